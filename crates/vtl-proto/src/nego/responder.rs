//! The responder of a session.

use core::{net::IpAddr, time::Duration};
use std::collections::BTreeMap;

use super::{
    Established, Flight, NegoKey, Reason, STRANGERS, Values, asks_stateless,
    crypto::bound_nego,
    established, nack, nanos, succeeded,
    ticket::{Mint, Standing},
    to, with_capabilities,
};
use crate::{
    intf,
    services::{GraftInfo, Services},
    wire::{Extensions, Gids, Nego, Packet, Param, Params, Ticket},
};

/// How long [`Responder::handshake_failed`] has an effect.
const WARY: Duration = Duration::from_secs(10);

/// This host's policy for a peer's NEGO.
#[derive(Clone, Copy, Debug)]
pub struct Policy<'a, G = GraftInfo> {
    /// Grafts of the pool that this host lets peers use.
    pub grafts: &'a [G],
    /// Whether the requested port has a listener. If the NEGO asks for a successor ([`super::succeeded`]): whether
    /// the session to succeed is the sender's, which validates its address, too, and may have one.
    pub listening: bool,
    /// Whether there is room for another session.
    pub room: bool,
    /// If the NEGO asks for a stateless switch ([`super::asks_stateless`]): whether the session to succeed may lose what
    /// is in flight.
    pub tolerant: bool,
}

/// A graft of both pools with the required services, and its parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice {
    /// The graft.
    pub gid: u16,
    /// Its parameters.
    pub params: Values,
    /// Number of its parameters.
    count: usize,
    /// It is the initiator's first choice.
    first: bool,
}

/// A NEGO that may be accepted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// Choices in the initiator's order, at least one.
    pub choices: Vec<Choice>,
    /// Index and token of the session of early data. It can be granted with the first choice, if that is the
    /// initiator's, and with at least [`crate::intf::VTL_EARLY_WINDOW`] slots.
    pub early: Option<(u32, u64)>,
    /// As [`super::succeeded`].
    pub succeeds: Option<(u32, u64)>,
    /// As [`super::asks_stateless`]; the policy allows it.
    pub stateless: bool,
    /// The crypto handshake's first flight, if it asks for a session with keys.
    pub hello: Option<Vec<u8>>,
    /// Length of its extensions, bytes: the answer's must not be longer.
    room: usize,
    nego: Nego<'static>,
    key: NegoKey,
    stranger: bool,
    /// Ticket to register as used.
    spent: Option<Ticket>,
}

impl Request {
    /// Services that the initiator requires.
    pub fn services(&self) -> Services {
        Services::from_bits(self.nego.services)
    }

    /// The port asked for.
    pub fn port(&self) -> u16 {
        self.nego.port
    }

    /// The attempt that it belongs to.
    pub fn key(&self) -> &NegoKey {
        &self.key
    }

    /// The bytes of NEGO that the crypto handshake must protect.
    pub fn bound(&self) -> Vec<u8> {
        bound_nego(&self.nego)
    }

    /// Index and token of the session of early data, if this choice permits it.
    pub fn early_with(&self, choice: &Choice) -> Option<(u32, u64)> {
        self.early.filter(|_| choice.first)
    }
}

/// Decision about a NEGO.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Send this answer. No state is kept.
    Answer(Packet<'static>),
    /// Ignore it.
    Ignore,
    /// Create a session with the first choice that is available and call [`Responder::accept`], or else
    /// [`Responder::refuse`].
    Open(Request),
    /// Finish the crypto handshake of that session with this flight, and call [`Responder::finished`].
    Finish(u32, Vec<u8>),
}

