//! What crosses the network.

use std::{
    collections::HashSet,
    io,
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread::{self, JoinHandle},
};

use etherparse::{IpNumber, IpSlice, TcpSlice};
use nix::sys::socket::{MsgFlags, recv, setsockopt, sockopt};
use vtl_testbed::Host;

use super::World;

/// What a host sends to the other one, and receives. (Not what it sends as live frames, which no tap sees: the other
/// host receives that.)
pub(crate) struct Wire {
    is_over: Arc<AtomicBool>,
    thread: JoinHandle<Vec<u8>>,
}

impl Wire {
    /// Hears what `part` says of each IP packet.
    pub(crate) fn tap(world: &World, host: Host, part: fn(&[u8]) -> &[u8]) -> Self {
        let open = || packet_socket("eth0", libc::SOCK_DGRAM);
        let socket = world.testbed.in_netns(host, open);
        let socket = socket.expect("a namespace");
        setsockopt(&socket, sockopt::RcvBufForce, &(64 << 20)).expect("root");
        let patience = nix::sys::time::TimeVal::new(0, 50_000);
        setsockopt(&socket, sockopt::ReceiveTimeout, &patience).expect("set");
        let is_over = Arc::new(AtomicBool::new(false));
        let until = Arc::clone(&is_over);
        let thread = thread::spawn(move || {
            let mut heard = Vec::new();
            let mut buffer = vec![0; 1 << 17];
            loop {
                match recv(socket.as_raw_fd(), &mut buffer, MsgFlags::empty()) {
                    Ok(length) => heard.extend_from_slice(part(&buffer[..length])),
                    Err(_) if until.load(Relaxed) => return heard,
                    Err(_) => {}
                }
            }
        });
        Self { is_over, thread }
    }

    /// All that was heard.
    pub(crate) fn end(self) -> Vec<u8> {
        self.is_over.store(true, Relaxed);
        self.thread.join().expect("it ends")
    }
}

/// A socket for all packets of an interface in this thread's namespace: with their Ethernet headers (`SOCK_RAW`) or without
/// (`SOCK_DGRAM`).
pub(crate) fn packet_socket(interface: &str, kind: i32) -> OwnedFd {
    // SAFETY: a plain system call.
    let fd = unsafe { libc::socket(libc::AF_PACKET, kind, 0) };
    assert!(fd >= 0, "{}", io::Error::last_os_error());
    // SAFETY: a new descriptor that nobody else owns.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    let index = nix::net::if_::if_nametoindex(interface).expect("the link's end");
    let address = libc::sockaddr_ll {
        sll_family: libc::AF_PACKET as u16,
        sll_protocol: (libc::ETH_P_ALL as u16).to_be(),
        sll_ifindex: index as i32,
        sll_hatype: 0,
        sll_pkttype: 0,
        sll_halen: 0,
        sll_addr: [0; 8],
    };
    // SAFETY: an address of its own length.
    let bound = unsafe {
        let length = size_of_val(&address) as libc::socklen_t;
        libc::bind(fd, (&raw const address).cast(), length)
    };
    assert_eq!(bound, 0, "{}", io::Error::last_os_error());
    socket
}

/// The payload of an IP packet.
pub(crate) fn any_payload(packet: &[u8]) -> &[u8] {
    IpSlice::from_slice(packet).map_or(&[], |ip| ip.payload().payload)
}

/// The same of TCP alone.
pub(crate) fn tcp_payload(packet: &[u8]) -> &[u8] {
    match IpSlice::from_slice(packet).map(|ip| ip.payload().clone()) {
        Ok(ip) if ip.ip_number == IpNumber::TCP => {
            TcpSlice::from_slice(ip.payload).map_or(&[], |tcp| tcp.payload())
        }
        _ => &[],
    }
}

/// How many words of these bytes are in what was heard, wherever.
pub(crate) fn words_of(bytes: &[u8], heard: &[u8]) -> usize {
    let words: HashSet<&[u8]> = bytes.chunks_exact(8).collect();
    let heard: HashSet<&[u8]> = heard.windows(8).filter(|w| words.contains(w)).collect();
    heard.len()
}
