//! Carrying a plan out.

mod curl;
mod endpoint;
mod transfer;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::bench::plan::{Plan, Transport};
use crate::bench::row::Row;
use crate::bench::table::brief;
use crate::interrupt::{Interrupt, Interrupted};
use crate::nginx::Scratch;
use crate::programs::Programs;

/// What a bench needs besides plans.
#[derive(Debug)]
pub(crate) struct Bench {
    /// VTL's own programs.
    pub(crate) programs: Programs,
    /// The testbed's name; nobody else may use it meanwhile.
    pub(crate) testbed: String,
    /// Tells when to stop.
    pub(crate) interrupt: Interrupt,
    scratch: Scratch,
}

/// What a running bench has to say to people.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Event<'a> {
    /// This transfer has begun.
    Begun(&'a str),
    /// This is what came of one.
    Ended(&'a str),
}

/// A bench that has ended, perhaps early.
#[derive(Debug)]
pub(crate) struct Finished {
    /// What was measured until then.
    pub(crate) rows: Vec<Row>,
    /// Why it ended early, if it did.
    pub(crate) stopped: Option<anyhow::Error>,
}

impl Bench {
    /// A bench in testbeds of this name.
    ///
    /// # Errors
    /// No scratch directory can be made.
    pub(crate) fn new(
        programs: Programs,
        testbed: String,
        interrupt: Interrupt,
    ) -> anyhow::Result<Self> {
        Ok(Self {
            programs,
            testbed,
            interrupt,
            scratch: Scratch::new()?,
        })
    }

    /// The name that a bench's testbeds have: `$VTL_TESTBED`, or one of this process's own.
    pub(crate) fn testbed_name() -> String {
        std::env::var("VTL_TESTBED").unwrap_or_else(|_| format!("bench-{}", std::process::id()))
    }

    /// Where daemons and endpoints write what they have to say; gone with the bench.
    pub(crate) fn logs(&self) -> PathBuf {
        self.scratch.path().to_owned()
    }

    /// Measures everything that the plans ask for, one transfer after the other. A transfer that
    /// fails becomes a row that says so.
    pub(crate) fn run(&self, plans: &[Plan], mut say: impl FnMut(Event<'_>)) -> Finished {
        let total: usize = plans.iter().map(Plan::transfers).sum();
        let started = Instant::now();
        let mut done = 0;
        let mut rows = Vec::new();
        for plan in plans {
            // What is to be compared is measured close together, and again later.
            for run in 1..=plan.runs {
                for cell in &plan.cells {
                    for leg in cell.legs() {
                        if let Err(error) = self.interrupt.check() {
                            return Finished {
                                rows,
                                stopped: Some(error.into()),
                            };
                        }
                        let names: Vec<_> = leg.iter().map(ToString::to_string).collect();
                        say(Event::Begun(&format!(
                            "[{}/{total}] {}: {cell}: {}, run {run}",
                            done + 1,
                            plan.name,
                            names.join(" and "),
                        )));
                        let results = match self.transfer(plan, cell, leg, run) {
                            Ok(results) => results,
                            Err(error) if stops(&error) => {
                                return Finished {
                                    rows,
                                    stopped: Some(error),
                                };
                            }
                            Err(error) => leg
                                .iter()
                                .map(|transport| failed(plan, cell, transport, run, &error))
                                .collect(),
                        };
                        done += 1;
                        let left =
                            started.elapsed().as_secs_f64() / done as f64 * (total - done) as f64;
                        for row in &results {
                            say(Event::Ended(&format!(
                                "[{done}/{total}] {}: {cell}: {}, run {run}: {}; {} left",
                                plan.name,
                                row.transport,
                                brief(row),
                                people(left),
                            )));
                        }
                        rows.extend(results);
                    }
                }
            }
        }
        Finished {
            rows,
            stopped: None,
        }
    }
}

/// After these nothing else can be measured either.
fn stops(error: &anyhow::Error) -> bool {
    error.is::<Interrupted>()
        || matches!(
            error.downcast_ref::<vtl_testbed::Error>(),
            Some(
                vtl_testbed::Error::NotRoot
                    | vtl_testbed::Error::AlreadyUp(_)
                    | vtl_testbed::Error::BadName(_)
            )
        )
}

fn failed(
    plan: &Plan,
    cell: &crate::bench::plan::Cell,
    transport: &Transport,
    run: u32,
    error: &anyhow::Error,
) -> Row {
    let mut row = Row::new(&plan.name, cell, transport, run);
    row.error = Some(format!("{error:#}"));
    row
}

fn people(seconds: f64) -> String {
    let rounded = Duration::from_secs(seconds.round() as u64);
    humantime::format_duration(rounded).to_string()
}
