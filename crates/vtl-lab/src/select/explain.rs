//! `vtl select explain`: why the model chooses a carrier, and what each would have given.

use std::fmt::Write;
use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use clap::Args;
use serde::Serialize;
use vtl_cli::daemon::{self, SocketArgs};
use vtl_cli::units;
use vtl_control::{FlowStatus, PathReport, PathStatus, Request, SelectStatus, SelectedPath};
use vtl_core::profile::Profile;
use vtl_core::select::{CLASSES, Explanation, Features, Selector, is_sure};
use vtl_link::{Link, LossModel};

use super::campaign::{Figure, LIMIT, LOADS, LinkId, Load};
use super::progress::Progress;
use super::rows::{BURST_PACKETS, LOSS_PERCENT, RATE_MBIT, RTT_MS};
use super::{measure, model};
use crate::bench::plan::size;

/// What the reason of connections begins with that the model has chosen for, and a class that is a graft.
const AUTO: &str = "auto: ";
const GRAFT: &str = "graft:";

/// Arguments of `vtl select explain`.
#[derive(Clone, Debug, Args)]
pub(crate) struct ExplainArgs {
    /// The path to this host, by what the daemon knows of it (vtl path show): of the direction in which this host sends
    #[arg(long, value_name = "ADDRESS", conflicts_with_all = ["rtt", "loss", "burst", "rate"])]
    path: Option<IpAddr>,
    /// The path of this connection of the carrier auto (vtl flow list), by what it was chosen by
    #[arg(long, value_name = "ID",
        conflicts_with_all = ["path", "profile", "rtt", "loss", "burst", "rate"])]
    flow: Option<u64>,
    /// Round-trip time of the path without queues, milliseconds
    #[arg(long, value_name = "MS", value_parser = units::milliseconds)]
    rtt: Option<f64>,
    /// Packets that the path loses, per cent
    #[arg(long, value_name = "PCT", value_parser = units::per_cent)]
    loss: Option<f64>,
    /// Packets that are lost together on average [default: losses are independent]
    #[arg(long, value_name = "PACKETS")]
    burst: Option<f64>,
    /// Rate of the path, Mbit/s
    #[arg(long, value_name = "MBIT", value_parser = units::mbit_per_second)]
    rate: Option<f64>,
    /// A lower bound of the rate, where that is unknown.
    #[arg(skip)]
    at_least: Option<f64>,
    /// What the application wants: time-sensitive, time-and-loss-sensitive, loss-sensitive or insensitive
    #[arg(long, value_name = "PROFILE")]
    profile: Option<Profile>,
    /// How much it will send: bytes, or with a unit such as 64KiB or 1.5MB
    #[arg(long, value_name = "BYTES", value_parser = units::bytes)]
    size: Option<u64>,
    /// Choose by this model of `vtl select train` instead of VTL's own
    #[arg(long, value_name = "MODEL.jsonl")]
    model: Option<PathBuf>,
    /// Write JSON for machines instead of text
    #[arg(long)]
    json: bool,
}

/// Why a choice is made, for machines.
#[derive(Debug, Serialize)]
struct Report {
    chosen: &'static str,
    /// Why it is the default and the model was not asked.
    default_because: Option<String>,
    /// Whether it is a graft that is not surely better on such a path, so that connections of auto stay on TCP.
    stays_on_tcp: bool,
    path: Vec<Test>,
    /// Of what all carriers won over the worst in such cases of the training, the share of each.
    shares: Vec<Share>,
    /// What each takes in virtual time, the fastest first; empty if what is needed for that is unknown.
    alternatives: Vec<Alternative>,
    #[serde(skip)]
    told: Features,
    /// What connections have taught the daemon of the host, with the profile that this is of.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    learnt: Vec<Learnt>,
    /// Whether that is what the daemon knows of a path.
    #[serde(skip)]
    of_path: bool,
    /// What the alternatives carry, in words.
    #[serde(skip)]
    transfer: String,
}

#[derive(Debug, Serialize)]
struct Learnt {
    /// `None`: unknown.
    profile: Option<String>,
    /// What the daemon's model chooses, and what is chosen instead.
    model: String,
    carrier: Option<String>,
}

#[derive(Debug, Serialize)]
struct Test {
    condition: String,
    /// Whether a value decided; else the condition is what most cases of the training fulfilled.
    known: bool,
    #[serde(skip)]
    attribute: String,
}

