//! Path MTU discovery (RFC 8899), and fallback to TCP where nothing else gets through (a detour).
//!
//! A session starts with the MTU of its route. When it makes no progress although packets are in flight, it
//! probes the path: a burst of SIZE packets of many sizes, which the peer answers one by one. The answers
//! distinguish a reduced path MTU, a path that drops everything, and ordinary loss. Where only TCP gets
//! through, packets are sent over TCP ([`PathMtu`] decides) until another encapsulation works again ([`Detour`]
//! decides). ICMP only adds a size to probe, so forged ICMP has no effect. Where the graft's acknowledgements
//! do not tell which sizes arrive, the path is probed periodically. Specification: `PROTOCOL.md`, section 5.

use std::net::IpAddr;

use vtl_proto::{intf, nego::Encapsulation};

const MS: u64 = 1_000_000;
/// Time without progress after which the path is probed; at least four round trips.
const STALL_NS: u64 = 300 * MS;
/// Probe interval while packets are sent, where acknowledgements do not tell which sizes arrive.
const CHECK_NS: u64 = 10_000 * MS;
/// Rounds with answers to smaller sizes only, after which the size in use counts as too large.
const ROUNDS: u32 = 3;
/// Rounds answered over TCP only, after which packets are sent over TCP.
const TCP_ROUNDS: u32 = 2;
/// Bounds of the interval between rounds, which is two round trips. Exponential back-off without any answer.
const WAIT_NS: [u64; 2] = [100 * MS, 3_000 * MS];
/// IP packet sizes to probe: common MTUs, and those of common tunnels. The last one is the smallest path MTU of
/// a session (BASE_PLPMTU of RFC 8899), which acknowledgements need.
const SIZES: [u32; 12] = [
    1500, 1492, 1480, 1450, 1420, 1400, 1380, 1360, 1320, 1280, 1240, 1200,
];

/// Maximum payload of a packet to `peer` for an MTU, bytes: a multiple of 8.
pub fn max_payload(mtu: u32, peer: IpAddr, encapsulation: Encapsulation) -> u16 {
    let ip = if peer.is_ipv4() { 20 } else { 40 } + u32::from(encapsulation.overhead());
    let headers = ip + size_of::<intf::vtl_data_hdr>() as u32;
    let max = mtu.saturating_sub(headers).min(intf::VTL_MAX_PAYLOAD);
    (max & !7).max(8) as u16
}

/// Action that path MTU discovery requests.
#[derive(Debug, PartialEq, Eq)]
pub enum Step {
    /// Nothing.
    Nothing,
    /// Send a SIZE with `ACK_NOW` for each of these payloads, bytes.
    Ask(Vec<u16>),
    /// Reduce the payload of packets to this size, bytes: larger ones do not get through.
    Reduce(u16),
    /// Send packets over TCP: nothing else gets through.
    UseTcp,
}

/// Progress of a session at one time.
#[derive(Clone, Copy, Debug)]
pub struct Progress {
    /// Packets acknowledged; packets sent, where acknowledgements do not tell which sizes arrive.
    pub mark: u64,
    /// Packets, or a keepalive probe, are in flight.
    pub out: bool,
    /// The session's round-trip time, nanoseconds.
    pub rtt_ns: u64,
}

/// Path MTU discovery of one session, for the packets that this host sends.
#[derive(Debug)]
pub struct PathMtu {
    peer: IpAddr,
    encapsulation: Encapsulation,
    /// Largest payload known to get through, bytes.
    max: u16,
    /// The graft's acknowledgements tell which sizes arrive.
    acknowledged: bool,
    /// [`Progress::mark`] when the path was last found to work, and that time.
    mark: u64,
    since_ns: u64,
    /// The peer has probed over TCP, so it makes no progress.
    suspected: bool,
    search: Option<Search>,
}

