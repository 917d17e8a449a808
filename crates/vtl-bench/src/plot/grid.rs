//! Completion times by size, for every link and loss of a plan in one figure: that of the thesis's
//! figure 3.14.

use std::collections::BTreeMap;
use std::error::Error;
use std::path::Path;

use plotters::coord::Shift;
use plotters::prelude::*;

use super::{color, plain};
use crate::plan::size;
use crate::row::Row;
use crate::spread::Spread;

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// A panel, pixels.
const PANEL: (u32, u32) = (360, 300);
/// What the title takes of the height, pixels.
const TITLE: u32 = 40;
/// Of an entry of the legend: its height, its stroke, and a letter of its name, pixels.
const LINE: i32 = 22;
const STROKE: i32 = 22;
const LETTER: i32 = 8;

/// A point of a line.
struct Point {
    /// Bytes.
    size: f64,
    /// Seconds.
    time: Spread,
    /// Most transfers of this size were cut at that time.
    cut: bool,
}

/// A transport and its points, in order of size.
type Lines = BTreeMap<String, Vec<Point>>;

/// One link at one loss.
struct Panel {
    title: String,
    lines: Lines,
}

/// Links below each other, losses side by side.
pub(super) struct Grid {
    title: String,
    rows: Vec<Vec<Panel>>,
}

impl Grid {
    /// Of rows with several sizes, and several links or losses.
    pub(super) fn of(title: &str, rows: &[&Row]) -> Option<Self> {
        let files: Vec<&Row> = rows
            .iter()
            .filter(|r| r.workload == "file" && r.size.is_some() && r.fct_s.is_some())
            .copied()
            .collect();
        let mut links: Vec<String> = Vec::new();
        for row in &files {
            let link = row.link_name();
            if !links.contains(&link) {
                links.push(link);
            }
        }
        let losses = distinct(files.iter().map(|r| r.loss_pct));
        let sizes = distinct(files.iter().filter_map(|r| Some(r.size? as f64)));
        if sizes.len() < 2 || links.len() * losses.len() < 2 {
            return None;
        }
        let panel = |link: &String, loss: f64| {
            let of = files.iter();
            let of = of.filter(|r| r.loss_pct == loss && r.link_name() == *link);
            Panel {
                title: format!("{link}, {loss} % loss"),
                lines: lines(of.copied()),
            }
        };
        let panels = |link| losses.iter().map(|loss| panel(link, *loss)).collect();
        Some(Self {
            title: format!("{title}: completion times; triangles: cut"),
            rows: links.iter().map(panels).collect(),
        })
    }

    pub(super) fn draw(&self, path: &Path) -> Result<(), Box<dyn Error>> {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(1);
        let (width, height) = (PANEL.0 * columns as u32, PANEL.1 * self.rows.len() as u32);
        let names = self.names(width);
        let legend = names.last().map_or(0, |(_, (_, y))| y + LINE) as u32 + 8;
        let canvas = SVGBackend::new(path, (width, TITLE + height + legend)).into_drawing_area();
        canvas.fill(&WHITE)?;
        let canvas = canvas.titled(&self.title, ("sans-serif", 22))?;
        let rest = canvas.dim_in_pixel().1.saturating_sub(legend);
        let (panels, legend) = canvas.split_vertically(rest);
        let areas = panels.split_evenly((self.rows.len(), columns));
        let x = range(self.rows.iter().flatten(), |p| (p.size, p.size));
        for (row, areas) in self.rows.iter().zip(areas.chunks(columns)) {
            // What stands side by side shall be compared.
            let y = range(row.iter(), |p| (p.time.least, p.time.most));
            for (panel, area) in row.iter().zip(areas) {
                panel.draw(area, x.clone(), y.clone())?;
            }
        }
        Self::legend(&names, &legend)?;
        canvas.present()?;
        Ok(())
    }

