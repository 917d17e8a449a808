//! Two hosts and an emulated link between them, on one machine.
//!
//! A testbed is three network namespaces, `<name>-client`, `<name>-router` and `<name>-server`. The
//! client and the server share a subnet; the router bridges their Ethernet frames and gives the path
//! the properties of a [`Link`]: rate, drop-tail queue, loss, delay, jitter, reordering, duplication
//! and bit errors.
//!
//! ```text
//!  <name>-client            <name>-router               <name>-server
//!  eth0 10.73.0.1  ──veth── to-client ⇄ to-server ──veth── eth0 10.73.0.2
//!       fd73::1                  emulator                       fd73::2
//! ```
//!
//! ```no_run
//! use vtl_testbed::{Host, Lifetime, Link, Profile, Testbed};
//!
//! let mut link = Profile::Terrestrial.link();
//! link.loss_pct = 1.0;
//! let testbed = Testbed::up("demo", &link, Lifetime::Guarded)?;
//! let status = testbed.command(Host::Client, "ping")?.args(["-c1", "10.73.0.2"]).status();
//! # Ok::<(), vtl_testbed::Error>(())
//! ```
//!
//! - `testbed`: creates, uses and removes testbeds; `chain`: two of them in a row;
//! - `emulator`: the link, in user space; `packet_socket`: its frames; `control`: its control socket;
//! - `netem`, `lossy_wire`: the link in the kernel instead;
//! - `namespace`, `offload`: network namespaces, and offloads of devices;
//! - `tcp`: TCP baselines; `state`: records of testbeds for other processes.
//!
//! All testbeds use the same addresses; namespaces keep them apart. All of it needs root.

// Tests are named `function__case`.
#![cfg_attr(test, allow(non_snake_case))]

mod chain;
mod control;
mod emulator;
mod error;
mod lossy_wire;
mod namespace;
mod netem;
mod offload;
mod packet_socket;
mod state;
mod tcp;
mod testbed;

pub use emulator::Stats;
pub use error::{Error, Result};
pub use tcp::CongestionControl;
pub use testbed::{Backend, Lifetime, Testbed};
pub use vtl_link::{BadLink, DirectionStats, Host, Link, LossModel, Medium, Profile, Slots};
