//! Stacks: layers over UDP, or between KCP and UDP (PROTOCOL.md, section 7, "Layers"). The layers themselves are in
//! `vtl_core::layers`; here are the opening of a stack, and the task that moves its packets. Layers over other carriers are
//! in `layered.rs`.
//!
//! What a stack consists of is the opener's to say, in its first message: the other side knows no stack by name.

mod outside;
mod udp;

use std::{cell::RefCell, io, rc::Rc, time::Duration};

use bytes::Bytes;
use tokio::{
    task::spawn_local,
    time::{Instant, timeout_at},
};
use vtl_control::CarrierPath;
use vtl_core::layers::{Description, Packet, Pipeline};
use vtl_proto::{
    carrier::Kind,
    frame::Side,
    layers::{Message, NUMBER},
};

use super::{
    HANDSHAKE,
    conversations::{Conversations, DATAGRAM, Protocol, Start, Talk, number},
    kcp,
    library::{Layering, Opened, ms},
};
use crate::panics;
use outside::Outside;

/// Bytes in front of a packet of the layers: the number, and the kind of the message.
const HEAD: usize = NUMBER + 1;
/// Maximum number of packets that are given to the socket together.
const RUN: usize = 64;
/// Minimum room for a packet above the layers, bytes: KCP's packets fit.
const MIN_CAPACITY: usize = 256;
/// Interval of SETUP, at least and at most; else twice the round-trip time.
const SETUP: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(1));

/// This host's endpoint of all stacks.
pub(super) type Stacks = Conversations<Layered>;

/// Layers over UDP, or below KCP.
pub(super) struct Layered {
    outside: Rc<Outside>,
}

impl Layered {
    /// Loads the layers that are compiled outside of VTL.
    pub(super) fn load() -> Self {
        Self {
            outside: Rc::new(Outside::load()),
        }
    }
}

/// What a stack's task tells of it.
#[derive(Default)]
struct TaskState {
    path: Option<CarrierPath>,
    memory: u64,
}

type SharedTaskState = Rc<RefCell<TaskState>>;

impl Protocol for Layered {
    const MIN_PACKET: usize = HEAD;

    fn begin(&self, talk: Talk, start: Start) -> io::Result<Opened> {
        let pipe = Rc::clone(talk.pipe());
        let task_state = SharedTaskState::default();
        let (of_path, of_memory) = (Rc::clone(&task_state), Rc::clone(&task_state));
        let outside = Rc::clone(&self.outside);
        spawn_local(panics::isolated(async move {
            run(talk, start, task_state, &outside).await;
        }));
        Ok(Opened {
            pipe,
            memory: Box::new(move || of_memory.borrow().memory),
            path: Box::new(move || of_path.borrow().path),
        })
    }

    fn layers(&self, layers: &str, mtu: usize) -> Result<Pipeline, String> {
        let (_, made) = self.outside.build(layers, None, true)?;
        let pipeline = Pipeline::new(made, mtu, 0, None);
        has_room(&pipeline)?;
        Ok(pipeline)
    }
}

/// Whether layers leave enough of a packet.
fn has_room(pipeline: &Pipeline) -> Result<(), String> {
    match pipeline.capacity() {
        ..MIN_CAPACITY => Err(format!(
            "the layers' headers leave {} bytes of a packet, {MIN_CAPACITY} are needed",
            pipeline.capacity()
        )),
        _ => Ok(()),
    }
}

