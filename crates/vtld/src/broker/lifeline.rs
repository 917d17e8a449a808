//! The TCP connection that a stream session has besides its graft (PROTOCOL.md, section 8). Its end
//! tells that the peer's daemon has ended; over it the daemons find out whether the graft's packets
//! get lost while others arrive; and then the session's packets go this way.

use std::{
    io::{self, Read, Write},
    net::TcpStream,
};

use vtl_proto::intf;

use super::preamble::GREETING;
use crate::option;

/// Bytes of a word, and how each begins: as a preamble.
const WORD: usize = 16;
const MAGIC: &[u8; 4] = b"VTL1";
/// Bytes that are kept in each direction.
const KEPT: usize = 64 << 10;
/// Bytes before each packet: its length.
const PREFIX: usize = 2;

/// What the daemons say to each other before packets go this way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Word {
    /// Nothing is heard of the graft: are you there?
    Ask,
    /// Yes.
    Here,
    /// No packets go by the graft from now on. So many have arrived that way; the others follow
    /// here.
    Leave { received: u64 },
}

impl Word {
    fn emit(self) -> [u8; WORD] {
        let mut bytes = [0; WORD];
        bytes[..4].copy_from_slice(MAGIC);
        bytes[4] = match self {
            Self::Ask => 2,
            Self::Here => 3,
            Self::Leave { received } => {
                bytes[8..].copy_from_slice(&received.to_be_bytes());
                4
            }
        };
        bytes
    }

    fn parse(bytes: &[u8; WORD]) -> Option<Self> {
        let rest = bytes.strip_prefix(MAGIC)?;
        match rest[0] {
            2 => Some(Self::Ask),
            3 => Some(Self::Here),
            4 => Some(Self::Leave {
                received: u64::from_be_bytes(rest[4..].try_into().ok()?),
            }),
            _ => None,
        }
    }
}

/// How far the session is from going this way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// The graft does its work.
    Quiet,
    /// It may not: the peer was asked.
    Asked {
        at_ns: u64,
        /// When it answered.
        here_ns: Option<u64>,
    },
    /// The programs are letting go of the session since then.
    Leaving { since_ns: u64 },
    /// They have, and the peer was told.
    Left,
    /// Packets go this way.
    Carrying,
}

/// What is wrong with a lifeline.
#[derive(Debug, thiserror::Error)]
pub(super) enum Fault {
    #[error("it has ended")]
    Ended,
    #[error("the peer says something else than it may")]
    Nonsense,
}

/// One session's.
pub(super) struct Lifeline {
    socket: TcpStream,
    /// The other end is known to be a vtld. Before, nothing is written.
    greeted: bool,
    pub(super) stage: Stage,
    /// Packets that the peer had when it left.
    pub(super) peer_has: Option<u64>,
    out: Vec<u8>,
    /// Bytes of `out` that have gone.
    gone: usize,
    come: Vec<u8>,
}

impl Lifeline {
    /// Of a connection that does not block. `preamble`: what a client says once it was greeted; a
    /// server has greeted already.
    pub(super) fn new(socket: TcpStream, preamble: Option<[u8; WORD]>) -> Self {
        // A word must not wait for others.
        let _ = socket.set_nodelay(true);
        Self {
            socket,
            greeted: preamble.is_none(),
            stage: Stage::Quiet,
            peer_has: None,
            out: preamble.map(Vec::from).unwrap_or_default(),
            gone: 0,
            come: Vec::new(),
        }
    }

    /// Whether this is one: the other end is a vtld.
    pub(super) fn is_greeted(&self) -> bool {
        self.greeted
    }

    /// Whether the session has left its graft, or is about to.
    pub(super) fn is_leaving(&self) -> bool {
        matches!(
            self.stage,
            Stage::Leaving { .. } | Stage::Left | Stage::Carrying
        )
    }

    /// Asks whether the peer is there: the daemon, and, as that may not have greeted, its kernel.
    pub(super) fn ask(&mut self, now: u64) {
        self.say(Word::Ask);
        option::keep_asking(&self.socket, true);
        self.stage = Stage::Asked {
            at_ns: now,
            here_ns: None,
        };
    }

