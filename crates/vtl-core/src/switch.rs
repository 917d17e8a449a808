//! Stateless switches of an application's session (thesis, section 3.3.2): another session takes its place at once, and
//! what is in flight in it is given up and counted. Beside them there are stateful ones, which lose nothing over
//! reliable grafts.
//!
//! Specification: `PROTOCOL.md`, section 4, "Succession".

use vtl_proto::{carrier::GRAFT_PORT, services::Services};

/// What both hosts know of a session that may be switched, and what one of them requires.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Terms {
    /// VTL port at which it was opened.
    pub port: u16,
    /// Services of its graft.
    pub provides: Services,
    /// Services that its initiator has required, as NEGO says.
    pub asked: Services,
    /// Services that this host's application has required of it, or of a session that led to it.
    pub required: Services,
}

/// Why a session may not be switched statelessly.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Intolerant {
    /// It carries flows of TCP programs.
    #[error("TCP connections lose nothing: no stateless switch")]
    Flows,
    /// This host's application has required reliability.
    #[error("the application requires reliability of this session: switch without stateless")]
    Required,
    /// The graft is reliable, and nobody has said that less would do.
    #[error(
        "graft and requirements promise that nothing is lost: switch without stateless, or open sessions with a max_loss"
    )]
    Promised,
}

impl Terms {
    /// Whether the session may lose what is in flight: its graft may lose packets anyway, or its initiator has asked for
    /// partial reliability, which a bound of losses is, and got more.
    ///
    /// # Errors
    /// Why not.
    pub fn tolerate_loss(&self) -> Result<(), Intolerant> {
        if self.port == GRAFT_PORT {
            return Err(Intolerant::Flows);
        }
        if self.required.contains(Services::RELIABLE) {
            return Err(Intolerant::Required);
        }
        let bounded = self.asked.contains(Services::PARTIAL_RELIABILITY)
            && !self.asked.contains(Services::RELIABLE);
        match bounded || !self.provides.contains(Services::RELIABLE) {
            true => Ok(()),
            false => Err(Intolerant::Promised),
        }
    }
}

#[cfg(test)]
#[allow(non_snake_case)]
mod tests {
    use super::*;

    #[test]
    fn tolerate_loss__table() {
        let (partial, reliable) = (Services::PARTIAL_RELIABILITY, Services::RELIABLE);
        let none = Services::NONE;
        let go_back_n = reliable | Services::ORDERED;
        for (port, provides, asked, required, verdict) in [
            (
                7,
                Services::TCP,
                Services::TCP,
                Services::TCP,
                Err(Intolerant::Required),
            ),
            (
                7,
                Services::TCP,
                Services::TCP,
                none,
                Err(Intolerant::Promised),
            ),
            // A graft by its name, without a word of losses.
            (7, go_back_n, none, none, Err(Intolerant::Promised)),
            (7, go_back_n, partial, partial, Ok(())),
            (7, go_back_n, partial, none, Ok(())),
            // The initiator bears losses, the responder has required otherwise in the session before.
            (7, go_back_n, partial, reliable, Err(Intolerant::Required)),
            (
                7,
                go_back_n,
                partial | reliable,
                none,
                Err(Intolerant::Promised),
            ),
            (7, partial | Services::ORDERED, partial, partial, Ok(())),
            (7, Services::CONGESTION_CONTROL, none, none, Ok(())),
            (7, none, none, none, Ok(())),
            (GRAFT_PORT, partial, none, none, Err(Intolerant::Flows)),
        ] {
            let terms = Terms {
                port,
                provides,
                asked,
                required,
            };
            assert_eq!(terms.tolerate_loss(), verdict, "{terms:?}");
        }
    }
}
