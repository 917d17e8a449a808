//! The manifest of a package, in TOML: `manifest.toml`.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use serde_json::{Value, json};
use vtl_proto::{intf, services::Services};

use crate::{
    Error, Result,
    object::{Description, Parameter, is_name},
};

/// Maximum length of a manifest, bytes.
pub const MAX_MANIFEST: usize = 64 << 10;

/// `1.2.3`, compared number by number. Versions of a graft that agree in the first non-zero number
/// have the same layout of session state: one can replace the other under traffic.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version {
    /// Changes with the layout of session state.
    pub major: u32,
    /// Likewise while `major` is 0.
    pub minor: u32,
    /// Changes with everything else.
    pub patch: u32,
}

impl Version {
    /// Whether sessions of one version can continue with the other.
    pub fn is_compatible(self, other: Self) -> bool {
        let leading = |v: Self| match v {
            Self {
                major: 0,
                minor: 0,
                patch,
            } => (0, 0, patch),
            Self {
                major: 0, minor, ..
            } => (0, minor, 0),
            Self { major, .. } => (major, 0, 0),
        };
        leading(self) == leading(other)
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

impl FromStr for Version {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let number = |part: Option<&str>| {
            part.filter(|p| p.bytes().all(|b| b.is_ascii_digit()))
                .filter(|p| p.len() == 1 || !p.starts_with('0'))
                .and_then(|p| p.parse().ok())
                .ok_or_else(|| format!("`{text}` is no version: write it as 1.2.3"))
        };
        let mut parts = text.splitn(3, '.');
        Ok(Self {
            major: number(parts.next())?,
            minor: number(parts.next())?,
            patch: number(parts.next())?,
        })
    }
}

/// A graft by name, or by name and version: `NAME` or `NAME@1.2.3`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// The graft's name.
    pub name: String,
    /// This version; `None`: the highest.
    pub version: Option<Version>,
}

impl FromStr for Wanted {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let (name, version) = match text.split_once('@') {
            Some((name, version)) => (name, Some(version.parse()?)),
            None => (text, None),
        };
        if !is_name(name) {
            return Err(format!("`{name}` is no name of a graft"));
        }
        Ok(Self {
            name: name.to_owned(),
            version,
        })
    }
}

impl fmt::Display for Wanted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)?;
        self.version
            .map_or(Ok(()), |version| write!(f, "@{version}"))
    }
}

impl Wanted {
    /// Whether a version of the graft matches.
    pub fn takes(&self, version: Version) -> bool {
        self.version.is_none_or(|wanted| wanted == version)
    }
}

impl Serialize for Version {
    fn serialize<S: Serializer>(&self, to: S) -> std::result::Result<S::Ok, S::Error> {
        to.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Version {
    fn deserialize<D: Deserializer<'de>>(from: D) -> std::result::Result<Self, D::Error> {
        let text = String::deserialize(from)?;
        text.parse().map_err(de::Error::custom)
    }
}

/// The manifest of a package.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// The graft's name: letters, digits and `-`.
    pub name: String,
    /// Version of the graft.
    pub version: Version,
    /// The graft's number in packets.
    pub gid: u16,
    /// Services that it provides.
    #[serde(with = "services")]
    pub services: Services,
    /// Names of its transport functions.
    pub functions: Vec<String>,
    /// Wire version.
    pub wire: u32,
    /// Version of the interface between programs and daemon.
    pub interface: u32,
    /// Summary, one sentence.
    pub summary: String,
    /// SPDX expression.
    pub licence: String,
    /// Name, optionally with address.
    pub author: String,
    /// Parameters for applications, with defaults, units and limits.
    #[serde(default, rename = "parameter", skip_serializing_if = "Vec::is_empty")]
    pub parameters: Vec<Parameter>,
}

mod services {
    use super::{Deserialize, Deserializer, Serializer, Services, de};

