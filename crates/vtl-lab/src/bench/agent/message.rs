//! Streams of messages at a rate, over what may lose some: each one is a packet of its own, and says when it was due.

use std::io;
use std::thread;
use std::time::Duration;

use super::workload::{Progress, now_ns};
use crate::payload::{self, Checker};

/// Bytes of a message: one packet on every path.
pub(super) const MESSAGE: usize = 1_200;
/// What a message begins with: when it was due, in nanoseconds of the monotonic clock, which both ends share.
const STAMP: usize = 8;

/// Nanoseconds between two messages, and how many there are.
fn schedule(rate_kbit: u64, millis: u64) -> (u64, u64) {
    let distance = MESSAGE as u64 * 8 * 1_000_000 / rate_kbit.max(1);
    (distance, millis * 1_000_000 / distance.max(1))
}

/// The bytes that a stream asks for.
pub(super) fn bytes(rate_kbit: u64, millis: u64) -> u64 {
    schedule(rate_kbit, millis).1 * MESSAGE as u64
}

/// Hands each message of a stream over when it is due.
///
/// # Errors
/// What `send` returns.
pub(super) fn pace(
    rate_kbit: u64,
    millis: u64,
    mut send: impl FnMut(&[u8]) -> io::Result<()>,
) -> io::Result<()> {
    let (distance, count) = schedule(rate_kbit, millis);
    let mut message = [0; MESSAGE];
    message[STAMP..].copy_from_slice(payload::at(0, (MESSAGE - STAMP) as u64));
    let began = now_ns();
    for number in 0..count {
        let due = began + number * distance;
        let early = due.saturating_sub(now_ns());
        if early > 0 {
            thread::sleep(Duration::from_nanos(early));
        }
        message[..STAMP].copy_from_slice(&due.to_le_bytes());
        send(&message)?;
    }
    Ok(())
}

/// Counts and checks a message that has arrived.
pub(super) fn arrived(message: &[u8], progress: &Progress) {
    let Some((stamp, rest)) = message.split_first_chunk::<STAMP>() else {
        progress.add(message.len() as u64, message.len() as u64);
        return;
    };
    let mut checker = Checker::default();
    checker.check(rest);
    progress.record(now_ns().saturating_sub(u64::from_le_bytes(*stamp)));
    progress.add(message.len() as u64, checker.wrong());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pace__as_many_as_asked_for_and_each_checked() {
        let progress = Progress::new(0);
        let mut sent = 0;
        pace(9_600, 20, |message| {
            arrived(message, &progress);
            sent += message.len() as u64;
            Ok(())
        })
        .expect("sent");
        assert_eq!(sent, bytes(9_600, 20));
        assert_eq!(
            (sent, progress.bytes(), progress.wrong()),
            (24_000, 24_000, 0)
        );
        assert!(progress.latency_us().is_some());
    }

    #[test]
    fn arrived__counts_damage() {
        let progress = Progress::new(0);
        let mut message = [0; MESSAGE];
        message[STAMP..].copy_from_slice(payload::at(0, (MESSAGE - STAMP) as u64));
        message[STAMP + 5] ^= 1;
        arrived(&message, &progress);
        arrived(&[1, 2], &progress);
        assert_eq!(progress.wrong(), 1 + 2);
    }
}
