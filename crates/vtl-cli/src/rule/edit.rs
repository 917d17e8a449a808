//! The file of rules, changed in place: comments, order and form of what is there stay.

use std::fs;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use anyhow::{Context, anyhow, bail};
use nix::fcntl::{Flock, FlockArg};
use toml_edit::{
    Array, ArrayOfTables, Datetime, DocumentMut, InlineTable, Item, Table, Value, value,
};
use vtl_control::{Client, Request, RuleCount};

use crate::daemon;

/// From the epoch to the year 10000, which RFC 3339 does not have.
const LAST: Duration = Duration::from_secs(253_402_300_800);

/// A rule to be written.
pub(super) struct Draft<'a> {
    pub(super) name: &'a str,
    /// Kinds of conditions with their values.
    pub(super) lists: [(&'a str, &'a [String]); 9],
    pub(super) local: bool,
    pub(super) listen: &'a [u16],
    pub(super) carrier: Option<&'a str>,
    pub(super) others: Option<&'a str>,
    pub(super) loss_tolerant: bool,
    pub(super) require_carrier: bool,
    pub(super) require_encryption: bool,
    pub(super) services: Services<'a>,
    /// Conditions on the path, with their carriers.
    pub(super) when: &'a [(String, String)],
    pub(super) dwell: Option<&'a str>,
    /// What is bounded, by its key.
    pub(super) bounds: [(&'a str, Option<&'a str>); 2],
    pub(super) expires: Option<Datetime>,
    pub(super) bypass: bool,
}

/// Parses "CONDITION then CARRIER". The daemon says whether these are right.
pub(super) fn when(text: &str) -> Result<(String, String), String> {
    let parts = text.rsplit_once(" then ");
    let parts = parts.map(|(condition, carrier)| (condition.trim(), carrier.trim()));
    match parts.filter(|(condition, carrier)| !condition.is_empty() && !carrier.is_empty()) {
        Some((condition, carrier)) => Ok((condition.to_owned(), carrier.to_owned())),
        None => {
            Err("expected a condition and a carrier, such as \"rtt >= 300ms then quic\"".into())
        }
    }
}

/// Parses a time from now, or a date and time in UTC (RFC 3339).
pub(super) fn expiry(text: &str) -> Result<Datetime, String> {
    let now = SystemTime::now();
    let at = match humantime::parse_duration(text) {
        Ok(time) => now.checked_add(time),
        Err(_) => humantime::parse_rfc3339(text).ok(),
    };
    let at = at.filter(|at| *at > now && *at < SystemTime::UNIX_EPOCH + LAST);
    // Whole seconds, not before its time.
    let at = at.map(|at| at + Duration::from_nanos(999_999_999));
    let written = at.map(|at| humantime::format_rfc3339_seconds(at).to_string());
    written
        .and_then(|text| text.parse().ok())
        .ok_or_else(|| "expected a time such as 30min, 8h or 2027-01-31T18:00:00Z".into())
}

/// What its sessions are to be like; nothing named is nothing asked for.
#[derive(Default)]
pub(super) struct Services<'a> {
    pub(super) sets: [(&'a str, &'a [String]); 4],
    pub(super) max_delay_ms: Option<u32>,
    pub(super) min_throughput_mbit: Option<f64>,
}

impl Services<'_> {
    fn table(&self) -> InlineTable {
        let mut table = InlineTable::new();
        for (level, services) in self.sets {
            if let Some(value) = one_or_many(services.iter().map(Value::from)) {
                table.insert(level, value);
            }
        }
        if let Some(ms) = self.max_delay_ms {
            table.insert("max_delay_ms", i64::from(ms).into());
        }
        if let Some(mbit) = self.min_throughput_mbit {
            table.insert("min_throughput_mbit", mbit.into());
        }
        table
    }
}

