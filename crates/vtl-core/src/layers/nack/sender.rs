//! The sender's end of `nack`.

use std::collections::VecDeque;

use vtl_proto::layers::{Nack as Header, Report, near};

use super::{
    super::{Figures, MS, Ns, Out, Packet},
    RESERVE,
};

/// A missing packet is lost when this many later transmissions have arrived at first (RFC 9002, 6.1.1), and at most,
const REORDERING: u64 = 3;
const MAX_REORDERING: u64 = 256;
/// or one that left so much later, which grows with it.
const REORDERING_TIME: Ns = 2 * MS;
/// Pause after which the first probe is sent, in times of that, so that what it finds missing is lost.
const PAUSE: Ns = 2;
/// Round-trip time while none is known.
const RTT: Ns = 200 * MS;
/// Minimum and maximum of the interval between probes, which doubles.
const MIN_PROBE: Ns = 10 * MS;
const MAX_PROBE: Ns = 3_000 * MS;

/// A packet that was not reported yet.
struct Sent {
    /// The packet, without header; `None`: it has arrived.
    packet: Option<Packet>,
    /// Its latest transmission, and when that was.
    xid: u64,
    at: Ns,
    /// It is in `lost`.
    is_lost: bool,
}

/// What was sent.
pub(super) struct Sender {
    window: usize,
    /// Number of the first packet of `sent`: all below are reported.
    first: u64,
    sent: VecDeque<Sent>,
    /// Packets to be sent again, by number.
    lost: VecDeque<u64>,
    /// When the latest transmissions were made, and the number of the first of these.
    times: VecDeque<Ns>,
    first_xid: u64,
    /// The highest transmission that has arrived, and when it was made.
    highest: Option<(u64, Ns)>,
    reordering: u64,
    dups: u32,
    srtt: Ns,
    rttvar: Ns,
    min_rtt: Ns,
    /// When the next probe is due, and how many went unanswered.
    probe: Option<Ns>,
    probes: u32,
    /// Since when nothing was answered.
    waits: Option<Ns>,
    transmissions: u64,
    losses: u64,
    delivered: u64,
}

impl Sender {
    pub(super) fn new(window: u32, rtt: Option<Ns>) -> Self {
        Self {
            window: window as usize,
            first: 0,
            sent: VecDeque::new(),
            lost: VecDeque::new(),
            times: VecDeque::new(),
            first_xid: 0,
            highest: None,
            reordering: REORDERING,
            dups: 0,
            srtt: rtt.unwrap_or(0),
            rttvar: rtt.unwrap_or(0) / 2,
            min_rtt: 0,
            probe: None,
            probes: 0,
            waits: None,
            transmissions: 0,
            losses: 0,
            delivered: 0,
        }
    }

    pub(super) fn is_ready(&self) -> bool {
        self.sent.len() + RESERVE < self.window
    }

    pub(super) fn has_lost(&self) -> bool {
        !self.lost.is_empty()
    }

    fn next(&self) -> u64 {
        self.first + self.sent.len() as u64
    }

    fn next_xid(&self) -> u64 {
        self.first_xid + self.times.len() as u64
    }

    /// Number of a new transmission.
    fn transmit(&mut self, now: Ns) -> u64 {
        // As many are looked up as can be under way.
        if self.times.len() >= 4 * self.window {
            self.times.pop_front();
            self.first_xid += 1;
        }
        let xid = self.next_xid();
        self.times.push_back(now);
        self.waits.get_or_insert(now);
        xid
    }

    /// Sends a packet that has its place in `sent`.
    fn put(&mut self, now: Ns, place: usize, out: &mut Out) {
        let xid = self.transmit(now);
        let seq = self.first + place as u64;
        let Some(Sent {
            packet: Some(packet),
            ..
        }) = self.sent.get(place)
        else {
            return;
        };
        let mut packet = packet.clone();
        // Truncated on purpose.
        let header = Header::Data {
            seq: seq as u32,
            xid: xid as u32,
        };
        packet.push(&header.emit());
        out.down(packet);
        (self.sent[place].xid, self.sent[place].at) = (xid, now);
        self.transmissions += 1;
        self.probes = 0;
        self.probe = Some(now + PAUSE * self.reordering_time());
    }

    pub(super) fn send(&mut self, now: Ns, packet: Packet, out: &mut Out) {
        self.sent.push_back(Sent {
            packet: Some(packet),
            xid: 0,
            at: now,
            is_lost: false,
        });
        self.put(now, self.sent.len() - 1, out);
    }

