//! A socket for several threads.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, TryLockError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, poll},
    sys::{
        epoll::Epoll,
        eventfd::{EfdFlags, EventFd},
    },
};
use vtl_proto::services::Requirements;

use crate::{
    Statistics,
    socket::{Agreement, Error, Mode, NUDGE, Socket, patience, watch},
};

/// The longest that a lost wake-up can cost, ms.
const WAIT_MS: u16 = 200;
/// How often close looks whether everything has arrived.
const CLOSE: Duration = Duration::from_millis(1);

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
    any: Arc<Epoll>,
    sending: Direction,
    receiving: Direction,
}

/// Who sends, or who receives.
struct Direction {
    turn: Mutex<()>,
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
            turn: Mutex::new(()),
            waiting: AtomicBool::new(false),
            nudged: AtomicBool::new(false),
            nudge: EventFd::from_flags(flags)?,
        })
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
            socket: Mutex::new(Some(socket)),
            sending: Direction::new()?,
            receiving: Direction::new()?,
        };
        for direction in [&shared.sending, &shared.receiving] {
            watch(&shared.any, direction.nudge.as_fd(), NUDGE)?;
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
        let end = limit.map(|limit| Instant::now() + limit);
        let _turn = match own.turn.try_lock() {
            Err(TryLockError::WouldBlock) if limit == Some(Duration::ZERO) => {
                return Err(Error::TimedOut);
            }
            Err(TryLockError::WouldBlock) => lock(&own.turn),
            Err(TryLockError::Poisoned(turn)) => turn.into_inner(),
            Ok(turn) => turn,
        };
        loop {
            {
                let mut socket = lock(&self.socket);
                let socket = socket.as_mut().ok_or(Error::Closed)?;
                own.clear();
                let result = attempt(socket).transpose();
                own.waiting.store(result.is_none(), Ordering::Relaxed);
                if socket.took_wakeups() && other.waiting.load(Ordering::Relaxed) {
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
            let mut events = [self.any.0.as_fd(), own.nudge.as_fd()]
                .map(|fd| PollFd::new(fd, PollFlags::POLLIN));
            match poll(&mut events, most) {
                Ok(_) | Err(Errno::EINTR) => {}
                Err(error) => return Err(io::Error::from(error).into()),
            }
        }
    }

    fn send<T>(
        &self,
        limit: Option<Duration>,
        mut attempt: impl FnMut(&mut Socket) -> Result<Option<T>, Error>,
    ) -> Result<T, Error> {
        let attempt = |socket: &mut Socket| {
            if socket.try_ready()? {
                attempt(socket)
            } else {
                Ok(None)
            }
        };
        self.operate(&self.sending, &self.receiving, limit, attempt)
    }

    fn recv<T>(
        &self,
        limit: Option<Duration>,
        mut attempt: impl FnMut(&mut Socket) -> Result<Option<T>, Error>,
    ) -> Result<T, Error> {
        let attempt = |socket: &mut Socket| {
            if socket.try_ready()? {
                attempt(socket)
            } else {
                Ok(None)
            }
        };
        if limit != Some(Duration::ZERO) {
            let nap = lock(&self.socket).as_mut().and_then(Socket::nap);
            if let Some(nap) = nap {
                std::thread::sleep(nap);
            }
        }
        self.operate(&self.receiving, &self.sending, limit, attempt)
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
        self.operate(&self.receiving, &self.sending, limit, |socket| {
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

    /// As [`Socket::send_message`].
    ///
    /// # Errors
    /// As [`Socket::send_message`].
    pub fn send_message(&self, message: &[u8], limit: Option<Duration>) -> Result<(), Error> {
        self.send(limit, |socket| {
            Ok(socket.try_send_message(message)?.then_some(()))
        })
    }

    /// As [`Socket::recv_message`].
    ///
    /// # Errors
    /// As [`Socket::recv_message`].
    pub fn recv_message(&self, buffer: &mut [u8], limit: Option<Duration>) -> Result<usize, Error> {
        self.recv(limit, |socket| socket.try_recv_message(buffer))
    }

    /// As [`Socket::close`]; threads that wait for something else fail with [`Error::Closed`], as
    /// does everything after it. After [`Error::TimedOut`] the socket is still open.
    ///
    /// # Errors
    /// As [`Socket::close`]; then the socket is closed all the same.
    pub fn close(&self, limit: Option<Duration>) -> Result<(), Error> {
        let end = limit.map(|limit| Instant::now() + limit);
        loop {
            let done = match lock(&self.socket).as_mut() {
                Some(socket) => socket.try_close(),
                None => Err(Error::Closed),
            };
            match done {
                Ok(false) => {}
                Ok(true) => {
                    self.abort();
                    return Ok(());
                }
                Err(error) => {
                    self.abort();
                    return Err(error);
                }
            }
            patience(end, WAIT_MS)?;
            std::thread::sleep(end.map_or(CLOSE, |end| {
                CLOSE.min(end.saturating_duration_since(Instant::now()))
            }));
        }
    }

    /// Ends the session at once; the peer is told that data may be missing. The same as dropping
    /// the socket, except that other threads may still be using it: they fail with
    /// [`Error::Closed`].
    pub fn abort(&self) {
        lock(&self.socket).take();
        self.sending.nudge();
        self.receiving.nudge();
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

impl AsFd for Shared {
    /// As that of [`Socket`].
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.any.0.as_fd()
    }
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Shared").field(&lock(&self.socket)).finish()
    }
}
