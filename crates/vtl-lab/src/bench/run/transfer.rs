//! One transfer, or several that compete, on a testbed of their own.

use std::fs;
use std::iter;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use vtl_testbed::{Host, Lifetime, Link, Testbed};

use super::Bench;
use super::endpoint::Endpoint;
use crate::bench::agent::{Order, Outcome, Protocol, Side, Summary, Work};
use crate::bench::cpu;
use crate::bench::plan::{Amount, Cell, Change, Direction, Plan, Transport, Workload};
use crate::bench::row::{Row, seed, share};
use crate::child::pin;
use crate::daemons::{self, Daemons};

/// The first endpoint's port; each competing one has the next.
pub(super) const PORT: u16 = 5201;
/// How long an endpoint may take for what is not measured.
const PATIENCE: Duration = Duration::from_secs(30);
/// What is left of a time limit when a client must have spoken.
const GRACE_S: f64 = 15.0;
/// More sessions than this are many.
const MANY: u32 = 16;
/// Less may be over before there is a carrier, bytes.
const SMALL: u64 = 4 << 20;

/// Everything around a transfer; ends with it.
pub(super) struct Stage<'a> {
    pub(super) bench: &'a Bench,
    pub(super) cell: &'a Cell,
    /// The link, and the hosts at its ends.
    pub(super) testbed: Testbed,
    /// The link behind it, with the server at its end: the former's server is a router then.
    core: Option<Testbed>,
    pub(super) daemons: Option<Daemons>,
}

impl Bench {
    /// Measures `leg`: one transport, or all that compete.
    pub(super) fn transfer(
        &self,
        plan: &Plan,
        cell: &Cell,
        leg: &[Transport],
        run: u32,
    ) -> anyhow::Result<Vec<Row>> {
        let link = Link {
            seed: seed(cell, run),
            ..cell.link.clone()
        };
        let both = [&leg[0], &leg[0]].map(Transport::clone);
        let is_both = is_both(cell);
        let leg = if is_both { &both } else { leg };
        let stage = Stage::set(self, cell, &link, leg)?;
        let mut rows: Vec<Row> = leg
            .iter()
            .map(|transport| Row::new(&plan.name, cell, transport, run))
            .collect();
        if let Workload::Compete { .. } = cell.workload {
            for (row, number) in rows.iter_mut().zip(1..) {
                row.flow = Some(number);
            }
        }
        if let (true, [down, up]) = (is_both, &mut rows[..]) {
            (down.direction, up.direction) = (Some("down of both"), Some("up of both"));
        }
        if cell.curl {
            stage.curl(&leg[0], &mut rows[0])?;
        } else {
            stage.endpoints(leg, &mut rows)?;
        }
        share(cell, &mut rows);
        Ok(rows)
    }
}

impl<'a> Stage<'a> {
    fn set(
        bench: &'a Bench,
        cell: &'a Cell,
        link: &Link,
        leg: &[Transport],
    ) -> anyhow::Result<Self> {
        let testbed = Testbed::up(&bench.testbed, link, Lifetime::Guarded)?;
        let core = match &cell.core {
            Some(link) => {
                let name = format!("{}-core", bench.testbed);
                let core = Testbed::up(&name, link, Lifetime::Guarded)?;
                testbed.append(&core)?;
                Some(core)
            }
            None => None,
        };
        for transport in leg {
            for host in [Host::Client, Host::Server] {
                for testbed in iter::once(&testbed).chain(&core) {
                    testbed.tune_tcp(host, transport.host_control())?;
                }
            }
        }
        let wanted = cell.vtl.attached || leg.iter().any(Transport::needs_daemons);
        let daemons = if wanted {
            let logs = bench.logs();
            let options = daemons::Options {
                arguments: [arguments(cell), takes_stacks(leg, &logs)?].concat(),
                of_client: rules_of_client(cell, leg, &logs)?,
                cores: cores(cell),
            };
            let has_gateway = matches!(leg, [Transport::Gateway(_), ..]);
            let of_server = core.as_ref().filter(|_| !has_gateway);
            let daemons = Daemons::start_apart(
                [&testbed, of_server.unwrap_or(&testbed)],
                &bench.programs,
                &options,
                &logs,
                &logs,
                &bench.interrupt,
            )?;
            for transport in leg {
                match transport {
                    Transport::Graft(graft) => daemons.deploy(&graft.name)?,
                    gateway @ Transport::Gateway(_) => {
                        if let Some(graft) = gateway.graft() {
                            daemons.deploy(&graft.name)?;
                        }
                        let carrier = gateway.carrier_on(link);
                        daemons.gateway(testbed.device(Host::Server), carrier)?;
                    }
                    Transport::Rule { name, .. } => {
                        for graft in [&cell.rules[name].own, &cell.rules[name].then] {
                            daemons.deploy(&graft.name)?;
                        }
                    }
                    _ => {}
                }
            }
            Some(daemons)
        } else {
            None
        };
        Ok(Self {
            bench,
            cell,
            testbed,
            core,
            daemons,
        })
    }

