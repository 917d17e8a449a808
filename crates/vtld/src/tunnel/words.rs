//! What the daemons say to each other about a tunnel: words on the discovery connection, and the
//! first bytes of a stream. PROTOCOL.md, "Tunnels".

use super::Kind;

/// Bytes of a word, which has the form of a preamble.
pub(super) const WORD: usize = 16;
/// Bytes of [`Word::Granted`] with the fingerprint behind it.
const MAGIC: &[u8; 4] = b"VTL1";
/// Bytes of the fingerprint: SHA-256 of the server's certificate.
pub(super) const FINGERPRINT: usize = 32;

const PLAIN: u8 = 0;
/// Behind a preamble that asks for a tunnel.
pub(crate) const ASK: u8 = 16;
const GRANTED: u8 = 17;
const REFUSED: u8 = 18;

/// On the discovery connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Word {
    /// Client: no tunnel after all, the application's bytes follow.
    Plain,
    /// Client: may this host have a tunnel?
    Ask(Kind),
    /// Server: yes, at this UDP port, with this token; the fingerprint follows.
    Granted { port: u16, token: u64 },
    /// Server: no.
    Refused,
}

impl Word {
    pub(super) fn emit(self) -> [u8; WORD] {
        let mut bytes = [0; WORD];
        bytes[..4].copy_from_slice(MAGIC);
        match self {
            Self::Plain => bytes[4] = PLAIN,
            Self::Ask(kind) => {
                bytes[4] = ASK;
                bytes[5] = kind.number();
            }
            Self::Granted { port, token } => {
                bytes[4] = GRANTED;
                bytes[6..8].copy_from_slice(&port.to_be_bytes());
                bytes[8..].copy_from_slice(&token.to_be_bytes());
            }
            Self::Refused => bytes[4] = REFUSED,
        }
        bytes
    }

    /// `None` for anything that is no word of these.
    pub(super) fn parse(bytes: &[u8; WORD]) -> Option<Self> {
        let rest = bytes.strip_prefix(MAGIC)?;
        match rest[0] {
            PLAIN => Some(Self::Plain),
            ASK => Some(Self::Ask(Kind::numbered(rest[1])?)),
            GRANTED => Some(Self::Granted {
                port: u16::from_be_bytes([rest[2], rest[3]]),
                token: u64::from_be_bytes(rest[4..].try_into().ok()?),
            }),
            REFUSED => Some(Self::Refused),
            _ => None,
        }
    }
}

/// Bytes of [`Open`].
pub(super) const OPEN: usize = 8;
/// How it begins, and the byte by which the other side says that its application has accepted: the
/// types of the frames in PROTOCOL.md, section 7.
const OPEN_TYPE: u8 = 1;
pub(super) const OPENED: u8 = 2;
/// Before the code of a refusal, where a stream's reset has none.
pub(super) const RESET: u8 = 5;

/// The first bytes of a stream. The addresses are those of the tunnel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Open {
    /// Where the application wants to go.
    pub(super) dest_port: u16,
    /// The application's own.
    pub(super) src_port: u16,
}

impl Open {
    pub(super) fn emit(self) -> [u8; OPEN] {
        let ([d0, d1], [s0, s1]) = (self.dest_port.to_be_bytes(), self.src_port.to_be_bytes());
        [OPEN_TYPE, 0, 0, 0, d0, d1, s0, s1]
    }

    pub(super) fn parse(bytes: &[u8; OPEN]) -> Option<Self> {
        let [OPEN_TYPE, _, _, _, d0, d1, s0, s1] = *bytes else {
            return None;
        };
        Some(Self {
            dest_port: u16::from_be_bytes([d0, d1]),
            src_port: u16::from_be_bytes([s0, s1]),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn word__emit_then_parse_is_identity() {
        let granted = Word::Granted {
            port: 40_000,
            token: 0x0123_4567_89ab_cdef,
        };
        for word in [Word::Plain, Word::Ask(Kind::Quic), granted, Word::Refused] {
            assert_eq!(Word::parse(&word.emit()), Some(word));
        }
    }

    #[test]
    fn word__anything_else_is_none() {
        assert_eq!(Word::parse(b"GET / HTTP/1.1\r\n"), None);
        let mut lifeline = Word::Plain.emit();
        lifeline[4] = 1;
        assert_eq!(Word::parse(&lifeline), None);
        let mut ask = Word::Ask(Kind::Quic).emit();
        ask[5] = 0;
        assert_eq!(Word::parse(&ask), None);
    }

    #[test]
    fn open__emit_then_parse_is_identity() {
        let open = Open {
            dest_port: 80,
            src_port: 54_321,
        };
        assert_eq!(Open::parse(&open.emit()), Some(open));
        assert_eq!(Open::parse(b"GET / HT"), None);
    }
}
