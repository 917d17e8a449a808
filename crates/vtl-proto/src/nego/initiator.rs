//! The initiator of a session.

use core::time::Duration;

use super::{
    Encapsulation, Established, FIRST_WAIT, Flight, HEAD_START, MAX_WAIT, MIN_WAIT, NegoError,
    Reason, Values, asks_stateless,
    crypto::bound_nego,
    established, nanos,
    race::{Race, Run},
    succeeded, to, with_capabilities,
};
use crate::{
    intf,
    services::{ParamRange, Services},
    wire::{Extensions, Gids, Header, Nego, Packet, Param, Params, Ticket},
};

/// A graft in an offer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Offered {
    /// The graft.
    pub gid: u16,
    /// Its parameters in this host's pool.
    pub params: Vec<ParamRange>,
    /// Parameters that differ from their defaults: index and value.
    pub asked: Vec<(u8, u32)>,
}

impl Offered {
    /// The values of all parameters.
    fn values(&self) -> Values {
        let mut values = Values::default();
        for (value, range) in values.iter_mut().zip(&self.params) {
            *value = range.initial;
        }
        for (index, asked) in &self.asked {
            if let Some(value) = values.get_mut(usize::from(*index)) {
                *value = *asked;
            }
        }
        values
    }
}

/// The initiator's requirements and offer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Offer {
    /// This host's session index, not 0.
    pub sid: u32,
    /// Slots of this host's receive ring, 1 to `intf::VTL_MAX_WINDOW`.
    pub ring_slots: u32,
    /// Maximum payload of a packet that this host accepts, bytes, [`crate::wire::MIN_PAYLOAD`] to
    /// `intf::VTL_MAX_PAYLOAD`.
    pub max_payload: u16,
    /// Destination port, not 0.
    pub port: u16,
    /// Services that the graft must provide.
    pub services: Services,
    /// Grafts in order of preference, at least one. Those that do not fit into a NEGO are omitted.
    pub grafts: Vec<Offered>,
    /// The path's round-trip time, if known: the retransmission timeout starts at twice that.
    pub known_rtt: Option<Duration>,
    /// Encapsulations to try, the preferred one first, which early data use. At least one.
    pub encapsulations: Vec<Encapsulation>,
    /// Time from the first NEGO until giving up, usually [`super::PATIENCE`].
    pub patience: Duration,
    /// The peer's ticket, from an earlier session.
    pub ticket: Option<Ticket>,
    /// Early data, which need a ticket that was never used.
    pub early: Option<Early>,
    /// The peer's index and token of the session to succeed; excludes early data.
    pub succeeds: Option<(u32, u64)>,
    /// Ask for a stateless switch: that session may end at once, with what is in flight. A peer that does not know of
    /// it opens the successor without: [`Established::stateless`].
    pub stateless: bool,
}

/// Parameters of early data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Early {
    /// The peer's token of the session, drawn by this host.
    pub token: u64,
    /// Maximum payload of a packet that the peer accepted in the last session, bytes.
    pub max_payload: u16,
    /// Whether the peer accepted messages of several packets.
    pub long_messages: bool,
}

/// Action of the initiator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Send this packet in this encapsulation.
    Send(Packet<'static>, Encapsulation),
    /// Send early data from now on, before the answer.
    OpenEarly(Established),
}

/// Result of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The session is open.
    Opened(Established),
    /// The session of the early data is confirmed.
    Confirmed(Established),
    /// Early data were rejected: another session is open, perhaps over another graft, in which they must be
    /// retransmitted.
    Moved(Established),
    /// The peer has accepted the flight given to [`Initiator::finish`].
    Finished,
}

/// The initiator's state machine. Call [`Initiator::poll`] at once and whenever [`Initiator::poll_at`] has
/// passed, [`Initiator::handle`] for each packet. An answer and an error end it.
#[derive(Clone, Debug)]
pub struct Initiator {
    offer: Offer,
    gids: Gids,
    params: Params,
    token: u64,
    begun_ns: u64,
    end_ns: u64,
    race: Race,
    /// When to send early data.
    early_ns: Option<u64>,
    /// The session of early data sent.
    opened_early: Option<Established>,
    /// An answer has requested another NEGO, without early data.
    returned: bool,
    /// NACK `Used` has answered early data: their session has ended, and no answer in it was received.
    used: bool,
    /// Round-trip sample by the answer that requested another NEGO.
    rtt: Option<Duration>,
    /// Extensions of NEGO: the crypto handshake's flight.
    extensions: Vec<u8>,
    /// The peer's index and token, once the last flight is being sent.
    finishing: Option<(u32, u64)>,
    critical: bool,
}

