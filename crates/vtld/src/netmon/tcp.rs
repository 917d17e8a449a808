//! Counters of TCP connections, by the kernel's TCP_INFO.

use std::{
    cell::RefCell,
    ffi::OsStr,
    io,
    net::{IpAddr, TcpStream},
    os::unix::ffi::OsStrExt,
    time::{Duration, Instant},
};

use nix::sys::socket::{getsockopt, sockopt};
use vtl_control::CarrierPath;
use vtl_core::netmon::{Bound, Counters, Reading};

use super::{Evidence, NetMonitor, Watch};
use crate::option;

/// Maximum number of connections that a thread reads in one second: 256 system calls of some 500 ns each.
pub(crate) const MAX_READ: usize = 256;

/// One connection that is read from time to time.
#[derive(Debug, Default)]
pub(crate) struct TcpWatch {
    watch: Watch,
    /// The other host; inner `None`: it is this one. `None`: unknown yet.
    peer: Option<Option<IpAddr>>,
    /// Whether its congestion control models the path.
    models: bool,
    /// It does, and is in its startup: what it reaches there is its own doing.
    starts: bool,
    /// The latest reading of its times: when it was, for how long the connection had been sending by then, and for how
    /// long the receiver or its own buffer had bounded it.
    last: Option<(Instant, Duration, Duration)>,
    /// What bounded it between the latest two of these readings.
    bound: Bound,
    /// SYNs or SYN/ACKs that were sent again, which says nothing of losses: over a long path that is done before an answer
    /// can come.
    handshake: u32,
}

/// Minimum interval of these readings: the kernel counts such times in ticks of up to 10 ms.
const LOOK: Duration = Duration::from_millis(90);

impl TcpWatch {
    /// Has the next reading look up the congestion control again, after a change of it.
    pub(crate) fn forget_control(&mut self) {
        self.peer = None;
    }

    /// Reads the counters of a connection, one system call, and notes them.
    pub(crate) fn read(&mut self, monitor: &NetMonitor, connection: &TcpStream) {
        if self.peer.is_none() {
            // It may be connecting still.
            let Ok(peer) = other_host(connection) else {
                return;
            };
            self.peer = Some(peer);
            let name = getsockopt(connection, sockopt::TcpCongestion).unwrap_or_default();
            self.models = models_the_path(&name);
            self.starts = self.models;
        }
        let Some(Some(peer)) = self.peer else { return };
        let Ok(info) = option::tcp_info(connection) else {
            return;
        };
        self.starts = self.starts && is_startup(&info);
        let now = Instant::now();
        let counters = self.counters(now, &info);
        monitor.note(peer, Evidence::Tcp, &mut self.watch, now, counters);
    }

    /// What bounds the connection: another reader may have looked a moment ago.
    fn bound(&mut self, now: Instant, info: &libc::tcp_info) -> Bound {
        let passed = |then| now.saturating_duration_since(then);
        if self.last.is_some_and(|(then, ..)| passed(then) < LOOK) {
            return self.bound;
        }
        let sending = Duration::from_micros(info.tcpi_busy_time);
        let elsewhere = Duration::from_micros(
            info.tcpi_rwnd_limited
                .saturating_add(info.tcpi_sndbuf_limited),
        );
        let last = self.last.replace((now, sending, elsewhere));
        // Nine tenths of the time since then have to be the path's.
        let is_path = last.is_some_and(|(then, sent, held)| {
            let sending = sending.saturating_sub(sent);
            let held = elsewhere.saturating_sub(held);
            sending.saturating_sub(held) >= passed(then) * 9 / 10
        });
        self.bound = match (is_path, self.models && !self.starts) {
            (false, _) => Bound::Application,
            (true, true) => Bound::Path,
            (true, false) => Bound::Window,
        };
        self.bound
    }

    fn counters(&mut self, now: Instant, info: &libc::tcp_info) -> Counters {
        let path = path_of(info);
        if info.tcpi_bytes_retrans == 0 {
            self.handshake = info.tcpi_total_retrans;
        }
        Counters {
            rtt_variance: Some(Duration::from_micros(info.tcpi_rttvar.into())),
            rtt: Some(Duration::from_micros(info.tcpi_rtt.into())),
            min_rtt: min_rtt(info),
            sent: path.sent as u32,
            lost: (path.lost as u32).wrapping_sub(self.handshake),
            delivered: path.delivered,
            bound: self.bound(now, info),
            // Times that a packet was overtaken, of packets delivered.
            reordering: (info.tcpi_delivered > 0).then(|| {
                (f64::from(info.tcpi_reord_seen) / f64::from(info.tcpi_delivered)).min(1.0)
            }),
        }
    }
}