#[derive(Debug, Serialize)]
struct Share {
    carrier: &'static str,
    share: f64,
}

#[derive(Debug, Serialize)]
struct Alternative {
    carrier: &'static str,
    /// Of streams: the time in which as much is in time as was sent.
    ms: f64,
    /// Whether some transfers were cut.
    cut: bool,
    /// How much longer than by the fastest, as a share.
    longer: f64,
}

/// Runs `vtl select explain`.
pub(super) fn run(args: &ExplainArgs, socket: &SocketArgs) -> Result<()> {
    let report = match (args.path, args.flow) {
        (Some(peer), _) => {
            let of = daemon::ask(&socket.socket, |daemon| {
                daemon.call::<PathReport>(&Request::PathShow { peer })
            })?;
            let report = args.of_path(&of.path).report()?;
            report.taught_of(peer, socket)
        }
        (None, Some(id)) => {
            let flow: FlowStatus = daemon::ask(&socket.socket, |daemon| {
                daemon.call(&Request::FlowShow { id })
            })?;
            let selected = daemon::ask(&socket.socket, vtl_control::Client::selected)?;
            let report = args.of_flow(&flow, &selected)?.report()?;
            report.taught_of(flow.peer.ip(), socket)
        }
        (None, None) => args.report()?,
    };
    super::show(&report, args.json, Report::text)
}

impl ExplainArgs {
    /// The same with the figures of a path.
    fn of_path(&self, path: &PathStatus) -> Self {
        let is_measured = path.bandwidth_at_least == Some(false);
        Self {
            rtt: path.min_rtt_ms,
            loss: path.clear_loss_pct.or(path.loss_pct),
            burst: path.loss_burst,
            rate: path.bandwidth_mbit.filter(|_| is_measured),
            at_least: path.bandwidth_mbit,
            ..self.clone()
        }
    }

    /// The same with the figures of a connection's path.
    ///
    /// # Errors
    /// None are chosen for its host, as it has another carrier, or nothing is known.
    fn of_flow(&self, flow: &FlowStatus, selected: &SelectStatus) -> Result<Self> {
        let (id, peer) = (flow.id, flow.peer.ip());
        ensure!(
            flow.why.starts_with(AUTO),
            "the model has not chosen what connection {id} goes by: {}: vtl flow show {id}",
            flow.why
        );
        let is_its =
            |path: &&SelectedPath| (path.peer, path.association) == (peer, flow.association);
        let chosen = selected.paths.iter().find(is_its);
        let known = chosen.filter(|path| path.min_rtt_ms.is_some());
        let known = known.with_context(|| {
            format!("too little is known of the path to {peer} yet: vtl select status")
        })?;
        let is_measured = known.rate_at_least == Some(false);
        Ok(Self {
            path: Some(peer),
            rtt: known.min_rtt_ms,
            loss: known.loss_pct,
            burst: known.loss_burst,
            rate: known.rate_mbit.filter(|_| is_measured),
            at_least: known.rate_mbit,
            profile: known.profile.as_ref().and_then(|name| name.parse().ok()),
            ..self.clone()
        })
    }

    /// Whether what was told is what simulations are for.
    fn is_common(&self) -> bool {
        let is_in =
            |x: Option<f64>, range: RangeInclusive<f64>| x.is_none_or(|x| range.contains(&x));
        is_in(self.rtt, RTT_MS)
            && is_in(self.loss, LOSS_PERCENT)
            && is_in(self.rate, RATE_MBIT)
            && is_in(self.burst, BURST_PACKETS)
    }

    fn report(&self) -> Result<Report> {
        let told = self.features()?;
        let explanation = match &self.model {
            Some(path) => model::read(path)?.explain(&told),
            None => Selector::embedded().explain(&told),
        };
        let (alternatives, transfer) = self.alternatives()?;
        let Explanation {
            class,
            default_because,
            path,
            shares,
        } = explanation;
        let test = |step: vtl_core::select::Step| Test {
            condition: step.condition,
            known: step.known,
            attribute: step.attribute,
        };
        let share = |(carrier, share)| Share { carrier, share };
        Ok(Report {
            chosen: class,
            default_because,
            stays_on_tcp: class.starts_with(GRAFT) && !is_sure(&told, self.at_least),
            path: path.into_iter().map(test).collect(),
            shares: shares.into_iter().map(share).collect(),
            alternatives,
            told,
            learnt: Vec::new(),
            of_path: self.path.is_some(),
            transfer,
        })
    }

