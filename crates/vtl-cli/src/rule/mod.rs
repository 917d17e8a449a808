//! `vtl rule`: which connections travel by what, for all programs of the host.

mod edit;

use std::fs;
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow};
use clap::{Args, Subcommand};
use serde_json::{Map, Value};
use toml_edit::Datetime;
use vtl_control::{
    Client, Done, Executable, Explanation, OpenedConnection, PathCondition, Request, RuleCount,
    Rules,
};

use crate::daemon::{self, SocketArgs};
use crate::failure::Failure;
use crate::{output, units};
use edit::{Draft, File};

/// Arguments of `vtl rule`.
#[derive(Debug, Subcommand)]
pub(crate) enum RuleCommand {
    /// Add a rule to the file, behind the others, and put it in force
    #[command(after_help = "Examples:\n  \
        vtl rule add backup --user backup --port 873 --to 10.0.0.0/8 --carrier graft:cubic\n  \
        vtl rule add far --to 198.51.100.0/24,2001:db8::/32 --carrier tcp:hybla\n  \
        vtl rule add far --to 198.51.100.0/24 --carrier best --when 'rtt >= 300ms for 200ms then quic'\n  \
        vtl rule add live --port 1935 --carrier auto --max-delay 200ms --min-throughput 5M\n  \
        vtl rule add not-here --exe /usr/bin/ssh --bypass --before backup\n  \
        vtl rule add tonight --user backup --carrier best --expires 8h\n  \
        vtl rule add hop --via wan0 --to 10.20.0.0/16 --carrier quic     what a gateway forwards there\n  \
        vtl rule add web --listen 80,443         clients that speak VTL reach these ports over it\n\n\
        The first rule that matches decides; a connection that none matches is left alone. All kinds\n\
        of conditions that are given must hold, of each kind one value. Connections of this host to\n\
        itself, link-local and multicast ones match only with --local. What was hooked by hand\n\
        (vtl run, vtl hook add) counts before rules.")]
    Add(Box<AddArgs>),
    /// List the rules in force, and how many connections each has matched
    List {
        /// Write JSON for machines instead of text
        #[arg(long)]
        json: bool,
    },
    /// Take a rule out of the file and out of force, also one that a request installed; connections that it made go on
    Remove {
        /// The rule's name
        name: String,
    },
    /// Say which rule decides about a connection, and why the ones before it do not
    #[command(after_help = "Examples:\n  \
        vtl rule explain --to 10.1.2.3:873 --user backup\n  \
        vtl rule explain --to [2001:db8::1]:443 --pid 4711")]
    Explain(ExplainArgs),
    /// Read the file again; if anything in it is wrong, what was in force stays
    Reload,
    /// Say whether a file of rules is right, without putting it in force
    Check {
        /// The file; the one that the daemon reads unless it is given
        file: Option<PathBuf>,
    },
}

