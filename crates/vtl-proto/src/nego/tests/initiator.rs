//! The initiator: transmissions, encapsulations, and accepted answers.

use super::*;

#[test]
fn initiator__retransmits_then_gives_up() {
    let mut initiator = Initiator::new(offer(), 0, 1);
    let mut sent = Vec::new();
    let mut now = 0;
    let end = loop {
        if now > 0 {
            assert_eq!(initiator.poll(now - 1), Ok(None));
        }
        match initiator.poll(now) {
            Ok(step) => assert!(matches!(
                step,
                Some(Step::Send(Packet::Nego(_), Encapsulation::Native))
            )),
            Err(error) => break error,
        }
        sent.push(now / MS);
        now = initiator.poll_at();
    };
    assert_eq!(end, NegoError::TimedOut);
    assert_eq!(sent, [0, 300, 900, 2100, 4500]);
    assert_eq!(now, 9000 * MS);
}

#[test]
fn initiator__waits_follow_the_known_rtt() {
    let due = |rtt_ms| {
        let known_rtt = Some(Duration::from_millis(rtt_ms));
        let offer = Offer {
            known_rtt,
            ..offer()
        };
        let mut initiator = Initiator::new(offer, 0, 1);
        next_nego(&mut initiator);
        initiator.poll_at() / MS
    };
    assert_eq!(
        [due(0), due(100), due(600), due(100_000)],
        [100, 200, 1200, 5000]
    );
}

/// Goes by UDP if nothing comes back.
fn both(known_rtt: Option<Duration>) -> Offer {
    Offer {
        encapsulations: vec![Encapsulation::Native, Encapsulation::Udp],
        known_rtt,
        ..offer()
    }
}

#[test]
fn initiator__tries_the_second_encapsulation_a_little_later() {
    let sent = |rtt_ms: Option<u64>| {
        let mut initiator = Initiator::new(both(rtt_ms.map(Duration::from_millis)), 0, 1);
        let send = |_| {
            let now = initiator.poll_at();
            match initiator.poll(now) {
                Ok(Some(Step::Send(_, encapsulation))) => (now / MS, encapsulation),
                other => panic!("{other:?}"),
            }
        };
        (0..5).map(send).collect::<Vec<_>>()
    };
    let (native, udp) = (Encapsulation::Native, Encapsulation::Udp);
    let unknown = [
        (0, native),
        (250, udp),
        (300, native),
        (550, udp),
        (900, native),
    ];
    assert_eq!(sent(None), unknown);
    let near = [
        (0, native),
        (50, udp),
        (100, native),
        (150, udp),
        (300, native),
    ];
    assert_eq!(sent(Some(1)), near);
    let far = [
        (0, native),
        (900, udp),
        (1200, native),
        (2100, udp),
        (3600, native),
    ];
    assert_eq!(sent(Some(600)), far);
}

#[test]
fn initiator__the_first_answer_decides() {
    let grafts = [reliable(9)];
    let mut initiator = Initiator::new(both(None), 0, 1);
    let (by_native, by_udp) = (next_nego(&mut initiator), next_nego(&mut initiator));
    assert_eq!(by_native, by_udp, "one request");
    let mut responder = responder();
    let ack = answer(&mut responder, 0, &by_native, &grafts);
    assert_eq!(refusal(&mut responder, &by_udp, &policy(&grafts)), ack);
    // Two transmissions natively, one by UDP: a round-trip sample of the latter only.
    next_nego(&mut initiator);
    let opened = |encapsulation| match initiator.clone().handle(310 * MS, &ack, encapsulation) {
        Ok(Some(Answer::Opened(session))) => session.rtt,
        other => panic!("{other:?}"),
    };
    assert_eq!(opened(Encapsulation::Native), None);
    assert_eq!(opened(Encapsulation::Udp), Some(Duration::from_millis(60)));
    // Answers in an unused encapsulation are ignored.
    let mut initiator = Initiator::new(both(None), 0, 1);
    next_nego(&mut initiator);
    assert_eq!(initiator.handle(MS, &ack, Encapsulation::Udp), Ok(None));
}

