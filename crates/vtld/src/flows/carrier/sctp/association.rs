//! One SCTP association: the library's state, and VTL's checks and supervision around it.
//!
//! It runs in a task of its own, the only one to call the library: if a packet makes that panic, just
//! this association ends.

use std::{
    cell::{Cell, RefCell},
    collections::{BTreeSet, VecDeque},
    rc::Rc,
    sync::Arc,
    time::{Duration, Instant},
};

use bytes::Bytes;
use sctp_proto::{
    Association, AssociationHandle, ClientConfig, DatagramEvent, Endpoint, EndpointConfig, Event,
    PathMeasured, Payload, PayloadProtocolIdentifier, ReliabilityType, ServerConfig, StreamEvent,
    TransportConfig,
};
use tokio::{task::yield_now, time::sleep_until};
use vtl_proto::{
    intf::{VTL_PTO_FIRST_MS, VTL_PTO_MAX_MS},
    preamble::SctpMessage,
};

use super::{
    super::{
        DEAD, HANDSHAKE, MIN_RTO, SILENCE,
        framed::{Arrived, Out, Pipe},
        sealed,
    },
    Path, Wire,
    packet::{self, Header},
};

/// Streams: for the association itself, for control frames, and for chunks, which are unordered.
const OWN: u16 = 0;
const CONTROL: u16 = 1;
const CHUNKS: u16 = 2;
const STREAMS: u16 = 3;
/// Maximum size of a message, one DATA chunk, bytes. Longer ones would be fragmented, and delivered
/// only when complete.
const MESSAGE: usize = 1168;

/// Receive window, bytes, and maximum distance of a TSN ahead of the cumulative one.
const WINDOW: u32 = 16 << 20;
const AHEAD: u32 = 16_384;
/// Messages queued in the library that were not sent yet: enough to fill its congestion window, and
/// few for new flows to wait behind.
const BACKLOG: usize = 32;
/// Maximum round-trip time that a PONG is believed.
const MAX_RTT: Duration = Duration::from_secs(60);
/// Receive queue of the association, packets and bytes,
const WAITING: usize = 4096;
const WAITING_BYTES: usize = 8 << 20;
/// and packets processed at once.
const AT_ONCE: usize = 256;

/// Maximum retransmission timeout, and the initial one without a known round-trip time: the same as
/// a session's.
const MAX_RTO: Duration = Duration::from_millis(VTL_PTO_MAX_MS as u64);
const FIRST_RTO: Duration = Duration::from_millis(VTL_PTO_FIRST_MS as u64);

/// Keepalive interval (PING).
const PINGS: Duration = Duration::from_secs(4);

/// Which end of the association this is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    Client,
    Server,
}

/// State of an association shared with other tasks.
pub(super) struct Shared {
    pub(super) pipe: Rc<Pipe>,
    pub(super) figures: Figures,
    datagrams: RefCell<sealed::Datagrams>,
    /// Maximum size of a message, bytes.
    message: usize,
    inbox: RefCell<VecDeque<Bytes>>,
    /// Bytes in the inbox.
    waiting: Cell<usize>,
    /// Received bytes that the library holds.
    unread: Cell<u32>,
}

/// Statistics.
#[derive(Default)]
pub(super) struct Figures {
    /// The latest round-trip time (PING, PONG).
    pub(super) rtt: Cell<Option<Duration>>,
    /// What the sender's model of the path has.
    pub(super) measured: Cell<Option<PathMeasured>>,
    /// Packets sent, and DATA chunks retransmitted.
    pub(super) sent: Cell<u64>,
    pub(super) again: Cell<u64>,
    /// Packets from the peer's address that were rejected.
    pub(super) refused: Cell<u64>,
}

fn count(cell: &Cell<u64>) {
    cell.set(cell.get() + 1);
}

