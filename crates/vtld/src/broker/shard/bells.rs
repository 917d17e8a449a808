//! What wakes aware applications: eventfds. A descriptor for each session would bound the number of
//! sessions, so the kernel keeps the files in the table of an io_uring, by which they are also
//! written to, many in one call. Where there is none, each keeps its descriptor.

use std::{os::fd::AsRawFd, sync::Arc};

use io_uring::{IoUring, opcode, squeue, types::Fixed};
use nix::sys::{
    eventfd::EventFd,
    resource::{Resource, getrlimit},
};

/// Wake-ups in one call.
const BATCH: u32 = 64;

/// An application's eventfd.
pub(super) enum Bell {
    Held(Arc<EventFd>),
    /// A place in the table.
    Kept(u32),
}

/// All of them.
pub(super) struct Bells {
    ring: Option<IoUring>,
    /// Places of the table that were never used begin here.
    next: u32,
    /// Where the table ends.
    places: u32,
    /// Places that are free again.
    free: Vec<u32>,
}

impl Bells {
    /// Has room for so many, or as many as this process may open files.
    pub(super) fn new(most: u32) -> Self {
        let files = getrlimit(Resource::RLIMIT_NOFILE).map_or(0, |(soft, _)| soft);
        let places = most.min(files.try_into().unwrap_or(u32::MAX));
        let made = IoUring::new(BATCH).and_then(|ring| {
            ring.submitter().register_files_sparse(places)?;
            Ok(ring)
        });
        let ring = made.inspect_err(
            |error| tracing::info!(%error, "no io_uring: sessions take one descriptor more"),
        );
        Self {
            ring: ring.ok(),
            next: 0,
            places,
            free: Vec::new(),
        }
    }

    /// Closes the descriptor of one that its application has, if the file can be kept otherwise.
    pub(super) fn keep(&mut self, bell: &mut Bell) {
        let (Some(ring), Bell::Held(event)) = (&self.ring, &*bell) else {
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
            Ok(1) => *bell = Bell::Kept(place),
            _ => self.free.push(place),
        }
    }

    /// Lets go of one, which is of no use any more.
    pub(super) fn remove(&mut self, bell: &Bell) {
        if let (Bell::Kept(place), Some(ring)) = (bell, &self.ring)
            && let Ok(1) = ring.submitter().register_files_update(*place, &[-1])
        {
            self.free.push(*place);
        }
    }

    /// Wakes an application, at the next [`Bells::flush`] at the latest.
    pub(super) fn ring(&mut self, bell: &Bell) {
        static ONE: u64 = 1;
        match bell {
            Bell::Held(event) => {
                let _ = event.write(ONE);
            }
            Bell::Kept(place) => {
                let bytes = (&raw const ONE).cast();
                // Nothing is said of those that go well.
                let write = opcode::Write::new(Fixed(*place), bytes, size_of_val(&ONE) as u32)
                    .build()
                    .flags(squeue::Flags::SKIP_SUCCESS);
                if !self.push(&write) {
                    self.flush();
                    self.push(&write);
                }
            }
        }
    }

    /// False if there is no room before the next flush.
    fn push(&mut self, write: &squeue::Entry) -> bool {
        self.ring.as_mut().is_none_or(|ring| {
            // SAFETY: it reads eight bytes that live for ever.
            unsafe { ring.submission().push(write) }.is_ok()
        })
    }

    /// Makes the wake-ups that are due.
    pub(super) fn flush(&mut self) {
        let Some(ring) = &mut self.ring else {
            return;
        };
        if !ring.submission().is_empty() {
            // What fails is tried again with the next ones.
            let _ = ring.submit();
            // An eventfd that its application has filled is readable, too.
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
    fn pair() -> (Bell, EventFd) {
        let event = EventFd::from_flags(EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC).unwrap();
        let application = event.as_fd().try_clone_to_owned().unwrap();
        // SAFETY: a duplicate of an eventfd.
        let application = unsafe { EventFd::from_owned_fd(application) };
        (Bell::Held(Arc::new(event)), application)
    }

    #[test]
    fn ring__reaches_the_application_kept_or_not() {
        reaches(Bells::new(100));
        reaches(Bells {
            ring: None,
            next: 0,
            places: 0,
            free: Vec::new(),
        });
    }

    fn reaches(mut bells: Bells) {
        const COUNT: usize = 200;
        let mut pairs: Vec<_> = (0..COUNT).map(|_| pair()).collect();
        for (bell, _) in &mut pairs {
            bells.keep(bell);
        }
        let kept = pairs.iter().filter(|(b, _)| matches!(b, Bell::Kept(_)));
        let room = if bells.ring.is_some() { 100 } else { 0 };
        assert_eq!(kept.count(), room);
        for (bell, _) in &pairs {
            bells.ring(bell);
        }
        bells.flush();
        for (_, application) in &pairs {
            assert_eq!(application.read(), Ok(1));
        }
        // One that its application has filled hurts nobody else.
        pairs[3].1.write(u64::MAX - 1).unwrap();
        for _ in 0..COUNT {
            bells.ring(&pairs[3].0);
            bells.ring(&pairs[4].0);
        }
        bells.flush();
        assert_eq!(pairs[3].1.read(), Ok(u64::MAX - 1));
        assert_eq!(pairs[4].1.read(), Ok(COUNT as u64));
    }

    #[test]
    fn remove__its_place_is_anothers_and_its_file_is_gone() {
        let mut bells = Bells::new(1);
        if bells.ring.is_none() {
            vtl_testing::skip("no io_uring here");
            return;
        }
        for _ in 0..1000 {
            let (mut bell, application) = pair();
            bells.keep(&mut bell);
            assert!(matches!(bell, Bell::Kept(0)));
            bells.ring(&bell);
            bells.flush();
            assert_eq!(application.read(), Ok(1));
            bells.remove(&bell);
        }
    }
}
