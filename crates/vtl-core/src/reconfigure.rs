//! Decides by what a rule's connections to one host are to travel while the figures of the path change (thesis, section
//! 3.3.2: reconfiguration).
//!
//! [`Engine`] follows one path: [`Engine::sample`] takes the path's [`Metrics`], and says when to switch. What is wanted
//! comes of one of two sources:
//! - a [`Plan`] has [`Condition`]s, of which the first one that holds decides; where none holds, the rule's own carrier.
//!   What carriers are is the caller's matter: a [`Choice`] is the number of a condition;
//! - a trained model ([`Engine::by_model`]): a [`Choice`] is then a place among [`CLASSES`], `None` the first one. Grafts
//!   that are not surely better than TCP are none. Where the connections have [`Bounds`], what cannot keep them, or was
//!   seen to miss them ([`Engine::note_outcome`]), is passed over for a while.
//!
//! Time is an argument, in nanoseconds of any clock that does not go back.

mod bounds;
mod condition;
pub mod learn;
mod model;
mod watch;

use std::time::Duration;

pub use bounds::{Bound, Bounds};
pub use condition::{
    Condition, ConditionError, Figure, Relation, Term, parse_rate, parse_time, rate_in_words,
    time_in_words,
};
pub use model::{Decision, ENOUGH_PACKETS, OBSERVED};
pub use watch::{BoundWatch, Change, JUDGED_AFTER, Outcome};

use super::{netmon::Metrics, profile::Profile, select::CLASSES};
use bounds::fills_queues;
use condition::Reading;
use model::Model;

/// Maximum number of conditions in a plan.
pub const MAX_CONDITIONS: usize = 8;
/// Default of [`Plan::dwell`].
pub const DEFAULT_DWELL: Duration = Duration::from_secs(10);
/// By a model: what a path of which nothing is known begins with, a place among [`CLASSES`]. Under BBR a transfer suffers
/// least until something is known.
pub const UNKNOWN: Choice = Some(1);
/// How many of [`CLASSES`] are TCP, the first ones.
const TCP_CLASSES: usize = 2;
/// How often the wait after a failure is doubled at most.
const MAX_DOUBLED: u32 = 5;

/// The conditions of a rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// In the order in which they count.
    pub conditions: Vec<Condition>,
    /// Minimum time between two switches, and before what failed is tried again: what a switch costs.
    pub dwell: Duration,
}

impl Plan {
    /// Whether a condition is about the link layer.
    pub fn is_about_link(&self) -> bool {
        let mut terms = self.conditions.iter().flat_map(|of| &of.terms);
        terms.any(|term| term.figure.is_of_link())
    }
}

/// What decides: the condition of this number; `None`: no condition, so the rule's own carrier. By a model: the place of
/// the class among [`CLASSES`]; `None`: the first.
pub type Choice = Option<usize>;

/// A switch to be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Switch {
    /// What decided so far.
    pub from: Choice,
    /// What decides now.
    pub to: Choice,
}

/// What is known of one condition.
#[derive(Clone, Copy, Debug, Default)]
struct State {
    holds: bool,
    /// Since when each sample has said the opposite of `holds`, ns.
    since_ns: Option<u64>,
}

/// The failures of one choice.
#[derive(Clone, Copy, Debug, Default)]
struct Failures {
    /// Not to be chosen before, ns.
    until_ns: u64,
    /// How often it has failed since it worked last.
    count: u32,
}

/// Follows the conditions of a plan, or a model, for one path.
#[derive(Clone, Debug)]
pub struct Engine {
    /// Without conditions if a model decides.
    plan: Plan,
    states: Vec<State>,
    model: Option<Model>,
    bounds: BoundWatch,
    /// What flows have taught to choose instead of what the model wants most.
    learnt: Option<Choice>,
    /// By condition or class; the last one is that of the rule's own carrier.
    failures: Vec<Failures>,
    current: Choice,
    former: Choice,
    /// When it switched last, ns.
    switched_ns: Option<u64>,
    /// The last switch is still being made.
    is_pending: bool,
    /// The connections have bytes under way.
    is_moving: bool,
}

