//! Flows that belong to no carrier, without I/O: no sockets, no clock, no threads. What arrives comes in
//! by `handle_*`, what is to be sent goes out by `poll_*`.
//!
//! - [`flow`]: one application's byte stream: what is to be sent, by which carrier, and what has arrived;
//! - [`association`]: all flows and carriers between two hosts, and the frames that they exchange;
//! - [`path`]: how large packets the path to a peer takes, and whether TCP is the only way.
//!
//! A flow has a TCP connection of its own from its first byte to its last; its bytes go by that
//! connection, or by a carrier of the association. `PROTOCOL.md`, "Flows over carriers", is the
//! specification.

#![deny(unsafe_code)]

pub mod association;
pub mod flow;
pub mod path;

pub use association::Association;
pub use flow::Flow;