    /// Where a host is.
    fn home(&self, host: Host) -> &Testbed {
        let core = self.core.as_ref().filter(|_| host == Host::Server);
        core.unwrap_or(&self.testbed)
    }

    /// This program on a host, captured if the transport is a hook.
    fn command(&self, host: Host, transport: &Transport) -> anyhow::Result<Command> {
        let lab = &self.bench.programs.lab;
        let carrier = transport.carrier_on(&self.cell.link);
        let mut command = match (carrier, &self.daemons, host) {
            (Some(carrier), Some(daemons), Host::Client) => {
                let programs = &self.bench.programs;
                let lossy = transport.is_lossy_hook();
                daemons.captured(&self.testbed, programs, Some(&carrier), lossy, lab)?
            }
            _ => self.home(host).command(host, lab)?,
        };
        self.pin(&mut command, host);
        Ok(command)
    }

    /// Puts a host's process where the plan wants it.
    pub(super) fn pin(&self, command: &mut Command, host: Host) {
        if let Some(cores) = cores(self.cell) {
            pin(command, cores[usize::from(host == Host::Server)]);
        }
    }

    fn order(&self, side: Side, transport: &Transport, index: u16) -> Order {
        let server = IpAddr::V4(match &self.core {
            Some(core) => core.addr4_beyond(Host::Server),
            None => self.testbed.addr4(Host::Server),
        });
        let host = match side {
            Side::Client => Host::Client,
            Side::Server => Host::Server,
        };
        let (work, connections) = self.work(index);
        let delay_s = match &self.cell.workload {
            Workload::Compete { starts, .. } => starts.get(usize::from(index)).copied(),
            _ => None,
        };
        Order {
            side,
            protocol: self.protocol(host, transport),
            address: SocketAddr::new(server, PORT + index),
            work,
            connections,
            known: self.cell.known,
            delay_s: delay_s.unwrap_or(0.0),
            limit_s: self.limit_s(),
            rtt_ms: self.cell.rtt_ms(),
            rate_mbit: self.cell.link.rate_mbit,
        }
    }

    /// What an end on this host uses.
    fn protocol(&self, host: Host, transport: &Transport) -> Protocol {
        match transport {
            Transport::Tcp(control) => Protocol::Tcp(Some((*control).to_owned())),
            // The programs of tcp-cubic, captured, or of one that can do without what is lost.
            hook if hook.is_lossy_hook() => Protocol::LossyTcp,
            Transport::Hook(_) | Transport::Gateway(_) | Transport::Served(_) => {
                Protocol::Tcp(Some("cubic".to_owned()))
            }
            Transport::Quic(control) => Protocol::Quic((*control).to_owned()),
            Transport::Udp => Protocol::Udp,
            Transport::Graft(graft) => Protocol::Graft {
                name: graft.name.clone(),
                params: graft.params_on(&self.cell.link),
                sealed: graft.sealed,
                daemon: self.socket(host),
            },
            Transport::Rule { name, .. } => Protocol::Aware {
                rule: self.cell.rules[name].clone(),
                daemon: self.socket(host),
            },
        }
    }

    /// Where the host's daemon listens.
    fn socket(&self, host: Host) -> PathBuf {
        let daemons = self.daemons.as_ref();
        daemons.map_or_else(PathBuf::new, |d| d.socket(host).to_owned())
    }

    /// What the client of a pair asks for on each connection, and how many of these there are.
    fn work(&self, index: u16) -> (Work, u32) {
        let stream = |rate_mbit: f64, seconds: f64| Work::Stream {
            rate_kbit: (rate_mbit * 1e3) as u64,
            millis: (seconds * 1e3) as u64,
        };
        match &self.cell.workload {
            Workload::File { bytes, direction } => match (direction, index) {
                (Direction::Down, _) | (Direction::Both, 0) => (Work::File(*bytes), 1),
                _ => (Work::Upload(*bytes), 1),
            },
            Workload::RequestResponse {
                request,
                response,
                count,
            } => {
                let messages = Work::Messages {
                    request: *request,
                    response: *response,
                    count: *count,
                };
                (messages, 1)
            }
            Workload::Stream { rate_mbit, seconds } => (stream(*rate_mbit, *seconds), 1),
            Workload::Flows { count, amount } => match amount {
                Amount::Bytes(bytes) => (Work::File(*bytes), *count),
                Amount::Seconds(seconds) => (stream(0.0, *seconds), *count),
            },
            Workload::Compete { seconds, .. } => (stream(0.0, *seconds), 1),
        }
    }