impl Engine {
    /// Begins with the rule's own carrier. Conditions beyond [`MAX_CONDITIONS`] are ignored.
    pub fn new(mut plan: Plan) -> Self {
        plan.conditions.truncate(MAX_CONDITIONS);
        let count = plan.conditions.len();
        Self {
            plan,
            states: vec![State::default(); count],
            model: None,
            bounds: BoundWatch::new(Bounds::default()),
            learnt: None,
            failures: vec![Failures::default(); count + 1],
            current: None,
            former: None,
            switched_ns: None,
            is_pending: false,
            is_moving: false,
        }
    }

    /// Begins with a choice made before; its condition, if it has that, holds until it is seen to end.
    pub fn resume(plan: Plan, choice: Choice) -> Self {
        let mut engine = Self::new(plan);
        if let Some(state) = choice.and_then(|i| engine.states.get_mut(i)) {
            state.holds = true;
            engine.current = choice;
        }
        engine
    }

    /// Begins with [`UNKNOWN`], and follows the model that comes with VTL. `profile`: of the applications, if it is known;
    /// `dwell`: as [`Plan::dwell`].
    pub fn by_model(profile: Option<Profile>, dwell: Duration) -> Self {
        let conditions = Vec::new();
        Self {
            model: Some(Model::new(profile)),
            failures: vec![Failures::default(); CLASSES.len() + 1],
            current: UNKNOWN,
            ..Self::new(Plan { conditions, dwell })
        }
    }

    /// The same beginning with a choice made before, which stays until the model has decided otherwise. `None` and what is
    /// none of [`CLASSES`]: [`UNKNOWN`].
    pub fn resume_by_model(profile: Option<Profile>, dwell: Duration, choice: Choice) -> Self {
        let known = choice.filter(|place| (1..CLASSES.len()).contains(place));
        Self {
            current: known.or(UNKNOWN),
            ..Self::by_model(profile, dwell)
        }
    }

    /// Has the model decide at once by figures of earlier connections over the path, for an association that begins.
    /// Returns the switch to be made, as [`Engine::sample`] does. Without a model, and by figures that are of too little:
    /// nothing.
    pub fn begin(&mut self, now_ns: u64, metrics: &Metrics) -> Option<Switch> {
        self.model.as_mut()?.begin(now_ns, metrics);
        self.turn(now_ns)
    }

    /// Has a model keep these bounds where it can.
    #[must_use]
    pub fn with_bounds(mut self, bounds: Bounds) -> Self {
        if self.model.is_some() {
            self.bounds = BoundWatch::among(bounds, self.failures.len());
        }
        self
    }

    /// What the model wants, best first; empty before its first decision.
    pub fn wanted(&self) -> &[Choice] {
        self.model.as_ref().map_or(&[], Model::wanted)
    }

    /// Has what flows have taught come first, once the model has decided; `None`: the model's choice.
    pub fn set_learnt(&mut self, learnt: Option<Choice>) {
        self.learnt = learnt;
    }

    /// What decides, if flows have taught it.
    pub fn follows_learnt(&self) -> bool {
        self.learnt == Some(self.current) && self.wanted().first() != Some(&self.current)
    }

    /// The bounds that it keeps where it can.
    pub fn bounds(&self) -> Bounds {
        self.bounds.bounds
    }

    /// A bound, and what was measured of it, in words.
    pub fn figures(&self, bound: Bound, outcome: &Outcome) -> String {
        self.bounds.figures(bound, outcome)
    }

    /// The bounds that are missed.
    pub fn missed(&self) -> impl Iterator<Item = Bound> {
        self.bounds.missed()
    }

