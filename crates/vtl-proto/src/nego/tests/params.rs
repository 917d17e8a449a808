//! Negotiation of grafts' parameters.

use super::*;

fn range(initial: u32, min: u32, max: u32) -> ParamRange {
    ParamRange { initial, min, max }
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
        let opened = match initiator.handle(1, &deliver(ack), Encapsulation::Native) {
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
    // Of a later graft only the requested ones; the others have the responder's defaults.
    let other = [range(10, 1, 100), range(21, 1, 100)];
    assert_eq!(values(&[pool(5, &other)]), Ok((5, vec![7, 21])));
    // A value out of the responder's range leads to the next choice.
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
        initiator
            .clone()
            .handle(1, &deliver(ack), Encapsulation::Native)
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
