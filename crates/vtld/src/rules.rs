//! The rules file: read at start and on request, rejected as a whole on any error; and rules that requests install
//! (`installed.rs`).

mod installed;

use std::{
    collections::BTreeSet,
    fs::File,
    io::{self, Read},
    path::PathBuf,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak},
    thread,
    time::{Duration, Instant, SystemTime},
};

use vtl_control::{
    Conditions, Explanation, MAX_MESSAGE, OpenedConnection, PassedRule, PathCondition, Rule as Row,
    RuleEvent, Rules, What,
};
use vtl_core::reconfigure::Condition;

use crate::{
    broker,
    events::emit,
    flows::RuleState,
    hooker::{
        Carrier, Hooked, Hooker,
        rules::{
            About, Action, Forwards, LONGEST_FILE, Listed, Matches, Rule, Verdict, When, Wrong,
        },
    },
    stacks,
};

/// Default path of the rules file.
pub const DEFAULT_FILE: &str = "/etc/vtl/rules.toml";

/// Maximum of values of one kind in a listed rule.
const FEW: usize = 64;
/// Interval of looking at the clock, and of noticing the daemon's end.
const CLOCK_INTERVAL: Duration = Duration::from_secs(1);
/// Pause after expired rules could not be taken out.
const RETRY_INTERVAL: Duration = Duration::from_secs(10);
/// Interval of checking whether programs or control groups named by rules have been replaced.
const CHECK_INTERVAL: Duration = Duration::from_millis(200);

/// Reads the rules file, and has the hooker apply it.
pub struct RulesManager {
    path: PathBuf,
    broker: broker::Handle,
    /// Weak, so that pending requests do not keep it alive.
    hooker: Weak<Hooker>,
    /// Serialises changes.
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// The rules that were installed, then those of the file, whose time may be over: the clock may be set back.
    rules: Vec<Rule>,
    /// The texts of the installed ones.
    installed: Vec<installed::Text>,
    /// Whether each of them is in force.
    in_force: Vec<bool>,
    /// Whether some name programs or control groups, which may be replaced.
    is_watching: bool,
    /// What has expired could not be taken out: when that is tried again.
    retry: Option<Instant>,
}

impl State {
    /// Puts in force what has not expired, if that is another set than before: `apply` gets it. Returns whether.
    fn follow_clock(
        &mut self,
        now: SystemTime,
        apply: impl FnOnce(&[Rule]) -> Result<(), Wrong>,
    ) -> Result<bool, Wrong> {
        let in_force = in_force(&self.rules, now);
        if in_force == self.in_force {
            return Ok(false);
        }
        apply(&chosen(&self.rules, &in_force))?;
        for (rule, (was, is)) in self.rules.iter().zip(self.in_force.iter().zip(&in_force)) {
            match (was, is) {
                (true, false) => {
                    tracing::info!(rule = %rule.name, "rules: expired: it matches nothing any more");
                    installed::tell_expired(rule);
                }
                (false, true) => {
                    tracing::info!(rule = %rule.name, "rules: the clock was set back: it matches again");
                    emit(What::RuleAdded(event(rule, false)));
                }
                _ => {}
            }
        }
        self.in_force = in_force;
        self.forget_expired();
        Ok(true)
    }
}

/// Which rules have not expired.
fn in_force(rules: &[Rule], now: SystemTime) -> Vec<bool> {
    rules.iter().map(|rule| !rule.has_expired(now)).collect()
}

/// The rules in force.
fn chosen(rules: &[Rule], in_force: &[bool]) -> Vec<Rule> {
    let each = rules.iter().zip(in_force);
    each.filter(|(_, is)| **is)
        .map(|(rule, _)| rule.clone())
        .collect()
}

impl RulesManager {
    /// Applies the rules of a file; none if it does not exist. `is_heir`: log errors instead of failing, since
    /// connections were taken over. `left`: the installed rules of a former daemon.
    ///
    /// # Errors
    /// The file cannot be read, or where it is wrong, as one sentence.
    pub fn start(
        path: PathBuf,
        broker: broker::Handle,
        hooker: Weak<Hooker>,
        is_heir: bool,
        left: Vec<String>,
    ) -> Result<Arc<Self>, String> {
        let manager = Arc::new(Self {
            path,
            broker,
            hooker,
            state: Mutex::default(),
            changed: Condvar::new(),
        });
        // First: rules name them, installed ones too.
        let stacks = stacks::load(&manager.stacks());
        manager.inherit(left);
        match stacks.and_then(|_| manager.reload_rules(&mut manager.lock())) {
            // Keep the connections taken over.
            Err(error) if is_heir => {
                tracing::error!(%error, "rules: only inherited ones are in force");
            }
            read => drop(read?),
        }
        let watcher = Arc::downgrade(&manager);
        thread::Builder::new()
            .name("vtl-rules".into())
            .spawn(move || watch(&watcher))
            .map_err(|e| format!("no thread can be started: {e}"))?;
        Ok(manager)
    }

