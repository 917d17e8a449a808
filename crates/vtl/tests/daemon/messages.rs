//! Messages of several packets, cut by one socket and put together by another, over rings between
//! which the test carries the packets: a few at a time, so that both ends stop in the middle.

use std::{collections::VecDeque, mem::offset_of};

use nix::sys::uio::{pread, pwrite};
use vtl::{Error, Part, Socket};
use vtl_proto::intf::{self, vtl_ring_ctl, vtl_slot};
use vtl_testing::Random;

use super::{Client, Daemon, Granted, NOW, PAYLOAD, SLOTS, Shared};

const LONGEST: u32 = intf::VTL_MAX_MESSAGE;
const PACKET: usize = PAYLOAD as usize;

fn below(random: &mut Random, max: usize) -> usize {
    random.below(max as u64) as usize
}

fn bytes(random: &mut Random, count: usize) -> Vec<u8> {
    (0..count).map(|_| random.bits() as u8).collect()
}

/// Two sockets, and the programs between them.
pub(super) struct Pair {
    pub(super) sender: Socket,
    pub(super) receiver: Socket,
    clients: [Client; 2],
    pub(super) rings: [Granted; 2],
    /// Packets carried.
    carried: u64,
}

impl Pair {
    fn new() -> Option<Self> {
        Self::over([Granted::new()?, Granted::new()?], LONGEST)
    }

    pub(super) fn over([out, back]: [Granted; 2], max_message: u32) -> Option<Self> {
        let daemon = Daemon::start();
        let (sender, first, out) = daemon.session_over(out, max_message)?;
        let (receiver, second, back) = daemon.session_over(back, max_message)?;
        Some(Self {
            sender,
            receiver,
            clients: [first, second],
            rings: [out, back],
            carried: 0,
        })
    }

    fn load(&self, from: bool, field: usize) -> u64 {
        let ring = if from {
            &self.rings[0].tx
        } else {
            &self.rings[1].rx
        };
        let mut word = [0; 8];
        pread(ring, &mut word, field as i64).unwrap();
        u64::from_ne_bytes(word)
    }

    /// Moves up to `max` packets, as far as there is room; returns how many.
    pub(super) fn carry(&mut self, max: u64) -> u64 {
        let written = self.load(true, offset_of!(vtl_ring_ctl, producer));
        let read = self.load(false, offset_of!(vtl_ring_ctl, consumer));
        let end = written
            .min(read + u64::from(SLOTS))
            .min(self.carried.saturating_add(max));
        let count = end - self.carried;
        let mut slot = vec![0; intf::VTL_SLOT_SIZE as usize];
        for packet in self.carried..end {
            let at = (1 + packet % u64::from(SLOTS)) * u64::from(intf::VTL_SLOT_SIZE);
            pread(&self.rings[0].tx, &mut slot, at as i64).unwrap();
            pwrite(&self.rings[1].rx, &slot, at as i64).unwrap();
        }
        self.carried = end;
        let end = end.to_ne_bytes();
        pwrite(
            &self.rings[1].rx,
            &end,
            offset_of!(vtl_ring_ctl, producer) as i64,
        )
        .unwrap();
        pwrite(
            &self.rings[0].tx,
            &end,
            offset_of!(vtl_ring_ctl, consumer) as i64,
        )
        .unwrap();
        count
    }

    /// The peer closes.
    fn close(&self, why: u32) {
        let closed = (why + 1).to_ne_bytes();
        let at = offset_of!(vtl_ring_ctl, closed) as i64;
        pwrite(&self.rings[1].rx, &closed, at).unwrap();
    }

    /// Sends as much of a message as a ring takes.
    fn begin(&mut self, message: &[u8]) {
        assert!(!self.sender.try_send_message(message).unwrap());
        assert!(self.carry(u64::MAX) > 0);
    }
}

