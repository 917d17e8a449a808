//! Two hosts and the link model of the testbed, `vtl-link`, in virtual time. Deterministic by seed.

use vtl_link::{Direction, Frame, Nanos, Params, Random, mark_ip};
use vtl_proto::{intf, ip::field::IP, wire};

use crate::{
    app::{Pattern, Promise, Reader, Writer},
    ffi,
    host::{FrameBuffer, Host, SessionConfig, UPTIME, in_flight},
    hostile::{self, Hostile},
};

pub use crate::scenario::{Failure, Outcome, Scenario};

/// The session with well-behaved applications.
pub const HONEST: u32 = 1;
/// The session with misbehaving applications and peers, if there is one.
pub const HOSTILE: u32 = 2;

/// Nanoseconds per millisecond.
pub const MS: Nanos = 1_000_000;

/// A frame on the link.
#[derive(Clone, Debug)]
pub struct Packet {
    bytes: Vec<u8>,
    entered: Nanos,
}

impl Frame for Packet {
    fn link_bytes(&self) -> u64 {
        // The Ethernet header does not count on the link.
        (self.bytes.len() - IP) as u64
    }

    fn mark(&mut self) -> bool {
        mark_ip(&mut self.bytes[IP..])
    }

    fn flip_bit(&mut self, random: u64) -> bool {
        let from = hostile::offset(&self.bytes);
        let bits = (self.bytes.len() - from) as u64 * 8;
        if bits == 0 {
            return false;
        }
        let bit = (random % bits) as usize;
        self.bytes[from + bit / 8] ^= 1 << (bit % 8);
        true
    }
}

struct Side {
    host: Host,
    writer: Writer,
    reader: Reader,
    /// Time of each session's next egress call.
    wake: [Nanos; 3],
    hostile: Option<Hostile>,
}

/// Counters so far: `bytes` of both readers, all others of the direction from host 0 to host 1.
#[derive(Default)]
struct Counts {
    bytes: [u64; 2],
    sent: u64,
    retransmitted: u64,
    dups: u64,
}

/// A running simulation.
pub struct Sim {
    scenario: Scenario,
    now: Nanos,
    sides: [Side; 2],
    links: [Direction<Packet>; 2],
    params: [Params; 2],
    noise: Random,
    queueing: Vec<u32>,
    /// Time of the receivers' latest progress, and their packets then.
    moved: (Nanos, u64),
    measured: Counts,
    first_megabyte: Nanos,
    buffer: FrameBuffer,
    pool: Vec<Vec<u8>>,
}

impl Sim {
    /// Two hosts with an open session, before the first packet.
    pub fn new(scenario: Scenario) -> Self {
        let side = |i: usize| {
            let mut host = Host::new();
            host.open(HONEST, i as u8, &scenario.session);
            if scenario.hostile {
                host.open(
                    HOSTILE,
                    i as u8,
                    &SessionConfig {
                        slots: 64,
                        ..scenario.session
                    },
                );
            }
            let pattern = |of: usize| {
                Pattern::new(
                    scenario.seed ^ of as u64,
                    scenario.lengths,
                    scenario.session.max_payload,
                )
            };
            Side {
                host,
                writer: Writer::new(pattern(i), scenario.packets[i]),
                reader: Reader::new(
                    pattern(1 - i),
                    scenario.pace,
                    scenario.promise,
                    scenario.seed ^ i as u64,
                ),
                wake: [u64::MAX, 0, if scenario.hostile { 0 } else { u64::MAX }],
                hostile: scenario
                    .hostile
                    .then(|| Hostile::new(scenario.seed ^ i as u64)),
            }
        };
        let params = [Params::down(&scenario.link), Params::up(&scenario.link)];
        Self {
            sides: [side(0), side(1)],
            links: params.clone().map(Direction::new),
            params,
            noise: Random::new(scenario.seed, 99),
            now: 0,
            queueing: Vec::new(),
            moved: (0, 0),
            measured: Counts::default(),
            first_megabyte: 0,
            buffer: [0; ffi::VTL_NATIVE_FRAME as usize],
            pool: Vec::new(),
            scenario,
        }
    }

