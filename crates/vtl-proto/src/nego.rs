//! Negotiation of a session: one NEGO, one answer. With a peer met before, early data need not wait for the answer.
//!
//! [`Initiator`] opens, [`Responder`] answers. Both are sans-I/O: packets, time and random values come in,
//! packets and decisions go out.
//!
//! Times are nanoseconds of one monotonic clock, any epoch. Tokens and secrets are random values
//! that the caller draws: unpredictable, and new each time.

mod crypto;
mod initiator;
mod race;
mod responder;
mod ticket;

#[cfg(test)]
mod network;
#[cfg(test)]
mod tests;

use core::{mem::offset_of, net::IpAddr, time::Duration};

pub use crypto::{EXPORTERS, Flight, bound_answer, join_answer, split_answer};
pub use initiator::{Answer, Early, Initiator, Offer, Offered, Step};
pub use race::Encapsulation;
pub use responder::{Choice, Counters, Made, Policy, Request, Responder, Verdict};
pub use ticket::LIFE;

use crate::{
    intf,
    wire::{Header, Nego, Packet, Ticket, get},
};

/// Initial retransmission timeout of NEGO while the round-trip time is unknown.
pub const FIRST_WAIT: Duration = Duration::from_millis(300);
/// Time from the first NEGO until giving up, however short the round-trip time: a peer may be busy with the
/// rings of many sessions.
pub const PATIENCE: Duration = Duration::from_secs(9);
/// Maximum of the retransmission timeout.
pub const MAX_WAIT: Duration = Duration::from_secs(5);
/// Minimum of the retransmission timeout, however short the round-trip time: the answer includes the wake-up of
/// a process.
pub const MIN_WAIT: Duration = Duration::from_millis(100);
/// Delay of early data after NEGO, in which the responder's daemon creates the session.
pub const HEAD_START: Duration = Duration::from_millis(2);
/// Delay of the next encapsulation while the round-trip time is unknown (RFC 8305, section 5); otherwise one
/// and a half round trips, at least [`MIN_ATTEMPT_DELAY`].
pub const ATTEMPT_DELAY: Duration = Duration::from_millis(250);
/// Minimum of that delay, however short the round-trip time.
pub const MIN_ATTEMPT_DELAY: Duration = Duration::from_millis(50);
/// Maximum number of sessions with peers whose addresses are not validated. Beyond it, peers are sent a cookie
/// first.
pub const STRANGERS: usize = 8;

/// Values of a graft's parameters, in its own order; unused ones are 0.
pub type Values = [u32; intf::VTL_NEGO_PARAMS as usize];

/// The session as negotiated, seen from one side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Established {
    /// The peer's session index: `sid` of packets to it.
    pub peer_sid: u32,
    /// The peer's token: `token` of packets to it.
    pub peer_token: u64,
    /// Slots of the peer's receive ring, at most `intf::VTL_MAX_WINDOW`: the first limit.
    pub peer_slots: u32,
    /// Maximum payload of a packet, in both directions, bytes.
    pub max_payload: u16,
    /// Whether the peer supports messages of several packets.
    pub long_messages: bool,
    /// The graft.
    pub gid: u16,
    /// Its parameters.
    pub params: Values,
    /// Round-trip time; `None` when the answer may belong to more than one transmission
    /// (Karn's rule, RFC 6298 section 3).
    pub rtt: Option<Duration>,
    /// Ticket for the next session with this peer; only at the initiator.
    pub ticket: Option<Ticket>,
    /// The session succeeds another one, which ends at once, with what is in flight ([`asks_stateless`]).
    pub stateless: bool,
}

/// Why there is no session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NegoError {
    /// No answer in time.
    #[error("the peer did not answer")]
    TimedOut,
    /// The peer's NEGO_NACK.
    #[error("the peer refused: {0}")]
    Refused(Reason),
    /// The peer chose a graft that was not offered.
    #[error("the peer chose graft {0}, which was not offered")]
    NotOffered(u16),
    /// The peer's answer has a critical extension that this host does not know.
    #[error("the peer's answer requires extension {0}, which is not known here")]
    Extension(u16),
    /// The peer's graft of that number has other parameters: it is another graft.
    #[error("the peer's graft {0} differs from ours")]
    Differs(u16),
    /// Early data were sent in a way that the answer does not permit.
    #[error("the peer has changed since the last session, and data were under way: try again")]
    Changed,
    /// The peer does not support keys, and the session requires them.
    #[error("the peer does not encrypt")]
    Clear,
    /// Early data may have arrived before the peer restarted.
    #[error("the peer was restarted while the session was opened: data may have arrived or not")]
    Restarted,
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
    /// No listener at that port.
    #[error("no listener at that port")]
    NoListener,
    /// Unsupported version.
    #[error("unsupported version")]
    Version,
    /// Not a refusal: the initiator has to validate its address by returning the ticket.
    #[error("address validation: repeat the NEGO with the ticket of the answer")]
    Cookie,
    /// The ticket has opened a session before.
    #[error("the ticket was used before; early data may have arrived or not")]
    Used,
    /// The session to be succeeded has ended, or has a successor.
    #[error("it has ended the session, or is changing it itself")]
    Succession,
    /// NEGO has a critical extension that the responder does not know.
    #[error("it does not know an extension that the session requires")]
    Extension,
    /// A stateless switch, where the application there does without no packet.
    #[error("its application requires that nothing is lost: switch without stateless")]
    Reliable,
    /// Unknown to this version.
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
            intf::VTL_NACK_COOKIE => Self::Cookie,
            intf::VTL_NACK_USED => Self::Used,
            intf::VTL_NACK_SUCCESSION => Self::Succession,
            intf::VTL_NACK_EXTENSION => Self::Extension,
            intf::VTL_NACK_RELIABLE => Self::Reliable,
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
            Reason::Cookie => intf::VTL_NACK_COOKIE as u8,
            Reason::Used => intf::VTL_NACK_USED as u8,
            Reason::Succession => intf::VTL_NACK_SUCCESSION as u8,
            Reason::Extension => intf::VTL_NACK_EXTENSION as u8,
            Reason::Reliable => intf::VTL_NACK_RELIABLE as u8,
            Reason::Other(value) => value,
        }
    }
}

