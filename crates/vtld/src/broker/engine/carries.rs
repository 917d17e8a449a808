//! What the sessions of hooked flows are like.

use vtl_proto::services::Services;

use super::{super::session::Wish, Engine};
use crate::hooker::Over;

/// What a session needs to carry TCP connections.
const FLOWS: Services = Services::TCP;

/// What a session for flows is to be like.
pub(crate) fn wish(over: Option<&Over>) -> Wish {
    let mut wish = Wish::from(FLOWS);
    match over {
        None => {}
        Some(Over::Lossy(name)) => {
            wish = Wish {
                graft: Some(name.clone()),
                ..Wish::default()
            };
        }
        Some(Over::Graft(name)) => wish.graft = Some(name.clone()),
        Some(Over::Services(wanted)) => {
            wish.wanted = *wanted;
            wish.wanted.services = FLOWS | wanted.services;
        }
    }
    wish
}

impl Engine {
    /// Whether the sessions of hooked connections can be like this.
    pub(super) fn carries(&self, over: &Over) -> Result<(), String> {
        let graft = match over {
            Over::Graft(name) => name,
            Over::Services(_) | Over::Lossy(_) => {
                return self.candidates(&wish(Some(over))).map(|_| ());
            }
        };
        let others = || {
            let fits = self.pool.iter().filter(|p| !p.disabled);
            let fits = fits.filter(|p| p.info.provides.contains(FLOWS));
            let names = fits.map(|p| format!("graft:{}", p.info.name));
            names.collect::<Vec<_>>().join(", ")
        };
        let found = self.pool.iter().filter(|p| !p.disabled);
        match found.map(|p| &p.info).find(|g| g.name == *graft) {
            Some(g) if g.provides.contains(FLOWS) => Ok(()),
            Some(g) => Err(format!(
                "graft:{graft} cannot carry TCP connections, it lacks {}: there are {}",
                g.provides.missing(FLOWS),
                others()
            )),
            None => Err(format!(
                "there is no carrier graft:{graft}: there are {}",
                others()
            )),
        }
    }
}
