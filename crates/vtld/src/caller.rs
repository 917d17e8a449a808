//! The peer of a connection to the control socket: identity and permissions.

use std::{
    fs, io,
    os::fd::{AsRawFd, OwnedFd},
};

use nix::sys::socket::{getsockopt, sockopt};
use vtl_control::Refusal;

use crate::option::netns_cookie;

/// The process at the other end of a control connection.
pub(crate) struct Caller {
    pub(crate) uid: u32,
    /// It is in our network namespace.
    pub(crate) same_netns: bool,
    /// Pidfd of the process that has connected: its PID may be reused.
    process: Option<OwnedFd>,
}

impl Caller {
    /// Looks up the other end of a socket. `namespace`: cookie of our network namespace.
    ///
    /// # Errors
    /// It has disconnected.
    pub(crate) fn of(socket: &OwnedFd, namespace: Option<u64>) -> io::Result<Self> {
        Ok(Self {
            uid: getsockopt(socket, sockopt::PeerCredentials)?.uid(),
            same_netns: netns_cookie(socket).is_ok_and(|n| Some(n) == namespace),
            process: getsockopt(socket, sockopt::PeerPidfd).ok(),
        })
    }

    pub(crate) fn is_root(&self) -> bool {
        self.uid == 0
    }

    /// Refuses a command to anybody but root.
    ///
    /// # Errors
    /// The caller is not root.
    pub(crate) fn require_root(&self, command: &str) -> Result<(), Refusal> {
        if self.is_root() {
            return Ok(());
        }
        let why = format!("vtl {command} is for root: use sudo");
        Err(Refusal { why, denied: true })
    }

    /// Refuses ports reserved for root (ip_unprivileged_port_start).
    ///
    /// # Errors
    /// The port is reserved, and the caller not root.
    pub(crate) fn may_listen(&self, port: u16) -> Result<(), Refusal> {
        let setting = fs::read_to_string("/proc/sys/net/ipv4/ip_unprivileged_port_start");
        let first = setting.ok().and_then(|text| text.trim().parse().ok());
        if self.is_root() || port >= first.unwrap_or(1024) {
            return Ok(());
        }
        let why = format!("port {port} is for root: use sudo, or a port from 1024 on");
        Err(Refusal { why, denied: true })
    }

    /// The caller's PID in our PID namespace, if the process lives and still belongs to the user who connected:
    /// it may have executed a program with another's rights.
    ///
    /// # Errors
    /// It has ended, or is not directly in our PID namespace.
    pub(crate) fn process(&self) -> Result<u32, String> {
        // Processes in PID namespaces below ours have further PIDs; those elsewhere have 0.
        let pid = match self.numbers()[..] {
            [pid] if pid > 0 => pid as u32,
            [] => return Err("the process has ended".into()),
            [pid, ..] if pid < 0 => return Err("the process has ended".into()),
            _ => return Err("the process is not in vtld's PID namespace".into()),
        };
        let status = match fs::read_to_string(format!("/proc/{pid}/status")) {
            Err(_) if self.is_alive() => {
                return Err(
                    "vtld does not see the process: /proc is mounted with hidepid, so the unit needs \
                     SupplementaryGroups= with the group that its gid= names"
                        .into(),
                );
            }
            status => status.unwrap_or_default(),
        };
        let uids: Vec<_> = numbers(&status, "Uid:").collect();
        let is_users = !uids.is_empty() && uids.iter().all(|uid| *uid == i64::from(self.uid));
        // The PID was the process's while the file was read.
        if is_users && self.is_alive() {
            Ok(pid)
        } else {
            Err("the process is not the user's who has connected".into())
        }
    }

    /// Whether the process lives.
    pub(crate) fn is_alive(&self) -> bool {
        self.numbers().first().is_some_and(|pid| *pid >= 0)
    }

    /// The process's PIDs in our PID namespace and in those below (`pidfd_open(2)`): 0 if it is in none of
    /// them, -1 if it has ended.
    fn numbers(&self) -> Vec<i64> {
        let path = |fd: &OwnedFd| format!("/proc/self/fdinfo/{}", fd.as_raw_fd());
        let info = self.process.as_ref().map(|fd| fs::read_to_string(path(fd)));
        let info = info.and_then(Result::ok).unwrap_or_default();
        numbers(&info, "NSpid:").collect()
    }
}

/// Parses the numbers of the line that starts with `name`.
fn numbers<'a>(text: &'a str, name: &str) -> impl Iterator<Item = i64> + 'a {
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    let words = line.unwrap_or_default().split_whitespace();
    words.map_while(|word| word.parse().ok())
}