    pub(super) fn serialize<S: Serializer>(set: &Services, to: S) -> Result<S::Ok, S::Error> {
        let text = set.to_string();
        to.collect_seq(text.split('+').filter(|word| *word != "none"))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Services, D::Error> {
        let words = Vec::<String>::deserialize(from)?;
        let mut set = Services::NONE;
        for word in words {
            set = set | word.parse().map_err(de::Error::custom)?;
        }
        Ok(set)
    }
}

/// A developer's part of the manifest (`graft.toml`); the rest comes from the object.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Project {
    /// As [`Manifest::name`].
    pub name: String,
    /// As [`Manifest::version`].
    pub version: Version,
    /// As [`Manifest::gid`].
    pub gid: u16,
    /// As [`Manifest::services`].
    #[serde(with = "services")]
    pub services: Services,
    /// As [`Manifest::licence`].
    pub licence: String,
    /// As [`Manifest::author`].
    pub author: String,
}

impl Project {
    /// Reads `graft.toml`.
    ///
    /// # Errors
    /// [`Error::BadManifest`].
    pub fn parse(text: &str) -> Result<Self> {
        from_toml(text)
    }

    /// The project of a built-in graft.
    pub fn built_in(object: &Description, version: Version) -> Self {
        Self {
            name: object.name.clone(),
            version,
            gid: object.gid,
            services: object.services,
            licence: "GPL-2.0-only".into(),
            author: "VTL".into(),
        }
    }

    /// The manifest for this project's object.
    ///
    /// # Errors
    /// As [`Manifest::check`].
    pub fn manifest(&self, object: &Description) -> Result<Manifest> {
        let manifest = Manifest {
            name: self.name.clone(),
            version: self.version,
            gid: self.gid,
            services: self.services,
            functions: object.functions.iter().map(|f| f.name.clone()).collect(),
            wire: intf::VTL_VERSION,
            interface: intf::VTL_GRAFT_ABI,
            summary: object.summary.clone(),
            licence: self.licence.clone(),
            author: self.author.clone(),
            parameters: object.parameters.clone(),
        };
        manifest.check(object)?;
        Ok(manifest)
    }
}

fn from_toml<T: de::DeserializeOwned>(text: &str) -> Result<T> {
    if text.len() > MAX_MANIFEST {
        return Err(Error::TooLong {
            what: "the manifest".into(),
            max: MAX_MANIFEST,
        });
    }
    toml::from_str(text).map_err(|error| {
        let line = error.span().map(|span| {
            let before = text.get(..span.start).unwrap_or_default();
            format!("line {}: ", before.matches('\n').count() + 1)
        });
        let why = error.message().replace('\n', " ");
        Error::BadManifest(line.unwrap_or_default() + &why)
    })
}

impl Manifest {
    /// Reads a manifest.
    ///
    /// # Errors
    /// [`Error::BadManifest`], [`Error::TooLong`].
    pub fn parse(text: &str) -> Result<Self> {
        let manifest: Self = from_toml(text)?;
        let bad = |why: &str| Err(Error::BadManifest(why.to_owned()));
        if !is_name(&manifest.name) {
            return bad("its name is not made of up to 31 letters, digits and -");
        }
        for (key, value) in [
            ("summary", &manifest.summary),
            ("licence", &manifest.licence),
            ("author", &manifest.author),
        ] {
            if value.len() > 200 || value.chars().any(char::is_control) {
                return bad(&format!("its {key} is no single line of up to 200 bytes"));
            }
        }
        Ok(manifest)
    }

    /// Serialises the manifest, for [`Manifest::parse`].
    pub fn to_text(&self) -> String {
        toml::to_string(self).expect("a manifest has no maps with other keys than text")
    }

    /// Description for `vtl graft show`; callers add the graft's location.
    pub fn to_json(&self) -> Value {
        let parameter = |p: &Parameter| {
            json!({
                "name": p.name, "unit": p.unit,
                "default": p.default, "least": p.min, "most": p.max,
            })
        };
        json!({
            "name": self.name,
            "version": self.version.to_string(),
            "gid": self.gid,
            "summary": self.summary,
            "services": self.services.to_string(),
            "functions": self.functions,
            "parameters": self.parameters.iter().map(parameter).collect::<Vec<_>>(),
            "wire": self.wire,
            "interface": self.interface,
            "licence": self.licence,
            "author": self.author,
        })
    }

