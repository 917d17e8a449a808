//! Conditions on the figures of a path: `rtt >= 300ms and loss > 1% for 2s`, `medium is wifi and signal < 30%`.

use std::{fmt, str::FromStr, time::Duration};

use crate::netmon::{Medium, Metrics};

/// Maximum length of a condition's text, bytes.
const MAX_TEXT: usize = 256;
/// Maximum number of comparisons in a condition.
const MAX_TERMS: usize = 4;
/// Maximum of a time: an hour, in microseconds.
const MAX_TIME: u64 = 3_600_000_000;
/// Maximum of a share, in units of 0.0001 %.
const MAX_SHARE: u64 = 1_000_000;
/// Maximum of a rate, bit/s.
const MAX_RATE: u64 = 10_000_000_000_000;

/// A condition that holds ends when a figure is on the other side of its threshold by this share of it: one part in ten.
const HYSTERESIS: u64 = 10;

/// A figure of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Figure {
    /// The smoothed round-trip time, µs.
    Rtt,
    /// The mean deviation of round-trip times, µs.
    Jitter,
    /// The queueing delay: what the smoothed round-trip time exceeds the minimum by, µs.
    Queueing,
    /// The share of packets lost, in units of 0.0001 %.
    Loss,
    /// The bandwidth that the path has for this host, bit/s of payload.
    Rate,
    /// The rate of the link layer of this host's interface, bit/s.
    LinkRate,
    /// The quality of its signal, in units of 0.0001 %.
    Signal,
    /// Its medium, a place among [`Medium::ALL`].
    Medium,
}

impl Figure {
    /// All figures.
    pub const ALL: [Self; 8] = [
        Self::Rtt,
        Self::Jitter,
        Self::Queueing,
        Self::Loss,
        Self::Rate,
        Self::LinkRate,
        Self::Signal,
        Self::Medium,
    ];

    /// Its name in conditions.
    pub fn name(self) -> &'static str {
        match self {
            Self::Rtt => "rtt",
            Self::Jitter => "jitter",
            Self::Queueing => "queueing",
            Self::Loss => "loss",
            Self::Rate => "rate",
            Self::LinkRate => "link-rate",
            Self::Signal => "signal",
            Self::Medium => "medium",
        }
    }

    /// Whether it is of the link layer.
    pub fn is_of_link(self) -> bool {
        matches!(self, Self::LinkRate | Self::Signal | Self::Medium)
    }

    /// Its units, and how many of the least unit each is; none: it has names.
    fn units(self) -> &'static [(&'static str, u64)] {
        match self {
            Self::Rtt | Self::Jitter | Self::Queueing => &TIMES,
            Self::Loss | Self::Signal => &[("%", 10_000)],
            Self::Rate | Self::LinkRate => &RATES,
            Self::Medium => &[],
        }
    }

    fn max(self) -> u64 {
        match self {
            Self::Rtt | Self::Jitter | Self::Queueing => MAX_TIME,
            Self::Loss | Self::Signal => MAX_SHARE,
            Self::Rate | Self::LinkRate => MAX_RATE,
            Self::Medium => Medium::ALL.len() as u64 - 1,
        }
    }

    /// A value in words.
    fn words(self, value: u64) -> String {
        let medium = usize::try_from(value).ok().and_then(|n| Medium::ALL.get(n));
        match (self, medium) {
            (Self::Medium, Some(medium)) => medium.to_string(),
            _ => Quantity(value, self.units()).to_string(),
        }
    }

    /// Its value in the least unit, and whether that is a lower bound.
    fn of(self, metrics: &Metrics) -> Option<(u64, bool)> {
        // Rounded: 0 to 1 million.
        let share = |share: f64| (share * MAX_SHARE as f64).round() as u64;
        let micros = |time: Option<Duration>| Some((u64::try_from(time?.as_micros()).ok()?, false));
        match self {
            Self::Rtt => micros(metrics.rtt),
            Self::Jitter => micros(metrics.rtt_variance),
            Self::Queueing => micros(metrics.queueing()),
            Self::Loss => Some((share(metrics.loss?), false)),
            Self::Rate => metrics.bandwidth.map(|b| (b.rate, b.at_least)),
            Self::LinkRate => Some((metrics.link.rate?, false)),
            Self::Signal => Some((share(metrics.link.signal?), false)),
            Self::Medium => {
                let medium = metrics.link.medium?;
                let place = Medium::ALL.iter().position(|known| *known == medium)?;
                Some((place as u64, false))
            }
        }
    }
}

impl fmt::Display for Figure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

