//! A flow's licence: its TCP connection, which firewalls, connection limits and NATs have admitted, and can
//! end. While the flow's bytes travel by a carrier, keepalive probes (RFC 9293, section 3.8.4) verify that the
//! connection still gets through; without answers the licence is void, and the flow stalls as the connection would.

use std::{
    cell::Cell,
    convert::Infallible,
    net::TcpStream,
    time::{Duration, Instant},
};

use nix::sys::socket::{setsockopt, sockopt};
use tokio::{sync::Notify, time::sleep};

use super::socket::unacknowledged;
use crate::option::{self, IDLE_AGAIN_S, IDLE_S};

/// Keepalive interval while the flow's bytes travel by a carrier, s,
const OFTEN_S: u32 = 2;
/// and after an unanswered probe, s.
const AGAIN_S: u32 = 1;
/// Interval of unanswered probes while the licence is void, s: 127 of them take about as long as TCP's fifteen
/// retransmissions (RFC 1122, section 4.2.3.5, R2).
const WAITING_S: u32 = 7;
/// Maximum age of the last answer: one of five probes has to get through.
const FRESH: Duration = Duration::from_secs(7);
/// Idle time after which a flow is not probed often any more.
const RESTS: Duration = Duration::from_secs(10);
/// Interval of the checks.
const LOOK: Duration = Duration::from_secs(1);
/// State of a connection closed in both directions (`include/net/tcp_states.h`): it is not probed any more.
const TCP_CLOSE: u8 = 7;

/// State of a flow's licence.
#[derive(Default)]
pub(super) struct Licence {
    /// Bytes have moved by a carrier since the last check.
    has_moved: Cell<bool>,
    /// The kernel probes often.
    is_asked: Cell<bool>,
    is_void: Cell<bool>,
    /// The flow goes by other paths as well, which the connection says nothing about.
    is_waived: Cell<bool>,
    moved: Notify,
    valid: Notify,
}

/// Enables keepalive on a flow's connection.
pub(super) fn prepare(tcp: &TcpStream) {
    option::keep_alive(tcp, IDLE_S, IDLE_AGAIN_S);
}

/// Sets the keepalive timers: probe after `after_s` of silence, and `again_s` after an unanswered probe.
fn ask(tcp: &TcpStream, after_s: u32, again_s: u32) {
    let _ = setsockopt(tcp, sockopt::TcpKeepInterval, &again_s);
    // A connection that is idle for longer already is probed at once.
    let _ = setsockopt(tcp, sockopt::TcpKeepIdle, &after_s);
}

/// Time since the last acknowledgement; zero if the connection is not probed.
fn age(tcp: &TcpStream) -> Duration {
    // It cannot fail on a TCP socket.
    let Ok(info) = option::tcp_info(tcp) else {
        return Duration::ZERO;
    };
    // Zero-window probes replace keepalive probes while the peer's window is closed, and are rare.
    let is_closed = info.tcpi_unacked == 0 && info.tcpi_probes < 2 && unacknowledged(tcp) > 0;
    if info.tcpi_state == TCP_CLOSE || is_closed {
        return Duration::ZERO;
    }
    Duration::from_millis(info.tcpi_last_ack_recv.into())
}

impl Licence {
    /// Notes that bytes of the flow have moved by a carrier.
    pub(super) fn note_moved(&self) {
        if !self.has_moved.replace(true) && !self.is_asked.get() {
            self.moved.notify_one();
        }
    }

    /// Whether the flow must not use carriers, unless it goes by other paths as well.
    pub(super) fn is_void(&self) -> bool {
        self.is_void.get() && !self.is_waived.get()
    }

    /// Whether the connection does not get through: the flow must not use carriers on its path.
    pub(super) fn is_void_on_path(&self) -> bool {
        self.is_void.get()
    }

    /// Sets whether the flow may use carriers although the connection does not get through.
    pub(super) fn set_waived(&self, is_waived: bool) {
        if self.is_waived.replace(is_waived) != is_waived {
            self.valid.notify_waiters();
        }
    }

    /// Sets whether the connection has failed to get through.
    pub(super) fn set_void(&self, is_void: bool) {
        if self.is_void.replace(is_void) && !is_void {
            self.valid.notify_waiters();
        }
    }

    /// Completes once the flow may use carriers.
    pub(super) async fn valid(&self) {
        while self.is_void() {
            self.valid.notified().await;
        }
    }

    /// The same of carriers on its path.
    pub(super) async fn valid_on_path(&self) {
        while self.is_void_on_path() {
            self.valid.notified().await;
        }
    }

    /// Supervises the connection. Never completes.
    pub(super) async fn keep(&self, tcp: &TcpStream) -> Infallible {
        loop {
            while !self.has_moved.get() {
                self.moved.notified().await;
            }
            self.is_asked.set(true);
            ask(tcp, OFTEN_S, AGAIN_S);
            let began = Instant::now();
            let mut last_moved = began;
            while last_moved.elapsed() < RESTS || self.is_void.get() {
                if self.has_moved.take() {
                    last_moved = Instant::now();
                }
                sleep(LOOK).await;
                let is_void = age(tcp).min(began.elapsed()) > FRESH;
                if self.is_void.get() != is_void {
                    last_moved = Instant::now();
                    ask(tcp, OFTEN_S, if is_void { WAITING_S } else { AGAIN_S });
                }
                self.set_void(is_void);
            }
            self.is_asked.set(false);
            ask(tcp, IDLE_S, IDLE_AGAIN_S);
        }
    }
}

#[cfg(test)]
#[allow(non_snake_case)]
mod tests {
    use super::*;

    #[test]
    fn licence__is_waived_for_other_paths_only() {
        let licence = Licence::default();
        licence.set_waived(true);
        licence.set_void(true);
        assert!(!licence.is_void() && licence.is_void_on_path());
        licence.set_waived(false);
        assert!(licence.is_void());
        licence.set_void(false);
        assert!(!licence.is_void() && !licence.is_void_on_path());
    }
}
