//! Sessions whose payload is sealed.

use std::fs;

use serde_json::Value;
use vtl::{Preference, Requirements, Services};
use vtl_proto::{
    intf,
    wire::{Gids, Header, Nego, Packet},
};
use vtl_testbed::{Host, Link};

use crate::{
    attacks::stranger::Stranger,
    harness::{Wire, World, any_payload, payload, until, words_of},
    many::{expect, open_with, send},
};

const SIZE: usize = 2 << 20;

impl World {
    /// With what the open sessions of a host are sealed.
    fn ciphers(&self, host: Host) -> Vec<Value> {
        let status = self.status(host);
        let sessions = status["sessions"].as_array().expect("a list");
        let open = sessions.iter().filter(|s| s["phase"] == "open");
        open.map(|session| session["cipher"].clone()).collect()
    }
}

/// In both directions, to the first host that is met and to the one that is known.
#[test]
fn keys__nobody_on_the_path_reads_what_sessions_carry() {
    let Some(mut world) = World::new("keys", &Link::new(10.0, 100.0)) else {
        return;
    };
    world.serve("f", SIZE);
    let wanted = payload(SIZE, SIZE as u64);
    for server in world.servers() {
        let taps = [Host::Client, Host::Server].map(|at| Wire::tap(&world, at, any_payload));
        for _ in 0..2 {
            let mut download = world.start_download_run(&["--require"], server, "f");
            assert!(download.process.wait().success());
            download.check();
        }
        world.upload_run(&["--require"], server, "up", &payload(SIZE, 7));
        let heard = taps.map(Wire::end).concat();
        assert_eq!(words_of(&wanted, &heard), 0);
        assert_eq!(words_of(&payload(SIZE, 7), &heard), 0);
        assert!(heard.len() > 3 * SIZE, "the taps hear: {}", heard.len());
        for host in [Host::Client, Host::Server] {
            let ciphers = world.ciphers(host);
            assert!(
                !ciphers.is_empty() && ciphers.iter().all(Value::is_string),
                "{ciphers:?}"
            );
        }
    }

    // Unless one wants it otherwise.
    world.stop_daemons();
    world.start_both(&["--no-encryption"]);
    let server = world.servers()[0];
    let tap = Wire::tap(&world, Host::Client, any_payload);
    let mut download = world.start_download_run(&["--require"], server, "f");
    assert!(download.process.wait().success());
    let clear = words_of(&wanted, &tap.end());
    assert!(clear > SIZE / 8 / 2, "the tap hears: {clear}");
    assert_eq!(world.ciphers(Host::Client), [Value::Null]);
}

/// The same of what other carriers carry, unless one wants it otherwise.
#[test]
fn keys__nobody_on_the_path_reads_other_carriers() {
    let Some(mut world) = World::bare("keys-kinds", &Link::new(10.0, 100.0)) else {
        return;
    };
    world.start_web();
    world.serve("f", SIZE);
    let wanted = payload(SIZE, SIZE as u64);
    for (i, encryption) in [&[][..], &["--no-encryption"]].into_iter().enumerate() {
        world.start_both(encryption);
        let server = world.servers()[i];
        for carrier in ["mptcp", "sctp", "kcp"] {
            let args = ["--require", "--carrier", carrier];
            let tap = Wire::tap(&world, Host::Server, any_payload);
            let mut download = world.start_download_run(&args, server, "f");
            assert!(download.process.wait().success());
            download.check();
            world.upload_run(&args, server, "up", &payload(SIZE, 7));
            let heard = tap.end();
            assert!(heard.len() > 2 * SIZE, "the tap hears: {}", heard.len());
            let clear = [&wanted, &payload(SIZE, 7)].map(|bytes| words_of(bytes, &heard));
            match encryption {
                [] => assert_eq!(clear, [0, 0], "{carrier}"),
                _ => assert!(clear.into_iter().all(|n| n > SIZE / 8 / 2), "{clear:?}"),
            }
        }
        world.stop_daemons();
    }
}

