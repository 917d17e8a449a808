//! Keys, packages, and the places where they are kept.

use std::fs;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::{Context, bail, ensure};
use clap::{Args, Subcommand};
use serde_json::{Value, json};
use vtl_bpf::{cost, objects};
use vtl_control::{Grafts, Request};
use vtl_pool::key::{PublicKey, SecretKey, Trust};
use vtl_pool::manifest::{Version, Wanted};
use vtl_pool::object::fingerprint;
use vtl_pool::package::MAX_PACKAGE;
use vtl_pool::revocations::{Revocation, Revocations};
use vtl_pool::{Package, pool, read_bounded};

use super::index;
use super::project::Project;
use crate::daemon::SocketArgs;
use crate::registry::{self, Place};

/// What to do with keys.
#[derive(Debug, Subcommand)]
pub(crate) enum KeyCommand {
    /// Make a key: NAME.key, which stays with you, and NAME.pub, which others trust
    #[command(
        after_help = "Hosts take packages that are signed with a key in /etc/vtl/keys:\n  \
        sudo install -Dm644 NAME.pub /etc/vtl/keys/NAME.pub"
    )]
    New {
        /// The key's name
        name: String,
        /// Where to write both files
        #[arg(long, value_name = "DIR", default_value = ".")]
        dir: PathBuf,
    },
}

/// Where a host keeps the keys that it trusts.
const KEYS: &str = "/etc/vtl/keys";

/// Arguments of `vtl graft revoke`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    sudo vtl graft revoke /etc/vtl/keys/eve.pub     nothing that this key has signed\n  \
    sudo vtl graft revoke mine-0.1.0.vtlg           not this package, nor its object in another\n  \
    sudo vtl graft revoke mine@0.1.2                no version of mine before 0.1.2\n\n\
It is written to revoked.toml beside the keys, which may be edited, too; vtld reads it at the\n\
start, and for `vtl graft list`, `deploy` and `swap`. A graft that is in the kernel gets no new\n\
sessions from then on; `vtl graft remove` takes it out.")]
pub(crate) struct RevokeArgs {
    /// A key's file (*.pub) or its 64 digits, a package's file (*.vtlg), or NAME@VERSION
    what: String,
    /// The directory of the trusted keys
    #[arg(long, value_name = "DIR", default_value = KEYS)]
    keys: PathBuf,
}

/// Arguments of `vtl graft sign`.
#[derive(Debug, Args)]
pub(crate) struct SignArgs {
    #[command(flatten)]
    project: super::ProjectArgs,
    /// The secret key
    #[arg(long, value_name = "FILE")]
    key: PathBuf,
    /// Where to write the package, NAME-VERSION.vtlg
    #[arg(long, value_name = "DIR", default_value = ".")]
    output: PathBuf,
}

/// Where packages are found.
#[derive(Clone, Debug)]
pub(super) enum Shelf {
    Directory(PathBuf),
    Registry(Place),
}

impl FromStr for Shelf {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once("://") {
            Some(("oci", _)) => text.parse().map(Self::Registry),
            Some(_) => Err("a registry is written as oci://HOST[:PORT]/PATH".to_owned()),
            None => Ok(Self::Directory(text.into())),
        }
    }
}

const REGISTRIES: &str = "\
In a registry each graft has a repository PATH/NAME, and each version a tag. Logins are those of\n\
`docker login`; certificates are those that this machine trusts ($SSL_CERT_FILE names others).";

/// Arguments of `vtl graft publish`.
#[derive(Debug, Args)]
#[command(after_help = format!("Examples:\n  \
    vtl graft publish mine-0.1.0.vtlg /srv/grafts\n  \
    vtl graft publish mine-0.1.0.vtlg oci://registry.example/grafts\n\n{REGISTRIES}"))]
pub(crate) struct PublishArgs {
    /// The package
    package: PathBuf,
    /// A directory, or oci://REGISTRY/PATH
    #[arg(value_name = "PLACE")]
    to: Shelf,
    /// Talk to the registry without encryption
    #[arg(long)]
    plain_http: bool,
}

/// Arguments of `vtl graft pull`.
#[derive(Debug, Args)]
#[command(after_help = format!("Examples:\n  \
    vtl graft pull mine@0.1.0 /srv/grafts\n  \
    vtl graft pull mine oci://registry.example/grafts\n\n{REGISTRIES}"))]
