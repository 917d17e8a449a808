//! The first bytes on a discovery connection: the server's vtld says that it has it, and the client's
//! what it is for. PROTOCOL.md, "The discovery connection".

/// Bytes of a preamble.
pub(crate) const LENGTH: usize = 16;
const MAGIC: &[u8; 4] = b"VTL1";
/// What the server's vtld says first. Without it the connection may have reached the application,
/// for which no preamble is meant.
pub(crate) const GREETING: [u8; LENGTH] = *b"VTL1\x05\0\0\0\0\0\0\0\0\0\0\0";

/// Asks for a tunnel, and the answer that there is none: a preamble follows.
const ASK: u8 = 16;
pub(super) const REFUSED: [u8; LENGTH] = *b"VTL1\x12\0\0\0\0\0\0\0\0\0\0\0";

/// What a discovery connection is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Preamble {
    /// Plain TCP after all: the application's bytes follow.
    Plain,
    /// Ends when the client's vtld ends. The token is the server's guard of the session.
    Lifeline {
        /// `vtl_session.token` at the server.
        token: u64,
    },
    /// Asks for what other releases of VTL have and this one has not.
    Tunnel,
}

impl Preamble {
    pub(crate) fn emit(self) -> [u8; LENGTH] {
        let mut bytes = [0; LENGTH];
        bytes[..4].copy_from_slice(MAGIC);
        match self {
            Self::Plain => {}
            Self::Lifeline { token } => {
                bytes[4] = 1;
                bytes[8..].copy_from_slice(&token.to_be_bytes());
            }
            Self::Tunnel => bytes[4] = ASK,
        }
        bytes
    }

    /// `None` for anything that is no preamble.
    pub(super) fn parse(bytes: &[u8; LENGTH]) -> Option<Self> {
        let rest = bytes.strip_prefix(MAGIC)?;
        match rest[0] {
            0 => Some(Self::Plain),
            1 => Some(Self::Lifeline {
                token: u64::from_be_bytes(rest[4..].try_into().ok()?),
            }),
            ASK => Some(Self::Tunnel),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn preamble__emit_then_parse_is_identity() {
        for preamble in [
            Preamble::Plain,
            Preamble::Lifeline {
                token: 0x0123_4567_89ab_cdef,
            },
            Preamble::Tunnel,
        ] {
            assert_eq!(Preamble::parse(&preamble.emit()), Some(preamble));
        }
    }

    #[test]
    fn preamble__anything_else_is_refused() {
        assert_eq!(Preamble::parse(b"GET / HTTP/1.1\r\n"), None);
        let mut bytes = Preamble::Plain.emit();
        bytes[4] = 2;
        assert_eq!(Preamble::parse(&bytes), None);
        assert_eq!(Preamble::parse(&GREETING), None);
    }
}
