//! Waiting: how long, and for what.

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

/// The longest that a lost wake-up can cost, ms.
pub(crate) const WAIT_MS: u16 = 200;
/// How often close looks whether everything has arrived.
const CLOSE: Duration = Duration::from_millis(1);

/// When what begins now has to end. Never, if that is further away than a clock can tell.
pub(crate) fn deadline(limit: Option<Duration>) -> Option<Instant> {
    Instant::now().checked_add(limit?)
}

/// How long to wait: until `limit`, but at most `most` milliseconds.
pub(crate) fn patience(limit: Option<Instant>, most: u16) -> Result<PollTimeout, Error> {
    let Some(limit) = limit else {
        return Ok(most.into());
    };
    let left = limit.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(Error::TimedOut);
    }
    // Rounded up, or the rest of a millisecond would be spent asking for nothing.
    let ms = left.as_micros().div_ceil(1000);
    Ok(u16::try_from(ms).map_or(most, |ms| ms.min(most)).into())
}

/// Between two looks whether everything has arrived, of which nobody tells.
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

/// As poll(2). A signal ends it early: whoever waits looks again anyway.
pub(crate) fn poll(fds: &mut [PollFd<'_>], most: PollTimeout) -> io::Result<()> {
    match nix::poll::poll(fds, most) {
        Ok(_) | Err(Errno::EINTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// One descriptor for several.
pub(crate) fn epoll() -> io::Result<Epoll> {
    Ok(Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?)
}

/// Makes `epoll` readable when `fd` is.
pub(crate) fn watch(epoll: &Epoll, fd: impl AsFd, source: Source) -> io::Result<()> {
    Ok(epoll.add(fd, EpollEvent::new(EpollFlags::EPOLLIN, source as u64))?)
}

/// What became readable.
#[derive(Clone, Copy)]
pub(crate) enum Source {
    /// What need not be told from the others.
    Any,
    /// The eventfd from the daemon.
    Wake,
    /// The kernel's events.
    Events,
    /// What belongs to another session of the socket.
    Other,
}

/// What wakes the user of a session.
pub(crate) struct Wakeups {
    /// From the daemon.
    wake: OwnedFd,
    /// From the kernel, unless it leaves them to the daemon.
    events: Option<Events>,
    /// Readable when one of those two is, or the daemon has gone.
    any: Arc<Epoll>,
    /// Hangs up when the daemon dies.
    daemon: Arc<Client>,
    /// Some were taken off `any` since [`Wakeups::took`] was last asked.
    taken: bool,
}

impl Wakeups {
    /// Those of a session that has just opened.
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
            // The daemon's answer was one, too.
            taken: true,
        };
        watch(any, &wakeups.wake, Source::Wake)?;
        if let Some(events) = &wakeups.events {
            watch(any, events, Source::Events)?;
        }
        Ok(wakeups)
    }

    /// Sleeps until one comes, or for so long. False if the daemon has gone.
    pub(crate) fn sleep(&self, most: PollTimeout) -> io::Result<bool> {
        let wake = self.wake.as_fd();
        let mut fds = [
            PollFd::new(self.daemon.as_fd(), PollFlags::empty()),
            PollFd::new(wake, PollFlags::POLLIN),
            PollFd::new(
                self.events.as_ref().map_or(wake, AsFd::as_fd),
                PollFlags::POLLIN,
            ),
        ];
        poll(&mut fds, most)?;
        let [hung_up, woken, event] = fds.map(|fd| fd.any().unwrap_or(false));
        if event {
            self.clear_events();
        }
        if woken {
            self.clear_wake();
        }
        Ok(!hung_up)
    }

    /// Makes the descriptor unreadable until the next one. False if the daemon has gone.
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
                // The daemon never speaks unasked.
                _ => {
                    here = false;
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
        // Fails only if there is none.
        let _ = nix::unistd::read(&self.wake, &mut [0; 8]);
    }

    /// Whether the daemon is still there.
    pub(crate) fn daemon_lives(&self) -> io::Result<bool> {
        let mut fds = [PollFd::new(self.daemon.as_fd(), PollFlags::empty())];
        poll(&mut fds, PollTimeout::ZERO)?;
        Ok(!fds[0].any().unwrap_or(false))
    }

    /// Whether some were taken off the descriptor since this was last asked.
    pub(crate) fn took(&mut self) -> bool {
        std::mem::take(&mut self.taken)
    }
}

impl Drop for Wakeups {
    fn drop(&mut self) {
        // The daemon holds both, too: closing them here would not take them out.
        let events = self.events.as_ref().map(AsFd::as_fd);
        for fd in iter::once(self.wake.as_fd()).chain(events) {
            // Fails if it never came in.
            let _ = self.any.delete(fd);
        }
    }
}

const WAKE: u64 = Source::Wake as u64;
const EVENTS: u64 = Source::Events as u64;
const OTHER: u64 = Source::Other as u64;
