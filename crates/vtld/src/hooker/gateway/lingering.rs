//! Sockets that live on in the kernel once a gateway's connections have ended in order, a minute in TIME_WAIT.
//!
//! They have addresses of other hosts. While the gateway's programs and routes are there they do what any such socket
//! does: acknowledge an end that the other side repeats. Without, nothing reaches them any more, and connections with the
//! same ends are not forwarded if `tcp_early_demux` is on. So they are destroyed with the routes.
//!
//! Other programs have sockets with addresses of other hosts as well (TPROXY). Those of a gateway are known by a mark,
//! which they get as late as may be: until their end their packets have none, as rules for marks may treat them otherwise
//! than the router's own.

use std::{
    io,
    net::{Shutdown, TcpStream},
    os::fd::OwnedFd,
};

use nix::sys::socket::SockProtocol;
use vtl_bpf::netlink::{self, attribute};
use vtl_proto::intf::VTL_GATEWAY_MARK;

use super::super::sock;
use crate::option;

// linux/sock_diag.h and linux/inet_diag.h, which libc lacks.
const SOCK_DIAG_BY_FAMILY: u16 = 20;
const SOCK_DESTROY: u16 = 21;
const INET_DIAG_REQ_BYTECODE: u16 = 1;
const INET_DIAG_BC_MARK_COND: u8 = 10;
/// Size of `inet_diag_sockid`, by which a socket is named, and where an `inet_diag_msg` has it.
const SOCKET: usize = 48;
const SOCKET_AT: usize = 4;

/// Sends the end of a stream, as [`TcpStream::shutdown`] does. All connections that may be a gateway's end by this.
pub(crate) fn shut_down(stream: &TcpStream, how: Shutdown) -> io::Result<()> {
    // Of both families; it does not fail on a TCP socket.
    let is_transparent = option::get(stream, libc::IPPROTO_IP, libc::IP_TRANSPARENT);
    if is_transparent.is_ok_and(|is_transparent: libc::c_int| is_transparent != 0) {
        // Fails without CAP_NET_ADMIN: then it lives on for its minute.
        let _ = sock::mark(stream, VTL_GATEWAY_MARK);
    }
    stream.shutdown(how)
}

/// An `inet_diag_req_v2`, of TCP sockets in any state.
fn request(family: u8, socket: &[u8; SOCKET]) -> Vec<u8> {
    let mut request = vec![family, libc::IPPROTO_TCP as u8, 0, 0];
    request.extend(u32::MAX.to_ne_bytes());
    request.extend(socket);
    request
}

/// Destroys the sockets of ended connections, in this thread's namespace. Failures are logged: they live a minute.
pub(super) fn sweep() {
    match try_sweep() {
        Ok(0) => {}
        Ok(count) => tracing::debug!(count, "gateway: sockets of ended connections destroyed"),
        Err(error) => {
            tracing::debug!(%error, "gateway: cannot destroy the sockets of ended connections");
        }
    }
}

fn try_sweep() -> io::Result<usize> {
    let socket = netlink::open(SockProtocol::NetlinkSockDiag)?;
    let mut count = 0;
    for family in super::routes::families() {
        for id in marked(&socket, family)? {
            match netlink::request(&socket, SOCK_DESTROY, 0, &request(family, &id)) {
                Ok(()) => count += 1,
                // Its minute is over.
                Err(error) if error.raw_os_error() == Some(libc::ENOENT) => {}
                // A kernel without `CONFIG_INET_DIAG_DESTROY`.
                Err(error) => return Err(error),
            }
        }
    }
    Ok(count)
}

/// The sockets of one family with a gateway's mark.
fn marked(socket: &OwnedFd, family: u8) -> io::Result<Vec<[u8; SOCKET]>> {
    // One instruction of 12 bytes: behind it ends the filter, which a socket passes that gets there exactly.
    let mut filter = vec![INET_DIAG_BC_MARK_COND, 12];
    filter.extend(16_u16.to_ne_bytes());
    filter.extend(VTL_GATEWAY_MARK.to_ne_bytes());
    filter.extend(u32::MAX.to_ne_bytes());
    let mut all = request(family, &[0; SOCKET]);
    all.extend(attribute(INET_DIAG_REQ_BYTECODE, &filter));
    let mut found = Vec::new();
    netlink::dump(socket, SOCK_DIAG_BY_FAMILY, &all, |message| {
        let id = message.get(SOCKET_AT..).and_then(<[u8]>::first_chunk);
        found.extend(id);
    })?;
    Ok(found)
}

#[cfg(test)]
#[allow(non_snake_case)]
mod tests {
    use std::{
        net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener},
        process::Command,
    };

    use vtl_testing::until;

    use super::*;

    /// Local ends of sockets in TIME_WAIT in this thread's namespace, as `ss` shows them.
    fn waiting() -> Vec<String> {
        let ss = Command::new("ss")
            .args(["-Htn", "state", "time-wait"])
            .output();
        let shown = String::from_utf8(ss.expect("ss runs").stdout).expect("UTF-8");
        let end = |line: &str| line.split_whitespace().nth(2).map(str::to_owned);
        shown.lines().filter_map(end).collect()
    }

    /// A connection that the returned end closes first.
    fn ended(listener: &TcpListener, is_transparent: bool) -> SocketAddr {
        let to = listener.local_addr().expect("an address");
        let socket = sock::tcp(to.ip()).expect("a socket");
        if is_transparent {
            super::super::connect::set_transparent(&socket, to.ip()).expect("root may");
        }
        sock::connect(&socket, to).expect("it listens");
        let (other, from) = listener.accept().expect("a connection");
        let stream = TcpStream::from(socket);
        shut_down(&stream, Shutdown::Write).expect("open");
        drop(other);
        from
    }

    #[test]
    fn sweep__takes_a_gateways_sockets_only() {
        if !nix::unistd::geteuid().is_root() {
            vtl_testing::skip("namespaces take root");
            return;
        }
        let elsewhere = || {
            nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).expect("a namespace");
            let up = Command::new("ip")
                .args(["link", "set", "lo", "up"])
                .status();
            assert!(up.expect("ip runs").success());
            let mut others = Vec::new();
            for ip in [Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()] {
                let listener = TcpListener::bind(SocketAddr::new(ip, 0)).expect("a port");
                ended(&listener, true);
                others.push(ended(&listener, false).to_string());
            }
            others.sort();
            until("all have ended", || waiting().len() == 4);
            sweep();
            let mut left = waiting();
            left.sort();
            assert_eq!(left, others);
        };
        std::thread::scope(|scope| scope.spawn(elsewhere).join().expect("no panic"));
    }
}