impl Draft<'_> {
    fn table(&self) -> Table {
        let mut table = Table::new();
        table["name"] = value(self.name);
        for (kind, values) in self.lists {
            // Numbers as numbers, which need no quotes.
            let word = |text: &String| match text.parse::<u32>() {
                Ok(number) if matches!(kind, "port" | "from_port" | "user") => {
                    Value::from(i64::from(number))
                }
                _ => Value::from(text),
            };
            put(&mut table, kind, values.iter().map(word));
        }
        if self.local {
            table["local"] = value(true);
        }
        let ports = self.listen.iter().map(|port| i64::from(*port).into());
        put(&mut table, "listen", ports);
        if let Some(carrier) = self.carrier {
            table["carrier"] = value(carrier);
        }
        if let Some(others) = self.others {
            table["others"] = value(others);
        }
        if self.loss_tolerant {
            table["loss_tolerant"] = value(true);
        }
        if self.require_carrier {
            table["require_carrier"] = value(true);
        }
        if self.require_encryption {
            table["require_encryption"] = value(true);
        }
        let services = self.services.table();
        if !services.is_empty() {
            table["services"] = value(services);
        }
        let conditions = self.when.iter().map(|(condition, carrier)| {
            let table: InlineTable = [("if", condition), ("carrier", carrier)]
                .into_iter()
                .collect();
            Value::from(table)
        });
        put(&mut table, "when", conditions);
        if let Some(dwell) = self.dwell {
            table["dwell"] = value(dwell);
        }
        for (key, bound) in self.bounds {
            if let Some(bound) = bound {
                table[key] = value(bound);
            }
        }
        if let Some(expires) = self.expires {
            table["expires"] = value(expires);
        }
        if self.bypass {
            table["bypass"] = value(true);
        }
        table
    }
}

fn put(table: &mut Table, key: &str, values: impl Iterator<Item = Value>) {
    if let Some(all) = one_or_many(values) {
        table[key] = value(all);
    }
}

/// One value by itself, several as a list.
fn one_or_many(values: impl Iterator<Item = Value>) -> Option<Value> {
    let mut values: Vec<Value> = values.collect();
    match values.len() {
        0 | 1 => values.pop(),
        _ => Some(values.into_iter().collect::<Array>().into()),
    }
}

/// The text with one rule more.
pub(super) fn add(text: &str, draft: &Draft<'_>, before: Option<&str>) -> anyhow::Result<String> {
    let mut document = parse(text)?;
    let rules = rules(&mut document)?;
    if rules.iter().any(|rule| name(rule) == Some(draft.name)) {
        bail!(
            "there is a rule \"{}\" already: vtl rule remove {0}",
            draft.name
        );
    }
    let mut all: Vec<Table> = std::mem::take(rules).into_iter().collect();
    let at = match before {
        Some(before) => position(&all, before)?,
        None => all.len(),
    };
    let mut table = draft.table();
    let apart = if text.trim().is_empty() { "" } else { "\n" };
    let last = at == all.len();
    let head = match all.first_mut().filter(|_| at == 0) {
        // What stands at the top of the file stays there.
        Some(first) => {
            let (head, own) = paragraphs(first);
            first.decor_mut().set_prefix(format!("\n{own}"));
            head
        }
        None => apart.to_owned(),
    };
    table.decor_mut().set_prefix(head);
    all.insert(at, table);
    fill(rules, all);
    if last {
        // As does what stands behind the last rule.
        let before = document.trailing().as_str().unwrap_or_default().to_owned();
        document.set_trailing("");
        let all = self::rules(&mut document)?;
        if let Some(table) = all.get_mut(at) {
            table.decor_mut().set_prefix(before + apart);
        }
    }
    Ok(document.to_string())
}

/// The text without a rule, nor the comments right before it; those that a blank line parts from
/// them stay.
pub(super) fn remove(text: &str, name: &str) -> anyhow::Result<String> {
    let mut document = parse(text)?;
    let rules = rules(&mut document)?;
    let mut all: Vec<Table> = std::mem::take(rules).into_iter().collect();
    let at = position(&all, name)?;
    let (kept, _) = paragraphs(&all.remove(at));
    match all.get_mut(at) {
        Some(next) if !kept.trim().is_empty() => {
            let prefix = prefix(next).trim_start_matches('\n').to_owned();
            next.decor_mut().set_prefix(kept + &prefix);
            fill(rules, all);
        }
        Some(_) => fill(rules, all),
        None => {
            fill(rules, all);
            let behind = document.trailing().as_str().unwrap_or_default().to_owned();
            document.set_trailing(kept.trim_end_matches('\n').to_owned() + "\n" + &behind);
        }
    }
    Ok(document.to_string().trim_start_matches('\n').to_owned())
}

/// The comments before a rule: those that a blank line parts from it, and those that are its own.
fn paragraphs(rule: &Table) -> (String, String) {
    let prefix = prefix(rule);
    let at = prefix.rfind("\n\n").map_or(0, |at| at + 2);
    (
        prefix[..at].to_owned(),
        prefix[at..].trim_start_matches('\n').to_owned(),
    )
}