    /// What the user told, refused where it means nothing.
    fn features(&self) -> Result<Features> {
        for (name, value, range) in [
            ("--rtt", self.rtt, RTT_MS),
            ("--loss", self.loss, LOSS_PERCENT),
            ("--rate", self.rate, RATE_MBIT),
            ("--burst", self.burst, BURST_PACKETS),
        ] {
            let (min, max) = (range.start(), range.end());
            if let Some(x) = value.filter(|_| self.path.is_none()) {
                ensure!(range.contains(&x), "{name} {x}: expected {min} to {max}");
            }
        }
        let independent = self.loss.filter(|loss| (1e-9..100.0).contains(loss));
        let independent = independent.map(|loss| 1.0 / (1.0 - loss / 100.0));
        Ok(Features {
            rtt_ms: self.rtt,
            rate_mbit: self.rate,
            loss_percent: self.loss,
            loss_burst: self.burst.or(independent.filter(|_| self.path.is_none())),
            profile: self.profile,
            bytes: self.size.map(|bytes| bytes as f64),
        })
    }

    /// What each carrier takes for what was told, in virtual time, and what that was in words. Nothing if the link, or the
    /// size of a file, is unknown.
    fn alternatives(&self) -> Result<(Vec<Alternative>, String)> {
        let (Some(rtt), Some(rate), Some(loss)) = (self.rtt, self.rate, self.loss) else {
            return Ok(Default::default());
        };
        if !self.is_common() {
            return Ok(Default::default());
        }
        let mut link = Link {
            loss_down_pct: Some(loss),
            loss_up_pct: Some(0.0),
            ..Link::new(rtt, rate)
        };
        if let Some(burst_packets) = self.burst {
            link.loss_model = LossModel::GilbertElliott {
                burst_packets,
                bad_loss_pct: 100.0,
            };
        }
        link.check()?;
        let id = LinkId { seed: 0, number: 0 };
        let (load, transfer) = match (self.profile, self.size) {
            (Some(Profile::TimeSensitive), _) => {
                let stream = LOADS[LOADS.len() - 1];
                let every = stream.traffic(id, &link).every as f64;
                let kbit = super::simulate::PAYLOAD as f64 * 8e6 / every;
                (stream, format!("10 s of packets, {kbit:.0} kbit/s"))
            }
            (_, None) => return Ok(Default::default()),
            (_, Some(bytes)) => {
                let max = LOADS.into_iter().filter_map(Load::bytes).max();
                let part = bytes.min(max.unwrap_or(bytes));
                let of = match part < bytes {
                    true => format!("the first {} of {}", size(part), size(bytes)),
                    false => size(bytes),
                };
                (Load::file(part), of)
            }
        };
        let (figure, words) = match self.profile {
            Some(Profile::TimeAndLossSensitive) => (Figure::Tail, "the slowest quarter"),
            _ => (Figure::Mean, "the mean"),
        };
        let progress = Progress::new(CLASSES.len(), "carriers");
        let mut all = Vec::new();
        for carrier in CLASSES {
            let costs = measure::costs(id, &link, load, carrier)?.unwrap_or_default();
            all.push(Alternative {
                carrier,
                ms: figure.of(&costs),
                cut: costs.iter().any(|ms| *ms * 1e6 >= LIMIT as f64),
                longer: 0.0,
            });
            progress.add_one();
        }
        all.sort_by(|a, b| a.ms.total_cmp(&b.ms));
        let min = all[0].ms;
        for one in &mut all {
            one.longer = one.ms / min - 1.0;
        }
        let runs = load.runs(&link);
        Ok((
            all,
            format!("{transfer}, in virtual time: {words} of {runs} transfers"),
        ))
    }
}

impl Report {
    /// With what connections to a host have taught the daemon; nothing of one of a former version.
    fn taught_of(mut self, peer: IpAddr, socket: &SocketArgs) -> Self {
        let lessons = daemon::ask(&socket.socket, vtl_control::Client::lessons);
        let lessons = lessons.map_or_else(|_| Vec::new(), |lessons| lessons.lessons);
        let of_peer = lessons
            .into_iter()
            .filter(|lesson| lesson.peer == peer.to_canonical());
        self.learnt = of_peer
            .map(|lesson| Learnt {
                profile: lesson.profile,
                model: lesson.model,
                carrier: lesson.learnt,
            })
            .collect();
        self
    }

