//! Helpers of the tests that need a testbed.
#![allow(dead_code, reason = "each test binary uses some of them")]

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::AsRawFd;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use vtl_testbed::{DirectionStats, Host, Lifetime, Link, Testbed};
use vtl_testing::Turn;

/// Waits until no other test has a testbed. `None`, and the test is skipped, without root or one of the tools.
pub(crate) fn turn(tools: &[&str]) -> Option<Turn> {
    if !vtl_testing::is_root() {
        return None;
    }
    let missing = |t: &&&str| Command::new(t).arg("-V").output().is_err();
    if let Some(tool) = tools.iter().find(missing) {
        vtl_testing::skip(&format!("no `{tool}`"));
        return None;
    }
    Some(vtl_testing::turn_alone())
}

/// A testbed.
pub(crate) fn testbed(name: &str, link: &Link) -> Testbed {
    Testbed::up(name, link, Lifetime::Guarded).expect("a testbed")
}

pub(crate) fn median(mut figures: Vec<f64>) -> f64 {
    figures.sort_by(f64::total_cmp);
    figures[figures.len() / 2]
}

/// Asserts that `count` of `packets` is `pct` per cent within five standard errors, which chance exceeds once
/// in 1.7 million times. `variance`: as a multiple of that of independent events.
#[track_caller]
pub(crate) fn within(count: u64, packets: u64, pct: f64, variance: f64) {
    let (p, n) = (pct / 100.0, packets as f64);
    let error = (n * p * (1.0 - p) * variance).sqrt();
    assert!(
        (count as f64 - n * p).abs() <= 5.0 * error,
        "{count} of {packets}, which are not {pct} %: the standard error is {error:.1}"
    );
}

/// Sets an option of the socket level.
pub(crate) fn set_option(socket: &UdpSocket, option: libc::c_int, value: libc::c_int) {
    // SAFETY: `value` is an int that outlives the call, and the length says so.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            option,
            (&raw const value).cast(),
            4,
        )
    };
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
}

/// Raises the calling thread's priority.
fn hurry() {
    // SAFETY: plain system call; 0 is the calling thread.
    unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, -19) };
}

/// Result of a flood.
#[derive(Debug)]
pub(crate) struct Flood {
    pub(crate) sent: u64,
    pub(crate) received: u64,
    /// Rate of 1,500-byte IP packets from the first arrival to the last, Mbit/s.
    pub(crate) mbit: f64,
    /// Time from before the first packet was sent to the last arrival.
    pub(crate) until_last: Duration,
    /// The link's counters during the flood.
    pub(crate) link: DirectionStats,
}

/// Sends UDP packets of 1,500 bytes, headers included, at `mbit` Mbit/s for `time`, and counts arrivals.
pub(crate) fn flood(testbed: &Testbed, from: Host, to: Host, mbit: f64, time: Duration) -> Flood {
    let address: IpAddr = testbed.addr4(to).into();
    let receiver = testbed
        .in_netns(to, || UdpSocket::bind((address, 9)).expect("a free port"))
        .expect("in the namespace");
    let sender = testbed
        .in_netns(from, || UdpSocket::bind("0.0.0.0:0").expect("a free port"))
        .expect("in the namespace");
    // The kernel doubles it: more than any flood sends.
    set_option(&receiver, libc::SO_RCVBUFFORCE, 256 << 20);
    receiver
        .set_read_timeout(Some(Duration::from_millis(100)))
        .expect("a timeout");
    let counters = || {
        let stats = testbed.stats().expect("stats");
        if to == Host::Server {
            stats.up
        } else {
            stats.down
        }
    };
    let before = counters();
    let done = AtomicBool::new(false);
    let target = SocketAddr::new(address, 9);
    let start = Instant::now();
    let (sent, received, first, last) = std::thread::scope(|scope| {
        let counting = scope.spawn(|| {
            hurry();
            let mut buffer = [0; 2048];
            let (mut received, mut first, mut last) = (0u64, None, start);
            loop {
                // Before the socket is read: everything that has arrived by then is counted.
                let over = done.load(Ordering::Acquire);
                match receiver.recv(&mut buffer) {
                    Ok(_) => {
                        received += 1;
                        last = Instant::now();
                        first.get_or_insert(last);
                    }
                    Err(_) if over => break,
                    Err(_) => {}
                }
            }
            (received, first.unwrap_or(last), last)
        });
        let sending = scope.spawn(|| {
            hurry();
            let payload = [0x55; 1472];
            let mut sent = 0u64;
            while start.elapsed() < time {
                let owed = (start.elapsed().as_secs_f64() * mbit * 1e6 / 12_000.0) as u64;
                if owed <= sent {
                    std::thread::sleep(Duration::from_micros(50));
                }
                // After a stall of the machine, do not catch up in one burst.
                let due = owed.saturating_sub(sent).min(20);
                for _ in 0..due {
                    sender.send_to(&payload, target).expect("sent");
                }
                sent += due;
            }
            sent
        });
        let sent = sending.join().expect("the sender");
        settled(sent, &before, counters);
        done.store(true, Ordering::Release);
        let (received, first, last) = counting.join().expect("the receiver");
        (sent, received, first, last)
    });
    let bits = received.saturating_sub(1) as f64 * 12_000.0;
    Flood {
        sent,
        received,
        mbit: bits / (last - first).as_secs_f64() / 1e6,
        until_last: last - start,
        link: since(&counters(), &before),
    }
}

/// Waits until the link has delivered or dropped all `sent` packets.
pub(crate) fn settled(sent: u64, before: &DirectionStats, counters: impl Fn() -> DirectionStats) {
    vtl_testing::until("the link has delivered everything", || {
        let now = counters();
        let seen = since(&now, before);
        seen.rx_packets + seen.host_drops >= sent
            && now.queue_packets == 0
            && now.flying_packets == 0
    });
}

/// Differences of two snapshots of the counters.
pub(crate) fn since(now: &DirectionStats, before: &DirectionStats) -> DirectionStats {
    DirectionStats {
        rx_packets: now.rx_packets - before.rx_packets,
        tx_packets: now.tx_packets - before.tx_packets,
        lost: now.lost - before.lost,
        queue_drops: now.queue_drops - before.queue_drops,
        reordered: now.reordered - before.reordered,
        duplicated: now.duplicated - before.duplicated,
        corrupted: now.corrupted - before.corrupted,
        host_drops: now.host_drops - before.host_drops,
        send_errors: now.send_errors - before.send_errors,
        ..now.clone()
    }
}
