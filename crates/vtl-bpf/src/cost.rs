//! What a graft costs for each packet: its programs run on packets of their own, of which each end's
//! are given to the other.

use std::{
    thread,
    time::{Duration, Instant},
};

use crate::{
    Error, Result,
    trial::{Kernel, PEER_SID, SID, SLOTS, TC, data},
};

/// Bytes of a packet's payload.
pub const PAYLOAD: usize = 1_440;
/// Packets that are sent, unless the graft takes too long.
const PACKETS: u32 = SLOTS * 3 / 4;
/// Fewer say nothing.
const LEAST: usize = 8;
/// How long the graft may take, with all that it waits for.
const PATIENCE: Duration = Duration::from_secs(2);
/// Between two attempts of a graft that paces its packets.
const PAUSE: Duration = Duration::from_micros(200);
/// A sender that is refused so many times in turn, and hears nothing, is done.
const ATTEMPTS: u32 = 2_000;
const EGRESS: &str = "vtl_root_out_tc";
const INGRESS: &str = "vtl_root_in_tc";

/// Nanoseconds that each program takes for a packet, with the root program before it: medians.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Costs {
    /// Instructions of all its programs.
    pub instructions: usize,
    /// A full packet made.
    pub egress_ns: f64,
    /// A full packet taken.
    pub ingress_ns: f64,
    /// An acknowledgement taken, if there are any.
    pub listener_ns: Option<f64>,
}

/// Runs a graft. Takes up to two seconds, for grafts that pace their packets.
///
/// # Errors
/// The kernel does not load or run it, or it sends next to nothing.
pub fn measure(object: &[u8]) -> Result<Costs> {
    let kernel = Kernel::with(object)?;
    kernel.open_other_end();
    for seq in 0..PACKETS {
        kernel.write(seq.into(), &[1; PAYLOAD]);
    }
    let method = of_the_method(&kernel)?;
    let [mut egress, mut ingress, mut listener] = [const { Vec::new() }; 3];
    let begun = Instant::now();
    let mut attempts = 0;
    while egress.len() < PACKETS as usize && attempts < ATTEMPTS && begun.elapsed() < PATIENCE {
        let made = kernel.try_run(EGRESS, &kernel.pump(SID), 1)?;
        let answer = if made.verdict == TC.send {
            egress.push(made.ns);
            let taken = kernel.try_run(INGRESS, &made.frame, 1)?;
            ingress.push(taken.ns);
            (taken.verdict == TC.answer).then_some(taken.frame)
        } else {
            // Nothing may be sent now: perhaps the other end has something to say.
            let made = kernel.try_run(EGRESS, &kernel.pump(PEER_SID), 1)?;
            (made.verdict == TC.send).then_some(made.frame)
        };
        attempts = if made.verdict == TC.send {
            0
        } else {
            attempts + 1
        };
        if let Some(answer) = answer {
            listener.push(kernel.try_run(INGRESS, &answer, 1)?.ns);
        } else if made.verdict != TC.send {
            thread::sleep(PAUSE);
        }
    }
    let median = |times: Vec<u32>| {
        let time = middle(times)?;
        Some((f64::from(time) - method).max(0.0))
    };
    let enough = egress.len() >= LEAST;
    match (median(egress), median(ingress)) {
        (Some(egress_ns), Some(ingress_ns)) if enough => Ok(Costs {
            instructions: kernel.graft.instructions,
            egress_ns,
            ingress_ns,
            listener_ns: median(listener),
        }),
        _ => Err(Error::BadGraft(format!(
            "graft \"{}\" sends next to nothing to a peer that answers at once",
            kernel.graft.name
        ))),
    }
}

/// What a single run seems to take longer than one of many: reading the clock, above all.
fn of_the_method(kernel: &Kernel) -> Result<f64> {
    const SINGLE: usize = 200;
    const MANY: u32 = 100_000;
    let mut other = data(0, 0, &[0; PAYLOAD]);
    other[23] = libc::IPPROTO_TCP as u8;
    let run = |repeat| Ok(kernel.try_run(INGRESS, &other, repeat)?.ns);
    let single = (0..SINGLE).map(|_| run(1)).collect::<Result<_>>()?;
    let single = middle(single).unwrap_or(0);
    Ok(f64::from(single.saturating_sub(run(MANY)?)))
}

fn middle(mut times: Vec<u32>) -> Option<u32> {
    times.sort_unstable();
    times.get(times.len() / 2).copied()
}
