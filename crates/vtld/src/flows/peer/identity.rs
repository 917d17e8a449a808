//! Identity of an association's peer, and the carriers that may serve it.

use std::io;

use vtl_control::What;
use vtl_pool::key::PublicKey;
use vtl_proto::{
    carrier::Kind,
    frame::{FlowId, Side},
};

use super::{
    super::{
        carrier::Carrier,
        flow::{RESET, State},
    },
    Peer,
};
use crate::{
    events::emit,
    identity::{Refused, Standing},
};

impl Peer {
    pub(in super::super) fn is_admitted(&self) -> bool {
        self.admitted.get()
    }

    /// Whether the peer has been admitted or refused.
    pub(in super::super) fn is_judged(&self) -> bool {
        self.admitted.get() || self.refused.borrow().is_some()
    }

    /// Applies the result of authentication on a control connection. `shown`: the peer's key, if any.
    ///
    /// # Errors
    /// The peer is refused.
    pub(in super::super) fn note_identity(
        &self,
        shown: Option<PublicKey>,
        judged: Result<Standing, Refused>,
    ) -> io::Result<()> {
        let before = self.shown.get();
        // A client is identified by its key alone, so it must not change.
        let is_client = self.key.opener == Side::Peer && before.is_some();
        let refused = match judged {
            Ok(_) if is_client && shown != before => Some(Refused::Another {
                peer: self.key.peer,
            }),
            Ok(standing) => {
                self.standing.replace(standing);
                None
            }
            Err(refused) => Some(refused),
        };
        self.admitted.set(refused.is_none());
        let result = match &refused {
            None => {
                if shown != before {
                    // Existing carriers belong to another identity. Not sessions, if there was no key before: they need
                    // no grant, and may precede the first control connection.
                    for running in self.carriers.borrow().values() {
                        if before.is_some() || running.carrier.kind() != Some(Kind::Graft) {
                            running.carrier.close();
                        }
                    }
                }
                self.shown.set(shown);
                self.judge_flows();
                Ok(())
            }
            Some(why) => {
                if self.refused.borrow().as_ref() != Some(why) {
                    tracing::error!("identity: {why}");
                    let (peer, text) = (self.key.peer, why.to_string().into());
                    emit(match why {
                        Refused::Changed { .. } | Refused::Another { .. } => {
                            What::PeerChanged { peer, why: text }
                        }
                        _ => What::PeerRefused { peer, why: text },
                    });
                }
                self.close_carriers();
                Err(io::Error::new(io::ErrorKind::PermissionDenied, why.clone()))
            }
        };
        self.refused.replace(refused);
        for running in self.carriers.borrow().values() {
            if running.carrier.is_clear() && self.refuses_clear() {
                running.carrier.close();
            }
        }
        self.changed.notify_waiters();
        result
    }

    /// Why the peer's flows are not carried to a port of this host; `None` if they are, and while the peer is not
    /// authenticated.
    pub(in super::super) fn out_of_reach(&self, port: u16) -> Option<String> {
        let standing = self.standing.borrow();
        standing.out_of_reach(port).filter(|_| self.is_admitted())
    }

    /// Whether a new flow is to stay plain TCP (one that requires a carrier fails). Decided later if the peer is not
    /// authenticated yet: nothing is carried before.
    pub(super) fn refuses(&self, id: FlowId, state: &State) -> bool {
        state.is_judged.set(self.is_admitted());
        if id.opener == Side::Local {
            return false;
        }
        let why = self.out_of_reach(state.local.port());
        if let Some(why) = &why {
            tracing::debug!(why, peer = %state.peer, "flows: plain TCP");
        }
        why.is_some()
    }

    /// After authentication: refuses earlier flows to ports that the peer may not reach, which stay plain TCP; resets
    /// those that require a carrier.
    fn judge_flows(&self) {
        for (id, state) in self.states() {
            if !state.is_judged.get() && self.refuses(id, &state) {
                let mut core = self.core.borrow_mut();
                match id.requires_carrier() {
                    true => core.reset(id, RESET),
                    false => core.refuse(id),
                }
            }
        }
        self.turn();
    }

    /// Whether to refuse a cleartext session for which this host has offered keys: if the peer has a key, somebody in
    /// between may have stripped the offer (downgrade).
    pub(in super::super) fn refuses_clear(&self) -> bool {
        let refuses = self.shown.get().is_some();
        if refuses {
            tracing::warn!(
                peer = %self.key.peer,
                "session: closed: not encrypted, although the peer has a key (downgrade on the path?): \
                 connections go by other carriers, or plain TCP"
            );
        }
        refuses
    }

    /// Requires encryption for the association's flows, and closes carriers without it.
    pub(in super::super) fn require_encryption(&self) {
        if !self.encrypted.replace(true) {
            for running in self.carriers.borrow().values() {
                if !self.may_serve(&*running.carrier) {
                    running.carrier.close();
                }
            }
        }
    }

    pub(in super::super) fn requires_encryption(&self) -> bool {
        self.encrypted.get()
    }

    /// Whether a carrier is confidential: encrypted, and the peer has shown its key.
    pub(super) fn is_secret(&self, carrier: &dyn Carrier) -> bool {
        carrier.is_encrypted() && self.shown.get().is_some()
    }

    /// Whether a carrier may serve the association.
    pub(super) fn may_serve(&self, carrier: &dyn Carrier) -> bool {
        let is_enough = self.is_secret(carrier) || !self.encrypted.get();
        is_enough && (carrier.kind().is_none() || self.has_room() && self.admitted.get())
    }
}
