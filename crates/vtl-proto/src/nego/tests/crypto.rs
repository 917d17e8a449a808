//! Negotiations with a crypto handshake, of which only the flights matter here.

use super::*;

const FLIGHTS: [&[u8]; 3] = [b"hello", b"the answer", b"the end"];

/// A packet with extensions, which live as long as the test.
fn with<'a>(packet: Packet<'a>, extensions: &'a [u8]) -> Packet<'a> {
    packet.with_extensions(Extensions::parse(extensions).unwrap())
}

fn asking(required: bool) -> Initiator {
    let mut initiator = Initiator::new(offer(), 0, 0xaaaa);
    initiator.set_crypto(FLIGHTS[0], required);
    initiator
}

fn nego_of(initiator: &mut Initiator) -> (Nego<'static>, Vec<u8>) {
    let nego = next_nego(initiator);
    (nego, initiator.extensions().to_vec())
}

/// A session with keys at a responder, whose answer has its flight.
fn opened(responder: &mut Responder, nego: &Nego<'_>) -> Nego<'static> {
    let grafts = [reliable(9)];
    let request = request(responder, 0, nego, &grafts);
    assert_eq!(request.hello.as_deref(), Some(FLIGHTS[0]));
    let made = made(3, 0xbbbb);
    let (Packet::NegoAck(ack), _) = responder.accept(0, &request, &request.choices[0], &made)
    else {
        panic!("no session")
    };
    assert!(responder.set_crypto(&request, FLIGHTS[1]));
    ack
}

#[test]
fn keys__take_one_round_trip() {
    let mut initiator = asking(true);
    let (nego, extensions) = nego_of(&mut initiator);
    let hello = Extensions::parse(&extensions).unwrap();
    assert_eq!(with(Packet::Nego(nego), &extensions).wire_len(), 1200);
    let nego = Nego {
        extensions: hello,
        ..nego
    };
    let mut responder = responder();
    let ack = opened(&mut responder, &nego);
    let key = NegoKey::new(HERE, &nego);
    let flight = responder.extensions(&key).to_vec();
    let answer = with(Packet::NegoAck(ack), &flight);
    let Ok(Some(Answer::Opened(session))) = initiator.handle(MS, &answer, Encapsulation::Native)
    else {
        panic!("no session")
    };
    // A copy of the first NEGO gets the same answer.
    let grafts = [reliable(9)];
    let again = responder.asked(MS, HERE, &nego, &policy(&grafts), || NEXT);
    assert_eq!(again, Verdict::Answer(Packet::NegoAck(ack)));
    assert_eq!(responder.extensions(&key), flight);

    initiator.finish(MS, &session, FLIGHTS[2], Encapsulation::Native);
    assert!(initiator.is_finishing());
    let (last, extensions) = nego_of(&mut initiator);
    assert_eq!((last.header.sid, last.header.token), (3, 0xbbbb));
    assert_eq!(
        (last.sid, last.token, last.ticket),
        (7, 0xaaaa, Ticket::default())
    );
    // A duplicate of the first answer is ignored.
    assert_eq!(
        initiator.handle(2 * MS, &answer, Encapsulation::Native),
        Ok(None)
    );
    let last = Nego {
        extensions: Extensions::parse(&extensions).unwrap(),
        ..last
    };
    let finish = Verdict::Finish(3, FLIGHTS[2].to_vec());
    let asked =
        |responder: &mut Responder| responder.asked(2 * MS, HERE, &last, &policy(&grafts), || NEXT);
    // Until the responder has accepted it.
    assert_eq!(asked(&mut responder), finish);
    assert_eq!(asked(&mut responder), finish);
    assert_eq!(responder.finished(3), Some(Packet::NegoAck(ack)));
    assert_eq!(asked(&mut responder), Verdict::Answer(Packet::NegoAck(ack)));
    assert!(responder.extensions(&key).is_empty());
    let done = initiator.handle(3 * MS, &Packet::NegoAck(ack), Encapsulation::Native);
    assert_eq!(done, Ok(Some(Answer::Finished)));

    // Once the session has ended, and at a host that never had it.
    responder.ended(3);
    assert_eq!(responder.finished(3), None);
    for responder in [&mut responder, &mut super::responder()] {
        assert_eq!(asked(responder), Verdict::Ignore);
    }
}

#[test]
fn keys__that_are_required_and_not_given() {
    for required in [false, true] {
        let mut initiator = asking(required);
        let (nego, _) = nego_of(&mut initiator);
        // The extension was stripped on the path.
        let ack = answer(&mut responder(), 0, &nego, &[reliable(9)]);
        let opened = initiator.handle(MS, &ack, Encapsulation::Native);
        match required {
            true => assert_eq!(opened, Err(NegoError::Clear)),
            false => assert!(matches!(opened, Ok(Some(Answer::Opened(_)))), "{opened:?}"),
        }
    }
}

#[test]
fn keys__no_data_go_ahead_of_them() {
    let mut responder = responder();
    let ticket = ticket(&mut responder, 0);
    let mut initiator = Initiator::new(early(ticket), 0, 0xaaaa);
    initiator.set_crypto(FLIGHTS[0], false);
    let (nego, extensions) = nego_of(&mut initiator);
    assert_eq!((nego.header.sid, nego.header.token), (0, 0));
    // A responder does not grant early data together with keys, either.
    let extensions = Extensions::parse(&extensions).unwrap();
    let both = Nego {
        header: to(ticket.sid, 5),
        extensions,
        ..nego
    };
    let request = request(&mut responder, 0, &both, &[reliable(9)]);
    assert_eq!(request.early, None);
}

#[test]
fn keys__an_answer_longer_than_the_question_is_refused() {
    let mut responder = responder();
    let (nego, _) = nego_of(&mut asking(false));
    let mut extensions = [0; 64];
    let hello = Extension {
        kind: intf::VTL_EXT_CRYPTO as u16,
        critical: false,
        value: b"\x01\0\0\0hello",
    };
    let used = hello.emit(&mut extensions).unwrap();
    let nego = Nego {
        extensions: Extensions::parse(&extensions[..used]).unwrap(),
        ..nego
    };
    let request = request(&mut responder, 0, &nego, &[reliable(9)]);
    responder.accept(0, &request, &request.choices[0], &made(3, 4));
    assert!(!responder.set_crypto(&request, &[0; 10]));
    assert!(responder.set_crypto(&request, &[0; 5]));
}

#[test]
fn keys__answer_is_repeated_to_as_long_a_question_only() {
    let mut responder = responder();
    let (nego, extensions) = nego_of(&mut asking(false));
    let long = Nego {
        extensions: Extensions::parse(&extensions).unwrap(),
        ..nego
    };
    opened(&mut responder, &long);
    let grafts = [reliable(9)];
    let mut asked = |nego: &Nego<'_>| {
        let verdict = responder.asked(MS, HERE, nego, &policy(&grafts), || NEXT);
        matches!(verdict, Verdict::Answer(_))
    };
    assert!(asked(&long));
    assert!(!asked(&nego));
}

