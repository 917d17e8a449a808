//! The picture of goodput over time.

use std::iter;
use std::path::Path;

use anyhow::anyhow;
use plotters::prelude::*;

use super::report::Row;
use super::transport::Transport;
use crate::bench::plot::{goodput, use_own_font};

/// The shortest time axis, in seconds.
const SHORTEST: f64 = 8.0;

/// Draws the first run of each transport.
pub(super) fn draw(path: &Path, title: &str, rate_mbit: f64, rows: &[Row]) -> anyhow::Result<()> {
    use_own_font();
    // An error of the drawing library borrows the canvas: keep only its text.
    draw_chart(path, title, rate_mbit, rows)
        .map_err(|err| anyhow!("cannot draw {}: {err}", path.display()))
}

fn draw_chart(
    path: &Path,
    title: &str,
    rate_mbit: f64,
    rows: &[Row],
) -> Result<(), Box<dyn std::error::Error>> {
    let rows: Vec<&Row> = rows.iter().filter(|row| row.run == 1).collect();
    let canvas = BitMapBackend::new(path, (1000, 560)).into_drawing_area();
    canvas.fill(&WHITE)?;
    let end = time_axis(&rows);
    let mut chart = ChartBuilder::on(&canvas)
        .caption(title, ("sans-serif", 22))
        .margin(16)
        .x_label_area_size(44)
        .y_label_area_size(56)
        .build_cartesian_2d(0.0..end, 0.0..goodput_axis(&rows, rate_mbit))?;
    chart
        .configure_mesh()
        .x_desc("seconds since curl was started")
        .y_desc("goodput, Mbit/s")
        .label_style(("sans-serif", 15))
        .x_label_formatter(&|x| format!("{x:.0}"))
        .y_label_formatter(&|y| format!("{y:.0}"))
        .axis_desc_style(("sans-serif", 16))
        .light_line_style(TRANSPARENT)
        .draw()?;
    chart.draw_series(DashedLineSeries::new(
        [(0.0, rate_mbit), (end, rate_mbit)],
        6,
        4,
        BLACK.mix(0.5).stroke_width(1),
    ))?;
    for row in rows {
        let color = color(row.transport);
        let mut label = format!("{}: {:.1} Mbit/s", row.transport.name(), row.goodput_mbit);
        if row.seconds > end {
            label.push_str(&format!(" (goes on until {:.0} s)", row.seconds));
        }
        chart
            .draw_series(LineSeries::new(
                iter::once((0.0, 0.0))
                    .chain(goodput(&row.samples))
                    .filter(|point| point.0 <= end),
                color.stroke_width(2),
            ))?
            .label(label)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 20, y)], color.stroke_width(3)));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperRight)
        .background_style(WHITE.mix(0.85))
        .border_style(BLACK.mix(0.3))
        .label_font(("sans-serif", 16))
        .draw()?;
    canvas.present()?;
    Ok(())
}

/// Long enough for every download that finished, and half as long again; one that was cut
/// continues beyond the edge.
fn time_axis(rows: &[&Row]) -> f64 {
    let longest = |complete| {
        let rows = rows.iter().filter(|row| row.complete == complete);
        rows.map(|row| row.seconds).reduce(f64::max)
    };
    let end = longest(true).map_or_else(|| longest(false).unwrap_or(0.0), |s| s * 1.5);
    end.max(SHORTEST)
}

/// High enough for the link's rate, and for the bursts that follow a hole being filled.
fn goodput_axis(rows: &[&Row], rate_mbit: f64) -> f64 {
    let points = rows.iter().flat_map(|row| goodput(&row.samples));
    let highest = points.map(|point| point.1).fold(rate_mbit, f64::max);
    highest * 1.08
}

fn color(transport: Transport) -> RGBColor {
    match transport {
        Transport::Cubic => RGBColor(0xd5, 0x5e, 0x00),
        Transport::Bbr => RGBColor(0x56, 0xb4, 0xe9),
        Transport::Vtl => RGBColor(0x00, 0x72, 0x54),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draw__writes_a_png_without_system_fonts() {
        let path = std::env::temp_dir().join(format!("vtl-plot-{}.png", std::process::id()));
        draw(&path, "title", 100.0, &[]).expect("drawn");
        let bytes = std::fs::read(&path).expect("read");
        assert!(bytes.starts_with(b"\x89PNG"));
        std::fs::remove_file(path).expect("removed");
    }
}
