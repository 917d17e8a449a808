//! Certificates of hosts: statements, signed with an operator's key, that bind a host's key to its
//! name and addresses until they expire (PROTOCOL.md, section 7, "Certificates").
//!
//! At most [`MAX_CERTIFICATE`] bytes, with a canonical encoding. In a file: one line of hexadecimal
//! digits after a word, as in key files.

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    path::Path,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use crate::{
    Error, LAST_EXPIRY, Result,
    key::{PublicKey, SecretKey, from_hex_bytes, to_hex},
    read_bounded,
};

/// Maximum length of a certificate, bytes.
pub const MAX_CERTIFICATE: usize = FIXED + MAX_NAME + MAX_ADDRESSES * 18 + SIGNATURE;
/// Maximum length of a host's name, bytes.
pub const MAX_NAME: usize = 253;
/// Maximum number of prefixes in a certificate.
pub const MAX_ADDRESSES: usize = 32;

/// Domain separation: no signature for another purpose is valid for a certificate.
const DOMAIN: &[u8] = b"vtl host certificate 1\n";
/// Version of the encoding.
const VERSION: u8 = 1;
/// Length of the fixed part, before the name and after the prefixes.
const FIXED: usize = 4 + 8 + 32 + 32;
const SIGNATURE: usize = 64;
/// The first word of a certificate's file.
const WORD: &str = "vtl-certificate";

/// Reasons for which bytes are no certificate.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// The encoding is invalid.
    #[error("it is no certificate: {0}")]
    Form(&'static str),
    /// The signature does not match signer and content.
    #[error("its signature is invalid")]
    Signature,
}

/// A host's certificate with a valid signature.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Certificate {
    /// The host's name: 1 to [`MAX_NAME`] letters, digits, dots, colons, hyphens and underscores.
    pub name: String,
    /// The host's key.
    pub key: PublicKey,
    /// The signing key. Whether it is trusted is checked elsewhere.
    pub signer: PublicKey,
    /// Prefixes of the host's addresses, with their lengths. May be empty for a host that no peer
    /// connects to, which may then be anywhere.
    pub addresses: Vec<(IpAddr, u8)>,
    /// Expiry, seconds since 1970-01-01T00:00:00Z; valid before.
    pub expires: u64,
}

/// Whether this may be the name of a host.
pub fn is_name(name: &str) -> bool {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.:".contains(c);
    (1..=MAX_NAME).contains(&name.len()) && name.chars().all(is_plain)
}

impl Certificate {
    /// Signs a certificate; returns its bytes.
    ///
    /// # Errors
    /// [`Malformed::Form`] if the name, a prefix (bits beyond its length must be 0), or the expiry
    /// is invalid.
    pub fn sign(
        name: &str,
        key: PublicKey,
        addresses: &[(IpAddr, u8)],
        expires: u64,
        ca: &SecretKey,
    ) -> std::result::Result<Vec<u8>, Malformed> {
        if !is_name(name) {
            return Err(Malformed::Form("its name is none"));
        }
        if addresses.len() > MAX_ADDRESSES {
            return Err(Malformed::Form("it has too many addresses"));
        }
        let mut bytes = vec![VERSION, name.len() as u8, addresses.len() as u8, 0];
        bytes.extend_from_slice(&expires.to_be_bytes());
        bytes.extend_from_slice(&key.to_bytes());
        bytes.extend_from_slice(&ca.public().to_bytes());
        bytes.extend_from_slice(name.as_bytes());
        for (address, bits) in addresses {
            let (family, octets) = match address {
                IpAddr::V4(v4) => (4, v4.octets().to_vec()),
                IpAddr::V6(v6) => (6, v6.octets().to_vec()),
            };
            bytes.extend_from_slice(&[family, *bits]);
            bytes.extend_from_slice(&octets);
        }
        let signature = ca.sign(&message(&bytes));
        bytes.extend_from_slice(&signature);
        // Check it as its readers will.
        Self::parse(&bytes)?;
        Ok(bytes)
    }

