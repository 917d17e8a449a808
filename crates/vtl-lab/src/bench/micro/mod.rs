//! What the parts of the data plane cost by themselves: whole programs, single transport functions,
//! frames by the size of a call, and the way from an idle application to the wire.

mod batches;
mod composition;
mod functions;
mod programs;
mod stacks;
mod wake;

use crate::bench::figure::{Figure, Sheet};
use crate::interrupt::Interrupt;
use crate::nginx::Scratch;
use crate::programs::Programs;

/// A full payload, bytes.
const PAYLOAD: usize = 1_440;

/// Measures everything, in about half a minute. `say` hears what comes next. What was measured before
/// something failed is returned all the same.
///
/// # Panics
/// If the programs cannot be loaded: that needs root.
pub(crate) fn run(
    daemons: &Programs,
    testbed: &str,
    interrupt: &Interrupt,
    say: impl FnMut(&str),
) -> (Vec<Figure>, anyhow::Result<()>) {
    let mut all = Vec::new();
    let result = measure(daemons, testbed, interrupt, say, &mut all);
    (all, result)
}

fn measure(
    daemons: &Programs,
    testbed: &str,
    interrupt: &Interrupt,
    mut say: impl FnMut(&str),
    all: &mut Vec<Figure>,
) -> anyhow::Result<()> {
    say("programs");
    programs::run(&mut Sheet::new("program", "ns", all));
    interrupt.check()?;
    say("stacks");
    stacks::run(&mut Sheet::new("stack", "ns", all));
    interrupt.check()?;
    say("transport functions");
    functions::run(&mut Sheet::new("function", "ns", all));
    interrupt.check()?;
    say("composition");
    composition::run(&mut Sheet::new("composition", "ns", all));
    interrupt.check()?;
    say("frames by the size of a call");
    batches::run(testbed, &mut Sheet::new("batch", "ns", all))?;
    interrupt.check()?;
    say("wake-up to wire");
    let scratch = Scratch::new()?;
    let sheet = &mut Sheet::new("wake-up", "us", all);
    wake::run(daemons, testbed, scratch.path(), interrupt, sheet)
}

/// The tables for people.
pub(crate) fn table(figures: &[Figure]) -> String {
    const TITLES: [(&str, &str); 6] = [
        (
            "program",
            "Programs, by BPF_PROG_TEST_RUN: packets that change nothing are means, others medians of \
             single runs, which include reading the clock",
        ),
        (
            "stack",
            "From a payload of 1,440 bytes in the ring to the packet, by graft: medians of single runs",
        ),
        (
            "function",
            "Transport functions as eBPF, by BPF_PROG_TEST_RUN: 64 calls in a program, less the same \
             program without them",
        ),
        (
            "composition",
            "Parts of selective-repeat, composed and written by hand, by the same method: medians of seven",
        ),
        (
            "batch",
            "A frame of 1,440 bytes by the frames of a call: egress, and the other end of a veth, which drops",
        ),
        (
            "wake-up",
            "From an idle application's send of 64 bytes to the packet at the peer's interface",
        ),
    ];
    let mut text = String::new();
    for (table, title) in TITLES {
        let rows = || figures.iter().filter(|f| f.table == table);
        let width =
            |of: fn(&Figure) -> &str| rows().map(|f| of(f).chars().count()).max().unwrap_or(0);
        let (place, what) = (width(|f| &f.place), width(|f| &f.what));
        if rows().next().is_none() {
            continue;
        }
        if !text.is_empty() {
            text.push('\n');
        }
        text += &format!("{title}:\n");
        for f in rows() {
            text += &format!(
                "  {:<place$}  {:<what$}  {:>8.1} {}\n",
                f.place,
                f.what,
                f.value,
                if f.unit == "us" { "µs" } else { f.unit }
            );
        }
    }
    text
}