    /// `NAME-VERSION.vtlg`.
    pub fn file_name(&self) -> String {
        format!("{}-{}.vtlg", self.name, self.version)
    }

    /// Checks the manifest against the object, and against this host's versions.
    ///
    /// # Errors
    /// [`Error::Wire`], [`Error::Interface`], [`Error::Lie`], [`Error::Unfounded`].
    pub fn check(&self, object: &Description) -> Result<()> {
        if self.wire != intf::VTL_VERSION {
            return Err(Error::Wire {
                name: self.name.clone(),
                its: self.wire,
                ours: intf::VTL_VERSION,
            });
        }
        if self.interface != intf::VTL_GRAFT_ABI {
            return Err(Error::Interface {
                name: self.name.clone(),
                its: self.interface,
                ours: intf::VTL_GRAFT_ABI,
            });
        }
        let names: Vec<&str> = object.functions.iter().map(|f| f.name.as_str()).collect();
        let list = |parameters: &[Parameter]| {
            let one = |p: &Parameter| {
                format!(
                    "{} {} ({} to {} {})",
                    p.name, p.default, p.min, p.max, p.unit
                )
            };
            let all: Vec<_> = parameters.iter().map(one).collect();
            format!("[{}]", all.join(", "))
        };
        let pairs = [
            ("name", self.name.clone(), object.name.clone()),
            ("gid", self.gid.to_string(), object.gid.to_string()),
            (
                "services",
                self.services.to_string(),
                object.services.to_string(),
            ),
            (
                "functions",
                format!("[{}]", self.functions.join(", ")),
                format!("[{}]", names.join(", ")),
            ),
            ("summary", self.summary.clone(), object.summary.clone()),
            (
                "parameters",
                list(&self.parameters),
                list(&object.parameters),
            ),
        ];
        for (key, claimed, actual) in pairs {
            if claimed != actual {
                return Err(Error::Lie {
                    key,
                    claimed,
                    actual,
                });
            }
        }
        let unfounded = object.founded().missing(self.services);
        if !unfounded.is_empty() {
            return Err(Error::Unfounded {
                services: unfounded.to_string(),
                functions: names.join(", "),
            });
        }
        Ok(())
    }
}

#[cfg(test)]
#[allow(non_snake_case)]
mod tests {
    use super::*;

    #[test]
    fn version__order_and_compatibility() {
        let v = |text: &str| text.parse::<Version>().unwrap();
        assert!(v("1.2.10") > v("1.2.9") && v("2.0.0") > v("1.99.99"));
        assert!(v("1.2.3").is_compatible(v("1.9.0")));
        assert!(!v("1.2.3").is_compatible(v("2.0.0")));
        assert!(v("0.2.3").is_compatible(v("0.2.9")));
        assert!(!v("0.2.3").is_compatible(v("0.3.0")));
        assert!(!v("0.0.1").is_compatible(v("0.0.2")));
        for wrong in [
            "",
            "1",
            "1.2",
            "1.2.3.4",
            "1.2.x",
            "01.2.3",
            "1.2.+3",
            "1.2.99999999999",
        ] {
            assert!(wrong.parse::<Version>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn wanted__name_and_version() {
        for text in ["mine", "mine@1.2.3"] {
            let wanted: Wanted = text.parse().unwrap();
            assert_eq!(
                (wanted.name.as_str(), wanted.to_string().as_str()),
                ("mine", text)
            );
            assert!(wanted.takes("1.2.3".parse().unwrap()));
            assert_eq!(wanted.takes("1.2.4".parse().unwrap()), text == "mine");
        }
        for wrong in ["", "mine@", "mine@1", "@1.2.3", "../mine", "a b", "-v"] {
            assert!(wrong.parse::<Wanted>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn parse__says_the_line() {
        let error = Project::parse("name = \"a\"\nversion = \"1\"\n").unwrap_err();
        assert!(
            error.to_string().contains("line 2: `1` is no version"),
            "{error}"
        );
        let error = Project::parse("nmae = 1\n").unwrap_err();
        assert!(
            error.to_string().contains("line 1: unknown field `nmae`"),
            "{error}"
        );
    }
}
