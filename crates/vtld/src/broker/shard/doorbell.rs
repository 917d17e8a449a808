//! Wake-up of vtld by ingress: a copy of the packet with its own EtherType on the loopback, which a packet
//! socket receives at once. A wake-up through a BPF ring buffer is an interrupt to the own processor, which
//! takes several microseconds in a virtual machine. The event itself is in the ring buffer in either case.

use std::{
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
};

use nix::sys::socket::{MsgFlags, recv};
use vtl_proto::intf;

use crate::scope::LOOPBACK;

/// Frames left in the socket before it is drained; it has room for many times more.
const KEPT: u32 = 16;

/// A socket for wake-ups. Watch it edge-triggered: it is not drained each time.
pub(crate) struct Doorbell {
    socket: OwnedFd,
    rings: u32,
}

impl Doorbell {
    /// Opens a shard's, which receives frames with its number as their mark.
    pub(super) fn of_shard(number: u32) -> io::Result<Self> {
        Self::of(intf::VTL_DOORBELL_ETHERTYPE, Some(number))
    }

    /// Opens that of the thread of flows.
    pub(crate) fn of_flows() -> io::Result<Self> {
        Self::of(intf::VTL_FLOWS_ETHERTYPE, None)
    }

    fn of(ethertype: u32, mark: Option<u32>) -> io::Result<Self> {
        let protocol = (ethertype as u16).to_be();
        let kind = libc::SOCK_DGRAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        // SAFETY: a plain system call. Protocol 0: nothing comes before it is bound.
        let fd = unsafe { libc::socket(libc::AF_PACKET, kind, 0) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: a new descriptor that nobody else owns.
        let socket = unsafe { OwnedFd::from_raw_fd(fd) };
        if let Some(mark) = mark {
            hear_only(&socket, mark)?;
        }
        // SAFETY: zeros are a valid address.
        let mut at: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
        at.sll_family = libc::AF_PACKET as u16;
        at.sll_protocol = protocol;
        at.sll_ifindex = LOOPBACK as i32;
        // SAFETY: the address and its size, both alive during the call.
        let bound = unsafe {
            libc::bind(
                fd,
                (&raw const at).cast(),
                size_of::<libc::sockaddr_ll>() as libc::socklen_t,
            )
        };
        if bound < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Self { socket, rings: 0 })
    }

    /// Notes a wake-up; drains the socket every few of them.
    pub(crate) fn hear(&mut self) {
        self.rings += 1;
        if self.rings >= KEPT {
            self.rings = 0;
            let socket = self.socket.as_raw_fd();
            while recv(socket, &mut [0], MsgFlags::MSG_DONTWAIT).is_ok() {}
        }
    }
}

/// Attaches a filter that passes only frames with this mark.
fn hear_only(socket: &OwnedFd, mark: u32) -> io::Result<()> {
    const WHOLE: u32 = u32::MAX;
    let instruction = |code: u32, jf: u8, k: u32| libc::sock_filter {
        code: code as u16,
        jt: 0,
        jf,
        k,
    };
    let ancillary = (libc::SKF_AD_OFF + libc::SKF_AD_MARK) as u32;
    let filter = [
        instruction(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, ancillary),
        instruction(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 1, mark),
        instruction(libc::BPF_RET | libc::BPF_K, 0, WHOLE),
        instruction(libc::BPF_RET | libc::BPF_K, 0, 0),
    ];
    let program = libc::sock_fprog {
        len: filter.len() as u16,
        filter: filter.as_ptr().cast_mut(),
    };
    // SAFETY: the program and its instructions, with their sizes, are alive during the call, which
    // only reads them.
    let attached = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_ATTACH_FILTER,
            (&raw const program).cast(),
            size_of::<libc::sock_fprog>() as libc::socklen_t,
        )
    };
    if attached < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

impl AsRawFd for Doorbell {
    fn as_raw_fd(&self) -> RawFd {
        self.socket.as_raw_fd()
    }
}

impl AsFd for Doorbell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
