//! What a handle stands for.

use std::{
    net::{IpAddr, Ipv6Addr, SocketAddr},
    os::fd::{AsFd, AsRawFd, OwnedFd},
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicI32, Ordering},
    },
    time::{Duration, Instant},
};

use libc::c_int;
use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, poll},
};
use vtl::{Agreement, Error, Listener, Mode, Shared, control::socket_path};

use crate::{
    abi::{VTL_INITIATOR, VTL_LISTENER, VTL_RESPONDER, vtl_mode},
    failure::Failure,
};

/// How soon a thread that waits for a session notices that its listener was closed, ms.
const WAIT_MS: u16 = 100;

pub(crate) struct Socket {
    /// Milliseconds; negative: for ever.
    timeout: AtomicI32,
    kind: Kind,
}

enum Kind {
    Session(Shared),
    Listener {
        /// `None` once it is closed.
        listener: Mutex<Option<Listener>>,
        /// Its descriptor.
        ready: OwnedFd,
    },
}

fn system(error: std::io::Error) -> Failure {
    Failure::of(&error.into(), -1)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Socket {
    pub(crate) fn new(
        mode: vtl_mode,
        src: Option<&str>,
        dst: Option<&str>,
    ) -> Result<Self, Failure> {
        let daemon = socket_path(None);
        let kind = match mode {
            VTL_INITIATOR => {
                if src.is_some() {
                    return Err(Failure::invalid("an initiator's src is NULL"));
                }
                let to = peer(dst)?;
                let socket = vtl::Socket::init(Mode::Initiator, to, &daemon);
                Kind::session(socket.map_err(|e| Failure::of(&e, -1))?)?
            }
            VTL_RESPONDER | VTL_LISTENER => {
                if dst.is_some() {
                    return Err(Failure::invalid("a responder's or listener's dst is NULL"));
                }
                let at = own(src)?;
                let taken = |error: Error| {
                    let mut failure = Failure::of(&error, -1);
                    if matches!(error, Error::Daemon(vtl::control::Error::Refused(_))) {
                        failure.code = libc::EADDRINUSE;
                    }
                    failure
                };
                if mode == VTL_RESPONDER {
                    let socket = vtl::Socket::init(Mode::Responder, at, &daemon);
                    Kind::session(socket.map_err(taken)?)?
                } else {
                    Kind::listener(Listener::bind(at.port(), &daemon).map_err(taken)?)?
                }
            }
            _ => return Err(Failure::invalid(format!("there is no mode {mode}"))),
        };
        Ok(Self {
            timeout: AtomicI32::new(-1),
            kind,
        })
    }

    pub(crate) fn set_timeout(&self, ms: c_int) {
        self.timeout.store(ms, Ordering::Relaxed);
    }

    /// Does something with the session's socket, within the time limit.
    pub(crate) fn shared<T>(
        &self,
        operation: impl FnOnce(&Shared, Option<Duration>) -> Result<T, Error>,
    ) -> Result<T, Failure> {
        let Kind::Session(shared) = &self.kind else {
            return Err(Failure::invalid("a listener has no session: vtl_accept"));
        };
        let (ms, limit) = self.limit();
        operation(shared, limit).map_err(|error| Failure::of(&error, ms))
    }

    fn limit(&self) -> (c_int, Option<Duration>) {
        let ms = self.timeout.load(Ordering::Relaxed);
        let limit = u64::try_from(ms).ok().map(Duration::from_millis);
        (ms, limit)
    }

    /// The next session of a listener.
    pub(crate) fn accept(&self) -> Result<Self, Failure> {
        let Kind::Listener { listener, ready } = &self.kind else {
            return Err(Failure::invalid("only a listener can accept"));
        };
        let (ms, limit) = self.limit();
        let end = limit.map(|limit| Instant::now() + limit);
        loop {
            let accepted = match lock(listener).as_mut() {
                Some(listener) => listener.try_accept(),
                None => Err(Error::Closed),
            };
            if let Some(socket) = accepted.map_err(|e| Failure::of(&e, ms))? {
                return Ok(Self {
                    timeout: AtomicI32::new(ms),
                    kind: Kind::session(socket)?,
                });
            }
            let left = end.map(|end| end.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                return Err(Failure::of(&Error::TimedOut, ms));
            }
            // At least 1, or the rest of a millisecond would be spent asking for nothing.
            let max = left.map_or(WAIT_MS, |left| {
                left.as_millis().clamp(1, WAIT_MS.into()) as u16
            });
            match poll(&mut [PollFd::new(ready.as_fd(), PollFlags::POLLIN)], max) {
                Ok(_) | Err(Errno::EINTR) => {}
                Err(error) => return Err(system(error.into())),
            }
        }
    }

    pub(crate) fn close(&self) -> Result<(), Failure> {
        match &self.kind {
            Kind::Session(_) => self.shared(Shared::close),
            Kind::Listener { listener, .. } => {
                lock(listener).take();
                Ok(())
            }
        }
    }

    pub(crate) fn abort(&self) {
        match &self.kind {
            Kind::Session(shared) => shared.abort(),
            Kind::Listener { listener, .. } => {
                lock(listener).take();
            }
        }
    }

    pub(crate) fn fd(&self) -> c_int {
        match &self.kind {
            Kind::Session(shared) => shared.as_fd().as_raw_fd(),
            Kind::Listener { ready, .. } => ready.as_raw_fd(),
        }
    }

    /// What was negotiated.
    pub(crate) fn agreement(&self) -> Result<Agreement, Failure> {
        self.shared(|shared, _| Ok(shared.agreement()))?
            .ok_or_else(|| Failure::new(libc::ENOTCONN, "there is no session yet"))
    }
}

impl Kind {
    fn session(socket: vtl::Socket) -> Result<Self, Failure> {
        Shared::new(socket).map(Self::Session).map_err(system)
    }

    fn listener(listener: Listener) -> Result<Self, Failure> {
        Ok(Self::Listener {
            ready: listener.as_fd().try_clone_to_owned().map_err(system)?,
            listener: Mutex::new(Some(listener)),
        })
    }
}

/// "address:port".
fn peer(text: Option<&str>) -> Result<SocketAddr, Failure> {
    let text = text.ok_or_else(|| Failure::invalid("an initiator needs a dst, not NULL"))?;
    let address: Option<SocketAddr> = text.parse().ok();
    address.filter(|a| a.port() != 0).ok_or_else(|| {
        let why = "write 10.0.0.2:7000 or [fd00::2]:7000, with a port from 1 to 65534";
        Failure::invalid(format!("\"{text}\" is no address with port: {why}"))
    })
}

/// ":port", also with the address that stands for all.
fn own(text: Option<&str>) -> Result<SocketAddr, Failure> {
    let text = text.ok_or_else(|| Failure::invalid("name the port: a src such as \":7000\""))?;
    let port = text.strip_prefix(':').and_then(|port| port.parse().ok());
    let any = IpAddr::V6(Ipv6Addr::UNSPECIFIED);
    port.map(|port| SocketAddr::new(any, port))
        .or_else(|| text.parse().ok())
        .filter(|at| at.port() != 0 && at.ip().is_unspecified())
        .ok_or_else(|| {
            let why = "write :7000, with a port from 1 to 65534, for all addresses of this host";
            Failure::invalid(format!("\"{text}\" is no port to wait at: {why}"))
        })
}
