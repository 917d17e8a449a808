//! VirtualStack's figures 5 to 8 from rows: latency and goodput by the propagation delay, the composed path, and what a
//! packet costs.

use std::fmt::Write;

use super::bars::{Bar, Bars, Panel};
use super::grid::{By, Grid, NO_DELAY, Panel as Lines, distinct};
use super::lines::lines;
use crate::bench::plan::size;
use crate::bench::row::Row;
use crate::spread::Spread;

/// Bytes of payload that count as a packet: what TCP puts into one of 1,500 bytes.
const PACKET: f64 = 1_448.0;
/// What a packet may take through a stack, and a change of protocol in a gateway, µs.
const STACK_AIM_US: f64 = 3.0;
const CHANGE_AIM_US: f64 = 10.0;

/// Figure 5: latency and goodput of streams at a rate by the propagation delay, a column for each loss.
pub(super) fn by_delay(title: &str, rows: &[&Row]) -> Option<Grid> {
    let streams = rows.iter().copied().filter(|r| r.offered_mbit.is_some());
    let streams: Vec<&Row> = streams.collect();
    let rates = distinct(streams.iter().filter_map(|r| r.offered_mbit));
    let losses = distinct(streams.iter().map(|r| r.loss_pct));
    let delay = |row: &Row| Some((row.rtt_ms / 2.0).max(NO_DELAY));
    let mut parts = Vec::new();
    for rate in rates {
        for loss in &losses {
            let here = |r: &&&Row| r.offered_mbit == Some(rate) && r.loss_pct == *loss;
            let here: Vec<&Row> = streams.iter().filter(here).copied().collect();
            let mut add = |what: &str, unit, value: fn(&Row) -> Option<f64>| {
                let lines = lines(&here, delay, value)?;
                parts.push(Lines {
                    link: format!("{what} of {rate} Mbit/s"),
                    column: *loss,
                    unit,
                    lines,
                });
                Some(())
            };
            add("latency", "ms, median", |r| Some(r.latency_p50_us? / 1e3));
            add("goodput", "Mbit/s", |r| r.goodput_mbps);
        }
    }
    let title = format!("{title}: by the propagation delay; triangles: cut");
    // A row of panels for each measure and rate, latencies first.
    parts.sort_by(|a, b| b.link.cmp(&a.link));
    Grid::new(title, By::Delay, parts)
}

/// Figure 6: files over two links, end to end and with a gateway.
pub(super) fn composed(title: &str, rows: &[&Row]) -> Option<Bars> {
    let files = rows.iter().copied();
    let files: Vec<&Row> = files
        .filter(|r| r.workload == "file" && r.core_rtt_ms.is_some_and(|ms| ms > 0.0))
        .collect();
    let mut panels = Vec::new();
    let losses = distinct(files.iter().map(|r| r.loss_pct));
    let sizes = distinct(files.iter().filter_map(|r| r.size));
    let max = sizes.iter().max()?;
    for loss in losses {
        for bytes in &sizes {
            let here = files.iter().copied();
            let here: Vec<&Row> = here
                .filter(|r| r.loss_pct == loss && r.size == Some(*bytes))
                .collect();
            // Mice are for their time, elephants for their rate.
            let (what, unit) = match bytes == max {
                true => ("goodput", "Mbit/s"),
                false => ("completion time", "ms"),
            };
            let value = |r: &Row| match bytes == max {
                true => r.goodput_mbps,
                false => Some(r.fct_s? * 1e3),
            };
            panels.push(Panel {
                title: format!("{}, {loss} % loss: {what}", size(*bytes)),
                bars: bars(&here, unit, value),
                aim: None,
            });
        }
    }
    Some(Bars {
        title: format!("{title}: end to end, and with a gateway behind the first link"),
        panels,
    })
}

/// A bar for each transport, in the order in which they were measured.
fn bars(rows: &[&Row], unit: &str, value: impl Fn(&Row) -> Option<f64>) -> Vec<Bar> {
    let names = distinct(rows.iter().map(|r| r.transport.clone()));
    let bar = |name: String| {
        let here = || rows.iter().filter(|r| r.transport == name);
        let cut = here().filter(|r| r.cut).count() * 2 > here().count();
        let mut note = unit.to_owned();
        if cut {
            note.push_str(", cut");
        }
        // Of what may be lost, as much as arrives.
        let arrived = here().filter_map(|r| Some(r.bytes as f64 / r.size? as f64));
        let arrived = Spread::of(arrived).map_or(1.0, |share| share.median);
        if !cut && arrived < 0.999 {
            note = format!("{note}, {:.1} % arrive", arrived * 100.0);
        }
        Some(Bar {
            value: Spread::of(here().filter_map(|r| value(r)))?,
            name,
            note,
        })
    };
    names.into_iter().filter_map(bar).collect()
}

/// Figures 7 and 8: processor time of a packet, in a host's stack or in a gateway, with the wake-ups beside it; under load,
/// and at a rate, where most packets wake somebody.
pub(super) fn cost(title: &str, rows: &[&Row]) -> Option<Bars> {
    // Where an emulator delivers packets one by one, they cost more.
    let bulk = rows.iter().copied();
    let bulk: Vec<&Row> = bulk
        .filter(|r| r.profile == "wire" && ["file", "stream"].contains(&r.workload))
        .filter(|r| r.server_vtld_cpu_s.is_some() && r.bytes > 0)
        .collect();
    let packets = |r: &Row| r.bytes as f64 / PACKET;
    let (through, to): (Vec<&Row>, Vec<&Row>) = bulk
        .iter()
        .copied()
        .partition(|r| r.transport.starts_with("gateway:"));
    let mut panels = Vec::new();
    let mut add = |rows: &[&Row], what: &str, aim: Option<f64>, value: fn(&Row) -> Option<f64>| {
        for (direction, offered) in distinct(rows.iter().map(|r| (r.direction, r.offered_mbit))) {
            let here: Vec<&Row> = rows
                .iter()
                .copied()
                .filter(|r| (r.direction, r.offered_mbit) == (direction, offered))
                .collect();
            let mut bars = bars(&here, "µs", |r| Some(value(r)? * 1e6 / packets(r)));
            for bar in &mut bars {
                let wakeups = here.iter().filter(|r| r.transport == bar.name);
                let wakeups =
                    wakeups.filter_map(|r| Some(r.server_vtld_wakeups? as f64 / packets(r)));
                if let Some(wakeups) = Spread::of(wakeups) {
                    let _ = write!(bar.note, ", {:.3} wake-ups", wakeups.median);
                }
            }
            let direction = direction.map_or(String::new(), |way| format!(", {way}"));
            let load = offered.map_or("under load".to_owned(), |mbit| format!("at {mbit} Mbit/s"));
            panels.push(Panel {
                title: format!("{what}, {load}{direction}"),
                bars,
                // What is asked for is asked for under load.
                aim: aim.filter(|_| offered.is_none()),
            });
        }
    };
    add(
        &through,
        "processor time of the gateway for a packet whose protocol it changes (line: 10 µs)",
        Some(CHANGE_AIM_US),
        |r| r.server_vtld_cpu_s,
    );
    add(
        &to,
        "processor time of the sending host's daemon for a packet (line: 3 µs)",
        Some(STACK_AIM_US),
        |r| r.server_vtld_cpu_s,
    );
    (!panels.is_empty()).then(|| Bars {
        title: format!("{title}: what a packet costs"),
        panels,
    })
}
