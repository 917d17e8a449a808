//! Sessions on further paths, for flows that are spread over several at once (`multipath`): from each of this host's
//! interfaces, to each of the peer's that it tells. They come and go with addresses.

use std::{
    collections::BTreeMap,
    future::pending,
    io,
    net::{IpAddr, UdpSocket},
    rc::Rc,
    time::Duration,
};

use tokio::{
    sync::Mutex,
    task::{AbortHandle, JoinSet},
    time::sleep,
};
use vtl_control::{PathEvent, What};
use vtl_proto::{
    carrier::Kind,
    frame::{Addresses as AddressesFrame, Frame, MAX_ADDRESSES},
};

use super::{
    Flows,
    addresses::{Addresses, Own, elsewhere},
    carrier::{Granted, ToOpen},
    control::Control,
    keeper::Pauses,
    peer::Peer,
};
use crate::{events::emit, scope};

/// Maximum number of further paths of an association.
const MAX_PATHS: usize = 7;
/// Least interval between two ADDRESSES, and between two that are followed: a peer names any address.
const TELLING: Duration = Duration::from_secs(1);
/// How often to ask again which routes there are: one may come later than the address, as by DHCP.
const ROUTES: Duration = Duration::from_secs(5);
/// Maximum number of paths whose back-off is remembered.
const MAX_REMEMBERED: usize = 64;

/// A path: the addresses of this host and of the peer.
type Path = (IpAddr, IpAddr);

impl Flows {
    /// This host's addresses.
    fn addresses(&self) -> Rc<Addresses> {
        let mut addresses = self.addresses.borrow_mut();
        let addresses =
            addresses.get_or_insert_with(|| Addresses::start(self.limits.scope.clone()));
        Rc::clone(addresses)
    }

    /// Tells schedulers what the link layer says of each path.
    pub(super) fn follow_links(&self, peer: &Peer) {
        if !peer.is_spread() {
            return;
        }
        let monitor = self.broker.monitor();
        peer.note_link_rates(|local, peer| monitor.link_between(local, peer).rate);
    }

    /// Keeps sessions on further paths open while flows are spread. Never returns.
    pub(super) async fn open_stacks(self: &Rc<Self>, peer: &Rc<Peer>) {
        peer.until(Peer::is_spread).await;
        let addresses = self.addresses();
        let mut tasks = JoinSet::new();
        let mut running: BTreeMap<Path, AbortHandle> = BTreeMap::new();
        // Kept beyond a path's end, so that one that comes and goes is not tried each time.
        let mut pauses: BTreeMap<Path, Rc<Mutex<Pauses>>> = BTreeMap::new();
        // It may be the loopback's, or of an interface that VTL is not for.
        let mut was_listed = false;
        let mut last = 0_u8;
        loop {
            let (version, state) = (addresses.version(), peer.stacks_state());
            let own = addresses.all();
            let is_listed = own.iter().any(|own| own.address == home(peer).0);
            was_listed |= is_listed;
            peer.set_own(is_listed || !was_listed && is_own(home(peer).0));
            let wanted = match peer.may_have_stacks() {
                true => {
                    let known: Vec<Path> = running.keys().copied().collect();
                    paths(home(peer), &own, &peer.told_addresses(), &known, leads)
                }
                false => Vec::new(),
            };
            running.retain(|path, task| {
                let stays = wanted.contains(path) && !task.is_finished();
                if !stays {
                    // Its session ends with it.
                    task.abort();
                }
                stays
            });
            if pauses.len() > MAX_REMEMBERED {
                pauses.retain(|path, _| wanted.contains(path));
            }
            for path in wanted {
                running.entry(path).or_insert_with(|| {
                    last = last.wrapping_add(1).max(1);
                    // Answers to the TCP option say nothing of further paths.
                    let pauses = pauses.entry(path);
                    let pauses = pauses
                        .or_insert_with(|| Rc::new(Mutex::new(Pauses::new(Peer::successions))));
                    let (flows, peer) = (Rc::clone(self), Rc::clone(peer));
                    tasks.spawn_local(flows.open_stack(peer, path, last, Rc::clone(pauses)))
                });
            }
            while tasks.try_join_next().is_some() {}
            let other = async {
                // The first addresses are followed at once.
                if !peer.told_addresses().is_empty() {
                    sleep(TELLING).await;
                }
                peer.until(|peer| peer.stacks_state() != state).await;
            };
            tokio::select! {
                () = addresses.changed(version) => {}
                () = other => {}
                () = again(peer) => {}
            }
        }
    }

