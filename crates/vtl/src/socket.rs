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
//! Messages keep their boundaries: [`Socket::send_message`], [`Socket::recv_message`],
//! [`Socket::recv_part`].
//!
//! Payload is written into the ring from which the kernel sends, and read from the ring into which
//! it receives. A socket may move between threads; one thread uses it at a time. [`crate::Shared`]
//! is for several threads, [`crate::Listener`] accepts many sessions.

use std::{
    io::{self, Read, Write},
    net::{IpAddr, SocketAddr},
    os::fd::{AsFd, BorrowedFd},
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use nix::{
    poll::{PollFd, PollFlags},
    sys::epoll::Epoll,
};
use vtl_control::{self as control, Client, Destination, Done, Listening, Request, SessionRequest};
use vtl_proto::services::{Requirements, Services};

pub use crate::error::Error;
use crate::{
    message::Part,
    session::{Halt, Receivable, Session},
    succession::{Patience, Succession, Switches},
    waiting::{Source, WAIT_MS, deadline, epoll, patience, pause, poll, watch},
};

/// Role of a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Opens sessions: [`Socket::negotiate`].
    Initiator,
    /// Waits for sessions: [`Socket::validate`].
    Responder,
}

/// Result of the negotiation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Agreement {
    /// The graft's name.
    pub graft: String,
    /// The graft's number in packets.
    pub gid: u16,
    /// The services that it provides.
    pub services: Services,
    /// The other host.
    pub peer: IpAddr,
}

/// Counters of a session, since its start unless stated otherwise.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Deserialize)]
#[serde(default)]
pub struct Statistics {
    /// Smoothed round-trip time, milliseconds.
    pub rtt_ms: f64,
    /// Minimum round-trip time of the last 10 s, milliseconds.
    pub min_rtt_ms: f64,
    /// Maximum delivery rate over one second, of the last ten seconds with data: Mbit/s of payload.
    pub rate_mbit: f64,
    /// Loss rate on the way to the peer, of transmissions in the last 10 s with data: percent.
    pub loss_pct: f64,
    /// Congestion window, packets.
    pub cwnd: u64,
    /// Packets sent, retransmissions included.
    pub sent: u64,
    /// Packets retransmitted.
    pub retransmitted: u64,
    /// Transmissions lost, as of the latest acknowledgement.
    pub lost: u64,
    /// Packets delivered to the peer, as of the latest acknowledgement.
    pub delivered: u64,
    /// Packets that the peer has not acknowledged yet.
    pub unacknowledged: u64,
    /// Packets received, without duplicates.
    pub received: u64,
    /// Duplicates received.
    pub duplicates: u64,
    /// Consecutive probe timeouts without an acknowledgement.
    pub timeouts: u64,
}

/// A VTL socket. Data flows in both directions, whichever side opened the session.
pub struct Socket {
    pub(crate) daemon: PathBuf,
    pub(crate) client: Arc<Client>,
    mode: Mode,
    address: SocketAddr,
    timeout: Option<Duration>,
    /// A request for a session is outstanding at the daemon.
    asked: bool,
    /// Who has asked for the first session was not told of it yet; whatever else is called may take the answer.
    awaits_first: bool,
    pub(crate) any: Arc<Epoll>,
    pub(crate) agreement: Option<Agreement>,
    pub(crate) session: Option<Session>,
    pub(crate) succession: Succession,
}

impl Socket {
    /// Obtains a socket from the daemon at `daemon`. `address`: for an initiator, the peer and its
    /// VTL port; for a responder, only the port counts, 1 to 65534, which it holds exclusively.
    ///
    /// # Errors
    /// The daemon is unreachable, or the port is taken.
    pub fn init(mode: Mode, address: SocketAddr, daemon: &Path) -> Result<Self, Error> {
        let client = Client::connect(daemon)?;
        if mode == Mode::Responder {
            let port = address.port();
            let _: Listening = client.call(&Request::Listen { port })?;
        }
        Self::over(client, mode, address, daemon)
    }

