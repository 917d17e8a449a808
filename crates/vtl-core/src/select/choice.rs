//! The choice by a trained model.

use std::fmt;
use std::mem::discriminant;
use std::sync::LazyLock;

use vtl_tree::{Attribute, Condition, Domain, Model, Value};

use super::{CLASSES, Features};

/// The model that comes with VTL: `vtl select train` made it of `bench/select/rows.csv`.
pub const EMBEDDED: &str = include_str!("model.json");

/// By which factor a feature may lie outside what training has seen, and count as on its edge: as exactly are paths measured.
const SLACK: f64 = 1.1;
/// The place of the size among [`Features::attributes`].
const SIZE: usize = 5;

/// Why a carrier is chosen.
#[derive(Clone, Debug, PartialEq)]
pub struct Explanation {
    /// The carrier, one of [`CLASSES`].
    pub class: &'static str,
    /// Why the model was not asked, and the carrier is the default; `None` if it was.
    pub default_because: Option<String>,
    /// The way through the tree, from its root.
    pub path: Vec<Step>,
    /// Of what all classes together won over the worst one, in the training's cases at the path's end, the share that each
    /// won, 0 to 1, the greatest first. Where three are equally good it is a third.
    pub shares: Vec<(&'static str, f64)>,
}

/// A test on the way through a tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// The attribute that is tested, as in [`Features::attributes`].
    pub attribute: String,
    /// What holds on the branch that was taken: `rtt > 8.5 ms`.
    pub condition: String,
    /// Whether the feature's value decided. If not, it is missing: all branches count, each as many of the training's
    /// cases as took it, and this is the one that most of them took.
    pub known: bool,
    /// Whether no later test bounds the same attribute on the same side.
    pub closest: bool,
}

/// In one line.
impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(why) = &self.default_because {
            return write!(f, "{}, the default: {why}", self.class);
        }
        write!(f, "{}: in the training's cases", self.class)?;
        let mut word = " with ";
        for step in self.path.iter().filter(|step| step.known && step.closest) {
            write!(f, "{word}{}", step.condition)?;
            word = ", ";
        }
        f.write_str(" the shares of what was won are ")?;
        for (place, (class, share)) in self.shares.iter().enumerate() {
            let comma = if place == 0 { "" } else { ", " };
            write!(f, "{comma}{class} {:.0}", share * 100.0)?;
        }
        f.write_str(" %")
    }
}

/// Why a model cannot choose.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// It is no model, or one of another version.
    #[error(transparent)]
    Model(#[from] vtl_tree::Error),
    /// It has other attributes.
    #[error(
        "model: it asks for other features than this version has: train it anew by `vtl select train`"
    )]
    Attributes,
    /// It has a class that is none of [`CLASSES`].
    #[error(
        "model: its class \"{0}\" is no carrier to choose: train it anew by `vtl select train`"
    )]
    Class(String),
}

/// Chooses by a model.
#[derive(Clone, Debug)]
pub struct Selector {
    model: Model,
    /// Of each class of the model.
    classes: Vec<&'static str>,
}

impl Selector {
    /// A selector with a model that `vtl select train` has written.
    ///
    /// # Errors
    /// [`Error`]: `json` may come from anybody.
    pub fn from_json(json: &[u8]) -> Result<Self, Error> {
        let model = Model::from_json(json)?;
        let is_same = |(own, other): (&Attribute, &Attribute)| {
            let domain = match (&own.domain, &other.domain) {
                (Domain::Continuous { .. }, Domain::Continuous { .. }) => true,
                (Domain::Discrete { values: a, .. }, Domain::Discrete { values: b, .. }) => a == b,
                _ => false,
            };
            domain && (&own.name, &own.unit) == (&other.name, &other.unit)
        };
        let (own, wanted) = (model.attributes(), Features::attributes());
        if own.len() != wanted.len() || !own.iter().zip(&wanted).all(is_same) {
            return Err(Error::Attributes);
        }
        let known = |class: &String| {
            let found = CLASSES.into_iter().find(|known| known == class);
            found.ok_or_else(|| Error::Class(class.escape_debug().to_string()))
        };
        let classes = model
            .classes()
            .iter()
            .map(known)
            .collect::<Result<_, _>>()?;
        Ok(Self { model, classes })
    }

