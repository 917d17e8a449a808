//! Completion times of a plan in one figure: by size for every link and loss, as in the thesis's
//! figure 3.14, and by loss for every link and size, as in its figure 4.9; and whatever else has a panel for each link
//! and loss.

use std::error::Error;
use std::path::Path;

use plotters::coord::Shift;
use plotters::coord::ranged1d::{AsRangedCoord, ValueFormatter};
use plotters::prelude::*;

use super::lines::{Lines, Point, lines};
use super::palette::Palette;
use super::plain;
use crate::bench::plan::size;
use crate::bench::row::Row;

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// Where no delay stands on a logarithmic axis, ms.
pub(super) const NO_DELAY: f64 = 0.1;
/// A panel, pixels.
const PANEL: (u32, u32) = (360, 300);
/// What the title takes of the height, pixels.
const TITLE: u32 = 40;
/// Of an entry of the legend: its height, its stroke, and a letter of its name, pixels.
const LINE: i32 = 22;
const STROKE: i32 = 22;
const LETTER: i32 = 8;

/// What the horizontal axis shows; the other of the two tells panels of a link apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum By {
    /// Bytes, a panel for each loss.
    Size,
    /// Per cent, a panel for each size.
    Loss,
    /// Propagation delay, milliseconds, a panel for each loss.
    Delay,
}

impl By {
    /// Where a row stands: on the horizontal axis, and in which panel of its link.
    fn place(self, row: &Row) -> Option<(f64, f64)> {
        let size = row.size? as f64;
        match self {
            Self::Size => Some((size, row.loss_pct)),
            Self::Loss => Some((row.loss_pct, size)),
            Self::Delay => None,
        }
    }

    /// A value of the horizontal axis.
    fn show(self, value: f64) -> String {
        match self {
            Self::Size => size(value.round() as u64),
            Self::Loss => format!("{} %", plain(value)),
            Self::Delay if value <= NO_DELAY => "0".to_owned(),
            Self::Delay => format!("{} ms", plain(value)),
        }
    }

    /// A panel's name.
    fn panel(self, column: f64) -> String {
        match self {
            Self::Size | Self::Delay => format!("{column} % loss"),
            Self::Loss => size(column.round() as u64),
        }
    }
}

/// One link at one loss, or of one size: seconds by the other.
pub(super) struct Panel {
    /// The link, or what else its row of panels shows.
    pub(super) link: String,
    pub(super) column: f64,
    /// Of the vertical axis.
    pub(super) unit: &'static str,
    pub(super) lines: Lines,
}

/// Links below each other, losses or sizes side by side.
pub(super) struct Grid {
    title: String,
    by: By,
    links: Vec<String>,
    columns: Vec<f64>,
    panels: Vec<Panel>,
}

impl Grid {
    /// Of rows that fill at least two panels: where the axis has one value only, there is nothing to
    /// draw.
    pub(super) fn of(title: &str, rows: &[&Row], by: By) -> Option<Self> {
        let column = |row: &Row| by.place(row).map(|(_, column)| column);
        let files = || rows.iter().copied().filter(|r| r.workload == "file");
        let places = distinct(files().filter_map(|r| Some((r.link_name(), column(r)?))));
        let panel = |(link, at): (String, f64)| {
            let here = files().filter(|r| column(r) == Some(at) && r.link_name() == link);
            let here: Vec<&Row> = here.collect();
            let lines = lines(&here, |r| by.place(r).map(|(x, _)| x), |r| r.fct_s)?;
            Some(Panel {
                link,
                column: at,
                unit: "seconds",
                lines,
            })
        };
        let panels: Vec<Panel> = places.into_iter().filter_map(panel).collect();
        Self::new(
            format!("{title}: completion times; triangles: cut"),
            by,
            panels,
        )
    }

    /// Of these panels, if there are two.
    pub(super) fn new(title: String, by: By, panels: Vec<Panel>) -> Option<Self> {
        if panels.len() < 2 {
            return None;
        }
        let mut columns = distinct(panels.iter().map(|p| p.column));
        columns.sort_by(f64::total_cmp);
        Some(Self {
            title,
            by,
            links: distinct(panels.iter().map(|p| p.link.clone())),
            columns,
            panels,
        })
    }