impl Initiator {
    /// Starts at `now_ns`; `token`: of packets to this host.
    pub fn new(mut offer: Offer, now_ns: u64, token: u64) -> Self {
        let params = fit(&mut offer.grafts);
        let gids: Vec<u16> = offer.grafts.iter().map(|g| g.gid).collect();
        if offer.ticket.is_none() || offer.succeeds.is_some() {
            offer.early = None;
        }
        let mut initiator = Self {
            gids: Gids::new(&gids).unwrap_or_default(),
            params: Params::new(&params).unwrap_or_default(),
            offer,
            token,
            begun_ns: now_ns,
            end_ns: 0,
            race: Race::new(&[], now_ns, FIRST_WAIT, None),
            early_ns: None,
            opened_early: None,
            returned: false,
            used: false,
            rtt: None,
            extensions: Vec::new(),
            finishing: None,
            critical: false,
        };
        initiator.end_ns = now_ns.saturating_add(nanos(initiator.offer.patience));
        initiator.begin(now_ns, initiator.first_wait());
        initiator
    }

    /// Restarts the attempt without an unusable graft, within the remaining time; `None` if there is no other.
    /// `token` must be a new one. Not after [`Step::OpenEarly`].
    pub fn without(&self, gid: u16, now_ns: u64, token: u64) -> Option<Self> {
        let mut offer = self.offer.clone();
        offer.grafts.retain(|g| g.gid != gid);
        offer.early = None;
        if offer.grafts.is_empty() || self.opened_early.is_some() {
            return None;
        }
        let mut next = Self::new(offer, now_ns, token);
        next.end_ns = self.end_ns;
        Some(next)
    }

    /// The bytes of NEGO that the crypto handshake must protect.
    pub fn bound(&self) -> Vec<u8> {
        let header = match self.offer.succeeds {
            Some(_) => self.header(),
            None => with_capabilities(Header::default()),
        };
        bound_nego(&self.nego(header))
    }

    /// Requests a session with keys, before NEGO is sent. `flight`: the first flight of the handshake, which
    /// protects [`Initiator::bound`]. Disables early data. `required`: fail without keys.
    pub fn set_crypto(&mut self, flight: &[u8], required: bool) {
        self.offer.early = None;
        self.critical = required;
        self.extensions = Flight::Hello.emit(flight, required).unwrap_or_default();
    }

    /// The extensions to send with NEGO.
    pub fn extensions(&self) -> &[u8] {
        &self.extensions
    }

    /// Continues after [`Answer::Opened`], whose answer came in `encapsulation`, until the peer has the handshake's last
    /// flight: [`Answer::Finished`]. Restarts the timeout.
    pub fn finish(
        &mut self,
        now_ns: u64,
        session: &Established,
        flight: &[u8],
        encapsulation: Encapsulation,
    ) {
        self.finishing = Some((session.peer_sid, session.peer_token));
        self.extensions = Flight::Finish
            .emit(flight, self.critical)
            .unwrap_or_default();
        self.end_ns = now_ns.saturating_add(nanos(self.offer.patience));
        self.offer.encapsulations = vec![encapsulation];
        self.begin(now_ns, self.first_wait());
    }

    /// Whether the handshake's last flight is being sent.
    pub fn is_finishing(&self) -> bool {
        self.finishing.is_some()
    }

    /// (Re)starts sending NEGO.
    fn begin(&mut self, now_ns: u64, wait: Duration) {
        let rtt = self.rtt.or(self.offer.known_rtt);
        self.race = Race::new(&self.offer.encapsulations, now_ns, wait, rtt);
    }

    fn first_wait(&self) -> Duration {
        let rtt = self.rtt.or(self.offer.known_rtt);
        let wait = rtt.map_or(FIRST_WAIT, |rtt| rtt.saturating_mul(2));
        wait.clamp(MIN_WAIT, MAX_WAIT)
    }

    /// Time of the next [`Initiator::poll`].
    pub fn poll_at(&self) -> u64 {
        let due_ns = self.race.due_ns().min(self.end_ns);
        self.early_ns.map_or(due_ns, |at| at.min(due_ns))
    }

    /// Returns the action that is due, if any.
    ///
    /// # Errors
    /// [`Offer::patience`] has passed: [`NegoError::TimedOut`], or the ticket was used.
    pub fn poll(&mut self, now_ns: u64) -> Result<Option<Step>, NegoError> {
        if now_ns >= self.end_ns {
            return Err(if self.used {
                NegoError::Refused(Reason::Used)
            } else {
                NegoError::TimedOut
            });
        }
        if self.early_ns.is_some_and(|at| at <= now_ns) {
            self.early_ns = None;
            self.opened_early = self.early();
            return Ok(self.opened_early.map(Step::OpenEarly));
        }
        let Some(encapsulation) = self.race.next(now_ns) else {
            return Ok(None);
        };
        let is_early = self.offer.early.is_some() && self.offer.succeeds.is_none();
        if is_early && self.race.tries() == 1 && self.opened_early.is_none() {
            self.early_ns = Some(now_ns.saturating_add(nanos(HEAD_START)));
        }
        let nego = self.nego(self.header());
        Ok(Some(Step::Send(Packet::Nego(nego), encapsulation)))
    }

