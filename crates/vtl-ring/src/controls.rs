//! The daemon's view of a session's rings.

use std::{io, os::fd::BorrowedFd, sync::atomic::Ordering};

use vtl_proto::intf;

use super::Ring;

/// The control slots of both rings of a session, for the daemon, concurrently with the reader and
/// the writer of packets. Usable from any thread.
pub struct Controls {
    transmit: Ring,
    receive: Ring,
}

// SAFETY: only fields of the control slots are touched here, atomically.
unsafe impl Sync for Controls {}

impl Controls {
    /// Maps the control slots only: mapping all 32 MiB takes a millisecond.
    ///
    /// # Errors
    /// The system's.
    pub fn map(transmit: BorrowedFd<'_>, receive: BorrowedFd<'_>) -> io::Result<Self> {
        Ok(Self {
            transmit: Ring::map(transmit, 1)?,
            receive: Ring::map(receive, 1)?,
        })
    }

    /// Packets published in the transmit ring since the session began.
    pub fn published(&self) -> u64 {
        self.transmit.producer().load(Ordering::Acquire)
    }

    /// Packets published and not acknowledged; meaningless if the application writes nonsense.
    pub fn unacknowledged(&self) -> u64 {
        let acknowledged = self.transmit.consumer().load(Ordering::Acquire);
        self.published().saturating_sub(acknowledged)
    }

    /// Tells the writer the path's maximum payload, bytes.
    pub fn set_path(&self, max: u16) {
        self.transmit
            .path_payload()
            .store(max.into(), Ordering::Relaxed);
    }

    /// Clears the reader's mark that there is room again ([`super::RxRing::offer_room`]). Returns
    /// whether it was set.
    pub fn take_offer(&self) -> bool {
        let refill = self.receive.refill();
        refill.load(Ordering::Relaxed) != 0 && refill.swap(0, Ordering::AcqRel) != 0
    }

    /// Marks the session as ended: `why` is one of `enum vtl_closed`.
    pub fn set_closed(&self, why: u32) {
        self.transmit.set_closed(why);
        self.receive.set_closed(why);
    }

    /// Tells the application that the peer has opened the session that succeeds this one.
    pub fn set_succeeded(&self) {
        let closed = self.transmit.closed();
        closed.fetch_or(intf::VTL_SUCCEEDED, Ordering::Release);
    }
}
