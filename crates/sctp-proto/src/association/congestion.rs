//! Congestion control by a model of the path: its bottleneck's rate and its shortest round trip.
//!
//! After BBR (Cardwell et al., ACM Queue 2016; draft-cardwell-iccrg-bbr-congestion-control), as
//! VTL's transport function `bpf/tf/congestion_bbr.h` has it, with rate samples after
//! draft-cheng-iccrg-delivery-rate-estimation. It differs from BBR in this:
//!
//! - Losses tell of congestion only together with a queue. While round trips are short, the pacing
//!   rate makes up for them.
//! - While a queue stands, a little less than the measured rate is sent: a rate measured from
//!   acknowledgements that come in clusters is too high.
//! - PROBE_RTT keeps half a bandwidth-delay product in flight instead of four packets.
//!
//! Rates are bytes per second, windows and amounts bytes of user data. Nothing here reads a clock.

use core::time::Duration;
use std::time::Instant;

/// Gains in 256ths: 2 / ln 2, and its inverse.
const HIGH_GAIN: u64 = 739;
const DRAIN_GAIN: u64 = 88;
const UP_GAIN: u64 = 320;
const DOWN_GAIN: u64 = 192;
/// Cruising with a queue: 1/16 less makes up for a rate that was measured 6 % too high.
const QUEUED_GAIN: u64 = 240;
/// Of the window: what may be in flight at most, in bandwidth-delay products.
const CWND_GAIN: u64 = 512;
const UNIT: u64 = 256;

/// Rounds that the maximum of the rate is taken of.
const ROUNDS: usize = 10;
/// Packets: the window at least; before the first round trip is known; and before the first rate,
/// one for each millisecond of round trip, within these: a long path takes longest to get to know.
const MIN_CWND: u64 = 4;
const FIRST_CWND: u64 = 10;
const INITIAL_CWND: (u64, u64) = (32, 128);

/// How long a shortest round trip is believed, and how long probing for a new one takes.
const MIN_RTT_FOR: Duration = Duration::from_secs(10);
const PROBE_RTT_FOR: Duration = Duration::from_millis(200);
/// What timers and the peer's scheduler may add to a round trip.
const HOST: Duration = Duration::from_millis(1);
/// Packets may leave so much before their time: timers of user space are no finer.
const EARLY: Duration = Duration::from_millis(1);
/// A late sender may catch up with a burst of this, or of a sixteenth of a round trip.
const BURST: Duration = Duration::from_millis(2);

/// Shares of lost bytes in 65,536ths: the largest that is made up for, 10 %; and what ends startup,
/// 20 %, since the queue runs over.
const LOSS_MAX: u64 = 6554;
const LOSS_FULL: u64 = 13107;
/// Packets that a round needs to tell a share of losses.
const LOSS_PACKETS: u64 = 64;

/// What a chunk remembers of its last transmission.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sent {
    /// When it left.
    pub(crate) at: Instant,
    /// Its number in the order of transmissions.
    pub(crate) order: u64,
    /// What had been delivered by then, and when the last of it was acknowledged.
    delivered: u64,
    delivered_at: Instant,
    /// When the chunk had left whose acknowledgement was the latest then.
    first_at: Instant,
    /// The application had not enough to fill the path.
    app_limited: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    Startup,
    Drain,
    Up,
    Down,
    Cruise,
    ProbeRtt,
}

/// What the sender's model of a path has measured.
#[derive(Clone, Copy, Debug)]
pub struct PathMeasured {
    /// The smoothed round-trip time; 0 before the first.
    pub rtt: Duration,
    /// Its minimum lately.
    pub min_rtt: Option<Duration>,
    /// Bytes of user data that were acknowledged.
    pub delivered: u64,
    /// The application had not enough to fill the path lately.
    pub app_limited: bool,
}

