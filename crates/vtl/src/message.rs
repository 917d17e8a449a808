//! State of messages that take several packets: the one being sent, and the one being received.
//!
//! A message longer than the rings is sent and received piece by piece, so both ends may have to
//! stop in the middle. The sender then remembers its position, and is called with the same message
//! again; the receiver keeps the part that has arrived, never more than the caller's buffer.

use std::{
    collections::TryReserveError,
    hash::{DefaultHasher, Hasher},
    io,
};

use crate::error::Error;

/// Buffer capacity kept for the next message, bytes.
const KEEP: usize = 1 << 20;
/// A message sent in part is recognised by this many bytes at the beginning and at the end of that
/// part: all of it, if it is not longer than both.
const MARK: usize = 32 << 10;

/// The message that is being sent.
#[derive(Default)]
pub(crate) struct Outgoing {
    /// `None` between two messages.
    begun: Option<Begun>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
struct Begun {
    /// Bytes sent so far.
    sent: usize,
    length: usize,
    /// Digest of the bytes of [`MARK`].
    digest: u64,
}

impl Begun {
    fn new(message: &[u8], sent: usize) -> Self {
        let gone = &message[..sent];
        let mut hasher = DefaultHasher::new();
        hasher.write(&gone[..sent.min(MARK)]);
        hasher.write(&gone[sent.saturating_sub(MARK).max(sent.min(MARK))..]);
        Self {
            sent,
            length: message.len(),
            digest: hasher.finish(),
        }
    }
}

impl Outgoing {
    /// Checks that no message is sent in part.
    pub(crate) fn between(&self) -> Result<(), Error> {
        match self.begun {
            None => Ok(()),
            Some(_) => Err(Error::Misuse(
                "a message was begun and is not sent whole: call send_message with it again",
            )),
        }
    }

    /// Bytes of this message that are sent already.
    pub(crate) fn start(&self, message: &[u8]) -> Result<usize, Error> {
        match self.begun {
            Some(begun)
                if begun.length == message.len() && Begun::new(message, begun.sent) == begun =>
            {
                Ok(begun.sent)
            }
            _ => self.between().map(|()| 0),
        }
    }

    /// Suspends the message after `sent` bytes, until a later call.
    pub(crate) fn stop(&mut self, message: &[u8], sent: usize) {
        self.begun = (sent > 0).then(|| Begun::new(message, sent));
    }

    /// Marks the message as sent.
    pub(crate) fn finish(&mut self) {
        self.begun = None;
    }
}

/// The message that is being received.
#[derive(Default)]
pub(crate) struct Incoming {
    /// The part that has arrived and was not handed out, from `from` on.
    bytes: Vec<u8>,
    from: usize,
    /// The last packet read was not the end of its message,
    pub(crate) inside: bool,
    /// and a reader has got a part of what was kept of that.
    taken: bool,
}

impl Incoming {
    /// The bytes kept.
    pub(crate) fn kept(&self) -> &[u8] {
        &self.bytes[self.from..]
    }

    /// Makes room for `more` bytes; at most `max` in all.
    pub(crate) fn reserve(&mut self, more: usize, max: usize) -> Result<(), Error> {
        if self.from > 0 {
            self.bytes.drain(..self.from);
            self.from = 0;
        }
        let need = self.bytes.len() + more;
        if need <= self.bytes.capacity() {
            return Ok(());
        }
        let want = need.saturating_mul(2).min(max).max(need);
        let none = |_: TryReserveError| io::Error::from_raw_os_error(libc::ENOMEM);
        let additional = want - self.bytes.len();
        Ok(self.bytes.try_reserve_exact(additional).map_err(none)?)
    }

    /// Appends a piece; room is reserved.
    pub(crate) fn keep(&mut self, piece: &[u8]) {
        self.bytes.extend_from_slice(piece);
    }