    /// The selector with the model that comes with VTL.
    pub fn embedded() -> &'static Self {
        static SELECTOR: LazyLock<Selector> = LazyLock::new(|| {
            Selector::from_json(EMBEDDED.as_bytes()).expect("a test parses the model")
        });
        &SELECTOR
    }

    /// Chooses a carrier, one of [`CLASSES`]. The default where the path's delay or loss is unknown, or a feature lies
    /// outside what training has seen, by more than a tenth. A size outside counts as the nearest that it has seen: what is
    /// true of 16 MB is of more.
    pub fn choose(&self, features: &Features) -> &'static str {
        let values = self.clamped(features);
        match self.unfit(features, &values) {
            Some(_) => CLASSES[0],
            None => self.classes[self.model.classify(&values)],
        }
    }

    /// Why [`Selector::choose`] chooses what it does.
    pub fn explain(&self, features: &Features) -> Explanation {
        let values = self.clamped(features);
        if let Some(why) = self.unfit(features, &values) {
            return Explanation {
                class: CLASSES[0],
                default_because: Some(why),
                path: Vec::new(),
                shares: Vec::new(),
            };
        }
        let path = self.model.path(&values);
        let is_same = |a: &Condition, b: &Condition| {
            a.attribute == b.attribute && discriminant(&a.relation) == discriminant(&b.relation)
        };
        let step = |(place, condition): (usize, &Condition)| Step {
            attribute: self.model.attributes()[condition.attribute].name.clone(),
            condition: self.model.words(condition),
            known: condition.known,
            // A value that is missing bounds nothing.
            closest: !path[place + 1..]
                .iter()
                .any(|later| is_same(later, condition)),
        };
        let shares = self.model.distribution(&values);
        let mut shares: Vec<_> = self.classes.iter().copied().zip(shares).collect();
        // The sort is stable: the simpler of equal ones comes first.
        shares.sort_by(|a, b| b.1.total_cmp(&a.1));
        Explanation {
            class: self.classes[self.model.classify(&values)],
            default_because: None,
            path: path.iter().enumerate().map(step).collect(),
            shares,
        }
    }

    /// Why the model has nothing to say on values that are [`Selector::clamped`].
    fn unfit(&self, features: &Features, values: &[Value]) -> Option<String> {
        // NaN is what a division by nothing gives.
        let is_unknown = |x: Option<f64>| x.is_none_or(f64::is_nan);
        if is_unknown(features.rtt_ms) {
            return Some("the path's round-trip time is unknown".to_owned());
        }
        if is_unknown(features.loss_percent) {
            return Some("the path's loss is unknown".to_owned());
        }
        let attribute = &self.model.attributes()[*self.model.outside(values).first()?];
        let unit = match attribute.unit.as_str() {
            "" => String::new(),
            unit => format!(" {unit}"),
        };
        let trained = match attribute.domain {
            Domain::Continuous {
                range: Some((min, max)),
            } => format!("is outside the training's {min} to {max}{unit}"),
            _ => "is one that the training has not".to_owned(),
        };
        Some(format!("the {} {trained}", attribute.name))
    }

    /// The features' values, with those at the edge of the training's ranges that are just outside.
    fn clamped(&self, features: &Features) -> Vec<Value> {
        let clamp = |(place, value): (usize, Value)| {
            let (Value::Continuous(x), Domain::Continuous { range: Some(range) }) =
                (value, &self.model.attributes()[place].domain)
            else {
                return value;
            };
            let (min, max) = *range;
            let near = (min / SLACK..=max * SLACK).contains(&x) || place == SIZE && !x.is_nan();
            Value::Continuous(if near { x.max(min).min(max) } else { x })
        };
        let values = features.values();
        values.into_iter().enumerate().map(clamp).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::Profile;

    /// A bulk transfer over a satellite that loses packets.
    const FAR: Features = Features {
        rtt_ms: Some(600.0),
        rate_mbit: Some(10.0),
        loss_percent: Some(2.0),
        loss_burst: Some(1.0),
        profile: Some(Profile::LossSensitive),
        bytes: Some(1e7),
    };

    fn explain(features: &Features) -> Explanation {
        let explanation = Selector::embedded().explain(features);
        assert_eq!(Selector::embedded().choose(features), explanation.class);
        explanation
    }

    #[test]
    fn explain__tells_far_and_lossy_from_near_and_clean() {
        let far = explain(&FAR);
        assert_eq!(far.class, "graft:stream", "{far}");
        assert_eq!(far.shares[0].0, "graft:stream");
        assert!(far.shares[0].1 > 0.4, "{far:?}");
        assert!((far.shares.iter().map(|(_, share)| share).sum::<f64>() - 1.0).abs() < 1e-9);
        let text = far.to_string();
        let start = "graft:stream: in the training's cases with ";
        assert!(text.starts_with(start), "{text}");
        assert!(text.contains("won are graft:stream "), "{text}");
        assert_eq!(text.matches("rtt > ").count(), 1, "{text}");
        let near = Features {
            rtt_ms: Some(5.0),
            rate_mbit: Some(10.0),
            loss_percent: Some(0.0),
            loss_burst: None,
            profile: Some(Profile::TimeAndLossSensitive),
            bytes: Some(1e6),
        };
        let near = explain(&near);
        assert_eq!(near.class, "tcp", "{near}");
    }

    #[test]
    fn explain__does_without_size_and_rate() {
        let far = Features {
            rate_mbit: None,
            bytes: None,
            ..FAR
        };
        let far = explain(&far);
        assert_eq!(far.class, "graft:stream");
        let unknown = far.path.iter().filter(|step| !step.known);
        assert!(unknown.clone().count() > 0, "{far:?}");
        for step in unknown {
            assert!(
                ["size", "rate"].contains(&step.attribute.as_str()),
                "{step:?}"
            );
        }
        assert!(!far.to_string().contains("size"), "{far}");
    }

    #[test]
    fn choose__gives_the_default_and_the_reason_outside_the_training() {
        let with = |change: fn(&mut Features)| {
            let mut features = FAR;
            change(&mut features);
            features
        };
        for (features, reason) in [
            (Features::default(), "round-trip time is unknown"),
            (with(|f| f.loss_percent = None), "loss is unknown"),
            (
                with(|f| f.rtt_ms = Some(0.2)),
                "the rtt is outside the training's 1",
            ),
            (
                with(|f| f.rtt_ms = Some(f64::NAN)),
                "round-trip time is unknown",
            ),
            (
                with(|f| f.rtt_ms = Some(f64::INFINITY)),
                "the rtt is outside",
            ),
            (with(|f| f.loss_percent = Some(60.0)), "the loss is outside"),
            (with(|f| f.loss_percent = Some(-1.0)), "the loss is outside"),
            (with(|f| f.loss_percent = Some(f64::NAN)), "loss is unknown"),
            (with(|f| f.rate_mbit = Some(1e9)), "the rate is outside"),
            (
                with(|f| f.profile = Some(Profile::Insensitive)),
                "the profile is one that the training has not",
            ),
        ] {
            let choice = explain(&features);
            assert_eq!((choice.class, choice.shares.len()), ("tcp", 0), "{choice}");
            assert!(choice.to_string().contains(reason), "{choice}");
        }
    }

    #[test]
    fn choose__more_bytes_than_measured_count_as_the_most() {
        let huge = Features {
            bytes: Some(1e12),
            ..FAR
        };
        assert_eq!(explain(&huge), explain(&FAR.with_bytes(16_777_216.0)));
    }

    impl Features {
        fn with_bytes(self, bytes: f64) -> Self {
            Self {
                bytes: Some(bytes),
                ..self
            }
        }
    }

    #[test]
    fn from_json__refuses_what_cannot_choose() {
        let refused = |json: &str| Selector::from_json(json.as_bytes()).unwrap_err();
        assert!(matches!(
            refused(&EMBEDDED[..EMBEDDED.len() / 2]),
            Error::Model(_)
        ));
        assert!(matches!(refused(""), Error::Model(_)));
        let other = EMBEDDED.replacen("graft:hybla", "graft:hyena", 1);
        assert_eq!(refused(&other), Error::Class("graft:hyena".into()));
        let other = EMBEDDED.replacen("burst", "bursts", 1);
        assert_eq!(refused(&other), Error::Attributes);
    }
}
