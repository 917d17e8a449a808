//! Packet-level models of competing TCP senders, limited to their effect on a shared queue. Every
//! transmission is acknowledged individually, without delay, so loss detection and recovery are
//! those of an ideal SACK: a transmission overtaken by three is lost, and the next packet sent
//! retransmits it. [`Sender::with_probes`] adds what decides how long short transfers take: tail
//! loss probes, losses told by time, and Linux's retransmission timeout.

use std::collections::VecDeque;

use vtl_link::Nanos;

/// Length of a full segment on the link, bytes.
pub const SEGMENT: u64 = 1500;
/// The initial window, segments (RFC 6928).
const INITIAL: f64 = 10.0;
/// Nanoseconds in a second. Times are in nanoseconds, windows in segments, rates in segments per second.
const SECOND: f64 = 1e9;

/// A modelled congestion control.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Model {
    /// CUBIC (RFC 9438) as in Linux: HyStart's delay rule, no pacing.
    Cubic,
    /// BBR version 1, as in Linux.
    Bbr,
}

/// A transmission in flight, with the sender's state at that time for the rate sample.
#[derive(Clone, Copy, Debug)]
struct Sent {
    id: u64,
    segment: u64,
    at: Nanos,
    first: Nanos,
    delivered: u64,
    delivered_at: Nanos,
    /// Application-limited.
    limited: bool,
}

/// Input of congestion control from an acknowledgement.
#[derive(Clone, Copy, Debug)]
struct Sample {
    now: Nanos,
    rtt: f64,
    /// Segments per second.
    rate: f64,
    in_flight: f64,
    round: bool,
    lost: bool,
    limited: bool,
}

/// A bulk sender.
#[derive(Debug)]
pub struct Sender {
    control: Control,
    /// Transmissions in flight, in order.
    out: VecDeque<Sent>,
    /// Number of the next transmission.
    next: u64,
    /// Transmissions delivered.
    pub delivered: u64,
    delivered_at: Nanos,
    /// Time of the transmission acknowledged latest: start of rate samples.
    first: Nanos,
    /// `delivered` at which the round ends.
    round_end: u64,
    /// First transmission after the latest reduction of the window.
    recover: u64,
    srtt: f64,
    /// Round-trip time of the handshake, for the timeout before the first sample.
    handshake: f64,
    /// Time of the latest acknowledgement.
    heard: Nanos,
    /// Earliest time of the next transmission.
    pace_at: Nanos,
    /// Segments to send: those of `lost`, and new ones.
    left: u64,
    /// Segments to retransmit.
    lost: VecDeque<u64>,
    /// Next new segment.
    fresh: u64,
    /// Segment of the latest transmission.
    latest: u64,
    probes: Option<Probes>,
}

/// State of probes and of the timeout.
#[derive(Clone, Copy, Debug)]
struct Probes {
    min_rtt: f64,
    /// Time of the latest transmission.
    sent: Nanos,
    /// Whether a probe is under way.
    probing: bool,
    /// Timeouts in a row.
    timeouts: u32,
}

impl Probes {
    /// Linux's lower bound of what the timeout adds to the round-trip time.
    const MIN_TIMEOUT: f64 = 200e6;
    /// Linux's lower bound of what a probe waits besides two round trips.
    const MIN_PROBE: f64 = 2e6;

    /// Time of the probe after `last`, the latest transmission or acknowledgement (RFC 8985, section 7.2; as Linux
    /// where one packet is in flight, whose acknowledgement may be delayed).
    fn probe_at(&self, last: Nanos, srtt: f64, in_flight: usize) -> Nanos {
        let more = if in_flight == 1 {
            Self::MIN_TIMEOUT
        } else {
            Self::MIN_PROBE
        };
        last + (2.0 * srtt + more) as Nanos
    }

    /// Time of the timeout (RFC 6298, with backoff).
    fn timeout_at(&self, last: Nanos, srtt: f64) -> Nanos {
        last + ((srtt + Self::MIN_TIMEOUT) * f64::from(1 << self.timeouts.min(8))) as Nanos
    }
}

