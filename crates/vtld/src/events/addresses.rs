//! Events of this host's addresses, as they come and go.

use std::collections::BTreeSet;

use vtl_control::What;

use super::emit;
use crate::addresses::{self, Own};

/// Those that others may reach.
pub(crate) struct Addresses(BTreeSet<Own>);

impl Addresses {
    /// As they are now.
    pub(crate) fn read() -> Self {
        Self(read().unwrap_or_default())
    }

    /// Tells of those that have come and gone since. Call it when rtnetlink says that something changed.
    pub(crate) fn follow(&mut self) {
        let Ok(now) = read() else { return };
        for own in self.0.difference(&now) {
            let (address, interface) = (own.address, own.interface.clone().into());
            emit(What::AddressRemoved { address, interface });
        }
        for own in now.difference(&self.0) {
            let (address, interface) = (own.address, own.interface.clone().into());
            emit(What::AddressAdded { address, interface });
        }
        self.0 = now;
    }
}

fn read() -> nix::Result<BTreeSet<Own>> {
    let all = addresses::own()?.into_iter();
    Ok(all.filter(|own| own.is_up).collect())
}
