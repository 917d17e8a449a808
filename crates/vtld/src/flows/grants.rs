//! Grants of carriers: the kinds available on this host, and the peers that may open them.

use std::{
    io,
    net::IpAddr,
    rc::Rc,
    time::{Duration, Instant},
};

use tokio::{
    sync::mpsc,
    task::spawn_local,
    time::{sleep, timeout},
};
use vtl_pool::key::PublicKey;
use vtl_proto::{
    carrier::{Kind, WITH_LAYERS},
    frame::{Frame, Side},
};

use super::{
    Desired, Flows, Key,
    carrier::{self, CarrierLayers, Endpoint, Grant, Link, Shown},
    peer::Peer,
};
use crate::{network::Network, stacks};

/// How long a kind of carrier that could not be started is not tried again.
const START_AGAIN: Duration = Duration::from_secs(60);
/// Lifetime of a grant.
const GRANT: Duration = Duration::from_secs(15);
/// Maximum number of outstanding grants,
const MAX_PROMISES: usize = 1024;
/// and of one association's, with the carriers that have come for them and do not serve yet.
const MAX_OF_PEER: usize = 4;
/// How long a carrier that arrives before its association, or before the peer is authenticated, waits.
const TAG_WAIT: Duration = Duration::from_secs(2);
/// Maximum number of carriers waiting for their associations.
pub(super) const MAX_EARLY: usize = 64;
/// Timeout of telling peers about the end, for each kind of carrier.
const FAREWELL: Duration = Duration::from_millis(200);

impl Flows {
    /// The endpoint of a kind of carrier, started on first use.
    pub(super) fn endpoint(self: &Rc<Self>, kind: Kind) -> io::Result<Rc<dyn Endpoint>> {
        let unsupported = || io::Error::from(io::ErrorKind::Unsupported);
        let mut endpoints = self.endpoints.borrow_mut();
        match endpoints.get(&kind) {
            Some(Ok(made)) => return Ok(Rc::clone(made)),
            Some(Err(failed)) if failed.elapsed() < START_AGAIN => return Err(unsupported()),
            Some(Err(_)) | None => {}
        }
        let (arrivals, arrived) = mpsc::unbounded_channel();
        let made = carrier::start(kind, arrivals, &self.broker, self.budget.max_ahead());
        match &made {
            Ok(_) => drop(spawn_local(Rc::clone(self).accept(kind, arrived))),
            Err(error) => {
                tracing::error!(%error, carrier = %kind, "carrier: cannot start this kind: connections go by others, or plain TCP");
            }
        }
        let made = made.map_err(|_| Instant::now());
        endpoints.insert(kind, made.clone());
        made.map_err(|_| unsupported())
    }

    /// What layers over a carrier need. `to_open`: those that this host wants, as text.
    pub(super) fn layers(self: &Rc<Self>, to_open: Option<String>) -> CarrierLayers {
        CarrierLayers {
            endpoint: self.endpoint(Kind::Stack).ok(),
            to_open,
        }
    }

