//! Sockets and listeners for tokio. Nothing here blocks outside the runtime, with three exceptions
//! of about 0.1 ms each (10 s if the daemon hangs), which are requests to it: making a socket or a listener; ending or
//! succeeding a session; statistics.
//!
//! Every future is safe to cancel, with two exceptions: dropping a future that opens a session ends
//! that session; after dropping one that sends a message of several packets, the same message must
//! be sent again before anything else.

use std::{
    future::poll_fn,
    io,
    net::SocketAddr,
    os::fd::{AsFd, OwnedFd},
    path::Path,
    pin::Pin,
    sync::{Arc, Mutex, PoisonError},
    task::{Context, Poll, Wake, Waker, ready},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncWrite, Interest, ReadBuf, unix::AsyncFd},
    task::coop::poll_proceed,
    time::{Sleep, sleep},
};

use crate::{Agreement, Error, Mode, Part, Requirements, Statistics, Switches};

/// Minimum and maximum polling interval of close, for delivery.
const CLOSE: [Duration; 2] = [Duration::from_millis(1), Duration::from_millis(20)];

/// What a task waits for.
#[derive(Clone, Copy)]
enum Direction {
    Send = 0,
    Receive = 1,
}

/// Wakers by direction. Both share one descriptor, and a check in one direction consumes the
/// other's events: so a wake-up wakes both.
#[derive(Default)]
struct Waiting([Mutex<Option<Waker>>; 2]);

impl Waiting {
    fn register(&self, direction: Direction, waker: &Waker) {
        let mut place = self.place(direction);
        match &mut *place {
            Some(present) => present.clone_from(waker),
            empty => *empty = Some(waker.clone()),
        }
    }

    fn wake_one(&self, direction: Direction) {
        let waker = self.place(direction).take();
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    fn place(&self, direction: Direction) -> std::sync::MutexGuard<'_, Option<Waker>> {
        self.0[direction as usize]
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

impl Wake for Waiting {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.wake_one(Direction::Send);
        self.wake_one(Direction::Receive);
    }
}

/// A descriptor that the runtime watches for two waiters.
struct Watched {
    fd: AsyncFd<OwnedFd>,
    waiting: Arc<Waiting>,
    both: Waker,
}

impl Watched {
    fn new(fd: &impl AsFd) -> io::Result<Self> {
        let waiting = Arc::new(Waiting::default());
        let fd = fd.as_fd().try_clone_to_owned()?;
        // SAFETY: an owned descriptor stays open, and the same one, as long as it lives.
        let fd = unsafe { AsyncFd::register_with_interest(fd, Interest::READABLE) }?;
        Ok(Self {
            fd,
            both: Waker::from(Arc::clone(&waiting)),
            waiting,
        })
    }

    /// Polls for readability. `Ready`: it was readable; retry the operation.
    fn poll(&self) -> Poll<io::Result<()>> {
        let mut guard = ready!(
            self.fd
                .poll_read_ready(&mut Context::from_waker(&self.both))
        )?;
        guard.clear_ready();
        Poll::Ready(Ok(()))
    }
}

/// A session for tokio: [`crate::Socket`] with the same operations.
///
/// [`AsyncRead`] and [`AsyncWrite`] read and write it as a stream; `tokio::io::split` makes two
/// halves for two tasks. Half-close does not exist: `shutdown` waits until the peer has everything
/// and ends the session, as [`Socket::close`] does. Dropping the socket aborts the session: the
/// peer is told that data may be missing.
pub struct Socket {
    socket: crate::Socket,
    watched: Watched,
    closing: Option<(Pin<Box<Sleep>>, Duration)>,
}

impl Socket {
    /// Opens a session with the peer and VTL port `to`, through the daemon at `daemon`.
    ///
    /// # Errors
    /// As [`crate::Socket::init`] and [`crate::Socket::negotiate`].
    pub async fn connect(
        to: SocketAddr,
        requirements: &Requirements,
        daemon: &Path,
    ) -> Result<Self, Error> {
        let mut socket = Self::new(crate::Socket::init(Mode::Initiator, to, daemon)?)?;
        poll_fn(|cx| {
            socket.poll_with(cx, Direction::Receive, |socket| {
                socket.try_negotiate(requirements)
            })
        })
        .await?;
        Ok(socket)
    }

