//! Shared by the tests that need a testbed.

use std::fs::File;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::AsRawFd;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use nix::fcntl::{Flock, FlockArg};
use vtl_testbed::{Host, Lifetime, Link, Testbed};

/// Leave to measure: one test at a time, over all processes of this machine.
pub(crate) struct Turn(#[allow(dead_code, reason = "held")] Flock<File>);

/// Waits for its turn, or says why a test is skipped. Tests that make testbeds need root and the tools.
pub(crate) fn turn(test: &str, tools: &[&str]) -> Option<Turn> {
    let reason = if !nix::unistd::geteuid().is_root() {
        "not root".to_owned()
    } else {
        let missing = |t: &&&str| Command::new(t).arg("-V").output().is_err();
        match tools.iter().find(missing) {
            Some(tool) => format!("no `{tool}`"),
            None => {
                let file = File::create("/run/vtl-testbed-tests.lock").expect("a lock file");
                return Some(Turn(
                    Flock::lock(file, FlockArg::LockExclusive).expect("a lock"),
                ));
            }
        }
    };
    eprintln!("{test}: skipped: {reason}");
    None
}

/// A testbed that uses the emulator even if the kernel has netem.
pub(crate) fn testbed(name: &str, link: &Link) -> Testbed {
    // SAFETY: every test sets the same value, and nothing in these tests removes it.
    unsafe { std::env::set_var("VTL_TESTBED_BACKEND", "emulator") };
    Testbed::up(name, link, Lifetime::Guarded).expect("a testbed")
}

/// Tries a measurement on a noisy machine three times before it fails.
#[track_caller]
pub(crate) fn within_three_attempts(measure: impl Fn() -> Result<String, String>) {
    let mut failures = Vec::new();
    for _ in 0..3 {
        match measure() {
            Ok(figures) => return eprintln!("{figures}"),
            Err(figures) => failures.push(figures),
        }
    }
    panic!("three attempts: {failures:#?}");
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

/// Puts the calling thread before the machine's other work.
fn hurry() {
    // SAFETY: plain system call; 0 is the calling thread.
    unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, -19) };
}

/// What came out of a flood.
pub(crate) struct Flood {
    pub(crate) sent: u64,
    pub(crate) received: u64,
    /// Of 1,500-byte IP packets, from the first to the last that arrived.
    pub(crate) mbit: f64,
}

/// UDP packets of 1,500 bytes with their headers, at `mbit` for `time`.
pub(crate) fn flood(testbed: &Testbed, from: Host, to: Host, mbit: f64, time: Duration) -> Flood {
    let address: IpAddr = testbed.addr4(to).into();
    let receiver = testbed
        .in_netns(to, || UdpSocket::bind((address, 9)).expect("a free port"))
        .expect("in the namespace");
    let sender = testbed
        .in_netns(from, || UdpSocket::bind("0.0.0.0:0").expect("a free port"))
        .expect("in the namespace");
    set_option(&receiver, libc::SO_RCVBUFFORCE, 64 << 20);
    receiver
        .set_read_timeout(Some(Duration::from_millis(100)))
        .expect("a timeout");
    let done = AtomicBool::new(false);
    let target = SocketAddr::new(address, 9);
    std::thread::scope(|scope| {
        let counting = scope.spawn(|| {
            hurry();
            let mut buffer = [0; 2048];
            let (mut received, mut first, mut last) = (0u64, None, None);
            loop {
                match receiver.recv(&mut buffer) {
                    Ok(_) => {
                        received += 1;
                        let now = Instant::now();
                        first.get_or_insert(now);
                        last = Some(now);
                    }
                    Err(_) if done.load(Ordering::Relaxed) => break,
                    Err(_) => {}
                }
            }
            let span = first.zip(last).map_or(Duration::ZERO, |(f, l)| l - f);
            (received, span)
        });
        let sending = scope.spawn(|| {
            hurry();
            let payload = [0x55; 1472];
            let (start, mut sent) = (Instant::now(), 0u64);
            while start.elapsed() < time {
                let owed = (start.elapsed().as_secs_f64() * mbit * 1e6 / 12_000.0) as u64;
                if owed <= sent {
                    std::thread::sleep(Duration::from_micros(50));
                }
                // A machine that stalled must not catch up in one burst.
                let due = owed.saturating_sub(sent).min(20);
                for _ in 0..due {
                    sender.send_to(&payload, target).expect("sent");
                }
                sent += due;
            }
            sent
        });
        let sent = sending.join().expect("the sender");
        std::thread::sleep(Duration::from_millis(300));
        done.store(true, Ordering::Relaxed);
        let (received, span) = counting.join().expect("the receiver");
        let mbit = (received.saturating_sub(1)) as f64 * 12_000.0 / span.as_secs_f64() / 1e6;
        Flood {
            sent,
            received,
            mbit,
        }
    })
}
