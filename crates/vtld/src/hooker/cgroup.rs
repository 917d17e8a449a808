//! Control groups: where they are, which this daemon made, and what was left by dead ones.

use std::{
    collections::BTreeSet,
    ffi::OsStr,
    fs, io, mem,
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
    path::{Path, PathBuf},
};

use super::error::HookerError;

/// Every directory that a daemon makes begins with this, its process id follows.
const PREFIX: &str = "vtl-";
/// What follows that in the name of a program's group: a number.
const RUN: &str = ".run-";

/// The name of the folder of the daemon that made a program's group.
fn maker(group: &Path) -> Option<&str> {
    let name = group.file_name()?.to_str()?;
    let (maker, _) = name.split_once(RUN)?;
    maker.starts_with(PREFIX).then_some(maker)
}

fn at(path: &Path) -> impl FnOnce(io::Error) -> HookerError {
    let path = path.to_owned();
    move |source| HookerError::Cgroup { path, source }
}

/// The cgroup v2 hierarchy as this process sees it.
pub(super) struct Hierarchy {
    root: PathBuf,
    own: PathBuf,
    /// Keeps a private mount alive.
    _mount: Option<OwnedFd>,
}

impl Hierarchy {
    /// Looks for a mounted hierarchy; in a mount namespace without one (`ip netns exec` makes
    /// such) mounts one that nobody else sees.
    pub(super) fn find() -> Result<Self, HookerError> {
        let mounts = fs::read_to_string("/proc/self/mountinfo").map_err(HookerError::NoCgroup2)?;
        let visible = |path: &PathBuf| path.join("cgroup.procs").exists();
        let (root, mount) = match mounts.lines().filter_map(mount_point).find(visible) {
            Some(root) => (root, None),
            None => {
                let mount = private_mount().map_err(HookerError::NoMount)?;
                let root = format!("/proc/self/fd/{}", mount.as_raw_fd());
                (PathBuf::from(root), Some(mount))
            }
        };
        let own = group_of(&root, "self").map_err(HookerError::NoCgroup2)?;
        Ok(Self {
            root,
            own,
            _mount: mount,
        })
    }

    /// The group that a process is in.
    pub(super) fn group_of(&self, pid: u32) -> Result<PathBuf, HookerError> {
        let group = group_of(&self.root, &pid.to_string());
        group.map_err(at(Path::new(&format!("/proc/{pid}/cgroup"))))
    }

    /// The topmost group visible here.
    pub(super) fn root(&self) -> &Path {
        &self.root
    }

    /// Where in the file system a group is: one that is named as seen from the root, or by its path
    /// in the file system.
    pub(super) fn place(&self, path: &Path) -> PathBuf {
        let inside = path.strip_prefix("/").unwrap_or(path);
        let inside = self.root.join(inside);
        if inside.join("cgroup.procs").exists() {
            inside
        } else {
            path.to_owned()
        }
    }

    /// A group as seen from the root, for [`Hierarchy::place`] of another daemon.
    pub(super) fn inside(&self, path: &Path) -> PathBuf {
        path.strip_prefix(&self.root)
            .map_or_else(|_| path.to_owned(), |below| Path::new("/").join(below))
    }

    /// How far below the root a group is; `None`: it is not below.
    pub(super) fn depth(&self, path: &Path) -> Option<u32> {
        let place = self.place(path);
        let below = place.strip_prefix(&self.root).ok()?;
        below.components().count().try_into().ok()
    }

    /// The group that this process is in.
    pub(super) fn own(&self) -> &Path {
        &self.own
    }

    /// Removes the groups of daemons that died, after moving their living members up.
    pub(super) fn sweep(&self) {
        let is_folder = |path: &PathBuf| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            name.starts_with(PREFIX) && !name.contains(RUN)
        };
        let folders = below(&self.root).into_iter().filter(is_folder);
        let dead: Vec<_> = folders
            .filter_map(|path| Some((lock(&path)?, path)))
            .collect();
        // A folder that is not here may be above this root, and its daemon alive.
        let is_dead = |maker: &str| {
            let folder = self.root.join(maker);
            dead.iter().any(|(_, path)| *path == folder)
        };
        sweep_groups(&self.root, &is_dead);
        for (lock, folder) in dead {
            remove(&folder, &self.root);
            drop(lock);
        }
    }
}