/// The session that the caller has created.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Made {
    /// Its index, not 0.
    pub sid: u32,
    /// Its token: drawn by the caller, or that of early data.
    pub token: u64,
    /// Slots of its receive ring, 1 to `intf::VTL_MAX_WINDOW`.
    pub ring_slots: u32,
    /// Maximum payload of a packet that this host accepts, bytes, [`crate::wire::MIN_PAYLOAD`] to
    /// `intf::VTL_MAX_PAYLOAD`.
    pub max_payload: u16,
    /// Index to suggest for the peer's next session, probably free then, not 0.
    pub next_sid: u32,
}

/// Counters since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Sessions created.
    pub accepted: u64,
    /// Of those, sessions with early data.
    pub early: u64,
    /// NEGOs refused for other reasons than the next two.
    pub refused: u64,
    /// NEGOs answered with a cookie, for which no state is kept.
    pub cookies: u64,
    /// Replays: NEGOs whose ticket has opened a session before.
    pub replays: u64,
    /// Retransmitted NEGOs, answered as before.
    pub repeated: u64,
}

struct Held {
    key: NegoKey,
    answer: Packet<'static>,
    /// Extensions of the answer: the crypto handshake's flight, until that is finished.
    extensions: Vec<u8>,
    /// Its address is not validated, by a ticket or by a packet with the session's token.
    stranger: bool,
}

/// The responder's state machine. Its memory is bounded: it keeps one answer for each session that it has
/// created, and a bounded register of used tickets; no other state.
pub struct Responder {
    mint: Mint,
    sessions: BTreeMap<u32, Held>,
    attempts: BTreeMap<NegoKey, u32>,
    strangers: usize,
    /// Until when, after a failed crypto handshake, peers have to validate their addresses first.
    wary_ns: u64,
    counters: Counters,
}

impl Responder {
    /// Starts at `now_ns`. Earlier tickets are not recognised.
    pub fn new(now_ns: u64, secret: [u8; 16]) -> Self {
        Self {
            mint: Mint::new(now_ns, secret),
            sessions: BTreeMap::new(),
            attempts: BTreeMap::new(),
            strangers: 0,
            wary_ns: now_ns,
            counters: Counters::default(),
        }
    }

    /// Housekeeping; call it every few seconds. `secret` draws a new key, about once an hour.
    pub fn maintain(&mut self, now_ns: u64, secret: impl FnOnce() -> [u8; 16]) {
        self.mint.maintain(now_ns, secret);
    }

    /// Counters since the start.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Number of sessions held.
    #[cfg(test)]
    pub(super) fn sessions(&self) -> usize {
        self.sessions.len()
    }

    /// Number of sessions whose peers' addresses are not validated.
    pub fn strangers(&self) -> usize {
        self.strangers
    }

