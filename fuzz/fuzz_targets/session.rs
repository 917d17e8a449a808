//! The life of a session and its path, whatever happens in whatever order: it ends once, and its packets never
//! become larger than the path was taken for.
#![no_main]

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use vtl_core::{
    mtud::{DetourStep, PathMtu, Progress, SessionPath, Step, max_payload},
    session::{Action, Lifecycle, Observation, PeerClose, Phase, Reaction, Successor},
};
use vtl_proto::nego::Encapsulation;

#[derive(Arbitrary, Debug)]
enum Happening {
    Wait(u16),
    Poll {
        heard: u8,
        timeouts: u8,
        out: u8,
        flags: u8,
    },
    Close {
        aborted: bool,
    },
    Abort,
    Fail,
    PeerClose {
        aborted: bool,
        succeeds: bool,
        successor: u8,
    },
    Established,
    Confirmed,
    Heard(u8),
    FirstPacket,
    StartEarly,
    Size,
    Question {
        encapsulation: u8,
    },
    Answer {
        encapsulation: u8,
        payload: u16,
        mark: u8,
    },
    Path {
        mark: u8,
        out: bool,
        rtt_us: u32,
        hint: u16,
    },
    Detour {
        rtt_us: u32,
        udp: bool,
    },
    EndDetour,
}

#[derive(Arbitrary, Debug)]
struct Input {
    initiator: bool,
    v6: bool,
    acknowledged: bool,
    mtu: u16,
    encapsulation: u8,
    happenings: Vec<Happening>,
}

fn encapsulation(number: u8) -> Encapsulation {
    [
        Encapsulation::Native,
        Encapsulation::Udp,
        Encapsulation::Tcp,
    ][usize::from(number % 3)]
}

fuzz_target!(|input: Input| {
    let mut now = 1;
    let mut life = match input.initiator {
        true => Lifecycle::initiator(now, ()),
        false => Lifecycle::responder(now),
    };
    let peer = match input.v6 {
        true => IpAddr::from(Ipv6Addr::LOCALHOST),
        false => IpAddr::from(Ipv4Addr::LOCALHOST),
    };
    let first = encapsulation(input.encapsulation);
    let mut max = max_payload(u32::from(input.mtu).max(1200), peer, first);
    let mut path = SessionPath::default();
    let mtu = PathMtu::new(peer, first, max, input.acknowledged, now);
    path.begin(now, first, input.initiator, Some(mtu));
    let mut told = 0;
    for happening in input.happenings {
        let ended = matches!(life.phase(), Phase::Ended);
        let mut ends = 0;
        match happening {
            Happening::Wait(ms) => now += u64::from(ms) * 1_000_000,
            Happening::Poll {
                heard,
                timeouts,
                out,
                flags,
            } => {
                let seen = Observation {
                    heard: heard.into(),
                    timeouts: timeouts.into(),
                    unacknowledged: out.into(),
                    located: flags & 1 != 0,
                    rerouted: flags & 2 != 0,
                };
                let action = life.poll(now, &seen);
                assert!(!ended || action == Action::Nothing);
                ends += u32::from(matches!(action, Action::End(_) | Action::Forget));
            }
            Happening::Close { aborted } => match life.close(now, aborted) {
                Action::End(end) => {
                    assert!(end.tell.is_none());
                    ends += 1;
                }
                // Whoever closes what has ended already is told so each time.
                Action::Forget => ends += u32::from(!ended),
                _ => assert!(!ended),
            },
            Happening::Abort => ends += u32::from(life.abort().is_some()),
            Happening::Fail => ends += u32::from(life.fail().is_some()),
            Happening::PeerClose {
                aborted,
                succeeds,
                successor,
            } => {
                let states = [Successor::Known, Successor::Shown, Successor::Silent];
                let reaction = life.handle_close(&PeerClose {
                    aborted,
                    succeeds,
                    successor: states[usize::from(successor % 3)],
                });
                assert!(!ended || reaction == Reaction::Ignore);
                ends += u32::from(matches!(reaction, Reaction::End(_) | Reaction::Forget));
            }
            Happening::Established => life.handle_established(now),
            Happening::Confirmed => life.handle_confirmed(),
            Happening::Heard(heard) => life.handle_heard(heard.into()),
            Happening::FirstPacket => assert_eq!(life.handle_first_packet(), life.is_open()),
            Happening::StartEarly => life.start_confirming(now),
            Happening::Size => life.handle_size(now),
            Happening::Question { encapsulation: by } => path.handle_question(encapsulation(by)),
            Happening::Answer {
                encapsulation: by,
                payload,
                mark,
            } => {
                path.handle_answer(now, encapsulation(by), payload, mark.into());
            }
            Happening::Path {
                mark,
                out,
                rtt_us,
                hint,
            } => {
                let at = Progress {
                    mark: mark.into(),
                    out,
                    rtt_ns: u64::from(rtt_us) * 1000,
                };
                match path.mtu().map(|mtu| mtu.poll(now, &at, || hint.into())) {
                    Some(Step::Ask(sizes)) => {
                        assert!(sizes.len() <= 16 && sizes.iter().all(|size| *size <= max));
                    }
                    Some(Step::Reduce(less)) => {
                        let min = max_payload(1200, peer, first);
                        assert!((min..max).contains(&less));
                        max = less;
                    }
                    Some(Step::UseTcp) => path.start_detour(now),
                    Some(Step::Nothing) | None => {}
                }
            }
            Happening::Detour { rtt_us, udp } => {
                let rtt_ns = u64::from(rtt_us) * 1000;
                let step = path.detour().map(|d| d.poll(now, rtt_ns, udp));
                assert!(udp || step != Some(DetourStep::Leave(Encapsulation::Udp)));
            }
            Happening::EndDetour => path.end_detour(),
        }
        told += ends;
        let is_over = matches!(life.phase(), Phase::Ended);
        assert!(ends == 0 || is_over, "an end that is none");
        assert!(told <= 1, "two ends");
        assert!(!ended || is_over, "ended, and goes on");
        assert!(told == 1 || !is_over, "an end that nobody is told of");
        let _ = (
            life.is_settled(),
            life.is_probing(),
            life.as_successor(true),
        );
    }
});