#[derive(Debug)]
enum Control {
    Cubic(Cubic),
    Bbr(Bbr),
}

impl Sender {
    /// A sender of `segments` segments. `seed` selects BBR's initial phase.
    pub fn new(model: Model, segments: u64, seed: u64) -> Self {
        Self {
            control: match model {
                Model::Cubic => Control::Cubic(Cubic::new()),
                Model::Bbr => Control::Bbr(Bbr::new(seed)),
            },
            out: VecDeque::new(),
            next: 0,
            delivered: 0,
            delivered_at: 0,
            first: 0,
            round_end: 0,
            recover: 0,
            srtt: 0.0,
            handshake: 0.0,
            heard: 0,
            pace_at: 0,
            left: segments,
            lost: VecDeque::new(),
            fresh: 0,
            latest: 0,
            probes: None,
        }
    }

    /// Sets the round-trip time of the handshake.
    #[must_use]
    pub fn with_handshake(mut self, rtt: Nanos) -> Self {
        self.handshake = rtt as f64;
        self
    }

    /// Adds tail loss probes (RFC 8985, section 7), losses told by time (section 6) and Linux's timeout. `rtt`: the
    /// round-trip time of the handshake.
    #[must_use]
    pub fn with_probes(mut self, rtt: Nanos) -> Self {
        self.srtt = rtt as f64;
        self.probes = Some(Probes {
            min_rtt: rtt as f64,
            sent: 0,
            probing: false,
            timeouts: 0,
        });
        self
    }

    /// Adds segments to send.
    pub fn offer(&mut self, segments: u64) {
        self.left += segments;
    }

    /// The segment that the latest transmission carried; the first is 0.
    pub fn latest_segment(&self) -> u64 {
        self.latest
    }

    fn cwnd(&self) -> f64 {
        match &self.control {
            Control::Cubic(c) => c.cwnd,
            Control::Bbr(b) => b.cwnd,
        }
    }

    /// Time of the next attempt to send, unless an acknowledgement comes first.
    pub fn due(&self) -> Nanos {
        if self.left > 0 && (self.out.len() as f64) < self.cwnd() {
            self.pace_at
        } else if self.out.is_empty() {
            Nanos::MAX
        } else {
            self.timeout_at().min(self.probe_at())
        }
    }

    fn timeout_at(&self) -> Nanos {
        match &self.probes {
            None => {
                let rtt = if self.srtt == 0.0 {
                    self.handshake
                } else {
                    self.srtt
                };
                self.heard + (2.0 * rtt) as Nanos + 1_000_000_000
            }
            Some(probes) => probes.timeout_at(self.heard.max(probes.sent), self.srtt),
        }
    }

    fn probe_at(&self) -> Nanos {
        match &self.probes {
            Some(p) if !p.probing && p.timeouts == 0 && !self.out.is_empty() => {
                p.probe_at(self.heard.max(p.sent), self.srtt, self.out.len())
            }
            _ => Nanos::MAX,
        }
    }

