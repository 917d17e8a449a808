//! A pipeline of layers.

use std::{collections::VecDeque, mem};

use super::{Figures, Layer, MAX_PACKET, MS, Ns, Out, Pacer, Packet};

/// Packets that may wait at the bottom, as time at the rate, and the bounds of their number. Repeated packets wait behind
/// them; without a rate the network below takes what there is.
const BACKLOG: Ns = 4 * MS;
const MIN_BACKLOG: usize = 4;
const MAX_BACKLOG: usize = 256;
/// Packets that may wait at the top if no layer bounds them: more are dropped. `ordering` passes up as many at once.
const MAX_WAITING: usize = 16_384;

/// Packets that may wait for the network, where layers answer the other host faster than the rate carries: more are
/// dropped, as a network would.
const MAX_OUTGOING: usize = 8192;

/// Layers around a carrier, from the top to the bottom.
pub struct Pipeline {
    layers: Vec<Box<dyn Layer>>,
    /// Maximum length of a packet at the bottom, and what the network adds to it, bytes.
    mtu: usize,
    below: usize,
    pacer: Option<Pacer>,
    /// Packets for the network.
    outgoing: VecDeque<Packet>,
    /// Packets for whoever is above.
    incoming: VecDeque<Packet>,
    refused: u64,
    /// Packets that may wait at the bottom.
    max_backlog: usize,
    /// Packets on their way between layers, and what the one at work has passed on: kept for their memory.
    steps: VecDeque<Step>,
    out: Out,
}

/// A packet between two layers.
enum Step {
    /// To the layer at this place, from above.
    Down(usize, Packet),
    /// To the layer in front of this place, from below.
    Up(usize, Packet),
}

impl Pipeline {
    /// Creates a pipeline; `layers`: the top one first. `mtu`: maximum length of a packet for the network, at most
    /// [`MAX_PACKET`]; `below`: what the network adds to it, bytes, which counts for the rate. `rate`: bit/s.
    pub fn new(layers: Vec<Box<dyn Layer>>, mtu: usize, below: usize, rate: Option<u64>) -> Self {
        let mtu = mtu.min(MAX_PACKET);
        let pacer = rate.map(Pacer::new);
        let max_backlog = pacer.map_or(MAX_BACKLOG, |pacer| {
            let packets = pacer.bytes_in(BACKLOG) / mtu.max(1) as u64;
            (packets as usize).clamp(MIN_BACKLOG, MAX_BACKLOG)
        });
        Self {
            layers,
            mtu,
            below,
            pacer,
            outgoing: VecDeque::new(),
            incoming: VecDeque::new(),
            refused: 0,
            max_backlog,
            steps: VecDeque::new(),
            out: Out::default(),
        }
    }

    /// Maximum length of a packet at the top, bytes.
    pub fn capacity(&self) -> usize {
        let headers = self.layers.iter().map(|layer| layer.header()).sum();
        self.mtu.saturating_sub(headers)
    }

    /// Whether it takes a packet.
    pub fn is_ready(&self) -> bool {
        self.room() > 0 && self.layers.iter().all(|layer| layer.is_ready())
    }

    /// Packets that may be added at the bottom.
    fn room(&self) -> usize {
        self.max_backlog.saturating_sub(self.outgoing.len())
    }

    /// Sends a packet of at most [`Pipeline::capacity`] bytes. Only if [`Pipeline::is_ready`].
    pub fn send(&mut self, now: Ns, bytes: &[u8]) {
        debug_assert!(bytes.len() <= self.capacity());
        self.pass(now, Step::Down(0, Packet::new(bytes)));
    }

    /// Takes a packet from the network.
    pub fn receive(&mut self, now: Ns, bytes: &[u8]) {
        if bytes.len() > self.mtu {
            self.refused += 1;
            return;
        }
        self.pass(now, Step::Up(self.layers.len(), Packet::new(bytes)));
    }

