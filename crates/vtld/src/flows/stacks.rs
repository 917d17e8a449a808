//! Sessions on further paths, for flows that are spread over several at once (`multipath`): from each of this host's
//! interfaces, to each of the peer's that it tells. They come and go with addresses.

use std::{collections::BTreeMap, future::pending, net::IpAddr, rc::Rc, time::Duration};

use tokio::{
    task::{AbortHandle, JoinSet},
    time::sleep,
};
use vtl_proto::{
    carrier::Kind,
    frame::{Addresses as Told, Frame, MAX_ADDRESSES},
};

use super::{
    Flows,
    addresses::{Addresses, Own, elsewhere},
    carrier::{Granted, ToOpen},
    control::Control,
    keeper::Pauses,
    peer::Peer,
};
use crate::scope;

/// Maximum number of further paths of an association.
const MOST: usize = 7;
/// Least interval between two ADDRESSES, and between two that are followed: a peer names any address.
const TELLING: Duration = Duration::from_secs(1);

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

    /// Keeps sessions on further paths open while flows are spread. Never returns.
    pub(super) async fn open_stacks(self: &Rc<Self>, peer: &Rc<Peer>) {
        peer.until(Peer::is_spread).await;
        let addresses = self.addresses();
        let mut tasks = JoinSet::new();
        let mut running: BTreeMap<Path, AbortHandle> = BTreeMap::new();
        let mut last = 0_u8;
        loop {
            let (version, state) = (addresses.version(), peer.stacks_state());
            let own = addresses.all();
            peer.set_own(own.iter().any(|own| own.address == home(peer).0));
            let wanted = match peer.may_have_stacks() {
                true => paths(home(peer), &own, &peer.told_addresses(), leads),
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
            for path in wanted {
                running.entry(path).or_insert_with(|| {
                    last = last.wrapping_add(1).max(1);
                    let (flows, peer) = (Rc::clone(self), Rc::clone(peer));
                    tasks.spawn_local(flows.open_stack(peer, path, last))
                });
            }
            while tasks.try_join_next().is_some() {}
            let other = async {
                sleep(TELLING).await;
                peer.until(|peer| peer.stacks_state() != state).await;
            };
            tokio::select! {
                () = addresses.changed(version) => {}
                () = other => {}
            }
        }
    }

    /// Keeps a session on a path open.
    async fn open_stack(self: Rc<Self>, peer: Rc<Peer>, path: Path, number: u8) {
        let (local, to) = path;
        let mut pauses = Pauses::new(Peer::signs);
        loop {
            pauses.wait(&peer).await;
            let Ok(endpoint) = self.endpoint(Kind::Graft) else {
                return;
            };
            let opening = ToOpen {
                granted: Granted::freely(to),
                local,
                rtt: None,
                over: peer.over(Kind::Graft),
                encrypted: true,
                path: number,
            };
            match endpoint.connect(opening).await {
                Ok(link) => {
                    tracing::info!(peer = %peer.key.peer, %local, %to, "stacks: path open");
                    let id = peer.next_carrier();
                    link.serve(Rc::clone(&peer), Some(id)).await;
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
                let entries: Vec<_> = further.iter().copied().map(Told::entry).collect();
                let frame = Frame::Addresses(Told::new(&entries));
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

/// The path of the flows' own connections.
fn home(peer: &Peer) -> Path {
    (peer.key.local.to_canonical(), peer.key.peer.to_canonical())
}

/// Whether packets between these addresses leave by the interface of this host's.
fn leads(from: &Own, to: IpAddr) -> bool {
    scope::exit(to, from.address, 0).is_ok_and(|index| index == from.index)
}

/// The further paths: each address of both hosts is used once, or else together with one that is used already.
/// `told`: the peer's further addresses.
fn paths(
    (local, peer): Path,
    own: &[Own],
    told: &[IpAddr],
    leads: impl Fn(&Own, IpAddr) -> bool,
) -> Vec<Path> {
    let home = own.iter().find(|own| own.address == local);
    let mut locals = elsewhere(own, local);
    let is_other = |address: &&IpAddr| {
        address.is_ipv4() == peer.is_ipv4() && own.iter().all(|own| own.address != **address)
    };
    let mut peers: Vec<IpAddr> = told.iter().filter(is_other).copied().collect();
    if home.is_none() {
        peers.insert(0, peer);
    }
    let mut found = Vec::new();
    // Both are used for the first time.
    peers.retain(|to| {
        let fit = locals.iter().position(|from| leads(from, *to));
        fit.inspect(|fit| found.push((locals.remove(*fit).address, *to)))
            .is_none()
    });
    // One of them is.
    let used = elsewhere(own, local);
    for to in peers {
        let from = home.into_iter().chain(&used).find(|from| leads(from, to));
        found.extend(from.map(|from| (from.address, to)));
    }
    for from in locals {
        let to = [peer].into_iter().chain(told.iter().copied());
        let to = to.into_iter().find(|to| leads(&from, *to));
        found.extend(to.map(|to| (from.address, to)));
    }
    found.truncate(MOST);
    found
}

#[cfg(test)]
#[allow(non_snake_case)]
mod tests {
    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().expect("an address")
    }

    fn own(address: &str, index: u32) -> Own {
        let address = ip(address);
        Own { address, index }
    }

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
        let found = paths(home(), &all, &told, same_network);
        assert_eq!(found, [(ip("10.2.0.1"), ip("10.2.0.2"))]);
    }

    #[test]
    fn paths__each_address_once() {
        let all = [own("10.1.0.1", 2), own("10.2.0.1", 3)];
        let told = ["10.2.0.2", "10.3.0.2"].map(ip);
        let found = paths(home(), &all, &told, |_, _| true);
        let wanted = [("10.2.0.1", "10.2.0.2"), ("10.1.0.1", "10.3.0.2")];
        assert_eq!(found, wanted.map(|(a, b)| (ip(a), ip(b))));
        // The peer has one address.
        let found = paths(home(), &all, &[], |_, _| true);
        assert_eq!(found, [(ip("10.2.0.1"), ip("10.1.0.2"))]);
    }

    #[test]
    fn paths__an_address_that_is_gone_is_replaced() {
        let all = [own("10.2.0.1", 3)];
        let found = paths(home(), &all, &[], |_, _| true);
        assert_eq!(found, [(ip("10.2.0.1"), ip("10.1.0.2"))]);
        assert!(paths(home(), &[], &[ip("10.2.0.2")], |_, _| true).is_empty());
    }

    #[test]
    fn paths__never_to_this_host_and_not_too_many() {
        let all = [own("10.1.0.1", 2), own("172.17.0.1", 3)];
        let found = paths(home(), &all, &[ip("172.17.0.1")], same_network);
        assert!(found.is_empty(), "{found:?}");
        let told: Vec<IpAddr> = (0..20).map(|n| ip(&format!("10.2.0.{n}"))).collect();
        assert_eq!(paths(home(), &all, &told, |_, _| true).len(), MOST);
    }
}
