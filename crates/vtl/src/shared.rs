//! A socket for several threads.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd},
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use nix::{
    poll::{PollFd, PollFlags},
    sys::{
        epoll::Epoll,
        eventfd::{EfdFlags, EventFd},
    },
};
use vtl_proto::services::Requirements;

use crate::{
    Part, Statistics, Switches,
    socket::{Agreement, Error, Mode, Socket},
    waiting::{Source, WAIT_MS, deadline, epoll, patience, pause, poll, watch},
};

/// A [`Socket`] that several threads may use at once. One thread sends and one receives at a time;
/// others wait for their turn. Data of one thread is contiguous only as far as one call takes it.
///
/// Blocking operations take a time limit: `None` waits without limit; nothing is lost on expiry
/// ([`Error::TimedOut`]); a limit of zero does not block. The descriptor then becomes readable when
/// the operation may succeed, and stays so until it is retried; to give it up, send or receive with
/// an empty buffer.
pub struct Shared {
    /// `None` once closed.
    socket: Mutex<Option<Socket>>,
    /// The socket's descriptor.
    any: Arc<Epoll>,
    /// `any`, or a nudge, for external pollers. Threads waiting in here poll `any` and their own
    /// nudge: they must not wake from a nudge meant for another, which may be pending for long.
    polled: Epoll,
    sending: Direction,
    receiving: Direction,
}

/// State of one direction: sending, or receiving.
struct Direction {
    turns: Mutex<Turns>,
    /// Signalled when the turn is free and somebody waits for it.
    free: Condvar,
    /// The last attempt would have blocked. This and `nudged` change under the socket's lock.
    waiting: AtomicBool,
    /// Whether `nudge` is readable.
    nudged: AtomicBool,
    /// Readable when the other direction took a wake-up that may have been for this one.
    nudge: EventFd,
}

/// Whose turn it is in a direction.
#[derive(Default)]
struct Turns {
    /// A thread has it.
    taken: bool,
    /// Threads that wait for it.
    waiting: usize,
}

impl Direction {
    fn new() -> io::Result<Self> {
        let flags = EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC;
        Ok(Self {
            turns: Mutex::default(),
            free: Condvar::new(),
            waiting: AtomicBool::new(false),
            nudged: AtomicBool::new(false),
            nudge: EventFd::from_flags(flags)?,
        })
    }

    /// Waits for the turn.
    fn enter(&self, end: Option<Instant>) -> Result<Turn<'_>, Error> {
        let mut turns = lock(&self.turns);
        while turns.taken {
            let left = end.map_or(Duration::MAX, |end| {
                end.saturating_duration_since(Instant::now())
            });
            if left.is_zero() {
                return Err(Error::TimedOut);
            }
            turns.waiting += 1;
            let woken = self.free.wait_timeout(turns, left);
            turns = woken.unwrap_or_else(PoisonError::into_inner).0;
            turns.waiting -= 1;
        }
        turns.taken = true;
        Ok(Turn(self))
    }

    fn nudge(&self) {
        if !self.nudged.swap(true, Ordering::Relaxed) {
            let _ = self.nudge.write(1);
        }
    }

    /// Consumes a nudge.
    fn clear(&self) {
        if self.nudged.swap(false, Ordering::Relaxed) {
            let _ = self.nudge.read();
        }
    }
}

