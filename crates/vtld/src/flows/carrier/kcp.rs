//! KCP over UDP as a carrier, with the crate `kcp`.
//!
//! The conversation's number is the lower half of the token; the client's stream begins with the whole token.
//! Datagrams are sealed after that number if the peer supports it. KCP's congestion window, which halves on loss, is
//! enabled: most users disable it, which is unfair to other traffic.

use std::{
    cell::RefCell,
    io::{self, Write},
    rc::Rc,
    time::Duration,
};

use bytes::{Bytes, BytesMut};
use kcp::KCP_OVERHEAD;
use tokio::{
    task::spawn_local,
    time::{Instant, sleep_until},
};
use vtl_proto::{carrier::Kind, frame::Side, preamble};

use super::{
    HANDSHAKE, MIN_RTO, SILENCE,
    conversations::{Conversations, DATAGRAM, Protocol, Start, Talk, number},
    framed::{Arrived, Out},
    library::Opened,
    stack::UdpLayers,
};
use crate::panics;

/// Window in segments: 100 Mbit/s at a round trip of 200 ms.
const WINDOW: u16 = 2048;
/// Segments that may wait in any case,
const AHEAD: usize = 64;
/// besides twice what was acknowledged in this time, or in three round trips. The library does not tell its congestion
/// window; with [`WINDOW`] segments, a new flow would wait behind seconds of another's bytes.
const LATELY: Duration = Duration::from_millis(250);
/// KCP's update interval, ms.
const INTERVAL: i32 = 10;
/// Fast retransmission threshold: acknowledgements of later segments.
const RESEND: i32 = 2;

/// This host's endpoint of all conversations.
pub(super) type Kcp = Conversations<Plain>;

/// KCP over UDP, without layers between.
pub(super) struct Plain;

impl Protocol for Plain {
    const MIN_PACKET: usize = KCP_OVERHEAD;

    fn begin(&self, talk: Talk, start: Start) -> io::Result<Opened> {
        let pipe = Rc::clone(talk.pipe());
        let driver = Driver::new(talk, &start, None)?;
        spawn_local(panics::isolated(driver.run()));
        Ok(Opened {
            pipe,
            memory: Box::new(|| MEMORY),
            path: Box::new(|| None),
        })
    }
}

/// Memory of a conversation, bytes: KCP does not report what it holds out of order, so assume a full window.
pub(super) const MEMORY: u64 = WINDOW as u64 * DATAGRAM as u64;

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
pub(super) struct Driver {
    talk: Talk,
    /// The layers between KCP and UDP, if it is a stack's.
    layers: Option<UdpLayers>,
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

impl Driver {
    /// `layers`: those between KCP and UDP.
    pub(super) fn new(talk: Talk, start: &Start, layers: Option<UdpLayers>) -> io::Result<Self> {
        let outbox = Outbox::default();
        let mut control = kcp::Kcp::new_stream(number(start.token), outbox.clone());
        let mtu = layers.as_ref().map_or(talk.mtu(), UdpLayers::capacity);
        control.set_mtu(mtu).map_err(io::Error::other)?;
        control.set_wndsize(WINDOW, WINDOW);
        control.set_nodelay(true, INTERVAL, RESEND, false);
        // Fast retransmission is to come before the timeout, which collapses the window.
        let min = start.rtt.map_or(MIN_RTO, |rtt| MIN_RTO.max(2 * rtt));
        control.set_rx_minrto(min.as_millis() as u32);
        if start.opener == Side::Local {
            let shown = control.send(&preamble::token(start.token));
            shown.map_err(io::Error::other)?;
        }
        Ok(Self {
            talk,
            layers,
            control,
            outbox,
            began: Instant::now(),
            expected: (start.opener == Side::Peer).then_some(start.token),
            unread: BytesMut::new(),
            waits: None,
            patience: SILENCE + 3 * start.rtt.unwrap_or_default(),
            given: 0,
            looked: (Instant::now(), 0),
            lately: 0,
            span: LATELY.max(3 * start.rtt.unwrap_or_default()),
        })
    }

    pub(super) async fn run(mut self) {
        let pipe = Rc::clone(self.talk.pipe());
        let ended = loop {
            if let Err(ended) = self.step().await {
                break ended;
            }
            let next = self.began + Duration::from_millis(self.next_ms());
            let due = self.layers.as_ref().and_then(UdpLayers::next_timeout);
            tokio::select! {
                () = pipe.work.notified() => {}
                () = pipe.taken(), if self.control.peeksize().is_ok() => {}
                () = sleep_until(due.map_or(next, |due| next.min(due))) => {}
            }
        };
        tracing::debug!(%ended, peer = %self.talk.peer(), carrier = %Kind::Kcp, "carrier: KCP conversation ended");
    }

    /// Passes packets that have come to KCP; whether there were some.
    async fn receive(&mut self) -> bool {
        let packets = self.talk.packets();
        let mut has_news = false;
        let mut input = |packet: &[u8]| {
            has_news = true;
            // An invalid packet counts as lost.
            let is_good = packet.len() >= KCP_OVERHEAD && self.control.input(packet).is_ok();
            if is_good {
                self.waits = None;
                self.talk.note_heard();
            }
        };
        let Some(layers) = &mut self.layers else {
            packets.iter().for_each(|packet| input(packet));
            return has_news;
        };
        for packet in packets {
            layers.receive(&self.talk, &packet).await;
        }
        while let Some(packet) = layers.deliver() {
            input(packet.bytes());
        }
        has_news
    }

    /// Sends what KCP has emitted, and what layers have.
    async fn transmit(&mut self) {
        let packets = std::mem::take(&mut *self.outbox.0.borrow_mut());
        let Some(layers) = &mut self.layers else {
            self.talk.transmit(packets).await;
            return;
        };
        for packet in packets {
            // One for which a layer has no room counts as lost.
            layers.send(&packet);
            layers.transmit(&self.talk).await;
        }
        layers.transmit(&self.talk).await;
    }

    /// Maximum number of segments given to the library that are not acknowledged.
    fn max_waiting(&mut self) -> usize {
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
        if self.talk.pipe().is_over() {
            return Err(Ended::Here);
        }
        let has_news = self.receive().await;
        self.read()?;
        let mut has_more = false;
        let max = self.max_waiting();
        while self.control.wait_snd() < max
            && let Some(Out::Control(bytes) | Out::Chunk(bytes)) = self.talk.pipe().next()
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
        self.transmit().await;
        Ok(())
    }

    /// Passes received bytes to the pipe; checks the token first.
    fn read(&mut self) -> Result<(), Ended> {
        let pipe = self.talk.pipe();
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