    pub(super) fn draw(&self, path: &Path) -> Result<(), Box<dyn Error>> {
        let shape = (self.links.len(), self.columns.len());
        let (width, height) = (PANEL.0 * shape.1 as u32, PANEL.1 * shape.0 as u32);
        let mut names = distinct(self.panels.iter().flat_map(|p| p.lines.keys()));
        names.sort_unstable();
        let palette = Palette::of(names.iter().map(|name| name.as_str()));
        let places = places(&names, width as i32);
        let legend = places.last().map_or(0, |(_, y)| y + LINE) as u32 + 8;
        let canvas = SVGBackend::new(path, (width, TITLE + height + legend)).into_drawing_area();
        canvas.fill(&WHITE)?;
        // A letter is about half as wide as high.
        let letters = self.title.chars().count() as u32;
        let height = (2 * width / letters.max(1)).min(22);
        let canvas = canvas.titled(&self.title, ("sans-serif", height))?;
        let rest = canvas.dim_in_pixel().1.saturating_sub(legend);
        let (panels, legend) = canvas.split_vertically(rest);
        let areas = panels.split_evenly(shape);
        let x = range(&self.panels, |p| (p.x, p.x));
        for (link, areas) in self.links.iter().zip(areas.chunks(shape.1)) {
            // What stands side by side shall be compared.
            let row = || self.panels.iter().filter(|p| p.link == *link);
            let y = range(row(), |p| (p.y.min, p.y.max));
            for panel in row() {
                let at = self.columns.iter().position(|at| *at == panel.column);
                let area = &areas[at.expect("it is one of them")];
                let (x, y) = (x.clone(), y.clone());
                match self.by {
                    By::Size | By::Delay => {
                        panel.draw(area, &palette, self.by, x.log_scale(), y)?;
                    }
                    // No room is left of nothing lost.
                    By::Loss => panel.draw(area, &palette, self.by, -0.2..x.end, y)?,
                }
            }
        }
        for (name, (x, y)) in names.into_iter().zip(places) {
            let stroke = [(x, y + 12), (x + STROKE, y + 12)];
            let style = palette.color(name).stroke_width(3);
            legend.draw(&PathElement::new(stroke, style))?;
            let text = (x + STROKE + 6, y + 4);
            legend.draw(&Text::new(name.clone(), text, ("sans-serif", 15)))?;
        }
        canvas.present()?;
        Ok(())
    }
}

/// Where names stand in a legend of this width, pixels.
fn places(names: &[&String], width: i32) -> Vec<(i32, i32)> {
    let (mut x, mut y) = (STROKE, 0);
    let place = |name: &&String| {
        let length = 2 * STROKE + name.len() as i32 * LETTER;
        if x + length > width && x > STROKE {
            (x, y) = (STROKE, y + LINE);
        }
        let at = (x, y);
        x += length;
        at
    };
    names.iter().map(place).collect()
}

impl Panel {
    fn draw<X>(
        &self,
        area: &Area<'_>,
        palette: &Palette,
        by: By,
        x: X,
        y: std::ops::Range<f64>,
    ) -> Result<(), Box<dyn Error>>
    where
        X: AsRangedCoord<Value = f64>,
        X::CoordDescType: ValueFormatter<f64>,
    {
        let mut chart = ChartBuilder::on(area)
            .caption(
                format!("{}, {}", self.link, by.panel(self.column)),
                ("sans-serif", 16),
            )
            .margin(8)
            .x_label_area_size(32)
            .y_label_area_size(52)
            .build_cartesian_2d(x, y.log_scale())?;
        chart
            .configure_mesh()
            .y_desc(self.unit)
            .x_labels(5)
            .label_style(("sans-serif", 12))
            .axis_desc_style(("sans-serif", 13))
            .x_label_formatter(&|value| by.show(*value))
            .y_label_formatter(&|seconds| plain(*seconds))
            .light_line_style(TRANSPARENT)
            .draw()?;
        for (name, points) in &self.lines {
            let style = palette.color(name);
            let whole = || points.iter().filter(|p| !p.cut);
            let line = whole().map(|p| (p.x, p.y.median));
            chart.draw_series(LineSeries::new(line, style.stroke_width(2)))?;
            let marks = whole().map(|p| Circle::new((p.x, p.y.median), 3, style.filled()));
            chart.draw_series(marks)?;
            for point in whole().filter(|p| p.y.max > p.y.min) {
                let bar = [(point.x, point.y.min), (point.x, point.y.max)];
                chart.draw_series([PathElement::new(bar, style.stroke_width(1))])?;
            }
            let cut = points.iter().filter(|p| p.cut);
            let at = cut.map(|p| (p.x, p.y.median));
            chart.draw_series(at.map(|at| TriangleMarker::new(at, 6, style.stroke_width(2))))?;
        }
        Ok(())
    }
}

/// Each value once, in the order in which they come.
pub(super) fn distinct<T: PartialEq>(values: impl Iterator<Item = T>) -> Vec<T> {
    let mut all = Vec::new();
    for value in values {
        if !all.contains(&value) {
            all.push(value);
        }
    }
    all
}

/// What the axis must show, with some room around it.
fn range<'a>(
    panels: impl IntoIterator<Item = &'a Panel>,
    of: impl Fn(&Point) -> (f64, f64),
) -> std::ops::Range<f64> {
    let points = panels.into_iter().flat_map(|p| p.lines.values().flatten());
    let (low, high) = points
        .map(of)
        .fold((f64::INFINITY, 0.0), |all: (f64, f64), p| {
            (all.0.min(p.0), all.1.max(p.1))
        });
    let high = if high > 0.0 { high } else { 1.0 };
    // No completion takes less than a microsecond.
    (low.clamp(1e-6, high) / 1.4)..(high * 1.4)
}
