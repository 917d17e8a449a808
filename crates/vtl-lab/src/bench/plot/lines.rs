//! Rows as lines of a picture.

use std::collections::BTreeMap;

use crate::bench::row::Row;
use crate::spread::Spread;

/// A point of a line.
pub(super) struct Point {
    pub(super) x: f64,
    pub(super) y: Spread,
    /// Most of its transfers were cut.
    pub(super) cut: bool,
}

/// The lines of a picture by name, with their points in the order of x.
pub(super) type Lines = BTreeMap<String, Vec<Point>>;

/// Points of each transport and model of losses, if there are at least two different x.
pub(super) fn lines(
    rows: &[&Row],
    x: impl Fn(&Row) -> Option<f64>,
    y: impl Fn(&Row) -> Option<f64>,
) -> Option<Lines> {
    let mut groups: BTreeMap<String, Vec<(f64, f64, bool)>> = BTreeMap::new();
    for row in rows {
        if let (Some(x), Some(y)) = (x(row), y(row)) {
            groups.entry(name(row)).or_default().push((x, y, row.cut));
        }
    }
    let mut lines = Lines::new();
    for (name, mut values) in groups {
        values.sort_by(|a, b| a.0.total_cmp(&b.0));
        let line = values.chunk_by(|a, b| a.0 == b.0).filter_map(|same| {
            Some(Point {
                x: same[0].0,
                y: Spread::of(same.iter().map(|v| v.1))?,
                cut: same.iter().filter(|v| v.2).count() * 2 > same.len(),
            })
        });
        lines.insert(name, line.collect());
    }
    lines.values().any(|line| line.len() > 1).then_some(lines)
}

/// A line's.
fn name(row: &Row) -> String {
    match row.loss_model {
        "uniform" => row.transport.clone(),
        _ => format!("{}, bursts", row.transport),
    }
}
