//! Attachments held as file descriptors: closing one, or the end of the process, detaches.

use std::{
    mem,
    os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
};

use crate::{Error, Result};

/// Hook of an attachment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hook {
    /// Traffic control, incoming packets (Linux 6.6).
    TcxIngress,
    /// Traffic control, outgoing packets (Linux 6.6).
    TcxEgress,
    /// XDP in the driver's receive path.
    XdpNative,
    /// Generic XDP, independent of the driver, slower.
    XdpGeneric,
}

/// Attaches a program to a network interface of the calling thread's namespace.
///
/// # Errors
/// [`Error::System`] if the kernel lacks the hook, the interface does not exist, or another XDP
/// program is attached.
pub fn attach(program: BorrowedFd<'_>, ifindex: u32, hook: Hook) -> Result<OwnedFd> {
    let (kind, flags) = match hook {
        Hook::TcxIngress => (libbpf_sys::BPF_TCX_INGRESS, 0),
        Hook::TcxEgress => (libbpf_sys::BPF_TCX_EGRESS, 0),
        Hook::XdpNative => (libbpf_sys::BPF_XDP, libbpf_sys::XDP_FLAGS_DRV_MODE),
        Hook::XdpGeneric => (libbpf_sys::BPF_XDP, libbpf_sys::XDP_FLAGS_SKB_MODE),
    };
    let options = libbpf_sys::bpf_link_create_opts {
        sz: mem::size_of::<libbpf_sys::bpf_link_create_opts>() as _,
        flags,
        ..Default::default()
    };
    // SAFETY: the options are initialised with their size, and outlive the call.
    let fd = unsafe {
        libbpf_sys::bpf_link_create(
            program.as_raw_fd(),
            ifindex as i32,
            kind,
            &raw const options,
        )
    };
    if fd < 0 {
        let source = std::io::Error::from_raw_os_error(-fd);
        let hint = match hook {
            Hook::TcxIngress | Hook::TcxEgress if source.raw_os_error() == Some(libc::EINVAL) => {
                " (tcx needs Linux 6.6 or newer)"
            }
            Hook::XdpNative | Hook::XdpGeneric if source.raw_os_error() == Some(libc::EBUSY) => {
                " (another XDP program is attached there)"
            }
            _ => "",
        };
        return Err(Error::System {
            what: format!("attaching to interface {ifindex} at {hook:?}{hint}"),
            source,
        });
    }
    // SAFETY: bpf_link_create returned a new descriptor that nobody else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