#[derive(Debug)]
struct Search {
    rounds: u32,
    wait_ns: u64,
    next_ns: u64,
    /// Rounds with an answer, and whether this round has one.
    heard: u32,
    hears: bool,
    /// Largest payload answered, bytes.
    best: u16,
    /// Rounds with an answer over TCP, and whether this round has one.
    by_tcp: u32,
    hears_tcp: bool,
}

impl PathMtu {
    /// Starts for a session with `encapsulation` and at most `max` bytes of payload in a packet.
    /// `acknowledged`: the graft's acknowledgements tell which sizes arrive.
    pub fn new(
        peer: IpAddr,
        encapsulation: Encapsulation,
        max: u16,
        acknowledged: bool,
        now: u64,
    ) -> Self {
        Self {
            peer,
            encapsulation,
            max,
            acknowledged,
            mark: 0,
            since_ns: now,
            suspected: false,
            search: None,
        }
    }

    /// Whether the graft's acknowledgements tell which sizes arrive.
    pub fn is_acknowledged(&self) -> bool {
        self.acknowledged
    }

    /// Returns the action that is due; call it periodically. `hint` returns the MTU of the route, which
    /// includes what ICMP reported.
    pub fn poll(&mut self, now: u64, at: &Progress, hint: impl FnOnce() -> u32) -> Step {
        let (stuck, patience) = if self.acknowledged {
            (at.out && at.mark == self.mark, STALL_NS)
        } else {
            (at.mark != self.mark, CHECK_NS)
        };
        if !stuck && !self.suspected {
            self.settle(now, at.mark);
            return Step::Nothing;
        }
        let Some(search) = &mut self.search else {
            if !self.suspected && now.saturating_sub(self.since_ns) < patience.max(4 * at.rtt_ns) {
                return Step::Nothing;
            }
            let wait_ns = (2 * at.rtt_ns).clamp(WAIT_NS[0], WAIT_NS[1]);
            self.search = Some(Search {
                rounds: 1,
                wait_ns,
                next_ns: now + wait_ns,
                heard: 0,
                hears: false,
                best: 0,
                by_tcp: 0,
                hears_tcp: false,
            });
            return Step::Ask(if self.acknowledged {
                self.sizes(hint())
            } else {
                vec![self.max; 2]
            });
        };
        if now < search.next_ns {
            return Step::Nothing;
        }
        if search.heard >= ROUNDS {
            self.max = search.best;
            self.settle(now, at.mark);
            return Step::Reduce(self.max);
        }
        if search.heard == 0 && search.by_tcp >= TCP_ROUNDS {
            self.settle(now, at.mark);
            return Step::UseTcp;
        }
        if search.best == 0 && search.rounds >= ROUNDS {
            search.wait_ns = (2 * search.wait_ns).min(WAIT_NS[1]);
        }
        search.rounds += 1;
        search.hears = false;
        search.hears_tcp = false;
        search.next_ns = now + search.wait_ns;
        Step::Ask(self.sizes(hint()))
    }

    /// Handles the answer to a SIZE as large as DATA with `payload` bytes. `mark`: as in [`Progress`].
    pub fn handle_answer(&mut self, now: u64, payload: u16, mark: u64) {
        let min = self.min_payload();
        if payload >= self.max {
            self.settle(now, mark);
        } else if let Some(search) = &mut self.search
            && payload >= min
        {
            search.best = search.best.max(payload);
            search.heard += u32::from(!search.hears);
            search.hears = true;
        }
    }

    /// Handles an answer to a SIZE over TCP.
    pub fn handle_answer_by_tcp(&mut self) {
        if let Some(search) = &mut self.search {
            search.by_tcp += u32::from(!search.hears_tcp);
            search.hears_tcp = true;
        }
    }

    /// Whether to probe over TCP, too: not in the first round, whose probes may just have been lost.
    pub fn asks_by_tcp(&self) -> bool {
        let search = self.search.as_ref();
        search.is_some_and(|search| self.suspected || search.rounds > 1)
    }

