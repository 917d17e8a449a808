//! Pictures of rows, as SVG.

mod bars;
mod grid;
mod lines;
mod palette;
mod virtualstack;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Once;

use anyhow::{Context, anyhow};
use plotters::coord::ranged1d::AsRangedCoord;
use plotters::coord::ranged1d::ValueFormatter;
use plotters::prelude::*;
use plotters::style::{FontStyle, register_font};

use self::grid::{By, Grid};
use self::lines::{Lines, Point, lines};
use self::palette::Palette;
use crate::bench::plan::size;
use crate::bench::row::Row;
use crate::spread::Spread;

/// Width and height, pixels.
const SIZE: (u32, u32) = (960, 560);
/// The span over which goodput over time is averaged, seconds.
const WINDOW_S: f64 = 0.5;

/// Draws what the rows allow: goodput by loss, completion time by size, goodput by the number of
/// flows, and competing flows over time; latency by delay, files over two links, and what packets cost; and for all of a plan in one figure, completion times by
/// size for each loss, and by loss for each size. Returns the files.
///
/// # Errors
/// A file cannot be written.
pub(crate) fn draw(directory: &Path, rows: &[Row]) -> anyhow::Result<Vec<PathBuf>> {
    use_own_font();
    fs::create_dir_all(directory)
        .with_context(|| format!("cannot make the directory {}", directory.display()))?;
    let mut files = Vec::new();
    let mut place = |name: &str, kind: &str| {
        files.push(directory.join(format!("{name}-{kind}.svg")));
        files[files.len() - 1].clone()
    };
    for (name, title, rows) in by_condition(rows, Row::link_name) {
        let mut add = |kind: &str, picture: Option<Picture>| -> anyhow::Result<()> {
            if let Some(picture) = picture {
                let path = place(&name, kind);
                picture
                    .draw(&path)
                    .map_err(|error| failed(&path, &*error))?;
            }
            Ok(())
        };
        add("loss", goodput_by_loss(&title, &rows))?;
        add("size", time_by_size(&title, &rows))?;
        add("flows", goodput_by_flows(&title, &rows))?;
        add("time", over_time(&title, &rows))?;
    }
    for (name, title, rows) in by_condition(rows, Row::medium_name) {
        if let Some(grid) = virtualstack::by_delay(&title, &rows) {
            let path = place(&name, "delays");
            grid.draw(&path).map_err(|error| failed(&path, &*error))?;
        }
    }
    for (name, title, rows) in by_condition(rows, |_| String::new()) {
        for (bars, kind) in [
            (virtualstack::composed(&title, &rows), "composed"),
            (virtualstack::cost(&title, &rows), "cost"),
        ] {
            if let Some(bars) = bars {
                let path = place(&name, kind);
                bars.draw(&path).map_err(|error| failed(&path, &*error))?;
            }
        }
        for (by, kind) in [(By::Size, "sizes"), (By::Loss, "losses")] {
            if let Some(grid) = Grid::of(&title, &rows, by) {
                let path = place(&name, kind);
                grid.draw(&path).map_err(|error| failed(&path, &*error))?;
            }
        }
    }
    Ok(files)
}

fn failed(path: &Path, error: &dyn std::error::Error) -> anyhow::Error {
    anyhow!("cannot draw {}: {error}", path.display())
}

/// What is drawn.
struct Picture {
    title: String,
    x: Axis,
    y: Axis,
    lines: Lines,
    /// Where on the x axis the link changes.
    changes: Vec<f64>,
    /// Points of lines, by their names, where another graft takes over.
    switches: Vec<(String, f64, f64)>,
    /// Where lines are least likely.
    legend: SeriesLabelPosition,
}

struct Axis {
    label: &'static str,
    logarithmic: bool,
    show: fn(f64) -> String,
}

/// Rows that belong into one picture: of one plan, program and acquaintance, and of one link if that
/// is what `link` says of it.
fn by_condition(rows: &[Row], link: impl Fn(&Row) -> String) -> Vec<(String, String, Vec<&Row>)> {
    let mut groups: BTreeMap<String, Vec<&Row>> = BTreeMap::new();
    for row in rows.iter().filter(|row| row.ok) {
        let mut name = row.plan.clone();
        let link = link(row);
        if !link.is_empty() {
            name = format!("{name}-{link}");
        }
        for part in [&row.driver, &row.ingress].into_iter().flatten() {
            name = format!("{name}-{part}");
        }
        if let Some(cores) = row.cores {
            name = format!("{name}-{cores}core");
        }
        if row.app == "curl" {
            name.push_str("-curl");
        }
        if row.known {
            name.push_str("-known");
        }
        groups.entry(name).or_default().push(row);
    }
    groups
        .into_iter()
        .map(|(name, rows)| (name.clone(), name.replace('-', " "), rows))
        .collect()
}

