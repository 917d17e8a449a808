//! TCP as an application uses it.

use std::io::{self, Read, Write};
use std::mem::{offset_of, size_of};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::time::Instant;

use nix::sys::socket::{
    AddressFamily, Backlog, SockFlag, SockType, SockaddrStorage, bind, listen, setsockopt, socket,
    sockopt,
};

use super::conn::{Conn, run_blocking};
use super::workload::{Progress, serve_one};
use super::{ASK_EVERY, Work};
use crate::payload::GapChecker;

/// Bytes read at a time.
const READ: usize = 256 * 1024;

/// A connection.
pub(super) struct Tcp {
    stream: TcpStream,
    buffer: Vec<u8>,
}

impl Tcp {
    pub(super) fn new(stream: TcpStream) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        Ok(Self {
            stream,
            buffer: vec![0; READ],
        })
    }

    /// Connects, with this congestion control if one is named.
    pub(super) fn connect(to: SocketAddr, control: Option<&str>) -> io::Result<Self> {
        let socket = open(to, control)?;
        let address = SockaddrStorage::from(to);
        nix::sys::socket::connect(socket.as_raw_fd(), &address)?;
        Self::new(socket.into())
    }

    /// The client's part where bytes may be lost on the way: asks until some come, and counts what
    /// comes until the server has closed.
    pub(super) fn fetch_what_arrives(
        &mut self,
        work: Work,
        limit_s: f64,
        progress: &Progress,
    ) -> io::Result<()> {
        self.stream.set_read_timeout(Some(ASK_EVERY))?;
        let begun = Instant::now();
        let mut checker = GapChecker::default();
        self.stream.write_all(&work.encode())?;
        loop {
            match self.stream.read(&mut self.buffer) {
                Ok(0) => return Ok(()),
                Ok(n) => progress.add(n as u64, checker.check(&self.buffer[..n])),
                Err(error)
                    if error.kind() == io::ErrorKind::WouldBlock
                        && begun.elapsed().as_secs_f64() < limit_s =>
                {
                    if progress.bytes() == 0 {
                        self.stream.write_all(&work.encode())?;
                    }
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// The server's part: answers one question, however often it comes.
    pub(super) fn serve_what_arrives(mut self) -> io::Result<()> {
        run_blocking(serve_one(&mut self))?;
        self.stream.shutdown(Shutdown::Write)?;
        while self.stream.read(&mut self.buffer)? > 0 {}
        Ok(())
    }
}

impl Conn for Tcp {
    async fn send(&mut self, data: &[u8]) -> io::Result<()> {
        self.stream.write_all(data)
    }

    async fn receive(&mut self, mut take: impl FnMut(&[u8])) -> io::Result<usize> {
        let n = self.stream.read(&mut self.buffer)?;
        take(&self.buffer[..n]);
        Ok(n)
    }
}

fn open(to: SocketAddr, control: Option<&str>) -> io::Result<OwnedFd> {
    let family = match to {
        SocketAddr::V4(_) => AddressFamily::Inet,
        SocketAddr::V6(_) => AddressFamily::Inet6,
    };
    let socket = socket(family, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
    if let Some(control) = control {
        setsockopt(&socket, sockopt::TcpCongestion, &control.into())?;
    }
    Ok(socket)
}

/// Listens, with this congestion control for what it accepts.
pub(super) fn bind_listener(at: SocketAddr, control: Option<&str>) -> io::Result<TcpListener> {
    let socket = open(at, control)?;
    setsockopt(&socket, sockopt::ReuseAddr, &true)?;
    bind(socket.as_raw_fd(), &SockaddrStorage::from(at))?;
    listen(&socket, Backlog::MAXCONN)?;
    Ok(socket.into())
}

/// A connection that can be looked at while others use it.
pub(super) fn watch(stream: &TcpStream) -> io::Result<OwnedFd> {
    let copy = stream.try_clone()?;
    Ok(copy.into())
}

/// Packets sent, and sent again.
pub(super) fn retransmissions(socket: &OwnedFd) -> (u64, u64) {
    info(socket).map_or((0, 0), |info| {
        (u64::from(info.data_segs_out), u64::from(info.total_retrans))
    })
}

/// What a connection really uses: the name of its congestion control first.
pub(super) fn settings(socket: &OwnedFd) -> String {
    let mut parts = vec![congestion(socket).unwrap_or_else(|_| "unknown".to_owned())];
    if let Ok(info) = info(socket) {
        let option = |bit: u8, name: &str| {
            let on = info.options & bit != 0;
            format!("{name} {}", if on { "on" } else { "OFF" })
        };
        parts.push(option(2, "SACK"));
        parts.push(option(1, "timestamps"));
        parts.push(format!("MSS {}", info.snd_mss));
    }
    for key in ["tcp_rmem", "tcp_wmem"] {
        let text = std::fs::read_to_string(format!("/proc/sys/net/ipv4/{key}")).unwrap_or_default();
        let max = text.split_whitespace().last().unwrap_or("?");
        parts.push(format!("{key} up to {max}"));
    }
    parts.join(", ")
}

fn congestion(socket: &OwnedFd) -> io::Result<String> {
    let mut name = [0_u8; 16];
    let length = get(socket, libc::TCP_CONGESTION, &mut name)?;
    let name = name[..length].split(|b| *b == 0).next().unwrap_or_default();
    Ok(String::from_utf8_lossy(name).into_owned())
}

/// The beginning of the kernel's `struct tcp_info` (`linux/tcp.h`), as far as it is looked at.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct TcpInfo {
    _state: [u8; 5],
    options: u8,
    _scale: [u8; 2],
    _timeouts: [u32; 2],
    snd_mss: u32,
    _figures: [u32; 20],
    // At byte 100.
    total_retrans: u32,
    _rates: [u64; 4],
    _segments: [u32; 5],
    // At byte 156.
    data_segs_out: u32,
}

const _: () = assert!(offset_of!(TcpInfo, total_retrans) == 100);
const _: () = assert!(offset_of!(TcpInfo, data_segs_out) == 156);

fn info(socket: &OwnedFd) -> io::Result<TcpInfo> {
    let mut bytes = [0_u8; size_of::<TcpInfo>()];
    get(socket, libc::TCP_INFO, &mut bytes)?;
    // SAFETY: plain numbers, for which any bytes are valid; the sizes agree.
    Ok(unsafe { std::ptr::read_unaligned(bytes.as_ptr().cast()) })
}

fn get(socket: &OwnedFd, option: i32, value: &mut [u8]) -> io::Result<usize> {
    let mut length = value.len() as libc::socklen_t;
    // SAFETY: `value` and `length` outlive the call; the kernel writes at most `length` bytes.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_TCP,
            option,
            value.as_mut_ptr().cast(),
            &raw mut length,
        )
    };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(length as usize)
}

/// Raises the limits of a socket's buffers as far as root may.
pub(super) fn enlarge(socket: &impl AsFd, bytes: usize) {
    let _ = setsockopt(socket, sockopt::RcvBufForce, &bytes);
    let _ = setsockopt(socket, sockopt::SndBufForce, &bytes);
}
