//! What flows of the carrier `auto` teach: a few explore, in associations of their own, and what becomes of all of them
//! corrects the model's choice for their destination (`vtl_core::reconfigure::learn`).

use std::{
    cell::Cell,
    collections::HashMap,
    rc::Rc,
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use vtl_control::{Lesson, LessonOutcome, Lessons};
use vtl_core::{
    flow::Path,
    reconfigure::{
        Choice,
        learn::{Destination, Learner, MAX_DESTINATIONS, Outcome, Row},
    },
    select::CLASSES,
};
use vtl_proto::{carrier::Kind, frame::FlowId};

use super::{
    Flows,
    flow::State,
    now_ns,
    peer::Peer,
    reconfigure::Following,
    select::{Auto, ByModel},
};
use crate::broker::random_token;

/// Time without bytes from which on a flow pauses: that is not its carrier's.
const PAUSE: Duration = Duration::from_secs(1);
/// Of a flow's bytes at least so many fifths have to be by what it ends by.
const MAIN_SHARE: u64 = 4;
/// Lessons in one message: each may have an outcome of every class and size.
const LESSONS: usize = 32;
/// Outcomes that wait to be noted, of an association.
const WAITING: usize = 64;

/// What was learnt, and what the model wants where. Shared by threads.
#[derive(Debug)]
pub(super) struct Teacher {
    began: Instant,
    known: Mutex<Known>,
}

#[derive(Debug, Default)]
struct Known {
    learner: Learner,
    /// What the model wants, best first.
    wanted: HashMap<Destination, Vec<Choice>>,
}

impl Default for Teacher {
    fn default() -> Self {
        Self {
            began: Instant::now(),
            known: Mutex::default(),
        }
    }
}

impl Teacher {
    fn known(&self) -> MutexGuard<'_, Known> {
        // Poisoning is harmless: no critical section leaves a partial update.
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a new flow explores, and what: a place among [`CLASSES`].
    pub(super) fn explore(&self, destination: &Destination) -> Option<u8> {
        let chance = (random_token() >> 11) as f64 / (1_u64 << 53) as f64;
        let known = &mut *self.known();
        let wanted = known.wanted.get(destination)?;
        let now = now_ns(self.began);
        let explored = known.learner.explore(now, destination, wanted, chance)?;
        u8::try_from(explored.unwrap_or(0)).ok()
    }

    /// Notes what the model wants for a destination. Returns what flows have taught instead.
    fn follow(&self, destination: Destination, wanted: &[Choice]) -> Option<Choice> {
        let base = *wanted.first()?;
        let known = &mut *self.known();
        if known.wanted.get(&destination).map(Vec::as_slice) != Some(wanted) {
            if known.wanted.len() >= MAX_DESTINATIONS {
                known.wanted.clear(); // those that are in use are told again
            }
            known.wanted.insert(destination, wanted.to_vec());
        }
        known.learner.learnt(now_ns(self.began), &destination, base)
    }

    fn note(&self, destination: Destination, outcome: &Outcome) {
        let known = &mut *self.known();
        let base = known.wanted.get(&destination).and_then(|all| all.first());
        if let Some(base) = base {
            let now = now_ns(self.began);
            known.learner.note(now, destination, *base, outcome);
        }
    }

    /// Forgets what was learnt.
    pub(super) fn reset(&self) {
        self.known().learner.reset();
    }

    /// What was learnt: a page from an index on.
    pub(super) fn lessons(&self, from: usize, on: bool) -> Lessons {
        let rows = self.known().learner.rows(now_ns(self.began));
        let end = from.saturating_add(LESSONS);
        let more = (rows.len() > end).then_some(end);
        let page = rows.into_iter().skip(from).take(LESSONS);
        let lessons = page.map(|row| lesson(&row)).collect();
        Lessons { on, lessons, more }
    }
}

fn lesson(row: &Row) -> Lesson {
    let outcomes = row
        .shown
        .iter()
        .map(|(class, min, shown, age)| LessonOutcome {
            carrier: (*class).to_owned(),
            bytes_from: *min,
            rate_mbit: (shown.rate() / 1e4).round() / 100.0,
            flows: shown.count(),
            age_s: age.as_secs_f64(),
        });
    Lesson {
        peer: row.destination.host,
        profile: row.destination.profile.map(|profile| profile.to_string()),
        model: row.base.to_owned(),
        learnt: row.learnt.map(str::to_owned),
        outcomes: outcomes.collect(),
    }
}

/// The course of a flow since it changed what it goes by.
pub(super) struct Course {
    began: Cell<Instant>,
    /// Bytes that had been moved by then.
    before: Cell<u64>,
    /// When bytes moved last, and how long none did, in pauses.
    last: Cell<Instant>,
    paused: Cell<Duration>,
}

impl Course {
    pub(super) fn new() -> Self {
        let now = Instant::now();
        Self {
            began: Cell::new(now),
            before: Cell::new(0),
            last: Cell::new(now),
            paused: Cell::default(),
        }
    }

    /// Begins anew, with so many bytes moved.
    pub(super) fn begin(&self, bytes: u64) {
        let now = Instant::now();
        self.began.set(now);
        self.before.set(bytes);
        self.last.set(now);
        self.paused.set(Duration::ZERO);
    }

    /// Notes that bytes move.
    pub(super) fn note_moving(&self) {
        let now = Instant::now();
        let gap = now.duration_since(self.last.replace(now));
        if gap > PAUSE {
            self.paused.set(self.paused.get().saturating_add(gap));
        }
    }

    /// Bytes since, of `moved` in all, and the time that they took; `None`: too many were moved before.
    fn result(&self, moved: u64) -> Option<(u64, Duration)> {
        let bytes = moved.saturating_sub(self.before.get());
        let took = self.last.get().duration_since(self.began.get());
        let is_most = bytes / MAIN_SHARE >= moved / (MAIN_SHARE + 1);
        is_most.then(|| (bytes, took.saturating_sub(self.paused.get())))
    }
}

impl Auto {
    /// Whether its flows teach: a rule that bounds something has its own reasons.
    fn teaches(&self) -> bool {
        self.bounds.is_none()
    }

    /// What its flows go by to explore.
    pub(super) fn explored(&self) -> Option<Choice> {
        let place = usize::from(self.explores?);
        Some(Some(place).filter(|place| (1..CLASSES.len()).contains(place)))
    }
}

impl Flows {
    fn destination(peer: &Peer, auto: Auto) -> Destination {
        Destination {
            host: peer.key.peer.to_canonical(),
            profile: auto.profile,
        }
    }

    /// Notes what became of an association's flows. `following`: what the model says of it.
    pub(super) fn learn(&self, peer: &Peer, auto: Auto, following: Option<&Following>) {
        let outcomes = peer.taught.take();
        if !auto.teaches() {
            return;
        }
        let learns = self.limits.selection.learns();
        let (teacher, destination) = (&self.names.teacher, Self::destination(peer, auto));
        for outcome in outcomes.iter().filter(|_| learns) {
            teacher.note(destination, outcome);
        }
        if let Some(following) = following {
            let mut engine = following.engine.borrow_mut();
            let learnt = teacher.follow(destination, engine.wanted());
            engine.set_learnt(learnt.filter(|_| learns));
        }
    }

    /// Has the flows of an association that explores go by what it is for.
    pub(super) fn follow_explored(&self, peer: &Rc<Peer>, auto: Auto, choice: Choice) {
        let target = Some(ByModel::target(choice));
        if peer.condition_target() != target {
            peer.set_target(target);
            peer.set_bbr(ByModel::may_be_bbr(choice));
        }
        self.learn(peer, auto, None);
    }
}

impl Peer {
    /// Notes what became of a flow that has ended in order, if it went by what was chosen for it.
    pub(super) fn note_outcome(&self, id: FlowId, state: &State) {
        let (Some(auto), Some(course)) = (self.auto(), state.profile.course()) else {
            return;
        };
        let following = self.following.borrow();
        let made = following.as_ref().map(|of| of.engine.borrow().made());
        let Some(class) = auto.explored().or(made) else {
            return;
        };
        let Some((path, moved)) = self.path_and_bytes(id) else {
            return;
        };
        let kind = match path {
            Path::Tcp => None,
            Path::Carrier(id) => self.carrier(id).and_then(|carrier| carrier.kind()),
        };
        let wanted = ByModel::target(class).map(|_| Kind::Graft);
        let mut taught = self.taught.borrow_mut();
        if kind == wanted
            && taught.len() < WAITING
            && let Some((bytes, took)) = course.result(moved)
        {
            taught.push(Outcome { class, bytes, took });
        }
    }
}

#[cfg(test)]
mod tests {
    use std::thread::sleep;

    use super::*;

    #[test]
    fn course__counts_what_came_since_and_no_pauses() {
        let course = Course::new();
        course.begin(100);
        sleep(Duration::from_millis(5));
        course.note_moving();
        let (bytes, took) = course.result(1100).expect("most");
        assert!(bytes == 1000 && took >= Duration::from_millis(5));
        // More than a fifth went before.
        assert!(course.result(400).is_none());
        course.paused.set(Duration::from_secs(9));
        assert_eq!(course.result(1100), Some((1000, Duration::ZERO)));
    }

    #[test]
    fn teacher__explores_what_the_model_wants_next() {
        let teacher = Teacher::default();
        let destination = Destination {
            host: "192.0.2.1".parse().expect("an address"),
            profile: None,
        };
        let explored = |teacher: &Teacher| {
            let all = (0..2000).filter_map(|_| teacher.explore(&destination));
            all.collect::<Vec<_>>()
        };
        assert!(explored(&teacher).is_empty(), "nobody knows what is wanted");
        assert_eq!(teacher.follow(destination, &[Some(1), Some(2), None]), None);
        let places = explored(&teacher);
        // 60 of 2,000 are expected.
        assert!((10..200).contains(&places.len()), "{}", places.len());
        assert!(places.iter().all(|place| [0, 2].contains(place)));
        for (class, mbit) in [(Some(1), 1_u64), (Some(2), 9), (Some(2), 9)] {
            let bytes = 1 << 20;
            let took = Duration::from_secs_f64(bytes as f64 * 8.0 / (mbit as f64 * 1e6));
            teacher.note(destination, &Outcome { class, bytes, took });
        }
        let wanted = [Some(1), Some(2), None];
        assert_eq!(teacher.follow(destination, &wanted), Some(Some(2)));
        let lessons = teacher.lessons(0, true);
        assert_eq!(lessons.lessons.len(), 1);
        let lesson = &lessons.lessons[0];
        assert_eq!(lesson.learnt.as_deref(), Some("graft:stream"));
        assert_eq!(
            (lesson.model.as_str(), lesson.outcomes.len()),
            ("tcp:bbr", 2)
        );
        teacher.reset();
        assert!(teacher.lessons(0, true).lessons.is_empty());
        assert_eq!(teacher.follow(destination, &wanted), None);
    }
}
