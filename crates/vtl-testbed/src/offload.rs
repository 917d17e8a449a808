//! Offloads of a network device, switched by the ethtool ioctl.

use std::io;
use std::os::fd::AsRawFd;

use nix::sys::socket::{AddressFamily, SockFlag, SockType, socket};

use crate::error::{Error, Result};

/// Offloads, as commands of the ioctl with `struct ethtool_value` (`linux/ethtool.h`).
#[derive(Debug, Clone, Copy)]
#[repr(u32)]
pub(crate) enum Offload {
    /// Transmit checksums (`ETHTOOL_STXCSUM`). Off: every frame has complete checksums, and segmentation
    /// offload is off, too, which depends on it.
    TxChecksum = 0x17,
    /// Generic receive offload (`ETHTOOL_SGRO`). On a veth it also switches NAPI on.
    Gro = 0x2c,
}

#[repr(C)]
struct EthtoolValue {
    cmd: u32,
    data: u32,
}

/// Switches an offload of a device in the calling thread's namespace.
pub(crate) fn set(device: &str, offload: Offload, on: bool) -> Result<()> {
    let what = || format!("switch {offload:?} of {device}");
    let control = socket(
        AddressFamily::Inet,
        SockType::Datagram,
        SockFlag::SOCK_CLOEXEC,
        None,
    )
    .map_err(|e| Error::system("open a socket")(e.into()))?;
    let mut value = EthtoolValue {
        cmd: offload as u32,
        data: u32::from(on),
    };
    // SAFETY: all-zero bytes are a valid ifreq.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    assert!(
        device.len() < request.ifr_name.len(),
        "device names are this crate's own and short"
    );
    for (to, from) in request.ifr_name.iter_mut().zip(device.bytes()) {
        *to = from as libc::c_char;
    }
    request.ifr_ifru.ifru_data = (&raw mut value).cast();
    // SAFETY: `request` names a device and points to `value`, which outlives the call and has the layout
    // that this command reads.
    let result = unsafe {
        libc::ioctl(
            control.as_raw_fd(),
            libc::SIOCETHTOOL as _,
            &raw mut request,
        )
    };
    if result < 0 {
        Err(Error::system(what())(io::Error::last_os_error()))
    } else {
        Ok(())
    }
}
