//! The side that opens a session.

use core::time::Duration;

use super::{
    Established, FIRST_WAIT, Flight, HEAD_START, MAX_WAIT, MIN_WAIT, NegoError, Reason, Values,
    Way, able,
    crypto::bound_nego,
    established, nanos,
    race::{Race, Run},
    succeeded, to,
};
use crate::{
    intf,
    services::{ParamRange, Services},
    wire::{Extensions, Gids, Header, Nego, Packet, Param, Params, Ticket},
};

/// A graft that is offered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Offered {
    /// The graft.
    pub gid: u16,
    /// Its parameters in this host's pool.
    pub params: Vec<ParamRange>,
    /// Parameters that shall not have their defaults: index and value.
    pub asked: Vec<(u8, u32)>,
}

impl Offered {
    /// The values of all its parameters.
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
    /// Grafts in order of preference, at least one. What does not fit into a NEGO is left out.
    pub grafts: Vec<Offered>,
    /// The path's round-trip time if known: retransmissions then start at twice that.
    pub known_rtt: Option<Duration>,
    /// How the peer may be reached, the best way first: data go ahead of the answer by that one. At
    /// least one.
    pub ways: Vec<Way>,
    /// From the first NEGO until giving up, usually [`super::PATIENCE`].
    pub patience: Duration,
    /// The peer's, from an earlier session.
    pub ticket: Option<Ticket>,
    /// With a ticket that was never used: data need not wait for the answer.
    pub early: Option<Early>,
    /// The peer's index and token of the session that this one succeeds; then there are no early
    /// data.
    pub succeeds: Option<(u32, u64)>,
}

/// How data go ahead of the answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Early {
    /// The peer's guard of the session, drawn by us.
    pub token: u64,
    /// The most payload bytes per packet that the peer took in the last session.
    pub max_payload: u16,
    /// Whether it took messages of several packets.
    pub long_messages: bool,
}

/// What is to be done now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Send this, by that way.
    Send(Packet<'static>, Way),
    /// Data may go from now on. The answer is still to come.
    Go(Established),
}

/// What an answer means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// There is a session.
    Opened(Established),
    /// The session to which data have gone already is there.
    Confirmed(Established),
    /// It is another one, perhaps by another graft, and what has gone already has not arrived: it
    /// must go again, to this one.
    Moved(Established),
    /// The peer has taken what [`Initiator::finish`] was given.
    Finished,
}

/// The side that opens. Call [`Initiator::poll`] at once and whenever [`Initiator::poll_at`] has
/// passed, [`Initiator::handle`] with each packet. An answer and an error end it.
#[derive(Clone, Debug)]
pub struct Initiator {
    offer: Offer,
    gids: Gids,
    params: Params,
    token: u64,
    begun_ns: u64,
    end_ns: u64,
    race: Race,
    /// When data may go.
    go_ns: Option<u64>,
    /// How they went.
    gone: Option<Established>,
    /// An answer has asked for another NEGO, without early data.
    returned: bool,
    /// The early data's session has been, and nothing was heard of it.
    used: bool,
    /// From the answer that asked for another NEGO.
    rtt: Option<Duration>,
    /// The crypto handshake's flight that NEGO carries.
    extensions: Vec<u8>,
    /// The peer's session, once that is the last one.
    finishing: Option<(u32, u64)>,
    critical: bool,
}

impl Initiator {
    /// Starts at `now_ns`; `token` guards packets to us.
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
            go_ns: None,
            gone: None,
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

    /// The same attempt without a graft that turned out to be of no use, in the time that is left;
    /// `None` if there is no other. `token` must be a new one. Not after [`Step::Go`].
    pub fn without(&self, gid: u16, now_ns: u64, token: u64) -> Option<Self> {
        let mut offer = self.offer.clone();
        offer.grafts.retain(|g| g.gid != gid);
        offer.early = None;
        if offer.grafts.is_empty() || self.gone.is_some() {
            return None;
        }
        let mut next = Self::new(offer, now_ns, token);
        next.end_ns = self.end_ns;
        Some(next)
    }

