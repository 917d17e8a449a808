//! Pictures of rows, as SVG.

mod grid;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Once;

use anyhow::{Context, anyhow};
use plotters::coord::ranged1d::AsRangedCoord;
use plotters::coord::ranged1d::ValueFormatter;
use plotters::prelude::*;
use plotters::style::{FontStyle, register_font};

use crate::plan::size;
use crate::row::Row;
use crate::spread::Spread;

/// Width and height, pixels.
const SIZE: (u32, u32) = (960, 560);
/// The span over which goodput over time is averaged, seconds.
const WINDOW_S: f64 = 0.5;

/// A line of a picture: its name and points of x, with the spread of y.
type Lines = BTreeMap<String, Vec<(f64, Spread)>>;

/// Draws what the rows allow: goodput by loss, completion time by size (for all links and losses of a
/// plan in one figure, too), goodput by the number of flows, and competing flows over time. Returns
/// the files.
///
/// # Errors
/// A file cannot be written.
pub fn draw(directory: &Path, rows: &[Row]) -> anyhow::Result<Vec<PathBuf>> {
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
    for (name, title, rows) in by_condition(rows, |_| String::new()) {
        if let Some(grid) = grid::Grid::of(&title, &rows) {
            let path = place(&name, "sizes");
            grid.draw(&path).map_err(|error| failed(&path, &*error))?;
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

/// Points of each transport, if there are at least two different x.
fn lines(
    rows: &[&Row],
    name: impl Fn(&Row) -> String,
    x: impl Fn(&Row) -> Option<f64>,
    y: impl Fn(&Row) -> Option<f64>,
) -> Option<Lines> {
    let mut points: BTreeMap<String, Vec<(f64, f64)>> = BTreeMap::new();
    for row in rows {
        if let (Some(x), Some(y)) = (x(row), y(row)) {
            points.entry(name(row)).or_default().push((x, y));
        }
    }
    let mut lines = Lines::new();
    for (name, mut points) in points {
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        let line = points
            .chunk_by(|a, b| a.0 == b.0)
            .filter_map(|same| Some((same[0].0, Spread::of(same.iter().map(|p| p.1))?)))
            .collect();
        lines.insert(name, line);
    }
    lines.values().any(|line| line.len() > 1).then_some(lines)
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
    let name = |row: &Row| match row.loss_model {
        "uniform" => row.transport.clone(),
        _ => format!("{}, bursts", row.transport),
    };
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
        lines: lines(&rows, name, of_largest, |r| r.goodput_mbps)?,
    })
}

fn time_by_size(title: &str, rows: &[&Row]) -> Option<Picture> {
    let rows: Vec<&Row> = rows
        .iter()
        .filter(|r| r.workload == "file" && !r.cut)
        .copied()
        .collect();
    let least = rows.iter().map(|r| r.loss_pct).reduce(f64::min)?;
    let bytes = |row: &Row| {
        let size = row.size.filter(|_| row.loss_pct == least)?;
        Some(size as f64)
    };
    Some(Picture {
        title: format!("{title}: completion time at {least} % loss"),
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
        lines: lines(&rows, |r| r.transport.clone(), bytes, |r| r.fct_s)?,
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
        lines: lines(&rows, |r| r.transport.clone(), count, |r| r.goodput_mbps)?,
    })
}

/// The first run of what has samples.
fn over_time(title: &str, rows: &[&Row]) -> Option<Picture> {
    let mut lines = Lines::new();
    for row in rows.iter().filter(|r| r.run == 1 && !r.samples.is_empty()) {
        let name = match row.flow {
            Some(flow) => format!("{flow}: {}", row.transport),
            None => row.transport.clone(),
        };
        let point = |(time, value)| {
            let spread = Spread::of(std::iter::once(value))?;
            Some((time, spread))
        };
        let line = goodput(&row.samples).into_iter().filter_map(point);
        lines.insert(name, line.collect());
    }
    (!lines.is_empty()).then(|| Picture {
        title: format!("{title}: goodput over time"),
        x: Axis {
            label: "seconds since its own start",
            logarithmic: false,
            show: plain,
        },
        y: Axis {
            label: "goodput, Mbit/s",
            logarithmic: false,
            show: plain,
        },
        lines,
    })
}

/// Goodput at each sample over the window that ends there, Mbit/s.
fn goodput(samples: &[(f64, u64)]) -> Vec<(f64, f64)> {
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
        let x = range(&mut points().map(|p| p.0), &self.x);
        let y = range(&mut points().map(|p| p.1.most), &self.y);
        let least = points().map(|p| p.1.least).fold(f64::INFINITY, f64::min);
        let y_log = (least.max(1e-9) / 1.25)..y.end;
        match (self.x.logarithmic, self.y.logarithmic) {
            (false, false) => self.chart(&canvas, x, y)?,
            (true, false) => self.chart(&canvas, x.log_scale(), y)?,
            (false, true) => self.chart(&canvas, x, y_log.log_scale())?,
            (true, true) => self.chart(&canvas, x.log_scale(), y_log.log_scale())?,
        }
        canvas.present()?;
        Ok(())
    }

    fn chart<X, Y>(
        &self,
        canvas: &DrawingArea<SVGBackend<'_>, plotters::coord::Shift>,
        x: X,
        y: Y,
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
        for (index, (name, line)) in self.lines.iter().enumerate() {
            let color = color(name, index);
            chart
                .draw_series(LineSeries::new(
                    line.iter().map(|(x, y)| (*x, y.median)),
                    color.stroke_width(2),
                ))?
                .label(name.clone())
                .legend(move |(x, y)| {
                    PathElement::new([(x, y), (x + 20, y)], color.stroke_width(3))
                });
            for (x, y) in line.iter().filter(|(_, y)| y.most > y.least) {
                let bar = [(*x, y.least), (*x, y.most)];
                chart.draw_series([PathElement::new(bar, color.stroke_width(1))])?;
            }
            // Marks would hide a line of many points.
            if line.len() <= 20 {
                let marks = line.iter().map(|(x, y)| (*x, y.median));
                chart.draw_series(marks.map(|at| Circle::new(at, 3, color.filled())))?;
            }
        }
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::UpperRight)
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
            "custom" => format!("custom-{}mbit-{}ms", self.rate_mbit, self.rtt_ms),
            profile => profile.to_owned(),
        }
    }
}

