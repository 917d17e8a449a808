//! The lifecycle of a session: each transition, and each timer at its bounds.
#![allow(missing_docs, non_snake_case)]

use vtl_core::session::{
    Action, CLOSE_NS, CLOSE_TRIES, DEAD_NS, DEAD_TIMEOUTS, End, EndReason, Farewell, Handshake,
    KEEPALIVE_NS, Lifecycle, Observation, PeerClose, Phase, Reaction, Successor, UNVALIDATED_NS,
};

const MS: u64 = 1_000_000;
/// When sessions begin.
const T: u64 = 1_000 * MS;

/// A negotiation; the lifecycle does not look at it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Negotiation(u32);

type Session = Lifecycle<Negotiation>;

fn opening() -> Session {
    Session::initiator(T, Negotiation(7))
}

/// An initiator's session whose answer has come.
fn open() -> Session {
    let mut session = opening();
    session.handle_established(T);
    session
}

/// An initiator's session that has sent early data.
fn confirming() -> Session {
    let mut session = opening();
    session.start_confirming(T);
    session
}

/// A responder's session without a packet of the peer.
fn unvalidated() -> Session {
    let mut session = Session::responder(T);
    session.handle_established(T);
    session
}

fn closing() -> Session {
    let mut session = open();
    assert_eq!(session.close(T, false), Action::SendClose);
    session
}

fn ended() -> Session {
    let mut session = open();
    assert!(session.fail().is_some());
    session
}

/// A session whose peer is known and has been heard once.
fn seen() -> Observation {
    Observation {
        located: true,
        heard: 0,
        ..Observation::default()
    }
}

fn orderly() -> PeerClose {
    PeerClose {
        aborted: false,
        succeeds: false,
        successor: Successor::Known,
    }
}

fn abortive() -> PeerClose {
    PeerClose {
        aborted: true,
        ..orderly()
    }
}

const WATCH: Action = Action::Watch {
    heard: false,
    probe: false,
};
const PROBE: Action = Action::Watch {
    heard: false,
    probe: true,
};
const HEARD: Action = Action::Watch {
    heard: true,
    probe: false,
};

/// The end of a session that its user has closed.
const QUIET: End = End {
    farewell: Farewell::Nothing,
    tell: None,
};

fn end(farewell: Farewell, reason: EndReason) -> End {
    End {
        farewell,
        tell: Some(reason),
    }
}

#[test]
fn opening__opens_with_the_answer() {
    let mut session = opening();
    assert!(session.is_initiator() && !session.is_open());
    assert_eq!(session.opening(), Some(&mut Negotiation(7)));
    assert_eq!(session.confirming(), None);
    assert_eq!(session.poll(T + DEAD_NS, &seen()), Action::Nothing);
    session.handle_established(T + DEAD_NS);
    assert!(session.is_settled());
    assert_eq!(session.opening(), None);
    // Silence counts from the answer on.
    let timeouts = Observation {
        timeouts: DEAD_TIMEOUTS,
        ..seen()
    };
    assert_eq!(session.poll(T + 2 * DEAD_NS, &timeouts), WATCH);
}

#[test]
fn opening__another_negotiation_takes_the_place_of_one() {
    let mut session = opening();
    *session.opening().unwrap() = Negotiation(8);
    assert_eq!(session.opening(), Some(&mut Negotiation(8)));
}

#[test]
fn opening__is_forgotten_when_it_is_closed() {
    for aborted in [false, true] {
        let mut session = opening();
        assert_eq!(session.close(T, aborted), Action::Forget);
        assert!(matches!(session.phase(), Phase::Ended));
    }
}

#[test]
fn opening__ignores_a_close() {
    let mut session = opening();
    for close in [orderly(), abortive()] {
        assert_eq!(session.handle_close(&close), Reaction::Ignore);
    }
    assert!(session.opening().is_some());
}