/// Arguments of `vtl rule add`.
#[derive(Debug, Args)]
pub(crate) struct AddArgs {
    /// What to call it
    name: String,
    /// Processes in this cgroup, or below: as seen from the topmost one, or in the file system
    #[arg(long, value_name = "PATH", value_delimiter = ',')]
    cgroup: Vec<String>,
    /// Processes of this user: a name or a number
    #[arg(long, value_name = "USER", value_delimiter = ',')]
    user: Vec<String>,
    /// Processes that execute this file
    #[arg(long, value_name = "PATH", value_delimiter = ',')]
    exe: Vec<String>,
    /// Connections to this port, or to a range of them
    #[arg(long, value_name = "N[-N]", value_delimiter = ',')]
    port: Vec<String>,
    /// Connections to this address, or to a prefix
    #[arg(long, value_name = "ADDR[/BITS]", value_delimiter = ',')]
    to: Vec<String>,
    /// Connections of applications that are time-sensitive, time-and-loss-sensitive, loss-sensitive
    /// or insensitive, as the port tells
    #[arg(long, value_name = "PROFILE", value_delimiter = ',')]
    profile: Vec<String>,
    /// Also connections of this host to itself, link-local and multicast ones
    #[arg(long)]
    local: bool,
    #[command(flatten)]
    gateway: ViaArgs,
    /// Instead of the above: connections that a server of this host accepts at this port
    #[arg(
        long,
        value_name = "N",
        value_delimiter = ',',
        value_parser = clap::value_parser!(u16).range(1..),
        conflicts_with_all = [
            "cgroup", "user", "exe", "port", "to", "profile", "local", "via", "bypass", "services",
        ],
    )]
    listen: Vec<u16>,
    /// What they travel by: `best`, sessions with hosts that run VTL; `tcp`; `tcp:CONTROL`, TCP
    /// under a congestion control; `auto`, what suits path and application; `graft:NAME`, sessions over a graft;
    /// `multipath`, sessions on several paths at once; and what else `vtl run --help` names
    #[arg(long, value_name = "NAME", required_unless_present_any = ["bypass", "listen", "services"])]
    carrier: Option<String>,
    /// With --listen: TCP to clients without VTL is sent under this congestion control
    #[arg(
        long,
        value_name = "tcp:CONTROL",
        requires = "listen",
        conflicts_with = "carrier"
    )]
    others: Option<String>,
    /// They can do without what the network loses: goes with `udp`, `udp-lite`, `dccp-ccid2`,
    /// `dccp-ccid3` and `graft:partial-reliability`, also in --when; with --listen, clients may come by those
    #[arg(long, conflicts_with_all = ["bypass", "services"])]
    loss_tolerant: bool,
    /// By that or not at all: they fail where it cannot be had, and none of their bytes travels by
    /// plain TCP
    #[arg(long, conflicts_with_all = ["bypass", "listen", "loss_tolerant"])]
    require_carrier: bool,
    /// As --require-carrier, and by carriers that are encrypted: where none works, inside TLS over the
    /// two hosts' own TCP connection
    #[arg(long, conflicts_with_all = ["bypass", "listen", "loss_tolerant"])]
    require_encryption: bool,
    #[command(flatten)]
    services: ServiceArgs,
    /// What they travel by while the path is so, such as "rtt >= 300ms for 200ms then quic", or with --loss-tolerant
    /// "rtt >= 300ms then graft:partial-reliability?max-loss=100"; may be given several times, of which the first that
    /// holds counts
    #[arg(
        long,
        value_name = "CONDITION then CARRIER",
        value_parser = edit::when,
        conflicts_with_all = ["bypass", "listen"],
    )]
    when: Vec<(String, String)>,
    /// The least time between two such changes, such as 10s
    #[arg(long, value_name = "TIME", requires = "when")]
    dwell: Option<String>,
    /// With --carrier auto: what they send is to arrive within this time, such as 200ms
    #[arg(long, value_name = "TIME", requires = "carrier")]
    max_delay: Option<String>,
    /// With --carrier auto: they are to get as much as this, such as 5M (Mbit/s)
    #[arg(long, value_name = "RATE", requires = "carrier")]
    min_throughput: Option<String>,
    /// It matches nothing after this time: from now (8h, 2days), or a date (2027-01-31T18:00:00Z)
    #[arg(long, value_name = "TIME", value_parser = edit::expiry)]
    expires: Option<Datetime>,
    /// Leave them alone, whatever later rules say
    #[arg(long, conflicts_with_all = ["carrier", "services"])]
    bypass: bool,
    /// The rule that it comes before, instead of being the last
    #[arg(long, value_name = "NAME")]
    before: Option<String>,
}

