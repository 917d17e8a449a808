//! Capabilities of network interfaces, queried from the kernel.

use std::{
    ffi::{CStr, CString},
    io,
    ops::Range,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
};

use nix::sys::socket::{
    self, AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType,
};

use crate::{Error, Result};

/// A network interface of the calling thread's namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Interface {
    /// Kernel index.
    pub index: u32,
    /// Name.
    pub name: String,
    /// MTU, bytes, without the Ethernet header.
    pub mtu: u32,
}

/// The Ethernet interfaces that are up: VTL attaches to those.
///
/// # Errors
/// [`Error::System`] if the kernel does not list them.
pub fn interfaces() -> Result<Vec<Interface>> {
    let mut found = Vec::new();
    let list = nix::net::if_::if_nameindex().map_err(|e| Error::System {
        what: "listing interfaces".into(),
        source: e.into(),
    })?;
    for entry in list.iter() {
        let name = entry.name().to_string_lossy().into_owned();
        if let Ok(Some(mtu)) = ethernet_mtu(&name) {
            found.push(Interface {
                index: entry.index(),
                name,
                mtu,
            });
        }
    }
    Ok(found)
}

/// Name of the interface with this index in the calling thread's namespace; `None` if there is
/// none.
pub fn name_of(index: u32) -> Option<String> {
    let mut name = [0_u8; libc::IF_NAMESIZE];
    // SAFETY: the buffer holds the longest name.
    if unsafe { libc::if_indextoname(index, name.as_mut_ptr().cast()) }.is_null() {
        return None;
    }
    let name = CStr::from_bytes_until_nul(&name).ok()?;
    Some(name.to_string_lossy().into_owned())
}

/// Readable when interfaces are added, removed or changed in the namespace in which it was opened.
pub struct Changes(OwnedFd);

impl Changes {
    /// Subscribes to link events.
    ///
    /// # Errors
    /// [`Error::System`] if the kernel has no rtnetlink.
    pub fn open() -> Result<Self> {
        let failed = |e: nix::Error| Error::System {
            what: "listening for changes of interfaces".into(),
            source: e.into(),
        };
        let socket = socket::socket(
            AddressFamily::Netlink,
            SockType::Raw,
            SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK,
            SockProtocol::NetlinkRoute,
        )
        .map_err(failed)?;
        let links = NetlinkAddr::new(0, libc::RTMGRP_LINK as u32);
        socket::bind(socket.as_raw_fd(), &links).map_err(failed)?;
        Ok(Self(socket))
    }

    /// Drains the pending events. Call [`interfaces`] for the result: the kernel may have dropped
    /// events.
    pub fn take(&self) {
        // Reading one byte consumes a message; an overrun is an error once, and an event, too.
        let mut byte = [0];
        while !matches!(
            socket::recv(self.0.as_raw_fd(), &mut byte, MsgFlags::empty()),
            Err(nix::Error::EAGAIN)
        ) {}
    }
}

