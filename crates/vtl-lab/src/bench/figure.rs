//! Single measured figures, as `vtl bench micro` and `vtl bench deploy` write them.

use serde::Serialize;

use crate::provenance;
use crate::spread::Spread;

/// One figure.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Figure {
    /// What it belongs to.
    pub(crate) table: &'static str,
    /// Where: a hook and a role, a driver, a graft.
    pub(crate) place: String,
    /// Of what.
    pub(crate) what: String,
    /// The figure.
    pub(crate) value: f64,
    /// Its unit.
    pub(crate) unit: &'static str,
    /// When, UTC.
    pub(crate) date: String,
    /// The kernel's release.
    pub(crate) kernel: String,
}

/// Takes the figures of one table.
pub(crate) struct Sheet<'a> {
    table: &'static str,
    unit: &'static str,
    all: &'a mut Vec<Figure>,
}

impl<'a> Sheet<'a> {
    pub(crate) fn new(table: &'static str, unit: &'static str, all: &'a mut Vec<Figure>) -> Self {
        Self { table, unit, all }
    }

    /// The median of what was measured several times; nothing if it never was.
    pub(crate) fn add_median(
        &mut self,
        place: impl Into<String>,
        what: impl Into<String>,
        values: impl IntoIterator<Item = f64>,
    ) {
        if let Some(spread) = Spread::of(values) {
            self.add(place, what, spread.median);
        }
    }

    pub(crate) fn add(&mut self, place: impl Into<String>, what: impl Into<String>, value: f64) {
        self.all.push(Figure {
            table: self.table,
            place: place.into(),
            what: what.into(),
            value,
            unit: self.unit,
            date: provenance::date(),
            kernel: provenance::kernel(),
        });
    }
}
