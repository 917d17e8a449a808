//! The programs that measurements start.

use std::path::{Path, PathBuf};
use std::{env, io};

use anyhow::{Context, bail};

/// Where VTL's own programs are.
#[derive(Clone, Debug)]
pub struct Programs {
    /// The `vtl` command, which also is the endpoints of measured transfers: see
    /// [`crate::agent::main`].
    pub vtl: PathBuf,
    /// The daemon.
    pub vtld: PathBuf,
}

impl Programs {
    /// This executable, which must be `vtl`, and the daemon beside it.
    ///
    /// # Errors
    /// The daemon is missing.
    pub fn find() -> anyhow::Result<Self> {
        let vtl = env::current_exe().context("cannot find this program's own file")?;
        let vtld = vtl.with_file_name("vtld");
        if !vtld.exists() {
            bail!("{} is missing: run `make build`", vtld.display());
        }
        Ok(Self { vtl, vtld })
    }
}

/// Finds a program where a shell of root's would.
///
/// # Errors
/// `NotFound`.
pub fn find_program(name: &str) -> io::Result<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path)
        .chain([PathBuf::from("/usr/sbin"), PathBuf::from("/sbin")])
        .map(|dir| dir.join(name))
        .find(|candidate| is_executable(candidate))
        .ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, "not installed"))
}

fn is_executable(path: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt;
    path.metadata()
        .is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
}
