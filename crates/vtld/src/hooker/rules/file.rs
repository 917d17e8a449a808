//! Parser of the file of rules: TOML, accepted as a whole or rejected with the position of the error.

mod bounds;
mod via;
mod when;

use std::{
    ops::{Range, RangeInclusive},
    path::{Path, PathBuf},
    time::SystemTime,
};

use toml::{
    Spanned,
    de::{DeString, DeTable, DeValue},
};

use vtl_proto::services::{Requirements, Services};

use super::{About, Action, MAX_RULES, Matches, Place, Prefix, Rule, User, Wrong};
use crate::hooker::{Carrier, Must};

/// Maximum length of a name, characters.
const LONGEST_NAME: usize = 64;
/// Maximum size of the file, bytes.
pub const LONGEST_FILE: usize = 1 << 20;

type Result<T> = std::result::Result<T, Wrong>;
type Value<'a> = Spanned<DeValue<'a>>;
type Key<'a> = Spanned<DeString<'a>>;

/// Parses a file of rules. `uid`: looks up a user of this host by name.
///
/// # Errors
/// The first error found.
pub fn parse(text: &str, uid: impl Fn(&str) -> Option<u32>) -> Result<Vec<Rule>> {
    parse_beside(text, &[], uid)
}

/// The same for rules that are to be in force beside others, with which they must agree.
///
/// # Errors
/// The first error found.
pub fn parse_beside(
    text: &str,
    others: &[Rule],
    uid: impl Fn(&str) -> Option<u32>,
) -> Result<Vec<Rule>> {
    let source = Source { text, uid: &uid };
    if text.len() > LONGEST_FILE {
        return source.wrong(
            0..0,
            format!("the file is longer than {} KiB", LONGEST_FILE >> 10),
        );
    }
    let table = DeTable::parse(text).map_err(|error| {
        // On one line.
        let message = error.message().trim().replace('\n', ", ");
        source.error(error.span().unwrap_or(0..0), message)
    })?;
    let mut rules = others.to_vec();
    for (key, value) in table.get_ref() {
        if key.get_ref() != "rule" {
            return source.wrong(
                key.span(),
                format!(
                    "there is no \"{}\" here: each rule begins with [[rule]]",
                    key.get_ref().escape_debug()
                ),
            );
        }
        let DeValue::Array(tables) = value.get_ref() else {
            return source.wrong(key.span(), "write [[rule]], with two brackets".into());
        };
        for table in tables.iter() {
            let DeValue::Table(keys) = table.get_ref() else {
                return source.wrong(
                    table.span(),
                    "a rule is a table: begin it with [[rule]]".into(),
                );
            };
            if rules.len() == MAX_RULES {
                return source.wrong(table.span(), format!("more than {MAX_RULES} rules"));
            }
            rules.push(source.rule(table.span(), keys, &rules)?);
        }
    }
    Ok(rules.split_off(others.len()))
}

struct Source<'a> {
    text: &'a str,
    uid: &'a dyn Fn(&str) -> Option<u32>,
}

/// The keys of one rule as read, with their positions for errors about combinations.
#[derive(Default)]
struct Draft<'a> {
    name: Option<String>,
    matches: Matches,
    /// The first key with a condition.
    matching: Option<&'a Key<'a>>,
    local: Option<&'a Key<'a>>,
    exe: Option<Place>,
    /// The ports of servers, with the key.
    listen: Option<(&'a Key<'a>, Vec<u16>)>,
    /// The actions, with their keys and values; at most one is valid.
    actions: Vec<(&'a Key<'a>, &'a Value<'a>, Action)>,
    /// Position of the mark loss-tolerant.
    tolerant: Option<Range<usize>>,
    /// The requirement of a carrier or of encryption, and its position.
    required: Option<(Must, Range<usize>)>,
    /// The carrier of TCP to clients without VTL, and its position.
    others: Option<(&'a str, Range<usize>)>,
    via: via::Via<'a>,
    when: when::Draft,
    /// A condition names a carrier that loses something.
    loses_by_when: bool,
    expires: Option<SystemTime>,
    bounded: bounds::Bounded,
}

