//! Addresses: of a place in a registry, as users write it, and those that a registry answers with.

use std::fmt;
use std::net::Ipv6Addr;
use std::str::FromStr;

/// The longest address that a registry may name, bytes.
const MAX_URL: usize = 8 << 10;
/// The longest name of a repository.
const MAX_REPOSITORY: usize = 255;

/// An `http` or `https` address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Url {
    /// Whether it is `https`.
    pub(super) secure: bool,
    /// The host, in lower case, with its port unless that is the usual one.
    pub(super) authority: String,
    /// From the first `/` on.
    pub(super) rest: String,
}

impl Url {
    /// `None` unless it is an absolute address of one of both kinds, without a user's name in it.
    pub(super) fn parse(text: &str) -> Option<Self> {
        if text.len() > MAX_URL || !text.bytes().all(|b| b.is_ascii_graphic()) {
            return None;
        }
        let (scheme, rest) = text.split_once("://")?;
        let (secure, usual) = match scheme.to_ascii_lowercase().as_str() {
            "https" => (true, ":443"),
            "http" => (false, ":80"),
            _ => return None,
        };
        let rest = rest.split('#').next()?;
        let end = rest.find(['/', '?']).unwrap_or(rest.len());
        let (authority, rest) = rest.split_at(end);
        let authority = authority.to_ascii_lowercase();
        if !is_authority(&authority) {
            return None;
        }
        let slash = if rest.starts_with('/') { "" } else { "/" };
        Some(Self {
            secure,
            authority: authority
                .strip_suffix(usual)
                .unwrap_or(&authority)
                .to_owned(),
            rest: format!("{slash}{rest}"),
        })
    }

    /// Another address at the same host.
    pub(super) fn at(&self, rest: String) -> Self {
        Self {
            rest,
            ..self.clone()
        }
    }

    /// What an answer from here names: an absolute address, or one at this host.
    pub(super) fn join(&self, location: &str) -> Option<Self> {
        let scheme_end = location.find("://");
        if scheme_end.is_some() && scheme_end < location.find(['/', '?', '#']) {
            return Self::parse(location);
        }
        let scheme = if self.secure { "https" } else { "http" };
        if location.starts_with("//") {
            return Self::parse(&format!("{scheme}:{location}"));
        }
        let folder = match location.starts_with('/') {
            true => "",
            false => {
                let path = self.rest.split('?').next()?;
                &path[..=path.rfind('/')?]
            }
        };
        Self::parse(&format!("{scheme}://{}{folder}{location}", self.authority))
    }

    /// With one more parameter behind the `?`.
    pub(super) fn with(&self, key: &str, value: &str) -> Self {
        let mark = if self.rest.contains('?') { '&' } else { '?' };
        self.at(format!(
            "{}{mark}{key}={}",
            self.rest,
            percent_encode(value)
        ))
    }

    /// Whether what may be said to the one may be said to the other.
    pub(super) fn same_origin(&self, other: &Self) -> bool {
        (self.secure, &self.authority) == (other.secure, &other.authority)
    }

    /// Whether nobody on the path can read along: encrypted, or to this host.
    pub(super) fn is_private(&self) -> bool {
        let host = match self.authority.rsplit_once(':') {
            Some((host, port)) if port.bytes().all(|b| b.is_ascii_digit()) => host,
            _ => &self.authority,
        };
        let host = host.trim_start_matches('[').trim_end_matches(']');
        let address = host.parse::<std::net::IpAddr>();
        self.secure || host == "localhost" || address.is_ok_and(|a| a.is_loopback())
    }
}

impl fmt::Display for Url {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = if self.secure { "https" } else { "http" };
        write!(f, "{scheme}://{}{}", self.authority, self.rest)
    }
}

/// A host and perhaps a port; no user's name (RFC 3986, section 3.2).
fn is_authority(text: &str) -> bool {
    let good = |b: u8| b.is_ascii_alphanumeric() || b".-".contains(&b);
    let (is_host, port) = match text.strip_prefix('[').map(|rest| rest.split_once(']')) {
        Some(Some((address, rest))) => (address.parse::<Ipv6Addr>().is_ok(), rest),
        Some(None) => return false,
        None => {
            let (host, port) = text.split_at(text.find(':').unwrap_or(text.len()));
            (!host.is_empty() && host.bytes().all(good), port)
        }
    };
    let is_port = |digits: &str| digits.parse::<u16>().is_ok() && !digits.starts_with('+');
    is_host && (port.is_empty() || port.strip_prefix(':').is_some_and(is_port))
}

/// Percent-encodes a parameter's value (RFC 3986, section 2.1).
fn percent_encode(value: &str) -> String {
    value.bytes().fold(String::new(), |mut text, byte| {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            text.push(byte.into());
        } else {
            text += &format!("%{byte:02X}");
        }
        text
    })
}

/// A place in a registry: `oci://HOST[:PORT][/PATH]`. Each graft has a repository of its own below
/// it, each of its versions a tag there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    /// The registry, as the user calls it.
    pub(super) registry: String,
    /// Names with `/` between them, perhaps none.
    path: String,
}

