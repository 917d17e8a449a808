//! What both ends do on a connection, whatever carries it.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use nix::time::{ClockId, clock_gettime};

use super::Work;
use super::conn::Conn;
use crate::payload::{self, CHUNK, Checker};

/// A request is five numbers of eight bytes: the kind, and what belongs to it.
pub(super) const REQUEST: usize = 40;
/// The first bytes of a stream at a rate: when it began, in nanoseconds of the monotonic clock,
/// which both ends share.
const STAMP: usize = 8;
/// What the server says of an upload: the bytes that were wrong.
const VERDICT: usize = 8;
/// The distance of the blocks of a stream at a rate, and the least that is sent at a time.
const INTERVAL: Duration = Duration::from_millis(1);
const BLOCK_MIN: u64 = 1_200;
/// How often connections look whether they may begin.
const GATE: Duration = Duration::from_millis(2);

impl Work {
    /// As a request.
    pub(super) fn encode(self) -> [u8; REQUEST] {
        let numbers: [u64; 5] = match self {
            Self::File(bytes) => [1, bytes, 0, 0, 0],
            Self::Messages {
                request,
                response,
                count,
            } => [2, request.into(), response.into(), count.into(), 0],
            Self::Stream { rate_kbit, millis } => [3, rate_kbit, millis, 0, 0],
            Self::Upload(bytes) => [4, bytes, 0, 0, 0],
        };
        let mut bytes = [0; REQUEST];
        for (to, number) in bytes.chunks_exact_mut(8).zip(numbers) {
            to.copy_from_slice(&number.to_le_bytes());
        }
        bytes
    }

    pub(super) fn decode(bytes: &[u8; REQUEST]) -> io::Result<Self> {
        let mut numbers = [0; 5];
        for (number, from) in numbers.iter_mut().zip(bytes.chunks_exact(8)) {
            *number = u64::from_le_bytes(from.try_into().map_err(io::Error::other)?);
        }
        let small = |n: u64| u32::try_from(n).map_err(io::Error::other);
        let [kind, a, b, c, _] = numbers;
        match kind {
            1 => Ok(Self::File(a)),
            2 => Ok(Self::Messages {
                request: small(a)?,
                response: small(b)?,
                count: small(c)?,
            }),
            3 => Ok(Self::Stream {
                rate_kbit: a,
                millis: b,
            }),
            4 => Ok(Self::Upload(a)),
            _ => Err(io::Error::other("not a request")),
        }
    }
}

/// Nanoseconds of the clock that both ends share.
pub(super) fn now_ns() -> u64 {
    clock_gettime(ClockId::CLOCK_MONOTONIC).map_or(0, |t| {
        t.tv_sec() as u64 * 1_000_000_000 + t.tv_nsec() as u64
    })
}

/// Bytes and distance of the blocks of a stream.
fn blocks(rate_kbit: u64) -> (u64, Duration) {
    let per_interval = rate_kbit * 1000 / 8 * INTERVAL.as_micros() as u64 / 1_000_000;
    let bytes = per_interval.max(BLOCK_MIN);
    let nanos = bytes * 8 * 1_000_000 / rate_kbit.max(1);
    (bytes, Duration::from_nanos(nanos))
}

/// What has not arrived yet of a stream at a rate, in nanoseconds of the clock that both ends share.
#[derive(Clone, Copy, Debug)]
pub(super) struct Expected {
    /// When the next block was due.
    next: u64,
    /// When the one behind the last would be.
    end: u64,
    /// From one to the next.
    distance: u64,
}

/// How far a transfer has come, seen by the thread that times it. All connections add to it.
pub(super) struct Progress {
    start: OnceLock<Instant>,
    /// Connections that are open, or never will be.
    opened: AtomicU32,
    failed: Mutex<Option<String>>,
    gate: AtomicBool,
    /// The bytes of all connections at which the time is taken; 0 if half-way is a time.
    half_at: u64,
    bytes: AtomicU64,
    wrong: AtomicU64,
    first_ns: AtomicU64,
    half_ns: AtomicU64,
    last_ns: AtomicU64,
    /// When another graft took over, seconds.
    switches: Mutex<Vec<f64>>,
    latency: Mutex<Histogram<u64>>,
    expected: Mutex<Option<Expected>>,
}

