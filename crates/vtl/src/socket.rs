//! The six operations of the thesis (section 3.2.7, table 3.4) on a VTL socket:
//!
//! | thesis | here |
//! | --- | --- |
//! | `vtl_init(mode, src_ip, dst_ip)` | [`Socket::init`] |
//! | `vtl_negotiate(sock, services, qos)` | [`Socket::negotiate`] |
//! | `vtl_validate(sock)` | [`Socket::validate`] |
//! | `vtl_send_data(sock, buffer, size)` | [`Socket::send_data`] |
//! | `vtl_recv_data(sock, buffer, size)` | [`Socket::recv_data`] |
//! | `vtl_close(sock)` | [`Socket::close`] |
//!
//! Bytes are written straight into the ring from which the kernel sends, and read from the ring
//! into which it receives. A socket may be moved between threads, and used by one at a time.

use std::{
    io::{self, Read, Write},
    net::{IpAddr, SocketAddr},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::Path,
    time::Duration,
};

use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags};
use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
};
use serde_json::{Value, json};
use vtl_proto::{
    intf,
    services::{Contradiction, Requirements, Services},
};

use crate::{
    control::{self, Client},
    events::Events,
    ring::{Closed, RxRing, TxRing},
};

/// Why an operation failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The daemon refused, or cannot be reached.
    #[error(transparent)]
    Daemon(#[from] control::Error),
    /// The requirements contradict each other.
    #[error(transparent)]
    Contradiction(#[from] Contradiction),
    /// The session broke: the peer does not answer, or gave up. Data may not have arrived.
    #[error("the session with {0} broke: what was sent last may not have arrived")]
    Broken(IpAddr),
    /// The peer closed the session; it reads no more.
    #[error("{0} has closed the session")]
    ClosedByPeer(IpAddr),
    /// The operation does not fit the socket's mode, or comes too early.
    #[error("{0}")]
    Misuse(&'static str),
    /// The system refused something on the way.
    #[error("{0}")]
    System(#[from] io::Error),
}

impl From<Error> for io::Error {
    fn from(error: Error) -> Self {
        let kind = match &error {
            Error::Broken(_) => io::ErrorKind::ConnectionAborted,
            Error::ClosedByPeer(_) => io::ErrorKind::BrokenPipe,
            Error::Misuse(_) | Error::Contradiction(_) => io::ErrorKind::InvalidInput,
            Error::Daemon(_) | Error::System(_) => io::ErrorKind::Other,
        };
        io::Error::new(kind, error)
    }
}

/// What the application will do with the socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Opens sessions: [`Socket::negotiate`].
    Initiator,
    /// Waits for them: [`Socket::validate`].
    Responder,
}

/// What was negotiated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Agreement {
    /// The graft's name.
    pub graft: String,
    /// The other host.
    pub peer: IpAddr,
}

/// An open session's rings.
struct Session {
    tx: TxRing,
    rx: RxRing,
    /// Towards the daemon.
    kick: OwnedFd,
    /// From the daemon.
    wake: OwnedFd,
    /// From the kernel.
    events: Events,
    /// Readable when one of those two is.
    either: Epoll,
    /// Sending here runs egress, without the daemon.
    caller: Option<OwnedFd>,
    /// The control connection: hangs up when the daemon dies.
    daemon: OwnedFd,
    peer: IpAddr,
    /// Bytes of the first packet in `rx` that were read.
    read: usize,
    /// Packets without content so far.
    given_up: u64,
    /// Packets read at a time last.
    batch: u64,
}

/// A VTL socket. Data flows both ways, whoever opened the session.
pub struct Socket {
    client: Client,
    mode: Mode,
    address: SocketAddr,
    session: Option<Session>,
}

/// How often close looks whether everything has arrived, ms.
const CLOSE_MS: u16 = 1;
/// A reader that got this many packets at once naps before it asks to be woken: in bulk transfers a
/// wake-up for every few packets costs more than the packets.
const BULK: u64 = 4;
/// How long.
const NAP: Duration = Duration::from_micros(100);
/// The longest that a lost wake-up can cost, ms.
const WAIT_MS: u16 = 200;

impl Socket {
    /// Obtains a socket from the daemon at `daemon`. For an initiator `address` is the peer and its
    /// VTL port; for a responder its port counts, 1 to 65535, and nobody else may have it.
    ///
    /// # Errors
    /// The daemon cannot be reached, or the port is taken.
    pub fn init(mode: Mode, address: SocketAddr, daemon: &Path) -> Result<Self, Error> {
        let client = Client::connect(daemon)?;
        if mode == Mode::Responder {
            client.call(&json!({ "op": "listen", "port": address.port() }))?;
        }
        Ok(Self {
            client,
            mode,
            address,
            session: None,
        })
    }

    /// Opens a session that meets the requirements; returns once the peer has agreed.
    ///
    /// # Errors
    /// The requirements contradict each other, no graft of both hosts meets them, or the peer does
    /// not answer.
    pub fn negotiate(&mut self, requirements: &Requirements) -> Result<Agreement, Error> {
        if self.mode != Mode::Initiator || self.session.is_some() {
            return Err(Error::Misuse(
                "only an initiator without session can negotiate",
            ));
        }
        if let Some(contradiction) = requirements.contradiction() {
            return Err(contradiction.into());
        }
        self.adopt(&json!({
            "op": "connect",
            "host": self.address.ip(),
            "port": self.address.port(),
            "services": requirements.services.bits(),
        }))
    }

    /// As [`Socket::negotiate`], but over this graft and no other, for tests and measurements.
    /// `params` are parameters of the graft that shall not have their defaults; they hold for the
    /// direction that this side sends in.
    ///
    /// # Errors
    /// As [`Socket::negotiate`]; or there is no such graft, or it has no such parameter.
    pub fn negotiate_over(
        &mut self,
        graft: &str,
        params: &[(&str, u32)],
    ) -> Result<Agreement, Error> {
        if self.mode != Mode::Initiator || self.session.is_some() {
            return Err(Error::Misuse(
                "only an initiator without session can negotiate",
            ));
        }
        let params: serde_json::Map<String, Value> = params
            .iter()
            .map(|(name, value)| ((*name).to_owned(), json!(value)))
            .collect();
        self.adopt(&json!({
            "op": "connect",
            "host": self.address.ip(),
            "port": self.address.port(),
            "services": 0,
            "graft": graft,
            "params": params,
        }))
    }

    /// Waits for a peer to open a session.
    ///
    /// # Errors
    /// The daemon has gone.
    pub fn validate(&mut self) -> Result<Agreement, Error> {
        if self.mode != Mode::Responder || self.session.is_some() {
            return Err(Error::Misuse(
                "only a responder without session can validate",
            ));
        }
        self.adopt(&json!({ "op": "accept" }))
    }

    fn adopt(&mut self, request: &Value) -> Result<Agreement, Error> {
        let (answer, descriptors) = self.client.call_with_descriptors(request)?;
        let malformed = || control::Error::Malformed(answer.to_string());
        let mut descriptors = descriptors.into_iter();
        let mut next = || descriptors.next().ok_or_else(malformed);
        let [transmit, receive, kick, wake, events] = [next()?, next()?, next()?, next()?, next()?];
        let caller = descriptors.next();
        let number = |key: &str| answer[key].as_u64().and_then(|n| u32::try_from(n).ok());
        let slots = number("slots").ok_or_else(malformed)?;
        let payload = number("max_payload")
            .and_then(|n| n.try_into().ok())
            .ok_or_else(malformed)?;
        let peer: IpAddr = answer["peer"]
            .as_str()
            .and_then(|p| p.parse().ok())
            .ok_or_else(malformed)?;
        let events = Events::map(events)?;
        let either = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).map_err(io::Error::from)?;
        for fd in [wake.as_fd(), events.as_fd()] {
            let readable = EpollEvent::new(EpollFlags::EPOLLIN, 0);
            either.add(fd, readable).map_err(io::Error::from)?;
        }
        self.session = Some(Session {
            tx: TxRing::map(transmit.as_fd(), slots, payload)?,
            rx: RxRing::map(receive.as_fd(), slots)?,
            kick,
            wake,
            events,
            either,
            caller,
            daemon: self.client.as_fd().try_clone_to_owned()?,
            peer,
            read: 0,
            given_up: 0,
            batch: 0,
        });
        let graft = answer["graft"].as_str().unwrap_or_default().to_owned();
        Ok(Agreement { graft, peer })
    }

    /// Opens a session with default requirements (reliable, ordered, congestion-controlled) unless
    /// there is one.
    fn ready(&mut self) -> Result<&mut Session, Error> {
        if self.session.is_none() {
            let services = Services::RELIABLE
                .union(Services::ORDERED)
                .union(Services::CONGESTION_CONTROL);
            match self.mode {
                Mode::Initiator => {
                    self.negotiate(&Requirements {
                        services,
                        ..Default::default()
                    })?;
                }
                Mode::Responder => {
                    self.validate()?;
                }
            }
        }
        self.session.as_mut().ok_or(Error::Misuse("no session"))
    }

    /// The session, which must be open already.
    fn open_session(&mut self) -> Result<&mut Session, Error> {
        const WHY: &str = "negotiate or validate a session first";
        self.session.as_mut().ok_or(Error::Misuse(WHY))
    }

    /// Hands bytes over for sending; waits until there is room for some. Returns how many it took:
    /// at least one, unless `data` is empty. They are on their way, not yet delivered:
    /// [`Socket::close`] waits for that.
    ///
    /// # Errors
    /// The session has ended.
    pub fn send_data(&mut self, data: &[u8]) -> Result<usize, Error> {
        if data.is_empty() {
            return Ok(0);
        }
        let session = self.ready()?;
        loop {
            if let Some(taken) = session.try_send(data)? {
                return Ok(taken);
            }
            session.sleep(WAIT_MS, true)?;
        }
    }

    /// As [`Socket::send_data`], but never waits: `None` means that there is no room. The
    /// socket's descriptor becomes readable when there is.
    ///
    /// # Errors
    /// The session has ended, or there is none yet.
    pub fn try_send_data(&mut self, data: &[u8]) -> Result<Option<usize>, Error> {
        if data.is_empty() {
            return Ok(Some(0));
        }
        let session = self.open_session()?;
        let taken = session.try_send(data)?;
        if taken.is_none() {
            session.clear();
            // What became free before the descriptor was cleared is not told again.
            return session.try_send(data);
        }
        Ok(taken)
    }

    /// Fetches bytes that have arrived, in order; waits for the first. 0 means that the peer has
    /// closed the session and everything it sent was read.
    ///
    /// # Errors
    /// The session broke; data may be missing.
    pub fn recv_data(&mut self, buffer: &mut [u8]) -> Result<usize, Error> {
        if buffer.is_empty() {
            return Ok(0);
        }
        let session = self.ready()?;
        loop {
            if !session.wait()? {
                return Ok(0);
            }
            let filled = session.read(buffer);
            // Nothing but packets that were given up is not the end.
            if filled > 0 {
                return Ok(filled);
            }
        }
    }

    /// Packets of the peer that were given up, as far as the application has read: they left gaps.
    /// Always 0 over grafts that are reliable; others do not know.
    pub fn given_up(&self) -> u64 {
        self.session.as_ref().map_or(0, |s| s.given_up)
    }

    /// Reads up to `most` packets in place, without a copy; waits for the first. A packet that was
    /// given up is read as an empty one. Returns how many were read; 0 means the end, as in [`Socket::recv_data`].
    ///
    /// # Errors
    /// As [`Socket::recv_data`].
    pub fn recv_in_place(&mut self, most: u64, mut take: impl FnMut(&[u8])) -> Result<u64, Error> {
        let session = self.ready()?;
        if !session.wait()? {
            return Ok(0);
        }
        Ok(session.read_in_place(most, &mut take))
    }

    /// As [`Socket::recv_in_place`], but never waits: `None` means that nothing has arrived. The
    /// socket's descriptor becomes readable when something does.
    ///
    /// # Errors
    /// As [`Socket::recv_data`], or there is no session yet.
    pub fn try_recv_in_place(
        &mut self,
        most: u64,
        mut take: impl FnMut(&[u8]),
    ) -> Result<Option<u64>, Error> {
        let session = self.open_session()?;
        let mut state = session.receivable()?;
        if state == Receivable::NotYet {
            session.clear();
            state = session.receivable()?;
        }
        Ok(match state {
            Receivable::NotYet => None,
            Receivable::End => Some(0),
            Receivable::Packets => Some(session.read_in_place(most, &mut take)),
        })
    }

    /// Waits until the peer has everything, and ends the session. Dropping the socket instead ends
    /// it at once, and the peer is told that data may be missing.
    ///
    /// # Errors
    /// The session broke before everything was delivered.
    pub fn close(mut self) -> Result<(), Error> {
        if let Some(session) = self.session.take() {
            while session.tx.unacknowledged() > 0 {
                session.check_open()?;
                session.sleep(CLOSE_MS, false)?;
            }
            self.client.call(&json!({ "op": "close" }))?;
        }
        Ok(())
    }

    /// The peer of the open session.
    pub fn peer(&self) -> Option<IpAddr> {
        self.session.as_ref().map(|s| s.peer)
    }
}