    /// Answers a peer's ASK with GRANT or REFUSE. `seals`: the peer supports sealing. `rtt`: of the path, measured by
    /// TCP.
    pub(super) fn grant(
        self: &Rc<Self>,
        peer: &Rc<Peer>,
        asked: u32,
        seals: bool,
        rtt: Option<Duration>,
    ) -> Frame<'static> {
        let refuse = Frame::Refuse { kind: asked };
        let has_layers = asked & WITH_LAYERS != 0;
        let kind = u8::try_from(asked & !WITH_LAYERS).ok();
        let Some(kind) = kind.and_then(Kind::numbered) else {
            return refuse;
        };
        if has_layers && matches!(kind, Kind::Stack | Kind::Kcp) {
            return refuse;
        }
        let is_unwanted = kind == Kind::Stack && stacks::accept_rate() == 0;
        if is_unwanted || !peer.has_ample_room() {
            return refuse;
        }
        let promises = self.promises.borrow();
        let of_peer = promises.values().filter(|(p, _)| Rc::ptr_eq(p, peer));
        let of_peer = of_peer.count() + peer.half_open();
        if promises.len() >= MAX_PROMISES || of_peer >= MAX_OF_PEER {
            return refuse;
        }
        drop(promises);
        let Ok(endpoint) = self.endpoint(kind) else {
            return refuse;
        };
        let Some(grantor) = endpoint.grantor() else {
            return refuse;
        };
        let Grant {
            port,
            token,
            crypto,
        } = match grantor.grant(peer.host(), rtt, seals) {
            Ok(grant) => grant,
            Err(error) => {
                tracing::warn!(%error, peer = %peer.key.peer, carrier = %kind, "carrier: cannot grant: peer refused");
                return refuse;
            }
        };
        let of_flows = if has_layers { Kind::Stack } else { kind };
        peer.set_desired(Desired::of(of_flows));
        let promise = (Rc::clone(peer), peer.shown.get());
        self.promises.borrow_mut().insert(token, promise);
        let (expiring, endpoint) = (Rc::clone(self), Rc::clone(&endpoint));
        spawn_local(async move {
            sleep(GRANT).await;
            if let Some(grantor) = endpoint.grantor() {
                grantor.revoke(token);
            }
            expiring.promises.borrow_mut().remove(&token);
        });
        Frame::Grant {
            kind: asked,
            port,
            token,
            crypto,
        }
    }

    /// Accepts carriers of a kind that peers open, and serves them.
    async fn accept(
        self: Rc<Self>,
        kind: Kind,
        mut arrived: mpsc::UnboundedReceiver<(Shown, Box<dyn Link>)>,
    ) {
        while let Some((shown, link)) = arrived.recv().await {
            let flows = Rc::clone(&self);
            spawn_local(async move {
                let peer = match shown {
                    Shown::Token(token) => {
                        let promised = flows.promises.borrow_mut().remove(&token);
                        // With required encryption a grant is void if the peer's key has changed since.
                        let is_his = |(peer, key): &(Rc<Peer>, _)| {
                            !peer.requires_encryption() || *key == peer.shown.get()
                        };
                        promised.filter(is_his).map(|(peer, _)| peer)
                    }
                    Shown::Association { peer, tag, shown } => {
                        flows.opened_by(peer, tag, shown.map(|key| *key)).await
                    }
                };
                if let Some(peer) = peer {
                    tracing::debug!(peer = %peer.key.peer, carrier = %kind, "carrier: accepted");
                    let has_layers = link.has_layers();
                    let of_flows = if has_layers { Kind::Stack } else { kind };
                    peer.set_desired(Desired::of(of_flows));
                    peer.links.set(peer.links.get() + 1);
                    // It may precede the control connection that authenticates the peer.
                    let _ = timeout(TAG_WAIT, peer.until(Peer::is_judged)).await;
                    if peer.is_admitted() {
                        link.serve(Rc::clone(&peer), None, flows.layers(None)).await;
                    }
                    peer.links.set(peer.links.get() - 1);
                }
            });
        }
    }

    /// Finds the association that a peer has opened with this tag; waits up to [`TAG_WAIT`], since the carrier may arrive
    /// first. `shown`: the key that the carrier has shown, by which it is found from other addresses of the peer.
    async fn opened_by(
        &self,
        address: IpAddr,
        tag: u32,
        shown: Option<PublicKey>,
    ) -> Option<Rc<Peer>> {
        let find = || {
            let is_it = |peer: &Rc<Peer>| {
                let Key {
                    opener,
                    peer: named,
                    tag: t,
                    ..
                } = peer.key;
                let is_there = [named, peer.host()]
                    .iter()
                    .any(|it| it.to_canonical() == address);
                (opener, t) == (Side::Peer, tag) && (is_there || peer.may_be_elsewhere(shown))
            };
            self.peers().into_iter().find(is_it)
        };
        if let Some(found) = find() {
            return Some(found);
        }
        let _place = self.early.enter(Network::of(address))?;
        let found = async {
            loop {
                let appeared = self.appeared.notified();
                if let Some(found) = find() {
                    return found;
                }
                appeared.await;
            }
        };
        timeout(TAG_WAIT, found).await.ok()
    }

    /// Closes all endpoints, and tells the peers.
    pub(super) async fn close(&self) {
        let all: Vec<_> = self
            .endpoints
            .borrow()
            .values()
            .flatten()
            .cloned()
            .collect();
        // Before any flow's task is dropped, so that no peer takes the end of a flow for an orderly one.
        all.iter().for_each(|endpoint| endpoint.close());
        for endpoint in all {
            let _ = timeout(FAREWELL, endpoint.wait_idle()).await;
        }
    }
}