    /// Runs until everything is delivered and acknowledged, or to the scenario's end.
    ///
    /// # Errors
    /// A [`Failure`]: a bug in a transport function.
    pub fn run(mut self) -> Result<Outcome, Failure> {
        let mut measuring = false;
        while self.now < self.scenario.until {
            if !measuring && self.now >= self.scenario.measure_from {
                measuring = true;
                self.queueing.clear();
                self.measured = self.counts();
            }
            self.change();
            self.outages();
            self.arrivals();
            for i in 0..2 {
                self.applications(i)?;
                self.pump(i)?;
            }
            self.check_progress()?;
            // Before time moves on: what comes next may be a timer that has nothing to do any more, or nothing at all.
            if self.is_complete() {
                break;
            }
            self.now = self.next_event().max(self.now + 1).min(self.scenario.until);
        }
        if self.is_complete() {
            self.check_accounts()?;
        }
        Ok(self.outcome())
    }

    fn counts(&self) -> Counts {
        let tx = &self.sides[0].host.session(HONEST).tx;
        let rx = &self.sides[1].host.session(HONEST).rx;
        Counts {
            bytes: [0, 1].map(|i: usize| self.sides[i].reader.bytes()),
            sent: tx.sent,
            retransmitted: tx.retransmitted,
            dups: rx.dups.into(),
        }
    }

    /// Time on a host's clock.
    fn clock(&self, host: usize) -> u64 {
        let drift = self.now as i64 * self.scenario.drift_ppm / 1_000_000 * host as i64;
        (UPTIME + self.now).saturating_add_signed(drift)
    }

    /// Time of the next egress call of a host's session, on the simulation's clock.
    fn wake(&self, host: usize, sid: u32) -> Nanos {
        let at = self.sides[host].host.wake(sid);
        let drift = self.clock(host) as i64 - (UPTIME + self.now) as i64;
        // Precise enough: if it is too early, egress is called again.
        match at {
            0 | u64::MAX => at,
            at => at.saturating_add_signed(-drift),
        }
    }

    fn is_complete(&self) -> bool {
        (0..2).all(|i| {
            let tx = &self.sides[i].host.session(HONEST).tx;
            let all = self.scenario.packets[i];
            let reader = &self.sides[1 - i].reader;
            let read = match self.scenario.promise {
                Promise::Everything | Promise::Lanes | Promise::Gaps => reader.packets() == all,
                // Only the link knows whether more will arrive.
                Promise::Datagrams | Promise::Nothing => {
                    reader.due == u64::MAX && self.links[i].next_event().is_none()
                }
            };
            tx.una == all && read
        })
    }

    fn next_event(&self) -> Nanos {
        let mut next = u64::MAX;
        for link in &self.links {
            next = next.min(link.next_event().unwrap_or(u64::MAX));
        }
        for side in &self.sides {
            next = side
                .wake
                .iter()
                .fold(next.min(side.reader.due), |a, b| a.min(*b));
            next = next.min(side.hostile.as_ref().map_or(u64::MAX, |h| h.due));
        }
        if let Some((at, _)) = &self.scenario.change {
            next = next.min(*at);
        }
        for &(from, to) in &self.scenario.outages {
            next = [from, to]
                .into_iter()
                .filter(|t| *t > self.now)
                .fold(next, Nanos::min);
        }
        next
    }

    fn change(&mut self) {
        if let Some((at, link)) = self.scenario.change.take_if(|(at, _)| *at <= self.now) {
            self.params = [Params::down(&link), Params::up(&link)];
            for (link, params) in self.links.iter_mut().zip(&self.params) {
                link.set(at, params.clone());
            }
        }
    }

    fn outages(&mut self) {
        if self.scenario.outages.is_empty() {
            return;
        }
        let dark = self
            .scenario
            .outages
            .iter()
            .any(|o| (o.0..o.1).contains(&self.now));
        for (link, normal) in self.links.iter_mut().zip(&self.params) {
            let mut params = normal.clone();
            if dark {
                params.loss = 1.0;
            }
            link.set(self.now, params);
        }
    }

