//! The congestion control of flows' own TCP connections where the model chooses: their own, as it starts sooner, until the
//! path is seen to lose packets; then one that models the path, for as long as it does: VTL's `tcp:stream`, which goes on where
//! slow start was, or the kernel's BBR where the kernel does not take that. "BBR" stands for either.

use std::{
    cell::{Cell, OnceCell, RefCell},
    ffi::OsString,
    net::TcpStream,
    sync::{Once, OnceLock},
    thread,
    time::{Duration, Instant},
};

use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, getsockopt, setsockopt, socket, sockopt,
};
use tokio::sync::Notify;
use vtl_core::netmon::{PathLosses, Verdict};

use super::{flow::UNSENT, now_ns};
use crate::{
    controls, netmon,
    option::{tcp_info, tcp_rtt},
};

/// How often the losses of a connection that begins are looked at: times in a round trip, least interval, and times in
/// all. Later its writes are enough.
const LOOKS: u32 = 4;
const MIN_LOOK: Duration = Duration::from_millis(2);
const ALL_LOOKS: u32 = 64;

/// What takes over: VTL's, or else the kernel's.
const STREAM: &str = "stream";
const BBR: &str = "bbr";

/// The kernel's name of what takes over, once that is known; `None`: nothing can.
static SUCCESSOR: OnceLock<Option<String>> = OnceLock::new();

/// Has the kernel take VTL's control when a path first loses packets, beside the thread that moves bytes: it takes milliseconds.
fn prepare() {
    static PREPARED: Once = Once::new();
    PREPARED.call_once(|| {
        let thread = thread::Builder::new().name("vtl-tcp".into());
        if thread.spawn(|| SUCCESSOR.get_or_init(successor)).is_err() {
            SUCCESSOR.get_or_init(successor);
        }
    });
}

fn successor() -> Option<String> {
    controls::register(STREAM)
        .inspect_err(|error| tracing::info!(%error, "select: BBR in the place of tcp:stream"))
        .ok()
        .or_else(|| has_bbr().then(|| BBR.to_owned()))
}

/// The congestion control of one TCP connection.
#[derive(Debug, Default)]
pub(super) struct Congestion {
    /// Whether BBR takes over once the path loses packets,
    may_be_bbr: Cell<bool>,
    /// and what waits for that.
    allowed: Notify,
    /// The connection's own control, while BBR has taken over.
    own: RefCell<Option<OsString>>,
    /// What was lost, since the first look,
    losses: Cell<PathLosses>,
    began: OnceCell<Instant>,
    /// whether the path was lossy by the latest verdict,
    is_lossy: Cell<bool>,
    /// and whether the connection had half a window to send, or as much as flows keep in the kernel.
    has_more: Cell<bool>,
}

impl Congestion {
    /// Lets BBR take over, or gives the connection its own control back. Returns whether that has changed.
    pub(super) fn allow_bbr(&self, tcp: &TcpStream, may: bool) -> bool {
        self.may_be_bbr.set(may);
        if may {
            self.allowed.notify_one();
            return self.watch(tcp);
        }
        self.give_back(tcp)
    }

    /// Waits until BBR may take over.
    pub(super) async fn allowed(&self) {
        while !self.may_be_bbr.get() {
            self.allowed.notified().await;
        }
    }

    /// Time until the connection is to be looked at again, after so many looks; `None`: no more. A loss takes a third of the window
    /// within a round trip, and the rate that BBR measures first falls with it.
    pub(super) fn next_look(&self, tcp: &TcpStream, looks: u32) -> Option<Duration> {
        let goes_on = looks < ALL_LOOKS && self.may_be_bbr.get() && self.own.borrow().is_none();
        if !goes_on {
            return None;
        }
        Some((tcp_rtt(tcp)? / LOOKS).max(MIN_LOOK))
    }

    /// Has BBR take over if it may and the path loses packets, and the connection's own control once it has lost none for
    /// long. Returns whether either does so now.
    pub(super) fn watch(&self, tcp: &TcpStream) -> bool {
        if !self.may_be_bbr.get() {
            return false;
        }
        self.look(tcp);
        let is_bbr = self.own.borrow().is_some();
        match (self.is_lossy.get(), is_bbr) {
            (true, true) | (false, false) => false,
            // What is sent already comes no sooner, and repairs that are paced come later.
            (true, false) => self.has_more.get() && self.take_over(tcp),
            (false, true) => self.give_back(tcp),
        }
    }

