//! Early data.

use super::*;

#[test]
fn early__data_need_not_wait() {
    let mut responder = responder();
    let ticket = ticket(&mut responder, 0);
    let mut initiator = Initiator::new(early(ticket), 5 * S, 0xaaaa);
    let nego = next_nego(&mut initiator);
    assert_eq!((nego.header.sid, nego.header.token), (NEXT, 0xeeee));
    assert_eq!(initiator.poll_at(), 5 * S + nanos(HEAD_START));
    let Ok(Some(Step::OpenEarly(session))) = initiator.poll(initiator.poll_at()) else {
        panic!("data must wait")
    };
    assert_eq!((session.peer_sid, session.peer_token), (NEXT, 0xeeee));
    assert_eq!((session.max_payload, session.peer_slots), (1200, 256));
    let ack = answer(&mut responder, 5 * S, &nego, &[reliable(9)]);
    assert_eq!(responder.counters().early, 1);
    let Ok(Some(Answer::Confirmed(session))) =
        initiator.handle(5 * S + 10 * MS, &ack, Encapsulation::Native)
    else {
        panic!("not confirmed")
    };
    assert_eq!(session.max_payload, 1200);
    assert!(session.ticket.is_some_and(|new| new != ticket));
}

#[test]
fn early__replays_open_nothing() {
    let mut responder = responder();
    let ticket = ticket(&mut responder, 0);
    let mut initiator = Initiator::new(early(ticket), 5 * S, 0xaaaa);
    let nego = next_nego(&mut initiator);
    let grafts = [reliable(9)];
    let ack = answer(&mut responder, 5 * S, &nego, &grafts);
    // While the session lives a replay gets the same answer, afterwards a refusal.
    let replay = |responder: &mut Responder, nego: &Nego<'_>| match responder.asked(
        6 * S,
        HERE,
        nego,
        &policy(&grafts),
        || NEXT,
    ) {
        Verdict::Answer(packet) => packet,
        verdict => panic!("{verdict:?}: a second session"),
    };
    assert_eq!(replay(&mut responder, &nego), ack);
    let other = Nego { token: 1, ..nego };
    for nego in [&nego, &other] {
        let used = replay(&mut responder, nego);
        if nego.token == 1 {
            assert!(matches!(used, Packet::NegoNack(n) if n.reason == 6));
        }
    }
    responder.ended(NEXT);
    let used = deliver(replay(&mut responder, &nego));
    assert!(matches!(used, Packet::NegoNack(n) if n.reason == 6));
    assert_eq!(responder.counters().replays, 2);
    // An initiator that has sent early data learns of it at the end only: acknowledgements may still arrive.
    initiator.poll(initiator.poll_at()).unwrap();
    assert_eq!(
        initiator.handle(6 * S, &used, Encapsulation::Native),
        Ok(None)
    );
    assert_eq!(
        initiator.poll(5 * S + nanos(PATIENCE)),
        Err(NegoError::Refused(Reason::Used))
    );
    // It still validates the address.
    let plain = Nego {
        header: Header::default(),
        ..other
    };
    request(&mut responder, 6 * S, &plain, &grafts);
}

#[test]
fn early__used_before_any_data_went_opens_without() {
    let mut responder = responder();
    let ticket = ticket(&mut responder, 0);
    let grafts = [reliable(9)];
    let thief = next_nego(&mut Initiator::new(early(ticket), S, 1));
    answer(&mut responder, S, &thief, &grafts);
    let mut initiator = Initiator::new(early(ticket), S, 2);
    let nego = next_nego(&mut initiator);
    let used = refusal(&mut responder, &nego, &policy(&grafts));
    assert_eq!(
        initiator.handle(S + MS, &used, Encapsulation::Native),
        Ok(None)
    );
    let again = next_nego(&mut initiator);
    assert_eq!(again.header, with_capabilities(Header::default()));
    let ack = answer(&mut responder, S, &again, &grafts);
    let opened = initiator.handle(S + 9 * MS, &ack, Encapsulation::Native);
    assert!(matches!(opened, Ok(Some(Answer::Opened(_)))));
}

#[test]
fn early__a_stale_ticket_moves_the_data() {
    let stale = ticket(&mut responder(), 0);
    let mut restarted = Responder::new(2 * S, [8; 16]);
    let grafts = [reliable(9)];
    let mut initiator = Initiator::new(early(stale), 5 * S, 0xaaaa);
    let nego = next_nego(&mut initiator);
    initiator.poll(initiator.poll_at()).unwrap();
    let ack = answer(&mut restarted, 5 * S, &nego, &grafts);
    let mut other = initiator.clone();
    let Ok(Some(Answer::Moved(session))) =
        initiator.handle(5 * S + 10 * MS, &ack, Encapsulation::Native)
    else {
        panic!("not moved")
    };
    assert_eq!((session.peer_sid, session.max_payload), (3, 1200));
    // If the peer had restarted during the negotiation, an earlier copy might have opened a session.
    assert_eq!(
        other.handle(8 * S + 1, &ack, Encapsulation::Native),
        Err(NegoError::Restarted),
        "up for 3 s, asked for longer"
    );
}

#[test]
fn early__another_graft_or_smaller_packets() {
    let grafts = [reliable(9), reliable(5)];
    let go = || {
        let mut responder = responder();
        let ticket = ticket(&mut responder, 0);
        let mut initiator = Initiator::new(early(ticket), S, 0xaaaa);
        let nego = next_nego(&mut initiator);
        initiator.poll(initiator.poll_at()).unwrap();
        (responder, initiator, nego)
    };
    // The first choice is not available.
    let (mut responder, mut initiator, nego) = go();
    let wanted = request(&mut responder, S, &nego, &grafts);
    assert_eq!(wanted.early_with(&wanted.choices[0]), Some((NEXT, 0xeeee)));
    assert_eq!(wanted.early_with(&wanted.choices[1]), None);
    let (ack, _) = responder.accept(S, &wanted, &wanted.choices[1], &made(3, 4));
    let Ok(Some(Answer::Moved(session))) = initiator.handle(S, &ack, Encapsulation::Native) else {
        panic!("not moved")
    };
    assert_eq!((session.gid, session.peer_sid), (5, 3));
    // The ticket cannot be used for another attempt, either.
    responder.ended(3);
    let again = refusal(&mut responder, &nego, &policy(&grafts));
    assert!(matches!(again, Packet::NegoNack(n) if n.reason == 6));
    // The answer names the session of early data, but another graft.
    let (mut responder, mut initiator, nego) = go();
    let wanted = request(&mut responder, S, &nego, &grafts);
    let other = &wanted.choices[1];
    let (ack, _) = responder.accept(S, &wanted, other, &made(NEXT, 0xeeee));
    assert_eq!(
        initiator.handle(S, &ack, Encapsulation::Native),
        Err(NegoError::Changed)
    );
    // The answer has a smaller maximum payload.
    let (mut responder, mut initiator, nego) = go();
    let wanted = request(&mut responder, S, &nego, &grafts);
    let narrow = Made {
        max_payload: 1000,
        ..made(3, 4)
    };
    let (ack, _) = responder.accept(S, &wanted, &wanted.choices[0], &narrow);
    assert_eq!(
        initiator.handle(S, &ack, Encapsulation::Native),
        Err(NegoError::Changed)
    );
}