    /// Hands out the bytes kept, as far as they fit.
    pub(crate) fn take(&mut self, buffer: &mut [u8]) -> usize {
        let n = self.kept().len().min(buffer.len());
        buffer[..n].copy_from_slice(&self.kept()[..n]);
        self.forget(n);
        self.taken |= n > 0 && self.inside;
        n
    }

    /// Notes whether the last packet read was not the end of its message.
    pub(crate) fn note(&mut self, inside: bool) {
        self.inside = inside;
        self.taken &= inside;
    }

    /// Whether a reader has a part of the message of which the rest has not come.
    pub(crate) fn is_begun(&self) -> bool {
        self.inside && (self.taken || self.kept().is_empty())
    }

    /// Drops the first `n` bytes kept.
    pub(crate) fn forget(&mut self, n: usize) {
        self.from += n;
        if self.from < self.bytes.len() {
            return;
        }
        self.from = 0;
        if self.bytes.capacity() > KEEP {
            self.bytes = Vec::new();
        }
        self.bytes.clear();
    }
}

/// A piece of a message.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Part {
    /// Bytes; 0: the peer has closed the session and everything was read, or the buffer is empty.
    pub len: usize,
    /// The message continues after this part.
    pub more: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outgoing__goes_on_with_the_same_message_only() {
        let mut out = Outgoing::default();
        assert_eq!(out.start(b"0123456789").unwrap(), 0);
        out.stop(b"0123456789", 0);
        assert!(out.between().is_ok(), "nothing of it has gone");
        out.stop(b"0123456789", 4);
        assert!(matches!(out.between(), Err(Error::Misuse(_))));
        for other in [&b"012345678"[..], b"0125456789"] {
            assert!(matches!(out.start(other), Err(Error::Misuse(_))));
        }
        assert_eq!(out.start(b"0123456789").unwrap(), 4);
        out.finish();
        assert_eq!(out.start(b"else").unwrap(), 0);
        // Long ones by both ends of what has gone.
        let mut message = vec![7; 4 * MARK];
        out.stop(&message, 3 * MARK);
        for at in [0, MARK - 1, 2 * MARK, 3 * MARK - 1] {
            message[at] = 8;
            assert!(out.start(&message).is_err(), "{at}");
            message[at] = 7;
        }
        assert_eq!(out.start(&message).unwrap(), 3 * MARK);
    }

    #[test]
    fn incoming__keeps_no_more_than_the_buffer_takes() {
        let mut incoming = Incoming::default();
        for _ in 0..10 {
            incoming.reserve(100, 1000).unwrap();
            incoming.keep(&[7; 100]);
            assert!(incoming.bytes.capacity() <= 1000);
        }
        assert_eq!(incoming.kept().len(), 1000);
        let mut buffer = [0; 300];
        assert_eq!(incoming.take(&mut buffer), 300);
        // What was taken makes place.
        incoming.reserve(300, 1000).unwrap();
        assert_eq!(
            (incoming.kept().len(), incoming.bytes.capacity()),
            (700, 1000)
        );
        incoming.forget(700);
        assert!(incoming.kept().is_empty());
    }

    #[test]
    fn incoming__is_begun_once_a_reader_has_a_part() {
        let mut incoming = Incoming::default();
        incoming.note(true);
        assert!(incoming.is_begun(), "read piece by piece");
        incoming.reserve(100, 100).unwrap();
        incoming.keep(&[7; 100]);
        assert!(!incoming.is_begun(), "kept for a reader of messages");
        assert_eq!(incoming.take(&mut [0; 10]), 10);
        assert!(incoming.is_begun(), "who reads it piece by piece after all");
        incoming.note(false);
        incoming.note(true);
        assert!(!incoming.is_begun(), "the next one");
    }

    #[test]
    fn incoming__gives_large_memory_back() {
        let mut incoming = Incoming::default();
        incoming.reserve(2 * KEEP, 2 * KEEP).unwrap();
        incoming.keep(&vec![1; 2 * KEEP]);
        incoming.forget(2 * KEEP);
        assert_eq!(incoming.bytes.capacity(), 0);
    }
}
