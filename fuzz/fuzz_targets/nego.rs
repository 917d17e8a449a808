//! A responder and an initiator between which anything is sent, forged and replayed.
#![no_main]

use std::{collections::BTreeSet, net::IpAddr, time::Duration};

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use vtl_proto::{
    intf,
    nego::{
        Answer, Early, Encapsulation, Initiator, Made, NegoKey, Offer, Offered, Policy, Reason,
        Responder, STRANGERS, Step, Verdict,
    },
    services::{GraftInfo, ParamRange, Services},
    wire::{Extensions, MIN_PAYLOAD, Packet, Ticket},
};

#[derive(Arbitrary, Debug)]
struct Input<'a> {
    offer: OfferInput,
    /// Whether the session is to have keys, and without keys not to be.
    keys: Option<bool>,
    steps: Vec<Action<'a>>,
}

#[derive(Arbitrary, Debug)]
struct OfferInput {
    sid: u32,
    ring_slots: u16,
    services: u16,
    grafts: Vec<(u8, Vec<(u8, u32)>)>,
    rtt_ms: Option<u8>,
    encapsulations: u8,
    ticket: Option<(u64, u64, u32)>,
    early: bool,
    succeeds: Option<(u32, u64)>,
}

#[derive(Arbitrary, Debug)]
enum Action<'a> {
    Wait(u16),
    Poll,
    /// The initiator's latest NEGO reaches the responder, from one of several addresses.
    Ask {
        from: u8,
        policy: u8,
    },
    /// The same with some bytes changed.
    AskSpoilt {
        from: u8,
        policy: u8,
        at: u8,
        byte: u8,
    },
    /// Any packet reaches the responder.
    AskForged {
        from: u8,
        policy: u8,
        packet: &'a [u8],
    },
    /// The responder's latest answer reaches the initiator.
    Answer {
        encapsulation: u8,
    },
    AnswerSpoilt {
        encapsulation: u8,
        at: u8,
        byte: u8,
    },
    AnswerForged {
        encapsulation: u8,
        packet: &'a [u8],
    },
    Validated(u8),
    Ended(u8),
    Maintain,
}

const LARGEST: u16 = intf::VTL_MAX_PAYLOAD as u16;

fn params(gid: u16) -> Vec<ParamRange> {
    let range = |i: u16| ParamRange {
        initial: i.into(),
        min: 0,
        max: 100 * u32::from(i + 1),
    };
    (0..gid % 4).map(range).collect()
}

fn encapsulation(number: u8) -> Encapsulation {
    [
        Encapsulation::Native,
        Encapsulation::Udp,
        Encapsulation::Tcp,
    ][usize::from(number % 3)]
}

fn offer(input: &OfferInput) -> Offer {
    let encapsulations = [
        vec![Encapsulation::Native],
        vec![Encapsulation::Udp, Encapsulation::Native],
        vec![
            Encapsulation::Native,
            Encapsulation::Udp,
            Encapsulation::Tcp,
        ],
    ];
    let graft = |(gid, asked): &(u8, Vec<(u8, u32)>)| Offered {
        gid: u16::from(*gid).max(1),
        params: params(u16::from(*gid).max(1)),
        // Parameters that it has, with values that they may have, as the broker makes sure.
        asked: (0..gid % 4)
            .zip(asked)
            .map(|(i, (_, value))| (i, value % 100))
            .collect(),
    };
    let mut grafts: Vec<Offered> = input.grafts.iter().take(12).map(graft).collect();
    if grafts.is_empty() {
        grafts.push(graft(&(5, Vec::new())));
    }
    Offer {
        sid: input.sid.max(1),
        ring_slots: u32::from(input.ring_slots).clamp(1, intf::VTL_MAX_WINDOW),
        max_payload: LARGEST,
        port: 7,
        services: Services::from_bits(input.services),
        grafts,
        known_rtt: input.rtt_ms.map(|ms| Duration::from_millis(ms.into())),
        encapsulations: encapsulations[usize::from(input.encapsulations % 3)].clone(),
        patience: Duration::from_secs(9),
        ticket: input
            .ticket
            .map(|(time, mac, sid)| Ticket { time, mac, sid }),
        early: (input.early && input.ticket.is_some()).then_some(Early {
            token: 77,
            max_payload: LARGEST,
            long_messages: true,
        }),
        succeeds: input.succeeds,
        stateless: input.services & 1 << 15 != 0,
    }
}

struct Host {
    responder: Responder,
    grafts: Vec<GraftInfo>,
    now: u64,
    sid: u32,
    held: BTreeSet<u32>,
}

