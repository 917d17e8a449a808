//! Keys of a session, which seal its packets' payload.

use core::{fmt, hint::black_box};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error};

/// Length of a secret, bytes.
const SECRET: usize = 32;

/// An AEAD algorithm. Serialized by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Suite {
    /// AES-128 in Galois/counter mode.
    #[serde(rename = "aes-128-gcm")]
    Aes128Gcm,
    /// AES-256 in Galois/counter mode.
    #[serde(rename = "aes-256-gcm")]
    Aes256Gcm,
    /// ChaCha20 and Poly1305 (RFC 8439).
    #[serde(rename = "chacha20-poly1305")]
    ChaCha20Poly1305,
}

impl Suite {
    /// All algorithms.
    pub const ALL: [Self; 3] = [Self::Aes128Gcm, Self::Aes256Gcm, Self::ChaCha20Poly1305];

    /// The algorithm's name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Aes128Gcm => "aes-128-gcm",
            Self::Aes256Gcm => "aes-256-gcm",
            Self::ChaCha20Poly1305 => "chacha20-poly1305",
        }
    }
}

impl fmt::Display for Suite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The first traffic secret of one direction. Serialized in hexadecimal, and overwritten when it is
/// dropped.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret([u8; SECRET]);

impl Secret {
    /// Its bytes.
    pub const fn as_bytes(&self) -> &[u8; SECRET] {
        &self.0
    }
}

impl From<[u8; SECRET]> for Secret {
    fn from(bytes: [u8; SECRET]) -> Self {
        Self(bytes)
    }
}

impl Drop for Secret {
    fn drop(&mut self) {
        self.0.fill(0);
        // Keeps the compiler from eliding the store, whose result is never read.
        black_box(&self.0);
    }
}

/// Without the secret.
impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

impl Serialize for Secret {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let digits = |b: u8| [b >> 4, b & 15].map(|d| char::from(b"0123456789abcdef"[d as usize]));
        let text: String = self.0.iter().flat_map(|b| digits(*b)).collect();
        serializer.serialize_str(&text)
    }
}

impl<'de> Deserialize<'de> for Secret {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        // The error does not quote the text.
        parse(&text).ok_or_else(|| D::Error::custom("a secret has 64 hexadecimal digits"))
    }
}

fn parse(text: &str) -> Option<Secret> {
    if text.len() != 2 * SECRET {
        return None;
    }
    let digit = |d: u8| char::from(d).to_digit(16).map(|d| d as u8);
    let mut secret = Secret([0; SECRET]);
    for (byte, pair) in secret.0.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
        *byte = digit(pair[0])? << 4 | digit(pair[1])?;
    }
    Some(secret)
}

/// Keys of both directions of a session, as seen by one host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Keys {
    /// The algorithm.
    pub suite: Suite,
    /// Secret of the sending direction.
    pub send: Secret,
    /// Secret of the receiving direction.
    pub receive: Secret,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys() -> Keys {
        Keys {
            suite: Suite::Aes128Gcm,
            send: [0xab; SECRET].into(),
            receive: [0x07; SECRET].into(),
        }
    }

    #[test]
    fn keys__debug_shows_no_secret() {
        let expected = "Keys { suite: Aes128Gcm, send: Secret(..), receive: Secret(..) }";
        assert_eq!(format!("{:?}", keys()), expected);
        assert!(!format!("{:#x?}", keys()).contains("ab"));
        assert_eq!(keys().suite.to_string(), "aes-128-gcm");
    }

    #[test]
    fn keys__have_this_form() {
        let form = serde_json::json!({
            "suite": "aes-128-gcm", "send": "ab".repeat(32), "receive": "07".repeat(32),
        });
        assert_eq!(serde_json::to_value(keys()).unwrap(), form);
        assert_eq!(serde_json::from_value::<Keys>(form).unwrap(), keys());
    }

    #[test]
    fn suite__is_serialized_by_its_name() {
        for suite in Suite::ALL {
            let name = serde_json::to_value(suite).unwrap();
            assert_eq!(name, suite.name());
            assert_eq!(serde_json::from_value::<Suite>(name).unwrap(), suite);
        }
    }

    #[test]
    fn secret__what_is_none_is_refused_and_not_quoted() {
        for text in [
            "",
            "ab",
            &"ag".repeat(32),
            &"ab".repeat(33),
            &"é".repeat(32),
        ] {
            let error = serde_json::from_value::<Secret>(text.into()).unwrap_err();
            assert_eq!(error.to_string(), "a secret has 64 hexadecimal digits");
        }
        let upper = serde_json::from_value::<Secret>("AB".repeat(32).into());
        assert_eq!(upper.unwrap(), keys().send);
    }
}
