//! VTL's sans-I/O protocol logic: no sockets, no clock, no randomness. Packets come in as slices, time and
//! random values as arguments; packets to send come out.
//!
//! - [`wire`]: packets, parsed once into checked values, and emitted with their checksum;
//! - [`nego`]: negotiation of a session;
//! - [`services`]: services that applications require and grafts provide;
//! - [`carrier`]: kinds of carriers for hooked flows;
//! - [`preamble`]: preambles of carriers and control connections;
//! - [`frame`]: frames of an association's flows, moved by carriers;
//! - [`layers`]: headers of the layers of a stack;
//! - [`ip`]: the Ethernet and IP headers in front of packets;
//! - [`record`]: packets and sealed bytes in a stream;
//! - [`keys`]: keys of a session; [`seal`]: format of sealed payload;
//! - [`mod@file`]: the exchange of `vtl send` and `vtl recv`;
//! - [`intf`]: the C headers `bpf/include/vtl/{wire,intf,timers,hooker}.h`, generated.
//!
//! `PROTOCOL.md` is the specification.

#![deny(unsafe_code)]

pub mod carrier;
pub mod file;
pub mod frame;
pub mod ip;
pub mod keys;
pub mod layers;
pub mod nego;
pub mod preamble;
pub mod record;
pub mod seal;
pub mod services;
pub mod wire;

/// `wire.h`, `intf.h`, `timers.h` and `hooker.h` of `bpf/include/vtl` through bindgen; the comments are there. Integers
/// named `__be16` and so on are plain integers here: [`wire`] converts them.
#[allow(
    missing_docs,
    non_camel_case_types,
    non_snake_case,
    non_upper_case_globals,
    unreachable_pub,
    unsafe_code,
    clippy::all,
    clippy::undocumented_unsafe_blocks,
    rustdoc::all
)]
pub mod intf {
    include!(concat!(env!("OUT_DIR"), "/intf.rs"));
}