/// Which connections a gateway's rule is about.
#[derive(Debug, Args)]
pub(crate) struct ViaArgs {
    /// On a gateway: connections of other hosts that leave by this interface (`vtl gateway`)
    #[arg(
        long,
        value_name = "INTERFACE",
        value_delimiter = ',',
        conflicts_with_all = ["cgroup", "user", "exe", "local", "bypass", "loss_tolerant", "require_carrier", "require_encryption"],
    )]
    via: Vec<String>,
    /// With --via: those that this address opens, or a prefix
    #[arg(
        long,
        value_name = "ADDR[/BITS]",
        value_delimiter = ',',
        requires = "via"
    )]
    from: Vec<String>,
    /// With --via: those that are opened from this port, or from a range of them
    #[arg(long, value_name = "N[-N]", value_delimiter = ',', requires = "via")]
    from_port: Vec<String>,
}

/// What sessions are to be like, instead of a carrier.
#[derive(Debug, Args)]
#[group(id = "services", multiple = true, conflicts_with = "carrier")]
pub(crate) struct ServiceArgs {
    /// They travel by sessions over a graft that provides these services besides what every TCP
    /// connection has
    #[arg(long, value_name = "SERVICE", value_delimiter = ',')]
    require: Vec<String>,
    /// Rather over one that provides these
    #[arg(long, value_name = "SERVICE", value_delimiter = ',')]
    prefer: Vec<String>,
    /// Rather over one that does not provide these
    #[arg(long, value_name = "SERVICE", value_delimiter = ',')]
    avoid: Vec<String>,
    /// Only over one that does not provide these
    #[arg(long, value_name = "SERVICE", value_delimiter = ',')]
    prohibit: Vec<String>,
    /// What they send is to arrive within so many milliseconds, by grafts with a parameter for that; see --max-delay
    #[arg(long, value_name = "MS", value_parser = delay)]
    max_delay_ms: Option<u32>,
    /// They are to get as much as this, by grafts with a parameter for that; see --min-throughput
    #[arg(long, value_name = "MBIT", value_parser = units::mbit_per_second)]
    min_throughput_mbit: Option<f64>,
}

/// Parses a delay: what a file of rules takes for `max_delay_ms`.
fn delay(text: &str) -> Result<u32, String> {
    let ms = units::milliseconds(text).unwrap_or_default();
    if ms.fract() == 0.0 && (1.0..=f64::from(u32::MAX)).contains(&ms) {
        return Ok(ms as u32);
    }
    Err("expected whole milliseconds from 1, such as 150 or 150ms".into())
}

/// Arguments of `vtl rule explain`.
#[derive(Debug, Args)]
pub(crate) struct ExplainArgs {
    /// Where the connection goes
    #[arg(long, value_name = "ADDR:PORT")]
    to: SocketAddr,
    /// Who opens it: a name or a number
    #[arg(long)]
    user: Option<String>,
    /// The file that the process executes
    #[arg(long, value_name = "PATH")]
    exe: Option<PathBuf>,
    /// The cgroup that the process is in
    #[arg(long, value_name = "PATH")]
    cgroup: Option<PathBuf>,
    /// The process that opens it: says the three above
    #[arg(long, conflicts_with_all = ["user", "exe", "cgroup"])]
    pid: Option<u32>,
    /// On a gateway: the interface by which a connection of other hosts leaves
    #[arg(long, value_name = "INTERFACE", conflicts_with_all = ["user", "exe", "cgroup", "pid"])]
    via: Option<String>,
    /// With --via: who opens it
    #[arg(long, value_name = "ADDR:PORT", requires = "via")]
    from: Option<SocketAddr>,
    /// Write JSON for machines instead of text
    #[arg(long)]
    json: bool,
}

