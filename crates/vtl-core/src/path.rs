//! How large packets the path to a peer takes (RFC 8899), without I/O.
//!
//! A session begins with what the route takes. If it does not get on although packets are out, the
//! peer is asked, with packets of many sizes at a time, which of them get through: that tells a
//! path that takes less than it did from one that takes nothing, and from bad luck. One that takes
//! nothing, while TCP gets through, is gone round by TCP ([`Detour`] looks for the way back). What
//! routers say (ICMP) is one more size to ask about, no more, so whoever forges that achieves nothing. Where the
//! graft does not learn what arrives, the peer is asked from time to time whether all is well.

use std::net::IpAddr;

use vtl_proto::{intf, nego::Way};

const MS: u64 = 1_000_000;
/// A session that gets on no further for so long, and for four round trips, is looked into.
const STALL_NS: u64 = 300 * MS;
/// Where nobody says what arrives, this often, while something is sent.
const CHECK_NS: u64 = 10_000 * MS;
/// The peer's silence on a size is believed when it has answered others so often.
const ROUNDS: u32 = 3;
/// TCP's answers are believed when it has brought so many and nothing else has come.
const TCP_ROUNDS: u32 = 2;
/// Between two rounds: two round trips, and within these bounds. Each round without any answer
/// doubles it.
const WAIT_NS: [u64; 2] = [100 * MS, 3_000 * MS];
/// IP packets of these sizes are asked about: common MTUs, and those of common carriers. The last is
/// the smallest that a session is cut down to (BASE_PLPMTU of RFC 8899), as acknowledgements need it.
const SIZES: [u32; 12] = [
    1500, 1492, 1480, 1450, 1420, 1400, 1380, 1360, 1320, 1280, 1240, 1200,
];

/// The most payload per packet for an MTU, a multiple of 8.
pub fn max_payload(mtu: u32, to: IpAddr, way: Way) -> u16 {
    let ip = if to.is_ipv4() { 20 } else { 40 } + u32::from(way.overhead());
    let headers = ip + size_of::<intf::vtl_data_hdr>() as u32;
    let most = mtu.saturating_sub(headers).min(intf::VTL_MAX_PAYLOAD);
    (most & !7).max(8) as u16
}

/// What is to be done now.
#[derive(Debug, PartialEq, Eq)]
pub enum Step {
    /// Nothing.
    Nothing,
    /// Ask about these payloads.
    Ask(Vec<u16>),
    /// So much payload gets through, and what was sent so far does not.
    Narrow(u16),
    /// Nothing gets through, and TCP does.
    GoRound,
}

/// How far a session is.
pub struct Progress {
    /// Packets acknowledged, or, where nobody says what arrives, sent.
    pub mark: u64,
    /// More were sent than that.
    pub out: bool,
    /// Its round-trip time.
    pub rtt_ns: u64,
}

/// One session's path.
#[derive(Debug)]
pub struct PathSize {
    peer: IpAddr,
    way: Way,
    /// Payload bytes that it takes, as far as is known.
    most: u16,
    /// Acknowledgements tell what arrives.
    acknowledged: bool,
    /// All was well when the session was here, and at that time.
    mark: u64,
    since_ns: u64,
    /// The peer has asked by TCP: it does not get on.
    suspected: bool,
    search: Option<Search>,
}

#[derive(Debug)]
struct Search {
    rounds: u32,
    wait_ns: u64,
    next_ns: u64,
    /// Rounds in which some were answered, and whether this one is such.
    heard: u32,
    hears: bool,
    /// The largest size that was answered, payload bytes.
    best: u16,
    /// Rounds in which TCP has brought an answer, and whether this one is such.
    by_tcp: u32,
    hears_tcp: bool,
}

impl PathSize {
    /// The path of a session whose packets go by `way`, and have at most `most` bytes of payload.
    /// `acknowledged`: acknowledgements tell what arrives.
    pub fn new(peer: IpAddr, way: Way, most: u16, acknowledged: bool, now: u64) -> Self {
        Self {
            peer,
            way,
            most,
            acknowledged,
            mark: 0,
            since_ns: now,
            suspected: false,
            search: None,
        }
    }

