//! Keys, packages, and the places where they are kept.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use clap::{Args, Subcommand};
use serde_json::{Value, json};
use vtl_pool::key::SecretKey;
use vtl_pool::manifest::{Version, Wanted};
use vtl_pool::object::Description;
use vtl_pool::package::MAX_PACKAGE;
use vtl_pool::{Package, pool, read_bounded};

use super::project::Project;

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

/// Arguments of `vtl graft publish`.
#[derive(Debug, Args)]
#[command(after_help = "Example: vtl graft publish mine-0.1.0.vtlg /srv/grafts")]
pub(crate) struct PublishArgs {
    /// The package
    package: PathBuf,
    /// A directory
    to: String,
}

/// Arguments of `vtl graft pull`.
#[derive(Debug, Args)]
#[command(after_help = "Example: vtl graft pull mine@0.1.0 /srv/grafts")]
pub(crate) struct PullArgs {
    /// The graft's name, or NAME@VERSION; the highest version unless it is given
    graft: Wanted,
    /// A directory
    from: String,
    /// Where to write the package
    #[arg(long, value_name = "DIR", default_value = ".")]
    output: PathBuf,
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
    let manifest = project.manifest.manifest(&Description::read(&object)?)?;
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
fn read(path: &Path) -> anyhow::Result<(Vec<u8>, Package)> {
    let bytes = read_bounded(path, MAX_PACKAGE)?;
    let package = Package::read(&bytes).with_context(|| path.display().to_string())?;
    Ok((bytes, package))
}

/// What `vtl graft show` says of a package.
pub(crate) fn describe(path: &Path) -> anyhow::Result<Value> {
    let (bytes, package) = read(path)?;
    let mut answer = package.manifest.to_json();
    answer["key"] = package.signer.to_string().into();
    answer["package"] = json!(path);
    answer["package_bytes"] = bytes.len().into();
    answer["bytes"] = package.object.len().into();
    Ok(answer)
}

/// `vtl graft publish`
pub(crate) fn publish(args: &PublishArgs) -> anyhow::Result<()> {
    let (bytes, package) = read(&args.package)?;
    let path = pool::store(Path::new(&args.to), &package.manifest, &bytes)?;
    eprintln!("published: {}", path.display());
    Ok(())
}

/// `vtl graft pull`
pub(crate) fn pull(args: &PullArgs) -> anyhow::Result<()> {
    let Wanted { name, .. } = &args.graft;
    let folder = Path::new(&args.from);
    let entries = fs::read_dir(folder).with_context(|| format!("cannot read {}", args.from))?;
    let version = |file: &str| -> Option<Version> {
        let rest = file.strip_prefix(name.as_str())?.strip_prefix('-')?;
        rest.strip_suffix(".vtlg")?.parse().ok()
    };
    let best = entries
        .filter_map(|entry| version(entry.ok()?.file_name().to_str()?))
        .filter(|version| args.graft.takes(*version))
        .max();
    let Some(best) = best else {
        bail!("there is no package of {} in {}", args.graft, args.from);
    };
    let file = format!("{name}-{best}.vtlg");
    let (bytes, package) = read(&folder.join(&file))?;
    if package.manifest.file_name() != file {
        let inside = package.manifest.file_name();
        bail!("{file} in {} holds another package: {inside}", args.from);
    }
    let path = pool::store(&args.output, &package.manifest, &bytes)?;
    eprintln!(
        "pulled: {}, signed with {}",
        path.display(),
        package.signer.short()
    );
    Ok(())
}
