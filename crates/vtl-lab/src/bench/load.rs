//! `vtl bench load`: many TCP connections, opened at a rate or held open. Ordinary sockets on one
//! thread, so that the Hooker can capture them as any program's.
//!
//! A client sends 64 bytes on each connection, must get the same back, and the side that the
//! message's first byte names closes first: where that side is decides who keeps the connection's
//! TIME_WAIT, and so how many there can be in a minute.

use std::{
    collections::{BTreeMap, VecDeque},
    io::{self, ErrorKind, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    os::fd::{AsRawFd, FromRawFd, IntoRawFd},
    time::{Duration, Instant},
};

use clap::Args;
use hdrhistogram::Histogram;
use nix::{
    errno::Errno,
    sys::{
        epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout},
        resource::{Resource, getrlimit, setrlimit},
        socket::{
            self, AddressFamily, Backlog, SockFlag, SockType, SockaddrStorage, setsockopt, sockopt,
        },
    },
};
use serde::Serialize;

/// Bytes that go there and back.
const MESSAGE: usize = 64;
/// The first byte of a message after which the server closes first.
const SERVER_CLOSES: u8 = b's';
/// A connection that has not come to its end by then counts as failed.
const PATIENCE: Duration = Duration::from_secs(10);
/// Connections opened between two looks at those that there are.
const BURST: u64 = 32;
const LISTENER: u64 = u64::MAX;

/// What the client does: the arguments of `vtl bench load connect`.
#[derive(Args, Clone, Copy, Debug)]
pub(crate) struct Load {
    /// Where the server is
    pub(crate) to: SocketAddr,
    /// Connections begun in a second
    #[arg(long, value_name = "N", default_value_t = 1000, value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) rate: u64,
    /// How many in all
    #[arg(long, value_name = "N", default_value_t = 10_000, value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) count: u64,
    /// Begin none while so many wait for their answer or their end, however late that makes it
    #[arg(long, value_name = "N", default_value_t = u64::MAX, hide_default_value = true, value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) at_once: u64,
    /// Keep all open, say `held` and how many, and go on when the input ends
    #[arg(long)]
    pub(crate) hold: bool,
    /// Have the server close first
    #[arg(long)]
    pub(crate) server_closes: bool,
}

/// What became of the connections.
#[derive(Debug, Serialize)]
pub(crate) struct Outcome {
    /// Connections begun.
    pub(crate) begun: u64,
    /// Those that got their bytes back, each time, and came to their end.
    pub(crate) good: u64,
    /// The others, by what went wrong.
    pub(crate) failed: BTreeMap<String, u64>,
    /// From the first connection's beginning to the last one's.
    pub(crate) seconds: f64,
    /// From connect() to the last byte of the answer, µs: the median, the 99th percentile, the most.
    pub(crate) latency_us: [u64; 3],
    /// Open at the same time, at most.
    pub(crate) max_open: u64,
}

/// As many descriptors as are allowed.
fn allow_files() {
    // Who may not have more tries with what there is.
    let _ = getrlimit(Resource::RLIMIT_NOFILE)
        .and_then(|(_, hard)| setrlimit(Resource::RLIMIT_NOFILE, hard, hard));
}

fn tcp(to: SocketAddr) -> nix::Result<TcpStream> {
    let family = if to.is_ipv4() {
        AddressFamily::Inet
    } else {
        AddressFamily::Inet6
    };
    let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
    let socket = socket::socket(family, SockType::Stream, flags, None)?;
    Ok(socket.into())
}