    /// The number of the next transmission, if one may be sent now.
    pub fn send(&mut self, now: Nanos) -> Option<u64> {
        let window_limited = self.left > 0 && self.out.len() as f64 >= self.cwnd();
        if now >= self.probe_at() && (self.left == 0 || window_limited) {
            return self.probe(now);
        }
        if !self.out.is_empty() && now >= self.timeout_at() {
            self.left += self.out.len() as u64;
            self.lost
                .extend(self.out.drain(..).map(|sent| sent.segment));
            self.lost.make_contiguous().sort_unstable();
            self.heard = now;
            if let Some(probes) = &mut self.probes {
                (probes.probing, probes.timeouts) = (false, probes.timeouts + 1);
            }
            match &mut self.control {
                Control::Cubic(c) => c.timeout(),
                Control::Bbr(b) => b.cwnd = 4.0,
            }
        }
        if self.left == 0 || self.out.len() as f64 >= self.cwnd() || now < self.pace_at {
            return None;
        }
        if self.out.is_empty() {
            (self.first, self.delivered_at, self.heard) = (now, now, now);
        }
        let rate = match &self.control {
            Control::Cubic(_) => f64::INFINITY,
            Control::Bbr(b) => b.pace(self.srtt),
        };
        // Linux does not pace the initial window.
        if self.probes.is_none() || self.next >= INITIAL as u64 {
            self.pace_at =
                self.pace_at.max(now.saturating_sub(1_000_000)) + (SECOND / rate) as Nanos;
        }
        self.left -= 1;
        let segment = self.lost.pop_front().unwrap_or_else(|| {
            self.fresh += 1;
            self.fresh - 1
        });
        Some(self.transmit(now, segment))
    }

    fn transmit(&mut self, now: Nanos, segment: u64) -> u64 {
        let id = self.next;
        self.next += 1;
        self.latest = segment;
        if let Some(probes) = &mut self.probes {
            probes.sent = now;
        }
        self.out.push_back(Sent {
            id,
            segment,
            at: now,
            first: self.first,
            delivered: self.delivered,
            delivered_at: self.delivered_at,
            limited: self.left == 0,
        });
        id
    }

    /// Sends the last segment again, for an acknowledgement that tells what was lost.
    fn probe(&mut self, now: Nanos) -> Option<u64> {
        let last = self.out.pop_back()?;
        self.probes.as_mut()?.probing = true;
        Some(self.transmit(now, last.segment))
    }

    /// Whether the transmission at the front is lost, as one sent at `at` with the number `id` has arrived.
    fn is_overtaken(&self, front: &Sent, at: Nanos, id: u64) -> bool {
        let reordering = self.probes.map(|probes| (probes.min_rtt / 4.0) as Nanos);
        front.id + 3 <= id || reordering.is_some_and(|r| front.id < id && front.at + r < at)
    }

    /// Processes the acknowledgement of transmission `id`.
    pub fn acknowledged(&mut self, now: Nanos, id: u64) {
        let Ok(place) = self.out.binary_search_by_key(&id, |s| s.id) else {
            return;
        };
        let Some(sent) = self.out.remove(place) else {
            return;
        };
        self.heard = now;
        self.delivered += 1;
        self.delivered_at = now;
        self.first = sent.at;
        let rtt = (now - sent.at) as f64;
        self.srtt = if self.srtt == 0.0 {
            rtt
        } else {
            self.srtt * 0.875 + rtt * 0.125
        };
        if let Some(probes) = &mut self.probes {
            probes.min_rtt = probes.min_rtt.min(rtt);
            (probes.probing, probes.timeouts) = (false, 0);
        }
        let mut lost = false;
        while let Some(front) = self.out.front().copied()
            && self.is_overtaken(&front, sent.at, id)
        {
            self.out.pop_front();
            self.left += 1;
            self.lost.push_back(front.segment);
            // One reduction per window.
            if front.id >= self.recover {
                self.recover = self.next;
                lost = true;
            }
        }
        let round = sent.delivered >= self.round_end;
        if round {
            self.round_end = self.delivered;
        }
        let span = (sent.at - sent.first).max(now - sent.delivered_at).max(1);
        let sample = Sample {
            now,
            rtt,
            rate: (self.delivered - sent.delivered) as f64 * SECOND / span as f64,
            in_flight: self.out.len() as f64,
            round,
            lost,
            limited: sent.limited,
        };
        match &mut self.control {
            Control::Cubic(c) => c.sample(&sample, self.srtt),
            Control::Bbr(b) => b.sample(&sample, self.delivered),
        }
    }
}