    /// When clients give up, seconds.
    fn limit_s(&self) -> f64 {
        match &self.cell.workload {
            // The last blocks arrive after the time is over.
            Workload::Stream { seconds, .. } => {
                let max = seconds + GRACE_S / 2.0;
                let limit = Some(self.cell.time_limit_s).filter(|limit| limit >= seconds);
                limit.map_or(max, |limit| limit.min(max))
            }
            Workload::Compete { seconds, .. }
            | Workload::Flows {
                amount: Amount::Seconds(seconds),
                ..
            } => *seconds,
            _ => self.cell.time_limit_s,
        }
    }

    /// This program's own ends, one pair for each transport, all at the same time.
    fn endpoints(&self, leg: &[Transport], rows: &mut [Row]) -> anyhow::Result<()> {
        let interrupt = &self.bench.interrupt;
        let mut pairs = Vec::new();
        for (transport, index) in leg.iter().zip(0..) {
            let order = self.order(Side::Server, transport, index);
            if let (Some(carrier), Some(daemons)) = (transport.hooked(), &self.daemons) {
                daemons.hook(order.address.port(), carrier, transport.is_lossy_hook())?;
            }
            let log = |side| self.bench.logs().join(format!("{side}-{index}.log"));
            let command = self.command(Host::Server, transport)?;
            let mut server = Endpoint::start(command, &order, log("server"))?;
            server.ready(PATIENCE, interrupt)?;
            let order = self.order(Side::Client, transport, index);
            let command = self.command(Host::Client, transport)?;
            let mut client = Endpoint::start(command, &order, log("client"))?;
            client.ready(PATIENCE, interrupt)?;
            pairs.push((client, server));
        }
        let since = cpu::Since::now();
        let mut clock = Clock::start(&self.testbed, &self.cell.timeline);
        for (client, _) in &mut pairs {
            client.go()?;
        }
        let mut memory = Memory::new(self.daemons.as_ref());
        let before = self.daemons.as_ref().map(Daemons::efforts);
        let mut switch = Switch::new(self.daemons.as_ref(), &leg[0]);
        let mut outcomes: Vec<Outcome> = Vec::new();
        for (client, _) in &mut pairs {
            let patience = Duration::from_secs_f64(self.cell.longest_s() + 60.0 + 2.0 * GRACE_S);
            let tick = || {
                memory.tick();
                switch.tick();
                clock.tick()
            };
            outcomes.push(client.hear(patience, interrupt, tick)?);
        }
        let memory_samples = memory.samples();
        let busy = since.busy_s();
        let after = self.daemons.as_ref().map(Daemons::efforts);
        let again = self.vtl_retransmitted();
        let mut memory = self.daemons.as_ref().map_or(0, Daemons::peak_kb);
        for (((_, server), outcome), (transport, row)) in pairs
            .iter_mut()
            .zip(&outcomes)
            .zip(leg.iter().zip(rows.iter_mut()))
        {
            server.dismiss();
            let summary: Summary = server.hear(PATIENCE, interrupt, || Ok(()))?;
            row.measured(self.cell, transport, outcome);
            row.switches.extend(switch.at_s);
            row.settings = summary.settings.clone();
            row.retransmitted_pct = (summary.sent > 0)
                .then(|| summary.again as f64 / summary.sent as f64 * 100.0)
                .filter(|_| *transport != Transport::Udp);
            if transport.needs_daemons() && !matches!(transport, Transport::Served(_)) {
                row.retransmitted_pct = again;
                row.settings = self.vtl_settings();
            }
            memory += outcome.peak_kb + summary.peak_kb;
        }
        let total: u64 = rows.iter().map(|row| row.bytes).sum();
        for (row, transport) in rows.iter_mut().zip(leg) {
            check_settings(row, transport);
            // Of all together: what competes cannot be told apart.
            row.cpu(busy);
            row.cpu_s_per_gb = (total > 0).then(|| busy / (total as f64 / 1e9));
            if let (Some(before), Some(after)) = (before, after) {
                row.daemons_did([after[0] - before[0], after[1] - before[1]]);
            }
            row.memory_peak_kb = Some(memory);
            row.memory_samples.clone_from(&memory_samples);
            self.link_figures(row)?;
        }
        let competes = matches!(self.cell.workload, Workload::Compete { .. });
        if leg[0].is_hook() && !leg[0].is_auto() && !competes {
            self.check_carried(rows)?;
        }
        if let (Transport::Rule { aware: false, .. }, Some(daemons)) = (&leg[0], &self.daemons) {
            rows[0].skipped = Some(daemons.statuses()?.skipped());
        }
        for (client, _) in &mut pairs {
            client.dismiss();
        }
        Ok(())
    }