/// Answers on a port until the process is killed.
///
/// # Errors
/// The port cannot be had.
pub(crate) fn serve(port: u16) -> io::Result<()> {
    allow_files();
    let any = SocketAddr::from((std::net::Ipv6Addr::UNSPECIFIED, port));
    let listener = tcp(any)?;
    setsockopt(&listener, sockopt::ReuseAddr, &true)?;
    socket::bind(listener.as_raw_fd(), &SockaddrStorage::from(any))?;
    socket::listen(&listener, Backlog::MAXCONN)?;
    // SAFETY: the descriptor is a listening socket's, and given up here.
    let listener = unsafe { TcpListener::from_raw_fd(listener.into_raw_fd()) };
    let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
    epoll.add(&listener, EpollEvent::new(EpollFlags::EPOLLIN, LISTENER))?;
    println!("ready");
    let mut open: Vec<Option<Served>> = Vec::new();
    let mut free = Vec::new();
    let mut events = [EpollEvent::empty(); 256];
    loop {
        let count = wait(&epoll, &mut events, EpollTimeout::NONE)?;
        for event in &events[..count] {
            if event.data() != LISTENER {
                let index = event.data() as usize;
                if open[index].as_mut().is_some_and(Served::is_over) {
                    open[index] = None;
                    free.push(index);
                }
                continue;
            }
            while let Ok((stream, _)) = listener.accept() {
                stream.set_nonblocking(true)?;
                let index = free.pop().unwrap_or_else(|| {
                    open.push(None);
                    open.len() - 1
                });
                let interest = EpollEvent::new(EpollFlags::EPOLLIN, index as u64);
                epoll.add(&stream, interest)?;
                open[index] = Some(Served {
                    stream,
                    message: [0; MESSAGE],
                    filled: 0,
                });
            }
        }
    }
}

/// A connection at the server.
struct Served {
    stream: TcpStream,
    message: [u8; MESSAGE],
    filled: usize,
}

impl Served {
    /// Reads, and answers a whole message.
    fn is_over(&mut self) -> bool {
        loop {
            match self.stream.read(&mut self.message[self.filled..]) {
                Ok(0) => return true,
                Ok(n) => self.filled += n,
                Err(e) if e.kind() == ErrorKind::WouldBlock => return false,
                Err(_) => return true,
            }
            if self.filled < MESSAGE {
                continue;
            }
            self.filled = 0;
            // So few bytes find room in an empty socket.
            let answered = matches!(self.stream.write(&self.message), Ok(MESSAGE));
            if !answered || self.message[0] == SERVER_CLOSES {
                return true;
            }
        }
    }
}

/// EINTR counts as nothing.
fn wait(epoll: &Epoll, events: &mut [EpollEvent], timeout: EpollTimeout) -> io::Result<usize> {
    match epoll.wait(events, timeout) {
        Err(Errno::EINTR) => Ok(0),
        other => Ok(other?),
    }
}

/// A connection of the client's.
struct Opened {
    stream: TcpStream,
    number: u64,
    began: Instant,
    sent: bool,
    filled: usize,
    answer: [u8; MESSAGE],
    /// The answer has come; what is left is the server's end.
    answered: bool,
    /// Nothing is to happen to it now.
    held: bool,
}

/// What a look at a connection came to.
enum Step {
    Waits,
    Held,
    Done,
}

/// The client's side.
pub(crate) struct Client {
    load: Load,
    epoll: Epoll,
    open: Vec<Option<Opened>>,
    free: Vec<usize>,
    /// Places and numbers in the order of their beginnings.
    due: VecDeque<(usize, u64, Instant)>,
    busy: u64,
    held: Vec<usize>,
    closing: bool,
    latency: Histogram<u64>,
    outcome: Outcome,
}

impl Client {
    /// Opens all connections, and sees each to its end, or, if they are to be held, to its answer.
    ///
    /// # Errors
    /// This process cannot wait for sockets.
    pub(crate) fn run(load: Load) -> io::Result<Self> {
        allow_files();
        // Up to 100 s, three digits; the bounds are valid.
        let latency = Histogram::new_with_bounds(1, 100_000_000, 3).expect("valid bounds");
        let mut client = Self {
            load,
            epoll: Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?,
            open: Vec::new(),
            free: Vec::new(),
            due: VecDeque::new(),
            busy: 0,
            held: Vec::new(),
            closing: false,
            latency,
            outcome: Outcome {
                begun: 0,
                good: 0,
                failed: BTreeMap::new(),
                seconds: 0.0,
                latency_us: [0; 3],
                max_open: 0,
            },
        };
        let start = Instant::now();
        loop {
            let elapsed = start.elapsed();
            let wanted = (elapsed.as_secs_f64() * load.rate as f64) as u64 + 1;
            let late = wanted.min(load.count).saturating_sub(client.outcome.begun);
            let room = load.at_once.saturating_sub(client.busy);
            for _ in 0..late.min(BURST).min(room) {
                client.begin();
                client.outcome.seconds = start.elapsed().as_secs_f64();
            }
            if client.outcome.begun == load.count && client.busy == 0 {
                return Ok(client);
            }
            client.look(late > BURST && room > 0)?;
        }
    }

