//! The responder: refusals, cookies, retransmissions, quotas.

use super::*;

#[test]
fn asked__refusals() {
    let mut initiator = Initiator::new(offer(), 0, 1);
    let nego = next_nego(&mut initiator);
    let grafts = [reliable(9)];
    let weak = [graft(9, Services::ORDERED)];
    let mut responder = responder();
    let mut refused = |nego: &Nego<'_>, policy: &Policy<'_>| {
        let nack = refusal(&mut responder, nego, policy);
        match initiator.clone().handle(1, &nack, Encapsulation::Native) {
            Err(NegoError::Refused(reason)) => reason,
            other => panic!("{other:?}"),
        }
    };
    let good = policy(&grafts);
    assert_eq!(refused(&nego, &policy(&[])), Reason::NoGraft);
    assert_eq!(refused(&nego, &policy(&weak)), Reason::NoGraft);
    let full = Policy {
        room: false,
        ..good
    };
    assert_eq!(refused(&nego, &full), Reason::NoRoom);
    let deaf = Policy {
        listening: false,
        ..good
    };
    assert_eq!(refused(&nego, &deaf), Reason::NoListener);
    let unknown = Nego {
        services: 0x8001,
        ..nego
    };
    assert_eq!(refused(&unknown, &good), Reason::NoGraft);
    assert_eq!(responder.counters().refused, 5);
    assert_eq!(responder.sessions(), 0);
}

fn parsed(bytes: &[u8]) -> Nego<'_> {
    match Packet::parse(bytes) {
        Ok(Packet::Nego(nego)) => nego,
        other => panic!("{other:?}"),
    }
}

#[test]
fn asked__extensions() {
    let nego = next_nego(&mut Initiator::new(offer(), 0, 1));
    let grafts = [reliable(9)];
    let mut responder = responder();
    let asks = |bytes: &[u8]| {
        let extensions = Extensions::parse(bytes).unwrap();
        let asks = Packet::Nego(Nego { extensions, ..nego });
        let mut buffer = vec![0; asks.wire_len()];
        asks.emit(&mut buffer).unwrap();
        buffer
    };
    // Critical extensions of types that this version does not support, defined or not.
    for kind in [2, 3, 0x7fff] {
        let bytes = asks(&extension(kind, true));
        let nack = refusal(&mut responder, &parsed(&bytes), &policy(&grafts));
        assert!(nack.wire_len() <= bytes.len());
        assert!(
            matches!(&nack, Packet::NegoNack(n) if n.reason == 8),
            "{nack:?}"
        );
        let mut initiator = Initiator::new(offer(), 0, 1);
        next_nego(&mut initiator);
        let refused = Err(NegoError::Refused(Reason::Extension));
        assert_eq!(initiator.handle(1, &nack, Encapsulation::Native), refused);
    }
    assert_eq!(responder.counters().refused, 3);
    assert_eq!(responder.sessions(), 0);
    // Non-critical unknown ones, and padding, are ignored: same answer as without extensions.
    let others = [
        extension(0, true),
        extension(2, false),
        extension(3, false),
        extension(0x7fff, false),
    ];
    let bytes = asks(&others.concat());
    let opened = answer(&mut responder, 0, &parsed(&bytes), &grafts);
    assert_eq!(opened.wire_len(), 160);
    let again = refusal(&mut responder, &nego, &policy(&grafts));
    assert_eq!(opened, again);
    // A retransmission of an attempt that has opened a session, with an extension.
    let bytes = asks(&extension(1, true));
    let again = refusal(&mut responder, &parsed(&bytes), &policy(&grafts));
    assert_eq!(opened, again);
}

#[test]
fn asked__a_stateless_switch() {
    let of = (0x55, 0x6666);
    let switch = |stateless| Offer {
        succeeds: Some(of),
        stateless,
        ..offer()
    };
    let grafts = [reliable(9)];
    let strict = Policy {
        tolerant: false,
        ..policy(&grafts)
    };
    let mut initiator = Initiator::new(switch(true), 0, 1);
    let nego = next_nego(&mut initiator);
    assert!(asks_stateless(&nego));
    let mut responder = responder();
    let nack = refusal(&mut responder, &nego, &strict);
    assert_eq!(
        initiator.clone().handle(1, &nack, Encapsulation::Native),
        Err(NegoError::Refused(Reason::Reliable))
    );
    // The other kind of switch loses nothing.
    let nego_stateful = next_nego(&mut Initiator::new(switch(false), 0, 2));
    let verdict = responder.asked(0, HERE, &nego_stateful, &strict, || NEXT);
    assert!(matches!(verdict, Verdict::Open(request) if !request.stateless));
    // No predecessor, nothing to lose.
    let first = Offer {
        succeeds: None,
        ..switch(true)
    };
    assert!(!asks_stateless(&next_nego(&mut Initiator::new(
        first, 0, 3
    ))));

    let request = request(&mut responder, 0, &nego, &grafts);
    assert!(request.stateless);
    let choice = request.choices[0];
    let (answer, session) = responder.accept(0, &request, &choice, &made(3, 4));
    assert!(session.stateless);
    let Packet::NegoAck(mut ack) = answer else {
        unreachable!()
    };
    // A host that does not know the flag answers without it: then nothing may be lost.
    let older = intf::VTL_F_STATELESS as u8;
    for (flags, stateless) in [(ack.header.flags, true), (ack.header.flags & !older, false)] {
        ack.header.flags = flags;
        let answer = Packet::NegoAck(ack);
        let opened = initiator
            .clone()
            .handle(1, &answer, Encapsulation::Native)
            .expect("an answer");
        assert!(
            matches!(opened, Some(Answer::Opened(session)) if session.stateless == stateless),
            "{opened:?}"
        );
    }
    // Whoever did not ask does not lose because an answer says so.
    ack.header.flags |= older;
    let mut other = Initiator::new(switch(false), 0, 1);
    next_nego(&mut other);
    let opened = other.handle(1, &Packet::NegoAck(ack), Encapsulation::Native);
    assert!(
        matches!(opened, Ok(Some(Answer::Opened(session))) if !session.stateless),
        "{opened:?}"
    );
}