const TIMES: [(&str, u64); 3] = [("s", 1_000_000), ("ms", 1_000), ("us", 1)];
const RATES: [(&str, u64); 4] = [
    ("Gbit/s", 1_000_000_000),
    ("Mbit/s", 1_000_000),
    ("kbit/s", 1_000),
    ("bit/s", 1),
];

/// What [`parse_rate`] takes: also single letters.
const SHORT_RATES: [(&str, u64); 7] = [
    ("G", 1_000_000_000),
    ("M", 1_000_000),
    ("k", 1_000),
    RATES[0],
    RATES[1],
    RATES[2],
    RATES[3],
];

/// How a figure is compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Relation {
    /// `>=`
    AtLeast,
    /// `>`
    Above,
    /// `<=`
    AtMost,
    /// `<`
    Below,
    /// `is`, of what has names.
    Is,
}

impl Relation {
    const ALL: [(&'static str, Self); 5] = [
        (">=", Self::AtLeast),
        (">", Self::Above),
        ("<=", Self::AtMost),
        ("<", Self::Below),
        ("is", Self::Is),
    ];
}

impl fmt::Display for Relation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut all = Self::ALL.iter();
        let sign = all.find_map(|(sign, relation)| (relation == self).then_some(*sign));
        f.write_str(sign.unwrap_or_default())
    }
}

/// One comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Term {
    /// The figure,
    pub figure: Figure,
    /// how it is compared,
    pub relation: Relation,
    /// with what, in the figure's least unit, above 0; or the place of a name.
    pub threshold: u64,
}

/// What the state of a path says about a condition.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Reading {
    /// The condition holds.
    Holds,
    /// It does not, but is near: one that has held goes on.
    IsNear,
    /// Nobody knows.
    Unknown,
    /// It is far from holding: one that has held ends.
    IsFar,
}

impl Term {
    fn read(&self, metrics: &Metrics) -> Reading {
        let Some((value, at_least)) = self.figure.of(metrics) else {
            return Reading::Unknown;
        };
        let margin = self.threshold / HYSTERESIS;
        let (holds, is_far) = match self.relation {
            Relation::AtLeast => (value >= self.threshold, value < self.threshold - margin),
            Relation::Above => (value > self.threshold, value < self.threshold - margin),
            Relation::AtMost => (value <= self.threshold, value > self.threshold + margin),
            Relation::Below => (value < self.threshold, value > self.threshold + margin),
            Relation::Is => (value == self.threshold, value != self.threshold),
        };
        let is_high = matches!(self.relation, Relation::AtLeast | Relation::Above);
        match (holds, is_far) {
            // A lower bound says only what the figure exceeds.
            (true, _) if at_least && !is_high => Reading::Unknown,
            (false, _) if at_least && is_high => Reading::Unknown,
            (true, _) => Reading::Holds,
            (false, true) => Reading::IsFar,
            (false, false) => Reading::IsNear,
        }
    }
}

impl fmt::Display for Term {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let threshold = self.figure.words(self.threshold);
        write!(f, "{} {} {threshold}", self.figure, self.relation)
    }
}

/// A condition on the figures of a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Condition {
    /// The comparisons; all must hold. At least one.
    pub terms: Vec<Term>,
    /// How long they must hold before the condition does, and how long one must be far from holding before it ends.
    pub hold: Duration,
}

impl Condition {
    pub(super) fn read(&self, metrics: &Metrics) -> Reading {
        let readings = self.terms.iter().map(|term| term.read(metrics));
        readings.max().unwrap_or(Reading::Unknown)
    }

    /// The path's values of the figures that it compares, in words.
    pub fn figures(&self, metrics: &Metrics) -> String {
        let words = self.terms.iter().map(|term| {
            let figure = term.figure;
            match figure.of(metrics) {
                Some((value, at_least)) => {
                    let more = if at_least { " or more" } else { "" };
                    format!("{figure} {}{more}", figure.words(value))
                }
                None => format!("{figure} unknown"),
            }
        });
        words.collect::<Vec<_>>().join(", ")
    }
}

impl fmt::Display for Condition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, term) in self.terms.iter().enumerate() {
            let and = if i > 0 { " and " } else { "" };
            write!(f, "{and}{term}")?;
        }
        if !self.hold.is_zero() {
            write!(f, " for ")?;
            let micros = u64::try_from(self.hold.as_micros()).unwrap_or(u64::MAX);
            quantity(f, micros, &TIMES)?;
        }
        Ok(())
    }
}

struct Quantity(u64, &'static [(&'static str, u64)]);

impl fmt::Display for Quantity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        quantity(f, self.0, self.1)
    }
}