    /// What the emulator saw.
    pub(super) fn link_figures(&self, row: &mut Row) -> anyhow::Result<()> {
        if self.cell.link.direct {
            return Ok(());
        }
        let stats = self.testbed.stats()?;
        let beyond = self.core.as_ref().map(Testbed::stats).transpose()?;
        if stats.down.rx_packets > 0 && self.cell.link.rate_mbit > 0.0 {
            row.queue_p50_ms = Some(stats.down.sojourn_p50_us as f64 / 1e3);
        }
        let lost = |d: &vtl_testbed::DirectionStats| d.host_drops + d.send_errors;
        let beyond = beyond.map_or(0, |stats| lost(&stats.down) + lost(&stats.up));
        row.emulator_drops = lost(&stats.down) + lost(&stats.up) + beyond;
        Ok(())
    }

    /// Plain TCP must not pass for VTL: all rows are of one transport's.
    pub(super) fn check_carried(&self, rows: &mut [Row]) -> anyhow::Result<()> {
        let Some(daemons) = &self.daemons else {
            return Ok(());
        };
        // The first bytes of a hooked flow to a new host go by the flow's own TCP connection, and so do those that are
        // there before the carrier is agreed on: in a gateway, or the first block of a stream at a rate.
        let bytes = rows.iter().map(|row| row.bytes).sum();
        let has_gateway = rows.iter().any(|row| row.transport.starts_with("gateway:"));
        let expected = match self.cell.known {
            true if has_gateway || rows.iter().any(|row| row.offered_mbit.is_some()) => bytes / 2,
            true => bytes,
            false if bytes < SMALL => 0,
            false => bytes / 2,
        };
        let carried = daemons.statuses()?.carried();
        if carried < expected {
            for row in rows {
                row.ok = false;
                row.error = Some(format!(
                    "only {carried} of {bytes} bytes went over VTL, the rest was plain TCP"
                ));
            }
        }
        Ok(())
    }

    pub(super) fn vtl_retransmitted(&self) -> Option<f64> {
        self.daemons.as_ref()?.statuses().ok()?.retransmitted_pct()
    }

    pub(super) fn vtl_settings(&self) -> String {
        let statuses = self.daemons.as_ref().and_then(|d| d.statuses().ok());
        let driver = statuses
            .as_ref()
            .and_then(|s| s.driver().map(str::to_owned));
        format!(
            "driver {}, ingress {}, vtld {}",
            driver.as_deref().unwrap_or("unknown"),
            self.cell.vtl.ingress.as_deref().unwrap_or("tcx"),
            arguments(self.cell).join(" ")
        )
    }
}

fn is_both(cell: &Cell) -> bool {
    let direction = match cell.workload {
        Workload::File { direction, .. } => direction,
        _ => Direction::Down,
    };
    direction == Direction::Both
}

/// TCP under another congestion control than the transport's name says must not pass for it.
pub(super) fn check_settings(row: &mut Row, transport: &Transport) {
    let control = match transport {
        Transport::Tcp(control) => control,
        Transport::Served(control) => control.as_str(),
        _ => return,
    };
    let used = row.settings.split([',', ' ']).next().unwrap_or_default();
    // The kernel knows VTL's by a name with a prefix, and a number where another daemon has that.
    let name = used.strip_prefix("vtl_").map_or(used, |name| {
        let (bare, number) = name.rsplit_once('_').unwrap_or((name, ""));
        let numbered = number.parse::<u8>().is_ok();
        if numbered { bare } else { name }
    });
    if !row.settings.is_empty() && name != control {
        row.ok = false;
        row.error = Some(format!("the connection used {}", row.settings));
    }
}