#[test]
fn confirming__is_open_and_polls_the_negotiation_only() {
    let mut session = confirming();
    assert!(session.is_open() && !session.is_settled() && session.is_confirming());
    assert_eq!(session.opening(), None);
    assert_eq!(session.confirming(), Some(&mut Negotiation(7)));
    // The negotiation ends by its own patience.
    let silent = Observation {
        timeouts: DEAD_TIMEOUTS,
        ..seen()
    };
    assert_eq!(session.poll(T + 2 * DEAD_NS, &silent), Action::Confirm);
}

#[test]
fn confirming__ends_with_the_answer_or_an_acknowledgement() {
    let mut session = confirming();
    session.handle_heard(0);
    assert!(session.is_confirming());
    session.handle_heard(1);
    assert!(session.is_settled());
    let mut session = confirming();
    session.handle_confirmed();
    assert!(session.is_settled());
    // Nothing but early data is confirmed.
    for mut session in [opening(), unvalidated(), ended()] {
        session.handle_confirmed();
        assert!(!session.is_settled());
    }
}

#[test]
fn confirming__goes_on_while_the_session_is_closing() {
    let mut session = confirming();
    assert_eq!(session.close(T, false), Action::SendClose);
    assert!(session.confirming().is_some());
    assert_eq!(session.fail(), Some(QUIET));
    assert!(!session.is_confirming());
}

#[test]
fn start_early__is_for_sessions_that_are_being_opened() {
    for mut session in [open(), unvalidated(), closing(), ended()] {
        session.start_confirming(T);
        assert!(!session.is_confirming());
    }
    let mut session = closing();
    session.start_confirming(T);
    assert!(matches!(session.phase(), Phase::Closing(_)));
}

#[test]
fn unvalidated__is_forgotten_after_5_s() {
    let mut session = unvalidated();
    assert!(!session.is_initiator() && session.is_open() && !session.is_settled());
    let nothing = Observation::default();
    // Whatever else it hears, as long as it does not know where the peer is, or who.
    let heard = Observation {
        heard: 3,
        ..nothing
    };
    session.handle_size(T + UNVALIDATED_NS);
    assert_eq!(session.poll(T + UNVALIDATED_NS, &heard), Action::Nothing);
    assert_eq!(session.poll(T + UNVALIDATED_NS + 1, &heard), Action::Forget);
    assert_eq!(
        session.poll(T + UNVALIDATED_NS + 2, &nothing),
        Action::Nothing
    );
}

/// A housekeeping turn has read the clock before the session was accepted in it.
#[test]
fn poll__of_a_session_younger_than_the_turn() {
    let nothing = Observation::default();
    assert_eq!(unvalidated().poll(T - MS, &nothing), Action::Nothing);
    assert_eq!(open().poll(T - MS, &seen()), WATCH);
}

#[test]
fn unvalidated__is_kept_once_a_packet_has_come() {
    let mut session = unvalidated();
    // The packet is there, and its event has not been read yet.
    assert_eq!(session.poll(T + UNVALIDATED_NS + 1, &seen()), WATCH);
    assert!(session.handle_first_packet());
    assert!(session.is_settled());
    let nothing = Observation::default();
    assert_eq!(session.poll(T + UNVALIDATED_NS + 2, &nothing), WATCH);
}

#[test]
fn unvalidated__tells_nobody_when_it_is_closing() {
    let mut session = unvalidated();
    assert_eq!(session.close(T, false), Action::SendClose);
    assert_eq!(session.as_successor(true), Successor::Shown);
    assert!(!session.handle_first_packet());
    assert_eq!(session.as_successor(true), Successor::Known);
}

#[test]
fn unvalidated__answers_a_close_once_the_application_knows() {
    let mut session = unvalidated();
    assert_eq!(session.handle_close(&orderly()), Reaction::Validate);
    assert!(session.is_settled(), "whoever listens gets it");
    let closed = end(Farewell::Close, EndReason::ClosedByPeer);
    assert_eq!(session.handle_close(&orderly()), Reaction::End(closed));
    assert_eq!(session.handle_close(&orderly()), Reaction::Ignore);

    let mut session = unvalidated();
    assert_eq!(session.handle_close(&abortive()), Reaction::Validate);
    let failed = end(Farewell::Close, EndReason::Failed);
    assert_eq!(session.handle_close(&abortive()), Reaction::End(failed));
}

