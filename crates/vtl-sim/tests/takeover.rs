//! A flow that starts behind what others have left in the bottleneck's queue, as one that takes over a TCP connection's
//! bytes: once that is gone, its own queue must not take its place.
#![allow(missing_docs, non_snake_case)]

use std::thread;

use vtl_link::Nanos;
use vtl_sim::{
    change::link,
    contest::{Contest, Flow, Kind},
    models::Model,
    sim::MS,
};

/// How the queue came to be.
#[derive(Clone, Copy, Debug)]
enum Left {
    /// By packets that are there when the flow starts, behind its handshake.
    BehindHandshake,
    /// By packets that are there when the flow starts, and its handshake.
    BeforeHandshake,
    /// By a flow of CUBIC that fills the queue, and ends.
    Cubic,
}

/// A start on a link of `rate` Mbit/s and `rtt` ms, whose queue holds `held` ms of others.
#[derive(Clone, Copy, Debug)]
struct Start {
    rate: f64,
    rtt: f64,
    loss: f64,
    held: u64,
    left: Left,
}

impl Start {
    /// Time for this many packets at the bottleneck.
    fn packets(&self, count: u64) -> Nanos {
        (count as f64 * 12.0 / self.rate * MS as f64) as Nanos
    }

    /// Panics unless the queue is short, and the link busy, some time after the others' packets.
    fn check(self) {
        let rtt = (self.rtt * MS as f64) as Nanos;
        let held = self.held * MS;
        let packets = held / self.packets(1);
        let mut path = link(self.rtt, self.rate, self.loss, 2 * packets as u32 + 200);
        let mut flow = Flow::endless(Kind::Vtl);
        flow.known_rtt = rtt;
        let mut flows = Vec::new();
        let mut gone = held;
        match self.left {
            Left::BehindHandshake => {}
            Left::BeforeHandshake => flow.handshake_queued = held,
            Left::Cubic => {
                path.queue_packets = Some(packets as u32 + 4);
                (flow.start, flow.handshake_queued, gone) = (3 * held, held / 2, 5 * held);
                flows.push(Flow {
                    packets: 4 * (held + rtt) / self.packets(1),
                    ..Flow::endless(Kind::Tcp(Model::Cubic))
                });
            }
        }
        flows.insert(0, flow);
        let mut contest = Contest::new(path, flows, 0);
        if !matches!(self.left, Left::Cubic) {
            contest.foreign = packets;
        }
        contest.measure_from = gone + 4000 * MS + 20 * rtt + self.packets(1000);
        contest.until = contest.measure_from + 3000 * MS + 10 * rtt;
        let shares = contest.run();
        let rate = shares.rates[0] / self.rate / 1e6;
        let queue = shares.queue_p50 as Nanos;
        println!("{self:?}: {} ms, {rate:.3} of the rate", queue / MS);
        assert!(
            queue < rtt / 4 + self.packets(4),
            "{self:?}: a queue of {} ms",
            queue / MS
        );
        assert!(
            rate > 0.9 - self.loss / 100.0,
            "{self:?}: {rate:.3} of the rate"
        );
    }
}

#[test]
#[cfg_attr(
    debug_assertions,
    ignore = "takes long: `make test` runs it, optimised"
)]
fn takeover__leaves_no_queue() {
    let mut starts = Vec::new();
    for left in [Left::BehindHandshake, Left::BeforeHandshake, Left::Cubic] {
        for rtt in [10.0, 20.0, 100.0, 300.0] {
            for held in [200, 500, 1000, 2000] {
                for loss in [0.0, 1.0] {
                    for rate in [2.0, 8.0, 100.0] {
                        // CUBIC fills no queue where packets get lost.
                        let is_left_out = matches!(left, Left::Cubic) && loss > 0.0;
                        // Fast links take the simulator long.
                        if is_left_out || rate > 8.0 && (held, rtt as u64 % 100) != (500, 0) {
                            continue;
                        }
                        starts.push(Start {
                            rate,
                            rtt,
                            loss,
                            held,
                            left,
                        });
                    }
                }
            }
        }
    }
    let failed = thread::scope(|scope| {
        let (one, other) = starts.split_at(starts.len() / 2);
        let run = |part: &[Start]| {
            let is_bad = |s: &&Start| std::panic::catch_unwind(|| s.check()).is_err();
            part.iter().filter(is_bad).count()
        };
        let other = scope.spawn(move || run(other));
        run(one) + other.join().expect("panics are caught")
    });
    assert_eq!(failed, 0, "of {} starts", starts.len());
}

/// What other connections know may be of a former, shorter path.
#[test]
#[cfg_attr(debug_assertions, ignore = "as above")]
fn takeover__of_a_path_that_has_become_longer() {
    for (rtt, was) in [(200.0, 20.0), (100.0, 50.0), (300.0, 50.0), (500.0, 20.0)] {
        let rate = |known: f64| {
            let flow = Flow {
                known_rtt: (known * MS as f64) as Nanos,
                ..Flow::endless(Kind::Vtl)
            };
            let mut contest = Contest::new(link(rtt, 50.0, 0.5, 1000), vec![flow], 0);
            contest.measure_from = 0;
            contest.until = 15_000 * MS;
            contest.run().rates[0] / 50e6
        };
        let [unknown, right, wrong] = [0.0, rtt, was].map(rate);
        println!("{rtt} ms, was {was}: unknown {unknown:.3}, right {right:.3}, wrong {wrong:.3}");
        assert!(wrong > 0.9 * unknown, "{rtt} ms, was {was}");
    }
}
