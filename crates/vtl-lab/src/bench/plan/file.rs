//! The file format of plans, and from it the cells.

use std::collections::BTreeMap;
use std::path::Path;

use vtl_bpf::objects;
use vtl_pool::object::{Description, Parameter};
use vtl_proto::intf;
use vtl_proto::services::Services;
use vtl_testbed::Link;

use super::link::{CoreTable, LinkTable, OneLink, core_link, links, timeline};
use super::many::{Many, choices};
use super::transport::{RATE, WINDOW};
use super::{
    Amount, Cell, Direction, Error, Plan, Setting, Transport, Vtl, Workload,
    rule::{self, RuleTable},
};

/// When a transfer is cut unless the plan says otherwise, seconds.
const TIME_LIMIT_S: f64 = 60.0;
/// The longest of all times in a plan, seconds.
pub(super) const LONGEST_S: f64 = 86_400.0;
/// The largest transfer, bytes.
const LARGEST: u64 = 1 << 44;
/// The most flows at a time.
const MAX_FLOWS: u32 = 2_000;

#[derive(Debug, serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct PlanTable {
    transports: Many<String>,
    runs: Option<u32>,
    cores: Option<Many<u8>>,
    link: LinkTable,
    core: Option<CoreTable>,
    workload: WorkloadTable,
    #[serde(default)]
    vtl: VtlTable,
    #[serde(default)]
    rules: BTreeMap<String, RuleTable>,
}

#[derive(Debug, serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct WorkloadTable {
    kind: String,
    bytes: Option<Many<u64>>,
    seconds_worth: Option<f64>,
    request_bytes: Option<u32>,
    response_bytes: Option<u32>,
    count: Option<Many<u32>>,
    rate_mbit: Option<f64>,
    rate_share: Option<f64>,
    seconds: Option<f64>,
    start_s: Option<Vec<f64>>,
    app: Option<String>,
    direction: Option<Many<String>>,
    known: Option<Many<bool>>,
    time_limit_s: Option<f64>,
}

#[derive(Debug, Default, serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct VtlTable {
    driver: Option<Many<String>>,
    ingress: Option<Many<String>>,
    ring_slots: Option<Many<u32>>,
    attached: Option<Many<bool>>,
}

/// A problem at a key; the line is looked up by the key's name.
pub(super) struct Problem {
    key: &'static str,
    text: String,
}

pub(super) fn problem<T>(key: &'static str, text: impl Into<String>) -> Result<T, Problem> {
    Err(Problem {
        key,
        text: format!("`{key}`: {}", text.into()),
    })
}

pub(super) fn parse(path: &Path, text: &str) -> Result<Plan, Error> {
    let wrong = |line, problem| Error::Wrong {
        path: path.to_owned(),
        line,
        problem,
    };
    let table: PlanTable = toml::from_str(text).map_err(|error| {
        let at = error.span().map_or(0, |span| span.start.min(text.len()));
        let line = text.as_bytes()[..at]
            .iter()
            .filter(|b| **b == b'\n')
            .count()
            + 1;
        wrong(line, plainly(text, line, error.message()))
    })?;
    let name = path.file_stem().unwrap_or_default().to_string_lossy();
    build(&name, &table).map_err(|problem| wrong(line_of(text, problem.key), problem.text))
}

/// The parser's message in a user's words, with the key if the value is what is wrong.
fn plainly(text: &str, line: usize, message: &str) -> String {
    const WORDS: [(&str, &str); 7] = [
        ("a string", "text in quotes"),
        ("a boolean", "true or false"),
        ("a sequence", "a list"),
        ("f64", "a number"),
        ("u64", "a whole number from 0"),
        ("u32", "a whole number from 0 to 4,294,967,295"),
        ("u8", "a whole number from 0 to 255"),
    ];
    let mut message = message.replace('\n', "; ");
    for (theirs, ours) in WORDS {
        if let Some(rest) = message.strip_suffix(&format!("expected {theirs}")) {
            message = format!("{rest}expected {ours}");
        }
    }
    let line = text.lines().nth(line - 1).unwrap_or_default();
    match line.split_once('=') {
        Some((key, _))
            if message.starts_with("invalid type") || message.starts_with("invalid value") =>
        {
            format!("`{}`: {message}", key.trim())
        }
        _ => message,
    }
}

