#![allow(non_snake_case)]

use super::*;
use crate::{
    services::{GraftInfo, ParamRange, Services},
    wire::{Few, Gids, Param, WireError},
};

const MS: u64 = 1_000_000;
const S: u64 = 1000 * MS;
const HERE: IpAddr = IpAddr::V4(core::net::Ipv4Addr::new(192, 0, 2, 1));
const THERE: IpAddr = IpAddr::V4(core::net::Ipv4Addr::new(192, 0, 2, 2));
const NEXT: u32 = 77;

fn offered(gid: u16) -> Offered {
    Offered {
        gid,
        params: Vec::new(),
        asked: Vec::new(),
    }
}

fn offer() -> Offer {
    Offer {
        sid: 7,
        ring_slots: 512,
        max_payload: 1400,
        port: 0,
        services: Services::RELIABLE,
        grafts: [9, 5, 6].map(offered).into(),
        known_rtt: None,
        ways: vec![Way::Native],
        patience: PATIENCE,
        ticket: None,
        early: None,
        succeeds: None,
    }
}

fn graft(gid: u16, provides: Services) -> GraftInfo {
    GraftInfo {
        name: format!("g{gid}"),
        gid,
        provides,
        params: Vec::new(),
    }
}

fn reliable(gid: u16) -> GraftInfo {
    graft(gid, Services::RELIABLE)
}

fn policy(grafts: &[GraftInfo]) -> Policy<'_> {
    Policy {
        grafts,
        listening: true,
        room: true,
    }
}

fn made(sid: u32, token: u64) -> Made {
    Made {
        sid,
        token,
        ring_slots: 1024,
        max_payload: 1300,
        next_sid: NEXT,
    }
}

fn responder() -> Responder {
    Responder::new(0, [7; 16])
}

/// Over the wire and back.
fn deliver(packet: Packet<'_>) -> Packet<'static> {
    let mut buffer = [0; 160];
    let len = packet.emit(&mut buffer).unwrap();
    match Packet::parse(&buffer[..len]).unwrap() {
        Packet::Nego(nego) => Packet::Nego(nego),
        Packet::NegoAck(nego) => Packet::NegoAck(nego),
        Packet::NegoNack(nego) => Packet::NegoNack(nego),
        other => panic!("{other:?}"),
    }
}

fn next_nego(initiator: &mut Initiator) -> Nego {
    match initiator.poll(initiator.poll_at()).unwrap().unwrap() {
        Step::Send(packet, _) => match deliver(packet) {
            Packet::Nego(nego) => nego,
            other => panic!("{other:?}"),
        },
        step => panic!("{step:?}"),
    }
}

fn request(responder: &mut Responder, now: u64, nego: &Nego, grafts: &[GraftInfo]) -> Request {
    match responder.asked(now, HERE, nego, &policy(grafts), || NEXT) {
        Verdict::Open(request) => request,
        verdict => panic!("{verdict:?}"),
    }
}

/// What a responder with these grafts answers, its session being 3 with guard 0xbbbb, or the one
/// wished for.
fn answer(
    responder: &mut Responder,
    now: u64,
    nego: &Nego,
    grafts: &[GraftInfo],
) -> Packet<'static> {
    let request = request(responder, now, nego, grafts);
    let (sid, token) = request
        .early_with(&request.choices[0])
        .unwrap_or((3, 0xbbbb));
    let choice = &request.choices[0];
    deliver(responder.accept(now, &request, choice, &made(sid, token)).0)
}