    fn text(&self) -> String {
        let mut out = format!("{}\n\n", self.chosen);
        match &self.default_because {
            Some(why) => {
                let _ = writeln!(out, "The default, without asking the model: {why}.");
            }
            None => self.path_text(&mut out),
        }
        if self.stays_on_tcp {
            out += "Connections of auto stay on tcp:bbr: so few packets fit onto the path that a graft is not surely better.\n";
        }
        for learnt in &self.learnt {
            let profile = learnt.profile.as_deref().unwrap_or("of unknown profile");
            let _ = match &learnt.carrier {
                Some(carrier) => writeln!(
                    out,
                    "Learnt of connections ({profile}): {carrier} instead of the model's {} (vtl select learn list).",
                    learnt.model
                ),
                None => writeln!(
                    out,
                    "Learnt of connections ({profile}): nothing that contradicts the model's {}.",
                    learnt.model
                ),
            };
        }
        out.push('\n');
        if self.alternatives.is_empty() {
            out += match self.of_path {
                true => {
                    "With a size, and a rate that was measured, this also says what each carrier would take.\n"
                }
                false => {
                    "With --rtt, --loss, --rate and --size this also says what each carrier would take.\n"
                }
            };
            return out;
        }
        let _ = writeln!(out, "What each would take for {}", self.transfer);
        for one in &self.alternatives {
            let longer = match one.longer {
                0.0 => "the fastest".to_owned(),
                longer if longer < 1.0 => format!("{:.0} % longer", longer * 100.0),
                longer => format!("{:.1} times as long", longer + 1.0),
            };
            let mark = if one.carrier == self.chosen {
                "  <- chosen"
            } else {
                ""
            };
            let cut = if one.cut { ">" } else { "" };
            let time = cut.to_owned() + &time(one.ms);
            let _ = writeln!(out, "  {:14}{time:>9}  {longer}{mark}", one.carrier);
        }
        out
    }

    /// The path as lines: what was told, and what a tree made of it.
    fn path_text(&self, out: &mut String) {
        *out += "The path through one of the trees that choose it:\n";
        for test in &self.path {
            let value = self.told(&test.attribute);
            let _ = match test.known {
                true => writeln!(out, "  {:34}{value}", test.condition),
                false => {
                    let condition = test.condition.split(" (").next().unwrap_or_default();
                    writeln!(
                        out,
                        "  {condition:34}unknown; most cases of the training, the others count as well"
                    )
                }
            };
        }
        if self.path.is_empty() {
            *out += "  it asks nothing\n";
        }
        let shares = self.shares.iter();
        let shares = shares.map(|s| format!("{} {:.0} %", s.carrier, s.share * 100.0));
        let shares: Vec<String> = shares.collect();
        let _ = writeln!(
            out,
            "On the average of all trees, of the time that choices saved over the worst one in such cases of the training:\n  {}",
            shares.join(", ")
        );
    }

    /// What was told about an attribute.
    fn told(&self, attribute: &str) -> String {
        let f = &self.told;
        let with = |x: Option<f64>, unit: &str| {
            x.map_or_else(String::new, |x| format!("it is {} {unit}", rounded(x)))
        };
        match attribute {
            "rtt" => with(f.rtt_ms, "ms"),
            "rate" => with(f.rate_mbit, "Mbit/s"),
            "loss" => with(f.loss_percent, "%"),
            "burst" => with(f.loss_burst, "packets"),
            "size" => (f.bytes).map_or_else(String::new, |b| format!("it is {}", size(b as u64))),
            "bdp" => "the path's bandwidth-delay product".to_owned(),
            "length" => "the transfer, in such products".to_owned(),
            "lost" => "of the transfer, on average".to_owned(),
            _ => String::new(),
        }
    }
}

/// To three digits behind the point, without zeros at the end.
fn rounded(x: f64) -> f64 {
    (x * 1e3).round() / 1e3
}

