//! Attachment of the live-frame program: running a program that is attached nowhere costs 14 to 22
//! ms for each call.
//!
//! The program is attached in a network namespace without traffic: the process's own, if it has
//! CAP_SYS_ADMIN to make one, else one from the service manager ([`FrameNamespace`]).

use std::{
    fs::File,
    io,
    os::fd::{AsRawFd, BorrowedFd, OwnedFd},
    sync::{Arc, Mutex, PoisonError},
    thread,
};

use nix::sys::socket::{self, MsgFlags};

use vtl_proto::intf;

use crate::{
    Error, Result,
    link::{self, Hook},
    netlink::{self, attribute},
};

/// The attachment; dropping it detaches.
pub(crate) enum Anchor {
    /// In a namespace made for it, on the loopback.
    Own { _link: OwnedFd, _namespace: File },
    /// In an existing namespace, on a device made for it.
    Given {
        namespace: Arc<FrameNamespace>,
        device: String,
    },
}

/// Name of a shard's device in a [`FrameNamespace`].
fn device_of(shard: u32) -> String {
    format!("vtl{shard}")
}

fn failed(source: io::Error) -> Error {
    Error::System {
        what: "a namespace for live frames".into(),
        source,
    }
}

impl Anchor {
    /// Attaches a program in a new namespace.
    pub(crate) fn of_own(program: BorrowedFd<'_>) -> Result<Self> {
        thread::scope(|scope| {
            scope
                .spawn(|| {
                    nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET)
                        .map_err(|e| failed(e.into()))?;
                    let namespace = File::open("/proc/thread-self/ns/net").map_err(failed)?;
                    let loopback = intf::VTL_LOOPBACK_IFINDEX;
                    Ok(Self::Own {
                        _link: link::attach(program, loopback, Hook::XdpGeneric)?,
                        _namespace: namespace,
                    })
                })
                .join()
                .expect("does not panic")
        })
    }

    /// Attaches the program of a shard in an existing namespace.
    pub(crate) fn in_namespace(
        namespace: &Arc<FrameNamespace>,
        program: BorrowedFd<'_>,
        shard: u32,
    ) -> Result<Self> {
        let device = device_of(shard);
        namespace.add(&device).map_err(failed)?;
        let anchor = Self::Given {
            namespace: Arc::clone(namespace),
            device,
        };
        if let Self::Given { device, .. } = &anchor {
            namespace.attach(device, program).map_err(failed)?;
        }
        Ok(anchor)
    }
}

impl Drop for Anchor {
    fn drop(&mut self) {
        if let Self::Given { namespace, device } = self {
            let _ = namespace.remove(device);
        }
    }
}

/// A network namespace for attachments, accessed through a socket opened in it (`NETLINK_ROUTE`):
/// attaching needs no CAP_SYS_ADMIN, which entering the namespace would. Both the opener and the
/// user of the socket need CAP_NET_ADMIN.
#[derive(Debug)]
pub struct FrameNamespace(Mutex<OwnedFd>);

// From linux/if_link.h and linux/if.h, missing in libc.
const IFLA_XDP_FD: u16 = 1;
const IFLA_XDP_FLAGS: u16 = 3;
const NESTED: u16 = libc::NLA_F_NESTED as u16;

impl FrameNamespace {
    /// Uses the namespace in which the socket was opened, exclusively. Removes what a killed
    /// process has left there: programs, and their maps with them.
    pub fn new(socket: OwnedFd) -> Self {
        let namespace = Self(Mutex::new(socket));
        for shard in 0..intf::VTL_MAX_SHARDS {
            let _ = namespace.remove(&device_of(shard));
        }
        namespace
    }

    /// Adds a device: a veth, which every distribution's kernel has.
    fn add(&self, device: &str) -> io::Result<()> {
        let kind = attribute(libc::IFLA_INFO_KIND, b"veth");
        let new = libc::NLM_F_CREATE | libc::NLM_F_EXCL;
        let info = attribute(libc::IFLA_LINKINFO | NESTED, &kind);
        self.request(libc::RTM_NEWLINK, new, device, &info)
    }

    /// Removes a device, and its peer.
    fn remove(&self, device: &str) -> io::Result<()> {
        self.request(libc::RTM_DELLINK, 0, device, &[])
    }

