#![allow(non_snake_case)]

use super::*;
use crate::wire::WireError;

const MS: u64 = 1_000_000;

fn offer() -> Offer {
    Offer {
        sid: 7,
        ring_slots: 512,
        max_payload: 1400,
        port: 0,
        services: Services::RELIABLE,
        gids: Gids::new(&[9, 5, 6]).unwrap(),
        known_rtt: None,
    }
}

fn graft(gid: u16, provides: Services) -> GraftInfo {
    GraftInfo {
        name: format!("g{gid}"),
        gid,
        provides,
    }
}

fn policy(grafts: &[GraftInfo]) -> Policy<'_> {
    Policy {
        grafts,
        ports: &[0, 80],
        room: true,
        ring_slots: 1024,
        max_payload: 1300,
    }
}

/// Over the wire and back.
fn deliver(packet: Packet<'_>) -> Packet<'static> {
    let mut buffer = [0; 72];
    let len = packet.emit(&mut buffer).unwrap();
    match Packet::parse(&buffer[..len]).unwrap() {
        Packet::Nego(nego) => Packet::Nego(nego),
        Packet::NegoAck(nego) => Packet::NegoAck(nego),
        Packet::NegoNack(nego) => Packet::NegoNack(nego),
        other => panic!("{other:?}"),
    }
}

fn first_nego(initiator: &mut Initiator) -> Nego {
    match deliver(initiator.poll(initiator.poll_at()).unwrap().unwrap()) {
        Packet::Nego(nego) => nego,
        other => panic!("{other:?}"),
    }
}

#[test]
fn session__one_round_trip() {
    let mut initiator = Initiator::new(offer(), 100, 0xaaaa);
    let nego = first_nego(&mut initiator);
    // 9 is unknown, 5 does not provide reliability.
    let grafts = [graft(6, Services::RELIABLE), graft(5, Services::ORDERED)];
    let choice = respond(&nego, &policy(&grafts)).unwrap();
    assert_eq!(
        choice.session,
        Established {
            peer_sid: 7,
            peer_token: 0xaaaa,
            peer_slots: 512,
            max_payload: 1300,
            gid: 6,
            rtt: None
        }
    );
    let answer = deliver(choice.answer(3, 0xbbbb));
    assert_eq!(
        initiator.handle(100 + 40 * MS, &answer),
        Ok(Some(Established {
            peer_sid: 3,
            peer_token: 0xbbbb,
            peer_slots: 1024,
            max_payload: 1300,
            gid: 6,
            rtt: Some(Duration::from_millis(40)),
        }))
    );
}

#[test]
fn initiator__retransmits_then_gives_up() {
    let mut initiator = Initiator::new(offer(), 0, 1);
    let mut sent = Vec::new();
    let mut now = 0;
    let end = loop {
        assert_eq!(
            initiator.poll(now.max(1) - 1).ok().flatten().is_some(),
            now == 0
        );
        if now != 0 {
            match initiator.poll(now) {
                Ok(packet) => assert!(matches!(packet, Some(Packet::Nego(_)))),
                Err(error) => break error,
            }
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
        let mut initiator = Initiator::new(
            Offer {
                known_rtt,
                ..offer()
            },
            0,
            1,
        );
        first_nego(&mut initiator);
        initiator.poll_at() / MS
    };
    assert_eq!(
        [due(0), due(100), due(600), due(100_000)],
        [100, 200, 1200, 5000]
    );
}

#[test]
fn initiator__no_rtt_after_retransmission() {
    let mut initiator = Initiator::new(offer(), 0, 1);
    let nego = first_nego(&mut initiator);
    first_nego(&mut initiator);
    let grafts = [graft(9, Services::RELIABLE)];
    let answer = respond(&nego, &policy(&grafts)).unwrap().answer(3, 2);
    assert_eq!(
        initiator.handle(400 * MS, &answer).unwrap().unwrap().rtt,
        None
    );
}

#[test]
fn initiator__forged_answers_change_nothing() {
    let mut initiator = Initiator::new(offer(), 0, 0xaaaa);
    let nego = first_nego(&mut initiator);
    let grafts = [graft(9, Services::RELIABLE)];
    let Packet::NegoAck(good) = respond(&nego, &policy(&grafts)).unwrap().answer(3, 2) else {
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
        assert_eq!(initiator.handle(1, &Packet::NegoAck(bad)), Ok(None));
        assert_eq!(
            initiator.handle(1, &Packet::NegoNack(Nego { reason: 1, ..bad })),
            Ok(None)
        );
    }
    assert_eq!(
        initiator.handle(1, &Packet::Nego(nego)),
        Ok(None),
        "our own, reflected"
    );
    assert_eq!(initiator.handle(1, &Packet::Close(good.header)), Ok(None));
    assert!(
        initiator
            .handle(1, &Packet::NegoAck(good))
            .unwrap()
            .is_some()
    );
}

#[test]
fn initiator__answer_to_an_earlier_session_is_ignored() {
    let mut earlier = Initiator::new(offer(), 0, 0xaaaa);
    let grafts = [graft(9, Services::RELIABLE)];
    let old = respond(&first_nego(&mut earlier), &policy(&grafts))
        .unwrap()
        .answer(3, 2);
    let mut initiator = Initiator::new(offer(), 0, 0xcccc);
    first_nego(&mut initiator);
    assert_eq!(initiator.handle(1, &old), Ok(None));
}

#[test]
fn initiator__answer_before_the_first_nego_is_ignored() {
    let mut earlier = Initiator::new(offer(), 0, 0xaaaa);
    let grafts = [graft(9, Services::RELIABLE)];
    let answer = respond(&first_nego(&mut earlier), &policy(&grafts))
        .unwrap()
        .answer(3, 2);
    assert_eq!(
        Initiator::new(offer(), 0, 0xaaaa).handle(1, &answer),
        Ok(None)
    );
}

#[test]
fn initiator__graft_not_offered() {
    let mut initiator = Initiator::new(offer(), 0, 1);
    let nego = first_nego(&mut initiator);
    let grafts = [graft(9, Services::RELIABLE)];
    let mut choice = respond(&nego, &policy(&grafts)).unwrap();
    choice.session.gid = 4;
    let answer = deliver(choice.answer(3, 2));
    assert_eq!(initiator.handle(1, &answer), Err(NegoError::NotOffered(4)));
}

#[test]
fn initiator__clamps_hostile_sizes() {
    let mut initiator = Initiator::new(offer(), 0, 1);
    let nego = first_nego(&mut initiator);
    let grafts = [graft(9, Services::RELIABLE)];
    let Packet::NegoAck(mut ack) = respond(&nego, &policy(&grafts)).unwrap().answer(3, 2) else {
        unreachable!()
    };
    (ack.max_payload, ack.ring_slots) = (u16::MAX, u32::MAX);
    let session = initiator.handle(1, &Packet::NegoAck(ack)).unwrap().unwrap();
    assert_eq!(
        (session.max_payload, session.peer_slots),
        (1400, intf::VTL_MAX_WINDOW)
    );
}

#[test]
fn respond__refusals() {
    let mut initiator = Initiator::new(offer(), 0, 1);
    let nego = first_nego(&mut initiator);
    let grafts = [graft(9, Services::RELIABLE)];
    let weak = [graft(9, Services::ORDERED)];
    let refused = |nego: &Nego, policy: &Policy<'_>| {
        let nack = respond(nego, policy).unwrap_err();
        let mut initiator = initiator.clone();
        let result = initiator.handle(1, &deliver(nack.answer()));
        assert_eq!(result, Err(NegoError::Refused(nack.reason)));
        nack.reason
    };
    let good = policy(&grafts);
    assert_eq!(refused(&nego, &policy(&[])), Reason::NoGraft);
    assert_eq!(refused(&nego, &policy(&weak)), Reason::NoGraft);
    assert_eq!(
        refused(
            &nego,
            &Policy {
                room: false,
                ..good
            }
        ),
        Reason::NoRoom
    );
    assert_eq!(
        refused(&Nego { port: 81, ..nego }, &good),
        Reason::NoListener
    );
    let unknown = Nego {
        services: 0x8001,
        ..nego
    };
    assert_eq!(refused(&unknown, &good), Reason::NoGraft);
}

#[test]
fn respond__replay_gets_the_same_answer_and_key() {
    let mut initiator = Initiator::new(offer(), 0, 1);
    let (one, two) = (first_nego(&mut initiator), first_nego(&mut initiator));
    let grafts = [graft(5, Services::RELIABLE), graft(6, Services::RELIABLE)];
    assert_eq!(
        respond(&one, &policy(&grafts)),
        respond(&two, &policy(&grafts))
    );
    let addr: IpAddr = "192.0.2.1".parse().unwrap();
    assert_eq!(NegoKey::new(addr, &one), NegoKey::new(addr, &two));
    let other = first_nego(&mut Initiator::new(offer(), 0, 2));
    assert_ne!(NegoKey::new(addr, &one), NegoKey::new(addr, &other));
}

#[test]
fn refuse_version__answers_only_a_nego() {
    let mut buffer = [0; 72];
    let mut initiator = Initiator::new(offer(), 0, 0xaaaa);
    Packet::Nego(first_nego(&mut initiator))
        .emit(&mut buffer)
        .unwrap();
    buffer[0] = 0x20 | buffer[0] & 15;
    assert_eq!(Packet::parse(&buffer), Err(WireError::Version(2)));
    let answer = deliver(refuse_version(&buffer).unwrap().answer());
    assert_eq!(
        initiator.handle(1, &answer),
        Err(NegoError::Refused(Reason::Version))
    );
    assert_eq!(refuse_version(&buffer[..71]), None);
    buffer[0] = 0x25;
    assert_eq!(refuse_version(&buffer), None);
    // One of this version that was damaged on the way: the next try may be whole.
    buffer[0] = 0x13;
    buffer[71] ^= 1;
    assert_eq!(Packet::parse(&buffer), Err(WireError::Checksum));
    assert_eq!(refuse_version(&buffer), None);
}

#[test]
fn reason__round_trip() {
    for value in 1..=255u8 {
        assert_eq!(u8::from(Reason::from(value)), value);
    }
}
