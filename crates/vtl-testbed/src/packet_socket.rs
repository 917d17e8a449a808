//! Packet sockets: Ethernet frames from and to a device, in batches.

use std::io;
use std::mem::{size_of, zeroed};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use vtl_link::{Frame, MTU, Nanos, mark_ip};

use etherparse::{EtherType, Ethernet2HeaderSlice, Ipv4HeaderSlice, Ipv6HeaderSlice};

use crate::error::{Error, Result};

/// Length of `struct virtio_net_hdr`, which precedes each frame, bytes. It carries pending offloads (a
/// checksum to complete, segmentation), so that aggregates pass unchanged.
const VNET_HEADER: usize = 10;
const ETHERNET_HEADER: usize = 14;
/// Bytes after the IP header that are transport headers, whatever the transport: at most UDP's and an ACK's of
/// VTL.
const HEADERS: usize = 80;
/// Maximum length of a frame, bytes: 64 KiB of IP, Ethernet header and a VLAN tag.
const FRAME_MAX: usize = 65_536 + ETHERNET_HEADER + 4;
/// Maximum number of frames per system call.
pub(crate) const BATCH: usize = 64;
/// Receive buffer, bytes: for what arrives while the emulator sleeps or is not scheduled.
const RECEIVE_BUFFER: libc::c_int = 64 << 20;
const SEND_BUFFER: libc::c_int = 16 << 20;

/// Not in the libc crate (`linux/if_packet.h`).
const PACKET_IGNORE_OUTGOING: libc::c_int = 23;
const PACKET_VNET_HDR: libc::c_int = 15;
const PACKET_QDISC_BYPASS: libc::c_int = 20;
const PACKET_STATISTICS: libc::c_int = 6;

/// A captured frame, after its `virtio_net_hdr`.
#[derive(Debug, Clone)]
pub(crate) struct Packet(Vec<u8>);

impl Packet {
    fn frame(&self) -> &[u8] {
        self.0.get(VNET_HEADER..).unwrap_or_default()
    }

    /// Whether the frame is longer than the testbed's MTU: an aggregate, made by offloads of the sender or
    /// the receiver.
    pub(crate) fn is_aggregate(&self) -> bool {
        self.frame().len() > MTU as usize + ETHERNET_HEADER + 4
    }
}

/// Protocol of the IP packet in an Ethernet frame, and offset of its payload. `None` for other frames.
fn ip(frame: &[u8]) -> Option<(u8, usize)> {
    let ethernet = Ethernet2HeaderSlice::from_slice(frame).ok()?;
    let ip = &frame[ETHERNET_HEADER..];
    let (protocol, header) = match ethernet.ether_type() {
        EtherType::IPV4 => {
            let ip = Ipv4HeaderSlice::from_slice(ip).ok()?;
            (ip.protocol(), ip.slice().len())
        }
        EtherType::IPV6 => {
            let ip = Ipv6HeaderSlice::from_slice(ip).ok()?;
            (ip.next_header(), ip.slice().len())
        }
        _ => return None,
    };
    Some((protocol.0, ETHERNET_HEADER + header))
}

impl Frame for Packet {
    /// The rate of a link counts IP packets, without the Ethernet header.
    fn link_bytes(&self) -> u64 {
        self.frame().len().saturating_sub(ETHERNET_HEADER) as u64
    }

    fn mark(&mut self) -> bool {
        let ip = self.0.get_mut(VNET_HEADER + ETHERNET_HEADER..);
        ip.is_some_and(mark_ip)
    }

    fn protocol(&self) -> Option<u8> {
        ip(self.frame()).map(|(protocol, _)| protocol)
    }

    fn flip_bit(&mut self, random: u64) -> bool {
        let frame = self.0.get_mut(VNET_HEADER..).unwrap_or_default();
        let Some((_, start)) = ip(frame).filter(|&(_, start)| start < frame.len()) else {
            return false;
        };
        let bit = random % ((frame.len() - start) as u64 * 8);
        frame[start + (bit / 8) as usize] ^= 1 << (bit % 8);
        true
    }

