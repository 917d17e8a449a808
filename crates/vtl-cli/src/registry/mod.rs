//! Graft packages in OCI registries (OCI distribution specification 1.1): one repository for each
//! graft, one tag for each version, and in it an artifact with a single layer, the package.
//!
//! A registry is a stranger. Whatever it sends is bounded in size and has to fit its digest; that it
//! is what its author signed, the package itself shows. The login goes to the registry and, if it
//! names one, its token server, and to nobody else.

mod challenge;
mod http;
mod login;
mod url;

use anyhow::{Context, bail};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use ureq::http::{Method, StatusCode, header};
use vtl_pool::index::{Index, MAX_INDEX};
use vtl_pool::key::PublicKey;
use vtl_pool::manifest::{Manifest, Version, Wanted};
use vtl_pool::package::MAX_PACKAGE;

use self::http::{Ask, Registry};
use self::login::Login;
pub(crate) use self::url::Place;
use crate::output::hex;

/// What an artifact is.
struct Kind {
    artifact: &'static str,
    layer: &'static str,
    /// Bytes of the layer.
    max: usize,
}

const PACKAGE: Kind = Kind {
    artifact: "application/vnd.vtl.graft.v1",
    layer: "application/vnd.vtl.graft.package.v1+tar",
    max: MAX_PACKAGE,
};
const INDEX: Kind = Kind {
    artifact: "application/vnd.vtl.index.v1",
    layer: "application/vnd.vtl.index.v1+toml",
    max: MAX_INDEX,
};
/// The repository of indexes, beside those of grafts. Each publisher's has a tag of its own.
const INDEXES: &str = "vtl-index";
const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
/// What stands for a configuration where there is none (OCI image specification).
const EMPTY_TYPE: &str = "application/vnd.oci.empty.v1+json";
const EMPTY: &[u8] = b"{}";
/// The longest image manifest, bytes.
const MAX_MANIFEST: usize = 64 << 10;
/// The longest part of a list of tags, bytes.
const MAX_TAGS: usize = 1 << 20;
/// Parts of a list of tags that are asked for.
const MAX_PARTS: usize = 64;

/// A repository of a registry.
struct Repository {
    registry: Registry,
    /// Its name.
    name: String,
}

/// Stores a package in a registry. Returns where: `HOST/REPOSITORY:TAG`.
///
/// # Errors
/// The registry refuses, or there is another package of that name and version.
pub(crate) fn publish(
    place: &Place,
    plain: bool,
    manifest: &Manifest,
    package: &[u8],
) -> anyhow::Result<String> {
    let repository = Repository::open(place, plain, &manifest.name)?;
    let tag = manifest.version.to_string();
    let annotations = json!({
        "org.opencontainers.image.title": manifest.name,
        "org.opencontainers.image.version": tag,
        "org.opencontainers.image.licenses": manifest.licence,
    });
    let document = document(&PACKAGE, &manifest.file_name(), package, &annotations);
    let published = format!("{}/{}:{tag}", place.registry, repository.name);
    match repository.document(&tag)? {
        // Others describe the same package in other words.
        Some(there) if Layer::of(&PACKAGE, &there).is_ok_and(|l| l.digest == digest(package)) => {
            return Ok(published);
        }
        Some(_) => bail!(
            "another {} is in {place} already: raise the version",
            manifest.file_name()
        ),
        None => {}
    }
    repository.put(&tag, package, &document)?;
    Ok(published)
}

fn tag_of(signer: &PublicKey) -> String {
    format!("key-{}", signer.short())
}

/// Stores an index in a registry, in place of the one before. Returns where, as [`publish`] does.
///
/// # Errors
/// The registry refuses.
pub(crate) fn publish_index(place: &Place, plain: bool, index: &Index) -> anyhow::Result<String> {
    let repository = Repository::open(place, plain, INDEXES)?;
    let tag = tag_of(&index.signer);
    let annotations = json!({ "org.opencontainers.image.title": INDEXES });
    let file = vtl_pool::index::file_name(&index.signer);
    let document = document(&INDEX, &file, index.bytes(), &annotations);
    repository.put(&tag, index.bytes(), &document)?;
    Ok(format!("{}/{}:{tag}", place.registry, repository.name))
}