    /// Whether acknowledgements tell what arrives.
    pub fn acknowledged(&self) -> bool {
        self.acknowledged
    }

    /// To be called every now and then. `hint`: the MTU of the route, for all that routers told.
    pub fn look(&mut self, now: u64, at: &Progress, hint: impl FnOnce() -> u32) -> Step {
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
                vec![self.most; 2]
            });
        };
        if now < search.next_ns {
            return Step::Nothing;
        }
        if search.heard >= ROUNDS {
            self.most = search.best;
            self.settle(now, at.mark);
            return Step::Narrow(self.most);
        }
        if search.heard == 0 && search.by_tcp >= TCP_ROUNDS {
            self.settle(now, at.mark);
            return Step::GoRound;
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

    /// The peer has received a packet with so much payload; the session is at `mark`.
    pub fn answered(&mut self, now: u64, payload: u16, mark: u64) {
        let least = self.least();
        if payload >= self.most {
            self.settle(now, mark);
        } else if let Some(search) = &mut self.search
            && payload >= least
        {
            search.best = search.best.max(payload);
            search.heard += u32::from(!search.hears);
            search.hears = true;
        }
    }

    /// The peer has answered by TCP.
    pub fn answered_by_tcp(&mut self) {
        if let Some(search) = &mut self.search {
            search.by_tcp += u32::from(!search.hears_tcp);
            search.hears_tcp = true;
        }
    }

    /// Whether TCP is to be asked as well: bad luck has been ruled out, as far as one round does.
    pub fn asks_by_tcp(&self) -> bool {
        let search = self.search.as_ref();
        search.is_some_and(|search| self.suspected || search.rounds > 1)
    }

    /// The peer finds that nothing gets through.
    pub fn suspect(&mut self) {
        self.suspected = true;
    }

    fn settle(&mut self, now: u64, mark: u64) {
        (self.mark, self.since_ns, self.search) = (mark, now, None);
        self.suspected = false;
    }

    /// The least payload that the session is cut down to.
    fn least(&self) -> u16 {
        max_payload(SIZES[SIZES.len() - 1], self.peer, self.way)
    }

    /// Payloads to ask about.
    fn sizes(&self, hint: u32) -> Vec<u16> {
        let mut sizes: Vec<u16> = SIZES
            .iter()
            .chain([&hint])
            .map(|size| max_payload(*size, self.peer, self.way))
            .filter(|payload| (self.least()..self.most).contains(payload))
            .collect();
        sizes.sort_unstable_by(|a, b| b.cmp(a));
        // What is in use goes twice, first and last: its loss is what will be believed, and of a
        // burst into a full queue only the first packets get through.
        sizes.insert(0, self.most);
        sizes.push(self.most);
        sizes
    }
}

/// While packets go by TCP, the peer is asked so often whether others get through again.
const RETURN_NS: u64 = 1_000 * MS;
/// And those are believed when so many rounds, one after the other, were answered.
const RETURN_ROUNDS: u32 = 2;
/// Where the peer's next packet does not come at once, TCP goes on.
const LEAVING_NS: u64 = 1_000 * MS;

/// A session's packets go by TCP, since nothing else got through.
#[derive(Debug)]
pub struct Detour {
    next_ns: u64,
    /// Rounds that were answered natively and by UDP, and whether this one was.
    heard: [u32; 2],
    hears: [bool; 2],
    /// The session is on the way back since then.
    leaving_ns: Option<u64>,
}

/// What a detour wants to be done.
#[derive(Debug, PartialEq, Eq)]
pub enum Return {
    /// Nothing.
    Nothing,
    /// Ask natively and by UDP.
    Ask,
    /// Go on by this way, and ask by it, so that the answer shows where the peer is.
    Leave(Way),
    /// The answer did not come: by TCP, after all.
    Stay,
}

impl Detour {
    /// Packets go by TCP from now on.
    pub fn new(now: u64) -> Self {
        Self {
            next_ns: now + RETURN_NS,
            heard: [0; 2],
            hears: [false; 2],
            leaving_ns: None,
        }
    }

