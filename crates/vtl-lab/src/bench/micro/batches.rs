//! What a frame costs by the number of frames that a call of the pump asks for.

use std::time::{Duration, Instant};

use vtl_bpf::netdev;
use vtl_bpf::pump::{BATCH, Choice, Pump, Turn};
use vtl_bpf::trial::{Kernel, SID, SLOTS};
use vtl_testbed::{Host, Lifetime, Profile, Testbed};

use super::{PAYLOAD, Sheet};

/// How long each size is tried.
const TIME: Duration = Duration::from_millis(300);

pub(super) fn run(name: &str, sheet: &mut Sheet<'_>) -> anyhow::Result<()> {
    let testbed = Testbed::up(name, &Profile::Wire.link(), Lifetime::Guarded)?;
    for (driver, choice) in [("live", Choice::Live), ("tc", Choice::Tc)] {
        let figures = testbed.in_netns(Host::Client, || measure(choice))??;
        for (frames, ns) in figures {
            let text = if frames == 1 { "frame" } else { "frames" };
            sheet.add(driver, format!("{frames} {text} a call"), ns);
        }
    }
    Ok(())
}

/// Nanoseconds a frame, by frames a call.
fn measure(choice: Choice) -> anyhow::Result<Vec<(u32, f64)>> {
    let mut kernel = Kernel::new();
    let device = netdev::interfaces()?
        .into_iter()
        .next()
        .ok_or_else(|| anyhow::anyhow!("the testbed has no interface"))?;
    kernel.plane.attach(&device, vtl_bpf::plane::Ingress::Tcx)?;
    for seq in 0..SLOTS {
        kernel.write(seq.into(), &[1; PAYLOAD]);
    }
    let (mut pump, _) = Pump::open(&kernel.plane.shards()[0], device.index, device.mtu, choice)?;
    let again = || {
        kernel.alter(|s| {
            s.ifindex = device.index;
            s.tx.acks = 1;
            s.tx.next = 0;
            s.tx.sent = 0;
            s.tx.una = 0;
            s.tx.limit = SLOTS.into();
            s.tx.cwnd = u64::from(2 * SLOTS);
            s.tx.pacing_gap_ns = 0;
        });
    };
    let mut figures = Vec::new();
    let mut frames = 1;
    while frames <= BATCH {
        let mut one = || -> anyhow::Result<Duration> {
            again();
            let started = Instant::now();
            let turn = Turn {
                sid: SID,
                quota: frames,
            };
            pump.run(&[turn])?;
            let time = started.elapsed();
            let made = kernel.session().tx.sent;
            anyhow::ensure!(
                made == u64::from(frames),
                "{made} of {frames} frames were made"
            );
            Ok(time)
        };
        for _ in 0..20 {
            one()?;
        }
        let (begun, mut calls, mut spent) = (Instant::now(), 0_u32, Duration::ZERO);
        while begun.elapsed() < TIME {
            spent += one()?;
            calls += 1;
        }
        let ns = spent.as_nanos() as f64 / f64::from(calls) / f64::from(frames);
        figures.push((frames, ns));
        frames *= 4;
    }
    Ok(figures)
}