    /// The graft does its work after all.
    pub(super) fn rest(&mut self) {
        option::keep_asking(&self.socket, false);
        self.stage = Stage::Quiet;
    }

    /// Queues a word, unless the session has left: behind [`Word::Leave`] there are packets only, and
    /// it is answer enough to a word that crossed it.
    pub(super) fn say(&mut self, word: Word) {
        if !matches!(self.stage, Stage::Left | Stage::Carrying) {
            self.out.extend(word.emit());
        }
    }

    /// Queues a packet; false if enough is queued.
    pub(super) fn queue(&mut self, packet: &[u8]) -> bool {
        if self.out.len() - self.gone >= KEPT {
            return false;
        }
        self.out.extend((packet.len() as u16).to_be_bytes());
        self.out.extend(packet);
        true
    }

    /// Whether all that was queued has been written.
    pub(super) fn is_flushed(&self) -> bool {
        self.out.is_empty()
    }

    /// Writes what the connection takes.
    pub(super) fn flush(&mut self) -> Result<(), Fault> {
        if !self.greeted {
            return Ok(());
        }
        while self.gone < self.out.len() {
            match self.socket.write(&self.out[self.gone..]) {
                Ok(n) => self.gone += n,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return Err(Fault::Ended),
            }
        }
        if self.gone == self.out.len() {
            self.out.clear();
            self.gone = 0;
        } else if self.gone >= KEPT {
            self.out.drain(..self.gone);
            self.gone = 0;
        }
        Ok(())
    }

    /// Reads what has come, as far as there is room.
    pub(super) fn pull(&mut self) -> Result<(), Fault> {
        let room = KEPT.saturating_sub(self.come.len());
        match (&self.socket).take(room as u64).read_to_end(&mut self.come) {
            Ok(read) if read < room => return Err(Fault::Ended),
            Ok(_) => {}
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
            Err(_) => return Err(Fault::Ended),
        }
        if !self.greeted
            && let Some(first) = self.come.first_chunk()
        {
            if *first != GREETING {
                return Err(Fault::Nonsense);
            }
            self.come.drain(..WORD);
            self.greeted = true;
            self.flush()?;
        }
        Ok(())
    }

    /// What has come and was not used yet: in lossy sessions, frames of streams.
    pub(super) fn come(&self) -> &[u8] {
        &self.come
    }

    /// The first of those bytes were used.
    pub(super) fn used(&mut self, bytes: usize) {
        self.come.drain(..bytes);
    }

    /// Queues what `fill` writes, of at most so many bytes, until that is nothing or enough is
    /// queued.
    pub(super) fn queue_frames(&mut self, most: usize, mut fill: impl FnMut(&mut [u8]) -> usize) {
        while self.out.len() - self.gone < KEPT {
            let end = self.out.len();
            self.out.resize(end + most, 0);
            let filled = fill(&mut self.out[end..]);
            self.out.truncate(end + filled);
            if filled == 0 {
                break;
            }
        }
    }

    /// The next word that has come whole. After [`Word::Leave`] only packets do.
    pub(super) fn word(&mut self) -> Result<Option<Word>, Fault> {
        let Some((bytes, _)) = self.come.split_first_chunk() else {
            return Ok(None);
        };
        let word = Word::parse(bytes).ok_or(Fault::Nonsense)?;
        self.come.drain(..WORD);
        Ok(Some(word))
    }

    /// Hands out the packets that have come whole, as long as they are taken; returns how many were.
    pub(super) fn packets(&mut self, mut take: impl FnMut(&[u8]) -> bool) -> Result<usize, Fault> {
        let mut used = 0;
        let mut count = 0;
        while let Some((prefix, rest)) = self.come[used..].split_first_chunk() {
            let len = usize::from(u16::from_be_bytes(*prefix));
            if !(1..=intf::VTL_MAX_PAYLOAD as usize).contains(&len) {
                return Err(Fault::Nonsense);
            }
            let Some(packet) = rest.get(..len) else { break };
            if !take(packet) {
                break;
            }
            used += PREFIX + len;
            count += 1;
        }
        self.come.drain(..used);
        Ok(count)
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    fn pair() -> (Lifeline, Lifeline) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let other = listener.accept().unwrap().0;
        one.set_nonblocking(true).unwrap();
        other.set_nonblocking(true).unwrap();
        (Lifeline::new(one, None), Lifeline::new(other, None))
    }