    /// The next packet for whoever is above.
    pub fn poll_deliver(&mut self, now: Ns) -> Option<Packet> {
        let packet = self.incoming.pop_front()?;
        for index in 0..self.layers.len() {
            self.with(index, now, |layer, out| layer.taken(now, 1, out));
        }
        Some(packet)
    }

    /// Whether packets wait for whoever is above.
    pub fn has_incoming(&self) -> bool {
        !self.incoming.is_empty()
    }

    /// The next packet for the network, if one may leave now.
    pub fn poll_transmit(&mut self, now: Ns) -> Option<Packet> {
        if self.pacer.is_some_and(|pacer| pacer.next() > now) {
            return None;
        }
        let packet = self.outgoing.pop_front()?;
        if let Some(pacer) = &mut self.pacer {
            pacer.sent(now, packet.len() + self.below);
        }
        Some(packet)
    }

    /// Has layers send what waits for room, and what is due. The lowest first: it repeats what is oldest.
    pub fn handle_timeout(&mut self, now: Ns) {
        for index in (0..self.layers.len()).rev() {
            let room = self.room();
            self.with(index, now, |layer, out| layer.poll(now, room, out));
        }
    }

    /// Packets from the network that layers keep for those in front of them.
    pub fn held(&self) -> usize {
        self.layers.iter().map(|layer| layer.held()).sum()
    }

    /// Packets that wait for the network.
    pub fn backlog(&self) -> usize {
        self.outgoing.len()
    }

    /// When to call [`Pipeline::handle_timeout`] and [`Pipeline::poll_transmit`] again, if nothing happens before.
    pub fn next_timeout(&self) -> Option<Ns> {
        let sends = match &self.pacer {
            Some(pacer) => (!self.outgoing.is_empty()).then(|| pacer.next()),
            None => (!self.outgoing.is_empty()).then_some(0),
        };
        let waits = |layer: &dyn Layer| layer.is_waiting() && self.room() > 0;
        let due = self
            .layers
            .iter()
            .filter_map(|layer| match waits(layer.as_ref()) {
                true => Some(0),
                false => layer.next_timeout(),
            });
        due.chain(sends).min()
    }

    /// What the layers know of the path.
    pub fn figures(&self) -> Option<Figures> {
        self.layers.iter().find_map(|layer| layer.figures())
    }

    /// Packets that made no sense, or for which there was no room.
    pub fn refused(&self) -> u64 {
        self.refused
    }

    /// Has one layer do something, and passes on what it sends.
    fn with(&mut self, index: usize, now: Ns, act: impl FnOnce(&mut dyn Layer, &mut Out)) {
        act(self.layers[index].as_mut(), &mut self.out);
        self.note(index);
        self.run(now);
    }

    fn pass(&mut self, now: Ns, step: Step) {
        self.steps.push_back(step);
        self.run(now);
    }

    /// Notes what the layer at a place passes on.
    fn note(&mut self, index: usize) {
        self.refused += mem::take(&mut self.out.refused);
        let (down, up) = (self.out.down.drain(..), self.out.up.drain(..));
        self.steps.extend(down.map(|p| Step::Down(index + 1, p)));
        self.steps.extend(up.map(|p| Step::Up(index, p)));
    }

    /// Passes packets from layer to layer until all have left them.
    fn run(&mut self, now: Ns) {
        while let Some(step) = self.steps.pop_front() {
            let index = match step {
                Step::Down(index, packet) => {
                    let Some(layer) = self.layers.get_mut(index) else {
                        match self.outgoing.len() < MAX_OUTGOING {
                            true => self.outgoing.push_back(packet),
                            false => self.refused += 1,
                        }
                        continue;
                    };
                    layer.send(now, packet, &mut self.out);
                    index
                }
                Step::Up(0, packet) => {
                    match self.incoming.len() < MAX_WAITING {
                        true => self.incoming.push_back(packet),
                        false => self.refused += 1,
                    }
                    continue;
                }
                Step::Up(place, packet) => {
                    self.layers[place - 1].receive(now, packet, &mut self.out);
                    place - 1
                }
            };
            self.note(index);
        }
    }
}