    /// Parses a certificate, and checks its signature.
    ///
    /// # Errors
    /// [`Malformed`].
    pub fn parse(bytes: &[u8]) -> std::result::Result<Self, Malformed> {
        let short = || Malformed::Form("it is cut short");
        let split = bytes.len().checked_sub(SIGNATURE).ok_or_else(short)?;
        let (signed, signature) = bytes.split_at(split);
        let mut rest = signed;
        let [version, name_len, count, reserved] = take(&mut rest)?;
        if (version, reserved) != (VERSION, 0) {
            return Err(Malformed::Form("it is of another version"));
        }
        let expires = u64::from_be_bytes(take(&mut rest)?);
        if expires > LAST_EXPIRY {
            return Err(Malformed::Form("it expires at no time"));
        }
        let mut public = || -> std::result::Result<PublicKey, Malformed> {
            let key = PublicKey::from_bytes(&take(&mut rest)?);
            key.ok_or(Malformed::Form("a key in it is none"))
        };
        let (key, signer) = (public()?, public()?);
        let name = rest.split_at_checked(name_len.into());
        let (name, mut rest) = name.ok_or_else(short)?;
        let name = std::str::from_utf8(name).ok().filter(|name| is_name(name));
        let name = name.ok_or(Malformed::Form("its name is none"))?;
        if usize::from(count) > MAX_ADDRESSES {
            return Err(Malformed::Form("it has too many addresses"));
        }
        let addresses = (0..count).map(|_| address(&mut rest));
        let addresses = addresses.collect::<std::result::Result<_, _>>()?;
        if !rest.is_empty() {
            return Err(Malformed::Form("there is more in it than belongs there"));
        }
        let signature = signature.try_into().map_err(|_| short())?;
        if !signer.verifies(&message(signed), signature) {
            return Err(Malformed::Signature);
        }
        Ok(Self {
            name: name.to_owned(),
            key,
            signer,
            addresses,
            expires,
        })
    }

    /// Content of a certificate's file.
    pub fn to_text(bytes: &[u8]) -> String {
        format!("{WORD} {}\n", to_hex(bytes))
    }

    /// Reads a certificate from a file; returns its bytes, too.
    ///
    /// # Errors
    /// [`Error::File`]; [`Error::BadKey`] if the file holds no certificate.
    pub fn read(path: &Path) -> Result<(Vec<u8>, Self)> {
        let bad = |why: String| Error::BadKey {
            path: path.to_owned(),
            why,
        };
        let text = read_bounded(path, 2 * MAX_CERTIFICATE + 64)?;
        let text = std::str::from_utf8(&text).ok();
        let digits = text.and_then(|text| text.strip_prefix(WORD)).map(str::trim);
        let bytes = digits.and_then(from_hex_bytes);
        let bytes = bytes.ok_or_else(|| bad(format!("there is no {WORD} in this file")))?;
        let parsed = Self::parse(&bytes).map_err(|error| bad(error.to_string()))?;
        Ok((bytes, parsed))
    }

    /// Expiry, in RFC 3339 format.
    pub fn expiry(&self) -> impl fmt::Display + use<> {
        humantime::format_rfc3339_seconds(UNIX_EPOCH + Duration::from_secs(self.expires))
    }

    /// Whether it has expired.
    pub fn has_expired(&self, now: SystemTime) -> bool {
        now.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs() >= self.expires
    }
}

/// The signed content.
fn message(signed: &[u8]) -> Vec<u8> {
    [DOMAIN, signed].concat()
}

fn take<const N: usize>(rest: &mut &[u8]) -> std::result::Result<[u8; N], Malformed> {
    let (first, behind) = rest
        .split_first_chunk()
        .ok_or(Malformed::Form("it is cut short"))?;
    *rest = behind;
    Ok(*first)
}

/// Parses the next prefix.
fn address(rest: &mut &[u8]) -> std::result::Result<(IpAddr, u8), Malformed> {
    let [family, bits] = take(rest)?;
    let (address, bits_set, max): (IpAddr, u128, u8) = match family {
        4 => {
            let v4 = Ipv4Addr::from(take::<4>(rest)?);
            (v4.into(), u128::from(v4.to_bits()) << 96, 32)
        }
        6 => {
            let v6 = Ipv6Addr::from(take::<16>(rest)?);
            (v6.into(), v6.to_bits(), 128)
        }
        _ => {
            return Err(Malformed::Form(
                "an address in it is none, or has bits behind its prefix",
            ));
        }
    };
    let beyond = u128::MAX.checked_shr(bits.into()).unwrap_or(0);
    let is_mapped = matches!(address, IpAddr::V6(v6) if v6.to_ipv4_mapped().is_some());
    if bits > max || bits_set & beyond != 0 || is_mapped {
        return Err(Malformed::Form(
            "an address in it is none, or has bits behind its prefix",
        ));
    }
    Ok((address, bits))
}