    /// To be called every now and then, with a way back that is fit for the session if not all are.
    pub fn look(&mut self, now: u64, rtt_ns: u64, udp: bool) -> Return {
        if let Some(since) = self.leaving_ns {
            if now.saturating_sub(since) < LEAVING_NS.max(4 * rtt_ns) {
                return Return::Nothing;
            }
            *self = Self::new(now);
            return Return::Stay;
        }
        if now < self.next_ns {
            return Return::Nothing;
        }
        for (heard, hears) in self.heard.iter_mut().zip(&mut self.hears) {
            *heard = if std::mem::take(hears) { *heard + 1 } else { 0 };
        }
        self.next_ns = now + RETURN_NS;
        let back = match self.heard {
            [native, _] if native >= RETURN_ROUNDS => Way::Native,
            [_, by_udp] if by_udp >= RETURN_ROUNDS && udp => Way::Udp,
            _ => return Return::Ask,
        };
        self.leaving_ns = Some(now);
        Return::Leave(back)
    }

    /// The peer has answered.
    pub fn answered(&mut self, way: Way) {
        match way {
            Way::Native => self.hears[0] = true,
            Way::Udp => self.hears[1] = true,
            Way::Tcp => {}
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

    /// Lets time pass in ticks until there is something to do.
    fn until(path: &mut PathSize, now: &mut u64, at: &Progress) -> Step {
        for _ in 0..1000 {
            match path.look(*now, at, || 0) {
                Step::Nothing => *now += 100 * MS,
                step => return step,
            }
        }
        Step::Nothing
    }

    fn asked(path: &mut PathSize, now: &mut u64, at: &Progress) -> Vec<u16> {
        match until(path, now, at) {
            Step::Ask(sizes) => sizes,
            step => panic!("{step:?}"),
        }
    }

    #[test]
    fn path__smaller_ones_get_through() {
        let mut now = 1000 * MS;
        let mut path = PathSize::new(V4, Way::Native, 1440, true, now);
        assert_eq!(path.look(now, &at(7), || 0), Step::Nothing);
        let sizes = asked(&mut path, &mut now, &at(7));
        assert_eq!((sizes[0], sizes[1]), (1440, 1432));
        assert_eq!(sizes[sizes.len() - 2..], [1136, 1440]);
        assert_eq!(now, 1300 * MS);
        path.answered(now, 1136, 7);
        path.answered(now, 1000, 7);
        asked(&mut path, &mut now, &at(7));
        // A round in which nothing comes back says nothing.
        asked(&mut path, &mut now, &at(7));
        path.answered(now, 1216, 7);
        path.answered(now, 1136, 7);
        asked(&mut path, &mut now, &at(7));
        path.answered(now, 1176, 7);
        assert_eq!(until(&mut path, &mut now, &at(7)), Step::Narrow(1216));
        assert_eq!((now, path.most), (1700 * MS, 1216));
        // Less and less.
        let sizes = asked(&mut path, &mut now, &at(7));
        assert!(sizes.iter().all(|size| *size <= 1216));
    }

    #[test]
    fn path__large_ones_get_through_after_all() {
        let mut now = 0;
        let mut path = PathSize::new(V4, Way::Native, 1440, true, now);
        asked(&mut path, &mut now, &at(0));
        path.answered(now, 1136, 0);
        path.answered(now, 1440, 0);
        let since = now;
        asked(&mut path, &mut now, &at(0));
        assert_eq!(now - since, STALL_NS, "a new count");
        // Neither does it search where the session gets on, or nothing is out.
        assert_eq!(path.look(now + MS, &at(1), || 0), Step::Nothing);
        let idle = Progress {
            out: false,
            ..at(1)
        };
        assert_eq!(until(&mut path, &mut now, &idle), Step::Nothing);
        assert_eq!(path.most, 1440);
    }

    #[test]
    fn path__nothing_gets_through() {
        let mut now = 0;
        let mut path = PathSize::new(V4, Way::Native, 1440, true, now);
        for _ in 0..50 {
            asked(&mut path, &mut now, &at(0));
        }
        assert!(now > 40 * WAIT_NS[1], "it asks less often: {now}");
        assert_eq!(path.most, 1440);
    }

    #[test]
    fn path__where_tcp_alone_gets_through() {
        let mut now = 0;
        let mut path = PathSize::new(V4, Way::Native, 1440, true, now);
        asked(&mut path, &mut now, &at(0));
        assert!(!path.asks_by_tcp(), "that may have been bad luck");
        asked(&mut path, &mut now, &at(0));
        assert!(path.asks_by_tcp());
        path.answered_by_tcp();
        path.answered_by_tcp();
        asked(&mut path, &mut now, &at(0));
        path.answered_by_tcp();
        assert_eq!(until(&mut path, &mut now, &at(0)), Step::GoRound);
        assert_eq!(now, 600 * MS);
        // Not where other packets get through as well.
        for _ in 0..3 {
            asked(&mut path, &mut now, &at(0));
            path.answered_by_tcp();
            path.answered(now, 1200, 0);
        }
        assert_eq!(until(&mut path, &mut now, &at(0)), Step::Narrow(1200));
    }

    #[test]
    fn path__that_the_peer_suspects() {
        let mut now = 0;
        let mut path = PathSize::new(V4, Way::Native, 1440, true, now);
        let idle = Progress {
            out: false,
            ..at(0)
        };
        path.suspect();
        asked(&mut path, &mut now, &idle);
        assert!(path.asks_by_tcp());
        path.answered(now, 1440, 0);
        assert_eq!(until(&mut path, &mut now, &idle), Step::Nothing);
    }

    #[test]
    fn detour__ends_where_another_way_is_there_again() {
        let second = 1_000 * MS;
        let mut detour = Detour::new(0);
        let look = |detour: &mut Detour, s: u64| detour.look(s * second, 20 * MS, true);
        assert_eq!(look(&mut detour, 0), Return::Nothing);
        assert_eq!(look(&mut detour, 1), Return::Ask);
        detour.answered(Way::Udp);
        assert_eq!(look(&mut detour, 2), Return::Ask);
        assert_eq!(look(&mut detour, 3), Return::Ask, "once is not enough");
        detour.answered(Way::Udp);
        assert_eq!(look(&mut detour, 4), Return::Ask);
        detour.answered(Way::Udp);
        assert_eq!(detour.look(5 * second, 0, false), Return::Ask, "unfit");
        detour.answered(Way::Udp);
        assert_eq!(look(&mut detour, 6), Return::Leave(Way::Udp));
        assert_eq!(look(&mut detour, 6), Return::Nothing);
        assert_eq!(look(&mut detour, 7), Return::Stay);
        assert_eq!(look(&mut detour, 8), Return::Ask, "from the beginning");
        detour.answered(Way::Udp);
        detour.answered(Way::Native);
        assert_eq!(look(&mut detour, 9), Return::Ask);
        detour.answered(Way::Udp);
        detour.answered(Way::Native);
        assert_eq!(look(&mut detour, 10), Return::Leave(Way::Native));
    }

    #[test]
    fn path__where_nobody_says_what_arrives() {
        let mut now = 0;
        let mut path = PathSize::new(V4, Way::Native, 1440, false, now);
        assert_eq!(until(&mut path, &mut now, &at(0)), Step::Nothing, "idle");
        let since = now;
        assert_eq!(asked(&mut path, &mut now, &at(5)), [1440; 2]);
        assert_eq!(now - since, CHECK_NS - 100 * MS);
        path.answered(now, 1440, 5);
        assert_eq!(path.look(now + MS, &at(5), || 0), Step::Nothing);
        for sent in 6..9 {
            asked(&mut path, &mut now, &at(sent));
            path.answered(now, 1200, sent);
        }
        assert_eq!(until(&mut path, &mut now, &at(9)), Step::Narrow(1200));
    }

    #[test]
    fn sizes__are_those_below_the_one_in_use() {
        let path = PathSize::new(V4, Way::Native, 1440, true, 0);
        assert!(path.sizes(1300).contains(&1240), "what a router said");
        assert!(!path.sizes(600).contains(&536));
        let path = PathSize::new(Ipv6Addr::LOCALHOST.into(), Way::Native, 1120, true, 0);
        assert_eq!(path.sizes(0), [1120, 1120]);
        let path = PathSize::new(V4, Way::Udp, 1432, true, 0);
        assert!(path.sizes(0).contains(&1424), "1492 bytes");
        assert_eq!(path.least(), 1128);
    }
}
