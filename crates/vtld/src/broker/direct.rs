//! The socket through which an aware application runs its own session's egress, and vtld that of hooked flows,
//! for single packets: a datagram sent to nobody on the loopback becomes the session's next packet.

use std::{
    io,
    net::UdpSocket,
    os::fd::{AsFd, OwnedFd},
};

use libbpf_rs::{MapCore, MapFlags, MapHandle};
use nix::sys::socket::{setsockopt, sockopt};
use vtl_proto::intf;

use crate::option;

/// A UDP socket bound to the loopback; unprivileged processes cannot change that.
pub(super) struct DirectSocket {
    /// `None` once granted to the application.
    socket: Option<UdpSocket>,
    cookie: u64,
}

impl DirectSocket {
    /// Opens a socket, not registered yet.
    pub(super) fn open() -> io::Result<Self> {
        let socket = UdpSocket::bind("127.0.0.1:0")?;
        setsockopt(&socket, sockopt::BindToDevice, &"lo".into())?;
        setsockopt(&socket, sockopt::Mark, &intf::VTL_DIRECT_MARK)?;
        // The packet's content is replaced: no checksum.
        option::set(&socket, libc::SOL_SOCKET, libc::SO_NO_CHECK, 1)?;
        socket.connect("127.0.0.1:9")?;
        socket.set_nonblocking(true)?;
        let cookie = option::cookie(&socket)?;
        let socket = Some(socket);
        Ok(Self { socket, cookie })
    }

    /// Closes the daemon's descriptor; the application's stays valid.
    pub(super) fn release(&mut self) {
        self.socket = None;
    }

    /// Duplicates the descriptor for the application.
    pub(super) fn descriptor(&self) -> Option<OwnedFd> {
        self.socket.as_ref()?.as_fd().try_clone_to_owned().ok()
    }

    /// Registers the socket: datagrams sent through it run the session's egress from now on.
    pub(super) fn register(&self, callers: &MapHandle, sid: u32) -> io::Result<()> {
        let (key, value) = (self.cookie.to_ne_bytes(), sid.to_ne_bytes());
        callers
            .update(&key, &value, MapFlags::ANY)
            .map_err(io::Error::other)
    }

    /// Unregisters the socket.
    pub(super) fn forget(&self, callers: &MapHandle) {
        // Unregistered already is fine.
        let _ = callers.delete(&self.cookie.to_ne_bytes());
    }
}