/// The sender's model of a path.
#[derive(Debug)]
pub(crate) struct Model {
    mtu: u64,
    cwnd: u64,
    mode: Mode,
    mode_since: Instant,
    /// The largest rate of each of the last rounds; of all of them.
    rates: [u64; ROUNDS],
    slot: usize,
    rate: u64,
    /// When the present phase began.
    mode_rate: u64,
    mode_round: u64,
    full_rate: u64,
    full_rounds: u32,

    min_rtt: Option<Duration>,
    min_rtt_at: Instant,
    /// Of this round; in PROBE_RTT.
    round_rtt: Option<Duration>,
    probe_rtt: Option<Duration>,
    srtt: Duration,
    queued: bool,

    /// Bytes since the beginning; when the last of them were acknowledged, and had been sent.
    delivered: u64,
    delivered_at: Instant,
    first_at: Instant,
    lost: u64,
    /// Up to this `delivered` samples are the application's, not the path's.
    app_limited_until: u64,
    order: u64,

    rounds: u64,
    round_ends: u64,
    round_delivered: u64,
    round_lost: u64,
    loss: u64,

    /// The next packet's time.
    pace_at: Instant,
    /// The newest transmission that the present SACK acknowledges; what it delivers.
    newest: Option<(Sent, bool)>,
    acked: u64,
    /// The newest transmission that was ever acknowledged, and how long that took.
    rack: Option<(u64, Instant, Duration)>,
}

impl Model {
    pub(crate) fn new(mtu: u32, now: Instant) -> Self {
        let mtu = u64::from(mtu);
        Self {
            mtu,
            cwnd: FIRST_CWND * mtu,
            mode: Mode::Startup,
            mode_since: now,
            rates: [0; ROUNDS],
            slot: 0,
            rate: 0,
            mode_rate: 0,
            mode_round: 0,
            full_rate: 0,
            full_rounds: 0,
            min_rtt: None,
            min_rtt_at: now,
            round_rtt: None,
            probe_rtt: None,
            srtt: Duration::ZERO,
            queued: false,
            delivered: 0,
            delivered_at: now,
            first_at: now,
            lost: 0,
            app_limited_until: 0,
            order: 0,
            rounds: 0,
            round_ends: 0,
            round_delivered: 0,
            round_lost: 0,
            loss: 0,
            pace_at: now,
            newest: None,
            acked: 0,
            rack: None,
        }
    }

    /// The congestion window.
    pub(crate) fn cwnd(&self) -> u32 {
        u32::try_from(self.cwnd).unwrap_or(u32::MAX)
    }

    /// What it has measured.
    pub(crate) fn figures(&self) -> PathMeasured {
        PathMeasured {
            rtt: self.srtt,
            min_rtt: self.min_rtt,
            delivered: self.delivered,
            app_limited: self.app_limited_until > 0,
        }
    }

    /// Until when nothing may leave; `None` if something may.
    pub(crate) fn wait_until(&self, now: Instant) -> Option<Instant> {
        (self.pace_at > now + EARLY).then_some(self.pace_at)
    }

    /// The application has nothing more to send, and `in_flight` does not fill the window.
    pub(crate) fn app_limited(&mut self, in_flight: usize) {
        if (in_flight as u64) < self.cwnd {
            self.app_limited_until = (self.delivered + in_flight as u64).max(1);
        }
    }

    /// A chunk leaves, beside `in_flight`.
    pub(crate) fn sent(&mut self, bytes: usize, in_flight: usize, now: Instant) -> Sent {
        if in_flight == 0 {
            (self.first_at, self.delivered_at) = (now, now);
        }
        if let Some(gap) = (bytes as u64 * 1_000_000_000).checked_div(self.pacing_rate()) {
            let burst = BURST.max(self.srtt / 16);
            let earliest = now.checked_sub(burst).unwrap_or(now);
            self.pace_at = self.pace_at.max(earliest) + Duration::from_nanos(gap);
        }
        self.order += 1;
        Sent {
            at: now,
            order: self.order,
            delivered: self.delivered,
            delivered_at: self.delivered_at,
            first_at: self.first_at,
            app_limited: self.app_limited_until > 0,
        }
    }

