//! Transfers over emulated links, by VTL and by what it competes with, measured and compared: the
//! work behind `vtl bench` and `vtl demo`.
//!
//! - [`plan`]: what to measure, from a TOML file;
//! - [`run`]: carries a plan out, one transfer after the other, each on a testbed of its own;
//! - [`agent`]: the two ends of a transfer, processes in the testbed's namespaces;
//! - [`row`]: what a transfer came to; [`table`] and [`plot`] show rows to people,
//!   with the [`spread`] of repeated ones;
//! - [`micro`]: what each program costs by itself;
//! - [`deploy`]: what deploying grafts and setting up sessions take; [`figure`]: how both say it;
//! - [`load`]: many connections of ordinary sockets;
//! - [`payload`], [`daemons`], [`nginx`], [`download`], [`child`]: what the demo uses too.
//!
//! This is the inside of a command rather than a library for others, so functions that can fail in
//! many ways return [`anyhow::Result`].

pub mod agent;
pub mod child;
mod cpu;
pub mod daemons;
pub mod deploy;
pub mod download;
pub mod figure;
mod interrupt;
pub mod load;
pub mod micro;
pub mod nginx;
pub mod payload;
pub mod plan;
pub mod plot;
pub mod programs;
pub mod row;
pub mod run;
pub mod spread;
pub mod table;

pub use interrupt::{Interrupt, Interrupted};
