//! What one transfer came to, for machines.

use serde::{Deserialize, Deserializer, Serialize, de};
use vtl_testbed::{Link, Medium, Profile};

use crate::bench::agent::Outcome;
use crate::bench::effort::Effort;
use crate::bench::plan::{Amount, Cell, Transport, Workload};
use crate::provenance;

/// A word of a column that has few. By this name, as serde takes a reference for a part of its input.
pub(crate) type Word = &'static str;

/// One transfer, or one of several that competed. Absent figures do not exist for this workload or
/// transport. The meaning of each column is described in `bench/README.md`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Row {
    /// The plan's name.
    pub(crate) plan: String,
    /// When it began, UTC.
    pub(crate) date: String,
    /// The kernel's release.
    pub(crate) kernel: String,
    /// The link's profile, or `custom`.
    #[serde(deserialize_with = "word")]
    pub(crate) profile: Word,
    /// The link's medium, as the plan names it.
    #[serde(deserialize_with = "word_if_any")]
    pub(crate) medium: Option<Word>,
    /// Round-trip time, ms; of the first link, if there are two.
    pub(crate) rtt_ms: f64,
    /// Rate, Mbit/s; 0: not limited.
    pub(crate) rate_mbit: f64,
    /// Mean loss in each direction, per cent.
    pub(crate) loss_pct: f64,
    /// `uniform` or `gilbert-elliott`.
    #[serde(deserialize_with = "word")]
    pub(crate) loss_model: Word,
    /// Round-trip time of the second link, ms.
    pub(crate) core_rtt_ms: Option<f64>,
    /// Rate of the second link, Mbit/s; 0: not limited.
    pub(crate) core_rate_mbit: Option<f64>,
    /// Packets that later ones overtake, per cent.
    pub(crate) reorder_pct: f64,
    /// Packets that may wait at the bottleneck.
    pub(crate) queue_packets: u32,
    /// Seed of the link in this run.
    pub(crate) seed: u64,
    /// Whether the link changes during the transfer.
    pub(crate) timeline: bool,
    /// The workload's kind.
    #[serde(deserialize_with = "word")]
    pub(crate) workload: Word,
    /// Which way a file goes: `down`, `up`, or with one the other way at the same time, `down of both`, `up of both`.
    #[serde(deserialize_with = "word_if_any")]
    pub(crate) direction: Option<Word>,
    /// Bytes asked for: of the file, of each flow, of a response.
    pub(crate) size: Option<u64>,
    /// Messages, or flows at the same time.
    pub(crate) count: Option<u32>,
    /// Seconds asked for.
    pub(crate) seconds: Option<f64>,
    /// Mbit/s that the server's application sends at, if not as fast as it goes.
    pub(crate) offered_mbit: Option<f64>,
    /// `curl`, or `endpoint` for this program's own ends.
    #[serde(deserialize_with = "word")]
    pub(crate) app: Word,
    /// Whether an untimed transfer to the same peer came first.
    pub(crate) known: bool,
    /// Cores that both hosts had together, if that was limited.
    pub(crate) cores: Option<u8>,
    /// The daemons' driver as asked for.
    pub(crate) driver: Option<String>,
    /// The daemons' ingress as asked for.
    pub(crate) ingress: Option<String>,
    /// The daemons' ring size as asked for.
    pub(crate) ring_slots: Option<u32>,
    /// Whether daemons ran, used or not.
    pub(crate) daemons: bool,
    /// What carried it.
    pub(crate) transport: String,
    /// From 1; the transports alternate within a run.
    pub(crate) run: u32,
    /// Which of several competing flows, from 1.
    pub(crate) flow: Option<u32>,
    /// Every byte that arrived was right, and nothing is missing unless it was cut.
    pub(crate) ok: bool,
    /// The time limit ended it.
    pub(crate) cut: bool,
    /// Why it failed.
    pub(crate) error: Option<String>,
    /// Bytes of payload that arrived.
    pub(crate) bytes: u64,
    /// From before connecting to the last byte, s.
    pub(crate) fct_s: Option<f64>,
    /// From before connecting to the first byte, s.
    pub(crate) first_byte_s: Option<f64>,
    /// Payload over that time, Mbit/s.
    pub(crate) goodput_mbps: Option<f64>,
    /// Goodput over what the link can deliver.
    pub(crate) utilisation: Option<f64>,
    /// The same over the second half of the data, or of the time.
    pub(crate) utilisation_steady: Option<f64>,
    /// Of messages, µs.
    pub(crate) latency_p50_us: Option<f64>,
    /// Of messages, µs.
    pub(crate) latency_p99_us: Option<f64>,
    /// Of messages, µs.
    pub(crate) latency_p999_us: Option<f64>,
    /// Packets sent again (QUIC: lost), per cent of all sent by the server.
    pub(crate) retransmitted_pct: Option<f64>,
    /// Processor time of both hosts together, s.
    pub(crate) cpu_s: Option<f64>,
    /// The same for each 10^9 bytes.
    pub(crate) cpu_s_per_gb: Option<f64>,
    /// Processor time of the client's daemon, s.
    pub(crate) client_vtld_cpu_s: Option<f64>,
    /// How often its threads slept.
    pub(crate) client_vtld_wakeups: Option<u64>,
    /// Processor time of the server's daemon, or of the gateway's, s.
    pub(crate) server_vtld_cpu_s: Option<f64>,
    /// How often its threads slept.
    pub(crate) server_vtld_wakeups: Option<u64>,
    /// The most memory that endpoints and daemons had resident together, KiB.
    pub(crate) memory_peak_kb: Option<u64>,
    /// Time that half of the packets spent at the bottleneck at most, towards the client, ms.
    pub(crate) queue_p50_ms: Option<f64>,
    /// Packets that the emulator failed to carry: if not 0, the machine was too slow.
    pub(crate) emulator_drops: u64,
    /// Of all competing flows' bytes while all were running.
    pub(crate) share: Option<f64>,
    /// Of the link's rate, in the same time.
    pub(crate) link_share: Option<f64>,
    /// Jain's index of all competing flows' bytes in the same time.
    pub(crate) jain: Option<f64>,
    /// What the transport really used.
    pub(crate) settings: String,
    /// When the link changes, seconds; not in the CSV.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) changes: Vec<f64>,
    /// When the first bytes came by another graft than before, seconds; not in the CSV.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) switches: Vec<f64>,
    /// Bytes that were skipped as lost, of a captured program.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) skipped: Option<u64>,
    /// Seconds, and bytes by then: only of competing flows and of changing links.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) samples: Vec<(f64, u64)>,
    /// Seconds, and KiB that the daemons had resident then: only of transfers of a minute and more.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) memory_samples: Vec<(f64, u64)>,
}

