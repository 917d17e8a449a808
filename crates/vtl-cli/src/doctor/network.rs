//! Checks of the network stack, tried in a network namespace that exists only for the check.

use std::fs::{self, File};
use std::io;
use std::net::{Ipv4Addr, TcpListener, UdpSocket};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;

use libbpf_sys as sys;
use nix::sched::{CloneFlags, unshare};
use nix::sys::socket::{AddressFamily, SockFlag, SockProtocol, SockType, socket};
use tun_rs::DeviceBuilder;
use vtl_proto::intf;

use super::check::{Check, Need, Spec};
use super::kernel::attach;

/// `TCX_NEXT`: let the next program, or the stack, decide.
const TCX_NEXT: i32 = -1;
/// `XDP_PASS`.
const XDP_PASS: i32 = 2;
/// The loopback's index in every network namespace.
const LOOPBACK: i32 = 1;

/// All checks of this module.
pub(super) fn checks() -> Vec<Check> {
    vec![
        tcx(),
        native_xdp(),
        cgroup_mount(),
        connect_hook(),
        packet_socket(),
        raw_socket(),
        udp_port(),
        tcp_port(),
        namespaces(),
        root_mount(),
        netem(),
        tun(),
        gateway(),
        congestion_controls(),
    ]
}

fn tcx() -> Check {
    let spec = Spec {
        name: "tcx",
        used_for: "attaching VTL's root programs to interfaces",
        need: Need::Required,
        advice: "VTL needs Linux 6.6 or newer: boot a newer kernel",
    };
    spec.outcome(in_scratch_namespace(|| {
        attach(
            sys::BPF_PROG_TYPE_SCHED_CLS,
            sys::BPF_TCX_INGRESS,
            TCX_NEXT,
            LOOPBACK,
            0,
        )?;
        attach(
            sys::BPF_PROG_TYPE_SCHED_CLS,
            sys::BPF_TCX_EGRESS,
            TCX_NEXT,
            LOOPBACK,
            0,
        )?;
        Ok("works".into())
    }))
}

fn native_xdp() -> Check {
    let spec = Spec {
        name: "native-xdp",
        used_for: "the `live` egress driver and ingress on XDP (tried on veth)",
        need: Need::Optional,
        advice: "sessions use tcx and the `tc` egress driver, at about half the rate",
    };
    spec.outcome(in_scratch_namespace(|| {
        ip(&[
            "link", "add", "vtl0", "type", "veth", "peer", "name", "vtl1",
        ])?;
        let index = nix::net::if_::if_nametoindex("vtl0")?;
        let index = i32::try_from(index).map_err(io::Error::other)?;
        attach(
            sys::BPF_PROG_TYPE_XDP,
            sys::BPF_XDP,
            XDP_PASS,
            index,
            sys::XDP_FLAGS_DRV_MODE,
        )?;
        Ok("works".into())
    }))
}

fn cgroup_mount() -> Check {
    let spec = Spec {
        name: "cgroup2",
        used_for: "choosing whose TCP connections are captured",
        need: Need::Required,
        advice: "unmodified applications cannot be carried: mount -t cgroup2 none /sys/fs/cgroup",
    };
    spec.outcome(cgroup_root().map(|path| path.display().to_string()))
}

/// Where the unified cgroup hierarchy is mounted.
fn cgroup_root() -> io::Result<PathBuf> {
    let mounts = fs::read_to_string("/proc/mounts")?;
    cgroup_root_in(&mounts).ok_or_else(|| io::Error::other("not mounted"))
}

fn cgroup_root_in(mounts: &str) -> Option<PathBuf> {
    mounts.lines().find_map(|line| {
        let mut fields = line.split(' ').skip(1);
        let (path, fstype) = (fields.next()?, fields.next()?);
        (fstype == "cgroup2").then(|| PathBuf::from(path))
    })
}

fn connect_hook() -> Check {
    let spec = Spec {
        name: "connect-hook",
        used_for: "capturing the connections of unmodified applications",
        need: Need::Required,
        advice: "unmodified applications cannot be carried: use a kernel with CONFIG_CGROUP_BPF=y",
    };
    spec.outcome((|| {
        let path = cgroup_root()?.join(format!("vtl-doctor-{}", std::process::id()));
        fs::create_dir(&path)?;
        let attached = File::open(&path).and_then(|dir| {
            attach(
                sys::BPF_PROG_TYPE_CGROUP_SOCK_ADDR,
                sys::BPF_CGROUP_INET4_CONNECT,
                1,
                dir.as_raw_fd(),
                0,
            )
        });
        fs::remove_dir(&path)?;
        attached.map(|()| "works".into())
    })())
}

