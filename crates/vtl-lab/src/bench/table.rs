//! Rows for people: medians, with the smallest and the largest.

use std::fmt::Write;

use crate::bench::plan::size;
use crate::bench::row::Row;
use crate::spread::Spread;

/// A row's result in a few words.
pub(crate) fn brief(row: &Row) -> String {
    if let Some(error) = &row.error {
        return format!("FAILED: {error}");
    }
    let mut text = match (row.latency_p50_us, row.goodput_mbps, row.fct_s) {
        (Some(p50), ..) => format!("p50 {}", micros(p50)),
        (None, Some(mbps), Some(seconds)) => format!("{} in {seconds:.2} s", rate(mbps)),
        _ => "nothing".to_owned(),
    };
    if row.cut {
        text.push_str(", cut");
    }
    if row.emulator_drops > 0 {
        let _ = write!(text, ", VOID: the emulator dropped {}", row.emulator_drops);
    }
    text
}

/// Mbit/s, in Gbit/s where that is shorter.
fn rate(mbps: f64) -> String {
    if mbps >= 1_000.0 {
        format!("{:.2} Gbit/s", mbps / 1e3)
    } else {
        format!("{mbps:.1} Mbit/s")
    }
}

fn micros(us: f64) -> String {
    if us >= 10_000.0 {
        format!("{:.1} ms", us / 1e3)
    } else {
        format!("{us:.1} µs")
    }
}

/// What is the same for rows that are one line of the table.
fn key(row: &Row) -> String {
    format!(
        "{} {} {:?} {} {} {:?} {:?} {} {} {:?} {:?} {:?} {:?} {} {} {:?} {:?} {:?} {:?} {} {:?} {} {}",
        row.plan,
        row.profile,
        row.medium,
        row.rtt_ms,
        row.rate_mbit,
        row.core_rtt_ms,
        row.offered_mbit,
        row.loss_pct,
        row.loss_model,
        row.direction,
        row.size,
        row.count,
        row.seconds,
        row.app,
        row.known,
        row.cores,
        row.driver,
        row.ingress,
        row.ring_slots,
        row.transport,
        row.flow,
        row.daemons,
        row.workload,
    )
}

/// The link and the workload of a row in a few words.
fn conditions(row: &Row) -> String {
    let mut text = row.profile.to_owned();
    if row.profile == "custom" {
        text = format!("{} Mbit/s {} ms", row.rate_mbit, row.rtt_ms);
    }
    if let Some(medium) = row.medium {
        let _ = write!(text, " {medium}");
    }
    if let Some(rtt_ms) = row.core_rtt_ms {
        let _ = write!(text, " + {rtt_ms} ms");
    }
    if row.loss_pct > 0.0 {
        let _ = write!(text, " {} %", row.loss_pct);
        if row.loss_model != "uniform" {
            text.push_str(" bursts");
        }
    }
    if row.timeline {
        text.push_str(" changing");
    }
    match (row.workload, row.size, row.count, row.seconds) {
        ("file", Some(bytes), ..) => {
            let _ = write!(text, ", {}", size(bytes));
            if let Some(direction) = row.direction.filter(|d| *d != "down") {
                let _ = write!(text, " {direction}");
            }
        }
        ("flows", _, Some(count), _) => {
            let _ = write!(text, ", {count} flows");
        }
        (kind, _, _, Some(seconds)) => {
            let _ = write!(text, ", {kind} {seconds} s");
            if let Some(mbit) = row.offered_mbit {
                let _ = write!(text, " of {mbit} Mbit/s");
            }
        }
        (kind, Some(bytes), ..) => {
            let _ = write!(text, ", {kind} {}", size(bytes));
        }
        _ => {}
    }
    if row.app == "curl" {
        text.push_str(", curl");
    }
    if row.known {
        text.push_str(", known");
    }
    for part in [&row.driver, &row.ingress].into_iter().flatten() {
        let _ = write!(text, ", {part}");
    }
    match row.cores {
        Some(1) => text.push_str(", 1 core"),
        Some(n) => {
            let _ = write!(text, ", {n} cores");
        }
        None => {}
    }
    text
}

