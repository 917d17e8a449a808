//! The TLS handshake that negotiates a session's keys, as carried in NEGO and its answers: PROTOCOL.md, section
//! 4, "Keys". The flights are opaque here.

use core::mem::size_of;

use crate::{
    intf,
    wire::{Extension, Extensions, MAX_EXTENSIONS, Nego, Packet, Ticket},
};

const HEAD: usize = size_of::<intf::vtl_ext_crypto>();

/// Flight of the handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flight {
    /// The initiator's first, in NEGO.
    Hello,
    /// The responder's, in NEGO_ACK.
    Answer,
    /// The initiator's second, in another NEGO.
    Finish,
}

impl Flight {
    fn number(self) -> u8 {
        (match self {
            Self::Hello => intf::VTL_FLIGHT_HELLO,
            Self::Answer => intf::VTL_FLIGHT_ANSWER,
            Self::Finish => intf::VTL_FLIGHT_FINISH,
        }) as u8
    }

    /// Extracts this flight from a packet; `None` if it has none.
    pub fn of<'a>(self, extensions: &Extensions<'a>) -> Option<&'a [u8]> {
        let is_crypto = |e: &Extension<'_>| u32::from(e.kind) == intf::VTL_EXT_CRYPTO;
        let crypto = extensions.iter().find(is_crypto)?;
        let (head, bytes) = crypto.value.split_at_checked(HEAD)?;
        (head[0] == self.number()).then_some(bytes)
    }

    /// Encodes the flight as a packet's extensions; `None` if it is too long. `critical`: a peer that does not
    /// know the extension must refuse the session. A first flight is padded, so that the answer is not longer
    /// (amplification).
    pub fn emit(self, bytes: &[u8], critical: bool) -> Option<Vec<u8>> {
        let mut value = vec![0; HEAD];
        value[0] = self.number();
        value.extend_from_slice(bytes);
        let extension = Extension {
            kind: intf::VTL_EXT_CRYPTO as u16,
            critical,
            value: &value,
        };
        let mut buffer = vec![0; MAX_EXTENSIONS];
        let used = extension.emit(&mut buffer)?;
        let rest = MAX_EXTENSIONS - used;
        if self == Self::Hello && rest >= size_of::<intf::vtl_ext>() {
            let padding = Extension {
                kind: intf::VTL_EXT_PADDING as u16,
                critical: false,
                value: &vec![0; rest - size_of::<intf::vtl_ext>()],
            };
            padding.emit(&mut buffer[used..])?;
        } else {
            buffer.truncate(used);
        }
        Some(buffer)
    }
}

/// Labels that export the first secrets of the initiator and of the responder (RFC 8446, section 7.5).
pub const EXPORTERS: [&[u8]; 2] = [b"EXPORTER-VTL initiator", b"EXPORTER-VTL responder"];

/// Encodes the responder's flight: the length of its clear part, 2 bytes, the clear part, and the sealed part.
/// `None` if the clear part is too long.
pub fn join_answer(clear: &[u8], sealed: &[u8]) -> Option<Vec<u8>> {
    let length = u16::try_from(clear.len()).ok()?;
    Some([&length.to_be_bytes()[..], clear, sealed].concat())
}

/// Splits the responder's flight into its clear and its sealed part; `None` if it is truncated.
pub fn split_answer(flight: &[u8]) -> Option<(&[u8], &[u8])> {
    let (length, rest) = flight.split_first_chunk()?;
    rest.split_at_checked(u16::from_be_bytes(*length).into())
}

/// The bytes of a NEGO that the handshake protects: its fixed part, without the ticket, which a cookie may
/// change.
pub(super) fn bound_nego(nego: &Nego<'_>) -> Vec<u8> {
    bound(Packet::Nego(without_ticket(nego)))
}

/// The bytes of a NEGO_ACK that the handshake protects.
pub fn bound_answer(answer: &Nego<'_>) -> Vec<u8> {
    bound(Packet::NegoAck(without_ticket(answer)))
}

fn without_ticket<'a>(nego: &Nego<'_>) -> Nego<'a> {
    Nego {
        ticket: Ticket::default(),
        ..nego.without_extensions()
    }
}

fn bound(packet: Packet<'_>) -> Vec<u8> {
    let mut bytes = vec![0; packet.wire_len()];
    // A packet that cannot be sent protects nothing, so that the handshake fails.
    let used = packet.emit(&mut bytes).unwrap_or(0);
    bytes.truncate(used);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flight__is_found_as_it_was_put_in() {
        for (flight, len) in [
            (Flight::Hello, 250),
            (Flight::Answer, 1),
            (Flight::Finish, 1032),
        ] {
            let bytes = vec![7; len];
            let packed = flight.emit(&bytes, true).unwrap();
            let extensions = Extensions::parse(&packed).unwrap();
            assert_eq!(flight.of(&extensions), Some(&bytes[..]));
            assert_eq!(extensions.unknown_critical(), None);
            assert_eq!(packed.len() == MAX_EXTENSIONS, flight != Flight::Answer);
            let other = if flight == Flight::Hello {
                Flight::Finish
            } else {
                Flight::Hello
            };
            assert_eq!(other.of(&extensions), None);
        }
        assert_eq!(Flight::Hello.emit(&[0; MAX_EXTENSIONS - 7], false), None);
        assert_eq!(Flight::Hello.of(&Extensions::default()), None);
    }

    #[test]
    fn answer__is_split_as_it_was_joined() {
        let flight = join_answer(b"hello", b"rest").unwrap();
        assert_eq!(flight, b"\0\x05hellorest");
        assert_eq!(split_answer(&flight), Some((&b"hello"[..], &b"rest"[..])));
        assert_eq!(split_answer(b"\0\x05hell"), None);
        assert_eq!(split_answer(b"\0"), None);
        assert_eq!(join_answer(&[0; 1 << 16], b""), None);
    }

    #[test]
    fn flight__cut_off_is_none() {
        let extension = Extension {
            kind: intf::VTL_EXT_CRYPTO as u16,
            critical: false,
            value: &[1, 0, 0],
        };
        let mut bytes = vec![0; extension.wire_len()];
        extension.emit(&mut bytes).unwrap();
        let extensions = Extensions::parse(&bytes).unwrap();
        assert_eq!(Flight::Hello.of(&extensions), None);
    }
}
