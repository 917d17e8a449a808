//! Routing of packets that end at a gateway although they are for another host: policy rules and a table in which
//! everything is local. Their numbers are fixed (`bpf/include/vtl/gateway.h`), so what a killed daemon has left matches
//! nothing any more, and the next daemon removes it.

use std::{io, os::fd::OwnedFd};

use nix::sys::socket::SockProtocol;
use vtl_bpf::netlink::{self, attribute};
use vtl_proto::intf::{
    VTL_GATEWAY_INJECT, VTL_GATEWAY_MARK, VTL_GATEWAY_PRIORITY, VTL_GATEWAY_TABLE,
};

// linux/fib_rules.h and linux/rtnetlink.h, as far as libc lacks them.
const FRA_IIFNAME: u16 = 3;
const FRA_GOTO: u16 = 4;
const FRA_PRIORITY: u16 = 6;
const FRA_FWMARK: u16 = 10;
const FRA_TABLE: u16 = 15;
const FR_ACT_TO_TBL: u8 = 1;
const FR_ACT_GOTO: u8 = 2;
const FR_ACT_NOP: u8 = 3;
const LOOPBACK: u32 = 1;

/// The routes and rules; removed on drop, unless another daemon goes on with them.
pub(super) struct Routes {
    is_left: bool,
}

/// One object to be added or removed.
struct Object {
    /// Message types: of the request that adds it, and of the one that removes it.
    kinds: [u16; 2],
    /// The header behind netlink's, and attributes.
    body: Vec<u8>,
}

impl Routes {
    /// Adds what is missing.
    ///
    /// # Errors
    /// The kernel refuses (no policy routing, no rights).
    pub(super) fn add() -> io::Result<Self> {
        let routes = Self { is_left: false };
        let socket = open()?;
        for family in families() {
            for object in objects(family) {
                match change(&socket, &object, true) {
                    Err(error) if error.raw_os_error() == Some(libc::EEXIST) => {}
                    // IPv6 may be turned off.
                    Err(error) if family == libc::AF_INET6 as u8 => {
                        tracing::debug!(%error, "gateway: no routes for IPv6");
                        break;
                    }
                    other => other?,
                }
            }
        }
        Ok(routes)
    }

    /// Leaves them to the next daemon.
    pub(super) fn leave(&mut self) {
        self.is_left = true;
    }
}

impl Drop for Routes {
    fn drop(&mut self) {
        if !self.is_left {
            super::sweep();
        }
    }
}

/// Removes what there is, in both families. Failures are logged: what remains matches no packet without the programs
/// that set the marks.
pub(super) fn sweep() {
    let Ok(socket) = open() else { return };
    for family in families() {
        for object in objects(family) {
            // Several, if daemons were killed while they added them.
            while change(&socket, &object, false).is_ok() {}
        }
    }
}

pub(super) fn families() -> [u8; 2] {
    [libc::AF_INET as u8, libc::AF_INET6 as u8]
}

fn open() -> io::Result<OwnedFd> {
    netlink::open(SockProtocol::NetlinkRoute)
}

/// The route, and the rules in their order: injected SYNs, on their way out; the kernel's look at the way back of a
/// marked packet (`rp_filter` with `src_valid_mark`), which has `lo` as its input and must not find the table; marked
/// packets; the place behind.
fn objects(family: u8) -> Vec<Object> {
    let route = {
        let scope_host = libc::RT_SCOPE_HOST;
        let mut body = vec![family, 0, 0, 0, 0, libc::RTPROT_STATIC, scope_host];
        body.push(libc::RTN_LOCAL);
        body.extend([0; 4]);
        body.extend(attribute(libc::RTA_TABLE, &VTL_GATEWAY_TABLE.to_ne_bytes()));
        body.extend(attribute(libc::RTA_OIF, &LOOPBACK.to_ne_bytes()));
        Object {
            kinds: [libc::RTM_NEWROUTE, libc::RTM_DELROUTE],
            body,
        }
    };
    let rule = |place: u32, action: u8, attributes: Vec<(u16, Vec<u8>)>| {
        let mut body = vec![family, 0, 0, 0, 0, 0, 0, action];
        body.extend([0; 4]);
        let priority = VTL_GATEWAY_PRIORITY + place;
        body.extend(attribute(FRA_PRIORITY, &priority.to_ne_bytes()));
        for (kind, value) in attributes {
            body.extend(attribute(kind, &value));
        }
        Object {
            kinds: [libc::RTM_NEWRULE, libc::RTM_DELRULE],
            body,
        }
    };
    let number = |kind, value: u32| (kind, value.to_ne_bytes().to_vec());
    let own = || (FRA_IIFNAME, b"lo\0".to_vec());
    let table = || number(FRA_TABLE, VTL_GATEWAY_TABLE);
    vec![
        route,
        rule(3, FR_ACT_NOP, vec![]),
        rule(
            0,
            FR_ACT_TO_TBL,
            vec![own(), number(FRA_FWMARK, VTL_GATEWAY_INJECT), table()],
        ),
        rule(
            1,
            FR_ACT_GOTO,
            vec![
                own(),
                number(FRA_FWMARK, VTL_GATEWAY_MARK),
                number(FRA_GOTO, VTL_GATEWAY_PRIORITY + 3),
            ],
        ),
        rule(
            2,
            FR_ACT_TO_TBL,
            vec![number(FRA_FWMARK, VTL_GATEWAY_MARK), table()],
        ),
    ]
}

/// Adds or removes an object.
fn change(socket: &OwnedFd, object: &Object, is_new: bool) -> io::Result<()> {
    let flags = match is_new {
        true => libc::NLM_F_CREATE | libc::NLM_F_EXCL,
        false => 0,
    };
    let kind = object.kinds[usize::from(!is_new)];
    netlink::request(socket, kind, flags, &object.body)
}

#[cfg(test)]
#[allow(non_snake_case)]
mod tests {
    use std::process::Command;

    use super::*;

    /// What `ip` shows in this thread's namespace.
    fn shown(family: &str, what: &[&str]) -> String {
        let output = Command::new("ip").arg(family).args(what).output();
        String::from_utf8(output.expect("ip runs").stdout).expect("UTF-8")
    }

    #[test]
    fn routes__are_there_as_long_as_they_live() {
        if !nix::unistd::geteuid().is_root() {
            vtl_testing::skip("routes take root");
            return;
        }
        let elsewhere = || {
            nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).expect("a namespace");
            assert!(
                Command::new("ip")
                    .args(["link", "set", "lo", "up"])
                    .status()
                    .is_ok()
            );
            let before = ["-4", "-6"].map(|family| shown(family, &["rule"]));
            let table = VTL_GATEWAY_TABLE.to_string();
            let first = Routes::add().expect("routes");
            std::mem::forget(first); // killed
            let again = Routes::add().expect("routes");
            for family in ["-4", "-6"] {
                let rules = shown(family, &["rule"]);
                assert_eq!(
                    rules.lines().count(),
                    7 - usize::from(family == "-6"),
                    "{rules}"
                );
                let routes = shown(family, &["route", "show", "table", &table]);
                assert!(routes.contains("local default dev lo"), "{routes}");
            }
            drop(again);
            assert_eq!(["-4", "-6"].map(|family| shown(family, &["rule"])), before);
            for family in ["-4", "-6"] {
                assert_eq!(shown(family, &["route", "show", "table", &table]), "");
            }
        };
        std::thread::scope(|scope| scope.spawn(elsewhere).join().expect("no panic"));
    }
}
