//! What a link does to packets: rate, drop-tail queue, loss, delay, jitter, reordering, duplication and
//! bit errors, as a state machine without IO. The testbed's emulator runs it in real time (`vtl-testbed`),
//! the simulator in virtual time (`vtl-sim`).
//!
//! - [`Link`]: the parameters a user sets; [`Profile`]: links with names;
//! - [`Direction`]: one direction of a link, packets and the time in, packets and deadlines out;
//! - [`LossProcess`]: which packets are lost;
//! - [`Random`]: the numbers that decide all of that, the same for the same seed.

// Tests are named `function__case`.
#![cfg_attr(test, allow(non_snake_case))]

mod link;
mod loss;
mod model;
mod profile;
mod random;
mod sojourn;

pub use link::{BadLink, Host, Link, LossModel, MTU, Slots};
pub use loss::LossProcess;
pub use model::{Direction, DirectionStats, Frame, Nanos, Params, mark_ip};
pub use profile::Profile;
pub use random::Random;
