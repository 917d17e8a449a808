//! Decision trees as C4.5 release 8 and C5.0 induce them, for any data: nothing here knows transports.
//!
//! - [`DataSet`]: cases with continuous and discrete attributes, missing values, weights and classes; read from
//!   Quinlan's `.names` and `.data` ([`DataSet::from_names`]) or from CSV ([`DataSet::from_csv`]);
//! - [`train`]: gain ratio, thresholds with their cost, error-based and global pruning, boosting ([`Options`]); [`bag`]:
//!   several trees on cases drawn by chance;
//! - [`Model`]: evaluates a case in a fraction of a microsecond, explains itself ([`Model::path`]), says what lies outside its
//!   training ([`Model::outside`]), draws itself (`Display`), and is kept as JSON ([`Model::to_json`],
//!   [`Model::from_json`], which refuses what is malformed);
//! - [`evaluation`]: confusion matrices, precision and recall, cross-validation, hold-out by group.
//!
//! The same data and options give the same model, on every machine with IEEE 754 arithmetic and the same logarithm;
//! what is equally good is taken in the attributes' order.
//!
//! # Sources
//! - J. R. Quinlan: *C4.5: Programs for Machine Learning*, Morgan Kaufmann, 1993 ("the book"): the gain ratio criterion
//!   (chapter 2), unknown values as fractional cases (chapter 3), error-based pruning with subtree raising (chapter 4).
//! - J. R. Quinlan: *Improved Use of Continuous Attributes in C4.5*, JAIR 4:77-90, 1996: the cost of a threshold (release 8).
//! - J. R. Quinlan: *Bagging, Boosting, and C4.5*, AAAI 1996; Y. Freund and R. E. Schapire: *Experiments with a New
//!   Boosting Algorithm*, ICML 1996 (AdaBoost.M1).
//! - L. Breiman, J. Friedman, R. Olshen, C. Stone: *Classification and Regression Trees*, 1984: cost complexity and the
//!   rule of one standard error (sections 3.3 and 3.4), which C5.0's global pruning is.
//!
//! # Where this differs from C4.5 and C5.0
//! Trees are those of C4.5 release 8, by its descriptions and by Weka's J48 (with [`Limit::Deviate`], line for
//! line in the tests), but for:
//! - Any two different values have a possible threshold between them; C4.5 wants a distance of 1e-5, which would be blind
//!   for small quantities.
//! - No subsets of discrete values (C4.5's `-s`), no rules, no winnowing, no costs of errors, no fuzzy thresholds.
//!
//! C5.0 adds to C4.5 what is here: global pruning, on unless switched off, and boosting by its own scheme. It also does
//! what is not here, as no publication of Quinlan's has it: above 500 cases a class an MDL bound replaces the
//! average gain; a threshold costs at most the logarithm of the whole range divided by the gap that it lies in; gain
//! ratios within 0.1 % are equal, and fewer branches decide; only a test that is not on the same continuous attribute
//! is raised, and what is raised is grown anew; small branches are estimated together. `tests/c50.rs` says for which
//! data the trees are the same all the same, and bounds the difference in accuracy elsewhere.

#![deny(unsafe_code)]

mod bag;
mod boost;
mod csv_file;
mod data;
pub mod evaluation;
mod grow;
mod model;
mod model_file;
mod names_file;
#[cfg(test)]
mod properties;
mod prune;
mod rows;
mod text;

pub use bag::bag;
pub use csv_file::CsvColumns;
pub use data::{Attribute, Case, DataSet, Domain, Value};
pub use grow::{Limit, Options, train};
pub use model::{Condition, Model, Node, Relation, Test, Tree};
pub use model_file::MAX_FILE;

/// The most attributes of a data set or model.
pub const MAX_ATTRIBUTES: usize = 256;
/// The most values of a discrete attribute.
pub const MAX_VALUES: usize = 256;
/// The most classes.
pub const MAX_CLASSES: usize = 256;
/// The most bytes of a name, a unit or a value.
pub const MAX_NAME: usize = 100;
/// The most tests between a tree's root and a leaf. No tree is grown deeper.
pub const MAX_DEPTH: usize = 128;
/// The most nodes of a model's trees together.
pub const MAX_NODES: usize = 1 << 16;
/// The most trees of a model.
pub const MAX_TREES: usize = 100;

/// Why data, options or a model are refused: one sentence each, which says what is wrong, where, and how to mend it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// A line of a text file cannot be read.
    #[error("{file}, line {line}: {what}")]
    Line {
        /// What kind of file: ".names", ".data" or "CSV".
        file: &'static str,
        /// From 1.
        line: u64,
        /// What is wrong, and what would be right.
        what: String,
    },
    /// A data set contradicts itself.
    #[error("data set: {0}")]
    Data(String),
    /// An option is out of range.
    #[error("options: {0}")]
    Options(String),
    /// A model file is malformed, or from another version.
    #[error("model: {0}")]
    Model(String),
}

/// The result of what can be refused.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Two weights or gains that differ by less are equal: sums of fractions are not exact.
const EPSILON: f64 = 1e-6;

/// The index of the greatest number, the first of equal ones. 0 if there is none.
fn first_max(numbers: &[f64]) -> usize {
    let mut best = 0;
    for (i, number) in numbers.iter().enumerate().skip(1) {
        if *number > numbers[best] + EPSILON {
            best = i;
        }
    }
    best
}
