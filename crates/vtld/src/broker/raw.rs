//! Sockets for control packets: raw ones for IP protocol 253, and the UDP port, over IPv4 and IPv6.
//! The root programs let only NEGO, NEGO_ACK, NEGO_NACK, CLOSE and SIZE through to them.

use std::{
    io::{self, IoSlice, IoSliceMut},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6, UdpSocket},
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
};

use etherparse::Ipv4HeaderSlice;
use nix::{
    cmsg_space,
    errno::Errno,
    sys::socket::{
        ControlMessage, ControlMessageOwned, MsgFlags, SockaddrIn, SockaddrIn6, SockaddrLike,
        SockaddrStorage, bind, recvmsg, sendmsg, setsockopt, sockopt,
    },
};
use vtl_proto::{intf, nego::Encapsulation};

use crate::option;

/// A socket for packets in one encapsulation: a raw IP socket, or a UDP socket.
pub(super) struct Raw {
    fd: OwnedFd,
    v6: bool,
    encapsulation: Encapsulation,
}

/// Encapsulation, and port or connection, of packets to or from a peer's address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Via {
    Native,
    /// The peer's UDP port.
    Udp(u16),
    /// The connection's number, see `broker/tunnel.rs`.
    Tcp(u32),
}

impl Via {
    /// Over UDP to a port, or natively if it is 0.
    pub(super) fn port(port: u16) -> Self {
        match port {
            0 => Self::Native,
            port => Self::Udp(port),
        }
    }

    pub(super) fn encapsulation(self) -> Encapsulation {
        match self {
            Self::Native => Encapsulation::Native,
            Self::Udp(_) => Encapsulation::Udp,
            Self::Tcp(_) => Encapsulation::Tcp,
        }
    }
}

/// A received packet, without its IP and UDP headers.
pub(super) struct Received {
    pub(super) from: IpAddr,
    pub(super) via: Via,
    pub(super) to: IpAddr,
    pub(super) bytes: Vec<u8>,
}

// linux/udp.h: datagrams without checksum over IPv6 (RFC 6935).
const UDP_NO_CHECK6_TX: libc::c_int = 101;
const UDP_NO_CHECK6_RX: libc::c_int = 102;