    /// A chunk was acknowledged; `once`: it was sent once only.
    pub(crate) fn acked(&mut self, sent: &Sent, once: bool, bytes: usize, now: Instant) {
        self.delivered += bytes as u64;
        self.acked += bytes as u64;
        self.delivered_at = now;
        let rtt = now.saturating_duration_since(sent.at);
        if !once && self.min_rtt.is_none_or(|min| rtt < min) {
            // That was for an earlier transmission (RFC 8985, section 6.2).
            return;
        }
        if self.newest.is_none_or(|(n, _)| n.order < sent.order) {
            self.newest = Some((*sent, once));
        }
        if self.rack.is_none_or(|(order, ..)| order < sent.order) {
            self.rack = Some((sent.order, sent.at, rtt));
        }
    }

    /// A chunk counts as lost.
    pub(crate) fn lost(&mut self, bytes: usize) {
        self.lost += bytes as u64;
    }

    /// When a transmission counts as lost, since a later one has arrived: `None` if none has.
    /// The time for reordering is an eighth of a round trip (RFC 9002, section 6.1.2).
    pub(crate) fn lost_at(&self, sent: &Sent) -> Option<Instant> {
        let (order, _, rtt) = self.rack?;
        let patience = rtt.max(self.srtt);
        (sent.order < order).then(|| sent.at + patience + (patience / 8).max(HOST))
    }

    /// When a transmission is older than a round trip with some reordering.
    pub(crate) fn is_overdue(&self, sent: &Sent, now: Instant) -> bool {
        now >= sent.at + self.srtt + self.srtt / 8
    }

    /// The retransmission timer has expired (RFC 9260, section 7.2.3): one packet, and then as many
    /// more as get acknowledged, until the model's window is reached.
    pub(crate) fn timed_out(&mut self) {
        self.cwnd = self.mtu;
    }

    /// A SACK has been processed. `in_flight`: without what is lost.
    pub(crate) fn sack(&mut self, in_flight: usize, now: Instant) {
        let in_flight = in_flight as u64;
        if self.app_limited_until > 0 && self.delivered > self.app_limited_until {
            self.app_limited_until = 0;
        }
        let acked = core::mem::take(&mut self.acked);
        let Some((sent, once)) = self.newest.take() else {
            self.grow(acked);
            return;
        };
        // A sample's bounds begin with the newest packet that was acknowledged.
        let taken = sent.at.saturating_duration_since(sent.first_at);
        self.first_at = sent.at;
        let rtt = now.saturating_duration_since(sent.at);
        if once {
            self.measured(rtt, now);
        }
        let interval = taken.max(now.saturating_duration_since(sent.delivered_at));
        if self.min_rtt.is_some_and(|min| interval >= min) && !interval.is_zero() {
            let bytes = u128::from(self.delivered - sent.delivered) * 1_000_000_000;
            let rate = u64::try_from(bytes / interval.as_nanos()).unwrap_or(u64::MAX);
            self.sampled(rate, sent.app_limited);
        }
        // What was given up need not be waited for.
        self.round_ends = self.round_ends.min(self.delivered + in_flight);
        if sent.delivered >= self.round_ends {
            self.round(in_flight, sent.app_limited, now);
        }
        self.advance(in_flight, rtt, now);
        self.grow(acked);
    }