    /// One more message on each connection that is held; then they end.
    ///
    /// # Errors
    /// This process cannot wait for sockets.
    pub(crate) fn finish(mut self) -> io::Result<Outcome> {
        self.closing = true;
        let held = std::mem::take(&mut self.held);
        for places in held.chunks(BURST as usize) {
            for &place in places {
                if let Some(opened) = &mut self.open[place] {
                    opened.began = Instant::now();
                    opened.number += self.load.count;
                    opened.sent = false;
                    opened.filled = 0;
                    opened.answered = false;
                    opened.held = false;
                    self.due.push_back((place, opened.number, opened.began));
                    self.busy += 1;
                    self.step(place);
                }
            }
            self.look(true)?;
        }
        while self.busy > 0 {
            self.look(false)?;
        }
        let at = |q| self.latency.value_at_quantile(q);
        self.outcome.latency_us = [at(0.5), at(0.99), self.latency.max()];
        Ok(self.outcome)
    }

    /// Those that are held now.
    pub(crate) fn held(&self) -> usize {
        self.held.len()
    }

    fn begin(&mut self) {
        let number = self.outcome.begun;
        self.outcome.begun += 1;
        let began = Instant::now();
        let stream = tcp(self.load.to).and_then(|stream| {
            match socket::connect(stream.as_raw_fd(), &SockaddrStorage::from(self.load.to)) {
                Ok(()) | Err(Errno::EINPROGRESS) => Ok(stream),
                Err(errno) => Err(errno),
            }
        });
        let place = self.free.pop().unwrap_or_else(|| {
            self.open.push(None);
            self.open.len() - 1
        });
        let watched = stream.and_then(|stream| {
            let all = EpollFlags::EPOLLIN | EpollFlags::EPOLLOUT | EpollFlags::EPOLLET;
            self.epoll
                .add(&stream, EpollEvent::new(all, place as u64))?;
            Ok(stream)
        });
        match watched {
            Ok(stream) => {
                self.open[place] = Some(Opened {
                    stream,
                    number,
                    began,
                    sent: false,
                    filled: 0,
                    answer: [0; MESSAGE],
                    answered: false,
                    held: false,
                });
                self.due.push_back((place, number, began));
                self.busy += 1;
                let open = self.busy + self.held.len() as u64;
                self.outcome.max_open = self.outcome.max_open.max(open);
            }
            Err(errno) => {
                self.free.push(place);
                self.fail(&format!("connect: {errno:?}"));
            }
        }
    }

    /// Waits for a millisecond at most, or not at all.
    fn look(&mut self, at_once: bool) -> io::Result<()> {
        let mut events = [EpollEvent::empty(); 256];
        let count = wait(&self.epoll, &mut events, u8::from(!at_once).into())?;
        for event in &events[..count] {
            self.step(event.data() as usize);
        }
        while let Some((place, number, began)) = self.due.front().copied() {
            let is = |o: &&Opened| o.number == number && !o.held;
            let Some(opened) = self.open[place].as_ref().filter(is) else {
                self.due.pop_front();
                continue;
            };
            if began.elapsed() < PATIENCE {
                break;
            }
            self.due.pop_front();
            let what = match (opened.sent, opened.answered) {
                (false, _) => "connect",
                (true, false) => "answer",
                (true, true) => "end",
            };
            self.end(place, Err(format!("{what}: nothing for 10 s")));
        }
        Ok(())
    }