    /// Whether the path itself loses packets.
    fn look(&self, tcp: &TcpStream) {
        let Ok(info) = tcp_info(tcp) else {
            return;
        };
        let reading = netmon::losses(&info);
        let window = info.tcpi_snd_cwnd.saturating_mul(info.tcpi_snd_mss);
        self.has_more
            .set(info.tcpi_notsent_bytes >= (window / 2).min(UNSENT as u32));
        let began = *self.began.get_or_init(Instant::now);
        let mut losses = self.losses.get();
        match losses.look(now_ns(began), &reading) {
            Verdict::Unknown => {}
            Verdict::Lossy => self.is_lossy.set(true),
            Verdict::Clean => self.is_lossy.set(false),
        }
        self.losses.set(losses);
    }

    /// Gives the connection its own control back.
    fn give_back(&self, tcp: &TcpStream) -> bool {
        let Some(own) = self.own.take() else {
            return false;
        };
        if let Err(error) = setsockopt(tcp, sockopt::TcpCongestion, &own) {
            tracing::debug!(%error, control = ?own, "flows: a connection does not get its congestion control back");
        }
        true
    }

    fn take_over(&self, tcp: &TcpStream) -> bool {
        let successor = match SUCCESSOR.get() {
            Some(Some(successor)) => OsString::from(successor),
            Some(None) => {
                self.may_be_bbr.set(false);
                return false;
            }
            None => {
                prepare();
                return false;
            }
        };
        let set = getsockopt(tcp, sockopt::TcpCongestion).and_then(|own| {
            let is_model = netmon::models_the_path(&own);
            if !is_model {
                setsockopt(tcp, sockopt::TcpCongestion, &successor)?;
            }
            Ok((!is_model).then_some(own))
        });
        match set {
            // It is under one already.
            Ok(None) => {
                self.may_be_bbr.set(false);
                false
            }
            Ok(Some(own)) => {
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

/// Whether the kernel has BBR.
fn has_bbr() -> bool {
    let (family, kind) = (AddressFamily::Inet, SockType::Stream);
    let tried = socket(family, kind, SockFlag::SOCK_CLOEXEC, None)
        .and_then(|tcp| setsockopt(&tcp, sockopt::TcpCongestion, &OsString::from(BBR)));
    tried.is_ok()
}

#[cfg(test)]
#[allow(non_snake_case)]
mod tests {
    use std::{io::Write, net::TcpListener};

    use super::*;

    #[test]
    fn watch__gives_the_control_back_where_nothing_is_lost() {
        let Some(successor) = SUCCESSOR.get_or_init(successor) else {
            return vtl_testing::skip("the kernel takes neither tcp:stream nor BBR here");
        };
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let tcp = TcpStream::connect(listener.local_addr().expect("bound")).expect("connected");
        let control = || getsockopt(&tcp, sockopt::TcpCongestion).expect("a control");
        setsockopt(&tcp, sockopt::TcpCongestion, &"reno".into()).expect("every kernel has it");
        let congestion = Congestion::default();
        assert!(!congestion.allow_bbr(&tcp, true), "nothing is lost");
        congestion.is_lossy.set(true);
        assert!(!congestion.watch(&tcp), "all is sent");
        fill(&tcp);
        assert!(congestion.watch(&tcp));
        assert_eq!(control(), **successor);
        assert!(!congestion.watch(&tcp), "it stays");
        congestion.is_lossy.set(false);
        assert!(congestion.watch(&tcp));
        assert_eq!(control(), "reno");
        let info = tcp_info(&tcp).expect("a connection");
        let goes_on = info.tcpi_snd_ssthresh <= info.tcpi_snd_cwnd;
        assert!(goes_on || successor == BBR, "slow start from a full window");
        assert!(!congestion.watch(&tcp) && !congestion.allow_bbr(&tcp, false));
    }

    /// Writes until nothing more goes: nobody reads.
    fn fill(mut tcp: &TcpStream) {
        tcp.set_nonblocking(true).expect("a socket");
        while tcp.write(&[0; 65536]).is_ok() {}
    }
}
