//! The choice by a trained model.

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

/// What a flow is to travel by, and why.
#[derive(Clone, Debug, PartialEq)]
pub struct Choice {
    /// One of [`CLASSES`].
    pub class: &'static str,
    /// Why, in words for people.
    pub explanation: String,
    /// How clear it is: of what all classes together won over the worst one, in the training's cases like this one, the
    /// share that the class won, 0 to 1. Where three are equally good it is a third; 0 where no case was alike, and the
    /// class is the default.
    pub support: f64,
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

    /// Chooses a carrier. The default where the path's delay or loss is unknown, or a feature lies outside what training has
    /// seen, by more than a tenth. A size outside counts as the nearest that it has seen: what is true of 16 MB is of more.
    pub fn choose(&self, features: &Features) -> Choice {
        let values = self.clamped(features);
        if let Some(why) = self.unfit(features, &values) {
            return Choice {
                class: CLASSES[0],
                explanation: format!("{}, the default: {why}", CLASSES[0]),
                support: 0.0,
            };
        }
        let place = self.model.classify(&values);
        let shares = self.model.distribution(&values);
        let class = self.classes[place];
        let path = self.model.path(&values);
        // What is missing decides nothing: its branches were weighed against each other.
        // Of several bounds on the same side the last is the closest.
        let is_same = |a: &Condition, b: &Condition| {
            a.attribute == b.attribute && discriminant(&a.relation) == discriminant(&b.relation)
        };
        let counts = |(place, condition): &(usize, &Condition)| {
            condition.known
                && !path[place + 1..]
                    .iter()
                    .any(|later| is_same(later, condition))
        };
        let words: Vec<String> = (path.iter().enumerate().filter(counts))
            .map(|(_, condition)| self.model.words(condition))
            .collect();
        let when = match words.as_slice() {
            [] => String::new(),
            words => format!(" with {}", words.join(", ")),
        };
        // The best first; the sort is stable, so that the simpler of equal ones comes first.
        let mut ranks: Vec<usize> = (0..shares.len()).collect();
        ranks.sort_by(|a, b| shares[*b].total_cmp(&shares[*a]));
        let rank =
            |place: &usize| format!("{} {:.0}", self.classes[*place], shares[*place] * 100.0);
        let ranks: Vec<String> = ranks.iter().map(rank).collect();
        let ranks = ranks.join(", ");
        Choice {
            class,
            explanation: format!(
                "{class}: in the training's cases{when} the shares of what was won are {ranks} %"
            ),
            support: shares[place],
        }
    }

    /// Why the model has nothing to say on values that are [`Selector::clamped`].
    fn unfit(&self, features: &Features, values: &[Value]) -> Option<String> {
        if features.rtt_ms.is_none() {
            return Some("the path's round-trip time is unknown".to_owned());
        }
        if features.loss_percent.is_none() {
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

/// Chooses a carrier by the model that comes with VTL: see [`Selector::choose`].
pub fn choose(features: &Features) -> Choice {
    Selector::embedded().choose(features)
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

    #[test]
    fn choose__tells_far_and_lossy_from_near_and_clean() {
        let far = choose(&FAR);
        assert_eq!(far.class, "graft:stream", "{}", far.explanation);
        assert!(far.support > 0.4, "{far:?}");
        let start = "graft:stream: in the training's cases with ";
        assert!(far.explanation.starts_with(start), "{far:?}");
        assert!(far.explanation.contains("won are graft:stream "), "{far:?}");
        assert_eq!(far.explanation.matches("rtt > ").count(), 1, "{far:?}");
        let near = Features {
            rtt_ms: Some(5.0),
            rate_mbit: Some(10.0),
            loss_percent: Some(0.0),
            loss_burst: None,
            profile: Some(Profile::TimeAndLossSensitive),
            bytes: Some(1e6),
        };
        let choice = choose(&near);
        assert_eq!(choice.class, "tcp", "{}", choice.explanation);
        assert!(choice.support > 0.2, "{choice:?}");
    }

    #[test]
    fn choose__does_without_size_and_rate() {
        let far = Features {
            rate_mbit: None,
            bytes: None,
            ..FAR
        };
        let choice = choose(&far);
        assert_eq!(choice.class, "graft:stream");
        assert!(!choice.explanation.contains("missing"), "{choice:?}");
    }

    #[test]
    fn choose__gives_the_default_and_the_reason_outside_the_training() {
        for (features, reason) in [
            (Features::default(), "round-trip time is unknown"),
            (
                Features {
                    loss_percent: None,
                    ..FAR
                },
                "loss is unknown",
            ),
            (
                Features {
                    rtt_ms: Some(0.2),
                    ..FAR
                },
                "the rtt is outside the training's 1",
            ),
            (
                Features {
                    loss_percent: Some(60.0),
                    ..FAR
                },
                "the loss is outside",
            ),
            (
                Features {
                    profile: Some(Profile::Insensitive),
                    ..FAR
                },
                "the profile is one that the training has not",
            ),
        ] {
            let choice = choose(&features);
            assert_eq!((choice.class, choice.support), ("tcp", 0.0));
            assert!(choice.explanation.contains(reason), "{choice:?}");
        }
    }

    #[test]
    fn choose__more_bytes_than_measured_count_as_the_most() {
        let huge = Features {
            bytes: Some(1e12),
            ..FAR
        };
        assert_eq!(choose(&huge), choose(&FAR.with_bytes(16_777_216.0)));
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
