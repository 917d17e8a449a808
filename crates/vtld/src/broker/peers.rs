//! Cache of other hosts' parameters, between sessions with them.

use std::{collections::HashMap, net::IpAddr, time::Duration};

use vtl_proto::{
    intf,
    nego::{self, Encapsulation, Established},
    wire::Ticket,
};

use crate::network::make_room;

/// Maximum number of entries.
const PEERS: usize = 4096;

/// Lifetime of a cached path MTU (PMTU_RAISE_TIMER of RFC 8899).
const PATH_NS: u64 = 600_000_000_000;

/// Lifetime of the cached encapsulation, which is tried first.
const ENCAPSULATION_NS: u64 = 600_000_000_000;

/// Route of packets to a peer, as learned by the kernel's programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Exit {
    /// Ethernet header.
    pub(super) ethernet: [u8; 14],
    pub(super) ifindex: u32,
    /// The peer's UDP port, 0: without UDP.
    pub(super) port: u16,
}

/// Parameters that the latest session opened with a peer left for the next one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Next {
    pub(super) ticket: Ticket,
    /// Time of the ticket.
    since_ns: u64,
    /// The ticket has not been used for early data yet.
    fresh: bool,
    /// The port, where the peer probably still listens.
    port: u16,
    /// The grafts preferred then, in this order, and the one chosen.
    preferred: Vec<u16>,
    gid: u16,
    pub(super) max_payload: u16,
    pub(super) long_messages: bool,
    pub(super) exit: Exit,
}

impl Next {
    /// Stores the result of a negotiation; `None` if the peer gave no ticket or cannot be reached yet.
    pub(super) fn new(
        now_ns: u64,
        session: &Established,
        port: u16,
        preferred: Vec<u16>,
        exit: Exit,
    ) -> Option<Self> {
        let reachable = ![0, intf::VTL_TUNNEL].contains(&exit.ifindex);
        let ticket = session.ticket.filter(|_| reachable)?;
        Some(Self {
            ticket,
            since_ns: now_ns,
            fresh: true,
            port,
            preferred,
            gid: session.gid,
            max_payload: session.max_payload,
            long_messages: session.long_messages,
            exit,
        })
    }
}

#[derive(Default)]
struct Known {
    rtt: Option<Duration>,
    next: Option<Next>,
    /// Payload that the path takes without UDP, bytes, and when it was measured.
    path: Option<(u16, u64)>,
    /// The encapsulation that worked, and when.
    encapsulation: Option<(Encapsulation, u64)>,
}

/// The peers.
#[derive(Default)]
pub(super) struct Peers {
    known: HashMap<IpAddr, Known>,
}

impl Peers {
    fn entry(&mut self, peer: IpAddr) -> &mut Known {
        if self.known.len() >= PEERS && !self.known.contains_key(&peer) {
            // An evicted peer's next session is like one with a stranger.
            let known: Vec<IpAddr> = self.known.keys().copied().collect();
            make_room(known.into_iter(), |keep| {
                self.known.retain(|peer, _| keep(*peer));
            });
        }
        self.known.entry(peer).or_default()
    }

    /// The round-trip time, as last measured.
    pub(super) fn rtt(&self, peer: IpAddr) -> Option<Duration> {
        self.known.get(&peer)?.rtt
    }

    /// Notes a round-trip sample. An increase counts for an eighth: the hosts may have been busy.
    pub(super) fn note_rtt(&mut self, peer: IpAddr, rtt: Duration) {
        let known = &mut self.entry(peer).rtt;
        let eased = |known: Duration| rtt.min(known + rtt.saturating_sub(known) / 8);
        *known = Some(known.map_or(rtt, eased));
    }

    /// Notes a path MTU, as payload.
    pub(super) fn note_path(&mut self, peer: IpAddr, max: u16, now_ns: u64) {
        self.entry(peer).path = Some((max, now_ns));
    }

    /// Limits `max` bytes of payload to the cached path MTU.
    pub(super) fn payload(&self, peer: IpAddr, now_ns: u64, max: u16) -> u16 {
        let path = self.known.get(&peer).and_then(|known| known.path);
        match path {
            Some((path, at)) if now_ns.saturating_sub(at) < PATH_NS => path.min(max),
            _ => max,
        }
    }

    /// All encapsulations, the one most likely to work first.
    pub(super) fn encapsulations(&self, peer: IpAddr, now_ns: u64) -> [Encapsulation; 3] {
        let encapsulation = self.known.get(&peer).and_then(|known| known.encapsulation);
        match encapsulation {
            Some((Encapsulation::Udp, at)) if now_ns.saturating_sub(at) < ENCAPSULATION_NS => [
                Encapsulation::Udp,
                Encapsulation::Native,
                Encapsulation::Tcp,
            ],
            Some((Encapsulation::Tcp, at)) if now_ns.saturating_sub(at) < ENCAPSULATION_NS => [
                Encapsulation::Tcp,
                Encapsulation::Native,
                Encapsulation::Udp,
            ],
            _ => [
                Encapsulation::Native,
                Encapsulation::Udp,
                Encapsulation::Tcp,
            ],
        }
    }