    /// Handles the peer's probe over TCP: the next poll starts a search.
    pub fn handle_suspicion(&mut self) {
        self.suspected = true;
    }

    fn settle(&mut self, now: u64, mark: u64) {
        (self.mark, self.since_ns, self.search) = (mark, now, None);
        self.suspected = false;
    }

    /// Lower bound of the payload.
    fn min_payload(&self) -> u16 {
        max_payload(SIZES[SIZES.len() - 1], self.peer, self.encapsulation)
    }

    /// Payloads of one round of probes.
    fn sizes(&self, hint: u32) -> Vec<u16> {
        let mut sizes: Vec<u16> = SIZES
            .iter()
            .chain([&hint])
            .map(|size| max_payload(*size, self.peer, self.encapsulation))
            .filter(|payload| (self.min_payload()..self.max).contains(payload))
            .collect();
        sizes.sort_unstable_by(|a, b| b.cmp(a));
        // The size in use is sent first and last: its loss decides, and only the head of a burst gets through a
        // full queue.
        sizes.insert(0, self.max);
        sizes.push(self.max);
        sizes
    }
}

/// Path of one session's packets: encapsulation, path MTU, and the detour over TCP.
#[derive(Debug, Default)]
pub struct SessionPath {
    encapsulation: Encapsulation,
    detour: Option<Detour>,
    mtu: Option<PathMtu>,
}

impl SessionPath {
    /// Restarts for packets with `encapsulation`. The initiator probes for the way back from TCP. `mtu`:
    /// path MTU discovery, if the peer answers SIZE.
    pub fn begin(
        &mut self,
        now: u64,
        encapsulation: Encapsulation,
        is_initiator: bool,
        mtu: Option<PathMtu>,
    ) {
        self.encapsulation = encapsulation;
        self.mtu = mtu;
        if encapsulation == Encapsulation::Tcp && is_initiator {
            self.detour.get_or_insert_with(|| Detour::new(now));
        }
    }

    /// Encapsulation when the path was started.
    pub fn encapsulation(&self) -> Encapsulation {
        self.encapsulation
    }

    /// Whether the encapsulation has changed from that of [`SessionPath::begin`] to `encapsulation`, so that the path
    /// has to be restarted. Never during a detour, which decides itself.
    pub fn is_rerouted(&self, encapsulation: Encapsulation) -> bool {
        self.detour.is_none() && self.encapsulation != encapsulation
    }

    /// Path MTU discovery, if the peer answers SIZE.
    pub fn mtu(&mut self) -> Option<&mut PathMtu> {
        self.mtu.as_mut()
    }

    /// Whether the graft's acknowledgements tell which sizes arrive, if the peer answers SIZE.
    pub fn is_acknowledged(&self) -> bool {
        self.mtu.as_ref().is_some_and(PathMtu::is_acknowledged)
    }

    /// The detour over TCP, if any.
    pub fn detour(&mut self) -> Option<&mut Detour> {
        self.detour.as_mut()
    }

    /// Starts a detour: packets are sent over TCP until another encapsulation works again.
    pub fn start_detour(&mut self, now: u64) {
        self.detour = Some(Detour::new(now));
    }

    /// Ends the detour: the peer's address outside of TCP is validated.
    pub fn end_detour(&mut self) {
        self.detour = None;
    }

    /// Handles a SIZE with `ACK_NOW` that arrived in `encapsulation`. The peer probes over TCP if packets do not get
    /// through in either direction.
    pub fn handle_question(&mut self, encapsulation: Encapsulation) {
        if encapsulation == Encapsulation::Tcp
            && self.encapsulation != Encapsulation::Tcp
            && let Some(mtu) = &mut self.mtu
        {
            mtu.handle_suspicion();
        }
    }

