//! The end that asks, receives and measures.

use std::io::{self, BufRead, Read};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use super::conn::{Conn, run_blocking};
use super::graft::Session;
use super::tcp::Tcp;
use super::workload::{Progress, fetch, now_ns, wait_at_gate};
use super::{Order, Outcome, Protocol, READY, Work, aware, own_peak_kb, quic, say, udp};

/// The distance between two samples of the progress.
const SAMPLE: Duration = Duration::from_millis(100);
/// What is fetched from a peer to make it known where the workload is no file, and at most where it is one, bytes.
const GREETING: u64 = 4_096;
const GREETING_MAX: u64 = 1 << 20;
/// How long many connections may take to open.
const OPENING: Duration = Duration::from_secs(60);

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

/// Fetches the file once, or its beginning, and waits until the path is quiet again.
fn warm_up(order: &Order) -> io::Result<Option<quic::Client>> {
    let progress = Progress::new(0);
    progress.open_gate();
    let work = match order.work {
        Work::File(bytes) => Work::File(bytes.min(GREETING_MAX)),
        Work::Upload(bytes) => Work::Upload(bytes.min(GREETING_MAX)),
        _ => Work::File(GREETING),
    };
    let mut ticket = None;
    match &order.protocol {
        Protocol::Tcp(control) => {
            let mut conn = Tcp::connect(order.address, control.as_deref())?;
            run_blocking(fetch(&mut conn, work, &progress))?;
        }
        Protocol::Graft {
            name,
            params,
            sealed,
            daemon,
        } => {
            let mut session = Session::connect(order.address, daemon, name, params, *sealed)?;
            session.fetch(work, order, &progress)?;
        }
        Protocol::Quic(control) => {
            let client = quic::Client::new(order, control)?;
            client.fetch(1, work, &Arc::new(progress))?;
            ticket = Some(client);
        }
        // Its hosts meet as those of TCP do.
        Protocol::LossyTcp => {
            let mut conn = Tcp::connect(order.address, None)?;
            conn.fetch_what_arrives(work, order.limit_s, &progress)?;
        }
        Protocol::Udp | Protocol::Aware { .. } => {}
    }
    thread::sleep(Duration::from_secs_f64(order.rtt_ms * 4e-3));
    Ok(ticket)
}

fn measure(order: &Order, warm: Option<quic::Client>) -> Outcome {
    let (half_at, half_time, limit) = match order.work {
        Work::File(bytes) | Work::Upload(bytes) => (
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
    let progress = Arc::new(Progress::new(half_at));
    // What many streams carry is measured once all of them are open; all else includes set-up.
    let gated = open_end && order.connections > 1;
    if !gated {
        progress.begin();
        progress.open_gate();
    }
    let done = start_work(order.clone(), Arc::clone(&progress), warm);
    if gated {
        let asked = Instant::now();
        while progress.open() < order.connections && asked.elapsed() < OPENING {
            thread::sleep(Duration::from_millis(2));
        }
        progress.open_gate();
    }
    let start = progress.begin();

    let Watched {
        mut samples,
        half,
        result,
    } = watch(&progress, &done, start, limit, half_time);
    let complete = matches!(result, Some(Ok(())));
    let mut error = result.and_then(Result::err);
    let bytes = progress.bytes();
    if gated && progress.open() < order.connections {
        error = Some(io::Error::other("not all connections opened in time"));
    }
    if let Some(why) = progress.failed() {
        error.get_or_insert(io::Error::other(why));
    }
    let cut = !complete && error.is_none() && !open_end;
    if cut {
        progress.record_missing(now_ns());
    }
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
        first_byte_s: (progress.first_s()).filter(|_| !matches!(order.work, Work::Upload(_))),
        half: half.or_else(|| progress.half_s().map(|s| (s, half_at))),
        latency_us: progress.latency_us(),
        samples,
        switches: progress.switches(),
        peak_kb: own_peak_kb(),
        // With its causes: quinn says in them why a connection was lost.
        error: error.map(|e| format!("{:#}", anyhow::Error::from(e))),
    }
}

/// What was seen of a transfer.
struct Watched {
    samples: Vec<(f64, u64)>,
    /// At half of the time: seconds, and bytes by then.
    half: Option<(f64, u64)>,
    /// `None`: the limit came first.
    result: Option<io::Result<()>>,
}

/// Samples the progress until the transfer is done, for `limit` seconds at most. `half_time`: of a stream, seconds.
fn watch(
    progress: &Progress,
    done: &Done,
    start: Instant,
    limit: f64,
    half_time: Option<f64>,
) -> Watched {
    let mut samples = vec![(0.0, 0)];
    let mut half = None;
    let mut result = None;
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
            Ok(ended) => result = Some(ended),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => {
                result = Some(Err(io::Error::other("the receiving thread panicked")));
            }
        }
        if result.is_some() {
            break;
        }
        samples.push((start.elapsed().as_secs_f64(), progress.bytes()));
    }
    Watched {
        samples,
        half,
        result,
    }
}