impl Shared {
    fn new(datagrams: sealed::Datagrams) -> Self {
        let message = MESSAGE - datagrams.overhead();
        Self {
            pipe: Pipe::relayed(message),
            figures: Figures::default(),
            datagrams: RefCell::new(datagrams),
            message,
            inbox: RefCell::default(),
            waiting: Cell::new(0),
            unread: Cell::new(0),
        }
    }

    /// Memory of queued packets and of the library, bytes.
    pub(super) fn memory(&self) -> u64 {
        self.waiting.get() as u64 + u64::from(self.unread.get())
    }

    /// Opens a sealed packet; `None` if it is forged.
    pub(super) fn open(&self, packet: &[u8]) -> Option<Bytes> {
        let opened = self.datagrams.borrow_mut().open(packet);
        if opened.is_none() {
            count(&self.figures.refused);
        }
        opened
    }

    /// Queues a received packet; drops it if the queue is full.
    pub(super) fn deliver(&self, packet: Bytes) {
        let mut inbox = self.inbox.borrow_mut();
        let waiting = self.waiting.get() + packet.len();
        if inbox.len() < WAITING && waiting <= WAITING_BYTES {
            self.waiting.set(waiting);
            inbox.push_back(packet);
            self.pipe.work.notify_one();
        }
    }
}

/// Why an association has ended.
#[derive(Debug, thiserror::Error)]
pub(super) enum Ended {
    #[error("closed here")]
    Here,
    #[error("closed by the peer")]
    Peer,
    #[error("timeout: nothing received from the peer")]
    Silence,
    #[error("protocol violation by the peer")]
    Violation,
    #[error("wrong token")]
    Stranger,
    #[error("SCTP: {0}")]
    Library(String),
}

impl From<sctp_proto::Error> for Ended {
    fn from(error: sctp_proto::Error) -> Self {
        Self::Library(error.to_string())
    }
}

/// The association's task.
pub(super) struct Driver {
    shared: Rc<Shared>,
    wire: Rc<Wire>,
    path: Path,
    role: Role,
    token: u64,
    endpoint: Endpoint,
    association: Option<(AssociationHandle, Association)>,
    /// Called once it is usable.
    opened: Option<Box<dyn FnOnce()>>,
    /// The handshake is complete; the token was exchanged.
    established: bool,
    redeemed: bool,
    /// Verification tags, taken from outgoing packets: the peer's, and this host's own.
    tag: u32,
    own_tag: u32,
    /// The highest TSN sent.
    newest: Option<u32>,
    /// The peer's cumulative acknowledgement.
    acknowledged: Option<u32>,
    /// The cumulative acknowledgement sent to the peer.
    arrived: Option<u32>,
    /// Start of the current silence, while data is unacknowledged.
    waits: Option<Instant>,
    /// The path's round-trip time, measured by TCP.
    rtt: Duration,
    /// The stream of chunks was set to unordered.
    is_unordered: bool,
    /// Messages queued in the library that were not sent yet.
    backlog: usize,
    /// Streams with messages to read.
    readable: BTreeSet<u16>,
    began: Instant,
    heard: Instant,
    pinged: Instant,
}

/// Ends the association when its task ends, also by a panic.
struct Guard {
    shared: Rc<Shared>,
    wire: Rc<Wire>,
    path: Path,
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.shared.pipe.end();
        self.wire.forget(&self.path, &self.shared);
    }
}

fn transport(path: &Path, rtt: Option<Duration>, message: usize) -> Arc<TransportConfig> {
    let ms = |time: Duration| time.as_millis() as u64;
    // No delayed acknowledgements during the handshake.
    let first = rtt.map_or(FIRST_RTO, |rtt| rtt * 2 + Duration::from_millis(50));
    let config = TransportConfig::default()
        .with_max_receive_buffer_size(WINDOW)
        .with_max_send_message_size(message as u32)
        .with_max_num_outbound_streams(STREAMS)
        .with_max_num_inbound_streams(STREAMS)
        .with_rto_initial_ms(ms(first.clamp(MIN_RTO, MAX_RTO)))
        .with_rto_min_ms(ms(MIN_RTO))
        .with_rto_max_ms(ms(MAX_RTO))
        .with_path_model(true)
        .with_local_port(path.here)
        .with_remote_port(path.there);
    Arc::new(config)
}