    /// What the crypto handshake has to protect of the NEGO.
    pub fn bound(&self) -> Vec<u8> {
        let header = match self.offer.succeeds {
            Some(_) => self.header(),
            None => able(Header::default()),
        };
        bound_nego(&self.nego(header))
    }

    /// Asks for a session with keys, before NEGO is sent: with the first flight of the handshake, which has
    /// protected [`Initiator::bound`]. There are no early data then. `required`: without keys there is no
    /// session.
    pub fn set_crypto(&mut self, flight: &[u8], required: bool) {
        self.offer.early = None;
        self.critical = required;
        self.extensions = Flight::Hello.emit(flight, required).unwrap_or_default();
    }

    /// The extensions that go with NEGO.
    pub fn extensions(&self) -> &[u8] {
        &self.extensions
    }

    /// Goes on after [`Answer::Opened`], whose answer came by that way, until the peer has the last flight of the
    /// handshake: [`Answer::Finished`]. Its patience begins anew.
    pub fn finish(&mut self, now_ns: u64, session: &Established, flight: &[u8], way: Way) {
        self.finishing = Some((session.peer_sid, session.peer_token));
        self.extensions = Flight::Finish
            .emit(flight, self.critical)
            .unwrap_or_default();
        self.end_ns = now_ns.saturating_add(nanos(self.offer.patience));
        self.offer.ways = vec![way];
        self.begin(now_ns, self.first_wait());
    }

    /// Whether it goes on with the last flight of the handshake.
    pub fn is_finishing(&self) -> bool {
        self.finishing.is_some()
    }

    /// Sends the NEGO from now on.
    fn begin(&mut self, now_ns: u64, wait: Duration) {
        let rtt = self.rtt.or(self.offer.known_rtt);
        self.race = Race::new(&self.offer.ways, now_ns, wait, rtt);
    }

    fn first_wait(&self) -> Duration {
        let rtt = self.rtt.or(self.offer.known_rtt);
        let wait = rtt.map_or(FIRST_WAIT, |rtt| rtt.saturating_mul(2));
        wait.clamp(MIN_WAIT, MAX_WAIT)
    }

    /// When [`Initiator::poll`] has something to do.
    pub fn poll_at(&self) -> u64 {
        let due_ns = self.race.due_ns().min(self.end_ns);
        self.go_ns.map_or(due_ns, |at| at.min(due_ns))
    }