#[derive(Debug)]
struct Cubic {
    cwnd: f64,
    /// Slow start threshold.
    threshold: f64,
    /// `W_max` of RFC 9438.
    w_max: f64,
    /// `K`, seconds.
    k: f64,
    /// Start of congestion avoidance; 0: not begun since the latest loss.
    epoch: Nanos,
    /// `W_est`, `NewReno`'s window.
    w_est: f64,
    min_rtt: f64,
    /// Minimum of this round, and its samples: `HyStart`.
    round_rtt: f64,
    round_samples: u32,
}

impl Cubic {
    const C: f64 = 0.4;
    const BETA: f64 = 0.7;

    fn new() -> Self {
        Self {
            cwnd: INITIAL,
            threshold: f64::INFINITY,
            w_max: 0.0,
            k: 0.0,
            epoch: 0,
            w_est: 0.0,
            min_rtt: f64::INFINITY,
            round_rtt: f64::INFINITY,
            round_samples: 0,
        }
    }

    fn timeout(&mut self) {
        self.threshold = (self.cwnd * Self::BETA).max(2.0);
        self.cwnd = 1.0;
        self.epoch = 0;
    }

    fn sample(&mut self, s: &Sample, srtt: f64) {
        self.min_rtt = self.min_rtt.min(s.rtt);
        if s.round {
            (self.round_rtt, self.round_samples) = (f64::INFINITY, 0);
        }
        self.round_rtt = self.round_rtt.min(s.rtt);
        self.round_samples += 1;
        if s.lost {
            self.w_max = if self.cwnd < self.w_max {
                self.cwnd * (1.0 + Self::BETA) / 2.0
            } else {
                self.cwnd
            };
            self.cwnd = (self.cwnd * Self::BETA).max(2.0);
            (self.threshold, self.epoch) = (self.cwnd, 0);
            return;
        }
        // Not window-limited: no growth.
        if s.in_flight + 3.0 < self.cwnd {
            return;
        }
        if self.cwnd < self.threshold {
            self.cwnd += 1.0;
            let slack = (self.min_rtt / 8.0).clamp(4e6, 16e6);
            if self.cwnd >= 16.0 && self.round_samples >= 8 && self.round_rtt > self.min_rtt + slack
            {
                self.threshold = self.cwnd;
            }
            return;
        }
        if self.epoch == 0 {
            self.epoch = s.now;
            self.w_est = self.cwnd;
            self.w_max = self.w_max.max(self.cwnd);
            self.k = ((self.w_max - self.cwnd) / Self::C).cbrt();
        }
        let t = (s.now - self.epoch) as f64 / SECOND + srtt / SECOND;
        let target = Self::C * (t - self.k).powi(3) + self.w_max;
        self.w_est += 3.0 * (1.0 - Self::BETA) / (1.0 + Self::BETA) / self.cwnd;
        let target = target.max(self.w_est).min(self.cwnd * 1.5);
        self.cwnd += ((target - self.cwnd) / self.cwnd).max(0.01 / self.cwnd);
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Startup,
    Drain,
    ProbeBw,
    ProbeRtt,
}

#[derive(Debug)]
struct Bbr {
    mode: Mode,
    cwnd: f64,
    /// Maximum rate of each of ten rounds.
    rates: [f64; 10],
    /// Entry of `rates` for this round.
    slot: usize,
    min_rtt: f64,
    /// Time of the latest sample of `min_rtt`.
    min_at: Nanos,
    /// STARTUP: the rate that growth is compared with, and rounds without growth.
    full: f64,
    full_rounds: u32,
    /// `PROBE_BW`: position in `GAINS`, and its start.
    cycle: usize,
    cycle_at: Nanos,
    /// `PROBE_RTT`: its end; 0: in flight has not fallen to the minimum yet.
    probe_end: Nanos,
    /// Packet conservation in the round after a loss.
    recovery: bool,
}

impl Bbr {
    const HIGH: f64 = 2.885;
    const GAINS: [f64; 8] = [1.25, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0];