    fn exchange_words(&mut self, random: u64) -> bool {
        let frame = self.0.get_mut(VNET_HEADER..).unwrap_or_default();
        let payload = ip(frame).and_then(|(_, start)| frame.get_mut(start + HEADERS..));
        let Some(words) = payload.map(|bytes| bytes.as_chunks_mut::<8>().0) else {
            return false;
        };
        let count = words.len() as u64;
        if count < 2 {
            return false;
        }
        let (one, other) = (random % count, (random >> 32) % count);
        words.swap(one as usize, other as usize);
        words[one as usize] != words[other as usize]
    }
}

#[repr(C, align(8))]
struct ControlBuffer([u8; 64]);

/// Buffers for receiving one batch of frames.
pub(crate) struct ReceiveBatch {
    /// `headers` and `vectors` point into `buffers` and `control`; none of them ever reallocates.
    buffers: Vec<u8>,
    control: Vec<ControlBuffer>,
    #[allow(dead_code, reason = "owned here, reached through `headers`")]
    vectors: Vec<libc::iovec>,
    headers: Vec<libc::mmsghdr>,
}

const BUFFER: usize = VNET_HEADER + FRAME_MAX;

impl ReceiveBatch {
    pub(crate) fn new() -> Self {
        let mut buffers = vec![0u8; BATCH * BUFFER];
        let mut control: Vec<ControlBuffer> = (0..BATCH).map(|_| ControlBuffer([0; 64])).collect();
        let mut vectors: Vec<libc::iovec> = buffers
            .chunks_mut(BUFFER)
            .map(|b| libc::iovec {
                iov_base: b.as_mut_ptr().cast(),
                iov_len: b.len(),
            })
            .collect();
        let headers = vectors
            .iter_mut()
            .zip(&mut control)
            .map(|(vector, control)| {
                // SAFETY: all-zero bytes are a valid mmsghdr.
                let mut header: libc::mmsghdr = unsafe { zeroed() };
                header.msg_hdr.msg_iov = vector;
                header.msg_hdr.msg_iovlen = 1;
                header.msg_hdr.msg_control = control.0.as_mut_ptr().cast();
                header.msg_hdr.msg_controllen = size_of::<ControlBuffer>();
                header
            })
            .collect();
        ReceiveBatch {
            buffers,
            control,
            vectors,
            headers,
        }
    }

    /// Calls `each` with the frames of the first `count` slots and their arrival times (CLOCK_REALTIME),
    /// if known. Prepares the slots for the next batch.
    fn take(&mut self, count: usize, mut each: impl FnMut(Packet, Option<Nanos>)) {
        for (i, header) in self.headers.iter_mut().take(count).enumerate() {
            let length = (header.msg_len as usize).min(BUFFER);
            let start = i * BUFFER;
            let stamp = arrival(&self.control[i].0, header.msg_hdr.msg_controllen);
            header.msg_hdr.msg_controllen = size_of::<ControlBuffer>();
            if length > VNET_HEADER + ETHERNET_HEADER {
                each(Packet(self.buffers[start..start + length].to_vec()), stamp);
            }
        }
    }
}

/// Parses the control message SCM_TIMESTAMPNS, the only one enabled.
fn arrival(control: &[u8], length: usize) -> Option<Nanos> {
    const HEADER: usize = size_of::<libc::cmsghdr>();
    let field = |at: usize| {
        control
            .get(at..at + 8)?
            .try_into()
            .ok()
            .map(i64::from_ne_bytes)
    };
    if length < HEADER + 16 {
        return None;
    }
    Some((field(HEADER)? as u64) * 1_000_000_000 + field(HEADER + 8)? as u64)
}

/// A packet socket bound to one device.
pub(crate) struct PacketSocket {
    fd: OwnedFd,
}