impl Progress {
    pub(super) fn new(half_at: u64) -> Self {
        // Up to 100 s in µs, three digits; the bounds are valid.
        let latency = Histogram::new_with_bounds(1, 100_000_000_000, 3).expect("valid bounds");
        Self {
            start: OnceLock::new(),
            opened: 0.into(),
            failed: Mutex::default(),
            gate: false.into(),
            half_at,
            bytes: 0.into(),
            wrong: 0.into(),
            first_ns: 0.into(),
            half_ns: 0.into(),
            last_ns: 0.into(),
            switches: Mutex::default(),
            latency: Mutex::new(latency),
            expected: Mutex::default(),
        }
    }

    /// Notes what of a stream is yet to come.
    pub(super) fn expect(&self, expected: Expected) {
        if let Ok(mut place) = self.expected.lock() {
            *place = Some(expected);
        }
    }

    /// Of a stream that is cut: the blocks that were due and have not arrived are as late as they are now, and later.
    pub(super) fn record_missing(&self, now_ns: u64) {
        let expected = self.expected.lock().ok().and_then(|mut place| place.take());
        let Some(Expected {
            mut next,
            end,
            distance,
        }) = expected
        else {
            return;
        };
        while next < end.min(now_ns) {
            self.record(now_ns - next);
            next += distance.max(1);
        }
    }

    /// Starts the clock.
    pub(super) fn begin(&self) -> Instant {
        *self.start.get_or_init(Instant::now)
    }

    /// Lets connections that wait at the gate begin.
    pub(super) fn open_gate(&self) {
        self.gate.store(true, Ordering::Release);
    }

    /// Whether they may.
    pub(super) fn gate_is_open(&self) -> bool {
        self.gate.load(Ordering::Acquire)
    }

    /// Counts a connection that has been opened, or could not be.
    pub(super) fn opened(&self, error: Option<&io::Error>) {
        if let (Some(error), Ok(mut failed)) = (error, self.failed.lock()) {
            failed.get_or_insert(error.to_string());
        }
        self.opened.fetch_add(1, Ordering::Relaxed);
    }

    /// How many those are.
    pub(super) fn open(&self) -> u32 {
        self.opened.load(Ordering::Relaxed)
    }

    /// Why one could not be opened, if so.
    pub(super) fn failed(&self) -> Option<String> {
        self.failed.lock().ok().and_then(|failed| failed.clone())
    }

    /// Counts bytes that have just arrived and been checked.
    pub(super) fn add(&self, bytes: u64, wrong: u64) {
        let now = (self.begin().elapsed().as_nanos() as u64).max(1);
        let before = self.bytes.fetch_add(bytes, Ordering::Relaxed);
        if before == 0 {
            self.first_ns.store(now, Ordering::Relaxed);
        }
        if self.half_at > 0 && before < self.half_at && before + bytes >= self.half_at {
            self.half_ns.store(now, Ordering::Relaxed);
        }
        if wrong > 0 {
            self.wrong.fetch_add(wrong, Ordering::Relaxed);
        }
        self.last_ns.fetch_max(now, Ordering::Relaxed);
    }

    /// Notes that another graft takes over.
    pub(super) fn note_switch(&self) {
        let now = self.begin().elapsed().as_secs_f64();
        if let Ok(mut switches) = self.switches.lock() {
            switches.push(now);
        }
    }

    /// When that happened.
    pub(super) fn switches(&self) -> Vec<f64> {
        self.switches.lock().map(|s| s.clone()).unwrap_or_default()
    }

