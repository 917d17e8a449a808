//! An aware application that follows the path: its session goes by one graft, and has it succeeded by another one while
//! the path fulfils a condition (thesis, section 3.3.2). The sender decides, by its own session's round-trip time.

use std::io;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use vtl::{Agreement, Error, Mode, Socket};
use vtl_core::netmon::Metrics;
use vtl_core::reconfigure::{Condition, Engine, Plan};
use vtl_proto::carrier::GraftSpec;

use super::workload::Progress;
use super::{ASK_EVERY, Order, QUESTION, Work};
use crate::bench::plan::Rule;
use crate::payload::{self, Checker};

/// How often the sender looks at the round-trip time.
const LOOK: Duration = Duration::from_millis(50);
/// How long what decides stays at least; as in the rule of the unmodified program.
const DWELL: Duration = Duration::from_secs(1);
/// How long the sender waits while enough is under way.
const PAUSE: Duration = Duration::from_millis(1);
/// The largest packet of any path, bytes.
const PACKET: usize = 2_048;
/// The window of grafts that have one, packets, if the rule names none.
const WINDOW: u32 = 16;

fn negotiate(socket: &mut Socket, graft: &GraftSpec) -> Result<Agreement, Error> {
    let params: Vec<_> = graft.params.iter().map(|(n, v)| (n.as_str(), *v)).collect();
    socket.negotiate_over(&graft.name, &params)
}

/// The client's part: asks for bytes, and counts what comes in messages of one packet until the server has closed.
pub(super) fn fetch(
    order: &Order,
    rule: &Rule,
    daemon: &Path,
    progress: &Progress,
) -> io::Result<()> {
    let Work::File(bytes) = order.work else {
        return Err(io::Error::other("it carries files only"));
    };
    let begun = Instant::now();
    let mut socket = Socket::init(Mode::Initiator, order.address, daemon)?;
    let mut graft = negotiate(&mut socket, &rule.own)?.graft;
    socket.send_message(&bytes.to_le_bytes())?;
    socket.set_timeout(Some(ASK_EVERY));
    let mut buffer = vec![0; PACKET];
    loop {
        match socket.recv_message(&mut buffer) {
            Ok(0) => return Ok(()),
            Ok(n) => {
                // Every message is the payload from its beginning.
                let mut checker = Checker::default();
                checker.check(&buffer[..n]);
                progress.add(n as u64, checker.wrong());
            }
            Err(Error::TimedOut) if begun.elapsed().as_secs_f64() < order.limit_s => {}
            Err(error) => return Err(error.into()),
        }
        if let Some(now) = socket.agreement().filter(|now| now.graft != graft) {
            graft.clone_from(&now.graft);
            progress.note_switch();
        }
    }
}

/// The server's part: sends what is asked for, over the graft that the rule says.
pub(super) fn serve(mut socket: Socket, rule: &Rule) -> io::Result<()> {
    let mut question = [0; QUESTION];
    socket.recv_message(&mut question)?;
    let bytes = u64::from_le_bytes(question);
    let mut path = Follower::new(rule)?;
    let mut sent = 0;
    while sent < bytes {
        path.follow(&mut socket, rule)?;
        // Little is written ahead of the network: it would have to get there by the former graft first.
        if socket.unacknowledged() >= path.ahead(rule) {
            thread::sleep(PAUSE);
            continue;
        }
        let max = socket.max_packet() as u64;
        let message = payload::at(0, max.min(bytes - sent));
        socket.send_message(message)?;
        sent += message.len() as u64;
    }
    Ok(socket.close()?)
}

/// What the sender knows of the path.
struct Follower {
    engine: Engine,
    begun: Instant,
    looked: Instant,
}

impl Follower {
    fn new(rule: &Rule) -> io::Result<Self> {
        let condition: Condition = rule.condition.parse().map_err(io::Error::other)?;
        let plan = Plan {
            conditions: vec![condition],
            dwell: DWELL,
        };
        let now = Instant::now();
        Ok(Self {
            engine: Engine::new(plan),
            begun: now,
            looked: now,
        })
    }

    fn graft<'a>(&self, rule: &'a Rule) -> &'a GraftSpec {
        match self.engine.made() {
            Some(_) => &rule.then,
            None => &rule.own,
        }
    }

    /// How many packets may be under way: twice the window.
    fn ahead(&self, rule: &Rule) -> u64 {
        let window = self.graft(rule).params.get("window");
        2 * u64::from(*window.unwrap_or(&WINDOW))
    }

    /// Looks at the path if it is time to, and has the session succeeded if the condition has begun or ended to hold.
    fn follow(&mut self, socket: &mut Socket, rule: &Rule) -> io::Result<()> {
        if self.looked.elapsed() < LOOK {
            return Ok(());
        }
        self.looked = Instant::now();
        let rtt_ms = socket.statistics()?.rtt_ms;
        let metrics = Metrics {
            rtt: (rtt_ms > 0.0).then(|| Duration::from_secs_f64(rtt_ms / 1e3)),
            ..Metrics::default()
        };
        let now_ns = |begun: Instant| begun.elapsed().as_nanos() as u64;
        let Some(switch) = self.engine.sample(now_ns(self.begun), Some(&metrics)) else {
            return Ok(());
        };
        let graft = if switch.to.is_some() {
            &rule.then
        } else {
            &rule.own
        };
        match negotiate(socket, graft) {
            Ok(_) => self.engine.succeeded(),
            Err(error) => {
                eprintln!("no succession over {graft}: {error}");
                self.engine.failed(now_ns(self.begun));
            }
        }
        Ok(())
    }
}