/// Removes the groups of programs below this one that dead daemons have made.
fn sweep_groups(group: &Path, is_dead: &dyn Fn(&str) -> bool) {
    for path in below(group) {
        sweep_groups(&path, is_dead);
        if maker(&path).is_some_and(is_dead) {
            remove(&path, group);
        }
    }
}

/// The groups in a group.
fn below(group: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(group).into_iter().flatten().flatten();
    let groups = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    groups.map(|entry| entry.path()).collect()
}

/// The group of a process, below a root.
fn group_of(root: &Path, process: &str) -> io::Result<PathBuf> {
    let groups = fs::read_to_string(format!("/proc/{process}/cgroup"))?;
    let mut lines = groups.lines();
    let group = root.join(
        lines
            .find_map(|line| line.strip_prefix("0::/"))
            .unwrap_or(""),
    );
    // In a container the path may be one of the host's.
    Ok(match group.join("cgroup.procs").exists() {
        true => group,
        false => root.to_owned(),
    })
}

/// The mount point in a line of mountinfo, if that is a cgroup v2 hierarchy.
fn mount_point(line: &str) -> Option<PathBuf> {
    let (mount, kind) = line.split_once(" - ")?;
    if kind.split(' ').next() != Some("cgroup2") {
        return None;
    }
    let path = mount.split(' ').nth(4)?;
    Some(path.replace("\\040", " ").into())
}

fn private_mount() -> io::Result<OwnedFd> {
    const FSCONFIG_CMD_CREATE: u32 = 6;
    let descriptor = |result: libc::c_long| {
        if result < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: a new descriptor that nobody else owns.
        Ok(unsafe { OwnedFd::from_raw_fd(result as i32) })
    };
    // SAFETY: the name is a C string; fsopen copies it.
    let context = descriptor(unsafe { libc::syscall(libc::SYS_fsopen, c"cgroup2".as_ptr(), 1) })?;
    let null = std::ptr::null::<u8>();
    // SAFETY: this command takes no key and no value.
    let made = unsafe {
        let context = context.as_raw_fd();
        libc::syscall(
            libc::SYS_fsconfig,
            context,
            FSCONFIG_CMD_CREATE,
            null,
            null,
            0,
        )
    };
    if made < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: no pointers; 1 is FSMOUNT_CLOEXEC.
    descriptor(unsafe { libc::syscall(libc::SYS_fsmount, context.as_raw_fd(), 1, 0) })
}

/// Holds the directory for as long as its daemon lives, or who has got the descriptor from it; the kernel lets go
/// of it at any death.
fn lock(path: &Path) -> Option<OwnedFd> {
    let folder = fs::File::open(path).ok()?;
    folder.try_lock().ok()?;
    Some(folder.into())
}

/// Moves all members of the group and of those below it to `parent`, and removes them.
fn remove(path: &Path, parent: &Path) {
    for entry in fs::read_dir(path).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            remove(&entry.path(), parent);
        }
    }
    // A member may fork while the others are moved.
    for _ in 0..100 {
        for pid in members(path) {
            let _ = move_to(pid, parent);
        }
        match fs::remove_dir(path) {
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => continue,
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                tracing::warn!(path = %path.display(), %error, "cannot remove a cgroup");
            }
            _ => (),
        }
        return;
    }
}

/// The processes in a group, not counting those in groups below it.
pub(super) fn members(path: &Path) -> Vec<u32> {
    let procs = fs::read_to_string(path.join("cgroup.procs")).unwrap_or_default();
    procs.lines().filter_map(|line| line.parse().ok()).collect()
}

fn move_to(pid: u32, path: &Path) -> io::Result<()> {
    fs::write(path.join("cgroup.procs"), pid.to_string())
}