/// The columns of the CSV form: all fields but the samples and the times of changes.
pub(crate) const COLUMNS: [&str; 57] = [
    "plan",
    "date",
    "kernel",
    "profile",
    "medium",
    "rtt_ms",
    "rate_mbit",
    "loss_pct",
    "loss_model",
    "core_rtt_ms",
    "core_rate_mbit",
    "reorder_pct",
    "queue_packets",
    "seed",
    "timeline",
    "workload",
    "direction",
    "size",
    "count",
    "seconds",
    "offered_mbit",
    "app",
    "known",
    "cores",
    "driver",
    "ingress",
    "ring_slots",
    "daemons",
    "transport",
    "run",
    "flow",
    "ok",
    "cut",
    "error",
    "bytes",
    "fct_s",
    "first_byte_s",
    "goodput_mbps",
    "utilisation",
    "utilisation_steady",
    "latency_p50_us",
    "latency_p99_us",
    "latency_p999_us",
    "retransmitted_pct",
    "cpu_s",
    "cpu_s_per_gb",
    "client_vtld_cpu_s",
    "client_vtld_wakeups",
    "server_vtld_cpu_s",
    "server_vtld_wakeups",
    "memory_peak_kb",
    "queue_p50_ms",
    "emulator_drops",
    "share",
    "link_share",
    "jain",
    "settings",
];

