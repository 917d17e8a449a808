//! `vtl graft index`, and what `vtl graft pull` makes of the index that it finds.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use anyhow::{Context, bail, ensure};
use clap::Args;
use vtl_pool::index::{self, Index, MAX_INDEX};
use vtl_pool::key::{PublicKey, SecretKey, Trust};
use vtl_pool::revocations::{Identity, Revocation};
use vtl_pool::{Package, read_bounded};

use super::package::{self, Shelf, read};
use crate::registry;

/// Arguments of `vtl graft index`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    vtl graft index oci://registry.example/grafts mine-0.1.2.vtlg --key me.key\n  \
    vtl graft index /srv/grafts --key me.key                the same again, for 30 days more\n  \
    vtl graft index /srv/grafts --key me.key --revoke mine@0.1.1\n\n\
It says which version of each graft is the newest that this key has signed, and what is revoked,\n\
until it expires; renew it in time. Hosts that pull then notice where a place withholds new\n\
versions or shows an old index. The newest one is kept beside the key, as KEY.vtli: no host takes\n\
one with a lower serial.")]
pub(crate) struct IndexArgs {
    /// Where packages are published: a directory, or oci://REGISTRY/PATH
    #[arg(value_name = "PLACE")]
    place: Shelf,
    /// Packages that are new
    #[arg(value_name = "PACKAGE")]
    packages: Vec<PathBuf>,
    /// The secret key that the packages are signed with
    #[arg(long, value_name = "FILE")]
    key: PathBuf,
    /// For how many days it is good
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u32).range(1..=3650))]
    days: u32,
    /// A package's file (*.vtlg) that is revoked, or NAME@VERSION, the lowest version that is not; may be repeated
    #[arg(long, value_name = "WHAT")]
    revoke: Vec<String>,
    /// Talk to the registry without encryption
    #[arg(long)]
    plain_http: bool,
}

/// `vtl graft index`
pub(crate) fn update(args: &IndexArgs) -> anyhow::Result<()> {
    let key = SecretKey::read(&args.key)?;
    let own = args.key.with_extension("vtli");
    let kept = match own.exists() {
        true => Some(Index::read(&read_bounded(&own, MAX_INDEX)?)?),
        false => None,
    };
    let shown = fetch(&args.place, args.plain_http, &key.public())?;
    let shown = shown
        .map(|bytes| parse(&bytes, &key.public()))
        .transpose()?;
    // What the place shows may be an old one.
    let previous = shown.into_iter().chain(kept).max_by_key(Index::serial);
    let packages = args
        .packages
        .iter()
        .map(|path| Ok(read(path)?.1.identity()));
    let packages = packages.collect::<anyhow::Result<Vec<Identity>>>()?;
    let revocations = args.revoke.iter().map(|what| package::revocation(what));
    let revocations = revocations.collect::<anyhow::Result<Vec<Revocation>>>()?;
    let good = Duration::from_secs(u64::from(args.days) * 86_400);
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?;
    let expires = (now + good).as_secs();
    let index = Index::update(previous.as_ref(), &packages, revocations, expires, &key)?;
    fs::write(&own, index.bytes()).with_context(|| format!("cannot write {}", own.display()))?;
    let published = match &args.place {
        Shelf::Directory(to) => index.store(to)?.display().to_string(),
        Shelf::Registry(to) => registry::publish_index(to, args.plain_http, &index)?,
    };
    eprintln!(
        "published: {published}, serial {}, good until {}",
        index.serial(),
        index.expiry()
    );
    Ok(())
}

/// A publisher's index at a place, unread, if there is one.
fn fetch(place: &Shelf, plain: bool, signer: &PublicKey) -> anyhow::Result<Option<Vec<u8>>> {
    match place {
        Shelf::Registry(from) => registry::pull_index(from, plain, signer),
        Shelf::Directory(from) => {
            let path = from.join(index::file_name(signer));
            match path.exists() {
                true => Ok(Some(read_bounded(&path, MAX_INDEX)?)),
                false => Ok(None),
            }
        }
    }
}

fn parse(bytes: &[u8], signer: &PublicKey) -> anyhow::Result<Index> {
    let found = Index::read(bytes)?;
    ensure!(
        found.signer == *signer,
        "the index there is signed with another key, {}",
        found.signer.short()
    );
    Ok(found)
}

/// Checks a package against its publisher's index at the place that it was pulled from, and keeps that beside the
/// trusted keys. `as_newest`: it was pulled as the newest.
///
/// # Errors
/// The index is older than one that was seen, or says that the package is not to be taken. Where the host requires an
/// index, also that there is none, or that it has expired, which is a warning else.
pub(crate) fn check(
    (place, plain): (&Shelf, bool),
    keys: &Path,
    trust: &Trust,
    package: &Package,
    as_newest: bool,
) -> anyhow::Result<()> {
    let signer = &package.signer;
    let is_required = trust.revocations().requires_index();
    let complain = |why: String| {
        if is_required {
            bail!("{why}; an index is required here (revoked.toml)");
        }
        eprintln!("warning: {why}");
        Ok(())
    };
    let publisher = signer.short();
    let fetched = fetch(place, plain, signer);
    let is_unknown = fetched.is_err();
    let (shown, lack) = match fetched {
        Ok(shown) => (shown, format!("there is no index of {publisher}")),
        // Registries do not like to say that there is none.
        Err(error) => (
            None,
            format!("there is no index of {publisher} to be had: {error:#}"),
        ),
    };
    let shown = shown.map(|bytes| parse(&bytes, signer)).transpose()?;
    let is_shown = shown.is_some();
    let kept = Index::kept(keys, signer)?;
    let before = kept.as_ref().map(Index::serial);
    let Some(index) = Index::advance(shown, kept)? else {
        return match is_required || is_unknown {
            true => complain(lack),
            false => Ok(()),
        };
    };
    if !is_shown {
        complain(format!(
            "{lack}, and there was one: versions may be withheld"
        ))?;
    }
    // Strangers' are checked, and not kept.
    if before != Some(index.serial())
        && trust.name_of(signer).is_some()
        && let Err(error) = index.store(keys)
    {
        complain(format!(
            "{error}, so an older index would not be noticed next time"
        ))?;
    }
    if index.has_expired(SystemTime::now()) {
        let expiry = index.expiry();
        complain(format!(
            "the index of {publisher} has expired at {expiry}: newer versions or revocations may be withheld"
        ))?;
    }
    let identity = package.identity();
    index.check(&identity, as_newest)?;
    if !index.names(&identity.name) && is_required {
        complain(format!(
            "the index of {publisher} does not name {}",
            identity.name
        ))?;
    }
    Ok(())
}