    /// Records a message's latency.
    pub(super) fn record(&self, nanos: u64) {
        if let Ok(mut histogram) = self.latency.lock() {
            histogram.saturating_record(nanos.max(1));
        }
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    pub(super) fn wrong(&self) -> u64 {
        self.wrong.load(Ordering::Relaxed)
    }

    fn seconds(counter: &AtomicU64) -> Option<f64> {
        let nanos = counter.load(Ordering::Relaxed);
        (nanos > 0).then(|| nanos as f64 / 1e9)
    }

    pub(super) fn first_s(&self) -> Option<f64> {
        Self::seconds(&self.first_ns)
    }

    pub(super) fn half_s(&self) -> Option<f64> {
        Self::seconds(&self.half_ns)
    }

    pub(super) fn last_s(&self) -> Option<f64> {
        Self::seconds(&self.last_ns)
    }

    /// Microseconds at the 50th, 99th and 99.9th percentile, if there were messages.
    pub(super) fn latency_us(&self) -> Option<[f64; 3]> {
        let histogram = self.latency.lock().ok()?;
        let at = |q| histogram.value_at_quantile(q) as f64 / 1e3;
        (!histogram.is_empty()).then(|| [at(0.5), at(0.99), at(0.999)])
    }
}

/// Waits until all connections are open, if it is told to.
pub(super) async fn wait_at_gate<C: Conn>(conn: &mut C, progress: &Progress) {
    while !progress.gate_is_open() {
        conn.pause(GATE).await;
    }
}

/// The client's part: asks, receives, checks.
pub(super) async fn fetch<C: Conn>(
    conn: &mut C,
    work: Work,
    progress: &Progress,
) -> io::Result<()> {
    conn.send(&work.encode()).await?;
    match work {
        Work::File(bytes) => receive(conn, bytes, progress).await,
        Work::Upload(bytes) => upload(conn, bytes, progress).await,
        Work::Messages {
            request,
            response,
            count,
        } => exchange(conn, [request, response, count], progress).await,
        Work::Stream {
            rate_kbit: 0,
            millis: _,
        } => receive(conn, u64::MAX, progress).await,
        Work::Stream { rate_kbit, millis } => follow(conn, rate_kbit, millis, progress).await,
    }
}

async fn receive<C: Conn>(conn: &mut C, bytes: u64, progress: &Progress) -> io::Result<()> {
    let mut checker = Checker::default();
    while checker.bytes() < bytes {
        let wrong = checker.wrong();
        let n = conn.receive(|data| checker.check(data)).await?;
        if n == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        progress.add(n as u64, checker.wrong() - wrong);
    }
    if checker.bytes() > bytes {
        return Err(io::Error::other("more came than was asked for"));
    }
    Ok(())
}

/// Sends, and waits until the server says how many of the bytes were wrong.
async fn upload<C: Conn>(conn: &mut C, bytes: u64, progress: &Progress) -> io::Result<()> {
    let mut offset = 0;
    while offset < bytes {
        let data = payload::at(offset, bytes - offset);
        conn.send(data).await?;
        offset += data.len() as u64;
        progress.add(data.len() as u64, 0);
    }
    let mut said = Vec::new();
    if !fill(conn, &mut said, VERDICT).await? {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let wrong = said[..VERDICT].try_into().map_err(io::Error::other)?;
    progress.add(0, u64::from_le_bytes(wrong));
    Ok(())
}

async fn exchange<C: Conn>(
    conn: &mut C,
    [request, response, count]: [u32; 3],
    progress: &Progress,
) -> io::Result<()> {
    let question = payload::at(0, CHUNK as u64);
    for _ in 0..count {
        let start = Instant::now();
        send_payload(conn, request.into(), question).await?;
        let mut checker = Checker::default();
        while checker.bytes() < response.into() {
            if conn.receive(|data| checker.check(data)).await? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
        progress.record(start.elapsed().as_nanos() as u64);
        progress.add(checker.bytes(), checker.wrong());
    }
    Ok(())
}

async fn send_payload<C: Conn>(conn: &mut C, bytes: u64, first: &[u8]) -> io::Result<()> {
    if bytes <= first.len() as u64 {
        return conn.send(&first[..bytes as usize]).await;
    }
    let mut offset = 0;
    while offset < bytes {
        let data = payload::at(offset, bytes - offset);
        conn.send(data).await?;
        offset += data.len() as u64;
    }
    Ok(())
}

/// A stream at a rate: each block's latency is from when it was due at the sender.
async fn follow<C: Conn>(
    conn: &mut C,
    rate_kbit: u64,
    millis: u64,
    progress: &Progress,
) -> io::Result<()> {
    let (block, distance) = blocks(rate_kbit);
    let total = Duration::from_millis(millis).as_nanos() / distance.as_nanos().max(1);
    let mut stamp = Vec::with_capacity(STAMP);
    let mut checker = Checker::default();
    let mut arrived = 0;
    while arrived < total as u64 {
        let (before, wrong) = (checker.bytes(), checker.wrong());
        let n = conn
            .receive(|data| {
                let (head, rest) = data.split_at((STAMP - stamp.len()).min(data.len()));
                stamp.extend_from_slice(head);
                checker.check(rest);
            })
            .await?;
        if n == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let Ok(began) = <[u8; STAMP]>::try_from(&stamp[..]).map(u64::from_le_bytes) else {
            continue;
        };
        while arrived < checker.bytes() / block {
            let due = began + arrived * distance.as_nanos() as u64;
            progress.record(now_ns().saturating_sub(due));
            arrived += 1;
        }
        progress.add(checker.bytes() - before, checker.wrong() - wrong);
        progress.expect(Expected {
            next: began + arrived * distance.as_nanos() as u64,
            end: began + total as u64 * distance.as_nanos() as u64,
            distance: distance.as_nanos() as u64,
        });
    }
    Ok(())
}

/// The server's part: answers requests until the peer goes.
pub(super) async fn serve<C: Conn>(conn: &mut C) -> io::Result<()> {
    let mut inbox = Vec::new();
    while answer(conn, &mut inbox).await? {}
    Ok(())
}

/// Answers one request.
pub(super) async fn serve_one<C: Conn>(conn: &mut C) -> io::Result<()> {
    answer(conn, &mut Vec::new()).await.map(drop)
}

/// Answers the next request, if there is one.
async fn answer<C: Conn>(conn: &mut C, inbox: &mut Vec<u8>) -> io::Result<bool> {
    if !fill(conn, inbox, REQUEST).await? {
        return Ok(false);
    }
    let request: [u8; REQUEST] = inbox[..REQUEST].try_into().map_err(io::Error::other)?;
    inbox.drain(..REQUEST);
    match Work::decode(&request)? {
        Work::File(bytes) => send_payload(conn, bytes, &[]).await?,
        Work::Upload(bytes) => {
            let mut checker = Checker::default();
            checker.check(inbox);
            inbox.clear();
            while checker.bytes() < bytes {
                if conn.receive(|data| checker.check(data)).await? == 0 {
                    return Ok(false);
                }
            }
            conn.send(&checker.wrong().to_le_bytes()).await?;
        }
        Work::Messages {
            request,
            response,
            count,
        } => {
            let answer = payload::at(0, CHUNK as u64);
            for _ in 0..count {
                if !fill(conn, inbox, request as usize).await? {
                    return Ok(false);
                }
                inbox.drain(..request as usize);
                send_payload(conn, response.into(), answer).await?;
            }
        }
        // The client ends it.
        Work::Stream { rate_kbit: 0, .. } => send_payload(conn, u64::MAX, &[]).await?,
        Work::Stream { rate_kbit, millis } => pace(conn, rate_kbit, millis).await?,
    }
    Ok(true)
}

/// Waits until so many bytes are there; false at the end.
async fn fill<C: Conn>(conn: &mut C, inbox: &mut Vec<u8>, bytes: usize) -> io::Result<bool> {
    while inbox.len() < bytes {
        if conn.receive(|data| inbox.extend_from_slice(data)).await? == 0 {
            return Ok(false);
        }
    }
    Ok(true)
}

async fn pace<C: Conn>(conn: &mut C, rate_kbit: u64, millis: u64) -> io::Result<()> {
    let (block, distance) = blocks(rate_kbit);
    let total = (Duration::from_millis(millis).as_nanos() / distance.as_nanos().max(1)) as u64;
    let began = now_ns();
    conn.send(&began.to_le_bytes()).await?;
    let mut offset = 0;
    for number in 0..total {
        let due = began + number * distance.as_nanos() as u64;
        let early = due.saturating_sub(now_ns());
        if early > 0 {
            conn.pause(Duration::from_nanos(early)).await;
        }
        let end = offset + block;
        while offset < end {
            let data = payload::at(offset, end - offset);
            conn.send(data).await?;
            offset += data.len() as u64;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work__encode_and_decode() {
        for work in [
            Work::File(7),
            Work::Upload(8),
            Work::Messages {
                request: 64,
                response: 65,
                count: 66,
            },
            Work::Stream {
                rate_kbit: 5_000,
                millis: 9,
            },
        ] {
            let back = Work::decode(&work.encode()).expect("valid");
            assert_eq!(format!("{back:?}"), format!("{work:?}"));
        }
        assert!(Work::decode(&[0xff; REQUEST]).is_err());
    }

    #[test]
    fn record_missing__what_was_due_and_no_more() {
        let progress = Progress::new(0);
        progress.expect(Expected {
            next: 1_000_000,
            end: 9_000_000,
            distance: 1_000_000,
        });
        progress.record_missing(4_500_000);
        // 3.5, 2.5, 1.5 and 0.5 ms late; nothing twice.
        progress.record_missing(4_500_000);
        let [p50, _, max] = progress.latency_us().expect("recorded");
        assert!((p50 - 1_500.0).abs() < 10.0 && (max - 3_500.0).abs() < 10.0);
    }

    #[test]
    fn blocks__keep_the_rate() {
        for rate_kbit in [64, 1_000, 20_000, 10_000_000] {
            let (bytes, distance) = blocks(rate_kbit);
            let rate = bytes as f64 * 8.0 / distance.as_secs_f64() / 1e3;
            assert!((rate / rate_kbit as f64 - 1.0).abs() < 1e-3, "{rate}");
        }
    }
}