/// The words of columns that have few.
const WORDS: [&str; 15] = [
    "custom",
    "uniform",
    "gilbert-elliott",
    "file",
    "request-response",
    "stream",
    "flows",
    "compete",
    "down",
    "up",
    "both",
    "down of both",
    "up of both",
    "curl",
    "endpoint",
];

fn word<'de, D: Deserializer<'de>>(from: D) -> Result<Word, D::Error> {
    let text = String::deserialize(from)?;
    let names = Profile::ALL.map(Profile::name).into_iter();
    let names = names.chain(Medium::ALL.map(Medium::name)).chain(WORDS);
    let mut found = names.filter(|word| *word == text);
    found
        .next()
        .ok_or_else(|| de::Error::custom(format!("\"{text}\" is in no row of this version")))
}

fn word_if_any<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Word>, D::Error> {
    #[derive(Deserialize)]
    struct Known(#[serde(deserialize_with = "word")] Word);
    Ok(Option::<Known>::deserialize(from)?.map(|Known(word)| word))
}

impl Row {
    /// The inputs of a transfer that has not happened yet.
    pub(crate) fn new(plan: &str, cell: &Cell, transport: &Transport, run: u32) -> Self {
        let (size, count, seconds) = match &cell.workload {
            Workload::File { bytes, .. } => (Some(*bytes), None, None),
            Workload::RequestResponse {
                response, count, ..
            } => (Some(u64::from(*response)), Some(*count), None),
            Workload::Stream { seconds, .. } | Workload::Compete { seconds, .. } => {
                (None, None, Some(*seconds))
            }
            Workload::Flows { count, amount } => match amount {
                Amount::Bytes(bytes) => (Some(*bytes), Some(*count), None),
                Amount::Seconds(seconds) => (None, Some(*count), Some(*seconds)),
            },
        };
        Self {
            plan: plan.to_owned(),
            date: provenance::date(),
            kernel: provenance::kernel(),
            profile: cell.profile_name(),
            medium: cell.medium.map(Medium::name),
            rtt_ms: cell.link.rtt_ms,
            rate_mbit: cell.link.rate_mbit,
            loss_pct: cell.link.loss_pct,
            loss_model: cell.loss_model(),
            core_rtt_ms: cell.core.as_ref().map(|core| core.rtt_ms),
            core_rate_mbit: cell.core.as_ref().map(|core| core.rate_mbit),
            reorder_pct: cell.link.reorder_pct,
            queue_packets: cell.link.queue_limit(),
            seed: seed(cell, run),
            timeline: !cell.timeline.is_empty(),
            changes: cell.timeline.iter().map(|change| change.at_s).collect(),
            workload: cell.workload.kind(),
            direction: match cell.workload {
                Workload::File { direction, .. } => Some(direction.name()),
                _ => None,
            },
            size,
            count,
            seconds,
            offered_mbit: match cell.workload {
                Workload::Stream { rate_mbit, .. } if rate_mbit > 0.0 => Some(rate_mbit),
                _ => None,
            },
            app: if cell.curl { "curl" } else { "endpoint" },
            known: cell.known,
            cores: cell.cores,
            driver: cell.vtl.driver.clone(),
            ingress: cell.vtl.ingress.clone(),
            ring_slots: cell.vtl.ring_slots,
            daemons: transport.needs_daemons() || cell.vtl.attached,
            transport: transport.to_string(),
            run,
            ..Self::default()
        }
    }

    /// Adds what the receiver saw.
    pub(crate) fn measured(&mut self, cell: &Cell, transport: &Transport, outcome: &Outcome) {
        self.bytes = outcome.bytes;
        self.cut = outcome.cut;
        self.error.clone_from(&outcome.error);
        self.ok =
            outcome.error.is_none() && outcome.wrong == 0 && (outcome.complete || outcome.cut);
        if !self.ok && self.error.is_none() {
            self.error = Some("it ended before every byte had arrived".to_owned());
        }
        if outcome.wrong > 0 {
            self.error = Some(format!("{} bytes are not what was sent", outcome.wrong));
        }
        self.fct_s = Some(outcome.seconds);
        self.switches.clone_from(&outcome.switches);
        self.first_byte_s = outcome.first_byte_s;
        self.goodput_mbps = Some(mbps(outcome.bytes, outcome.seconds));
        let start = match &cell.workload {
            Workload::Compete { starts, .. } => {
                let index = self.flow.map_or(0, |flow| flow as usize - 1);
                starts.get(index).copied().unwrap_or(0.0)
            }
            _ => 0.0,
        };
        let utilisation = |bytes: u64, from: f64, to: f64| {
            let max = capacity_mbit(cell, start + from, start + to) * transport.efficiency();
            (max > 0.0).then(|| bytes as f64 * 8.0 / 1e6 / max)
        };
        if !matches!(cell.workload, Workload::RequestResponse { .. }) {
            self.utilisation = utilisation(outcome.bytes, 0.0, outcome.seconds);
            self.utilisation_steady = outcome.half.and_then(|(seconds, bytes)| {
                let rest = outcome.bytes.saturating_sub(bytes);
                utilisation(rest, seconds, outcome.seconds)
            });
        }
        if let Some([p50, p99, p999]) = outcome.latency_us {
            self.latency_p50_us = Some(p50);
            self.latency_p99_us = Some(p99);
            self.latency_p999_us = Some(p999);
        }
        if self.flow.is_some() || self.timeline {
            self.samples.clone_from(&outcome.samples);
        }
    }

    /// Adds the processor time.
    pub(crate) fn cpu(&mut self, seconds: f64) {
        self.cpu_s = Some(seconds);
        if self.bytes > 0 {
            self.cpu_s_per_gb = Some(seconds / (self.bytes as f64 / 1e9));
        }
    }

    /// Adds what the client's daemon did, and the server's or the gateway's.
    pub(crate) fn daemons_did(&mut self, [client, server]: [Effort; 2]) {
        self.client_vtld_cpu_s = Some(client.cpu_s);
        self.client_vtld_wakeups = Some(client.wakeups);
        self.server_vtld_cpu_s = Some(server.cpu_s);
        self.server_vtld_wakeups = Some(server.wakeups);
    }

    /// The row as CSV, in the order of [`COLUMNS`].
    pub(crate) fn csv(&self) -> String {
        let value = serde_json::to_value(self).unwrap_or_default();
        let cells = columns().map(|column| match &value[column] {
            serde_json::Value::Null => String::new(),
            serde_json::Value::String(text) => quote(text),
            other => other.to_string(),
        });
        cells.collect::<Vec<_>>().join(",")
    }
}

/// The names of the CSV columns.
pub(crate) fn columns() -> impl Iterator<Item = &'static str> {
    COLUMNS.into_iter()
}

