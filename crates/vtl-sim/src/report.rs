//! The tables of results: link profiles under kinds of loss, flows that share a bottleneck, and
//! paths that change.

use std::{fmt::Write, thread};

use vtl_link::{Link, LossModel, Profile};
use vtl_proto::intf;

use crate::{
    change::{self, Aftermath, Change},
    contest::{Contest, Flow, Kind},
    host::SessionConfig,
    models::Model,
    sim::{Failure, MS, Outcome, Scenario, Sim},
};

/// Links: name, round trip in ms, rate in Mbit/s, and duration of a measurement in seconds.
const LINKS: [(&str, f64, f64, u64); 10] = [
    ("campus", 10.0, 16.0, 12),
    ("lte", 40.0, 20.0, 12),
    ("lan", 50.0, 850.0, 4),
    ("terrestrial", 100.0, 100.0, 12),
    ("satellite", 600.0, 4.0, 60),
    ("", 10.0, 4.0, 12),
    ("", 10.0, 100.0, 12),
    ("", 10.0, 850.0, 3),
    ("", 100.0, 16.0, 12),
    ("", 600.0, 100.0, 40),
];

/// Impairments of the data: name, loss in %, bursts, reordering in %; acknowledgements have none.
const CONDITIONS: [(&str, f64, bool, f64); 8] = [
    ("loss 0 %", 0.0, false, 0.0),
    ("loss 1 %", 1.0, false, 0.0),
    ("loss 2 %", 2.0, false, 0.0),
    ("loss 5 %", 5.0, false, 0.0),
    ("bursts 1 %", 1.0, true, 0.0),
    ("bursts 2 %", 2.0, true, 0.0),
    ("bursts 5 %", 5.0, true, 0.0),
    ("reordering 1 %", 0.0, false, 1.0),
];

/// Ring size that does not limit a path: four bandwidth-delay products, for holes that take two or
/// three round trips to fill.
fn slots(rtt_ms: f64, rate_mbit: f64) -> u32 {
    let packets = rtt_ms * rate_mbit * 125.0 / 1500.0;
    ((4.0 * packets) as u32)
        .clamp(8192, intf::VTL_MAX_WINDOW)
        .next_power_of_two()
}

/// A link of the table; `lte` has slotted medium access, as in the testbed.
fn link(name: &str, rtt_ms: f64, rate_mbit: f64) -> Link {
    match name {
        "lte" => Profile::Lte.link(),
        _ => Link::new(rtt_ms, rate_mbit),
    }
}

/// Measures one cell of the grid. `rtt_ms`: the round trip of the handshake.
///
/// # Errors
/// A [`Failure`] of the transport functions.
pub fn measure(
    mut link: Link,
    rtt_ms: f64,
    seconds: u64,
    loss_pct: f64,
    bursts: bool,
    reorder_pct: f64,
) -> Result<Outcome, Failure> {
    let rate_mbit = link.rate_mbit;
    link.loss_down_pct = Some(loss_pct);
    link.loss_up_pct = Some(0.0);
    link.reorder_pct = reorder_pct;
    if bursts {
        link.loss_model = LossModel::BURSTS;
    }
    let mut scenario = Scenario::bulk(link, seconds * 1000 * MS);
    scenario.measure_from = scenario.until / 4;
    scenario.session = SessionConfig {
        slots: slots(rtt_ms, rate_mbit),
        rtt_us: (rtt_ms * 1000.0) as u32,
        ..Default::default()
    };
    Sim::new(scenario).run()
}

/// The whole table; byte-identical for the same sources.
///
/// # Panics
/// If a transport function fails, with the cell's name.
pub fn table() -> String {
    let out = String::from(
        "# stream, simulated: one bulk transfer of 1,440-byte packets, queue of one\n\
         # bandwidth-delay product (at least 64 packets), measured in the last three quarters of the\n\
         # time. `of rate`: goodput's share of the link's rate, 96 % is all there is. `again`:\n\
         # retransmissions per packet sent. `dup`: of them, those the receiver had already. `queue`:\n\
         # waiting time in the bottleneck. `1 MB`: from the session's opening to the millionth byte.\n\
         # UPDATE_RESULTS=1 cargo test -p vtl-sim --test results   writes this file anew.\n",
    );
    // Independent: one thread each.
    let parts: Vec<String> = thread::scope(|scope| {
        let all = LINKS.map(|link| scope.spawn(move || block(link)));
        all.into_iter()
            .map(|t| t.join().expect("a cell that works"))
            .collect()
    });
    out + &parts.concat() + &both_ways() + &sharing()
}

/// Bulk transfers in both directions of one session.
#[derive(Clone, Debug)]
pub struct BothWays {
    /// The link, the same in both directions.
    pub link: Link,
    /// Clock drift of host 1 against host 0, millionths.
    pub drift_ppm: i64,
    /// Round trip, ms, of the link from the beginning of the measurements on; `None`: unchanged.
    pub change: Option<f64>,
}