    /// Keeps a session on a path open.
    async fn open_stack(
        self: Rc<Self>,
        peer: Rc<Peer>,
        path: Path,
        number: u8,
        pauses: Rc<Mutex<Pauses>>,
    ) {
        let (local, to) = path;
        // A former task of the path's has been aborted, and is about to give them back.
        let mut pauses = pauses.lock().await;
        loop {
            pauses.wait(&peer).await;
            let Ok(endpoint) = self.endpoint(Kind::Graft) else {
                return;
            };
            let opening = ToOpen {
                granted: Granted::freely(to),
                local,
                rtt: None,
                options: peer.options(Kind::Graft),
                encrypted: true,
                path: number,
            };
            match endpoint.connect(opening).await {
                Ok(link) => {
                    tracing::info!(peer = %peer.key.peer, %local, %to, "stacks: path open");
                    let id = peer.next_carrier();
                    let _told = ToldPath::new(&peer, path);
                    let layers = self.layers(None);
                    link.serve(Rc::clone(&peer), Some(id), layers).await;
                    tracing::info!(peer = %peer.key.peer, %local, %to, "stacks: path closed");
                }
                Err(error) => {
                    tracing::info!(%error, peer = %peer.key.peer, %local, %to, "stacks: cannot open a path");
                }
            }
        }
    }

    /// Tells a peer that spreads its flows this host's further addresses, and when they change. Returns when the
    /// connection fails.
    pub(super) async fn tell_addresses(&self, peer: &Peer, control: &Control) {
        if !control.has_tls() {
            return pending().await;
        }
        let mut told = None;
        loop {
            peer.until(Peer::is_spread).await;
            let addresses = self.addresses();
            let version = addresses.version();
            let mut further = addresses.further(peer.key.local, peer.key.peer);
            further.truncate(MAX_ADDRESSES);
            if told.as_ref() != Some(&further) {
                let entries: Vec<_> = further.iter().copied().map(AddressesFrame::entry).collect();
                let frame = Frame::Addresses(AddressesFrame::new(&entries));
                if control.say(frame).await.is_err() {
                    return;
                }
                told = Some(further);
            }
            sleep(TELLING).await;
            addresses.changed(version).await;
        }
    }
}

/// A path that is up: tells that it is, and on drop, also where its task is aborted, that it is not any more.
struct ToldPath(PathEvent);

impl ToldPath {
    fn new(peer: &Peer, (local, to): Path) -> Self {
        let event = PathEvent {
            association: peer.key.tag,
            peer: peer.key.peer,
            local,
            to,
        };
        emit(What::PathUp(event.clone()));
        Self(event)
    }
}

impl Drop for ToldPath {
    fn drop(&mut self) {
        emit(What::PathDown(self.0.clone()));
    }
}

/// The path of the flows' own connections.
fn home(peer: &Peer) -> Path {
    (peer.key.local.to_canonical(), peer.key.peer.to_canonical())
}

/// Whether packets between these addresses leave by the interface of this host's.
fn leads(from: &Own, to: IpAddr) -> bool {
    scope::exit(to, from.address, 0).is_ok_and(|index| index == from.index)
}

/// Whether an address is this host's, on whatever interface.
fn is_own(address: IpAddr) -> bool {
    let bound = UdpSocket::bind((address, 0));
    !bound.is_err_and(|error| error.kind() == io::ErrorKind::AddrNotAvailable)
}

/// Completes when it is time to ask for routes again, while there are flows.
async fn again(peer: &Peer) {
    sleep(ROUTES).await;
    peer.until(Peer::has_flows).await;
}

/// The further paths, each with an interface of this host's for itself: several over one link would take several shares
/// of it. A host with no other interface has one more path to another address of the peer. `told`: the peer's further
/// addresses. `known`: paths that there are already; they stay as long as routes lead there.
fn paths(
    (local, peer): Path,
    own: &[Own],
    told: &[IpAddr],
    known: &[Path],
    leads: impl Fn(&Own, IpAddr) -> bool,
) -> Vec<Path> {
    let home = own.iter().find(|own| own.address == local);
    let mut locals = elsewhere(own, local);
    let is_other = |address: &&IpAddr| {
        address.is_ipv4() == peer.is_ipv4() && own.iter().all(|own| own.address != **address)
    };
    let mut peers: Vec<IpAddr> = told.iter().filter(is_other).copied().collect();
    let all: Vec<IpAddr> = [peer].into_iter().chain(peers.iter().copied()).collect();
    if home.is_none() {
        peers.insert(0, peer);
    }
    let mut found = Vec::new();
    for (from, to) in known {
        let at = locals.iter().position(|own| own.address == *from);
        if let Some(at) = at.filter(|at| all.contains(to) && leads(&locals[*at], *to)) {
            locals.remove(at);
            peers.retain(|peer| peer != to);
            found.push((*from, *to));
        }
    }
    // Both are used for the first time.
    peers.retain(|to| {
        let fit = locals.iter().position(|from| leads(from, *to));
        fit.inspect(|fit| found.push((locals.remove(*fit).address, *to)))
            .is_none()
    });
    for from in locals {
        let to = all.iter().find(|to| leads(&from, **to));
        found.extend(to.map(|to| (from.address, *to)));
    }
    if let Some(home) = home.filter(|_| found.is_empty()) {
        let stays = known
            .iter()
            .find(|(from, to)| *from == local && peers.contains(to));
        let to = stays.map(|(_, to)| to).into_iter().chain(&peers);
        let to = to.copied().find(|to| leads(home, *to));
        found.extend(to.map(|to| (local, to)));
    }
    found.truncate(MAX_PATHS);
    found
}