    fn measured(&mut self, rtt: Duration, now: Instant) {
        self.srtt = match self.min_rtt {
            Some(_) => (self.srtt * 7 + rtt) / 8,
            None => rtt,
        };
        let min_of = |known: Option<Duration>| Some(known.map_or(rtt, |known| known.min(rtt)));
        self.round_rtt = min_of(self.round_rtt);
        let min = self.min_rtt.unwrap_or(rtt);
        if rtt <= min {
            (self.min_rtt, self.min_rtt_at) = (Some(rtt), now);
        } else if rtt <= min + min / 50 {
            // As good as a new minimum: an idle queue needs no probing.
            self.min_rtt_at = now;
        } else if now.saturating_duration_since(self.min_rtt_at) > MIN_RTT_FOR
            && matches!(self.mode, Mode::Up | Mode::Down | Mode::Cruise)
        {
            self.probe_rtt = None;
            self.enter(Mode::ProbeRtt, now);
        }
        if self.mode == Mode::ProbeRtt && self.rounds - self.mode_round >= 2 {
            self.probe_rtt = min_of(self.probe_rtt);
        }
    }

    fn sampled(&mut self, rate: u64, app_limited: bool) {
        if self.mode == Mode::ProbeRtt || (app_limited && rate <= self.rate) {
            return;
        }
        let slot = &mut self.rates[self.slot];
        *slot = rate.max(*slot);
        self.rate = self.rates.iter().copied().max().unwrap_or_default();
    }

    fn enter(&mut self, mode: Mode, now: Instant) {
        self.mode = mode;
        self.mode_since = now;
        self.mode_rate = self.rate;
        self.mode_round = self.rounds;
    }

    /// A round trip's worth of data has been acknowledged.
    fn round(&mut self, in_flight: u64, app_limited: bool, now: Instant) {
        self.rounds += 1;
        self.round_ends = self.delivered + in_flight;
        self.queued = self.round_rtt.take().is_some_and(|rtt| rtt > self.empty());
        let delivered = self.delivered - self.round_delivered;
        let lost = self.lost - self.round_lost;
        if delivered + lost >= LOSS_PACKETS * self.mtu {
            let share = lost * 65536 / (delivered + lost);
            if self.mode == Mode::Startup && share > LOSS_FULL {
                self.enter(Mode::Drain, now);
            }
            // With a queue, losses may be its own: what was known before stays, and fades. Those
            // of DRAIN are of the queue that startup ran over.
            if self.mode == Mode::Drain {
            } else if !self.queued || share < self.loss {
                self.loss = (3 * self.loss + share) / 4;
            } else {
                self.loss -= self.loss / 16;
            }
            self.round_delivered = self.delivered;
            self.round_lost = self.lost;
        }
        // What the application did not fill says nothing of the path, and neither does PROBE_RTT.
        if self.mode != Mode::ProbeRtt && !app_limited {
            self.slot = (self.slot + 1) % ROUNDS;
            self.rates[self.slot] = 0;
        }
        if self.mode != Mode::Startup || app_limited || self.rate == 0 {
            return;
        }
        if self.rate >= self.full_rate + self.full_rate / 4 {
            self.full_rate = self.rate;
            self.full_rounds = 0;
        } else {
            self.full_rounds += 1;
            if self.full_rounds >= if self.queued { 1 } else { 3 } {
                self.enter(Mode::Drain, now);
            }
        }
    }

    /// Goes on to another phase if it is time to.
    fn advance(&mut self, in_flight: u64, rtt: Duration, now: Instant) {
        let min_rtt = self.min_rtt.unwrap_or_default().max(HOST);
        let spent = now.saturating_duration_since(self.mode_since);
        let drained = in_flight <= self.product(UNIT).max(MIN_CWND * self.mtu);
        match self.mode {
            Mode::Startup => {}
            Mode::Drain => {
                if drained {
                    self.enter(Mode::Cruise, now);
                }
            }
            Mode::Up => {
                if spent < min_rtt {
                } else if rtt <= self.empty() && self.rate > self.mode_rate + self.mode_rate / 8 {
                    // There is more, and no queue yet: go on.
                    self.enter(Mode::Up, now);
                } else if in_flight >= self.product(UP_GAIN) || spent > 3 * min_rtt {
                    self.enter(Mode::Down, now);
                }
            }
            Mode::Down => {
                if drained || spent > 2 * min_rtt {
                    self.enter(Mode::Cruise, now);
                }
            }
            Mode::Cruise => {
                // Not in step with others: by what happened to be delivered.
                let cruise = 2 + (self.delivered / self.mtu) as u32 % 4;
                if spent > cruise * min_rtt && (!self.queued || spent > 8 * min_rtt) {
                    self.enter(Mode::Up, now);
                }
            }
            Mode::ProbeRtt => {
                if let Some(seen) = self.probe_rtt.filter(|_| spent > PROBE_RTT_FOR) {
                    (self.min_rtt, self.min_rtt_at) = (Some(seen), now);
                    self.enter(Mode::Cruise, now);
                }
            }
        }
    }