    #[test]
    fn word__emit_then_parse_is_identity() {
        let leave = Word::Leave { received: 1 << 60 };
        for word in [Word::Ask, Word::Here, leave] {
            assert_eq!(Word::parse(&word.emit()), Some(word));
        }
        assert_eq!(Word::parse(&GREETING), None);
        assert_eq!(Word::parse(b"GET / HTTP/1.1\r\n"), None);
    }

    #[test]
    fn say__nothing_behind_leave() {
        let (mut here, mut there) = pair();
        here.say(Word::Leave { received: 7 });
        here.stage = Stage::Left;
        here.say(Word::Here);
        assert!(here.queue(b"packet"));
        here.flush().unwrap();
        let mut packets = Vec::new();
        while packets.is_empty() {
            there.pull().unwrap();
            if there.peer_has.is_none() {
                let Some(Word::Leave { received }) = there.word().unwrap() else {
                    continue;
                };
                there.peer_has = Some(received);
            }
            let mut take = |packet: &[u8]| {
                packets.push(packet.to_vec());
                true
            };
            there.packets(&mut take).unwrap();
        }
        assert_eq!(packets, [b"packet"]);
    }

    #[test]
    fn greeting__nothing_is_said_before_it() {
        let (mut server, client) = pair();
        let mut client = Lifeline::new(client.socket, Some([7; WORD]));
        client.say(Word::Ask);
        client.flush().unwrap();
        server.pull().unwrap();
        assert!(server.come.is_empty() && !client.is_greeted());
        server.out.extend(GREETING);
        server.say(Word::Here);
        server.flush().unwrap();
        while !client.is_greeted() {
            client.pull().unwrap();
        }
        assert_eq!(client.word().unwrap(), Some(Word::Here));
        while server.come.len() < 2 * WORD {
            server.pull().unwrap();
        }
        assert_eq!(server.come[..WORD], [7; WORD]);
    }

    #[test]
    fn greeting__an_applications_bytes_are_none() {
        let (mut application, client) = pair();
        let mut client = Lifeline::new(client.socket, Some([7; WORD]));
        application.out.extend(b"SSH-2.0-OpenSSH_9.2p1");
        application.flush().unwrap();
        let fault = loop {
            if let Err(fault) = client.pull() {
                break fault;
            }
        };
        assert!(matches!(fault, Fault::Nonsense) && !client.is_greeted());
    }

    #[test]
    fn packets__come_as_they_went_however_they_are_cut() {
        let (mut here, mut there) = pair();
        let packets: Vec<Vec<u8>> = (1..500).map(|n| vec![n as u8; n * 3]).collect();
        let mut sent = packets.iter().peekable();
        let mut got: Vec<Vec<u8>> = Vec::new();
        here.say(Word::Leave { received: 7 });
        let mut word = None;
        let mut turn = 0;
        while got.len() < packets.len() {
            while sent.peek().is_some_and(|packet| here.queue(packet)) {
                sent.next();
            }
            here.flush().unwrap();
            there.pull().unwrap();
            if word.is_none() {
                word = there.word().unwrap();
                continue;
            }
            turn += 1;
            let room = got.len() + turn % 7;
            let take = |packet: &[u8]| {
                let takes = got.len() < room;
                if takes {
                    got.push(packet.to_vec());
                }
                takes
            };
            there.packets(take).unwrap();
        }
        assert_eq!(word, Some(Word::Leave { received: 7 }));
        assert_eq!(got, packets);
        drop(here);
        assert!(matches!(there.pull(), Err(Fault::Ended)));
    }

    #[test]
    fn packets__of_impossible_lengths_are_nonsense() {
        for length in [0, intf::VTL_MAX_PAYLOAD as u16 + 1] {
            let (mut here, mut there) = pair();
            here.out.extend(length.to_be_bytes());
            here.flush().unwrap();
            while there.come.is_empty() {
                there.pull().unwrap();
            }
            assert!(matches!(there.packets(|_| true), Err(Fault::Nonsense)));
        }
    }
}