/// The keys of a rule: its name, conditions, then actions.
const KEYS: &str = "name, cgroup, user, exe, port, to, profile, local, via, from, from_port, listen, carrier, \
                    services, others, loss_tolerant, require_carrier, require_encryption, bypass, when, dwell, \
                    max_delay, min_throughput and expires";

/// The line of a rule that sets a requirement, for errors.
fn required_by(must: Must) -> &'static str {
    match must {
        Must::Carrier => "require_carrier = true",
        Must::Encryption => "require_encryption = true",
    }
}

impl Source<'_> {
    fn place(&self, span: Range<usize>) -> Place {
        let before = self.text.get(..span.start).unwrap_or(self.text);
        let line_start = before.rfind('\n').map_or(0, |at| at + 1);
        Place {
            line: before.matches('\n').count() + 1,
            column: before[line_start..].chars().count() + 1,
        }
    }

    fn error(&self, span: Range<usize>, text: String) -> Wrong {
        let place = self.place(span);
        Wrong { place, text }
    }

    fn wrong<T>(&self, span: Range<usize>, text: String) -> Result<T> {
        Err(self.error(span, text))
    }

    fn rule(&self, span: Range<usize>, keys: &DeTable<'_>, former: &[Rule]) -> Result<Rule> {
        let mut draft = self.draft(keys, former)?;
        let Some(name) = draft.name.take() else {
            return self.wrong(span, "a rule needs a name: name = \"backup\"".into());
        };
        if let [_, (second, ..), ..] = &draft.actions[..] {
            let text = format!(
                "rule \"{name}\" has two actions: take one of carrier, services and bypass"
            );
            return self.wrong(second.span(), text);
        }
        let exe = draft.exe;
        let expires = draft.expires;
        let when = std::mem::take(&mut draft.when);
        draft.loses_by_when = when.loses();
        let tolerant = draft.tolerant.clone();
        let (about, at) = match (draft.listen.take(), draft.via.key) {
            (Some((key, ports)), _) => self.accepted(draft, key, ports)?,
            (None, Some(key)) => self.forwarded(draft, key, &name)?,
            (None, None) => self.opened(draft, &name, span)?,
        };
        Ok(Rule {
            name,
            when: self.conditions(when, &about, tolerant.is_some())?,
            about,
            expires,
            place: self.place(at),
            exe,
        })
    }

    /// Reads the keys of a rule; [`Source::rule`] checks that they fit together.
    fn draft<'k>(&self, keys: &'k DeTable<'k>, former: &[Rule]) -> Result<Draft<'k>> {
        let mut draft = Draft::default();
        let matches = &mut draft.matches;
        for (key, value) in in_order(keys) {
            let which = key.get_ref().as_ref();
            match which {
                "cgroup" => matches.cgroup = self.each(value, |v| self.cgroup(v))?,
                "user" => matches.user = self.each(value, |v| self.user(v))?,
                "exe" => {
                    matches.exe = self.each(value, |v| self.exe(v))?;
                    draft.exe = Some(self.place(value.span()));
                }
                "port" => matches.port = self.each(value, |v| self.ports(v))?,
                "to" => matches.to = self.each(value, |v| self.prefix(v))?,
                "via" => draft.via.matches.via = self.each(value, |v| self.interface(v))?,
                "from" => draft.via.matches.from = self.each(value, |v| self.prefix(v))?,
                "from_port" => draft.via.matches.from_port = self.each(value, |v| self.ports(v))?,
                "profile" => matches.profile = self.each(value, |v| self.parsed(v, "a profile"))?,
                "local" => {
                    matches.local = self.truth(value)?;
                    draft.local = Some(key);
                }
                "name" => draft.name = Some(self.name(value, former)?),
                "listen" => {
                    draft.listen = Some((key, self.each(value, |v| self.listen(v, former))?));
                }
                "carrier" => {
                    let action = Action::Carry(self.carrier(value)?);
                    draft.actions.push((key, value, action));
                }
                "services" => {
                    let wanted = Carrier::Services(self.services(value)?);
                    draft.actions.push((key, value, Action::Carry(wanted)));
                }
                "others" => {
                    let others = self.string(value, "a carrier")?;
                    draft.others = Some((others, value.span()));
                }
                "loss_tolerant" => {
                    if self.truth(value)? {
                        draft.tolerant = Some(key.span());
                    }
                }
                "require_carrier" => {
                    if self.truth(value)? {
                        let mark = (Must::Carrier, key.span());
                        draft.required.get_or_insert(mark);
                    }
                }
                "require_encryption" => {
                    if self.truth(value)? {
                        draft.required = Some((Must::Encryption, key.span()));
                    }
                }
                "when" => draft.when.conditions = Some((key.span(), self.when(value)?)),
                "dwell" => draft.when.dwell = Some((key.span(), self.dwell(value)?)),
                "max_delay" | "min_throughput" => self.bound(key, value, &mut draft.bounded)?,
                "expires" => draft.expires = Some(self.expiry(value)?),
                "bypass" => {
                    if !self.truth(value)? {
                        return self
                            .wrong(value.span(), "bypass = true, or no bypass at all".into());
                    }
                    draft.actions.push((key, value, Action::Bypass));
                }
                other => {
                    let other = other.escape_debug();
                    let text = format!("a rule has no \"{other}\": it has {KEYS}");
                    return self.wrong(key.span(), text);
                }
            }
            let matcher = ["cgroup", "user", "exe", "port", "to", "profile", "local"];
            let of_gateways = ["via", "from", "from_port"];
            if of_gateways.contains(&which) {
                draft.via.key.get_or_insert(key);
            }
            if matcher.contains(&which) || of_gateways.contains(&which) {
                draft.matching.get_or_insert(key);
            }
        }
        Ok(draft)
    }

    /// Builds a rule about connections accepted at `ports`, which `key` names. Also returns the position of the
    /// carrier.
    fn accepted(
        &self,
        mut draft: Draft<'_>,
        key: &Key<'_>,
        mut ports: Vec<u16>,
    ) -> Result<(About, Range<usize>)> {
        if let Some(matching) = draft.matching {
            let text = format!(
                "\"{}\" and \"listen\" exclude each other: the one is about connections that \
                 this host opens, the other about those that it accepts",
                matching.get_ref()
            );
            return self.wrong(matching.span(), text);
        }
        self.bounded(None, std::mem::take(&mut draft.bounded))?;
        ports.sort_unstable();
        if let Some(twice) = ports.windows(2).find(|p| p[0] == p[1]) {
            return self.wrong(key.span(), format!("port {} is there twice", twice[0]));
        }
        let (at, carrier) = match draft.actions.pop() {
            None => (key.span(), Carrier::Best),
            Some((_, value, Action::Carry(carrier))) => {
                if let Err(error) = carrier.serves_port() {
                    return self.wrong(value.span(), error.to_string());
                }
                (value.span(), carrier)
            }
            Some((key, _, Action::Bypass)) => {
                let text = "a port that no rule names is left alone already: drop bypass, \
                            or the rule";
                return self.wrong(key.span(), text.into());
            }
        };
        let mut carrier = self.marked(carrier, &draft.tolerant, &at, true)?;
        if let Some((must, mark)) = draft.required {
            let required = carrier.required(must, required_by(must));
            carrier = required
                .and_then(|carrier| {
                    let serves = carrier.serves_port().map_err(|error| error.to_string());
                    serves.map(|()| carrier)
                })
                .map_err(|why| self.error(mark, why))?;
        }
        if let Some((others, place)) = draft.others {
            let with = carrier.with_others(others, true, "others");
            carrier = with.map_err(|why| self.error(place, why))?;
        }
        Ok((About::Accepted(ports, carrier), at))
    }

    /// Builds a rule about connections that this host opens. Also returns the position of the action.
    fn opened(
        &self,
        mut draft: Draft<'_>,
        name: &str,
        span: Range<usize>,
    ) -> Result<(About, Range<usize>)> {
        let Some((key, value, action)) = draft.actions.pop() else {
            let text = format!(
                "rule \"{name}\" says what it matches, not what is to happen: add carrier = \"best\", \
                 \"tcp\", \"tcp:CONTROL\", \"graft:NAME\" or another, services, or bypass = true"
            );
            return self.wrong(span, text);
        };
        if let Some((_, place)) = draft.others {
            let text =
                "\"others\" goes with \"listen\": it is about clients of a server of this host";
            return self.wrong(place, text.into());
        }
        let local = draft.local.filter(|_| draft.matches.local);
        if let Some(local) = local.filter(|_| action.captures()) {
            let text = format!(
                "local connections cannot travel by {action}, which takes two hosts: drop local, or \
                 take a carrier like tcp:cubic"
            );
            return self.wrong(local.span(), text);
        }
        let bounded = std::mem::take(&mut draft.bounded);
        let action = match action {
            Action::Bypass => {
                self.bounded(None, bounded)?;
                Action::Bypass
            }
            Action::Carry(carrier) => {
                let carrier = self.bounded(Some(carrier), bounded)?;
                Action::Carry(carrier.unwrap_or_default())
            }
        };
        let (at, action) = match action {
            Action::Bypass => match (draft.tolerant, draft.required) {
                (None, None) => (key.span(), Action::Bypass),
                (Some(mark), _) => {
                    let text = "bypass has no use for the mark loss_tolerant";
                    return self.wrong(mark, text.into());
                }
                (None, Some((_, mark))) => {
                    let text = "bypass excludes require_carrier and require_encryption";
                    return self.wrong(mark, text.into());
                }
            },
            Action::Carry(carrier) => {
                let mark = match (&carrier, draft.loses_by_when) {
                    (Carrier::Lossy(_), _) | (_, false) => draft.tolerant.clone(),
                    // It is for the carrier of a condition.
                    (_, true) => None,
                };
                let mut carrier = self.marked(carrier, &mark, &value.span(), false)?;
                if let Some((must, mark)) = draft.required {
                    let required = carrier.required(must, required_by(must));
                    carrier = required.map_err(|why| self.error(mark, why))?;
                }
                (value.span(), Action::Carry(carrier))
            }
        };
        Ok((About::Opened(draft.matches, action), at))
    }

    /// Reads one value, or a list that is not empty.
    fn each<T>(&self, value: &Value<'_>, one: impl Fn(&Value<'_>) -> Result<T>) -> Result<Vec<T>> {
        match value.get_ref() {
            DeValue::Array(list) if list.is_empty() => {
                let text = "an empty list matches nothing: leave the line out, or name something";
                self.wrong(value.span(), text.into())
            }
            DeValue::Array(list) => list.iter().map(one).collect(),
            _ => Ok(vec![one(value)?]),
        }
    }

    fn string<'a>(&self, value: &'a Value<'_>, what: &str) -> Result<&'a str> {
        match value.get_ref() {
            DeValue::String(text) => Ok(text),
            other => {
                let text = format!("{what} is text in quotes, not {}", kind(other));
                self.wrong(value.span(), text)
            }
        }
    }

    fn truth(&self, value: &Value<'_>) -> Result<bool> {
        match value.get_ref() {
            DeValue::Boolean(truth) => Ok(*truth),
            other => self.wrong(
                value.span(),
                format!("this is true or false, not {}", kind(other)),
            ),
        }
    }

    /// Reads a date and time, in UTC.
    fn expiry(&self, value: &Value<'_>) -> Result<SystemTime> {
        let date = value.get_ref().as_datetime();
        let parsed = date.and_then(|date| humantime::parse_rfc3339(&date.to_string()).ok());
        parsed.ok_or_else(|| {
            let text = "expires is a date and a time in UTC, without quotes: 2027-01-31T18:00:00Z";
            self.error(value.span(), text.into())
        })
    }

    /// Reads a number, if it is one and fits a `u32`.
    fn number(&self, value: &Value<'_>) -> Option<u32> {
        let number = value.get_ref().as_integer()?;
        u32::from_str_radix(number.as_str(), number.radix()).ok()
    }

    fn parsed<T: std::str::FromStr<Err = String>>(
        &self,
        value: &Value<'_>,
        what: &str,
    ) -> Result<T> {
        let parsed = self.string(value, what)?.parse();
        parsed.map_err(|text| self.error(value.span(), text))
    }

    fn name(&self, value: &Value<'_>, former: &[Rule]) -> Result<String> {
        let name = self.string(value, "a name")?;
        if name.is_empty() || name.chars().count() > LONGEST_NAME || name.contains(char::is_control)
        {
            let text = format!("a name has 1 to {LONGEST_NAME} characters, all of them printable");
            return self.wrong(value.span(), text);
        }
        if former.iter().any(|rule| rule.name == name) {
            let text = format!("there are two rules \"{name}\": names are for one each");
            return self.wrong(value.span(), text);
        }
        Ok(name.to_owned())
    }

    fn carrier(&self, value: &Value<'_>) -> Result<Carrier> {
        let carrier = self.string(value, "a carrier")?.parse();
        carrier.map_err(|error| self.error(value.span(), error))
    }

    /// Checks a carrier of flows, or of ports, against the mark loss-tolerant at `tolerant`, if there is one.
    fn marked(
        &self,
        carrier: Carrier,
        tolerant: &Option<Range<usize>>,
        at: &Range<usize>,
        ports: bool,
    ) -> Result<Carrier> {
        let marked = carrier.marked(tolerant.is_some(), ports, "loss_tolerant = true");
        let at = tolerant.as_ref().unwrap_or(at);
        marked.map_err(|why| self.error(at.clone(), why))
    }

    /// Reads the table `services`: requirements of sessions.
    fn services(&self, value: &Value<'_>) -> Result<Requirements> {
        const ALLOWED: &str = "require, prefer, avoid, prohibit, max_delay_ms and \
                               min_throughput_mbit";
        let DeValue::Table(keys) = value.get_ref() else {
            let text =
                format!("services is a table of {ALLOWED}, like {{ require = \"encryption\" }}");
            return self.wrong(value.span(), text);
        };
        let mut wanted = Requirements::default();
        for (key, value) in in_order(keys) {
            match key.get_ref().as_ref() {
                "require" => wanted.services = self.set(value)?,
                "prefer" => wanted.prefer = self.set(value)?,
                "avoid" => wanted.avoid = self.set(value)?,
                "prohibit" => wanted.prohibit = self.set(value)?,
                "max_delay_ms" => match self.number(value) {
                    Some(ms) if ms > 0 => wanted.qos.max_delay_ms = Some(ms),
                    _ => {
                        let text = "max_delay_ms is a number of milliseconds from 1";
                        return self.wrong(value.span(), text.into());
                    }
                },
                "min_throughput_mbit" => {
                    let mbit = match value.get_ref() {
                        DeValue::Float(mbit) => mbit.as_str().parse().ok(),
                        _ => self.number(value).map(f64::from),
                    };
                    match mbit {
                        Some(mbit) if mbit > 0.0 && f64::is_finite(mbit) => {
                            wanted.qos.min_throughput_mbit = Some(mbit);
                        }
                        _ => {
                            let text = "min_throughput_mbit is a number above 0";
                            return self.wrong(value.span(), text.into());
                        }
                    }
                }
                other => {
                    let other = other.escape_debug();
                    let text = format!("there is no \"{other}\" here: there are {ALLOWED}");
                    return self.wrong(key.span(), text);
                }
            }
        }
        // Check as the session will be requested.
        let mut whole = wanted;
        whole.services = Services::TCP | wanted.services;
        match whole.contradiction() {
            None => Ok(wanted),
            Some(error) => {
                let text = format!("{error} (TCP connections require {})", Services::TCP);
                self.wrong(value.span(), text)
            }
        }
    }

    /// Reads services, as one text or a list.
    fn set(&self, value: &Value<'_>) -> Result<Services> {
        let one = |value: &Value<'_>| {
            let parsed = self.string(value, "a service")?.parse::<Services>();
            parsed.map_err(|error| self.error(value.span(), error.to_string()))
        };
        let all = self.each(value, one)?;
        Ok(all.into_iter().fold(Services::NONE, |all, one| all | one))
    }

    fn path(&self, value: &Value<'_>, what: &str, example: &str) -> Result<PathBuf> {
        let text = self.string(value, what)?;
        let path = Path::new(text);
        let plain = path
            .components()
            .all(|c| c != std::path::Component::ParentDir);
        if path.is_absolute() && plain && !text.contains('\0') {
            // Normalised (slashes), since paths are compared.
            Ok(path.components().collect())
        } else {
            let text = format!("{what} is a whole path without \"..\", like {example}");
            self.wrong(value.span(), text)
        }
    }

    fn cgroup(&self, value: &Value<'_>) -> Result<PathBuf> {
        self.path(value, "a cgroup", "/system.slice/backup.service")
    }

    fn exe(&self, value: &Value<'_>) -> Result<PathBuf> {
        self.path(value, "an executable", "/usr/bin/rsync")
    }

    fn user(&self, value: &Value<'_>) -> Result<User> {
        if let Some(id) = self.number(value) {
            let text = id.to_string();
            return Ok(User { id, text });
        }
        let DeValue::String(name) = value.get_ref() else {
            let text = "a user is a name in quotes, or a number".to_owned();
            return self.wrong(value.span(), text);
        };
        match (self.uid)(name) {
            Some(id) => Ok(User {
                id,
                text: name.clone().into_owned(),
            }),
            None => {
                let text = format!("this host has no user \"{}\"", name.escape_debug());
                self.wrong(value.span(), text)
            }
        }
    }

    /// Reads a port, or a range `"FIRST-LAST"`.
    fn ports(&self, value: &Value<'_>) -> Result<RangeInclusive<u16>> {
        const ALLOWED: &str = "ports are 1 to 65535, one (443), a range (\"8000-8100\") or a list";
        let range = match value.get_ref() {
            DeValue::Integer(_) => self
                .number(value)
                .and_then(|port| u16::try_from(port).ok())
                .map(|port| port..=port),
            DeValue::String(text) => {
                let number = |text: &str| text.trim().parse::<u16>().ok();
                match text.split_once('-') {
                    Some((first, last)) => number(first).zip(number(last)).map(|(a, b)| a..=b),
                    None => number(text).map(|port| port..=port),
                }
            }
            _ => None,
        };
        match range {
            Some(range) if *range.start() > 0 && !range.is_empty() => Ok(range),
            _ => self.wrong(value.span(), format!("this is no port: {ALLOWED}")),
        }
    }

    fn listen(&self, value: &Value<'_>, former: &[Rule]) -> Result<u16> {
        let port = self.number(value).and_then(|port| u16::try_from(port).ok());
        let Some(port) = port.filter(|port| *port > 0) else {
            let text = "listen is a port from 1 to 65535 that a server of this host has, or a list \
                        of them";
            return self.wrong(value.span(), text.into());
        };
        let has = |rule: &&Rule| matches!(&rule.about, About::Accepted(ports, _) if ports.contains(&port));
        match former.iter().find(has) {
            Some(rule) => {
                let text = format!("rule \"{}\" has port {port} already", rule.name);
                self.wrong(value.span(), text)
            }
            None => Ok(port),
        }
    }

    fn prefix(&self, value: &Value<'_>) -> Result<Prefix> {
        let text = self.string(value, "a destination")?;
        match text.parse() {
            Ok(prefix) => Ok(prefix),
            Err(wrong) => {
                let text = format!("\"{}\" is {wrong}", text.escape_debug());
                self.wrong(value.span(), text)
            }
        }
    }
}

/// The keys of a table in the file's order, so that the first mistake is reported.
fn in_order<'a, 'b>(keys: &'a DeTable<'b>) -> Vec<(&'a Key<'b>, &'a Value<'b>)> {
    let mut keys: Vec<_> = keys.iter().collect();
    keys.sort_by_key(|(key, _)| key.span().start);
    keys
}

/// A value's kind in an operator's words.
fn kind(value: &DeValue<'_>) -> &'static str {
    match value {
        DeValue::String(_) => "text",
        DeValue::Integer(_) | DeValue::Float(_) => "a number",
        DeValue::Boolean(_) => "true or false",
        DeValue::Datetime(_) => "a date",
        DeValue::Array(_) => "a list",
        DeValue::Table(_) => "a table",
    }
}

#[cfg(test)]
mod tests;