    /// Makes a socket without a session over a connection to the daemon.
    pub(crate) fn over(
        client: Client,
        mode: Mode,
        address: SocketAddr,
        daemon: &Path,
    ) -> Result<Self, Error> {
        let any = epoll()?;
        watch(&any, &client, Source::Any)?;
        Ok(Self {
            daemon: daemon.to_path_buf(),
            client: Arc::new(client),
            mode,
            address,
            timeout: None,
            asked: false,
            awaits_first: false,
            any: Arc::new(any),
            agreement: None,
            session: None,
            succession: Succession::default(),
        })
    }

    /// Limits the duration of blocking operations; `None`, the default: no limit. An operation that
    /// exceeds it fails with [`Error::TimedOut`] and may be retried.
    pub fn set_timeout(&mut self, limit: Option<Duration>) {
        self.timeout = limit;
    }

    /// Opens a session that meets the requirements; returns once the peer has agreed. With a known
    /// peer it returns at once: data goes as early data over the graft that the peer agreed to last
    /// time. If the peer then refuses, or does not answer for nine seconds, the session is
    /// [`Error::Broken`].
    ///
    /// In a session, requests its succession by a session with these requirements; either side may.
    /// Data sent after that goes over the new session; each side reads the data of the old one
    /// first. If the old session is not reliable, its last packets may get lost, or be read after
    /// the first of the new one. The peer follows when it next sends or receives. A refusal changes
    /// nothing. After [`Error::TimedOut`] the attempt goes on, and takes effect with any later
    /// call.
    ///
    /// # Errors
    /// The requirements contradict each other, no graft of both hosts meets them, or the peer does
    /// not answer. In a session also: a message is sent in part; the peer has begun a succession
    /// itself, or its application requires a service that would be lost; or the last eight
    /// successions are not finished, because data of the previous sessions is unread or
    /// unacknowledged.
    pub fn negotiate(&mut self, requirements: &Requirements) -> Result<Agreement, Error> {
        let limit = self.deadline();
        self.await_agreement(limit, |socket| socket.try_negotiate(requirements))
    }

    /// As [`Socket::negotiate`], but does not block: `None` means that the peer has not agreed yet.
    /// The socket's descriptor becomes readable when another call may succeed. Only the
    /// requirements of the first call count.
    ///
    /// # Errors
    /// As [`Socket::negotiate`].
    pub fn try_negotiate(
        &mut self,
        requirements: &Requirements,
    ) -> Result<Option<Agreement>, Error> {
        if let Some(contradiction) = requirements.contradiction() {
            return Err(contradiction.into());
        }
        self.try_connect(&SessionRequest {
            requirements: *requirements,
            ..SessionRequest::default()
        })
    }

    /// As [`Socket::negotiate`], but over the named graft only, for tests and measurements.
    /// `params`: parameters of the graft that override its defaults, in both directions.
    ///
    /// # Errors
    /// As [`Socket::negotiate`]; or the graft, or one of the parameters, does not exist.
    pub fn negotiate_over(
        &mut self,
        graft: &str,
        params: &[(&str, u32)],
    ) -> Result<Agreement, Error> {
        self.negotiate_exactly(&Requirements::default(), graft, params)
    }

    /// As [`Socket::negotiate_over`], with requirements that the graft or the session must meet as
    /// well.
    ///
    /// # Errors
    /// As [`Socket::negotiate_over`]; or the graft does not meet them.
    pub fn negotiate_exactly(
        &mut self,
        requirements: &Requirements,
        graft: &str,
        params: &[(&str, u32)],
    ) -> Result<Agreement, Error> {
        let param = |(name, value): &(&str, u32)| ((*name).to_owned(), *value);
        let wanted = SessionRequest {
            requirements: *requirements,
            graft: Some(graft.to_owned()),
            params: params.iter().map(param).collect(),
            ..SessionRequest::default()
        };
        let limit = self.deadline();
        self.await_agreement(limit, |socket| socket.try_connect(&wanted))
    }

    /// Whether successions that this socket requests by [`Socket::negotiate`] and its variants are stateless from now on;
    /// at first they are not. A stateless switch takes one round trip and waits for nothing: the session before ends at
    /// once, in both directions, and what either side had sent in it and was not acknowledged is given up and counted
    /// ([`Socket::switches`]). What had arrived is still read, in order; nothing arrives twice, and no message in part: one
    /// that was begun goes by the new session, from its beginning. A reader that has fetched a part of a message of which
    /// the rest was cut off gets [`Error::Cut`], once.
    ///
    /// Only for applications that do without some packets: over a graft that may lose some, or if the session was opened
    /// with a bound of losses (`max_loss`), and neither side has required reliability; otherwise the request is refused.
    /// What is given up comes on top of `max_loss`. With a peer's host of an earlier version the switch loses nothing,
    /// and takes as long as without.
    pub fn set_stateless(&mut self, stateless: bool) {
        self.succession.stateless = stateless;
    }

