//! Events for the control socket (`vtl events`): [`emit`] is called where something happens, by any thread.
//!
//! The latest [`ROOM`] of them are kept; readers ask for what has come since the last that they have. So a reader that
//! is slow, hangs or has gone costs nothing but its request, and is told what it has missed. Nothing is emitted per packet
//! or byte: what costs something on the way of data is one comparison each time that a flow's state changes
//! (`flows/peer/events.rs`).

mod addresses;

use std::{
    collections::VecDeque,
    sync::{
        Arc, Condvar, LazyLock, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use vtl_control::{Event, Events, KINDS, MAX_MESSAGE, What};

pub(crate) use addresses::Addresses;

/// Number of events that are kept.
const ROOM: usize = 4096;
/// Maximum number of requests that wait for events at a time,
const MAX_WAITING: usize = 32;
/// and of those of others than root.
const MAX_WAITING_OTHERS: usize = 24;
/// Maximum number of events in an answer,
const PAGE: usize = 200;
/// and of bytes.
const MAX_BYTES: usize = MAX_MESSAGE / 2;
/// Time from an event to the answers that have it, in which others join it: bounds what waking readers costs.
const GATHERING: Duration = Duration::from_millis(5);
/// Interval of checking whether a reader has gone.
const GONE_CHECK: Duration = Duration::from_millis(200);

/// All events of this daemon.
static BUS: LazyLock<Bus> = LazyLock::new(|| Bus::new(SystemTime::now()));

/// Tells of something that has happened.
pub(crate) fn emit(what: What) {
    BUS.emit(what, SystemTime::now());
}

/// Answers a request for events. Blocks until there are some, or the time to wait is over.
///
/// # Errors
/// A kind is unknown, too many requests wait, or the reader has gone.
pub(crate) fn read(wanted: &Wanted, gone: impl Fn() -> bool) -> Result<Events, String> {
    BUS.read(wanted, gone)
}

/// What a reader wants.
pub(crate) struct Wanted {
    /// The last event that it has; `None`: what happens from now on.
    pub(crate) since: Option<u64>,
    /// Kinds; empty: all.
    pub(crate) kinds: Vec<String>,
    /// How long to wait; `None`: for ever.
    pub(crate) wait: Option<Duration>,
    pub(crate) is_root: bool,
}

struct Kept {
    id: u64,
    at: SystemTime,
    what: What,
}

struct State {
    kept: VecDeque<Arc<Kept>>,
    /// Id of the latest event.
    last: u64,
}

struct Bus {
    /// The id before the first event.
    start: u64,
    state: Mutex<State>,
    /// There are new events, and readers wait.
    arrived: Condvar,
    /// How many do; grows with `state` locked.
    waiting: AtomicUsize,
}

/// The place of a reader that waits.
struct Place<'a>(&'a Bus);

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Ordering::Relaxed);
    }
}

/// What is there for a reader.
struct Found {
    missed: Option<Event>,
    kept: Vec<Arc<Kept>>,
    last: u64,
}

impl Found {
    /// Leaves what is wanted, as much as one answer takes.
    fn filter(&mut self, kinds: &[String]) {
        let is_wanted =
            |kept: &Kept| kinds.is_empty() || kinds.iter().any(|kind| kept.what.is_of(kind));
        self.kept.retain(|kept| is_wanted(kept));
        if let Some(next) = self.kept.get(PAGE) {
            self.last = next.id - 1;
            self.kept.truncate(PAGE);
        }
    }

    fn is_nothing(&self) -> bool {
        self.missed.is_none() && self.kept.is_empty()
    }
}

