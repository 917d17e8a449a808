//! The choice of a carrier by decision trees (thesis, chapter 5): an application's profile and the state of the path
//! go in, a carrier comes out. Training and choosing compute features by the same code, which is here.

mod bounds;
mod choice;
pub mod learn;
mod sure;

use vtl_tree::{Attribute, Value};

use crate::{netmon::Metrics, profile::Profile};

pub use bounds::{Bound, Bounds, fills_queues};
pub use choice::{EMBEDDED, Error, Explanation, Selector, Step};
pub use sure::is_sure;

/// The carriers that a choice is made of, as rules name them, the simplest first. The first is the default: TCP as the
/// system has it.
pub const CLASSES: [&str; 5] = [
    "tcp",
    "tcp:bbr",
    "graft:stream",
    "graft:cubic",
    "graft:hybla",
];
/// By which share a carrier may be slower than the best and still tie with it. Of those that tie the simplest is right.
pub const TIE: f64 = 0.03;

/// What a choice is made by. Trained models have these attributes, in this order: [`Features::attributes`].
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Features {
    /// The minimum round-trip time, ms.
    pub rtt_ms: Option<f64>,
    /// The path's bandwidth, Mbit/s.
    pub rate_mbit: Option<f64>,
    /// The share of packets that the path loses, per cent.
    pub loss_percent: Option<f64>,
    /// How many packets are lost together, on average.
    pub loss_burst: Option<f64>,
    /// What the application wants; `None` if nobody knows.
    pub profile: Option<Profile>,
    /// How much it will send, where that is known, bytes.
    pub bytes: Option<f64>,
}

impl Features {
    /// The features of a flow over a path.
    pub fn new(path: &Metrics, profile: Option<Profile>) -> Self {
        Self {
            rtt_ms: path.min_rtt.map(|rtt| rtt.as_secs_f64() * 1e3),
            // A lower bound says nothing of where the bandwidth ends.
            rate_mbit: path
                .bandwidth
                .filter(|bandwidth| !bandwidth.at_least)
                .map(|bandwidth| bandwidth.rate as f64 / 1e6),
            // What the path loses by itself; what a full queue drops says more of the sender than of the path.
            loss_percent: path.clear_loss.or(path.loss).map(|loss| loss * 100.0),
            loss_burst: path.loss_burst,
            profile,
            bytes: None,
        }
    }

    /// The attributes of models: names, units and domains.
    pub fn attributes() -> Vec<Attribute> {
        vec![
            Attribute::continuous("rtt [ms]"),
            Attribute::continuous("rate [Mbit/s]"),
            Attribute::continuous("loss [%]"),
            Attribute::continuous("burst [packets]"),
            Attribute::discrete("profile", Profile::ALL.iter().map(ToString::to_string)),
            Attribute::continuous("size [bytes]"),
        ]
    }

    /// The values of [`Features::attributes`].
    pub fn values(&self) -> Vec<Value> {
        let number = |value: Option<f64>| value.map_or(Value::Missing, Value::Continuous);
        let profile = self.profile.and_then(|profile| {
            let place = Profile::ALL.iter().position(|p| *p == profile)?;
            u32::try_from(place).ok()
        });
        vec![
            number(self.rtt_ms),
            number(self.rate_mbit),
            number(self.loss_percent),
            number(self.loss_burst),
            profile.map_or(Value::Missing, Value::Discrete),
            number(self.bytes),
        ]
    }
}
