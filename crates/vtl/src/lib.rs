//! VTL's client library: applications ask for transport services and never name a protocol.
//!
//! - [`socket`]: the six operations of the thesis (table 3.4), over shared rings;
//! - [`Listener`]: many sessions at a port; [`Shared`]: a socket for several threads;
//! - `tokio`, with the feature of that name: the same for asynchronous applications;
//! - [`control`]: path and errors of the daemon's control socket.

mod error;
mod listener;
mod message;
mod session;
mod shared;
pub mod socket;
mod succession;
#[cfg(feature = "tokio")]
pub mod tokio;
mod waiting;

/// The part of the daemon's control socket that applications see.
pub mod control {
    pub use vtl_control::{Error, socket_path};
}

pub use listener::Listener;
pub use message::Part;
pub use shared::Shared;
pub use socket::{Agreement, Error, Mode, Socket, Statistics};
pub use succession::Switches;
pub use vtl_control::GivenUp;
pub use vtl_proto::services::{Preference, Qos, Requirements, Services};
