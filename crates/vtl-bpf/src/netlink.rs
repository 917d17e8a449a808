//! Messages to the kernel over netlink (RFC 3549).

/// An attribute, padded to its alignment.
pub fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    bytes.extend((value.len() as u16 + 4).to_ne_bytes());
    bytes.extend(kind.to_ne_bytes());
    bytes.extend(value);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

#[cfg(test)]
#[allow(non_snake_case)]
mod tests {
    use super::*;

    #[test]
    fn attribute__is_aligned_and_its_length_is_not() {
        let bytes = attribute(7, b"veth\0");
        assert_eq!(bytes[..2], 9_u16.to_ne_bytes());
        assert_eq!(bytes[2..4], 7_u16.to_ne_bytes());
        assert_eq!(&bytes[4..], b"veth\0\0\0\0");
        assert_eq!(attribute(1, &[]).len(), 4);
    }
}