pub(crate) struct PullArgs {
    /// The graft's name, or NAME@VERSION; the highest version unless it is given
    graft: Wanted,
    /// A directory, or oci://REGISTRY/PATH
    #[arg(value_name = "PLACE")]
    from: Shelf,
    /// Talk to the registry without encryption
    #[arg(long)]
    plain_http: bool,
    /// Where to write the package
    #[arg(long, value_name = "DIR", default_value = ".")]
    output: PathBuf,
    /// The directory of the trusted keys, whose revocations hold here, too; the newest index that was seen is kept there
    #[arg(long, value_name = "DIR", default_value = KEYS)]
    keys: PathBuf,
}

/// What a word revokes: a key's file or digits, a package's file, or NAME@VERSION.
pub(super) fn revocation(what: &str) -> anyhow::Result<Revocation> {
    let path = Path::new(what);
    Ok(if let Some(key) = PublicKey::parse(what) {
        Revocation::Key(key)
    } else if what.ends_with(".pub") {
        Revocation::Key(PublicKey::read(path)?)
    } else if what.ends_with(".vtlg") {
        Revocation::Package(read(path)?.1.identity().object)
    } else {
        let wanted: Wanted = what.parse().map_err(anyhow::Error::msg)?;
        let version = wanted.version.with_context(|| {
            format!("which versions of {what}? {what}@1.2.3 revokes those before 1.2.3")
        })?;
        Revocation::Before(wanted.name, version)
    })
}

/// `vtl graft revoke`
pub(crate) fn revoke(args: &RevokeArgs, socket: &SocketArgs) -> anyhow::Result<()> {
    let list = Revocations::add(&args.keys, revocation(&args.what)?)?;
    // Asked for its grafts, the daemon reads the list.
    let told = socket.call::<Grafts>(&Request::GraftList);
    let list = list.display();
    match told {
        Ok(_) => eprintln!("revoked in {list}"),
        Err(_) if !socket.socket.exists() => {
            eprintln!("revoked in {list}; no vtld runs that could be told");
        }
        Err(error) => {
            return Err(error.context(format!("revoked in {list}, but vtld was not told")));
        }
    }
    Ok(())
}

/// Runs a subcommand of `vtl graft key`.
pub(crate) fn key(command: &KeyCommand) -> anyhow::Result<()> {
    let KeyCommand::New { name, dir } = command;
    if name.is_empty() || name.contains('/') || name.starts_with('.') {
        bail!("\"{name}\" is no name for a key: take letters and digits");
    }
    let (secret, public) = SecretKey::generate()?.write(dir, name)?;
    eprintln!("{}: keep it to yourself", secret.display());
    eprintln!(
        "{}: for /etc/vtl/keys of hosts that shall take what you sign",
        public.display()
    );
    Ok(())
}

/// `vtl graft sign`
pub(crate) fn sign(args: &SignArgs) -> anyhow::Result<()> {
    let project = Project::open(&args.project.dir)?;
    let object = project.object()?;
    let manifest = project.describe(&object)?;
    let key = SecretKey::read(&args.key)?;
    let bytes = Package::sign(&manifest, &object, &key)?;
    let path = args.output.join(manifest.file_name());
    fs::write(&path, &bytes).with_context(|| format!("cannot write {}", path.display()))?;
    eprintln!(
        "{}: {} bytes, signed with {}",
        path.display(),
        bytes.len(),
        key.public().short()
    );
    Ok(())
}

/// Reads a package, whoever signed it.
pub(super) fn read(path: &Path) -> anyhow::Result<(Vec<u8>, Package)> {
    let bytes = read_bounded(path, MAX_PACKAGE)?;
    let package = Package::read(&bytes).with_context(|| path.display().to_string())?;
    Ok((bytes, package))
}

/// What `vtl graft show` says of a package, with its costs only if somebody who trusts it asks for
/// them: for that its programs run in this kernel.
pub(crate) fn describe(path: &Path, measure: bool) -> anyhow::Result<Value> {
    let (bytes, package) = read(path)?;
    let mut answer = package.manifest.to_json();
    answer["key"] = package.signer.to_string().into();
    answer["package"] = json!(path);
    answer["package_bytes"] = bytes.len().into();
    answer["bytes"] = package.object.len().into();
    answer[SHA256] = fingerprint(&package.object).into();
    if measure {
        add_costs(&mut answer, &package.object);
    }
    Ok(answer)
}

/// What the daemon says of a graft of its pool, and what it costs.
pub(crate) fn with_costs_of_pool(mut answer: Value) -> Value {
    match object_of_pool(&answer) {
        Ok(object) => add_costs(&mut answer, &object),
        Err(why) => answer[NS] = format!("not measured: {why:#}").into(),
    }
    answer
}

