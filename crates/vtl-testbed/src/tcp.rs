//! TCP baselines: buffers large enough for the path, and the congestion control asked for, verified.

use std::net::SocketAddr;
use vtl_link::{Host, Link};

use crate::error::{Error, Result};
use crate::namespace;
use crate::state;

const ALLOWED: &str = "ipv4/tcp_allowed_congestion_control";
const AVAILABLE: &str = "ipv4/tcp_available_congestion_control";
/// Minimum of the limit up to which socket buffers grow, bytes.
const BUFFER_MIN: u64 = 32 << 20;

/// An established TCP connection, as `ss` reports it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CongestionControl {
    /// Local address.
    pub local: SocketAddr,
    /// Peer's address.
    pub peer: SocketAddr,
    /// The congestion control in use.
    pub name: String,
}

/// Adds a congestion control to the list of those that namespaces may use. The list is the whole host's,
/// so the first testbed to change it saves it.
fn allow(name: &str) -> Result<()> {
    let _lock = state::lock()?;
    load(name);
    let available = namespace::read_sysctl(AVAILABLE)?;
    let has = |list: &str| list.split_whitespace().any(|n| n == name);
    if !has(&available) {
        return Err(Error::NoCongestionControl {
            wanted: name.to_owned(),
            available,
        });
    }
    let allowed = namespace::read_sysctl(ALLOWED)?;
    if has(&allowed) {
        return Ok(());
    }
    let saved = state::saved_congestion_controls();
    if !saved.exists() {
        std::fs::write(&saved, &allowed).map_err(Error::file("write", &saved))?;
    }
    namespace::write_sysctl(ALLOWED, &format!("{allowed} {name}"))
}

/// Has the kernel load the congestion control's module, if it has one that is not loaded; whether it has is seen by its list.
fn load(name: &str) {
    use nix::sys::socket::{
        AddressFamily, SockFlag, SockType, setsockopt, socket, sockopt::TcpCongestion,
    };
    let tcp = socket(
        AddressFamily::Inet,
        SockType::Stream,
        SockFlag::SOCK_CLOEXEC,
        None,
    );
    let _ = tcp.and_then(|tcp| setsockopt(&tcp, TcpCongestion, &name.into()));
}

/// Restores the host's list once no testbed is left. The caller holds the lock.
pub(crate) fn restore_allowed() {
    let saved = state::saved_congestion_controls();
    if state::names().is_empty()
        && let Ok(list) = std::fs::read_to_string(&saved)
        && namespace::write_sysctl(ALLOWED, &list).is_ok()
    {
        let _ = std::fs::remove_file(&saved);
    }
}

/// See [`Testbed::tune_tcp`](crate::Testbed::tune_tcp).
pub(crate) fn tune(testbed: &str, host: Host, link: &Link, congestion_control: &str) -> Result<()> {
    allow(congestion_control)?;
    let limit = BUFFER_MIN.max(2 * link.bdp_bytes());
    namespace::run_in(&namespace::path_of(testbed, host), || {
        namespace::write_sysctl("ipv4/tcp_rmem", &format!("4096 131072 {limit}"))?;
        namespace::write_sysctl("ipv4/tcp_wmem", &format!("4096 65536 {limit}"))?;
        namespace::write_sysctl("ipv4/tcp_sack", "1")?;
        namespace::write_sysctl("ipv4/tcp_timestamps", "1")?;
        // Metrics cached from one connection must not influence the next measurement.
        namespace::write_sysctl("ipv4/tcp_no_metrics_save", "1")?;
        namespace::write_sysctl("ipv4/tcp_congestion_control", congestion_control)?;
        // The kernel ignores some values without an error: read back.
        let now = namespace::read_sysctl("ipv4/tcp_congestion_control")?;
        if now == congestion_control {
            return Ok(());
        }
        Err(Error::NoCongestionControl {
            wanted: congestion_control.to_owned(),
            available: now,
        })
    })?
}

/// See [`Testbed::congestion_controls`](crate::Testbed::congestion_controls).
pub(crate) fn connections(testbed: &str, host: Host) -> Result<Vec<CongestionControl>> {
    let output = namespace::command_in(&namespace::path_of(testbed, host), "ss")?
        .args(["-tinH", "state", "established"])
        .output()
        .map_err(|_| Error::MissingTool {
            tool: "ss",
            package: "iproute2",
        })?;
    Ok(parse(&String::from_utf8_lossy(&output.stdout)))
}

/// Parses the output of `ss -tinH`: for each connection a line with its addresses, then an indented one
/// with its metrics, in which the congestion control follows the optional flags.
fn parse(text: &str) -> Vec<CongestionControl> {
    const FLAGS: [&str; 6] = ["ts", "sack", "ecn", "ecnseen", "fastopen", "usec_ts"];
    let mut connections = Vec::new();
    let mut ends = None;
    for line in text.lines() {
        let words = || line.split_whitespace();
        if line.starts_with(char::is_whitespace) {
            let name = words().find(|w| !FLAGS.contains(w));
            if let (Some((local, peer)), Some(name)) = (ends.take(), name) {
                connections.push(CongestionControl {
                    local,
                    peer,
                    name: name.to_owned(),
                });
            }
        } else {
            let mut addresses = words().filter_map(|w| w.parse::<SocketAddr>().ok());
            ends = addresses.next().zip(addresses.next());
        }
    }
    connections
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parse__finds_the_congestion_control() {
        let text = "0      0      10.73.0.1:40000    10.73.0.2:5201   \n\
                    \t ts sack cubic wscale:7,7 rto:204 rtt:3/1\n\
                    0      64     [fd73::1]:22    [fd73::2]:5202   \n\
                    \t bbr wscale:7,7\n";
        let found = parse(text);
        assert_eq!(found.len(), 2);
        assert_eq!(
            (found[0].name.as_str(), found[0].peer.port()),
            ("cubic", 5201)
        );
        assert_eq!((found[1].name.as_str(), found[1].local.port()), ("bbr", 22));
    }

    #[test]
    fn parse__ignores_other_lines() {
        assert!(parse("").is_empty());
        assert!(parse("State Recv-Q Send-Q\n\t cubic\n").is_empty());
    }
}
