//! The choice of a carrier by decision trees (thesis, chapter 5): an application's profile and the state of the path
//! go in, a carrier comes out. Training and choosing compute features by the same code, which is here.

mod choice;
mod sure;

use vtl_tree::{Attribute, Value};

use crate::{netmon::Metrics, profile::Profile};

pub use choice::{EMBEDDED, Error, Explanation, Selector, Step};
pub use sure::is_sure;

/// The carriers that a choice is made of, as rules name them, the simplest first.
pub const CLASSES: [&str; 5] = [
    "tcp",
    "tcp:bbr",
    "graft:stream",
    "graft:cubic",
    "graft:hybla",
];
/// By which share a carrier may be slower than the best and still tie with it. Of those that tie the simplest is right.
pub const TIE: f64 = 0.03;

/// Which of a flow's features are known that may not be: rate, size. Each of these views has a model of its own.
pub const VIEWS: [[bool; 2]; 4] = [[true, true], [true, false], [false, true], [false, false]];

/// Bytes of a full packet.
const PACKET: f64 = 1500.0;

/// Packets that fit onto a path: its bandwidth-delay product.
fn packets(rtt_ms: f64, rate_mbit: f64) -> f64 {
    rate_mbit * 1e6 / 8.0 * rtt_ms / 1e3 / PACKET
}

/// What a choice is made by. Trained models have these attributes, in this order: [`Features::attributes`]; those that
/// a view has not are missing.
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

    /// The place of what is known among [`VIEWS`]. How long a stream will be says nothing.
    pub fn view(&self) -> usize {
        let is_known = |x: Option<f64>| x.is_some_and(|x| !x.is_nan());
        let is_stream = self.profile == Some(Profile::TimeSensitive);
        let known = [is_known(self.rate_mbit), is_known(self.bytes) && !is_stream];
        let place = VIEWS.iter().position(|view| *view == known);
        place.expect("all four are there")
    }

    /// The same with what one of [`VIEWS`] knows; `None` if it knows more.
    pub fn seen(&self, view: usize) -> Option<Self> {
        let [rate, size] = VIEWS[view];
        let seen = Self {
            rate_mbit: self.rate_mbit.filter(|_| rate),
            bytes: self.bytes.filter(|_| size),
            ..*self
        };
        (seen.view() == view).then_some(seen)
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
            // What follows from these, as a tree compares one number at a time: the bandwidth-delay product, how often
            // the transfer fills it, and how many packets the path loses of it.
            Attribute::continuous("bdp [packets]"),
            Attribute::continuous("length [bdp]"),
            Attribute::continuous("lost [packets]"),
        ]
    }

    /// The values of [`Features::attributes`].
    pub fn values(&self) -> Vec<Value> {
        let number = |value: Option<f64>| value.map_or(Value::Missing, Value::Continuous);
        let profile = self.profile.and_then(|profile| {
            let place = Profile::ALL.iter().position(|p| *p == profile)?;
            u32::try_from(place).ok()
        });
        let both = self.rtt_ms.zip(self.rate_mbit);
        let bdp = both.map(|(rtt_ms, rate_mbit)| packets(rtt_ms, rate_mbit));
        let length = self.bytes.map(|bytes| bytes / PACKET);
        let lost = length.zip(self.loss_percent);
        vec![
            number(self.rtt_ms),
            number(self.rate_mbit),
            number(self.loss_percent),
            number(self.loss_burst),
            profile.map_or(Value::Missing, Value::Discrete),
            number(self.bytes),
            number(bdp),
            number(length.zip(bdp).map(|(length, bdp)| length / bdp)),
            number(lost.map(|(length, percent)| length * percent / 100.0)),
        ]
    }
}
