//! The life of one session at one host, from its handshake to its end.
//!
//! [`Lifecycle`] decides when a session counts as open, when to probe its peer or declare it dead, and how to
//! close it. Its driver
//! - calls [`Lifecycle::poll`] every 100 ms or so, with the session's state in the data plane;
//! - passes on events: `handle_*` for packets, [`Lifecycle::close`], [`Lifecycle::abort`] and
//!   [`Lifecycle::fail`] for local decisions;
//! - executes the returned actions.
//!
//! The negotiation is a type parameter `N` (`vtl_proto::nego::Initiator` in the daemon); an initiator holds one
//! until the peer has answered.
//!
//! Specification: `PROTOCOL.md`, section 4 for validation, early data and succession, section 6 for closing and
//! keepalive, section 9 for the timers.

const MS: u64 = 1_000_000;
/// Time after which a responder drops a session whose initiator is not validated (section 4).
pub const UNVALIDATED_NS: u64 = 5_000 * MS;
/// Silence of an idle peer after which keepalive probes are sent (section 6).
pub const KEEPALIVE_NS: u64 = 10_000 * MS;
/// How long after a keepalive probe another one is asked for, if no timeout has counted meanwhile: the graft repeats
/// it at each of its timeouts, the longest of which this is (section 5).
const ASK_AGAIN_NS: u64 = 3_000 * MS;
/// Silence after which a peer counts as dead, once [`DEAD_TIMEOUTS`] have passed, too (section 6).
pub const DEAD_NS: u64 = 15_000 * MS;
/// Minimum of unanswered probe timeouts and keepalive probes before a peer counts as dead.
pub const DEAD_TIMEOUTS: u32 = 3;
/// Maximum transmissions of CLOSE to a peer that does not answer (section 6).
pub const CLOSE_TRIES: u32 = 5;
/// Maximum transmissions of CLOSE while the negotiation has yet to confirm the session: as long as the
/// negotiation itself retries.
pub const UNCONFIRMED_TRIES: u32 = 45;
/// Retransmission interval of CLOSE, and the wait after the last one.
pub const CLOSE_NS: u64 = 200 * MS;
/// Copies of CLOSE with `ABORT`, sent at once since it is not retransmitted (section 6).
pub const ABORT_COPIES: u32 = 3;

/// This host's side of the handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Has sent NEGO.
    Initiator,
    /// Has answered NEGO.
    Responder,
}

/// State of a session. `N`: the negotiation of an initiator.
#[derive(Clone, Debug)]
pub enum Phase<N> {
    /// Initiator: awaiting the answer to NEGO.
    Opening(N),
    /// Data may be sent and received.
    Open(Handshake<N>),
    /// Closed by this host: only CLOSE and acknowledgements are sent.
    Closing(Closing<N>),
    /// Ended. The user may still read data that have arrived.
    Ended,
}

/// Progress of the handshake in an open session.
#[derive(Clone, Debug)]
pub enum Handshake<N> {
    /// Initiator: early data sent, awaiting the answer to NEGO, or to the last flight of the crypto handshake.
    Confirming(N),
    /// Responder: no packet with this host's token received yet.
    Unvalidated,
    /// Finished.
    Complete,
}

/// Retransmission state of CLOSE.
#[derive(Clone, Debug)]
pub struct Closing<N> {
    handshake: Handshake<N>,
    sent: u32,
    next_ns: u64,
}

/// State of a session in the data plane.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Observation {
    /// Counter of packets that show the peer alive: new acknowledgements, and DATA, new or duplicate. 0 until
    /// the first.
    pub heard: u64,
    /// Consecutive probe timeouts without an acknowledgement.
    pub timeouts: u32,
    /// Packets in flight.
    pub unacknowledged: u64,
    /// The peer's address is validated: a packet has come from it, and the last flight of the crypto handshake,
    /// if there is one.
    pub located: bool,
    /// The peer's packets arrive in another encapsulation than the path's state knows.
    pub rerouted: bool,
}

/// State of a session's successor (section 4, "Succession"), as far as closing the session depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Successor {
    /// None, or the application has been told of it.
    Known,
    /// The peer's first packet has arrived in it; the application has not been told yet.
    Shown,
    /// No packet of the peer has arrived in it.
    Silent,
}

/// A CLOSE from the peer; token and address have been checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerClose {
    /// `ABORT` is set.
    pub aborted: bool,
    /// The session is the successor of another one.
    pub succeeds: bool,
    /// State of the session's own successor.
    pub successor: Successor,
}

