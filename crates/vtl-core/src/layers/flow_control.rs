//! Flow control: the receiver grants credit for as many packets as it has room for.

use vtl_proto::layers::{FlowControl as Header, near};

use super::{Layer, Ns, Out, Packet};

/// Bounds the packets that the receiver has not taken to `window`.
///
/// The receiver says up to which packet it has room, whenever that has grown by a quarter of the window. It needs a layer
/// below that neither loses nor reorders packets: both sides count them.
pub struct FlowControl {
    window: u64,
    /// Packets sent, and how many the receiver has room for.
    sent: u64,
    limit: u64,
    /// Packets received, taken, and how many the sender was granted.
    received: u64,
    taken: u64,
    granted: u64,
}

impl FlowControl {
    /// `window`: packets.
    pub fn new(window: u32) -> Self {
        let window = window.into();
        Self {
            window,
            sent: 0,
            limit: window,
            received: 0,
            taken: 0,
            granted: window,
        }
    }
}

impl Layer for FlowControl {
    fn header(&self) -> usize {
        Header::LEN
    }

    fn is_ready(&self) -> bool {
        self.sent < self.limit
    }

    fn send(&mut self, _now: Ns, mut packet: Packet, out: &mut Out) {
        packet.push(&Header::Data.emit());
        self.sent += 1;
        out.down(packet);
    }

    fn receive(&mut self, _now: Ns, mut packet: Packet, out: &mut Out) {
        match Header::parse(packet.bytes()) {
            Some((Header::Data, rest)) if self.received < self.granted => {
                packet.keep(rest.len());
                self.received += 1;
                out.up(packet);
            }
            Some((Header::Credit(limit), _)) => {
                let limit = near(limit, self.limit);
                // The receiver takes no packet that was not sent.
                match limit <= self.sent + self.window {
                    true => self.limit = self.limit.max(limit),
                    false => out.refuse(),
                }
            }
            _ => out.refuse(),
        }
    }

    fn taken(&mut self, _now: Ns, packets: u32, out: &mut Out) {
        self.taken = (self.taken + u64::from(packets)).min(self.received);
        let grants = self.taken + self.window;
        if grants - self.granted >= self.window.div_ceil(4) {
            self.granted = grants;
            // Truncated on purpose.
            out.down(Packet::new(&Header::Credit(grants as u32).emit()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Passes a layer's packets down to the other, whose packets up are counted.
    fn pass(from: Out, to: &mut FlowControl) -> usize {
        let mut out = Out::default();
        for packet in from.down {
            to.receive(0, packet, &mut out);
        }
        assert_eq!(out.refused, 0);
        out.up.len()
    }

    #[test]
    fn flow_control__waits_for_credit() {
        let (mut here, mut there) = (FlowControl::new(8), FlowControl::new(8));
        for round in 0..100 {
            let mut out = Out::default();
            while here.is_ready() {
                here.send(0, Packet::new(b"x"), &mut out);
            }
            let expected = if round == 0 { 8 } else { 2 };
            assert_eq!(pass(out, &mut there), expected);
            let mut out = Out::default();
            there.taken(0, 1, &mut out);
            assert!(out.down.is_empty(), "a quarter of the window, no less");
            there.taken(0, 1, &mut out);
            assert_eq!(out.down.len(), 1);
            pass(out, &mut here);
        }
    }

    #[test]
    fn flow_control__takes_nothing_beyond_its_credit_and_believes_no_more_than_can_be() {
        let mut layer = FlowControl::new(8);
        let mut out = Out::default();
        for _ in 0..9 {
            layer.receive(0, Packet::new(&[0, 7]), &mut out);
        }
        assert_eq!((out.up.len(), out.refused), (8, 1));
        for wrong in [&[1, 0, 0, 0, 9][..], &[1, 0, 0], &[2], &[]] {
            layer.receive(0, Packet::new(wrong), &mut out);
        }
        assert_eq!((layer.limit, out.refused), (8, 5));
        // Nobody takes what has not come.
        layer.taken(0, 99, &mut out);
        assert_eq!(layer.granted, 16);
    }
}
