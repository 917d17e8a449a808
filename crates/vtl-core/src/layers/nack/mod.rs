//! Reliability by negative acknowledgements: the receiver names what it lacks, and the sender sends that again.
//!
//! Both directions are independent: [`sender`] and [`receiver`] are the two ends of one. There is no congestion control: what is
//! lost is sent again as soon as there is room.

mod receiver;
mod sender;

use receiver::Receiver;
use sender::Sender;
use vtl_proto::layers::Nack as Header;

use super::{Figures, Layer, Ns, Out, Packet};

/// Repeats packets until the receiver has them.
///
/// - A packet comes up once, as soon as it arrives: others may have overtaken it.
/// - The sender keeps `window` packets at most that the receiver has not reported, and takes no more from above; the receiver
///   takes no packet beyond that. 16 places are for packets of layers above themselves, which do not ask for readiness.
/// - After a pause the sender asks for a report, so that the last packets are repaired, too.
pub struct Nack {
    sender: Sender,
    receiver: Receiver,
}

/// Places of the window that are kept for packets of layers above themselves.
const RESERVE: usize = 16;

impl Nack {
    /// Minimum window, packets.
    pub const MIN_WINDOW: u32 = 2 * RESERVE as u32;

    /// `window`: packets, the same at both ends; `rtt`: the path's round-trip time, if it is known.
    pub fn new(window: u32, rtt: Option<Ns>) -> Self {
        let window = window.max(Self::MIN_WINDOW);
        Self {
            sender: Sender::new(window, rtt),
            receiver: Receiver::new(window),
        }
    }
}

impl Layer for Nack {
    fn header(&self) -> usize {
        Header::LEN
    }

    fn is_ready(&self) -> bool {
        self.sender.is_ready()
    }

    fn send(&mut self, now: Ns, packet: Packet, out: &mut Out) {
        self.sender.send(now, packet, out);
    }

    fn receive(&mut self, now: Ns, mut packet: Packet, out: &mut Out) {
        match Header::parse(packet.bytes()) {
            Some((Header::Data { seq, xid }, rest)) => {
                packet.keep(rest.len());
                self.receiver.data(now, seq, xid, packet, out);
            }
            Some((Header::Probe { next, xid }, _)) => self.receiver.probe(now, next, xid, out),
            Some((Header::Report(report), _)) => self.sender.report(now, &report, out),
            None => out.refuse(),
        }
    }

    fn poll(&mut self, now: Ns, room: usize, out: &mut Out) {
        self.receiver.poll(now, out);
        self.sender.poll(now, room, out);
    }

    fn is_waiting(&self) -> bool {
        self.sender.has_lost()
    }

    fn next_timeout(&self) -> Option<Ns> {
        let all = [self.sender.next_timeout(), self.receiver.next_timeout()];
        all.into_iter().flatten().min()
    }

    fn figures(&self) -> Option<Figures> {
        Some(self.sender.figures())
    }
}
