//! Accepts many sessions at one port.

use std::{
    io,
    net::{Ipv6Addr, SocketAddr},
    os::fd::{AsFd, BorrowedFd},
    path::{Path, PathBuf},
    time::Duration,
};

use nix::sys::epoll::Epoll;
use vtl_control::{Client, Listening, Request};

use crate::{
    socket::{Error, Mode, Socket},
    waiting::{Source, deadline, epoll, watch},
};

/// Holds a VTL port, and yields a [`Socket`] for each session that a peer opens to it. Sockets
/// outlive their listener; sessions not accepted end with it.
pub struct Listener {
    /// Holds the port.
    _client: Client,
    key: u64,
    address: SocketAddr,
    daemon: PathBuf,
    timeout: Option<Duration>,
    /// Waits for the next session.
    next: Option<Socket>,
    /// Readable when `next` has a session.
    ready: Epoll,
}

impl Listener {
    /// Binds a port, 1 to 65534, at the daemon.
    ///
    /// # Errors
    /// The daemon is unreachable, or the port is taken.
    pub fn bind(port: u16, daemon: &Path) -> Result<Self, Error> {
        let client = Client::connect(daemon)?;
        let Listening { key } = client.call(&Request::Listen { port })?;
        let mut listener = Self {
            _client: client,
            key,
            address: SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), port),
            daemon: daemon.to_path_buf(),
            timeout: None,
            next: None,
            ready: epoll()?,
        };
        listener.ask()?;
        Ok(listener)
    }

    /// Requests the next session, so that the descriptor becomes readable for it.
    fn ask(&mut self) -> Result<(), Error> {
        let client = Client::connect(&self.daemon)?;
        let mut next = Socket::over(client, Mode::Responder, self.address, &self.daemon)?;
        next.ask(&Request::Accept {
            key: Some(self.key),
        })?;
        watch(&self.ready, &next, Source::Any)?;
        self.next = Some(next);
        Ok(())
    }

    /// The port.
    pub fn port(&self) -> u16 {
        self.address.port()
    }

    /// As [`Socket::set_timeout`], for [`Listener::accept`]; accepted sockets start without a
    /// limit.
    pub fn set_timeout(&mut self, limit: Option<Duration>) {
        self.timeout = limit;
    }

    /// Waits for the next session.
    ///
    /// # Errors
    /// The daemon has gone, or the time limit passed.
    pub fn accept(&mut self) -> Result<Socket, Error> {
        let limit = deadline(self.timeout);
        loop {
            if let Some(socket) = self.try_accept()? {
                return Ok(socket);
            }
            if let Some(next) = &self.next {
                next.await_answer(limit)?;
            }
        }
    }

    /// As [`Listener::accept`], but does not block: `None` means that there is no session. The
    /// listener's descriptor becomes readable when there is.
    ///
    /// # Errors
    /// The daemon has gone.
    pub fn try_accept(&mut self) -> Result<Option<Socket>, Error> {
        if self.next.is_none() {
            self.ask()?;
        }
        let adopted = self.next.as_mut().map(Socket::try_adopt);
        if matches!(adopted, None | Some(Ok(None))) {
            return Ok(None);
        }
        let next = self.next.take();
        if let Some(next) = &next {
            self.ready.delete(next.as_fd()).map_err(io::Error::from)?;
        }
        // On failure the next call retries: this session is not affected.
        let _ = self.ask();
        adopted.transpose()?;
        Ok(next)
    }
}

impl AsFd for Listener {
    /// Readable when a session is ready to be accepted.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.ready.0.as_fd()
    }
}

impl std::fmt::Debug for Listener {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Listener")
            .field("port", &self.port())
            .finish_non_exhaustive()
    }
}
