//! As much of 64-bit little-endian ELF as packages need. The input is a stranger's: no offset is
//! believed, nothing panics.

/// Sections of one file that are looked at.
const MAX_SECTIONS: usize = 1024;

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    let bytes = bytes.get(at..at.checked_add(2)?)?;
    Some(u16::from_le_bytes(bytes.try_into().ok()?))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    let bytes = bytes.get(at..at.checked_add(4)?)?;
    Some(u32::from_le_bytes(bytes.try_into().ok()?))
}

fn offset_at(bytes: &[u8], at: usize) -> Option<usize> {
    let bytes = bytes.get(at..at.checked_add(8)?)?;
    u64::from_le_bytes(bytes.try_into().ok()?).try_into().ok()
}

/// A string that ends with a zero byte.
fn text_at(bytes: &[u8], at: usize) -> Option<&[u8]> {
    bytes.get(at..)?.split(|b| *b == 0).next()
}

/// The bytes of a section.
pub(crate) fn section<'a>(image: &'a [u8], name: &str) -> Option<&'a [u8]> {
    const NOBITS: u32 = 8;
    if image.get(..6)? != b"\x7fELF\x02\x01" {
        return None;
    }
    let table = offset_at(image, 40)?;
    let size = usize::from(u16_at(image, 58)?);
    let count = usize::from(u16_at(image, 60)?).min(MAX_SECTIONS);
    let header = |i: usize| table.checked_add(i.checked_mul(size)?);
    let bytes = |at: usize| -> Option<&'a [u8]> {
        let start = offset_at(image, at.checked_add(24)?)?;
        let length = offset_at(image, at.checked_add(32)?)?;
        image.get(start..start.checked_add(length)?)
    };
    let names = bytes(header(usize::from(u16_at(image, 62)?))?)?;
    (0..count).find_map(|i| {
        let at = header(i)?;
        let own = text_at(names, u32_at(image, at)? as usize)?;
        let filled = u32_at(image, at.checked_add(4)?)? != NOBITS;
        (own == name.as_bytes() && filled).then(|| bytes(at))?
    })
}
