//! The life of one session at one host, from its handshake to its end.
//!
//! [`Lifecycle`] decides when a session counts as open, when its peer is asked for a sign of life or
//! counts as dead, and how it closes. Whoever drives it
//! - calls [`Lifecycle::poll`] every 100 ms or so, with what the data plane shows of the session;
//! - passes on what happens: `handle_*` for packets, [`Lifecycle::close`], [`Lifecycle::abort`] and
//!   [`Lifecycle::fail`] for what this host decides;
//! - carries out the answers.
//!
//! The negotiation itself is a type parameter `N`, of which an initiator has one until the peer's
//! answer has come (`vtl_proto::nego::Initiator` in the daemon).
//!
//! `PROTOCOL.md` is the specification: section 4 for validation, early data and succession, section
//! 6 for closing and silence, section 9 for the times.

const MS: u64 = 1_000_000;
/// Time after which a responder forgets a session that its peer has not validated (section 4).
pub const UNVALIDATED_NS: u64 = 5_000 * MS;
/// Silence after which an idle peer is sent keepalive probes (section 6).
pub const KEEPALIVE_NS: u64 = 10_000 * MS;
/// Silence after which a peer counts as dead, if [`DEAD_TIMEOUTS`] have passed (section 6).
pub const DEAD_NS: u64 = 15_000 * MS;
/// Unanswered probe timeouts, or keepalive probes, without which no peer counts as dead.
pub const DEAD_TIMEOUTS: u32 = 3;
/// CLOSE packets that a closing host sends in all while its peer does not answer (section 6).
pub const CLOSE_TRIES: u32 = 5;
/// The same while a negotiation is still to confirm what was sent: as long as that has patience.
pub const UNCONFIRMED_TRIES: u32 = 45;
/// Interval between two of them, and from the last one to the end.
pub const CLOSE_NS: u64 = 200 * MS;
/// CLOSE packets with `ABORT` that are sent at once, since none is repeated (section 6).
pub const ABORT_COPIES: u32 = 3;

/// Which side of the handshake this host is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// It has sent NEGO.
    Initiator,
    /// It has answered NEGO.
    Responder,
}

/// How far a session is. `N`: the negotiation of an initiator.
#[derive(Clone, Debug)]
pub enum Phase<N> {
    /// The initiator waits for the answer to its NEGO.
    Opening(N),
    /// Data may be sent and received.
    Open(Handshake<N>),
    /// This host has closed the session: nothing but CLOSE and acknowledgements is sent.
    Closing(Closing<N>),
    /// The session has ended. Its user may still read what has arrived.
    Ended,
}

/// What is left of the handshake of a session that data may be sent in.
#[derive(Clone, Debug)]
pub enum Handshake<N> {
    /// The initiator has sent data, and waits for an answer to its NEGO: the first one, or the one to the last flight of
    /// the crypto handshake.
    Confirming(N),
    /// The responder has not had a packet with its token yet.
    Unvalidated,
    /// Nothing.
    Complete,
}

/// Repetition of CLOSE.
#[derive(Clone, Debug)]
pub struct Closing<N> {
    handshake: Handshake<N>,
    sent: u32,
    next_ns: u64,
}

/// What the data plane shows of a session.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Observation {
    /// Count that changes with each packet by which the peer is heard: new acknowledgements, and
    /// DATA, new or duplicate. 0 until the first.
    pub heard: u64,
    /// Consecutive probe timeouts without an acknowledgement.
    pub timeouts: u32,
    /// Packets in flight.
    pub unacknowledged: u64,
    /// A packet of the peer has come, by which it can be reached; and the last flight of the crypto handshake, if
    /// there is one.
    pub located: bool,
    /// The peer's packets come by another way than before, which the path's state does not know yet.
    pub rerouted: bool,
}

/// The successor of a session (section 4, "Succession"), as far as the session's end depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Successor {
    /// There is none, or the application knows of it.
    Known,
    /// The peer's first packet in it has come, of which the application has not been told.
    Shown,
    /// Nothing of the peer has come in it yet.
    Silent,
}

