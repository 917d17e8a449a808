//! Wake-up of aware applications by eventfds. Since a descriptor for each session would bound the number of
//! sessions, the kernel keeps the files in the table of an io_uring, through which they are also written to in
//! batches. Without io_uring each keeps its descriptor.

use std::{os::fd::AsRawFd, sync::Arc};

use io_uring::{IoUring, opcode, squeue, types::Fixed};
use nix::{
    fcntl::{FcntlArg, OFlag, fcntl},
    sys::{
        eventfd::EventFd,
        resource::{Resource, getrlimit},
    },
};

/// Maximum wake-ups in one call.
const BATCH: u32 = 64;

/// An application's eventfd.
pub(super) enum Wakeup {
    /// Written to through its own descriptor.
    Held(Arc<EventFd>),
    /// Index of the file in the table.
    Kept(u32),
}

/// Eventfds of all applications of a shard.
pub(super) struct Wakeups {
    ring: Option<IoUring>,
    /// First place of the table never used.
    next: u32,
    /// Size of the table.
    places: u32,
    /// Places freed.
    free: Vec<u32>,
}

impl Wakeups {
    /// Creates a table for `max` files, at most this process's limit of open files.
    pub(super) fn new(max: u32) -> Self {
        let files = getrlimit(Resource::RLIMIT_NOFILE).map_or(0, |(soft, _)| soft);
        let places = max.min(files.try_into().unwrap_or(u32::MAX));
        let made = IoUring::new(BATCH).and_then(|ring| {
            ring.submitter().register_files_sparse(places)?;
            Ok(ring)
        });
        let ring = made.inspect_err(
            |error| tracing::info!(%error, "wake-ups: no io_uring: each session takes one more file descriptor"),
        );
        Self {
            ring: ring.ok(),
            next: 0,
            places,
            free: Vec::new(),
        }
    }

    /// Moves an eventfd into the table if possible, and closes its descriptor.
    pub(super) fn keep(&mut self, wakeup: &mut Wakeup) {
        let (Some(ring), Wakeup::Held(event)) = (&self.ring, &*wakeup) else {
            return;
        };
        let place = match self.free.pop() {
            Some(place) => place,
            None if self.next < self.places => {
                self.next += 1;
                self.next - 1
            }
            None => return,
        };
        let file = [event.as_raw_fd()];
        match ring.submitter().register_files_update(place, &file) {
            Ok(1) => *wakeup = Wakeup::Kept(place),
            _ => self.free.push(place),
        }
    }

    /// Removes an eventfd.
    pub(super) fn remove(&mut self, wakeup: &Wakeup) {
        if let (Wakeup::Kept(place), Some(ring)) = (wakeup, &self.ring)
            && let Ok(1) = ring.submitter().register_files_update(*place, &[-1])
        {
            self.free.push(*place);
        }
    }

    /// Wakes an application, at the latest at the next [`Wakeups::flush`].
    pub(super) fn wake(&mut self, wakeup: &Wakeup) {
        static ONE: u64 = 1;
        match wakeup {
            Wakeup::Held(event) => {
                // The application has the same file, and may have made it block. It may do so once more in between,
                // which an io_uring does not mind.
                let _ = fcntl(event, FcntlArg::F_SETFL(OFlag::O_NONBLOCK));
                let _ = event.write(ONE);
            }
            Wakeup::Kept(place) => {
                let bytes = (&raw const ONE).cast();
                // No completions of successful writes.
                let write = opcode::Write::new(Fixed(*place), bytes, size_of_val(&ONE) as u32)
                    .rw_flags(libc::RWF_NOWAIT)
                    .build()
                    .flags(squeue::Flags::SKIP_SUCCESS);
                if !self.push(&write) {
                    self.flush();
                    self.push(&write);
                }
            }
        }
    }

    /// Queues a write. False if the queue is full until the next flush.
    fn push(&mut self, write: &squeue::Entry) -> bool {
        self.ring.as_mut().is_none_or(|ring| {
            // SAFETY: it reads eight bytes that live for ever.
            unsafe { ring.submission().push(write) }.is_ok()
        })
    }

    /// Submits queued wake-ups.
    pub(super) fn flush(&mut self) {
        let Some(ring) = &mut self.ring else {
            return;
        };
        if !ring.submission().is_empty() {
            // Entries not submitted are submitted with the next ones.
            let _ = ring.submit();
            // Completions are errors only: an eventfd whose counter is full is readable, too.
            ring.completion().for_each(drop);
        }
    }
}

#[cfg(test)]
#[allow(non_snake_case)]
mod tests {
    use std::os::fd::AsFd;

    use nix::sys::eventfd::EfdFlags;

    use super::*;

    /// Both ends of one.
    fn pair() -> (Wakeup, EventFd) {
        let event = EventFd::from_flags(EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC).unwrap();
        let application = event.as_fd().try_clone_to_owned().unwrap();
        // SAFETY: a duplicate of an eventfd.
        let application = unsafe { EventFd::from_owned_fd(application) };
        (Wakeup::Held(Arc::new(event)), application)
    }

    #[test]
    fn ring__reaches_the_application_kept_or_not() {
        reaches(Wakeups::new(100));
        reaches(Wakeups {
            ring: None,
            next: 0,
            places: 0,
            free: Vec::new(),
        });
    }

    fn reaches(mut wakeups: Wakeups) {
        const COUNT: usize = 200;
        let mut pairs: Vec<_> = (0..COUNT).map(|_| pair()).collect();
        for (wakeup, _) in &mut pairs {
            wakeups.keep(wakeup);
        }
        let kept = pairs.iter().filter(|(b, _)| matches!(b, Wakeup::Kept(_)));
        let room = if wakeups.ring.is_some() { 100 } else { 0 };
        assert_eq!(kept.count(), room);
        for (wakeup, _) in &pairs {
            wakeups.wake(wakeup);
        }
        wakeups.flush();
        for (_, application) in &pairs {
            assert_eq!(application.read(), Ok(1));
        }
        // One that its application has filled hurts nobody else.
        pairs[3].1.write(u64::MAX - 1).unwrap();
        for _ in 0..COUNT {
            wakeups.wake(&pairs[3].0);
            wakeups.wake(&pairs[4].0);
        }
        wakeups.flush();
        assert_eq!(pairs[3].1.read(), Ok(u64::MAX - 1));
        assert_eq!(pairs[4].1.read(), Ok(COUNT as u64));
    }

    #[test]
    fn remove__its_place_is_anothers_and_its_file_is_gone() {
        let mut wakeups = Wakeups::new(1);
        if wakeups.ring.is_none() {
            vtl_testing::skip("no io_uring here");
            return;
        }
        for _ in 0..1000 {
            let (mut wakeup, application) = pair();
            wakeups.keep(&mut wakeup);
            assert!(matches!(wakeup, Wakeup::Kept(0)));
            wakeups.wake(&wakeup);
            wakeups.flush();
            assert_eq!(application.read(), Ok(1));
            wakeups.remove(&wakeup);
        }
    }
}