#[cfg(test)]
#[allow(non_snake_case)]
mod tests {
    use super::{
        super::addresses::tests::{ip, own},
        *,
    };

    fn home() -> Path {
        (ip("10.1.0.1"), ip("10.1.0.2"))
    }

    /// Addresses of one network reach each other, and no others.
    fn same_network(from: &Own, to: IpAddr) -> bool {
        let network = |address: IpAddr| match address {
            IpAddr::V4(v4) => v4.octets()[..2].to_vec(),
            IpAddr::V6(v6) => v6.octets()[..4].to_vec(),
        };
        network(from.address) == network(to)
    }

    #[test]
    fn paths__between_networks_that_both_are_in() {
        let all = [own("10.1.0.1", 2), own("10.2.0.1", 3), own("10.3.0.1", 4)];
        let told = ["10.2.0.2", "10.9.0.2", "2001:db8::2"].map(ip);
        let found = paths(home(), &all, &told, &[], same_network);
        assert_eq!(found, [(ip("10.2.0.1"), ip("10.2.0.2"))]);
    }

    #[test]
    fn paths__each_address_once() {
        let all = [own("10.1.0.1", 2), own("10.2.0.1", 3)];
        let told = ["10.2.0.2", "10.3.0.2"].map(ip);
        let found = paths(home(), &all, &told, &[], |_, _| true);
        assert_eq!(found, [(ip("10.2.0.1"), ip("10.2.0.2"))]);
        // The peer has one address.
        let found = paths(home(), &all, &[], &[], |_, _| true);
        assert_eq!(found, [(ip("10.2.0.1"), ip("10.1.0.2"))]);
    }

    #[test]
    fn paths__an_address_that_is_gone_is_replaced() {
        let all = [own("10.2.0.1", 3)];
        let found = paths(home(), &all, &[], &[], |_, _| true);
        assert_eq!(found, [(ip("10.2.0.1"), ip("10.1.0.2"))]);
        assert!(paths(home(), &[], &[ip("10.2.0.2")], &[], |_, _| true).is_empty());
    }

    #[test]
    fn paths__never_to_this_host_and_not_too_many() {
        let all = [own("10.1.0.1", 2), own("172.17.0.1", 3)];
        let found = paths(home(), &all, &[ip("172.17.0.1")], &[], same_network);
        assert!(found.is_empty(), "{found:?}");
        let told: Vec<IpAddr> = (0..20).map(|n| ip(&format!("10.2.0.{n}"))).collect();
        assert_eq!(paths(home(), &all, &told, &[], |_, _| true).len(), 1);
        let all: Vec<Own> = (1..20).map(|n| own(&format!("10.{n}.0.1"), n)).collect();
        assert_eq!(
            paths(home(), &all, &told, &[], |_, _| true).len(),
            MAX_PATHS
        );
    }

    #[test]
    fn paths__one_link_has_two_shares_at_most() {
        let all = [own("10.1.0.1", 2)];
        let told = ["10.2.0.2", "10.3.0.2", "10.4.0.2"].map(ip);
        let found = paths(home(), &all, &told, &[], |_, _| true);
        assert_eq!(found, [(ip("10.1.0.1"), ip("10.2.0.2"))]);
        // It stays, whatever is told before it.
        let known = [(ip("10.1.0.1"), ip("10.4.0.2"))];
        assert_eq!(paths(home(), &all, &told, &known, |_, _| true), known);
    }

    #[test]
    fn paths__those_in_use_stay_while_routes_lead_there() {
        let all = [own("10.1.0.1", 2), own("10.2.0.1", 3), own("10.3.0.1", 4)];
        let told = ["10.8.0.2", "10.9.0.2"].map(ip);
        let found = paths(home(), &all, &told[1..], &[], |_, _| true);
        assert_eq!(found[0], (ip("10.2.0.1"), ip("10.9.0.2")));
        let later = paths(home(), &all, &told, &found[..1], |_, _| true);
        assert_eq!(later, [found[0], (ip("10.3.0.1"), ip("10.8.0.2"))]);
        let without = paths(home(), &all, &told, &found[..1], |from, _| from.index != 3);
        assert_eq!(without, [(ip("10.3.0.1"), ip("10.8.0.2"))]);
    }

    #[test]
    fn is_own__also_on_the_loopback() {
        assert!(is_own(ip("127.0.0.1")));
        assert!(!is_own(ip("192.0.2.77")));
    }
}