/// The first line that sets `key`, or begins the table of that name, or the first of all.
fn line_of(text: &str, key: &str) -> usize {
    let sets = |line: &str| {
        line.trim_start()
            .strip_prefix(key)
            .is_some_and(|rest| rest.trim_start().starts_with('='))
    };
    let begins = |line: &str| {
        line.trim_start()
            .strip_prefix('[')
            .and_then(|rest| rest.trim_start().strip_prefix(key))
            .is_some_and(|rest| rest.trim_start().starts_with(']'))
    };
    let line = text.lines().position(sets);
    let line = line.or_else(|| text.lines().position(begins));
    line.map_or(1, |index| index + 1)
}

fn build(name: &str, table: &PlanTable) -> Result<Plan, Problem> {
    let transports = transports(table)?;
    let rules = rule::rules(&table.rules)?;
    let runs = table.runs.unwrap_or(1);
    if !(1..=1000).contains(&runs) {
        return problem("runs", format!("{runs} is not between 1 and 1,000"));
    }
    let core = table.core.as_ref().map(core_link).transpose()?;
    let mut cells = Vec::new();
    for OneLink {
        profile,
        medium,
        link,
    } in links(&table.link)?
    {
        for workload in workloads(&table.workload, &link, transports.len())? {
            for known in choices(table.workload.known.as_ref()) {
                for cores in choices(table.cores.as_ref()) {
                    for vtl in daemons(&table.vtl)? {
                        let cell = Cell {
                            transports: transports.clone(),
                            profile,
                            medium,
                            core: core.clone(),
                            timeline: timeline(&table.link, &link)?,
                            link: link.clone(),
                            workload: workload.clone(),
                            curl: curl(&table.workload)?,
                            known: known.unwrap_or(false),
                            time_limit_s: time_limit(&table.workload)?,
                            cores,
                            vtl,
                            rules: rules.clone(),
                        };
                        check(&cell)?;
                        cells.push(cell);
                    }
                }
            }
        }
    }
    if cells.is_empty() {
        return problem(
            "link",
            "a list in this plan is empty, so nothing is measured",
        );
    }
    Ok(Plan {
        name: name.to_owned(),
        cells,
        runs,
    })
}

fn transports(table: &PlanTable) -> Result<Vec<Transport>, Problem> {
    let names = table.transports.list();
    if names.is_empty() {
        return problem("transports", "the list is empty");
    }
    let parse = |name: &String| {
        let transport: Transport = name
            .parse()
            .or_else(|text: String| problem("transports", text))?;
        let Some(graft) = transport.graft() else {
            return Ok(transport);
        };
        let (name, params) = (graft.name.as_str(), &graft.params);
        refuse_params("transports", name, |known| {
            let fits = |(key, setting): &&(String, Setting)| {
                let fits = |p: &Parameter| match setting {
                    Setting::Number(number) => (p.min..=p.max).contains(number),
                    Setting::Path => [WINDOW, RATE].contains(&p.name.as_str()),
                };
                known.iter().find(|p| p.name == *key).is_some_and(fits)
            };
            let wrong = params.iter().find(|param| !fits(param));
            wrong.map(|(key, _)| key.clone())
        })?;
        if transport.is_hook() && !is_stream(name) {
            let text = format!("the graft \"{name}\" carries no streams, so no hooked ones");
            return problem("transports", text);
        }
        Ok(transport)
    };
    names.iter().map(parse).collect()
}

/// Refuses a graft that does not come with VTL, and parameters: `wrong` finds one among those that it has.
pub(super) fn refuse_params(
    key: &'static str,
    name: &str,
    wrong: impl FnOnce(&[Parameter]) -> Option<String>,
) -> Result<(), Problem> {
    let Some(object) = objects::graft(name) else {
        let all: Vec<_> = objects::GRAFTS.iter().map(|(name, _)| *name).collect();
        let text = format!("there is no graft \"{name}\": valid are {}", all.join(", "));
        return problem(key, text);
    };
    let graft = Description::read(object).expect("it comes with VTL");
    match wrong(&graft.parameters) {
        Some(param) => problem(
            key,
            format!("graft \"{name}\" has no parameter {param} that may be that"),
        ),
        None => Ok(()),
    }
}

