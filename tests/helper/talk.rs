//! An application with many connections, each of which carries a little in both directions all the time, or
//! nothing.

use std::{
    io::{Read, Write},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// Bytes at a time, and the pause after them.
const PIECE: usize = 200;
const PAUSE: Duration = Duration::from_millis(50);

/// So many connect at a time.
const THREADS: usize = 32;

static IS_OVER: AtomicBool = AtomicBool::new(false);

/// The byte at a place: none looks like its neighbours, or like that of another connection at the same place.
fn byte(seed: u16, at: u64) -> u8 {
    let mixed = (at ^ u64::from(seed) << 32).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed >> 56) as u8
}

/// Sends until it is over.
fn say(mut stream: &TcpStream, seed: u16) {
    let mut at = 0;
    while !IS_OVER.load(Ordering::Relaxed) {
        let piece: Vec<u8> = (at..at + PIECE as u64).map(|at| byte(seed, at)).collect();
        stream.write_all(&piece).expect("it takes everything");
        at += PIECE as u64;
        thread::sleep(PAUSE);
    }
    stream.shutdown(Shutdown::Write).expect("open");
}

/// Reads up to the end. The longest pause between two bytes that came.
fn listen(mut stream: &TcpStream, seed: u16) -> Duration {
    let (mut at, mut longest, mut last) = (0, Duration::ZERO, Instant::now());
    let mut bytes = [0; 4096];
    loop {
        let n = stream.read(&mut bytes).expect("an end in order");
        longest = longest.max(last.elapsed());
        last = Instant::now();
        if n == 0 {
            assert!(IS_OVER.load(Ordering::Relaxed) || at > 0, "nothing came");
            return longest;
        }
        for got in &bytes[..n] {
            assert_eq!(
                *got,
                byte(seed, at),
                "byte {at} of the connection with port {seed}"
            );
            at += 1;
        }
    }
}

fn talk(stream: &TcpStream, ours: u16, theirs: u16) -> Duration {
    thread::scope(|scope| {
        scope.spawn(|| say(stream, ours));
        listen(stream, theirs)
    })
}

/// Holds connections, without a thread for each, until it is over; then each has to carry a byte and back.
fn hold(streams: &[TcpStream]) {
    while !IS_OVER.load(Ordering::Relaxed) {
        thread::sleep(PAUSE);
    }
    for (index, mut stream) in streams.iter().enumerate() {
        stream.write_all(&[index as u8]).expect("it is open");
    }
    for (index, mut stream) in streams.iter().enumerate() {
        let mut bytes = [0];
        assert_eq!(stream.read(&mut bytes).expect("it is open"), 1);
        assert_eq!(bytes, [index as u8]);
    }
}

/// Until its input says something, or ends.
fn await_the_end() {
    let _ = std::io::stdin().read(&mut [0]);
    IS_OVER.store(true, Ordering::Relaxed);
}

/// Says "ready" once it listens, "all" once all connections are there, and the longest pause in milliseconds at the
/// end, which its input's end brings about. Fails if a byte is wrong or missing.
pub(crate) fn run(role: &str, at: &str, count: &str, idle: bool) {
    let (_, max) = getrlimit(Resource::RLIMIT_NOFILE).expect("there is a limit");
    setrlimit(Resource::RLIMIT_NOFILE, max, max).expect("within the limit");
    let at: SocketAddr = at.parse().expect("an address");
    let count: usize = count.parse().expect("a number");
    let mut streams = Vec::new();
    match role {
        "serve" => {
            let listener = TcpListener::bind(at).expect("a port");
            println!("ready");
            while streams.len() < count {
                streams.push(listener.accept().expect("a connection").0);
            }
        }
        _ => {
            println!("ready");
            // Side by side: each takes a round trip.
            let some = |n| {
                (0..n)
                    .map(|_| TcpStream::connect(at).expect("connected"))
                    .collect()
            };
            let all: Vec<Vec<_>> = thread::scope(|scope| {
                let threads = (0..THREADS).map(|i| (count + i) / THREADS);
                let threads: Vec<_> = threads.map(|n| scope.spawn(move || some(n))).collect();
                threads
                    .into_iter()
                    .map(|one| one.join().expect("no error"))
                    .collect()
            });
            streams.extend(all.into_iter().flatten());
        }
    }
    println!("all");
    thread::spawn(await_the_end);
    match (idle, role) {
        (true, "serve") => {
            for mut stream in streams {
                let mut bytes = [0];
                assert_eq!(stream.read(&mut bytes).expect("it is open"), 1);
                stream.write_all(&bytes).expect("it is open");
            }
            println!("0");
        }
        (true, _) => {
            hold(&streams);
            println!("0");
        }
        (false, _) => {
            let each = |stream: &TcpStream| {
                // What the server sees of the client is the client's own address.
                let port = match role {
                    "serve" => stream.peer_addr(),
                    _ => stream.local_addr(),
                };
                let port = port.expect("connected").port();
                match role {
                    "serve" => talk(stream, !port, port),
                    _ => talk(stream, port, !port),
                }
            };
            let longest = thread::scope(|scope| {
                let all: Vec<_> = streams
                    .iter()
                    .map(|s| scope.spawn(move || each(s)))
                    .collect();
                let longest = all.into_iter().map(|one| one.join().expect("no error"));
                longest.max().unwrap_or_default()
            });
            println!("{}", longest.as_millis());
        }
    }
}
