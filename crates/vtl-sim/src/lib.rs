//! VTL's transport functions outside the kernel: the C sources of `bpf/tf` and the compositions of
//! `bpf/grafts`, compiled for this machine with undefined behaviour trapped and with rings
//! that end where inaccessible memory begins.
//!
//! - [`host`]: one host's data plane, packets in and out;
//! - [`sim`]: two hosts on the link model of `vtl-link`, in virtual time;
//! - [`pair`]: one session of them, whose frames somebody else moves;
//! - [`contest`]: flows that share a bottleneck, with [`models`] of TCP;
//! - [`fairness`]: their shares of a bottleneck, over links, queues, losses and round trips;
//! - [`change`]: paths that change under a transfer;
//! - [`hostile`]: misbehaving applications and peers;
//! - [`report`]: the table of results;
//! - [`app`]: the applications at both ends;
//! - [`ffi`]: the C interface, generated.

pub mod app;
pub mod change;
pub mod contest;
pub mod fairness;
pub mod host;
pub mod hostile;
pub mod models;
pub mod pair;
pub mod report;
mod scenario;
pub mod sim;

/// `native/native.h` through bindgen; the comments are there.
#[allow(
    missing_docs,
    non_camel_case_types,
    non_snake_case,
    non_upper_case_globals,
    unreachable_pub,
    clippy::all,
    clippy::undocumented_unsafe_blocks
)]
pub mod ffi {
    include!(concat!(env!("OUT_DIR"), "/native.rs"));
}