fn prefix(rule: &Table) -> &str {
    let prefix = rule.decor().prefix();
    prefix
        .and_then(|prefix| prefix.as_str())
        .unwrap_or_default()
}

fn parse(text: &str) -> anyhow::Result<DocumentMut> {
    // Where exactly, the daemon says.
    let parsed = text.parse();
    parsed.map_err(|_| anyhow!("the file of rules is wrong as it is: vtl rule check"))
}

fn rules(document: &mut DocumentMut) -> anyhow::Result<&mut ArrayOfTables> {
    let rules = document
        .entry("rule")
        .or_insert_with(|| Item::ArrayOfTables(ArrayOfTables::new()));
    let tables = rules.as_array_of_tables_mut();
    tables
        .ok_or_else(|| anyhow!("the file of rules is not made of [[rule]] tables: edit it by hand"))
}

fn name(rule: &Table) -> Option<&str> {
    rule.get("name")?.as_str()
}

fn position(rules: &[Table], wanted: &str) -> anyhow::Result<usize> {
    let at = rules.iter().position(|rule| name(rule) == Some(wanted));
    at.ok_or_else(|| anyhow!("there is no rule \"{wanted}\": vtl rule list"))
}

/// In this order, whatever the order was.
fn fill(rules: &mut ArrayOfTables, all: Vec<Table>) {
    for (position, mut rule) in all.into_iter().enumerate() {
        rule.set_position(Some(position as isize));
        rules.push(rule);
    }
}

/// The file while it is being changed.
pub(super) struct File {
    /// Itself, where a link leads to it.
    path: PathBuf,
    /// Nobody else changes files here meanwhile.
    _lock: Flock<fs::File>,
}

impl File {
    /// Takes the file, which need not be there, and makes its directory.
    pub(super) fn open(path: &Path) -> anyhow::Result<Self> {
        let path = match path.canonicalize() {
            Ok(path) => path,
            Err(error) if error.kind() == io::ErrorKind::NotFound => path.to_owned(),
            Err(error) => {
                return Err(error).with_context(|| format!("cannot read {}", path.display()));
            }
        };
        let dir = folder(&path);
        let lock = fs::create_dir_all(dir)
            .and_then(|()| fs::File::open(dir))
            .and_then(|dir| {
                Flock::lock(dir, FlockArg::LockExclusive).map_err(|(_, errno)| errno.into())
            })
            .with_context(|| format!("cannot write into {}", dir.display()))?;
        let file = Self { path, _lock: lock };
        file.sweep();
        Ok(file)
    }

    /// What it says; nothing if it is not there.
    pub(super) fn text(&self) -> anyhow::Result<String> {
        match fs::read_to_string(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(String::new()),
            result => result.with_context(|| format!("cannot read {}", self.path.display())),
        }
    }

    /// Has the daemon take another text, which then is the file's; if it refuses, the file stays.
    pub(super) fn replace(&self, text: &str, socket: &Path) -> anyhow::Result<()> {
        let former = self.path.exists().then(|| self.text()).transpose()?;
        let new = self.write(text)?;
        let checked = fs::File::open(&new.0)
            .context("cannot read what was written")
            .and_then(|file| check(socket, &file, &self.path));
        checked.and_then(|()| self.take_place(&new))?;
        let reloaded =
            Client::connect(socket).and_then(|d| d.call::<RuleCount>(&Request::RuleReload));
        if let Err(error) = reloaded {
            // One that is silent may have read it.
            let is_read = matches!(error, vtl_control::Error::Silent(_));
            let error = daemon::explain(error);
            if is_read {
                return Err(error);
            }
            let back = match former {
                Some(former) => self.write(&former).and_then(|old| self.take_place(&old)),
                None => fs::remove_file(&self.path).map_err(Into::into),
            };
            back.with_context(|| format!("{error}; and {} is changed", self.path.display()))?;
            return Err(error);
        }
        Ok(())
    }

    /// Removes what an interrupted command has left beside the file, while the directory is locked.
    fn sweep(&self) {
        let name = self.path.file_name().unwrap_or_default().to_string_lossy();
        for entry in fs::read_dir(folder(&self.path))
            .into_iter()
            .flatten()
            .flatten()
        {
            let left = entry.file_name();
            let pid = left
                .to_str()
                .and_then(|left| left.strip_prefix(&format!(".{name}.")));
            if pid.is_some_and(|pid| pid.parse::<u32>().is_ok()) {
                let _ = fs::remove_file(entry.path());
            }
        }
    }