    /// Waits until a peer opens a session with this responder, as [`crate::Socket::validate`].
    ///
    /// # Errors
    /// As [`crate::Socket::validate`].
    pub async fn validate(&mut self) -> Result<Agreement, Error> {
        poll_fn(|cx| self.poll_with(cx, Direction::Receive, crate::Socket::try_validate)).await
    }

    /// Requests the succession of this session, as [`crate::Socket::negotiate`]. Dropping the
    /// future does not revoke the request: it takes effect with a later call.
    ///
    /// # Errors
    /// As [`crate::Socket::negotiate`].
    pub async fn negotiate(&mut self, requirements: &Requirements) -> Result<Agreement, Error> {
        poll_fn(|cx| {
            self.poll_with(cx, Direction::Send, |socket| {
                socket.try_negotiate(requirements)
            })
        })
        .await
    }

    /// As [`crate::Socket::set_stateless`].
    pub fn set_stateless(&mut self, stateless: bool) {
        self.socket.set_stateless(stateless);
    }

    /// As [`crate::Socket::switches`].
    pub fn switches(&self) -> Switches {
        self.socket.switches()
    }

    /// Registers a socket, with a session or without, with the runtime.
    ///
    /// # Errors
    /// Out of file descriptors.
    ///
    /// # Panics
    /// Outside of a tokio runtime with I/O.
    pub fn new(socket: crate::Socket) -> io::Result<Self> {
        Ok(Self {
            watched: Watched::new(&socket)?,
            socket,
            closing: None,
        })
    }

    fn poll_with<T>(
        &mut self,
        cx: &mut Context<'_>,
        direction: Direction,
        mut attempt: impl FnMut(&mut crate::Socket) -> Result<Option<T>, Error>,
    ) -> Poll<Result<T, Error>> {
        // A task that is never kept waiting yields to others at times, as with tokio's own sockets.
        let budget = ready!(poll_proceed(cx));
        let waiting = &self.watched.waiting;
        // Register before the check, or a wake-up in between would be lost.
        waiting.register(direction, cx.waker());
        loop {
            let result = attempt(&mut self.socket);
            if self.socket.took_wakeups() {
                waiting.wake_one(match direction {
                    Direction::Send => Direction::Receive,
                    Direction::Receive => Direction::Send,
                });
            }
            match result.transpose() {
                Some(result) => {
                    budget.made_progress();
                    return Poll::Ready(result);
                }
                None => ready!(self.watched.poll())?,
            }
        }
    }

    /// Sends a message, as [`crate::Socket::send_message`].
    ///
    /// # Errors
    /// As [`crate::Socket::send_message`].
    pub async fn send_message(&mut self, message: &[u8]) -> Result<(), Error> {
        poll_fn(|cx| self.poll_send_in_lane(cx, 0, message)).await
    }

    /// Sends a message in a lane, as [`crate::Socket::send_in_lane`].
    ///
    /// # Errors
    /// As [`crate::Socket::send_message`].
    pub async fn send_in_lane(&mut self, lane: u32, message: &[u8]) -> Result<(), Error> {
        poll_fn(|cx| self.poll_send_in_lane(cx, lane, message)).await
    }

    /// Poll variant of [`Socket::send_in_lane`].
    pub fn poll_send_in_lane(
        &mut self,
        cx: &mut Context<'_>,
        lane: u32,
        message: &[u8],
    ) -> Poll<Result<(), Error>> {
        self.poll_with(cx, Direction::Send, |socket| {
            Ok(socket.try_send_in_lane(lane, message)?.then_some(()))
        })
    }

    /// Reads a message, as [`crate::Socket::recv_message`]; 0 at the end.
    ///
    /// # Errors
    /// As [`crate::Socket::recv_message`].
    pub async fn recv_message(&mut self, buffer: &mut [u8]) -> Result<usize, Error> {
        poll_fn(|cx| self.poll_recv_message(cx, buffer)).await
    }

    /// Poll variant of [`Socket::recv_message`].
    pub fn poll_recv_message(
        &mut self,
        cx: &mut Context<'_>,
        buffer: &mut [u8],
    ) -> Poll<Result<usize, Error>> {
        self.poll_with(cx, Direction::Receive, |socket| {
            socket.try_recv_message(buffer)
        })
    }