    /// Decides about a NEGO from `from`. `next_sid` returns an index to suggest for a session of that peer, not
    /// 0.
    pub fn asked(
        &mut self,
        now_ns: u64,
        from: IpAddr,
        nego: &Nego<'_>,
        policy: &Policy<'_, impl AsRef<GraftInfo>>,
        next_sid: impl FnOnce() -> u32,
    ) -> Verdict {
        let key = NegoKey::new(from, nego);
        let finish = Flight::Finish.of(&nego.extensions);
        if let Some(sid) = self.attempts.get(&key)
            && let Some(held) = self.sessions.get(sid)
        {
            if let Some(flight) = finish.filter(|_| !held.extensions.is_empty()) {
                return Verdict::Finish(*sid, flight.to_vec());
            }
            self.counters.repeated += 1;
            if held.extensions.len() > nego.extensions.as_bytes().len() {
                return Verdict::Ignore; // no amplification
            }
            return Verdict::Answer(held.answer);
        }
        let no = |reason| nack(nego.sid, nego.token, reason, Ticket::default());
        if finish.is_some() {
            return Verdict::Ignore; // its session has ended
        }
        if nego.extensions.unknown_critical().is_some() {
            self.counters.refused += 1;
            return Verdict::Answer(no(Reason::Extension));
        }
        let standing = self.mint.judge(now_ns, from, &nego.ticket);
        let asked = (nego.header.sid, nego.header.token);
        let succeeds = succeeded(nego);
        let hello = Flight::Hello.of(&nego.extensions).map(<[u8]>::to_vec);
        // No early data before keys.
        let early = hello.is_none()
            && succeeds.is_none()
            && nego.header.sid == nego.ticket.sid
            && nego.header.token != 0;
        if standing == Standing::Used && early {
            self.counters.replays += 1;
            return Verdict::Answer(no(Reason::Used));
        }
        let choices = match choose(nego, policy) {
            Ok(choices) => choices,
            Err(reason) => {
                self.counters.refused += 1;
                return Verdict::Answer(no(reason));
            }
        };
        let stranger = standing == Standing::Stranger && succeeds.is_none();
        let is_wary = hello.is_some() && now_ns < self.wary_ns;
        if stranger && (is_wary || self.strangers >= STRANGERS) {
            self.counters.cookies += 1;
            let ticket = self.mint.issue(now_ns, from, next_sid());
            return Verdict::Answer(nack(nego.sid, nego.token, Reason::Cookie, ticket));
        }
        let fresh = standing == Standing::Fresh && early;
        Verdict::Open(Request {
            choices,
            early: fresh.then_some(asked),
            succeeds,
            stateless: asks_stateless(nego),
            hello,
            room: nego.extensions.as_bytes().len(),
            nego: nego.without_extensions(),
            key,
            stranger,
            spent: fresh.then_some(nego.ticket),
        })
    }

    /// Builds the answer for a session that was created; returns the session, too.
    pub fn accept(
        &mut self,
        now_ns: u64,
        request: &Request,
        choice: &Choice,
        made: &Made,
    ) -> (Packet<'static>, Established) {
        let nego = &request.nego;
        let mut session = established(nego, made.max_payload, choice.gid, choice.params);
        session.stateless = request.stateless;
        let params: Vec<Param> = (0..choice.count)
            .map(|i| Param {
                graft: 0,
                index: i as u8,
                value: choice.params[i],
            })
            .collect();
        let mut header = with_capabilities(to(nego.sid, nego.token));
        if request.succeeds.is_some() {
            header.flags |= intf::VTL_F_SUCCEED as u8;
        }
        if request.stateless {
            header.flags |= intf::VTL_F_STATELESS as u8;
        }
        let answer = Packet::NegoAck(Nego {
            header,
            token: made.token,
            peer_token: nego.token,
            sid: made.sid,
            ring_slots: made.ring_slots,
            max_payload: made.max_payload,
            port: nego.port,
            services: nego.services,
            reason: 0,
            gids: Gids::new(&[choice.gid]).unwrap_or_default(),
            ticket: self.mint.issue(now_ns, request.key.addr, made.next_sid),
            params: Params::new(&params).unwrap_or_default(),
            extensions: Extensions::default(),
        });
        // Also if early data were not granted: NEGO and data could be replayed later.
        if let Some(ticket) = &request.spent {
            self.mint.strike(ticket);
        }
        self.counters.accepted += 1;
        if request.early == Some((made.sid, made.token)) {
            self.counters.early += 1;
        }
        self.ended(made.sid);
        self.attempts.insert(request.key, made.sid);
        self.strangers += usize::from(request.stranger);
        let held = Held {
            key: request.key,
            answer,
            extensions: Vec::new(),
            stranger: request.stranger,
        };
        self.sessions.insert(made.sid, held);
        (answer, session)
    }

    /// Adds the crypto handshake's flight to the answer, until it is finished. False if that is longer than the
    /// NEGO.
    pub fn set_crypto(&mut self, request: &Request, flight: &[u8]) -> bool {
        let emitted = Flight::Answer.emit(flight, false);
        let Some(extensions) = emitted.filter(|bytes| bytes.len() <= request.room) else {
            return false;
        };
        let sid = self.attempts.get(&request.key);
        if let Some(held) = sid.and_then(|sid| self.sessions.get_mut(sid)) {
            held.extensions = extensions;
        }
        true
    }

