//! Rules that a request installs for some time: in front of the file's, in memory, and handed over to the next daemon.

use std::time::{Duration, SystemTime};

use serde_json::{Map, Value};
use vtl_control::What;

use super::{RulesManager, State, chosen, in_force, tell_changes};
use crate::{
    events::emit,
    hooker::rules::{Rule, Wrong, parse_beside},
};

/// Maximum number of such rules,
const MAX_RULES: usize = 256;
/// and of bytes of one.
const LONGEST: usize = 16 << 10;
/// Longest time that one is in force for.
const MAX_TIME: Duration = Duration::from_secs(366 * 86_400);

/// A rule that was installed, as a file would have it: what the next daemon gets.
pub(super) type Text = String;

impl RulesManager {
    /// Puts a rule in force for some time, in the place of an installed one of that name. `rule`: as in a file, without
    /// `expires`.
    ///
    /// # Errors
    /// What is wrong with it, as one sentence; the rules in force stay unchanged.
    pub(crate) fn install(&self, rule: Map<String, Value>, time: Duration) -> Result<(), String> {
        let wrong = |why: String| format!("rule_install: {why}");
        if time > MAX_TIME {
            let days = MAX_TIME.as_secs() / 86_400;
            return Err(wrong(format!(
                "a rule is installed for at most {days} days"
            )));
        }
        let text = text(rule, SystemTime::now() + time).map_err(wrong)?;
        let mut state = self.lock();
        let new = self.parse_installed(&text, &state).map_err(wrong)?;
        let count = state.installed.len();
        let place = state.rules[..count]
            .iter()
            .position(|known| known.name == new.name);
        if place.is_none() && count >= MAX_RULES {
            return Err(wrong(format!(
                "{MAX_RULES} rules are installed already: vtl rule remove"
            )));
        }
        let (mut rules, mut installed) = (state.rules.clone(), state.installed.clone());
        match place {
            Some(place) => {
                rules[place] = new;
                installed[place] = text;
            }
            None => {
                rules.insert(count, new);
                installed.push(text);
            }
        }
        self.apply(&mut state, rules, installed)
            .map_err(|why| wrong(why.text))?;
        Ok(())
    }

    /// Takes an installed rule out of force.
    ///
    /// # Errors
    /// There is none of that name, or the hooker fails.
    pub(crate) fn withdraw(&self, name: &str) -> Result<(), String> {
        let mut state = self.lock();
        let count = state.installed.len();
        let place = state.rules[..count]
            .iter()
            .position(|rule| rule.name == name);
        let place =
            place.ok_or_else(|| format!("no rule \"{name}\" is installed: vtl rule list"))?;
        let (mut rules, mut installed) = (state.rules.clone(), state.installed.clone());
        rules.remove(place);
        installed.remove(place);
        let applied = self.apply(&mut state, rules, installed);
        applied.map(drop).map_err(|wrong| wrong.text)
    }

    /// The installed rules that have not expired, for the next daemon.
    pub(crate) fn leave(&self) -> Vec<Text> {
        let state = self.lock();
        let now = SystemTime::now();
        let both = state.rules.iter().zip(&state.installed);
        let left = both.filter(|(rule, _)| !rule.has_expired(now));
        left.map(|(_, text)| text.clone()).collect()
    }

    /// Takes what a former daemon has left; what is not right here is lost.
    pub(super) fn inherit(&self, left: Vec<Text>) {
        let mut state = self.lock();
        for text in left.into_iter().take(MAX_RULES) {
            match self.parse_installed(&text, &state) {
                Ok(rule) => {
                    let count = state.installed.len();
                    state.rules.insert(count, rule);
                    state.installed.push(text);
                }
                Err(why) => tracing::warn!(why, "handover: an installed rule is lost"),
            }
        }
    }

    /// Parses an installed rule beside all others but the one that it replaces.
    fn parse_installed(&self, text: &str, state: &State) -> Result<Rule, String> {
        let count = state.installed.len();
        let (installed, of_file) = state.rules.split_at(count.min(state.rules.len()));
        let alone = self.parse(text, &[]).map_err(|wrong| wrong.text)?;
        let [new] = &alone[..] else {
            return Err("\"rule\" is one rule".into());
        };
        if of_file.iter().any(|known| known.name == new.name) {
            let file = self.path.display();
            return Err(format!(
                "{file} has a rule \"{}\": take another name",
                new.name
            ));
        }
        let others = installed.iter().filter(|known| known.name != new.name);
        let others: Vec<Rule> = others.chain(of_file).cloned().collect();
        let beside = self.parse(text, &others).map_err(|wrong| wrong.text)?;
        beside
            .into_iter()
            .next()
            .ok_or_else(|| "there is no rule".into())
    }

