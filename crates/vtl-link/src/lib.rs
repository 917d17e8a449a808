//! A model of a link: rate, drop-tail queue, loss, delay, jitter, reordering, duplication and bit
//! errors, as a sans-I/O state machine. The testbed's emulator runs it in real time
//! (`vtl-testbed`), the simulator in virtual time (`vtl-sim`).
//!
//! - [`Link`]: parameters set by users; [`Profile`]: named links; [`Medium`]: what access to a medium adds;
//! - [`Direction`]: one direction of a link, packets and the time in, packets and deadlines out;
//! - [`LossModel`]: the distribution of losses;
//! - [`Random`]: the random numbers of all of them, reproducible by seed.

// Tests are named `function__case`.
#![cfg_attr(test, allow(non_snake_case))]

mod link;
mod loss;
mod medium;
mod model;
mod profile;
mod random;
mod sojourn;

pub use link::{BadLink, Host, Link, LossModel, MTU, Slots};
pub use medium::Medium;
pub use model::{Direction, DirectionStats, Frame, Nanos, Params, mark_ip};
pub use profile::Profile;
pub use random::Random;
