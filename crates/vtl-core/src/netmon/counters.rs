//! Counters of a connection, as carriers keep them, and what has come between two readings of them.

use std::time::Duration;

/// What bounded a sender's rate lately.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Bound {
    /// The path: the sender follows a model of it, and had more to send.
    Path,
    /// A window that losses shrink: the path where a queue stands on it, else something below.
    Window,
    /// The application, or the receiver; or nobody knows.
    #[default]
    Application,
}

/// Counters of one connection since it began, and its latest estimates. Counters may wrap, and begin again.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Counters {
    /// The smoothed round-trip time; 0 counts as `None`, here and below.
    pub rtt: Option<Duration>,
    /// The mean deviation of round-trip times.
    pub rtt_variance: Option<Duration>,
    /// The minimum round-trip time lately.
    pub min_rtt: Option<Duration>,
    /// Packets sent, modulo 2^32: best those alone whose fate is known.
    pub sent: u32,
    /// Those of them that were lost, modulo 2^32. May go back, where a packet was late and not lost.
    pub lost: u32,
    /// Bytes of payload that have arrived, if known.
    pub delivered: Option<u64>,
    /// What bounds the rate.
    pub bound: Bound,
    /// The share of packets that arrive behind later ones.
    pub reordering: Option<f64>,
}

/// A queue stands, or stood a moment ago, where the smoothed round trip exceeds the minimum by more than this part of it,
/// one eighth, and [`LATE`].
const QUEUE: u32 = 8;
/// A queue stands all of the time where it exceeds it by more than this part, one fourth, and [`LATE`]: a window that
/// leaves in one burst makes a queue for a moment only.
const STANDING: u32 = 4;
/// Time by which hosts answer late without any queue.
const LATE: Duration = Duration::from_micros(500);

impl Counters {
    /// Whether the smoothed round trip exceeds the minimum by this part of it.
    fn has_queue(&self, part: u32) -> bool {
        let times = self.rtt.zip(self.min_rtt.filter(|min| !min.is_zero()));
        times.is_some_and(|(rtt, min)| rtt.saturating_sub(min) > min / part + LATE)
    }
}

impl Counters {
    /// Whether the queue is so long that it may overflow: then what is lost says nothing of the path, and the link is busy.
    pub fn may_overflow(&self) -> bool {
        let times = self.rtt.zip(self.min_rtt.filter(|min| !min.is_zero()));
        times.is_some_and(|(rtt, min)| rtt.saturating_sub(min) > min * 3 / 4 + LATE)
    }

    /// Whether a queue stands, or stood a moment ago.
    pub(super) fn has_queue_lately(&self) -> bool {
        self.has_queue(QUEUE)
    }

    /// Whether a queue stands, longer than one that a window makes for a moment which leaves in one burst.
    pub(super) fn has_standing_queue(&self) -> bool {
        self.has_queue(STANDING)
    }
}

/// What has come between two readings of a connection's counters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Step {
    /// Time of the later reading, ns.
    pub at_ns: u64,
    /// Time of the earlier reading, ns; for a connection's first one the same, as nobody knows when it began.
    pub from_ns: u64,
    /// Packets sent.
    pub sent: u32,
    /// Packets lost; negative where packets that counted as lost have arrived.
    pub lost: i32,
    /// Bytes delivered, if known.
    pub delivered: Option<u64>,
    /// As in [`Counters`], but [`Bound::Path`] where a window has kept a queue filled, at both readings.
    pub bound: Bound,
    /// A queue stood on the path at either reading: what was lost may be its overflow.
    pub is_queued: bool,
    /// The smoothed round-trip time, never 0.
    pub rtt: Option<Duration>,
    /// The mean deviation of round-trip times.
    pub rtt_variance: Option<Duration>,
    /// The minimum round-trip time lately, never 0.
    pub min_rtt: Option<Duration>,
    /// The share of packets that arrive behind later ones, 0 to 1.
    pub reordering: Option<f64>,
}

/// The latest reading of one connection.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tracker {
    last: Option<(u64, Counters)>,
}

impl Tracker {
    /// Takes a reading. `None` if nothing has been sent or delivered since the last one, or if the counters have gone back,
    /// as those of another connection: then that one begins here.
    pub fn advance(&mut self, now_ns: u64, counters: Counters) -> Option<Step> {
        let none = Counters {
            delivered: Some(0),
            ..Counters::default()
        };
        let (from_ns, last) = self.last.unwrap_or((now_ns, none));
        self.last = Some((now_ns, counters));
        let sent = counters.sent.wrapping_sub(last.sent);
        let lost = counters.lost.wrapping_sub(last.lost) as i32;
        let both = counters.delivered.zip(last.delivered);
        let delivered = both.map(|(now, then)| now.saturating_sub(then));
        // Half the numbers or more: not that many in one step, but some back.
        let is_back = i32::try_from(sent).is_err() || now_ns < from_ns;
        let is_new = sent > 0 || lost != 0 || delivered.is_some_and(|bytes| bytes > 0);
        if is_back {
            return None;
        }
        // Estimates of what was delivered may go back a little.
        let max = counters
            .delivered
            .max(last.delivered.filter(|_| both.is_some()));
        self.last = Some((
            now_ns,
            Counters {
                delivered: max,
                ..counters
            },
        ));
        if !is_new {
            return None;
        }
        let known = |time: Option<Duration>| time.filter(|time| !time.is_zero());
        let (rtt, min_rtt) = (known(counters.rtt), known(counters.min_rtt));
        // The queue has to stand for all of the time.
        let is_full = [counters, last].iter().all(|at| at.has_standing_queue());
        let bound = match counters.bound {
            Bound::Window if is_full => Bound::Path,
            bound => bound,
        };
        Some(Step {
            at_ns: now_ns,
            from_ns,
            sent,
            lost,
            delivered,
            bound,
            is_queued: [counters, last].iter().any(|at| at.has_queue(QUEUE)),
            rtt,
            rtt_variance: counters.rtt_variance,
            min_rtt,
            reordering: counters
                .reordering
                .filter(|share| (0.0..=1.0).contains(share)),
        })
    }
}
