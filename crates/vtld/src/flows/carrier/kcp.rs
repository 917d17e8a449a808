//! KCP over UDP as a carrier, with the crate `kcp`.
//!
//! The conversation's number is the lower half of the token; the client's stream begins with the whole token.
//! Datagrams are sealed after that number if the peer supports it. KCP's congestion window, which halves on loss, is
//! enabled: most users disable it, which is unfair to other traffic.

use std::{
    cell::RefCell,
    collections::{HashMap, VecDeque},
    io::{self, Write},
    net::{IpAddr, SocketAddr},
    rc::Rc,
    time::Duration,
};

use bytes::{Bytes, BytesMut};
use kcp::KCP_OVERHEAD;
use tokio::{
    net::UdpSocket,
    sync::Notify,
    task::spawn_local,
    time::{Instant, sleep, sleep_until, timeout},
};
use vtl_proto::{
    carrier::Kind,
    frame::{HEADER, Side},
    preamble,
};

use super::{
    Expected, HANDSHAKE, Local, MIN_RTO, SILENCE, SOCKET_PAUSE,
    framed::{Arrived, Out, Pipe},
    library::{Library, Opened, Opening, Opens},
    sealed,
};
use crate::panics;

/// UDP payload that fits every IPv6 path, bytes.
const DATAGRAM: usize = 1280 - 48;
/// Maximum size of a chunk, bytes.
const CHUNK: usize = 8 << 10;
/// Window in segments: 100 Mbit/s at a round trip of 200 ms.
const WINDOW: u16 = 2048;
/// Segments that may wait in any case,
const AHEAD: usize = 64;
/// besides twice what was acknowledged in this time, or in three round trips. The library does not tell its congestion
/// window; with [`WINDOW`] segments, a new flow would wait behind seconds of another's bytes.
const LATELY: Duration = Duration::from_millis(250);
/// Receive queue of a conversation, datagrams.
const WAITING: usize = 4096;
/// KCP's update interval, ms.
const INTERVAL: i32 = 10;
/// Fast retransmission threshold: acknowledgements of later segments.
const RESEND: i32 = 2;

/// Key of a conversation: the peer's address, and the conversation's number.
type Key = (SocketAddr, u32);

struct Shared {
    socket: UdpSocket,
    conversations: RefCell<HashMap<Key, Rc<Conversation>>>,
    /// By the client's address, and its conversation's number.
    grants: RefCell<HashMap<(IpAddr, u32), Expected>>,
    arrivals: Opens,
}

/// This host's endpoint of all conversations.
pub(super) struct Kcp {
    shared: Rc<Shared>,
}

/// The shared state of a conversation.
struct Conversation {
    pipe: Rc<Pipe>,
    datagrams: RefCell<sealed::Datagrams>,
    inbox: RefCell<VecDeque<Bytes>>,
    /// The peer has answered.
    heard: Notify,
}

impl Conversation {
    /// Queues a received packet; drops it if the queue is full.
    fn deliver(&self, packet: Bytes) {
        let mut inbox = self.inbox.borrow_mut();
        if inbox.len() < WAITING {
            inbox.push_back(packet);
            self.pipe.work.notify_one();
        }
    }
}

impl Kcp {
    /// Starts the endpoint on a non-blocking socket.
    pub(super) fn start(socket: std::net::UdpSocket, arrivals: Opens) -> io::Result<Self> {
        let shared = Rc::new(Shared {
            socket: UdpSocket::from_std(socket)?,
            conversations: RefCell::default(),
            grants: RefCell::default(),
            arrivals,
        });
        spawn_local(Rc::clone(&shared).receive());
        Ok(Self { shared })
    }
}

/// A conversation's number.
fn number(token: u64) -> u32 {
    // Truncated on purpose.
    token as u32
}

impl Library for Kcp {
    fn expect(&self, expected: Expected) {
        let key = (expected.client, number(expected.token));
        self.shared.grants.borrow_mut().insert(key, expected);
    }