/// Arguments of the daemons.
fn arguments(cell: &Cell) -> Vec<String> {
    let mut arguments = vec!["--log".to_owned(), "warn".to_owned()];
    let mut add = |key: &str, value: Option<String>| {
        if let Some(value) = value {
            arguments.extend([format!("--{key}"), value]);
        }
    };
    add("driver", cell.vtl.driver.clone());
    add("ingress", cell.vtl.ingress.clone());
    if let Workload::Flows { count, .. } = cell.workload
        && count > MANY
    {
        // A quarter is for others.
        add("max-sessions", Some((count + count / 3 + MANY).to_string()));
    }
    add("ring-slots", cell.vtl.ring_slots.map(|n| n.to_string()));
    arguments
}

/// Arguments of both daemons that have the server take the stacks of the client, if a transport is one.
fn takes_stacks(leg: &[Transport], logs: &Path) -> anyhow::Result<Vec<String>> {
    let is_stack = |of: &Transport| match of {
        Transport::Hook(carrier) | Transport::Gateway(carrier) => carrier.starts_with("stack:"),
        _ => false,
    };
    if !leg.iter().any(is_stack) {
        return Ok(Vec::new());
    }
    let folder = logs.join("stacks");
    fs::create_dir_all(&folder)?;
    fs::write(folder.join("stacks.toml"), "accept_rate = 100000\n")?;
    let rules = folder.join("rules.toml");
    Ok(vec!["--rules".to_owned(), rules.display().to_string()])
}

/// Arguments of the client's daemon: the rules of its captured programs, if a plan's rule has some.
fn rules_of_client(cell: &Cell, leg: &[Transport], logs: &Path) -> anyhow::Result<Vec<String>> {
    let [Transport::Rule { name, aware: false }, ..] = leg else {
        return Ok(Vec::new());
    };
    let file = logs.join("rules.toml");
    fs::write(&file, cell.rules[name].file(PORT))?;
    Ok(vec!["--rules".to_owned(), file.display().to_string()])
}

/// The cores of client and server.
fn cores(cell: &Cell) -> Option<[usize; 2]> {
    match cell.cores {
        Some(1) => Some([0, 0]),
        Some(_) => Some([0, 1]),
        None => None,
    }
}

/// Looks at the daemons' memory from time to time.
struct Memory<'a> {
    daemons: Option<&'a Daemons>,
    start: Instant,
    samples: Vec<(f64, u64)>,
}

impl<'a> Memory<'a> {
    /// The distance of two looks.
    const EVERY_S: f64 = 10.0;
    /// Shorter transfers say nothing about growth.
    const MIN_SAMPLES: usize = 7;

    fn new(daemons: Option<&'a Daemons>) -> Self {
        Self {
            daemons,
            start: Instant::now(),
            samples: Vec::new(),
        }
    }

    fn tick(&mut self) {
        let now = self.start.elapsed().as_secs_f64();
        if let Some(daemons) = self.daemons
            && now >= self.samples.len() as f64 * Self::EVERY_S
        {
            self.samples.push((now, daemons.resident_kb()));
        }
    }

    fn samples(self) -> Vec<(f64, u64)> {
        if self.samples.len() < Self::MIN_SAMPLES {
            return Vec::new();
        }
        self.samples
    }
}

/// When a captured program's first bytes have come by a carrier that may lose some.
struct Switch<'a> {
    daemons: Option<&'a Daemons>,
    start: Instant,
    at_s: Option<f64>,
}

impl<'a> Switch<'a> {
    fn new(daemons: Option<&'a Daemons>, transport: &Transport) -> Self {
        let is_meant = matches!(transport, Transport::Rule { aware: false, .. });
        Self {
            daemons: daemons.filter(|_| is_meant),
            start: Instant::now(),
            at_s: None,
        }
    }

    fn tick(&mut self) {
        let status = self.daemons.filter(|_| self.at_s.is_none());
        if status.is_some_and(|daemons| daemons.statuses().is_ok_and(|s| s.has_lossy())) {
            self.at_s = Some(self.start.elapsed().as_secs_f64());
        }
    }
}

/// Changes the link as time goes by.
struct Clock<'a> {
    testbed: &'a Testbed,
    start: Instant,
    left: &'a [Change],
}

impl<'a> Clock<'a> {
    fn start(testbed: &'a Testbed, timeline: &'a [Change]) -> Self {
        Self {
            testbed,
            start: Instant::now(),
            left: timeline,
        }
    }

    fn tick(&mut self) -> anyhow::Result<()> {
        while let Some((next, rest)) = self.left.split_first() {
            if self.start.elapsed().as_secs_f64() < next.at_s {
                break;
            }
            self.testbed.set(&next.link)?;
            self.left = rest;
        }
        Ok(())
    }
}