#[test]
fn asked__a_session_that_succeeds_another() {
    let of = (0x55, 0x6666);
    let succeeding = Offer {
        succeeds: Some(of),
        ticket: None,
        ..early(Ticket::default())
    };
    let mut initiator = Initiator::new(succeeding, 0, 1);
    let nego = next_nego(&mut initiator);
    assert_eq!((nego.header.sid, nego.header.token), of);
    assert_eq!(succeeded(&nego), Some(of));
    let grafts = [reliable(9)];
    let mut responder = responder();
    let deaf = Policy {
        listening: false,
        ..policy(&grafts)
    };
    let nack = refusal(&mut responder, &nego, &deaf);
    let refused = Err(NegoError::Refused(Reason::Succession));
    assert_eq!(
        initiator.clone().handle(1, &nack, Encapsulation::Native),
        refused
    );
    // Its address is validated by the token: it neither takes nor needs a place for strangers.
    for sid in 0..STRANGERS as u32 {
        let stranger = Nego {
            sid: 100 + sid,
            ..next_nego(&mut Initiator::new(offer(), 0, 2))
        };
        let request = request(&mut responder, 0, &stranger, &grafts);
        let choice = request.choices[0];
        responder.accept(0, &request, &choice, &made(200 + sid, 3));
    }
    let request = request(&mut responder, 0, &nego, &grafts);
    assert_eq!((request.succeeds, request.early), (Some(of), None));
    let choice = request.choices[0];
    let (answer, _) = responder.accept(0, &request, &choice, &made(3, 4));
    assert_eq!(responder.strangers(), STRANGERS);
    // A host that does not know the flag opens any session.
    let Packet::NegoAck(mut ack) = answer else {
        unreachable!()
    };
    ack.header.flags &= !(intf::VTL_F_SUCCEED as u8);
    assert_eq!(
        initiator
            .clone()
            .handle(1, &Packet::NegoAck(ack), Encapsulation::Native),
        refused
    );
    let opened = initiator.handle(1, &answer, Encapsulation::Native);
    assert!(matches!(opened, Ok(Some(Answer::Opened(_)))), "{opened:?}");
}

#[test]
fn asked__a_repeated_nego_gets_the_same_answer() {
    let mut initiator = Initiator::new(offer(), 0, 1);
    let (one, two) = (next_nego(&mut initiator), next_nego(&mut initiator));
    let grafts = [reliable(5), reliable(6)];
    let mut responder = responder();
    let first = answer(&mut responder, 0, &one, &grafts);
    // Even if the policy has changed meanwhile.
    let again = refusal(&mut responder, &two, &policy(&[]));
    assert_eq!(first, again);
    assert_eq!(responder.counters().repeated, 1);
    // Another attempt, from another address, or after the end, is not the same.
    request(&mut responder, 0, &Nego { token: 2, ..one }, &grafts);
    let elsewhere = responder.asked(0, THERE, &one, &policy(&grafts), || NEXT);
    assert!(matches!(elsewhere, Verdict::Open(_)));
    responder.ended(3);
    request(&mut responder, 0, &one, &grafts);
}

#[test]
fn asked__all_choices_in_the_initiators_order() {
    let nego = next_nego(&mut Initiator::new(offer(), 0, 1));
    let grafts = [6, 7, 5, 9].map(reliable);
    let request = request(&mut responder(), 0, &nego, &grafts);
    let gids: Vec<_> = request.choices.iter().map(|c| c.gid).collect();
    assert_eq!(gids, [9, 5, 6]);
}

#[test]
fn asked__strangers_are_sent_for_a_cookie() {
    let mut responder = responder();
    let grafts = [reliable(9)];
    crowd(&mut responder);
    // The next one leaves no state, and succeeds after one more round trip.
    let mut initiator = Initiator::new(offer(), 0, 0xaaaa);
    let nego = next_nego(&mut initiator);
    let cookie = refusal(&mut responder, &nego, &policy(&grafts));
    assert_eq!(responder.counters().cookies, 1);
    assert_eq!(
        (responder.sessions(), responder.strangers()),
        (STRANGERS, STRANGERS)
    );
    assert_eq!(
        initiator.handle(20 * MS, &cookie, Encapsulation::Native),
        Ok(None)
    );
    assert_eq!(initiator.poll_at(), 20 * MS);
    let again = next_nego(&mut initiator);
    assert_eq!((again.sid, again.token), (nego.sid, nego.token));
    // The cookie is invalid from other addresses.
    let elsewhere = responder.asked(20 * MS, THERE, &again, &policy(&grafts), || NEXT);
    assert!(matches!(elsewhere, Verdict::Answer(Packet::NegoNack(_))));
    let ack = answer(&mut responder, 20 * MS, &again, &grafts);
    let Ok(Some(Answer::Opened(session))) = initiator.handle(50 * MS, &ack, Encapsulation::Native)
    else {
        panic!("no session")
    };
    assert_eq!(session.rtt, Some(Duration::from_millis(20)));
    assert_eq!(responder.strangers(), STRANGERS, "it is none");
    // A validated peer makes room, and so does a session that ends.
    responder.validated(10);
    responder.validated(10);
    responder.ended(10);
    responder.ended(11);
    assert_eq!(responder.strangers(), STRANGERS - 2);
    for i in 12..30 {
        responder.ended(i);
    }
    assert_eq!(responder.strangers(), 0);
}