    /// Reads a part of a message, as [`crate::Socket::recv_part`].
    ///
    /// # Errors
    /// As [`crate::Socket::recv_part`].
    pub async fn recv_part(&mut self, buffer: &mut [u8]) -> Result<Part, Error> {
        poll_fn(|cx| self.poll_recv_part(cx, buffer)).await
    }

    /// Poll variant of [`Socket::recv_part`].
    pub fn poll_recv_part(
        &mut self,
        cx: &mut Context<'_>,
        buffer: &mut [u8],
    ) -> Poll<Result<Part, Error>> {
        self.poll_with(cx, Direction::Receive, |socket| {
            socket.try_recv_part(buffer)
        })
    }

    /// Waits until the peer has everything, and ends the session, as [`crate::Socket::close`].
    ///
    /// # Errors
    /// As [`crate::Socket::close`].
    pub async fn close(mut self) -> Result<(), Error> {
        poll_fn(|cx| self.poll_close(cx)).await
    }

    fn poll_close(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Error>> {
        let [first, max] = CLOSE;
        while !self.socket.try_close()? {
            // Delivery causes no wake-up: poll.
            let (timer, pause) = self
                .closing
                .get_or_insert_with(|| (Box::pin(sleep(first)), first));
            ready!(timer.as_mut().poll(cx));
            let pause = (*pause * 2).min(max);
            self.closing = Some((Box::pin(sleep(pause)), pause));
        }
        Poll::Ready(Ok(()))
    }

    /// As [`crate::Socket::max_message`].
    pub fn max_message(&self) -> usize {
        self.socket.max_message()
    }

    /// As [`crate::Socket::max_packet`].
    pub fn max_packet(&self) -> usize {
        self.socket.max_packet()
    }

    /// Result of the negotiation.
    pub fn agreement(&self) -> Option<&Agreement> {
        self.socket.agreement()
    }

    /// As [`crate::Socket::statistics`].
    ///
    /// # Errors
    /// As [`crate::Socket::statistics`].
    pub fn statistics(&self) -> Result<Statistics, Error> {
        self.socket.statistics()
    }
}

impl AsyncRead for Socket {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let place = buffer.initialize_unfilled();
        let read = self
            .get_mut()
            .poll_with(cx, Direction::Receive, |socket| socket.try_recv_data(place));
        let read = ready!(read)?;
        buffer.advance(read);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Socket {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        data: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.get_mut()
            .poll_with(cx, Direction::Send, |socket| socket.try_send_data(data))
            .map_err(io::Error::from)
    }

    /// Sending starts at once; there is nothing to flush.
    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.get_mut().poll_close(cx).map_err(io::Error::from)
    }
}

impl std::fmt::Debug for Socket {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.socket.fmt(f)
    }
}

/// Accepts many sessions at a port, for tokio: [`crate::Listener`].
pub struct Listener {
    listener: crate::Listener,
    watched: Watched,
}

impl Listener {
    /// Binds a port, as [`crate::Listener::bind`].
    ///
    /// # Errors
    /// As [`crate::Listener::bind`].
    ///
    /// # Panics
    /// Outside of a tokio runtime with I/O.
    pub fn bind(port: u16, daemon: &Path) -> Result<Self, Error> {
        let listener = crate::Listener::bind(port, daemon)?;
        Ok(Self {
            watched: Watched::new(&listener)?,
            listener,
        })
    }

    /// Waits for the next session.
    ///
    /// # Errors
    /// The daemon has gone.
    pub async fn accept(&mut self) -> Result<Socket, Error> {
        poll_fn(|cx| self.poll_accept(cx)).await
    }

    /// Poll variant of [`Listener::accept`].
    pub fn poll_accept(&mut self, cx: &mut Context<'_>) -> Poll<Result<Socket, Error>> {
        self.watched
            .waiting
            .register(Direction::Receive, cx.waker());
        loop {
            if let Some(socket) = self.listener.try_accept()? {
                return Poll::Ready(Ok(Socket::new(socket)?));
            }
            ready!(self.watched.poll())?;
        }
    }
}

impl std::fmt::Debug for Listener {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.listener.fmt(f)
    }
}
