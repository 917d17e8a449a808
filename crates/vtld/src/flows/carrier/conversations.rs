//! Conversations over one UDP socket: what carriers have in common whose datagrams begin with a conversation's number, the
//! lower half of the token, and are sealed after that number if the peer supports it.

use std::{
    cell::RefCell,
    collections::{HashMap, VecDeque},
    io,
    net::{IpAddr, SocketAddr},
    rc::Rc,
    time::Duration,
};

use bytes::Bytes;
use tokio::{sync::Notify, task::spawn_local, time::timeout};
use vtl_core::layers::Pipeline;
use vtl_proto::frame::{HEADER, Side};

use super::{
    Expected, HANDSHAKE, Local,
    framed::Pipe,
    library::{Layering, Library, Opened, Opening, Opens},
    sealed,
    segments::Segments,
};

/// UDP payload that fits every IPv6 path, bytes.
pub(super) const DATAGRAM: usize = 1280 - 48;
/// Maximum size of a chunk, bytes.
const CHUNK: usize = 8 << 10;
/// Receive queue of a conversation, datagrams.
const WAITING: usize = 4096;

/// Key of a conversation: the peer's address, and the conversation's number.
type Key = (SocketAddr, u32);

/// What moves the bytes of conversations.
pub(super) trait Protocol: 'static {
    /// Minimum length of a datagram, its seal not counted.
    const MIN_PACKET: usize;

    /// Starts the task of a conversation.
    fn begin(&self, talk: Talk, start: Start) -> io::Result<Opened>;

    /// As [`Library::layers`].
    fn layers(&self, _layers: &str, _mtu: usize) -> Result<Pipeline, String> {
        Err("layers are in the process of stacks".into())
    }
}

/// How a conversation begins.
pub(super) struct Start {
    pub(super) token: u64,
    /// The path's round-trip time, measured by TCP.
    pub(super) rtt: Option<Duration>,
    /// The side that opened it.
    pub(super) opener: Side,
    /// At the opener, if the carrier is a stack.
    pub(super) layering: Option<Layering>,
    /// At the other side, the highest rate at which this host sends by a stack, kbit/s.
    pub(super) accept_rate: u32,
}

struct Shared<P> {
    protocol: P,
    socket: Rc<Segments>,
    conversations: Rc<RefCell<HashMap<Key, Rc<Conversation>>>>,
    /// By the client's address, and its conversation's number.
    grants: RefCell<HashMap<(IpAddr, u32), Expected>>,
    arrivals: Opens,
}

/// This host's endpoint of all conversations.
pub(super) struct Conversations<P> {
    shared: Rc<Shared<P>>,
}

/// The shared state of a conversation.
pub(super) struct Conversation {
    pub(super) pipe: Rc<Pipe>,
    datagrams: RefCell<sealed::Datagrams>,
    inbox: RefCell<VecDeque<Bytes>>,
    /// The peer has answered, or the conversation has ended.
    heard: Notify,
    /// Why it has ended before.
    failed: RefCell<Option<String>>,
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

/// A conversation's number.
pub(super) fn number(token: u64) -> u32 {
    // Truncated on purpose.
    token as u32
}

impl<P: Protocol> Conversations<P> {
    /// Starts the endpoint on a non-blocking socket.
    pub(super) fn start(
        protocol: P,
        socket: std::net::UdpSocket,
        arrivals: Opens,
    ) -> io::Result<Self> {
        let shared = Rc::new(Shared {
            protocol,
            socket: Rc::new(Segments::new(socket)?),
            conversations: Rc::default(),
            grants: RefCell::default(),
            arrivals,
        });
        spawn_local(Rc::clone(&shared).receive());
        Ok(Self { shared })
    }
}

impl<P: Protocol> Library for Conversations<P> {
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
            layering,
            ..
        } = opening;
        Box::pin(async move {
            if number(token) == 0 {
                return Err(io::ErrorKind::InvalidData.into());
            }
            let opener = Side::Local;
            let datagrams = sealed::Datagrams::new(&crypto, opener);
            let start = Start {
                token,
                rtt,
                opener,
                layering,
                accept_rate: 0,
            };
            let (opened, conversation) = self.shared.begin(to, datagrams, start)?;
            let answered = timeout(HANDSHAKE, conversation.heard.notified()).await;
            // On timeout, drop closes the conversation.
            answered.map_err(|_| io::ErrorKind::TimedOut)?;
            if conversation.pipe.is_over() {
                let failed = conversation.failed.take();
                return Err(failed.map_or(io::ErrorKind::TimedOut.into(), io::Error::other));
            }
            Ok(opened)
        })
    }

    fn layers(&self, layers: &str, mtu: usize) -> Result<Pipeline, String> {
        self.shared.protocol.layers(layers, mtu)
    }

    fn close(&self) {
        let conversations = self.shared.conversations.borrow();
        conversations.values().for_each(|one| one.pipe.end());
    }

    fn wait_idle(&self) -> Local<'_, ()> {
        // The end is not signalled; the control connection's is.
        Box::pin(async {})
    }
}

