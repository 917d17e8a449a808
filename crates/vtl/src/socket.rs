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
//! into which it receives. A socket may be moved between threads, and used by one at a time;
//! [`crate::Shared`] is one for several threads, [`crate::Listener`] gives many sockets.

use std::{
    io::{self, Read, Write},
    net::{IpAddr, SocketAddr},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
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
    /// The socket has been closed.
    #[error("the socket has been closed")]
    Closed,
    /// The socket's time limit has passed. Nothing is lost: the operation may be tried again.
    #[error("the time limit has passed")]
    TimedOut,
    /// A message is empty, or longer than a packet of the session takes.
    #[error("a message has 1 to {most} bytes in this session, not {len}")]
    MessageSize {
        /// Its length, bytes.
        len: usize,
        /// What [`Socket::max_message`] says, bytes.
        most: usize,
    },
    /// The next message does not fit into the buffer, and waits for a larger one.
    #[error("the next message has {0} bytes, more than the buffer")]
    BufferTooSmall(usize),
    /// The system refused something on the way.
    #[error("{0}")]
    System(#[from] io::Error),
}

impl From<Error> for io::Error {
    fn from(error: Error) -> Self {
        let kind = match &error {
            Error::Broken(_) => io::ErrorKind::ConnectionAborted,
            Error::ClosedByPeer(_) => io::ErrorKind::BrokenPipe,
            Error::Misuse(_)
            | Error::Contradiction(_)
            | Error::MessageSize { .. }
            | Error::BufferTooSmall(_) => io::ErrorKind::InvalidInput,
            Error::TimedOut => io::ErrorKind::TimedOut,
            Error::Closed => io::ErrorKind::NotConnected,
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
    /// Its identity in packets.
    pub gid: u16,
    /// The services that it provides.
    pub services: Services,
    /// The other host.
    pub peer: IpAddr,
}

/// What is counted of a session, since it began unless said otherwise.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Deserialize)]
#[serde(default)]
pub struct Statistics {
    /// Smoothed round-trip time, milliseconds.
    pub rtt_ms: f64,
    /// The shortest round-trip time of late, milliseconds.
    pub min_rtt_ms: f64,
    /// What the network takes, Mbit/s of payload: estimated.
    pub rate_mbit: f64,
    /// Packets lost on the way there of late, percent.
    pub loss_pct: f64,
    /// Packets that may be under way.
    pub cwnd: u64,
    /// Packets sent, repetitions included.
    pub sent: u64,
    /// Packets sent again.
    pub retransmitted: u64,
    /// Packets that the network lost.
    pub lost: u64,
    /// Packets that the peer acknowledged.
    pub delivered: u64,
    /// Packets that it has not acknowledged yet.
    pub unacknowledged: u64,
    /// Different packets received.
    pub received: u64,
    /// Packets received again.
    pub duplicates: u64,
    /// Times that nothing came back for too long.
    pub timeouts: u64,
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
    /// Readable when one of those two is, or the daemon has gone.
    any: Arc<Epoll>,
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
    /// Wake-ups were taken off `any` since [`Socket::took_wakeups`] was last asked.
    cleared: bool,
    /// How long the next nap is.
    nap: Duration,
}

/// A VTL socket. Data flows both ways, whoever opened the session.
pub struct Socket {
    client: Client,
    mode: Mode,
    address: SocketAddr,
    timeout: Option<Duration>,
    /// The daemon owes the answer to a request for a session.
    asked: bool,
    any: Arc<Epoll>,
    agreement: Option<Agreement>,
    session: Option<Session>,
}

/// How often close looks whether everything has arrived, ms.
const CLOSE_MS: u16 = 1;
/// A reader that got this many packets at once naps before it asks to be woken: in bulk transfers a
/// wake-up for every few packets costs more than the packets.
const BULK: u64 = 4;
/// How long at first. Each nap is a timer's interrupt, so naps grow while many packets arrive during
/// one, until a quarter of the ring does.
const NAP: Duration = Duration::from_micros(100);
/// At most.
const LONG_NAP: Duration = Duration::from_micros(300);
/// By how much at a time.
const LONGER: Duration = Duration::from_micros(25);
/// What is many: some 3 Gbit/s. Slower streams are better read at once.
const MANY: u64 = 32;
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
        Self::over(client, mode, address)
    }

    /// A socket without session over a connection to the daemon.
    pub(crate) fn over(client: Client, mode: Mode, address: SocketAddr) -> Result<Self, Error> {
        let any = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).map_err(io::Error::from)?;
        watch(&any, client.as_fd(), CONTROL)?;
        Ok(Self {
            client,
            mode,
            address,
            timeout: None,
            asked: false,
            any: Arc::new(any),
            agreement: None,
            session: None,
        })
    }

    /// Bounds how long operations that wait may take; `None`, the default: for ever. One that takes
    /// longer fails with [`Error::TimedOut`] and may be tried again.
    pub fn set_timeout(&mut self, limit: Option<Duration>) {
        self.timeout = limit;
    }

    /// Opens a session that meets the requirements; returns once the peer has agreed. With a peer
    /// met before it does not wait for that: data may be sent at once, by the graft that the peer
    /// took last time, and if it then refuses, or does not answer for nine seconds, the session is
    /// [`Error::Broken`].
    ///
    /// # Errors
    /// The requirements contradict each other, no graft of both hosts meets them, or the peer does
    /// not answer.
    pub fn negotiate(&mut self, requirements: &Requirements) -> Result<Agreement, Error> {
        let limit = self.deadline();
        loop {
            if let Some(agreement) = self.try_negotiate(requirements)? {
                return Ok(agreement);
            }
            self.await_answer(limit)?;
        }
    }

    /// As [`Socket::negotiate`], but never waits: `None` means that the peer has not agreed yet.
    /// The socket's descriptor becomes readable when it is worth another call. The requirements of
    /// the first call count.
    ///
    /// # Errors
    /// As [`Socket::negotiate`].
    pub fn try_negotiate(
        &mut self,
        requirements: &Requirements,
    ) -> Result<Option<Agreement>, Error> {
        if self.mode != Mode::Initiator || self.session.is_some() {
            return Err(Error::Misuse(
                "only an initiator without session can negotiate",
            ));
        }
        if !self.asked {
            if let Some(contradiction) = requirements.contradiction() {
                return Err(contradiction.into());
            }
            self.ask(&json!({
                "op": "connect",
                "host": self.address.ip(),
                "port": self.address.port(),
                "services": requirements.services.bits(),
                "prefer": requirements.prefer.bits(),
                "avoid": requirements.avoid.bits(),
                "prohibit": requirements.prohibit.bits(),
                "max_loss_pct": requirements.qos.max_loss_pct,
            }))?;
        }
        self.try_adopt()
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
        if !self.asked {
            self.ask(&json!({
                "op": "connect",
                "host": self.address.ip(),
                "port": self.address.port(),
                "services": 0,
                "graft": graft,
                "params": params,
            }))?;
        }
        let limit = self.deadline();
        loop {
            if let Some(agreement) = self.try_adopt()? {
                return Ok(agreement);
            }
            self.await_answer(limit)?;
        }
    }

    /// Waits for a peer to open a session.
    ///
    /// # Errors
    /// The daemon has gone.
    pub fn validate(&mut self) -> Result<Agreement, Error> {
        let limit = self.deadline();
        loop {
            if let Some(agreement) = self.try_validate()? {
                return Ok(agreement);
            }
            self.await_answer(limit)?;
        }
    }

    /// As [`Socket::validate`], but never waits: `None` means that nobody has opened a session yet.
    /// The socket's descriptor becomes readable when it is worth another call.
    ///
    /// # Errors
    /// As [`Socket::validate`].
    pub fn try_validate(&mut self) -> Result<Option<Agreement>, Error> {
        if self.mode != Mode::Responder || self.session.is_some() {
            return Err(Error::Misuse(
                "only a responder without session can validate",
            ));
        }
        if !self.asked {
            self.ask(&json!({ "op": "accept" }))?;
        }
        self.try_adopt()
    }

    /// Requests a session; [`Socket::try_adopt`] takes the answer.
    pub(crate) fn ask(&mut self, request: &Value) -> Result<(), Error> {
        self.client.ask(request)?;
        self.asked = true;
        Ok(())
    }

    fn deadline(&self) -> Option<Instant> {
        self.timeout.map(|limit| Instant::now() + limit)
    }

    /// Waits for the daemon's answer.
    pub(crate) fn await_answer(&self, limit: Option<Instant>) -> Result<(), Error> {
        let mut events = [PollFd::new(self.client.as_fd(), PollFlags::POLLIN)];
        match poll(&mut events, patience(limit, u16::MAX)?) {
            Ok(_) | Err(Errno::EINTR) => Ok(()),
            Err(error) => Err(io::Error::from(error).into()),
        }
    }

    /// The session, if the daemon has granted it.
    pub(crate) fn try_adopt(&mut self) -> Result<Option<Agreement>, Error> {
        let answer = self.client.answer();
        self.asked = matches!(answer, Ok(None));
        let Some((answer, descriptors)) = answer? else {
            return Ok(None);
        };
        let malformed = || control::Error::Malformed(answer.to_string());
        let mut descriptors = descriptors.into_iter();
        let mut next = || descriptors.next().ok_or_else(malformed);
        let [transmit, receive, kick, wake, events] = [next()?, next()?, next()?, next()?, next()?];
        let caller = descriptors.next();
        let number = |key: &str| answer[key].as_u64().and_then(|n| u32::try_from(n).ok());
        let small = |key: &str| number(key).and_then(|n| u16::try_from(n).ok());
        let slots = number("slots").ok_or_else(malformed)?;
        let payload = small("max_payload").ok_or_else(malformed)?;
        let agreement = Agreement {
            graft: answer["graft"].as_str().unwrap_or_default().to_owned(),
            gid: small("gid").ok_or_else(malformed)?,
            services: Services::from_bits(small("services").ok_or_else(malformed)?),
            peer: answer["peer"]
                .as_str()
                .and_then(|p| p.parse().ok())
                .ok_or_else(malformed)?,
        };
        let events = Events::map(events)?;
        watch(&self.any, wake.as_fd(), WAKE)?;
        watch(&self.any, events.as_fd(), EVENTS)?;
        self.session = Some(Session {
            tx: TxRing::map(transmit.as_fd(), slots, payload)?,
            rx: RxRing::map(receive.as_fd(), slots)?,
            kick,
            wake,
            events,
            any: Arc::clone(&self.any),
            caller,
            daemon: self.client.as_fd().try_clone_to_owned()?,
            peer: agreement.peer,
            read: 0,
            given_up: 0,
            batch: 0,
            // The answer was a wake-up, too.
            cleared: true,
            nap: NAP,
        });
        self.agreement = Some(agreement.clone());
        Ok(Some(agreement))
    }

    /// Opens a session with default requirements (reliable, ordered, congestion-controlled) unless
    /// there is one.
    fn ready(&mut self) -> Result<&mut Session, Error> {
        if self.session.is_none() {
            match self.mode {
                Mode::Initiator => {
                    self.negotiate(&Requirements::STREAM)?;
                }
                Mode::Responder => {
                    self.validate()?;
                }
            }
        }
        self.session.as_mut().ok_or(Error::Misuse("no session"))
    }

    /// As [`Socket::ready`], but never waits: false if there is no session yet.
    pub(crate) fn try_ready(&mut self) -> Result<bool, Error> {
        Ok(self.session.is_some()
            || match self.mode {
                Mode::Initiator => self.try_negotiate(&Requirements::STREAM)?,
                Mode::Responder => self.try_validate()?,
            }
            .is_some())
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
        let limit = self.deadline();
        let session = self.ready()?;
        loop {
            if let Some(taken) = session.try_send(data)? {
                return Ok(taken);
            }
            session.sleep(patience(limit, WAIT_MS)?, true)?;
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
            session.clear()?;
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
        let limit = self.deadline();
        let session = self.ready()?;
        loop {
            if !session.wait(limit)? {
                return Ok(0);
            }
            let filled = session.read(buffer);
            if filled > 0 {
                return Ok(filled);
            }
        }
    }

    /// As [`Socket::recv_data`], but never waits: `None` means that nothing has arrived. The
    /// socket's descriptor becomes readable when something does.
    ///
    /// # Errors
    /// As [`Socket::recv_data`], or there is no session yet.
    pub fn try_recv_data(&mut self, buffer: &mut [u8]) -> Result<Option<usize>, Error> {
        if buffer.is_empty() {
            return Ok(Some(0));
        }
        let session = self.open_session()?;
        loop {
            match session.look()? {
                Receivable::NotYet => return Ok(None),
                Receivable::End => return Ok(Some(0)),
                Receivable::Packets => match session.read(buffer) {
                    0 => {} // given up by the sender
                    filled => return Ok(Some(filled)),
                },
            }
        }
    }

    /// The longest message, bytes; 0 without a session.
    pub fn max_message(&self) -> usize {
        self.session.as_ref().map_or(0, |s| s.tx.max_payload())
    }

    /// Sends `message` as one packet, which arrives whole or not at all: for grafts that do not
    /// keep the order, or not every packet. `false` means that there is no room, as in
    /// [`Socket::try_send_data`].
    ///
    /// # Errors
    /// The message is empty or too long, the session has ended, or there is none yet.
    pub fn try_send_message(&mut self, message: &[u8]) -> Result<bool, Error> {
        let session = self.open_session()?;
        let (len, most) = (message.len(), session.tx.max_payload());
        if !(1..=most).contains(&len) {
            return Err(Error::MessageSize { len, most });
        }
        Ok(self.try_send_data(message)?.is_some())
    }

    /// Sends a message as [`Socket::try_send_message`] does; waits for room.
    ///
    /// # Errors
    /// As [`Socket::try_send_message`].
    pub fn send_message(&mut self, message: &[u8]) -> Result<(), Error> {
        let limit = self.deadline();
        self.ready()?;
        while !self.try_send_message(message)? {
            let session = self.open_session()?;
            session.sleep(patience(limit, WAIT_MS)?, true)?;
        }
        Ok(())
    }

    /// Fetches one packet, as the peer sent it: `Some(0)` at the end, `None` if nothing has
    /// arrived, as in [`Socket::try_recv_data`]. What [`Socket::recv_data`] left of a packet counts
    /// as one.
    ///
    /// # Errors
    /// The buffer is too small, the session broke, or there is none yet.
    pub fn try_recv_message(&mut self, buffer: &mut [u8]) -> Result<Option<usize>, Error> {
        let session = self.open_session()?;
        loop {
            match session.look()? {
                Receivable::NotYet => return Ok(None),
                Receivable::End => return Ok(Some(0)),
                Receivable::Packets => {}
            }
            let message = &session.rx.packet(0)[session.read..];
            let len = message.len();
            let place = buffer.get_mut(..len).ok_or(Error::BufferTooSmall(len))?;
            place.copy_from_slice(message);
            session.read = 0;
            session.given_up += u64::from(len == 0);
            session.consume(1);
            if len > 0 {
                return Ok(Some(len));
            }
        }
    }

    /// Fetches one packet as [`Socket::try_recv_message`] does; waits for it. 0 at the end.
    ///
    /// # Errors
    /// As [`Socket::try_recv_message`].
    pub fn recv_message(&mut self, buffer: &mut [u8]) -> Result<usize, Error> {
        let limit = self.deadline();
        self.ready()?;
        loop {
            if let Some(len) = self.try_recv_message(buffer)? {
                return Ok(len);
            }
            self.open_session()?.wait(limit)?;
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
        let limit = self.deadline();
        let session = self.ready()?;
        if !session.wait(limit)? {
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
        Ok(match session.look()? {
            Receivable::NotYet => None,
            Receivable::End => Some(0),
            Receivable::Packets => Some(session.read_in_place(most, &mut take)),
        })
    }

    /// Packets that were handed over for sending and that the peer has not acknowledged.
    pub fn unacknowledged(&self) -> u64 {
        self.session.as_ref().map_or(0, |s| s.tx.unacknowledged())
    }

    /// Waits until the peer has everything, and ends the session. Dropping the socket instead ends
    /// it at once, and the peer is told that data may be missing.
    ///
    /// # Errors
    /// The session broke before everything was delivered, or the time limit passed.
    pub fn close(mut self) -> Result<(), Error> {
        let limit = self.deadline();
        while !self.try_close()? {
            if let Some(session) = &self.session {
                session.sleep(patience(limit, CLOSE_MS)?, false)?;
            }
        }
        Ok(())
    }

    /// Ends the session if the peer has everything; `false` if it has not yet. There is no
    /// wake-up for that: try again after a while.
    ///
    /// # Errors
    /// The session broke before everything was delivered.
    pub fn try_close(&mut self) -> Result<bool, Error> {
        let Some(session) = &self.session else {
            return Ok(true);
        };
        if session.tx.unacknowledged() > 0 {
            session.check_open()?;
            return Ok(false);
        }
        self.client.call(&json!({ "op": "close" }))?;
        self.session = None;
        Ok(true)
    }

    /// The peer of the open session.
    pub fn peer(&self) -> Option<IpAddr> {
        self.session.as_ref().map(|s| s.peer)
    }

    /// What the kernel and the daemon count of this session: asks the daemon.
    ///
    /// # Errors
    /// There is no session, or the daemon has gone.
    pub fn statistics(&self) -> Result<Statistics, Error> {
        if self.session.is_none() {
            return Err(Error::Misuse("there is no session"));
        }
        let answer = self.client.call(&json!({ "op": "statistics" }))?;
        let text = answer.to_string();
        Ok(serde_json::from_value(answer).map_err(|_| control::Error::Malformed(text))?)
    }

    /// What the socket was made for.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// What [`Socket::as_fd`] gives, with a life of its own.
    pub(crate) fn any(&self) -> Arc<Epoll> {
        Arc::clone(&self.any)
    }

    /// What was negotiated, once there was a session.
    pub fn agreement(&self) -> Option<&Agreement> {
        self.agreement.as_ref()
    }

    /// Whether wake-ups were taken off the descriptor since this was last asked. Who waits for the
    /// other direction by the same descriptor has missed them and must look again.
    pub(crate) fn took_wakeups(&mut self) -> bool {
        self.session
            .as_mut()
            .is_some_and(|s| std::mem::take(&mut s.cleared))
    }

    /// How long a reader should nap before it looks and asks to be woken.
    pub(crate) fn nap(&mut self) -> Option<Duration> {
        let session = self.session.as_mut()?;
        session.naps().then_some(NAP)
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

    /// Looks whether something has arrived; if not, empties the descriptor and looks again.
    fn look(&mut self) -> Result<Receivable, Error> {
        let state = self.receivable()?;
        if state != Receivable::NotYet {
            return Ok(state);
        }
        self.clear()?;
        self.receivable()
    }

    /// Copies what has arrived. 0 if those were only places of packets that the sender gave up.
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

    /// Is this a bulk transfer, of which nothing is here?
    fn naps(&mut self) -> bool {
        self.batch >= BULK && self.rx.available() == 0
    }

    /// Waits for packets. False at the end.
    fn wait(&mut self, limit: Option<Instant>) -> Result<bool, Error> {
        if self.naps() {
            self.rest();
        }
        loop {
            match self.receivable()? {
                Receivable::Packets => return Ok(true),
                Receivable::End => return Ok(false),
                Receivable::NotYet => self.sleep(patience(limit, WAIT_MS)?, true)?,
            }
        }
    }

    /// Naps, and learns how long.
    fn rest(&mut self) {
        std::thread::sleep(self.nap);
        let (arrived, slots) = (self.rx.available(), self.rx.slots());
        if arrived > slots / 2 {
            self.nap = (self.nap / 2).max(NAP);
        } else if arrived < slots / 4 {
            self.nap = if arrived < MANY {
                NAP
            } else {
                (self.nap + LONGER).min(LONG_NAP)
            };
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

    /// Sleeps until the daemon wakes us, if `wake`, or for so long.
    fn sleep(&self, most: PollTimeout, wake: bool) -> Result<(), Error> {
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
        match poll(&mut events, most) {
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

    /// Makes the descriptor unreadable until the next wake-up.
    fn clear(&mut self) -> Result<(), Error> {
        let mut found = [EpollEvent::empty(); 5];
        let count = match self.any.wait(&mut found, EpollTimeout::ZERO) {
            Ok(count) => count,
            Err(Errno::EINTR) => 0,
            Err(error) => return Err(io::Error::from(error).into()),
        };
        for event in &found[..count] {
            match event.data() {
                EVENTS => self.events.clear(),
                WAKE => {
                    let mut value = [0; 8];
                    let _ = nix::unistd::read(&self.wake, &mut value);
                }
                // Not ours to clear.
                NUDGE => continue,
                // The daemon never speaks unasked.
                _ => return Err(Error::Broken(self.peer)),
            }
            self.cleared = true;
        }
        Ok(())
    }

    fn consume(&mut self, packets: u64) {
        self.batch = packets;
        if packets > 0 && self.rx.consume(packets) {
            signal(&self.kick, 1 << 32);
        }
    }
}

/// What became readable: the connection to the daemon, the eventfd from it, the kernel's events,
/// what users of a shared socket tell each other.
const CONTROL: u64 = 0;
const WAKE: u64 = 1;
const EVENTS: u64 = 2;
pub(crate) const NUDGE: u64 = 3;

pub(crate) fn watch(epoll: &Epoll, fd: BorrowedFd<'_>, source: u64) -> io::Result<()> {
    Ok(epoll.add(fd, EpollEvent::new(EpollFlags::EPOLLIN, source))?)
}

/// How long to wait: until `limit`, but at most `most` milliseconds.
pub(crate) fn patience(limit: Option<Instant>, most: u16) -> Result<PollTimeout, Error> {
    let Some(limit) = limit else {
        return Ok(most.into());
    };
    let left = limit.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(Error::TimedOut);
    }
    // Rounded up, or the rest of a millisecond would be spent asking for nothing.
    let ms = left.as_micros().div_ceil(1000);
    Ok(u16::try_from(ms).map_or(most, |ms| ms.min(most)).into())
}

/// Adds to an eventfd.
fn signal(event: &OwnedFd, value: u64) {
    // Fails only if the counter is full, and then the daemon has been told already.
    let _ = nix::unistd::write(event, &value.to_ne_bytes());
}

impl AsFd for Socket {
    /// Readable when something has arrived, there is room again, the session has opened or ended:
    /// one descriptor for everything, and the same one for the socket's life, so try whatever is
    /// of interest. Only what `try_…` found missing is told.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.any.0.as_fd()
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