/// A time for people.
fn time(ms: f64) -> String {
    match ms {
        ms if ms < 9.95 => format!("{ms:.1} ms"),
        ms if ms < 1e3 => format!("{ms:.0} ms"),
        ms if ms < 9.995e3 => format!("{:.2} s", ms / 1e3),
        ms => format!("{:.1} s", ms / 1e3),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 1 MiB over 600 ms, 10 Mbit/s and 2 % loss.
    fn far() -> ExplainArgs {
        ExplainArgs {
            path: None,
            flow: None,
            rtt: Some(600.0),
            loss: Some(2.0),
            burst: None,
            rate: Some(10.0),
            at_least: None,
            profile: Some(Profile::LossSensitive),
            size: Some(1 << 20),
            model: None,
            json: false,
        }
    }

    #[test]
    fn report__the_path_and_the_alternatives() {
        let report = far().report().unwrap();
        assert_eq!(report.chosen, "graft:stream");
        assert_eq!(report.alternatives.len(), CLASSES.len());
        assert_eq!(report.alternatives[0].carrier, "graft:stream");
        assert!(report.alternatives.is_sorted_by(|a, b| a.ms <= b.ms));
        let last = &report.alternatives[4];
        assert!((last.longer - (last.ms / report.alternatives[0].ms - 1.0)).abs() < 1e-9);
        let text = report.text();
        assert!(text.starts_with("graft:stream\n\nThe path"), "{text}");
        assert!(text.contains("it is 600 ms"), "{text}");
        assert!(
            text.contains("for 1 MiB, in virtual time: the mean of 24 transfers"),
            "{text}"
        );
        assert_eq!(text.matches("<- chosen").count(), 1, "{text}");
    }

    #[test]
    fn report__what_is_unknown_is_said() {
        let args = ExplainArgs {
            rate: None,
            size: None,
            ..far()
        };
        let text = args.report().unwrap().text();
        assert!(text.contains("through one of the trees"), "{text}");
        // There is a model that asks neither for them nor for what follows from them.
        for word in ["(missing", "unknown", "bdp", "size >", "rate >"] {
            assert!(!text.contains(word), "{word}: {text}");
        }
        assert!(
            text.contains("With --rtt, --loss, --rate and --size"),
            "{text}"
        );
        let args = ExplainArgs {
            profile: Some(Profile::Insensitive),
            ..far()
        };
        let text = args.report().unwrap().text();
        assert!(
            text.starts_with("tcp:bbr\n\nThe default, without asking"),
            "{text}"
        );
        let args = ExplainArgs {
            profile: Some(Profile::TimeSensitive),
            size: None,
            ..far()
        };
        let text = args.report().unwrap().text();
        assert!(text.contains("for 10 s of packets"), "{text}");
    }

    #[test]
    fn of_path__what_the_daemon_knows() {
        let path: PathStatus = serde_json::from_value(serde_json::json!({
            "peer": "192.0.2.7", "evidence": "tcp", "age_s": 0.2, "min_rtt_ms": 600.0, "packets": 3000,
            "loss_pct": 9.0, "clear_loss_pct": 2.0, "bandwidth_mbit": 8.0, "bandwidth_at_least": true,
        }))
        .unwrap();
        let args = ExplainArgs {
            path: Some(path.peer),
            ..far()
        };
        let report = args.of_path(&path).report().unwrap();
        assert_eq!(report.chosen, "graft:stream");
        let told = report.told;
        assert_eq!((told.rtt_ms, told.loss_percent), (Some(600.0), Some(2.0)));
        assert_eq!((told.rate_mbit, told.loss_burst), (None, None));
        assert!(report.text().contains("a rate that was measured"));
        // What training has not seen is no error: the daemon would take the default.
        let near = PathStatus {
            min_rtt_ms: Some(0.1),
            bandwidth_at_least: Some(false),
            ..path
        };
        let report = args.of_path(&near).report().unwrap();
        assert_eq!(report.chosen, "tcp");
    }

    #[test]
    fn report__refuses_what_no_path_has() {
        for (change, why) in [
            ((|a| a.rtt = Some(0.0)) as fn(&mut ExplainArgs), "--rtt 0"),
            (|a| a.loss = Some(101.0), "--loss 101: expected 0 to 100"),
            (|a| a.rate = Some(-1.0), "--rate -1"),
            (|a| a.burst = Some(0.5), "--burst 0.5"),
            (
                |a| a.model = Some("/no/model.jsonl".into()),
                "/no/model.jsonl",
            ),
        ] {
            let mut args = far();
            change(&mut args);
            let error = args.report().unwrap_err();
            assert!(format!("{error:#}").contains(why), "{error:#}");
        }
    }

    #[test]
    fn time__for_people() {
        for (ms, text) in [
            (3.21, "3.2 ms"),
            (87.4, "87 ms"),
            (1234.0, "1.23 s"),
            (61_000.0, "61.0 s"),
        ] {
            assert_eq!(time(ms), text);
        }
    }
}