    /// Handles an answer to a SIZE that arrived in `encapsulation`; `payload` and `mark` as for
    /// [`PathMtu::handle_answer`].
    pub fn handle_answer(
        &mut self,
        now: u64,
        encapsulation: Encapsulation,
        payload: u16,
        mark: u64,
    ) {
        match (&mut self.detour, &mut self.mtu) {
            (Some(detour), _) => detour.handle_answer(encapsulation),
            (None, Some(mtu)) if encapsulation == Encapsulation::Tcp => mtu.handle_answer_by_tcp(),
            (None, Some(mtu)) => mtu.handle_answer(now, payload, mark),
            (None, None) => {}
        }
    }
}

/// Interval of probing the other encapsulations during a detour.
const RETURN_NS: u64 = 1_000 * MS;
/// Consecutive answered rounds after which an encapsulation is used again.
const RETURN_ROUNDS: u32 = 2;
/// Timeout for a packet from the peer in the new encapsulation; then packets are sent over TCP again.
const LEAVING_NS: u64 = 1_000 * MS;

/// Detour of a session over TCP because nothing else got through: probes for the way back.
#[derive(Debug)]
pub struct Detour {
    next_ns: u64,
    /// Consecutive answered rounds, natively and over UDP, and whether this round has an answer.
    heard: [u32; 2],
    hears: [bool; 2],
    /// Start of leaving the detour.
    leaving_ns: Option<u64>,
}

/// Action that a [`Detour`] requests.
#[derive(Debug, PartialEq, Eq)]
pub enum DetourStep {
    /// Nothing.
    Nothing,
    /// Send a SIZE with `ACK_NOW` natively, and one over UDP.
    Ask,
    /// Send packets in this encapsulation, and a SIZE with `ACK_NOW`, whose answer validates the peer's
    /// address.
    Leave(Encapsulation),
    /// Send packets over TCP again: no answer came in the new encapsulation.
    Stay,
}

impl Detour {
    /// Starts a detour at time `now`.
    pub fn new(now: u64) -> Self {
        Self {
            next_ns: now + RETURN_NS,
            heard: [0; 2],
            hears: [false; 2],
            leaving_ns: None,
        }
    }

    /// Returns the action that is due; call it periodically. `udp`: packets already written would fit behind a
    /// UDP header.
    pub fn poll(&mut self, now: u64, rtt_ns: u64, udp: bool) -> DetourStep {
        if let Some(since) = self.leaving_ns {
            if now.saturating_sub(since) < LEAVING_NS.max(4 * rtt_ns) {
                return DetourStep::Nothing;
            }
            *self = Self::new(now);
            return DetourStep::Stay;
        }
        if now < self.next_ns {
            return DetourStep::Nothing;
        }
        for (heard, hears) in self.heard.iter_mut().zip(&mut self.hears) {
            *heard = if std::mem::take(hears) { *heard + 1 } else { 0 };
        }
        self.next_ns = now + RETURN_NS;
        let back = match self.heard {
            [native, _] if native >= RETURN_ROUNDS => Encapsulation::Native,
            [_, by_udp] if by_udp >= RETURN_ROUNDS && udp => Encapsulation::Udp,
            _ => return DetourStep::Ask,
        };
        self.leaving_ns = Some(now);
        DetourStep::Leave(back)
    }

    /// Handles an answer to a SIZE that arrived in `encapsulation`.
    pub fn handle_answer(&mut self, encapsulation: Encapsulation) {
        match encapsulation {
            Encapsulation::Native => self.hears[0] = true,
            Encapsulation::Udp => self.hears[1] = true,
            Encapsulation::Tcp => {}
        }
    }
}

#[cfg(test)]
#[allow(non_snake_case)]
mod tests {
    use std::net::{Ipv4Addr, Ipv6Addr};

    use super::*;

    const V4: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

    fn at(mark: u64) -> Progress {
        Progress {
            mark,
            out: true,
            rtt_ns: 20 * MS,
        }
    }