impl<P: Protocol> Shared<P> {
    /// Receives datagrams. Never returns.
    async fn receive(self: Rc<Self>) {
        let route = |from, _, packet: &[u8]| {
            if (P::MIN_PACKET..=DATAGRAM).contains(&packet.len()) {
                self.route(from, packet);
            }
        };
        self.socket.receive(route).await;
    }

    fn route(self: &Rc<Self>, from: SocketAddr, packet: &[u8]) {
        let Some(number) = packet.first_chunk() else {
            return;
        };
        let key = (from, u32::from_le_bytes(*number));
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
            token,
            rtt,
            crypto,
            accept_rate,
            ..
        } = self.grants.borrow().get(&place)?.clone();
        let mut datagrams = sealed::Datagrams::new(&crypto, Side::Peer);
        let packet = datagrams.open(packet)?;
        self.grants.borrow_mut().remove(&place);
        let start = Start {
            token,
            rtt,
            opener: Side::Peer,
            layering: None,
            accept_rate,
        };
        let begun = self.begin(key.0, datagrams, start).ok()?;
        let (opened, conversation) = begun;
        // Fails if the daemon is ending.
        let _ = self.arrivals.send((token, opened));
        Some((conversation, packet))
    }

    /// Starts a conversation, as client or server.
    fn begin(
        &self,
        peer: SocketAddr,
        datagrams: sealed::Datagrams,
        start: Start,
    ) -> io::Result<(Opened, Rc<Conversation>)> {
        let conversation = Rc::new(Conversation {
            pipe: Pipe::relayed(HEADER + CHUNK),
            datagrams: RefCell::new(datagrams),
            inbox: RefCell::default(),
            heard: Notify::new(),
            failed: RefCell::default(),
        });
        let key = (peer, number(start.token));
        let entered = Rc::clone(&conversation);
        self.conversations.borrow_mut().insert(key, entered);
        let talk = Talk {
            socket: Rc::clone(&self.socket),
            conversations: Rc::clone(&self.conversations),
            conversation: Rc::clone(&conversation),
            key,
        };
        let opened = self.protocol.begin(talk, start)?;
        Ok((opened, conversation))
    }
}

/// A conversation's own end of it, for its task; the conversation ends when it is dropped.
pub(super) struct Talk {
    socket: Rc<Segments>,
    conversations: Rc<RefCell<HashMap<Key, Rc<Conversation>>>>,
    conversation: Rc<Conversation>,
    key: Key,
}

impl Talk {
    pub(super) fn pipe(&self) -> &Rc<Pipe> {
        &self.conversation.pipe
    }

    /// The peer's address.
    pub(super) fn peer(&self) -> SocketAddr {
        self.key.0
    }

    /// Maximum length of a packet with its number, bytes.
    pub(super) fn mtu(&self) -> usize {
        DATAGRAM - self.conversation.datagrams.borrow().overhead()
    }

    /// Bytes that sealing, UDP and IP add to a packet.
    pub(super) fn overhead(&self) -> usize {
        let ip = if self.key.0.is_ipv4() { 20 } else { 40 };
        ip + 8 + self.conversation.datagrams.borrow().overhead()
    }

    /// The packets that have come.
    pub(super) fn packets(&self) -> VecDeque<Bytes> {
        std::mem::take(&mut *self.conversation.inbox.borrow_mut())
    }

    /// Notes that the peer has answered: the conversation is open.
    pub(super) fn note_heard(&self) {
        self.conversation.heard.notify_one();
    }

    /// Says why the conversation does not come about.
    pub(super) fn fail(&self, why: String) {
        self.conversation.failed.replace(Some(why));
    }

    /// Sends packets, which begin with the number. One that cannot be sent counts as lost.
    pub(super) async fn transmit(&self, packets: impl IntoIterator<Item = Bytes>) {
        let sealed = self.seal(packets);
        self.socket.send(self.key.0, None, &sealed).await;
    }

    fn seal(&self, packets: impl IntoIterator<Item = Bytes>) -> Vec<Bytes> {
        let mut datagrams = self.conversation.datagrams.borrow_mut();
        let sealed = packets.into_iter().map(|packet| datagrams.seal(packet));
        sealed.collect()
    }
}

impl Drop for Talk {
    fn drop(&mut self) {
        self.conversation.pipe.end();
        self.conversation.heard.notify_one();
        let mut all = self.conversations.borrow_mut();
        // Unless another one has its key.
        let is_own = |known: &Rc<Conversation>| Rc::ptr_eq(known, &self.conversation);
        if all.get(&self.key).is_some_and(is_own) {
            all.remove(&self.key);
        }
    }
}