fn time(key: &'static str, seconds: f64) -> Result<f64, Problem> {
    if seconds > 0.0 && seconds <= LONGEST_S {
        return Ok(seconds);
    }
    problem(key, format!("{seconds} is not a time up to {LONGEST_S} s"))
}

/// Keys that belong to some kinds of workload only.
fn refuse_strangers(table: &WorkloadTable) -> Result<(), Problem> {
    let present = [
        ("bytes", table.bytes.is_some()),
        ("seconds_worth", table.seconds_worth.is_some()),
        ("request_bytes", table.request_bytes.is_some()),
        ("response_bytes", table.response_bytes.is_some()),
        ("count", table.count.is_some()),
        ("rate_mbit", table.rate_mbit.is_some()),
        ("rate_share", table.rate_share.is_some()),
        ("seconds", table.seconds.is_some()),
        ("start_s", table.start_s.is_some()),
        ("app", table.app.is_some()),
        ("direction", table.direction.is_some()),
    ];
    let valid: &[&str] = match table.kind.as_str() {
        "file" => &["bytes", "seconds_worth", "app", "direction"],
        "request-response" => &["request_bytes", "response_bytes", "count"],
        "stream" => &["rate_mbit", "rate_share", "seconds"],
        "flows" => &["count", "bytes", "seconds"],
        "compete" => &["seconds", "start_s"],
        other => {
            return problem(
                "kind",
                format!(
                    "there is no \"{other}\": valid are \"file\", \"request-response\", \"stream\", \
                     \"flows\", \"compete\""
                ),
            );
        }
    };
    for (key, there) in present {
        if there && !valid.contains(&key) {
            return problem(
                key,
                format!(
                    "does not belong to the kind \"{}\", which takes {}, known, time_limit_s",
                    table.kind,
                    valid.join(", ")
                ),
            );
        }
    }
    Ok(())
}

fn workloads(
    table: &WorkloadTable,
    link: &Link,
    transports: usize,
) -> Result<Vec<Workload>, Problem> {
    refuse_strangers(table)?;
    match table.kind.as_str() {
        "file" => files(table, link),
        "request-response" => requests(table),
        "stream" => streams(table, link),
        "flows" => flows(table),
        _ => competitions(table, transports),
    }
}

fn missing<T>(table: &WorkloadTable, key: &str) -> Result<T, Problem> {
    problem("kind", format!("\"{}\" needs `{key}`", table.kind))
}

fn sizes(table: &WorkloadTable) -> Result<Vec<u64>, Problem> {
    let sizes = table.bytes.as_ref().map(Many::list).unwrap_or_default();
    match sizes.iter().find(|n| !(1..=LARGEST).contains(*n)) {
        Some(wrong) => problem("bytes", format!("{wrong} is not between 1 and 2^44")),
        None => Ok(sizes),
    }
}

fn seconds(table: &WorkloadTable) -> Result<Option<f64>, Problem> {
    table.seconds.map(|s| time("seconds", s)).transpose()
}

fn files(table: &WorkloadTable, link: &Link) -> Result<Vec<Workload>, Problem> {
    let mut sizes = sizes(table)?;
    if let Some(worth) = table.seconds_worth {
        let bytes = time("seconds_worth", worth)? * link.rate_mbit * 1e6 / 8.0;
        if bytes < 1.0 {
            return problem("seconds_worth", "the link has no rate: give `bytes`");
        }
        if bytes > LARGEST as f64 {
            return problem("seconds_worth", "is worth more than 2^44 bytes");
        }
        sizes.push(bytes as u64);
    }
    if sizes.is_empty() {
        return missing(table, "bytes");
    }
    let directions = directions(table)?;
    let of_size = |bytes| {
        let workload = move |direction: &Direction| Workload::File {
            bytes,
            direction: *direction,
        };
        directions.iter().map(workload)
    };
    Ok(sizes.into_iter().flat_map(of_size).collect())
}

fn directions(table: &WorkloadTable) -> Result<Vec<Direction>, Problem> {
    let Some(names) = table.direction.as_ref().map(Many::list) else {
        return Ok(vec![Direction::Down]);
    };
    let named = |name: &String| {
        let mut all = Direction::ALL.into_iter();
        let found = all.find(|direction| direction.name() == name);
        found.ok_or_else(|| Problem {
            key: "direction",
            text: format!("`direction`: there is no \"{name}\": valid are down, up, both"),
        })
    };
    names.iter().map(named).collect()
}

