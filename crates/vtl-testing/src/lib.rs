//! What the tests of all crates share: skipping aloud, and waiting without a stopwatch.

mod skip;
mod wait;

pub use skip::{is_root, skip};
pub use wait::{PATIENCE, until};
