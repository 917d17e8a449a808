//! What real flows have shown of carriers: for a destination, measured outcomes correct the model's choice.
//!
//! A few flows by chance, and so alike all others, explore another carrier than the one that is chosen
//! ([`Learner::explore`]). Every flow's outcome is noted ([`Learner::note`]), apart by how much it sent. What an explored
//! carrier did better than the chosen one twice in a row, by more than a tenth and by more than outcomes differ anyway, is
//! chosen from then on ([`Learner::learnt`]). What was learnt ends when it does worse than the model's choice twice in a row,
//! when that choice changes, as the path has, and after [`KNOWN_FOR`] without a confirmation. A carrier that was learnt and
//! given up waits for ten minutes, then twice as long for each time: outcomes that lie or vary make nothing flap.
//!
//! Time and randomness are arguments; time in nanoseconds of any clock that does not go back.

use std::{collections::HashMap, net::IpAddr, time::Duration};

use super::Choice;
use crate::{profile::Profile, select::CLASSES};

/// Share of flows that explore.
pub const EXPLORING: f64 = 0.03;
/// Maximum number of destinations. For one more, the one used longest ago goes.
pub const MAX_DESTINATIONS: usize = 1024;
/// How long an outcome counts, and what was learnt without another outcome that agrees.
pub const KNOWN_FOR: Duration = Duration::from_secs(3600);
/// Bytes that an outcome has to be of: below, it says more of handshakes than of carriers.
pub const MIN_BYTES: u64 = 64 << 10;

/// Outcomes in a row that have to agree.
const AGREE: u32 = 2;
/// By which share an outcome has to be better or worse to count as that.
const MARGIN: f64 = 1.1;
/// By how many mean deviations.
const DEVIATIONS: f64 = 2.0;
/// Weights of a new outcome in the mean of its class, and in the mean deviation.
const GAIN: f64 = 0.25;
/// Time for which a carrier that was learnt and given up is not explored, at first; doubled so often at most.
const GIVEN_UP: Duration = Duration::from_secs(600);
const MAX_DOUBLED: u32 = 8;
/// Outcomes are kept apart by size: from [`MIN_BYTES`], four times as much each.
const SIZES: usize = 4;
/// How many of the model's next best classes are explored.
const EXPLORED: usize = 3;

/// Flows that are learnt of together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Destination {
    /// The other host.
    pub host: IpAddr,
    /// The applications' profile, as far as it is known.
    pub profile: Option<Profile>,
}

/// What became of a flow.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Outcome {
    /// What it went by: a place among [`CLASSES`], `None` the first.
    pub class: Choice,
    /// How much was sent, bytes,
    pub bytes: u64,
    /// and how long that took.
    pub took: Duration,
}

/// What one class has shown for one size of flows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Shown {
    /// The logarithm of the rate in bytes per second, smoothed.
    log_rate: f64,
    /// Its mean deviation.
    deviation: f64,
    /// How many outcomes, and when the latest came, ns.
    count: u64,
    at_ns: u64,
}

impl Shown {
    /// The smoothed rate, bit/s: a geometric mean.
    pub fn rate(&self) -> f64 {
        self.log_rate.exp() * 8.0
    }