    /// Writes a text beside the file, as the file's owner and mode have it.
    fn write(&self, text: &str) -> anyhow::Result<Unplaced> {
        let name = self.path.file_name().unwrap_or_default().to_string_lossy();
        let path = self
            .path
            .with_file_name(format!(".{name}.{}", std::process::id()));
        let write = || -> io::Result<Unplaced> {
            let _ = fs::remove_file(&path);
            let mut file = fs::File::options()
                .write(true)
                .create_new(true)
                .mode(0o600)
                .open(&path)?;
            let unplaced = Unplaced(path.clone());
            file.write_all(text.as_bytes())?;
            match self.path.metadata() {
                Ok(old) => {
                    fchown(&file, Some(old.uid()), Some(old.gid()))?;
                    file.set_permissions(fs::Permissions::from_mode(old.mode() & 0o7777))?;
                }
                Err(_) => file.set_permissions(fs::Permissions::from_mode(0o644))?,
            }
            file.sync_all()?;
            Ok(unplaced)
        };
        write().with_context(|| format!("cannot write {}", path.display()))
    }

    /// Lets it be the file, at once and whole.
    fn take_place(&self, new: &Unplaced) -> anyhow::Result<()> {
        let place = || -> io::Result<()> {
            fs::rename(&new.0, &self.path)?;
            fs::File::open(folder(&self.path))?.sync_all()
        };
        place().with_context(|| format!("cannot write {}", self.path.display()))
    }
}

/// A file beside the one that it is to replace; gone when dropped, unless it has.
struct Unplaced(PathBuf);