fn plain(value: f64) -> String {
    if value.fract() == 0.0 || value >= 100.0 {
        format!("{value:.0}")
    } else if value >= 1.0 {
        format!("{value:.1}")
    } else {
        format!("{value:.3}")
    }
}

fn goodput_by_loss(title: &str, rows: &[&Row]) -> Option<Picture> {
    let file = rows.iter().filter(|r| r.workload == "file").copied();
    let rows: Vec<&Row> = file.collect();
    // Of several sizes the largest says most about the steady state.
    let largest = rows.iter().filter_map(|r| r.size).max()?;
    let of_largest = |row: &Row| (row.size == Some(largest)).then_some(row.loss_pct);
    Some(Picture {
        title: format!("{title}: goodput of {}", size(largest)),
        x: Axis {
            label: "loss, %",
            logarithmic: false,
            show: plain,
        },
        y: Axis {
            label: "goodput, Mbit/s, set-up and start-up included",
            logarithmic: false,
            show: plain,
        },
        lines: lines(&rows, of_largest, |r| r.goodput_mbps)?,
        changes: Vec::new(),
        switches: Vec::new(),
        legend: SeriesLabelPosition::LowerLeft,
    })
}

fn time_by_size(title: &str, rows: &[&Row]) -> Option<Picture> {
    let rows: Vec<&Row> = rows
        .iter()
        .filter(|r| r.workload == "file" && !r.cut)
        .copied()
        .collect();
    let min = rows.iter().map(|r| r.loss_pct).reduce(f64::min)?;
    let bytes = |row: &Row| {
        let size = row.size.filter(|_| row.loss_pct == min)?;
        Some(size as f64)
    };
    Some(Picture {
        title: format!("{title}: completion time at {min} % loss"),
        x: Axis {
            label: "size",
            logarithmic: true,
            show: |bytes| size(bytes.round() as u64),
        },
        y: Axis {
            label: "seconds, set-up included",
            logarithmic: true,
            show: plain,
        },
        lines: lines(&rows, bytes, |r| r.fct_s)?,
        changes: Vec::new(),
        switches: Vec::new(),
        legend: SeriesLabelPosition::UpperLeft,
    })
}

fn goodput_by_flows(title: &str, rows: &[&Row]) -> Option<Picture> {
    let rows: Vec<&Row> = rows
        .iter()
        .filter(|r| r.workload == "flows")
        .copied()
        .collect();
    let count = |row: &Row| row.count.map(f64::from);
    Some(Picture {
        title: format!("{title}: goodput of all flows together"),
        x: Axis {
            label: "flows at the same time",
            logarithmic: true,
            show: plain,
        },
        y: Axis {
            label: "goodput, Mbit/s",
            logarithmic: false,
            show: plain,
        },
        lines: lines(&rows, count, |r| r.goodput_mbps)?,
        changes: Vec::new(),
        switches: Vec::new(),
        legend: SeriesLabelPosition::LowerLeft,
    })
}

/// The first run of what has samples.
fn over_time(title: &str, rows: &[&Row]) -> Option<Picture> {
    let mut lines = Lines::new();
    let mut switches = Vec::new();
    for row in rows.iter().filter(|r| r.run == 1 && !r.samples.is_empty()) {
        let mut name = row.transport.clone();
        if let Some(flow) = row.flow {
            name = format!("{flow}: {name}");
        }
        // A plan may have several links that are all called the same.
        if rows.iter().any(|other| other.loss_pct != row.loss_pct) {
            name = format!("{name}, {} % loss", row.loss_pct);
        }
        let point = |(x, value)| {
            let y = Spread::of([value])?;
            Some(Point { x, y, cut: row.cut })
        };
        let points = goodput(&row.samples);
        for at in &row.switches {
            let there = points.iter().find(|(x, _)| x >= at);
            switches.extend(there.map(|(x, y)| (name.clone(), *x, *y)));
        }
        let line = points.into_iter().filter_map(point);
        lines.insert(name, line.collect());
    }
    (!lines.is_empty()).then(|| Picture {
        title: format!("{title}: goodput over time"),
        x: Axis {
            label: match switches.is_empty() {
                true => "seconds since its own start",
                false => "seconds since its own start; line: the path changes; dot: another graft takes over",
            },
            logarithmic: false,
            show: plain,
        },
        y: Axis {
            label: "goodput, Mbit/s",
            logarithmic: false,
            show: plain,
        },
        lines,
        changes: rows.iter().flat_map(|r| &r.changes).copied().collect(),
        switches,
        legend: SeriesLabelPosition::UpperRight,
    })
}