    /// Round trips up to this one show an empty queue: a sixth longer than the shortest, with what
    /// hosts and a packet in front may add.
    fn empty(&self) -> Duration {
        let packet = (self.mtu * 1_000_000).checked_div(self.rate);
        let min = self.min_rtt.unwrap_or_default();
        min + min / 6 + HOST + Duration::from_micros(packet.unwrap_or_default())
    }

    /// The bandwidth-delay product, times a gain.
    fn product(&self, gain: u64) -> u64 {
        let rtt = self.min_rtt.unwrap_or_default().as_micros();
        let bytes = u128::from(self.rate) * rtt / 1_000_000 * u128::from(gain) / u128::from(UNIT);
        u64::try_from(bytes).unwrap_or(u64::MAX)
    }

    /// The initial window.
    fn initial(&self) -> u64 {
        let (least, most) = INITIAL_CWND;
        let millis = self.min_rtt.unwrap_or_default().as_millis() as u64;
        millis.clamp(least, most) * self.mtu
    }

    /// The window follows what the model says, upwards by what gets acknowledged.
    fn grow(&mut self, acked: u64) {
        if self.min_rtt.is_none() {
            return;
        }
        let initial = self.initial();
        let host = self.rate / 1_000_000 * HOST.as_micros() as u64;
        let gain = match self.mode {
            Mode::ProbeRtt if self.rounds - self.mode_round >= 2 => UNIT / 2,
            Mode::ProbeRtt => UNIT,
            _ => CWND_GAIN,
        };
        let mut target = self.product(gain);
        if self.mode != Mode::ProbeRtt {
            target += 2 * host + 3 * self.mtu;
        }
        if self.mode == Mode::Startup {
            target = target.max(initial);
            if self.rounds <= 1 && self.lost == 0 {
                self.cwnd = self.cwnd.max(initial);
            }
        }
        self.cwnd += acked;
        self.cwnd = self.cwnd.min(target).max(MIN_CWND * self.mtu);
    }

    /// `0`: as fast as it goes, since nothing is known.
    fn pacing_rate(&self) -> u64 {
        let Some(min_rtt) = self.min_rtt else {
            return 0;
        };
        let mut rate = self.rate;
        if self.mode == Mode::Startup {
            // Until the path is known, no slower than the initial window per round trip.
            let micros = min_rtt.max(HOST).as_micros() as u64;
            rate = rate.max(self.initial() * 1_000_000 / micros);
        }
        if !self.queued || self.mode == Mode::Startup {
            let loss = if self.loss < LOSS_MAX { self.loss } else { 0 };
            rate += (u128::from(rate) * u128::from(loss) / 65536) as u64;
        }
        let gain = match self.mode {
            Mode::Startup => HIGH_GAIN,
            Mode::Drain => DRAIN_GAIN,
            Mode::Up => UP_GAIN,
            Mode::Down => DOWN_GAIN,
            Mode::Cruise if self.queued => QUEUED_GAIN,
            Mode::Cruise | Mode::ProbeRtt => UNIT,
        };
        rate.saturating_mul(gain) / UNIT
    }
}
