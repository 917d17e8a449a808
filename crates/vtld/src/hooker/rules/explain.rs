//! Explains in words how the rules decide on a connection.

use std::{
    net::SocketAddr,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use vtl_control::{Executable, OpenedConnection};

use super::{About, Forwarding, Matches, Profile, Rule, kernel::own_addresses};
use crate::hooker::abi::wide;

/// The verdict of one rule on a connection.
#[derive(Clone, Debug)]
pub struct Verdict {
    /// The rule's name.
    pub rule: String,
    /// Why it does not match; `None`: it does, and decides.
    pub because: Option<String>,
    /// The action of a rule that matches.
    pub action: Option<String>,
}

/// Verdicts of the rules that are about such connections, up to the one that decides. `place`: resolves a cgroup.
pub fn explain(
    rules: &[Rule],
    connection: &OpenedConnection,
    place: impl Fn(&Path) -> PathBuf,
) -> Vec<Verdict> {
    let local = is_local(connection.to);
    let mut verdicts = Vec::new();
    for rule in rules {
        let because = match (&rule.about, &connection.via) {
            (About::Opened(matches, _), None) => mismatch(matches, connection, local, &place),
            (About::Forwarded(matches, _), Some(via)) => matches.mismatch(&Forwarding {
                via,
                from: connection.from,
                to: connection.to,
            }),
            _ => continue,
        };
        let decides = because.is_none();
        verdicts.push(Verdict {
            rule: rule.name.clone(),
            because,
            action: decides.then(|| rule.action()),
        });
        if decides {
            break;
        }
    }
    verdicts
}

/// Why a connection does not match a rule; `None` if it does.
fn mismatch(
    rule: &Matches,
    connection: &OpenedConnection,
    local: bool,
    place: &impl Fn(&Path) -> PathBuf,
) -> Option<String> {
    let (ip, port) = (connection.to.ip().to_canonical(), connection.to.port());
    if local && !rule.local {
        return Some(format!(
            "{ip} is local, and the rule does not say local = true"
        ));
    }
    if !rule.port.is_empty() && !rule.port.iter().any(|range| range.contains(&port)) {
        return Some(format!("its port is not {port}"));
    }
    if !rule.profile.is_empty() {
        match Profile::of(port) {
            Some(profile) if rule.profile.contains(&profile) => {}
            Some(profile) => return Some(format!("port {port} has the profile {profile}")),
            None => return Some(format!("port {port} has no profile")),
        }
    }
    if !rule.user.is_empty() {
        match connection.user {
            Some(id) if rule.user.iter().any(|user| user.id == id) => {}
            Some(id) => return Some(format!("its user is not {}", user(id))),
            None => return Some("it wants a user: --user says which".into()),
        }
    }
    if !rule.to.is_empty() && !rule.to.iter().any(|prefix| prefix.contains(ip)) {
        return Some(format!("{ip} is in none of its prefixes"));
    }
    if !rule.cgroup.is_empty() {
        match &connection.cgroup {
            Some(group)
                if rule
                    .cgroup
                    .iter()
                    .any(|p| place(group).starts_with(place(p))) => {}
            Some(_) => return Some("it wants another group".into()),
            None => return Some("it wants a group: --cgroup says which".into()),
        }
    }
    if !rule.exe.is_empty() {
        let identity = |path: &PathBuf| {
            let metadata = path.metadata().ok()?;
            Some(Executable {
                device: metadata.dev(),
                inode: metadata.ino(),
            })
        };
        match connection.exe {
            Some(exe) if rule.exe.iter().any(|path| identity(path) == Some(exe)) => {}
            Some(_) => return Some("it wants another executable".into()),
            None => return Some("it wants an executable: --exe says which".into()),
        }
    }
    None
}

fn user(id: u32) -> String {
    let known = nix::unistd::User::from_uid(nix::unistd::Uid::from_raw(id));
    known
        .ok()
        .flatten()
        .map_or_else(|| id.to_string(), |user| user.name)
}

/// Whether a destination is local: rules without `local = true` do not match it.
fn is_local(to: SocketAddr) -> bool {
    let address = wide(to.ip());
    let by_form = match address.to_ipv4_mapped() {
        Some(v4) => {
            let first = v4.octets()[0];
            first == 0 || v4.is_loopback() || first >= 224 || v4.is_link_local()
        }
        None => {
            let low = address.to_bits() >> 32 == 0;
            low || address.is_multicast() || address.is_unicast_link_local()
        }
    };
    by_form || own_addresses().is_ok_and(|own| own.contains(&address))
}