/// Goodput at each sample, of seconds and bytes by then, over the half second that ends there, Mbit/s.
pub(crate) fn goodput(samples: &[(f64, u64)]) -> Vec<(f64, f64)> {
    let mut from = 0;
    let mut points = Vec::new();
    for &(time, bytes) in samples {
        while samples[from + 1..]
            .first()
            .is_some_and(|s| s.0 <= time - WINDOW_S)
        {
            from += 1;
        }
        let (then, had) = samples[from];
        if time > then {
            let rate = bytes.saturating_sub(had) as f64 * 8.0 / 1e6 / (time - then);
            points.push((time, rate));
        }
    }
    points
}

impl Picture {
    fn draw(&self, path: &Path) -> Result<(), Box<dyn std::error::Error>> {
        let canvas = SVGBackend::new(path, SIZE).into_drawing_area();
        canvas.fill(&WHITE)?;
        let points = || self.lines.values().flatten();
        let range = |values: &mut dyn Iterator<Item = f64>, axis: &Axis| {
            let (low, high) = values.fold((f64::INFINITY, 0.0), |(low, high): (f64, f64), v| {
                (low.min(v), high.max(v))
            });
            let high = if high > 0.0 { high } else { 1.0 };
            if axis.logarithmic {
                let low = low.max(high / 1e9);
                // A single value needs some room around it.
                (low / 1.25)..(high * 1.25)
            } else {
                0.0..(high * 1.08)
            }
        };
        let x = range(&mut points().map(|p| p.x), &self.x);
        let y = range(&mut points().map(|p| p.y.max), &self.y);
        let changes = self.changes.iter().filter(|at| x.contains(at));
        let changes: Vec<_> = changes.map(|at| [(*at, y.start), (*at, y.end)]).collect();
        let min = points().map(|p| p.y.min).fold(f64::INFINITY, f64::min);
        let y_log = (min.max(1e-9) / 1.25)..y.end;
        match (self.x.logarithmic, self.y.logarithmic) {
            (false, false) => self.chart(&canvas, x, y, &changes)?,
            (true, false) => self.chart(&canvas, x.log_scale(), y, &changes)?,
            (false, true) => self.chart(&canvas, x, y_log.log_scale(), &changes)?,
            (true, true) => self.chart(&canvas, x.log_scale(), y_log.log_scale(), &changes)?,
        }
        canvas.present()?;
        Ok(())
    }

    fn chart<X, Y>(
        &self,
        canvas: &DrawingArea<SVGBackend<'_>, plotters::coord::Shift>,
        x: X,
        y: Y,
        changes: &[[(f64, f64); 2]],
    ) -> Result<(), Box<dyn std::error::Error>>
    where
        X: AsRangedCoord<Value = f64>,
        Y: AsRangedCoord<Value = f64>,
        X::CoordDescType: ValueFormatter<f64>,
        Y::CoordDescType: ValueFormatter<f64>,
    {
        let mut chart = ChartBuilder::on(canvas)
            .caption(&self.title, ("sans-serif", 22))
            .margin(16)
            .x_label_area_size(44)
            .y_label_area_size(72)
            .build_cartesian_2d(x, y)?;
        chart
            .configure_mesh()
            .x_desc(self.x.label)
            .y_desc(self.y.label)
            .label_style(("sans-serif", 15))
            .axis_desc_style(("sans-serif", 16))
            .x_label_formatter(&|v| (self.x.show)(*v))
            .y_label_formatter(&|v| (self.y.show)(*v))
            .light_line_style(TRANSPARENT)
            .draw()?;
        let marks = changes
            .iter()
            .map(|line| PathElement::new(*line, BLACK.mix(0.4)));
        chart.draw_series(marks)?;
        let palette = Palette::of(self.lines.keys().map(String::as_str));
        for (name, line) in &self.lines {
            let color = palette.color(name);
            chart
                .draw_series(LineSeries::new(
                    line.iter().map(|p| (p.x, p.y.median)),
                    color.stroke_width(2),
                ))?
                .label(name.clone())
                .legend(move |(x, y)| {
                    PathElement::new([(x, y), (x + 20, y)], color.stroke_width(3))
                });
            for p in line.iter().filter(|p| p.y.max > p.y.min) {
                let bar = [(p.x, p.y.min), (p.x, p.y.max)];
                chart.draw_series([PathElement::new(bar, color.stroke_width(1))])?;
            }
            // Marks would hide a line of many points.
            if line.len() <= 20 {
                let marks = line.iter().map(|p| (p.x, p.y.median));
                chart.draw_series(marks.map(|at| Circle::new(at, 3, color.filled())))?;
            }
        }
        let switches = self.switches.iter().map(|(name, x, y)| {
            let color = palette.color(name);
            EmptyElement::at((*x, *y))
                + Circle::new((0, 0), 6, color.filled())
                + Circle::new((0, 0), 6, BLACK)
        });
        chart.draw_series(switches)?;
        chart
            .configure_series_labels()
            .position(self.legend.clone())
            .background_style(WHITE.mix(0.85))
            .border_style(BLACK.mix(0.3))
            .label_font(("sans-serif", 15))
            .draw()?;
        Ok(())
    }
}

