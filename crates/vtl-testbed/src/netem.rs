//! Emulation by the kernel, where it has `sch_netem` and `VTL_TESTBED_BACKEND=netem` is set: netem for delay,
//! loss, duplication, reordering and corruption, behind a token bucket (tbf) for rate and queue.
//!
//! The machines on which this project was developed have no netem: apart from the detection and the token
//! bucket **this has not been run**.
//!
//! ```text
//! to-client ─ bridge-c ─ mid-c ══veth══ mid-s ─ bridge-s ─ to-server
//!   netem ◀            tbf ▶          ◀ tbf              ▶ netem
//! ```
//! The queue must come before loss and delay. That takes two devices in a row: hence two bridges joined by
//! a veth pair.

use vtl_link::{BadLink, Host, Link, LossModel, MTU};

use crate::emulator::{TO_CLIENT, TO_SERVER};
use crate::error::Result;
use crate::namespace;

/// Length of the Ethernet header, bytes, which the token bucket counts and a [`Link`] does not.
const ETHERNET: u32 = 14;
/// netem's queue limit, packets: ample for any profile. The default of 1,000 would drop some.
const IN_FLIGHT: u32 = 1_000_000;

/// Whether this kernel has netem: adds it to one of the router's devices, and removes it again.
pub(crate) fn available(testbed: &str) -> bool {
    namespace::tc_batch(
        testbed,
        Host::Router,
        &format!("qdisc add dev {TO_CLIENT} root netem delay 1ms\n"),
    )
    .is_ok()
        && namespace::tc_batch(
            testbed,
            Host::Router,
            &format!("qdisc del dev {TO_CLIENT} root\n"),
        )
        .is_ok()
}

/// Joins the router's devices.
pub(crate) fn build(testbed: &str, link: &Link) -> Result<()> {
    namespace::ip_batch(
        testbed,
        Host::Router,
        &format!(
            "link add bridge-c type bridge forward_delay 0\n\
             link add bridge-s type bridge forward_delay 0\n\
             link add mid-c type veth peer name mid-s\n\
             link set {TO_CLIENT} master bridge-c\n\
             link set mid-c master bridge-c\n\
             link set mid-s master bridge-s\n\
             link set {TO_SERVER} master bridge-s\n\
             link set mid-c up\n\
             link set mid-s up\n\
             link set bridge-c up\n\
             link set bridge-s up\n"
        ),
    )?;
    set(testbed, link)
}

/// Changes the link.
pub(crate) fn set(testbed: &str, link: &Link) -> Result<()> {
    check(link)?;
    namespace::tc_batch(testbed, Host::Router, &commands(link))
}

/// Refuses what netem cannot do.
fn check(link: &Link) -> Result<(), BadLink> {
    let missing = if link.ecn_ms.is_some() {
        "ECN marks by queueing time"
    } else if link.blocked.is_some() {
        "dropping packets by their protocol"
    } else if link.tamper_pct > 0.0 {
        "tampering with payload"
    } else {
        return Ok(());
    };
    Err(BadLink(format!(
        "netem has no {missing}: use the emulator (unset VTL_TESTBED_BACKEND)"
    )))
}

fn commands(link: &Link) -> String {
    let mut lines = String::new();
    for (queue_device, link_device, loss) in [
        ("mid-c", TO_SERVER, link.loss_up()),
        ("mid-s", TO_CLIENT, link.loss_down()),
    ] {
        let frame = MTU + ETHERNET;
        let rate = if link.rate_mbit > 0.0 {
            let bits = link.rate_mbit * 1e6 * f64::from(frame) / f64::from(MTU);
            // The bucket must hold the bytes of a timer tick of 4 ms, and at least one frame.
            let burst = (bits / 8.0 / 250.0).max(f64::from(frame)) as u64;
            let limit = u64::from(link.queue_limit() + 1) * u64::from(frame);
            format!("tbf rate {}bit burst {burst} limit {limit}", bits as u64)
        } else {
            format!("pfifo limit {}", link.queue_limit())
        };
        let loss = match link.loss_model {
            _ if loss == 0.0 => String::new(),
            LossModel::Uniform => format!(" loss random {loss}%"),
            LossModel::GilbertElliott {
                burst_packets,
                bad_loss_pct,
            } => {
                let bad = loss / bad_loss_pct;
                let leave = 100.0 / burst_packets;
                let enter = if bad < 1.0 {
                    (leave * bad / (1.0 - bad)).min(100.0)
                } else {
                    100.0
                };
                format!(" loss gemodel {enter}% {leave}% {bad_loss_pct}% 0%")
            }
        };
        let mut netem = format!(
            "netem limit {IN_FLIGHT} delay {}us{loss}",
            (link.rtt_ms * 500.0) as u64
        );
        if link.duplicate_pct > 0.0 {
            netem += &format!(" duplicate {}%", link.duplicate_pct);
        }
        if link.corrupt_pct > 0.0 {
            netem += &format!(" corrupt {}%", link.corrupt_pct);
        }
        // netem reorders by sending a packet at once, instead of holding it back: `reorder_ms` has no effect.
        if link.reorder_pct > 0.0 && link.rtt_ms > 0.0 {
            netem += &format!(" reorder {}%", link.reorder_pct);
        }
        if let Some(slots) = link.slots {
            netem += &format!(
                " slot {}us {}us",
                (slots.min_ms * 1e3) as u64,
                (slots.max_ms * 1e3) as u64
            );
        }
        lines += &format!(
            "qdisc replace dev {queue_device} root {rate}\nqdisc replace dev {link_device} root {netem}\n"
        );
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn check__refuses_what_netem_cannot_do() {
        assert_eq!(check(&Link::new(10.0, 10.0)), Ok(()));
        for link in [
            Link {
                ecn_ms: Some(5.0),
                ..Link::default()
            },
            Link {
                blocked: Some(253),
                ..Link::default()
            },
            Link {
                tamper_pct: 1.0,
                ..Link::default()
            },
        ] {
            let refused = check(&link).expect_err("refused").to_string();
            assert!(refused.contains("use the emulator"), "{refused}");
        }
    }

    #[test]
    fn commands__one_queue_and_one_netem_per_direction() {
        let link = Link {
            loss_pct: 1.0,
            loss_up_pct: Some(0.0),
            ..Link::new(100.0, 100.0)
        };
        let text = commands(&link);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 4);
        assert!(
            lines[0].starts_with("qdisc replace dev mid-c root tbf rate 100933333bit"),
            "{}",
            lines[0]
        );
        assert_eq!(
            lines[1],
            "qdisc replace dev to-server root netem limit 1000000 delay 50000us"
        );
        assert!(
            lines[3].ends_with("delay 50000us loss random 1%"),
            "{}",
            lines[3]
        );
    }

    #[test]
    fn commands__bursts_keep_the_mean() {
        let text = commands(&Link {
            loss_pct: 20.0,
            loss_model: LossModel::BURSTS,
            ..Link::default()
        });
        assert!(text.contains("loss gemodel 3.125% 12.5% 100% 0%"), "{text}");
        assert!(text.contains("pfifo limit 1000000"), "{text}");
    }
}
