//! Grafts by name, and what `vtl status` shows.

use std::collections::HashMap;

use serde_json::{Value, json};
use vtl_bpf::netdev;
use vtl_proto::intf;

use super::{
    super::{Owner, meter::Mark, now_ns, session::Phase},
    Engine,
};

/// Sessions in one answer: a row takes up to 700 bytes, and a message holds 128 KiB.
const PAGE: usize = 100;

impl Engine {
    /// What there is, with at most `PAGE` sessions from index `from` on; `more` is where the next
    /// ones begin.
    pub(super) fn status(&mut self, from: u32) -> Value {
        let stats = self.plane.stats();
        let nego = self.responder.counters();
        let stat = |i: u32| stats.get(i as usize).copied().unwrap_or_default();
        let interfaces: Vec<Value> = self
            .interfaces
            .values()
            .map(|i| {
                let pump = self.pumps.get(&i.index);
                json!({
                    "name": i.name,
                    "mtu": i.mtu,
                    "driver": pump.map(|(p, _)| p.name()),
                    "why": pump.map(|(_, why)| why),
                })
            })
            .collect();
        let names = self.names();
        let more = self.sessions.range(from..).nth(PAGE).map(|(sid, _)| *sid);
        let page = self.sessions.range(from..).take(PAGE);
        let sids: Vec<u32> = page.map(|(sid, _)| *sid).collect();
        let sessions: Vec<Value> = sids
            .into_iter()
            .filter_map(|sid| self.session(sid, &names))
            .collect();
        json!({
            "version": env!("CARGO_PKG_VERSION"),
            "kernel": netdev::kernel_release(),
            "uptime_s": (now_ns() - self.started_ns) as f64 / 1e9,
            "interfaces": interfaces,
            "sessions": sessions,
            "more": more,
            "listeners": self.listeners.keys().collect::<Vec<_>>(),
            "negotiation": {
                "accepted": nego.accepted,
                "early": nego.early,
                "refused": nego.refused,
                "cookies": nego.cookies,
                "replays": nego.replays,
                "repeated": nego.repeated,
                "strangers": self.responder.strangers(),
            },
            "packets": {
                "received": stat(intf::VTL_ST_RX_PACKETS),
                "malformed": stat(intf::VTL_ST_RX_MALFORMED),
                "no_session": stat(intf::VTL_ST_RX_NO_SESSION),
                "no_graft": stat(intf::VTL_ST_RX_NO_GRAFT),
                "bad_checksum": stat(intf::VTL_ST_RX_BAD_CSUM),
                "duplicate": stat(intf::VTL_ST_RX_DUPLICATE),
                "beyond_window": stat(intf::VTL_ST_RX_BEYOND),
                "contended": stat(intf::VTL_ST_RX_CONTENDED),
                "control": stat(intf::VTL_ST_RX_CONTROL),
                "sent": stat(intf::VTL_ST_TX_PACKETS),
                "acknowledgements": stat(intf::VTL_ST_TX_ACKS),
                "failed": stat(intf::VTL_ST_TX_FAILED),
            },
        })
    }

    /// State of an aware application's session.
    pub(super) fn statistics(&mut self, owner: Owner) -> Result<Value, String> {
        // One that it has closed may not be over yet.
        let goes_on = |sid: &u32| {
            let session = self.sessions.get(sid);
            session.is_some_and(|s| {
                let granted = s.aware_ref().is_some_and(|a| a.granted);
                granted && !matches!(s.phase, Phase::Closing { .. })
            })
        };
        let owned = self.sessions_of_owner(owner);
        let sid = owned.into_iter().find(goes_on);
        let sid = sid.ok_or("there is no session")?;
        let names = self.names();
        self.session(sid, &names)
            .ok_or_else(|| "there is no session".to_owned())
    }

    /// The deployed grafts' names.
    fn names(&self) -> HashMap<u16, String> {
        self.plane
            .grafts()
            .map(|g| (g.gid, g.name.clone()))
            .collect()
    }

    fn session(&mut self, sid: u32, names: &HashMap<u16, String>) -> Option<Value> {
        let session = self.sessions.get_mut(&sid)?;
        let entry = self.plane.sessions().get(sid)?;
        let s = entry.snapshot();
        let (tx, rx) = (&s.tx, &s.rx);
        session.meter.note(Mark::new(now_ns(), &tx.meter));
        let payload = tx.bytes as f64 / tx.sent.max(1) as f64;
        let modes = ["startup", "drain", "probe-bw", "probe-rtt"];
        let mode = modes.get(tx.bbr.mode as usize);
        let mut row = json!({
            "sid": sid,
            "peer": session.peer,
            "port": session.port,
            "way": entry.way().to_string(),
            "udp_port": entry.port(),
            "phase": match session.phase {
                Phase::Opening(_) => "opening",
                Phase::Open => "open",
                Phase::Closing { .. } => "closing",
                Phase::Ended => "ended",
            },
            "graft": names.get(&s.gid),
            "rtt_ms": f64::from(tx.srtt_us) / 1e3,
            "min_rtt_ms": f64::from(tx.meter.min_rtt_us) / 1e3,
            "rate_mbit": session.meter.rate() * payload * 8.0 / 1e6,
            "loss_pct": session.meter.loss_pct(),
            "mode": mode,
            "cwnd": tx.cwnd,
            "sent": tx.sent,
            "retransmitted": tx.retransmitted,
            "delivered": tx.meter.received,
            "lost": session.meter.lost(),
            "reorder": tx.reorder,
            "timeouts": tx.timeouts,
            "unacknowledged": tx.next.saturating_sub(tx.una),
            "received": rx.received,
            "duplicates": rx.dups,
            "bad_checksum": rx.bad_csum,
            "beyond_window": rx.beyond,
        });
        let off_graft = session.is_off_graft();
        let lossy = session.lossy;
        if let Some(streams) = session.streams() {
            row["flows"] = streams.flows().into();
            row["fallback"] = off_graft.into();
            row["bytes_sent"] = streams.bytes_sent.into();
            row["bytes_received"] = streams.bytes_received.into();
            if lossy {
                let losses = streams.losses();
                row["skipped_bytes"] = losses.skipped.into();
                row["late"] = losses.late.into();
            }
        }
        Some(row)
    }
}