type Done = mpsc::Receiver<io::Result<()>>;

/// Starts the transfer on threads of its own; the result comes when all connections are through.
fn start_work(order: Order, progress: Arc<Progress>, warm: Option<quic::Client>) -> Done {
    let (tell, done) = mpsc::channel();
    thread::spawn(move || {
        let result = match &order.protocol {
            Protocol::Tcp(control) => each(
                &order,
                &progress,
                || Tcp::connect(order.address, control.as_deref()),
                |conn| run_blocking(fetch(conn, order.work, &progress)),
            ),
            Protocol::Graft {
                name,
                params,
                sealed,
                daemon,
            } => each(
                &order,
                &progress,
                || Session::connect(order.address, daemon, name, params, *sealed),
                |session| session.fetch(order.work, &order, &progress),
            ),
            Protocol::Quic(control) => {
                let client = warm.map_or_else(|| quic::Client::new(&order, control), Ok);
                client.and_then(|c| {
                    let result = c.fetch(order.connections, order.work, &progress);
                    // What is open stays open until the process ends.
                    std::mem::forget(c);
                    result
                })
            }
            Protocol::LossyTcp => {
                let conn = Tcp::connect(order.address, None);
                conn.and_then(|mut c| c.fetch_what_arrives(order.work, order.limit_s, &progress))
            }
            Protocol::Aware { rule, daemon } => aware::fetch(&order, rule, daemon, &progress),
            Protocol::Udp => udp::fetch(&order, &progress),
        };
        let _ = tell.send(result);
    });
    done
}

/// Opens all connections at the same time and fetches on each, on threads of their own.
fn each<C: Conn + Send + 'static>(
    order: &Order,
    progress: &Arc<Progress>,
    connect: impl Fn() -> io::Result<C> + Sync,
    carry: impl Fn(&mut C) -> io::Result<()> + Sync,
) -> io::Result<()> {
    let open = Mutex::new(Vec::new());
    let places = Places::default();
    let one = || -> io::Result<()> {
        let result = places.with(&connect);
        progress.opened(result.as_ref().err());
        let mut conn = result?;
        run_blocking(wait_at_gate(&mut conn, progress));
        let result = carry(&mut conn);
        open.lock()
            .map_err(|_| io::Error::other("a thread panicked"))?
            .push(conn);
        result
    };
    let result = if order.connections == 1 {
        one()
    } else {
        thread::scope(|scope| {
            let one = &one;
            let start = |_| {
                thread::Builder::new()
                    .stack_size(512 * 1024)
                    .spawn_scoped(scope, one)
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

/// Few connections are opened at a time: a daemon has eight places for peers that it does not know
/// yet, and a listener's backlog is not endless either.
#[derive(Default)]
struct Places {
    taken: Mutex<u32>,
    freed: Condvar,
}

impl Places {
    const ALL: u32 = 4;

    fn with<T>(&self, work: impl FnOnce() -> T) -> T {
        if let Ok(taken) = self.taken.lock()
            && let Ok(mut taken) = self.freed.wait_while(taken, |n| *n >= Self::ALL)
        {
            *taken += 1;
        }
        let result = work();
        if let Ok(mut taken) = self.taken.lock() {
            *taken = taken.saturating_sub(1);
        }
        self.freed.notify_one();
        result
    }
}