    /// Takes what the connections get. Returns the bounds that are missed from now on, or no longer. What misses one is
    /// passed over with the next [`Engine::sample`], and with it, if a queue is the greater part of the delay, all that
    /// fills queues.
    pub fn note_outcome(&mut self, now_ns: u64, outcome: &Outcome) -> [Option<Change>; 2] {
        if self.bounds.bounds.is_none() {
            return [None; 2];
        }
        let changes = self.bounds.take(now_ns, outcome);
        let is_missed = self.missed().next().is_some();
        if self.is_pending || !is_missed {
            if changes.iter().flatten().any(|change| !change.is_missed) {
                self.bounds.note_kept(self.place(self.current));
            }
            return changes;
        }
        if !self.bounds.is_judged(now_ns) {
            return changes;
        }
        self.bounds.note_miss(now_ns, self.place(self.current));
        let is_queue = outcome
            .delay
            .is_some_and(|delay| outcome.queueing > delay / 2);
        let delays = self.missed().any(|bound| bound == Bound::MaxDelay);
        if delays && is_queue && fills_queues(class_of(self.current)) {
            for (place, class) in CLASSES.iter().enumerate() {
                if fills_queues(class) {
                    let choice = Some(place).filter(|place| *place > 0);
                    self.bounds.note_miss(now_ns, self.place(choice));
                }
            }
        }
        changes
    }

    /// Whether a class keeps the bounds, as far as is known.
    fn keeps(&self, now_ns: u64, choice: Choice) -> bool {
        let bounds = &self.bounds;
        if bounds.bounds.is_none() {
            return true;
        }
        let features = self.decision().map(|decision| &decision.features);
        let broken = features.and_then(|of| bounds.bounds.broken_by(class_of(choice), of));
        broken.is_none() && !bounds.is_passed_over(now_ns, self.place(choice))
    }