impl BothWays {
    /// Transfers over such a link.
    pub fn new(rtt_ms: f64, rate_mbit: f64, loss_pct: f64) -> Self {
        Self {
            link: Link {
                loss_pct,
                ..Link::new(rtt_ms, rate_mbit)
            },
            drift_ppm: 0,
            change: None,
        }
    }

    /// Goodput of each direction alone, and of both at once, bit/s; from host 0 first.
    ///
    /// # Errors
    /// A [`Failure`] of the transport functions.
    pub fn measure(&self) -> Result<([f64; 2], [f64; 2]), Failure> {
        let run = |packets| {
            // At least as many round trips as the estimates on a long path need.
            let longest = self.change.unwrap_or_default().max(self.link.rtt_ms);
            let seconds = (longest / 10.0).clamp(8.0, 60.0) as u64;
            let mut scenario = Scenario::bulk(self.link.clone(), seconds * 1000 * MS);
            scenario.packets = packets;
            scenario.drift_ppm = self.drift_ppm;
            scenario.measure_from = scenario.until / 4;
            scenario.change = self.change.map(|rtt_ms| {
                let link = Link {
                    rtt_ms,
                    ..self.link.clone()
                };
                (scenario.measure_from, link)
            });
            scenario.session = SessionConfig {
                slots: slots(longest, self.link.rate_mbit),
                rtt_us: (self.link.rtt_ms * 1000.0) as u32,
                ..Default::default()
            };
            Sim::new(scenario).run()
        };
        let [down, up] = [run([u64::MAX, 0])?, run([0, u64::MAX])?];
        let both = run([u64::MAX; 2])?;
        Ok((
            [down.goodput, up.goodput_up],
            [both.goodput, both.goodput_up],
        ))
    }
}

/// The section on both directions at once.
fn both_ways() -> String {
    let mut out = String::from(
        "\n# Bulk transfers in both directions of a session: Mbit/s of each alone, and at once.\n\n",
    );
    let links = [
        (10.0, 100.0),
        (50.0, 20.0),
        (50.0, 100.0),
        (50.0, 850.0),
        (100.0, 100.0),
        (600.0, 4.0),
    ];
    let parts: Vec<String> = thread::scope(|scope| {
        let all = links.map(|(rtt_ms, rate_mbit)| {
            scope.spawn(move || {
                let line = |loss_pct| {
                    let measured = BothWays::new(rtt_ms, rate_mbit, loss_pct).measure();
                    let (alone, both) = measured.unwrap_or_else(|e| panic!("{rtt_ms} ms: {e}"));
                    let [down, up, down_too, up_too] =
                        [alone[0], alone[1], both[0], both[1]].map(|rate| rate / 1e6);
                    let what = format!("{rtt_ms} ms, {rate_mbit} Mbit/s, {loss_pct} %");
                    format!("{what:28}{down:9.2}{up:9.2}{down_too:9.2}{up_too:9.2}\n")
                };
                [0.0, 0.5, 2.0].map(line).concat()
            })
        });
        all.into_iter()
            .map(|t| t.join().expect("a session that works"))
            .collect()
    });
    out += &parts.concat();
    out
}

/// Changes of a path: before and after, as round trip in ms, rate in Mbit/s, loss in %, and queue
/// limit in packets.
const CHANGES: [[(f64, f64, f64, u32); 2]; 14] = [
    [(50.0, 100.0, 0.5, 500), (300.0, 100.0, 0.5, 500)],
    [(50.0, 100.0, 0.5, 500), (500.0, 100.0, 0.5, 500)],
    [(50.0, 100.0, 0.0, 5000), (500.0, 100.0, 0.0, 5000)],
    [(50.0, 100.0, 0.5, 5000), (500.0, 100.0, 0.5, 5000)],
    [(50.0, 100.0, 0.5, 500), (100.0, 100.0, 0.5, 500)],
    [(50.0, 100.0, 0.5, 500), (60.0, 100.0, 0.5, 500)],
    [(10.0, 100.0, 1.0, 500), (200.0, 100.0, 1.0, 500)],
    [(50.0, 100.0, 5.0, 500), (200.0, 100.0, 5.0, 500)],
    [(50.0, 100.0, 0.5, 500), (10.0, 100.0, 0.5, 500)],
    [(50.0, 100.0, 0.5, 500), (50.0, 5.0, 0.5, 500)],
    [(50.0, 100.0, 0.0, 5000), (50.0, 10.0, 0.0, 5000)],
    [(50.0, 5.0, 0.5, 500), (50.0, 100.0, 0.5, 500)],
    [(50.0, 100.0, 0.5, 500), (200.0, 10.0, 0.5, 500)],
    [(50.0, 100.0, 0.0, 500), (50.0, 100.0, 5.0, 500)],
];