    /// Notes an invalid first flight, which has cost a handshake to find out. For the next 10 s peers that ask
    /// for keys have to return a cookie first.
    pub fn handshake_failed(&mut self, now_ns: u64) {
        self.wary_ns = now_ns.saturating_add(nanos(WARY));
    }

    /// The extensions to send with the answer to such a NEGO.
    pub fn extensions(&self, key: &NegoKey) -> &[u8] {
        let held = self
            .attempts
            .get(key)
            .and_then(|sid| self.sessions.get(sid));
        held.map_or(&[], |held| &held.extensions)
    }

    /// Notes that a session's crypto handshake has finished; returns the answer that confirms it.
    pub fn finished(&mut self, sid: u32) -> Option<Packet<'static>> {
        let held = self.sessions.get_mut(&sid)?;
        held.extensions.clear();
        Some(held.answer)
    }

    /// Builds the refusal of a NEGO that could have been accepted.
    pub fn refuse(&mut self, request: &Request, reason: Reason) -> Packet<'static> {
        self.counters.refused += 1;
        nack(
            request.key.sid,
            request.key.token,
            reason,
            Ticket::default(),
        )
    }

    /// Notes a packet from the peer with the session's token, which validates its address.
    pub fn validated(&mut self, sid: u32) {
        if let Some(held) = self.sessions.get_mut(&sid)
            && held.stranger
        {
            held.stranger = false;
            self.strangers -= 1;
        }
    }

    /// Removes a session that has ended. Ignored for one that this side has not created.
    pub fn ended(&mut self, sid: u32) {
        if let Some(held) = self.sessions.remove(&sid) {
            self.strangers -= usize::from(held.stranger);
            self.attempts.remove(&held.key);
        }
    }
}

/// Grafts of this host, in the initiator's order, with the required services and with parameters whose ranges
/// allow the requested values.
fn choose(
    nego: &Nego<'_>,
    policy: &Policy<'_, impl AsRef<GraftInfo>>,
) -> Result<Vec<Choice>, Reason> {
    if !policy.listening {
        return Err(match succeeded(nego) {
            Some(_) => Reason::Succession,
            None => Reason::NoListener,
        });
    }
    if asks_stateless(nego) && !policy.tolerant {
        return Err(Reason::Reliable);
    }
    let mut services = Services::from_bits(nego.services);
    if Flight::Hello.of(&nego.extensions).is_some() {
        // Keys provide it with any graft.
        services = Services::ENCRYPTION.missing(services);
    }
    let choice = |(position, gid): (usize, &u16)| {
        let mut grafts = policy.grafts.iter().map(AsRef::as_ref);
        let graft = grafts.find(|g| g.gid == *gid)?;
        let mut params = Values::default();
        for (value, range) in params.iter_mut().zip(&graft.params) {
            *value = range.initial;
        }
        let count = graft.params.len();
        for asked in nego
            .params
            .iter()
            .filter(|p| usize::from(p.graft) == position)
        {
            let index = usize::from(asked.index);
            graft.params.get(index).filter(|p| p.allows(asked.value))?;
            *params.get_mut(index)? = asked.value;
        }
        let usable = graft.satisfies(services) && count <= params.len();
        usable.then_some(Choice {
            gid: *gid,
            params,
            count,
            first: position == 0,
        })
    };
    let choices: Vec<Choice> = nego.gids.iter().enumerate().filter_map(choice).collect();
    if choices.is_empty() {
        return Err(Reason::NoGraft);
    }
    if !policy.room {
        return Err(Reason::NoRoom);
    }
    Ok(choices)
}

const _: () = assert!(intf::VTL_NEGO_PARAMS as usize == size_of::<Values>() / size_of::<u32>());