#[test]
fn initiator__goes_on_in_the_encapsulation_of_the_answer() {
    let grafts = [reliable(9)];
    let mut responder = responder();
    crowd(&mut responder);
    let mut initiator = Initiator::new(both(None), 0, 0xaaaa);
    next_nego(&mut initiator);
    let nego = next_nego(&mut initiator);
    let cookie = refusal(&mut responder, &nego, &policy(&grafts));
    assert_eq!(
        initiator.handle(260 * MS, &cookie, Encapsulation::Udp),
        Ok(None)
    );
    let mut sends = || match initiator.poll(initiator.poll_at()) {
        Ok(Some(Step::Send(_, encapsulation))) => encapsulation,
        other => panic!("{other:?}"),
    };
    assert_eq!(
        [sends(), sends()],
        [Encapsulation::Udp, Encapsulation::Native]
    );
    // Another graft of the same peer, too.
    let next = initiator.without(9, 300 * MS, 2).unwrap().poll(300 * MS);
    assert!(matches!(next, Ok(Some(Step::Send(_, Encapsulation::Udp)))));
}

#[test]
fn initiator__no_rtt_after_retransmission() {
    let mut initiator = Initiator::new(offer(), 0, 1);
    let nego = next_nego(&mut initiator);
    next_nego(&mut initiator);
    let ack = answer(&mut responder(), 0, &nego, &[reliable(9)]);
    let Ok(Some(Answer::Opened(session))) = initiator.handle(400 * MS, &ack, Encapsulation::Native)
    else {
        panic!("no session")
    };
    assert_eq!(session.rtt, None);
}

#[test]
fn initiator__forged_answers_change_nothing() {
    let mut initiator = Initiator::new(offer(), 0, 0xaaaa);
    let nego = next_nego(&mut initiator);
    let Packet::NegoAck(good) = answer(&mut responder(), 0, &nego, &[reliable(9)]) else {
        unreachable!()
    };
    let wrong_echo = Nego {
        peer_token: 1,
        ..good
    };
    let wrong_guard = Nego {
        header: Header {
            token: 1,
            ..good.header
        },
        ..good
    };
    let wrong_sid = Nego {
        header: Header {
            sid: 8,
            ..good.header
        },
        ..good
    };
    for bad in [wrong_echo, wrong_guard, wrong_sid] {
        assert_eq!(
            initiator.handle(1, &Packet::NegoAck(bad), Encapsulation::Native),
            Ok(None)
        );
        for reason in [1, 5, 6] {
            let nack = Packet::NegoNack(Nego { reason, ..bad });
            assert_eq!(initiator.handle(1, &nack, Encapsulation::Native), Ok(None));
        }
    }
    assert_eq!(
        initiator.handle(1, &Packet::Nego(nego), Encapsulation::Native),
        Ok(None),
        "our own, reflected"
    );
    assert_eq!(
        initiator.handle(1, &Packet::Close(good.header), Encapsulation::Native),
        Ok(None)
    );
    assert_eq!(initiator.poll(1), Ok(None), "no NEGO was provoked");
    let opened = initiator.handle(1, &Packet::NegoAck(good), Encapsulation::Native);
    assert!(matches!(opened, Ok(Some(Answer::Opened(_)))));
}

#[test]
fn initiator__answer_to_an_earlier_session_is_ignored() {
    let mut earlier = Initiator::new(offer(), 0, 0xaaaa);
    let old = answer(
        &mut responder(),
        0,
        &next_nego(&mut earlier),
        &[reliable(9)],
    );
    let mut initiator = Initiator::new(offer(), 0, 0xcccc);
    next_nego(&mut initiator);
    assert_eq!(initiator.handle(1, &old, Encapsulation::Native), Ok(None));
    // And one that comes before the first NEGO was sent.
    let mut initiator = Initiator::new(offer(), 0, 0xaaaa);
    assert_eq!(initiator.handle(1, &old, Encapsulation::Native), Ok(None));
}

#[test]
fn initiator__graft_not_offered() {
    let mut initiator = Initiator::new(offer(), 0, 1);
    let nego = next_nego(&mut initiator);
    let Packet::NegoAck(mut ack) = answer(&mut responder(), 0, &nego, &[reliable(9)]) else {
        unreachable!()
    };
    ack.gids = Gids::new(&[4]).unwrap();
    let answer = deliver(Packet::NegoAck(ack));
    assert_eq!(
        initiator.handle(1, &answer, Encapsulation::Native),
        Err(NegoError::NotOffered(4))
    );
}