/// A CLOSE of the peer, whose token and address are right.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerClose {
    /// It has `ABORT`.
    pub aborted: bool,
    /// The session succeeds another one.
    pub succeeds: bool,
    /// The session's own successor.
    pub successor: Successor,
}

/// Why a session ended, as its user learns it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EndReason {
    /// The peer has closed it in order, and has had all its data acknowledged.
    ClosedByPeer,
    /// The peer has aborted it, or is silent, or packets do not get through.
    Failed,
    /// This host has ended it.
    Local,
}

/// The CLOSE that a session ends with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Farewell {
    /// None.
    Nothing,
    /// One without `ABORT`.
    Close,
    /// [`ABORT_COPIES`] with `ABORT`.
    Abort,
}

/// The end of a session. It is told once.
#[must_use]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct End {
    /// What to send first.
    pub farewell: Farewell,
    /// What to tell the session's user. `None`: the user has closed it, so it can be forgotten.
    pub tell: Option<EndReason>,
}

/// What is to be done now.
#[must_use]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Nothing.
    Nothing,
    /// Poll the negotiation, see [`Lifecycle::confirming`].
    Confirm,
    /// Follow the peer's packets to the way by which they come.
    Reroute,
    /// Look after the path of an open session.
    Watch {
        /// The peer was heard since the last poll.
        heard: bool,
        /// Send keepalive probes until one is acknowledged.
        probe: bool,
    },
    /// Send one CLOSE without `ABORT`.
    SendClose,
    /// End the session.
    End(End),
    /// Forget the session: nobody knows of it, and nothing is sent.
    Forget,
}

/// What a CLOSE of the peer leads to.
#[must_use]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reaction {
    /// Nothing. If an answer is due, the CLOSE comes again.
    Ignore,
    /// Tell the application of the successor, then pass the CLOSE once more.
    ValidateSuccessor,
    /// Tell the application of the session, then pass the CLOSE once more.
    Validate,
    /// End the session.
    End(End),
    /// Forget the session: nobody knows of it, and nothing is sent.
    Forget,
}

/// The state machine; see the module.
#[derive(Clone, Debug)]
pub struct Lifecycle<N> {
    role: Role,
    phase: Phase<N>,
    /// [`Observation::heard`] when the peer was heard last, and that time.
    heard: u64,
    heard_ns: u64,
    /// Keepalive probes since then.
    probes: u32,
}

impl<N> Lifecycle<N> {
    /// The session of a host that opens it by `negotiation`.
    pub fn initiator(now: u64, negotiation: N) -> Self {
        Self::new(now, Role::Initiator, Phase::Opening(negotiation))
    }

    /// The session of a host that answers a NEGO now.
    pub fn responder(now: u64) -> Self {
        let phase = Phase::Open(Handshake::Unvalidated);
        Self::new(now, Role::Responder, phase)
    }

    fn new(now: u64, role: Role, phase: Phase<N>) -> Self {
        Self {
            role,
            phase,
            heard: 0,
            heard_ns: now,
            probes: 0,
        }
    }

    /// How far the session is.
    pub fn phase(&self) -> &Phase<N> {
        &self.phase
    }

    /// Whether this host has opened the session.
    pub fn is_initiator(&self) -> bool {
        self.role == Role::Initiator
    }

    /// Whether data may be sent.
    pub fn is_open(&self) -> bool {
        matches!(self.phase, Phase::Open(_))
    }

    /// Whether the session is open, and nothing is left of its handshake.
    pub fn is_settled(&self) -> bool {
        matches!(self.phase, Phase::Open(Handshake::Complete))
    }

    /// Whether keepalive probes have been sent since the peer was heard last.
    pub fn is_probing(&self) -> bool {
        self.probes > 0
    }

    /// The negotiation of a session that is being opened.
    pub fn opening(&mut self) -> Option<&mut N> {
        match &mut self.phase {
            Phase::Opening(negotiation) => Some(negotiation),
            _ => None,
        }
    }

    /// The negotiation that is still to confirm early data.
    pub fn confirming(&mut self) -> Option<&mut N> {
        match self.handshake()? {
            Handshake::Confirming(negotiation) => Some(negotiation),
            _ => None,
        }
    }