    fn revoke(&self, token: u64) {
        let mut grants = self.shared.grants.borrow_mut();
        grants.retain(|_, expected| expected.token != token);
    }

    fn connect(&self, opening: Opening) -> Local<'_, io::Result<Opened>> {
        let Opening {
            to,
            token,
            crypto,
            rtt,
            ..
        } = opening;
        Box::pin(async move {
            if number(token) == 0 {
                return Err(io::ErrorKind::InvalidData.into());
            }
            let opener = Side::Local;
            let datagrams = sealed::Datagrams::new(&crypto, opener);
            let (opened, conversation) = self.shared.begin(to, token, rtt, opener, datagrams)?;
            let answered = timeout(HANDSHAKE, conversation.heard.notified()).await;
            // On timeout, drop closes the conversation.
            answered.map_err(|_| io::ErrorKind::TimedOut)?;
            if conversation.pipe.is_over() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            Ok(opened)
        })
    }

    fn close(&self) {
        let conversations = self.shared.conversations.borrow();
        conversations.values().for_each(|one| one.pipe.end());
    }

    fn wait_idle(&self) -> Local<'_, ()> {
        // KCP cannot signal the end; the control connection does.
        Box::pin(async {})
    }
}

impl Shared {
    /// Receives datagrams. Never returns.
    async fn receive(self: Rc<Self>) {
        let mut buffer = vec![0; 64 << 10];
        loop {
            let Ok((len, from)) = self.socket.recv_from(&mut buffer).await else {
                sleep(SOCKET_PAUSE).await;
                continue;
            };
            let from = SocketAddr::new(from.ip().to_canonical(), from.port());
            if (KCP_OVERHEAD..=DATAGRAM).contains(&len) {
                self.route(from, &buffer[..len]);
            }
        }
    }

    fn route(self: &Rc<Self>, from: SocketAddr, packet: &[u8]) {
        let key = (from, kcp::get_conv(packet));
        let known = self.conversations.borrow().get(&key).cloned();
        if let Some(conversation) = known {
            let opened = conversation.datagrams.borrow_mut().open(packet);
            if let Some(packet) = opened {
                conversation.deliver(packet);
            }
        } else if let Some((conversation, packet)) = self.admit(key, packet) {
            conversation.deliver(packet);
        }
    }

    /// Accepts a conversation of a client that holds a grant.
    fn admit(self: &Rc<Self>, key: Key, packet: &[u8]) -> Option<(Rc<Conversation>, Bytes)> {
        let place = (key.0.ip(), key.1);
        let Expected {
            token, rtt, crypto, ..
        } = self.grants.borrow().get(&place)?.clone();
        let mut datagrams = sealed::Datagrams::new(&crypto, Side::Peer);
        let packet = datagrams.open(packet)?;
        self.grants.borrow_mut().remove(&place);
        let begun = self.begin(key.0, token, rtt, Side::Peer, datagrams).ok()?;
        let (opened, conversation) = begun;
        // Fails if the daemon is ending.
        let _ = self.arrivals.send((token, opened));
        Some((conversation, packet))
    }