    /// Advances the time in ticks until there is something to do.
    fn until(path: &mut PathMtu, now: &mut u64, at: &Progress) -> Step {
        for _ in 0..1000 {
            match path.poll(*now, at, || 0) {
                Step::Nothing => *now += 100 * MS,
                step => return step,
            }
        }
        Step::Nothing
    }

    fn asked(path: &mut PathMtu, now: &mut u64, at: &Progress) -> Vec<u16> {
        match until(path, now, at) {
            Step::Ask(sizes) => sizes,
            step => panic!("{step:?}"),
        }
    }

    #[test]
    fn path__smaller_ones_get_through() {
        let mut now = 1000 * MS;
        let mut path = PathMtu::new(V4, Encapsulation::Native, 1440, true, now);
        assert_eq!(path.poll(now, &at(7), || 0), Step::Nothing);
        let sizes = asked(&mut path, &mut now, &at(7));
        assert_eq!((sizes[0], sizes[1]), (1440, 1432));
        assert_eq!(sizes[sizes.len() - 2..], [1136, 1440]);
        assert_eq!(now, 1300 * MS);
        path.handle_answer(now, 1136, 7);
        path.handle_answer(now, 1000, 7);
        asked(&mut path, &mut now, &at(7));
        // A round without any answer does not count.
        asked(&mut path, &mut now, &at(7));
        path.handle_answer(now, 1216, 7);
        path.handle_answer(now, 1136, 7);
        asked(&mut path, &mut now, &at(7));
        path.handle_answer(now, 1176, 7);
        assert_eq!(until(&mut path, &mut now, &at(7)), Step::Reduce(1216));
        assert_eq!((now, path.max), (1700 * MS, 1216));
        // Only smaller sizes are probed from now on.
        let sizes = asked(&mut path, &mut now, &at(7));
        assert!(sizes.iter().all(|size| *size <= 1216));
    }

    #[test]
    fn path__large_ones_get_through_after_all() {
        let mut now = 0;
        let mut path = PathMtu::new(V4, Encapsulation::Native, 1440, true, now);
        asked(&mut path, &mut now, &at(0));
        path.handle_answer(now, 1136, 0);
        path.handle_answer(now, 1440, 0);
        let since = now;
        asked(&mut path, &mut now, &at(0));
        assert_eq!(now - since, STALL_NS, "a new count");
        // No search while the session makes progress, or nothing is in flight.
        assert_eq!(path.poll(now + MS, &at(1), || 0), Step::Nothing);
        let idle = Progress {
            out: false,
            ..at(1)
        };
        assert_eq!(until(&mut path, &mut now, &idle), Step::Nothing);
        assert_eq!(path.max, 1440);
    }

    #[test]
    fn path__nothing_gets_through() {
        let mut now = 0;
        let mut path = PathMtu::new(V4, Encapsulation::Native, 1440, true, now);
        for _ in 0..50 {
            asked(&mut path, &mut now, &at(0));
        }
        assert!(now > 40 * WAIT_NS[1], "it asks less often: {now}");
        assert_eq!(path.max, 1440);
    }

    #[test]
    fn path__where_tcp_alone_gets_through() {
        let mut now = 0;
        let mut path = PathMtu::new(V4, Encapsulation::Native, 1440, true, now);
        asked(&mut path, &mut now, &at(0));
        assert!(!path.asks_by_tcp(), "that may have been bad luck");
        asked(&mut path, &mut now, &at(0));
        assert!(path.asks_by_tcp());
        path.handle_answer_by_tcp();
        path.handle_answer_by_tcp();
        asked(&mut path, &mut now, &at(0));
        path.handle_answer_by_tcp();
        assert_eq!(until(&mut path, &mut now, &at(0)), Step::UseTcp);
        assert_eq!(now, 600 * MS);
        // Not where other packets get through as well.
        for _ in 0..3 {
            asked(&mut path, &mut now, &at(0));
            path.handle_answer_by_tcp();
            path.handle_answer(now, 1200, 0);
        }
        assert_eq!(until(&mut path, &mut now, &at(0)), Step::Reduce(1200));
    }