/// Fetches a publisher's index, if there is one: its bytes, unread.
///
/// # Errors
/// The registry refuses, or what is there is not what it says.
pub(crate) fn pull_index(
    place: &Place,
    plain: bool,
    signer: &PublicKey,
) -> anyhow::Result<Option<Vec<u8>>> {
    let repository = Repository::open(place, plain, INDEXES)?;
    let Some(document) = repository.document(&tag_of(signer))? else {
        return Ok(None);
    };
    let layer = Layer::of(&INDEX, &document)
        .with_context(|| format!("{INDEXES} in {place} is no index"))?;
    repository.blob(&layer).map(Some)
}

/// Fetches a package, of the highest version unless one is wanted: its bytes, unread, and the
/// version that its tag says.
///
/// # Errors
/// There is none, or what is there is not what it says.
pub(crate) fn pull(
    place: &Place,
    plain: bool,
    wanted: &Wanted,
) -> anyhow::Result<(Version, Vec<u8>)> {
    let repository = Repository::open(place, plain, &wanted.name)?;
    let none = || format!("there is no package of {wanted} in {place}");
    let version = match wanted.version {
        Some(version) => version,
        None => repository
            .versions()?
            .into_iter()
            .max()
            .with_context(none)?,
    };
    let document = repository.document(&version.to_string())?;
    let layer = Layer::of(&PACKAGE, &document.with_context(none)?)
        .with_context(|| format!("{wanted} in {place} is no graft package"))?;
    Ok((version, repository.blob(&layer)?))
}

impl Repository {
    fn open(place: &Place, plain: bool, graft: &str) -> anyhow::Result<Self> {
        let name = place.repository(graft)?;
        let login = Login::find(&place.registry)?;
        let registry = Registry::new(&place.registry, plain, login)?;
        Ok(Self { registry, name })
    }

