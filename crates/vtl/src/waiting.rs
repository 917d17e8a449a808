//! Waiting: time limits, and sources of wake-ups.

use std::{
    io, iter,
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
    time::{Duration, Instant},
};

use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout},
    sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout},
};

use vtl_control::Client;
use vtl_ring::Events;

use crate::error::Error;

/// Polling interval against lost wake-ups, ms.
pub(crate) const WAIT_MS: u16 = 200;
/// Polling interval of close for delivery.
const CLOSE: Duration = Duration::from_millis(1);

/// Deadline of an operation that starts now. `None`, no deadline, if it is beyond the clock's
/// range.
pub(crate) fn deadline(limit: Option<Duration>) -> Option<Instant> {
    Instant::now().checked_add(limit?)
}

/// Time to wait: until `limit`, at most `max` milliseconds.
pub(crate) fn patience(limit: Option<Instant>, max: u16) -> Result<PollTimeout, Error> {
    let Some(limit) = limit else {
        return Ok(max.into());
    };
    let left = limit.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(Error::TimedOut);
    }
    // Rounded up, or the last fraction of a millisecond would be a busy loop.
    let ms = left.as_micros().div_ceil(1000);
    Ok(u16::try_from(ms).map_or(max, |ms| ms.min(max)).into())
}

/// Sleeps between two checks for delivery, which causes no wake-up.
pub(crate) fn pause(limit: Option<Instant>) -> Result<(), Error> {
    let left = limit.map_or(CLOSE, |limit| {
        limit.saturating_duration_since(Instant::now())
    });
    if left.is_zero() {
        return Err(Error::TimedOut);
    }
    std::thread::sleep(left.min(CLOSE));
    Ok(())
}

/// As poll(2). Returns early on a signal: callers check their condition again anyway.
pub(crate) fn poll(fds: &mut [PollFd<'_>], max: PollTimeout) -> io::Result<()> {
    match nix::poll::poll(fds, max) {
        Ok(_) | Err(Errno::EINTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// An epoll instance, to merge several descriptors into one.
pub(crate) fn epoll() -> io::Result<Epoll> {
    Ok(Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?)
}

/// Makes `epoll` readable when `fd` is.
pub(crate) fn watch(epoll: &Epoll, fd: impl AsFd, source: Source) -> io::Result<()> {
    Ok(epoll.add(fd, EpollEvent::new(EpollFlags::EPOLLIN, source as u64))?)
}

/// Source of an event.
#[derive(Clone, Copy)]
pub(crate) enum Source {
    /// Need not be distinguished.
    Any,
    /// The daemon's eventfd.
    Wake,
    /// The kernel's ring of events.
    Events,
    /// Another session of the socket.
    Other,
}

/// Sources of wake-ups of a session's user.
pub(crate) struct Wakeups {
    /// From the daemon: an eventfd.
    wake: OwnedFd,
    /// From the kernel; `None` if the daemon takes its events.
    events: Option<Events>,
    /// Readable when one of those two is, or the daemon has gone.
    any: Arc<Epoll>,
    /// Hangs up when the daemon dies.
    daemon: Arc<Client>,
    /// Events were taken off `any` since the last call of [`Wakeups::took`].
    taken: bool,
}

impl Wakeups {
    /// Watches the sources of a session that has just opened.
    pub(crate) fn new(
        wake: OwnedFd,
        events: Option<OwnedFd>,
        any: &Arc<Epoll>,
        daemon: &Arc<Client>,
    ) -> io::Result<Self> {
        let wakeups = Self {
            wake,
            events: events.map(Events::map).transpose()?,
            any: Arc::clone(any),
            daemon: Arc::clone(daemon),
            // The daemon's answer was an event, too.
            taken: true,
        };
        watch(any, &wakeups.wake, Source::Wake)?;
        if let Some(events) = &wakeups.events {
            watch(any, events, Source::Events)?;
        }
        Ok(wakeups)
    }

    /// Sleeps until a wake-up, for at most `max`. False if the daemon has gone.
    pub(crate) fn sleep(&self, max: PollTimeout) -> io::Result<bool> {
        let wake = self.wake.as_fd();
        let mut fds = [
            PollFd::new(self.daemon.as_fd(), PollFlags::empty()),
            PollFd::new(wake, PollFlags::POLLIN),
            PollFd::new(
                self.events.as_ref().map_or(wake, AsFd::as_fd),
                PollFlags::POLLIN,
            ),
        ];
        poll(&mut fds, max)?;
        let [hung_up, woken, event] = fds.map(|fd| fd.any().unwrap_or(false));
        if event {
            self.clear_events();
        }
        if woken {
            self.clear_wake();
        }
        Ok(!hung_up)
    }

    /// Consumes pending events: the descriptor is unreadable until the next one. False if the
    /// daemon has gone.
    pub(crate) fn clear(&mut self) -> io::Result<bool> {
        let mut found = [EpollEvent::empty(); 4];
        let count = match self.any.wait(&mut found, EpollTimeout::ZERO) {
            Ok(count) => count,
            Err(Errno::EINTR) => 0,
            Err(error) => return Err(error.into()),
        };
        let mut here = true;
        for event in &found[..count] {
            match event.data() {
                EVENTS => self.clear_events(),
                WAKE => self.clear_wake(),
                OTHER => continue,
                _ => {
                    here = !self.daemon.has_gone();
                    continue;
                }
            }
            self.taken = true;
        }
        Ok(here)
    }

    fn clear_events(&self) {
        if let Some(events) = &self.events {
            events.clear();
        }
    }

    fn clear_wake(&self) {
        // Fails only if nothing is pending.
        let _ = nix::unistd::read(&self.wake, &mut [0; 8]);
    }

    /// Whether the daemon is still connected.
    pub(crate) fn daemon_lives(&self) -> io::Result<bool> {
        let mut fds = [PollFd::new(self.daemon.as_fd(), PollFlags::empty())];
        poll(&mut fds, PollTimeout::ZERO)?;
        Ok(!fds[0].any().unwrap_or(false))
    }

    /// Whether events were taken off the descriptor since the last call.
    pub(crate) fn took(&mut self) -> bool {
        std::mem::take(&mut self.taken)
    }
}

impl Drop for Wakeups {
    fn drop(&mut self) {
        // The daemon holds both descriptors, too: closing ours would not remove them from the epoll
        // set.
        let events = self.events.as_ref().map(AsFd::as_fd);
        for fd in iter::once(self.wake.as_fd()).chain(events) {
            // Fails if it was never added.
            let _ = self.any.delete(fd);
        }
    }
}

const WAKE: u64 = Source::Wake as u64;
const EVENTS: u64 = Source::Events as u64;
const OTHER: u64 = Source::Other as u64;
