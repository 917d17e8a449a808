//! The programs under test, built before the first test that wants one: no test runs yesterday's daemon.

use std::{
    path::{Path, PathBuf},
    process::Command,
    sync::OnceLock,
};

use super::run;

/// Where this repository lies.
pub(crate) fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// A file of `tests/`.
pub(crate) fn source(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(name)
}

/// The `vtl` command.
pub(crate) fn vtl() -> PathBuf {
    built("vtl")
}

/// The daemon.
pub(crate) fn vtld() -> PathBuf {
    built("vtld")
}

/// Copies a program, by another process: one that is started at this moment would keep a file open for writing that
/// was written here, and the kernel executes no such file.
pub(crate) fn copy_program(from: impl AsRef<Path>, to: impl AsRef<Path>) {
    run(Command::new("cp").args([from.as_ref(), to.as_ref()]));
}

/// `tests/helper`.
pub(crate) fn helper() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_vtl-e2e-helper"))
}

/// Python's interpreter itself: what is in the path may be a slow wrapper.
pub(crate) fn python3() -> &'static str {
    static PATH: OnceLock<String> = OnceLock::new();
    PATH.get_or_init(|| {
        let ask = ["-c", "import sys; print(sys.executable)"];
        let output = Command::new("python3").args(ask).output();
        let path = String::from_utf8(output.expect("python3 runs").stdout);
        path.expect("UTF-8").trim().to_owned()
    })
}

/// An example in Rust.
pub(crate) fn example(name: &str) -> PathBuf {
    built("examples").join(name)
}

/// A program in the directory that cargo builds to, by the profile of this test.
fn built(name: &str) -> PathBuf {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    let directory = BUILT.get_or_init(|| {
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let mut command = Command::new(cargo);
        command
            .current_dir(repository())
            // As `make build` does: another selection of packages would be another build.
            .args(["build", "--workspace", "--lib", "--bins", "--examples"])
            .args(["--locked", "--quiet"]);
        if !cfg!(debug_assertions) {
            command.arg("--release");
        }
        run(as_from_a_shell(&mut command));
        let test = std::env::current_exe().expect("this program's path");
        // target/PROFILE/deps/e2e-...
        let directory = test.ancestors().nth(2).expect("below the target directory");
        directory.to_owned()
    });
    directory.join(name)
}

/// Without what cargo tells tests of their package: build scripts (ring's) take it for a change, and cargo would
/// build everything above them anew, now and the next time.
fn as_from_a_shell(command: &mut Command) -> &mut Command {
    for (name, _) in std::env::vars_os() {
        let about_package = ["CARGO_PKG_", "CARGO_MANIFEST_"];
        if about_package
            .iter()
            .any(|prefix| name.to_string_lossy().starts_with(prefix))
        {
            command.env_remove(name);
        }
    }
    command
}

/// The directory with the C library, built now.
pub(crate) fn library() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join("libvtl");
        let mut command = Command::new(repository().join("scripts/libvtl.sh"));
        command.arg(&directory).env("VTL_ARCHIVE", archive());
        run(&mut command);
        directory
    })
}

/// The C library as cargo leaves it, for `scripts/libvtl.sh`.
pub(crate) fn archive() -> PathBuf {
    built("libvtl_c.a")
}