fn refusal(responder: &mut Responder, nego: &Nego, policy: &Policy<'_>) -> Packet<'static> {
    match responder.asked(0, HERE, nego, policy, || NEXT) {
        Verdict::Answer(packet) => deliver(packet),
        verdict => panic!("{verdict:?}"),
    }
}

/// A ticket of this responder, as an earlier session gave it.
fn ticket(responder: &mut Responder, now: u64) -> Ticket {
    let nego = next_nego(&mut Initiator::new(offer(), now, 0xdddd));
    let Packet::NegoAck(ack) = answer(responder, now, &nego, &[reliable(9)]) else {
        unreachable!()
    };
    responder.ended(3);
    ack.ticket
}

fn early(ticket: Ticket) -> Offer {
    Offer {
        ticket: Some(ticket),
        early: Some(Early {
            token: 0xeeee,
            max_payload: 1200,
            long_messages: true,
        }),
        known_rtt: Some(Duration::from_millis(10)),
        ..offer()
    }
}

#[test]
fn session__one_round_trip() {
    let mut initiator = Initiator::new(offer(), 100, 0xaaaa);
    let nego = next_nego(&mut initiator);
    // 9 is unknown, 5 does not provide reliability.
    let grafts = [reliable(6), graft(5, Services::ORDERED)];
    let mut responder = responder();
    let request = request(&mut responder, 0, &nego, &grafts);
    let (ack, session) = responder.accept(0, &request, &request.choices[0], &made(3, 0xbbbb));
    assert_eq!(
        session,
        Established {
            peer_sid: 7,
            peer_token: 0xaaaa,
            peer_slots: 512,
            max_payload: 1300,
            long_messages: true,
            gid: 6,
            params: Values::default(),
            rtt: None,
            ticket: None,
        }
    );
    let Ok(Some(Answer::Opened(session))) =
        initiator.handle(100 + 40 * MS, &deliver(ack), Way::Native)
    else {
        panic!("no session")
    };
    assert_eq!(session.ticket.unwrap().sid, NEXT);
    assert_eq!(
        session,
        Established {
            peer_sid: 3,
            peer_token: 0xbbbb,
            peer_slots: 1024,
            max_payload: 1300,
            long_messages: true,
            gid: 6,
            params: Values::default(),
            rtt: Some(Duration::from_millis(40)),
            ticket: session.ticket,
        }
    );
}

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
                Some(Step::Send(Packet::Nego(_), Way::Native))
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
        ways: vec![Way::Native, Way::Udp],
        known_rtt,
        ..offer()
    }
}

#[test]
fn initiator__the_second_way_a_little_later() {
    let sent = |rtt_ms: Option<u64>| {
        let mut initiator = Initiator::new(both(rtt_ms.map(Duration::from_millis)), 0, 1);
        let send = |_| {
            let now = initiator.poll_at();
            match initiator.poll(now) {
                Ok(Some(Step::Send(_, way))) => (now / MS, way),
                other => panic!("{other:?}"),
            }
        };
        (0..5).map(send).collect::<Vec<_>>()
    };
    let (native, udp) = (Way::Native, Way::Udp);
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
    // One that was asked twice by this way, and once by the other.
    next_nego(&mut initiator);
    let opened = |way| match initiator.clone().handle(310 * MS, &ack, way) {
        Ok(Some(Answer::Opened(session))) => session.rtt,
        other => panic!("{other:?}"),
    };
    assert_eq!(opened(Way::Native), None);
    assert_eq!(opened(Way::Udp), Some(Duration::from_millis(60)));
    // Nobody answers by a way that was not used.
    let mut initiator = Initiator::new(both(None), 0, 1);
    next_nego(&mut initiator);
    assert_eq!(initiator.handle(MS, &ack, Way::Udp), Ok(None));
}

#[test]
fn initiator__goes_on_by_the_way_of_the_answer() {
    let grafts = [reliable(9)];
    let mut responder = responder();
    crowd(&mut responder);
    let mut initiator = Initiator::new(both(None), 0, 0xaaaa);
    next_nego(&mut initiator);
    let nego = next_nego(&mut initiator);
    let cookie = refusal(&mut responder, &nego, &policy(&grafts));
    assert_eq!(initiator.handle(260 * MS, &cookie, Way::Udp), Ok(None));
    let mut sends = || match initiator.poll(initiator.poll_at()) {
        Ok(Some(Step::Send(_, way))) => way,
        other => panic!("{other:?}"),
    };
    assert_eq!([sends(), sends()], [Way::Udp, Way::Native]);
    // Another graft of the same peer, too.
    let next = initiator.without(9, 300 * MS, 2).unwrap().poll(300 * MS);
    assert!(matches!(next, Ok(Some(Step::Send(_, Way::Udp)))));
}

