//! A load on a link by real kernels: this host's, in namespaces (`vtl testbed`), with the ends that `vtl bench` has.

use anyhow::Result;
use vtl_link::Link;

use super::campaign::{LinkId, Load};
use crate::bench::plan::{Cell, Direction, Plan, Transport, Vtl, Workload};
use crate::bench::run::Bench;
use crate::interrupt::Interrupt;
use crate::programs::Programs;

/// Runs of a load by each carrier on a link where something is random, and on others.
pub(super) const RUNS: (u32, u32) = (4, 1);
/// Links are at most so fast, Mbit/s: the emulator must carry several at the same time without a packet too late.
pub(super) const MAX_RATE_MBIT: f64 = 50.0;
/// Only files of at most so many bytes.
pub(super) const MAX_BYTES: u64 = 1 << 20;
/// A load that takes longer than this by TCP in virtual time is left out, ms: more cases in the same time.
pub(super) const MAX_MS: f64 = 6e3;
/// A transfer that takes longer counts as not measured, seconds.
const LIMIT_S: f64 = 60.0;

/// One testbed at a time.
pub(super) struct Testbeds(Bench);

impl Testbeds {
    /// Testbeds whose names end in `worker`.
    ///
    /// # Errors
    /// VTL's programs are missing.
    pub(super) fn new(worker: usize, interrupt: Interrupt) -> Result<Self> {
        let name = format!("{}-{worker}", Bench::testbed_name());
        Ok(Self(Bench::new(Programs::find()?, name, interrupt)?))
    }

    /// What each run of a load takes by a carrier, ms; `None` if it is not to be measured, or a run failed.
    ///
    /// # Errors
    /// An interrupt; no testbed can be made.
    pub(super) fn costs(
        &self,
        id: LinkId,
        link: &Link,
        load: Load,
        carrier: &str,
    ) -> Result<Option<Vec<f64>>> {
        let (Some(bytes), Some(transport)) = (load.bytes(), transport(carrier)) else {
            return Ok(None);
        };
        let runs = if Load::is_random(link) {
            RUNS.0
        } else {
            RUNS.1
        };
        let plan = Plan {
            name: id.name(),
            runs,
            cells: vec![Cell {
                medium: None,
                core: None,
                // As the rows in virtual time are: of hosts that know each other.
                known: matches!(transport, Transport::Hook(_)),
                transports: vec![transport],
                profile: None,
                link: Link {
                    seed: id.run_seed(0),
                    ..link.clone()
                },
                timeline: Vec::new(),
                workload: Workload::File {
                    bytes,
                    direction: Direction::Down,
                },
                curl: false,
                time_limit_s: LIMIT_S,
                cores: None,
                vtl: Vtl::default(),
                rules: std::collections::BTreeMap::default(),
            }],
        };
        let finished = self.0.run(&[plan], |_| ());
        if let Some(error) = finished.stopped {
            return Err(error);
        }
        let ms = finished.rows.iter().map(|row| {
            if let Some(error) = &row.error {
                eprintln!("{}, {carrier}, {bytes} bytes: {error}", id.name());
            }
            let is_good = row.ok && !row.cut && row.emulator_drops == 0;
            row.fct_s.filter(|_| is_good).map(|s| s * 1e3)
        });
        Ok(ms.collect())
    }
}

fn transport(carrier: &str) -> Option<Transport> {
    match carrier {
        "tcp" => Some(Transport::Tcp("cubic")),
        "tcp:bbr" => Some(Transport::Tcp("bbr")),
        "tcp:reno" => Some(Transport::Tcp("reno")),
        "graft:stream" => Some(Transport::Hook(carrier.to_owned())),
        _ => None,
    }
}