impl Driver {
    pub(super) fn new(
        role: Role,
        wire: &Rc<Wire>,
        path: Path,
        token: u64,
        rtt: Option<Duration>,
        datagrams: sealed::Datagrams,
        opened: Box<dyn FnOnce()>,
    ) -> Result<(Self, Rc<Shared>), Ended> {
        let shared = Rc::new(Shared::new(datagrams));
        let transport = transport(&path, rtt, shared.message);
        let mut config = EndpointConfig::new();
        config.max_payload_size(shared.message as u32);
        let server = (role == Role::Server).then(|| {
            let mut server = ServerConfig::new();
            server.transport = Arc::clone(&transport);
            Arc::new(server)
        });
        let mut endpoint = Endpoint::new(Arc::new(config), server);
        let association = match role {
            Role::Server => None,
            Role::Client => {
                let mut config = ClientConfig::new();
                config.transport = transport;
                let begun = endpoint.connect(config, path.peer);
                Some(begun.map_err(|error| Ended::Library(error.to_string()))?)
            }
        };
        let now = Instant::now();
        let driver = Self {
            shared: Rc::clone(&shared),
            wire: Rc::clone(wire),
            path,
            role,
            token,
            endpoint,
            association,
            opened: Some(opened),
            established: false,
            redeemed: false,
            tag: 0,
            own_tag: 0,
            newest: None,
            acknowledged: None,
            arrived: None,
            waits: None,
            rtt: rtt.unwrap_or_default(),
            is_unordered: false,
            backlog: 0,
            readable: BTreeSet::new(),
            began: now,
            heard: now,
            pinged: now,
        };
        Ok((driver, shared))
    }

    /// Runs the association until its end.
    pub(super) async fn run(mut self) {
        let _guard = Guard {
            shared: Rc::clone(&self.shared),
            wire: Rc::clone(&self.wire),
            path: self.path,
        };
        let ended = loop {
            let more = match self.step().await {
                Ok(more) => more,
                Err(ended) => break ended,
            };
            if more {
                yield_now().await;
                continue;
            }
            let next = self.next_time();
            tokio::select! {
                () = self.shared.pipe.work.notified() => {}
                () = self.shared.pipe.taken(), if !self.readable.is_empty() => {}
                () = sleep_until(next.into()) => {}
            }
        };
        tracing::debug!(%ended, peer = %self.path.peer, "carrier: SCTP association ended");
        if self.tag != 0 && !matches!(ended, Ended::Peer) {
            let abort = packet::abort(Header {
                source: self.path.here,
                destination: self.path.there,
                tag: self.tag,
            });
            self.transmit(vec![abort]).await;
        }
    }

    fn next_time(&self) -> Instant {
        let library = self
            .association
            .as_ref()
            .and_then(|(_, a)| a.poll_timeout());
        let own = self.patience().min(self.pinged + PINGS);
        library.map_or(own, |time| time.min(own))
    }

    /// Time at which it counts as dead.
    fn patience(&self) -> Instant {
        if !self.redeemed {
            return self.began + HANDSHAKE;
        }
        let rtt = self.shared.figures.rtt.get().unwrap_or(self.rtt);
        let answer = self.waits.map(|since| since + SILENCE + 3 * rtt);
        let dead = self.heard + DEAD;
        answer.map_or(dead, |answer| answer.min(dead))
    }