/// A thread's turn in a direction; ends on drop.
struct Turn<'a>(&'a Direction);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut turns = lock(&self.0.turns);
        turns.taken = false;
        // A system call, whether anybody waits or not.
        if turns.waiting > 0 {
            self.0.free.notify_one();
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    /// Shares a socket, with a session or without.
    ///
    /// # Errors
    /// Out of file descriptors.
    pub fn new(socket: Socket) -> io::Result<Self> {
        let shared = Self {
            any: socket.any(),
            polled: epoll()?,
            socket: Mutex::new(Some(socket)),
            sending: Direction::new()?,
            receiving: Direction::new()?,
        };
        watch(&shared.polled, &shared.any.0, Source::Any)?;
        for direction in [&shared.sending, &shared.receiving] {
            watch(&shared.polled, &direction.nudge, Source::Any)?;
        }
        Ok(shared)
    }

    /// Repeats `attempt` until it returns a result, in this thread's turn.
    fn operate<T>(
        &self,
        own: &Direction,
        other: &Direction,
        limit: Option<Duration>,
        mut attempt: impl FnMut(&mut Socket) -> Result<Option<T>, Error>,
    ) -> Result<T, Error> {
        let end = deadline(limit);
        let _turn = own.enter(end)?;
        loop {
            {
                let mut socket = lock(&self.socket);
                let socket = socket.as_mut().ok_or(Error::Closed)?;
                own.clear();
                let result = attempt(socket).transpose();
                own.waiting.store(result.is_none(), Ordering::Relaxed);
                // The other direction may not be told of a failure, either.
                let news = socket.took_wakeups() || matches!(result, Some(Err(_)));
                if news && other.waiting.load(Ordering::Relaxed) {
                    other.nudge();
                }
                if let Some(result) = result {
                    return result;
                }
            }
            let max = match patience(end, WAIT_MS) {
                Ok(max) => max,
                Err(error) => {
                    if limit != Some(Duration::ZERO) {
                        let _socket = lock(&self.socket);
                        own.waiting.store(false, Ordering::Relaxed);
                        own.clear();
                    }
                    return Err(error);
                }
            };
            let mut fds = [self.any.0.as_fd(), own.nudge.as_fd()]
                .map(|fd| PollFd::new(fd, PollFlags::POLLIN));
            poll(&mut fds, max)?;
        }
    }

    fn send<T>(
        &self,
        limit: Option<Duration>,
        mut attempt: impl FnMut(&mut Socket) -> Result<Option<T>, Error>,
    ) -> Result<T, Error> {
        self.operate(&self.sending, &self.receiving, limit, |socket| {
            if_ready(socket, &mut attempt)
        })
    }

    fn recv<T>(
        &self,
        limit: Option<Duration>,
        mut attempt: impl FnMut(&mut Socket) -> Result<Option<T>, Error>,
    ) -> Result<T, Error> {
        if limit != Some(Duration::ZERO) {
            let nap = lock(&self.socket).as_mut().and_then(Socket::nap);
            if let Some(nap) = nap {
                std::thread::sleep(nap);
            }
        }
        self.operate(&self.receiving, &self.sending, limit, |socket| {
            if_ready(socket, &mut attempt)
        })
    }

    /// As [`Socket::negotiate`]. After [`Error::TimedOut`], the same attempt goes on.
    ///
    /// # Errors
    /// As [`Socket::negotiate`].
    pub fn negotiate(
        &self,
        requirements: &Requirements,
        limit: Option<Duration>,
    ) -> Result<Agreement, Error> {
        self.operate(&self.sending, &self.receiving, limit, |socket| {
            socket.try_negotiate(requirements)
        })
    }

    /// As [`Socket::set_stateless`].
    pub fn set_stateless(&self, stateless: bool) {
        if let Some(socket) = lock(&self.socket).as_mut() {
            socket.set_stateless(stateless);
        }
    }

    /// As [`Socket::switches`].
    pub fn switches(&self) -> Switches {
        lock(&self.socket)
            .as_ref()
            .map(Socket::switches)
            .unwrap_or_default()
    }

    /// As [`Socket::validate`].
    ///
    /// # Errors
    /// As [`Socket::validate`].
    pub fn validate(&self, limit: Option<Duration>) -> Result<Agreement, Error> {
        self.operate(&self.receiving, &self.sending, limit, Socket::try_validate)
    }

    /// As [`Socket::send_data`].
    ///
    /// # Errors
    /// As [`Socket::send_data`].
    pub fn send_data(&self, data: &[u8], limit: Option<Duration>) -> Result<usize, Error> {
        self.send(limit, |socket| socket.try_send_data(data))
    }

    /// As [`Socket::recv_data`].
    ///
    /// # Errors
    /// As [`Socket::recv_data`].
    pub fn recv_data(&self, buffer: &mut [u8], limit: Option<Duration>) -> Result<usize, Error> {
        self.recv(limit, |socket| socket.try_recv_data(buffer))
    }

    /// As [`Socket::send_message`]. After [`Error::TimedOut`] part of the message may be in flight:
    /// no thread can send anything else until the same message is sent again, and whole.
    ///
    /// # Errors
    /// As [`Socket::send_message`].
    pub fn send_message(&self, message: &[u8], limit: Option<Duration>) -> Result<(), Error> {
        self.send_in_lane(0, message, limit)
    }

    /// As [`Socket::send_in_lane`], and as [`Shared::send_message`].
    ///
    /// # Errors
    /// As [`Socket::send_message`].
    pub fn send_in_lane(
        &self,
        lane: u32,
        message: &[u8],
        limit: Option<Duration>,
    ) -> Result<(), Error> {
        self.send(limit, |socket| {
            Ok(socket.try_send_in_lane(lane, message)?.then_some(()))
        })
    }

    /// As [`Socket::try_send_packets`]; waits for room.
    ///
    /// # Errors
    /// As [`Socket::try_send_packets`].
    pub fn send_packets(
        &self,
        limit: Option<Duration>,
        mut fill: impl FnMut(&mut [u8]) -> usize,
    ) -> Result<usize, Error> {
        self.send(limit, |socket| socket.try_send_packets(&mut fill))
    }

    /// As [`Socket::recv_message`].
    ///
    /// # Errors
    /// As [`Socket::recv_message`].
    pub fn recv_message(&self, buffer: &mut [u8], limit: Option<Duration>) -> Result<usize, Error> {
        self.recv(limit, |socket| socket.try_recv_message(buffer))
    }

    /// As [`Socket::try_recv_messages`]; waits for the first.
    ///
    /// # Errors
    /// As [`Socket::try_recv_messages`].
    pub fn recv_messages(
        &self,
        buffer: &mut [u8],
        max: u64,
        limit: Option<Duration>,
        mut take: impl FnMut(&[u8]),
    ) -> Result<u64, Error> {
        self.recv(limit, |socket| {
            socket.try_recv_messages(buffer, max, &mut take)
        })
    }

    /// As [`Socket::recv_part`].
    ///
    /// # Errors
    /// As [`Socket::recv_part`].
    pub fn recv_part(&self, buffer: &mut [u8], limit: Option<Duration>) -> Result<Part, Error> {
        self.recv(limit, |socket| socket.try_recv_part(buffer))
    }

    /// As [`Socket::close`]. Threads waiting in other operations fail with [`Error::Closed`], as
    /// does every later call. After [`Error::TimedOut`] the socket is still open.
    ///
    /// # Errors
    /// As [`Socket::close`]; the socket is closed nevertheless.
    pub fn close(&self, limit: Option<Duration>) -> Result<(), Error> {
        let end = deadline(limit);
        loop {
            let mut socket = lock(&self.socket);
            let done = match socket.as_mut() {
                Some(socket) => socket.try_close(),
                None => Err(Error::Closed),
            };
            if !matches!(done, Ok(false)) {
                // Under the lock: a waiting thread would find a socket without a session, and open
                // another one.
                self.end(socket);
                return done.map(drop);
            }
            drop(socket);
            pause(end)?;
        }
    }

    /// Aborts the session; the peer is told that data may be missing. The same as dropping the
    /// socket, but for other threads that still use it: they fail with [`Error::Closed`].
    pub fn abort(&self) {
        self.end(lock(&self.socket));
    }

    fn end(&self, mut socket: MutexGuard<'_, Option<Socket>>) {
        let ended = socket.take();
        self.sending.nudge();
        self.receiving.nudge();
        drop(socket);
        drop(ended);
    }

    /// As [`Socket::statistics`].
    ///
    /// # Errors
    /// As [`Socket::statistics`].
    pub fn statistics(&self) -> Result<Statistics, Error> {
        let socket = lock(&self.socket);
        socket.as_ref().ok_or(Error::Closed)?.statistics()
    }

    /// Result of the negotiation, if there is a session.
    pub fn agreement(&self) -> Option<Agreement> {
        lock(&self.socket).as_ref()?.agreement().cloned()
    }

    /// As [`Socket::max_message`].
    pub fn max_message(&self) -> usize {
        lock(&self.socket).as_ref().map_or(0, Socket::max_message)
    }

    /// As [`Socket::max_packet`].
    pub fn max_packet(&self) -> usize {
        lock(&self.socket).as_ref().map_or(0, Socket::max_packet)
    }

    /// As [`Socket::unacknowledged`].
    pub fn unacknowledged(&self) -> u64 {
        lock(&self.socket)
            .as_ref()
            .map_or(0, Socket::unacknowledged)
    }

    /// The socket's role; `None` once closed.
    pub fn mode(&self) -> Option<Mode> {
        lock(&self.socket).as_ref().map(Socket::mode)
    }
}

/// Calls `attempt` if there is a session.
fn if_ready<T>(
    socket: &mut Socket,
    attempt: &mut impl FnMut(&mut Socket) -> Result<Option<T>, Error>,
) -> Result<Option<T>, Error> {
    if socket.try_ready()? {
        attempt(socket)
    } else {
        Ok(None)
    }
}

impl AsFd for Shared {
    /// As that of [`Socket`].
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.polled.0.as_fd()
    }
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Shared").field(&lock(&self.socket)).finish()
    }
}