/// What a reader finds.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Receivable {
    Packets,
    End,
    /// Nothing, and the reader will be woken.
    NotYet,
}

impl Session {
    /// Hands over what there is room for; without room, asks to be woken and returns `None`.
    fn try_send(&mut self, data: &[u8]) -> Result<Option<usize>, Error> {
        loop {
            self.check_open()?;
            let room = self.tx.room().min(256) as usize;
            if room > 0 {
                return Ok(Some(self.fill(data, room)));
            }
            if self.tx.wait_for_room() {
                return Ok(None);
            }
        }
    }

    /// Copies what has arrived.
    fn read(&mut self, buffer: &mut [u8]) -> usize {
        let mut filled = 0;
        let mut packets = 0;
        let available = self.rx.available();
        while packets < available && filled < buffer.len() {
            let packet = self.rx.packet(packets);
            self.given_up += u64::from(packet.is_empty());
            let rest = &packet[self.read..];
            let n = rest.len().min(buffer.len() - filled);
            buffer[filled..filled + n].copy_from_slice(&rest[..n]);
            filled += n;
            if n < rest.len() {
                self.read += n;
                break;
            }
            self.read = 0;
            packets += 1;
        }
        self.consume(packets);
        filled
    }

    fn read_in_place(&mut self, most: u64, take: &mut dyn FnMut(&[u8])) -> u64 {
        let count = self.rx.available().min(most);
        for i in 0..count {
            let packet = self.rx.packet(i);
            self.given_up += u64::from(packet.is_empty());
            take(&packet[self.read..]);
            self.read = 0;
        }
        self.consume(count);
        count
    }