#[test]
fn initiator__no_rtt_after_retransmission() {
    let mut initiator = Initiator::new(offer(), 0, 1);
    let nego = next_nego(&mut initiator);
    next_nego(&mut initiator);
    let ack = answer(&mut responder(), 0, &nego, &[reliable(9)]);
    let Ok(Some(Answer::Opened(session))) = initiator.handle(400 * MS, &ack, Way::Native) else {
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
            initiator.handle(1, &Packet::NegoAck(bad), Way::Native),
            Ok(None)
        );
        for reason in [1, 5, 6] {
            let nack = Packet::NegoNack(Nego { reason, ..bad });
            assert_eq!(initiator.handle(1, &nack, Way::Native), Ok(None));
        }
    }
    assert_eq!(
        initiator.handle(1, &Packet::Nego(nego), Way::Native),
        Ok(None),
        "our own, reflected"
    );
    assert_eq!(
        initiator.handle(1, &Packet::Close(good.header), Way::Native),
        Ok(None)
    );
    assert_eq!(initiator.poll(1), Ok(None), "no NEGO was provoked");
    let opened = initiator.handle(1, &Packet::NegoAck(good), Way::Native);
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
    assert_eq!(initiator.handle(1, &old, Way::Native), Ok(None));
    // And one that comes before the first NEGO was sent.
    let mut initiator = Initiator::new(offer(), 0, 0xaaaa);
    assert_eq!(initiator.handle(1, &old, Way::Native), Ok(None));
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
        initiator.handle(1, &answer, Way::Native),
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
    let Ok(Some(Answer::Opened(session))) = initiator.handle(1, &Packet::NegoAck(ack), Way::Native)
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
fn asked__refusals() {
    let mut initiator = Initiator::new(offer(), 0, 1);
    let nego = next_nego(&mut initiator);
    let grafts = [reliable(9)];
    let weak = [graft(9, Services::ORDERED)];
    let mut responder = responder();
    let mut refused = |nego: &Nego, policy: &Policy<'_>| {
        let nack = refusal(&mut responder, nego, policy);
        match initiator.clone().handle(1, &nack, Way::Native) {
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
    assert_eq!(initiator.clone().handle(1, &nack, Way::Native), refused);
    // Its address is proven: strangers take no place from it, and it takes none from them.
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
            .handle(1, &Packet::NegoAck(ack), Way::Native),
        refused
    );
    let opened = initiator.handle(1, &answer, Way::Native);
    assert!(matches!(opened, Ok(Some(Answer::Opened(_)))), "{opened:?}");
}

#[test]
fn asked__a_repeated_nego_gets_the_same_answer() {
    let mut initiator = Initiator::new(offer(), 0, 1);
    let (one, two) = (next_nego(&mut initiator), next_nego(&mut initiator));
    let grafts = [reliable(5), reliable(6)];
    let mut responder = responder();
    let first = answer(&mut responder, 0, &one, &grafts);
    // Whatever has changed meanwhile.
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

/// Strangers in all their places, as sessions from 10 on.
fn crowd(responder: &mut Responder) {
    for i in 0..STRANGERS as u32 {
        let nego = next_nego(&mut Initiator::new(offer(), 0, 100 + u64::from(i)));
        let request = request(responder, 0, &nego, &[reliable(9)]);
        responder.accept(0, &request, &request.choices[0], &made(10 + i, 1));
    }
}

#[test]
fn asked__strangers_are_sent_for_a_cookie() {
    let mut responder = responder();
    let grafts = [reliable(9)];
    crowd(&mut responder);
    // The next one leaves nothing behind, and gets in with one more round trip.
    let mut initiator = Initiator::new(offer(), 0, 0xaaaa);
    let nego = next_nego(&mut initiator);
    let cookie = refusal(&mut responder, &nego, &policy(&grafts));
    assert_eq!(responder.counters().cookies, 1);
    assert_eq!(
        (responder.sessions(), responder.strangers()),
        (STRANGERS, STRANGERS)
    );
    assert_eq!(initiator.handle(20 * MS, &cookie, Way::Native), Ok(None));
    assert_eq!(initiator.poll_at(), 20 * MS);
    let again = next_nego(&mut initiator);
    assert_eq!((again.sid, again.token), (nego.sid, nego.token));
    // The cookie is of no use to anybody else.
    let elsewhere = responder.asked(20 * MS, THERE, &again, &policy(&grafts), || NEXT);
    assert!(matches!(elsewhere, Verdict::Answer(Packet::NegoNack(_))));
    let ack = answer(&mut responder, 20 * MS, &again, &grafts);
    let Ok(Some(Answer::Opened(session))) = initiator.handle(50 * MS, &ack, Way::Native) else {
        panic!("no session")
    };
    assert_eq!(session.rtt, Some(Duration::from_millis(20)));
    assert_eq!(responder.strangers(), STRANGERS, "it is none");
    // One that shows itself makes room, and so does one that ends.
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
            assert_eq!(initiator.handle(now + MS, &cookie, Way::Native), Ok(None));
        }
    };
    assert_eq!(error, NegoError::TimedOut);
    assert_eq!(sent, [0, 1, 101, 102, 502, 503, 2103, 2104, 7104, 7105]);
}