    /// Notes that a session with the peer was opened in this encapsulation.
    pub(super) fn note_encapsulation(
        &mut self,
        peer: IpAddr,
        encapsulation: Encapsulation,
        now_ns: u64,
    ) {
        let known = self.entry(peer);
        // Keep the first time, so that the others are tried again regularly however many sessions there are.
        match known.encapsulation {
            Some((same, at))
                if same == encapsulation && now_ns.saturating_sub(at) < ENCAPSULATION_NS => {}
            _ => known.encapsulation = Some((encapsulation, now_ns)),
        }
    }

    /// Notes a shorter sample by an open session: negotiation samples include the daemons' delay.
    pub(super) fn note_shorter_rtt(&mut self, peer: IpAddr, rtt: Duration) {
        if let Some(known) = self.known.get_mut(&peer).and_then(|k| k.rtt.as_mut()) {
            *known = rtt.min(*known);
        }
    }

    pub(super) fn note_next(&mut self, peer: IpAddr, next: Next) {
        self.entry(peer).next = Some(next);
    }

    /// The peer's ticket, if it is still valid: it validates our address.
    pub(super) fn ticket(&self, peer: IpAddr, now_ns: u64) -> Option<Ticket> {
        let next = self.known.get(&peer)?.next.as_ref()?;
        next.lives(now_ns).then_some(next.ticket)
    }

    /// Takes the parameters for early data to the peer's port in `encapsulation`, once per ticket: those of the former
    /// session, if its graft is `fit` for early data and is offered first. If the preferences are the same as before,
    /// that graft is moved to the front of `offered`.
    pub(super) fn take_early(
        &mut self,
        peer: IpAddr,
        port: u16,
        now_ns: u64,
        encapsulation: Encapsulation,
        offered: &mut [u16],
        fit: impl FnOnce(u16) -> bool,
    ) -> Option<Next> {
        let next = self.known.get_mut(&peer)?.next.as_mut()?;
        let same = next.preferred == *offered;
        let at = offered.iter().position(|gid| *gid == next.gid)?;
        if !next.fresh
            || !next.lives(now_ns)
            || next.port != port
            || Encapsulation::by(next.exit.port) != encapsulation
            || !(same || at == 0)
            || !fit(next.gid)
        {
            return None;
        }
        next.fresh = false;
        offered[..=at].rotate_right(1);
        Some(next.clone())
    }
}

impl Next {
    /// Whether the ticket is valid, with a minute to spare: the responder's clock decides.
    fn lives(&self, now_ns: u64) -> bool {
        let age = Duration::from_nanos(now_ns.saturating_sub(self.since_ns));
        age < nego::LIFE - Duration::from_secs(60)
    }
}

#[cfg(test)]
#[allow(non_snake_case)]
mod tests {
    use super::*;