/// Whether a congestion control, by the kernel's name, models the path: BBR, or VTL's `tcp:stream`.
pub(crate) fn models_the_path(control: &OsStr) -> bool {
    let control = control.as_bytes();
    control.starts_with(b"bbr") || control.starts_with(b"vtl_stream")
}

/// Whether a connection under such a control that was in its startup still is, and has not filled the path: that sends at 2.7
/// times what was delivered and more. `tcp:stream` on a path that it has filled sends at twice that, later phases at 1.25
/// times, and at 1.6 where a fifth is lost.
fn is_startup(info: &libc::tcp_info) -> bool {
    info.tcpi_pacing_rate / 11 > info.tcpi_delivery_rate / 5
}

/// `None` before the first sample: the kernel has all ones, or zero, there.
fn min_rtt(info: &libc::tcp_info) -> Option<Duration> {
    let us = info.tcpi_min_rtt;
    (us != 0 && us != u32::MAX).then(|| Duration::from_micros(us.into()))
}

/// The other host; `None` if it is this one: an application's connection.
///
/// # Errors
/// It is not connected.
fn other_host(connection: &TcpStream) -> io::Result<Option<IpAddr>> {
    let peer = connection.peer_addr()?.ip().to_canonical();
    let own = connection.local_addr()?.ip().to_canonical();
    Ok((peer != own && !peer.is_loopback()).then_some(peer))
}

/// A difference of counters; 0 where it is negative, as a network that duplicates packets makes it.
fn at_least_0(difference: u32) -> u32 {
    u32::try_from(difference as i32).unwrap_or(0)
}

/// The counters as a carrier's.
fn path_of(info: &libc::tcp_info) -> CarrierPath {
    // Retransmissions that the peer already had (RFC 2883) were not lost.
    let lost = at_least_0(info.tcpi_total_retrans.wrapping_sub(info.tcpi_dsack_dups));
    // In order, and behind a gap (RFC 2018).
    let behind = u64::from(info.tcpi_sacked) * u64::from(info.tcpi_snd_mss);
    CarrierPath {
        rtt_ms: f64::from(info.tcpi_rtt) / 1e3,
        min_rtt_ms: min_rtt(info).map(|rtt| rtt.as_secs_f64() * 1e3),
        sent: info.tcpi_data_segs_out.into(),
        lost: lost.into(),
        delivered: Some(info.tcpi_bytes_acked.saturating_add(behind)),
        app_limited: None,
        refused: None,
    }
}

/// `tcpi_snd_ssthresh` up to the first reduction of the congestion window (the kernel's TCP_INFINITE_SSTHRESH).
const NOT_REDUCED: u32 = 0x7fff_ffff;

/// What a connection has sent and lost, and its round trips.
pub(crate) fn losses(info: &libc::tcp_info) -> Reading {
    let path = path_of(info);
    Reading {
        counters: Counters {
            rtt: Some(Duration::from_micros(info.tcpi_rtt.into())),
            min_rtt: min_rtt(info),
            sent: path.sent as u32,
            lost: path.lost as u32,
            ..Counters::default()
        },
        acked: info.tcpi_bytes_acked,
        outstanding: u64::from(info.tcpi_unacked) * u64::from(info.tcpi_snd_mss),
        is_reduced: info.tcpi_snd_ssthresh < NOT_REDUCED,
    }
}