#[test]
fn long_messages__only_with_a_peer_that_takes_them() {
    let told = |header: Header| u32::from(header.flags) & intf::VTL_F_MORE != 0;
    let grafts = [reliable(9)];
    let mut initiator = Initiator::new(offer(), 0, 0xaaaa);
    let nego = next_nego(&mut initiator);
    assert!(told(nego.header));
    let mut older = nego;
    older.header.flags = 0;
    let mut responder = responder();
    let wanted = request(&mut responder, 0, &older, &grafts);
    let (ack, session) = responder.accept(0, &wanted, &wanted.choices[0], &made(3, 4));
    assert!(!session.long_messages);
    let older = |ack: Packet<'static>| {
        let Packet::NegoAck(mut ack) = ack else {
            unreachable!()
        };
        assert!(told(ack.header));
        ack.header.flags = 0;
        Packet::NegoAck(ack)
    };
    let Ok(Some(Answer::Opened(session))) = initiator.handle(MS, &older(ack), Way::Native) else {
        panic!("no session")
    };
    assert!(!session.long_messages);
    // Data were under way to a peer that did take them.
    responder.ended(3);
    let ticket = ticket(&mut responder, 0);
    let mut initiator = Initiator::new(early(ticket), S, 0xaaaa);
    let nego = next_nego(&mut initiator);
    let go = initiator.poll(initiator.poll_at());
    assert!(matches!(go, Ok(Some(Step::Go(session))) if session.long_messages));
    let ack = answer(&mut responder, S, &nego, &grafts);
    let changed = initiator.handle(S + MS, &older(ack), Way::Native);
    assert_eq!(changed, Err(NegoError::Changed));
}