fn requests(table: &WorkloadTable) -> Result<Vec<Workload>, Problem> {
    let request = table.request_bytes.unwrap_or(64);
    let response = table.response_bytes.unwrap_or(64);
    for (key, bytes) in [("request_bytes", request), ("response_bytes", response)] {
        if !(1..=1 << 24).contains(&bytes) {
            return problem(key, format!("{bytes} is not between 1 and 2^24"));
        }
    }
    let counts = table.count.as_ref().map_or_else(|| vec![1000], Many::list);
    if let Some(wrong) = counts.iter().find(|n| !(1..=10_000_000).contains(*n)) {
        return problem("count", format!("{wrong} is not between 1 and 10,000,000"));
    }
    let workload = |count| Workload::RequestResponse {
        request,
        response,
        count,
    };
    Ok(counts.into_iter().map(workload).collect())
}

fn streams(table: &WorkloadTable, link: &Link) -> Result<Vec<Workload>, Problem> {
    let Some(seconds) = seconds(table)? else {
        return missing(table, "seconds");
    };
    let mut rates: Vec<f64> = table.rate_mbit.into_iter().collect();
    if let Some(share) = table.rate_share {
        if !(share > 0.0 && share <= 1.0 && link.rate_mbit > 0.0) {
            return problem(
                "rate_share",
                "is above 0 and at most 1, of a link with a rate",
            );
        }
        rates.push(share * link.rate_mbit);
    }
    if rates.is_empty() {
        rates.push(0.0);
    }
    if rates.iter().any(|rate| !(0.0..=100_000.0).contains(rate)) {
        return problem("rate_mbit", "is not between 0 and 100,000");
    }
    let workload = |rate_mbit| Workload::Stream { rate_mbit, seconds };
    Ok(rates.into_iter().map(workload).collect())
}

fn flows(table: &WorkloadTable) -> Result<Vec<Workload>, Problem> {
    let mut amounts: Vec<Amount> = sizes(table)?.into_iter().map(Amount::Bytes).collect();
    amounts.extend(seconds(table)?.map(Amount::Seconds));
    let &[amount] = &amounts[..] else {
        return problem(
            "seconds",
            "flows carry either `bytes` each or `seconds`, one value",
        );
    };
    let Some(counts) = table.count.as_ref().map(Many::list) else {
        return missing(table, "count");
    };
    if let Some(wrong) = counts.iter().find(|n| !(1..=MAX_FLOWS).contains(*n)) {
        return problem("count", format!("{wrong} is not between 1 and {MAX_FLOWS}"));
    }
    let workload = |count| Workload::Flows { count, amount };
    Ok(counts.into_iter().map(workload).collect())
}

fn competitions(table: &WorkloadTable, transports: usize) -> Result<Vec<Workload>, Problem> {
    let Some(seconds) = seconds(table)? else {
        return missing(table, "seconds");
    };
    let starts = table
        .start_s
        .clone()
        .unwrap_or_else(|| vec![0.0; transports]);
    if starts.len() != transports {
        return problem(
            "start_s",
            format!("needs {transports} times, one a transport"),
        );
    }
    if let Some(wrong) = starts.iter().find(|s| !(0.0..=LONGEST_S).contains(*s)) {
        return problem("start_s", format!("{wrong} is not a time"));
    }
    if starts.iter().any(|s| *s >= seconds) {
        return problem("start_s", "all flows must start before the first has ended");
    }
    Ok(vec![Workload::Compete { seconds, starts }])
}

fn curl(table: &WorkloadTable) -> Result<bool, Problem> {
    match table.app.as_deref() {
        None => Ok(false),
        Some("curl") => Ok(true),
        Some(other) => problem("app", format!("there is no \"{other}\": valid is \"curl\"")),
    }
}

fn time_limit(table: &WorkloadTable) -> Result<f64, Problem> {
    table
        .time_limit_s
        .map_or(Ok(TIME_LIMIT_S), |s| time("time_limit_s", s))
}

