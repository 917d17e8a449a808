//! The handshake that NEGO carries, with flights that somebody changes, cuts, extends or makes up: whoever finishes it
//! has seen what the other host has sent, and both have the same keys.
#![no_main]

use std::sync::{Arc, LazyLock};

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use rustls::{ClientConfig, ServerConfig};
use vtl_pool::key::SecretKey;

#[allow(dead_code)]
#[path = "../../crates/vtld/src/identity/handshake.rs"]
mod handshake;
#[allow(dead_code)]
#[path = "../../crates/vtld/src/identity/tls.rs"]
mod tls;

use handshake::{Initiator, Responder, TAG_KEYS};

#[derive(Arbitrary, Debug)]
enum Change<'a> {
    Nothing,
    Byte { at: u16, by: u8 },
    Cut(u16),
    Longer(&'a [u8]),
    Raw(&'a [u8]),
}

#[derive(Arbitrary, Debug)]
struct Input<'a> {
    bound: [&'a [u8]; 2],
    hello: Change<'a>,
    answer: Change<'a>,
    finish: Change<'a>,
}

impl Change<'_> {
    fn of(&self, flight: &[u8]) -> Vec<u8> {
        let mut changed = flight.to_vec();
        match *self {
            Self::Nothing => {}
            Self::Byte { at, by } => changed[usize::from(at) % flight.len()] ^= by,
            Self::Cut(at) => changed.truncate(usize::from(at) % flight.len()),
            Self::Longer(more) => changed.extend_from_slice(more),
            Self::Raw(bytes) => changed = bytes.to_vec(),
        }
        changed
    }
}

static HOSTS: LazyLock<[(Arc<ClientConfig>, Arc<ServerConfig>); 2]> = LazyLock::new(|| {
    [(); 2].map(|()| {
        let key = SecretKey::generate().expect("randomness");
        tls::configs(&key).expect("a key")
    })
});

fuzz_target!(|input: Input<'_>| {
    let (client, server) = (&HOSTS[0].0, &HOSTS[1].1);
    let [theirs, ours] = input.bound.map(|bound| &bound[..bound.len().min(1000)]);
    let (initiator, hello) = Initiator::new(client, theirs.to_vec()).expect("a flight");
    let heard = input.hello.of(&hello);
    let responder = Responder::new(server, &heard, theirs, ours.to_vec(), &[5; TAG_KEYS]);
    let Ok((mut responder, answer)) = responder else {
        assert!(heard != hello, "an honest initiator is answered");
        // Whatever the answer, it is not one to what was asked.
        if let Change::Raw(bytes) = input.answer {
            assert!(initiator.answered(bytes, ours).is_err());
        }
        return;
    };
    let changed = input.answer.of(&answer);
    let is_honest = heard == hello && changed == answer;
    let answered = initiator.answered(&changed, ours);
    assert_eq!(answered.is_ok(), is_honest);
    let Ok((here, finish)) = answered else {
        assert!(responder.finished(&changed).is_err());
        return;
    };
    let changed = input.finish.of(&finish);
    if changed != finish {
        assert!(responder.finished(&changed).is_err());
    }
    let there = responder.finished(&finish).expect("the initiator's");
    assert!(here.keys.suite == there.keys.suite);
    assert!(here.keys.send == there.keys.receive && here.keys.receive == there.keys.send);
    assert!(here.tags.send == there.tags.receive && here.tags.receive == there.tags.send);
});
