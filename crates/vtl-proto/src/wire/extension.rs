//! Extensions behind the fixed part of NEGO, NEGO_ACK and NEGO_NACK.

use core::{fmt, mem::size_of};

use super::{WireError, get, put};
use crate::intf;

const HEADER: usize = size_of::<intf::vtl_ext>();
const ALIGN: usize = intf::VTL_EXT_ALIGN as usize;
const CRITICAL: u16 = intf::VTL_EXT_CRITICAL as u16;

/// Maximum length of a packet's extensions, bytes.
pub const MAX_EXTENSIONS: usize = intf::VTL_NEGO_MAX as usize - size_of::<intf::vtl_nego>();

const _: () = assert!(HEADER == ALIGN && MAX_EXTENSIONS.is_multiple_of(ALIGN));

/// One extension.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extension<'a> {
    /// `intf::VTL_EXT_*`, or a type that this version does not define; below 2^15.
    pub kind: u16,
    /// A receiver that does not know the type must not open the session.
    pub critical: bool,
    /// The value, without padding.
    pub value: &'a [u8],
}

impl<'a> Extension<'a> {
    /// Bytes that [`Extension::emit`] writes.
    pub fn wire_len(&self) -> usize {
        HEADER + self.value.len().next_multiple_of(ALIGN)
    }

    /// Writes the extension with its padding to the beginning of `buffer` and returns its length;
    /// `None` without room, or if the type or the value does not fit into its field.
    pub fn emit(&self, buffer: &mut [u8]) -> Option<usize> {
        let length = u16::try_from(self.value.len()).ok()?;
        if self.kind & CRITICAL != 0 {
            return None;
        }
        let need = self.wire_len();
        let (head, body) = buffer.get_mut(..need)?.split_at_mut(HEADER);
        let critical = if self.critical { CRITICAL } else { 0 };
        put!(head, vtl_ext, type_, self.kind | critical);
        put!(head, vtl_ext, length, length);
        let (value, padding) = body.split_at_mut(self.value.len());
        value.copy_from_slice(self.value);
        padding.fill(0);
        Some(need)
    }

    /// Splits off the first extension of `bytes`; `None` if it is truncated.
    fn take(bytes: &mut &'a [u8]) -> Option<Self> {
        let (head, rest) = bytes.split_at_checked(HEADER)?;
        let kind = get!(head, vtl_ext, type_);
        let length = usize::from(get!(head, vtl_ext, length));
        let (body, rest) = rest.split_at_checked(length.next_multiple_of(ALIGN))?;
        *bytes = rest;
        Some(Self {
            kind: kind & !CRITICAL,
            critical: kind & CRITICAL != 0,
            value: &body[..length],
        })
    }
}

/// The extensions of a packet, in encoded form: at most [`MAX_EXTENSIONS`] bytes, all well-formed.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct Extensions<'a>(&'a [u8]);

impl<'a> Extensions<'a> {
    /// Validates the bytes behind a packet's fixed part.
    ///
    /// # Errors
    /// Too many bytes, or not a sequence of complete extensions.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, WireError> {
        if bytes.len() > MAX_EXTENSIONS {
            return Err(WireError::Payload(bytes.len()));
        }
        let mut rest = bytes;
        while !rest.is_empty() {
            let at = bytes.len() - rest.len();
            Extension::take(&mut rest).ok_or(WireError::Extension(at))?;
        }
        Ok(Self(bytes))
    }

    /// The extensions in the packet's order, padding among them.
    pub fn iter(&self) -> impl Iterator<Item = Extension<'a>> + use<'a> {
        let mut rest = self.0;
        core::iter::from_fn(move || Extension::take(&mut rest))
    }

    /// The type of the first critical extension unknown to this host, if any.
    pub fn unknown_critical(&self) -> Option<u16> {
        let known = [intf::VTL_EXT_PADDING, intf::VTL_EXT_CRYPTO];
        self.iter()
            .find(|e| e.critical && !known.contains(&u32::from(e.kind)))
            .map(|e| e.kind)
    }

    /// The encoded form.
    pub fn as_bytes(&self) -> &'a [u8] {
        self.0
    }
}

impl fmt::Debug for Extensions<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}