    /// Processes packets, timers and queues once; `true` if more packets are queued.
    async fn step(&mut self) -> Result<bool, Ended> {
        if self.shared.pipe.is_over() {
            return Err(Ended::Here);
        }
        let now = Instant::now();
        let mut taken = 0;
        while taken < AT_ONCE
            && let Some(packet) = self.next_packet()
        {
            taken += 1;
            self.receive(&packet, now)?;
        }
        if let Some((_, association)) = &mut self.association {
            association.handle_timeout(now);
        }
        self.events()?;
        self.read()?;
        let unread = self.association.as_ref().map(|(_, a)| a.unread());
        self.shared.unread.set(unread.unwrap_or(0));
        let measured = self.association.as_ref().and_then(|(_, a)| a.measured());
        self.shared.figures.measured.set(measured);
        // Data is in flight: an acknowledgement is due.
        if self.newest != self.acknowledged {
            self.waits.get_or_insert(now);
        }
        if now >= self.patience() {
            return Err(Ended::Silence);
        }
        if now.saturating_duration_since(self.pinged) >= PINGS {
            self.pinged = now;
            if self.established {
                self.say(SctpMessage::Ping(self.clock(now)))?;
            }
        }
        self.send(now).await?;
        Ok(taken == AT_ONCE)
    }

    fn next_packet(&self) -> Option<Bytes> {
        let packet = self.shared.inbox.borrow_mut().pop_front()?;
        let waiting = &self.shared.waiting;
        waiting.set(waiting.get() - packet.len());
        Some(packet)
    }

    /// Time since the start, µs.
    fn clock(&self, now: Instant) -> u64 {
        let since = now.saturating_duration_since(self.began);
        since.as_micros() as u64
    }

    /// Passes a packet to the library, if it is admitted.
    fn receive(&mut self, packet: &Bytes, now: Instant) -> Result<(), Ended> {
        let Some(packet) = self.admit(packet)? else {
            count(&self.shared.figures.refused);
            return Ok(());
        };
        let given = self
            .endpoint
            .handle(now, self.path.peer, None, None, packet);
        match (given, &mut self.association) {
            (Some((_, DatagramEvent::AssociationEvent(event))), Some((_, association))) => {
                self.heard = now;
                self.waits = None;
                association.handle_event(event);
            }
            (Some((handle, DatagramEvent::NewAssociation(association))), None) => {
                self.endpoint.reject_new_associations();
                self.association = Some((handle, association));
            }
            _ => count(&self.shared.figures.refused),
        }
        Ok(())
    }

    /// Filters a packet for the library: checksum and verification tag must be right (the ports are,
    /// already), and chunks that VTL does not use are removed. So the library's handling of stream
    /// resets, FORWARD TSN or a second INIT is not exposed.
    fn admit(&mut self, packet: &Bytes) -> Result<Option<Bytes>, Ended> {
        let Some(header) = Header::of(packet).filter(|_| packet::is_intact(packet)) else {
            return Ok(None);
        };
        let mut first = packet::chunks(packet);
        let Some(chunk) = first.next() else {
            return Ok(None);
        };
        let alone = first.next().is_none();
        match (chunk.kind, self.role) {
            (packet::INIT, Role::Server) if header.tag == 0 => {}
            (packet::INIT_ACK, Role::Client) if header.tag == self.own_tag => {}
            (packet::INIT | packet::INIT_ACK, _) => return Ok(None),
            _ if header.tag != self.own_tag || self.own_tag == 0 => return Ok(None),
            _ => {
                for chunk in packet::chunks(packet) {
                    match chunk.kind {
                        packet::ABORT
                        | packet::SHUTDOWN
                        | packet::SHUTDOWN_ACK
                        | packet::SHUTDOWN_COMPLETE => return Err(Ended::Peer),
                        packet::DATA if !self.is_near(chunk) => return Ok(None),
                        packet::SACK => self.acknowledge(chunk),
                        _ => {}
                    }
                }
                let wanted = |kind| {
                    matches!(
                        kind,
                        packet::DATA
                            | packet::SACK
                            | packet::HEARTBEAT
                            | packet::COOKIE_ECHO
                            | packet::COOKIE_ACK
                    )
                };
                let all = packet::chunks(packet).all(|chunk| wanted(chunk.kind));
                return Ok(Some(match all {
                    true => packet.clone(),
                    false => packet::only(packet, wanted),
                }));
            }
        }
        if self.established || !alone {
            return Ok(None);
        }
        self.arrived = chunk.initial_tsn().map(|tsn| tsn.wrapping_sub(1));
        Ok(Some(packet::bare_init(packet)))
    }