    /// Stateless switches so far, requested by either side, and what this side has given up in them.
    pub fn switches(&self) -> Switches {
        self.succession.switches
    }

    /// Requests a session, or the succession of the present one, and takes the answer.
    fn try_connect(&mut self, wanted: &SessionRequest) -> Result<Option<Agreement>, Error> {
        if self.session.is_some() {
            return match self.taken() {
                Some(agreement) => Ok(Some(agreement)),
                None => self.try_succeed(wanted),
            };
        }
        let opened = self.try_open(wanted);
        self.awaits_first = matches!(opened, Ok(None));
        opened
    }

    /// Result of the first session, if who has asked for it was not told.
    fn taken(&mut self) -> Option<Agreement> {
        let is_told = !std::mem::take(&mut self.awaits_first);
        self.agreement.clone().filter(|_| !is_told)
    }

    /// Requests the first session, and takes the answer.
    fn try_open(&mut self, wanted: &SessionRequest) -> Result<Option<Agreement>, Error> {
        if self.mode != Mode::Initiator {
            return Err(Error::Misuse("a responder validates a session first"));
        }
        if !self.asked {
            self.ask(&Request::Connect {
                to: Destination::Peer {
                    host: self.address.ip(),
                    port: self.address.port(),
                },
                session: wanted.clone(),
            })?;
        }
        self.try_adopt()
    }

    /// Waits for a peer to open a session.
    ///
    /// # Errors
    /// The daemon has gone.
    pub fn validate(&mut self) -> Result<Agreement, Error> {
        let limit = self.deadline();
        self.await_agreement(limit, Self::try_validate)
    }

    /// As [`Socket::validate`], but does not block: `None` means that no peer has opened a session
    /// yet. The socket's descriptor becomes readable when another call may succeed.
    ///
    /// # Errors
    /// As [`Socket::validate`].
    pub fn try_validate(&mut self) -> Result<Option<Agreement>, Error> {
        if self.session.is_some()
            && let Some(agreement) = self.taken()
        {
            return Ok(Some(agreement));
        }
        if self.mode != Mode::Responder || self.session.is_some() {
            return Err(Error::Misuse(
                "only a responder without session can validate",
            ));
        }
        let accepted = self.try_accept();
        self.awaits_first = matches!(accepted, Ok(None));
        accepted
    }

    fn try_accept(&mut self) -> Result<Option<Agreement>, Error> {
        if !self.asked {
            self.ask(&Request::Accept { key: None })?;
        }
        self.try_adopt()
    }

    /// Requests a session; [`Socket::try_adopt`] takes the answer.
    pub(crate) fn ask(&mut self, request: &Request) -> Result<(), Error> {
        self.client.ask(request)?;
        self.asked = true;
        Ok(())
    }

    pub(crate) fn deadline(&self) -> Option<Instant> {
        deadline(self.timeout)
    }

    /// Repeats `attempt` until it returns a result; waits in between.
    fn await_agreement<T>(
        &mut self,
        limit: Option<Instant>,
        mut attempt: impl FnMut(&mut Self) -> Result<Option<T>, Error>,
    ) -> Result<T, Error> {
        loop {
            if let Some(agreed) = attempt(self)? {
                return Ok(agreed);
            }
            self.rest(limit)?;
        }
    }

    /// Waits until the descriptor is readable.
    pub(crate) fn rest(&self, limit: Option<Instant>) -> Result<(), Error> {
        let mut fds = [PollFd::new(self.any.0.as_fd(), PollFlags::POLLIN)];
        // Delivery of data of previous sessions causes no wake-up: poll.
        let none = self.succession.old.is_empty();
        let max = if none { u16::MAX } else { WAIT_MS };
        Ok(poll(&mut fds, patience(limit, max)?)?)
    }