#[test]
fn early__data_need_not_wait() {
    let mut responder = responder();
    let ticket = ticket(&mut responder, 0);
    let mut initiator = Initiator::new(early(ticket), 5 * S, 0xaaaa);
    let nego = next_nego(&mut initiator);
    assert_eq!((nego.header.sid, nego.header.token), (NEXT, 0xeeee));
    assert_eq!(initiator.poll_at(), 5 * S + nanos(HEAD_START));
    let Ok(Some(Step::Go(session))) = initiator.poll(initiator.poll_at()) else {
        panic!("data must wait")
    };
    assert_eq!((session.peer_sid, session.peer_token), (NEXT, 0xeeee));
    assert_eq!((session.max_payload, session.peer_slots), (1200, 256));
    let ack = answer(&mut responder, 5 * S, &nego, &[reliable(9)]);
    assert_eq!(responder.counters().early, 1);
    let Ok(Some(Answer::Confirmed(session))) = initiator.handle(5 * S + 10 * MS, &ack, Way::Native)
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
    let replay = |responder: &mut Responder, nego: &Nego| match responder.asked(
        6 * S,
        HERE,
        nego,
        &policy(&grafts),
        || NEXT,
    ) {
        Verdict::Answer(packet) => packet,
        Verdict::Open(_) => panic!("a second session"),
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
    // Who has sent data with it learns of it at the end only: acknowledgements may still come.
    initiator.poll(initiator.poll_at()).unwrap();
    assert_eq!(initiator.handle(6 * S, &used, Way::Native), Ok(None));
    assert_eq!(
        initiator.poll(5 * S + nanos(PATIENCE)),
        Err(NegoError::Refused(Reason::Used))
    );
    // As a proof of the address it still serves.
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
    assert_eq!(initiator.handle(S + MS, &used, Way::Native), Ok(None));
    let again = next_nego(&mut initiator);
    assert_eq!(again.header, able(Header::default()));
    let ack = answer(&mut responder, S, &again, &grafts);
    let opened = initiator.handle(S + 9 * MS, &ack, Way::Native);
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
    let Ok(Some(Answer::Moved(session))) = initiator.handle(5 * S + 10 * MS, &ack, Way::Native)
    else {
        panic!("not moved")
    };
    assert_eq!((session.peer_sid, session.max_payload), (3, 1200));
    // Had it started while NEGO was under way, an earlier copy might have opened a session.
    assert_eq!(
        other.handle(8 * S + 1, &ack, Way::Native),
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
    // The first choice cannot be had.
    let (mut responder, mut initiator, nego) = go();
    let wanted = request(&mut responder, S, &nego, &grafts);
    assert_eq!(wanted.early_with(&wanted.choices[0]), Some((NEXT, 0xeeee)));
    assert_eq!(wanted.early_with(&wanted.choices[1]), None);
    let (ack, _) = responder.accept(S, &wanted, &wanted.choices[1], &made(3, 4));
    let Ok(Some(Answer::Moved(session))) = initiator.handle(S, &ack, Way::Native) else {
        panic!("not moved")
    };
    assert_eq!((session.gid, session.peer_sid), (5, 3));
    // Nor is the ticket any good for another try.
    responder.ended(3);
    let again = refusal(&mut responder, &nego, &policy(&grafts));
    assert!(matches!(again, Packet::NegoNack(n) if n.reason == 6));
    // What was said to be there is not what was asked for.
    let (mut responder, mut initiator, nego) = go();
    let wanted = request(&mut responder, S, &nego, &grafts);
    let other = &wanted.choices[1];
    let (ack, _) = responder.accept(S, &wanted, other, &made(NEXT, 0xeeee));
    assert_eq!(
        initiator.handle(S, &ack, Way::Native),
        Err(NegoError::Changed)
    );
    // The path has become narrower.
    let (mut responder, mut initiator, nego) = go();
    let wanted = request(&mut responder, S, &nego, &grafts);
    let narrow = Made {
        max_payload: 1000,
        ..made(3, 4)
    };
    let (ack, _) = responder.accept(S, &wanted, &wanted.choices[0], &narrow);
    assert_eq!(
        initiator.handle(S, &ack, Way::Native),
        Err(NegoError::Changed)
    );
}

fn range(initial: u32, least: u32, most: u32) -> ParamRange {
    ParamRange {
        initial,
        least,
        most,
    }
}

#[test]
fn params__both_sides_agree() {
    let pool = |gid, params: &[ParamRange]| GraftInfo {
        params: params.into(),
        ..reliable(gid)
    };
    let ours = [range(10, 1, 100), range(20, 1, 100)];
    let mut offer = offer();
    offer.grafts = vec![
        Offered {
            params: ours.into(),
            asked: vec![(1, 50)],
            ..offered(9)
        },
        Offered {
            params: ours.into(),
            asked: vec![(0, 7)],
            ..offered(5)
        },
    ];
    let negotiate = |theirs: &[GraftInfo]| {
        let mut initiator = Initiator::new(offer.clone(), 0, 1);
        let nego = next_nego(&mut initiator);
        let request = request(&mut responder(), 0, &nego, theirs);
        let (ack, session) = responder().accept(0, &request, &request.choices[0], &made(3, 4));
        let opened = match initiator.handle(1, &deliver(ack), Way::Native) {
            Ok(Some(Answer::Opened(opened))) => Ok(opened),
            Err(error) => Err(error),
            other => panic!("{other:?}"),
        };
        opened.inspect(|opened| {
            assert_eq!((opened.gid, opened.params), (session.gid, session.params));
        })
    };
    let values = |theirs: &[GraftInfo]| negotiate(theirs).map(|s| (s.gid, s.params[..2].to_vec()));
    // The first graft's values are the initiator's in any case.
    assert_eq!(values(&[pool(9, &ours)]), Ok((9, vec![10, 50])));
    let other_default = [range(11, 1, 100), range(20, 1, 100)];
    assert_eq!(values(&[pool(9, &other_default)]), Ok((9, vec![10, 50])));
    // Of a later one those that were asked for; the rest is as the responder has it.
    let other = [range(10, 1, 100), range(21, 1, 100)];
    assert_eq!(values(&[pool(5, &other)]), Ok((5, vec![7, 21])));
    // What the responder's does not allow leads to the next choice.
    let narrow = [range(10, 1, 100), range(20, 1, 40)];
    let both = [pool(9, &narrow), pool(5, &ours)];
    assert_eq!(values(&both), Ok((5, vec![7, 20])));
    // A graft with other parameters is another graft.
    assert_eq!(values(&[pool(5, &ours[..1])]), Err(NegoError::Differs(5)));
    let beyond = [range(10, 1, 100), range(200, 1, 300)];
    assert_eq!(values(&[pool(5, &beyond)]), Err(NegoError::Differs(5)));
}

#[test]
fn params__what_does_not_fit_is_not_offered() {
    let graft = |gid, params: usize, asked: Vec<(u8, u32)>| Offered {
        gid,
        params: vec![range(1, 1, 9); params],
        asked,
    };
    let mut offer = offer();
    offer.grafts = vec![
        graft(1, 6, vec![]),
        graft(2, 3, vec![(0, 2), (1, 2), (2, 2)]),
        graft(3, 3, vec![(2, 10)]),
        graft(4, 3, vec![(5, 2)]),
        graft(5, 8, vec![(7, 9)]),
    ];
    offer
        .grafts
        .extend((6..20).map(|gid| graft(gid, 1, vec![])));
    let nego = next_nego(&mut Initiator::new(offer, 0, 1));
    assert_eq!(*nego.gids, [1, 5, 6, 7, 8, 9, 10, 11]);
    let last = Param {
        graft: 1,
        index: 7,
        value: 9,
    };
    assert_eq!((nego.params.len(), nego.params[6]), (7, last));
}

#[test]
fn params__an_incomplete_answer_is_no_agreement() {
    let mut offer = offer();
    offer.grafts = vec![Offered {
        params: vec![range(1, 1, 9); 2],
        ..offered(9)
    }];
    let initiator = {
        let mut initiator = Initiator::new(offer, 0, 1);
        next_nego(&mut initiator);
        initiator
    };
    let param = |index, value| Param {
        graft: 0,
        index,
        value,
    };
    let good = [param(0, 1), param(1, 1)];
    let answer = |params: &[Param]| {
        let ack = Packet::NegoAck(Nego {
            header: to(7, 1),
            token: 2,
            peer_token: 1,
            sid: 3,
            ring_slots: 1,
            max_payload: 1000,
            gids: Gids::new(&[9]).unwrap(),
            params: Few::new(params).unwrap(),
            ..Nego::default()
        });
        initiator.clone().handle(1, &deliver(ack), Way::Native)
    };
    assert!(matches!(answer(&good), Ok(Some(_))));
    for bad in [
        &good[..1],
        &[good[0], good[0]],
        &[good[1], good[0]],
        &[good[0], good[1], good[1]],
        &[good[0], param(1, 2)],
    ] {
        assert_eq!(answer(bad), Err(NegoError::Differs(9)), "{bad:?}");
    }
}

#[test]
fn refuse_version__answers_only_a_nego() {
    let mut buffer = [0; 160];
    let mut initiator = Initiator::new(offer(), 0, 0xaaaa);
    Packet::Nego(next_nego(&mut initiator))
        .emit(&mut buffer)
        .unwrap();
    buffer[0] = 0x20 | buffer[0] & 15;
    assert_eq!(Packet::parse(&buffer), Err(WireError::Version(2)));
    let answer = deliver(refuse_version(&buffer).unwrap());
    assert_eq!(
        initiator.handle(1, &answer, Way::Native),
        Err(NegoError::Refused(Reason::Version))
    );
    assert_eq!(refuse_version(&buffer[..159]), None);
    buffer[0] = 0x25;
    assert_eq!(refuse_version(&buffer), None);
    // One of this version that was damaged on the way: the next try may be whole.
    buffer[0] = 0x13;
    buffer[159] ^= 1;
    assert_eq!(Packet::parse(&buffer), Err(WireError::Checksum));
    assert_eq!(refuse_version(&buffer), None);
}

#[test]
fn reason__round_trip() {
    for value in 1..=255u8 {
        assert_eq!(u8::from(Reason::from(value)), value);
    }
}
