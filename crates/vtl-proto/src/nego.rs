//! How a session is opened: one NEGO, one answer.
//!
//! Times are nanoseconds of one monotonic clock, any epoch. Tokens are random values that the
//! caller draws: 64 bits, unpredictable, new for each session.

use core::{net::IpAddr, time::Duration};

use crate::{
    intf,
    services::{GraftInfo, Services},
    wire::{Gids, Header, Nego, Packet, get},
};

/// First wait for an answer where the round-trip time is unknown.
pub const FIRST_WAIT: Duration = Duration::from_millis(300);
/// From the first NEGO until giving up, however short the round-trip time: a peer may be busy with
/// the rings of many sessions.
pub const PATIENCE: Duration = Duration::from_secs(9);
/// No wait is longer.
pub const MAX_WAIT: Duration = Duration::from_secs(5);
/// No wait is shorter, however short the round-trip time: the answer takes a process to be woken.
pub const MIN_WAIT: Duration = Duration::from_millis(100);

/// What the initiator asks for and offers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Offer {
    /// Our session index, not 0.
    pub sid: u32,
    /// Slots of our receive ring, 1 to `intf::VTL_MAX_WINDOW`.
    pub ring_slots: u32,
    /// The most payload bytes per packet that we take, [`crate::wire::MIN_PAYLOAD`] to
    /// `intf::VTL_MAX_PAYLOAD`.
    pub max_payload: u16,
    /// Rendezvous; 0 is the Hooker's stream service.
    pub port: u16,
    /// What the graft must provide.
    pub services: Services,
    /// Grafts in order of preference, at least one.
    pub gids: Gids,
    /// The path's round-trip time if known: retransmissions then start at twice that.
    pub known_rtt: Option<Duration>,
}

/// The session as negotiated, seen from one side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Established {
    /// The peer's session index: `sid` of packets to it.
    pub peer_sid: u32,
    /// The peer's guard: `token` of packets to it.
    pub peer_token: u64,
    /// Slots of the peer's receive ring, at most `intf::VTL_MAX_WINDOW`: the first limit.
    pub peer_slots: u32,
    /// The most payload bytes per packet, in both directions.
    pub max_payload: u16,
    /// The graft.
    pub gid: u16,
    /// Round-trip time; `None` when the answer may belong to more than one transmission
    /// (Karn's rule, RFC 6298 section 3).
    pub rtt: Option<Duration>,
}

/// Why there is no session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NegoError {
    /// No answer within [`PATIENCE`].
    #[error("the peer did not answer")]
    TimedOut,
    /// The peer's NEGO_NACK.
    #[error("the peer refused: {0}")]
    Refused(Reason),
    /// The peer chose a graft that was not offered.
    #[error("the peer chose graft {0}, which was not offered")]
    NotOffered(u16),
}

/// The reason in a NEGO_NACK.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum Reason {
    /// None of the offered grafts is available there with the required services.
    #[error("no offered graft is available there")]
    NoGraft,
    /// Too many sessions.
    #[error("no room for another session")]
    NoRoom,
    /// Nobody waits at that port.
    #[error("nobody waits at that port")]
    NoListener,
    /// The version is not spoken there.
    #[error("version not spoken there")]
    Version,
    /// One that this version does not know.
    #[error("reason {0}")]
    Other(u8),
}

impl From<u8> for Reason {
    fn from(value: u8) -> Self {
        match u32::from(value) {
            intf::VTL_NACK_NO_GRAFT => Self::NoGraft,
            intf::VTL_NACK_NO_ROOM => Self::NoRoom,
            intf::VTL_NACK_NO_LISTENER => Self::NoListener,
            intf::VTL_NACK_VERSION => Self::Version,
            _ => Self::Other(value),
        }
    }
}

impl From<Reason> for u8 {
    fn from(reason: Reason) -> u8 {
        match reason {
            Reason::NoGraft => intf::VTL_NACK_NO_GRAFT as u8,
            Reason::NoRoom => intf::VTL_NACK_NO_ROOM as u8,
            Reason::NoListener => intf::VTL_NACK_NO_LISTENER as u8,
            Reason::Version => intf::VTL_NACK_VERSION as u8,
            Reason::Other(value) => value,
        }
    }
}