    /// Waits for the daemon's answer.
    pub(crate) fn await_answer(&self, limit: Option<Instant>) -> Result<(), Error> {
        let mut fds = [PollFd::new(self.client.as_fd(), PollFlags::POLLIN)];
        Ok(poll(&mut fds, patience(limit, u16::MAX)?)?)
    }

    /// Takes the session if the daemon has granted it.
    pub(crate) fn try_adopt(&mut self) -> Result<Option<Agreement>, Error> {
        let answer = self.client.answer();
        self.asked = matches!(answer, Ok(None));
        let granted = match answer {
            Ok(None) => return Ok(None),
            Ok(Some((grant, descriptors))) => {
                Session::granted(grant, descriptors, &self.any, &self.client)
            }
            // A malformed answer, or of another version, may have granted a session.
            Err(
                error @ (control::Error::System(_)
                | control::Error::Malformed(_)
                | control::Error::Protocol(_)),
            ) => Err(error.into()),
            Err(error) => return Err(error.into()),
        };
        let (session, agreement) = granted.inspect_err(|_| {
            // The daemon considers the session open: close it, or the next attempt would get
            // another one.
            let _ = self.client.call::<Done>(&Request::Close { aborted: true });
        })?;
        self.session = Some(session);
        self.agreement = Some(agreement.clone());
        Ok(Some(agreement))
    }

    /// Opens a session with default requirements (reliable, ordered, congestion-controlled) if
    /// there is none.
    pub(crate) fn ready(&mut self, limit: Option<Instant>) -> Result<(), Error> {
        if self.session.is_some() {
            return Ok(());
        }
        self.await_agreement(limit, |socket| Ok(socket.try_ready()?.then_some(())))
    }

    /// As `ready`, but does not block: false if there is no session yet.
    pub(crate) fn try_ready(&mut self) -> Result<bool, Error> {
        Ok(self.session.is_some()
            || match self.mode {
                Mode::Initiator => self.try_open(&SessionRequest {
                    requirements: Requirements::STREAM,
                    ..SessionRequest::default()
                })?,
                Mode::Responder => self.try_accept()?,
            }
            .is_some())
    }

    /// The session, which must be open already.
    pub(crate) fn open_session(&mut self) -> Result<&mut Session, Error> {
        const WHY: &str = "negotiate or validate a session first";
        self.session.as_mut().ok_or(Error::Misuse(WHY))
    }

    /// Queues bytes for sending; waits until there is room. Returns the number of bytes taken: at
    /// least one, unless `data` is empty. They are not delivered yet: [`Socket::close`] waits for
    /// that.
    ///
    /// # Errors
    /// The session has ended.
    pub fn send_data(&mut self, data: &[u8]) -> Result<usize, Error> {
        if data.is_empty() {
            return Ok(0);
        }
        self.send_with(|s, patience| match patience {
            Patience::Until(limit) => s.send(data, limit).map(Some),
            Patience::None => s.try_send(data),
        })
    }

    /// As [`Socket::send_data`], but does not block: `None` means that there is no room. The
    /// socket's descriptor becomes readable when there is.
    ///
    /// # Errors
    /// The session has ended, or there is none yet.
    pub fn try_send_data(&mut self, data: &[u8]) -> Result<Option<usize>, Error> {
        if data.is_empty() {
            return Ok(Some(0));
        }
        self.try_send_with(|s| s.try_send(data))
    }

    /// Reads bytes that have arrived, in order; waits for the first. 0: end of data, the peer has
    /// closed the session and everything was read.
    ///
    /// # Errors
    /// The session broke, and data may be missing; or a packet was modified on the path:
    /// [`Error::Forged`].
    pub fn recv_data(&mut self, buffer: &mut [u8]) -> Result<usize, Error> {
        if buffer.is_empty() {
            return Ok(0);
        }
        self.recv_with(|s, patience| match patience {
            Patience::Until(limit) => s.recv_data(limit, buffer).map(Some),
            Patience::None => s.try_recv_data(buffer),
        })
    }

    /// As [`Socket::recv_data`], but does not block: `None` means that nothing has arrived. The
    /// socket's descriptor becomes readable when something does.
    ///
    /// # Errors
    /// As [`Socket::recv_data`], or there is no session yet.
    pub fn try_recv_data(&mut self, buffer: &mut [u8]) -> Result<Option<usize>, Error> {
        if buffer.is_empty() {
            return Ok(Some(0));
        }
        self.try_recv_with(|s| s.try_recv_data(buffer))
    }

