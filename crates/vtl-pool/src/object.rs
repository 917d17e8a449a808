//! Description of a compiled graft, which `VTL_GRAFT` and `VTL_TF` of `bpf/include/vtl/tf.h` put in
//! sections of their own.

use std::{collections::BTreeSet, ffi::c_char};

use sha2::{Digest, Sha256};
use vtl_proto::{
    intf::{self, vtl_graft_info, vtl_param_info, vtl_tf_info},
    services::Services,
};

use crate::{Error, Result, elf, key::to_hex};

/// Maximum length of an object, bytes.
pub const MAX_OBJECT: usize = 2 << 20;
/// Maximum number of transport functions of a graft.
const MAX_FUNCTIONS: usize = 64;

/// A graft's description, from its object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Description {
    /// Its name: letters, digits and `-`.
    pub name: String,
    /// Number in its packets.
    pub gid: u16,
    /// Services that it provides.
    pub services: Services,
    /// Preference among grafts that meet the requirements: the highest is taken.
    pub rank: u32,
    /// Whether it fragments packets larger than the path's maximum payload, into halves.
    pub halves: bool,
    /// Summary, one sentence.
    pub summary: String,
    /// In the order of `vtl_session.param`.
    pub parameters: Vec<Parameter>,
    /// Its transport functions, in alphabetical order.
    pub functions: Vec<Function>,
}

/// A parameter of a graft.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Parameter {
    /// Its name.
    pub name: String,
    /// Unit of its value; empty for a bare number.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub unit: String,
    /// Default value.
    pub default: u32,
    /// Lowest value.
    #[serde(rename = "least")]
    pub min: u32,
    /// Highest value.
    #[serde(rename = "most")]
    pub max: u32,
}

/// A transport function.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Function {
    /// Its name.
    pub name: String,
    /// Bits of the services that it contributes to.
    pub services: u16,
}

impl Description {
    /// Reads an object's description.
    ///
    /// # Errors
    /// [`Error::BadObject`]; [`Error::Interface`] if it was built for another version of the
    /// interface.
    pub fn read(image: &[u8]) -> Result<Self> {
        let bad = |why: &str| Error::BadObject(why.to_owned());
        if image.len() > MAX_OBJECT {
            return Err(Error::TooLong {
                what: "the object".into(),
                max: MAX_OBJECT,
            });
        }
        let section = elf::section(image, ".vtl.graft").ok_or_else(|| {
            bad("it has no .vtl.graft section (VTL_GRAFT in the source makes it)")
        })?;
        let short = || bad("its .vtl.graft section is too short");
        let at = std::mem::offset_of!(vtl_graft_info, version);
        let version = section.get(at..at + 4).ok_or_else(short)?;
        let version = u32::from_le_bytes(version.try_into().expect("four bytes"));
        let name = text(section.get(..32).ok_or_else(short)?);
        let name = name.filter(|name| is_name(name)).ok_or_else(|| {
            bad("its name is empty or has other characters than letters, digits and -")
        })?;
        if version != intf::VTL_GRAFT_ABI {
            return Err(Error::Interface {
                name,
                its: version,
                ours: intf::VTL_GRAFT_ABI,
            });
        }
        let info = Reader::new::<vtl_graft_info>(section).ok_or_else(short)?;
        let word = |at| info.word(at);
        let gid = word(std::mem::offset_of!(vtl_graft_info, gid));
        if gid == 0 || gid >= intf::VTL_MAX_GRAFTS {
            return Err(bad(&format!(
                "gid {gid} is not within 1..{}",
                intf::VTL_MAX_GRAFTS - 1
            )));
        }
        let count = word(std::mem::offset_of!(vtl_graft_info, params)) as usize;
        if count > intf::VTL_PARAMS as usize {
            return Err(bad("it has more parameters than there is room for"));
        }
        let first = std::mem::offset_of!(vtl_graft_info, param);
        let parameters = (0..count).map(|i| {
            let at = first + i * size_of::<vtl_param_info>();
            parameter(&section[at..]).ok_or_else(|| bad("a parameter of it makes no sense"))
        });
        let parameters: Vec<_> = parameters.collect::<Result<_>>()?;
        let summary = std::mem::offset_of!(vtl_graft_info, summary);
        let summary = &section[summary..summary + size_of_val(&vtl_graft_info::default().summary)];
        Ok(Self {
            name,
            gid: gid as u16,
            services: Services::from_bits(
                word(std::mem::offset_of!(vtl_graft_info, services)) as u16
            ),
            rank: word(std::mem::offset_of!(vtl_graft_info, rank)),
            halves: word(std::mem::offset_of!(vtl_graft_info, flags)) & intf::VTL_G_HALVES != 0,
            summary: text(summary).ok_or_else(|| bad("its summary is not text"))?,
            parameters,
            functions: functions(image)?,
        })
    }

