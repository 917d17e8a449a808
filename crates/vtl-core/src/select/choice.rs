//! The choice by a trained model.

use std::fmt;
use std::mem::discriminant;
use std::sync::LazyLock;

use vtl_tree::{Attribute, Condition, Domain, Model, Value};

use super::{CLASSES, Features, VIEWS};

/// The model that comes with VTL: `vtl select train` made it of `bench/select/rows.csv`.
pub const EMBEDDED: &str = include_str!("model.jsonl");

/// Round trips below this are shorter than any that was trained with.
const NEAR_MS: f64 = 1.0;
/// By which factor a feature may lie outside what training has seen, and count as on its edge: as exactly are paths measured.
const SLACK: f64 = 1.1;
/// The place of the size among [`Features::attributes`], and before what follows from the others.
const SIZE: usize = 5;

/// Why a carrier is chosen.
#[derive(Clone, Debug, PartialEq)]
pub struct Explanation {
    /// The carrier, one of [`CLASSES`].
    pub class: &'static str,
    /// Why the model was not asked, and the carrier is the default; `None` if it was.
    pub default_because: Option<String>,
    /// The way through a tree that chooses the class, from its root.
    pub path: Vec<Step>,
    /// Of what all classes together won over the worst one, in the training's cases like this, the share that each won, 0
    /// to 1, the greatest first: on the average of all trees. Where three are equally good it is a third.
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
    /// There is not one for each of [`VIEWS`].
    #[error(
        "model: there are {0}, one a line, and this version needs 4: train them anew by `vtl select train`"
    )]
    Count(usize),
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

/// Chooses by models.
#[derive(Clone, Debug)]
pub struct Selector {
    /// In the order of [`VIEWS`].
    models: Vec<Model>,
    /// Of each class of the models.
    classes: Vec<&'static str>,
}

impl Selector {
    /// A selector with models that `vtl select train` has written, one a line (jsonlines.org).
    ///
    /// # Errors
    /// [`Error`]: `json` may come from anybody.
    pub fn from_json(json: &[u8]) -> Result<Self, Error> {
        let lines = json.split(|byte| *byte == b'\n');
        let lines: Vec<&[u8]> = lines.filter(|line| !line.is_empty()).collect();
        if lines.len() != VIEWS.len() {
            return Err(Error::Count(lines.len()));
        }
        let models = lines.into_iter().map(Model::from_json);
        let models: Vec<Model> = models.collect::<Result<_, _>>()?;
        let mut classes = Vec::new();
        for model in &models {
            classes = Self::classes(model)?;
            if model.classes() != models[0].classes() {
                return Err(Error::Attributes);
            }
        }
        Ok(Self { models, classes })
    }

    /// The classes of a model, which must have the attributes of this version.
    fn classes(model: &Model) -> Result<Vec<&'static str>, Error> {
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
        model.classes().iter().map(known).collect()
    }

    /// The selector with the model that comes with VTL.
    pub fn embedded() -> &'static Self {
        static SELECTOR: LazyLock<Selector> = LazyLock::new(|| {
            Selector::from_json(EMBEDDED.as_bytes()).expect("a test parses the model")
        });
        &SELECTOR
    }

    /// The model for what is known, and that.
    fn model(&self, features: &Features) -> (&Model, Features) {
        let view = features.view();
        let seen = features.seen(view);
        (&self.models[view], seen.unwrap_or(*features))
    }

    /// Chooses a carrier, one of [`CLASSES`]. The default where the path's delay or loss is unknown, or a feature lies
    /// outside what training has seen, by more than a tenth. A size outside counts as the nearest that it has seen: what is
    /// true of 16 MB is of more.
    pub fn choose(&self, features: &Features) -> &'static str {
        let (model, features) = self.model(features);
        let values = clamped(model, &features);
        match unfit(model, &features, &values) {
            Some(_) => default_for(&features),
            None => self.classes[model.classify(&values)],
        }
    }

    /// Why [`Selector::choose`] chooses what it does.
    pub fn explain(&self, features: &Features) -> Explanation {
        let (model, features) = self.model(features);
        let values = clamped(model, &features);
        if let Some(why) = unfit(model, &features, &values) {
            return Explanation {
                class: default_for(&features),
                default_because: Some(why),
                path: Vec::new(),
                shares: Vec::new(),
            };
        }
        let path = model.path(&values);
        let is_same = |a: &Condition, b: &Condition| {
            a.attribute == b.attribute && discriminant(&a.relation) == discriminant(&b.relation)
        };
        let step = |(place, condition): (usize, &Condition)| Step {
            attribute: model.attributes()[condition.attribute].name.clone(),
            condition: model.words(condition),
            known: condition.known,
            // A value that is missing bounds nothing.
            closest: !path[place + 1..]
                .iter()
                .any(|later| is_same(later, condition)),
        };
        let shares = model.distribution(&values);
        let mut shares: Vec<_> = self.classes.iter().copied().zip(shares).collect();
        // The sort is stable: the simpler of equal ones comes first.
        shares.sort_by(|a, b| b.1.total_cmp(&a.1));
        Explanation {
            class: self.classes[model.classify(&values)],
            default_because: None,
            path: path.iter().enumerate().map(step).collect(),
            shares,
        }
    }
}

