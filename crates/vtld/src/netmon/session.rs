//! Counters of sessions over grafts: `vtl_session.tx`, which the listener writes with each acknowledgement.

use vtl_bpf::sessions::Session;
use vtl_core::netmon::{Bound, Counters};
use vtl_proto::nego::Encapsulation;

/// The counters of a session over a graft; `None` while its packets go by TCP, which hides the path.
pub(crate) fn counters(entry: &Session<'_>) -> Option<Counters> {
    if entry.encapsulation() == Encapsulation::Tcp {
        return None;
    }
    let (meter, sender) = (entry.meter(), entry.sender());
    let sent = meter.xid.wrapping_sub(meter.extra);
    // The kernel counts packets that arrive, and bytes that leave.
    let arrived = u128::from(meter.received) * u128::from(sender.bytes);
    let delivered = arrived / u128::from(entry.sent().max(1));
    // What a session supposes before its first sample is of earlier times.
    let min_rtt = entry.measured_rtt();
    let sampled = |value| min_rtt.map(|_| value);
    Some(Counters {
        rtt: sampled(entry.srtt()),
        rtt_variance: sampled(sender.rtt_variance),
        min_rtt,
        sent,
        lost: sent.wrapping_sub(meter.arrived),
        delivered: u64::try_from(delivered).ok(),
        bound: match (sender.is_limited, sender.models) {
            (true, _) => Bound::Application,
            (false, true) => Bound::Path,
            (false, false) => Bound::Window,
        },
        reordering: Some(sender.reordering),
    })
}