impl Bus {
    /// `now`: ids ascend from one daemon to the next, as long as less than a million events happen in a second.
    fn new(now: SystemTime) -> Self {
        let seconds = now.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let start = seconds << 20;
        Self {
            start,
            state: Mutex::new(State {
                kept: VecDeque::with_capacity(ROOM),
                last: start,
            }),
            arrived: Condvar::new(),
            waiting: AtomicUsize::new(0),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Poisoning is harmless: no critical section leaves a partial update.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn emit(&self, what: What, at: SystemTime) {
        let mut state = self.state();
        let former = match state.kept.len() < ROOM {
            true => None,
            false => state.kept.pop_front(),
        };
        state.last += 1;
        let id = state.last;
        state.kept.push_back(Arc::new(Kept { id, at, what }));
        let is_awaited = self.waiting.load(Ordering::Relaxed) > 0;
        drop(state);
        // Outside of the lock: it may be the last one to have it.
        drop(former);
        if is_awaited {
            self.arrived.notify_all();
        }
    }

    fn read(&self, wanted: &Wanted, gone: impl Fn() -> bool) -> Result<Events, String> {
        let kinds = &wanted.kinds;
        let is_unknown = |kind: &&String| !KINDS.contains(&kind.as_str());
        if let Some(unknown) = kinds.iter().find(is_unknown) {
            let all = KINDS.join(", ");
            return Err(format!("events: there is no kind \"{unknown}\": {all}"));
        }
        if kinds.len() > KINDS.len() {
            return Err(format!("events: more than {} kinds", KINDS.len()));
        }
        let deadline = wanted.wait.map(|wait| Instant::now() + wait);
        let mut since = wanted.since;
        let mut place = None;
        loop {
            let mut found = self.find(since);
            // Outside of the lock, which others need to go on.
            found.filter(kinds);
            let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
            if !found.is_nothing() || left == Some(Duration::ZERO) {
                return Ok(answer(found));
            }
            // What is not wanted is not looked at again.
            since = Some(found.last);
            if place.is_none() {
                place = Some(self.enter(wanted.is_root)?);
            }
            let pause = left.map_or(GONE_CHECK, |left| left.min(GONE_CHECK));
            if self.wait(found.last, pause) {
                thread::sleep(GATHERING);
            }
            // Also while others than those that are wanted come all the time.
            if gone() {
                return Err("the reader of events has gone".into());
            }
        }
    }

    /// Waits for an event behind the last one. False if none has come in time.
    fn wait(&self, last: u64, pause: Duration) -> bool {
        let is_same = |state: &mut State| state.last == last;
        let waited = self
            .arrived
            .wait_timeout_while(self.state(), pause, is_same);
        !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }

    /// Takes a place of those that wait.
    fn enter(&self, is_root: bool) -> Result<Place<'_>, String> {
        let max = match is_root {
            true => MAX_WAITING,
            false => MAX_WAITING_OTHERS,
        };
        // So that no event comes in between: `emit` looks at it.
        let _state = self.state();
        if self.waiting.load(Ordering::Relaxed) >= max {
            return Err(format!(
                "events: {max} requests wait for events already: ask later, or with \"wait_ms\" 0"
            ));
        }
        self.waiting.fetch_add(1, Ordering::Relaxed);
        Ok(Place(self))
    }

    /// What there is behind an event; `None`: behind the latest one.
    fn find(&self, since: Option<u64>) -> Found {
        let state = self.state();
        let since = since.unwrap_or(state.last);
        let first = state.kept.front().map_or(state.last + 1, |kept| kept.id);
        // Of another daemon, also one with a clock ahead.
        let is_foreign = since < self.start || since > state.last;
        let (since, missed) = match is_foreign {
            true => (first - 1, Some(None)),
            false if since + 1 < first => (first - 1, Some(Some(first - 1 - since))),
            false => (since, None),
        };
        let behind = state.kept.iter().skip((since + 1 - first) as usize);
        Found {
            kept: behind.cloned().collect(),
            last: state.last,
            missed: missed.map(|events| Event {
                id: since,
                time: time(SystemTime::now()),
                what: What::Missed { events },
            }),
        }
    }
}

/// Makes an answer, as much as fits into a message.
fn answer(found: Found) -> Events {
    let mut answer = Events {
        events: found.missed.into_iter().collect(),
        last: found.last,
    };
    let mut bytes = 0;
    for kept in found.kept {
        let event = Event {
            id: kept.id,
            time: time(kept.at),
            what: kept.what.clone(),
        };
        bytes += serde_json::to_string(&event).map_or(0, |text| text.len());
        if bytes > MAX_BYTES && !answer.events.is_empty() {
            answer.last = kept.id - 1;
            break;
        }
        answer.events.push(event);
    }
    answer
}

fn time(at: SystemTime) -> String {
    humantime::format_rfc3339_millis(at).to_string()
}

#[cfg(test)]
#[allow(non_snake_case)]
mod tests;