/// Runs a subcommand of `vtl rule`.
pub(crate) fn run(command: &RuleCommand, socket: &SocketArgs) -> anyhow::Result<()> {
    match command {
        RuleCommand::Add(args) => {
            let draft = Draft {
                name: &args.name,
                lists: [
                    ("cgroup", &args.cgroup),
                    ("user", &args.user),
                    ("exe", &args.exe),
                    ("port", &args.port),
                    ("to", &args.to),
                    ("profile", &args.profile),
                    ("via", &args.gateway.via),
                    ("from", &args.gateway.from),
                    ("from_port", &args.gateway.from_port),
                ],
                local: args.local,
                listen: &args.listen,
                carrier: args.carrier.as_deref(),
                others: args.others.as_deref(),
                loss_tolerant: args.loss_tolerant,
                require_carrier: args.require_carrier,
                require_encryption: args.require_encryption,
                services: edit::Services {
                    sets: [
                        ("require", &args.services.require),
                        ("prefer", &args.services.prefer),
                        ("avoid", &args.services.avoid),
                        ("prohibit", &args.services.prohibit),
                    ],
                    max_delay_ms: args.services.max_delay_ms,
                    min_throughput_mbit: args.services.min_throughput_mbit,
                },
                when: &args.when,
                dwell: args.dwell.as_deref(),
                bounds: [
                    ("max_delay", args.max_delay.as_deref()),
                    ("min_throughput", args.min_throughput.as_deref()),
                ],
                expires: args.expires,
                bypass: args.bypass,
            };
            let before = args.before.as_deref();
            change(socket, "add", |text| edit::add(text, &draft, before))
        }
        RuleCommand::Remove { name } => {
            let rules = daemon::ask(&socket.socket, Client::rules)?.rules;
            if rules
                .iter()
                .any(|rule| rule.installed && rule.name == *name)
            {
                let name = name.clone();
                let _: Done = socket.call(&Request::RuleWithdraw { name })?;
                return Ok(());
            }
            change(socket, "remove", |text| edit::remove(text, name))
        }
        RuleCommand::List { json } => list(socket, *json),
        RuleCommand::Explain(args) => explain(args, socket),
        RuleCommand::Reload => {
            let _: RuleCount = socket.call(&Request::RuleReload)?;
            Ok(())
        }
        RuleCommand::Check { file } => {
            let path = match file {
                Some(path) => path.clone(),
                None => file_of(socket)?,
            };
            let open = fs::File::open(&path);
            let open = open.with_context(|| format!("cannot read {}", path.display()))?;
            edit::check(&socket.socket, &open, &path)
        }
    }
}

/// The file that the daemon reads.
fn file_of(socket: &SocketArgs) -> anyhow::Result<PathBuf> {
    let none: Rules = socket.call(&Request::RuleList { from: u32::MAX })?;
    Ok(none.file)
}

/// Changes the file, and has the daemon read it.
fn change(
    socket: &SocketArgs,
    what: &str,
    edit: impl Fn(&str) -> anyhow::Result<String>,
) -> anyhow::Result<()> {
    let path = file_of(socket)?;
    if !nix::unistd::geteuid().is_root() {
        return Err(Failure::permission(format!(
            "vtl rule {what} is for root: use sudo"
        )));
    }
    let file = File::open(&path)?;
    let text = file.text()?;
    file.replace(&edit(&text)?, &socket.socket)
}

fn list(socket: &SocketArgs, json: bool) -> anyhow::Result<()> {
    let rules = daemon::ask(&socket.socket, Client::rules)?;
    if json {
        output::show(&rules, true)?;
        return Ok(());
    }
    let file = rules.file.display();
    let mut rows = serde_json::to_value(&rules.rules)?;
    for (row, rule) in rows.as_array_mut().into_iter().flatten().zip(&rules.rules) {
        if !rule.when.is_empty() {
            let words: Vec<String> = rule.when.iter().map(words).collect();
            row["when"] = words.join("; ").into();
        }
    }
    let rows: Vec<&Map<String, Value>> = rows
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(Value::as_object)
        .collect();
    if rows.is_empty() {
        output::print(&format!("no rules ({file})\n"))?;
    } else {
        let columns = [
            "name",
            "match",
            "listen",
            "action",
            "when",
            "expires",
            "installed",
            "connections",
            "missing",
        ];
        output::print(&format!("{file}:\n{}", output::table(&rows, &columns)))?;
    }
    Ok(())
}