/// Returns what reads the counters of an MPTCP connection: those of its first subflow.
pub(crate) fn mptcp() -> impl Fn(&TcpStream) -> Option<(Instant, CarrierPath)> {
    let watch = RefCell::new(TcpWatch::default());
    move |connection| {
        let info = option::tcp_info(connection).ok()?;
        let now = Instant::now();
        let counters = watch.borrow_mut().counters(now, &info);
        let path = CarrierPath {
            app_limited: Some(counters.bound == Bound::Application),
            lost: at_least_0(counters.lost).into(),
            ..path_of(&info)
        };
        Some((now, path))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Counters of TCP that has been sending for so many milliseconds, of which the receiver took none for some.
    fn info(sending: u64, held: u64) -> libc::tcp_info {
        // SAFETY: numbers, of which zeros are valid.
        let mut info: libc::tcp_info = unsafe { std::mem::zeroed() };
        info.tcpi_busy_time = sending * 1000;
        info.tcpi_rwnd_limited = held * 1000;
        info
    }

    #[test]
    fn is_startup__by_what_is_paced_and_what_arrives() {
        // Both in percent of the path's rate.
        for (paced, delivered, want) in [
            (288, 100, true),  // BBR
            (277, 100, true),  // BBR, version 2 and later
            (320, 100, true),  // tcp:stream, a tenth lost
            (100, 0, true),    // nothing has arrived yet
            (204, 100, false), // tcp:stream has filled the path
            (156, 100, false), // a probe where a fifth is lost
            (100, 100, false),
        ] {
            let mut info = info(0, 0);
            info.tcpi_pacing_rate = paced * 125_000;
            info.tcpi_delivery_rate = delivered * 125_000;
            assert_eq!(is_startup(&info), want, "{paced} of {delivered}");
        }
    }

    #[test]
    fn counters__what_bounds_the_rate() {
        let began = Instant::now();
        // Readings after 1 s: time spent sending, and held up by the receiver.
        let bound = |models, sending: u64, held: u64| {
            let mut watch = TcpWatch {
                models,
                ..TcpWatch::default()
            };
            let first = watch.counters(began, &info(5000, 70));
            assert_eq!(first.bound, Bound::Application, "nobody knows yet");
            let later = began + Duration::from_secs(1);
            watch
                .counters(later, &info(5000 + sending, 70 + held))
                .bound
        };
        assert_eq!(bound(false, 1000, 0), Bound::Window);
        assert_eq!(bound(true, 1000, 0), Bound::Path);
        assert_eq!(bound(true, 899, 0), Bound::Application);
        assert_eq!(bound(true, 1000, 101), Bound::Application);
        assert_eq!(bound(false, 950, 50), Bound::Window);
        let mut begins = TcpWatch {
            models: true,
            starts: true,
            ..TcpWatch::default()
        };
        begins.counters(began, &info(0, 0));
        let later = began + Duration::from_secs(1);
        let bound = begins.counters(later, &info(1000, 0)).bound;
        assert_eq!(bound, Bound::Window, "BBR's startup");
        // Another reader a moment later has no more to go by.
        let mut watch = TcpWatch::default();
        for (at, sending) in [(0, 0), (1000, 1000), (1003, 1000)] {
            let bound = watch.bound(began + Duration::from_millis(at), &info(sending, 0));
            assert_eq!(bound == Bound::Window, at > 0);
        }
    }

    #[test]
    fn counters__the_handshake_loses_nothing() {
        let began = Instant::now();
        let mut watch = TcpWatch::default();
        let mut lost = |total: u32, bytes: u64| {
            let mut info = info(0, 0);
            info.tcpi_total_retrans = total;
            info.tcpi_bytes_retrans = bytes;
            watch.counters(began, &info).lost
        };
        assert_eq!([lost(1, 0), lost(2, 0)], [0, 0], "SYNs only");
        assert_eq!([lost(3, 1000), lost(7, 4500)], [1, 5]);
    }

    #[test]
    fn path_of__losses_and_deliveries() {
        let mut info = info(0, 0);
        assert_eq!(path_of(&info).min_rtt_ms, None);
        info.tcpi_min_rtt = u32::MAX;
        assert_eq!(path_of(&info).min_rtt_ms, None, "not measured");
        info.tcpi_min_rtt = 1500;
        info.tcpi_data_segs_out = 100;
        info.tcpi_total_retrans = 7;
        info.tcpi_dsack_dups = 2;
        info.tcpi_bytes_acked = 9000;
        info.tcpi_sacked = 3;
        info.tcpi_snd_mss = 1000;
        let path = path_of(&info);
        assert_eq!((path.min_rtt_ms, path.sent, path.lost), (Some(1.5), 100, 5));
        assert_eq!(path.delivered, Some(12_000));
    }

    #[test]
    fn read__not_of_applications_connections() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let monitor = NetMonitor::default();
        let mut watch = TcpWatch::default();
        watch.read(&monitor, &client);
        assert_eq!(watch.peer, Some(None));
        assert!(monitor.list(None).paths.is_empty());
    }
}