    fn ask(&self, method: Method, path: &str, max: usize) -> Ask<'static> {
        Ask {
            method,
            url: self.registry.url(&format!("{}/{path}", self.name)),
            headers: &[],
            body: &[],
            max,
        }
    }

    /// The versions that there are; tags that are none are somebody else's affair.
    fn versions(&self) -> anyhow::Result<Vec<Version>> {
        let mut ask = self.ask(Method::GET, "tags/list?n=1000", MAX_TAGS);
        let mut versions = Vec::new();
        for _ in 0..MAX_PARTS {
            let answer = self.registry.call(&ask)?;
            match answer.status {
                StatusCode::OK => {}
                StatusCode::NOT_FOUND => return Ok(versions),
                _ => return Err(self.registry.refusal(&answer)),
            }
            let list: Value = serde_json::from_slice(&answer.body).unwrap_or_default();
            let tags = list["tags"].as_array().into_iter().flatten();
            versions.extend(tags.filter_map(|tag| tag.as_str()?.parse::<Version>().ok()));
            let next = answer.header(header::LINK).and_then(next_part);
            match next.and_then(|next| answer.url.join(next)) {
                Some(next) if next.same_origin(&ask.url) => ask.url = next,
                Some(_) => bail!("{} has its list go on elsewhere", ask.url.authority),
                None => return Ok(versions),
            }
        }
        bail!("{} has more tags than anything honest", self.name)
    }

    /// The image manifest of a tag, if there is one.
    fn document(&self, tag: &str) -> anyhow::Result<Option<Vec<u8>>> {
        let ask = Ask {
            headers: &[(header::ACCEPT.as_str(), MANIFEST)],
            ..self.ask(Method::GET, &format!("manifests/{tag}"), MAX_MANIFEST)
        };
        let answer = self.registry.call(&ask)?;
        match answer.status {
            StatusCode::OK => {}
            StatusCode::NOT_FOUND => return Ok(None),
            _ => return Err(self.registry.refusal(&answer)),
        }
        let digest = digest(&answer.body);
        if let Some(claimed) = answer.header("docker-content-digest")
            && claimed.starts_with("sha256:")
            && claimed != digest
        {
            bail!(
                "the manifest of {}:{tag} is not what its digest says",
                self.name
            );
        }
        Ok(Some(answer.body))
    }

    fn blob(&self, layer: &Layer) -> anyhow::Result<Vec<u8>> {
        let path = format!("blobs/{}", layer.digest);
        let ask = self.ask(Method::GET, &path, layer.size);
        let bytes = self.registry.expect(&ask, StatusCode::OK)?.body;
        if bytes.len() != layer.size || digest(&bytes) != layer.digest {
            bail!("what is in {} is not what its digest says", self.name);
        }
        Ok(bytes)
    }

    /// Stores an artifact under a tag.
    fn put(&self, tag: &str, layer: &[u8], document: &[u8]) -> anyhow::Result<()> {
        self.put_blob(EMPTY)?;
        self.put_blob(layer)?;
        let ask = Ask {
            headers: &[(header::CONTENT_TYPE.as_str(), MANIFEST)],
            body: document,
            ..self.ask(Method::PUT, &format!("manifests/{tag}"), MAX_MANIFEST)
        };
        self.registry.expect(&ask, StatusCode::CREATED)?;
        Ok(())
    }

    /// Stores bytes unless they are there.
    fn put_blob(&self, bytes: &[u8]) -> anyhow::Result<()> {
        let digest = digest(bytes);
        let ask = self.ask(Method::HEAD, &format!("blobs/{digest}"), 0);
        if self.registry.call(&ask)?.status == StatusCode::OK {
            return Ok(());
        }
        let begin = self.ask(Method::POST, "blobs/uploads/", MAX_MANIFEST);
        let begun = self.registry.expect(&begin, StatusCode::ACCEPTED)?;
        let put = Ask {
            url: self.registry.next(&begun)?.with("digest", &digest),
            headers: &[(header::CONTENT_TYPE.as_str(), "application/octet-stream")],
            body: bytes,
            ..self.ask(Method::PUT, "", MAX_MANIFEST)
        };
        self.registry.expect(&put, StatusCode::CREATED)?;
        Ok(())
    }
}

/// As registries write it.
fn digest(bytes: &[u8]) -> String {
    format!("sha256:{}", hex(&Sha256::digest(bytes)))
}

/// The image manifest of an artifact: the same bytes for the same content.
fn document(kind: &Kind, file: &str, content: &[u8], annotations: &Value) -> Vec<u8> {
    let document = json!({
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "artifactType": kind.artifact,
        "config": { "mediaType": EMPTY_TYPE, "digest": digest(EMPTY), "size": EMPTY.len() },
        "layers": [{
            "mediaType": kind.layer,
            "digest": digest(content),
            "size": content.len(),
            "annotations": { "org.opencontainers.image.title": file },
        }],
        "annotations": annotations,
    });
    document.to_string().into_bytes()
}

/// Where an artifact's content is.
#[derive(Debug, PartialEq, Eq)]
struct Layer {
    digest: String,
    size: usize,
}

impl Layer {
    /// The only layer of an image manifest.
    fn of(kind: &Kind, document: &[u8]) -> anyhow::Result<Self> {
        let document: Value = serde_json::from_slice(document)?;
        if document["artifactType"] != kind.artifact {
            bail!("its type is not {}", kind.artifact);
        }
        let layers = document["layers"].as_array().map_or(&[][..], Vec::as_slice);
        let [layer] = layers else {
            bail!("it has {} layers, not one", layers.len());
        };
        if layer["mediaType"] != kind.layer {
            bail!("its layer's type is not {}", kind.layer);
        }
        let size = layer["size"].as_u64().and_then(|n| usize::try_from(n).ok());
        let size = size.filter(|n| (1..=kind.max).contains(n));
        let digest = layer["digest"].as_str().filter(|text| is_digest(text));
        match (digest, size) {
            (Some(digest), Some(size)) => Ok(Self {
                digest: digest.to_owned(),
                size,
            }),
            _ => bail!("its layer has no SHA-256, or a size that it cannot have"),
        }
    }
}

