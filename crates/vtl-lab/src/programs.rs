//! VTL's own programs, which measurements start.

use std::env;
use std::path::PathBuf;

use anyhow::{Context, bail};

/// Where VTL's own programs are.
#[derive(Clone, Debug)]
pub(crate) struct Programs {
    /// This very program, which also is the endpoints of measured transfers: see
    /// [`agent`](crate::bench).
    pub(crate) lab: PathBuf,
    /// The `vtl` command.
    pub(crate) vtl: PathBuf,
    /// The daemon.
    pub(crate) vtld: PathBuf,
}

impl Programs {
    /// This executable, and the command and the daemon beside it.
    ///
    /// # Errors
    /// One of them is missing.
    pub(crate) fn find() -> anyhow::Result<Self> {
        let lab = env::current_exe().context("cannot find this program's own file")?;
        let beside = |name: &str| {
            let program = lab.with_file_name(name);
            if !program.exists() {
                bail!("{} is missing: run `make build`", program.display());
            }
            Ok(program)
        };
        let (vtl, vtld) = (beside("vtl")?, beside("vtld")?);
        Ok(Self { lab, vtl, vtld })
    }
}
