//! An open session: its rings, and access to them without lost wake-ups.

mod receive;
mod send;

use std::{
    net::IpAddr,
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
    time::Duration,
};

use nix::sys::epoll::Epoll;
use vtl_control::{Client, Error::Malformed, GivenUp, Grant, SessionKey};
use vtl_proto::{intf, services::Services};
use vtl_ring::{Closed, Lanes, RxRing, TxRing};

use receive::NAP;

use crate::{
    error::Error,
    message::{Incoming, Outgoing},
    socket::Agreement,
    waiting::Wakeups,
};

pub(crate) struct Session {
    tx: TxRing,
    /// With partial order only.
    lanes: Option<Lanes>,
    rx: RxRing,
    /// Wakes the daemon.
    kick: OwnedFd,
    /// Socket that runs egress from this thread, without the daemon.
    caller: Option<OwnedFd>,
    wakeups: Wakeups,
    pub(crate) peer: IpAddr,
    /// Maximum length of a message, bytes, if messages may take several packets.
    long_messages: Option<usize>,
    outgoing: Outgoing,
    incoming: Incoming,
    /// Bytes read of the first packet in `rx`.
    read: usize,
    /// Given-up packets read so far.
    given_up: u64,
    /// Packets in the latest read.
    batch: u64,
    /// Duration of the next nap.
    nap: Duration,
    pub(crate) key: SessionKey,
    /// Whether the graft is reliable.
    pub(crate) reliable: bool,
    /// Succeeded by another session: only read, to its end.
    pub(crate) old: bool,
    /// Keep using the session for now, even if the peer has succeeded it.
    pub(crate) stays: bool,
    /// Cut, and its successor cannot be used.
    pub(crate) lost: bool,
}

/// Why an operation did not complete.
pub(crate) enum Halt {
    Error(Error),
    /// The operation continues in the session that succeeds this one.
    Succeeded,
}

impl<T: Into<Error>> From<T> for Halt {
    fn from(error: T) -> Self {
        Self::Error(error.into())
    }
}

/// State of the receive ring.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Receivable {
    Packets,
    End,
    /// The data continues in the session that succeeds this one, if there is one.
    Succeeded,
    /// Nothing has arrived; a wake-up is requested.
    NotYet,
}

impl Session {
    /// Maps the rings of a session that the daemon grants; its events make `any` readable.
    pub(crate) fn granted(
        grant: Grant,
        descriptors: Vec<OwnedFd>,
        any: &Arc<Epoll>,
        daemon: &Arc<Client>,
    ) -> Result<(Self, Agreement), Error> {
        let mut descriptors = descriptors.into_iter();
        let mut next = || {
            let missing = || Malformed("a session without its descriptors".to_owned());
            descriptors.next().ok_or_else(missing)
        };
        let [transmit, receive, kick, wake] = [next()?, next()?, next()?, next()?];
        let events = grant.events.then(&mut next).transpose()?;
        let caller = descriptors.next();
        let (slots, payload, longest) = (grant.slots, grant.max_payload, grant.max_message);
        let agreement = Agreement {
            graft: grant.graft,
            gid: grant.gid,
            services: grant.services,
            peer: grant.peer,
        };
        let mut tx = TxRing::map(transmit.as_fd(), slots, payload)?;
        let mut rx = RxRing::map(receive.as_fd(), slots)?;
        let lanes = agreement.services.contains(Services::PARTIAL_ORDER)
            && !agreement.services.contains(Services::ORDERED);
        if lanes {
            rx = rx.with_list();
        }
        if let Some(keys) = &grant.keys {
            // Reliable and ordered: a packet's number is its place in the ring.
            let placed = Services::RELIABLE | Services::ORDERED;
            let numbered = !agreement.services.contains(placed);
            tx = tx.with_keys(keys, numbered);
            rx = rx.with_keys(keys, numbered);
        }
        let session = Self {
            tx,
            rx,
            lanes: lanes.then(Lanes::default),
            kick,
            caller,
            wakeups: Wakeups::new(wake, events, any, daemon)?,
            peer: agreement.peer,
            long_messages: (longest > payload.into())
                .then_some(longest.min(intf::VTL_MAX_MESSAGE) as usize),
            outgoing: Outgoing::default(),
            incoming: Incoming::default(),
            read: 0,
            given_up: 0,
            batch: 0,
            nap: NAP,
            key: SessionKey {
                sid: grant.sid,
                key: grant.key,
            },
            reliable: agreement.services.contains(Services::RELIABLE),
            old: false,
            stays: false,
            lost: false,
        };
        Ok((session, agreement))
    }

    /// Maximum payload of a packet, bytes.
    pub(crate) fn max_payload(&self) -> usize {
        self.tx.max_payload()
    }

    /// Maximum length of a message, bytes.
    pub(crate) fn max_message(&self) -> usize {
        self.long_messages.unwrap_or(self.max_payload())
    }

    /// Packets queued or in flight: not acknowledged by the peer.
    pub(crate) fn unacknowledged(&self) -> u64 {
        self.tx.unacknowledged()
    }

    /// Given-up packets read.
    pub(crate) fn given_up(&self) -> u64 {
        self.given_up
    }

    /// Whether a stateless switch has ended the session: what is sent goes by its successor.
    pub(crate) fn is_cut(&self) -> bool {
        self.tx.closed() == Some(Closed::Cut)
    }

    /// What a stateless switch has given up of the data sent.
    pub(crate) fn cut_off(&self) -> GivenUp {
        let (packets, messages, bytes) = self.tx.pending();
        GivenUp {
            packets,
            messages,
            bytes,
        }
    }

    /// As [`Wakeups::took`].
    pub(crate) fn took_wakeups(&mut self) -> bool {
        self.wakeups.took()
    }

    fn broken(&self) -> Error {
        Error::Broken(self.peer)
    }

    /// Whether a packet failed authentication. Without reliability it counts as given up instead.
    fn is_forged(&self) -> bool {
        self.reliable && self.rx.forged() > 0
    }

    fn check_forged(&self) -> Result<(), Error> {
        match self.is_forged() {
            true => Err(Error::Forged(self.peer)),
            false => Ok(()),
        }
    }

    /// Wakes the daemon for this session.
    fn kick(&self) {
        // Fails only if the counter overflows, in thousands of years: the daemon does not read it,
        // each write is an event.
        let _ = nix::unistd::write(&self.kick, &1_u64.to_ne_bytes());
    }
}