    fn new(seed: u64) -> Self {
        Self {
            mode: Mode::Startup,
            cwnd: INITIAL,
            rates: [0.0; 10],
            slot: 0,
            min_rtt: f64::INFINITY,
            min_at: 0,
            full: 0.0,
            full_rounds: 0,
            cycle: 2 + (seed % 6) as usize,
            cycle_at: 0,
            probe_end: 0,
            recovery: false,
        }
    }

    fn bw(&self) -> f64 {
        self.rates.iter().fold(0.0, |a, b| a.max(*b))
    }

    fn bdp(&self) -> f64 {
        self.bw() * self.min_rtt / SECOND
    }

    fn pace(&self, srtt: f64) -> f64 {
        let gain = match self.mode {
            Mode::Startup => Self::HIGH,
            Mode::Drain => 1.0 / Self::HIGH,
            Mode::ProbeBw => Self::GAINS[self.cycle],
            Mode::ProbeRtt => 1.0,
        };
        let bw = self.bw();
        if bw == 0.0 {
            return if srtt == 0.0 {
                f64::INFINITY
            } else {
                Self::HIGH * INITIAL * SECOND / srtt
            };
        }
        0.99 * gain * bw
    }

    fn sample(&mut self, s: &Sample, delivered: u64) {
        if s.round {
            self.slot = (self.slot + 1) % self.rates.len();
            self.rates[self.slot] = 0.0;
            self.recovery = false;
        }
        if !s.limited || s.rate > self.bw() {
            self.rates[self.slot] = self.rates[self.slot].max(s.rate);
        }
        if s.round && self.mode == Mode::Startup {
            if self.bw() >= 1.25 * self.full {
                (self.full, self.full_rounds) = (self.bw(), 0);
            } else {
                self.full_rounds += 1;
                if self.full_rounds >= 3 {
                    self.mode = Mode::Drain;
                }
            }
        }
        if self.mode == Mode::Drain && s.in_flight <= self.bdp() {
            (self.mode, self.cycle_at) = (Mode::ProbeBw, s.now);
        }
        if self.mode == Mode::ProbeBw {
            let full = (s.now - self.cycle_at) as f64 > self.min_rtt;
            let next = match Self::GAINS[self.cycle] {
                g if g > 1.0 => full && (s.lost || s.in_flight >= g * self.bdp()),
                g if g < 1.0 => full || s.in_flight <= self.bdp(),
                _ => full,
            };
            if next {
                (self.cycle, self.cycle_at) = ((self.cycle + 1) % 8, s.now);
            }
        }
        let expired = s.now > self.min_at + 10_000_000_000;
        if s.rtt <= self.min_rtt || expired {
            (self.min_rtt, self.min_at) = (s.rtt, s.now);
        }
        if expired && self.mode != Mode::ProbeRtt && self.full_rounds >= 3 {
            (self.mode, self.probe_end) = (Mode::ProbeRtt, 0);
        }
        if self.mode == Mode::ProbeRtt {
            if self.probe_end == 0 && s.in_flight <= 4.0 {
                self.probe_end = s.now + 200_000_000 + self.min_rtt as Nanos;
            } else if self.probe_end != 0 && s.now > self.probe_end {
                (self.mode, self.min_at, self.cycle_at) = (Mode::ProbeBw, s.now, s.now);
                self.cycle = 2 + (delivered % 6) as usize;
            }
        }
        let target = (2.0 * self.bdp()).max(4.0) + 3.0;
        if s.lost {
            // Packet conservation for a round.
            self.recovery = true;
            self.cwnd = self.cwnd.min(s.in_flight + 1.0).max(4.0);
        }
        self.cwnd = if self.mode == Mode::ProbeRtt {
            self.cwnd.min(4.0)
        } else if self.recovery {
            self.cwnd
        } else if self.full_rounds >= 3 {
            target.min(
                self.cwnd
                    + 1.0
                    + if self.cwnd < target / 2.0 {
                        target
                    } else {
                        0.0
                    },
            )
        } else {
            self.cwnd + 1.0
        };
    }
}