/// The object that such an answer is about: the daemon trusts that one, and may have been built, or
/// have read the package, at another time.
fn object_of_pool(answer: &Value) -> anyhow::Result<Vec<u8>> {
    let name = answer["name"].as_str().unwrap_or_default();
    let (object, other) = match answer["package"].as_str() {
        Some(path) => (
            read(Path::new(path))?.1.object,
            "the package holds another one than vtld has",
        ),
        None => (
            objects::graft(name)
                .context("it is not part of this vtl")?
                .to_vec(),
            "this vtl holds another one than vtld has",
        ),
    };
    ensure!(answer[SHA256] == fingerprint(&object), other);
    Ok(object)
}

const NS: &str = "ns_per_packet";
/// Of the object.
const SHA256: &str = "sha256";

/// Adds what a graft costs, or why that is not known.
fn add_costs(answer: &mut Value, object: &[u8]) {
    if !nix::unistd::geteuid().is_root() {
        answer[NS] = "not measured: only root may load programs".into();
        return;
    }
    vtl_bpf::silence();
    match cost::measure(object) {
        Ok(costs) => {
            answer["instructions"] = costs.instructions.into();
            answer[NS] = json!({
                "egress": costs.egress_ns,
                "ingress": costs.ingress_ns,
                "listener": costs.listener_ns,
            });
        }
        Err(why) => answer[NS] = format!("not measured: {why}").into(),
    }
}

/// `vtl graft publish`
pub(crate) fn publish(args: &PublishArgs) -> anyhow::Result<()> {
    let (bytes, package) = read(&args.package)?;
    let manifest = &package.manifest;
    let published = match &args.to {
        Shelf::Directory(to) => pool::store(to, manifest, &bytes)?.display().to_string(),
        Shelf::Registry(to) => registry::publish(to, args.plain_http, manifest, &bytes)?,
    };
    eprintln!("published: {published}");
    Ok(())
}

/// `vtl graft pull`
pub(crate) fn pull(args: &PullArgs) -> anyhow::Result<()> {
    let (version, bytes) = match &args.from {
        Shelf::Directory(from) => find(from, &args.graft)?,
        Shelf::Registry(from) => registry::pull(from, args.plain_http, &args.graft)?,
    };
    let wanted = format!("{} {version}", args.graft.name);
    let package = Package::read(&bytes).with_context(|| wanted.clone())?;
    let manifest = &package.manifest;
    if (&manifest.name, manifest.version) != (&args.graft.name, version) {
        let (name, version) = (&manifest.name, manifest.version);
        bail!("what is there as {wanted} is another package: {name} {version}");
    }
    let trust = Trust::read(&args.keys)?;
    trust.revocations().check(&package.identity())?;
    let as_newest = args.graft.version.is_none();
    let place = (&args.from, args.plain_http);
    index::check(place, &args.keys, &trust, &package, as_newest)?;
    let path = pool::store(&args.output, manifest, &bytes)?;
    eprintln!(
        "pulled: {}, signed with {}",
        path.display(),
        package.signer.short()
    );
    Ok(())
}

/// A package of a directory, unread.
fn find(folder: &Path, wanted: &Wanted) -> anyhow::Result<(Version, Vec<u8>)> {
    let place = folder.display();
    let entries = fs::read_dir(folder).with_context(|| format!("cannot read {place}"))?;
    let version = |file: &str| -> Option<Version> {
        let rest = file.strip_prefix(&wanted.name)?.strip_prefix('-')?;
        rest.strip_suffix(".vtlg")?.parse().ok()
    };
    let best = entries
        .filter_map(|entry| version(entry.ok()?.file_name().to_str()?))
        .filter(|version| wanted.takes(*version))
        .max();
    let Some(best) = best else {
        bail!("there is no package of {wanted} in {place}");
    };
    let file = format!("{}-{best}.vtlg", wanted.name);
    Ok((best, read_bounded(&folder.join(file), MAX_PACKAGE)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn object_of_pool__only_what_the_daemon_has() {
        let image = objects::graft("udp").expect("it comes with VTL");
        let answer = json!({ "name": "udp", "package": null, "sha256": fingerprint(image) });
        assert_eq!(object_of_pool(&answer).expect("the same"), image);
        for sha256 in [json!(fingerprint(b"")), Value::Null] {
            let answer = json!({ "name": "udp", "package": null, "sha256": sha256 });
            let error = object_of_pool(&answer).expect_err("another one");
            assert!(error.to_string().contains("another one"), "{error}");
        }
    }
}