    fn send(&mut self, from: usize, length: usize) {
        let mut bytes = self.pool.pop().unwrap_or_default();
        bytes.clear();
        bytes.extend_from_slice(&self.buffer[..length]);
        self.links[from].push(
            self.now,
            Packet {
                bytes,
                entered: self.now,
            },
        );
    }

    fn arrivals(&mut self) {
        for from in 0..2 {
            while let Some(packet) = self.links[from].pop(self.now) {
                if from == 0 && packet.bytes.len() > 200 {
                    let p = &self.params[0];
                    let own = p.delay as f64 + packet.link_bytes() as f64 * p.ns_per_byte;
                    let waited = (self.now - packet.entered) as f64 - own;
                    self.queueing.push((waited.max(0.0) / 1000.0) as u32);
                }
                let garble = self.scenario.garbled_one_in;
                if garble != 0 && self.noise.one_in(garble) {
                    let mut copy = packet.bytes.clone();
                    hostile::garble(&mut copy, &mut self.noise);
                    self.arrive(1 - from, &copy);
                }
                self.arrive(1 - from, &packet.bytes);
                if self.pool.len() < 1024 {
                    self.pool.push(packet.bytes);
                }
            }
        }
    }

    fn arrive(&mut self, at: usize, bytes: &[u8]) {
        let clock = self.clock(at);
        let answer = self.sides[at].host.ingress(clock, bytes, &mut self.buffer);
        if let Some(length) = answer {
            self.send(at, length);
        }
    }

    fn applications(&mut self, i: usize) -> Result<(), Failure> {
        let now = self.now;
        let side = &mut self.sides[i];
        if let Some(hostile) = &mut side.hostile
            && hostile.due <= now
        {
            hostile.misuse(&mut side.host, HOSTILE, now);
            side.wake[HOSTILE as usize] = now;
            let token = crate::host::token(HOSTILE, i as u8);
            if let Some(length) = hostile.forge(&side.host, token, &mut self.buffer) {
                let frame = self.buffer[..length].to_vec();
                self.arrive(i, &frame);
            }
        }
        let side = &mut self.sides[i];
        for sid in [HONEST, HOSTILE]
            .into_iter()
            .take(1 + usize::from(side.hostile.is_some()))
        {
            let events = side.host.events(sid);
            if events & intf::VTL_EV_SEND != 0 {
                side.wake[sid as usize] = now;
            }
            if sid == HONEST && events & intf::VTL_EV_RECV != 0 {
                side.reader.wake(now);
            }
        }
        if side.writer.run(&mut side.host, HONEST) {
            side.wake[HONEST as usize] = now;
        }
        if side.reader.due <= now {
            let kick = side
                .reader
                .run(&mut side.host, HONEST, now)
                .map_err(|seq| Failure::WrongData { host: i, seq })?;
            if kick {
                side.host.session_mut(HONEST).rx.ack_now = 1;
                side.wake[HONEST as usize] = now;
            }
        }
        if i == 1 && self.first_megabyte == 0 && self.sides[1].reader.bytes() >= 1_000_000 {
            self.first_megabyte = now;
        }
        Ok(())
    }

    fn pump(&mut self, i: usize) -> Result<(), Failure> {
        for sid in [HONEST, HOSTILE] {
            if self.sides[i].wake[sid as usize] > self.now {
                continue;
            }
            let mut dry = 0;
            loop {
                let clock = self.clock(i);
                let side = &mut self.sides[i];
                let made = side.host.egress(sid, clock, &mut self.buffer);
                if let Some(length) = made {
                    self.send(i, length);
                    continue;
                }
                let wake = self.wake(i, sid);
                let side = &mut self.sides[i];
                side.wake[sid as usize] = wake;
                if side.wake[sid as usize] > self.now {
                    break;
                }
                dry += 1;
                if dry > 100 {
                    return Err(Failure::Spins {
                        at: self.now,
                        state: self.state(),
                    });
                }
            }
        }
        Ok(())
    }