#[test]
fn successor__that_its_initiator_aborts_at_once_is_forgotten() {
    let close = PeerClose {
        succeeds: true,
        ..abortive()
    };
    let mut session = unvalidated();
    assert_eq!(session.handle_close(&close), Reaction::Forget);
    assert_eq!(session.handle_close(&close), Reaction::Ignore);
    // Not when the application knows of it.
    let mut session = unvalidated();
    session.handle_first_packet();
    let failed = end(Farewell::Close, EndReason::Failed);
    assert_eq!(session.handle_close(&close), Reaction::End(failed));
    // Nor when it is closed in order.
    let close = PeerClose {
        succeeds: true,
        ..orderly()
    };
    assert_eq!(unvalidated().handle_close(&close), Reaction::Validate);
}

#[test]
fn successor__must_show_itself_before_a_close_is_answered() {
    let with = |successor| PeerClose {
        successor,
        ..orderly()
    };
    let mut session = open();
    for _ in 0..CLOSE_TRIES {
        let reaction = session.handle_close(&with(Successor::Silent));
        assert_eq!(reaction, Reaction::Ignore);
    }
    assert!(session.is_open());
    let reaction = session.handle_close(&with(Successor::Shown));
    assert_eq!(reaction, Reaction::ValidateSuccessor);
    let closed = end(Farewell::Close, EndReason::ClosedByPeer);
    let reaction = session.handle_close(&with(Successor::Known));
    assert_eq!(reaction, Reaction::End(closed));
    // An abort does not come again: it shows that the peer has gone over.
    let aborted = |successor| PeerClose {
        aborted: true,
        ..with(successor)
    };
    let mut session = open();
    for successor in [Successor::Silent, Successor::Shown] {
        let reaction = session.handle_close(&aborted(successor));
        assert_eq!(reaction, Reaction::ValidateSuccessor);
    }
    let failed = end(Farewell::Close, EndReason::Failed);
    let reaction = session.handle_close(&aborted(Successor::Known));
    assert_eq!(reaction, Reaction::End(failed));
    // Nor does a host that is closing.
    let reaction = closing().handle_close(&with(Successor::Silent));
    assert_eq!(reaction, Reaction::End(QUIET));
}

#[test]
fn as_successor__is_known_unless_the_peer_is_to_show_itself() {
    assert_eq!(unvalidated().as_successor(false), Successor::Silent);
    assert_eq!(unvalidated().as_successor(true), Successor::Shown);
    for session in [opening(), open(), confirming(), closing(), ended()] {
        assert_eq!(session.as_successor(false), Successor::Known);
    }
}

#[test]
fn poll__reroutes_first() {
    let mut session = open();
    let rerouted = Observation {
        rerouted: true,
        timeouts: DEAD_TIMEOUTS,
        ..seen()
    };
    assert_eq!(session.poll(T + DEAD_NS + 1, &rerouted), Action::Reroute);
    // Not before the handshake is over.
    assert_eq!(confirming().poll(T, &rerouted), Action::Confirm);
    assert_eq!(opening().poll(T, &rerouted), Action::Nothing);
    let late = Observation {
        located: false,
        ..rerouted
    };
    let mut session = unvalidated();
    assert_eq!(session.poll(T + UNVALIDATED_NS + 1, &late), Action::Forget);
}

#[test]
fn poll__notes_when_the_peer_was_heard() {
    let mut session = open();
    let heard = |heard| Observation { heard, ..seen() };
    assert_eq!(session.poll(T, &heard(0)), WATCH);
    assert_eq!(session.poll(T, &heard(3)), HEARD);
    assert_eq!(session.poll(T, &heard(3)), WATCH);
    // Early data that go to another session start the count anew.
    assert_eq!(session.poll(T, &heard(1)), HEARD);
}