    /// What is to be done now, if anything.
    ///
    /// # Errors
    /// When [`Offer::patience`] has passed: [`NegoError::TimedOut`], or that the ticket was used.
    pub fn poll(&mut self, now_ns: u64) -> Result<Option<Step>, NegoError> {
        if now_ns >= self.end_ns {
            return Err(if self.used {
                NegoError::Refused(Reason::Used)
            } else {
                NegoError::TimedOut
            });
        }
        if self.go_ns.is_some_and(|at| at <= now_ns) {
            self.go_ns = None;
            self.gone = self.early();
            return Ok(self.gone.map(Step::Go));
        }
        let Some(way) = self.race.next(now_ns) else {
            return Ok(None);
        };
        let is_early = self.offer.early.is_some() && self.offer.succeeds.is_none();
        if is_early && self.race.tries() == 1 && self.gone.is_none() {
            self.go_ns = Some(now_ns.saturating_add(nanos(HEAD_START)));
        }
        let nego = self.nego(self.header());
        Ok(Some(Step::Send(Packet::Nego(nego), way)))
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
        } else if let Some(early) = self.offer.early {
            header = to(ticket.sid, early.token);
        }
        able(header)
    }

    fn nego(&self, header: Header) -> Nego<'static> {
        let ticket = match self.finishing {
            // It proves no more, and must not be taken for one that opens a session.
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

    /// The session that data go to before the answer has come.
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
        })
    }

    /// Takes a packet from the peer, and by which way it came: that of the NEGO that it answers.
    /// Packets that do not prove knowledge of our token, and other types, change nothing: anybody can
    /// send those.
    ///
    /// # Errors
    /// The peer refuses, or answers what was not offered or what this host does not know.
    pub fn handle(
        &mut self,
        now_ns: u64,
        packet: &Packet<'_>,
        way: Way,
    ) -> Result<Option<Answer>, NegoError> {
        let (Packet::NegoAck(nego) | Packet::NegoNack(nego)) = packet else {
            return Ok(None);
        };
        let ours = nego.peer_token == self.token
            && nego.header.token == self.token
            && nego.header.sid == self.offer.sid;
        let Some(&Run { tries, sent_ns, .. }) = self.race.by(way).filter(|_| ours) else {
            return Ok(None);
        };
        if self.finishing.is_some() {
            // Earlier answers have a flight.
            let is_done = matches!(packet, Packet::NegoAck(_))
                && self.finishing == Some((nego.sid, nego.token))
                && Flight::Answer.of(&nego.extensions).is_none();
            return Ok(is_done.then_some(Answer::Finished));
        }
        // Whatever follows goes this way first.
        self.offer.ways.sort_by_key(|known| *known != way);
        if tries == 1 && !self.returned {
            self.rtt = Some(Duration::from_nanos(now_ns.saturating_sub(sent_ns)));
        }
        match packet {
            Packet::NegoNack(_) => self.refused(now_ns, nego, tries).map(|()| None),
            _ => self.accepted(now_ns, nego, tries).map(Some),
        }
    }

    /// `tries`: how often NEGO was sent by the way of the answer.
    fn refused(&mut self, now_ns: u64, nego: &Nego<'_>, tries: u32) -> Result<(), NegoError> {
        let reason = Reason::from(nego.reason);
        match reason {
            // Several copies of a NEGO may be answered like that: the first answer is heeded, and
            // others once the NEGO that returns its ticket should have been answered.
            Reason::Cookie if nego.ticket.sid != 0 => {
                if self.returned && tries < 2 {
                    return Ok(());
                }
                self.offer.ticket = Some(nego.ticket);
            }
            // No data have gone to what it opened.
            Reason::Used if self.gone.is_none() => {
                if self.offer.early.is_none() {
                    return Ok(()); // answers an earlier NEGO
                }
                self.offer.ticket = None;
            }
            // The answer to a second copy of our NEGO, once the session was over. Those of that
            // session may still come.
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
        self.go_ns = None;
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
            // To a peer that does not know the flag it is any session.
            return Err(NegoError::Refused(Reason::Succession));
        }
        let gid = nego.gids.first().copied().unwrap_or_default();
        let graft = self.offer.grafts.iter().find(|g| g.gid == gid);
        let graft = graft.ok_or(NegoError::NotOffered(gid))?;
        let values = self.values(graft, nego).ok_or(NegoError::Differs(gid))?;
        let mut session = established(nego, self.offer.max_payload, gid, values);
        // After several equal NEGOs nobody knows which one was answered.
        session.rtt = self.rtt.filter(|_| tries == 1 || self.returned);
        session.ticket = (nego.ticket.sid != 0).then_some(nego.ticket);
        let Some(gone) = self.gone else {
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
        // An earlier copy of our NEGO may have opened a session that took data, and of which this
        // peer knows nothing if it has started since.
        if nego.ticket.time < now_ns.saturating_sub(self.begun_ns).div_ceil(1_000_000) {
            return Err(NegoError::Restarted);
        }
        Ok(Answer::Moved(session))
    }

    /// The values in the answer, if they are all there, allowed, and those that we asked for.
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

/// Keeps the grafts that fit into a NEGO with what is asked of them, and lists that. Of the first
/// one all values are listed: data may go by it before the answer has come.
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