    /// Starts a conversation, as client or server.
    fn begin(
        self: &Rc<Self>,
        peer: SocketAddr,
        token: u64,
        rtt: Option<Duration>,
        opener: Side,
        datagrams: sealed::Datagrams,
    ) -> io::Result<(Opened, Rc<Conversation>)> {
        let outbox = Outbox::default();
        let mut control = kcp::Kcp::new_stream(number(token), outbox.clone());
        let mtu = DATAGRAM - datagrams.overhead();
        control.set_mtu(mtu).map_err(io::Error::other)?;
        control.set_wndsize(WINDOW, WINDOW);
        control.set_nodelay(true, INTERVAL, RESEND, false);
        // Fast retransmission is to come before the timeout, which collapses the window.
        let least = rtt.map_or(MIN_RTO, |rtt| MIN_RTO.max(2 * rtt));
        control.set_rx_minrto(least.as_millis() as u32);
        if opener == Side::Local {
            let shown = control.send(&preamble::token(token));
            shown.map_err(io::Error::other)?;
        }
        let conversation = Rc::new(Conversation {
            pipe: Pipe::relayed(HEADER + CHUNK),
            datagrams: RefCell::new(datagrams),
            inbox: RefCell::default(),
            heard: Notify::new(),
        });
        let key = (peer, number(token));
        let entered = Rc::clone(&conversation);
        self.conversations.borrow_mut().insert(key, entered);
        let driver = Driver {
            shared: Rc::clone(self),
            conversation: Rc::clone(&conversation),
            key,
            control,
            outbox,
            began: Instant::now(),
            expected: (opener == Side::Peer).then_some(token),
            unread: BytesMut::new(),
            waits: None,
            patience: SILENCE + 3 * rtt.unwrap_or_default(),
            given: 0,
            looked: (Instant::now(), 0),
            lately: 0,
            span: LATELY.max(3 * rtt.unwrap_or_default()),
        };
        spawn_local(panics::isolated(driver.run()));
        let opened = Opened {
            pipe: Rc::clone(&conversation.pipe),
            // KCP does not report what it holds out of order: assume a full window.
            memory: Box::new(|| (usize::from(WINDOW) * DATAGRAM) as u64),
            path: Box::new(|| None),
        };
        Ok((opened, conversation))
    }

    /// Removes a conversation, unless another one has its key.
    fn forget(&self, key: Key, conversation: &Rc<Conversation>) {
        let mut all = self.conversations.borrow_mut();
        if all
            .get(&key)
            .is_some_and(|known| Rc::ptr_eq(known, conversation))
        {
            all.remove(&key);
        }
    }

    /// Maps an address to the socket's family.
    fn destination(&self, peer: SocketAddr) -> SocketAddr {
        match (peer, self.socket.local_addr()) {
            (SocketAddr::V4(v4), Ok(SocketAddr::V6(_))) => {
                SocketAddr::new(v4.ip().to_ipv6_mapped().into(), v4.port())
            }
            _ => peer,
        }
    }
}

/// Datagrams that KCP has emitted.
#[derive(Clone, Default)]
struct Outbox(Rc<RefCell<Vec<Bytes>>>);

