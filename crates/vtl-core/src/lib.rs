//! VTL's logic above the wire, without I/O: no sockets, no clock, no threads. What happens comes in by
//! `handle_*`, with the time as an argument; what is to be done goes out by `poll_*`.
//!
//! Flows that belong to no carrier (`PROTOCOL.md`, section 7):
//! - [`flow`]: one application's byte stream: what is to be sent, by which carrier, and what has arrived;
//! - [`association`]: all flows and carriers between two hosts, and the frames that they exchange.
//!
//! A flow has a TCP connection of its own from its first byte to its last; its bytes go by that
//! connection, or by a carrier of the association.
//!
//! Sessions (sections 4 to 6), whose packets the kernel's programs send and receive:
//! - [`session`]: the life of a session: handshake, keepalive, closing;
//! - [`path`]: path MTU discovery, and the detour by TCP around a path that drops everything else.
//!
//! What a flow's application is like, by its first packets: [`profile`].

#![deny(unsafe_code)]

pub mod association;
pub mod flow;
pub mod path;
pub mod profile;
pub mod session;

pub use association::Association;
pub use flow::Flow;