fn packet_socket() -> Check {
    let spec = Spec {
        name: "packet-socket",
        used_for: "the `tc` egress driver and the testbed's link emulator (AF_PACKET)",
        need: Need::Required,
        advice: "use a kernel with CONFIG_PACKET=y, or `modprobe af_packet`",
    };
    let opened = socket(
        AddressFamily::Packet,
        SockType::Raw,
        SockFlag::SOCK_CLOEXEC,
        SockProtocol::EthAll,
    );
    spec.outcome(opened.map(|_| "works".into()).map_err(io::Error::from))
}

fn raw_socket() -> Check {
    let spec = Spec {
        name: "raw-socket",
        used_for: "sending and receiving IP protocol 253",
        need: Need::Optional,
        advice: "the `tc` egress driver uses packet sockets only",
    };
    let protocol = intf::VTL_IPPROTO as i32;
    // SAFETY: the call takes no pointers.
    let fd = unsafe { libc::socket(libc::AF_INET, libc::SOCK_RAW | libc::SOCK_CLOEXEC, protocol) };
    if fd < 0 {
        return spec.outcome(Err(io::Error::last_os_error()));
    }
    // SAFETY: the descriptor was opened above and is used nowhere else.
    unsafe { libc::close(fd) };
    spec.outcome(Ok("works".into()))
}

fn udp_port() -> Check {
    let spec = Spec {
        name: "udp-port",
        used_for: "sessions where the path drops IP protocol 253",
        need: Need::Optional,
        advice: "another program must leave the port to vtld; there is no other",
    };
    let port = intf::VTL_UDP_PORT as u16;
    let bound = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, port));
    spec.outcome(free_or_ours(port, bound.map(drop)))
}

fn tcp_port() -> Check {
    let spec = Spec {
        name: "tcp-port",
        used_for: "sessions of applications where the path drops UDP, too",
        need: Need::Optional,
        advice: "another program must leave the port to vtld; there is no other",
    };
    let port = intf::VTL_TCP_PORT as u16;
    let bound = TcpListener::bind((Ipv4Addr::UNSPECIFIED, port));
    spec.outcome(free_or_ours(port, bound.map(drop)))
}

fn free_or_ours(port: u16, bound: io::Result<()>) -> io::Result<String> {
    match bound {
        Ok(()) => Ok(format!("{port} is free")),
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
            Ok(format!("{port} is in use, by vtld if it runs"))
        }
        Err(error) => Err(error),
    }
}

fn namespaces() -> Check {
    let spec = Spec {
        name: "namespaces",
        used_for: "`vtl testbed` and `vtl demo`",
        need: Need::Development,
        advice: "the testbed and the demo do not run: use a kernel with CONFIG_NET_NS=y and CONFIG_VETH",
    };
    spec.outcome(in_scratch_namespace(|| {
        ip(&[
            "link", "add", "vtl0", "type", "veth", "peer", "name", "vtl1",
        ])?;
        Ok("network namespaces, veth".into())
    }))
}

fn root_mount() -> Check {
    let spec = Spec {
        name: "root-mount",
        used_for: "`ip netns exec`, which `vtl testbed` and `vtl demo` run",
        need: Need::Development,
        advice: "before the chroot is entered: mount --bind its directory onto itself",
    };
    let mounts = procfs::process::Process::myself().and_then(|this| this.mountinfo());
    spec.outcome(match mounts {
        Ok(mounts)
            if mounts
                .0
                .iter()
                .any(|mount| mount.mount_point == Path::new("/")) =>
        {
            Ok("works".into())
        }
        Ok(_) => Err(io::Error::other("/ is not a mount point, as in a chroot")),
        Err(error) => Err(io::Error::other(error)),
    })
}

fn netem() -> Check {
    let spec = Spec {
        name: "netem",
        used_for: "emulating links in the kernel, with VTL_TESTBED_BACKEND=netem",
        need: Need::Development,
        advice: "the testbed emulates links in user space, as it does by default",
    };
    spec.outcome(in_scratch_namespace(|| {
        run(
            "tc",
            &["qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"],
        )?;
        Ok("works".into())
    }))
}