#[test]
fn initiator__clamps_hostile_sizes() {
    let mut initiator = Initiator::new(offer(), 0, 1);
    let nego = next_nego(&mut initiator);
    let Packet::NegoAck(mut ack) = answer(&mut responder(), 0, &nego, &[reliable(9)]) else {
        unreachable!()
    };
    (ack.max_payload, ack.ring_slots) = (u16::MAX, u32::MAX);
    let Ok(Some(Answer::Opened(session))) =
        initiator.handle(1, &Packet::NegoAck(ack), Encapsulation::Native)
    else {
        panic!("no session")
    };
    assert_eq!(
        (session.max_payload, session.peer_slots),
        (1400, intf::VTL_MAX_WINDOW)
    );
}

#[test]
fn initiator__without_a_graft_that_does_not_load() {
    let mut initiator = Initiator::new(offer(), 0, 1);
    next_nego(&mut initiator);
    let mut next = initiator.without(9, 50 * MS, 2).unwrap();
    let nego = next_nego(&mut next);
    assert_eq!((&*nego.gids, nego.token), ([5, 6].as_slice(), 2));
    let last = next.without(5, 60 * MS, 3).unwrap();
    assert!(last.without(6, 70 * MS, 4).is_none());
    // The time is that of the first attempt.
    assert_eq!(last.clone().poll(9 * S), Err(NegoError::TimedOut));
}

#[test]
fn initiator__cookies_for_ever() {
    let mut initiator = Initiator::new(offer(), 0, 0xaaaa);
    let mut responder = responder();
    crowd(&mut responder);
    let mut sent = Vec::new();
    let error = loop {
        let now = initiator.poll_at();
        let mut nego = match initiator.poll(now) {
            Ok(Some(Step::Send(Packet::Nego(nego), _))) => nego,
            Ok(other) => panic!("{other:?}"),
            Err(error) => break error,
        };
        sent.push(now / MS);
        nego.ticket = Ticket::default(); // forgotten by a broken peer
        let grafts = [reliable(9)];
        let cookie = refusal(&mut responder, &nego, &policy(&grafts));
        // However many copies come.
        for _ in 0..3 {
            assert_eq!(
                initiator.handle(now + MS, &cookie, Encapsulation::Native),
                Ok(None)
            );
        }
    };
    assert_eq!(error, NegoError::TimedOut);
    assert_eq!(sent, [0, 1, 101, 102, 502, 503, 2103, 2104, 7104, 7105]);
}

#[test]
fn handle__extensions() {
    let mut initiator = Initiator::new(offer(), 0, 1);
    let nego = next_nego(&mut initiator);
    let Packet::NegoAck(ack) = answer(&mut responder(), 0, &nego, &[reliable(9)]) else {
        panic!("no session")
    };
    let Packet::NegoNack(nack) = nack(nego.sid, nego.token, Reason::NoRoom, Ticket::default())
    else {
        unreachable!()
    };
    let others = [extension(0, true), extension(3, false)].concat();
    let extensions = Extensions::parse(&others).unwrap();
    let opens = Packet::NegoAck(Nego { extensions, ..ack });
    let opened = initiator.clone().handle(1, &opens, Encapsulation::Native);
    assert!(matches!(opened, Ok(Some(Answer::Opened(_)))), "{opened:?}");
    for kind in [2, 3, 0x7fff] {
        let critical = extension(kind, true);
        let extensions = Extensions::parse(&critical).unwrap();
        // From a sender that does not know our token.
        let forged = Packet::NegoAck(Nego {
            peer_token: 2,
            extensions,
            ..ack
        });
        assert_eq!(
            initiator.handle(1, &forged, Encapsulation::Native),
            Ok(None)
        );
        let ends = Packet::NegoAck(Nego { extensions, ..ack });
        assert_eq!(
            initiator.clone().handle(1, &ends, Encapsulation::Native),
            Err(NegoError::Extension(kind))
        );
        // A refusal is one, whatever comes with it.
        let refuses = Packet::NegoNack(Nego { extensions, ..nack });
        assert_eq!(
            initiator.clone().handle(1, &refuses, Encapsulation::Native),
            Err(NegoError::Refused(Reason::NoRoom))
        );
    }
}
