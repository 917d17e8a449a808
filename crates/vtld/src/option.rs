//! Socket options that nix does not name.

use std::{
    io,
    net::TcpStream,
    os::fd::{AsFd, AsRawFd},
    time::Duration,
};

use libc::c_int;
use nix::{
    errno::Errno,
    sys::socket::{setsockopt, sockopt},
};

/// Type of an option's value.
///
/// # Safety
/// Any bytes are valid: the kernel's, and zeros where it gives fewer.
pub(crate) unsafe trait Value: Copy {}

// SAFETY: a number.
unsafe impl Value for c_int {}
// SAFETY: a number.
unsafe impl Value for u32 {}
// SAFETY: a number.
unsafe impl Value for u64 {}
// SAFETY: numbers.
unsafe impl Value for libc::tcp_info {}

/// Reads an option.
pub(crate) fn get<T: Value>(socket: &impl AsFd, level: c_int, name: c_int) -> io::Result<T> {
    // SAFETY: zeros are valid, as its trait says.
    let mut value: T = unsafe { std::mem::zeroed() };
    let mut length = size_of::<T>() as libc::socklen_t;
    // SAFETY: the value and its size, both alive during the call; any bytes are valid in it.
    let result = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            level,
            name,
            (&raw mut value).cast(),
            &raw mut length,
        )
    };
    Errno::result(result)?;
    Ok(value)
}

/// Sets an option.
pub(crate) fn set<T: Value>(
    socket: &impl AsFd,
    level: c_int,
    name: c_int,
    value: T,
) -> io::Result<()> {
    // SAFETY: the value and its size; the kernel only reads it.
    let result = unsafe {
        libc::setsockopt(
            socket.as_fd().as_raw_fd(),
            level,
            name,
            (&raw const value).cast(),
            size_of::<T>() as libc::socklen_t,
        )
    };
    Errno::result(result)?;
    Ok(())
}

/// Unanswered keepalive probes after which TCP gives up: an outage is not the end, so the kernel's maximum.
const PROBES: u32 = 127;

/// Keepalive of an application's idle connection, against timeouts of NATs and firewalls: seconds of silence
/// before a probe, and after an unanswered one. A vanished peer ends it after two hours, about Linux's default.
pub(crate) const IDLE_S: u32 = 150;
pub(crate) const IDLE_AGAIN_S: u32 = 60;

/// Enables frequent keepalive probes, which elicit the reset of a connection whose daemon has ended: the reset
/// is sent once and may get lost.
pub(crate) fn keep_asking(tcp: &impl AsFd) {
    const EVERY_S: u32 = 2;
    keep_alive(tcp, EVERY_S, EVERY_S);
}

/// Enables TCP keepalive: probes after `idle_s` seconds of silence, and every `interval_s` seconds after an
/// unanswered one.
pub(crate) fn keep_alive(tcp: &impl AsFd, idle_s: u32, interval_s: u32) {
    // Best effort: without it the end is noticed later. Some kernels lack the first three for MPTCP, and use
    // the system's values.
    let _ = setsockopt(tcp, sockopt::TcpKeepCount, &PROBES);
    let _ = setsockopt(tcp, sockopt::TcpKeepInterval, &interval_s);
    // An older connection is probed at once.
    let _ = setsockopt(tcp, sockopt::TcpKeepIdle, &idle_s);
    let _ = setsockopt(tcp, sockopt::KeepAlive, &true);
}

/// The kernel's cookie of a socket, unique until reboot.
pub(crate) fn cookie(socket: &impl AsFd) -> io::Result<u64> {
    get(socket, libc::SOL_SOCKET, libc::SO_COOKIE)
}

/// The kernel's cookie of the socket's network namespace; that of an accepted Unix socket is its client's.
pub(crate) fn netns_cookie(socket: &impl AsFd) -> io::Result<u64> {
    const SO_NETNS_COOKIE: c_int = 71; // libc lacks it
    get(socket, libc::SOL_SOCKET, SO_NETNS_COOKIE)
}

/// With `abort`, closing the socket resets the connection, even if this process is killed: a premature end must
/// not look like an orderly one.
pub(crate) fn abort_on_close(socket: &impl AsFd, abort: bool) -> io::Result<()> {
    let linger = libc::linger {
        l_onoff: abort.into(),
        l_linger: 0,
    };
    Ok(setsockopt(socket, sockopt::Linger, &linger)?)
}

/// TCP's counters and estimates (TCP_INFO); of MPTCP, those of the first subflow.
pub(crate) fn tcp_info(socket: &TcpStream) -> io::Result<libc::tcp_info> {
    get(socket, libc::IPPROTO_TCP, libc::TCP_INFO)
}

/// Has the kernel keep so many received bytes before they are read, at most half of its own maximum (`tcp_rmem`), and go on
/// adapting that.
pub(crate) fn make_room(socket: &impl AsFd, bytes: u32) -> io::Result<()> {
    // For a reader that waits for so many; the room stays when it does not any more.
    set(socket, libc::SOL_SOCKET, libc::SO_RCVLOWAT, bytes)?;
    set(socket, libc::SOL_SOCKET, libc::SO_RCVLOWAT, 1u32)
}

/// TCP's smoothed round-trip time: right after connecting, that of the handshake.
pub(crate) fn tcp_rtt(socket: &TcpStream) -> Option<Duration> {
    let info = tcp_info(socket).ok()?;
    (info.tcpi_rtt > 0).then(|| Duration::from_micros(info.tcpi_rtt.into()))
}

#[cfg(test)]
#[allow(non_snake_case)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn make_room__stays_when_the_reader_waits_for_a_byte() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let tcp = TcpStream::connect(listener.local_addr().expect("bound")).expect("connected");
        let option = |name| get::<u32>(&tcp, libc::SOL_SOCKET, name).expect("a number");
        let bytes = 256 << 10;
        assert!(option(libc::SO_RCVBUF) < bytes);
        make_room(&tcp, bytes).expect("a TCP connection");
        assert!(option(libc::SO_RCVBUF) >= bytes);
        assert_eq!(option(libc::SO_RCVLOWAT), 1);
    }
}