/// The task of a stack: opens it, and moves its packets until it ends.
async fn run(talk: Talk, start: Start, task_state: SharedTaskState, outside: &Outside) {
    let peer = talk.peer();
    let until = Instant::now() + HANDSHAKE;
    let opened = async {
        match &start.layering {
            Some(layering) => propose(&talk, &start, layering, outside).await,
            None => answer(&talk, &start, outside).await,
        }
    };
    let (description, layers) = match timeout_at(until, opened).await {
        Ok(Ok(opened)) => opened,
        Ok(Err(why)) => {
            tracing::debug!(%why, %peer, carrier = %Kind::Stack, "carrier: stack not opened");
            return talk.fail(why);
        }
        Err(_) => return,
    };
    task_state.borrow_mut().memory = description.memory() * DATAGRAM as u64;
    talk.note_heard();
    match description.carrier() {
        "kcp" => {
            task_state.borrow_mut().memory += kcp::MEMORY;
            // Fails only if the layers leave no room for KCP.
            match kcp::Driver::new(talk, &start, Some(layers)) {
                Ok(driver) => driver.run().await,
                Err(error) => {
                    tracing::debug!(%error, %peer, carrier = %Kind::Stack, "carrier: no KCP over the layers");
                }
            }
        }
        _ => udp::Driver::new(talk, layers, task_state).run().await,
    }
}