fn is_digest(text: &str) -> bool {
    let hex = |b: u8| b.is_ascii_digit() || (b'a'..=b'f').contains(&b);
    text.strip_prefix("sha256:")
        .is_some_and(|rest| rest.len() == 64 && rest.bytes().all(hex))
}

/// The address of the next part of a list, from a header such as `<address>; rel="next"`, which may
/// name several addresses (RFC 8288).
fn next_part(mut links: &str) -> Option<&str> {
    loop {
        let (address, rest) = links.split_once('<')?.1.split_once('>')?;
        let (parameters, others) = rest
            .split_once('<')
            .map_or((rest, ""), |(own, _)| (own, &rest[own.len()..]));
        let next = |parameter: &str| {
            let (key, value) = parameter.split_once('=').unwrap_or_default();
            let value = value.trim().trim_end_matches(',').trim().trim_matches('"');
            key.trim().eq_ignore_ascii_case("rel") && value == "next"
        };
        if parameters.split(';').any(next) {
            return Some(address);
        }
        links = others;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn honest() -> Vec<u8> {
        document(&PACKAGE, "mine-1.2.3.vtlg", b"package", &json!({}))
    }

    #[test]
    fn document__names_its_layer() {
        let layer = Layer::of(&PACKAGE, &honest()).unwrap();
        assert_eq!((layer.digest, layer.size), (digest(b"package"), 7));
    }

    #[test]
    fn layer__of_what_is_no_package() {
        let honest: Value = serde_json::from_slice(&honest()).unwrap();
        let why = |change: &dyn Fn(&mut Value)| {
            let mut document = honest.clone();
            change(&mut document);
            Layer::of(&PACKAGE, document.to_string().as_bytes())
                .unwrap_err()
                .to_string()
        };
        let kind = why(&|d| d["artifactType"] = "application/vnd.oci.image.config.v1+json".into());
        assert!(kind.contains("its type"), "{kind}");
        let two = why(&|d| d["layers"] = json!([honest["layers"][0], honest["layers"][0]]));
        assert!(two.contains("2 layers"), "{two}");
        for size in [
            json!(0),
            json!(MAX_PACKAGE + 1),
            json!(-1),
            json!("7"),
            json!(1e300),
        ] {
            why(&|d| d["layers"][0]["size"] = size.clone());
        }
        for digest in ["", "sha256:", "sha512:00", "sha256:../../../etc/passwd"] {
            why(&|d| d["layers"][0]["digest"] = digest.into());
        }
        let of = |document: &[u8]| Layer::of(&PACKAGE, document);
        assert!(of(b"").is_err() && of(b"[]").is_err());
        assert!(
            Layer::of(&INDEX, &self::honest()).is_err(),
            "a package is no index"
        );
    }

    #[test]
    fn next_part__of_a_link() {
        let link = "</v2/mine/tags/list?last=1.0.0&n=1000>; rel=\"next\"";
        assert_eq!(
            next_part(link),
            Some("/v2/mine/tags/list?last=1.0.0&n=1000")
        );
        assert_eq!(next_part("</x>; rel=\"prev\""), None);
        assert_eq!(next_part("</x>; rel=\"prev\"; title=\"next\""), None);
        let both = "</x>; rel=\"prev\", </y>; title=a; rel=next";
        assert_eq!(next_part(both), Some("/y"));
        assert_eq!(next_part("nothing"), None);
    }
}