/// Writes an amount in the largest unit that fits it, exactly.
fn quantity(f: &mut fmt::Formatter<'_>, value: u64, units: &[(&str, u64)]) -> fmt::Result {
    let fits = units.iter().find(|(_, size)| value >= *size);
    let Some((unit, size)) = fits.or(units.last()) else {
        return Ok(());
    };
    let (whole, mut rest, mut size) = (value / size, value % size, *size);
    write!(f, "{whole}")?;
    if rest > 0 {
        f.write_str(".")?;
    }
    while rest > 0 {
        size /= 10;
        write!(f, "{}", rest / size)?;
        rest %= size;
    }
    f.write_str(unit)
}

/// What is wrong with a condition.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConditionError {
    /// It is longer than any needs to be.
    #[error("a condition, a time or a rate has at most {MAX_TEXT} bytes")]
    TooLong,
    /// There is nothing, or not what belongs there.
    #[error("{found}, where {wanted} belongs: write a condition like \"rtt >= 300ms for 200ms\"")]
    Form {
        /// What is there.
        found: String,
        /// What should be.
        wanted: &'static str,
    },
    /// The figure is unknown.
    #[error("there is no figure \"{0}\": there are {names}", names = names())]
    Figure(String),
    /// The unit is missing, or not one of the figure's.
    #[error("\"{found}\" is no unit of {of}: take {units}")]
    Unit {
        /// What is there; empty: nothing.
        found: String,
        /// Of what.
        of: &'static str,
        /// What may be there.
        units: String,
    },
    /// The number is none, or out of range.
    #[error("\"{found}\" is no number above 0 and up to {max}")]
    Number {
        /// What is there.
        found: String,
        /// The maximum, with its unit.
        max: String,
    },
    /// There is no such name.
    #[error("\"{found}\" is no {of}: take {names}")]
    Name {
        /// What is there.
        found: String,
        /// Of what.
        of: &'static str,
        /// What may be there.
        names: String,
    },
    /// There are too many comparisons.
    #[error("a condition has at most {MAX_TERMS} comparisons")]
    TooMany,
}

fn names() -> String {
    Figure::ALL.map(Figure::name).join(", ")
}

/// The words of a text that is not too long.
fn words(text: &str) -> Result<Words<'_>, ConditionError> {
    match text.len() <= MAX_TEXT {
        true => Ok(Words(text)),
        false => Err(ConditionError::TooLong),
    }
}

impl FromStr for Condition {
    type Err = ConditionError;

    /// Parses comparisons with "and" between them, and perhaps "for" and a time behind them.
    fn from_str(text: &str) -> Result<Self, ConditionError> {
        let mut words = words(text)?;
        let mut terms = Vec::new();
        let mut hold = Duration::ZERO;
        loop {
            if terms.len() == MAX_TERMS {
                return Err(ConditionError::TooMany);
            }
            terms.push(words.term()?);
            match words.take() {
                None => break,
                Some(word) if word.eq_ignore_ascii_case("and") => {}
                Some(word) if word.eq_ignore_ascii_case("for") => {
                    let micros = words.quantity("a time", &TIMES, MAX_TIME)?;
                    hold = Duration::from_micros(micros);
                    match words.take() {
                        None => break,
                        more => return Err(form(more, "the end")),
                    }
                }
                more => return Err(form(more, "\"and\", \"for\" or the end")),
            }
        }
        Ok(Self { terms, hold })
    }
}

/// Parses a time: `200ms`, `10s`.
///
/// # Errors
/// One sentence: what is wrong, and what is allowed.
pub fn parse_time(text: &str) -> Result<Duration, ConditionError> {
    let mut words = words(text)?;
    let micros = words.quantity("a time", &TIMES, MAX_TIME)?;
    match words.take() {
        None => Ok(Duration::from_micros(micros)),
        more => Err(form(more, "the end")),
    }
}

/// Parses a rate: `5M`, `500kbit/s`.
///
/// # Errors
/// One sentence: what is wrong, and what is allowed.
pub fn parse_rate(text: &str) -> Result<u64, ConditionError> {
    let mut words = words(text)?;
    let bits = words.quantity("a rate", &SHORT_RATES, MAX_RATE)?;
    match words.take() {
        None => Ok(bits),
        more => Err(form(more, "the end")),
    }
}

/// A time in the largest unit that fits it, as conditions and rules have it.
pub fn time_in_words(time: Duration) -> String {
    let micros = u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
    Quantity(micros, &TIMES).to_string()
}

/// A rate in the largest unit that fits it.
pub fn rate_in_words(bits: u64) -> String {
    Quantity(bits, &RATES).to_string()
}

