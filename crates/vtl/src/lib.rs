//! VTL's client library: applications ask for transport services and never name a protocol.
//!
//! - [`socket`]: the six operations of the thesis (table 3.4), over shared rings;
//! - [`ring`]: the rings themselves, for those who want packets in place;
//! - [`control`]: requests to the daemon.

pub mod control;
mod events;
pub mod ring;
pub mod socket;

pub use socket::{Agreement, Error, Mode, Socket};
pub use vtl_proto::services::{Qos, Requirements, Services};
