//! The choice by a trained model.

use std::sync::LazyLock;

use vtl_tree::Model;

use super::{CLASSES, Features};

/// The model that comes with VTL: `vtl select train` made it of `bench/select/rows.csv`.
pub const EMBEDDED: &str = include_str!("model.json");

/// The place of the size among [`Features::attributes`].
const SIZE: usize = 5;

/// What a flow is to travel by, and why.
#[derive(Clone, Debug, PartialEq)]
pub struct Choice {
    /// One of [`CLASSES`].
    pub class: &'static str,
    /// Why, in words for people.
    pub explanation: String,
    /// The share of the training's cases like this one for which the class was right, 0 to 1; 0 where no case was alike,
    /// and the class is the default.
    pub support: f64,
}

/// Why a model cannot choose.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// It is no model, or one of another version.
    #[error(transparent)]
    Model(#[from] vtl_tree::Error),
    /// It has other attributes.
    #[error("model: it asks for other features than this version has: train it anew by `vtl select train`")]
    Attributes,
    /// It has a class that is none of [`CLASSES`].
    #[error("model: its class \"{0}\" is no carrier to choose: train it anew by `vtl select train`")]
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
        let is_same = |(own, other): (&vtl_tree::Attribute, &vtl_tree::Attribute)| {
            use vtl_tree::Domain::{Continuous, Discrete};
            let domain = match (&own.domain, &other.domain) {
                (Continuous { .. }, Continuous { .. }) => true,
                (Discrete { values: a, .. }, Discrete { values: b, .. }) => a == b,
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
        let classes = model.classes().iter().map(known).collect::<Result<_, _>>()?;
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
    /// seen. A size outside counts as the nearest that it has seen: what is true of 16 MB is of more.
    pub fn choose(&self, features: &Features) -> Choice {
        if let Some(why) = self.unfit(features) {
            return Choice {
                class: CLASSES[0],
                explanation: format!("{}, the default: {why}", CLASSES[0]),
                support: 0.0,
            };
        }
        let values = self.clamped(features).values();
        let place = self.model.classify(&values);
        let (class, support) = (self.classes[place], self.model.distribution(&values)[place]);
        let path = self.model.path(&values);
        // What is missing decides nothing: its branches were weighed against each other.
        let words: Vec<String> = (path.iter().filter(|condition| condition.known))
            .map(|condition| self.model.words(condition))
            .collect();
        let why = if words.is_empty() {
            "whatever is known".to_owned()
        } else {
            words.join(", ")
        };
        Choice {
            class,
            explanation: format!("{class}, right for {:.0} % of cases with {why}", support * 100.0),
            support,
        }
    }

    /// Why the model has nothing to say.
    fn unfit(&self, features: &Features) -> Option<String> {
        if features.rtt_ms.is_none() {
            return Some("the path's round-trip time is unknown".to_owned());
        }
        if features.loss_percent.is_none() {
            return Some("the path's loss is unknown".to_owned());
        }
        let values = self.clamped(features).values();
        let outside = self.model.outside(&values);
        let attribute = &self.model.attributes()[*outside.first()?];
        let unit = match attribute.unit.as_str() {
            "" => String::new(),
            unit => format!(" {unit}"),
        };
        let trained = match &attribute.domain {
            vtl_tree::Domain::Continuous { range: Some((min, max)) } => {
                format!("is outside the training's {min} to {max}{unit}")
            }
            _ => "is one that the training has not".to_owned(),
        };
        Some(format!("the {} {trained}", attribute.name))
    }

    fn clamped(&self, features: &Features) -> Features {
        let range = match self.model.attributes()[SIZE].domain {
            vtl_tree::Domain::Continuous { range } => range,
            vtl_tree::Domain::Discrete { .. } => None,
        };
        let clamp = |bytes: f64| range.map_or(bytes, |(min, max)| bytes.max(min).min(max));
        Features {
            bytes: features.bytes.map(clamp),
            ..*features
        }
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
        assert!(far.support > 0.8, "{far:?}");
        assert!(far.explanation.starts_with("graft:stream, right for"));
        let near = Features {
            rtt_ms: Some(5.0),
            rate_mbit: Some(10.0),
            loss_percent: Some(0.0),
            loss_burst: None,
            ..FAR
        };
        let choice = choose(&near);
        assert_eq!(choice.class, "tcp", "{}", choice.explanation);
        assert!(choice.support > 0.5);
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
        assert!(matches!(refused(&EMBEDDED[..EMBEDDED.len() / 2]), Error::Model(_)));
        assert!(matches!(refused(""), Error::Model(_)));
        let other = EMBEDDED.replacen("graft:hybla", "graft:hyena", 1);
        assert_eq!(refused(&other), Error::Class("graft:hyena".into()));
        let other = EMBEDDED.replacen("burst", "bursts", 1);
        assert_eq!(refused(&other), Error::Attributes);
    }
}