impl Drop for Unplaced {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

fn folder(path: &Path) -> &Path {
    let folder = path.parent().filter(|dir| !dir.as_os_str().is_empty());
    folder.unwrap_or(Path::new("."))
}

/// Asks the daemon whether a file of rules is right. `name` is what the answer calls it.
pub(super) fn check(socket: &Path, file: &fs::File, name: &Path) -> anyhow::Result<()> {
    let name = name.display().to_string();
    let request = Request::RuleCheck { name };
    let _: RuleCount = daemon::ask(socket, |d| d.call_handing(&request, &[file.as_fd()]))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = "# Ours.\n\n\
        # Backups go over the satellite.\n\
        [[rule]]\n\
        name = \"backup\" # at night\n\
        user = 'backup'\n\
        carrier = \"graft:cubic\"\n\
        \n\
        # Never touch these.\n\
        [[rule]]\n\
        name = \"dns\"\n\
        port = 53\n\
        bypass = true\n";

    fn draft<'a>(name: &'a str, ports: &'a [String]) -> Draft<'a> {
        Draft {
            name,
            lists: [
                ("cgroup", &[]),
                ("user", &[]),
                ("exe", &[]),
                ("port", ports),
                ("to", &[]),
                ("profile", &[]),
                ("via", &[]),
                ("from", &[]),
                ("from_port", &[]),
            ],
            local: false,
            listen: &[],
            carrier: Some("best"),
            others: None,
            loss_tolerant: false,
            require_carrier: false,
            require_encryption: false,
            services: Services::default(),
            when: &[],
            dwell: None,
            bounds: [("max_delay", None), ("min_throughput", None)],
            expires: None,
            bypass: false,
        }
    }

    #[test]
    fn add__writes_what_is_bounded() {
        let with = Draft {
            bounds: [("max_delay", Some("200ms")), ("min_throughput", Some("5M"))],
            carrier: Some("auto"),
            ..draft("a", &[])
        };
        let text = add("", &with, None).unwrap();
        let head = "[[rule]]\nname = \"a\"\ncarrier = \"auto\"\n";
        let bounds = "max_delay = \"200ms\"\nmin_throughput = \"5M\"\n";
        assert_eq!(text, format!("{head}{bounds}"));
    }

    #[test]
    fn add__writes_when_it_expires() {
        let at = expiry("2127-01-31T18:00:00Z").unwrap();
        let with = Draft {
            expires: Some(at),
            ..draft("a", &[])
        };
        let text = add("", &with, None).unwrap();
        let line = "expires = 2127-01-31T18:00:00Z\n";
        assert!(text.ends_with(line), "{text}");
        assert!(expiry("8h").unwrap() > expiry("7h 50min").unwrap());
        for text in [
            "",
            "0s",
            "soon",
            "-1h",
            "9000years",
            "2001-01-31T18:00:00Z",
            "2127-01-31",
        ] {
            assert!(expiry(text).is_err(), "{text}");
        }
    }

    #[test]
    fn add__writes_conditions_as_tables() {
        let one = [when("rtt >= 300ms for 200ms then quic").unwrap()];
        let with = Draft {
            when: &one,
            dwell: Some("5s"),
            ..draft("a", &[])
        };
        let head = "[[rule]]\nname = \"a\"\ncarrier = \"best\"\n";
        let text = add("", &with, None).unwrap();
        let first = "{ if = \"rtt >= 300ms for 200ms\", carrier = \"quic\" }";
        assert_eq!(text, format!("{head}when = {first}\ndwell = \"5s\"\n"));
        let two = [one[0].clone(), when("loss > 1% then  tcp ").unwrap()];
        let with = Draft {
            when: &two,
            ..draft("a", &[])
        };
        let second = "{ if = \"loss > 1%\", carrier = \"tcp\" }";
        let text = add("", &with, None).unwrap();
        assert_eq!(text, format!("{head}when = [{first}, {second}]\n"));
        for text in ["", "rtt > 3ms", " then quic", "rtt > 3ms then "] {
            assert!(when(text).is_err(), "{text}");
        }
    }

    #[test]
    fn add__writes_services_as_a_table() {
        let preferred = ["multipath".to_owned()];
        let required = ["encryption".to_owned(), "ordered".to_owned()];
        let with = Draft {
            carrier: None,
            services: Services {
                sets: [
                    ("require", &required),
                    ("prefer", &preferred),
                    ("avoid", &[]),
                    ("prohibit", &[]),
                ],
                max_delay_ms: Some(50),
                min_throughput_mbit: None,
            },
            ..draft("a", &[])
        };
        let text = add("", &with, None).unwrap();
        assert_eq!(
            text,
            "[[rule]]\nname = \"a\"\nservices = { require = [\"encryption\", \"ordered\"], \
             prefer = \"multipath\", max_delay_ms = 50 }\n"
        );
    }

    #[test]
    fn add__last_leaves_everything_before_as_it_is() {
        let ports = ["80".to_owned(), "8000-8100".to_owned()];
        let text = add(FILE, &draft("web", &ports), None).unwrap();
        let new = "\n[[rule]]\nname = \"web\"\nport = [80, \"8000-8100\"]\ncarrier = \"best\"\n";
        assert_eq!(text, format!("{FILE}{new}"));
        let first = add("", &draft("web", &ports), None).unwrap();
        assert_eq!(first, new.trim_start());
        let commented = add("# Ours.\n", &draft("web", &[]), None).unwrap();
        assert_eq!(
            commented,
            "# Ours.\n\n[[rule]]\nname = \"web\"\ncarrier = \"best\"\n"
        );
    }

    #[test]
    fn add__before_another_and_remove_leave_the_comments_of_others() {
        let text = add(FILE, &draft("web", &["80".to_owned()]), Some("dns")).unwrap();
        let at = |what: &str| text.find(what).unwrap_or_else(|| panic!("{what}: {text}"));
        assert!(at("at night") < at("\"web\""), "{text}");
        assert!(at("\"web\"") < at("# Never"), "{text}");
        assert!(at("# Never") < at("\"dns\""), "{text}");
        assert_eq!(remove(&text, "web").unwrap(), FILE);
        let first = add(FILE, &draft("web", &["80".to_owned()]), Some("backup")).unwrap();
        assert!(
            first.starts_with("# Ours.\n\n[[rule]]\nname = \"web\""),
            "{first}"
        );
        assert_eq!(remove(&first, "web").unwrap(), FILE);
        let rest = remove(FILE, "backup").unwrap();
        assert!(rest.starts_with("# Ours.\n\n# Never"), "{rest}");
        let nothing = remove(&rest, "dns").unwrap();
        assert_eq!(nothing, "# Ours.\n");
        let without = remove(FILE, "dns").unwrap();
        assert!(FILE.starts_with(without.trim_end()), "{without}");
        assert!(!without.contains("Never"), "{without}");
    }

    #[test]
    fn edits__that_cannot_be_are_refused() {
        for (result, about) in [
            (add(FILE, &draft("dns", &[]), None), "already"),
            (add(FILE, &draft("x", &[]), Some("y")), "no rule \"y\""),
            (add("rule = 7", &draft("x", &[]), None), "by hand"),
            (add("[[rule", &draft("x", &[]), None), "vtl rule check"),
            (remove(FILE, "x"), "no rule \"x\""),
        ] {
            let error = result.unwrap_err().to_string();
            assert!(error.contains(about), "{error}");
        }
    }
}
