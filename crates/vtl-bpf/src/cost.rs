//! Cost of a graft per packet: its programs run on their own packets, each end's output being the
//! other's input.

use std::{
    thread,
    time::{Duration, Instant},
};

use vtl_proto::ip;

use crate::{
    Error, Result,
    trial::{Kernel, PEER_SID, SID, SLOTS, TC, data},
};

/// Payload of a packet, bytes.
pub const PAYLOAD: usize = 1_440;
/// Packets to send, unless the graft takes too long.
const PACKETS: u32 = SLOTS * 3 / 4;
/// Minimum number for a valid measurement.
const MIN_PACKETS: usize = 8;
/// Time limit for a graft, its waiting included.
const TIME_LIMIT: Duration = Duration::from_secs(2);
/// Interval between attempts of a graft with pacing.
const PAUSE: Duration = Duration::from_micros(200);
/// Consecutive attempts without a packet after which a sender counts as finished.
const ATTEMPTS: u32 = 2_000;
const EGRESS: &str = "vtl_root_out_tc";
const INGRESS: &str = "vtl_root_in_tc";

/// Cost of each program per packet, nanoseconds, with the root program before it: medians.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Costs {
    /// Instructions of all programs.
    pub instructions: usize,
    /// Sending a full packet.
    pub egress_ns: f64,
    /// Receiving a full packet.
    pub ingress_ns: f64,
    /// Receiving an acknowledgement, if the graft has any.
    pub listener_ns: Option<f64>,
}

/// Measures a graft. Takes up to two seconds, for grafts with pacing.
///
/// # Errors
/// The kernel does not load or run it, or it sends too few packets.
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
    while egress.len() < PACKETS as usize && attempts < ATTEMPTS && begun.elapsed() < TIME_LIMIT {
        let made = kernel.try_run(EGRESS, &kernel.pump(SID), 1)?;
        let answer = if made.verdict == TC.send {
            egress.push(made.ns);
            let taken = kernel.try_run(INGRESS, &made.frame, 1)?;
            ingress.push(taken.ns);
            (taken.verdict == TC.answer).then_some(taken.frame)
        } else {
            // Nothing may be sent now: let the other end send, an acknowledgement perhaps.
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
    let enough = egress.len() >= MIN_PACKETS;
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

/// Overhead of a single run over one of many: mostly reading the clock.
fn of_the_method(kernel: &Kernel) -> Result<f64> {
    const SINGLE: usize = 200;
    const MANY: u32 = 100_000;
    let mut other = data(0, 0, &[0; PAYLOAD]);
    other[ip::field::V4_PROTOCOL] = libc::IPPROTO_TCP as u8;
    let run = |repeat| Ok(kernel.try_run(INGRESS, &other, repeat)?.ns);
    let single = (0..SINGLE).map(|_| run(1)).collect::<Result<_>>()?;
    let single = middle(single).unwrap_or(0);
    Ok(f64::from(single.saturating_sub(run(MANY)?)))
}

/// The median; `None` of nothing.
fn middle(mut times: Vec<u32>) -> Option<u32> {
    times.sort_unstable();
    times.get(times.len() / 2).copied()
}
