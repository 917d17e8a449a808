//! The congestion control of flows' own TCP connections where the model chooses: their own, as it starts sooner, until the
//! path is seen to lose packets; then BBR.

use std::{
    cell::{Cell, RefCell},
    ffi::OsString,
    net::TcpStream,
    sync::OnceLock,
    time::Duration,
};

use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, getsockopt, setsockopt, socket, sockopt,
};

use vtl_core::netmon::Counters;

use crate::{netmon, option::tcp_rtt};

/// How often a connection that begins is looked at: in a round trip, at most, and in all. Later its writes are enough.
const LOOKS: u32 = 4;
const LEAST: Duration = Duration::from_millis(2);
const ALL_LOOKS: u32 = 64;

/// The kernel's name of BBR.
const BBR: &str = "bbr";

/// The congestion control of one TCP connection.
#[derive(Debug, Default)]
pub(super) struct Congestion {
    /// Whether BBR takes over once the path loses packets.
    may_be_bbr: Cell<bool>,
    /// The connection's own control, while BBR has taken over.
    own: RefCell<Option<OsString>>,
    /// Packets sent and lost when a queue may have overflowed last: what was lost until then says nothing.
    overflown: Cell<(u32, u32)>,
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

    /// Whether the path itself loses packets.
    fn is_lossy(&self, tcp: &TcpStream) -> bool {
        let Some(counters) = netmon::losses(tcp) else {
            return false;
        };
        if counters.may_overflow() {
            self.overflown.set((counters.sent, counters.lost));
            return false;
        }
        let (sent, lost) = self.overflown.get();
        let since = Counters {
            sent: counters.sent.wrapping_sub(sent),
            lost: counters.lost.wrapping_sub(lost),
            ..counters
        };
        since.is_lossy()
    }

    /// Time until the connection is to be looked at again, after so many looks; `None`: no more. A loss takes a third of the window
    /// within a round trip, and what BBR begins with is what is left of it.
    pub(super) fn next_look(&self, tcp: &TcpStream, looks: u32) -> Option<Duration> {
        let goes_on = looks < ALL_LOOKS && self.own.borrow().is_none();
        let rtt = tcp_rtt(tcp).filter(|_| goes_on)?;
        Some((rtt / LOOKS).max(LEAST))
    }

    /// Has BBR take over if it may and the path loses packets. Returns whether it does so now.
    pub(super) fn watch(&self, tcp: &TcpStream) -> bool {
        let may_begin = self.may_be_bbr.get() && self.own.borrow().is_none();
        if !may_begin || !self.is_lossy(tcp) {
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
