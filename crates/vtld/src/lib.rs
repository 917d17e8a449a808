//! VTL's daemon as a library: what the binary `vtld` is made of.
//!
//! - [`hooker`]: captures unmodified applications' connections;
//! - [`broker`]: opens sessions with peers and moves the bytes;
//! - `flows`: hooked flows, and carriers that are no grafts, such as QUIC;
//! - [`handover`]: what a daemon leaves to its successor;
//! - [`identity`]: who this host is, and whom it knows;
//! - [`panics`]: what becomes of the daemon when one of its threads panics;
//! - [`rules`]: the file that says which connections travel by what;
//! - [`control`]: the Unix socket for `vtl` and the client library.

pub mod broker;
mod caller;
pub mod control;
mod flows;
pub mod handover;
pub mod hooker;
pub mod identity;
mod network;
mod option;
pub mod panics;
pub mod rules;
mod scope;
mod urgent;

/// The processes that `vtld --carriers KIND` is: what peers send by QUIC, SCTP and KCP is parsed there, without
/// privileges.
pub mod carriers {
    pub use crate::flows::{drop_privileges, run};
}
pub use scope::Scope;
