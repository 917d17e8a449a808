//! Carriers between two hosts: the kinds that this one has, and who may open which.

use std::{collections::hash_map::Entry, io, rc::Rc, time::Duration};

use tokio::{
    sync::mpsc,
    task::spawn_local,
    time::{sleep, timeout},
};
use vtl_proto::{carrier::Kind, frame::Frame};

use super::{
    Flows,
    carrier::{self, Endpoint, Link},
    peer::Peer,
};

/// How long a grant is good.
const GRANT: Duration = Duration::from_secs(15);
/// Grants at a time.
const MOST: usize = 1024;
const MOST_OF_PEER: usize = 4;
/// How long the peers' being told of the end may take.
const FAREWELL: Duration = Duration::from_millis(200);

/// For whom a token is good.
pub(super) struct Promise {
    peer: Rc<Peer>,
    kind: Kind,
}

impl Flows {
    /// This host's part of a kind, started when it is first needed.
    pub(super) fn endpoint(self: &Rc<Self>, kind: Kind) -> io::Result<Rc<dyn Endpoint>> {
        let unsupported = || io::Error::from(io::ErrorKind::Unsupported);
        let mut endpoints = self.endpoints.borrow_mut();
        let vacant = match endpoints.entry(kind) {
            Entry::Occupied(made) => return made.get().clone().ok_or_else(unsupported),
            Entry::Vacant(vacant) => vacant,
        };
        let (arrivals, arrived) = mpsc::unbounded_channel();
        let made = carrier::start(kind, arrivals, &self.broker);
        match &made {
            Ok(_) => drop(spawn_local(Rc::clone(self).accept(arrived))),
            Err(error) => tracing::error!(%error, carrier = %kind, "it cannot be had"),
        }
        vacant.insert(made.ok()).clone().ok_or_else(unsupported)
    }

    /// The answer to a peer that asks for a carrier. `rtt`: of the path, as TCP measured it.
    pub(super) fn grant(
        self: &Rc<Self>,
        peer: &Rc<Peer>,
        asked: u32,
        rtt: Option<Duration>,
    ) -> Frame<'static> {
        let refuse = Frame::Refuse { kind: asked };
        let Some(kind) = u8::try_from(asked).ok().and_then(Kind::numbered) else {
            return refuse;
        };
        let promises = self.promises.borrow();
        let of_peer = promises.values().filter(|p| Rc::ptr_eq(&p.peer, peer));
        if promises.len() >= MOST || of_peer.count() >= MOST_OF_PEER {
            return refuse;
        }
        drop(promises);
        let Ok(endpoint) = self.endpoint(kind) else {
            return refuse;
        };
        peer.set_kind(kind);
        let token = endpoint.token();
        endpoint.grant(token, peer.key.peer, rtt);
        let promise = Promise {
            peer: Rc::clone(peer),
            kind,
        };
        self.promises.borrow_mut().insert(token, promise);
        let (port, fingerprint) = endpoint.place();
        let expiring = Rc::clone(self);
        spawn_local(async move {
            sleep(GRANT).await;
            endpoint.revoke(token);
            expiring.promises.borrow_mut().remove(&token);
        });
        Frame::Grant {
            kind: asked,
            port,
            token,
            fingerprint,
        }
    }

    /// Has the carriers that peers open serve.
    async fn accept(self: Rc<Self>, mut arrived: mpsc::UnboundedReceiver<(u64, Box<dyn Link>)>) {
        while let Some((token, link)) = arrived.recv().await {
            let promise = self.promises.borrow_mut().remove(&token);
            if let Some(Promise { peer, kind }) = promise {
                tracing::debug!(peer = %peer.key.peer, carrier = %kind, "a carrier has come");
                spawn_local(link.serve(peer, None));
            }
        }
    }

    /// Tells the peers of the end.
    pub(super) async fn close(&self) {
        let all: Vec<_> = self
            .endpoints
            .borrow()
            .values()
            .flatten()
            .cloned()
            .collect();
        // Before any flow's task is dropped, so that none of their ends looks like a true one.
        all.iter().for_each(|endpoint| endpoint.close());
        for endpoint in all {
            let _ = timeout(FAREWELL, endpoint.wait_idle()).await;
        }
    }
}
