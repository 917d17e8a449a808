//! Network namespaces: names, entering them, commands in them, sysctls, and the tools `ip` and `tc`.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use nix::sched::{CloneFlags, setns};
use vtl_link::Host;

use crate::error::{Error, Result};

/// Whether / is a mount point in this process's mount namespace, which `ip netns exec` needs. It is not
/// after a chroot into a plain directory.
///
/// # Errors
/// If /proc is not mounted.
pub(crate) fn root_is_mount_point() -> io::Result<bool> {
    let mounts = std::fs::read_to_string("/proc/self/mountinfo")?;
    Ok(is_mount_point("/", &mounts))
}

/// proc(5): the fifth field is the mount point.
fn is_mount_point(path: &str, mountinfo: &str) -> bool {
    let mut points = mountinfo.lines().map(|line| line.split(' ').nth(4));
    points.any(|point| point == Some(path))
}

/// The name of a host's namespace.
pub(crate) fn name_of(testbed: &str, host: Host) -> String {
    format!("{testbed}-{}", host.name())
}

/// Where `ip netns` keeps a namespace.
pub(crate) fn path_of(testbed: &str, host: Host) -> PathBuf {
    Path::new("/run/netns").join(name_of(testbed, host))
}

/// Refuses names that are invalid as a namespace's or a file's.
pub(crate) fn check_name(name: &str) -> Result<()> {
    let fits = (1..=32).contains(&name.len())
        && !name.starts_with('-')
        && name
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_');
    if fits {
        Ok(())
    } else {
        Err(Error::BadName(name.to_owned()))
    }
}

/// Moves the calling thread into a namespace. It stays there.
pub(crate) fn enter(path: &Path) -> Result<()> {
    let file = File::open(path).map_err(Error::file("open", path))?;
    setns(file, CloneFlags::CLONE_NEWNET)
        .map_err(|e| Error::system(format!("enter {}", path.display()))(e.into()))
}

/// Runs `work` on a thread of its own inside a namespace.
pub(crate) fn run_in<T: Send>(path: &Path, work: impl FnOnce() -> T + Send) -> Result<T> {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| enter(path).map(|()| work()));
        match thread.join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })
}

/// A command that will run inside a namespace.
pub(crate) fn command_in(path: &Path, program: impl AsRef<OsStr>) -> Result<Command> {
    let file = File::open(path).map_err(Error::file("open", path))?;
    let mut command = Command::new(program);
    // SAFETY: the closure only makes a system call on a descriptor that it owns; it neither allocates nor
    // takes a lock between fork and exec.
    unsafe {
        command.pre_exec(move || setns(&file, CloneFlags::CLONE_NEWNET).map_err(io::Error::from));
    }
    Ok(command)
}

/// The error of starting a tool. If it is missing, the message names its package.
fn spawn_error(tool: &'static str, package: &'static str) -> impl FnOnce(io::Error) -> Error {
    move |e| match e.kind() {
        io::ErrorKind::NotFound => Error::MissingTool { tool, package },
        _ => Error::system(format!("run `{tool}`"))(e),
    }
}

/// Runs `ip` or `tc` and returns its output.
fn run_tool(tool: &'static str, args: &[&str], input: Option<&str>) -> Result<String> {
    let mut child = Command::new(tool)
        .args(args)
        .stdin(if input.is_some() {
            Stdio::piped()
        } else {
            Stdio::null()
        })
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(spawn_error(tool, "iproute2"))?;
    if let (Some(mut stdin), Some(input)) = (child.stdin.take(), input) {
        // A tool that stops reading early reports why on its standard error, which is read below.
        let _ = stdin.write_all(input.as_bytes());
    }
    let output = child
        .wait_with_output()
        .map_err(Error::system(format!("run `{tool}`")))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let message = String::from_utf8_lossy(&output.stderr);
    Err(Error::Tool {
        command: format!(
            "{tool} {}",
            input.map_or_else(|| args.join(" "), |i| i.trim().replace('\n', "; "))
        ),
        message: message.lines().next().unwrap_or("no message").to_owned(),
    })
}

/// Runs `ip` with the given arguments.
pub(crate) fn ip(args: &[&str]) -> Result<String> {
    run_tool("ip", args, None)
}

/// Runs `ip` commands, one per line, in a host's namespace.
pub(crate) fn ip_batch(testbed: &str, host: Host, lines: &str) -> Result<()> {
    run_tool(
        "ip",
        &["-n", &name_of(testbed, host), "-batch", "-"],
        Some(lines),
    )
    .map(drop)
}

/// Runs `tc` commands, one per line, in a host's namespace.
pub(crate) fn tc_batch(testbed: &str, host: Host, lines: &str) -> Result<()> {
    run_tool(
        "tc",
        &["-n", &name_of(testbed, host), "-batch", "-"],
        Some(lines),
    )
    .map(drop)
}

/// Processes whose main thread is inside a host's namespace.
pub(crate) fn pids_in(testbed: &str, host: Host) -> Vec<i32> {
    ip(&["netns", "pids", &name_of(testbed, host)])
        .map(|text| text.lines().filter_map(|l| l.trim().parse().ok()).collect())
        .unwrap_or_default()
}

/// Writes a network sysctl of the namespace that the calling thread is in. `key` is relative to
/// `/proc/sys/net`.
pub(crate) fn write_sysctl(key: &str, value: &str) -> Result<()> {
    let path = Path::new("/proc/sys/net").join(key);
    std::fs::write(&path, value).map_err(Error::file("write", path))
}

/// Reads a network sysctl of the namespace that the calling thread is in.
pub(crate) fn read_sysctl(key: &str) -> Result<String> {
    let path = Path::new("/proc/sys/net").join(key);
    std::fs::read_to_string(&path)
        .map(|s| s.trim().to_owned())
        .map_err(Error::file("read", path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn check_name__letters_digits_dashes() {
        for good in ["vtl", "t-acc", "a_1"] {
            assert!(check_name(good).is_ok());
        }
        for bad in ["", "a/b", "-x", "a b", "ü", &"x".repeat(33)] {
            assert!(check_name(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn is_mount_point__compares_the_mount_point_only() {
        let proc = "23 22 0:21 / /proc rw,relatime - proc proc rw\n";
        let root = "22 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n";
        assert!(is_mount_point("/", &[root, proc].concat()));
        // Not a mount below the path, and not the field of the mounted file system's root.
        assert!(!is_mount_point("/", proc));
    }
}