#[test]
fn keepalive__begins_after_10_s_of_silence() {
    let mut session = open();
    assert_eq!(session.poll(T + KEEPALIVE_NS, &seen()), WATCH);
    assert!(!session.is_probing());
    assert_eq!(session.poll(T + KEEPALIVE_NS + 1, &seen()), PROBE);
    assert!(session.is_probing());
    // The graft repeats it, at its timeouts.
    for after in [100 * MS, 2_900 * MS] {
        assert_eq!(session.poll(T + KEEPALIVE_NS + after, &seen()), WATCH);
    }
    assert_eq!(session.poll(T + KEEPALIVE_NS + 3_001 * MS, &seen()), PROBE);
    // An acknowledgement is enough.
    let heard = Observation { heard: 1, ..seen() };
    let now = T + KEEPALIVE_NS + 2;
    assert_eq!(session.poll(now, &heard), HEARD);
    assert!(!session.is_probing());
    assert_eq!(session.poll(now + KEEPALIVE_NS, &heard), WATCH);
    assert_eq!(session.poll(now + KEEPALIVE_NS + 1, &heard), PROBE);
}

#[test]
fn keepalive__is_left_to_what_is_in_flight() {
    let mut session = open();
    let in_flight = Observation {
        unacknowledged: 1,
        ..seen()
    };
    assert_eq!(session.poll(T + KEEPALIVE_NS + 1, &in_flight), WATCH);
    let timed_out = Observation {
        timeouts: 1,
        ..seen()
    };
    assert_eq!(session.poll(T + KEEPALIVE_NS + 1, &timed_out), WATCH);
    assert!(!session.is_probing());
}

#[test]
fn keepalive__counts_from_an_answer_about_the_path() {
    let mut session = open();
    session.handle_size(T + KEEPALIVE_NS);
    assert_eq!(session.poll(T + 2 * KEEPALIVE_NS, &seen()), WATCH);
    assert_eq!(session.poll(T + 2 * KEEPALIVE_NS + 1, &seen()), PROBE);
}

#[test]
fn death__takes_15_s_and_three_timeouts() {
    let failed = end(Farewell::Nothing, EndReason::Failed);
    let timed_out = |timeouts| Observation {
        timeouts,
        unacknowledged: 1,
        ..seen()
    };
    let mut session = open();
    assert_eq!(session.poll(T + DEAD_NS, &timed_out(DEAD_TIMEOUTS)), WATCH);
    let late = T + DEAD_NS + 1;
    assert_eq!(session.poll(late, &timed_out(DEAD_TIMEOUTS - 1)), WATCH);
    assert_eq!(
        session.poll(late, &timed_out(DEAD_TIMEOUTS)),
        Action::End(failed)
    );
    assert_eq!(
        session.poll(late, &timed_out(DEAD_TIMEOUTS)),
        Action::Nothing
    );
}

#[test]
fn death__counts_keepalive_probes_that_were_not_sent_as_timeouts_too() {
    let failed = end(Farewell::Nothing, EndReason::Failed);
    let mut session = open();
    let mut now = T + KEEPALIVE_NS + 1;
    // A graft without timeouts is asked again by the session.
    for _ in 0..DEAD_TIMEOUTS {
        assert_eq!(session.poll(now, &seen()), PROBE);
        now += 3_000 * MS;
    }
    assert_eq!(session.poll(now, &seen()), Action::End(failed));
    // One with them counts them, and both are three.
    let mut session = open();
    assert_eq!(session.poll(T + KEEPALIVE_NS + 1, &seen()), PROBE);
    let timed_out = |timeouts| Observation { timeouts, ..seen() };
    assert_eq!(session.poll(T + DEAD_NS + 1, &timed_out(1)), WATCH);
    assert_eq!(
        session.poll(T + DEAD_NS + 1, &timed_out(2)),
        Action::End(failed)
    );
    // Who is heard in time lives.
    let mut session = open();
    assert_eq!(session.poll(T + DEAD_NS, &seen()), PROBE);
    let heard = Observation { heard: 1, ..seen() };
    assert_eq!(session.poll(T + DEAD_NS + 1, &heard), HEARD);
}

