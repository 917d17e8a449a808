//! Negotiations between initiators and responders over a simulated network.
#![allow(non_snake_case)]

mod crypto;
mod early;
mod initiator;
mod params;
mod responder;

use super::*;
use crate::{
    services::{GraftInfo, ParamRange, Services},
    wire::{Extension, Extensions, Few, Gids, Param, WireError},
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
        encapsulations: vec![Encapsulation::Native],
        patience: PATIENCE,
        ticket: None,
        early: None,
        succeeds: None,
        stateless: false,
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
        tolerant: true,
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
        Packet::Nego(nego) => Packet::Nego(nego.without_extensions()),
        Packet::NegoAck(nego) => Packet::NegoAck(nego.without_extensions()),
        Packet::NegoNack(nego) => Packet::NegoNack(nego.without_extensions()),
        other => panic!("{other:?}"),
    }
}

fn next_nego(initiator: &mut Initiator) -> Nego<'static> {
    match initiator.poll(initiator.poll_at()).unwrap().unwrap() {
        Step::Send(packet, _) => match deliver(packet) {
            Packet::Nego(nego) => nego,
            other => panic!("{other:?}"),
        },
        step => panic!("{step:?}"),
    }
}

fn request(responder: &mut Responder, now: u64, nego: &Nego<'_>, grafts: &[GraftInfo]) -> Request {
    match responder.asked(now, HERE, nego, &policy(grafts), || NEXT) {
        Verdict::Open(request) => request,
        verdict => panic!("{verdict:?}"),
    }
}

/// The answer of a responder with these grafts, whose session is 3 with token 0xbbbb, or that of early data.
fn answer(
    responder: &mut Responder,
    now: u64,
    nego: &Nego<'_>,
    grafts: &[GraftInfo],
) -> Packet<'static> {
    let request = request(responder, now, nego, grafts);
    let (sid, token) = request
        .early_with(&request.choices[0])
        .unwrap_or((3, 0xbbbb));
    let choice = &request.choices[0];
    deliver(responder.accept(now, &request, choice, &made(sid, token)).0)
}

fn refusal(responder: &mut Responder, nego: &Nego<'_>, policy: &Policy<'_>) -> Packet<'static> {
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
            stateless: false,
        }
    );
    let Ok(Some(Answer::Opened(session))) =
        initiator.handle(100 + 40 * MS, &deliver(ack), Encapsulation::Native)
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
            stateless: false,
        }
    );
}

/// One extension, as it lies in a packet.
fn extension(kind: u16, critical: bool) -> Vec<u8> {
    let extension = Extension {
        kind,
        critical,
        value: &[1; 9],
    };
    let mut bytes = vec![0; extension.wire_len()];
    extension.emit(&mut bytes).unwrap();
    bytes
}

/// Fills all places for peers without validated addresses, as sessions from 10 on.
fn crowd(responder: &mut Responder) {
    for i in 0..STRANGERS as u32 {
        let nego = next_nego(&mut Initiator::new(offer(), 0, 100 + u64::from(i)));
        let request = request(responder, 0, &nego, &[reliable(9)]);
        responder.accept(0, &request, &request.choices[0], &made(10 + i, 1));
    }
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
    let Ok(Some(Answer::Opened(session))) =
        initiator.handle(MS, &older(ack), Encapsulation::Native)
    else {
        panic!("no session")
    };
    assert!(!session.long_messages);
    // Early data were sent to a peer that did support them.
    responder.ended(3);
    let ticket = ticket(&mut responder, 0);
    let mut initiator = Initiator::new(early(ticket), S, 0xaaaa);
    let nego = next_nego(&mut initiator);
    let go = initiator.poll(initiator.poll_at());
    assert!(matches!(go, Ok(Some(Step::OpenEarly(session))) if session.long_messages));
    let ack = answer(&mut responder, S, &nego, &grafts);
    let changed = initiator.handle(S + MS, &older(ack), Encapsulation::Native);
    assert_eq!(changed, Err(NegoError::Changed));
}

#[test]
fn refuse_version__answers_only_a_nego() {
    let mut buffer = [0; 160];
    let mut initiator = Initiator::new(offer(), 0, 0xaaaa);
    Packet::Nego(next_nego(&mut initiator))
        .emit(&mut buffer)
        .unwrap();
    for version in [1, 3, 15] {
        let mut buffer = buffer;
        buffer[0] = version << 4 | buffer[0] & 15;
        assert_eq!(Packet::parse(&buffer), Err(WireError::Version(version)));
        // A NEGO of this version with flipped bits in the version field.
        assert_eq!(refuse_version(&buffer), None);
        buffer[159] ^= 1;
        let answer = deliver(refuse_version(&buffer).unwrap());
        assert_eq!(
            initiator.clone().handle(1, &answer, Encapsulation::Native),
            Err(NegoError::Refused(Reason::Version))
        );
        assert_eq!(refuse_version(&buffer[..159]), None);
        // Bytes behind another version's NEGO are not parsed.
        let longer = [&buffer[..], &[0x80, 9, 0xff]].concat();
        assert_eq!(refuse_version(&longer).map(deliver), Some(answer));
        buffer[0] = version << 4 | 5;
        assert_eq!(refuse_version(&buffer), None);
    }
    // A damaged NEGO of this version: no answer, since the retransmission may be intact.
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