/// The same for a transport in every picture; told apart by the colour-blind, too (Okabe, Ito).
fn color(name: &str, index: usize) -> RGBColor {
    const OTHERS: [RGBColor; 3] = [
        RGBColor(0xcc, 0x79, 0xa7),
        RGBColor(0x99, 0x99, 0x99),
        RGBColor(0xf0, 0xe4, 0x42),
    ];
    // Parameters do not change it.
    match name.split('?').next().unwrap_or_default() {
        "graft:canonical" => BLACK,
        "graft:stop-and-wait" => RGBColor(0x99, 0x99, 0x99),
        "graft:go-back-n" => RGBColor(0xe6, 0x9f, 0x00),
        "graft:selective-repeat" => RGBColor(0x00, 0x9e, 0x73),
        "graft:partial-reliability" => RGBColor(0xcc, 0x79, 0xa7),
        "tcp-cubic" => RGBColor(0xd5, 0x5e, 0x00),
        "tcp-bbr" => RGBColor(0x56, 0xb4, 0xe9),
        "quic" => RGBColor(0xe6, 0x9f, 0x00),
        "quic-bbr" => RGBColor(0xcc, 0x79, 0xa7),
        "udp" => RGBColor(0x99, 0x99, 0x99),
        "graft:stream" => RGBColor(0x00, 0x72, 0x54),
        "hook:graft:stream" => RGBColor(0x00, 0x72, 0xb2),
        _ => match index {
            0 => RGBColor(0x00, 0x72, 0x54),
            1 => RGBColor(0xd5, 0x5e, 0x00),
            2 => RGBColor(0x56, 0xb4, 0xe9),
            3 => RGBColor(0xe6, 0x9f, 0x00),
            _ => OTHERS[index % OTHERS.len()],
        },
    }
}

/// Headless machines have no fonts installed: the drawing library needs one to measure text.
fn use_own_font() {
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
            rows.push(competing);
        }
        let directory = std::env::temp_dir().join(format!("vtl-plots-{}", std::process::id()));
        // Of the figure of all losses: one that was cut.
        let slow = Row {
            cut: true,
            ..row("file", "graft:stop-and-wait", 5.0, 1 << 20, 0.1)
        };
        rows.push(slow);
        let files = draw(&directory, &rows).expect("drawn");
        assert_eq!(files.len(), 5, "{files:?}");
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
            "terrestrial, 5 % loss",
            "graft:stop-and-wait",
            "1 MiB",
        ] {
            assert!(text.contains(words), "{words}");
        }
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