#[test]
fn close__is_repeated_five_times_200_ms_apart() {
    let mut session = closing();
    let (mut now, mut sent) = (T, 1);
    loop {
        assert_eq!(session.poll(now + CLOSE_NS - 1, &seen()), Action::Nothing);
        now += CLOSE_NS;
        match session.poll(now, &seen()) {
            Action::SendClose => sent += 1,
            action => {
                assert_eq!(action, Action::End(QUIET));
                break;
            }
        }
    }
    assert_eq!(sent, CLOSE_TRIES);
    assert_eq!(now, T + u64::from(CLOSE_TRIES) * CLOSE_NS);
    assert_eq!(session.poll(now + CLOSE_NS, &seen()), Action::Nothing);
}

#[test]
fn close__ends_with_the_peers_close() {
    for close in [orderly(), abortive()] {
        let mut session = closing();
        assert_eq!(session.handle_close(&close), Reaction::End(QUIET));
        assert_eq!(session.handle_close(&close), Reaction::Ignore);
        assert_eq!(session.poll(T + CLOSE_NS, &seen()), Action::Nothing);
    }
}

#[test]
fn close__with_abort_ends_at_once() {
    let aborted = Action::End(End {
        farewell: Farewell::Abort,
        tell: None,
    });
    for mut session in [open(), confirming(), unvalidated()] {
        assert_eq!(session.close(T, true), aborted);
        assert!(matches!(session.phase(), Phase::Ended));
    }
}

#[test]
fn close__again_changes_nothing() {
    for aborted in [false, true] {
        let mut session = closing();
        assert_eq!(session.close(T + 1, aborted), Action::Nothing);
        assert_eq!(session.poll(T + CLOSE_NS, &seen()), Action::SendClose);
    }
    // Who has read the end lets go.
    assert_eq!(ended().close(T, false), Action::Forget);
    assert_eq!(ended().close(T, true), Action::Forget);
}

#[test]
fn open__ends_with_the_peers_close() {
    let closed = end(Farewell::Close, EndReason::ClosedByPeer);
    let failed = end(Farewell::Close, EndReason::Failed);
    for mut session in [open(), confirming()] {
        assert_eq!(session.handle_close(&orderly()), Reaction::End(closed));
        assert!(!session.is_open() && !session.is_confirming());
    }
    assert_eq!(open().handle_close(&abortive()), Reaction::End(failed));
}

#[test]
fn abort__is_told_to_the_peer_and_the_user() {
    let aborted = end(Farewell::Abort, EndReason::Local);
    assert_eq!(open().abort(), Some(aborted));
    // A user that has closed the session learns nothing more.
    let quiet = End {
        farewell: Farewell::Abort,
        tell: None,
    };
    assert_eq!(closing().abort(), Some(quiet));
    assert_eq!(ended().abort(), None);
}

#[test]
fn fail__is_told_to_the_user() {
    let failed = end(Farewell::Nothing, EndReason::Failed);
    for mut session in [open(), confirming(), unvalidated()] {
        assert_eq!(session.fail(), Some(failed));
        assert_eq!(session.fail(), None, "once");
    }
    assert_eq!(closing().fail(), Some(QUIET));
}

#[test]
fn phase__shows_the_handshake() {
    assert!(matches!(opening().phase(), Phase::Opening(_)));
    let handshake = |session: Session| match session.phase() {
        Phase::Open(handshake) => handshake.clone(),
        phase => panic!("{phase:?}"),
    };
    assert!(matches!(handshake(confirming()), Handshake::Confirming(_)));
    assert!(matches!(handshake(unvalidated()), Handshake::Unvalidated));
    assert!(matches!(handshake(open()), Handshake::Complete));
}