    /// Services to which its transport functions contribute.
    pub fn founded(&self) -> Services {
        Services::from_bits(self.functions.iter().fold(0, |all, f| all | f.services))
    }
}

/// SHA-256 of an object, in hexadecimal digits.
pub fn fingerprint(image: &[u8]) -> String {
    to_hex(&Sha256::digest(image))
}

/// Licence named by the object, which decides about the helpers that the kernel allows; empty if
/// there is none.
pub fn licence(image: &[u8]) -> String {
    let section = elf::section(image, "license").unwrap_or_default();
    text(section).unwrap_or_default()
}

/// Reads words at offsets of a complete C structure.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn new<T>(bytes: &'a [u8]) -> Option<Self> {
        bytes.get(..size_of::<T>()).map(Self)
    }

    fn word(&self, at: usize) -> u32 {
        u32::from_le_bytes(self.0[at..at + 4].try_into().expect("four bytes"))
    }
}

fn parameter(bytes: &[u8]) -> Option<Parameter> {
    let info = Reader::new::<vtl_param_info>(bytes)?;
    let (name_at, unit_at) = (
        std::mem::offset_of!(vtl_param_info, name),
        std::mem::offset_of!(vtl_param_info, unit),
    );
    let parameter = Parameter {
        name: text(&bytes[name_at..name_at + size_of::<[c_char; 24]>()])?,
        unit: text(&bytes[unit_at..unit_at + size_of::<[c_char; 16]>()])?,
        default: info.word(std::mem::offset_of!(vtl_param_info, initial)),
        min: info.word(std::mem::offset_of!(vtl_param_info, min)),
        max: info.word(std::mem::offset_of!(vtl_param_info, max)),
    };
    let fits = (parameter.min..=parameter.max).contains(&parameter.default);
    (is_name(&parameter.name) && fits).then_some(parameter)
}

/// The transport functions, from the entries of `VTL_TF`.
fn functions(image: &[u8]) -> Result<Vec<Function>> {
    let bad = || Error::BadObject("its .vtl.tf section makes no sense".into());
    let section = elf::section(image, ".vtl.tf").unwrap_or_default();
    let mut found = BTreeSet::new();
    let (entries, rest) = section.as_chunks::<{ size_of::<vtl_tf_info>() }>();
    if !rest.is_empty() || entries.len() > MAX_FUNCTIONS {
        return Err(bad());
    }
    for entry in entries {
        let (name, services) = entry.split_at(std::mem::offset_of!(vtl_tf_info, services));
        let name = text(name)
            .filter(|name| is_function(name))
            .ok_or_else(bad)?;
        let services = u32::from_le_bytes(services.try_into().expect("four bytes"));
        found.insert(Function {
            name,
            services: services as u16,
        });
    }
    Ok(found.into_iter().collect())
}

/// Whether this may be the name of a C function.
fn is_function(text: &str) -> bool {
    (1..32).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_')
}

/// Whether this may be the name of a graft or a parameter: letters, digits and `-`, at most 31,
/// without a leading `-`, which commands would take for an option.
pub fn is_name(text: &str) -> bool {
    (1..32).contains(&text.len())
        && !text.starts_with('-')
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-')
}

/// Zero-terminated text; `None` without a terminator, or with control characters.
fn text(bytes: &[u8]) -> Option<String> {
    let text = std::ffi::CStr::from_bytes_until_nul(bytes).ok()?;
    let text = text.to_str().ok()?;
    (!text.chars().any(char::is_control)).then(|| text.to_owned())
}

#[cfg(test)]
#[allow(non_snake_case)]
mod tests {
    use vtl_bpf::objects;

    use super::*;

    #[test]
    fn read__built_in_grafts_match_their_names() {
        for (name, image) in objects::GRAFTS {
            assert_eq!(Description::read(image).unwrap().name, *name);
        }
    }

    #[test]
    fn read__halves_are_for_those_that_keep_everything_in_order() {
        for (name, image) in objects::GRAFTS {
            let graft = Description::read(image).unwrap();
            let both = Services::RELIABLE | Services::ORDERED;
            assert_eq!(graft.halves, graft.services.contains(both), "{name}");
        }
    }

    #[test]
    fn read__refuses_what_is_no_graft() {
        assert!(Description::read(b"").is_err());
        assert!(Description::read(b"\x7fELF\x02\x01").is_err());
        assert!(Description::read(objects::ROOT).is_err());
    }
}