#[test]
fn keys__after_a_bad_hello_strangers_need_a_cookie_first() {
    let mut responder = responder();
    let (nego, extensions) = nego_of(&mut asking(false));
    let hello = Nego {
        extensions: Extensions::parse(&extensions).unwrap(),
        ..nego
    };
    let grafts = [reliable(9)];
    let opens = |responder: &mut Responder, now, nego: &Nego<'_>| {
        let verdict = responder.asked(now, HERE, nego, &policy(&grafts), || NEXT);
        matches!(verdict, Verdict::Open(_))
    };
    assert!(opens(&mut responder, S, &hello));
    responder.handshake_failed(S);
    assert!(!opens(&mut responder, 2 * S, &hello));
    assert_eq!(responder.counters().cookies, 1);
    assert!(opens(&mut responder, 2 * S, &nego));
    let ticket = ticket(&mut responder, 2 * S);
    assert!(opens(&mut responder, 2 * S, &Nego { ticket, ..hello }));
    assert!(opens(&mut responder, 12 * S, &hello));
}

#[test]
fn keys__bind_what_is_negotiated_but_the_ticket() {
    let mut initiator = asking(false);
    let bound = initiator.bound();
    let (nego, extensions) = nego_of(&mut initiator);
    let there = |nego: Nego<'static>| {
        let nego = Nego {
            extensions: Extensions::parse(&extensions).unwrap(),
            ..nego
        };
        request(&mut responder(), 0, &nego, &[reliable(9)]).bound()
    };
    assert_eq!(there(nego), bound);
    let ticket = Ticket {
        time: 1,
        mac: 2,
        sid: 3,
    };
    assert_eq!(there(Nego { ticket, ..nego }), bound);
    assert_ne!(there(Nego { port: 9, ..nego }), bound);
    let gids = Gids::new(&[9]).unwrap();
    assert_ne!(there(Nego { gids, ..nego }), bound);
}