/// Somebody on the path takes the question for keys out of NEGO: what the peer then answers is not believed, once it
/// is known that it has a key.
#[test]
fn keys__question_that_was_taken_out_is_noticed() {
    let Some(mut world) = World::bare("keys-strip", &Link::new(10.0, 100.0)) else {
        return;
    };
    world.start_web();
    // Byte 161 is the extension's type, which becomes padding; byte 165 makes up for that in the checksum.
    world.filter(
        Host::Client,
        "table ip keys {
             chain out {
                 type filter hook output priority 0
                 ip protocol 253 @th,0,8 0x23 @th,1288,8 1 @th,1288,8 set 0 @th,1320,8 set 1 counter
                 udp dport 22100 drop
             }
         }",
    );
    world.start_both(&[]);
    world.serve("f", SIZE);
    let [v4, _] = world.servers();
    for _ in 0..3 {
        world.download(v4, "f");
    }
    until("it is noticed", || {
        let log = fs::read_to_string(world.log_path(Host::Client)).expect("a log");
        log.contains("not encrypted, although the peer has a key")
    });
    until("the session is closed", || {
        let open = world.ciphers(Host::Client);
        !open.contains(&Value::Null)
    });
    world.download(v4, "f");
}

/// Somebody on the path, who has read a session's tokens, asks each of its hosts for another one in its place.
#[test]
fn keys__session_is_not_taken_over_by_who_reads_its_tokens() {
    const PORT: u16 = 4000;
    let Some(world) = World::with_daemons("keys-take", &Link::new(2.0, 100.0)) else {
        return;
    };
    let [server, _] = world.servers();
    let reader = Stranger::new(&world, server);
    let mut wanted = Requirements::STREAM;
    wanted.set(Services::ENCRYPTION, Preference::Require);
    let (mut client, mut there) = open_with(&world, PORT, |client| client.negotiate(&wanted));
    send(&mut client, b"between us");
    expect(&mut there, b"between us");
    let heard = reader.overhear();
    let said = heard.iter().find_map(|packet| match packet {
        Packet::NegoAck(ack) => Some(*ack),
        _ => None,
    });
    let said = said.expect("an answer");
    let to_client = Stranger::on(&world, Host::Server, "10.73.0.1".parse().expect("one"));
    // What said that a session has ended, as long as headers had only the tokens.
    let close = |sid, token| {
        Packet::Close(Header {
            flags: intf::VTL_F_ABORT as u8,
            sid,
            token,
            ..Header::default()
        })
    };
    reader.send_packet(&close(said.sid, said.token));
    to_client.send_packet(&close(said.header.sid, said.header.token));
    let ends = [
        (&reader, said.sid, said.token),
        (&to_client, said.header.sid, said.header.token),
    ];
    for (somebody, sid, token) in ends {
        let mine = 0x5eed + token % 1000;
        until("it is refused", || {
            somebody.send_packet(&Packet::Nego(Nego {
                header: Header {
                    flags: (intf::VTL_F_SUCCEED | intf::VTL_F_MORE) as u8,
                    sid,
                    token,
                    ..Header::default()
                },
                token: mine,
                sid: 77,
                ring_slots: 64,
                max_payload: 1400,
                port: PORT,
                gids: Gids::new(&[said.gids[0]]).expect("one"),
                ..Nego::default()
            }));
            std::thread::sleep(std::time::Duration::from_millis(20));
            somebody.overhear().iter().any(|packet| match packet {
                Packet::NegoAck(ack) => panic!("a session for anybody: {ack:?}"),
                Packet::NegoNack(nack) => {
                    nack.peer_token == mine && u32::from(nack.reason) == intf::VTL_NACK_NO_GRAFT
                }
                _ => false,
            })
        });
    }
    send(&mut there, b"still");
    expect(&mut client, b"still");
    for host in [Host::Client, Host::Server] {
        assert_eq!(world.ciphers(host).len(), 1);
    }
}
