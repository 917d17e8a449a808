//! Cgroups: the hierarchy, the ones created by this daemon, and removal of those left by dead daemons.

use std::{
    collections::BTreeSet,
    ffi::OsStr,
    fs, io, mem,
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
    path::{Path, PathBuf},
};

use super::error::HookerError;

/// Name prefix of every directory that a daemon creates; its process id follows.
const PREFIX: &str = "vtl-";
/// Infix in the name of a program's cgroup; a number follows.
const RUN: &str = ".run-";

/// The folder name of the daemon that created a program's cgroup.
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
    /// Finds a mounted hierarchy; in a mount namespace without one (as `ip netns exec` creates),
    /// mounts one privately.
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

    /// The cgroup of a process.
    pub(super) fn group_of(&self, pid: u32) -> Result<PathBuf, HookerError> {
        let group = group_of(&self.root, &pid.to_string());
        group.map_err(at(Path::new(&format!("/proc/{pid}/cgroup"))))
    }

    /// The topmost cgroup visible here.
    pub(super) fn root(&self) -> &Path {
        &self.root
    }

    /// Resolves a cgroup, given relative to the root or by its path in the file system, to the latter.
    pub(super) fn place(&self, path: &Path) -> PathBuf {
        let inside = path.strip_prefix("/").unwrap_or(path);
        let inside = self.root.join(inside);
        if inside.join("cgroup.procs").exists() {
            inside
        } else {
            path.to_owned()
        }
    }

    /// The path of a cgroup relative to the root, for [`Hierarchy::place`] of another daemon.
    pub(super) fn inside(&self, path: &Path) -> PathBuf {
        path.strip_prefix(&self.root)
            .map_or_else(|_| path.to_owned(), |below| Path::new("/").join(below))
    }

    /// Depth of a cgroup below the root; `None` if it is not below.
    pub(super) fn depth(&self, path: &Path) -> Option<u32> {
        let place = self.place(path);
        let below = place.strip_prefix(&self.root).ok()?;
        below.components().count().try_into().ok()
    }

    /// The cgroup of this process.
    pub(super) fn own(&self) -> &Path {
        &self.own
    }

    /// Removes the cgroups of dead daemons, after moving their live members up.
    pub(super) fn sweep(&self) {
        let is_folder = |path: &PathBuf| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            name.starts_with(PREFIX) && !name.contains(RUN)
        };
        let folders = below(&self.root).into_iter().filter(is_folder);
        let dead: Vec<_> = folders
            .filter_map(|path| Some((lock(&path)?, path)))
            .collect();
        // Only folders that are here: one above this root may belong to a live daemon.
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

/// Removes the programs' cgroups below this one that dead daemons have created.
fn sweep_groups(group: &Path, is_dead: &dyn Fn(&str) -> bool) {
    for path in below(group) {
        sweep_groups(&path, is_dead);
        if maker(&path).is_some_and(is_dead) {
            remove(&path, group);
        }
    }
}

/// The children of a cgroup.
fn below(group: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(group).into_iter().flatten().flatten();
    let groups = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    groups.map(|entry| entry.path()).collect()
}

/// The cgroup of a process, below a root.
fn group_of(root: &Path, process: &str) -> io::Result<PathBuf> {
    let groups = fs::read_to_string(format!("/proc/{process}/cgroup"))?;
    let mut lines = groups.lines();
    let group = root.join(
        lines
            .find_map(|line| line.strip_prefix("0::/"))
            .unwrap_or(""),
    );
    // In a container the path may be the host's.
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

/// Locks a directory until its daemon, and any that has inherited the descriptor, dies: the kernel releases the lock.
fn lock(path: &Path) -> Option<OwnedFd> {
    let folder = fs::File::open(path).ok()?;
    folder.try_lock().ok()?;
    Some(folder.into())
}

/// Removes a cgroup and its descendants, after moving all members to `parent`.
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
                tracing::warn!(path = %path.display(), %error, "hooks: cgroup left behind: it cannot be removed");
            }
            _ => (),
        }
        return;
    }
    tracing::warn!(path = %path.display(), "hooks: cgroup left behind: its members fork faster than they are moved");
}

