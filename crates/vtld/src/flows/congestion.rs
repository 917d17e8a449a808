//! The congestion control of flows' own TCP connections where the model chooses: their own, as it starts sooner, until the
//! path is seen to lose packets; then BBR.

use std::{
    cell::{Cell, RefCell},
    ffi::OsString,
    net::TcpStream,
    sync::OnceLock,
};

use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, getsockopt, setsockopt, socket, sockopt,
};

use crate::netmon;

/// The kernel's name of BBR.
const BBR: &str = "bbr";

/// The congestion control of one TCP connection.
#[derive(Debug, Default)]
pub(super) struct Congestion {
    /// Whether BBR takes over once the path loses packets.
    may_be_bbr: Cell<bool>,
    /// The connection's own control, while BBR has taken over.
    own: RefCell<Option<OsString>>,
}

impl Congestion {
    /// Lets BBR take over, or gives the connection its own control back. Returns whether that has changed.
    pub(super) fn allow_bbr(&self, tcp: &TcpStream, may: bool) -> bool {
        self.may_be_bbr.set(may);
        if may {
            return self.watch(tcp);
        }
        let Some(own) = self.own.take() else {
            return false;
        };
        if let Err(error) = setsockopt(tcp, sockopt::TcpCongestion, &own) {
            tracing::debug!(%error, "flows: BBR stays the congestion control");
        }
        true
    }

    /// Has BBR take over if it may and the path loses packets. Returns whether it does so now.
    pub(super) fn watch(&self, tcp: &TcpStream) -> bool {
        let may_begin = self.may_be_bbr.get() && self.own.borrow().is_none();
        if !may_begin || !netmon::is_lossy(tcp) {
            return false;
        }
        if !has_bbr() {
            self.may_be_bbr.set(false);
            return false;
        }
        let set = getsockopt(tcp, sockopt::TcpCongestion).and_then(|own| {
            setsockopt(tcp, sockopt::TcpCongestion, &OsString::from(BBR))?;
            Ok(own)
        });
        match set {
            Ok(own) => {
                self.own.replace(Some(own));
                true
            }
            Err(error) => {
                tracing::debug!(%error, "flows: the congestion control stays as it is");
                self.may_be_bbr.set(false);
                false
            }
        }
    }
}

/// Whether the kernel has BBR. Asked once, as it may look for a module on disk each time.
fn has_bbr() -> bool {
    static HAS: OnceLock<bool> = OnceLock::new();
    *HAS.get_or_init(|| {
        let (family, kind) = (AddressFamily::Inet, SockType::Stream);
        let tried = socket(family, kind, SockFlag::SOCK_CLOEXEC, None)
            .and_then(|tcp| setsockopt(&tcp, sockopt::TcpCongestion, &OsString::from(BBR)));
        tried.is_ok()
    })
}