/// What is chosen where the model has nothing to say: TCP, which BBR takes over where the path loses packets. As the system
/// has it where round trips are shorter than queues that could be told from them: what gets lost there is the sender's doing.
fn default_for(features: &Features) -> &'static str {
    let is_near = features.rtt_ms.is_some_and(|rtt| rtt < NEAR_MS);
    CLASSES[usize::from(!is_near)]
}

/// Why the model has nothing to say on values that are [`clamped`].
fn unfit(model: &Model, features: &Features, values: &[Value]) -> Option<String> {
    // NaN is what a division by nothing gives.
    let is_unknown = |x: Option<f64>| x.is_none_or(f64::is_nan);
    if is_unknown(features.rtt_ms) {
        return Some("the path's round-trip time is unknown".to_owned());
    }
    if is_unknown(features.loss_percent) {
        return Some("the path's loss is unknown".to_owned());
    }
    let attribute = &model.attributes()[*model.outside(values).first()?];
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

/// The features' values, with those at the edge of the training's ranges that are just outside. What follows from the size
/// follows from the clamped one.
fn clamped(model: &Model, features: &Features) -> Vec<Value> {
    let within = |bytes: f64| match &model.attributes()[SIZE].domain {
        Domain::Continuous {
            range: Some((min, max)),
        } if !bytes.is_nan() => bytes.max(*min).min(*max),
        _ => bytes,
    };
    let features = Features {
        bytes: features.bytes.map(within),
        ..*features
    };
    let clamp = |(place, value): (usize, Value)| {
        let (Value::Continuous(x), Domain::Continuous { range: Some(range) }) =
            (value, &model.attributes()[place].domain)
        else {
            return value;
        };
        let (min, max) = *range;
        let near = (min / SLACK..=max * SLACK).contains(&x) || place >= SIZE && !x.is_nan();
        Value::Continuous(if near { x.max(min).min(max) } else { x })
    };
    let values = features.values();
    values.into_iter().enumerate().map(clamp).collect()
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
        for [rate, size] in VIEWS {
            let far = Features {
                rate_mbit: FAR.rate_mbit.filter(|_| rate),
                bytes: FAR.bytes.filter(|_| size),
                ..FAR
            };
            let far = explain(&far);
            assert!(far.class.starts_with("graft:"), "rate {rate}, size {size}");
            // Nothing is asked that the model of this view has not seen.
            assert!(far.path.iter().all(|step| step.known), "{far:?}");
            assert!(size || !far.to_string().contains("size"), "{far}");
        }
    }

    #[test]
    fn choose__the_length_of_a_stream_says_nothing() {
        let stream = |bytes| Features {
            profile: Some(Profile::TimeSensitive),
            bytes,
            ..FAR
        };
        let without = explain(&stream(None));
        assert_eq!(without.default_because, None);
        assert_eq!(explain(&stream(Some(1e6))), without);
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
            let is_near = features.rtt_ms == Some(0.2);
            let class = CLASSES[usize::from(!is_near)];
            assert_eq!((choice.class, choice.shares.len()), (class, 0), "{choice}");
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
        let cut = &EMBEDDED[..EMBEDDED.len() - 100];
        assert!(matches!(refused(cut), Error::Model(_)));
        assert_eq!(refused(""), Error::Count(0));
        let other = EMBEDDED.replace("graft:hybla", "graft:hyena");
        assert_eq!(refused(&other), Error::Class("graft:hyena".into()));
        let other = EMBEDDED.replacen("burst", "bursts", 1);
        assert_eq!(refused(&other), Error::Attributes);
        let lines: Vec<&str> = EMBEDDED.lines().collect();
        assert_eq!(refused(&lines[..3].join("\n")), Error::Count(3));
        // Those of one model in another order.
        let other = EMBEDDED.replacen(r#""tcp","tcp:bbr""#, r#""tcp:bbr","tcp""#, 1);
        assert_eq!(refused(&other), Error::Attributes);
    }
}