impl Raw {
    /// Opens a socket for one IP version and one encapsulation other than TCP.
    pub(super) fn open(v6: bool, encapsulation: Encapsulation) -> io::Result<Self> {
        let family = if v6 { libc::AF_INET6 } else { libc::AF_INET };
        let (kind, protocol) = match encapsulation {
            Encapsulation::Native => (libc::SOCK_RAW, intf::VTL_IPPROTO as i32),
            Encapsulation::Udp => (libc::SOCK_DGRAM, libc::IPPROTO_UDP),
            Encapsulation::Tcp => return Err(io::ErrorKind::Unsupported.into()),
        };
        let kind = kind | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        // SAFETY: a plain system call.
        let fd = unsafe { libc::socket(family, kind, protocol) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: a new descriptor that nobody else owns.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        if v6 {
            setsockopt(&fd, sockopt::Ipv6RecvPacketInfo, &true)?;
        }
        unfragmented(fd.as_fd(), v6)?;
        if encapsulation == Encapsulation::Udp {
            take_port(&fd, v6)?;
        }
        Ok(Self {
            fd,
            v6,
            encapsulation,
        })
    }

    /// Sends from a local address; `port`: destination UDP port.
    pub(super) fn send(&self, bytes: &[u8], from: IpAddr, to: IpAddr, port: u16) -> io::Result<()> {
        let parts = [IoSlice::new(bytes)];
        match (from, to) {
            (IpAddr::V4(from), IpAddr::V4(to)) => {
                let info = libc::in_pktinfo {
                    ipi_ifindex: 0,
                    ipi_spec_dst: libc::in_addr {
                        s_addr: u32::from(from).to_be(),
                    },
                    ipi_addr: libc::in_addr { s_addr: 0 },
                };
                let to = SockaddrIn::from(SocketAddrV4::new(to, port));
                self.transmit(&parts, &ControlMessage::Ipv4PacketInfo(&info), &to)
            }
            (IpAddr::V6(from), IpAddr::V6(to)) => {
                let info = libc::in6_pktinfo {
                    ipi6_addr: libc::in6_addr {
                        s6_addr: from.octets(),
                    },
                    ipi6_ifindex: 0,
                };
                let to = SockaddrIn6::from(SocketAddrV6::new(to, port, 0, 0));
                self.transmit(&parts, &ControlMessage::Ipv6PacketInfo(&info), &to)
            }
            _ => Err(io::ErrorKind::InvalidInput.into()),
        }
    }

    fn transmit(
        &self,
        parts: &[IoSlice<'_>],
        info: &ControlMessage<'_>,
        to: &impl SockaddrLike,
    ) -> io::Result<()> {
        sendmsg(
            self.fd.as_raw_fd(),
            parts,
            std::slice::from_ref(info),
            MsgFlags::empty(),
            Some(to),
        )?;
        Ok(())
    }

    /// Receives the next packet; `None` if there is none.
    pub(super) fn receive(&self) -> io::Result<Option<Received>> {
        let mut buffer = [0; 2048];
        let mut space = cmsg_space!(libc::in6_pktinfo);
        let mut parts = [IoSliceMut::new(&mut buffer)];
        let message = match recvmsg::<SockaddrStorage>(
            self.fd.as_raw_fd(),
            &mut parts,
            Some(&mut space),
            MsgFlags::empty(),
        ) {
            Ok(message) => message,
            Err(Errno::EAGAIN | Errno::EINTR) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let from = message.address.and_then(|a| {
            a.as_sockaddr_in()
                .map(|a| (IpAddr::V4(a.ip()), a.port()))
                .or_else(|| a.as_sockaddr_in6().map(|a| (IpAddr::V6(a.ip()), a.port())))
        });
        let mut to = IpAddr::V6(Ipv6Addr::UNSPECIFIED);
        for control in message.cmsgs()? {
            match control {
                ControlMessageOwned::Ipv6PacketInfo(info) => {
                    to = IpAddr::V6(info.ipi6_addr.s6_addr.into());
                }
                ControlMessageOwned::Ipv4PacketInfo(info) => {
                    to = IpAddr::V4(u32::from_be(info.ipi_addr.s_addr).into());
                }
                _ => {}
            }
        }
        let count = message.bytes;
        let mut bytes = &buffer[..count];
        if !self.v6 && self.encapsulation == Encapsulation::Native {
            // IPv4 raw sockets deliver the IP header; the root programs allow no options.
            let Ok(ip) = Ipv4HeaderSlice::from_slice(bytes) else {
                return Ok(None);
            };
            to = ip.destination_addr().into();
            bytes = &bytes[ip.slice().len()..];
        }
        let Some((from, port)) = from else {
            return Ok(None);
        };
        Ok(Some(Received {
            from,
            via: match self.encapsulation {
                Encapsulation::Native | Encapsulation::Tcp => Via::Native,
                Encapsulation::Udp => Via::Udp(port),
            },
            to,
            bytes: bytes.to_vec(),
        }))
    }
}

impl AsFd for Raw {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Binds VTL's UDP port. Datagrams have no checksum, as those of sessions, so that a negotiation by UDP shows
/// that such datagrams get through.
fn take_port(fd: &OwnedFd, v6: bool) -> io::Result<()> {
    let port = intf::VTL_UDP_PORT as u16;
    if v6 {
        setsockopt(fd, sockopt::Ipv6V6Only, &true)?;
        option::set(&fd, libc::IPPROTO_UDP, UDP_NO_CHECK6_TX, 1)?;
        option::set(&fd, libc::IPPROTO_UDP, UDP_NO_CHECK6_RX, 1)?;
        let any = SockaddrIn6::from(SocketAddrV6::new(Ipv6Addr::UNSPECIFIED, port, 0, 0));
        bind(fd.as_raw_fd(), &any)?;
    } else {
        setsockopt(fd, sockopt::Ipv4PacketInfo, &true)?;
        option::set(&fd, libc::SOL_SOCKET, libc::SO_NO_CHECK, 1)?;
        let any = SockaddrIn::from(SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, port));
        bind(fd.as_raw_fd(), &any)?;
    }
    Ok(())
}

/// Disables fragmentation, and the kernel's own path MTU: we discover it ourselves.
fn unfragmented(fd: BorrowedFd<'_>, v6: bool) -> io::Result<()> {
    if v6 {
        let (level, probe) = (libc::IPPROTO_IPV6, libc::IPV6_PMTUDISC_PROBE);
        option::set(&fd, level, libc::IPV6_MTU_DISCOVER, probe)?;
        option::set(&fd, level, libc::IPV6_DONTFRAG, 1)
    } else {
        let probe = libc::IP_PMTUDISC_PROBE;
        option::set(&fd, libc::IPPROTO_IP, libc::IP_MTU_DISCOVER, probe)
    }
}

/// Looks up the local address and the MTU of the route to a destination, from that address if there is one. Sends nothing.
pub(super) fn route(to: IpAddr, from: Option<IpAddr>) -> io::Result<(IpAddr, u32)> {
    let any: IpAddr = if to.is_ipv4() {
        Ipv4Addr::UNSPECIFIED.into()
    } else {
        Ipv6Addr::UNSPECIFIED.into()
    };
    let socket = UdpSocket::bind(SocketAddr::new(from.unwrap_or(any), 0))?;
    socket.connect(SocketAddr::new(to, 9))?;
    let (level, name) = if to.is_ipv4() {
        (libc::IPPROTO_IP, libc::IP_MTU)
    } else {
        (libc::IPPROTO_IPV6, libc::IPV6_MTU)
    };
    let mtu: libc::c_int = option::get(&socket, level, name)?;
    Ok((socket.local_addr()?.ip(), mtu as u32))
}
