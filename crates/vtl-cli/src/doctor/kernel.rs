//! Checks of the kernel: its version, and what eBPF can do in it.

use std::fs;
use std::io;
use std::os::fd::AsFd;

use libbpf_sys as sys;

use super::bpf::{self, Insn};
use super::check::{Check, Need, Spec};

/// The oldest kernel VTL runs on: the first with tcx.
const OLDEST: (u32, u32) = (6, 6);

/// All checks of this module.
pub(super) fn checks() -> Vec<Check> {
    vec![
        version(),
        btf(),
        jit(),
        mmapable_array(),
        ring_of_maps(),
        ring_buffer(),
        live_frames(),
        header_options(),
        programs(),
        struct_ops(),
    ]
}

fn version() -> Check {
    let spec = Spec {
        name: "kernel",
        used_for: "everything below",
        need: Need::Required,
        advice: "VTL needs Linux 6.6 or newer: boot a newer kernel",
    };
    spec.outcome((|| {
        let uname = nix::sys::utsname::uname()?;
        let release = uname.release().to_string_lossy().into_owned();
        match parse_release(&release) {
            Some(version) if version >= OLDEST => Ok(release),
            _ => Err(io::Error::other(release)),
        }
    })())
}

/// Major and minor number of a release such as `6.12.3-amd64`.
fn parse_release(release: &str) -> Option<(u32, u32)> {
    let mut parts = release.split(|c: char| !c.is_ascii_digit());
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

fn btf() -> Check {
    let spec = Spec {
        name: "btf",
        used_for: "loading compiled eBPF objects into this very kernel",
        need: Need::Required,
        advice: "use a kernel built with CONFIG_DEBUG_INFO_BTF=y (all distribution kernels are)",
    };
    let path = "/sys/kernel/btf/vmlinux";
    spec.outcome(fs::metadata(path).map(|_| path.to_owned()))
}

fn jit() -> Check {
    let spec = Spec {
        name: "jit",
        used_for: "running grafts at machine speed",
        need: Need::Optional,
        advice: "grafts run interpreted, many times slower: sysctl -w net.core.bpf_jit_enable=1",
    };
    let read = fs::read_to_string("/proc/sys/net/core/bpf_jit_enable");
    spec.outcome(read.and_then(|value| match value.trim() {
        "0" => Err(io::Error::other("switched off")),
        value => Ok(format!("net.core.bpf_jit_enable = {value}")),
    }))
}

fn mmapable_array() -> Check {
    let spec = Spec {
        name: "mmap-arrays",
        used_for: "packet rings that applications read and write in place",
        need: Need::Required,
        advice: "VTL needs Linux 6.6 or newer: boot a newer kernel",
    };
    let map = bpf::create_map(
        sys::BPF_MAP_TYPE_ARRAY,
        4,
        2048,
        2,
        sys::BPF_F_MMAPABLE,
        None,
    );
    spec.outcome(
        map.and_then(|map| bpf::map_and_unmap(map.as_fd()))
            .map(|()| "works".into()),
    )
}

fn ring_of_maps() -> Check {
    let spec = Spec {
        name: "map-of-rings",
        used_for: "finding a session's own ring in the kernel",
        need: Need::Required,
        advice: "VTL needs Linux 6.6 or newer: boot a newer kernel",
    };
    let flags = sys::BPF_F_MMAPABLE | sys::BPF_F_INNER_MAP;
    let outer =
        bpf::create_map(sys::BPF_MAP_TYPE_ARRAY, 4, 2048, 2, flags, None).and_then(|inner| {
            bpf::create_map(
                sys::BPF_MAP_TYPE_ARRAY_OF_MAPS,
                4,
                4,
                2,
                0,
                Some(inner.as_fd()),
            )
        });
    spec.outcome(outer.map(|_| "works".into()))
}

fn ring_buffer() -> Check {
    let spec = Spec {
        name: "ringbuf",
        used_for: "events from the kernel to the daemon",
        need: Need::Required,
        advice: "VTL needs Linux 6.6 or newer: boot a newer kernel",
    };
    let map = bpf::create_map(sys::BPF_MAP_TYPE_RINGBUF, 0, 0, 64 * 1024, 0, None);
    spec.outcome(map.map(|_| "works".into()))
}

fn programs() -> Check {
    let spec = Spec {
        name: "programs",
        used_for: "everything: this kernel's verifier takes what vtld loads",
        need: Need::Required,
        advice: "VTL was seen to load on Linux 6.8, 6.12, 6.18 and 7.0: boot one of them, and report this",
    };
    spec.outcome((|| {
        if !nix::unistd::geteuid().is_root() {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        let verdicts = vtl_bpf::check::check_needed().map_err(io::Error::other)?;
        match verdicts.iter().find_map(|verdict| verdict.complaint()) {
            Some(complaint) => Err(io::Error::other(complaint.to_string())),
            None => Ok(format!("{} programs", verdicts.len())),
        }
    })())
}

fn live_frames() -> Check {
    let spec = Spec {
        name: "xdp-live-frames",
        used_for: "the `live` egress driver: packets made and sent by eBPF alone",
        need: Need::Optional,
        advice: "sessions use the `tc` egress driver, at about half the rate",
    };
    const XDP_DROP: i32 = 1;
    let insns = [bpf::mov_imm(0, XDP_DROP), bpf::exit()];
    let run = bpf::load(sys::BPF_PROG_TYPE_XDP, sys::BPF_XDP, &insns)
        .and_then(|prog| bpf::run_live_frame(prog.as_fd()));
    spec.outcome(run.map(|()| "works".into()))
}

fn header_options() -> Check {
    let spec = Spec {
        name: "tcp-options",
        used_for: "asking a TCP peer whether it speaks VTL (sock_ops header options)",
        need: Need::Required,
        advice: "unmodified applications cannot be carried: use a kernel with CONFIG_CGROUP_BPF=y",
    };
    // r1 is the context already; reserve 8 bytes, no flags.
    let insns: [Insn; 5] = [
        bpf::mov_imm(2, 8),
        bpf::mov_imm(3, 0),
        bpf::call(sys::BPF_FUNC_reserve_hdr_opt),
        bpf::mov_imm(0, 1),
        bpf::exit(),
    ];
    let prog = bpf::load(
        sys::BPF_PROG_TYPE_SOCK_OPS,
        sys::BPF_CGROUP_SOCK_OPS,
        &insns,
    );
    spec.outcome(prog.map(|_| "works".into()))
}

fn struct_ops() -> Check {
    let spec = Spec {
        name: "struct-ops-cc",
        used_for: "TCP congestion controls written in eBPF",
        need: Need::Optional,
        advice: "only the kernel's own congestion controls can be used for TCP carriers (--carrier \
                 tcp:NAME), and with --carrier auto BBR takes over what loses packets",
    };
    spec.outcome((|| {
        if !nix::unistd::geteuid().is_root() {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        let names: Vec<_> = vtl_bpf::tcp::names().collect();
        for name in &names {
            // Gone again at once.
            vtl_bpf::tcp::Control::register(name).map_err(io::Error::other)?;
        }
        Ok(names.join(", "))
    })())
}

/// Loads a program that only returns `verdict`, attaches it to `target` (an interface index or a
/// cgroup's descriptor), and detaches it again.
pub(super) fn attach(
    prog_type: sys::bpf_prog_type,
    attach_type: sys::bpf_attach_type,
    verdict: i32,
    target: i32,
    flags: u32,
) -> io::Result<()> {
    let insns = [bpf::mov_imm(0, verdict), bpf::exit()];
    let prog = bpf::load(prog_type, attach_type, &insns)?;
    bpf::link(prog.as_fd(), target, attach_type, flags).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parse_release__takes_major_and_minor() {
        assert_eq!(parse_release("6.12.3-amd64"), Some((6, 12)));
        assert_eq!(parse_release("6.6-rc1"), Some((6, 6)));
        assert_eq!(parse_release("linux"), None);
    }

    #[test]
    fn parse_release__orders_by_number_not_by_text() {
        assert!(parse_release("6.18.0") > Some(OLDEST));
        assert!(parse_release("5.15.0") < Some(OLDEST));
    }
}