/// As RFC 4180 wants it.
fn quote(text: &str) -> String {
    if text.contains(['"', ',', '\n', '\r']) {
        format!("\"{}\"", text.replace('"', "\"\""))
    } else {
        text.to_owned()
    }
}

/// The link's seed in a run: each run loses other packets, each transport of a run the same.
pub(crate) fn seed(cell: &Cell, run: u32) -> u64 {
    cell.link.seed + u64::from(run) - 1
}

/// Megabits that the link can deliver to the client between two times, headers included.
fn capacity_mbit(cell: &Cell, from: f64, to: f64) -> f64 {
    let delivers = |link: &Link| link.rate_mbit * (1.0 - link.loss_down() / 100.0);
    let mut total = 0.0;
    let (mut since, mut link) = (from, &cell.link);
    for change in &cell.timeline {
        let until = change.at_s.clamp(since, to.max(since));
        total += delivers(link) * (until - since);
        (since, link) = (until, &change.link);
    }
    total + delivers(link) * (to - since).max(0.0)
}

fn mbps(bytes: u64, seconds: f64) -> f64 {
    if seconds > 0.0 {
        bytes as f64 * 8.0 / 1e6 / seconds
    } else {
        0.0
    }
}

/// How competing flows shared the link while all were running.
pub(crate) fn share(cell: &Cell, rows: &mut [Row]) {
    let Workload::Compete { seconds, starts } = &cell.workload else {
        return;
    };
    let from = starts.iter().copied().fold(0.0, f64::max);
    let to = starts.iter().copied().fold(f64::INFINITY, f64::min) + seconds;
    let bytes: Vec<f64> = rows
        .iter()
        .zip(starts)
        .map(|(row, start)| at(&row.samples, to - start) - at(&row.samples, from - start))
        .collect();
    let sum: f64 = bytes.iter().sum();
    let squares: f64 = bytes.iter().map(|b| b * b).sum();
    if sum <= 0.0 {
        return;
    }
    let rate: f64 = capacity_mbit(cell, from, to) * 1e6 / 8.0;
    let jain = sum * sum / (bytes.len() as f64 * squares);
    for (row, bytes) in rows.iter_mut().zip(bytes) {
        row.share = Some(bytes / sum);
        row.link_share = (rate > 0.0).then(|| bytes / rate);
        row.jain = Some(jain);
    }
}