fn daemons(table: &VtlTable) -> Result<Vec<Vtl>, Problem> {
    let valid = |key: &'static str, value: &Option<String>, valid: &[&str]| match value {
        Some(value) if !valid.contains(&value.as_str()) => problem(
            key,
            format!("there is no \"{value}\": valid are {}", valid.join(", ")),
        ),
        _ => Ok(()),
    };
    let mut all = Vec::new();
    for driver in choices(table.driver.as_ref()) {
        valid("driver", &driver, &["auto", "live", "tc"])?;
        for ingress in choices(table.ingress.as_ref()) {
            valid("ingress", &ingress, &["tcx", "xdp"])?;
            for ring_slots in choices(table.ring_slots.as_ref()) {
                if ring_slots.is_some_and(|n| {
                    !n.is_power_of_two() || !(64..=intf::VTL_MAX_WINDOW).contains(&n)
                }) {
                    return problem(
                        "ring_slots",
                        format!("must be a power of two from 64 to {}", intf::VTL_MAX_WINDOW),
                    );
                }
                for attached in choices(table.attached.as_ref()) {
                    all.push(Vtl {
                        driver: driver.clone(),
                        ingress: ingress.clone(),
                        ring_slots,
                        attached: attached.unwrap_or(false),
                    });
                }
            }
        }
    }
    Ok(all)
}

/// Whether a graft that comes with VTL delivers every byte, in order.
fn is_stream(graft: &str) -> bool {
    let description = objects::graft(graft).and_then(|object| Description::read(object).ok());
    description.is_some_and(|d| d.services.contains(Services::RELIABLE | Services::ORDERED))
}

/// What fits only together.
fn check(cell: &Cell) -> Result<(), Problem> {
    if !matches!(cell.cores, None | Some(1 | 2)) {
        return problem("cores", "is 1 (both hosts on one) or 2 (one each)");
    }
    for transport in &cell.transports {
        if *transport == Transport::Udp
            && !matches!(
                cell.workload,
                Workload::File { .. } | Workload::Stream { .. }
            )
        {
            return problem("transports", "udp carries only \"file\" and \"stream\"");
        }
        let loses = match transport {
            Transport::Graft(graft) => !is_stream(&graft.name),
            Transport::Rule { .. } => true,
            hook => hook.is_lossy_hook(),
        };
        let is_download = match cell.workload {
            Workload::File { direction, .. } => direction == Direction::Down,
            _ => true,
        };
        if !is_download && (cell.curl || loses || *transport == Transport::Udp) {
            let text =
                format!("{transport} measures \"down\" only, as do curl and what may lose packets");
            return problem("direction", text);
        }
        if matches!(transport, Transport::Gateway(_)) && cell.core.is_none() {
            let text = format!("{transport} needs a table [core]: the link behind the gateway");
            return problem("transports", text);
        }
        if let Transport::Rule { name, .. } = transport
            && !cell.rules.contains_key(name)
        {
            let text = format!("{transport} needs a table [rules.{name}]");
            return problem("transports", text);
        }
        let is_paced =
            matches!(cell.workload, Workload::Stream { rate_mbit, .. } if rate_mbit > 0.0);
        let is_graft = matches!(transport, Transport::Graft(_));
        if loses && !matches!(cell.workload, Workload::File { .. }) && !(is_paced && is_graft) {
            let text = format!(
                "{transport} may lose packets, so it carries only \"file\", and a graft \"stream\" at a rate"
            );
            return problem("transports", text);
        }
        let has_none = |(name, setting): &(String, Setting)| {
            let lacks = match name.as_str() {
                RATE => cell.link.rate_mbit <= 0.0,
                _ => cell.link.bdp_bytes() == 0,
            };
            *setting == Setting::Path && (lacks || !cell.timeline.is_empty())
        };
        if transport
            .graft()
            .is_some_and(|graft| graft.params.iter().any(has_none))
        {
            let text = "a path without a rate of its own, or with a timeline, deserves no window and no rate";
            return problem("transports", text);
        }
        if cell.curl && cell.core.is_some() {
            return problem("app", "curl crosses one link only: leave out [core]");
        }
        if cell.curl
            && (transport.is_lossy_hook()
                || !matches!(
                    transport,
                    Transport::Tcp(_) | Transport::Hook(_) | Transport::Served(_)
                ))
        {
            return problem(
                "transports",
                format!(
                    "curl speaks TCP: {transport} cannot carry it, tcp-* and hook:* that lose \
                     nothing can"
                ),
            );
        }
    }
    Ok(())
}