/// A condition on the path, with the hosts for which it decides, or holds behind one that does.
fn words(condition: &PathCondition) -> String {
    let PathCondition {
        condition,
        carrier,
        holds_for,
        decides_for,
    } = condition;
    let mut text = format!("{condition} then {carrier}");
    let idle = holds_for.iter().filter(|host| !decides_for.contains(host));
    let idle: Vec<&str> = idle.map(String::as_str).collect();
    if !decides_for.is_empty() {
        text += &format!(" (now to {})", decides_for.join(", "));
    }
    if !idle.is_empty() {
        text += &format!(" (holds for {})", idle.join(", "));
    }
    text
}

fn explain(args: &ExplainArgs, socket: &SocketArgs) -> anyhow::Result<()> {
    let mut connection = OpenedConnection {
        to: args.to,
        user: None,
        exe: None,
        cgroup: args.cgroup.clone(),
        via: args.via.clone(),
        from: args.from,
    };
    if let Some(pid) = args.pid {
        let dir = PathBuf::from(format!("/proc/{pid}"));
        let read = |what: &str| {
            let path = dir.join(what);
            fs::read_to_string(&path).map_err(|error| of_process(pid, &error))
        };
        let status = read("status")?;
        let user = status
            .lines()
            .find_map(|line| line.strip_prefix("Uid:")?.split_whitespace().next());
        connection.user = user.and_then(|user| user.parse().ok());
        let groups = read("cgroup")?;
        let group = groups.lines().find_map(|line| line.strip_prefix("0::"));
        connection.cgroup = group.map(PathBuf::from);
        let exe = identity(&dir.join("exe")).map_err(|error| of_process(pid, &error))?;
        connection.exe = Some(exe);
    } else {
        if let Some(user) = &args.user {
            connection.user = Some(uid(user)?);
        }
        if let Some(exe) = &args.exe {
            let identity = identity(exe);
            let identity =
                identity.with_context(|| format!("there is no program {}", exe.display()))?;
            connection.exe = Some(identity);
        }
    }
    let answer: Explanation = socket.call(&Request::RuleExplain(connection))?;
    if args.json {
        output::show(&answer, true)?;
        return Ok(());
    }
    let mut text = String::new();
    if let Some(hook) = answer.hook {
        text = format!("hook {hook} decides: what is hooked by hand counts before rules\n");
    } else {
        for passed in answer.passed {
            text += &format!("rule \"{}\": {}\n", passed.rule, passed.because);
        }
        text += &match (answer.decides, answer.action) {
            (Some(rule), Some(action)) => format!("rule \"{rule}\" decides: {action}\n"),
            _ => "no rule matches: the connection is left alone\n".to_owned(),
        };
    }
    output::print(&text)?;
    Ok(())
}

/// What a file is, whatever it is called.
fn identity(path: &Path) -> io::Result<Executable> {
    let metadata = path.metadata()?;
    Ok(Executable {
        device: metadata.dev(),
        inode: metadata.ino(),
    })
}

fn uid(user: &str) -> anyhow::Result<u32> {
    if let Ok(id) = user.parse() {
        return Ok(id);
    }
    let known = nix::unistd::User::from_name(user)?;
    let known = known.ok_or_else(|| anyhow!("this host has no user \"{user}\""))?;
    Ok(known.uid.as_raw())
}

fn of_process(pid: u32, error: &io::Error) -> anyhow::Error {
    match error.kind() {
        io::ErrorKind::NotFound => anyhow!("there is no process {pid}"),
        io::ErrorKind::PermissionDenied => {
            Failure::permission(format!("process {pid} is another user's: use sudo"))
        }
        _ => anyhow!("cannot look at process {pid}: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delay__is_in_whole_milliseconds() {
        assert_eq!(delay("150"), Ok(150));
        assert_eq!(delay("150ms"), Ok(150));
        assert_eq!(delay("4294967295"), Ok(u32::MAX));
        for text in ["0", "-1", "1.5", "4294967296", "1s", "soon", ""] {
            let message = delay(text).expect_err(text);
            assert_eq!(
                message,
                "expected whole milliseconds from 1, such as 150 or 150ms"
            );
        }
    }
}
