//! Streams that come cut anywhere: messages of a process of carriers, packets by a TCP connection, and sealed records
//! and datagrams, some of which somebody has changed on the way. What is taken does not depend on the cuts.
#![no_main]

use arbitrary::Arbitrary;
use bytes::BytesMut;
use libfuzzer_sys::fuzz_target;
use vtl_proto::{
    frame::{CRYPTO, Side},
    keys::Secret,
    record::Records,
};

/// The secret of carriers that seal nothing, as the daemon has it.
const CLEAR: [u8; CRYPTO] = [0; CRYPTO];

#[allow(dead_code)]
#[path = "../../crates/vtld/src/flows/carrier/sealed.rs"]
mod sealed;
#[allow(dead_code)]
#[path = "../../crates/vtld/src/flows/carrier/process/wire.rs"]
mod wire;

#[derive(Arbitrary, Debug)]
enum Stream<'a> {
    Messages(Vec<&'a [u8]>),
    Packets(Vec<&'a [u8]>),
    Records {
        written: Vec<&'a [u8]>,
        spoilt: Option<(u16, u8)>,
        cut: u16,
    },
    Datagrams {
        written: Vec<&'a [u8]>,
        spoilt: Option<(u16, u8)>,
        order: Vec<u8>,
    },
}

fn messages(parts: &[&[u8]]) {
    let whole = parts.concat();
    let mut unread = BytesMut::new();
    let mut again = BytesMut::new();
    for part in parts {
        unread.extend_from_slice(part);
        loop {
            match wire::take(&mut unread) {
                Ok(Some((tag, body))) => {
                    assert!(body.len() <= wire::MAX_MESSAGE);
                    if let Some(figures) = wire::Figures::read(&body) {
                        assert!(figures.path.is_none_or(|path| path.rtt_ms.is_finite()));
                    }
                    wire::emit(&mut again, tag, &body);
                    assert!(whole.starts_with(&again));
                }
                Ok(None) => break,
                Err(_) => return,
            }
        }
    }
    assert_eq!(again.len() + unread.len(), whole.len());
}

fn packets(parts: &[&[u8]]) {
    let (all, ends) = Records::PACKETS.count(&parts.concat());
    let (mut unread, mut taken) = (Vec::new(), 0);
    for part in parts {
        unread.extend_from_slice(part);
        let (whole, result) = Records::PACKETS.count(&unread);
        let mut rest = &unread[..whole];
        while let Some((packet, others)) = Records::PACKETS.first(rest) {
            taken += 2 + packet.len();
            rest = others;
        }
        assert!(rest.is_empty());
        unread.drain(..whole);
        if result.is_err() {
            break;
        }
    }
    assert_eq!((taken, unread.len() > 1), (all, unread.len() > 1));
    assert!(ends.is_ok() || !unread.is_empty());
}

fn spoil(bytes: &mut [u8], at: Option<(u16, u8)>) -> bool {
    let place = at.and_then(|(at, by)| Some((bytes.get_mut(usize::from(at))?, by)));
    place.is_some_and(|(place, by)| {
        *place ^= by;
        by != 0
    })
}

fn secret() -> Secret {
    Secret::from([7; CRYPTO])
}

fn records(written: &[&[u8]], spoilt: Option<(u16, u8)>, cut: u16) {
    let (mut writer, _) = sealed::records(&secret(), Side::Local).expect("a secret");
    let (_, mut reader) = sealed::records(&secret(), Side::Peer).expect("a secret");
    let mut bytes: Vec<u8> = written.iter().flat_map(|part| writer.seal(part)).collect();
    let is_spoilt = spoil(&mut bytes, spoilt);
    let plain = written.concat();
    let mut read = Vec::new();
    for part in bytes.chunks(usize::from(cut).max(1)) {
        match reader.open(part) {
            Ok(opened) => read.extend_from_slice(&opened),
            Err(sealed::Forged) => {
                assert!(is_spoilt);
                break;
            }
        }
    }
    assert!(plain.starts_with(&read));
    assert!(is_spoilt || read == plain);
}

/// `written`: none is empty, which no host sends.
fn datagrams(written: &[&[u8]], spoilt: Option<(u16, u8)>, order: &[u8]) {
    let mut here = sealed::Datagrams::new(&secret(), Side::Local);
    let mut there = sealed::Datagrams::new(&secret(), Side::Peer);
    let packet = |part: &&[u8]| [&[1, 2, 3, 4][..], part].concat();
    let sent: Vec<_> = written
        .iter()
        .map(|part| here.seal(packet(part).into()))
        .collect();
    let mut seen = vec![false; sent.len()];
    for number in order {
        let Some(index) = usize::from(*number).checked_rem(sent.len()) else {
            return;
        };
        let mut datagram = sent[index].to_vec();
        // The head is not sealed: it is not what is spoilt.
        let is_spoilt = spoil(&mut datagram[4..], spoilt.filter(|_| number & 1 == 1));
        let opened = there.open(&datagram);
        assert_eq!(opened.is_some(), !is_spoilt && !seen[index]);
        if let Some(opened) = opened {
            assert_eq!(opened, packet(&written[index]));
            seen[index] = true;
        }
    }
    for part in written {
        assert_eq!(there.open(part), None);
    }
}

fuzz_target!(|stream: Stream<'_>| match stream {
    Stream::Messages(parts) => messages(&parts),
    Stream::Packets(parts) => packets(&parts),
    Stream::Records {
        written,
        spoilt,
        cut,
    } => records(&written, spoilt, cut),
    Stream::Datagrams {
        mut written,
        spoilt,
        order,
    } => {
        written.retain(|part| !part.is_empty());
        datagrams(&written, spoilt, &order);
    }
});
