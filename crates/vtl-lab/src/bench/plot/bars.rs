//! Bars: figures of transports beside each other, as in VirtualStack's figures 6, 7 and 8.

use std::error::Error;
use std::path::Path;

use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::grid::distinct;
use super::palette::Palette;
use super::plain;
use crate::spread::Spread;

/// Width of a picture, pixels.
const WIDTH: i32 = 960;
/// Of a panel: its title, a bar with the space below it, and the space below the panel, pixels.
const TITLE: i32 = 34;
const BAR: i32 = 16;
const STEP: i32 = 23;
const GAP: i32 = 14;
/// Room for names on the left and for figures on the right, pixels.
const NAMES: i32 = 290;
const FIGURES: i32 = 210;

/// A bar.
pub(super) struct Bar {
    /// What it is of.
    pub(super) name: String,
    /// Its length, and the spread that is drawn on it.
    pub(super) value: Spread,
    /// What stands behind its figure.
    pub(super) note: String,
}

/// Bars with a common scale.
pub(super) struct Panel {
    /// What they show.
    pub(super) title: String,
    /// The bars, from the top down.
    pub(super) bars: Vec<Bar>,
    /// What was asked for: a line across the bars.
    pub(super) aim: Option<f64>,
}

/// Panels below each other.
pub(super) struct Bars {
    pub(super) title: String,
    pub(super) panels: Vec<Panel>,
}

impl Panel {
    fn height(&self) -> i32 {
        TITLE + self.bars.len() as i32 * STEP + GAP
    }

    /// Pixels of a value.
    fn scale(&self) -> impl Fn(f64) -> i32 + use<> {
        let values = self.bars.iter().map(|bar| bar.value.max);
        let max = values.chain(self.aim).fold(f64::MIN_POSITIVE, f64::max);
        let room = f64::from(WIDTH - NAMES - FIGURES);
        move |value| NAMES + (value / max * room).round() as i32
    }
}

impl Bars {
    pub(super) fn draw(&self, path: &Path) -> Result<(), Box<dyn Error>> {
        let height = 44 + self.panels.iter().map(Panel::height).sum::<i32>();
        let size = (WIDTH as u32, height as u32);
        let canvas = SVGBackend::new(path, size).into_drawing_area();
        canvas.fill(&WHITE)?;
        let names = self.panels.iter().flat_map(|panel| &panel.bars);
        let palette = Palette::of(distinct(names.map(|bar| bar.name.as_str())));
        let text = |size: i32| ("sans-serif", size).into_font().color(&BLACK);
        let left = |size: i32| text(size).pos(Pos::new(HPos::Left, VPos::Center));
        let right = |size: i32| text(size).pos(Pos::new(HPos::Right, VPos::Center));
        canvas.draw(&Text::new(self.title.clone(), (16, 22), left(19)))?;
        let mut top = 44;
        for panel in &self.panels {
            let scale = panel.scale();
            canvas.draw(&Text::new(panel.title.clone(), (16, top + 14), left(15)))?;
            for (bar, place) in panel.bars.iter().zip(0..) {
                let y = top + TITLE + place * STEP;
                let middle = y + BAR / 2;
                let color = palette.color(&bar.name);
                let area = [(NAMES, y), (scale(bar.value.median), y + BAR)];
                canvas.draw(&Rectangle::new(area, color.filled()))?;
                let at = (NAMES - 8, middle);
                canvas.draw(&Text::new(bar.name.clone(), at, right(14)))?;
                if bar.value.max > bar.value.min {
                    let spread = [
                        (scale(bar.value.min), middle),
                        (scale(bar.value.max), middle),
                    ];
                    canvas.draw(&PathElement::new(spread, BLACK.stroke_width(2)))?;
                }
                let figure = format!("{} {}", plain(bar.value.median), bar.note);
                let at = (scale(bar.value.max) + 8, middle);
                canvas.draw(&Text::new(figure, at, left(14)))?;
            }
            if let Some(aim) = panel.aim {
                let bottom = top + TITLE + panel.bars.len() as i32 * STEP;
                let line = [(scale(aim), top + TITLE - 5), (scale(aim), bottom)];
                canvas.draw(&PathElement::new(line, BLACK.mix(0.5).stroke_width(2)))?;
            }
            top += panel.height();
        }
        canvas.present()?;
        Ok(())
    }
}