    /// What the model wants more than what decides, where that is passed over as it does not keep the bounds.
    pub fn passed_over(&self, now_ns: u64) -> Option<&'static str> {
        let wanted = *self.model.as_ref()?.wanted().first()?;
        let is_over = wanted != self.current && !self.keeps(now_ns, wanted);
        is_over.then(|| class_of(wanted))
    }

    /// What the model has decided last, and by what; `None`: nothing yet, or there is no model.
    pub fn decision(&self) -> Option<&Decision> {
        self.model.as_ref()?.decision()
    }

    /// Notes whether the connections have bytes under way: then a model leaves TCP that does well for the next pause.
    pub fn note_moving(&mut self, is_moving: bool) {
        self.is_moving = is_moving;
    }

    /// The profile by which a model decides.
    pub fn profile(&self) -> Option<Profile> {
        self.model.as_ref()?.profile()
    }

    /// Has a model decide by another profile, as the first bytes of connections have shown one: from the next figures on,
    /// as if the path had changed.
    pub fn set_profile(&mut self, profile: Option<Profile>) {
        if let Some(model) = &mut self.model {
            model.set_profile(profile);
        }
    }

    /// What decides.
    pub fn current(&self) -> Choice {
        self.current
    }

    /// The plan that it follows.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Whether the condition of this number holds.
    pub fn holds(&self, condition: usize) -> bool {
        self.states.get(condition).is_some_and(|state| state.holds)
    }

    /// Takes the state of the path. `None`: unknown, or too old to say anything; then, and where a condition's figure is
    /// missing, the condition neither begins nor ends to hold. Returns the switch to be made: there is no other one before
    /// the caller has said [`Engine::succeeded`] or [`Engine::failed`].
    pub fn sample(&mut self, now_ns: u64, metrics: Option<&Metrics>) -> Option<Switch> {
        for (state, condition) in self.states.iter_mut().zip(&self.plan.conditions) {
            let reading = metrics.map_or(Reading::Unknown, |metrics| condition.read(metrics));
            state.take(now_ns, reading, condition.hold);
        }
        if let (Some(model), Some(metrics)) = (&mut self.model, metrics) {
            model.observe(now_ns, metrics);
        }
        self.turn(now_ns)
    }

    /// Whether the connections stay on TCP while bytes move: a change in the middle costs more than it wins. BBR may begin
    /// at any time.
    fn stays(&self, choice: Choice) -> bool {
        let is_tcp = self.current.is_none_or(|place| place < TCP_CLASSES);
        let does_well = |model: &Model| model.tcp_does_well();
        let is_missed = self.missed().next().is_some();
        let may_stay = self.is_moving && is_tcp && choice != UNKNOWN && !is_missed;
        may_stay && self.model.as_ref().is_some_and(does_well)
    }

    /// Switches to what is wanted, unless it is too early.
    fn turn(&mut self, now_ns: u64) -> Option<Switch> {
        let dwell_ns = nanos(self.plan.dwell);
        let is_early = |then_ns| now_ns.saturating_sub(then_ns) < dwell_ns;
        let choice = self.choice(now_ns);
        let must_wait = self.is_pending || self.switched_ns.is_some_and(is_early);
        if choice == self.current || must_wait || self.stays(choice) {
            return None;
        }
        self.is_pending = true;
        self.former = self.current;
        self.current = choice;
        self.switched_ns = Some(now_ns);
        Some(Switch {
            from: self.former,
            to: choice,
        })
    }

    /// The first that is wanted and has not failed lately; if all have, what decides already.
    fn choice(&self, now_ns: u64) -> Choice {
        let may_be = |choice: &Choice| self.failures[self.place(*choice)].until_ns <= now_ns;
        let holding = (0..self.states.len()).filter(|i| self.states[*i].holds);
        let found = match &self.model {
            Some(model) => {
                let learnt = self.learnt.filter(|_| !model.wanted().is_empty());
                let wanted = learnt.into_iter().chain(model.wanted().iter().copied());
                let mut wanted = wanted.filter(may_be);
                let stays = Some(self.current).filter(may_be);
                // If none keeps the bounds, nothing is won by a change.
                wanted
                    .clone()
                    .find(|choice| self.keeps(now_ns, *choice))
                    .or(stays.filter(|_| !self.bounds.bounds.is_none()))
                    .or_else(|| wanted.next())
            }
            None => holding.map(Some).chain([None]).find(may_be),
        };
        found.unwrap_or(self.current)
    }

    fn place(&self, choice: Choice) -> usize {
        choice.unwrap_or(self.failures.len() - 1)
    }

    /// Notes that the last switch was made.
    pub fn succeeded(&mut self) {
        self.is_pending = false;
        self.bounds.note_switch();
        let place = self.place(self.current);
        self.failures[place] = Failures::default();
    }

    /// Notes that the last switch could not be made: what decided before does so again, and this is not tried before the
    /// dwell has passed, by a model twice as long for each failure in a row, 32 times at most. Returns whether it is worth a report: it has not failed since it worked last.
    pub fn failed(&mut self, now_ns: u64) -> bool {
        self.is_pending = false;
        self.bounds.note_switch();
        let place = self.place(self.current);
        let failures = &mut self.failures[place];
        // Of the model's classes several may be out of reach: each must have its turn.
        let doubled = if self.model.is_some() {
            failures.count.min(MAX_DOUBLED)
        } else {
            0
        };
        let wait_ns = nanos(self.plan.dwell).saturating_mul(1 << doubled);
        failures.until_ns = now_ns.saturating_add(wait_ns);
        let is_new = failures.count == 0;
        failures.count = failures.count.saturating_add(1);
        self.current = self.former;
        is_new
    }

    /// Notes that the model's choice works no longer, so that the connections go by [`UNKNOWN`]. As a failure.
    pub fn lost(&mut self, now_ns: u64) {
        self.former = UNKNOWN;
        self.failed(now_ns);
    }

    /// What the connections go by: what decides, but for a switch that is still being made.
    pub fn made(&self) -> Choice {
        match self.is_pending {
            true => self.former,
            false => self.current,
        }
    }
}

impl State {
    fn take(&mut self, now_ns: u64, reading: Reading, hold: Duration) {
        let is_opposite = match self.holds {
            false => reading == Reading::Holds,
            true => reading == Reading::IsFar,
        };
        if !is_opposite {
            self.since_ns = None;
            return;
        }
        let since_ns = *self.since_ns.get_or_insert(now_ns);
        if now_ns.saturating_sub(since_ns) >= nanos(hold) {
            self.holds = !self.holds;
            self.since_ns = None;
        }
    }
}

/// The class of a model's choice.
fn class_of(choice: Choice) -> &'static str {
    choice
        .and_then(|place| CLASSES.get(place))
        .unwrap_or(&CLASSES[0])
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod model_tests;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod watch_tests;