    fn step(&mut self, place: usize) {
        let Some(opened) = self.open[place].as_mut() else {
            return;
        };
        let keep = self.load.hold && !self.closing;
        let first = if self.load.server_closes && !keep {
            SERVER_CLOSES
        } else {
            b'c'
        };
        match opened.step(first, keep) {
            Ok(Step::Waits) => {
                // The message is whole: whatever is left is the end.
                if opened.filled == MESSAGE && !opened.answered {
                    opened.answered = true;
                    let taken = opened.began.elapsed().as_micros() as u64;
                    self.latency.saturating_record(taken);
                }
            }
            Ok(Step::Held) if opened.held => {}
            Ok(Step::Held) => {
                opened.held = true;
                let taken = opened.began.elapsed().as_micros() as u64;
                self.latency.saturating_record(taken);
                self.busy -= 1;
                self.held.push(place);
            }
            Ok(Step::Done) => {
                if !opened.answered {
                    let taken = opened.began.elapsed().as_micros() as u64;
                    self.latency.saturating_record(taken);
                }
                self.end(place, Ok(()));
            }
            Err(what) => self.end(place, Err(what)),
        }
    }

    fn end(&mut self, place: usize, how: Result<(), String>) {
        let ended = self.open[place].take();
        self.free.push(place);
        if ended.is_some_and(|opened| opened.held) {
            self.held.retain(|held| *held != place);
        } else {
            self.busy -= 1;
        }
        match how {
            Ok(()) => self.outcome.good += 1,
            Err(what) => self.fail(&what),
        }
    }

    fn fail(&mut self, what: &str) {
        *self.outcome.failed.entry(what.to_owned()).or_default() += 1;
    }
}

impl Opened {
    /// The message of this connection: its number, so that no two are alike.
    fn message(&self, first: u8) -> [u8; MESSAGE] {
        let mut message = [first; MESSAGE];
        for (byte, number) in message[1..].chunks_exact_mut(8).zip(self.number..) {
            byte.copy_from_slice(&number.to_le_bytes());
        }
        message
    }

    fn step(&mut self, first: u8, keep: bool) -> Result<Step, String> {
        let failed = |what: &str, e: &io::Error| {
            let errno = Errno::from_raw(e.raw_os_error().unwrap_or(0));
            format!("{what}: {errno:?}")
        };
        if !self.sent {
            match self.stream.write(&self.message(first)) {
                Ok(MESSAGE) => self.sent = true,
                Ok(n) => return Err(format!("send: {n} bytes")),
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(Step::Waits),
                Err(e) => return Err(failed("connect", &e)),
            }
        }
        while self.filled < MESSAGE {
            match self.stream.read(&mut self.answer[self.filled..]) {
                Ok(0) => return Err("answer: end of stream".to_owned()),
                Ok(n) => self.filled += n,
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(Step::Waits),
                Err(e) => return Err(failed("answer", &e)),
            }
        }
        if self.answer != self.message(first) {
            return Err("answer: other bytes".to_owned());
        }
        // Of a connection that is held more may come: its end, which must not.
        if !keep && first != SERVER_CLOSES {
            return Ok(Step::Done);
        }
        match self.stream.read(&mut [0]) {
            Ok(0) if !keep => Ok(Step::Done),
            Ok(0) => Err("held: end of stream".to_owned()),
            Ok(_) => Err("end: more bytes".to_owned()),
            Err(e) if e.kind() == ErrorKind::WouldBlock && keep => Ok(Step::Held),
            Err(e) if e.kind() == ErrorKind::WouldBlock => Ok(Step::Waits),
            Err(e) => Err(failed("end", &e)),
        }
    }
}

/// Runs the client as a process: says how it went, as JSON; before that, of connections that are
/// held, `held` and their number, and waits for the end of its input.
///
/// # Errors
/// This process cannot wait for sockets.
pub(crate) fn connect(load: Load) -> io::Result<Outcome> {
    let client = Client::run(load)?;
    if load.hold {
        println!("held {}", client.held());
        io::copy(&mut io::stdin().lock(), &mut io::sink())?;
    }
    client.finish()
}