    /// Names of transports, and where they stand in the legend.
    fn names(&self, width: u32) -> Vec<(&str, (i32, i32))> {
        let panels = self.rows.iter().flatten();
        let mut names: Vec<&str> = panels
            .flat_map(|p| p.lines.keys().map(String::as_str))
            .collect();
        names.sort_unstable();
        names.dedup();
        let (mut x, mut y) = (STROKE, 0);
        let place = |name: &'_ str| {
            let length = 2 * STROKE + name.len() as i32 * LETTER;
            if x + length > width as i32 && x > STROKE {
                (x, y) = (STROKE, y + LINE);
            }
            let at = (x, y);
            x += length;
            at
        };
        let places: Vec<_> = names.iter().copied().map(place).collect();
        names.into_iter().zip(places).collect()
    }

    fn legend(names: &[(&str, (i32, i32))], area: &Area<'_>) -> Result<(), Box<dyn Error>> {
        for (index, (name, (x, y))) in names.iter().enumerate() {
            let style = color(name, index);
            let stroke = [(*x, y + 12), (x + STROKE, y + 12)];
            area.draw(&PathElement::new(stroke, style.stroke_width(3)))?;
            let text = (x + STROKE + 6, y + 4);
            area.draw(&Text::new((*name).to_owned(), text, ("sans-serif", 15)))?;
        }
        Ok(())
    }
}

impl Panel {
    fn draw(
        &self,
        area: &Area<'_>,
        x: std::ops::Range<f64>,
        y: std::ops::Range<f64>,
    ) -> Result<(), Box<dyn Error>> {
        let mut chart = ChartBuilder::on(area)
            .caption(&self.title, ("sans-serif", 16))
            .margin(8)
            .x_label_area_size(32)
            .y_label_area_size(52)
            .build_cartesian_2d(x.log_scale(), y.log_scale())?;
        chart
            .configure_mesh()
            .y_desc("seconds")
            .x_labels(5)
            .label_style(("sans-serif", 12))
            .axis_desc_style(("sans-serif", 13))
            .x_label_formatter(&|bytes| size(bytes.round() as u64))
            .y_label_formatter(&|seconds| plain(*seconds))
            .light_line_style(TRANSPARENT)
            .draw()?;
        for (index, (name, points)) in self.lines.iter().enumerate() {
            let style = color(name, index);
            let whole = || points.iter().filter(|p| !p.cut);
            let line = whole().map(|p| (p.size, p.time.median));
            chart.draw_series(LineSeries::new(line, style.stroke_width(2)))?;
            let marks = whole().map(|p| Circle::new((p.size, p.time.median), 3, style.filled()));
            chart.draw_series(marks)?;
            for point in whole().filter(|p| p.time.most > p.time.least) {
                let bar = [
                    (point.size, point.time.least),
                    (point.size, point.time.most),
                ];
                chart.draw_series([PathElement::new(bar, style.stroke_width(1))])?;
            }
            let cut = points.iter().filter(|p| p.cut);
            let at = cut.map(|p| (p.size, p.time.median));
            chart.draw_series(at.map(|at| TriangleMarker::new(at, 6, style.stroke_width(2))))?;
        }
        Ok(())
    }
}

fn lines<'a>(rows: impl Iterator<Item = &'a Row>) -> Lines {
    let mut all: BTreeMap<String, Vec<&Row>> = BTreeMap::new();
    for row in rows {
        all.entry(row.transport.clone()).or_default().push(row);
    }
    let points = |mut rows: Vec<&Row>| -> Vec<Point> {
        rows.sort_by_key(|r| r.size);
        let same = rows.chunk_by(|a, b| a.size == b.size);
        same.filter_map(|same| {
            Some(Point {
                size: same[0].size? as f64,
                time: Spread::of(same.iter().filter_map(|r| r.fct_s))?,
                cut: same.iter().filter(|r| r.cut).count() * 2 > same.len(),
            })
        })
        .collect()
    };
    all.into_iter()
        .map(|(name, rows)| (name, points(rows)))
        .collect()
}

fn distinct(values: impl Iterator<Item = f64>) -> Vec<f64> {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values.dedup();
    values
}

/// What the axis must show, with some room around it.
fn range<'a>(
    panels: impl Iterator<Item = &'a Panel>,
    of: impl Fn(&Point) -> (f64, f64),
) -> std::ops::Range<f64> {
    let points = panels.flat_map(|p| p.lines.values().flatten());
    let (low, high) = points
        .map(of)
        .fold((f64::INFINITY, 0.0), |all: (f64, f64), p| {
            (all.0.min(p.0), all.1.max(p.1))
        });
    let high = if high > 0.0 { high } else { 1.0 };
    // No completion takes less than a microsecond.
    (low.clamp(1e-6, high) / 1.4)..(high * 1.4)
}