/// The table of paths that change.
///
/// # Panics
/// If a transport function fails.
pub fn changes() -> String {
    let mut out = String::from(
        "# stream, simulated, on a path that changes under a bulk transfer after 2 s: round trip, rate, loss, and\n\
         # packets of the queue. In the 30 s after, of stream; of stream that begins then; and of a model of TCP under\n\
         # BBR (version 1): Mbit/s on the link, and the longest time that a queue stood of more than a quarter of a\n\
         # round trip and four packets, s. The rest are random changes, the worst first.\n\
         # UPDATE_RESULTS=1 cargo test -p vtl-sim --test results   writes this file anew.\n\n",
    );
    let named = CHANGES.map(|[before, after]| {
        let [before, after] =
            [before, after].map(|(rtt, rate, loss, queue)| change::link(rtt, rate, loss, queue));
        Change {
            before,
            after,
            at: 2000 * MS,
        }
    });
    let random: Vec<_> = (1..=24).map(Change::random).collect();
    let mut all = change::measure_all(&[&named[..], &random].concat());
    let of_random = all.split_off(named.len());
    let mut rows: Vec<_> = random.iter().zip(of_random).collect();
    rows.sort_by(|(_, a), (_, b)| a.share().total_cmp(&b.share()));
    let rows = named.iter().zip(all).chain(rows);
    writeln!(out, "{:70}{:>14}{:>14}{:>14}", "", "stream", "fresh", "BBR").expect("a String");
    for (change, Aftermath { stream, fresh, bbr }) in rows {
        let what = change.to_string();
        write!(out, "{what:70}").expect("a String");
        for fate in [stream, fresh, bbr] {
            let rate = fate.rate / 1e6;
            write!(out, "{rate:9.2}{:5.1}", fate.standing).expect("a String");
        }
        out.push('\n');
    }
    out
}

/// Competitors on a bottleneck: name, and flows.
const PARTIES: [(&str, &[Kind]); 4] = [
    ("alone", &[Kind::Vtl]),
    ("and CUBIC", &[Kind::Vtl, Kind::Tcp(Model::Cubic)]),
    ("and BBR", &[Kind::Vtl, Kind::Tcp(Model::Bbr)]),
    ("four of them", &[Kind::Vtl; 4]),
];

/// The section on flows that share a bottleneck.
fn sharing() -> String {
    let mut out = String::from(
        "\n# Flows that share the bottleneck, from the beginning on, each starting 100 ms after the\n\
         # one before: shares of the rate in per cent, stream first, then a model of TCP; Jain's\n\
         # index; median waiting time; packets that found the queue full.\n",
    );
    let parts: Vec<String> = thread::scope(|scope| {
        let links = [(10.0, 16.0), (40.0, 20.0), (100.0, 100.0), (600.0, 4.0)];
        let all = links.map(|(rtt, rate)| scope.spawn(move || shared(rtt, rate)));
        all.into_iter()
            .map(|t| t.join().expect("a contest that ends"))
            .collect()
    });
    out += &parts.concat();
    out
}

/// The rows of one link.
fn shared(rtt: f64, rate: f64) -> String {
    let mut out = format!("\n{rtt} ms, {rate} Mbit/s, 60 s, no loss\n");
    for (name, kinds) in PARTIES {
        let flow = |(i, kind): (usize, &Kind)| Flow {
            start: i as u64 * 100 * MS,
            ..Flow::endless(*kind)
        };
        let flows = kinds.iter().enumerate().map(flow).collect();
        let mut contest = Contest::new(Link::new(rtt, rate), flows, 60_000 * MS);
        contest.measure_from = 0;
        let shares = contest.run();
        let rates: Vec<String> = shares
            .rates
            .iter()
            .map(|r| format!("{:.1}", r / rate / 1e4))
            .collect();
        writeln!(
            out,
            "{name:16}{:24}{:8.3}{:9.1} ms{:6.2} %",
            rates.join("  "),
            shares.jain(),
            shares.queue_p50 / 1e6,
            shares.overflow * 100.0
        )
        .expect("a String takes everything");
    }
    out
}

/// The part of the table about one link.
fn block((name, rtt, rate, seconds): (&str, f64, f64, u64)) -> String {
    let mut out = String::new();
    writeln!(
        out,
        "\n{rtt} ms, {rate} Mbit/s, {seconds} s{}{name}",
        if name.is_empty() { "" } else { ": " }
    )
    .expect("a String takes everything");
    writeln!(
        out,
        "{:16}{:>8}{:>9}{:>8}{:>8}{:>12}{:>12}{:>9}",
        "", "Mbit/s", "of rate", "again", "dup", "queue 50 %", "queue 95 %", "1 MB"
    )
    .expect("a String takes everything");
    for (what, loss, bursts, reorder) in CONDITIONS {
        let o = measure(link(name, rtt, rate), rtt, seconds, loss, bursts, reorder)
            .unwrap_or_else(|failure| panic!("{rtt} ms, {rate} Mbit/s, {what}: {failure}"));
        writeln!(
            out,
            "{what:16}{:8.2}{:7.1} %{:6.2} %{:6.2} %{:9.1} ms{:9.1} ms{:6} ms",
            o.goodput / 1e6,
            o.goodput / rate / 1e4,
            o.retransmitted * 100.0,
            o.duplicates * 100.0,
            o.queue_p50 / 1e6,
            o.queue_p95 / 1e6,
            o.first_megabyte / MS,
        )
        .expect("a String takes everything");
    }
    out
}