/// Reason of a session's end, as reported to its user.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EndReason {
    /// Closed in order by the peer, whose data have all been acknowledged.
    ClosedByPeer,
    /// Aborted by the peer, dead peer, or no packets get through.
    Failed,
    /// Ended by this host.
    Local,
    /// Ended at once by a stateless switch: its successor goes on.
    Cut,
}

/// CLOSE packets to send at the end of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Farewell {
    /// None.
    Nothing,
    /// One without `ABORT`.
    Close,
    /// [`ABORT_COPIES`] with `ABORT`.
    Abort,
}

/// End of a session; reported once.
#[must_use]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct End {
    /// CLOSE packets to send first.
    pub farewell: Farewell,
    /// Reason to report to the session's user. `None`: the user has closed the session itself, so free it.
    pub tell: Option<EndReason>,
}

/// Action for the driver to execute.
#[must_use]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Nothing.
    Nothing,
    /// Poll the negotiation, see [`Lifecycle::confirming`].
    Confirm,
    /// Switch to the encapsulation of the peer's packets.
    Reroute,
    /// Poll the path of an open session.
    Watch {
        /// The peer has been heard since the last poll.
        heard: bool,
        /// Send keepalive probes until one is acknowledged.
        probe: bool,
    },
    /// Send one CLOSE without `ABORT`.
    SendClose,
    /// End the session.
    End(End),
    /// Free the session: no user knows of it, and nothing is sent.
    Forget,
}

/// Reaction to a CLOSE from the peer.
#[must_use]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reaction {
    /// Ignore it; the peer retransmits a CLOSE that needs an answer.
    Ignore,
    /// Report the successor to the application, then pass the CLOSE again.
    ValidateSuccessor,
    /// Report the session to the application, then pass the CLOSE again.
    Validate,
    /// End the session.
    End(End),
    /// Free the session: no user knows of it, and nothing is sent.
    Forget,
}

/// State machine of a session; see the module.
#[derive(Clone, Debug)]
pub struct Lifecycle<N> {
    role: Role,
    phase: Phase<N>,
    /// [`Observation::heard`] when the peer was last heard, and that time.
    heard: u64,
    heard_ns: u64,
    /// Keepalive probes since then,
    probes: u32,
    /// and when the latest one was asked for.
    asked_ns: u64,
}

impl<N> Lifecycle<N> {
    /// Creates the session of an initiator, which opens it by `negotiation`.
    pub fn initiator(now: u64, negotiation: N) -> Self {
        Self::new(now, Role::Initiator, Phase::Opening(negotiation))
    }

