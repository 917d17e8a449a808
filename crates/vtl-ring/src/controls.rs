//! The daemon's view of a session's rings.

use std::{io, os::fd::BorrowedFd, sync::atomic::Ordering};

use vtl_proto::intf;

use super::Ring;

/// The control slots of both rings of a session, as the daemon uses them beside whoever reads and
/// writes packets. Any thread may.
pub struct Controls {
    transmit: Ring,
    receive: Ring,
}

// SAFETY: only fields of the control slots are touched here, atomically.
unsafe impl Sync for Controls {}

impl Controls {
    /// Maps no more than the control slots: all of 32 MiB takes a millisecond.
    ///
    /// # Errors
    /// The system's.
    pub fn map(transmit: BorrowedFd<'_>, receive: BorrowedFd<'_>) -> io::Result<Self> {
        Ok(Self {
            transmit: Ring::map(transmit, 1)?,
            receive: Ring::map(receive, 1)?,
        })
    }

    /// Packets that were written to the transmit ring since the session began.
    pub fn published(&self) -> u64 {
        self.transmit.producer().load(Ordering::Acquire)
    }

    /// Tells whoever writes packets how many bytes of payload the path takes.
    pub fn set_path(&self, most: u16) {
        self.transmit.most().store(most.into(), Ordering::Relaxed);
    }

    /// Takes away the reader's note that its ring has room again ([`super::RxRing::offer_room`]).
    /// Returns whether there was one.
    pub fn take_offer(&self) -> bool {
        let refill = self.receive.refill();
        refill.load(Ordering::Relaxed) != 0 && refill.swap(0, Ordering::AcqRel) != 0
    }

    /// Marks the session as ended: `why` is one of `enum vtl_closed`.
    pub fn set_closed(&self, why: u32) {
        self.transmit.set_closed(why);
        self.receive.set_closed(why);
    }

    /// Tells the application that there is a session that succeeds this one.
    pub fn set_succeeded(&self) {
        let closed = self.transmit.closed();
        closed.fetch_or(intf::VTL_SUCCEEDED, Ordering::Release);
    }
}