#[cfg(test)]
#[allow(non_snake_case)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn ca() -> SecretKey {
        SecretKey::from_seed([1; 32])
    }

    fn host() -> PublicKey {
        SecretKey::from_seed([2; 32]).public()
    }

    fn addresses() -> Vec<(IpAddr, u8)> {
        let at = |text: &str| text.parse::<IpAddr>().unwrap();
        vec![(at("192.0.2.7"), 32), (at("2001:db8::"), 32)]
    }

    fn gate() -> Vec<u8> {
        Certificate::sign("gate", host(), &addresses(), 1_900_000_000, &ca()).unwrap()
    }

    #[test]
    fn parse__vectors() {
        let mut seen = 0;
        for vector in include_str!("../tests/vectors/certificates.txt")
            .split("vector ")
            .skip(1)
        {
            let mut lines = vector.lines();
            let name = lines.next().unwrap();
            let mut value = |key| lines.next().unwrap().strip_prefix(key).unwrap();
            let bytes = from_hex_bytes(value("hex ")).unwrap();
            let said = match Certificate::parse(&bytes) {
                Ok(c) => {
                    let addresses = c.addresses.iter().map(|(at, bits)| format!("{at}/{bits}"));
                    let addresses = addresses.collect::<Vec<_>>().join(",");
                    let addresses = Some(addresses).filter(|all| !all.is_empty());
                    format!(
                        "{} key={} signer={} addresses={} expires={}",
                        c.name,
                        c.key,
                        c.signer,
                        addresses.as_deref().unwrap_or("-"),
                        c.expires
                    )
                }
                Err(Malformed::Form(_)) => "error form".into(),
                Err(Malformed::Signature) => "error signature".into(),
            };
            assert_eq!(said, value("want "), "{name}");
            seen += 1;
        }
        assert_eq!(seen, 19);
        // Signing gives the same bytes (RFC 8032 signatures have no randomness).
        assert!(include_str!("../tests/vectors/certificates.txt").contains(&to_hex(&gate())));
    }

    #[test]
    fn certificate__says_what_was_signed() {
        let bytes = gate();
        let read = Certificate::parse(&bytes).unwrap();
        let wanted = Certificate {
            name: "gate".into(),
            key: host(),
            signer: ca().public(),
            addresses: addresses(),
            expires: 1_900_000_000,
        };
        assert_eq!(read, wanted);
        assert_eq!(read.expiry().to_string(), "2030-03-17T17:46:40Z");
        let at = |seconds| UNIX_EPOCH + Duration::from_secs(seconds);
        assert!(!read.has_expired(at(1_899_999_999)) && read.has_expired(at(1_900_000_000)));
        let path = std::env::temp_dir().join(format!("vtl-{}.crt", std::process::id()));
        std::fs::write(&path, Certificate::to_text(&bytes)).unwrap();
        assert_eq!(Certificate::read(&path).unwrap(), (bytes, wanted));
        std::fs::write(&path, "vtl-public-key 00\n").unwrap();
        let error = Certificate::read(&path).unwrap_err().to_string();
        assert!(error.contains("there is no vtl-certificate"), "{error}");
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn certificate__longest_and_shortest() {
        let name = "n".repeat(MAX_NAME);
        let long = vec![("2001:db8::1".parse().unwrap(), 128); MAX_ADDRESSES];
        let bytes = Certificate::sign(&name, host(), &long, LAST_EXPIRY, &ca()).unwrap();
        assert_eq!(bytes.len(), MAX_CERTIFICATE);
        let bytes = Certificate::sign("a", host(), &[], 0, &ca()).unwrap();
        assert_eq!(bytes.len(), FIXED + 1 + SIGNATURE);
    }

    #[test]
    fn sign__refuses_what_nobody_would_take() {
        let sign = |name: &str, addresses: &[(IpAddr, u8)], expires| {
            Certificate::sign(name, host(), addresses, expires, &ca())
                .unwrap_err()
                .to_string()
        };
        assert!(sign("", &[], 0).contains("name"));
        assert!(sign("a b", &[], 0).contains("name"));
        assert!(sign(&"n".repeat(MAX_NAME + 1), &[], 0).contains("name"));
        assert!(sign("a", &[], LAST_EXPIRY + 1).contains("expires"));
        for (text, bits) in [
            ("10.0.0.1", 8),
            ("10.0.0.0", 33),
            ("::1", 64),
            ("::", 129),
            ("::ffff:1.2.3.4", 128),
        ] {
            let error = sign("a", &[(text.parse().unwrap(), bits)], 0);
            assert!(error.contains("address"), "{text}/{bits}: {error}");
        }
        let many = vec![("10.0.0.0".parse().unwrap(), 8); MAX_ADDRESSES + 1];
        assert!(sign("a", &many, 0).contains("too many"));
    }

    #[test]
    fn parse__no_byte_can_be_changed_added_or_left_out() {
        let bytes = gate();
        for at in 0..bytes.len() {
            for bit in 0..8 {
                let mut changed = bytes.clone();
                changed[at] ^= 1 << bit;
                assert!(Certificate::parse(&changed).is_err(), "{at}");
            }
            assert!(Certificate::parse(&bytes[..at]).is_err(), "{at}");
        }
        assert!(Certificate::parse(&[&bytes[..], &[0]].concat()).is_err());
        // Another purpose's signature of the same bytes.
        let (signed, _) = bytes.split_at(bytes.len() - SIGNATURE);
        let other = [signed, &ca().sign(signed)].concat();
        assert_eq!(Certificate::parse(&other), Err(Malformed::Signature));
    }

    proptest! {
        #[test]
        fn parse__never_panics(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
            let _ = Certificate::parse(&bytes);
            let mut bytes = bytes;
            for (place, byte) in bytes.iter_mut().zip(gate()).take(76) {
                *place = byte;
            }
            let _ = Certificate::parse(&bytes);
        }
    }
}