/// The side that opens. Call [`Initiator::poll`] at once and whenever [`Initiator::poll_at`] has
/// passed, [`Initiator::handle`] with each packet; a result other than `Ok(None)` of `handle`, and
/// an error of `poll`, ends it.
#[derive(Clone, Debug)]
pub struct Initiator {
    offer: Offer,
    token: u64,
    tries: u32,
    wait: Duration,
    sent_ns: u64,
    due_ns: u64,
    end_ns: u64,
}

impl Initiator {
    /// Starts at `now_ns`; `token` guards packets to us.
    pub fn new(offer: Offer, now_ns: u64, token: u64) -> Self {
        let wait = offer
            .known_rtt
            .map_or(FIRST_WAIT, |rtt| rtt.saturating_mul(2));
        let wait = wait.clamp(MIN_WAIT, MAX_WAIT);
        Self {
            offer,
            token,
            tries: 0,
            wait,
            sent_ns: now_ns,
            due_ns: now_ns,
            end_ns: now_ns.saturating_add(nanos(PATIENCE)),
        }
    }

    /// When [`Initiator::poll`] has something to do.
    pub fn poll_at(&self) -> u64 {
        self.due_ns
    }

    /// The NEGO to be sent now, if any.
    ///
    /// # Errors
    /// [`NegoError::TimedOut`] when [`PATIENCE`] has passed.
    pub fn poll(&mut self, now_ns: u64) -> Result<Option<Packet<'static>>, NegoError> {
        if now_ns < self.due_ns {
            return Ok(None);
        }
        if now_ns >= self.end_ns {
            return Err(NegoError::TimedOut);
        }
        self.tries += 1;
        self.sent_ns = now_ns;
        self.due_ns = now_ns.saturating_add(nanos(self.wait)).min(self.end_ns);
        self.wait = (self.wait * 2).min(MAX_WAIT);
        Ok(Some(Packet::Nego(Nego {
            header: Header::default(),
            token: self.token,
            peer_token: 0,
            sid: self.offer.sid,
            ring_slots: self.offer.ring_slots,
            max_payload: self.offer.max_payload,
            port: self.offer.port,
            services: self.offer.services.bits(),
            reason: 0,
            gids: self.offer.gids,
        })))
    }

    /// Takes a packet from the peer. Packets that do not prove knowledge of our token, and other
    /// types, change nothing: anybody can send those.
    ///
    /// # Errors
    /// The peer refuses, or answers what was not offered.
    pub fn handle(
        &mut self,
        now_ns: u64,
        packet: &Packet<'_>,
    ) -> Result<Option<Established>, NegoError> {
        let (Packet::NegoAck(nego) | Packet::NegoNack(nego)) = packet else {
            return Ok(None);
        };
        let ours = nego.peer_token == self.token
            && nego.header.token == self.token
            && nego.header.sid == self.offer.sid;
        if !ours || self.tries == 0 {
            return Ok(None);
        }
        if let Packet::NegoNack(_) = packet {
            return Err(NegoError::Refused(nego.reason.into()));
        }
        let gid = nego.gids.first().copied().unwrap_or_default();
        if !self.offer.gids.contains(&gid) {
            return Err(NegoError::NotOffered(gid));
        }
        let rtt = Duration::from_nanos(now_ns.saturating_sub(self.sent_ns));
        let rtt = (self.tries == 1).then_some(rtt);
        Ok(Some(established(nego, self.offer.max_payload, gid, rtt)))
    }
}

/// What decides about a peer's NEGO.
#[derive(Clone, Copy, Debug)]
pub struct Policy<'a> {
    /// Grafts of the pool that this host lets peers use.
    pub grafts: &'a [GraftInfo],
    /// Ports where somebody waits.
    pub ports: &'a [u16],
    /// Whether another session fits.
    pub room: bool,
    /// Slots that our receive ring would have, 1 to `intf::VTL_MAX_WINDOW`.
    pub ring_slots: u32,
    /// The most payload bytes per packet that we take, [`crate::wire::MIN_PAYLOAD`] to
    /// `intf::VTL_MAX_PAYLOAD`.
    pub max_payload: u16,
}

/// A NEGO that is accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice {
    /// The session, without round-trip time.
    pub session: Established,
    /// The port asked for.
    pub port: u16,
    /// What the initiator requires.
    pub services: Services,
    ring_slots: u32,
}

