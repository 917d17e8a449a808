//! Sealed payload: its format, and the derivation of keys.
//!
//! A sealed payload is the ciphertext, as long as the plaintext, and a tag of 16 bytes. If the reader cannot
//! derive the packet's number from its place in the ring, the number follows in 8 bytes, big-endian. The
//! associated data are one byte: the packet's flags `MORE` and `LAST` if the reader can derive the number, else
//! 0.
//!
//! A key is used for 2^22 packets: `epoch = number >> 22`. Keys are derived from the epoch's secret, and each
//! secret from the one before it, by HKDF-Expand with SHA-256 (RFC 5869):
//!
//! ```text
//! secret of epoch + 1 = expand(secret, "vtl ku", 32 bytes)
//! key                 = expand(secret, "vtl key", as long as the algorithm's)
//! iv                  = expand(secret, "vtl iv", 12 bytes)
//! ```
//!
//! The info has the form of HKDF-Expand-Label (RFC 8446, section 7.1), without its prefix `tls13`
//! and with an empty context. The nonce is the iv XOR the packet's number, big-endian and padded
//! with zeros in front (RFC 8446, section 5.3).

use crate::intf;

/// Bits of a packet number within an epoch: 2^22 packets with one key, of the 2^23 that RFC 9001, section 6.6,
/// allows for AES-GCM.
pub const EPOCH: u32 = 22;
/// Length of a tag, bytes, with each algorithm.
pub const TAG: usize = 16;
/// Length of a packet number, bytes.
pub const NUMBER: usize = size_of::<u64>();
/// Length of a nonce, bytes, with each algorithm.
pub const NONCE: usize = 12;

/// Label of the next epoch's secret.
pub const UPDATE: &str = "vtl ku";
/// Label of an epoch's key.
pub const KEY: &str = "vtl key";
/// Label of an epoch's iv.
pub const IV: &str = "vtl iv";
/// Labels that derive the first secrets of a carrier's two directions from its shared secret: the opener's, and
/// the other host's.
pub const DIRECTIONS: [&str; 2] = ["vtl opener", "vtl other"];

/// Bytes that sealing adds to a payload. `numbered`: the packet number is included.
pub const fn overhead(numbered: bool) -> usize {
    if numbered { TAG + NUMBER } else { TAG }
}

/// The epoch of a packet, whose keys seal it.
pub const fn epoch(number: u64) -> u64 {
    number >> EPOCH
}

/// The associated data of a packet. `more`: its flags, as in the slot.
pub const fn associated(more: u32, numbered: bool) -> [u8; 1] {
    [if numbered {
        0
    } else {
        (more & intf::VTL_F_MARKS) as u8
    }]
}

/// The nonce of a packet.
pub fn nonce(iv: &[u8; NONCE], number: u64) -> [u8; NONCE] {
    let mut nonce = *iv;
    let last = &mut nonce[NONCE - NUMBER..];
    for (byte, number) in last.iter_mut().zip(told(number)) {
        *byte ^= number;
    }
    nonce
}

/// Encodes the packet number behind the tag.
pub const fn told(number: u64) -> [u8; NUMBER] {
    number.to_be_bytes()
}

/// Decodes the packet number behind the tag.
pub const fn number(told: [u8; NUMBER]) -> u64 {
    u64::from_be_bytes(told)
}

/// The info of HKDF-Expand: `uint16 length; opaque label<7..255>; opaque context<0..255>`.
///
/// # Panics
/// The label has more than 255 bytes.
pub fn info(length: u16, label: &str) -> Vec<u8> {
    let label_length = u8::try_from(label.len()).expect("a short label");
    [
        &length.to_be_bytes()[..],
        &[label_length],
        label.as_bytes(),
        &[0],
    ]
    .concat()
}

#[cfg(test)]
#[allow(non_snake_case)]
mod tests {
    use super::*;

    #[test]
    fn info__is_an_expand_label_without_prefix() {
        assert_eq!(info(32, UPDATE), b"\x00\x20\x06vtl ku\x00");
        assert_eq!(info(12, IV), b"\x00\x0c\x06vtl iv\x00");
    }

    #[test]
    fn nonce__differs_in_its_last_eight_bytes() {
        let iv = [0xff; NONCE];
        assert_eq!(nonce(&iv, 0), iv);
        let want = [255, 255, 255, 255, 254, 253, 252, 251, 250, 249, 248, 247];
        assert_eq!(nonce(&iv, 0x0102_0304_0506_0708), want);
        assert_eq!(number(told(u64::MAX - 1)), u64::MAX - 1);
    }

    #[test]
    fn associated__are_the_flags_of_messages_alone() {
        let marks = intf::VTL_F_MARKS as u8;
        assert_eq!(associated(u32::MAX, false), [marks]);
        assert_eq!(associated(u32::MAX, true), [0]);
        assert_eq!((epoch((1 << 22) - 1), epoch(1 << 22)), (0, 1));
        assert_eq!((overhead(true), overhead(false)), (24, 16));
    }
}
