//! Layers around a carrier that moves packets (VirtualStack, section III: a stack is a pipeline of layers; PROTOCOL.md,
//! section 7, "Layers").
//!
//! A [`Pipeline`] has layers from the top, where frames of flows come in and go out, to the bottom, where packets go to
//! the network and come from it. Each is a [`Layer`], one file here. [`Description`] is what a stack consists of, as text in
//! the file of stacks and on the wire; it says as well which order makes sense.
//!
//! # Contract of a layer
//! - **Time** is an argument, ns since any beginning, and never goes back. A layer has no clock, no thread and no I/O.
//! - **Header**: it puts at most [`Layer::header`] bytes in front of a packet from above, and may shorten or lengthen
//!   what is behind as long as the sum is no longer than packet and header were. It takes its header off on receipt.
//! - **What is below**: datagrams, of which the next point says what may become of them; or messages of a carrier that has
//!   reliability, congestion control and flow control (QUIC, SCTP, MPTCP, a session), of which each comes, once, in any order.
//!   Over these a layer that drops a packet loses it for good: what is refused ends the stack.
//! - **Own packets** are no longer than the longest packet from above with its header. Apart from answers to a packet
//!   and from timers, it sends them in [`Layer::poll`], as many as there is room for. Nobody asks layers below whether
//!   they are ready for them: such a layer keeps room for a few.
//! - **Order, loss, copies**: packets from below may be lost, repeated, reordered and delayed without bound. What it may do of
//!   that itself to packets that it passes up is in [`Promises`]: `nack` loses and repeats none, and reorders them, over
//!   any layer; `ordering` neither reorders nor repeats, and loses what it was waited for too long, unless the layer below
//!   loses none; `fec` and `compression` pass on what they get. A layer must pass down every packet that it takes, in order.
//! - **Hostile input**: packets from below may be anything. What makes no sense is dropped and counted
//!   ([`Out::refuse`]), and changes nothing. Memory is bounded by the layer's parameters, whatever arrives.
//! - **Readiness**: [`Layer::is_ready`] stops the layer above; a packet comes down only if all layers are ready.

mod compression;
mod description;
mod fec;
mod flow_control;
mod nack;
mod ordering;
mod pace;
mod packet;
mod pipeline;

pub use compression::Compression;
pub use description::{BUILT_IN, Built, Description, MAX_LAYERS, Unfit};
pub use fec::Fec;
pub use flow_control::FlowControl;
pub use nack::Nack;
pub use ordering::Ordering;
pub use pace::Pacer;
pub use packet::Packet;
pub use pipeline::Pipeline;

/// Time, ns.
pub type Ns = u64;

/// A millisecond.
const MS: Ns = 1_000_000;

/// Longest packet of a pipeline, bytes: nothing longer is ever allocated for one.
pub const MAX_PACKET: usize = 2048;

/// What a layer guarantees to the one above, or the carrier to the lowest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Promises {
    /// Every packet arrives, once.
    pub reliable: bool,
    /// Those that arrive do so in the order in which they were sent.
    pub ordered: bool,
    /// Packets that the receiver has not taken are bounded in number.
    pub controlled: bool,
}

/// Packets that a layer passes on.
#[derive(Debug, Default)]
pub struct Out {
    down: Vec<Packet>,
    up: Vec<Packet>,
    refused: u64,
}

impl Out {
    /// Passes a packet to the layer below.
    pub fn down(&mut self, packet: Packet) {
        self.down.push(packet);
    }

    /// Passes a packet to the layer above.
    pub fn up(&mut self, packet: Packet) {
        self.up.push(packet);
    }

    /// Counts a packet from below that made no sense, or for which there was no room.
    pub fn refuse(&mut self) {
        self.refused += 1;
    }
}

/// What a layer knows of the path.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Figures {
    /// Smoothed round-trip time, and its minimum; 0: unknown.
    pub rtt: Ns,
    /// The minimum of all.
    pub min_rtt: Ns,
    /// Packets sent, repeated ones included, and packets found lost.
    pub sent: u64,
    /// Packets found lost.
    pub lost: u64,
    /// Bytes that the peer has reported as arrived.
    pub delivered: u64,
    /// Since when something is unanswered that the peer has to answer.
    pub waits: Option<Ns>,
}

/// A layer of a stack; the module says what it may do.
pub trait Layer {
    /// Bytes that it adds to a packet from above, at most.
    fn header(&self) -> usize;

    /// Whether it takes a packet from above.
    fn is_ready(&self) -> bool {
        true
    }

    /// Handles a packet from above.
    fn send(&mut self, now: Ns, packet: Packet, out: &mut Out);

    /// Handles a packet from below.
    fn receive(&mut self, now: Ns, packet: Packet, out: &mut Out);

    /// Notes that whoever is above the stack has taken this many of the packets that came up.
    fn taken(&mut self, _now: Ns, _packets: u32, _out: &mut Out) {}

    /// Sends packets of its own: what waits for room, of which there is for `room` packets, and what is due.
    fn poll(&mut self, _now: Ns, _room: usize, _out: &mut Out) {}

    /// Packets from below that it keeps for those in front of them.
    fn held(&self) -> usize {
        0
    }

    /// Whether packets wait for room.
    fn is_waiting(&self) -> bool {
        false
    }

    /// Time of the next [`Layer::poll`], if one is due.
    fn next_timeout(&self) -> Option<Ns> {
        None
    }

    /// What it knows of the path, if it measures that.
    fn figures(&self) -> Option<Figures> {
        None
    }
}