    /// Reads the file again, and the file of stacks beside it. Returns the number of rules, without those that have expired.
    ///
    /// # Errors
    /// A file cannot be read, or where it is wrong, as one sentence. Rules and stacks in force stay unchanged.
    pub fn reload(&self) -> Result<usize, String> {
        let mut state = self.lock();
        let former = stacks::load(&self.stacks())?;
        let count = self.reload_rules(&mut state);
        if count.is_err() {
            stacks::restore(former);
        }
        count
    }

    fn reload_rules(&self, state: &mut State) -> Result<usize, String> {
        let text = match File::open(&self.path) {
            Ok(file) => text(file).map_err(|e| self.unreadable(&e))?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
            Err(error) => return Err(self.unreadable(&error)),
        };
        if self.hooker.strong_count() == 0 {
            return Err("the daemon is stopping".into());
        }
        let wrong = |wrong: Wrong| format!("{}:{wrong}", self.path.display());
        let installed = state.installed.clone();
        let mut rules = state.rules[..installed.len()].to_vec();
        // Their stacks may have gone.
        let carried = self.check_carriers(&rules);
        carried.map_err(|wrong| format!("an installed rule: {}", wrong.text))?;
        let of_file = self.parse(&text, &rules).map_err(wrong)?;
        rules.extend(of_file);
        self.apply(state, rules, installed).map_err(wrong)
    }

    /// Checks a file that could replace the current one. Returns the number of its rules.
    ///
    /// # Errors
    /// It cannot be read, or where it is wrong, as one sentence.
    pub fn check(&self, file: File, name: &str) -> Result<usize, String> {
        let text = text(file).map_err(|e| format!("cannot read {name}: {e}"))?;
        let state = self.lock();
        let installed = state.rules[..state.installed.len()].to_vec();
        drop(state);
        let rules = self
            .parse(&text, &installed)
            .map_err(|wrong| format!("{name}:{wrong}"))?;
        Ok(rules.len())
    }

    /// Lists the rules in force from `from` on, as many as fit into one message. `more`: index of the next one.
    ///
    /// # Errors
    /// The daemon is stopping.
    pub fn list(&self, from: u32) -> Result<Rules, String> {
        let hooker = self.hooker.upgrade().ok_or("the daemon is stopping")?;
        let mut answer = Rules {
            file: self.path.clone(),
            rules: Vec::new(),
            more: None,
        };
        let states = self.broker.rule_states();
        let state = self.lock();
        let mut bytes = 0;
        for (i, listed) in (0..).zip(hooker.rules()).skip(from as usize) {
            let mut row = row(listed, &states);
            row.installed = state.is_installed(&row.name);
            bytes += serde_json::to_string(&row).map_or(0, |text| text.len());
            if bytes > MAX_MESSAGE / 2 && i > from {
                answer.more = Some(i);
                break;
            }
            answer.rules.push(row);
        }
        Ok(answer)
    }

    /// Explains how the rules in force match a connection.
    ///
    /// # Errors
    /// The daemon is stopping.
    pub fn explain(&self, connection: &OpenedConnection) -> Result<Explanation, String> {
        let hooker = self.hooker.upgrade().ok_or("the daemon is stopping")?;
        let hook = hooker.list().into_iter().find(|hook| match &hook.what {
            Hooked::Run { cgroup: path, .. } | Hooked::Cgroup(path) => connection
                .cgroup
                .as_ref()
                .is_some_and(|group| hooker.cgroup(group).starts_with(path)),
            Hooked::Port(_) => false,
        });
        let verdicts = hooker.explain(connection);
        let last = verdicts.last();
        let decides = last.filter(|v| v.because.is_none());
        let passed = |v: &Verdict| {
            Some(PassedRule {
                rule: v.rule.clone(),
                because: v.because.clone()?,
            })
        };
        Ok(Explanation {
            hook: hook.map(|hook| hook.id),
            passed: verdicts.iter().filter_map(passed).collect(),
            decides: decides.map(|v| v.rule.clone()),
            action: decides.and_then(|v| v.action.clone()),
        })
    }