    /// Whether a negotiation is still to confirm early data.
    pub fn is_confirming(&self) -> bool {
        match &self.phase {
            Phase::Open(handshake) | Phase::Closing(Closing { handshake, .. }) => {
                matches!(handshake, Handshake::Confirming(_))
            }
            Phase::Opening(_) | Phase::Ended => false,
        }
    }

    /// This session as the successor of another one. `located`: as in [`Observation`].
    pub fn as_successor(&self, located: bool) -> Successor {
        match &self.phase {
            Phase::Open(Handshake::Unvalidated)
            | Phase::Closing(Closing {
                handshake: Handshake::Unvalidated,
                ..
            }) => match located {
                true => Successor::Shown,
                false => Successor::Silent,
            },
            _ => Successor::Known,
        }
    }

    fn handshake(&mut self) -> Option<&mut Handshake<N>> {
        match &mut self.phase {
            Phase::Open(handshake) | Phase::Closing(Closing { handshake, .. }) => Some(handshake),
            Phase::Opening(_) | Phase::Ended => None,
        }
    }

    /// The initiator sends data from now on, while the negotiation goes on.
    pub fn start_confirming(&mut self, now: u64) {
        match std::mem::replace(&mut self.phase, Phase::Ended) {
            Phase::Opening(negotiation) => {
                self.phase = Phase::Open(Handshake::Confirming(negotiation));
                self.heard_ns = now;
            }
            phase => self.phase = phase,
        }
    }

    /// The peer has answered the initiator's NEGO, or the data plane has the responder's session.
    pub fn handle_established(&mut self, now: u64) {
        if matches!(self.phase, Phase::Opening(_)) {
            self.phase = Phase::Open(Handshake::Complete);
        }
        self.heard_ns = now;
    }

    /// The peer's answer has confirmed the early data, or named another session for them.
    pub fn handle_confirmed(&mut self) {
        if let Some(handshake @ Handshake::Confirming(_)) = self.handshake() {
            *handshake = Handshake::Complete;
        }
    }

    /// Takes [`Observation::heard`]: an acknowledgement confirms early data as the answer does.
    pub fn handle_heard(&mut self, heard: u64) {
        if heard != 0 {
            self.handle_confirmed();
        }
    }

    /// The peer's first packet has come to the responder. Whether the application is to be told of
    /// the session.
    pub fn handle_first_packet(&mut self) -> bool {
        if let Some(handshake @ Handshake::Unvalidated) = self.handshake() {
            *handshake = Handshake::Complete;
        }
        self.is_open()
    }

    /// A SIZE has come, which shows that the peer lives.
    pub fn handle_size(&mut self, now: u64) {
        if !matches!(self.phase, Phase::Open(Handshake::Unvalidated)) {
            self.heard_ns = now;
        }
    }

    /// Decides what is to be done now.
    pub fn poll(&mut self, now: u64, seen: &Observation) -> Action {
        match &mut self.phase {
            Phase::Opening(_) | Phase::Ended => Action::Nothing,
            Phase::Closing(closing) if now < closing.next_ns => Action::Nothing,
            Phase::Closing(closing) => {
                closing.sent += 1;
                closing.next_ns = now + CLOSE_NS;
                // Until it is confirmed the peer may not be able to use what it has.
                let most = match closing.handshake {
                    Handshake::Confirming(_) => UNCONFIRMED_TRIES,
                    Handshake::Unvalidated | Handshake::Complete => CLOSE_TRIES,
                };
                if closing.sent > most {
                    self.end(Farewell::Nothing, EndReason::Local)
                        .map_or(Action::Nothing, Action::End)
                } else {
                    Action::SendClose
                }
            }
            Phase::Open(Handshake::Confirming(_)) => Action::Confirm,
            Phase::Open(Handshake::Unvalidated) if !seen.located => {
                if now.saturating_sub(self.heard_ns) <= UNVALIDATED_NS {
                    return Action::Nothing;
                }
                self.phase = Phase::Ended;
                Action::Forget
            }
            Phase::Open(_) if seen.rerouted => Action::Reroute,
            Phase::Open(_) => self.poll_silence(now, seen),
        }
    }

