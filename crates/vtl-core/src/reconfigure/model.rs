//! What a trained model wants, by the figures of one path.

use std::time::Duration;

use super::{Choice, TCP_CLASSES, UNKNOWN, nanos};
use crate::{
    netmon::Metrics,
    profile::Profile,
    select::{CLASSES, Explanation, Features, Selector, is_sure},
};

/// Minimum number of packets that a loss has to be of: fewer say nothing of a path that loses 2 %.
pub const ENOUGH_PACKETS: u64 = 64;
/// Minimum time between two observations.
pub const OBSERVED: Duration = Duration::from_millis(500);
/// Time after which an observation does not agree with any later one.
const FORGOTTEN: Duration = Duration::from_secs(10);
/// Time for which a rate that was measured counts where later figures have none: only some carriers measure it, and the
/// choice of one must not take its reason away.
const REMEMBERED: Duration = Duration::from_secs(300);

/// What comes behind where the model was not asked, so that there are no shares: a graft that keeps queues short, and BBR.
const REST: [Choice; 2] = [Some(2), UNKNOWN];

/// Loss up to which TCP that BBR takes over does well.
const BBR_LOSS: f64 = 0.08;
/// The same for streams: from there on a graft is surely better (`select/sure.rs`).
const STREAM_LOSS: f64 = 0.01;

/// What a model has decided.
#[derive(Clone, Debug, PartialEq)]
pub struct Decision {
    /// By what.
    pub features: Features,
    /// The class, and why.
    pub explanation: Explanation,
    /// The class is a graft that is not surely better than TCP ([`is_sure`]), so [`UNKNOWN`] is in its place.
    pub is_unsure: bool,
}

/// What the figures of a path said at one time.
#[derive(Clone, Copy, Debug)]
struct Observation {
    at_ns: u64,
    class: &'static str,
    is_unsure: bool,
    /// Packets that the loss was of: figures of as many are not new ones.
    packets: u64,
}

impl Observation {
    fn says_as(&self, other: &Self) -> bool {
        (self.class, self.is_unsure) == (other.class, other.is_unsure)
    }
}

/// Follows the figures of one path.
#[derive(Clone, Debug)]
pub(super) struct Model {
    profile: Option<Profile>,
    last: Option<Observation>,
    /// The rate measured last, Mbit/s, and when.
    rate: Option<(u64, f64)>,
    /// The classes, best first.
    wanted: Vec<Choice>,
    decision: Option<Decision>,
    /// The loss told last.
    loss: Option<f64>,
}

impl Model {
    pub(super) fn new(profile: Option<Profile>) -> Self {
        Self {
            profile,
            last: None,
            rate: None,
            wanted: Vec::new(),
            decision: None,
            loss: None,
        }
    }

    /// Whether TCP does well enough to stay while bytes move. Where late bytes are as bad as lost ones it does not once the
    /// path loses packets: what comes behind one waits for it, and a sender at a pace of its own has no rate to lose by a
    /// change.
    pub(super) fn tcp_does_well(&self) -> bool {
        let limit = match self.profile {
            Some(Profile::TimeSensitive) => STREAM_LOSS,
            _ => BBR_LOSS,
        };
        self.loss.is_some_and(|loss| loss < limit)
    }

    pub(super) fn profile(&self) -> Option<Profile> {
        self.profile
    }

    /// Decides by another profile from the next observation on. That of the former one still has to agree with it: if both
    /// profiles want the same class, nothing is to be decided anew.
    pub(super) fn set_profile(&mut self, profile: Option<Profile>) {
        self.profile = profile;
    }

    /// The classes that may be switched to, best first; empty before the first decision.
    pub(super) fn wanted(&self) -> &[Choice] {
        &self.wanted
    }

    pub(super) fn decision(&self) -> Option<&Decision> {
        self.decision.as_ref()
    }

    /// Decides by one observation.
    pub(super) fn begin(&mut self, now_ns: u64, metrics: &Metrics) {
        if let Some((seen, decision)) = self.read(now_ns, metrics) {
            self.last = Some(seen);
            self.decide(decision);
        }
    }

    /// Takes the figures, and decides once two observations agree. What is unknown changes nothing.
    pub(super) fn observe(&mut self, now_ns: u64, metrics: &Metrics) {
        let since = |then_ns| now_ns.saturating_sub(then_ns);
        let is_known = |last: Observation| {
            last.packets == metrics.packets || since(last.at_ns) < nanos(OBSERVED)
        };
        if self.last.is_some_and(is_known) {
            return;
        }
        let Some((seen, decision)) = self.read(now_ns, metrics) else {
            return;
        };
        let agrees =
            |last: Observation| last.says_as(&seen) && since(last.at_ns) <= nanos(FORGOTTEN);
        if self.last.replace(seen).is_some_and(agrees) {
            self.decide(decision);
        }
    }

    /// What the figures say; `None`: too little is known.
    fn read(&mut self, now_ns: u64, metrics: &Metrics) -> Option<(Observation, Decision)> {
        let mut features = Features::new(metrics, self.profile);
        let loss = features.loss_percent.map(|loss| loss / 100.0);
        self.loss = loss.or(self.loss);
        let is_recent =
            |(at_ns, _): &(u64, f64)| now_ns.saturating_sub(*at_ns) <= nanos(REMEMBERED);
        let is_stream = self.profile == Some(Profile::TimeSensitive);
        features.rate_mbit = match is_stream || loss.is_some_and(|loss| loss >= BBR_LOSS) {
            // What a stream, or TCP there, reaches is its own, and no figure of the path: a lower bound.
            true => None,
            false => {
                let rate = features.rate_mbit.map(|rate| (now_ns, rate));
                self.rate = rate.or(self.rate);
                self.rate.filter(is_recent).map(|(_, rate)| rate)
            }
        };
        let is_enough = metrics.packets >= ENOUGH_PACKETS;
        (features.rtt_ms.is_some() && features.loss_percent.is_some() && is_enough).then(|| {
            let explanation = Selector::embedded().explain(&features);
            let is_graft = !CLASSES[..TCP_CLASSES].contains(&explanation.class);
            let rate = metrics
                .bandwidth
                .map(|bandwidth| bandwidth.rate as f64 / 1e6);
            let is_unsure = is_graft && !is_sure(&features, rate);
            let seen = Observation {
                at_ns: now_ns,
                class: explanation.class,
                is_unsure,
                packets: metrics.packets,
            };
            let decision = Decision {
                features,
                explanation,
                is_unsure,
            };
            (seen, decision)
        })
    }

    fn decide(&mut self, decision: Decision) {
        let Explanation { class, shares, .. } = &decision.explanation;
        let others = shares.iter().map(|(class, _)| *class);
        let ranked = [*class].into_iter().chain(others).chain([CLASSES[0]]);
        let choice_of = |class: &str| {
            let place = CLASSES.iter().position(|known| *known == class);
            place.filter(|place| *place > 0)
        };
        self.wanted.clear();
        if decision.is_unsure {
            self.wanted.push(UNKNOWN);
        }
        // TCP can always be had; what comes behind it is for those that pass it over.
        for choice in ranked.map(choice_of).chain(REST) {
            if !self.wanted.contains(&choice) {
                self.wanted.push(choice);
            }
        }
        self.decision = Some(decision);
    }
}
