//! Profile of a flow's application, classified by the flow's first bytes.

use std::{cell::RefCell, net::SocketAddr, time::Instant};

use vtl_core::profile::{Classifier, Verdict};
use vtl_proto::frame::Side;

/// Feeds a flow's first reads and writes to a [`Classifier`]; after its verdict the cost is a check of a flag.
pub(super) struct Observer {
    opener: Side,
    began: Instant,
    /// `None` for a flow whose beginning was not seen here.
    classifier: RefCell<Option<Classifier>>,
}

impl Observer {
    /// The observer of a new flow. `addresses`: local, peer.
    pub(super) fn new(opener: Side, addresses: [SocketAddr; 2]) -> Self {
        let [local, peer] = addresses;
        let destination = match opener {
            Side::Local => peer,
            Side::Peer => local,
        };
        Self {
            opener,
            began: Instant::now(),
            classifier: RefCell::new(Some(Classifier::new(None, destination.port()))),
        }
    }

    /// The observer of a flow handed over by a former daemon: no profile.
    pub(super) fn none() -> Self {
        Self {
            opener: Side::Local,
            began: Instant::now(),
            classifier: RefCell::default(),
        }
    }

    /// Classifies bytes sent by the application of side `by`.
    pub(super) fn look(&self, by: Side, bytes: &[u8]) {
        let mut classifier = self.classifier.borrow_mut();
        let Some(classifier) = classifier.as_mut().filter(|c| !c.is_done()) else {
            return;
        };
        let now = u64::try_from(self.began.elapsed().as_nanos()).unwrap_or(u64::MAX);
        match by == self.opener {
            true => classifier.sent(now, bytes),
            false => classifier.received(now, bytes),
        }
    }

    /// Whether there is no verdict yet.
    pub(super) fn is_looking(&self) -> bool {
        self.classifier
            .borrow()
            .as_ref()
            .is_some_and(|c| !c.is_done())
    }

    /// The verdict, once there is one.
    pub(super) fn verdict(&self) -> Option<Verdict> {
        self.classifier.borrow().as_ref()?.verdict().cloned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn verdict(opener: Side, by: Side, bytes: &[u8]) -> Option<String> {
        let addresses =
            ["192.0.2.1:5004", "192.0.2.2:25"].map(|at| at.parse().expect("an address"));
        let observer = Observer::new(opener, addresses);
        observer.look(by, bytes);
        observer.verdict().map(|verdict| verdict.evidence)
    }

    #[test]
    fn look__knows_who_opened_the_flow() {
        let greeting = b"220 mx ESMTP\r\n";
        assert_eq!(
            verdict(Side::Local, Side::Peer, greeting).as_deref(),
            Some("SMTP greeting")
        );
        assert_eq!(
            verdict(Side::Peer, Side::Local, greeting).as_deref(),
            Some("SMTP greeting")
        );
        // Clients greet nobody.
        assert_eq!(verdict(Side::Local, Side::Local, greeting), None);
        assert_eq!(verdict(Side::Peer, Side::Peer, greeting), None);
    }

    #[test]
    fn none__has_no_verdict() {
        let observer = Observer::none();
        observer.look(Side::Local, b"SSH-2.0-x\r\n");
        assert_eq!(observer.verdict(), None);
    }
}