/// Waits for the next message. `take`: returns what is made of it.
async fn next<T>(talk: &Talk, mut take: impl FnMut(Message<'_>) -> Option<T>) -> T {
    loop {
        let packets = talk.packets();
        let messages = packets.iter();
        let mut messages = messages.filter_map(|packet| Message::parse(packet.get(NUMBER..)?));
        // What has come behind it is lost, and sent again.
        if let Some(taken) = messages.find_map(&mut take) {
            return taken;
        }
        talk.pipe().work.notified().await;
    }
}

/// The opener's side: says what the stack consists of, until that is answered.
async fn propose(
    talk: &Talk,
    start: &Start,
    layering: &Layering,
    outside: &Outside,
) -> Result<(Description, UdpLayers), String> {
    let (description, layers) = built(talk, start, outside, &layering.layers, layering.rate)?;
    let setup = Message::Setup {
        token: start.token,
        rate: layering.peer_rate,
        layers: &layering.layers,
    };
    let interval = 2 * start.rtt.unwrap_or_default();
    let interval = interval.clamp(SETUP.0, SETUP.1);
    loop {
        talk.transmit([layers.message(setup)]).await;
        let answered = next(talk, |message| match message {
            Message::Accept => Some(Ok(())),
            Message::Refuse(why) => Some(Err(why.escape_debug().to_string())),
            _ => None,
        });
        if let Ok(answer) = timeout_at(Instant::now() + interval, answered).await {
            let accepted = answer.map(|()| (description, layers));
            return accepted.map_err(|why| format!("the peer refuses the stack: {why}"));
        }
        if talk.pipe().is_over() {
            return Err("closed here".into());
        }
    }
}

/// The other side: takes what the opener says, if it can.
async fn answer(
    talk: &Talk,
    start: &Start,
    outside: &Outside,
) -> Result<(Description, UdpLayers), String> {
    loop {
        let (token, rate, text) = next(talk, |message| match message {
            Message::Setup {
                token,
                rate,
                layers,
            } => Some((token, rate, layers.to_owned())),
            _ => None,
        })
        .await;
        if token != start.token {
            return Err("wrong token".into());
        }
        // 0: as fast as it likes, of which this host knows nothing.
        let rate = match rate {
            0 => start.accept_rate,
            rate => rate.min(start.accept_rate),
        };
        let number = number(start.token).to_le_bytes();
        match built(talk, start, outside, &text, rate) {
            Ok((description, layers)) => {
                talk.transmit([message(number, Message::Accept)]).await;
                return Ok((description, layers));
            }
            // Until the opener has it: it asks again otherwise.
            Err(why) => {
                talk.transmit([message(number, Message::Refuse(&why))])
                    .await;
            }
        }
    }
}

/// Builds a stack's layers. `rate`: kbit/s; 0: without bound.
fn built(
    talk: &Talk,
    start: &Start,
    outside: &Outside,
    text: &str,
    rate: u32,
) -> Result<(Description, UdpLayers), String> {
    let (description, made) = outside.build(text, start.rtt, false)?;
    let rate = (rate > 0).then(|| u64::from(rate) * 1000);
    let pipeline = Pipeline::new(made, talk.mtu() - HEAD, talk.overhead() + HEAD, rate);
    has_room(&pipeline)?;
    let layers = UdpLayers {
        pipeline,
        began: Instant::now(),
        number: number(start.token).to_le_bytes(),
        token: (start.opener == Side::Peer).then_some(start.token),
    };
    Ok((description, layers))
}

/// A message as a datagram, not sealed yet.
fn message(number: [u8; NUMBER], message: Message<'_>) -> Bytes {
    let mut datagram = number.to_vec();
    message.emit(&mut datagram);
    datagram.into()
}

/// The layers of a stack, over UDP.
pub(super) struct UdpLayers {
    pipeline: Pipeline,
    began: Instant,
    /// The conversation's number.
    number: [u8; NUMBER],
    /// The token, if the peer has opened the stack: it may have missed the answer.
    token: Option<u64>,
}

impl UdpLayers {
    fn now(&self) -> u64 {
        self.began.elapsed().as_nanos() as u64
    }

    fn message(&self, said: Message<'_>) -> Bytes {
        message(self.number, said)
    }

    /// Maximum length of a packet, bytes.
    pub(super) fn capacity(&self) -> usize {
        self.pipeline.capacity()
    }

    /// When [`UdpLayers::transmit`] is due.
    pub(super) fn next_timeout(&self) -> Option<Instant> {
        let at = self.pipeline.next_timeout()?;
        self.began.checked_add(Duration::from_nanos(at))
    }

    /// Takes a datagram.
    pub(super) async fn receive(&mut self, talk: &Talk, datagram: &[u8]) {
        match datagram.get(NUMBER..).and_then(Message::parse) {
            Some(Message::Packet(packet)) => self.pipeline.receive(self.now(), packet),
            Some(Message::Setup { token, .. }) if Some(token) == self.token => {
                talk.transmit([self.message(Message::Accept)]).await;
            }
            _ => {}
        }
    }

    /// The next packet that has come.
    pub(super) fn deliver(&mut self) -> Option<Packet> {
        self.pipeline.poll_deliver(self.now())
    }

    /// Sends a packet, if the layers take one.
    pub(super) fn send(&mut self, packet: &[u8]) {
        if self.pipeline.is_ready() && packet.len() <= self.capacity() {
            self.pipeline.send(self.now(), packet);
        }
    }

    /// Sends what may leave now. Returns whether something did.
    pub(super) async fn transmit(&mut self, talk: &Talk) -> bool {
        self.pipeline.handle_timeout(self.now());
        let mut has_sent = false;
        loop {
            let mut run = Vec::new();
            while run.len() < RUN
                && let Some(mut packet) = self.pipeline.poll_transmit(self.now())
            {
                packet.push(&[Message::PACKET]);
                packet.push(&self.number);
                run.push(packet.into_bytes());
            }
            if run.is_empty() {
                return has_sent;
            }
            has_sent = true;
            talk.transmit(run).await;
        }
    }

    /// What the layers know of the path. `is_idle`: there is nothing more to send.
    fn path(&self, is_idle: bool) -> Option<CarrierPath> {
        let figures = self.pipeline.figures()?;
        let ms = |ns: u64| ms(Duration::from_nanos(ns));
        Some(CarrierPath {
            rtt_ms: ms(figures.rtt),
            min_rtt_ms: (figures.min_rtt > 0).then(|| ms(figures.min_rtt)),
            sent: figures.sent,
            lost: figures.lost,
            delivered: Some(figures.delivered),
            app_limited: Some(is_idle),
            refused: None,
        })
    }

    /// Whether the peer has been silent for too long. `patience`: longer than three round trips.
    fn is_dead(&self, patience: Duration) -> bool {
        let waits = |since: u64| Duration::from_nanos(self.now().saturating_sub(since));
        self.pipeline.figures().is_some_and(|figures| {
            let patience = patience + 3 * Duration::from_nanos(figures.rtt);
            figures.waits.is_some_and(|since| waits(since) > patience)
        })
    }
}