    fn reordering_time(&self) -> Ns {
        REORDERING_TIME * (self.reordering / REORDERING)
    }

    pub(super) fn report(&mut self, now: Ns, report: &Report, out: &mut Out) {
        let next = self.next();
        let cum = near(report.cum, self.first);
        let end = near(report.end, self.first);
        let echo = near(report.echo, self.next_xid());
        let made = echo.checked_sub(self.first_xid);
        let made = made.and_then(|place| self.times.get(place as usize).copied());
        // Of what was never sent, or so old that it says nothing new.
        let (Some(made), true) = (made, cum <= end && end <= next) else {
            return out.refuse();
        };
        if cum < self.first {
            return;
        }
        // Of a transmission once: the other host could say how old it is for ever.
        if self.highest.is_none_or(|(highest, _)| highest < echo) {
            self.sample(now, made, report.held);
            self.highest = Some((echo, made));
        }
        // Modulo 2^32; an older report may come late.
        let again = report.dups.wrapping_sub(self.dups);
        if again > 0 && again < u32::MAX / 2 {
            self.dups = report.dups;
            self.reordering = (self.reordering * 2).min(MAX_REORDERING);
        }
        self.arrived(cum, end, report);
        while self.sent.front().is_some_and(|sent| sent.packet.is_none()) {
            self.sent.pop_front();
            self.first += 1;
        }
        self.waits = (!self.sent.is_empty()).then_some(now);
        if self.sent.is_empty() {
            self.probe = None;
            self.probes = 0;
        }
    }

    /// Notes which packets have arrived, and which of the others are lost.
    fn arrived(&mut self, cum: u64, end: u64, report: &Report) {
        let first = self.first;
        let place = |number: u64| (number - first) as usize;
        for place in 0..place(cum) {
            self.delivered(place);
        }
        let mut at = place(cum);
        let end = place(end);
        for (arrived, missing) in &report.missing {
            let missing_from = at + usize::from(*arrived);
            let next = missing_from + usize::from(*missing);
            if next > end {
                // Malformed: what it has said so far may be true.
                return;
            }
            for place in at..missing_from {
                self.delivered(place);
            }
            for place in missing_from..next {
                self.missing(place);
            }
            at = next;
        }
        for place in at..end {
            self.delivered(place);
        }
    }

    fn delivered(&mut self, place: usize) {
        if let Some(packet) = self.sent[place].packet.take() {
            self.delivered += packet.len() as u64;
        }
    }

    /// Judges a packet that is missing.
    fn missing(&mut self, place: usize) {
        let late = self.reordering_time();
        let (Some((highest, made)), reordering) = (self.highest, self.reordering) else {
            return;
        };
        let sent = &mut self.sent[place];
        let is_lost = sent.xid < highest
            && (highest - sent.xid >= reordering || made.saturating_sub(sent.at) >= late);
        // One that a former report has named as arrived stays so.
        if is_lost && !sent.is_lost && sent.packet.is_some() {
            sent.is_lost = true;
            self.losses += 1;
            self.lost.push_back(self.first + place as u64);
        }
    }

    /// A round-trip time (RFC 6298, section 2).
    fn sample(&mut self, now: Ns, made: Ns, held_us: u32) {
        let rtt = now.saturating_sub(made);
        let rtt = rtt.saturating_sub(Ns::from(held_us) * 1000).max(1);
        self.min_rtt = match self.min_rtt {
            0 => rtt,
            min => min.min(rtt),
        };
        if self.srtt == 0 || self.highest.is_none() {
            (self.srtt, self.rttvar) = (rtt, rtt / 2);
        } else {
            self.rttvar = self.rttvar - self.rttvar / 4 + self.srtt.abs_diff(rtt) / 4;
            self.srtt = self.srtt - self.srtt / 8 + rtt / 8;
        }
    }

    pub(super) fn poll(&mut self, now: Ns, mut room: usize, out: &mut Out) {
        while room > 0
            && let Some(seq) = self.lost.pop_front()
        {
            let Some(place) = seq.checked_sub(self.first) else {
                continue;
            };
            let place = place as usize;
            if let Some(sent) = self.sent.get_mut(place) {
                sent.is_lost = false;
                if sent.packet.is_some() {
                    room -= 1;
                    self.put(now, place, out);
                }
            }
        }
        let is_due = self.probe.is_some_and(|at| at <= now);
        if is_due && room > 0 && self.lost.is_empty() {
            let next = self.next() as u32;
            let xid = self.transmit(now) as u32;
            out.down(Packet::new(&Header::Probe { next, xid }.emit()));
            let rtt = if self.srtt == 0 { RTT } else { self.srtt };
            let interval = (rtt + 4 * self.rttvar).max(MIN_PROBE) + 2 * MS;
            let interval = interval.saturating_mul(1 << self.probes.min(8));
            self.probes += 1;
            self.probe = Some(now + interval.min(MAX_PROBE));
        }
    }

