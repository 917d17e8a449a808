//! As much of 64-bit little-endian ELF as packages need. The input is a stranger's: no offset is
//! believed, nothing panics.

/// Sections of one file that are looked at.
const MAX_SECTIONS: usize = 1024;
/// `sh_type` of sections without bytes in the file.
const NULL: u32 = 0;
const NOBITS: u32 = 8;

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

/// A section's header, with the bytes in the file.
pub(crate) struct Section<'a> {
    pub(crate) name: &'a str,
    /// `SHT_*`.
    pub(crate) kind: u32,
    /// `SHF_*`.
    pub(crate) flags: u64,
    /// Bytes in memory.
    pub(crate) size: u64,
    /// The section that this one is about, by index: of relocations, where they apply.
    pub(crate) info: u32,
    pub(crate) bytes: &'a [u8],
    link: u32,
}

/// A symbol.
pub(crate) struct Symbol<'a> {
    pub(crate) name: &'a str,
    /// `STT_*`.
    pub(crate) kind: u8,
    /// Index of its section.
    pub(crate) section: usize,
    pub(crate) value: u64,
    pub(crate) size: u64,
}

/// All sections of an eBPF object, by index; `None` if the file is anything but one as clang
/// writes it.
pub(crate) fn sections(image: &[u8]) -> Option<Vec<Section<'_>>> {
    const RELOCATABLE: u16 = 1;
    const EM_BPF: u16 = 247;
    const HEADER: usize = 64;
    if image.get(..6)? != b"\x7fELF\x02\x01"
        || u16_at(image, 16)? != RELOCATABLE
        || u16_at(image, 18)? != EM_BPF
        || usize::from(u16_at(image, 58)?) != HEADER
    {
        return None;
    }
    let table = offset_at(image, 40)?;
    let count = usize::from(u16_at(image, 60)?);
    if count == 0 || count > MAX_SECTIONS {
        return None;
    }
    let header = |i: usize| table.checked_add(i * HEADER);
    let bytes = |at: usize| -> Option<&[u8]> {
        if matches!(u32_at(image, at.checked_add(4)?)?, NULL | NOBITS) {
            return Some(&[]);
        }
        let start = offset_at(image, at.checked_add(24)?)?;
        let length = offset_at(image, at.checked_add(32)?)?;
        image.get(start..start.checked_add(length)?)
    };
    let names = usize::from(u16_at(image, 62)?);
    let names = bytes(header(names).filter(|_| names < count)?)?;
    let section = |i: usize| {
        let at = header(i)?;
        image.get(at..at.checked_add(HEADER)?)?;
        Some(Section {
            name: std::str::from_utf8(text_at(names, u32_at(image, at)? as usize)?).ok()?,
            kind: u32_at(image, at + 4)?,
            flags: offset_at(image, at + 8)? as u64,
            size: offset_at(image, at + 32)? as u64,
            link: u32_at(image, at + 40)?,
            info: u32_at(image, at + 44)?,
            bytes: bytes(at)?,
        })
    };
    (0..count).map(section).collect()
}

/// All symbols of all symbol tables.
pub(crate) fn symbols<'a>(sections: &[Section<'a>]) -> Option<Vec<Symbol<'a>>> {
    const SYMTAB: u32 = 2;
    const ENTRY: usize = 24;
    let mut symbols = Vec::new();
    for table in sections.iter().filter(|s| s.kind == SYMTAB) {
        let names = sections.get(table.link as usize)?.bytes;
        let (entries, rest) = table.bytes.as_chunks::<ENTRY>();
        if !rest.is_empty() {
            return None;
        }
        for entry in entries {
            symbols.push(Symbol {
                name: std::str::from_utf8(text_at(names, u32_at(entry, 0)? as usize)?).ok()?,
                kind: entry[4] & 15,
                section: usize::from(u16_at(entry, 6)?),
                value: offset_at(entry, 8)? as u64,
                size: offset_at(entry, 16)? as u64,
            });
        }
    }
    Some(symbols)
}