    /// How many outcomes there were.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Whether a rate is better (`sign` 1) or worse (-1) than this, beyond doubt.
    fn is_beyond(&self, log_rate: f64, sign: f64) -> bool {
        let differs = (log_rate - self.log_rate) * sign;
        differs > MARGIN.ln() && differs > DEVIATIONS * self.deviation
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct GivenUp {
    until_ns: u64,
    count: u32,
}

/// What is known of one destination.
#[derive(Clone, Debug)]
struct Known {
    /// What the model chooses.
    base: Choice,
    /// What is chosen instead, and when an outcome agreed last, ns.
    learnt: Option<(Choice, u64)>,
    shown: [[Option<Shown>; SIZES]; CLASSES.len()],
    given_up: [GivenUp; CLASSES.len()],
    /// The class that outcomes in a row have said to choose, and how many.
    says: Option<(Choice, u32)>,
    used_ns: u64,
}

/// A row of what is known, for people and machines.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// The destination.
    pub destination: Destination,
    /// What the model chooses.
    pub base: &'static str,
    /// What is chosen instead; `None`: nothing was learnt.
    pub learnt: Option<&'static str>,
    /// Of each class and size, the least bytes of that, what was shown, and its age.
    pub shown: Vec<(&'static str, u64, Shown, Duration)>,
}

/// Learns of flows, by destination.
#[derive(Clone, Debug, Default)]
pub struct Learner {
    known: HashMap<Destination, Known>,
}

fn place(choice: Choice) -> usize {
    choice.filter(|place| *place < CLASSES.len()).unwrap_or(0)
}

fn is_fresh(now_ns: u64, at_ns: u64) -> bool {
    Duration::from_nanos(now_ns.saturating_sub(at_ns)) <= KNOWN_FOR
}

/// The place of a size; `None`: too little.
fn size(bytes: u64) -> Option<usize> {
    let steps = (bytes / MIN_BYTES).checked_ilog(4)?;
    Some((steps as usize).min(SIZES - 1))
}

impl Learner {
    /// The class that flows to a destination go by instead of the model's choice, `base`.
    pub fn learnt(
        &mut self,
        now_ns: u64,
        destination: &Destination,
        base: Choice,
    ) -> Option<Choice> {
        let known = self.known.get_mut(destination)?;
        known.follow(now_ns, base);
        known.learnt.map(|(choice, _)| choice)
    }

    /// Whether a new flow explores, and what: the class of the model's order `wanted`, best first, that was tried least.
    /// `chance`: uniformly from 0 to 1. `None`: it goes by what is chosen.
    pub fn explore(
        &mut self,
        now_ns: u64,
        destination: &Destination,
        wanted: &[Choice],
        chance: f64,
    ) -> Option<Choice> {
        let base = *wanted.first()?;
        if !(0.0..EXPLORING).contains(&chance) {
            return None;
        }
        let known = self.enter(now_ns, *destination, base);
        let chosen = known.chosen();
        let all = wanted.iter().copied().filter(|choice| {
            let given_up = known.given_up[place(*choice)];
            *choice != chosen && given_up.until_ns <= now_ns
        });
        let tried = |choice: &Choice| {
            let shown = known.shown[place(*choice)].iter().flatten();
            shown.map(|of| of.count).sum::<u64>()
        };
        // Of those tried as often, the first.
        all.take(EXPLORED).min_by_key(tried)
    }

    /// Notes the outcome of a flow. `base`: what the model chooses for the destination.
    pub fn note(&mut self, now_ns: u64, destination: Destination, base: Choice, outcome: &Outcome) {
        let seconds = outcome.took.as_secs_f64();
        let (Some(size), true) = (size(outcome.bytes), seconds > 0.0) else {
            return;
        };
        let log_rate = (outcome.bytes as f64 / seconds).ln();
        let known = self.enter(now_ns, destination, base);
        known.judge(now_ns, size, outcome.class, log_rate);
        known.shown[place(outcome.class)][size] =
            Some(known.fresh(now_ns, outcome.class, size).map_or(
                Shown {
                    log_rate,
                    // As TCP's first round trip (RFC 6298): half of what it could be.
                    deviation: MARGIN.ln() / DEVIATIONS,
                    count: 1,
                    at_ns: now_ns,
                },
                |before| before.with(now_ns, log_rate),
            ));
    }

    /// Forgets everything.
    pub fn reset(&mut self) {
        self.known.clear();
    }

    /// All that is known, by destination.
    pub fn rows(&self, now_ns: u64) -> Vec<Row> {
        let mut rows: Vec<Row> = self
            .known
            .iter()
            .map(|(to, of)| of.row(now_ns, *to))
            .collect();
        rows.sort_by_key(|row| row.destination);
        rows
    }

    fn enter(&mut self, now_ns: u64, destination: Destination, base: Choice) -> &mut Known {
        if self.known.len() >= MAX_DESTINATIONS && !self.known.contains_key(&destination) {
            let oldest = self.known.iter().min_by_key(|(_, known)| known.used_ns);
            if let Some(oldest) = oldest.map(|(destination, _)| *destination) {
                self.known.remove(&oldest);
            }
        }
        let known = self
            .known
            .entry(destination)
            .or_insert_with(|| Known::new(base));
        known.follow(now_ns, base);
        known.used_ns = now_ns;
        known
    }
}

impl Shown {
    fn with(self, now_ns: u64, log_rate: f64) -> Self {
        let differs = log_rate - self.log_rate;
        Self {
            log_rate: self.log_rate + GAIN * differs,
            deviation: self.deviation + GAIN * (differs.abs() - self.deviation),
            count: self.count.saturating_add(1),
            at_ns: now_ns,
        }
    }
}

impl Known {
    fn new(base: Choice) -> Self {
        Self {
            base,
            learnt: None,
            shown: [[None; SIZES]; CLASSES.len()],
            given_up: [GivenUp::default(); CLASSES.len()],
            says: None,
            used_ns: 0,
        }
    }

    /// What flows go by.
    fn chosen(&self) -> Choice {
        self.learnt.map_or(self.base, |(choice, _)| choice)
    }

    /// Follows the model's choice, and forgets what is too old.
    fn follow(&mut self, now_ns: u64, base: Choice) {
        let is_old = |(_, at_ns): (Choice, u64)| !is_fresh(now_ns, at_ns);
        if self.base != base || self.learnt.is_some_and(is_old) {
            (self.learnt, self.says) = (None, None);
        }
        if self.base != base {
            // The path has changed: outcomes of the former one say nothing of it.
            self.shown = [[None; SIZES]; CLASSES.len()];
            self.base = base;
        }
    }

    fn fresh(&self, now_ns: u64, class: Choice, size: usize) -> Option<Shown> {
        self.shown[place(class)][size].filter(|shown| is_fresh(now_ns, shown.at_ns))
    }

    /// Compares an outcome with what the other one of two has shown: of the chosen class with the model's choice, of another
    /// one with the chosen class.
    fn judge(&mut self, now_ns: u64, size: usize, class: Choice, log_rate: f64) {
        let chosen = self.chosen();
        // What an outcome may say to choose.
        let (against, sign, instead) = match class == chosen {
            true => (self.base, -1.0, self.base),
            false => (chosen, 1.0, class),
        };
        if against == class {
            return; // the model's choice is chosen: nothing to compare it with
        }
        let Some(known) = self.fresh(now_ns, against, size) else {
            return;
        };
        // What was learnt is given up soon, whatever its own outcomes vary by.
        let own = self.fresh(now_ns, class, size).filter(|_| class != chosen);
        let deviation = own.map_or(0.0, |own| own.deviation).max(known.deviation);
        let known = Shown { deviation, ..known };
        if !known.is_beyond(log_rate, sign) {
            if self.says.is_some_and(|(says, _)| says == instead) {
                self.says = None;
            }
            if class == chosen
                && let Some((_, at_ns)) = &mut self.learnt
            {
                *at_ns = now_ns;
            }
            return;
        }
        let before = self.says.filter(|(says, _)| *says == instead);
        let count = before.map_or(0, |(_, count)| count) + 1;
        self.says = Some((instead, count));
        if count >= AGREE {
            self.choose(now_ns, instead);
        }
    }

    fn choose(&mut self, now_ns: u64, choice: Choice) {
        self.says = None;
        if let Some((former, _)) = self.learnt.take() {
            let given_up = &mut self.given_up[place(former)];
            let wait = GIVEN_UP.saturating_mul(1 << given_up.count.min(MAX_DOUBLED));
            given_up.until_ns =
                now_ns.saturating_add(u64::try_from(wait.as_nanos()).unwrap_or(u64::MAX));
            given_up.count = given_up.count.saturating_add(1);
        }
        self.learnt = (choice != self.base).then_some((choice, now_ns));
    }

    fn row(&self, now_ns: u64, destination: Destination) -> Row {
        let mut shown = Vec::new();
        for (class, sizes) in CLASSES.into_iter().zip(&self.shown) {
            for (min, of) in (0..).map(|step| MIN_BYTES << (2 * step)).zip(sizes) {
                if let Some(of) = of.filter(|of| is_fresh(now_ns, of.at_ns)) {
                    let age = Duration::from_nanos(now_ns.saturating_sub(of.at_ns));
                    shown.push((class, min, of, age));
                }
            }
        }
        Row {
            destination,
            base: CLASSES[place(self.base)],
            learnt: self.learnt.map(|(choice, _)| CLASSES[place(choice)]),
            shown,
        }
    }
}

#[cfg(test)]
mod tests {
    use vtl_testing::Random;

    use super::*;

    const S: u64 = 1_000_000_000;
    const TCP: Choice = None;
    const BBR: Choice = Some(1);
    const STREAM: Choice = Some(2);
    /// The model's order.
    const WANTED: [Choice; 3] = [TCP, STREAM, BBR];

    fn to(last: u8) -> Destination {
        Destination {
            host: IpAddr::from([192, 0, 2, last]),
            profile: None,
        }
    }

    /// A network where each class has a mean rate, which outcomes differ from by chance.
    struct Network {
        learner: Learner,
        random: Random,
        now_ns: u64,
        switches: u32,
        /// Flows by each class.
        flows: [u32; CLASSES.len()],
    }

    impl Network {
        fn new(seed: u64) -> Self {
            Self {
                learner: Learner::default(),
                random: Random::new(seed, 18),
                now_ns: 0,
                switches: 0,
                flows: [0; CLASSES.len()],
            }
        }

        /// What flows go by that do not explore.
        fn chosen(&mut self) -> Choice {
            self.learner
                .learnt(self.now_ns, &to(1), WANTED[0])
                .unwrap_or(WANTED[0])
        }

        /// So many flows of 1 MiB, one a second. `mbit`: by class, and whether the flow explores; `spread`: of the rates'
        /// logarithms.
        fn run(&mut self, flows: u32, spread: f64, mbit: impl Fn(Choice, bool) -> f64) {
            for _ in 0..flows {
                self.now_ns += S;
                let before = self.chosen();
                let chance = self.random.unit();
                let explored = self.learner.explore(self.now_ns, &to(1), &WANTED, chance);
                let class = explored.unwrap_or(before);
                self.flows[place(class)] += 1;
                // Nearly normal: the sum of twelve.
                let noise: f64 = (0..12).map(|_| self.random.unit() - 0.5).sum();
                let rate = mbit(class, explored.is_some()) * 1e6 / 8.0 * (noise * spread).exp();
                let bytes = 1 << 20;
                let took = Duration::from_secs_f64(bytes as f64 / rate);
                let outcome = Outcome { class, bytes, took };
                self.learner.note(self.now_ns, to(1), WANTED[0], &outcome);
                self.switches += u32::from(self.chosen() != before);
            }
        }
    }

    #[test]
    fn learner__corrects_a_wrong_model() {
        for seed in 0..50 {
            let mut network = Network::new(seed);
            // The graft has five times the rate of what the model chooses.
            let rates = |class: Choice, _| if class == STREAM { 10.0 } else { 2.0 };
            network.run(600, 0.2, rates);
            assert_eq!(network.chosen(), STREAM, "{seed}: {:?}", network.flows);
            network.run(2000, 0.2, rates);
            assert_eq!((network.chosen(), network.switches), (STREAM, 1), "{seed}");
        }
    }

    #[test]
    fn learner__leaves_a_model_that_is_right() {
        for seed in 0..50 {
            let mut network = Network::new(seed);
            network.run(3000, 0.2, |class, _| if class == TCP { 10.0 } else { 8.0 });
            assert_eq!((network.chosen(), network.switches), (TCP, 0), "{seed}");
            // A few per cent explore, each of the others.
            let explored: u32 = network.flows.iter().sum::<u32>() - network.flows[0];
            assert!((50..150).contains(&explored), "{explored}");
            assert!(network.flows[1] > 10 && network.flows[2] > 10);
        }
    }

    /// All are alike, and each outcome is anything from a quarter to four times that.
    #[test]
    fn learner__does_not_flap_by_noise() {
        let mut all = 0;
        for seed in 0..50 {
            let mut network = Network::new(seed);
            network.run(5000, 0.7, |_, _| 5.0);
            assert!(network.switches <= 8, "{seed}: {}", network.switches);
            all += network.switches;
        }
        // Of 250,000 flows, 7,500 of which have explored.
        assert!(all <= 150, "{all}");
    }

    /// What is explored looks ten times as good as it is once it is chosen.
    #[test]
    fn learner__does_not_flap_by_outcomes_that_lie() {
        for seed in 0..20 {
            let mut network = Network::new(seed);
            let lie = |class: Choice, explores: bool| match (class, explores) {
                (STREAM, true) => 50.0,
                (STREAM, false) => 1.0,
                _ => 5.0,
            };
            // Nearly three hours: each time it is given up for twice as long, from ten minutes on.
            network.run(10_000, 0.2, lie);
            assert!(network.switches <= 20, "{seed}: {}", network.switches);
            let harmed = network.flows[2];
            assert!(harmed < 400, "{seed}: {harmed}");
        }
    }

    fn outcome(class: Choice, mbit: f64) -> Outcome {
        let bytes = 1 << 20;
        let took = Duration::from_secs_f64(bytes as f64 * 8.0 / mbit / 1e6);
        Outcome { class, bytes, took }
    }

    /// Notes outcomes, a second apart; the choice after each.
    fn note(learner: &mut Learner, from_s: u64, outcomes: &[(Choice, f64)]) -> Vec<Option<Choice>> {
        let each = (from_s..).zip(outcomes).map(|(at, (class, mbit))| {
            learner.note(at * S, to(1), TCP, &outcome(*class, *mbit));
            learner.learnt(at * S, &to(1), TCP)
        });
        each.collect()
    }

    #[test]
    fn note__two_agree_before_a_switch() {
        let mut learner = Learner::default();
        let choices = note(
            &mut learner,
            0,
            &[
                (TCP, 2.0),
                (STREAM, 9.0),
                (TCP, 2.0),
                (STREAM, 1.0),
                (STREAM, 9.0),
                (STREAM, 9.0),
            ],
        );
        assert_eq!(choices, [None, None, None, None, None, Some(STREAM)]);
        // And two before it is given up again; what is given up waits.
        let choices = note(
            &mut learner,
            6,
            &[(STREAM, 0.2), (STREAM, 9.0), (STREAM, 0.1), (STREAM, 0.1)],
        );
        assert_eq!(choices, [Some(STREAM), Some(STREAM), Some(STREAM), None]);
        let explored =
            |learner: &mut Learner, at_s| learner.explore(at_s * S, &to(1), &[TCP, STREAM], 0.0);
        assert_eq!(explored(&mut learner, 10), None);
        assert_eq!(explored(&mut learner, 700), Some(STREAM));
    }

    #[test]
    fn note__compares_flows_of_one_size() {
        let mut learner = Learner::default();
        let little = |class, mbit| Outcome {
            bytes: 64 << 10,
            took: outcome(class, mbit).took / 16,
            class,
        };
        learner.note(0, to(1), TCP, &outcome(TCP, 9.0));
        for at in 1..9 {
            learner.note(at * S, to(1), TCP, &little(STREAM, 20.0));
        }
        assert_eq!(learner.learnt(9 * S, &to(1), TCP), None);
        learner.note(9 * S, to(1), TCP, &little(TCP, 1.0));
        for at in 10..12 {
            learner.note(at * S, to(1), TCP, &little(STREAM, 20.0));
        }
        assert_eq!(learner.learnt(12 * S, &to(1), TCP), Some(STREAM));
        // What is too little, or took no time, says nothing.
        let mut learner = Learner::default();
        for bytes in [0, MIN_BYTES - 1, MIN_BYTES] {
            let took = Duration::ZERO;
            let class = TCP;
            learner.note(0, to(1), TCP, &Outcome { class, bytes, took });
        }
        assert!(learner.known.is_empty());
    }

    #[test]
    fn learnt__ends_with_age_with_the_model_s_choice_and_by_command() {
        let learn = || {
            let mut learner = Learner::default();
            note(&mut learner, 0, &[(TCP, 2.0), (STREAM, 9.0), (STREAM, 9.0)]);
            assert_eq!(learner.learnt(3 * S, &to(1), TCP), Some(STREAM));
            learner
        };
        let hour = KNOWN_FOR.as_secs();
        assert_eq!(learn().learnt((2 + hour) * S, &to(1), TCP), Some(STREAM));
        assert_eq!(learn().learnt((3 + hour) * S, &to(1), TCP), None);
        let mut learner = learn();
        assert_eq!(learner.learnt(4 * S, &to(1), BBR), None);
        assert_eq!(
            learner.learnt(5 * S, &to(1), TCP),
            None,
            "it was another path"
        );
        let mut learner = learn();
        assert_eq!(learner.learnt(4 * S, &to(2), TCP), None, "another host");
        learner.reset();
        assert_eq!(learner.learnt(4 * S, &to(1), TCP), None);
        assert!(learner.rows(4 * S).is_empty());
        // What agrees keeps it.
        let mut learner = learn();
        note(&mut learner, hour, &[(STREAM, 9.0)]);
        assert_eq!(
            learner.learnt((2 * hour - 1) * S, &to(1), TCP),
            Some(STREAM)
        );
    }

    #[test]
    fn rows__say_what_was_learnt() {
        let mut learner = Learner::default();
        note(&mut learner, 0, &[(TCP, 2.0), (STREAM, 9.0), (STREAM, 9.0)]);
        let rows = learner.rows(4 * S);
        assert_eq!(rows.len(), 1);
        assert_eq!(
            (rows[0].base, rows[0].learnt),
            ("tcp", Some("graft:stream"))
        );
        let classes: Vec<_> = rows[0]
            .shown
            .iter()
            .map(|(class, min, ..)| (*class, *min))
            .collect();
        assert_eq!(classes, [("tcp", 1 << 20), ("graft:stream", 1 << 20)]);
        let (_, _, shown, age) = rows[0].shown[1];
        assert_eq!((shown.count(), age), (2, Duration::from_secs(2)));
        assert!((shown.rate() / 9e6 - 1.0).abs() < 0.01, "{}", shown.rate());
    }

    #[test]
    fn learner__is_bounded() {
        let mut learner = Learner::default();
        let all = MAX_DESTINATIONS as u64;
        let at = |i: u64| Destination {
            host: IpAddr::from(std::net::Ipv4Addr::from(0x0a00_0000 + i as u32)),
            profile: None,
        };
        for i in 0..all + 10 {
            learner.note(i * S, at(i), TCP, &outcome(TCP, 1.0));
        }
        assert_eq!(learner.known.len(), MAX_DESTINATIONS);
        assert!(!learner.known.contains_key(&at(9)) && learner.known.contains_key(&at(10)));
        // A chance that is none explores nothing.
        for chance in [EXPLORING, 1.0, -0.1, f64::NAN] {
            assert_eq!(learner.explore(0, &at(10), &WANTED, chance), None);
        }
        assert_eq!(learner.explore(0, &at(10), &[], 0.0), None);
        assert_eq!(learner.explore(0, &at(10), &[TCP], 0.0), None);
    }
}