    pub(super) fn next_timeout(&self) -> Option<Ns> {
        self.probe.filter(|_| self.lost.is_empty())
    }

    pub(super) fn figures(&self) -> Figures {
        Figures {
            rtt: self.srtt,
            min_rtt: self.min_rtt,
            sent: self.transmissions,
            lost: self.losses,
            delivered: self.delivered,
            waits: self.waits,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sender(packets: u32) -> Sender {
        let mut sender = Sender::new(64, None);
        for i in 0..packets {
            let mut out = Out::default();
            sender.send(Ns::from(i), Packet::new(b"data"), &mut out);
        }
        sender
    }

    fn report(cum: u32, end: u32, echo: u32, missing: &[(u16, u16)]) -> Report {
        Report {
            cum,
            end,
            echo,
            missing: missing.to_vec(),
            ..Report::default()
        }
    }

    #[test]
    fn report__names_what_is_lost_once() {
        let mut sender = sender(10);
        let mut out = Out::default();
        // 2 and 3 are missing; 7 was the latest: 3 and more have overtaken both.
        sender.report(50, &report(2, 8, 7, &[(0, 2)]), &mut out);
        assert_eq!(sender.lost, [2, 3]);
        sender.report(60, &report(2, 8, 7, &[(0, 2)]), &mut out);
        assert_eq!((sender.lost.len(), sender.losses), (2, 2));
        sender.poll(70, 1, &mut out);
        assert!(out.down.len() == 1 && sender.has_lost(), "as there is room");
        sender.poll(70, 9, &mut out);
        assert_eq!(out.down.len(), 2);
        // Nothing that was sent later has arrived.
        sender.report(80, &report(2, 10, 9, &[(0, 2)]), &mut out);
        assert!(!sender.has_lost());
        sender.report(90, &report(10, 10, 11, &[]), &mut out);
        assert_eq!((sender.first, sender.sent.len()), (10, 0));
        assert_eq!((sender.next_timeout(), sender.waits), (None, None));
        assert_eq!((sender.delivered, out.refused), (40, 0));
    }

    #[test]
    fn report__of_what_was_never_sent_is_refused() {
        let mut sender = sender(4);
        let mut out = Out::default();
        for wrong in [
            report(5, 5, 3, &[]),
            report(0, 5, 3, &[]),
            report(3, 2, 3, &[]),
            report(0, 4, 4, &[]),
            report(0, 4, u32::MAX, &[]),
        ] {
            sender.report(50, &wrong, &mut out);
        }
        assert_eq!((out.refused, sender.sent.len()), (5, 4));
        // Runs beyond the end: nothing there is judged.
        sender.report(50, &report(0, 4, 3, &[(1, 9)]), &mut out);
        sender.report(50, &report(0, 4, 3, &[(u16::MAX, u16::MAX)]), &mut out);
        assert!(sender.sent.len() == 4 && !sender.has_lost());
    }

    #[test]
    fn probe__comes_after_a_pause_and_then_ever_later() {
        let mut sender = sender(1);
        let mut times = Vec::new();
        for _ in 0..6 {
            let at = sender.next_timeout().expect("something is unreported");
            let mut out = Out::default();
            sender.poll(at, 1, &mut out);
            assert_eq!(out.down.len(), 1);
            times.push(at / MS);
        }
        assert_eq!(times, [4, 206, 610, 1418, 3034, 6034]);
        // The probe, the second transmission, has arrived, and the packet has not.
        let mut out = Out::default();
        sender.report(6_050 * MS, &report(0, 1, 1, &[(0, 1)]), &mut out);
        assert_eq!(sender.lost, [0]);
    }

    #[test]
    fn report__duplicates_say_that_packets_are_reordered() {
        let mut sender = sender(20);
        let mut out = Out::default();
        let dups = |dups| Report {
            dups,
            ..report(0, 8, 5, &[(0, 1)])
        };
        sender.report(30, &dups(3), &mut out);
        assert_eq!(sender.reordering, 2 * REORDERING);
        assert!(!sender.has_lost(), "5 transmissions are not 6");
        // One that comes late.
        sender.report(30, &dups(1), &mut out);
        assert_eq!((sender.dups, sender.reordering), (3, 2 * REORDERING));
    }
}
