//! A UDP socket that takes and gives runs of packets by one system call (UDP GSO and GRO).

use std::{
    cell::Cell,
    io::{self, IoSliceMut},
    net::{IpAddr, SocketAddr},
};

use bytes::Bytes;
use quinn_udp::{BATCH_SIZE, RecvMeta, Transmit, UdpSocketState};
use tokio::{io::Interest, net::UdpSocket, time::sleep};

use super::SOCKET_PAUSE;

/// Size of a receive buffer, and maximum of what is given to the kernel at once, bytes.
const DATAGRAM: usize = 64 << 10;

/// The socket.
pub(super) struct Segments {
    socket: UdpSocket,
    state: UdpSocketState,
    /// Its family, to which IPv4 addresses are mapped.
    is_v6: bool,
    /// A run of packets in one piece, kept for its memory.
    joined: Cell<Vec<u8>>,
}

impl Segments {
    /// Takes a non-blocking socket.
    pub(super) fn new(socket: std::net::UdpSocket) -> io::Result<Self> {
        let state = UdpSocketState::new((&socket).into())?;
        let is_v6 = socket.local_addr()?.is_ipv6();
        Ok(Self {
            socket: UdpSocket::from_std(socket)?,
            state,
            is_v6,
            joined: Cell::default(),
        })
    }

    /// Receives packets. Never returns.
    pub(super) async fn receive(&self, mut each: impl FnMut(SocketAddr, Option<IpAddr>, &[u8])) {
        let mut buffers = vec![vec![0; DATAGRAM]; BATCH_SIZE];
        let mut metas = [RecvMeta::default(); BATCH_SIZE];
        loop {
            let got = self
                .socket
                .async_io(Interest::READABLE, || {
                    let mut slices: Vec<_> =
                        buffers.iter_mut().map(|b| IoSliceMut::new(b)).collect();
                    self.state
                        .recv((&self.socket).into(), &mut slices, &mut metas)
                })
                .await;
            let Ok(got) = got else {
                sleep(SOCKET_PAUSE).await;
                continue;
            };
            for (meta, buffer) in metas.iter().zip(&buffers).take(got) {
                let peer = SocketAddr::new(meta.addr.ip().to_canonical(), meta.addr.port());
                let local = meta.dst_ip.map(|ip| ip.to_canonical());
                for packet in buffer[..meta.len].chunks(meta.stride.max(1)) {
                    each(peer, local, packet);
                }
            }
            // Let those run whom the packets are for.
            tokio::task::yield_now().await;
        }
    }

    /// Sends packets, waiting for room in the socket. `from`: the local address; `None`: the route's.
    pub(super) async fn send(&self, to: SocketAddr, from: Option<IpAddr>, packets: &[Bytes]) {
        let destination = self.destination(to);
        let mut rest = packets;
        while let Some(first) = rest.first() {
            // GSO: a run of packets of equal size, the last of which may be shorter.
            let segments = self
                .state
                .max_gso_segments()
                .min(DATAGRAM / first.len().max(1));
            let equal = rest.iter().take(segments.max(1));
            let mut run = equal.take_while(|p| p.len() == first.len()).count();
            if run < segments && rest.get(run).is_some_and(|p| p.len() < first.len()) {
                run += 1;
            }
            let mut joined = self.joined.take();
            joined.clear();
            let contents: &[u8] = match run {
                1 => first,
                _ => {
                    rest[..run].iter().for_each(|p| joined.extend_from_slice(p));
                    &joined
                }
            };
            let transmit = Transmit {
                destination,
                ecn: None,
                contents,
                segment_size: (run > 1).then_some(first.len()),
                src_ip: from,
            };
            let send = || self.state.send((&self.socket).into(), &transmit);
            // A packet that cannot be sent counts as lost.
            let _ = self.socket.async_io(Interest::WRITABLE, send).await;
            self.joined.set(joined);
            rest = &rest[run..];
        }
    }

    /// Maps an address to the socket's family.
    fn destination(&self, peer: SocketAddr) -> SocketAddr {
        match peer {
            SocketAddr::V4(v4) if self.is_v6 => {
                SocketAddr::new(v4.ip().to_ipv6_mapped().into(), v4.port())
            }
            _ => peer,
        }
    }
}