    /// Creates the session of a responder, which answers a NEGO now.
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
            asked_ns: 0,
        }
    }

    /// State of the session.
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

    /// Whether the session is open and its handshake finished.
    pub fn is_settled(&self) -> bool {
        matches!(self.phase, Phase::Open(Handshake::Complete))
    }

    /// Whether keepalive probes have been sent since the peer was last heard.
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

    /// The negotiation that has yet to confirm the open session: early data, or the last flight of the crypto
    /// handshake.
    pub fn confirming(&mut self) -> Option<&mut N> {
        match self.handshake()? {
            Handshake::Confirming(negotiation) => Some(negotiation),
            _ => None,
        }
    }

    /// Whether the negotiation has yet to confirm the open session, as in [`Lifecycle::confirming`].
    pub fn is_confirming(&self) -> bool {
        match &self.phase {
            Phase::Open(handshake) | Phase::Closing(Closing { handshake, .. }) => {
                matches!(handshake, Handshake::Confirming(_))
            }
            Phase::Opening(_) | Phase::Ended => false,
        }
    }

    /// State of this session as the successor of another one. `located`: as in [`Observation`].
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

    /// Opens the initiator's session while the negotiation goes on: for early data, or once its keys are agreed.
    pub fn start_confirming(&mut self, now: u64) {
        match std::mem::replace(&mut self.phase, Phase::Ended) {
            Phase::Opening(negotiation) => {
                self.phase = Phase::Open(Handshake::Confirming(negotiation));
                self.heard_ns = now;
            }
            phase => self.phase = phase,
        }
    }

    /// Takes the peer's answer to NEGO (initiator), or the session's set-up in the data plane (responder).
    pub fn handle_established(&mut self, now: u64) {
        if matches!(self.phase, Phase::Opening(_)) {
            self.phase = Phase::Open(Handshake::Complete);
        }
        self.heard_ns = now;
    }

    /// Takes the answer that the negotiation waited for: it confirms the session, or names another one for its
    /// early data.
    pub fn handle_confirmed(&mut self) {
        if let Some(handshake @ Handshake::Confirming(_)) = self.handshake() {
            *handshake = Handshake::Complete;
        }
    }

    /// Takes [`Observation::heard`]: an acknowledgement confirms the session as an answer does.
    pub fn handle_heard(&mut self, heard: u64) {
        if heard != 0 {
            self.handle_confirmed();
        }
    }

    /// Takes the peer's first packet (responder). Returns whether to report the session to the application.
    pub fn handle_first_packet(&mut self) -> bool {
        if let Some(handshake @ Handshake::Unvalidated) = self.handshake() {
            *handshake = Handshake::Complete;
        }
        self.is_open()
    }

    /// Takes a SIZE, which shows the peer alive.
    pub fn handle_size(&mut self, now: u64) {
        if !matches!(self.phase, Phase::Open(Handshake::Unvalidated)) {
            self.heard_ns = now;
        }
    }

    /// Returns the action that is due.
    pub fn poll(&mut self, now: u64, seen: &Observation) -> Action {
        match &mut self.phase {
            Phase::Opening(_) | Phase::Ended => Action::Nothing,
            Phase::Closing(closing) if now < closing.next_ns => Action::Nothing,
            Phase::Closing(closing) => {
                closing.sent += 1;
                closing.next_ns = now + CLOSE_NS;
                // The peer may be unable to use data before the handshake completes.
                let max = match closing.handshake {
                    Handshake::Confirming(_) => UNCONFIRMED_TRIES,
                    Handshake::Unvalidated | Handshake::Complete => CLOSE_TRIES,
                };
                if closing.sent > max {
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

    /// Keepalive and dead-peer detection (section 6).
    fn poll_silence(&mut self, now: u64, seen: &Observation) -> Action {
        let heard = seen.heard != self.heard;
        if heard {
            self.heard = seen.heard;
            self.heard_ns = now;
            self.probes = 0;
        }
        let silent_ns = now.saturating_sub(self.heard_ns);
        if silent_ns > DEAD_NS && seen.timeouts.saturating_add(self.probes) >= DEAD_TIMEOUTS {
            return self.fail().map_or(Action::Nothing, Action::End);
        }
        // Packets in flight, or a probe under retransmission, elicit an answer already.
        let asks = seen.unacknowledged > 0 || seen.timeouts > 0;
        let is_asked = self.probes > 0 && now.saturating_sub(self.asked_ns) < ASK_AGAIN_NS;
        let probe = silent_ns > KEEPALIVE_NS && !asks && !is_asked;
        if probe {
            self.probes += 1;
            self.asked_ns = now;
        }
        Action::Watch { heard, probe }
    }

    /// Closes the session for its user. `aborted`: data may not have been delivered.
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

    /// Aborts the session on this host's behalf, to be reported to its user. `None` if it has ended.
    pub fn abort(&mut self) -> Option<End> {
        self.end(Farewell::Abort, EndReason::Local)
    }

    /// Ends a session that cannot go on, to be reported to its user. `None` if it has ended.
    pub fn fail(&mut self) -> Option<End> {
        self.end(Farewell::Nothing, EndReason::Failed)
    }

    /// Ends a session for its successor, by a stateless switch. Nothing is sent: the peer knows, or learns by the
    /// successor's first packet. `None` if it has ended.
    pub fn cut(&mut self) -> Option<End> {
        self.end(Farewell::Nothing, EndReason::Cut)
    }

    fn end(&mut self, farewell: Farewell, reason: EndReason) -> Option<End> {
        let tell = match std::mem::replace(&mut self.phase, Phase::Ended) {
            Phase::Ended => return None,
            Phase::Closing(_) => None,
            Phase::Opening(_) | Phase::Open(_) => Some(reason),
        };
        Some(End { farewell, tell })
    }

    /// Handles a CLOSE from the peer.
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
                // The initiator could not use it and stays with the predecessor.
                self.phase = Phase::Ended;
                return Reaction::Forget;
            }
            // All data in this session may have arrived, and an application that knows of the successor
            // continues there. The successor may have had no packet yet, and this CLOSE is retransmitted for a
            // short time only.
            if close.successor != Successor::Known {
                return Reaction::ValidateSuccessor;
            }
            EndReason::Failed
        } else {
            // Report the successor first: otherwise the application takes this for the end.
            match close.successor {
                Successor::Known => {}
                Successor::Shown => return Reaction::ValidateSuccessor,
                Successor::Silent => return Reaction::Ignore,
            }
            EndReason::ClosedByPeer
        };
        // A CLOSE validates the peer's address as any packet does, and may be the first to arrive: the
        // listening application gets the session, and its end.
        if unvalidated {
            self.handle_first_packet();
            return Reaction::Validate;
        }
        let end = self.end(Farewell::Close, reason);
        end.map_or(Reaction::Ignore, Reaction::End)
    }
}
