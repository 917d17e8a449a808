//! Preambles of carriers and control connections, before the first frame: PROTOCOL.md, section 7. A token is
//! the server's permission for one carrier.

/// The application protocol of control connections and of QUIC carriers (RFC 7301).
pub const ALPN: &[u8] = b"vtl/2";
/// ALPN of a control connection on which each side sends a certificate first. Both names are part of the signed
/// handshake, which prevents a downgrade by hosts on the path.
pub const ALPN_CERTIFIED: &[u8] = b"vtl/2+certificate";
/// Server name on control connections: TLS requires one, but it selects no host.
pub const SERVER_NAME: &str = "vtl.invalid";

/// Length of a token, bytes; the preamble of an MPTCP or a KCP carrier's stream.
pub const TOKEN: usize = size_of::<u64>();

/// Encodes a token for a stream, big-endian.
pub const fn token(token: u64) -> [u8; TOKEN] {
    token.to_be_bytes()
}

/// Decodes a stream's token.
pub const fn shown(token: [u8; TOKEN]) -> u64 {
    u64::from_be_bytes(token)
}

/// The server name in which a QUIC client conveys a token (RFC 6066, section 3).
pub fn name_of(token: u64) -> String {
    format!("t{token:016x}.{SERVER_NAME}")
}

/// The token in a server name; `None` if there is none.
pub fn named(name: &str) -> Option<u64> {
    let hex = name.strip_prefix('t')?;
    let hex = hex.strip_suffix(SERVER_NAME)?.strip_suffix('.')?;
    let is_hex = hex.len() == 16 && hex.bytes().all(|byte| byte.is_ascii_hexdigit());
    is_hex.then(|| u64::from_str_radix(hex, 16).ok()).flatten()
}

/// A message of an SCTP carrier itself, on stream 0: kind (1 byte), number (8 bytes).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SctpMessage {
    /// The token: the client's first message.
    Token(u64),
    /// Asks for a pong with this number.
    Ping(u64),
    /// Answers a ping.
    Pong(u64),
}

impl SctpMessage {
    /// Encodes the message.
    pub fn emit(self) -> [u8; 1 + size_of::<u64>()] {
        let (kind, number) = match self {
            Self::Token(token) => (16, token),
            Self::Ping(number) => (17, number),
            Self::Pong(number) => (18, number),
        };
        let [a, b, c, d, e, f, g, h] = number.to_be_bytes();
        [kind, a, b, c, d, e, f, g, h]
    }

    /// Decodes a message; `None` if it is malformed.
    pub fn parse(message: &[u8]) -> Option<Self> {
        let (kind, number) = message.split_first()?;
        let number = u64::from_be_bytes(number.try_into().ok()?);
        match kind {
            16 => Some(Self::Token(number)),
            17 => Some(Self::Ping(number)),
            18 => Some(Self::Pong(number)),
            _ => None,
        }
    }
}

#[cfg(test)]
#[allow(non_snake_case)]
mod tests {
    use super::*;

    #[test]
    fn token__is_shown_by_streams_and_names() {
        assert_eq!(token(0x0123_4567_89ab_cdef)[..2], [0x01, 0x23]);
        assert_eq!(name_of(0xbeef), "t000000000000beef.vtl.invalid");
        for number in [0, 1, u64::MAX, 0x0123_4567_89ab_cdef] {
            assert_eq!(shown(token(number)), number);
            assert_eq!(named(&name_of(number)), Some(number));
        }
        for other in ["", "t.vtl.invalid", "example.org", "tzz.vtl.invalid"] {
            assert_eq!(named(other), None, "{other}");
        }
    }

    #[test]
    fn sctp_message__survives_the_wire_and_refuses_others() {
        for message in [
            SctpMessage::Token(1),
            SctpMessage::Ping(u64::MAX),
            SctpMessage::Pong(0),
        ] {
            let bytes = message.emit();
            assert_eq!(SctpMessage::parse(&bytes), Some(message));
            assert_eq!(SctpMessage::parse(&bytes[..8]), None);
            assert_eq!(SctpMessage::parse(&[&bytes[..], &[0]].concat()), None);
        }
        assert_eq!(SctpMessage::Token(258).emit(), [16, 0, 0, 0, 0, 0, 0, 1, 2]);
        assert_eq!(SctpMessage::parse(&[19, 0, 0, 0, 0, 0, 0, 0, 0]), None);
        assert_eq!(SctpMessage::parse(&[]), None);
    }
}