    /// Maximum length of a message, bytes; 0 without a session. 64 MiB if the graft is reliable and
    /// ordered and the peer's host supports such messages; else [`Socket::max_packet`].
    pub fn max_message(&self) -> usize {
        self.session.as_ref().map_or(0, Session::max_message)
    }

    /// Maximum payload of a packet, bytes; 0 without a session. Shrinks when the path MTU does.
    pub fn max_packet(&self) -> usize {
        self.session.as_ref().map_or(0, Session::max_payload)
    }

    /// Sends a message of 1 to [`Socket::max_message`] bytes; the receiver gets it whole or not at
    /// all. `false`: no room for all of it, as in [`Socket::try_send_data`]; part of it may be in
    /// flight. Then continue with the same message: until it is sent whole, nothing else can be
    /// sent, and [`Socket::close`] fails. A message of one packet is never sent in part.
    ///
    /// # Errors
    /// The message is empty or too long, another one is sent in part, the session has ended, or
    /// there is none yet.
    pub fn try_send_message(&mut self, message: &[u8]) -> Result<bool, Error> {
        self.try_send_in_lane(0, message)
    }

    /// As [`Socket::try_send_message`], in a lane of the application's choice. With a graft of
    /// partial order, messages of a lane arrive in order, and lanes do not block each other; the
    /// receiver does not learn the lane. All other data is in lane 0. With full order, or none,
    /// lanes have no effect.
    ///
    /// # Errors
    /// As [`Socket::try_send_message`].
    pub fn try_send_in_lane(&mut self, lane: u32, message: &[u8]) -> Result<bool, Error> {
        let sent = self.try_send_with(|s| {
            check_message(message, s)?;
            Ok(s.try_send_message(lane, message)?.then_some(()))
        })?;
        Ok(sent.is_some())
    }

    /// Sends messages of one packet each, which `fill` writes: it gets a packet's room, at least
    /// one byte, and returns the message's length, 0 after the last. They leave together, which
    /// costs far less than each alone. Returns their number, which a full ring or a limit of some
    /// hundred may end before `fill` does; `None`: no room, as in [`Socket::try_send_data`].
    ///
    /// # Errors
    /// Another message is sent in part, the session has ended, or there is none yet.
    pub fn try_send_packets(
        &mut self,
        mut fill: impl FnMut(&mut [u8]) -> usize,
    ) -> Result<Option<usize>, Error> {
        self.try_send_with(|s| s.try_send_packets(&mut fill))
    }

    /// Sends a message as [`Socket::try_send_message`] does; waits for room. After
    /// [`Error::TimedOut`], continue with the same message.
    ///
    /// # Errors
    /// As [`Socket::try_send_message`].
    pub fn send_message(&mut self, message: &[u8]) -> Result<(), Error> {
        self.send_in_lane(0, message)
    }

    /// As [`Socket::send_message`], in a lane: see [`Socket::try_send_in_lane`].
    ///
    /// # Errors
    /// As [`Socket::try_send_message`].
    pub fn send_in_lane(&mut self, lane: u32, message: &[u8]) -> Result<(), Error> {
        self.send_with(|s, patience| {
            check_message(message, s)?;
            match patience {
                Patience::Until(limit) => s.send_message(lane, message, limit).map(Some),
                Patience::None => Ok(s.try_send_message(lane, message)?.then_some(())),
            }
        })
    }

    /// Reads a message as the peer sent it: `Some(0)` at the end, `None` if none has arrived whole,
    /// as in [`Socket::try_recv_data`]. The part that has arrived is kept for the next call, with
    /// any buffer; it takes at most as much memory as `buffer` has. The rest of a message that
    /// [`Socket::recv_data`] read in part counts as a message.
    ///
    /// # Errors
    /// The buffer is too small: the message stays, for a larger one or for
    /// [`Socket::try_recv_part`]. The session broke, or ended in the middle of a message; or there
    /// is none yet.
    pub fn try_recv_message(&mut self, buffer: &mut [u8]) -> Result<Option<usize>, Error> {
        self.try_recv_with(|s| s.try_recv_message(buffer))
    }