    /// Copies as much of `data` as fits into `room` slots, and publishes them.
    fn fill(&mut self, data: &[u8], room: usize) -> usize {
        let each = self.tx.max_payload();
        let mut lengths = [0_u32; 256];
        let mut count = 0;
        let mut taken = 0;
        for chunk in data.chunks(each).take(room) {
            self.tx.slot(count as u64)[..chunk.len()].copy_from_slice(chunk);
            lengths[count] = chunk.len() as u32;
            count += 1;
            taken += chunk.len();
        }
        if self.tx.publish(&lengths[..count]) && !(count == 1 && self.call_egress(lengths[0])) {
            signal(&self.kick, 1);
        }
        taken
    }

    /// Runs egress for one packet of `length` bytes. False if that is not possible here or now.
    fn call_egress(&self, length: u32) -> bool {
        /// What precedes the payload, less what precedes that of a UDP packet: then the kernel
        /// need not change the packet's length.
        const HEADERS: usize = size_of::<intf::vtl_data_hdr>() - 8;
        /// What is sent is replaced.
        static NOTHING: [u8; HEADERS + intf::VTL_MAX_PAYLOAD as usize] =
            [0; HEADERS + intf::VTL_MAX_PAYLOAD as usize];
        let least = intf::VTL_MIN_PACKET as usize - 8;
        let length = (HEADERS + length as usize).clamp(least, NOTHING.len());
        self.caller
            .as_ref()
            .is_some_and(|caller| nix::unistd::write(caller, &NOTHING[..length]).is_ok())
    }

