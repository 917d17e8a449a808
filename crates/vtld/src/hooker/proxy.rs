//! Plain TCP proxying between pairs of sockets, all on one thread.
//!
//! The two connections of a pair behave as one: an end of stream is forwarded once every byte
//! before it was written, a reset at one side resets the other, and a side that does not read
//! exerts backpressure on the other. Sockets may still be connecting when they are added.

use std::{
    io::{self, ErrorKind, Read, Write},
    net::{Shutdown, TcpStream},
    sync::{
        Arc,
        mpsc::{self, Receiver, Sender, SyncSender, sync_channel},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use nix::sys::{
    epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout},
    eventfd::{EfdFlags, EventFd},
};

use bytes::Bytes;

use super::{ClientAddressGuard, gateway, handover::PairLeft, sock};
use crate::{
    netmon::{MAX_READ, NetMonitor, TcpWatch},
    option::{self, IDLE_AGAIN_S, IDLE_S},
    panics::test_point,
    urgent::{self, Ahead},
};

/// Maximum size of a read, and of a blocked direction's buffer, bytes.
const CHUNK: usize = 64 * 1024;
/// Interval of reading a pair's counters.
const READING: Duration = Duration::from_secs(1);
/// Chunks that one direction may move before other pairs get their turn.
const TURN: usize = 16;
/// Turns after an error: more than a receive buffer (`tcp_rmem`, 6 MiB) holds.
const LAST_TURNS: usize = 16;
const WAKE: u64 = u64::MAX;

/// Guard that lives as long as a pair.
pub(super) type Guard = Option<ClientAddressGuard>;

enum Command {
    Join([(TcpStream, Bytes, bool); 2], Guard),
    Leave(SyncSender<Vec<PairLeft>>),
    Stop,
}

/// Handle of the proxy's thread.
#[derive(Clone)]
pub(super) struct ProxyHandle {
    commands: Sender<Command>,
    wake: Arc<EventFd>,
}

impl ProxyHandle {
    /// Starts to proxy between two streams.
    pub(super) fn join(&self, a: TcpStream, b: TcpStream, guard: Guard) {
        self.resume([a, b].map(|side| (side, Bytes::new(), false)), guard);
    }

    /// The same, after a restart: with the bytes still to be written to each side, and whether they are just the urgent
    /// byte.
    pub(super) fn resume(&self, sides: [(TcpStream, Bytes, bool); 2], guard: Guard) {
        // If the thread has ended, the sockets are dropped, which resets both.
        let _ = self.commands.send(Command::Join(sides, guard));
        let _ = self.wake.write(1);
    }

    /// Ends the thread, and returns its pairs.
    pub(super) fn leave(&self) -> Vec<PairLeft> {
        let (reply, answer) = sync_channel(1);
        let _ = self.commands.send(Command::Leave(reply));
        let _ = self.wake.write(1);
        answer.recv().unwrap_or_default()
    }

    /// Ends the thread, and resets its connections.
    pub(super) fn stop(&self) {
        let _ = self.commands.send(Command::Stop);
        let _ = self.wake.write(1);
    }
}

/// Starts the proxy's thread.
pub(super) fn spawn(monitor: Arc<NetMonitor>) -> io::Result<(ProxyHandle, JoinHandle<()>)> {
    let (commands, inbox) = mpsc::channel();
    let wake = Arc::new(EventFd::from_flags(
        EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC,
    )?);
    let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
    epoll.add(&*wake, EpollEvent::new(EpollFlags::EPOLLIN, WAKE))?;
    let handle = ProxyHandle {
        commands,
        wake: Arc::clone(&wake),
    };
    let mut proxy = Proxy {
        epoll,
        wake,
        inbox,
        pairs: Vec::new(),
        free: Vec::new(),
        rounds: 0,
        readings: Readings::new(monitor),
    };
    let thread = std::thread::Builder::new()
        .name("vtl-proxy".into())
        .spawn(move || proxy.run())?;
    Ok((handle, thread))
}

struct Side {
    stream: TcpStream,
    /// Edge-triggered: true until the kernel says EAGAIN. Not writable before it is connected.
    readable: bool,
    writable: bool,
    /// An end or an error is waiting behind the data: read until it shows.
    ending: bool,
    /// Nothing more will be read from this side.
    ended: bool,
    /// Nothing more will be written to this side.
    shut: bool,
    /// Read from the other side, not yet written to this one: `pending[done..]`.
    pending: Vec<u8>,
    done: usize,
    watch: TcpWatch,
    /// `pending` is just the urgent byte.
    urgent: bool,
}

impl Side {
    fn new((stream, pending, urgent): (TcpStream, Bytes, bool)) -> Self {
        Self {
            stream,
            readable: true,
            writable: false,
            ending: false,
            ended: false,
            shut: false,
            pending: pending.into(),
            done: 0,
            watch: TcpWatch::default(),
            urgent,
        }
    }

    /// Notes the events of epoll. An error ends the pair.
    fn note(&mut self, flags: EpollFlags) -> io::Result<()> {
        if flags.contains(EpollFlags::EPOLLERR) {
            sock::take_error(&self.stream)?;
        }
        let ends = EpollFlags::EPOLLRDHUP | EpollFlags::EPOLLHUP | EpollFlags::EPOLLERR;
        self.ending |= flags.intersects(ends);
        self.readable |= flags.intersects(EpollFlags::EPOLLIN | ends);
        self.writable |= flags.contains(EpollFlags::EPOLLOUT);
        Ok(())
    }

    /// Writes `pending` as far as possible; true if all of it is written.
    fn flush(&mut self) -> io::Result<bool> {
        while self.done < self.pending.len() {
            if !self.writable {
                return Ok(false);
            }
            let written = match self.urgent {
                true => urgent::send(&self.stream, self.pending[self.done]),
                false => self.stream.write(&self.pending[self.done..]),
            };
            match written {
                Ok(n) => self.done += n,
                Err(error) if error.kind() == ErrorKind::WouldBlock => self.writable = false,
                Err(error) if error.kind() == ErrorKind::Interrupted => (),
                Err(error) => return Err(error),
            }
        }
        self.pending = Vec::new();
        self.done = 0;
        self.urgent = false;
        Ok(true)
    }

    /// Writes `data`, and keeps the rest in `pending`.
    fn write(&mut self, data: &[u8]) -> io::Result<()> {
        debug_assert!(self.pending.is_empty());
        let mut done = 0;
        while self.writable && done < data.len() {
            match self.stream.write(&data[done..]) {
                Ok(n) => done += n,
                Err(error) if error.kind() == ErrorKind::WouldBlock => self.writable = false,
                Err(error) if error.kind() == ErrorKind::Interrupted => (),
                Err(error) => return Err(error),
            }
        }
        self.pending = data[done..].to_vec();
        Ok(())
    }
}

struct Pair {
    sides: [Side; 2],
    generation: u32,
    /// When its counters were last read.
    read: Option<Instant>,
    /// Lives as long as the pair.
    guard: Guard,
}

enum Outcome {
    Waits,
    MoreToDo,
    Finished,
}

impl Pair {
    /// Moves bytes from side `from` to the other. True if it stopped for fairness alone.
    fn carry(&mut self, from: usize, scratch: &mut [u8]) -> io::Result<bool> {
        let [a, b] = &mut self.sides;
        let (source, sink) = if from == 0 { (a, b) } else { (b, a) };
        for _ in 0..TURN {
            if !sink.flush()? {
                return Ok(false);
            }
            if source.ended {
                if !sink.shut && sink.writable {
                    sink.shut = true;
                    // All of this direction was written: from here on close in order.
                    sock::abort_on_close(&sink.stream, false)?;
                    match gateway::shut_down(&sink.stream, Shutdown::Write) {
                        // A former daemon has sent the FIN, and the other end its own.
                        Err(error) if error.kind() == ErrorKind::NotConnected => {}
                        said => said?,
                    }
                }
                return Ok(false);
            }
            if !source.readable {
                return Ok(false);
            }
            let read = urgent::ahead(&source.stream).and_then(|ahead| match ahead {
                Ahead::Bytes(_) => Ok((ahead, source.stream.read(scratch)?)),
                Ahead::Urgent => Ok((ahead, source.stream.read(&mut scratch[..1])?)),
                Ahead::End => Ok((ahead, 0)),
            });
            match read {
                Ok((_, 0)) => source.ended = true,
                Ok((Ahead::Urgent, _)) => {
                    sink.pending = vec![scratch[0]];
                    sink.urgent = true;
                }
                Ok((_, n)) => {
                    // After a short read the queue is empty, unless it stopped before an urgent byte, and
                    // more data causes a new edge; but an end that was signalled before causes none.
                    source.readable =
                        n == scratch.len() || source.ending || urgent::is_next(&source.stream);
                    sink.write(&scratch[..n])?;
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => source.readable = false,
                Err(error) if error.kind() == ErrorKind::Interrupted => (),
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    /// Hands on what came before an error, as much as goes without waiting: TCP's reset is behind it.
    fn last_words(&mut self) {
        for side in &mut self.sides {
            // Its events may be still to come.
            (side.readable, side.writable) = (true, true);
            // No end of the other stream is genuine any more: it gets no FIN.
            side.shut = true;
        }
        let mut scratch = vec![0; CHUNK];
        for from in [0, 1] {
            // What one has received is bounded; what still arrives at the other is not.
            for _ in 0..LAST_TURNS {
                if !self.carry(from, &mut scratch).unwrap_or(false) {
                    break;
                }
            }
        }
    }

    fn turn(&mut self, scratch: &mut [u8]) -> io::Result<Outcome> {
        let more = self.carry(0, scratch)? | self.carry(1, scratch)?;
        Ok(match self.sides.iter().all(|side| side.shut) {
            true => Outcome::Finished,
            false if more => Outcome::MoreToDo,
            false => Outcome::Waits,
        })
    }
}

/// Readings of connections for the monitor of paths: at most [`MAX_READ`] pairs a second, each once a second while it
/// moves bytes, and when it ends.
struct Readings {
    monitor: Arc<NetMonitor>,
    /// The current second, and how many pairs were read in it.
    began: Instant,
    count: usize,
}

impl Readings {
    fn new(monitor: Arc<NetMonitor>) -> Self {
        Self {
            monitor,
            began: Instant::now(),
            count: 0,
        }
    }

    fn read(&mut self, pair: &mut Pair, is_last: bool) {
        let now = Instant::now();
        if now.duration_since(self.began) >= READING {
            self.began = now;
            self.count = 0;
        }
        let is_due = pair
            .read
            .is_none_or(|read| now.duration_since(read) >= READING);
        if self.count >= MAX_READ || !(is_due || is_last) {
            return;
        }
        self.count += 1;
        pair.read = Some(now);
        for side in &mut pair.sides {
            side.watch.read(&self.monitor, &side.stream);
        }
    }
}

struct Proxy {
    epoll: Epoll,
    wake: Arc<EventFd>,
    inbox: Receiver<Command>,
    pairs: Vec<Option<Pair>>,
    free: Vec<usize>,
    /// Generation counter: distinguishes pairs that use the same index in turn.
    rounds: u32,
    readings: Readings,
}

/// The pair at an index, unless it is another one by now.
fn live(pairs: &mut [Option<Pair>], index: usize, generation: u32) -> Option<&mut Pair> {
    let pair = pairs.get_mut(index)?.as_mut()?;
    (pair.generation == generation).then_some(pair)
}

impl Proxy {
    fn run(&mut self) {
        let mut events = [EpollEvent::empty(); 256];
        let mut scratch = vec![0; CHUNK];
        // Pairs that stopped for fairness.
        let mut ready: Vec<(usize, u32)> = Vec::new();
        loop {
            let timeout = if ready.is_empty() {
                EpollTimeout::NONE
            } else {
                EpollTimeout::ZERO
            };
            let count = match self.epoll.wait(&mut events, timeout) {
                Ok(count) => count,
                Err(nix::Error::EINTR) => continue,
                Err(error) => {
                    tracing::error!(%error, "proxy: epoll failed: its connections end");
                    return;
                }
            };
            test_point();
            let mut touched = std::mem::take(&mut ready);
            for event in &events[..count] {
                if event.data() == WAKE {
                    if !self.commands(&mut touched) {
                        return;
                    }
                } else if let Some(place) = self.note(event) {
                    touched.push(place);
                }
            }
            for (index, generation) in touched {
                let Some(pair) = live(&mut self.pairs, index, generation) else {
                    continue;
                };
                self.readings.read(pair, false);
                match pair.turn(&mut scratch) {
                    Ok(Outcome::Waits) => (),
                    Ok(Outcome::MoreToDo) => ready.push((index, generation)),
                    Ok(Outcome::Finished) => self.close(index),
                    Err(_) => self.reset(index),
                }
            }
        }
    }

    fn pair(&mut self, index: usize, generation: u32) -> Option<&mut Pair> {
        live(&mut self.pairs, index, generation)
    }

    /// The pair that the event is about, unless it is gone or the event ended it.
    fn note(&mut self, event: &EpollEvent) -> Option<(usize, u32)> {
        let generation = (event.data() >> 32) as u32;
        let index = (event.data() as u32 >> 1) as usize;
        let side = (event.data() & 1) as usize;
        let pair = self.pair(index, generation)?;
        if pair.sides[side].note(event.events()).is_err() {
            self.reset(index);
            return None;
        }
        Some((index, generation))
    }

    fn commands(&mut self, touched: &mut Vec<(usize, u32)>) -> bool {
        let _ = self.wake.read();
        while let Ok(command) = self.inbox.try_recv() {
            match command {
                Command::Stop => return false,
                Command::Leave(reply) => {
                    let _ = reply.send(self.leave());
                    return false;
                }
                Command::Join(sides, guard) => match self.join(sides, guard) {
                    Ok(place) => touched.push(place),
                    Err(error) => tracing::warn!(%error, "proxy: cannot take a connection: closed"),
                },
            }
        }
        true
    }

    fn leave(&mut self) -> Vec<PairLeft> {
        let pairs = self.pairs.drain(..).flatten();
        let left = |pair: Pair| PairLeft {
            shown: pair.guard.as_ref().map(ClientAddressGuard::end),
            sides: pair.sides.map(|mut side| {
                let pending = Bytes::from(side.pending.split_off(side.done));
                (side.stream, pending, side.urgent)
            }),
        };
        pairs.map(left).collect()
    }

    fn join(
        &mut self,
        sides: [(TcpStream, Bytes, bool); 2],
        guard: Guard,
    ) -> io::Result<(usize, u32)> {
        self.rounds = self.rounds.wrapping_add(1) & 0x7fff_ffff;
        let generation = self.rounds;
        let index = self.free.pop().unwrap_or_else(|| {
            self.pairs.push(None);
            self.pairs.len() - 1
        });
        let flags = EpollFlags::EPOLLIN
            | EpollFlags::EPOLLOUT
            | EpollFlags::EPOLLRDHUP
            | EpollFlags::EPOLLET;
        let token = u64::from(generation) << 32 | (index as u64) << 1;
        for (stream, ..) in &sides {
            // The application's own keepalive probes end at vtld.
            option::keep_alive(stream, IDLE_S, IDLE_AGAIN_S);
        }
        let added = self
            .epoll
            .add(&sides[0].0, EpollEvent::new(flags, token))
            .and_then(|()| {
                self.epoll
                    .add(&sides[1].0, EpollEvent::new(flags, token | 1))
            });
        if let Err(errno) = added {
            self.free.push(index);
            return Err(errno.into());
        }
        self.pairs[index] = Some(Pair {
            sides: sides.map(Side::new),
            generation,
            read: None,
            guard,
        });
        Ok((index, generation))
    }

    fn close(&mut self, index: usize) {
        if let Some(mut pair) = self.pairs[index].take() {
            self.readings.read(&mut pair, true);
        }
        self.free.push(index);
    }

    fn reset(&mut self, index: usize) {
        if let Some(pair) = &mut self.pairs[index] {
            pair.last_words();
        }
        for side in self.pairs[index].iter().flat_map(|pair| &pair.sides) {
            // Fails only if there is no connection left to reset.
            let _ = sock::abort_on_close(&side.stream, true);
        }
        self.close(index);
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use nix::sys::socket::{getsockopt, sockopt};
    use vtl_testing::until;

    use super::*;

    /// Both ends of a connection on the loopback.
    fn connection() -> [TcpStream; 2] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (server, _) = listener.accept().unwrap();
        client.set_nonblocking(true).unwrap();
        [client, server]
    }

    #[test]
    fn reset__comes_behind_what_was_sent_before() {
        let (proxy, thread) = spawn(Arc::default()).unwrap();
        for is_first in [false, true] {
            let [near, mut client] = connection();
            let [far, mut server] = connection();
            // A server that answers and closes with unread bytes.
            client.write_all(b"request").unwrap();
            (&far).write_all(b"request").unwrap();
            until("it has come", || server.peek(&mut [0; 7]).unwrap() == 7);
            server.write_all(b"answer").unwrap();
            drop(server);
            match is_first {
                true => proxy.join(far, near, None),
                false => proxy.join(near, far, None),
            }
            let mut got = Vec::new();
            let mut chunk = [0; 64];
            let end = loop {
                match client.read(&mut chunk) {
                    Ok(0) => panic!("an end in order behind {got:?}"),
                    Ok(n) => got.extend_from_slice(&chunk[..n]),
                    Err(error) => break error,
                }
            };
            let reset = ErrorKind::ConnectionReset;
            assert_eq!((&got[..], end.kind()), (&b"answer"[..], reset));
        }
        proxy.stop();
        thread.join().unwrap();
    }

    #[test]
    fn join__pairs_are_probed_while_they_are_idle() {
        let (proxy, thread) = spawn(Arc::default()).unwrap();
        let (own, _ends): (Vec<_>, Vec<_>) = [connection(), connection()]
            .map(|[ours, theirs]| (ours, theirs))
            .into_iter()
            .unzip();
        let sides: Vec<_> = own.iter().map(|side| side.try_clone().unwrap()).collect();
        let [a, b] = <[TcpStream; 2]>::try_from(own).unwrap();
        proxy.join(a, b, None);
        for side in &sides {
            until("keepalive is on", || {
                getsockopt(side, sockopt::KeepAlive).unwrap()
            });
            assert_eq!(getsockopt(side, sockopt::TcpKeepIdle).unwrap(), IDLE_S);
            let interval = getsockopt(side, sockopt::TcpKeepInterval).unwrap();
            assert_eq!(interval, IDLE_AGAIN_S);
        }
        proxy.stop();
        thread.join().unwrap();
    }
}