    #[test]
    fn path__that_the_peer_suspects() {
        let mut now = 0;
        let mut path = PathMtu::new(V4, Encapsulation::Native, 1440, true, now);
        let idle = Progress {
            out: false,
            ..at(0)
        };
        path.handle_suspicion();
        asked(&mut path, &mut now, &idle);
        assert!(path.asks_by_tcp());
        path.handle_answer(now, 1440, 0);
        assert_eq!(until(&mut path, &mut now, &idle), Step::Nothing);
    }

    #[test]
    fn detour__ends_when_another_encapsulation_works_again() {
        let second = 1_000 * MS;
        let mut detour = Detour::new(0);
        let look = |detour: &mut Detour, s: u64| detour.poll(s * second, 20 * MS, true);
        assert_eq!(look(&mut detour, 0), DetourStep::Nothing);
        assert_eq!(look(&mut detour, 1), DetourStep::Ask);
        detour.handle_answer(Encapsulation::Udp);
        assert_eq!(look(&mut detour, 2), DetourStep::Ask);
        assert_eq!(look(&mut detour, 3), DetourStep::Ask, "once is not enough");
        detour.handle_answer(Encapsulation::Udp);
        assert_eq!(look(&mut detour, 4), DetourStep::Ask);
        detour.handle_answer(Encapsulation::Udp);
        assert_eq!(detour.poll(5 * second, 0, false), DetourStep::Ask, "unfit");
        detour.handle_answer(Encapsulation::Udp);
        assert_eq!(look(&mut detour, 6), DetourStep::Leave(Encapsulation::Udp));
        assert_eq!(look(&mut detour, 6), DetourStep::Nothing);
        assert_eq!(look(&mut detour, 7), DetourStep::Stay);
        assert_eq!(look(&mut detour, 8), DetourStep::Ask, "from the beginning");
        detour.handle_answer(Encapsulation::Udp);
        detour.handle_answer(Encapsulation::Native);
        assert_eq!(look(&mut detour, 9), DetourStep::Ask);
        detour.handle_answer(Encapsulation::Udp);
        detour.handle_answer(Encapsulation::Native);
        assert_eq!(
            look(&mut detour, 10),
            DetourStep::Leave(Encapsulation::Native)
        );
    }

    fn session_path(encapsulation: Encapsulation) -> SessionPath {
        let mut path = SessionPath::default();
        path.begin(
            0,
            encapsulation,
            true,
            Some(PathMtu::new(V4, encapsulation, 1440, true, 0)),
        );
        path
    }

    #[test]
    fn session_path__begins_a_detour_at_the_initiator_by_tcp() {
        assert!(session_path(Encapsulation::Udp).detour().is_none());
        let mut path = session_path(Encapsulation::Tcp);
        assert_eq!(path.encapsulation(), Encapsulation::Tcp);
        let detour = path.detour().expect("the initiator looks for the way back");
        assert_eq!(detour.poll(RETURN_NS, 0, true), DetourStep::Ask);
        // The current detour continues.
        path.begin(RETURN_NS, Encapsulation::Tcp, true, None);
        let detour = path.detour().expect("still by TCP");
        assert_eq!(detour.poll(RETURN_NS, 0, true), DetourStep::Nothing);
        assert_eq!(detour.poll(2 * RETURN_NS, 0, true), DetourStep::Ask);
        let mut path = SessionPath::default();
        path.begin(0, Encapsulation::Tcp, false, None);
        assert!(path.detour().is_none(), "the responder follows");
    }

    #[test]
    fn session_path__follows_the_encapsulation_except_on_a_detour() {
        let mut path = session_path(Encapsulation::Native);
        assert!(!path.is_rerouted(Encapsulation::Native));
        assert!(path.is_rerouted(Encapsulation::Udp));
        path.start_detour(0);
        assert!(!path.is_rerouted(Encapsulation::Tcp));
        path.end_detour();
        assert!(path.is_rerouted(Encapsulation::Tcp));
    }

