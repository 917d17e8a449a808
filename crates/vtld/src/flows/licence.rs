//! A flow's licence: its TCP connection, which firewalls, connection limits and NATs have admitted, and can
//! end. While bytes of the flow travel by a carrier, the connection has to show that it still gets through, by
//! the answers to its keepalive probes (RFC 9293, section 3.8.4); where these stay away, the flow waits as the
//! connection would.

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

/// Between two probes of a connection whose flow moves bytes by a carrier, and after an unanswered one.
const OFTEN_S: u32 = 2;
const AGAIN_S: u32 = 1;
/// Between unanswered probes of a flow that waits; 127 of them take about what TCP's fifteen retransmissions take
/// (RFC 1122, section 4.2.3.5, R2).
const WAITING_S: u32 = 7;
/// How old the last answer may be: of five probes one has to get through.
const FRESH: Duration = Duration::from_secs(7);
/// A flow that has moved nothing for so long needs none.
const RESTS: Duration = Duration::from_secs(10);
/// Between two looks.
const LOOK: Duration = Duration::from_secs(1);
/// A connection that has ended in both directions (`include/net/tcp_states.h`): nobody asks it any more.
const TCP_CLOSE: u8 = 7;

/// What is known of it.
#[derive(Default)]
pub(super) struct Licence {
    /// Bytes have moved by a carrier since the last look.
    has_moved: Cell<bool>,
    /// The kernel asks often.
    is_asked: Cell<bool>,
    is_void: Cell<bool>,
    moved: Notify,
    valid: Notify,
}

/// Sets up a flow's connection.
pub(super) fn prepare(tcp: &TcpStream) {
    option::keep_alive(tcp, IDLE_S, IDLE_AGAIN_S);
}

/// Has the kernel probe after so many seconds, and so many after an unanswered probe.
fn ask(tcp: &TcpStream, after_s: u32, again_s: u32) {
    let _ = setsockopt(tcp, sockopt::TcpKeepInterval, &again_s);
    // An older connection is asked at once.
    let _ = setsockopt(tcp, sockopt::TcpKeepIdle, &after_s);
}

/// How long ago the last answer came.
fn age(tcp: &TcpStream) -> Duration {
    let info: std::io::Result<libc::tcp_info> = option::get(tcp, libc::IPPROTO_TCP, libc::TCP_INFO);
    // It cannot fail on a TCP socket.
    let Ok(info) = info else {
        return Duration::ZERO;
    };
    // In place of keepalive probes there are those of a closed window, seldom ones.
    let is_closed = info.tcpi_unacked == 0 && info.tcpi_probes < 2 && unacknowledged(tcp) > 0;
    if info.tcpi_state == TCP_CLOSE || is_closed {
        return Duration::ZERO;
    }
    Duration::from_millis(info.tcpi_last_ack_recv.into())
}

impl Licence {
    /// Bytes of the flow move by a carrier.
    pub(super) fn note_moved(&self) {
        if !self.has_moved.replace(true) && !self.is_asked.get() {
            self.moved.notify_one();
        }
    }

    pub(super) fn is_void(&self) -> bool {
        self.is_void.get()
    }

    /// Notes whether the connection gets through.
    pub(super) fn set_void(&self, is_void: bool) {
        if self.is_void.replace(is_void) && !is_void {
            self.valid.notify_waiters();
        }
    }

    /// Completes while the flow may go by carriers.
    pub(super) async fn valid(&self) {
        while self.is_void() {
            self.valid.notified().await;
        }
    }

    /// Looks after it, for good.
    pub(super) async fn keep(&self, tcp: &TcpStream) -> Infallible {
        loop {
            while !self.has_moved.get() {
                self.moved.notified().await;
            }
            self.is_asked.set(true);
            ask(tcp, OFTEN_S, AGAIN_S);
            let began = Instant::now();
            let mut last_moved = began;
            while last_moved.elapsed() < RESTS || self.is_void() {
                if self.has_moved.take() {
                    last_moved = Instant::now();
                }
                sleep(LOOK).await;
                let is_void = age(tcp).min(began.elapsed()) > FRESH;
                if self.is_void() != is_void {
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
