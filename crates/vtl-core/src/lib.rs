//! VTL's sans-I/O logic above the wire: no sockets, no clock, no threads. Events come in by `handle_*`, with
//! the time as an argument; actions go out by `poll_*`.
//!
//! Flows that belong to no carrier (`PROTOCOL.md`, section 7):
//! - [`flow`]: one application's byte stream: path selection, credit, retransmission, reassembly;
//! - [`association`]: all flows and carriers between two hosts, and their control frames;
//! - [`stacks`]: by which of several carriers a flow's next bytes go;
//! - [`layers`]: layers around a carrier that moves packets.
//!
//! A flow keeps its own TCP connection from its first byte to its last; its bytes take that connection or a
//! carrier of the association.
//!
//! Sessions (sections 4 to 6), whose packets the kernel's programs send and receive:
//! - [`session`]: the life of a session: handshake, keepalive, closing;
//! - [`switch`]: whether a session may be left at once for its successor, with what is in flight;
//! - [`mtud`]: path MTU discovery, and fallback to TCP where nothing else gets through.
//!
//! Choice: classification of flows by their first packets ([`profile`]), their traffic over time ([`traffic`]), the state of paths ([`netmon`]), what carrier
//! suits both ([`select`]), and when it is to change what flows travel by ([`reconfigure`]).

#![deny(unsafe_code)]

pub mod association;
pub mod flow;
pub mod layers;
pub mod mtud;
pub mod netmon;
pub mod profile;
pub mod reconfigure;
pub mod select;
pub mod session;
pub mod stacks;
pub mod switch;
pub mod traffic;

pub use association::Association;
pub use flow::Flow;