/// Identifies one attempt to open a session: retransmitted NEGOs have the same key.
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
    /// The key of a NEGO that came from `addr`.
    pub fn new(addr: IpAddr, nego: &Nego<'_>) -> Self {
        Self {
            addr,
            sid: nego.sid,
            token: nego.token,
        }
    }
}

/// The responder's session that a NEGO wants to succeed: index and token.
pub fn succeeded(nego: &Nego<'_>) -> Option<(u32, u64)> {
    let asks = u32::from(nego.header.flags) & intf::VTL_F_SUCCEED != 0;
    asks.then_some((nego.header.sid, nego.header.token))
}

/// Whether a NEGO asks for, or a NEGO_ACK agrees to, a stateless switch: the session to be succeeded ends at once in
/// both directions, and what is in flight in it may be lost. Older hosts neither set the flag nor heed it.
pub fn asks_stateless(nego: &Nego<'_>) -> bool {
    let asks = u32::from(nego.header.flags) & intf::VTL_F_STATELESS != 0;
    asks && succeeded(nego).is_some()
}

/// Builds the refusal of a NEGO of another version; `None` for any other packet, such as a damaged NEGO of this
/// version, which gets no answer. All versions keep the offsets of `version_type`, `token` and `sid`, so that
/// this can be answered; none has a shorter NEGO.
pub fn refuse_version(packet: &[u8]) -> Option<Packet<'static>> {
    let nego = packet.get(..size_of::<intf::vtl_nego>())?;
    let version_type = u32::from(get!(nego, vtl_hdr, version_type));
    if version_type >> 4 == intf::VTL_VERSION || version_type & 15 != intf::VTL_NEGO {
        return None;
    }
    // The version field itself may be damaged: a refusal would end a session that a retransmission opens.
    let mut mended = packet.to_vec();
    mended[offset_of!(intf::vtl_hdr, version_type)] =
        (intf::VTL_VERSION << 4 | intf::VTL_NEGO) as u8;
    if Packet::parse(&mended).is_ok() {
        return None;
    }
    let (sid, token) = (get!(nego, vtl_nego, sid), get!(nego, vtl_nego, token));
    Some(nack(sid, token, Reason::Version, Ticket::default()))
}

/// Builds a NEGO_NACK, without extensions and so never longer than the NEGO: no amplification.
fn nack(sid: u32, token: u64, reason: Reason, ticket: Ticket) -> Packet<'static> {
    Packet::NegoNack(Nego {
        header: to(sid, token),
        peer_token: token,
        reason: reason.into(),
        ticket,
        ..Nego::default()
    })
}

/// The session with the sender of `nego`, whose unauthenticated sizes are bounded here.
fn established(nego: &Nego<'_>, max_payload: u16, gid: u16, params: Values) -> Established {
    Established {
        peer_sid: nego.sid,
        peer_token: nego.token,
        peer_slots: nego.ring_slots.min(intf::VTL_MAX_WINDOW),
        max_payload: nego
            .max_payload
            .min(max_payload)
            .min(intf::VTL_MAX_PAYLOAD as u16),
        long_messages: u32::from(nego.header.flags) & intf::VTL_F_MORE != 0,
        gid,
        params,
        rtt: None,
        ticket: None,
        stateless: false,
    }
}

fn to(sid: u32, token: u64) -> Header {
    Header {
        sid,
        token,
        ..Header::default()
    }
}

/// Sets the flags of this host's capabilities in the header of a NEGO or NEGO_ACK.
fn with_capabilities(header: Header) -> Header {
    Header {
        flags: header.flags | intf::VTL_F_MORE as u8,
        ..header
    }
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