impl AsFd for Changes {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// MTU of an Ethernet interface that is up; `None` for others.
fn ethernet_mtu(name: &str) -> io::Result<Option<u32>> {
    let ask = |request| -> io::Result<libc::ifreq> {
        // SAFETY: ifreq is plain data for which zeros are valid.
        let mut ifr: libc::ifreq = unsafe { std::mem::zeroed() };
        let place = ifr.ifr_name.iter_mut().take(libc::IFNAMSIZ - 1);
        for (to, from) in place.zip(name.bytes()) {
            *to = from as libc::c_char;
        }
        // SAFETY: the requests below read the name and write one union member.
        unsafe { device_ioctl(request, &mut ifr) }?;
        Ok(ifr)
    };
    // SAFETY: SIOCGIFFLAGS filled in this member.
    let flags = i32::from(unsafe { ask(libc::SIOCGIFFLAGS)?.ifr_ifru.ifru_flags });
    if flags & libc::IFF_UP == 0 || flags & libc::IFF_LOOPBACK != 0 {
        return Ok(None);
    }
    // SAFETY: SIOCGIFHWADDR filled in this member.
    let kind = unsafe { ask(libc::SIOCGIFHWADDR)?.ifr_ifru.ifru_hwaddr.sa_family };
    if kind != libc::ARPHRD_ETHER {
        return Ok(None);
    }
    // SAFETY: SIOCGIFMTU filled in this member.
    Ok(Some(
        unsafe { ask(libc::SIOCGIFMTU)?.ifr_ifru.ifru_mtu } as u32
    ))
}

/// Makes an ioctl on a network device.
///
/// # Safety
/// `ifr` must hold what `request` expects; pointers in it must be valid during the call.
unsafe fn device_ioctl(request: libc::Ioctl, ifr: &mut libc::ifreq) -> io::Result<()> {
    let socket = socket::socket(
        AddressFamily::Inet,
        SockType::Datagram,
        SockFlag::SOCK_CLOEXEC,
        None,
    )?;
    // SAFETY: guaranteed by the caller.
    let r = unsafe { libc::ioctl(socket.as_raw_fd(), request, std::ptr::from_mut(ifr)) };
    if r < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Whether the interface transmits XDP frames (`ndo_xdp_xmit`), as the `live` egress driver needs.
/// `None` if the kernel does not tell (before Linux 6.3).
///
/// A veth does if its peer receives through NAPI: with GRO on, or an XDP program.
pub(crate) fn can_transmit_xdp(ifindex: u32) -> Option<bool> {
    let mut options = libbpf_sys::bpf_xdp_query_opts {
        sz: std::mem::size_of::<libbpf_sys::bpf_xdp_query_opts>() as _,
        ..Default::default()
    };
    // SAFETY: the options carry their size and outlive the call.
    let r = unsafe { libbpf_sys::bpf_xdp_query(ifindex as i32, 0, &raw mut options) };
    if r < 0 || options.feature_flags == 0 {
        return None;
    }
    // enum netdev_xdp_act in linux/netdev.h
    const NETDEV_XDP_ACT_NDO_XMIT: u64 = 4;
    Some(options.feature_flags & NETDEV_XDP_ACT_NDO_XMIT != 0)
}

/// Whether the interface is a veth. False if the kernel does not tell.
pub(crate) fn is_veth(ifindex: u32) -> bool {
    driver(ifindex).is_ok_and(|driver| driver == "veth")
}

/// The name of an interface's driver.
///
/// # Errors
/// There is no such interface, or it does not tell.
pub fn driver(ifindex: u32) -> io::Result<String> {
    const ETHTOOL_GDRVINFO: u32 = 3;
    // struct ethtool_drvinfo: the command, then the driver's name.
    const LENGTH: usize = 196;
    const NAME: Range<usize> = 4..36;
    let mut info = [0_u8; LENGTH];
    info[..4].copy_from_slice(&ETHTOOL_GDRVINFO.to_ne_bytes());
    // SAFETY: an ethtool_drvinfo.
    unsafe { ethtool(ifindex, &mut info) }?;
    let name = info[NAME].split(|b| *b == 0).next().unwrap_or_default();
    Ok(String::from_utf8_lossy(name).into_owned())
}

/// The rate that an interface's link was set or negotiated to, bit/s; `None`: it does not tell.
///
/// # Errors
/// As [`driver`].
pub fn link_rate(ifindex: u32) -> io::Result<Option<u64>> {
    const ETHTOOL_GLINKSETTINGS: u32 = 0x4c;
    // struct ethtool_link_settings: the command and the speed, Mbit/s; the number of words of each of the three masks
    // behind it, negative in the answer to a request that has none of them.
    const SPEED: Range<usize> = 4..8;
    const WORDS: usize = 15;
    const LENGTH: usize = 48;
    const UNKNOWN: u32 = u32::MAX;
    let mut settings = vec![0_u8; LENGTH];
    settings[..4].copy_from_slice(&ETHTOOL_GLINKSETTINGS.to_ne_bytes());
    // SAFETY: an ethtool_link_settings without masks, as its zeros say.
    unsafe { ethtool(ifindex, &mut settings) }?;
    let words = settings[WORDS].wrapping_neg();
    if words as i8 <= 0 {
        return Err(io::ErrorKind::InvalidData.into());
    }
    settings[4..].fill(0);
    settings[WORDS] = words;
    settings.resize(LENGTH + 3 * 4 * usize::from(words), 0);
    // SAFETY: one with three masks of so many words of 4 bytes.
    unsafe { ethtool(ifindex, &mut settings) }?;
    let speed = settings[SPEED].first_chunk().copied();
    let speed = speed.map_or(UNKNOWN, u32::from_ne_bytes);
    Ok((speed != 0 && speed != UNKNOWN).then_some(u64::from(speed) * 1_000_000))
}

/// A request of ethtool, answered in its place.
///
/// # Safety
/// `request` must be the whole structure that its first four bytes, the command, are for.
unsafe fn ethtool(ifindex: u32, request: &mut [u8]) -> io::Result<()> {
    // SAFETY: ifreq is plain data for which zeros are valid.
    let mut ifr: libc::ifreq = unsafe { std::mem::zeroed() };
    // SAFETY: the name takes IF_NAMESIZE bytes at most, which is what there is.
    if unsafe { libc::if_indextoname(ifindex, ifr.ifr_name.as_mut_ptr()) }.is_null() {
        return Err(io::Error::last_os_error());
    }
    ifr.ifr_ifru.ifru_data = request.as_mut_ptr().cast();
    // SAFETY: the member points to the command's structure, guaranteed by the caller, which outlives the call.
    unsafe { device_ioctl(libc::SIOCETHTOOL as _, &mut ifr) }
}

/// Index of an interface by name.
///
/// # Errors
/// [`Error::System`] if there is none.
pub fn index_of(name: &str) -> Result<u32> {
    let c = CString::new(name).map_err(|_| Error::System {
        what: format!("interface {name:?}"),
        source: io::ErrorKind::InvalidInput.into(),
    })?;
    // SAFETY: a NUL-terminated string.
    let index = unsafe { libc::if_nametoindex(c.as_ptr()) };
    if index == 0 {
        Err(Error::last(format!("interface {name:?}")))
    } else {
        Ok(index)
    }
}
