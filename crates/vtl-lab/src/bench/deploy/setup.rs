//! Setting up a session, over a link with a delay: daemons that have just started and know nobody,
//! then the same ones again.

use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use vtl::{Listener, Mode, Socket};
use vtl_testbed::{Host, Lifetime, Link, Testbed};

use super::{Order, RATE_MBIT, RTT_MS, Report, ms};
use crate::daemons::{self, Daemons};
use crate::interrupt::Interrupt;
use crate::programs::Programs;
use crate::spread::Spread;

/// To a peer never met, over a graft that both have in the kernel.
pub(super) const COLD: &str = "cold";
/// To a known peer, over a graft that both load for it.
pub(super) const FIRST: &str = "loaded for it";
/// To a known peer, over a graft that both have in the kernel.
pub(super) const KNOWN: &str = "known peer";

/// The graft that is in the kernel when vtld starts.
const READY: &str = "stream";
/// The thesis's grafts.
const OTHERS: [&str; 4] = [
    "canonical",
    "go-back-n",
    "selective-repeat",
    "partial-reliability",
];
const PORT: u16 = 5_202;
/// How long anything may take.
const PATIENCE: Duration = Duration::from_secs(10);
/// Between sessions: vtld makes new rings once it has opened none for a second.
const REST: Duration = Duration::from_millis(1_300);

/// Times of each kind of set-up, milliseconds, in the order of their first one.
type Times = Vec<(String, Vec<f64>)>;

fn note(times: &mut Times, kind: String, time: Duration) {
    match times.iter_mut().find(|(known, _)| *known == kind) {
        Some((_, all)) => all.push(ms(time)),
        None => times.push((kind, vec![ms(time)])),
    }
}

pub(super) fn run(
    order: &Order<'_>,
    chosen: &[&str],
    programs: &Programs,
    name: &str,
    interrupt: &Interrupt,
    say: &mut dyn FnMut(&str),
    report: &mut Report,
) -> anyhow::Result<()> {
    let mut times = Times::new();
    for round in 0..order.sessions {
        interrupt.check()?;
        say(&format!(
            "session set-up, {} of {}",
            round + 1,
            order.sessions
        ));
        let link = Link::new(RTT_MS, RATE_MBIT);
        let testbed = Testbed::up(name, &link, Lifetime::Guarded)?;
        note(&mut times, "TCP: handshake".into(), tcp(&testbed)?);
        vtl(
            &testbed,
            chosen,
            programs,
            order.scratch,
            interrupt,
            &mut times,
        )?;
    }
    let mut sheet = report.sheet("set-up", "ms");
    for (kind, all) in times {
        if let Some(all) = Spread::of(all) {
            for (what, value) in [
                ("median", all.median),
                ("least", all.min),
                ("most", all.max),
            ] {
                sheet.add(kind.clone(), what, value);
            }
        }
    }
    Ok(())
}

/// What TCP takes.
fn tcp(testbed: &Testbed) -> anyhow::Result<Duration> {
    let at = address(testbed);
    let _listener = testbed.in_netns(Host::Server, || TcpListener::bind(at))??;
    let connect = || -> std::io::Result<Duration> {
        let started = Instant::now();
        TcpStream::connect_timeout(&at, PATIENCE)?;
        Ok(started.elapsed())
    };
    // The first packet also waits for the neighbours' addresses.
    testbed.in_netns(Host::Client, connect)??;
    Ok(testbed.in_netns(Host::Client, connect)??)
}

fn address(testbed: &Testbed) -> SocketAddr {
    SocketAddr::new(IpAddr::V4(testbed.addr4(Host::Server)), PORT)
}

/// One pair of daemons, from their start.
fn vtl(
    testbed: &Testbed,
    chosen: &[&str],
    programs: &Programs,
    scratch: &Path,
    interrupt: &Interrupt,
    times: &mut Times,
) -> anyhow::Result<()> {
    let options = daemons::Options::default();
    let daemons = Daemons::start(testbed, programs, &options, scratch, scratch, interrupt)?;
    let mut listener = Listener::bind(PORT, daemons.socket(Host::Server))?;
    let server = thread::spawn(move || {
        // Ends with the daemon.
        while let Ok(mut socket) = listener.accept() {
            socket.set_timeout(Some(PATIENCE));
            while socket.recv_data(&mut [0; 64]).is_ok_and(|n| n > 0) {}
        }
    });
    let at = address(testbed);
    let daemon = daemons.socket(Host::Client);
    let mut session = |graft: &str, kind: &str| -> anyhow::Result<()> {
        interrupt.check()?;
        thread::sleep(REST);
        let took = testbed.in_netns(Host::Client, || open(at, daemon, graft))??;
        note(times, format!("{graft}: {kind}"), took);
        Ok(())
    };
    let mut all = || -> anyhow::Result<()> {
        session(READY, COLD)?;
        session(READY, KNOWN)?;
        for graft in OTHERS.into_iter().filter(|name| chosen.contains(name)) {
            session(graft, FIRST)?;
            session(graft, KNOWN)?;
        }
        Ok(())
    };
    let result = all();
    drop(daemons);
    let _ = server.join();
    result
}

/// From a socket's making until it may send.
fn open(at: SocketAddr, daemon: &Path, graft: &str) -> Result<Duration, vtl::Error> {
    let started = Instant::now();
    let mut socket = Socket::init(Mode::Initiator, at, daemon)?;
    socket.set_timeout(Some(PATIENCE));
    socket.negotiate_over(graft, &[])?;
    let took = started.elapsed();
    // It is a session only if it carries something.
    socket.send_data(&[1])?;
    socket.close()?;
    Ok(took)
}