    /// Notes the cumulative acknowledgement of a SACK.
    fn acknowledge(&mut self, sack: packet::Chunk<'_>) {
        let Some((tsn, newest)) = sack.tsn().zip(self.newest) else {
            return;
        };
        let is_news = self
            .acknowledged
            .is_none_or(|last| packet::is_behind(tsn, last));
        if is_news && !packet::is_behind(tsn, newest) {
            self.acknowledged = Some(tsn);
        }
    }

    /// Whether a DATA chunk's TSN is at most [`AHEAD`] ahead, which bounds the library's memory.
    fn is_near(&self, chunk: packet::Chunk<'_>) -> bool {
        let (Some(tsn), Some(stream)) = (chunk.tsn(), chunk.stream()) else {
            return false;
        };
        let ahead = tsn.wrapping_sub(self.arrived.unwrap_or(tsn));
        // Duplicates (2^31 and more in this arithmetic) pass: they need an acknowledgement.
        stream < STREAMS && !(AHEAD..1 << 31).contains(&ahead)
    }

    fn events(&mut self) -> Result<(), Ended> {
        let Some((_, association)) = &mut self.association else {
            return Ok(());
        };
        let mut connected = false;
        while let Some(event) = association.poll() {
            match event {
                Event::Connected => connected = true,
                Event::HandshakeFailed { reason } | Event::AssociationLost { reason } => {
                    return Err(Ended::Library(reason.to_string()));
                }
                Event::Stream(StreamEvent::Readable { id }) => {
                    self.readable.insert(id);
                }
                _ => {}
            }
        }
        while association.accept_stream().is_some() {}
        if connected && !self.established {
            self.established = true;
            if self.role == Role::Client {
                self.say(SctpMessage::Token(self.token))?;
                self.open();
            }
            let now = Instant::now();
            self.say(SctpMessage::Ping(self.clock(now)))?;
        }
        Ok(())
    }

    fn open(&mut self) {
        self.redeemed = true;
        if let Some(opened) = self.opened.take() {
            opened();
        }
    }

    /// Reads received messages from the library.
    fn read(&mut self) -> Result<(), Ended> {
        if self.readable.remove(&OWN) {
            while let Some(message) = self.message(OWN) {
                self.own(&message)?;
            }
        }
        // Messages received before the token wait.
        while self.redeemed
            && self.shared.pipe.has_room()
            && let Some(&id) = self.readable.first()
        {
            match self.message(id) {
                Some(message) if id == CHUNKS => self.shared.pipe.arrived(Arrived::Frame(message)),
                Some(message) => self.shared.pipe.arrived(Arrived::Stream(message)),
                None => {
                    self.readable.remove(&id);
                }
            }
        }
        Ok(())
    }

    fn message(&mut self, id: u16) -> Option<Bytes> {
        let (_, association) = self.association.as_mut()?;
        let mut message = association.stream(id).ok()?.read().ok()??;
        let len = message.len();
        Some(message.next(len)?.bytes)
    }

    /// Handles a message of the association's own stream.
    fn own(&mut self, message: &Bytes) -> Result<(), Ended> {
        let message = SctpMessage::parse(message).ok_or(Ended::Violation)?;
        match (message, self.role) {
            (SctpMessage::Token(token), Role::Server) if !self.redeemed => {
                if token != self.token {
                    return Err(Ended::Stranger);
                }
                self.open();
            }
            // PINGs in excess are not answered.
            (SctpMessage::Ping(_), _) if self.backlog >= BACKLOG => {}
            (SctpMessage::Ping(number), _) => self.say(SctpMessage::Pong(number))?,
            (SctpMessage::Pong(number), _) => {
                let then = Duration::from_micros(number);
                let trip = self.began.elapsed().checked_sub(then);
                let trip = trip.filter(|trip| *trip < MAX_RTT);
                self.shared.figures.rtt.set(trip);
            }
            _ => return Err(Ended::Violation),
        }
        Ok(())
    }