impl AsFd for PacketSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl PacketSocket {
    /// Opens a socket on a device of the calling thread's namespace.
    pub(crate) fn open(device: &str) -> Result<Self> {
        let failed = |what: &str| Error::system(format!("{what} {device}"));
        let index =
            nix::net::if_::if_nametoindex(device).map_err(|e| failed("find device")(e.into()))?;
        let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        // SAFETY: plain system call. Protocol 0: nothing is received before the options are set.
        let fd = unsafe { libc::socket(libc::AF_PACKET, kind, 0) };
        if fd < 0 {
            return Err(failed("open a packet socket for")(
                io::Error::last_os_error(),
            ));
        }
        // SAFETY: `fd` was just created and belongs to nobody else.
        let owned = unsafe { OwnedFd::from_raw_fd(fd) };
        let socket = PacketSocket { fd: owned };
        for (level, option, value) in [
            // Do not capture the frames that the emulator itself sends by this device.
            (libc::SOL_PACKET, PACKET_IGNORE_OUTGOING, 1),
            (libc::SOL_PACKET, PACKET_VNET_HDR, 1),
            (libc::SOL_PACKET, PACKET_QDISC_BYPASS, 1),
            (libc::SOL_SOCKET, libc::SO_TIMESTAMPNS, 1),
            (libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, RECEIVE_BUFFER),
            (libc::SOL_SOCKET, libc::SO_SNDBUFFORCE, SEND_BUFFER),
        ] {
            // SAFETY: `value` is an int that outlives the call, and the length says so.
            let result = unsafe {
                libc::setsockopt(
                    fd,
                    level,
                    option,
                    (&raw const value).cast(),
                    size_of::<libc::c_int>() as u32,
                )
            };
            if result < 0 {
                return Err(failed("set up the packet socket of")(
                    io::Error::last_os_error(),
                ));
            }
        }
        // SAFETY: all-zero bytes are a valid sockaddr_ll.
        let mut address: libc::sockaddr_ll = unsafe { zeroed() };
        address.sll_family = libc::AF_PACKET as u16;
        address.sll_protocol = (libc::ETH_P_ALL as u16).to_be();
        address.sll_ifindex = index as i32;
        // SAFETY: `address` is a sockaddr_ll that outlives the call, and the length says so.
        let result = unsafe {
            libc::bind(
                fd,
                (&raw const address).cast(),
                size_of::<libc::sockaddr_ll>() as u32,
            )
        };
        if result < 0 {
            Err(failed("bind a packet socket to")(io::Error::last_os_error()))
        } else {
            Ok(socket)
        }
    }

    /// Receives at most one batch, without blocking. Returns the number of frames.
    pub(crate) fn receive(
        &self,
        batch: &mut ReceiveBatch,
        each: impl FnMut(Packet, Option<Nanos>),
    ) -> io::Result<usize> {
        // SAFETY: every header points to a buffer, a vector and a control buffer owned by `batch`, whose
        // lengths it carries.
        let count = unsafe {
            libc::recvmmsg(
                self.fd.as_raw_fd(),
                batch.headers.as_mut_ptr(),
                BATCH as u32,
                libc::MSG_DONTWAIT as _,
                std::ptr::null_mut(),
            )
        };
        if count < 0 {
            return Err(io::Error::last_os_error());
        }
        batch.take(count as usize, each);
        Ok(count as usize)
    }