    fn check_open(&self) -> Result<(), Error> {
        match self.tx.closed() {
            None => Ok(()),
            Some(Closed::ByPeer) => Err(Error::ClosedByPeer(self.peer)),
            Some(Closed::Broken | Closed::Local) => Err(Error::Broken(self.peer)),
        }
    }

    /// Waits for packets. False at the end.
    fn wait(&mut self) -> Result<bool, Error> {
        if self.batch >= BULK && self.rx.available() == 0 {
            std::thread::sleep(NAP);
        }
        loop {
            match self.receivable()? {
                Receivable::Packets => return Ok(true),
                Receivable::End => return Ok(false),
                Receivable::NotYet => self.sleep(WAIT_MS, true)?,
            }
        }
    }

    fn receivable(&mut self) -> Result<Receivable, Error> {
        loop {
            if self.rx.available() > 0 {
                return Ok(Receivable::Packets);
            }
            match self.rx.closed() {
                // What arrived before the end was published before it.
                Some(_) if self.rx.available() > 0 => return Ok(Receivable::Packets),
                Some(Closed::ByPeer) => return Ok(Receivable::End),
                Some(Closed::Broken | Closed::Local) => return Err(Error::Broken(self.peer)),
                None => {}
            }
            if self.rx.prepare_wait() {
                return Ok(Receivable::NotYet);
            }
        }
    }

