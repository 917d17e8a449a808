//! A graft's source: made, compiled, and shown to the verifier.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, bail};
use clap::Args;
use vtl_bpf::objects::{HEADERS, SOURCES};
use vtl_bpf::plane::DataPlane;
use vtl_bpf::{admit, check, flags};
use vtl_pool::manifest::{self, Manifest};
use vtl_pool::object::{Description, MAX_OBJECT, is_name};
use vtl_pool::read_bounded;

use crate::failure::Failure;
use crate::output;

/// The first gid of grafts that do not come with VTL.
const FIRST_GID: u16 = 40;
/// What a new graft begins as.
const TEMPLATE: &str = "selective-repeat";
pub(super) const SOURCE: &str = "graft.bpf.c";
const OBJECT: &str = "build/graft.bpf.o";

/// Arguments of `vtl graft new`.
#[derive(Debug, Args)]
pub(crate) struct NewArgs {
    /// Its name: letters, digits and -
    name: String,
    /// The number that its packets carry; grafts that meet on a host must differ in it
    #[arg(long, default_value_t = FIRST_GID, value_parser = clap::value_parser!(u16).range(40..=63))]
    gid: u16,
}

/// Arguments of `vtl graft build`.
#[derive(Debug, Args)]
pub(crate) struct BuildArgs {
    #[command(flatten)]
    project: super::ProjectArgs,
}

/// Arguments of `vtl graft check`.
#[derive(Debug, Args)]
pub(crate) struct CheckArgs {
    #[command(flatten)]
    project: super::ProjectArgs,
    /// Print the verifier's whole log of what it refuses
    #[arg(long)]
    log: bool,
}

/// A directory with a `graft.toml`.
pub struct Project {
    pub(crate) dir: PathBuf,
    pub(crate) manifest: manifest::Project,
}

impl Project {
    /// Reads `graft.toml`.
    pub fn open(dir: &Path) -> anyhow::Result<Self> {
        let path = dir.join("graft.toml");
        let text = fs::read_to_string(&path).with_context(|| {
            format!(
                "{} is no graft's directory (cannot read {}): make one with `vtl graft new NAME`",
                dir.display(),
                path.display()
            )
        })?;
        let manifest =
            manifest::Project::parse(&text).with_context(|| path.display().to_string())?;
        Ok(Self {
            dir: dir.to_owned(),
            manifest,
        })
    }

    /// The compiled object.
    pub fn object(&self) -> anyhow::Result<Vec<u8>> {
        let path = self.dir.join(OBJECT);
        if !path.exists() {
            bail!(
                "{} is not there: run `vtl graft build` first",
                path.display()
            );
        }
        Ok(read_bounded(&path, MAX_OBJECT)?)
    }

    /// What its package would say of that object, if all of it is on the allow list.
    pub fn describe(&self, object: &[u8]) -> anyhow::Result<Manifest> {
        let manifest = self.manifest.manifest(&Description::read(object)?);
        let manifest =
            manifest.with_context(|| self.dir.join("graft.toml").display().to_string())?;
        vtl_bpf::silence();
        admit::open(object)?;
        Ok(manifest)
    }

    /// Writes VTL's headers below `build/include`, so that a graft compiles against those of this
    /// very build, and returns that directory.
    pub(crate) fn headers(&self) -> anyhow::Result<PathBuf> {
        let include = self.dir.join("build/include");
        write_headers(&include)?;
        Ok(include)
    }
}