/// The groups that this daemon makes for the programs that it runs: each below the one that the program was in, whose
/// limits it so keeps. An empty folder below the root shows by its lock that the daemon lives.
pub(super) struct Runs {
    root: PathBuf,
    base: PathBuf,
    /// Folders of this daemon, and of former ones, whose programs still run.
    kept: Vec<(PathBuf, OwnedFd)>,
    /// Groups of programs.
    groups: BTreeSet<PathBuf>,
    made: u32,
    is_left: bool,
}

impl Runs {
    /// `groups`: folders that a former daemon has left to this one, as seen from the root, and what holds them.
    pub(super) fn new(
        hierarchy: &Hierarchy,
        groups: Vec<(PathBuf, OwnedFd)>,
    ) -> Result<Self, HookerError> {
        let root = hierarchy.root().to_owned();
        let place = |(path, lock): (PathBuf, OwnedFd)| (hierarchy.place(&path), lock);
        let mut kept: Vec<_> = groups.into_iter().map(place).collect();
        // A second daemon in the same process, or one with the same number in another PID
        // namespace, has the first names.
        for attempt in 0..1000 {
            let pid = std::process::id();
            let base = root.join(format!("{PREFIX}{pid}-{attempt}"));
            match fs::create_dir(&base) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
                result => result.map_err(at(&base))?,
            }
            // Another daemon's sweep may have been faster.
            if let Some(lock) = lock(&base)
                && base.exists()
            {
                kept.push((base.clone(), lock));
                return Ok(Self {
                    root,
                    base,
                    kept,
                    groups: BTreeSet::new(),
                    made: 0,
                    is_left: false,
                });
            }
        }
        Err(at(&root)(io::ErrorKind::AlreadyExists.into()))
    }

    /// A new, empty group for a program that is in this one.
    pub(super) fn make(&mut self, from: &Path) -> Result<PathBuf, HookerError> {
        self.made += 1;
        // A program's group is no place for another's, which may run for longer.
        let is_ours = maker(from).is_some();
        let parent = from.parent().filter(|_| is_ours).unwrap_or(from);
        let base = self.base.file_name().unwrap_or_default().to_string_lossy();
        let path = parent.join(format!("{base}{RUN}{}", self.made));
        fs::create_dir(&path).map_err(at(&path))?;
        self.groups.insert(path.clone());
        Ok(path)
    }

    /// Keeps a group that a former daemon has made.
    pub(super) fn keep(&mut self, path: &Path) {
        self.groups.insert(path.to_owned());
    }

    /// Moves a process with all its threads.
    pub(super) fn enter(pid: u32, path: &Path) -> Result<(), HookerError> {
        move_to(pid, path).map_err(at(&path.join("cgroup.procs")))
    }

    /// Removes a group made here; those who are still in it leave it.
    pub(super) fn remove(&mut self, path: &Path) {
        remove(path, path.parent().unwrap_or(&self.root));
        self.groups.remove(path);
    }

    /// The folders, which are another daemon's from now on, but for those without programs; and what holds them.
    pub(super) fn leave(&mut self) -> Vec<(PathBuf, OwnedFd)> {
        self.is_left = true;
        let mut folders = mem::take(&mut self.kept);
        let groups = &self.groups;
        let is_used = |folder: &Path| {
            let name = folder.file_name().and_then(OsStr::to_str);
            groups.iter().any(|group| maker(group) == name)
        };
        // One with groups in it, of a former version's, cannot be removed.
        folders.retain(|(path, _)| is_used(path) || fs::remove_dir(path).is_err());
        folders
    }

    /// Removes all of them.
    pub(super) fn close(&self) {
        if !self.is_left {
            for path in &self.groups {
                remove(path, path.parent().unwrap_or(&self.root));
            }
            for (path, _) in &self.kept {
                remove(path, &self.root);
            }
        }
    }
}

impl Drop for Runs {
    fn drop(&mut self) {
        self.close();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mount_point__takes_cgroup2_only() {
        let v2 = "35 24 0:30 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw";
        let v1 = "36 24 0:31 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu";
        assert_eq!(mount_point(v2), Some("/sys/fs/cgroup/unified".into()));
        assert_eq!(mount_point(v1), None);
        assert_eq!(mount_point(""), None);
    }
}