    #[test]
    fn session_path__suspects_when_the_peer_asks_by_tcp() {
        let suspects = |path: &mut SessionPath| {
            let mtu = path.mtu().expect("the peer answers SIZE");
            mtu.poll(MS, &at(1), || 0) != Step::Nothing
        };
        for (encapsulation, asked_by, suspected) in [
            (Encapsulation::Native, Encapsulation::Native, false),
            (Encapsulation::Native, Encapsulation::Tcp, true),
            (Encapsulation::Udp, Encapsulation::Tcp, true),
            (Encapsulation::Tcp, Encapsulation::Tcp, false),
        ] {
            let mut path = session_path(encapsulation);
            path.handle_question(asked_by);
            assert_eq!(suspects(&mut path), suspected, "{encapsulation} {asked_by}");
        }
    }

    #[test]
    fn session_path__gives_answers_to_the_detour_or_to_discovery() {
        let mut now = 0;
        let mut path = session_path(Encapsulation::Native);
        asked(path.mtu().unwrap(), &mut now, &at(0));
        path.handle_answer(now, Encapsulation::Tcp, 8, 0);
        asked(path.mtu().unwrap(), &mut now, &at(0));
        path.handle_answer(now, Encapsulation::Tcp, 8, 0);
        let step = until(path.mtu().unwrap(), &mut now, &at(0));
        assert_eq!(step, Step::UseTcp);
        // The size in use gets through: nothing is wrong.
        asked(path.mtu().unwrap(), &mut now, &at(0));
        path.handle_answer(now, Encapsulation::Native, 1440, 0);
        let step = path.mtu().unwrap().poll(now + MS, &at(0), || 0);
        assert_eq!(step, Step::Nothing);
        path.start_detour(0);
        for round in 1..=2 {
            let step = path.detour().unwrap().poll(round * RETURN_NS, 0, true);
            assert_eq!(step, DetourStep::Ask);
            path.handle_answer(0, Encapsulation::Native, 1440, 0);
        }
        let step = path.detour().unwrap().poll(3 * RETURN_NS, 0, true);
        assert_eq!(step, DetourStep::Leave(Encapsulation::Native));
    }

    #[test]
    fn path__where_nobody_says_what_arrives() {
        let mut now = 0;
        let mut path = PathMtu::new(V4, Encapsulation::Native, 1440, false, now);
        assert_eq!(until(&mut path, &mut now, &at(0)), Step::Nothing, "idle");
        let since = now;
        assert_eq!(asked(&mut path, &mut now, &at(5)), [1440; 2]);
        assert_eq!(now - since, CHECK_NS - 100 * MS);
        path.handle_answer(now, 1440, 5);
        assert_eq!(path.poll(now + MS, &at(5), || 0), Step::Nothing);
        for sent in 6..9 {
            asked(&mut path, &mut now, &at(sent));
            path.handle_answer(now, 1200, sent);
        }
        assert_eq!(until(&mut path, &mut now, &at(9)), Step::Reduce(1200));
    }

    #[test]
    fn sizes__are_those_below_the_one_in_use() {
        let path = PathMtu::new(V4, Encapsulation::Native, 1440, true, 0);
        assert!(path.sizes(1300).contains(&1240), "what a router said");
        assert!(!path.sizes(600).contains(&536));
        let path = PathMtu::new(
            Ipv6Addr::LOCALHOST.into(),
            Encapsulation::Native,
            1120,
            true,
            0,
        );
        assert_eq!(path.sizes(0), [1120, 1120]);
        let path = PathMtu::new(V4, Encapsulation::Udp, 1432, true, 0);
        assert!(path.sizes(0).contains(&1424), "1492 bytes");
        assert_eq!(path.min_payload(), 1128);
    }
}
