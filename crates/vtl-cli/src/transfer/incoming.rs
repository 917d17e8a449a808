//! A file that appears under its name only when it is whole.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use nix::fcntl::{AT_FDCWD, AtFlags, RenameFlags, renameat2};
use nix::unistd::linkat;

/// The file while it is being received. It has no name at all until it is kept, so that nothing is
/// left behind whatever ends this process; where the file system cannot do that, it has a hidden
/// name beside its own.
#[derive(Debug)]
pub(super) struct Incoming {
    file: File,
    named: bool,
    hidden: PathBuf,
    path: PathBuf,
    force: bool,
}

impl Incoming {
    /// Begins a file that is to become `path`.
    pub(super) fn create(path: PathBuf, force: bool) -> anyhow::Result<Self> {
        let unnamed = unnamed_beside(&path).ok();
        Self::begin(path, force, unnamed)
    }

    fn begin(path: PathBuf, force: bool, unnamed: Option<File>) -> anyhow::Result<Self> {
        if path.exists() && !force {
            return Err(taken(&path));
        }
        let name = path.file_name().context("the path names no file")?;
        let hidden = format!(".{}.vtl-{}", name.to_string_lossy(), std::process::id());
        let hidden = path.with_file_name(hidden);
        let named = unnamed.is_none();
        let file = match unnamed {
            Some(file) => file,
            None => File::create_new(&hidden)
                .with_context(|| format!("cannot write {}", path.display()))?,
        };
        Ok(Self {
            file,
            named,
            hidden,
            path,
            force,
        })
    }

    /// Appends to the file.
    pub(super) fn write_all(&mut self, bytes: &[u8]) -> anyhow::Result<()> {
        self.file
            .write_all(bytes)
            .with_context(|| format!("cannot write {}", self.path.display()))
    }

    /// Gives the file its name, once its bytes are on the disk.
    pub(super) fn keep(mut self) -> anyhow::Result<PathBuf> {
        self.file
            .sync_all()
            .with_context(|| format!("cannot write {}", self.path.display()))?;
        match self.give_name() {
            Ok(()) => Ok(self.path.clone()),
            Err(err) if err.kind() == io::ErrorKind::AlreadyExists => Err(taken(&self.path)),
            Err(err) => bail!("cannot make {}: {err}", self.path.display()),
        }
    }

    /// Without `force`, also a file that came into being meanwhile stays as it is.
    fn give_name(&mut self) -> io::Result<()> {
        if !self.named && !self.force {
            return self.link(&self.path);
        }
        if !self.named {
            self.link(&self.hidden)?;
            self.named = true;
        }
        if self.force {
            fs::rename(&self.hidden, &self.path)?;
        } else {
            let flags = RenameFlags::RENAME_NOREPLACE;
            renameat2(AT_FDCWD, &self.hidden, AT_FDCWD, &self.path, flags)?;
        }
        self.named = false;
        Ok(())
    }

    /// Names an unnamed file, as open(2) describes it.
    fn link(&self, name: &Path) -> io::Result<()> {
        let unnamed = PathBuf::from(format!("/proc/self/fd/{}", self.file.as_raw_fd()));
        Ok(linkat(
            AT_FDCWD,
            &unnamed,
            AT_FDCWD,
            name,
            AtFlags::AT_SYMLINK_FOLLOW,
        )?)
    }
}

impl Drop for Incoming {
    fn drop(&mut self) {
        if self.named {
            let _ = fs::remove_file(&self.hidden);
        }
    }
}

fn unnamed_beside(path: &Path) -> io::Result<File> {
    let directory = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    OpenOptions::new()
        .write(true)
        .custom_flags(libc::O_TMPFILE)
        .mode(0o666)
        .open(directory)
}

fn taken(path: &Path) -> anyhow::Error {
    anyhow::anyhow!(
        "{} exists: use --force to replace it, or --output",
        path.display()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scratch(name: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("vtl-incoming-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir(&path).expect("made");
        path
    }

    fn listing(dir: &Path) -> Vec<String> {
        let entries = fs::read_dir(dir).expect("listed").flatten();
        entries
            .map(|e| e.file_name().to_string_lossy().into_owned())
            .collect()
    }

    /// With a file of no name, or with the hidden name of file systems that lack those.
    fn begin(dir: &Path, force: bool, unnamed: bool) -> Incoming {
        let path = dir.join("f");
        if unnamed {
            Incoming::create(path, force).expect("begun")
        } else {
            Incoming::begin(path, force, None).expect("begun")
        }
    }

    #[test]
    fn keep__replaces_only_with_force() {
        let dir = scratch("keep");
        for force in [true, false] {
            for unnamed in [true, false] {
                let mut incoming = begin(&dir, force, unnamed);
                fs::write(dir.join("f"), "old").expect("written");
                incoming.write_all(b"new").expect("written");
                assert_eq!(incoming.keep().is_ok(), force);
                let text = fs::read_to_string(dir.join("f")).expect("read");
                assert_eq!(text, if force { "new" } else { "old" });
                fs::remove_file(dir.join("f")).expect("removed");
            }
            assert!(listing(&dir).is_empty());
        }
        fs::remove_dir_all(dir).expect("removed");
    }

    #[test]
    fn drop__leaves_nothing() {
        let dir = scratch("drop");
        for unnamed in [true, false] {
            let mut incoming = begin(&dir, false, unnamed);
            incoming.write_all(b"part").expect("written");
            drop(incoming);
            assert!(listing(&dir).is_empty());
        }
        fs::remove_dir_all(dir).expect("removed");
    }
}
