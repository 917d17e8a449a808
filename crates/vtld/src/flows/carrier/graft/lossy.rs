//! Lossy sessions as carriers: supervision of the path, and detection of packets lost at the end of a burst.
//!
//! Most of their grafts say nothing of what arrives: both hosts have to ask whether the path is alive, and a packet that
//! is not there some time after it has left is lost. `partial-reliability` settles each packet: it has arrived, or the
//! sender has given it up, within the graft's bound. Then acknowledgements show that the path is alive, and HELLO, which
//! would take places of the window, is for idle directions.

use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
    time::Duration,
};

use bytes::Bytes;
use tokio::time::{Instant, interval, sleep, timeout};
use vtl_proto::frame::{FlowId, Frame};

use super::{
    super::{Carrier, HANDSHAKE, SILENCE},
    moving::Graft,
};
use crate::flows::peer::Peer;

/// Interval of the checks.
const TICK: Duration = Duration::from_millis(25);
/// Interval of keepalive probes (HELLO), and of the checks on an idle path.
const QUESTION: Duration = Duration::from_millis(100);
/// Idle time after which a path is not probed.
const QUIET: Duration = Duration::from_secs(1);
/// Delay from a packet's departure until the peer is told that it counts as lost: reordering seldom exceeds it.
const PATIENCE: Duration = Duration::from_millis(50);

/// Progress of a flow's sending direction.
struct Sent {
    offset: u64,
    /// The packet with the last bytes before `offset`.
    number: u64,
    /// When its departure was noticed.
    left: Option<Instant>,
}

/// State of a lossy session.
#[derive(Default)]
pub(super) struct Lossy {
    sent: RefCell<BTreeMap<FlowId, Sent>>,
    /// Packets with chunks, in either direction.
    moved: Cell<u64>,
    /// Packets received.
    heard: Cell<u64>,
    /// A probe of the peer is to be answered.
    is_asked: Cell<bool>,
}

impl Lossy {
    /// Notes that packet `number` has a flow's bytes up to `offset`.
    pub(super) fn note_sent(&self, flow: FlowId, offset: u64, number: u64) {
        self.moved.set(self.moved.get() + 1);
        let left = None;
        let sent = Sent {
            offset,
            number,
            left,
        };
        self.sent.borrow_mut().insert(flow, sent);
    }

    pub(super) fn note_received(&self, mut packet: &[u8]) {
        if packet.is_empty() {
            return; // given up
        }
        self.heard.set(self.heard.get() + 1);
        match Frame::take(&mut packet) {
            Ok(Frame::Hello { .. }) => self.is_asked.set(true),
            _ => self.moved.set(self.moved.get() + 1),
        }
    }

    pub(super) fn forget(&self, flow: FlowId) {
        self.sent.borrow_mut().remove(&flow);
    }
}

impl Graft {
    /// Sends HELLO, as the opener until the peer answers. False if it does not.
    pub(super) async fn meet(&self, hello: &Bytes, is_opener: bool, rtt: Duration) -> bool {
        let is_said = || self.control(hello.clone());
        if !is_opener {
            // Later probes are answered by `attend`.
            return is_said().await.is_ok();
        }
        let asking = async {
            let mut ticks = interval(QUESTION.max(rtt));
            loop {
                ticks.tick().await;
                if is_said().await.is_err() {
                    return;
                }
            }
        };
        tokio::select! {
            is_there = timeout(HANDSHAKE, self.session.readable()) => is_there.unwrap_or(false),
            () = asking => false,
            () = self.refill() => false,
            () = self.over() => false,
        }
    }

    /// Reports lost packets to the peer, and probes the path or answers probes. Completes when the path is dead.
    pub(super) async fn attend(&self, peer: &Peer, hello: &Bytes, is_opener: bool, rtt: Duration) {
        let lossy = &self.lossy;
        let now = Instant::now();
        let (mut moved, mut heard) = (lossy.moved.get(), self.signs());
        let (mut moved_at, mut said_at) = (now, now);
        // Start of the current silence, while an answer is due.
        let mut waits: Option<Instant> = None;
        loop {
            let is_quiet = waits.is_none() && lossy.sent.borrow().is_empty();
            sleep(if is_quiet { QUESTION } else { TICK }).await;
            let now = Instant::now();
            self.session.take_events();
            let rtt = match self.session.settles {
                true => rtt.max(self.session.srtt()),
                false => rtt,
            };
            // Not on a path that may be dead: TCP delivers the bytes that are not given up.
            let silence = 3 * (QUESTION + rtt);
            if self.session.settles || waits.is_none_or(|since| now - since < silence) {
                self.pass(peer, now);
            }
            if moved != lossy.moved.get() {
                moved = lossy.moved.get();
                moved_at = now;
                waits.get_or_insert(now);
            }
            if heard != self.signs() {
                heard = self.signs();
                waits = None;
            }
            let may_say = !self.session.settles || self.session.tx.borrow().unacknowledged() == 0;
            let is_due = now - moved_at < QUIET && now - said_at >= QUESTION;
            let asks = is_opener && may_say && is_due;
            let answers = !is_opener && lossy.is_asked.take() && may_say;
            if asks || answers {
                said_at = now;
                if self.control(hello.clone()).await.is_err() {
                    return;
                }
            }
            if asks {
                waits.get_or_insert(now);
            }
            if waits.is_some_and(|since| now - since > SILENCE + 3 * rtt) {
                return;
            }
        }
    }

    /// Count of what shows that the peer is there.
    fn signs(&self) -> u64 {
        let settled = match self.session.settles {
            true => self.session.tx.borrow().acknowledged(),
            false => 0,
        };
        self.lossy.heard.get().wrapping_add(settled)
    }

    /// Reports flows whose last packets departed [`PATIENCE`] ago: bytes up to there that are missing are lost.
    fn pass(&self, peer: &Peer, now: Instant) {
        let departed = self.session.tx.borrow().acknowledged();
        let mut passed = Vec::new();
        self.lossy.sent.borrow_mut().retain(|flow, sent| {
            if sent.left.is_none() && sent.number < departed {
                sent.left = Some(now);
            }
            let is_over = sent.left.is_some_and(|left| now - left >= PATIENCE);
            if is_over {
                passed.push((*flow, sent.offset));
            }
            !is_over
        });
        for (flow, offset) in passed {
            peer.with(flow, |flow| {
                if flow.send.confirmed_offset() < offset {
                    flow.send.passed(offset);
                }
            });
        }
    }
}