#[test]
fn messages__any_lengths_in_any_pieces_come_out_as_they_went_in() {
    let lengths = [1, 2, PACKET - 1, PACKET, PACKET + 1, 2 * PACKET, 20_000];
    for seed in 1..=40 {
        let mut random = Random(seed);
        let Some(mut pair) = Pair::new() else {
            return;
        };
        let mut sent: VecDeque<Vec<u8>> = VecDeque::new();
        let mut next: Option<Vec<u8>> = None;
        let mut parts = Vec::new();
        let mut received = 0;
        while received < 60 {
            match below(&mut random, 4) {
                0 => {
                    let message = next.take().unwrap_or_else(|| {
                        let max = lengths[below(&mut random, lengths.len())];
                        let length = if below(&mut random, 2) == 0 {
                            max
                        } else {
                            1 + below(&mut random, max)
                        };
                        bytes(&mut random, length)
                    });
                    if pair.sender.try_send_message(&message).unwrap() {
                        sent.push_back(message);
                    } else {
                        next = Some(message);
                    }
                }
                1 => {
                    pair.carry(below(&mut random, 80) as u64);
                }
                // In pieces. What has come of a message may be taken by either way.
                2 => {
                    let mut buffer = vec![0; 1 + below(&mut random, 500)];
                    let part = pair.receiver.try_recv_part(&mut buffer).unwrap();
                    let Some(Part { len, more }) = part else {
                        continue;
                    };
                    assert!(len > 0);
                    parts.extend_from_slice(&buffer[..len]);
                    if !more {
                        let wanted = sent.pop_front().unwrap();
                        assert!(parts == wanted, "seed {seed}, message {received}");
                        parts.clear();
                        received += 1;
                    }
                }
                _ => {
                    let max = [PACKET / 2, 1000, 30_000][below(&mut random, 3)];
                    let mut buffer = vec![0; max];
                    match pair.receiver.try_recv_message(&mut buffer) {
                        Ok(None) => {}
                        Ok(Some(len)) => {
                            assert!(len > 0);
                            parts.extend_from_slice(&buffer[..len]);
                            let wanted = sent.pop_front().unwrap();
                            assert!(parts == wanted, "seed {seed}, message {received}");
                            parts.clear();
                            received += 1;
                        }
                        Err(Error::BufferTooSmall(here)) => assert!(here > max),
                        Err(error) => panic!("seed {seed}: {error}"),
                    }
                }
            }
        }
    }
}

#[test]
fn messages__the_longest_goes_through_small_rings() {
    let Some(mut pair) = Pair::new() else {
        return;
    };
    let message = bytes(&mut Random(7), 4 << 20);
    let mut buffer = vec![0; message.len()];
    let mut gone = false;
    let len = loop {
        gone = gone || pair.sender.try_send_message(&message).unwrap();
        pair.carry(u64::MAX);
        if let Some(len) = pair.receiver.try_recv_message(&mut buffer).unwrap() {
            break len;
        }
    };
    assert!(gone && len == message.len() && buffer == message);
    let max = LONGEST as usize;
    let error = pair.sender.try_send_message(&vec![0; max + 1]);
    assert!(matches!(error, Err(Error::MessageSize { len, max: m }) if m == max && len == max + 1));
    let error = pair.sender.try_send_message(&[]);
    assert!(matches!(error, Err(Error::MessageSize { len: 0, .. })));
}

#[test]
fn messages__a_begun_one_stands_in_the_way_of_everything_else() {
    let Some(mut pair) = Pair::new() else {
        return;
    };
    let message = vec![1; 100 * PACKET];
    assert!(!pair.sender.try_send_message(&message).unwrap());
    for refused in [
        pair.sender.try_send_data(b"x").map(drop),
        pair.sender.try_send_message(b"x").map(drop),
        pair.sender.try_close().map(drop),
    ] {
        assert!(matches!(refused, Err(Error::Misuse(_))), "{refused:?}");
    }
    assert!(matches!(pair.sender.try_send_data(&[]), Ok(Some(0))));
    pair.carry(u64::MAX);
    let mut buffer = vec![0; message.len()];
    assert!(matches!(
        pair.receiver.try_recv_message(&mut buffer),
        Ok(None)
    ));
    assert!(pair.sender.try_send_message(&message).unwrap());
    assert!(matches!(pair.sender.try_send_data(b"bytes"), Ok(Some(5))));
    pair.carry(u64::MAX);
    assert_eq!(
        pair.receiver.try_recv_message(&mut buffer).unwrap(),
        Some(message.len())
    );
    assert_eq!(pair.receiver.try_recv_data(&mut buffer).unwrap(), Some(5));
}

#[test]
fn messages__readers_of_bytes_notice_nothing() {
    let Some(mut pair) = Pair::new() else {
        return;
    };
    let message = bytes(&mut Random(9), 90 * PACKET + 3);
    pair.begin(&message);
    // Some of it was kept for a message, and comes all the same.
    let mut buffer = vec![0; message.len() + 10];
    assert!(
        pair.receiver
            .try_recv_message(&mut buffer)
            .unwrap()
            .is_none()
    );
    let mut got = Vec::new();
    let mut piece = [0; 77];
    let mut gone = false;
    while got.len() < message.len() {
        gone = gone || pair.sender.try_send_message(&message).unwrap();
        pair.carry(10);
        while let Some(n) = pair.receiver.try_recv_data(&mut piece).unwrap() {
            got.extend_from_slice(&piece[..n]);
        }
    }
    assert!(got == message);
    // In place, too.
    pair.begin(&message);
    assert!(
        pair.receiver
            .try_recv_message(&mut buffer)
            .unwrap()
            .is_none()
    );
    let mut seen = Vec::new();
    let count = pair
        .receiver
        .try_recv_in_place(9, |bytes| seen.extend_from_slice(bytes));
    assert_eq!(count.unwrap(), Some(1));
    assert!(message.starts_with(&seen) && seen.len() > PACKET);
}