    fn check_progress(&mut self) -> Result<(), Failure> {
        let read = self.sides.iter().map(|s| s.reader.packets()).sum::<u64>()
            + self
                .sides
                .iter()
                .map(|s| s.host.session(HONEST).tx.una)
                .sum::<u64>();
        let dark = self
            .scenario
            .outages
            .iter()
            .any(|o| (o.0..o.1).contains(&self.now));
        if read != self.moved.1 || dark {
            self.moved = (self.now, read);
        }
        if self.now - self.moved.0 > self.scenario.patience {
            return Err(Failure::Stalled {
                since: self.moved.0,
                state: self.state(),
            });
        }
        Ok(())
    }

    /// With every packet acknowledged, the sender must count none as lost or in flight, except
    /// spurious retransmissions.
    fn check_accounts(&self) -> Result<(), Failure> {
        for side in &self.sides {
            let s = side.host.session(HONEST);
            let marked: u32 = s.tx.lost.iter().map(|w| w.count_ones()).sum();
            if s.tx.lost_pending != 0 || marked != 0 || in_flight(s) < 0 {
                return Err(Failure::Leak(self.state()));
            }
        }
        Ok(())
    }

    fn state(&self) -> String {
        let mut out = format!("at {} ms", self.now as f64 / 1e6);
        for side in &self.sides {
            let s = side.host.session(HONEST);
            let (tx, rx) = (&s.tx, &s.rx);
            out += &format!(
                "; una {} next {} limit {} cwnd {} flight {} sent {} retx {} lost {} abandoned {} \
                 pending {} timeouts {} reorder {} srtt {} us gap {} ns mode {} wake {} | cum {} \
                 max {} read {} dups {} bad {} beyond {}",
                tx.una,
                tx.next,
                tx.limit,
                tx.cwnd,
                in_flight(s),
                tx.sent,
                tx.retransmitted,
                tx.lost_total,
                tx.abandoned,
                tx.lost_pending,
                tx.timeouts,
                tx.reorder,
                tx.srtt_us,
                tx.pacing_gap_ns,
                tx.mode,
                side.wake[1],
                rx.cum,
                rx.max,
                rx.consumer,
                rx.dups,
                rx.bad_csum,
                rx.beyond
            );
        }
        out
    }

    fn outcome(mut self) -> Outcome {
        let (now, before) = (self.counts(), &self.measured);
        let span = (self.now - self.scenario.measure_from.min(self.now)).max(1) as f64 / 1e9;
        let share = |a: u64, b: u64| if b == 0 { 0.0 } else { a as f64 / b as f64 };
        self.queueing.sort_unstable();
        let n = self.queueing.len();
        let waited = |percent| {
            let us = self.queueing.get(n * percent / 100);
            us.map_or(0.0, |us| f64::from(*us) * 1000.0)
        };
        Outcome {
            end: self.now,
            packets: [
                self.sides[0].reader.packets(),
                self.sides[1].reader.packets(),
            ],
            goodput: (now.bytes[1] - before.bytes[1]) as f64 * 8.0 / span,
            goodput_up: (now.bytes[0] - before.bytes[0]) as f64 * 8.0 / span,
            retransmitted: share(
                now.retransmitted - before.retransmitted,
                now.sent - before.sent,
            ),
            duplicates: share(now.dups - before.dups, now.sent - before.sent),
            queue_p50: waited(50),
            queue_p95: waited(95),
            first_megabyte: self.first_megabyte,
            losses: self.sides[1].reader.losses().clone(),
            abandoned: self.sides[0].host.session(HONEST).tx.abandoned,
        }
    }
}

/// Parses the VTL packet in a frame.
pub fn packet(frame: &[u8]) -> Result<wire::Packet<'_>, wire::WireError> {
    wire::Packet::parse(&frame[hostile::offset(frame)..])
}
