//! What the demo reports: rows for machines, a table and one line for people.

use std::fmt::Write;

use serde::Serialize;
use vtl_testbed::Link;

use crate::daemons::Statuses;
use crate::download::Outcome;
use crate::spread::Spread;

use super::payload;
use super::transport::Transport;

/// One download.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Row {
    /// What carried it.
    pub(super) transport: Transport,
    /// From 1; runs of all transports alternate.
    pub(super) run: u32,
    /// Bytes received.
    pub(super) bytes: u64,
    /// Whether that is the whole file.
    pub(super) complete: bool,
    /// Whether every byte received is the byte sent.
    pub(super) intact: bool,
    /// SHA-256 of the bytes received.
    pub(super) sha256: String,
    /// From starting curl to the last byte, or to the cut.
    pub(super) seconds: f64,
    /// From starting curl to the first byte.
    pub(super) first_byte_seconds: f64,
    /// Payload over `seconds`: set-up and start-up included.
    pub(super) goodput_mbit: f64,
    /// Goodput from the middle of the file to its end.
    pub(super) second_half_mbit: Option<f64>,
    /// The congestion control of the server's connection, read back from the kernel; for VTL, that
    /// of the connection that stands by.
    pub(super) congestion_control: Option<String>,
    /// What both daemons said about the session at its end.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) daemons: Option<Statuses>,
    /// Seconds since the start, and bytes received by then.
    pub(super) samples: Vec<(f64, u64)>,
}

impl Row {
    /// The row of one download of a file of `size` bytes, with the digest of what arrived.
    pub(super) fn new(
        transport: Transport,
        run: u32,
        size: u64,
        outcome: Outcome,
        sha256: String,
    ) -> Self {
        let seconds = outcome.time.as_secs_f64();
        let complete = outcome.bytes == size;
        let second_half = outcome
            .half_time
            .filter(|_| complete)
            .map(|half| mbit(size - size / 2, seconds - half.as_secs_f64()));
        Self {
            transport,
            run,
            bytes: outcome.bytes,
            complete,
            intact: (outcome.cut || complete) && sha256 == payload::sha256(outcome.bytes),
            sha256,
            seconds,
            first_byte_seconds: outcome.first_byte.as_secs_f64(),
            goodput_mbit: mbit(outcome.bytes, seconds),
            second_half_mbit: second_half,
            congestion_control: None,
            daemons: None,
            samples: outcome
                .samples
                .into_iter()
                .map(|(time, bytes)| (time.as_secs_f64(), bytes))
                .collect(),
        }
    }
}

/// All downloads over one transport.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Summary {
    /// What carried them.
    pub(super) transport: Transport,
    /// How many.
    pub(super) runs: usize,
    /// Whether all came to their end.
    pub(super) complete: bool,
    /// Median of the rows' field of that name.
    pub(super) seconds: f64,
    /// Median, over the incomplete ones too.
    pub(super) bytes: u64,
    /// Median.
    pub(super) goodput_mbit: f64,
    /// Smallest and largest.
    pub(super) goodput_range_mbit: (f64, f64),
    /// Median of those that have one.
    pub(super) second_half_mbit: Option<f64>,
}

/// Everything about one demo.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    /// When it began, UTC.
    pub(super) date: String,
    /// The kernel's release.
    pub(super) kernel: String,
    /// The command line.
    pub(super) command: Vec<String>,
    /// The link.
    pub(super) link: Link,
    /// 4 or 6.
    pub(super) ip_version: u8,
    /// Bytes of the file.
    pub(super) size: u64,
    /// Its SHA-256.
    pub(super) sha256: String,
    /// One per transport, in the order of the rows.
    pub(super) summary: Vec<Summary>,
    /// One per download.
    pub(super) rows: Vec<Row>,
}

/// Summaries in the order in which the transports first appear.
pub(super) fn summarise(rows: &[Row]) -> Vec<Summary> {
    let mut order: Vec<Transport> = Vec::new();
    for row in rows {
        if !order.contains(&row.transport) {
            order.push(row.transport);
        }
    }
    order
        .into_iter()
        .map(|transport| {
            let rows: Vec<&Row> = rows.iter().filter(|r| r.transport == transport).collect();
            let over = |figure: fn(&Row) -> f64| {
                Spread::of(rows.iter().map(|r| figure(r))).unwrap_or_default()
            };
            let goodput = over(|r| r.goodput_mbit);
            let halves = Spread::of(rows.iter().filter_map(|r| r.second_half_mbit));
            Summary {
                transport,
                runs: rows.len(),
                complete: rows.iter().all(|r| r.complete),
                seconds: over(|r| r.seconds).median,
                bytes: over(|r| r.bytes as f64).median as u64,
                goodput_mbit: goodput.median,
                goodput_range_mbit: (goodput.min, goodput.max),
                second_half_mbit: halves.map(|spread| spread.median),
            }
        })
        .collect()
}