    /// Sends at most one batch, without blocking. Returns the number of packets sent.
    pub(crate) fn send<'a>(&self, packets: impl Iterator<Item = &'a Packet>) -> io::Result<usize> {
        let mut vectors: [libc::iovec; BATCH] = [libc::iovec {
            iov_base: std::ptr::null_mut(),
            iov_len: 0,
        }; BATCH];
        let mut count = 0;
        for (vector, packet) in vectors.iter_mut().zip(packets) {
            *vector = libc::iovec {
                iov_base: packet.0.as_ptr().cast_mut().cast(),
                iov_len: packet.0.len(),
            };
            count += 1;
        }
        // SAFETY: all-zero bytes are valid mmsghdrs.
        let mut headers: [libc::mmsghdr; BATCH] = unsafe { zeroed() };
        for (header, vector) in headers.iter_mut().zip(&mut vectors).take(count) {
            header.msg_hdr.msg_iov = vector;
            header.msg_hdr.msg_iovlen = 1;
        }
        // SAFETY: the first `count` headers point to vectors that point to packets borrowed for this call;
        // sending only reads them.
        let sent = unsafe {
            libc::sendmmsg(
                self.fd.as_raw_fd(),
                headers.as_mut_ptr(),
                count as u32,
                libc::MSG_DONTWAIT as _,
            )
        };
        if sent < 0 {
            Err(io::Error::last_os_error())
        } else {
            Ok(sent as usize)
        }
    }

    /// Number of frames that the kernel dropped since the last call, as the receive buffer was full.
    pub(crate) fn kernel_drops(&self) -> u64 {
        let mut counters = [0u32; 2];
        let mut length = size_of::<[u32; 2]>() as libc::socklen_t;
        // SAFETY: `counters` has the size and layout of `struct tpacket_stats` (packets, drops).
        let result = unsafe {
            libc::getsockopt(
                self.fd.as_raw_fd(),
                libc::SOL_PACKET,
                PACKET_STATISTICS,
                counters.as_mut_ptr().cast(),
                &raw mut length,
            )
        };
        if result < 0 {
            0
        } else {
            u64::from(counters[1])
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packet(frame: &[u8]) -> Packet {
        Packet([&[0; VNET_HEADER], frame].concat())
    }

    fn ethernet(ethertype: [u8; 2], payload: &[u8]) -> Packet {
        packet(&[&[0; 12], &ethertype[..], payload].concat())
    }

    #[test]
    fn flip_bit__one_bit_after_the_ip_header() {
        let mut v4 = vec![0; 60];
        v4[0] = 0x46;
        let mut v6 = vec![0; 60];
        v6[0] = 0x60;
        for (ethertype, ip, header) in [([8, 0], v4, 24), ([0x86, 0xdd], v6, 40)] {
            for random in [0, 1, 77, u64::MAX] {
                let before = ethernet(ethertype, &ip);
                let mut after = before.clone();
                assert!(after.flip_bit(random));
                let changed: Vec<usize> = (0..before.0.len())
                    .filter(|&i| before.0[i] != after.0[i])
                    .collect();
                assert_eq!(changed.len(), 1);
                assert!(changed[0] >= VNET_HEADER + ETHERNET_HEADER + header);
                assert_eq!((before.0[changed[0]] ^ after.0[changed[0]]).count_ones(), 1);
            }
        }
    }

    #[test]
    fn flip_bit__ignores_arp_and_truncated_frames() {
        assert!(!ethernet([8, 6], &[0; 28]).flip_bit(1));
        assert!(!ethernet([8, 0], &[0x45; 20]).flip_bit(1));
        assert!(!ethernet([8, 0], &[]).flip_bit(1));
        assert!(!packet(&[]).flip_bit(1));
    }

    #[test]
    fn exchange_words__keeps_the_checksum() {
        let ip: Vec<u8> = (0..200).collect();
        let before = ethernet([8, 0], &[&[0x45], &ip[..]].concat());
        let mut after = before.clone();
        assert!(after.exchange_words(1));
        assert_ne!(after.0, before.0);
        let behind = VNET_HEADER + ETHERNET_HEADER + 20;
        let sum = |packet: &Packet| -> u64 {
            let words = packet.0[behind..].as_chunks().0.iter();
            words
                .map(|w| u64::from_le_bytes(*w))
                .fold(0, u64::wrapping_add)
        };
        assert_eq!(sum(&after), sum(&before));
        assert_eq!(after.0[..behind + HEADERS], before.0[..behind + HEADERS]);
        assert!(!after.exchange_words(0), "with itself");
        assert!(!ethernet([8, 0], &[0x45; 115]).exchange_words(1));
        assert!(!ethernet([8, 6], &[0; 28]).exchange_words(1));
    }

    #[test]
    fn link_bytes__are_those_of_ip() {
        assert_eq!(ethernet([8, 0], &[0; 1500]).link_bytes(), 1500);
        assert!(!ethernet([8, 0], &[0; 1500]).is_aggregate());
        assert!(ethernet([8, 0], &[0; 3000]).is_aggregate());
    }
}