/// Bytes by a time, between samples on a straight line.
fn at(samples: &[(f64, u64)], time: f64) -> f64 {
    let after = samples.partition_point(|s| s.0 < time);
    match (after.checked_sub(1).map(|i| samples[i]), samples.get(after)) {
        (Some((t0, b0)), Some((t1, b1))) => {
            let part = if *t1 > t0 {
                (time - t0) / (t1 - t0)
            } else {
                0.0
            };
            b0 as f64 + (*b1 as f64 - b0 as f64) * part
        }
        (Some((_, bytes)), None) => bytes as f64,
        (None, _) => 0.0,
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::bench::plan::Plan;

    fn cell(text: &str) -> Cell {
        Plan::parse(Path::new("p.toml"), text).expect("valid").cells[0].clone()
    }

    const FILE: &str = "transports = [\"tcp-cubic\"]\n\
        [link]\nrtt_ms = 100\nrate_mbit = 100\nloss_pct = 2\n\
        [workload]\nkind = \"file\"\nbytes = 10_000_000\n";

    fn outcome(seconds: f64, half: f64) -> Outcome {
        Outcome {
            bytes: 10_000_000,
            complete: true,
            seconds,
            half: Some((half, 5_000_000)),
            ..Outcome::default()
        }
    }

    #[test]
    fn measured__utilisation_discounts_loss_and_headers() {
        let cell = cell(FILE);
        let tcp = &cell.transports[0];
        let mut row = Row::new("p", &cell, tcp, 1);
        // 80 Mbit in 2 s, the second half of it in 0.5 s.
        row.measured(&cell, tcp, &outcome(2.0, 1.5));
        assert!(row.ok && !row.cut);
        assert_eq!(row.goodput_mbps, Some(40.0));
        let deliverable = 100.0 * 0.98 * 1448.0 / 1500.0;
        assert!((row.utilisation.expect("a rate") - 40.0 / deliverable).abs() < 1e-9);
        assert!((row.utilisation_steady.expect("half") - 80.0 / deliverable).abs() < 1e-9);
        row.cpu(0.5);
        assert_eq!(row.cpu_s_per_gb, Some(50.0));
    }

    #[test]
    fn measured__cut_wrong_and_failed() {
        let cell = cell(FILE);
        let tcp = &cell.transports[0];
        let result = |change: &dyn Fn(&mut Outcome)| {
            let mut outcome = outcome(2.0, 1.0);
            change(&mut outcome);
            let mut row = Row::new("p", &cell, tcp, 1);
            row.measured(&cell, tcp, &outcome);
            (row.ok, row.cut, row.error.is_some())
        };
        let cut = |o: &mut Outcome| (o.complete, o.cut) = (false, true);
        assert_eq!(result(&cut), (true, true, false));
        assert_eq!(result(&|o| o.wrong = 1), (false, false, true));
        assert_eq!(result(&|o| o.complete = false), (false, false, true));
        let failed = |o: &mut Outcome| (o.complete, o.error) = (false, Some("no".to_owned()));
        assert_eq!(result(&failed), (false, false, true));
    }

    #[test]
    fn capacity__follows_the_timeline() {
        let text = format!("{FILE}[[link.timeline]]\nat_s = 1\nrate_mbit = 50\nloss_pct = 0\n");
        let cell = cell(&text);
        assert!((capacity_mbit(&cell, 0.0, 3.0) - (98.0 + 100.0)).abs() < 1e-9);
        assert!((capacity_mbit(&cell, 2.0, 3.0) - 50.0).abs() < 1e-9);
        assert!((capacity_mbit(&cell, 0.0, 0.5) - 49.0).abs() < 1e-9);
    }

    #[test]
    fn share__only_while_all_run() {
        let cell = cell(
            "transports = [\"graft:stream\", \"tcp-cubic\"]\n[link]\nprofile = \"terrestrial\"\n\
             [workload]\nkind = \"compete\"\nseconds = 10\nstart_s = [0, 5]\n",
        );
        let mut rows: Vec<Row> = cell
            .transports
            .iter()
            .map(|t| Row::new("p", &cell, t, 1))
            .collect();
        // The first has the link to itself, then gets 3 MB/s and the other 1 MB/s.
        rows[0].samples = vec![(0.0, 0), (5.0, 50_000_000), (10.0, 65_000_000)];
        rows[1].samples = vec![(0.0, 0), (5.0, 5_000_000), (10.0, 20_000_000)];
        share(&cell, &mut rows);
        assert_eq!((rows[0].share, rows[1].share), (Some(0.75), Some(0.25)));
        assert_eq!(rows[0].jain, Some(0.8));
        assert_eq!(rows[1].link_share, Some(0.08));
    }

    #[test]
    fn deserialize__what_was_written_and_rows_without_later_columns() {
        let text = FILE.replace("rtt_ms", "medium = \"lte\"\nrtt_ms");
        let cell = cell(&text);
        let mut row = Row::new("p", &cell, &cell.transports[0], 2);
        row.fct_s = Some(1.5);
        let value = serde_json::to_value(&row).expect("serialises");
        let back: Row = serde_json::from_value(value.clone()).expect("a row");
        assert_eq!(serde_json::to_value(&back).expect("serialises"), value);
        let mut old = value;
        old.as_object_mut().expect("an object").remove("medium");
        let back: Row = serde_json::from_value(old.clone()).expect("a row");
        assert_eq!((back.medium, back.profile), (None, "custom"));
        old["profile"] = "moon".into();
        assert!(serde_json::from_value::<Row>(old).is_err());
    }

    #[test]
    fn csv__has_every_field_and_quotes() {
        let cell = cell(FILE);
        let mut row = Row::new("p", &cell, &cell.transports[0], 1);
        row.settings = "cubic, SACK \"on\"".to_owned();
        let value = serde_json::to_value(&row).expect("serialises");
        let mut keys: Vec<_> = value.as_object().expect("an object").keys().collect();
        let mut named: Vec<_> = columns().collect();
        keys.sort();
        named.sort_unstable();
        assert_eq!(keys, named);
        assert!(row.csv().ends_with(",\"cubic, SACK \"\"on\"\"\""));
    }
}