impl Host {
    /// The answer's bytes.
    fn asked(&mut self, from: u8, policy: u8, packet: &[u8]) -> Option<Vec<u8>> {
        let Ok(Packet::Nego(nego)) = Packet::parse_unverified(packet) else {
            return None;
        };
        let from = IpAddr::from([10, 0, 0, from % 16]);
        let policy = Policy {
            grafts: &self.grafts,
            listening: policy & 1 == 0,
            room: policy & 2 == 0,
            tolerant: policy & 4 == 0,
        };
        let next_sid = self.sid + 1;
        let verdict = self
            .responder
            .asked(self.now, from, &nego, &policy, || next_sid);
        let answer = match verdict {
            Verdict::Answer(answer) => answer,
            Verdict::Ignore => return None,
            Verdict::Finish(sid, _) => {
                assert!(self.held.contains(&sid));
                self.responder.finished(sid).expect("it is held")
            }
            Verdict::Open(request) => {
                assert!(policy.listening && !request.choices.is_empty());
                let choice = request.choices[0];
                assert!(nego.gids.contains(&choice.gid));
                match request.early_with(&choice) {
                    _ if self.held.len() >= 64 => self.responder.refuse(&request, Reason::NoRoom),
                    early => {
                        self.sid += 1;
                        // What is asked for and taken is refused, as the broker does.
                        let asked = early.filter(|(sid, _)| *sid != 0 && !self.held.contains(sid));
                        let (sid, token) = asked.unwrap_or((self.sid, u64::from(self.sid) << 8));
                        let made = Made {
                            sid,
                            token,
                            ring_slots: 1024,
                            max_payload: LARGEST,
                            next_sid: self.sid + 1,
                        };
                        self.held.insert(sid);
                        let (answer, session) =
                            self.responder.accept(self.now, &request, &choice, &made);
                        assert!((MIN_PAYLOAD..=LARGEST).contains(&session.max_payload));
                        assert!((1..=intf::VTL_MAX_WINDOW).contains(&session.peer_slots));
                        if let Some(hello) = &request.hello {
                            self.responder.set_crypto(&request, hello);
                        }
                        answer
                    }
                }
            }
        };
        assert!(self.responder.strangers() <= STRANGERS);
        let extensions = self.responder.extensions(&NegoKey::new(from, &nego));
        let answer = answer.with_extensions(Extensions::parse(extensions).expect("our own"));
        let mut bytes = vec![0; answer.wire_len()];
        // Nothing is amplified.
        assert!(bytes.len() <= packet.len());
        answer.emit(&mut bytes).expect("an answer can be sent");
        Some(bytes)
    }
}

fn spoilt(packet: &[u8], at: u8, byte: u8) -> Vec<u8> {
    let mut packet = packet.to_vec();
    if let Some(place) = packet.get_mut(usize::from(at)) {
        *place = byte;
    }
    packet
}

fuzz_target!(|input: Input<'_>| {
    let graft = |gid: u16| GraftInfo {
        name: format!("g{gid}"),
        gid,
        provides: Services::from_bits(u16::MAX >> (gid % 5)),
        params: params(gid),
    };
    let mut host = Host {
        responder: Responder::new(0, [1; 16]),
        grafts: (1..20).map(graft).collect(),
        now: 1,
        sid: 100,
        held: BTreeSet::new(),
    };
    let offer = offer(&input.offer);
    let offered: Vec<u16> = offer.grafts.iter().map(|g| g.gid).collect();
    let mut initiator = Initiator::new(offer, 1, 4242);
    if let Some(required) = input.keys {
        initiator.set_crypto(b"hello", required);
    }
    let mut initiator = Some(initiator);
    let (mut question, mut answer) = (Vec::new(), Vec::new());
    for step in input.steps.iter().take(200) {
        let reply = match step {
            Action::Wait(ms) => {
                host.now += u64::from(*ms) * 10_000_000;
                continue;
            }
            Action::Poll => {
                let polled = initiator.as_mut().map(|i| i.poll(host.now));
                match polled {
                    Some(Ok(Some(Step::Send(packet, _)))) => {
                        let extensions = initiator.as_ref().map_or(&[][..], Initiator::extensions);
                        let extensions = Extensions::parse(extensions).expect("our own");
                        let packet = packet.with_extensions(extensions);
                        question = vec![0; packet.wire_len()];
                        packet.emit(&mut question).expect("a NEGO can be sent");
                    }
                    Some(Err(_)) => initiator = None,
                    _ => {}
                }
                continue;
            }
            Action::Validated(sid) => {
                host.responder.validated(100 + u32::from(*sid));
                continue;
            }
            Action::Ended(sid) => {
                let sid = 100 + u32::from(*sid);
                host.responder.ended(sid);
                host.held.remove(&sid);
                continue;
            }
            Action::Maintain => {
                host.responder.maintain(host.now, || [2; 16]);
                continue;
            }
            Action::Ask { from, policy } => {
                answer = host.asked(*from, *policy, &question).unwrap_or(answer);
                continue;
            }
            Action::AskSpoilt {
                from,
                policy,
                at,
                byte,
            } => {
                let packet = spoilt(&question, *at, *byte);
                answer = host.asked(*from, *policy, &packet).unwrap_or(answer);
                continue;
            }
            Action::AskForged {
                from,
                policy,
                packet,
            } => {
                answer = host.asked(*from, *policy, packet).unwrap_or(answer);
                continue;
            }
            Action::Answer { encapsulation } => (answer.clone(), *encapsulation),
            Action::AnswerSpoilt {
                encapsulation,
                at,
                byte,
            } => (spoilt(&answer, *at, *byte), *encapsulation),
            Action::AnswerForged {
                encapsulation,
                packet,
            } => (packet.to_vec(), *encapsulation),
        };
        let (Ok(packet), Some(open)) = (Packet::parse_unverified(&reply.0), &mut initiator) else {
            continue;
        };
        match open.handle(host.now, &packet, encapsulation(reply.1)) {
            Ok(None) => {}
            Err(_) => initiator = None,
            Ok(Some(
                Answer::Opened(session) | Answer::Confirmed(session) | Answer::Moved(session),
            )) => {
                assert!(offered.contains(&session.gid));
                assert!((MIN_PAYLOAD..=LARGEST).contains(&session.max_payload));
                assert!((1..=intf::VTL_MAX_WINDOW).contains(&session.peer_slots));
                match input.keys {
                    Some(_) if !open.is_finishing() => {
                        open.finish(host.now, &session, b"finish", encapsulation(reply.1));
                    }
                    _ => initiator = None,
                }
            }
            Ok(Some(Answer::Finished)) => initiator = None,
        }
    }
});