fn form(found: Option<&str>, wanted: &'static str) -> ConditionError {
    let found = match found {
        Some(word) => format!("there is \"{}\"", word.escape_debug()),
        None => "there is nothing".into(),
    };
    ConditionError::Form { found, wanted }
}

/// What is left of a condition's text.
struct Words<'a>(&'a str);

impl<'a> Words<'a> {
    /// The next word: signs of comparison, a number, or anything else up to one of these or a blank.
    fn peek(&self) -> Option<&'a str> {
        #[derive(PartialEq)]
        enum Class {
            Blank,
            Sign,
            Digit,
            Other,
        }
        let class = |c: char| match c {
            '<' | '>' | '=' => Class::Sign,
            '0'..='9' | '.' => Class::Digit,
            c if c.is_whitespace() => Class::Blank,
            _ => Class::Other,
        };
        let text = self.0.trim_start();
        let first = class(text.chars().next()?);
        let end = text.find(|c| class(c) != first).unwrap_or(text.len());
        Some(&text[..end])
    }

    fn take(&mut self) -> Option<&'a str> {
        let word = self.peek()?;
        self.0 = &self.0.trim_start()[word.len()..];
        Some(word)
    }

    fn term(&mut self) -> Result<Term, ConditionError> {
        let name = self.take().ok_or_else(|| form(None, "a figure"))?;
        let mut all = Figure::ALL.into_iter();
        let figure = all
            .find(|figure| name.eq_ignore_ascii_case(figure.name()))
            .ok_or_else(|| ConditionError::Figure(name.escape_debug().to_string()))?;
        let sign = self.take();
        if figure == Figure::Medium {
            return self.medium(sign);
        }
        let mut all = Relation::ALL
            .into_iter()
            .filter(|(_, of)| *of != Relation::Is);
        let relation = all
            .find_map(|(text, relation)| (sign == Some(text)).then_some(relation))
            .ok_or_else(|| form(sign, ">=, >, <= or <"))?;
        Ok(Term {
            figure,
            relation,
            threshold: self.quantity(figure.name(), figure.units(), figure.max())?,
        })
    }

    /// A comparison of the medium, behind its name and `sign`.
    fn medium(&mut self, sign: Option<&str>) -> Result<Term, ConditionError> {
        if !sign.is_some_and(|sign| sign.eq_ignore_ascii_case("is")) {
            return Err(form(sign, "\"is\""));
        }
        let name = self.take().ok_or_else(|| form(None, "a medium"))?;
        let is_it = |medium: &Medium| name.eq_ignore_ascii_case(medium.name());
        let place = Medium::ALL.iter().position(is_it);
        Ok(Term {
            figure: Figure::Medium,
            relation: Relation::Is,
            threshold: place.ok_or_else(|| ConditionError::Name {
                found: name.escape_debug().to_string(),
                of: "medium",
                names: Medium::ALL.map(Medium::name).join(", "),
            })? as u64,
        })
    }

    /// A number with a unit, in the least unit: 1 to `max`.
    fn quantity(
        &mut self,
        of: &'static str,
        units: &'static [(&'static str, u64)],
        max: u64,
    ) -> Result<u64, ConditionError> {
        let word = self.take().ok_or_else(|| form(None, "a number"))?;
        let is_link = |word: &&str| ["and", "for"].iter().any(|w| word.eq_ignore_ascii_case(w));
        let unit = self.peek().filter(|word| !is_link(word));
        let number = || ConditionError::Number {
            found: word.escape_debug().to_string(),
            max: Quantity(max, units).to_string(),
        };
        // Not what else a float can be: signs, exponents, infinity.
        let figure: f64 = match word.chars().all(|c| c.is_ascii_digit() || c == '.') {
            true => word.parse().map_err(|_| number())?,
            false => return Err(number()),
        };
        let is_it = |name: &str| {
            let short = name.strip_suffix("/s").unwrap_or(name);
            let is = |name| unit.is_some_and(|unit| unit.eq_ignore_ascii_case(name));
            is(name) || is(short)
        };
        let found = units.iter().find(|(name, _)| is_it(name));
        let (_, size) = found.ok_or_else(|| ConditionError::Unit {
            found: unit.unwrap_or_default().escape_debug().to_string(),
            of,
            units: units.iter().map(|(n, _)| *n).collect::<Vec<_>>().join(", "),
        })?;
        self.take();
        let value = (figure * *size as f64).round();
        // Truncated never: whole, and compared before.
        match (1.0..=max as f64).contains(&value) {
            true => Ok(value as u64),
            false => Err(number()),
        }
    }
}