    /// Sends a message on the association's own stream.
    fn say(&mut self, message: SctpMessage) -> Result<(), Ended> {
        self.write(OWN, &message.emit())
    }

    fn write(&mut self, id: u16, message: &[u8]) -> Result<(), Ended> {
        const PROTOCOL: PayloadProtocolIdentifier = PayloadProtocolIdentifier::Binary;
        let Some((_, association)) = &mut self.association else {
            return Ok(());
        };
        // The peer may have opened it.
        if association.stream(id).is_err() {
            association.open_stream(id, PROTOCOL)?;
        }
        if id == CHUNKS && !self.is_unordered {
            self.is_unordered = true;
            let mut stream = association.stream(id)?;
            stream.set_reliability_params(true, ReliabilityType::Reliable, 0)?;
        }
        association.stream(id)?.write_with_ppi(message, PROTOCOL)?;
        self.backlog += 1;
        Ok(())
    }

    /// Passes messages to the library as far as it can send them, and sends its packets.
    async fn send(&mut self, now: Instant) -> Result<(), Ended> {
        loop {
            while self.redeemed
                && self.backlog < BACKLOG
                && let Some(next) = self.shared.pipe.next()
            {
                match next {
                    Out::Chunk(frame) => self.write(CHUNKS, &frame)?,
                    Out::Control(frames) => {
                        for message in frames.chunks(self.shared.message) {
                            self.write(CONTROL, message)?;
                        }
                    }
                }
            }
            let Some((_, association)) = &mut self.association else {
                return Ok(());
            };
            let Some(transmit) = association.poll_transmit(now) else {
                return Ok(());
            };
            let Payload::RawEncode(packets) = transmit.payload else {
                return Ok(());
            };
            let mut packets: Vec<_> = packets.into_iter().map(|p| self.sent(p)).collect();
            let has_data = |p: &&mut Bytes| packet::chunks(p).any(|c| c.kind == packet::DATA);
            if let Some(last) = packets.iter_mut().rfind(has_data) {
                *last = packet::urgent(last);
            }
            self.transmit(packets).await;
            if self.backlog > 0 {
                // Limited by the congestion window or by pacing.
                return Ok(());
            }
        }
    }

    async fn transmit(&self, packets: Vec<Bytes>) {
        let seal = |packet| self.shared.datagrams.borrow_mut().seal(packet);
        let datagrams: Vec<_> = packets.into_iter().map(seal).collect();
        let (to, from) = (self.path.peer, self.path.local);
        self.wire.socket.send(to, from, &datagrams).await;
    }

    /// Notes tags and TSNs of an outgoing packet. Returns it as to be sent, INIT without extensions.
    fn sent(&mut self, packet: Bytes) -> Bytes {
        count(&self.shared.figures.sent);
        if let Some(header) = Header::of(&packet)
            && header.tag != 0
        {
            self.tag = header.tag;
        }
        let mut bare = false;
        for chunk in packet::chunks(&packet) {
            match (chunk.kind, chunk.tsn()) {
                (packet::INIT | packet::INIT_ACK, _) => {
                    bare = true;
                    self.own_tag = chunk.initiate_tag().unwrap_or_default();
                }
                (packet::SACK, Some(tsn)) => self.arrived = Some(tsn),
                (packet::DATA, Some(tsn)) => {
                    if self
                        .newest
                        .is_none_or(|newest| packet::is_behind(tsn, newest))
                    {
                        self.newest = Some(tsn);
                        self.backlog = self.backlog.saturating_sub(1);
                    } else {
                        count(&self.shared.figures.again);
                    }
                }
                _ => {}
            }
        }
        match bare {
            true => packet::bare_init(&packet),
            false => packet,
        }
    }
}
