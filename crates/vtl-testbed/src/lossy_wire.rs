//! Loss without an emulator: an XDP program on each of the router's two devices redirects frames to the
//! other one, and drops some at random. For measurements at rates that no emulator in user space
//! reaches.
//!
//! The random numbers are the kernel's, so each run loses other packets.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use nix::net::if_::if_nametoindex;
use vtl_link::{Host, Link};

use crate::emulator::{TO_CLIENT, TO_SERVER};
use crate::error::{Error, Result};
use crate::namespace;

// `linux/bpf.h`, `linux/if_link.h`.
const BPF_PROG_LOAD: libc::c_long = 5;
const BPF_LINK_CREATE: libc::c_long = 28;
const BPF_PROG_TYPE_XDP: u32 = 6;
const BPF_XDP: u32 = 37;
const XDP_FLAGS_DRV_MODE: u32 = 4;
const FUNC_GET_PRANDOM_U32: u32 = 7;
const FUNC_REDIRECT: u32 = 23;
const XDP_DROP: u32 = 1;
const LICENCE: &CStr = c"GPL";

/// The two attachments. Dropping them cuts the link.
#[derive(Debug)]
pub(crate) struct LossyWire {
    _attachments: [OwnedFd; 2],
}

/// One instruction of eBPF.
#[repr(C)]
#[derive(Clone, Copy)]
struct Instruction {
    code: u8,
    registers: u8,
    offset: i16,
    immediate: u32,
}

/// The beginning of `union bpf_attr` for BPF_PROG_LOAD.
#[repr(C)]
struct ProgLoad {
    prog_type: u32,
    insn_cnt: u32,
    insns: u64,
    license: u64,
    rest: [u64; 12],
}

/// The beginning of `union bpf_attr` for BPF_LINK_CREATE.
#[repr(C)]
struct LinkCreate {
    prog_fd: u32,
    target_ifindex: u32,
    attach_type: u32,
    flags: u32,
    rest: [u64; 12],
}

impl LossyWire {
    /// Joins the router's devices, with the loss of `link`.
    pub(crate) fn build(testbed: &str, link: &Link) -> Result<Self> {
        let join = || -> Result<Self> {
            let index = |device: &str| {
                if_nametoindex(device)
                    .map_err(|e| Error::system(format!("find the device {device}"))(e.into()))
            };
            let (client, server) = (index(TO_CLIENT)?, index(TO_SERVER)?);
            Ok(LossyWire {
                _attachments: [
                    attach(client, server, link.loss_up())?,
                    attach(server, client, link.loss_down())?,
                ],
            })
        };
        namespace::run_in(&namespace::path_of(testbed, Host::Router), join)?
    }
}

/// An XDP program that drops a frame if a random 32-bit number is below the threshold for `loss_pct`, and
/// otherwise redirects it to interface `to`.
fn program(to: u32, loss_pct: f64) -> [Instruction; 8] {
    let threshold = (loss_pct / 100.0 * 4_294_967_296.0).min(4_294_967_295.0) as u32;
    let instruction = |code, register, offset, immediate| Instruction {
        code,
        registers: register,
        offset,
        immediate,
    };
    // Calls, 64-bit moves, an unsigned 32-bit jump, exits.
    const CALL: u8 = 0x85;
    const MOVE: u8 = 0xb7;
    const JUMP_IF_LESS: u8 = 0xa6;
    const EXIT: u8 = 0x95;
    [
        instruction(CALL, 0, 0, FUNC_GET_PRANDOM_U32),
        instruction(JUMP_IF_LESS, 0, 4, threshold),
        instruction(MOVE, 1, 0, to),
        instruction(MOVE, 2, 0, 0),
        instruction(CALL, 0, 0, FUNC_REDIRECT),
        instruction(EXIT, 0, 0, 0),
        instruction(MOVE, 0, 0, XDP_DROP),
        instruction(EXIT, 0, 0, 0),
    ]
}

/// Attaches the program to interface `from`.
fn attach(from: u32, to: u32, loss_pct: f64) -> Result<OwnedFd> {
    let instructions = program(to, loss_pct);
    let load = ProgLoad {
        prog_type: BPF_PROG_TYPE_XDP,
        insn_cnt: instructions.len() as u32,
        insns: instructions.as_ptr() as u64,
        license: LICENCE.as_ptr() as u64,
        rest: [0; 12],
    };
    let program = bpf(BPF_PROG_LOAD, &load)
        .map_err(Error::system("load the XDP program that drops frames"))?;
    let create = LinkCreate {
        prog_fd: program.as_raw_fd() as u32,
        target_ifindex: from,
        attach_type: BPF_XDP,
        flags: XDP_FLAGS_DRV_MODE,
        rest: [0; 12],
    };
    bpf(BPF_LINK_CREATE, &create).map_err(Error::system("attach the XDP program that drops frames"))
}

/// The system call bpf(2), for commands that return a descriptor.
fn bpf<T>(command: libc::c_long, attributes: &T) -> io::Result<OwnedFd> {
    // SAFETY: the attributes begin as this command expects and are zero after that; what they point
    // to outlives the call.
    let fd = unsafe {
        libc::syscall(
            libc::SYS_bpf,
            command,
            std::ptr::from_ref(attributes),
            size_of::<T>(),
        )
    };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: both commands return a new descriptor that nobody else has.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn program__threshold_is_the_loss_rate_of_2_to_the_32() {
        assert_eq!(program(7, 0.0)[1].immediate, 0);
        assert_eq!(program(7, 50.0)[1].immediate, 1 << 31);
        assert_eq!(program(7, 100.0)[1].immediate, u32::MAX);
        assert_eq!(program(7, 1.0)[2].immediate, 7);
    }
}
