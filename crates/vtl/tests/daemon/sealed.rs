//! Sessions whose payload is sealed.

use std::{io, mem::offset_of};

use nix::sys::uio::{pread, pwrite};
use vtl::{Error, Services, Socket};
use vtl_proto::{
    intf::{self, vtl_slot},
    keys::{Keys, Suite},
};

use super::{Granted, PAYLOAD, messages::Pair};

const LONGEST: u32 = intf::VTL_MAX_MESSAGE;

/// Two sockets over a graft with these services.
fn pair(services: Services, max_message: u32) -> Option<Pair> {
    let granted = |send: u8, receive: u8| {
        let mut granted = Granted::new()?;
        granted.services = services;
        granted.keys = Some(Keys {
            suite: Suite::Aes128Gcm,
            send: [send; 32].into(),
            receive: [receive; 32].into(),
        });
        Some(granted)
    };
    Pair::over([granted(1, 2)?, granted(2, 1)?], max_message)
}

/// What lies in a slot, and the offset of its payload in the ring.
fn payload(ring: &impl std::os::fd::AsFd, packet: i64) -> (Vec<u8>, i64) {
    let slot = (1 + packet) * i64::from(intf::VTL_SLOT_SIZE);
    let mut len = [0; 4];
    pread(ring, &mut len, slot + offset_of!(vtl_slot, len) as i64).unwrap();
    let mut data = vec![0; u32::from_ne_bytes(len) as usize];
    let at = slot + offset_of!(vtl_slot, data) as i64;
    pread(ring, &mut data, at).unwrap();
    (data, at)
}

/// Somebody on the path changes a bit of a packet that was published.
fn forge(pair: &Pair, packet: i64) {
    let (data, at) = payload(&pair.rings[0].tx, packet);
    pwrite(&pair.rings[0].tx, &[data[0] ^ 1], at).unwrap();
}

#[test]
fn sealed__bytes_and_messages_go_through() {
    let Some(mut pair) = pair(Services::TCP, LONGEST) else {
        return;
    };
    let packet = usize::from(PAYLOAD) - 16;
    assert_eq!(pair.sender.max_packet(), packet);
    assert_eq!(pair.sender.max_message(), LONGEST as usize);
    let text = b"nobody on the path can read this";
    pair.sender.try_send_data(text).unwrap();
    let (sent, _) = payload(&pair.rings[0].tx, 0);
    assert_eq!(sent.len(), text.len() + 16);
    assert!(
        !sent
            .windows(4)
            .any(|part| text.windows(4).any(|t| t == part))
    );
    pair.carry(u64::MAX);
    let mut buffer = vec![0; 10_000];
    // In pieces of a packet.
    for piece in text.chunks(20) {
        let n = pair.receiver.try_recv_data(&mut buffer[..20]).unwrap();
        assert_eq!(buffer[..n.unwrap()], *piece);
    }
    let message: Vec<u8> = (0..3000).map(|i| i as u8).collect();
    for _ in 0..10 {
        assert!(pair.sender.try_send_message(&message).unwrap());
        pair.carry(20);
        assert!(
            pair.receiver
                .try_recv_message(&mut buffer)
                .unwrap()
                .is_none()
        );
        pair.carry(u64::MAX);
        let n = pair.receiver.try_recv_message(&mut buffer).unwrap();
        assert_eq!(buffer[..n.unwrap()], message);
    }
}

#[test]
fn sealed__single_packets_where_the_graft_may_lose_some() {
    let Some(mut pair) = pair(Services::CONGESTION_CONTROL, PAYLOAD.into()) else {
        return;
    };
    let max = usize::from(PAYLOAD) - 24;
    let sizes = (pair.sender.max_message(), pair.sender.max_packet());
    assert_eq!(sizes, (max, max));
    let long = pair.sender.try_send_message(&vec![0; max + 1]);
    assert!(matches!(long, Err(Error::MessageSize { .. })), "{long:?}");
    for n in 0..4 {
        assert!(pair.sender.try_send_message(&vec![n; max]).unwrap());
    }
    forge(&pair, 1);
    pair.carry(u64::MAX);
    let mut buffer = [0; PAYLOAD as usize];
    for n in [0, 2, 3] {
        let len = pair.receiver.try_recv_message(&mut buffer).unwrap();
        assert_eq!(buffer[..len.unwrap()], vec![n; max]);
    }
    assert!(matches!(
        pair.receiver.try_recv_message(&mut buffer),
        Ok(None)
    ));
    assert_eq!(pair.receiver.given_up(), 1);
    assert!(matches!(pair.receiver.try_send_data(b"x"), Ok(Some(1))));
}

