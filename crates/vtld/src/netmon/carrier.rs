//! Counters of carriers that are not grafts.

use std::time::Duration;

use vtl_control::CarrierPath;
use vtl_core::netmon::{Bound, Counters};
use vtl_proto::carrier::Kind;

/// The counters of a carrier. Those of processes are as untrusted as these, and were checked when they came.
pub(crate) fn counters(kind: Kind, path: &CarrierPath) -> Counters {
    let time = |ms: f64| Duration::try_from_secs_f64(ms / 1e3).ok();
    Counters {
        rtt: time(path.rtt_ms),
        rtt_variance: None,
        min_rtt: path.min_rtt_ms.and_then(time),
        // Truncated on purpose.
        sent: path.sent as u32,
        lost: path.lost as u32,
        delivered: path.delivered,
        bound: match (path.app_limited, kind) {
            // Both follow BBR.
            (Some(false), Kind::Quic | Kind::Sctp) => Bound::Path,
            (Some(false), _) => Bound::Window,
            _ => Bound::Application,
        },
        reordering: None,
    }
}