impl FromStr for Place {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let rest = text
            .strip_prefix("oci://")
            .ok_or("a registry is written as oci://HOST[:PORT]/PATH")?;
        let (registry, path) = rest.split_once('/').unwrap_or((rest, ""));
        let path = path.trim_end_matches('/');
        if !is_authority(registry) {
            return Err(format!("\"{registry}\" is no registry's host"));
        }
        if !path.is_empty() && !path.split('/').all(is_component) {
            return Err(format!(
                "\"{path}\" cannot be a path in a registry: take lower-case letters, digits, and - . _ \
                 between them"
            ));
        }
        Ok(Self {
            registry: registry.to_ascii_lowercase(),
            path: path.to_owned(),
        })
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let slash = if self.path.is_empty() { "" } else { "/" };
        write!(f, "oci://{}{slash}{}", self.registry, self.path)
    }
}

impl Place {
    /// The repository of a graft.
    ///
    /// # Errors
    /// Registries do not take its name.
    pub(super) fn repository(&self, graft: &str) -> anyhow::Result<String> {
        let slash = if self.path.is_empty() { "" } else { "/" };
        let repository = format!("{}{slash}{graft}", self.path);
        if !is_component(graft) || repository.len() > MAX_REPOSITORY {
            anyhow::bail!(
                "registries do not take \"{graft}\" as a name: it must be in lower case, short, and not \
                 end in -"
            );
        }
        Ok(repository)
    }
}

/// One name of a repository's path (OCI distribution specification, "pulling manifests").
fn is_component(text: &str) -> bool {
    let alphanumeric = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    let separator = |part: &str| {
        matches!(part, "." | "_" | "__") || (!part.is_empty() && part.bytes().all(|b| b == b'-'))
    };
    let bytes = text.as_bytes();
    let ends = |b: Option<&u8>| b.is_some_and(|b| alphanumeric(*b));
    ends(bytes.first())
        && ends(bytes.last())
        && text
            .split(|c: char| c.is_ascii() && alphanumeric(c as u8))
            .filter(|part| !part.is_empty())
            .all(separator)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn url(text: &str) -> Url {
        Url::parse(text).unwrap_or_else(|| panic!("{text}"))
    }

    #[test]
    fn url__parse_and_refuse() {
        assert_eq!(
            url("HTTPS://A.Example:443").to_string(),
            "https://a.example/"
        );
        assert_eq!(url("http://a:5000?x#y").to_string(), "http://a:5000/?x");
        for wrong in [
            "",
            "/v2/",
            "ftp://a/",
            "https://",
            "https://:443/",
            "https://user@a/",
            "https://a /",
            "https://a/\r\nX: y",
            "https://a:443:443/",
            "https://a:+443/",
            "https://a:65536/",
            "https://[::1/",
            "https://[::1]443/",
            "https://[0:::::443:443/",
            "https://a]/",
        ] {
            assert_eq!(Url::parse(wrong), None, "{wrong}");
        }
        assert_eq!(
            Url::parse(&format!("https://a/{}", "x".repeat(MAX_URL))),
            None
        );
    }

    #[test]
    fn join__absolute_and_relative() {
        let here = url("https://a/v2/b/uploads/?x=1");
        for (location, there) in [
            ("https://b/c", "https://b/c"),
            ("//b/c", "https://b/c"),
            ("/c?d", "https://a/c?d"),
            ("c", "https://a/v2/b/uploads/c"),
        ] {
            assert_eq!(here.join(location), Some(url(there)), "{location}");
        }
        assert_eq!(here.join("file:///etc/passwd"), None);
        let with = url("https://a/c?d=e").with("digest", "sha256:f");
        assert_eq!(with.to_string(), "https://a/c?d=e&digest=sha256%3Af");
    }

    #[test]
    fn url__who_may_hear_secrets() {
        assert!(url("https://a/x").same_origin(&url("https://a:443/y")));
        for other in ["http://a/", "https://b/", "https://a:444/"] {
            assert!(!url("https://a/").same_origin(&url(other)), "{other}");
        }
        for private in [
            "https://a/",
            "http://localhost:5000/",
            "http://127.0.0.1/",
            "http://[::1]:5000/",
        ] {
            assert!(url(private).is_private(), "{private}");
        }
        for open in ["http://a/", "http://localhost.example/", "http://10.0.0.1/"] {
            assert!(!url(open).is_private(), "{open}");
        }
    }

    #[test]
    fn place__paths_and_repositories() {
        let place: Place = "oci://Registry.example:5000/some/grafts/".parse().unwrap();
        assert_eq!(place.to_string(), "oci://registry.example:5000/some/grafts");
        assert_eq!(place.repository("mine").unwrap(), "some/grafts/mine");
        let bare: Place = "oci://localhost".parse().unwrap();
        assert_eq!(bare.repository("go-back--n").unwrap(), "go-back--n");
        for wrong in ["Mine", "mine-", ""] {
            assert!(place.repository(wrong).is_err(), "{wrong}");
        }
        for wrong in [
            "registry.example/x",
            "oci://",
            "oci://a/../b",
            "oci://a/b//c",
            "oci://u@a/b",
            "oci://a/B",
            "oci://a/b?c",
        ] {
            assert!(wrong.parse::<Place>().is_err(), "{wrong}");
        }
    }
}