    /// Reads a message as [`Socket::try_recv_message`] does; waits for it. 0 at the end.
    ///
    /// # Errors
    /// As [`Socket::try_recv_message`].
    pub fn recv_message(&mut self, buffer: &mut [u8]) -> Result<usize, Error> {
        self.recv_with(|s, patience| match patience {
            Patience::Until(limit) => s.recv_message(limit, buffer).map(Some),
            Patience::None => s.try_recv_message(buffer),
        })
    }

    /// Passes up to `max` whole messages (at least 1) that have arrived to `take`: those of one
    /// packet without a copy, longer ones put together in `buffer`. Returns their number: 0 means
    /// the end, as in [`Socket::recv_data`]; `None` that none is whole yet, and then the socket's
    /// descriptor becomes readable when something arrives. Messages that were given up are left
    /// out.
    ///
    /// # Errors
    /// As [`Socket::try_recv_message`].
    pub fn try_recv_messages(
        &mut self,
        buffer: &mut [u8],
        max: u64,
        mut take: impl FnMut(&[u8]),
    ) -> Result<Option<u64>, Error> {
        self.try_recv_with(|s| s.try_recv_messages(buffer, max, &mut take))
    }

    /// Reads the part of a message that has arrived and fits, and tells whether the message
    /// continues: for messages too large to buffer. `None` if nothing has arrived, as in
    /// [`Socket::try_recv_data`]; with an empty buffer, reads nothing.
    ///
    /// # Errors
    /// The session broke, or ended in the middle of a message; or there is none yet.
    pub fn try_recv_part(&mut self, buffer: &mut [u8]) -> Result<Option<Part>, Error> {
        if buffer.is_empty() {
            return Ok(Some(Part::default()));
        }
        self.try_recv_with(|s| s.try_recv_part(buffer))
    }

    /// Reads a part of a message as [`Socket::try_recv_part`] does; waits for it.
    ///
    /// # Errors
    /// As [`Socket::try_recv_part`].
    pub fn recv_part(&mut self, buffer: &mut [u8]) -> Result<Part, Error> {
        if buffer.is_empty() {
            return Ok(Part::default());
        }
        self.recv_with(|s, patience| match patience {
            Patience::Until(limit) => s.recv_part(limit, buffer).map(Some),
            Patience::None => s.try_recv_part(buffer),
        })
    }

    /// Gaps in the data up to the application's position: packets that the peer gave up, over an
    /// ordered graft of partial reliability, or that failed authentication, over an unreliable
    /// graft. Always 0 over reliable grafts; without order, lost packets are not counted.
    pub fn given_up(&self) -> u64 {
        let sessions = self.sessions().map(Session::given_up);
        self.succession.given_up + sessions.sum::<u64>()
    }

    /// Reads up to `max` packets in place, without a copy; waits for the first. A given-up packet
    /// reads as empty. Returns the number of packets read; 0 means the end, as in
    /// [`Socket::recv_data`].
    ///
    /// # Errors
    /// As [`Socket::recv_data`].
    pub fn recv_in_place(&mut self, max: u64, mut take: impl FnMut(&[u8])) -> Result<u64, Error> {
        self.recv_with(|s, patience| {
            if let Patience::Until(limit) = patience
                && !s.has_kept()
                && !s.wait(limit)?
            {
                return Ok(Some(0));
            }
            try_in_place(s, max, &mut take)
        })
    }

    /// As [`Socket::recv_in_place`], but does not block: `None` means that nothing has arrived. The
    /// socket's descriptor becomes readable when something does.
    ///
    /// # Errors
    /// As [`Socket::recv_data`], or there is no session yet.
    pub fn try_recv_in_place(
        &mut self,
        max: u64,
        mut take: impl FnMut(&[u8]),
    ) -> Result<Option<u64>, Error> {
        self.try_recv_with(|s| try_in_place(s, max, &mut take))
    }

    /// The present session, and the previous ones.
    fn sessions(&self) -> impl Iterator<Item = &Session> {
        let before = self.succession.old.iter().map(|old| &old.session);
        self.session.iter().chain(before)
    }