/// The table for people.
pub(super) fn table(summaries: &[Summary], rate_mbit: f64, size: u64) -> String {
    let cubic = goodput(summaries, Transport::Cubic);
    let several = summaries.iter().any(|s| s.runs > 1);
    let mut lines = vec![vec![
        "transport".to_owned(),
        "time".to_owned(),
        "goodput".to_owned(),
        "second half".to_owned(),
        "of the link".to_owned(),
        "vs cubic".to_owned(),
    ]];
    for s in summaries {
        let time = if s.complete {
            format!("{:.2} s", s.seconds)
        } else {
            let percent = s.bytes as f64 / size as f64 * 100.0;
            format!("cut at {:.0} s and {percent:.0} %", s.seconds)
        };
        let mut goodput = format!("{:.1} Mbit/s", s.goodput_mbit);
        if several {
            let (low, high) = s.goodput_range_mbit;
            let _ = write!(goodput, " ({low:.1}–{high:.1})");
        }
        lines.push(vec![
            s.transport.name().to_owned(),
            time,
            goodput,
            s.second_half_mbit
                .map_or("–".to_owned(), |mbit| format!("{mbit:.1} Mbit/s")),
            format!("{:.0} %", s.goodput_mbit / rate_mbit * 100.0),
            cubic.map_or("–".to_owned(), |c| format!("{:.1}x", s.goodput_mbit / c)),
        ]);
    }
    align(&lines)
}

/// The demo's last line.
pub(super) fn last_line(summaries: &[Summary], intact: bool) -> String {
    let mut parts = Vec::new();
    for transport in [Transport::Vtl, Transport::Bbr, Transport::Cubic] {
        if let Some(mbit) = goodput(summaries, transport) {
            parts.push(format!("{} {mbit:.1} Mbit/s", transport.name()));
        }
    }
    if let (Some(vtl), Some(cubic)) = (
        goodput(summaries, Transport::Vtl),
        goodput(summaries, Transport::Cubic),
    ) {
        parts.push(format!("vtl/cubic {:.1}x", vtl / cubic));
    }
    parts.push(format!("sha256 {}", if intact { "ok" } else { "WRONG" }));
    format!("demo: {}", parts.join(", "))
}

fn goodput(summaries: &[Summary], transport: Transport) -> Option<f64> {
    let summary = summaries.iter().find(|s| s.transport == transport)?;
    Some(summary.goodput_mbit)
}

/// Columns as wide as their widest cell: the first flush left, the others flush right.
fn align(lines: &[Vec<String>]) -> String {
    let width = |column: usize| {
        let cells = lines.iter().map(|line| line[column].chars().count());
        cells.max().unwrap_or(0)
    };
    let mut out = String::new();
    for line in lines {
        let mut text = format!("{:<w$}", line[0], w = width(0));
        for (column, cell) in line.iter().enumerate().skip(1) {
            let _ = write!(text, "  {cell:>w$}", w = width(column));
        }
        out.push_str(text.trim_end());
        out.push('\n');
    }
    out
}

fn mbit(bytes: u64, seconds: f64) -> f64 {
    if seconds > 0.0 {
        bytes as f64 * 8.0 / 1e6 / seconds
    } else {
        0.0
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const SIZE: u64 = 32_000_000;

    fn row(transport: Transport, run: u32, bytes: u64, seconds: f64) -> Row {
        let outcome = Outcome {
            bytes,
            time: Duration::from_secs_f64(seconds),
            first_byte: Duration::from_millis(200),
            half_time: (bytes == SIZE).then(|| Duration::from_secs_f64(seconds / 2.0)),
            cut: bytes != SIZE,
            peak_kb: 0,
            samples: vec![],
        };
        Row::new(transport, run, SIZE, outcome, String::new())
    }

    #[test]
    fn last_line__names_all_three_and_the_ratio() {
        let rows = [
            row(Transport::Cubic, 1, 5_625_000, 45.0),
            row(Transport::Bbr, 1, SIZE, 4.0),
            row(Transport::Vtl, 1, SIZE, 3.2),
        ];
        assert_eq!(
            last_line(&summarise(&rows), true),
            "demo: vtl 80.0 Mbit/s, tcp-bbr 64.0 Mbit/s, tcp-cubic 1.0 Mbit/s, \
             vtl/cubic 80.0x, sha256 ok"
        );
    }

    #[test]
    fn summarise__takes_medians_and_spread_per_transport() {
        let rows = [
            row(Transport::Bbr, 1, SIZE, 4.0),
            row(Transport::Bbr, 2, SIZE, 8.0),
            row(Transport::Bbr, 3, SIZE, 3.2),
        ];
        let summary = &summarise(&rows)[0];
        assert_eq!(summary.goodput_mbit, 64.0);
        assert_eq!(summary.goodput_range_mbit, (32.0, 80.0));
        assert_eq!(summary.second_half_mbit, Some(64.0));
    }

    #[test]
    fn table__says_how_far_a_cut_download_came() {
        let rows = [row(Transport::Cubic, 1, SIZE / 4, 45.0)];
        let table = table(&summarise(&rows), 100.0, SIZE);
        assert!(table.contains("cut at 45 s and 25 %"), "{table}");
    }
}
