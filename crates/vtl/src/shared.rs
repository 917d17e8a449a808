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
    Part, Statistics,
    socket::{Agreement, Error, Mode, Socket},
    waiting::{Source, WAIT_MS, deadline, epoll, patience, pause, poll, watch},
};

/// A [`Socket`] that several threads may use at once. One of them sends and one receives at a time;
/// others wait for their turn, and what one thread sends in one call stays together only as far as
/// that call takes it.
///
/// Each operation that may wait takes a limit: `None` waits for ever; nothing is lost when it
/// passes ([`Error::TimedOut`]), and a limit of zero never waits. The descriptor then becomes
/// readable when the operation may succeed, and stays so until it is tried again; who has lost
/// interest in it says so by sending, or receiving, nothing.
pub struct Shared {
    /// `None` once it is closed.
    socket: Mutex<Option<Socket>>,
    /// The socket's descriptor.
    any: Arc<Epoll>,
    /// That, or a nudge, for those who poll. Who waits in here must not wake from a nudge that is
    /// for somebody else, and may lie there for long.
    polled: Epoll,
    sending: Direction,
    receiving: Direction,
}

/// Who sends, or who receives.
struct Direction {
    /// Whether somebody has the turn.
    taken: Mutex<bool>,
    /// Somebody has it no more.
    free: Condvar,
    /// Its last attempt found nothing. This and `nudged` change under the socket's lock.
    waiting: AtomicBool,
    /// Whether `nudge` is readable.
    nudged: AtomicBool,
    /// Readable when the other direction took a wake-up that may have been this one's.
    nudge: EventFd,
}

impl Direction {
    fn new() -> io::Result<Self> {
        let flags = EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC;
        Ok(Self {
            taken: Mutex::new(false),
            free: Condvar::new(),
            waiting: AtomicBool::new(false),
            nudged: AtomicBool::new(false),
            nudge: EventFd::from_flags(flags)?,
        })
    }

    /// Waits for the turn.
    fn enter(&self, end: Option<Instant>) -> Result<Turn<'_>, Error> {
        let mut taken = lock(&self.taken);
        while *taken {
            taken = match end {
                None => self
                    .free
                    .wait(taken)
                    .unwrap_or_else(PoisonError::into_inner),
                Some(end) => {
                    let left = end.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return Err(Error::TimedOut);
                    }
                    let woken = self.free.wait_timeout(taken, left);
                    woken.unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
        *taken = true;
        Ok(Turn(self))
    }

    fn nudge(&self) {
        if !self.nudged.swap(true, Ordering::Relaxed) {
            let _ = self.nudge.write(1);
        }
    }

    /// Takes note of a nudge.
    fn clear(&self) {
        if self.nudged.swap(false, Ordering::Relaxed) {
            let _ = self.nudge.read();
        }
    }
}

/// The turn of one thread in a direction.
struct Turn<'a>(&'a Direction);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        *lock(&self.0.taken) = false;
        self.0.free.notify_one();
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

    /// Does what `attempt` does, once it succeeds.
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
                // Of a failure, too, the other one may not be told.
                let news = socket.took_wakeups() || matches!(result, Some(Err(_)));
                if news && other.waiting.load(Ordering::Relaxed) {
                    other.nudge();
                }
                if let Some(result) = result {
                    return result;
                }
            }
            let most = match patience(end, WAIT_MS) {
                Ok(most) => most,
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
            poll(&mut fds, most)?;
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

    /// As [`Socket::send_message`]. After [`Error::TimedOut`] part of the message may be under way:
    /// nobody else can send until it was sent again, and whole.
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

    /// As [`Socket::recv_message`].
    ///
    /// # Errors
    /// As [`Socket::recv_message`].
    pub fn recv_message(&self, buffer: &mut [u8], limit: Option<Duration>) -> Result<usize, Error> {
        self.recv(limit, |socket| socket.try_recv_message(buffer))
    }

    /// As [`Socket::recv_part`].
    ///
    /// # Errors
    /// As [`Socket::recv_part`].
    pub fn recv_part(&self, buffer: &mut [u8], limit: Option<Duration>) -> Result<Part, Error> {
        self.recv(limit, |socket| socket.try_recv_part(buffer))
    }

    /// As [`Socket::close`]; threads that wait for something else fail with [`Error::Closed`], as
    /// does everything after it. After [`Error::TimedOut`] the socket is still open.
    ///
    /// # Errors
    /// As [`Socket::close`]; then the socket is closed all the same.
    pub fn close(&self, limit: Option<Duration>) -> Result<(), Error> {
        let end = deadline(limit);
        loop {
            let mut socket = lock(&self.socket);
            let done = match socket.as_mut() {
                Some(socket) => socket.try_close(),
                None => Err(Error::Closed),
            };
            if !matches!(done, Ok(false)) {
                // In one go: who waits would find a socket without a session, and open another one.
                self.end(socket);
                return done.map(drop);
            }
            drop(socket);
            pause(end)?;
        }
    }

    /// Ends the session at once; the peer is told that data may be missing. The same as dropping
    /// the socket, except that other threads may still be using it: they fail with
    /// [`Error::Closed`].
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

    /// What was negotiated, if there is a session.
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

    /// What the socket was made for; `None` once it is closed.
    pub fn mode(&self) -> Option<Mode> {
        lock(&self.socket).as_ref().map(Socket::mode)
    }
}

/// Attempts it once there is a session.
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