impl Choice {
    /// The same with a receive ring of another size, for when the policy was a guess.
    #[must_use]
    pub fn with_ring_slots(self, ring_slots: u32) -> Self {
        Self { ring_slots, ..self }
    }

    /// The NEGO_ACK, with the index and the guard of the session that the caller made.
    pub fn answer(&self, sid: u32, token: u64) -> Packet<'static> {
        Packet::NegoAck(Nego {
            header: to(self.session.peer_sid, self.session.peer_token),
            token,
            peer_token: self.session.peer_token,
            sid,
            ring_slots: self.ring_slots,
            max_payload: self.session.max_payload,
            port: self.port,
            services: self.services.bits(),
            reason: 0,
            gids: Gids::new(&[self.session.gid]).unwrap_or_default(),
        })
    }
}

/// A NEGO that is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Nack {
    /// Why.
    pub reason: Reason,
    sid: u32,
    token: u64,
}

impl Nack {
    /// The NEGO_NACK. It is as long as the NEGO: refusing amplifies nothing.
    pub fn answer(&self) -> Packet<'static> {
        Packet::NegoNack(Nego {
            header: to(self.sid, self.token),
            peer_token: self.token,
            reason: self.reason.into(),
            ..Nego::default()
        })
    }
}

/// Decides about a NEGO: a function of its arguments, so that a duplicate which is not in the
/// caller's table any more gets the same answer. The first graft in the initiator's order that is
/// available and provides the required services is chosen.
///
/// # Errors
/// What to refuse with.
pub fn respond(nego: &Nego, policy: &Policy<'_>) -> Result<Choice, Nack> {
    let nack = |reason| Nack {
        reason,
        sid: nego.sid,
        token: nego.token,
    };
    if !policy.ports.contains(&nego.port) {
        return Err(nack(Reason::NoListener));
    }
    let services = Services::from_bits(nego.services);
    let usable = |gid| {
        policy
            .grafts
            .iter()
            .any(|g| g.gid == gid && g.satisfies(services))
    };
    let gid = nego.gids.iter().copied().find(|gid| usable(*gid));
    let gid = gid.ok_or_else(|| nack(Reason::NoGraft))?;
    if !policy.room {
        return Err(nack(Reason::NoRoom));
    }
    Ok(Choice {
        session: established(nego, policy.max_payload, gid, None),
        port: nego.port,
        services,
        ring_slots: policy.ring_slots,
    })
}

/// The refusal of a NEGO of another version, from the whole packet; `None` if it is anything else,
/// such as a damaged NEGO of this version, which gets no answer. All versions keep the place of
/// `version_type`, `token` and `sid`, so that this can be answered.
pub fn refuse_version(packet: &[u8]) -> Option<Nack> {
    let nego = packet.get(..size_of::<intf::vtl_nego>())?;
    let version_type = u32::from(get!(nego, vtl_hdr, version_type));
    let other = version_type >> 4 != intf::VTL_VERSION;
    (other && version_type & 15 == intf::VTL_NEGO).then(|| Nack {
        reason: Reason::Version,
        sid: get!(nego, vtl_nego, sid),
        token: get!(nego, vtl_nego, token),
    })
}

/// Names one attempt to open a session. A responder keeps a table from this to its answer: a
/// retransmitted NEGO gets the same one again and opens nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NegoKey {
    /// The initiator's address.
    pub addr: IpAddr,
    /// Its session index.
    pub sid: u32,
    /// Its token.
    pub token: u64,
}

impl NegoKey {
    /// Of a NEGO that came from `addr`.
    pub fn new(addr: IpAddr, nego: &Nego) -> Self {
        Self {
            addr,
            sid: nego.sid,
            token: nego.token,
        }
    }
}

fn established(nego: &Nego, max_payload: u16, gid: u16, rtt: Option<Duration>) -> Established {
    Established {
        peer_sid: nego.sid,
        peer_token: nego.token,
        peer_slots: nego.ring_slots.min(intf::VTL_MAX_WINDOW),
        max_payload: nego
            .max_payload
            .min(max_payload)
            .min(intf::VTL_MAX_PAYLOAD as u16),
        gid,
        rtt,
    }
}

fn to(sid: u32, token: u64) -> Header {
    Header {
        sid,
        token,
        ..Header::default()
    }
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;