/// The processes in a cgroup, without its descendants.
pub(super) fn members(path: &Path) -> Vec<u32> {
    let procs = fs::read_to_string(path.join("cgroup.procs")).unwrap_or_default();
    procs.lines().filter_map(|line| line.parse().ok()).collect()
}

fn move_to(pid: u32, path: &Path) -> io::Result<()> {
    fs::write(path.join("cgroup.procs"), pid.to_string())
}

/// The cgroups that this daemon creates for the programs that it runs: each below the program's former one, whose
/// limits stay in force. The lock of an empty folder below the root shows that the daemon is alive.
pub(super) struct Runs {
    root: PathBuf,
    base: PathBuf,
    /// Folders, with their locks, of this daemon and of former ones whose programs still run.
    kept: Vec<(PathBuf, OwnedFd)>,
    /// Cgroups of programs.
    groups: BTreeSet<PathBuf>,
    made: u32,
    is_left: bool,
}

impl Runs {
    /// `groups`: folders handed over by a former daemon, relative to the root, and their locks.
    pub(super) fn new(
        hierarchy: &Hierarchy,
        groups: Vec<(PathBuf, OwnedFd)>,
    ) -> Result<Self, HookerError> {
        let root = hierarchy.root().to_owned();
        let place = |(path, lock): (PathBuf, OwnedFd)| (hierarchy.place(&path), lock);
        let mut kept: Vec<_> = groups.into_iter().map(place).collect();
        // Names may be taken, by a second daemon in this process or by the same process id in another PID
        // namespace.
        for attempt in 0..1000 {
            let pid = std::process::id();
            let base = root.join(format!("{PREFIX}{pid}-{attempt}"));
            match fs::create_dir(&base) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
                result => result.map_err(at(&base))?,
            }
            // Race: another daemon's sweep may have removed it.
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

    /// Creates a cgroup for a program that is in `from`.
    pub(super) fn make(&mut self, from: &Path) -> Result<PathBuf, HookerError> {
        self.made += 1;
        // Not below another program's cgroup: this one may run for longer.
        let is_ours = maker(from).is_some();
        let parent = from.parent().filter(|_| is_ours).unwrap_or(from);
        let base = self.base.file_name().unwrap_or_default().to_string_lossy();
        let path = parent.join(format!("{base}{RUN}{}", self.made));
        fs::create_dir(&path).map_err(at(&path))?;
        self.groups.insert(path.clone());
        Ok(path)
    }

    /// Adopts a cgroup that a former daemon has created.
    pub(super) fn keep(&mut self, path: &Path) {
        self.groups.insert(path.to_owned());
    }

    /// Moves a process, with all its threads, to a cgroup.
    pub(super) fn enter(pid: u32, path: &Path) -> Result<(), HookerError> {
        move_to(pid, path).map_err(at(&path.join("cgroup.procs")))
    }

    /// Removes a cgroup created here; remaining members move to its parent.
    pub(super) fn remove(&mut self, path: &Path) {
        remove(path, path.parent().unwrap_or(&self.root));
        self.groups.remove(path);
    }

    /// Hands over the folders, with their locks; removes those without programs.
    pub(super) fn leave(&mut self) -> Vec<(PathBuf, OwnedFd)> {
        self.is_left = true;
        let mut folders = mem::take(&mut self.kept);
        let groups = &self.groups;
        let is_used = |folder: &Path| {
            let name = folder.file_name().and_then(OsStr::to_str);
            groups.iter().any(|group| maker(group) == name)
        };
        // Removal fails for a former version's folder, which contains cgroups.
        folders.retain(|(path, _)| is_used(path) || fs::remove_dir(path).is_err());
        folders
    }

    /// Removes all cgroups and folders, unless handed over.
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