/// Rows that differ only in the run, in order of first appearance.
pub(crate) fn groups(rows: &[Row]) -> Vec<Vec<&Row>> {
    let mut groups: Vec<(String, Vec<&Row>)> = Vec::new();
    for row in rows {
        let key = key(row);
        match groups.iter_mut().find(|(other, _)| *other == key) {
            Some((_, group)) => group.push(row),
            None => groups.push((key, vec![row])),
        }
    }
    groups.into_iter().map(|(_, group)| group).collect()
}

/// The table.
pub(crate) fn table(rows: &[Row]) -> String {
    let heads = [
        "conditions",
        "transport",
        "goodput",
        "time",
        "steady",
        "p50",
        "p99",
        "sent again",
        "queue",
        "CPU s/GB",
        "share",
        "result",
    ];
    let mut lines = vec![heads.map(str::to_owned).to_vec()];
    for group in groups(rows) {
        lines.push(line(&group));
    }
    align(&lines)
}

fn line(group: &[&Row]) -> Vec<String> {
    let over = |figure: &dyn Fn(&Row) -> Option<f64>| {
        Spread::of(group.iter().filter(|r| r.ok).filter_map(|r| figure(r)))
    };
    let spread = |figure: &dyn Fn(&Row) -> Option<f64>, show: &dyn Fn(f64) -> String| {
        over(figure).map_or_else(String::new, |s| {
            if group.len() == 1 {
                show(s.median)
            } else {
                format!("{} ({}–{})", show(s.median), show(s.min), show(s.max))
            }
        })
    };
    let only = |figure: &dyn Fn(&Row) -> Option<f64>, show: &dyn Fn(f64) -> String| {
        over(figure).map_or_else(String::new, |s| show(s.median))
    };
    let first = group[0];
    let failed = group.iter().filter(|r| !r.ok).count();
    let cut = group.iter().filter(|r| r.cut).count();
    let result = match (failed, cut) {
        (0, 0) => "ok".to_owned(),
        (0, cut) => format!("{cut} of {} cut", group.len()),
        (failed, _) => format!("{failed} of {} FAILED", group.len()),
    };
    let percent = |share: f64| format!("{:.1} %", share * 100.0);
    vec![
        conditions(first),
        first.transport.clone()
            + if first.daemons && first.transport.starts_with("tcp") {
                " beside vtld"
            } else {
                ""
            },
        spread(&|r| r.goodput_mbps, &rate),
        spread(&|r| r.fct_s, &|s| format!("{s:.3} s")),
        only(&|r| r.utilisation_steady, &percent),
        only(&|r| r.latency_p50_us, &micros),
        only(&|r| r.latency_p99_us, &micros),
        only(&|r| r.retransmitted_pct, &|p| format!("{p:.1} %")),
        only(&|r| r.queue_p50_ms, &|ms| format!("{ms:.1} ms")),
        only(&|r| r.cpu_s_per_gb, &|s| format!("{s:.2}")),
        only(&|r| r.share, &percent),
        result,
    ]
}

/// Columns as wide as their widest cell, without those that are empty.
fn align(lines: &[Vec<String>]) -> String {
    let columns: Vec<usize> = (0..lines[0].len())
        .filter(|c| lines[1..].iter().any(|line| !line[*c].is_empty()))
        .collect();
    let mut out = String::new();
    for line in lines {
        let mut text = String::new();
        for column in &columns {
            let width = lines.iter().map(|line| line[*column].chars().count()).max();
            let _ = write!(text, "{:<w$}  ", line[*column], w = width.unwrap_or(0));
        }
        out.push_str(text.trim_end());
        out.push('\n');
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(transport: &str, run: u32, mbps: f64) -> Row {
        Row {
            profile: "terrestrial",
            workload: "file",
            size: Some(1 << 20),
            transport: transport.to_owned(),
            run,
            ok: true,
            goodput_mbps: Some(mbps),
            ..Row::default()
        }
    }

    #[test]
    fn table__one_line_for_all_runs_of_a_transport() {
        let mut rows = vec![
            row("udp", 1, 90.0),
            row("tcp-bbr", 1, 50.0),
            row("udp", 2, 96.0),
            row("udp", 3, 95.0),
        ];
        let text = table(&rows);
        assert_eq!(text.lines().count(), 3, "{text}");
        assert!(
            text.contains("95.0 Mbit/s (90.0 Mbit/s–96.0 Mbit/s)"),
            "{text}"
        );
        rows[1].ok = false;
        assert!(table(&rows).contains("1 of 1 FAILED"));
    }
}