    /// Puts rules in force, of which the first are installed ones, and tells what has changed. Returns how many.
    pub(super) fn apply(
        &self,
        state: &mut State,
        rules: Vec<Rule>,
        installed: Vec<Text>,
    ) -> Result<usize, Wrong> {
        let former = chosen(&state.rules, &state.in_force);
        let in_force = in_force(&rules, SystemTime::now());
        let chosen = chosen(&rules, &in_force);
        let stopping = || Wrong {
            place: crate::hooker::rules::Place { line: 1, column: 1 },
            text: "the daemon is stopping".into(),
        };
        let hooker = self.hooker.upgrade().ok_or_else(stopping)?;
        hooker.set_rules(&chosen)?;
        let names: Vec<&str> = rules[..installed.len()]
            .iter()
            .map(|rule| &*rule.name)
            .collect();
        tell_changes(&former, &chosen, &names);
        *state = State {
            rules,
            installed,
            in_force,
            is_watching: hooker.refresh_rules(),
            retry: None,
        };
        self.changed.notify_all();
        Ok(chosen.len())
    }

    /// Parses rules, and checks that this host supports their carriers.
    pub(super) fn parse(&self, text: &str, others: &[Rule]) -> Result<Vec<Rule>, Wrong> {
        let uid = |name: &str| {
            let user = nix::unistd::User::from_name(name).ok().flatten();
            user.map(|user| user.uid.as_raw())
        };
        let rules = parse_beside(text, others, uid)?;
        self.check_carriers(&rules)?;
        Ok(rules)
    }
}

impl State {
    /// Forgets the installed rules that have expired.
    pub(super) fn forget_expired(&mut self) {
        let count = self.installed.len();
        let gone: Vec<usize> = (0..count).filter(|i| !self.in_force[*i]).collect();
        for i in gone.into_iter().rev() {
            self.rules.remove(i);
            self.installed.remove(i);
            self.in_force.remove(i);
        }
    }

    /// Whether a rule is an installed one.
    pub(super) fn is_installed(&self, name: &str) -> bool {
        self.rules
            .iter()
            .zip(&self.installed)
            .any(|(rule, _)| rule.name == name)
    }
}

/// A rule as a file would have it.
fn text(mut rule: Map<String, Value>, expires: SystemTime) -> Result<Text, String> {
    if rule.contains_key("expires") {
        return Err("\"for_s\" says when it expires: leave \"expires\" out".into());
    }
    // TOML has no null: as if it were not there.
    rule.retain(|_, value| !value.is_null());
    let mut table = toml::Table::try_from(rule)
        .map_err(|error| format!("\"rule\" is not as in a file of rules: {error}"))?;
    // Whole seconds, not before its time.
    let expires = expires + Duration::from_nanos(999_999_999);
    let at = humantime::format_rfc3339_seconds(expires).to_string();
    let at = at.parse::<toml::value::Datetime>();
    let at = at.map_err(|error| error.to_string())?;
    table.insert("expires".into(), at.into());
    let rules = toml::Value::Array(vec![table.into()]);
    let text = toml::to_string(&toml::Table::from_iter([("rule".to_owned(), rules)]));
    let text = text.map_err(|error| format!("\"rule\" is not as in a file of rules: {error}"))?;
    match text.len() <= LONGEST {
        true => Ok(text),
        false => Err(format!("\"rule\" is longer than {} KiB", LONGEST >> 10)),
    }
}

/// Tells that a rule's time is over.
pub(super) fn tell_expired(rule: &Rule) {
    emit(What::RuleExpired {
        rule: rule.name.clone().into(),
    });
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::hooker::rules::About;

    #[test]
    fn text__is_a_rule_of_a_file() {
        let at = SystemTime::UNIX_EPOCH + Duration::from_secs(1_800_000_000);
        let of = |rule: Value| text(rule.as_object().expect("an object").clone(), at);
        let rule = of(json!({
            "name": "offices", "to": ["10.0.0.0/8", "2001:db8::/32"], "port": 80, "carrier": "best", "user": null,
            "when": [{ "if": "rtt >= 300ms", "carrier": "quic" }], "dwell": "10s",
        }));
        let parsed = parse_beside(&rule.expect("right"), &[], |_| None).expect("right");
        let [rule] = &parsed[..] else {
            panic!("{parsed:?}");
        };
        assert_eq!((rule.name.as_str(), rule.expires), ("offices", Some(at)));
        assert!(rule.when.is_some());
        let About::Opened(matches, _) = &rule.about else {
            panic!("{rule:?}");
        };
        assert_eq!((matches.to.len(), matches.port.len()), (2, 1));
        let services = of(json!({ "name": "a", "services": { "require": "encryption" } }));
        assert!(parse_beside(&services.expect("right"), &[], |_| None).is_ok());
        for (wrong, about) in [
            (json!({ "name": "a", "expires": "now" }), "for_s"),
            (json!({ "name": "a".repeat(LONGEST) }), "longer than 16 KiB"),
        ] {
            let why = of(wrong).expect_err("wrong");
            assert!(why.contains(about), "{why}");
        }
    }
}