    /// Checks that this host supports the carriers of rules.
    fn check_carriers(&self, rules: &[Rule]) -> Result<(), Wrong> {
        for rule in rules {
            let own = match &rule.about {
                About::Opened(_, Action::Carry(carrier)) | About::Forwarded(_, carrier) => {
                    Some(carrier)
                }
                _ => None,
            };
            let others = rule.when.iter().flat_map(|when| &when.carriers);
            for carrier in own.into_iter().chain(others) {
                let place = rule.place;
                let carries = self.broker.carries(carrier);
                carries.map_err(|text| Wrong { place, text })?;
            }
        }
        Ok(())
    }

    /// The file of stacks.
    fn stacks(&self) -> PathBuf {
        self.path.with_file_name(stacks::FILE)
    }

    fn unreadable(&self, error: &io::Error) -> String {
        format!("cannot read {}: {error}", self.path.display())
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic while it is held can only have prevented a change.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Polls the clock, and the programs and control groups that rules name, until the daemon ends.
fn watch(manager: &Weak<RulesManager>) {
    while let Some(manager) = manager.upgrade() {
        let state = manager.lock();
        let wait = match state.is_watching {
            true => CHECK_INTERVAL,
            false => CLOCK_INTERVAL,
        };
        let woken = manager.changed.wait_timeout(state, wait);
        let (mut state, _) = woken.unwrap_or_else(PoisonError::into_inner);
        let Some(hooker) = manager.hooker.upgrade() else {
            return;
        };
        if state.retry.is_none_or(|at| at <= Instant::now()) {
            match state.follow_clock(SystemTime::now(), |rules| hooker.set_rules(rules)) {
                Ok(is_changed) => {
                    state.is_watching |= is_changed;
                    state.retry = None;
                }
                Err(error) => {
                    tracing::warn!(%error, "rules: expired ones cannot be taken out: tried again in 10 s");
                    state.retry = Some(Instant::now() + RETRY_INTERVAL);
                }
            }
        }
        if state.is_watching {
            state.is_watching = hooker.refresh_rules();
        }
    }
}

/// Checks that a file is regular: reading any other may block for ever.
///
/// # Errors
/// It is not regular.
pub fn is_regular(file: &File) -> io::Result<()> {
    match file.metadata()?.is_file() {
        true => Ok(()),
        false => Err(io::Error::other("not a regular file")),
    }
}

/// Reads a file of at most the maximum length of rules.
fn text(file: File) -> io::Result<String> {
    is_regular(&file)?;
    let mut text = String::new();
    // One more byte, to detect excess length.
    file.take(LONGEST_FILE as u64 + 1)
        .read_to_string(&mut text)?;
    Ok(text)
}

/// Encodes a rule for a list. `states`: what conditions on paths say.
fn row(listed: Listed, states: &[RuleState]) -> Row {
    let when = listed.rule.when.as_deref();
    let when = when.map(|when| path_conditions(&listed.rule.name, when, states));
    let action = listed.rule.action();
    let (conditions, listen) = match listed.rule.about {
        About::Opened(matches, _) => (Some(conditions(&matches)), None),
        About::Accepted(ports, _) => (None, Some(ports)),
        About::Forwarded(matches, _) => (Some(forwards(&matches)), None),
    };
    Row {
        name: listed.rule.name,
        conditions,
        listen,
        action,
        when: when.unwrap_or_default(),
        expires: listed.rule.expires.map(date),
        connections: listed.connections,
        missing: listed.missing,
        installed: false,
    }
}

fn path_conditions(rule: &str, when: &When, states: &[RuleState]) -> Vec<PathCondition> {
    let hosts = |is_it: &dyn Fn(&RuleState) -> bool| {
        // Not of conditions before a change that is not followed yet.
        let of_rule = states
            .iter()
            .filter(|state| &*state.rule == rule && *state.when == *when);
        all(of_rule
            .filter(|state| is_it(state))
            .map(|state| state.peer)
            .collect::<BTreeSet<_>>())
    };
    let cases = when.plan.conditions.iter().zip(&when.carriers);
    let row = |(i, (condition, carrier)): (usize, (&Condition, &Carrier))| PathCondition {
        condition: condition.to_string(),
        carrier: carrier.to_string(),
        holds_for: hosts(&|state| state.holds.contains(&i)),
        decides_for: hosts(&|state| state.decides == Some(i)),
    };
    cases.enumerate().map(row).collect()
}

/// The first few values, and how many there are more.
fn all<T: ToString>(each: impl IntoIterator<Item = T>) -> Vec<String> {
    let mut each = each.into_iter();
    let mut few: Vec<_> = each
        .by_ref()
        .take(FEW)
        .map(|each| each.to_string())
        .collect();
    match each.count() {
        0 => {}
        more => few.push(format!("and {more} more")),
    }
    few
}

fn date(at: SystemTime) -> String {
    humantime::format_rfc3339(at).to_string()
}

/// What events say of a rule in force.
fn event(rule: &Rule, installed: bool) -> RuleEvent {
    RuleEvent {
        rule: rule.name.clone().into(),
        action: rule.action().into(),
        expires: rule.expires.map(|at| date(at).into()),
        installed,
    }
}

/// Tells how the rules in force differ from former ones. `installed`: the names of installed ones.
fn tell_changes(former: &[Rule], now: &[Rule], installed: &[&str]) {
    for rule in former {
        if now.iter().all(|other| other.name != rule.name) {
            let rule = rule.name.clone().into();
            emit(What::RuleRemoved { rule });
        }
    }
    for rule in now {
        let event = event(rule, installed.contains(&&*rule.name));
        match former.iter().find(|other| other.name == rule.name) {
            None => emit(What::RuleAdded(event)),
            Some(former) if former.is_same(rule) => {}
            Some(_) => emit(What::RuleChanged(event)),
        }
    }
}

fn port(range: &std::ops::RangeInclusive<u16>) -> String {
    match range.start() == range.end() {
        true => range.start().to_string(),
        false => format!("{}-{}", range.start(), range.end()),
    }
}

fn forwards(matches: &Forwards) -> Conditions {
    Conditions {
        via: all(&matches.via),
        from: all(&matches.from),
        from_port: all(matches.from_port.iter().map(port)),
        to: all(&matches.to),
        port: all(matches.port.iter().map(port)),
        profile: all(&matches.profile),
        ..Conditions::default()
    }
}

fn conditions(matches: &Matches) -> Conditions {
    let paths = |paths: &[PathBuf]| all(paths.iter().map(|p| p.display()));
    Conditions {
        cgroup: paths(&matches.cgroup),
        user: all(matches.user.iter().map(|u| &u.text)),
        exe: paths(&matches.exe),
        port: all(matches.port.iter().map(port)),
        to: all(&matches.to),
        profile: all(&matches.profile),
        local: matches.local,
        ..Conditions::default()
    }
}

#[cfg(test)]
#[allow(non_snake_case)]
mod tests {
    use super::*;
    use crate::hooker::rules;

    #[test]
    fn follow_clock__forgets_installed_rules_that_have_expired() {
        let text = "[[rule]]\nname = \"a\"\nbypass = true\nexpires = 2027-01-31T18:00:00Z\n\
                    [[rule]]\nname = \"b\"\nbypass = true\n";
        let rules = rules::parse(text, |_| None).expect("right");
        let at = humantime::parse_rfc3339("2027-01-31T18:00:00Z").expect("right");
        let mut state = State {
            in_force: in_force(&rules, at - Duration::from_secs(1)),
            rules,
            installed: vec!["a".into()],
            ..State::default()
        };
        assert!(state.is_installed("a") && !state.is_installed("b"));
        let changed = state.follow_clock(at, |rules| {
            assert_eq!(rules.len(), 1);
            Ok(())
        });
        assert!(changed.expect("applied"));
        let names: Vec<&str> = state.rules.iter().map(|rule| &*rule.name).collect();
        assert_eq!((names, state.in_force), (vec!["b"], vec![true]));
        assert_eq!(state.installed.len(), 0);
    }

    #[test]
    fn follow_clock__takes_out_what_is_over_and_brings_it_back() {
        let text = "[[rule]]\nname = \"a\"\nbypass = true\nexpires = 2027-01-31T18:00:00Z\n\
                    [[rule]]\nname = \"b\"\nbypass = true\n";
        let rules = rules::parse(text, |_| None).expect("right");
        let at = humantime::parse_rfc3339("2027-01-31T18:00:00Z").expect("right");
        let before = at - Duration::from_secs(1);
        let mut state = State {
            in_force: in_force(&rules, before),
            rules,
            ..State::default()
        };
        let is_same = state.follow_clock(before, |_| unreachable!());
        assert!(!is_same.expect("nothing is done"));
        let wrong = || Wrong {
            place: rules::Place { line: 1, column: 1 },
            text: "no room".into(),
        };
        assert!(state.follow_clock(at, |_| Err(wrong())).is_err());
        for (now, names) in [(at, &["b"][..]), (before, &["a", "b"])] {
            let mut left = Vec::new();
            let is_changed = state.follow_clock(now, |rules| {
                left = rules.iter().map(|rule| rule.name.clone()).collect();
                Ok(())
            });
            assert!(is_changed.expect("applied"));
            assert_eq!(left, names);
        }
    }
}
