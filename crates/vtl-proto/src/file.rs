//! The exchange of `vtl send` and `vtl recv`, around the bytes of a file:
//!
//! ```text
//! sender:   magic (8)  size (8)  length of name (2)  name  ─▶
//! receiver: 0, or 1 and length of reason (2) and reason    ◀─
//! sender:   the file  SHA-256 (32)                         ─▶
//! receiver: 0, or 1 and length of reason (2) and reason    ◀─
//! ```
//! Integers are big-endian, text is UTF-8.

use std::io::{self, Read, Write};

/// Identifies this exchange and its version.
const MAGIC: &[u8; 8] = b"VTLFILE1";
/// Maximum length of a file name on Linux, bytes.
const LONGEST_NAME: usize = 255;

/// The sender's offer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Offer {
    /// Bytes in the file.
    pub size: u64,
    /// The file's name, without directories.
    pub name: String,
}

impl Offer {
    /// Sends the offer.
    ///
    /// # Errors
    /// The stream's.
    pub fn write(&self, to: &mut impl Write) -> io::Result<()> {
        let mut message = MAGIC.to_vec();
        message.extend(self.size.to_be_bytes());
        put_text(&mut message, &self.name);
        to.write_all(&message)?;
        to.flush()
    }

    /// Receives an offer.
    ///
    /// # Errors
    /// The stream's; `InvalidData` if this is none.
    pub fn read(from: &mut impl Read) -> io::Result<Self> {
        let magic: [u8; 8] = array(from)?;
        if &magic != MAGIC {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "it speaks something else",
            ));
        }
        let size = u64::from_be_bytes(array(from)?);
        let name = text(from)?;
        if name.len() > LONGEST_NAME {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "its file's name is too long",
            ));
        }
        Ok(Self { size, name })
    }
}

/// The receiver's answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Offer accepted, or file received.
    Accepted,
    /// Refused, with a sentence for the sender's user.
    Refused(String),
}

impl Verdict {
    /// Sends the answer.
    ///
    /// # Errors
    /// The stream's.
    pub fn write(&self, to: &mut impl Write) -> io::Result<()> {
        let mut message = Vec::new();
        match self {
            Self::Accepted => message.push(0),
            Self::Refused(reason) => {
                message.push(1);
                put_text(&mut message, reason);
            }
        }
        to.write_all(&message)?;
        to.flush()
    }

    /// Receives an answer.
    ///
    /// # Errors
    /// The stream's; `InvalidData` if this is none.
    pub fn read(from: &mut impl Read) -> io::Result<Self> {
        let [kind] = array(from)?;
        match kind {
            0 => Ok(Self::Accepted),
            1 => Ok(Self::Refused(text(from)?)),
            _ => Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "it speaks something else",
            )),
        }
    }

    /// A refusal as an error.
    ///
    /// # Errors
    /// Its sentence.
    pub fn into_result(self) -> Result<(), String> {
        match self {
            Self::Accepted => Ok(()),
            Self::Refused(reason) => Err(reason),
        }
    }
}

fn put_text(message: &mut Vec<u8>, text: &str) {
    let mut end = text.len().min(u16::MAX.into());
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    message.extend((end as u16).to_be_bytes());
    message.extend(&text.as_bytes()[..end]);
}

fn text(from: &mut impl Read) -> io::Result<String> {
    let mut bytes = vec![0; u16::from_be_bytes(array(from)?).into()];
    from.read_exact(&mut bytes)?;
    String::from_utf8(bytes)
        .map_err(|_| io::Error::new(io::ErrorKind::InvalidData, "it sent text that is not UTF-8"))
}

fn array<const N: usize>(from: &mut impl Read) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    from.read_exact(&mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
#[allow(non_snake_case)]
mod tests {
    use super::*;

    #[test]
    fn offer__survives_the_wire() {
        let offer = Offer {
            size: u64::MAX,
            name: "ü.txt".into(),
        };
        let mut bytes = Vec::new();
        offer.write(&mut bytes).expect("written");
        assert_eq!(Offer::read(&mut bytes.as_slice()).expect("read"), offer);
        for end in 0..bytes.len() {
            assert!(Offer::read(&mut &bytes[..end]).is_err(), "cut at {end}");
        }
    }

    #[test]
    fn offer__is_these_bytes() {
        let (size, name) = (0x0102, "f".to_owned());
        let mut bytes = Vec::new();
        Offer { size, name }.write(&mut bytes).expect("written");
        assert_eq!(bytes, b"VTLFILE1\0\0\0\0\0\0\x01\x02\0\x01f");
    }

    #[test]
    fn offer__another_protocol_is_refused() {
        assert!(Offer::read(&mut b"GET / HTTP/1.1\r\n\r\n".as_slice()).is_err());
    }

    #[test]
    fn verdict__carries_its_reason() {
        for verdict in [Verdict::Accepted, Verdict::Refused("disk full".into())] {
            let mut bytes = Vec::new();
            verdict.write(&mut bytes).expect("written");
            assert_eq!(Verdict::read(&mut bytes.as_slice()).expect("read"), verdict);
        }
        assert!(Verdict::read(&mut [7u8].as_slice()).is_err());
    }
}
