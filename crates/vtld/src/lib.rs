//! VTL's daemon as a library: what the binary `vtld` is made of.
//!
//! - [`hooker`]: captures unmodified applications' connections;
//! - [`broker`]: opens sessions with peers, and runs their egress;
//! - `flows`: carries captured connections, over sessions or by carriers that are not grafts, such as QUIC;
//! - [`selection`]: the carrier `auto`, which the daemon chooses by path and application;
//! - [`netmon`]: the state of the paths to other hosts, by what connections count;
//! - [`identity`]: identities of this host and of its peers;
//! - [`rules`]: the rules file, which selects carriers for connections;
//! - `stacks`: stacks of layers by name;
//! - [`Scope`]: the network interfaces that VTL uses;
//! - [`control`]: the Unix socket for `vtl` and the client library, and `caller`: who its clients are;
//! - `events`: what is told there of changes;
//! - [`handover`]: handover of a daemon's state to the next one;
//! - [`panics`]: orderly end of the daemon after a panic in one of its threads;
//! - `network`, `option`, `urgent`: networks of peers, socket options, urgent data of TCP.

mod addresses;
pub mod broker;
mod caller;
pub mod control;
mod controls;
mod events;
mod flows;
pub mod handover;
pub mod hooker;
pub mod identity;
pub mod netmon;
mod network;
mod option;
pub mod panics;
pub mod rules;
mod scope;
pub mod selection;
mod stacks;
mod urgent;

/// Entry points of `vtld --carriers KIND`: unprivileged processes that parse what peers send by QUIC, SCTP,
/// KCP and stacks of layers.
pub mod carriers {
    pub use crate::flows::{drop_privileges, run};
    pub use crate::stacks::use_layers;
}
pub use scope::Scope;