fn tun() -> Check {
    let spec = Spec {
        name: "tun",
        used_for: "carrying any IP packets between two hosts (vtl tun)",
        need: Need::Optional,
        advice: "`vtl tun` does not work: load the module tun (modprobe tun)",
    };
    if !Path::new("/dev/net/tun").exists() {
        return spec.outcome(Err(io::ErrorKind::NotFound.into())); // which the library would make
    }
    spec.outcome(in_scratch_namespace(|| {
        DeviceBuilder::new().name("vtl0").build_sync()?;
        Ok("works".into())
    }))
}

fn gateway() -> Check {
    let spec = Spec {
        name: "gateway",
        used_for: "carrying connections that this host forwards (vtl gateway)",
        need: Need::Optional,
        advice: "`vtl gateway` does not work: it takes policy routing (CONFIG_IP_MULTIPLE_TABLES), iproute2 to try it, \
                 and sysctl net.ipv4.tcp_fwmark_accept=0",
    };
    spec.outcome(accepts_no_marks().and_then(|()| {
        in_scratch_namespace(|| {
            let rule = "rule add priority 21 fwmark 0x56544c47 lookup 22100";
            run("ip", &rule.split(' ').collect::<Vec<_>>())?;
            Ok("works".into())
        })
    }))
}

/// Connections must not inherit the marks of their SYNs, by which packets to a gateway are routed.
fn accepts_no_marks() -> io::Result<()> {
    match fs::read_to_string("/proc/sys/net/ipv4/tcp_fwmark_accept")?.trim() {
        "0" => Ok(()),
        _ => Err(io::Error::other("net.ipv4.tcp_fwmark_accept is on")),
    }
}

fn congestion_controls() -> Check {
    let spec = Spec {
        name: "tcp-cc",
        used_for: "the TCP baselines: cubic and bbr",
        need: Need::Development,
        advice: "the demo and benchmarks that compare with what is missing end in an error: modprobe tcp_bbr",
    };
    let listed = fs::read_to_string("/proc/sys/net/ipv4/tcp_available_congestion_control");
    spec.outcome(listed.and_then(|list| {
        let list = list.trim().to_owned();
        let has = |name| list.split(' ').any(|cc| cc == name);
        if has("cubic") && has("bbr") {
            Ok(list)
        } else {
            Err(io::Error::other(format!("only {list}")))
        }
    }))
}

/// Runs `probe` on a thread in a network namespace of its own, which vanishes with the thread.
fn in_scratch_namespace<T: Send>(probe: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
    thread::scope(|scope| {
        let probe = scope.spawn(|| {
            unshare(CloneFlags::CLONE_NEWNET)?;
            probe()
        });
        probe
            .join()
            .unwrap_or_else(|_| Err(io::Error::other("the probe panicked")))
    })
}

fn ip(args: &[&str]) -> io::Result<()> {
    run("ip", args)
}

fn run(program: &str, args: &[&str]) -> io::Result<()> {
    let output = Command::new(program)
        .args(args)
        .stdin(Stdio::null())
        .output()
        .map_err(|err| match err.kind() {
            io::ErrorKind::NotFound => {
                io::Error::other(format!("`{program}` is not installed (package iproute2)"))
            }
            _ => err,
        })?;
    if output.status.success() {
        return Ok(());
    }
    let stderr = String::from_utf8_lossy(&output.stderr);
    let reason = stderr.lines().next().unwrap_or("no reason given");
    Err(io::Error::other(
        reason
            .trim_start_matches("Error: ")
            .trim_end_matches('.')
            .to_owned(),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cgroup_root_in__finds_hybrid_and_unified() {
        let hybrid = "tmpfs /sys/fs/cgroup tmpfs rw 0 0\n\
                      cgroup /sys/fs/cgroup/cpu cgroup rw,cpu 0 0\n\
                      cgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\n";
        assert_eq!(
            cgroup_root_in(hybrid),
            Some("/sys/fs/cgroup/unified".into())
        );
        let unified = "cgroup2 /sys/fs/cgroup cgroup2 rw 0 0\n";
        assert_eq!(cgroup_root_in(unified), Some("/sys/fs/cgroup".into()));
        assert_eq!(cgroup_root_in("proc /proc proc rw 0 0\n"), None);
    }
}