impl Write for Outbox {
    fn write(&mut self, datagram: &[u8]) -> io::Result<usize> {
        self.0.borrow_mut().push(Bytes::copy_from_slice(datagram));
        Ok(datagram.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Why a conversation has ended.
#[derive(Debug, thiserror::Error)]
enum Ended {
    #[error("closed here")]
    Here,
    #[error("timeout: nothing received from the peer")]
    Silence,
    #[error("wrong token")]
    Stranger,
    #[error("KCP: {0}")]
    Library(#[from] kcp::Error),
}

/// The task of a conversation, the only one to call the library: if a packet makes that panic, just this conversation
/// ends.
struct Driver {
    shared: Rc<Shared>,
    conversation: Rc<Conversation>,
    key: Key,
    control: kcp::Kcp<Outbox>,
    outbox: Outbox,
    began: Instant,
    /// The token that the peer has yet to show, and the bytes of it received so far.
    expected: Option<u64>,
    unread: BytesMut,
    /// Start of the current silence, while segments are unacknowledged.
    waits: Option<Instant>,
    patience: Duration,
    /// Segments given to the library, and those acknowledged of them: at the time, and in the span before it.
    given: u64,
    looked: (Instant, u64),
    lately: u64,
    span: Duration,
}

impl Drop for Driver {
    fn drop(&mut self) {
        self.conversation.pipe.end();
        self.conversation.heard.notify_one();
        self.shared.forget(self.key, &self.conversation);
    }
}

impl Driver {
    async fn run(mut self) {
        let pipe = Rc::clone(&self.conversation.pipe);
        let ended = loop {
            if let Err(ended) = self.step().await {
                break ended;
            }
            let next = self.began + Duration::from_millis(self.next_ms());
            tokio::select! {
                () = pipe.work.notified() => {}
                () = pipe.taken(), if self.control.peeksize().is_ok() => {}
                () = sleep_until(next) => {}
            }
        };
        tracing::debug!(%ended, peer = %self.key.0, carrier = %Kind::Kcp, "carrier: KCP conversation ended");
    }

    /// Maximum number of segments given to the library that are not acknowledged.
    fn most_waiting(&mut self) -> usize {
        let acknowledged = self.given.saturating_sub(self.control.wait_snd() as u64);
        let (at, before) = self.looked;
        let news = acknowledged.saturating_sub(before);
        if at.elapsed() < self.span {
            self.lately = self.lately.max(news);
        } else {
            self.lately = news;
            self.looked = (Instant::now(), acknowledged);
        }
        (2 * self.lately as usize).min(WINDOW.into()) + AHEAD
    }

    fn now_ms(&self) -> u32 {
        // KCP's clock is 32 bits wide.
        self.began.elapsed().as_millis() as u32
    }

    /// Time of KCP's next timer, ms since the start.
    fn next_ms(&self) -> u64 {
        let now = self.began.elapsed().as_millis() as u64;
        now + u64::from(self.control.check(now as u32)).max(1)
    }

    async fn step(&mut self) -> Result<(), Ended> {
        if self.conversation.pipe.is_over() {
            return Err(Ended::Here);
        }
        let packets = std::mem::take(&mut *self.conversation.inbox.borrow_mut());
        let has_news = !packets.is_empty();
        for packet in packets {
            // An invalid packet counts as lost.
            if self.control.input(&packet).is_ok() {
                self.waits = None;
                self.conversation.heard.notify_one();
            }
        }
        self.read()?;
        let mut has_more = false;
        let most = self.most_waiting();
        while self.control.wait_snd() < most
            && let Some(Out::Control(bytes) | Out::Chunk(bytes)) = self.conversation.pipe.next()
        {
            let before = self.control.wait_snd();
            self.control.send(&bytes)?;
            self.given += (self.control.wait_snd() - before) as u64;
            has_more = true;
        }
        self.control.update(self.now_ms())?;
        if has_news || has_more {
            self.control.flush()?;
        }
        if self.control.wait_snd() > 0 {
            let since = *self.waits.get_or_insert_with(Instant::now);
            if since.elapsed() > self.patience {
                return Err(Ended::Silence);
            }
        }
        if self.expected.is_some() && self.began.elapsed() > HANDSHAKE {
            return Err(Ended::Silence);
        }
        let packets = std::mem::take(&mut *self.outbox.0.borrow_mut());
        let to = self.shared.destination(self.key.0);
        for packet in packets {
            let datagram = self.conversation.datagrams.borrow_mut().seal(packet);
            // A packet that cannot be sent counts as lost.
            let _ = self.shared.socket.send_to(&datagram, to).await;
        }
        Ok(())
    }

    /// Passes received bytes to the pipe; checks the token first.
    fn read(&mut self) -> Result<(), Ended> {
        let pipe = &self.conversation.pipe;
        while pipe.has_room()
            && let Ok(size) = self.control.peeksize()
        {
            let mut bytes = BytesMut::zeroed(size);
            self.control.recv(&mut bytes)?;
            let Some(token) = self.expected else {
                pipe.arrived(Arrived::Stream(bytes.freeze()));
                continue;
            };
            self.unread.extend_from_slice(&bytes);
            if let Some(shown) = self.unread.first_chunk() {
                if preamble::shown(*shown) != token {
                    return Err(Ended::Stranger);
                }
                self.expected = None;
                let mut rest = self.unread.split();
                pipe.arrived(Arrived::Stream(rest.split_off(preamble::TOKEN).freeze()));
            }
        }
        Ok(())
    }
}