/// A way to receive: what came, or `None` if nothing has.
type Receive = fn(&mut Socket) -> Result<Option<Vec<u8>>, Error>;

const WAYS: [(&str, Receive); 8] = [
    ("recv_data", |socket| {
        let mut buffer = vec![0; 1000];
        let n = socket.recv_data(&mut buffer)?;
        buffer.truncate(n);
        Ok(Some(buffer))
    }),
    ("try_recv_data", |socket| {
        let mut buffer = vec![0; 7];
        let n = socket.try_recv_data(&mut buffer)?;
        Ok(n.map(|n| buffer[..n].to_vec()))
    }),
    ("recv_message", |socket| {
        let mut buffer = vec![0; 1000];
        let n = socket.recv_message(&mut buffer)?;
        Ok(Some(buffer[..n].to_vec()))
    }),
    ("try_recv_message", |socket| {
        let mut buffer = vec![0; 1000];
        let n = socket.try_recv_message(&mut buffer)?;
        Ok(n.map(|n| buffer[..n].to_vec()))
    }),
    ("recv_part", |socket| {
        let mut buffer = vec![0; 1000];
        let part = socket.recv_part(&mut buffer)?;
        Ok(Some(buffer[..part.len].to_vec()))
    }),
    ("try_recv_part", |socket| {
        let mut buffer = vec![0; 7];
        let part = socket.try_recv_part(&mut buffer)?;
        Ok(part.map(|part| buffer[..part.len].to_vec()))
    }),
    ("recv_in_place", |socket| {
        let mut seen = Vec::new();
        socket.recv_in_place(100, |bytes| seen.extend_from_slice(bytes))?;
        Ok(Some(seen))
    }),
    ("try_recv_in_place", |socket| {
        let mut seen = Vec::new();
        let count = socket.try_recv_in_place(1, |bytes| seen.extend_from_slice(bytes))?;
        Ok(count.map(|_| seen))
    }),
];

/// A message is whole and in one packet, the next one's second packet is forged, and others follow.
fn forged_session() -> Option<Pair> {
    let mut pair = pair(Services::TCP, LONGEST)?;
    assert!(pair.sender.try_send_message(b"whole").unwrap());
    assert!(pair.sender.try_send_message(&[7; 300]).unwrap());
    assert!(pair.sender.try_send_message(b"behind it").unwrap());
    forge(&pair, 2);
    pair.carry(u64::MAX);
    Some(pair)
}

#[test]
fn sealed__a_forged_packet_ends_the_session_for_every_reader() {
    for (way, receive) in WAYS {
        let Some(mut pair) = forged_session() else {
            return;
        };
        let mut got = Vec::new();
        let error = loop {
            match receive(&mut pair.receiver) {
                Ok(Some(bytes)) => {
                    assert!(!bytes.is_empty(), "{way}: the end is no error");
                    got.extend(bytes);
                }
                Ok(None) => panic!("{way}: nothing"),
                Err(error) => break error,
            }
        };
        assert!(matches!(error, Error::Forged(_)), "{way}: {error:?}");
        let before = [&b"whole"[..], &[7; 84]].concat();
        let min = if way.ends_with("message") {
            5
        } else {
            before.len()
        };
        assert!(before.starts_with(&got), "{way}: {got:?}");
        assert_eq!(got.len(), min, "{way}");
        // It stays so, whoever asks.
        for (other, receive) in WAYS {
            let again = receive(&mut pair.receiver);
            assert!(
                matches!(again, Err(Error::Forged(_))),
                "{way}, {other}: {again:?}"
            );
        }
    }
}

#[test]
fn sealed__nothing_is_sent_behind_a_forgery_and_the_end_is_no_orderly_one() {
    let Some(mut pair) = forged_session() else {
        return;
    };
    let mut buffer = [0; 1000];
    while pair.receiver.try_recv_data(&mut buffer).is_ok() {}
    let socket = &mut pair.receiver;
    for refused in [
        socket.try_send_data(b"x").map(drop),
        socket.try_send_message(b"x").map(drop),
        socket.try_close().map(drop),
    ] {
        assert!(matches!(refused, Err(Error::Forged(_))), "{refused:?}");
    }
    let error = io::Error::from(socket.try_close().unwrap_err());
    assert_eq!(error.kind(), io::ErrorKind::InvalidData);
}
