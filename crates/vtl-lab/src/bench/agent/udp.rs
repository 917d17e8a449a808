//! Datagrams at the link's rate: what arrives of them is the most that any protocol could deliver.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::socket::{setsockopt, sockopt};

use super::workload::{Progress, REQUEST};
use super::{ASK_EVERY, DATAGRAM, Order, SOCKET, Summary, Work, message, tcp};
use crate::payload::{self, Checker};

/// Bytes of a full datagram.
const PAYLOAD: u64 = DATAGRAM as u64;
/// Datagrams that one system call sends, cut by the kernel (`UDP_SEGMENT`).
const BURST: u64 = 44;

/// Asks the server to send, and counts what comes until it is silent.
pub(super) fn fetch(order: &Order, progress: &Progress) -> io::Result<()> {
    let any: SocketAddr = if order.address.is_ipv4() {
        (Ipv4Addr::UNSPECIFIED, 0).into()
    } else {
        (Ipv6Addr::UNSPECIFIED, 0).into()
    };
    let socket = UdpSocket::bind(any)?;
    tcp::enlarge(&socket, SOCKET);
    socket.connect(order.address)?;
    let silence = ASK_EVERY + Duration::from_secs_f64(order.rtt_ms * 2e-3);
    socket.set_read_timeout(Some(silence))?;
    let (bytes, is_paced) = match order.work {
        Work::File(bytes) => (bytes, false),
        Work::Stream { rate_kbit, millis } if rate_kbit > 0 => {
            (message::bytes(rate_kbit, millis), true)
        }
        Work::Upload(_) | Work::Stream { .. } | Work::Messages { .. } => (u64::MAX, false),
    };
    let question = match is_paced {
        true => order.work,
        false => Work::File(bytes),
    };
    let question = question.encode();
    let mut buffer = vec![0; 65_536];
    let started = Instant::now();
    socket.send(&question)?;
    loop {
        match socket.recv(&mut buffer) {
            Ok(n) => {
                if is_paced {
                    message::arrived(&buffer[..n], progress);
                } else {
                    // Every datagram is the payload from its beginning.
                    let mut checker = Checker::default();
                    checker.check(&buffer[..n]);
                    progress.add(n as u64, checker.wrong());
                }
                if progress.bytes() >= bytes {
                    return Ok(());
                }
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                if progress.bytes() > 0 {
                    return Ok(());
                }
                if started.elapsed().as_secs_f64() > order.limit_s {
                    return Err(io::Error::other("the server does not answer"));
                }
                socket.send(&question)?;
            }
            Err(error) => return Err(error),
        }
    }
}

/// The sending end, on a thread of its own.
pub(super) struct Server {
    sent: Arc<AtomicU64>,
    settings: String,
}

impl Server {
    pub(super) fn start(order: &Order) -> io::Result<Self> {
        let socket = UdpSocket::bind(order.address)?;
        tcp::enlarge(&socket, SOCKET);
        let segmented = setsockopt(&socket, sockopt::UdpGsoSegment, &DATAGRAM.into()).is_ok();
        let sent = Arc::<AtomicU64>::default();
        let (count, rate) = (Arc::clone(&sent), order.rate_mbit);
        let rate_text = if rate > 0.0 {
            format!("{rate} Mbit/s")
        } else {
            "no limit".to_owned()
        };
        thread::spawn(move || send(&socket, rate, segmented, &count));
        Ok(Self {
            sent,
            settings: format!("datagrams of {DATAGRAM} bytes, paced at {rate_text}"),
        })
    }

    pub(super) fn summary(&self) -> Summary {
        Summary {
            sent: self.sent.load(Ordering::Relaxed),
            settings: self.settings.clone(),
            ..Summary::default()
        }
    }
}

/// Waits for a question, and sends as many bytes as it says at the link's rate.
fn send(socket: &UdpSocket, rate_mbit: f64, segmented: bool, sent: &AtomicU64) {
    let mut question = [0; REQUEST];
    let Ok((_, peer)) = socket.recv_from(&mut question) else {
        return;
    };
    let bytes = match Work::decode(&question) {
        Ok(Work::File(bytes)) => bytes,
        Ok(Work::Stream { rate_kbit, millis }) => {
            // Cut into datagrams by the application: one message each.
            let _ = setsockopt(socket, sockopt::UdpGsoSegment, &0);
            let _ = message::pace(rate_kbit, millis, |message| {
                let _ = socket.send_to(message, peer);
                sent.fetch_add(1, Ordering::Relaxed);
                Ok(())
            });
            return;
        }
        Ok(Work::Upload(_) | Work::Messages { .. }) | Err(_) => return,
    };
    // IP and UDP headers take their part of the link.
    let ns_per_datagram = if rate_mbit > 0.0 {
        (PAYLOAD + 28) as f64 * 8e3 / rate_mbit
    } else {
        0.0
    };
    // Bursts of about a millisecond, so that no queue overflows that holds one product.
    let burst = if ns_per_datagram > 0.0 {
        ((1e6 / ns_per_datagram) as u64).clamp(1, BURST)
    } else {
        BURST
    };
    let burst = if segmented { burst } else { 1 };
    let one = payload::at(0, PAYLOAD);
    let many: Vec<u8> = one.repeat(burst as usize);
    let start = Instant::now();
    let mut datagrams = 0_u64;
    let mut offset = 0;
    while offset < bytes {
        let due = Duration::from_nanos((datagrams as f64 * ns_per_datagram) as u64);
        if let Some(early) = due.checked_sub(start.elapsed()).filter(|t| !t.is_zero()) {
            thread::sleep(early);
        }
        let length = (many.len() as u64).min(bytes - offset);
        // A full queue at this host or a peer that has gone: as good as lost.
        let _ = socket.send_to(&many[..length as usize], peer);
        offset += length;
        datagrams += length.div_ceil(PAYLOAD);
        sent.store(datagrams, Ordering::Relaxed);
    }
}