    /// Sleeps until the daemon wakes us, if `wake`, or for `ms` milliseconds.
    fn sleep(&self, ms: u16, wake: bool) -> Result<(), Error> {
        let wanted = if wake {
            PollFlags::POLLIN
        } else {
            PollFlags::empty()
        };
        let mut events = [
            PollFd::new(self.wake.as_fd(), wanted),
            PollFd::new(self.daemon.as_fd(), PollFlags::empty()),
            PollFd::new(self.events.as_fd(), wanted),
        ];
        match poll(&mut events, PollTimeout::from(ms)) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(error) => return Err(io::Error::from(error).into()),
        }
        let [woken, daemon, event] = events.map(|e| e.revents().unwrap_or(PollFlags::empty()));
        if !daemon.is_empty() {
            return Err(Error::Broken(self.peer));
        }
        if !event.is_empty() {
            self.events.clear();
        }
        if !woken.is_empty() {
            let mut value = [0; 8];
            let _ = nix::unistd::read(&self.wake, &mut value);
        }
        Ok(())
    }

    /// Makes the descriptors unreadable until the next wake-up.
    fn clear(&self) {
        self.events.clear();
        let mut value = [0; 8];
        let _ = nix::unistd::read(&self.wake, &mut value);
    }

    fn consume(&mut self, packets: u64) {
        self.batch = packets;
        if packets > 0 && self.rx.consume(packets) {
            signal(&self.kick, 1 << 32);
        }
    }
}

/// Adds to an eventfd.
fn signal(event: &OwnedFd, value: u64) {
    // Fails only if the counter is full, and then the daemon has been told already.
    let _ = nix::unistd::write(event, &value.to_ne_bytes());
}

impl AsFd for Socket {
    /// Readable when something has arrived, there is room again, or the session has ended: one
    /// descriptor for both directions, so try both. Only what `try_…` found missing is told.
    /// Without a session, the control connection.
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.session {
            Some(session) => session.either.0.as_fd(),
            None => self.client.as_fd(),
        }
    }
}

impl Read for Socket {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        Ok(self.recv_data(buffer)?)
    }
}

impl Write for Socket {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        Ok(self.send_data(data)?)
    }

    /// Sending starts at once; there is nothing to flush.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl std::fmt::Debug for Socket {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Socket")
            .field("mode", &self.mode)
            .field("address", &self.address)
            .finish()
    }
}
