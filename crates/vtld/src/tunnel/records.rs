//! How an application's bytes lie in a stream: records of a length (2 bytes, big-endian) and so many
//! bytes; a length of 0 stands before TCP's urgent byte (RFC 6093), which must stay one. The length
//! 65,535 says that this is the true end, where a stream's own may be a false one.

use std::{
    collections::VecDeque,
    io::{self, IoSlice, Write},
    net::TcpStream,
};

use bytes::Bytes;

use crate::urgent;

/// Bytes before each record.
pub(super) const PREFIX: usize = 2;
/// Bytes of the longest record.
pub(super) const LONGEST: usize = u16::MAX as usize - 1;
/// The true end.
pub(super) const END: [u8; PREFIX] = [0xff; PREFIX];
/// Pieces handed to the kernel in one call.
const PIECES: usize = 32;

/// The prefix of a record.
pub(super) fn prefix(len: usize) -> [u8; PREFIX] {
    debug_assert!((1..=LONGEST).contains(&len));
    (len as u16).to_be_bytes()
}

/// The record of the urgent byte.
pub(super) fn urgent_record(byte: u8) -> [u8; PREFIX + 1] {
    [0, 0, byte]
}

#[derive(Clone, Copy, Debug, Default)]
enum State {
    #[default]
    Prefix,
    /// Its first byte has come.
    HalfPrefix(u8),
    Body {
        left: usize,
    },
    Urgent,
    End,
}

enum Piece {
    Bytes(Bytes),
    Urgent(u8),
}

/// Takes a stream apart, and keeps what the application has not yet taken.
#[derive(Default)]
pub(super) struct Records {
    state: State,
    pieces: VecDeque<Piece>,
    /// Bytes in `pieces`.
    held: usize,
}

impl Records {
    /// Takes the stream's next bytes, however they are cut.
    pub(super) fn push(&mut self, mut bytes: Bytes) {
        while let Some(&first) = bytes.first() {
            self.state = match self.state {
                State::Prefix => {
                    let _ = bytes.split_to(1);
                    State::HalfPrefix(first)
                }
                State::HalfPrefix(high) => {
                    let _ = bytes.split_to(1);
                    match u16::from_be_bytes([high, first]) {
                        0 => State::Urgent,
                        u16::MAX => State::End,
                        len => State::Body { left: len.into() },
                    }
                }
                State::Urgent => {
                    let _ = bytes.split_to(1);
                    self.pieces.push_back(Piece::Urgent(first));
                    self.held += 1;
                    State::Prefix
                }
                // What follows has no meaning.
                State::End => return,
                State::Body { left } => {
                    let piece = bytes.split_to(left.min(bytes.len()));
                    self.held += piece.len();
                    let left = left - piece.len();
                    self.pieces.push_back(Piece::Bytes(piece));
                    match left {
                        0 => State::Prefix,
                        left => State::Body { left },
                    }
                }
            };
        }
    }

    /// Whether the stream may end here, or only behind a record that says so.
    pub(super) fn is_whole(&self, by_record: bool) -> bool {
        match self.state {
            State::End => true,
            State::Prefix => !by_record,
            _ => false,
        }
    }

    /// Bytes that wait for the application.
    pub(super) fn held(&self) -> usize {
        self.held
    }

    /// Writes to the application once; returns how many bytes it took.
    pub(super) fn write_to(&mut self, mut app: &TcpStream) -> io::Result<usize> {
        let written = match self.pieces.front() {
            None => return Ok(0),
            Some(Piece::Urgent(byte)) => urgent::send(app, *byte)?,
            Some(Piece::Bytes(_)) => {
                let mut slices = [IoSlice::new(&[]); PIECES];
                let mut count = 0;
                for (slice, piece) in slices.iter_mut().zip(&self.pieces) {
                    let Piece::Bytes(bytes) = piece else { break };
                    *slice = IoSlice::new(bytes);
                    count += 1;
                }
                app.write_vectored(&slices[..count])?
            }
        };
        self.held -= written;
        let mut left = written;
        while left > 0 {
            match self.pieces.front_mut() {
                Some(Piece::Bytes(bytes)) if bytes.len() > left => {
                    let _ = bytes.split_to(left);
                    left = 0;
                }
                Some(Piece::Bytes(bytes)) => {
                    left -= bytes.len();
                    self.pieces.pop_front();
                }
                Some(Piece::Urgent(_)) => {
                    left -= 1;
                    self.pieces.pop_front();
                }
                None => break,
            }
        }
        Ok(written)
    }
}

#[cfg(test)]
mod tests {
    use std::{io::Read, net::TcpListener};

    use super::*;

    fn tcp() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (one, listener.accept().unwrap().0)
    }

    #[test]
    fn records__come_out_as_they_went_in_however_they_are_cut() {
        let mut stream = Vec::new();
        let mut wanted = Vec::new();
        for len in [1, 2, 255, 256, 300, LONGEST] {
            let body: Vec<u8> = (0..len).map(|n| (n * 7 + len) as u8).collect();
            stream.extend(prefix(len));
            stream.extend(&body);
            wanted.extend(body);
        }
        for cut in [1, 3, 1000, stream.len()] {
            let (ours, mut theirs) = tcp();
            let mut records = Records::default();
            let mut wrote = 0;
            let reader = std::thread::spawn(move || {
                let mut got = Vec::new();
                theirs.read_to_end(&mut got).unwrap();
                got
            });
            for chunk in stream.chunks(cut) {
                records.push(Bytes::copy_from_slice(chunk));
                while records.held() > 0 {
                    wrote += records.write_to(&ours).unwrap();
                }
            }
            assert!(records.is_whole(false) && !records.is_whole(true));
            records.push(Bytes::from_static(&END));
            assert!(records.is_whole(true));
            drop(ours);
            assert_eq!(wrote, wanted.len());
            assert_eq!(reader.join().unwrap(), wanted);
        }
    }

    #[test]
    fn records__an_urgent_byte_stays_one() {
        let (ours, mut theirs) = tcp();
        nix::sys::socket::setsockopt(&theirs, nix::sys::socket::sockopt::OobInline, &true).unwrap();
        let mut records = Records::default();
        let mut stream = prefix(3).to_vec();
        stream.extend(b"one");
        stream.extend(urgent_record(b'!'));
        stream.extend(prefix(3));
        stream.extend(b"two");
        records.push(stream.into());
        while records.held() > 0 {
            records.write_to(&ours).unwrap();
        }
        let mut got = [0; 8];
        assert_eq!(theirs.read(&mut got).unwrap(), 3);
        assert!(urgent::is_next(&theirs));
        theirs.read_exact(&mut got[3..7]).unwrap();
        assert_eq!(&got[..7], b"one!two");
    }

    #[test]
    fn records__that_end_in_the_middle_are_not_whole() {
        for cut in [&[0_u8][..], &[0, 0], &[0, 2, 1]] {
            let mut records = Records::default();
            records.push(Bytes::copy_from_slice(cut));
            assert!(!records.is_whole(false) && !records.is_whole(true));
        }
    }
}
