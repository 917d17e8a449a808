//! What the tests of all crates share: skipping aloud, turns, waiting without a
//! stopwatch, and numbers for simulations.

mod random;
mod skip;
mod turn;
mod wait;

pub use random::Random;
pub use skip::{is_root, skip};
pub use turn::{Turn, turn, turn_alone};
pub use wait::{PATIENCE, until};