    /// Packets queued for sending or in flight: not acknowledged by the peer, nor given up by a stateless switch.
    pub fn unacknowledged(&self) -> u64 {
        let sessions = self.sessions().filter(|session| !session.is_cut());
        sessions.map(Session::unacknowledged).sum()
    }

    /// Waits until the peer has acknowledged everything, and ends the session. Dropping the socket
    /// instead aborts the session: the peer is told that data may be missing.
    ///
    /// # Errors
    /// The session broke before everything was delivered, or the time limit passed.
    pub fn close(mut self) -> Result<(), Error> {
        let limit = self.deadline();
        while !self.try_close()? {
            pause(limit)?;
        }
        Ok(())
    }

    /// Ends the session if everything is acknowledged; `false` if not yet. There is no wake-up for
    /// that: poll.
    ///
    /// # Errors
    /// The session broke before everything was delivered.
    pub fn try_close(&mut self) -> Result<bool, Error> {
        self.tend();
        let Some(session) = &self.session else {
            return Ok(true);
        };
        let delivered = session.delivered()?;
        session.between_messages()?;
        if !delivered || !self.are_old_delivered()? {
            return Ok(false);
        }
        while !self.succession.old.is_empty() {
            self.retire();
        }
        match self.client.call::<Done>(&Request::Close { aborted: false }) {
            // A daemon that hangs reads it when it goes on.
            Ok(Done {}) | Err(control::Error::Silent(_)) => {}
            Err(error) => return Err(error.into()),
        }
        self.session = None;
        Ok(true)
    }

    /// The peer of the open session.
    pub fn peer(&self) -> Option<IpAddr> {
        self.session.as_ref().map(|s| s.peer)
    }

    /// Requests the session's counters, of kernel and daemon, from the daemon.
    ///
    /// # Errors
    /// There is no session, or the daemon has gone.
    pub fn statistics(&self) -> Result<Statistics, Error> {
        if self.session.is_none() {
            return Err(Error::Misuse("there is no session"));
        }
        Ok(self.client.call(&Request::Statistics)?)
    }

    /// The socket's role.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// An owned reference to the descriptor of [`Socket::as_fd`].
    pub(crate) fn any(&self) -> Arc<Epoll> {
        Arc::clone(&self.any)
    }

    /// Result of the negotiation, once there was a session.
    pub fn agreement(&self) -> Option<&Agreement> {
        self.agreement.as_ref()
    }

    /// Whether wake-ups were taken off the descriptor since the last call. A waiter for the other
    /// direction on the same descriptor has missed them and must check again.
    pub(crate) fn took_wakeups(&mut self) -> bool {
        let before = self.succession.old.iter_mut().map(|old| &mut old.session);
        let sessions = self.session.iter_mut().chain(before);
        // Clears the flag of every session: no short circuit.
        let took = sessions.filter_map(|s| s.took_wakeups().then_some(()));
        took.count() > 0 || std::mem::take(&mut self.succession.news)
    }

    /// How long a reader should sleep before it checks and waits for a wake-up.
    pub(crate) fn nap(&mut self) -> Option<Duration> {
        if !self.succession.old.is_empty() {
            return None;
        }
        self.session.as_mut()?.nap()
    }
}

/// Reads in place the packets that have arrived.
fn try_in_place(
    session: &mut Session,
    max: u64,
    take: &mut impl FnMut(&[u8]),
) -> Result<Option<u64>, Halt> {
    if max > 0 && session.read_kept(take) {
        return Ok(Some(1));
    }
    Ok(match session.look()? {
        Receivable::NotYet => None,
        Receivable::End => Some(0),
        Receivable::Succeeded => return Err(Halt::Succeeded),
        Receivable::Packets => Some(session.read_in_place(max, take)?),
    })
}

/// Checks the length of a message against the session's limit.
fn check_message(message: &[u8], session: &Session) -> Result<(), Error> {
    let (len, max) = (message.len(), session.max_message());
    if (1..=max).contains(&len) {
        Ok(())
    } else {
        Err(Error::MessageSize { len, max })
    }
}

impl AsFd for Socket {
    /// Readable when data has arrived, there is room again, or the session has opened or ended. One
    /// descriptor for all events and for the socket's life: on a wake-up, retry every operation of
    /// interest. Reports only events that a `try_…` call has returned without.
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
