//! `vtl graft test`: the graft as a program of this machine, on tables and on simulated paths, and
//! then in the kernel.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, bail};
use clap::Args;

use super::project::{self, Project, clang};
use crate::lab;

/// Arguments of `vtl graft test`.
#[derive(Debug, Args)]
#[command(after_help = "\
Compiles each file of tests/ with the graft and runs it. Then carries 2 MB between two simulated\n\
hosts over 24 paths: round trips of 1 to 600 ms, 0 to 5 % loss, with and without reordering. The\n\
simulation is seeded: the same seed gives the same packets. Needs neither root nor the kernel.\n\
As root, it then loads the graft on two hosts in namespaces of their own, and carries data over a\n\
link of 10 ms, 100 Mbit/s and 1 % loss: every byte, or, if the graft is not reliable, messages.")]
pub(crate) struct TestArgs {
    #[command(flatten)]
    project: super::ProjectArgs,
    /// Other chances of loss and reordering
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

pub(crate) fn test(args: &TestArgs) -> anyhow::Result<()> {
    let project = Project::open(&args.project.dir)?;
    let compiler = NativeCompiler::new(&project)?;
    let tests = project.dir.join("tests");
    let mut files: Vec<PathBuf> = match fs::read_dir(&tests) {
        Ok(entries) => entries
            .filter_map(|entry| Some(entry.ok()?.path()))
            .collect(),
        Err(_) => Vec::new(),
    };
    files.retain(|path| path.extension().is_some_and(|e| e == "c"));
    files.sort();
    for file in &files {
        let name = file.file_stem().unwrap_or_default().to_string_lossy();
        let program = compiler.build(&format!("test-{name}"), &[file])?;
        run(&program, &[]).with_context(|| format!("{} fails", file.display()))?;
        eprintln!("{}: passed", file.display());
    }
    let graft = project.dir.join(project::SOURCE);
    let simulate = compiler.native.join("simulate.c");
    let program = compiler.build("simulate", &[&graft, &simulate])?;
    run(&program, &[&args.seed.to_string()]).with_context(|| {
        format!(
            "\"{}\" does not keep its promise on every path: see above",
            project.manifest.name
        )
    })?;
    in_kernel(&project)
}

/// The last part: the graft in the kernel, with real packets, by the program that makes hosts for it.
fn in_kernel(project: &Project) -> anyhow::Result<()> {
    let skipped = |why: &str| {
        eprintln!("namespaces: skipped: {why}");
        Ok(())
    };
    if !nix::unistd::geteuid().is_root() {
        return skipped("needs root: use sudo");
    }
    let Ok(program) = lab::find() else {
        return skipped("needs the program vtl-lab, beside `vtl` or in the PATH");
    };
    project::compile(project)?;
    lab::exec(&program, ["graft-test".as_ref(), project.dir.as_os_str()])
}

/// Compiles grafts and their tests into programs of this machine.
struct NativeCompiler<'a> {
    project: &'a Project,
    clang: String,
    include: PathBuf,
    native: PathBuf,
}

impl<'a> NativeCompiler<'a> {
    fn new(project: &'a Project) -> anyhow::Result<Self> {
        let include = project.headers()?;
        Ok(Self {
            project,
            clang: clang()?,
            native: include.join("native"),
            include,
        })
    }

    /// A program of these sources, one of which is the graft or includes it, and the simulator's.
    /// Undefined behaviour ends it.
    fn build(&self, name: &str, sources: &[&Path]) -> anyhow::Result<PathBuf> {
        let program = self.project.dir.join("build").join(name);
        let mut command = Command::new(&self.clang);
        command
            .args([
                "-std=gnu11",
                "-g",
                "-O2",
                "-fno-strict-aliasing",
                "-Wall",
                "-Wextra",
            ])
            .args([
                "-fsanitize=undefined",
                "-fno-sanitize=alignment",
                "-fsanitize-trap=undefined",
            ])
            .arg("-DVTL_NATIVE_OPS=vtl_graft_ops")
            // A table does not use all that it includes.
            .arg("-Wno-unused-function")
            // Its vtl/graft.h takes the place of the kernel's.
            .arg(format!("-I{}", self.native.display()))
            .arg(format!("-I{}", self.include.display()))
            .arg(format!("-I{}", self.project.dir.display()));
        let status = command
            .args(sources)
            .args(["alone.c", "native.c"].map(|file| self.native.join(file)))
            .arg("-o")
            .arg(&program)
            .status()
            .with_context(|| format!("cannot run {}", self.clang))?;
        if !status.success() {
            bail!("{name} does not compile: see above");
        }
        Ok(program)
    }
}

fn run(program: &Path, args: &[&str]) -> anyhow::Result<()> {
    let path = fs::canonicalize(program)?;
    let status = Command::new(&path)
        .args(args)
        .status()
        .with_context(|| format!("cannot run {}", path.display()))?;
    if !status.success() {
        bail!("it ended with {status}");
    }
    Ok(())
}
