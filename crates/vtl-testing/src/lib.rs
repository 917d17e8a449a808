//! What the tests of all crates share: skipping aloud, waiting without a stopwatch, and
//! numbers for simulations.

mod random;
mod skip;
mod wait;

pub use random::Random;
pub use skip::{is_root, skip};
pub use wait::{PATIENCE, until};