impl Row {
    /// The link, as a part of a file's name.
    fn link_name(&self) -> String {
        match self.profile {
            "custom" => {
                let medium = self.medium.map(|medium| format!("{medium}-"));
                let medium = medium.unwrap_or_default();
                format!("custom-{medium}{}mbit-{}ms", self.rate_mbit, self.rtt_ms)
            }
            profile => profile.to_owned(),
        }
    }

    /// Medium and rate, as a part of a file's name: what links have in common whatever their delay.
    fn medium_name(&self) -> String {
        format!(
            "{}-{}mbit",
            self.medium.unwrap_or(self.profile),
            self.rate_mbit
        )
    }
}

/// Headless machines have no fonts installed: the drawing library needs one to measure text.
pub(crate) fn use_own_font() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // Fails only for a file that is no font, and then the drawing says so.
        let _ = register_font("sans-serif", FontStyle::Normal, dejavu::sans::regular());
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(workload: &'static str, transport: &str, loss: f64, bytes: u64, mbps: f64) -> Row {
        Row {
            plan: "p".to_owned(),
            profile: "terrestrial",
            loss_model: "uniform",
            workload,
            transport: transport.to_owned(),
            run: 1,
            ok: true,
            loss_pct: loss,
            size: Some(bytes),
            count: Some(bytes as u32),
            goodput_mbps: Some(mbps),
            fct_s: Some(bytes as f64 * 8e-6 / mbps),
            ..Row::default()
        }
    }

    #[test]
    fn draw__every_kind_of_picture_with_its_labels() {
        let mut rows = Vec::new();
        for (loss, mbps) in [(0.0, 90.0), (2.0, 70.0), (5.0, 50.0)] {
            for bytes in [4_096, 1 << 20] {
                rows.push(row("file", "tcp-bbr", loss, bytes, mbps));
                rows.push(row("file", "graft:stream", loss, bytes, mbps + 5.0));
            }
        }
        rows.push(row("flows", "udp", 0.0, 1, 5.0));
        rows.push(row("flows", "udp", 0.0, 100, 4.0));
        for flow in [1, 2] {
            let mut competing = row("compete", "graft:stream", 0.0, 1, 5.0);
            competing.flow = Some(flow);
            competing.samples = (0..50)
                .map(|i| (f64::from(i) * 0.1, i as u64 * 9_000))
                .collect();
            competing.switches = vec![2.5];
            rows.push(competing);
        }
        let directory = std::env::temp_dir().join(format!("vtl-plots-{}", std::process::id()));
        // Of the figure of all losses: one that was cut.
        let slow = Row {
            cut: true,
            ..row("file", "graft:stop-and-wait", 5.0, 1 << 20, 0.1)
        };
        rows.push(slow);
        // And of another link, of which that figure shows nothing: one size.
        let lan = |row: Row| Row {
            profile: "lan",
            ..row
        };
        rows.push(lan(row("file", "tcp-bbr", 0.0, 1 << 24, 90.0)));
        // Bursts are lines of their own.
        rows.push(Row {
            loss_model: "gilbert-elliott",
            ..row("file", "tcp-bbr", 5.0, 1 << 20, 40.0)
        });
        let files = draw(&directory, &rows).expect("drawn");
        assert_eq!(files.len(), 6, "{files:?}");
        let text: String = files
            .iter()
            .map(|file| fs::read_to_string(file).expect("read"))
            .collect();
        fs::remove_dir_all(&directory).expect("removed");
        for words in [
            "loss, %",
            "graft:stream",
            "flows at the same time",
            "2: graft:stream",
            "another graft takes over",
            "terrestrial, 5 % loss",
            "terrestrial, 4 KiB",
            "graft:stop-and-wait",
            "tcp-bbr, bursts",
            "1 MiB",
        ] {
            assert!(text.contains(words), "{words}");
        }
        assert!(!text.contains("lan, 0 % loss"));
    }

    #[test]
    fn goodput__averages_over_the_window() {
        // 1 Mbit each 100 ms: 10 Mbit/s throughout.
        let samples: Vec<_> = (0..20_u32)
            .map(|i| (f64::from(i) * 0.1, u64::from(i) * 125_000))
            .collect();
        for (time, mbit) in goodput(&samples) {
            assert!((mbit - 10.0).abs() < 1e-6, "{mbit} at {time}");
        }
    }
}
