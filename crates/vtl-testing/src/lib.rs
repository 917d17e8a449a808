//! What the tests of all crates share: skipping aloud, turns, waiting without a
//! stopwatch, and numbers for simulations.

mod remains;
mod skip;
mod turn;
mod wait;

pub use remains::{gone, remains};
pub use skip::{is_root, skip};
pub use turn::{Turn, turn, turn_alone};
pub use vtl_link::Random;
pub use wait::{PATIENCE, until};