    fn attach(&self, device: &str, program: BorrowedFd<'_>) -> io::Result<()> {
        let flags = libbpf_sys::XDP_FLAGS_SKB_MODE | libbpf_sys::XDP_FLAGS_UPDATE_IF_NOEXIST;
        let mut xdp = attribute(IFLA_XDP_FD, &program.as_raw_fd().to_ne_bytes());
        xdp.extend(attribute(IFLA_XDP_FLAGS, &flags.to_ne_bytes()));
        let xdp = attribute(libc::IFLA_XDP | NESTED, &xdp);
        self.request(libc::RTM_SETLINK, 0, device, &xdp)
    }

    /// Sends a request about a device, and reads the kernel's answer.
    fn request(
        &self,
        kind: u16,
        flags: libc::c_int,
        device: &str,
        attributes: &[u8],
    ) -> io::Result<()> {
        /// Length of `ifinfomsg`.
        const HEAD: usize = 16;
        let mut body = vec![0; HEAD];
        body.extend(attribute(
            libc::IFLA_IFNAME,
            &[device.as_bytes(), b"\0"].concat(),
        ));
        body.extend(attributes);
        let socket = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // Discard answers to a process that was killed before it read them.
        while socket::recv(socket.as_raw_fd(), &mut [0], MsgFlags::MSG_DONTWAIT).is_ok() {}
        netlink::request(&socket, kind, flags, &body)
    }
}

#[cfg(test)]
#[allow(non_snake_case)]
mod tests {
    use std::os::fd::AsFd;

    use nix::sys::socket::SockProtocol;

    use super::*;
    use crate::{netdev, plane::DataPlane};

    /// Runs in a new namespace.
    fn elsewhere<T: Send>(work: impl FnOnce() -> T + Send) -> T {
        let thread = || {
            nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).unwrap();
            work()
        };
        thread::scope(|scope| scope.spawn(thread).join().unwrap())
    }

    /// Whether a program is attached to a device of this thread's namespace; `None`: there is no such device.
    fn is_used(device: &str) -> Option<bool> {
        let index = netdev::index_of(device).ok()?;
        let mut id = 0;
        let flags = libbpf_sys::XDP_FLAGS_SKB_MODE as i32;
        // SAFETY: the number outlives the call.
        let asked = unsafe { libbpf_sys::bpf_xdp_query_id(index as i32, flags, &raw mut id) };
        assert_eq!(asked, 0);
        Some(id != 0)
    }

    #[test]
    fn namespace__has_a_device_with_the_program_as_long_as_the_anchor() {
        if !nix::unistd::geteuid().is_root() {
            vtl_testing::skip("loading eBPF programs takes root");
            return;
        }
        let plane = DataPlane::load_for(0, 2, true, false).unwrap();
        elsewhere(|| {
            let socket = netlink::open(SockProtocol::NetlinkRoute).unwrap();
            let namespace = Arc::new(FrameNamespace::new(socket));
            let attach = |shard: usize| {
                let program = plane.shards()[shard].program().unwrap();
                // On a thread of another namespace, as of a daemon.
                elsewhere(|| {
                    Anchor::in_namespace(&namespace, program.as_fd(), shard as u32).unwrap()
                })
            };
            let first = attach(0);
            let second = attach(1);
            assert_eq!(["vtl0", "vtl1"].map(is_used), [Some(true); 2]);
            drop(first);
            assert_eq!(["vtl0", "vtl1"].map(is_used), [None, Some(true)]);
            // Of a process that was killed.
            std::mem::forget(second);
            let socket = namespace.0.lock().unwrap().try_clone().unwrap();
            let namespace = Arc::new(FrameNamespace::new(socket));
            assert_eq!(is_used("vtl1"), None);
            let program = plane.shards()[1].program().unwrap();
            let again = Anchor::in_namespace(&namespace, program.as_fd(), 1).unwrap();
            assert_eq!(is_used("vtl1"), Some(true));
            drop(again);
            assert_eq!(is_used("vtl1"), None);
            let refused = namespace.remove("vtl1").unwrap_err();
            assert_eq!(refused.raw_os_error(), Some(libc::ENODEV));
        });
    }
}