#[test]
fn messages__a_session_that_ends_in_the_middle_is_an_error() {
    for why in [intf::VTL_CLOSED_BY_PEER, intf::VTL_CLOSED_TIMEOUT] {
        let Some(mut pair) = Pair::new() else {
            return;
        };
        assert!(pair.sender.try_send_message(b"whole").unwrap());
        assert!(!pair.sender.try_send_message(&[1; 100 * PACKET]).unwrap());
        pair.carry(u64::MAX);
        pair.close(why);
        let mut buffer = vec![0; 200 * PACKET];
        assert_eq!(
            pair.receiver.try_recv_message(&mut buffer).unwrap(),
            Some(5)
        );
        for _ in 0..2 {
            let end = pair.receiver.try_recv_message(&mut buffer);
            assert!(
                matches!(end, Err(Error::Cut(_) | Error::Broken(_))),
                "{end:?}"
            );
        }
        let part = pair.receiver.try_recv_part(&mut buffer).unwrap();
        assert!(part.is_some_and(|part| part.more && part.len == 63 * PACKET));
        let end = pair.receiver.try_recv_part(&mut buffer);
        assert!(
            matches!(end, Err(Error::Cut(_) | Error::Broken(_))),
            "{end:?}"
        );
    }
}

#[test]
fn messages__limits_in_the_middle_lose_nothing() {
    let Some(mut pair) = Pair::new() else {
        return;
    };
    let message = bytes(&mut Random(11), SLOTS as usize * PACKET + 50);
    pair.sender.set_timeout(NOW);
    let error = pair.sender.send_message(&message);
    assert!(matches!(error, Err(Error::TimedOut)), "{error:?}");
    pair.carry(u64::MAX);
    let Pair {
        sender,
        receiver,
        rings,
        clients,
        ..
    } = pair;
    let shared = [sender, receiver].map(|socket| Shared::new(socket).unwrap());
    let mut buffer = vec![0; message.len()];
    let error = shared[1].recv_message(&mut buffer[..100], NOW);
    assert!(matches!(error, Err(Error::BufferTooSmall(_))), "{error:?}");
    for _ in 0..2 {
        let error = shared[1].recv_message(&mut buffer, NOW);
        assert!(matches!(error, Err(Error::TimedOut)), "{error:?}");
    }
    shared[0].send_message(&message, NOW).unwrap();
    let receiver = &rings[1];
    // By hand, as the sockets have moved: the packet that lies where the first one did.
    let slot = u64::from(intf::VTL_SLOT_SIZE);
    let mut last = vec![0; intf::VTL_SLOT_SIZE as usize];
    pread(&rings[0].tx, &mut last, slot as i64).unwrap();
    pwrite(&receiver.rx, &last, slot as i64).unwrap();
    let end = (u64::from(SLOTS) + 1).to_ne_bytes();
    pwrite(
        &receiver.rx,
        &end,
        offset_of!(vtl_ring_ctl, producer) as i64,
    )
    .unwrap();
    assert_eq!(
        shared[1].recv_message(&mut buffer, NOW).unwrap(),
        message.len()
    );
    assert!(buffer == message);
    drop(clients);
}

#[test]
fn messages__of_one_packet_where_the_session_has_no_others() {
    let daemon = Daemon::start();
    let Some((mut socket, _client, granted)) = daemon.session() else {
        return;
    };
    assert_eq!(
        (socket.max_message(), socket.max_packet()),
        (PACKET, PACKET)
    );
    let error = socket.try_send_message(&[0; PACKET + 1]);
    assert!(matches!(error, Err(Error::MessageSize { .. })), "{error:?}");
    // What the peer says of more is not heeded.
    granted.arrive(b"whole");
    let more = intf::VTL_F_MORE.to_ne_bytes();
    let at = u64::from(intf::VTL_SLOT_SIZE) as usize + offset_of!(vtl_slot, more);
    pwrite(&granted.rx, &more, at as i64).unwrap();
    assert_eq!(socket.try_recv_message(&mut [0; 9]).unwrap(), Some(5));
}
