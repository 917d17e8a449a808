//! The end that asks, receives and measures.

use std::io::{self, BufRead, Read};
use std::net::SocketAddr;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use super::conn::{Conn, run_blocking};
use super::graft::Session;
use super::tcp::Tcp;
use super::workload::{Progress, fetch};
use super::{Order, Outcome, Over, READY, Work, own_peak_kb, quic, say, udp};

/// The distance between two samples of the progress.
const SAMPLE: Duration = Duration::from_millis(100);
/// What is fetched from a peer to make it known, bytes.
const GREETING: u64 = 4_096;

pub(super) fn run(order: &Order) -> anyhow::Result<()> {
    let warm = if order.known { warm_up(order)? } else { None };
    say(&READY)?;
    let mut line = String::new();
    if io::stdin().lock().read_line(&mut line)? == 0 {
        return Ok(());
    }
    thread::sleep(Duration::from_secs_f64(order.delay_s));
    let outcome = measure(order, warm);
    say(&outcome)?;
    // The connections, which belong to threads, end with the process.
    let _ = io::stdin().lock().read_to_end(&mut Vec::new());
    std::process::exit(0);
}

/// Fetches a little, and waits until the path is quiet again.
fn warm_up(order: &Order) -> io::Result<Option<quic::Client>> {
    let progress = Progress::new(Instant::now(), 0);
    let work = Work::File(GREETING);
    let mut ticket = None;
    match &order.over {
        Over::Tcp(control) => {
            let mut conn = Tcp::connect(order.address, control.as_deref())?;
            run_blocking(fetch(&mut conn, work, &progress))?;
        }
        Over::Graft { name, daemon } => {
            let mut conn = Session::connect(greeting_port(order), daemon, name)?;
            run_blocking(fetch(&mut conn, work, &progress))?;
        }
        Over::Quic(control) => {
            let client = quic::Client::new(order, control)?;
            client.fetch(1, work, &Arc::new(progress))?;
            ticket = Some(client);
        }
        Over::Udp => {}
    }
    thread::sleep(Duration::from_secs_f64(order.rtt_ms * 4e-3));
    Ok(ticket)
}

/// Where the greeting's session goes.
pub(super) fn greeting_port(order: &Order) -> SocketAddr {
    let mut to = order.address;
    to.set_port(to.port() + order.connections as u16);
    to
}

fn measure(order: &Order, warm: Option<quic::Client>) -> Outcome {
    let start = Instant::now();
    let (half_at, half_time, limit) = match order.work {
        Work::File(bytes) => (
            bytes * u64::from(order.connections) / 2,
            None,
            order.limit_s,
        ),
        Work::Messages { .. } => (0, None, order.limit_s),
        Work::Stream { millis, .. } => {
            let seconds = millis as f64 / 1e3;
            (0, Some(seconds / 2.0), order.limit_s.min(seconds))
        }
    };
    // A stream without a rate ends by the clock; everything else by its last byte.
    let open_end = matches!(order.work, Work::Stream { rate_kbit: 0, .. });
    let limit = if open_end { limit } else { order.limit_s };
    let progress = Arc::new(Progress::new(start, half_at));
    let done = start_work(order.clone(), Arc::clone(&progress), warm);

    let mut samples = vec![(0.0, 0)];
    let mut half = None;
    let mut error = None;
    let mut complete = false;
    loop {
        let elapsed = start.elapsed().as_secs_f64();
        if elapsed >= limit {
            break;
        }
        let mut wait = SAMPLE.as_secs_f64().min(limit - elapsed);
        if let Some(at) = half_time.filter(|_| half.is_none()) {
            if elapsed >= at {
                half = Some((elapsed, progress.bytes()));
            } else {
                wait = wait.min(at - elapsed);
            }
        }
        match done.recv_timeout(Duration::from_secs_f64(wait)) {
            Ok(result) => {
                complete = result.is_ok();
                error = result.err();
                break;
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => {
                error = Some(io::Error::other("the receiving thread panicked"));
                break;
            }
        }
        samples.push((start.elapsed().as_secs_f64(), progress.bytes()));
    }
    let bytes = progress.bytes();
    let cut = !complete && error.is_none() && !open_end;
    let seconds = match progress.last_s() {
        Some(last) if complete => last,
        _ => start.elapsed().as_secs_f64(),
    };
    samples.push((seconds, bytes));
    Outcome {
        bytes,
        wrong: progress.wrong(),
        complete: complete || (open_end && error.is_none()),
        cut,
        seconds,
        first_byte_s: progress.first_s(),
        half: half.or_else(|| progress.half_s().map(|s| (s, half_at))),
        latency_us: progress.latency_us(),
        samples,
        peak_kb: own_peak_kb(),
        error: error.map(|e| e.to_string()),
    }
}

type Done = mpsc::Receiver<io::Result<()>>;

/// Starts the transfer on threads of its own; the result comes when all connections are through.
fn start_work(order: Order, progress: Arc<Progress>, warm: Option<quic::Client>) -> Done {
    let (tell, done) = mpsc::channel();
    thread::spawn(move || {
        let result = match &order.over {
            Over::Tcp(control) => each(&order, &progress, |_| {
                Tcp::connect(order.address, control.as_deref())
            }),
            Over::Graft { name, daemon } => each(&order, &progress, |index| {
                let mut to = order.address;
                to.set_port(to.port() + index as u16);
                Session::connect(to, daemon, name)
            }),
            Over::Quic(control) => {
                let client = warm.map_or_else(|| quic::Client::new(&order, control), Ok);
                client.and_then(|c| {
                    let result = c.fetch(order.connections, order.work, &progress);
                    // What is open stays open until the process ends.
                    std::mem::forget(c);
                    result
                })
            }
            Over::Udp => udp::fetch(&order, &progress),
        };
        let _ = tell.send(result);
    });
    done
}

/// Opens all connections at the same time and fetches on each, on threads of their own.
fn each<C: Conn + Send + 'static>(
    order: &Order,
    progress: &Arc<Progress>,
    connect: impl Fn(u32) -> io::Result<C> + Sync,
) -> io::Result<()> {
    let open = Mutex::new(Vec::new());
    let one = |index| -> io::Result<()> {
        let mut conn = connect(index)?;
        let result = run_blocking(fetch(&mut conn, order.work, progress));
        open.lock()
            .map_err(|_| io::Error::other("a thread panicked"))?
            .push(conn);
        result
    };
    let result = if order.connections == 1 {
        one(0)
    } else {
        thread::scope(|scope| {
            let one = &one;
            let start = |index| {
                thread::Builder::new()
                    .stack_size(512 * 1024)
                    .spawn_scoped(scope, move || one(index))
            };
            let threads: Vec<_> = (0..order.connections).map(start).collect();
            let mut result = Ok(());
            for thread in threads {
                let one = thread.and_then(|t| {
                    t.join()
                        .unwrap_or_else(|_| Err(io::Error::other("a thread panicked")))
                });
                result = result.and(one);
            }
            result
        })
    };
    // What is open stays open until the process ends.
    std::mem::forget(open);
    result
}