    /// Keepalive, and death by silence (section 6).
    fn poll_silence(&mut self, now: u64, seen: &Observation) -> Action {
        let heard = seen.heard != self.heard;
        if heard {
            self.heard = seen.heard;
            self.heard_ns = now;
            self.probes = 0;
        }
        let silent_ns = now.saturating_sub(self.heard_ns);
        if silent_ns > DEAD_NS && seen.timeouts.max(self.probes) >= DEAD_TIMEOUTS {
            return self.fail().map_or(Action::Nothing, Action::End);
        }
        // What is in flight, or a probe whose timeouts have begun, asks already.
        let asks = seen.unacknowledged > 0 || seen.timeouts > 0;
        let probe = silent_ns > KEEPALIVE_NS && !asks;
        self.probes += u32::from(probe);
        Action::Watch { heard, probe }
    }

    /// The session's user closes it. `aborted`: something may not have been delivered.
    pub fn close(&mut self, now: u64, aborted: bool) -> Action {
        match std::mem::replace(&mut self.phase, Phase::Ended) {
            Phase::Opening(_) | Phase::Ended => Action::Forget,
            phase @ Phase::Closing(_) => {
                self.phase = phase;
                Action::Nothing
            }
            Phase::Open(_) if aborted => Action::End(End {
                farewell: Farewell::Abort,
                tell: None,
            }),
            Phase::Open(handshake) => {
                self.phase = Phase::Closing(Closing {
                    handshake,
                    sent: 1,
                    next_ns: now + CLOSE_NS,
                });
                Action::SendClose
            }
        }
    }

    /// This host ends the session without its user, who learns of it. `None` if it has ended.
    pub fn abort(&mut self) -> Option<End> {
        self.end(Farewell::Abort, EndReason::Local)
    }

    /// The session cannot go on, and its user learns of it. `None` if it has ended.
    pub fn fail(&mut self) -> Option<End> {
        self.end(Farewell::Nothing, EndReason::Failed)
    }

    fn end(&mut self, farewell: Farewell, reason: EndReason) -> Option<End> {
        let tell = match std::mem::replace(&mut self.phase, Phase::Ended) {
            Phase::Ended => return None,
            Phase::Closing(_) => None,
            Phase::Opening(_) | Phase::Open(_) => Some(reason),
        };
        Some(End { farewell, tell })
    }

    /// Takes a CLOSE of the peer.
    pub fn handle_close(&mut self, close: &PeerClose) -> Reaction {
        let unvalidated = match &self.phase {
            Phase::Opening(_) | Phase::Ended => return Reaction::Ignore,
            Phase::Closing(_) => {
                let end = self.end(Farewell::Nothing, EndReason::Local);
                return end.map_or(Reaction::Ignore, Reaction::End);
            }
            Phase::Open(handshake) => matches!(handshake, Handshake::Unvalidated),
        };
        let reason = if close.aborted {
            if close.succeeds && unvalidated {
                // Its initiator could not use it, and goes on with the session before.
                self.phase = Phase::Ended;
                return Reaction::Forget;
            }
            // What the peer sent here may all have come, and the application goes on where it knows of
            // the successor. Nothing need have come there yet, and this CLOSE is not repeated for long.
            if close.successor != Successor::Known {
                return Reaction::ValidateSuccessor;
            }
            EndReason::Failed
        } else {
            // The application must know of the successor first: it would take this for the end.
            match close.successor {
                Successor::Known => {}
                Successor::Shown => return Reaction::ValidateSuccessor,
                Successor::Silent => return Reaction::Ignore,
            }
            EndReason::ClosedByPeer
        };
        // A CLOSE proves the peer's address as any packet does, and may be the first that comes: the
        // application that listens gets the session, and its end.
        if unvalidated {
            self.handle_first_packet();
            return Reaction::Validate;
        }
        let end = self.end(Farewell::Close, reason);
        end.map_or(Reaction::Ignore, Reaction::End)
    }
}