    const PORT: u16 = 7;
    const PEER: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 1));

    fn session(gid: u16) -> Established {
        Established {
            peer_sid: 1,
            peer_token: 2,
            peer_slots: 256,
            max_payload: 1400,
            long_messages: true,
            gid,
            params: Default::default(),
            rtt: None,
            ticket: Some(Ticket {
                time: 1,
                mac: 2,
                sid: 3,
            }),
            stateless: false,
        }
    }

    fn exit(ifindex: u32) -> Exit {
        Exit {
            ethernet: [0; 14],
            ifindex,
            port: 0,
        }
    }

    fn met(offered: &[u16], gid: u16) -> Peers {
        let mut peers = Peers::default();
        let next = Next::new(0, &session(gid), PORT, offered.into(), exit(2)).unwrap();
        peers.note_next(PEER, next);
        peers
    }

    #[test]
    fn next__needs_a_ticket_and_an_exit() {
        let none = Established {
            ticket: None,
            ..session(1)
        };
        assert!(Next::new(0, &none, PORT, vec![1], exit(2)).is_none());
        assert!(Next::new(0, &session(1), PORT, vec![1], exit(0)).is_none());
    }

    #[test]
    fn take_early__once_and_while_the_ticket_lives() {
        let mut peers = met(&[1, 2], 1);
        assert_eq!(
            peers.take_early(PEER, PORT, 9, Encapsulation::Native, &mut [1, 2], |gid| gid
                != 1),
            None
        );
        let life = nego::LIFE.as_nanos() as u64;
        assert_eq!(
            peers.take_early(PEER, PORT, life, Encapsulation::Native, &mut [1, 2], |_| {
                true
            }),
            None
        );
        assert!(peers.ticket(PEER, life).is_none());
        assert_eq!(
            peers.take_early(PEER, 8, 9, Encapsulation::Native, &mut [1, 2], |_| true),
            None
        );
        assert!(
            peers
                .take_early(PEER, PORT, 9, Encapsulation::Native, &mut [1, 2], |_| true)
                .is_some()
        );
        assert_eq!(
            peers.take_early(PEER, PORT, 9, Encapsulation::Native, &mut [1, 2], |_| true),
            None
        );
        assert!(
            peers.ticket(PEER, 9).is_some(),
            "it still validates this host's address"
        );
    }

    #[test]
    fn take_early__what_the_peer_chose_from_the_same_offer_comes_first() {
        let mut offer = [1, 2, 3];
        assert!(
            met(&[1, 2, 3], 3)
                .take_early(PEER, PORT, 0, Encapsulation::Native, &mut offer, |_| true)
                .is_some()
        );
        assert_eq!(offer, [3, 1, 2]);
        // From another offer the peer may choose another one.
        for (mut offer, early) in [([1, 3], false), ([3, 1], true), ([2, 1], false)] {
            let before = offer;
            let next = met(&[1, 2, 3], 3).take_early(
                PEER,
                PORT,
                0,
                Encapsulation::Native,
                &mut offer,
                |_| true,
            );
            assert_eq!((next.is_some(), offer), (early, before));
        }
    }

    #[test]
    fn take_early__session_after_session() {
        let mut peers = met(&[1, 2, 3], 3);
        let exit = peers.known[&PEER].next.as_ref().unwrap().exit;
        for _ in 0..3 {
            let mut offer = [1, 2, 3];
            let early =
                peers.take_early(PEER, PORT, 0, Encapsulation::Native, &mut offer, |_| true);
            assert!(early.is_some());
            assert_eq!(offer, [3, 1, 2]);
            let next = Next::new(0, &session(3), PORT, vec![1, 2, 3], exit).unwrap();
            peers.note_next(PEER, next);
        }
    }

    #[test]
    fn take_early__by_the_same_encapsulation_only() {
        let mut peers = met(&[1], 1);
        let mut early =
            |encapsulation| peers.take_early(PEER, PORT, 0, encapsulation, &mut [1], |_| true);
        assert_eq!(early(Encapsulation::Udp), None);
        assert!(early(Encapsulation::Native).is_some());
    }

    #[test]
    fn encapsulations__the_latest_to_reach_the_peer_is_first_for_a_while() {
        let (native, udp) = (
            [
                Encapsulation::Native,
                Encapsulation::Udp,
                Encapsulation::Tcp,
            ],
            [
                Encapsulation::Udp,
                Encapsulation::Native,
                Encapsulation::Tcp,
            ],
        );
        let mut peers = Peers::default();
        assert_eq!(peers.encapsulations(PEER, 0), native);
        peers.note_encapsulation(PEER, Encapsulation::Udp, 5);
        peers.note_encapsulation(PEER, Encapsulation::Udp, ENCAPSULATION_NS);
        assert_eq!(peers.encapsulations(PEER, ENCAPSULATION_NS), udp);
        assert_eq!(peers.encapsulations(PEER, ENCAPSULATION_NS + 5), native);
        peers.note_encapsulation(PEER, Encapsulation::Udp, ENCAPSULATION_NS + 5);
        assert_eq!(peers.encapsulations(PEER, ENCAPSULATION_NS + 6), udp);
        peers.note_encapsulation(PEER, Encapsulation::Native, ENCAPSULATION_NS + 7);
        assert_eq!(peers.encapsulations(PEER, ENCAPSULATION_NS + 8), native);
        peers.note_encapsulation(PEER, Encapsulation::Tcp, ENCAPSULATION_NS + 9);
        let tcp = [
            Encapsulation::Tcp,
            Encapsulation::Native,
            Encapsulation::Udp,
        ];
        assert_eq!(peers.encapsulations(PEER, ENCAPSULATION_NS + 10), tcp);
    }

    #[test]
    fn note_shorter_rtt__only_that() {
        let ms = Duration::from_millis;
        let mut peers = Peers::default();
        peers.note_shorter_rtt(PEER, ms(1));
        assert_eq!(peers.rtt(PEER), None);
        peers.note_rtt(PEER, ms(8));
        peers.note_shorter_rtt(PEER, ms(9));
        assert_eq!(peers.rtt(PEER), Some(ms(8)));
        peers.note_shorter_rtt(PEER, ms(1));
        assert_eq!(peers.rtt(PEER), Some(ms(1)));
    }

    #[test]
    fn peers__are_bounded() {
        let mut peers = Peers::default();
        for i in 0..=PEERS as u32 {
            let peer = IpAddr::V4(i.into());
            peers.note_rtt(peer, Duration::from_millis(1));
        }
        assert!(peers.known.len() <= PEERS);
    }

    #[test]
    fn peers__of_one_network_make_no_other_forgotten() {
        let mut peers = Peers::default();
        let rtt = Duration::from_millis(1);
        peers.note_rtt(PEER, rtt);
        for i in 0..2 * PEERS as u128 {
            peers.note_rtt(IpAddr::V6((0x2001_0db8 << 96 | i).into()), rtt);
        }
        assert_eq!(peers.rtt(PEER), Some(rtt));
        assert!(peers.known.len() <= PEERS);
    }
}
