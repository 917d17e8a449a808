//! A VTL session, as an aware application uses it.

use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use vtl::{Error, Listener, Mode, Preference, Requirements, Services, Socket};

use super::conn::{Conn, run_blocking};
use super::workload::{Progress, REQUEST, fetch};
use super::{ASK_EVERY, Order, Work, message};
use crate::payload::{self, Checker};

/// Packets read at a time.
const PACKETS: u64 = 256;
/// What precedes a payload in a packet, bytes: headers of IP and VTL.
const HEADERS: u64 = 60;

/// A session.
pub(super) struct Session(Socket);

impl Session {
    /// Opens one, over the graft of this name or not at all.
    pub(super) fn connect(
        to: SocketAddr,
        daemon: &Path,
        graft: &str,
        params: &[(String, u32)],
        sealed: bool,
    ) -> io::Result<Self> {
        let params: Vec<_> = params.iter().map(|(n, v)| (n.as_str(), *v)).collect();
        let mut socket = Socket::init(Mode::Initiator, to, daemon)?;
        let mut requirements = Requirements::default();
        if sealed {
            requirements.set(Services::ENCRYPTION, Preference::Require);
        }
        socket.negotiate_exactly(&requirements, graft, &params)?;
        Ok(Self(socket))
    }

    /// The next one that a peer opens.
    pub(super) fn accept(listener: &mut Listener) -> io::Result<Self> {
        Ok(Self(listener.accept()?))
    }

    /// Whether its graft delivers every byte, in order.
    pub(super) fn is_stream(&self) -> bool {
        let both = Services::RELIABLE | Services::ORDERED;
        let agreement = self.0.agreement();
        agreement.is_some_and(|a| a.services.contains(both))
    }

    /// The client's part of the work; over a graft that may lose packets, as much as arrives.
    pub(super) fn fetch(
        &mut self,
        work: Work,
        order: &Order,
        progress: &Progress,
    ) -> io::Result<()> {
        match work {
            Work::File(_) | Work::Stream { .. } if !self.is_stream() => {
                self.fetch_messages(work, order.limit_s, progress)
            }
            work => run_blocking(fetch(self, work, progress)),
        }
    }

    /// Asks for bytes until some come, and counts what comes until the server has closed.
    fn fetch_messages(&mut self, work: Work, limit_s: f64, progress: &Progress) -> io::Result<()> {
        let bytes = match work {
            Work::File(bytes) => bytes,
            Work::Stream { rate_kbit, millis } => message::bytes(rate_kbit, millis),
            Work::Upload(_) | Work::Messages { .. } => 0,
        };
        let begun = Instant::now();
        let mut buffer = vec![0; self.0.max_message()];
        self.0.set_timeout(Some(ASK_EVERY));
        let mut ask = true;
        while progress.bytes() < bytes {
            if ask {
                self.0.send_message(&work.encode())?;
            }
            match self.0.recv_message(&mut buffer) {
                Ok(0) => break,
                Ok(n) if matches!(work, Work::Stream { .. }) => {
                    message::arrived(&buffer[..n], progress);
                }
                Ok(n) => {
                    // Every message is the payload from its beginning.
                    let mut checker = Checker::default();
                    checker.check(&buffer[..n]);
                    progress.add(n as u64, checker.wrong());
                }
                Err(Error::TimedOut) if begun.elapsed().as_secs_f64() < limit_s => {}
                Err(error) => return Err(error.into()),
            }
            ask = progress.bytes() == 0;
        }
        Ok(())
    }

    /// Waits for a question, and sends as many bytes as it says at the link's rate, like any
    /// application that nothing slows down; or the messages of a stream when they are due.
    pub(super) fn serve_messages(mut self, rate_mbit: f64) -> io::Result<()> {
        let mut question = [0; REQUEST];
        self.0.recv_message(&mut question)?;
        let bytes = match Work::decode(&question)? {
            Work::File(bytes) => bytes,
            Work::Stream { rate_kbit, millis } => {
                message::pace(rate_kbit, millis, |message| {
                    Ok(self.0.send_message(message)?)
                })?;
                return Ok(self.0.close()?);
            }
            Work::Upload(_) | Work::Messages { .. } => {
                return Err(io::Error::other("it carries files and streams only"));
            }
        };
        let max = self.0.max_message() as u64;
        let ns_per_packet = if rate_mbit > 0.0 {
            (max + HEADERS) as f64 * 8e3 / rate_mbit
        } else {
            0.0
        };
        let begun = Instant::now();
        let (mut packets, mut sent) = (0_u64, 0);
        while sent < bytes {
            let due = Duration::from_nanos((packets as f64 * ns_per_packet) as u64);
            if let Some(early) = due.checked_sub(begun.elapsed()).filter(|t| !t.is_zero()) {
                thread::sleep(early);
            }
            let message = payload::at(0, max.min(bytes - sent));
            self.0.send_message(message)?;
            sent += message.len() as u64;
            packets += 1;
        }
        Ok(self.0.close()?)
    }
}

impl Conn for Session {
    async fn send(&mut self, mut data: &[u8]) -> io::Result<()> {
        while !data.is_empty() {
            let n = self.0.send_data(data)?;
            data = &data[n..];
        }
        Ok(())
    }

    async fn receive(&mut self, mut take: impl FnMut(&[u8])) -> io::Result<usize> {
        let mut bytes = 0;
        self.0.recv_in_place(PACKETS, |packet| {
            bytes += packet.len();
            take(packet);
        })?;
        Ok(bytes)
    }
}
