//! Parses sections and symbols of eBPF objects, as far as packages need them. The input is
//! untrusted: the crate `object` checks every offset.

use object::{
    LittleEndian,
    elf::{EM_BPF, ET_REL, FileHeader64, SHT_NOBITS, SHT_NULL, SHT_SYMTAB},
    read::elf::{FileHeader, SectionHeader, SectionTable, Sym, SymbolTable},
};

/// Maximum number of sections in a file.
const MAX_SECTIONS: usize = 1024;
const LE: LittleEndian = LittleEndian;

type Header = FileHeader64<LittleEndian>;

/// Parses a 64-bit little-endian ELF file with at least one section.
fn open(image: &[u8]) -> Option<(&Header, SectionTable<'_, Header>)> {
    let header = Header::parse(image).ok()?;
    header.endian().ok()?;
    let table = header.sections(LE, image).ok()?;
    (1..=MAX_SECTIONS)
        .contains(&table.len())
        .then_some((header, table))
}

fn text(bytes: &[u8]) -> Option<&str> {
    std::str::from_utf8(bytes).ok()
}

/// The bytes of a section.
pub(crate) fn section<'a>(image: &'a [u8], name: &str) -> Option<&'a [u8]> {
    let (_, table) = open(image)?;
    let is_it = |section: &&<Header as FileHeader>::SectionHeader| {
        section.sh_type(LE) != SHT_NOBITS && table.section_name(LE, section) == Ok(name.as_bytes())
    };
    table.iter().find(is_it)?.data(LE, image).ok()
}

/// A section's header and content.
pub(crate) struct Section<'a> {
    pub(crate) name: &'a str,
    /// `SHT_*`.
    pub(crate) kind: u32,
    /// `SHF_*`.
    pub(crate) flags: u64,
    /// Bytes in memory.
    pub(crate) size: u64,
    /// Index of the section that it refers to: for relocations, their target.
    pub(crate) info: u32,
    pub(crate) bytes: &'a [u8],
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

/// All sections of an eBPF object, by index, and the symbols of all its symbol tables; `None`
/// unless the file is as clang writes it.
pub(crate) fn parse(image: &[u8]) -> Option<(Vec<Section<'_>>, Vec<Symbol<'_>>)> {
    let (header, table) = open(image)?;
    if header.e_type(LE) != ET_REL || header.e_machine(LE) != EM_BPF {
        return None;
    }
    let mut sections = Vec::new();
    let mut symbols = Vec::new();
    for (index, section) in table.enumerate() {
        let kind = section.sh_type(LE);
        sections.push(Section {
            name: text(table.section_name(LE, section).ok()?)?,
            kind: kind.0,
            flags: section.sh_flags(LE).0,
            size: section.sh_size(LE),
            info: section.sh_info(LE),
            bytes: match kind {
                SHT_NULL | SHT_NOBITS => &[],
                _ => section.data(LE, image).ok()?,
            },
        });
        if kind == SHT_SYMTAB {
            let found = SymbolTable::parse(LE, image, &table, index, section).ok()?;
            for symbol in found.iter() {
                symbols.push(Symbol {
                    name: text(found.symbol_name(LE, symbol).ok()?)?,
                    kind: symbol.st_type().0,
                    section: symbol.st_shndx(LE).0.into(),
                    value: symbol.st_value(LE),
                    size: symbol.st_size(LE),
                });
            }
        }
    }
    Some((sections, symbols))
}

#[cfg(test)]
#[allow(non_snake_case)]
mod tests {
    use proptest::prelude::*;
    use vtl_bpf::objects;

    use super::*;

    #[test]
    fn parse__wherever_the_image_lies_in_memory() {
        let image = objects::ROOT;
        let (sections, symbols) = parse(image).unwrap();
        assert!(sections.iter().any(|s| s.name == ".maps") && !symbols.is_empty());
        for shift in 1..8 {
            let shifted = [&[0; 8][..shift], image].concat();
            let (other, others) = parse(&shifted[shift..]).unwrap();
            assert_eq!((other.len(), others.len()), (sections.len(), symbols.len()));
            assert_eq!(
                section(&shifted[shift..], "license"),
                section(image, "license")
            );
        }
    }

    #[test]
    fn parse__nothing_but_eBPF() {
        let changed = |at: usize, byte: u8| {
            let mut image = objects::ROOT.to_vec();
            assert_ne!(image[at], byte);
            image[at] = byte;
            image
        };
        // Class, byte order, type, machine, no sections, headers of another size.
        for (at, byte) in [(4, 1), (5, 2), (16, 2), (18, 62), (60, 0), (58, 63)] {
            assert!(parse(&changed(at, byte)).is_none(), "byte {at}");
        }
        assert!(parse(&[]).is_none());
    }

    proptest! {
        #[test]
        fn parse__never_panics(
            changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..20),
            header in prop::collection::vec((0..64_usize, any::<u8>()), 0..3),
            end in any::<prop::sample::Index>(),
        ) {
            let mut image = objects::ROOT.to_vec();
            for (at, byte) in changes {
                let at = at.index(image.len());
                image[at] = byte;
            }
            for (at, byte) in header {
                image[at] = byte;
            }
            let end = end.index(image.len() + 1);
            for image in [&image[..], &image[..end]] {
                let _ = parse(image);
                let _ = section(image, "license");
            }
        }
    }
}