    /// NEGO's header.
    fn header(&self) -> Header {
        let ticket = self.offer.ticket.unwrap_or_default();
        let mut header = Header::default();
        if let Some((sid, token)) = self.finishing {
            header = to(sid, token);
        } else if let Some((sid, token)) = self.offer.succeeds {
            header = to(sid, token);
            header.flags = intf::VTL_F_SUCCEED as u8;
            if self.offer.stateless {
                header.flags |= intf::VTL_F_STATELESS as u8;
            }
        } else if let Some(early) = self.offer.early {
            header = to(ticket.sid, early.token);
        }
        with_capabilities(header)
    }

    fn nego(&self, header: Header) -> Nego<'static> {
        let ticket = match self.finishing {
            // It proves nothing more, and must not be mistaken for one that opens a session.
            Some(_) => None,
            None => self.offer.ticket,
        };
        Nego {
            header,
            token: self.token,
            peer_token: 0,
            sid: self.offer.sid,
            ring_slots: self.offer.ring_slots,
            max_payload: self.offer.max_payload,
            port: self.offer.port,
            services: self.offer.services.bits(),
            reason: 0,
            gids: self.gids,
            ticket: ticket.unwrap_or_default(),
            params: self.params,
            extensions: Extensions::default(),
        }
    }

    /// The session of early data.
    fn early(&self) -> Option<Established> {
        let (ticket, early) = (self.offer.ticket?, self.offer.early?);
        let graft = self.offer.grafts.first()?;
        Some(Established {
            peer_sid: ticket.sid,
            peer_token: early.token,
            peer_slots: intf::VTL_EARLY_WINDOW,
            max_payload: early.max_payload.min(self.offer.max_payload),
            long_messages: early.long_messages,
            gid: graft.gid,
            params: graft.values(),
            rtt: None,
            ticket: None,
            stateless: false,
        })
    }

    /// Handles a packet from the peer, which came in `encapsulation`, that of the NEGO that it answers. Ignores other
    /// types, and packets without our token, which anybody can send.
    ///
    /// # Errors
    /// The peer refuses, or its answer was not offered or is unknown to this host.
    pub fn handle(
        &mut self,
        now_ns: u64,
        packet: &Packet<'_>,
        encapsulation: Encapsulation,
    ) -> Result<Option<Answer>, NegoError> {
        let (Packet::NegoAck(nego) | Packet::NegoNack(nego)) = packet else {
            return Ok(None);
        };
        let ours = nego.peer_token == self.token
            && nego.header.token == self.token
            && nego.header.sid == self.offer.sid;
        let Some(&Run { tries, sent_ns, .. }) = self.race.by(encapsulation).filter(|_| ours) else {
            return Ok(None);
        };
        if self.finishing.is_some() {
            // Duplicates of earlier answers have a flight.
            let is_done = matches!(packet, Packet::NegoAck(_))
                && self.finishing == Some((nego.sid, nego.token))
                && Flight::Answer.of(&nego.extensions).is_none();
            return Ok(is_done.then_some(Answer::Finished));
        }
        // Prefer this encapsulation from now on.
        self.offer
            .encapsulations
            .sort_by_key(|known| *known != encapsulation);
        if tries == 1 && !self.returned {
            self.rtt = Some(Duration::from_nanos(now_ns.saturating_sub(sent_ns)));
        }
        match packet {
            Packet::NegoNack(_) => self.refused(now_ns, nego, tries).map(|()| None),
            _ => self.accepted(now_ns, nego, tries).map(Some),
        }
    }

    /// `tries`: transmissions of NEGO in the answer's encapsulation.
    fn refused(&mut self, now_ns: u64, nego: &Nego<'_>, tries: u32) -> Result<(), NegoError> {
        let reason = Reason::from(nego.reason);
        match reason {
            // Copies of a NEGO may all be answered so: heed the first answer, and others once the NEGO with its
            // ticket should have been answered.
            Reason::Cookie if nego.ticket.sid != 0 => {
                if self.returned && tries < 2 {
                    return Ok(());
                }
                self.offer.ticket = Some(nego.ticket);
            }
            // No early data were sent.
            Reason::Used if self.opened_early.is_none() => {
                if self.offer.early.is_none() {
                    return Ok(()); // answer to an earlier NEGO
                }
                self.offer.ticket = None;
            }
            // Answer to a duplicate of our NEGO, after the session's end. That session's answers may still
            // arrive.
            Reason::Used => {
                self.used = true;
                return Ok(());
            }
            _ => return Err(NegoError::Refused(reason)),
        }
        let wait = match self.returned {
            false => self.first_wait(),
            true => self.race.wait(),
        };
        self.returned = true;
        self.offer.early = None;
        self.early_ns = None;
        self.begin(now_ns, wait);
        Ok(())
    }

    fn accepted(&mut self, now_ns: u64, nego: &Nego<'_>, tries: u32) -> Result<Answer, NegoError> {
        if let Some(kind) = nego.extensions.unknown_critical() {
            return Err(NegoError::Extension(kind));
        }
        if self.critical && Flight::Answer.of(&nego.extensions).is_none() {
            return Err(NegoError::Clear);
        }
        if self.offer.succeeds.is_some() && succeeded(nego).is_none() {
            // A peer that does not know the flag takes it for any session.
            return Err(NegoError::Refused(Reason::Succession));
        }
        let gid = nego.gids.first().copied().unwrap_or_default();
        let graft = self.offer.grafts.iter().find(|g| g.gid == gid);
        let graft = graft.ok_or(NegoError::NotOffered(gid))?;
        let values = self.values(graft, nego).ok_or(NegoError::Differs(gid))?;
        let mut session = established(nego, self.offer.max_payload, gid, values);
        // Karn's rule: no sample after retransmissions, whose answer is ambiguous.
        session.rtt = self.rtt.filter(|_| tries == 1 || self.returned);
        session.ticket = (nego.ticket.sid != 0).then_some(nego.ticket);
        session.stateless = self.offer.stateless && asks_stateless(nego);
        let Some(gone) = self.opened_early else {
            return Ok(Answer::Opened(session));
        };
        let same = (gone.peer_sid, gone.peer_token) == (session.peer_sid, session.peer_token);
        let agreed = (gone.gid, gone.params) == (session.gid, session.params);
        let less = session.max_payload < gone.max_payload
            || (gone.long_messages && !session.long_messages);
        if less || (same && !agreed) {
            return Err(NegoError::Changed);
        }
        (session.max_payload, session.long_messages) = (gone.max_payload, gone.long_messages);
        if same {
            return Ok(Answer::Confirmed(session));
        }
        // If the peer has restarted since, the session that took the data, opened by a former copy of our NEGO,
        // is unknown to it.
        if nego.ticket.time < now_ns.saturating_sub(self.begun_ns).div_ceil(1_000_000) {
            return Err(NegoError::Restarted);
        }
        Ok(Answer::Moved(session))
    }

    /// The values in the answer, if complete, within range, and as requested.
    fn values(&self, graft: &Offered, nego: &Nego<'_>) -> Option<Values> {
        let mut values = Values::default();
        let complete = nego.params.len() == graft.params.len()
            && nego.params.iter().enumerate().all(|(i, p)| {
                values[i] = p.value;
                usize::from(p.index) == i && graft.params[i].allows(p.value)
            });
        let wanted = graft.values();
        let first = self.offer.grafts.first() == Some(graft);
        let kept = |i: usize| values[i] == wanted[i];
        let asked = |i: usize| {
            first
                || graft
                    .asked
                    .iter()
                    .any(|(index, _)| usize::from(*index) == i)
        };
        let agreed = (0..graft.params.len()).all(|i| kept(i) || !asked(i));
        (complete && agreed).then_some(values)
    }
}

/// Retains the grafts that fit into a NEGO with their requested parameters, and lists those. All values of the
/// first one are listed, since early data may use it.
fn fit(grafts: &mut Vec<Offered>) -> Vec<Param> {
    let mut list = Vec::new();
    let mut count = 0u8;
    grafts.retain(|graft| {
        let values = graft.values();
        let asked: Vec<usize> = if count == 0 {
            (0..graft.params.len()).collect()
        } else {
            graft.asked.iter().map(|(i, _)| usize::from(*i)).collect()
        };
        let possible = asked
            .iter()
            .all(|i| graft.params.get(*i).is_some_and(|p| p.allows(values[*i])));
        let fits = u32::from(count) < intf::VTL_NEGO_GRAFTS
            && graft.params.len() <= values.len()
            && list.len() + asked.len() <= intf::VTL_NEGO_PARAMS as usize;
        if fits && possible {
            list.extend(asked.iter().map(|i| Param {
                graft: count,
                index: *i as u8,
                value: values[*i],
            }));
            count += 1;
        }
        fits && possible
    });
    list
}