/// Writes what grafts are compiled against into a directory.
pub fn write_headers(include: &Path) -> anyhow::Result<()> {
    let api = libbpf_sys::API_HEADERS
        .iter()
        .map(|(name, text)| (format!("bpf/{name}"), *text));
    let own = HEADERS
        .iter()
        .map(|(name, text)| ((*name).to_owned(), *text));
    for (name, text) in own.chain(api) {
        let path = include.join(name);
        let folder = path.parent().expect("below the directory");
        fs::create_dir_all(folder)
            .and_then(|()| fs::write(&path, text))
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

/// `vtl graft new`
pub(crate) fn new(args: &NewArgs) -> anyhow::Result<()> {
    let name = &args.name;
    if !is_name(name) {
        bail!("\"{name}\" is no name for a graft: take up to 31 letters, digits and -");
    }
    let dir = Path::new(name);
    fs::create_dir(dir).with_context(|| format!("cannot make the directory {name}"))?;
    let files = [
        ("graft.toml", project_file(name, args.gid)),
        (SOURCE, source(name, args.gid)),
        ("tests/window.c", TEST.to_owned()),
        (".gitignore", "build/\n*.vtlg\n*.key\n".to_owned()),
    ];
    for (file, text) in files {
        let path = dir.join(file);
        let folder = path.parent().expect("below the directory");
        fs::create_dir_all(folder)
            .and_then(|()| fs::write(&path, text))
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    eprintln!("{name}/{SOURCE} is what to change; next: cd {name} && vtl graft build");
    Ok(())
}

/// A table test to begin with.
const TEST: &str = include_str!("template/window.c");

fn project_file(name: &str, gid: u16) -> String {
    format!(
        "# What the package says besides what the object says itself. Name, gid and services must\n\
         # agree with VTL_GRAFT in {SOURCE}.\n\
         name = \"{name}\"\n\
         # Versions with the same first number lay the state of a session out alike.\n\
         version = \"0.1.0\"\n\
         gid = {gid}\n\
         services = [\"reliable\", \"ordered\", \"flow-control\"]\n\
         # The kernel loads programs only under a licence compatible with the GPL.\n\
         licence = \"GPL-2.0-only\"\n\
         author = \"nobody yet\"\n"
    )
}

/// The source of a graft that comes with VTL, under another name.
fn source(name: &str, gid: u16) -> String {
    let (_, text) = SOURCES
        .iter()
        .find(|(known, _)| *known == TEMPLATE)
        .expect("the template is part of this build");
    let at = text.find("VTL_GRAFT(").expect("it describes itself");
    let (composition, description) = text.split_at(at);
    let number = description
        .split_once(", ")
        .and_then(|(_, rest)| rest.split_once(','))
        .map(|(number, _)| number)
        .expect("its gid is its second word");
    let old = format!("VTL_GRAFT(\"{TEMPLATE}\", {number},");
    assert!(description.starts_with(&old), "as the grafts are written");
    composition.to_owned()
        + &description.replacen(&old, &format!("VTL_GRAFT(\"{name}\", {gid},"), 1)
}

/// A clang that compiles for eBPF.
pub fn clang() -> anyhow::Result<String> {
    let wanted = std::env::var("CLANG").ok();
    let candidates = match &wanted {
        Some(clang) => vec![clang.as_str()],
        None => vec!["clang-19", "clang"],
    };
    for clang in &candidates {
        let mut version = Command::new(clang);
        version
            .arg("--version")
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        if version.status().is_ok_and(|s| s.success()) {
            return Ok((*clang).to_owned());
        }
    }
    bail!(
        "{} was not found, and grafts are compiled with it: apt install clang-19 (CLANG=… names another)",
        candidates.join(" or ")
    )
}

/// `vtl graft build`
pub(crate) fn build(args: &BuildArgs) -> anyhow::Result<()> {
    let project = Project::open(&args.project.dir)?;
    let (manifest, _) = compile(&project)?;
    eprintln!(
        "{}: graft \"{}\", gid {}, {}, of {}",
        project.dir.join(OBJECT).display(),
        manifest.name,
        manifest.gid,
        manifest.services,
        manifest.functions.join(", ")
    );
    Ok(())
}

/// Compiles it, and returns what its package would contain: manifest and object.
pub(super) fn compile(project: &Project) -> anyhow::Result<(Manifest, Vec<u8>)> {
    let clang = clang()?;
    let include = project.headers()?;
    let path = project.dir.join(OBJECT);
    compile_source(&clang, &include, &project.dir.join(SOURCE), &path)?;
    let object = project.object()?;
    Ok((project.describe(&object)?, object))
}

/// Compiles one source against the headers in `include`.
pub fn compile_source(
    clang: &str,
    include: &Path,
    source: &Path,
    object: &Path,
) -> anyhow::Result<()> {
    let status = Command::new(clang)
        .args(["-target", "bpf", "-g"])
        .args(flags::CLANG)
        .arg(format!("-I{}", include.display()))
        .args(["-c", "-o"])
        .arg(object)
        .arg(source)
        .status()
        .with_context(|| format!("cannot run {clang}"))?;
    if !status.success() {
        bail!("{} does not compile: see above", source.display());
    }
    Ok(())
}

/// `vtl graft check`
pub(crate) fn check(args: &CheckArgs) -> anyhow::Result<()> {
    let project = Project::open(&args.project.dir)?;
    let object = project.object()?;
    let manifest = project.describe(&object)?;
    if !nix::unistd::geteuid().is_root() {
        return Err(Failure::permission(
            "the object contains nothing that is not allowed, but only root may ask the verifier: use sudo",
        ));
    }
    vtl_bpf::silence();
    let plane = DataPlane::load()?;
    let mut refused = 0;
    let mut text = String::new();
    for verdict in check::check(plane.loader(), &object)? {
        use std::fmt::Write;
        let _ = match verdict.complaint() {
            None => writeln!(
                text,
                "{}: accepted; {} instructions, {} looked at, {:.1} ms",
                verdict.program,
                verdict.instructions,
                verdict.processed,
                verdict.took.as_secs_f64() * 1000.0
            ),
            Some(complaint) => {
                refused += 1;
                writeln!(text, "{}: refused: {complaint}", verdict.program)
            }
        };
        if args.log && !verdict.accepted {
            text.push_str(&verdict.log);
        }
    }
    output::print(&text)?;
    if refused > 0 {
        bail!(
            "the verifier refuses {refused} programs of \"{}\"",
            manifest.name
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn source__is_the_template_under_another_name() {
        let text = source("mine", 41);
        assert!(text.contains("VTL_GRAFT(\"mine\", 41,"), "{text}");
        assert!(text.contains("#include \"tf/loss.h\""), "{text}");
        let project = manifest::Project::parse(&project_file("mine", 41)).unwrap();
        assert_eq!((project.name.as_str(), project.gid), ("mine", 41));
    }
}
