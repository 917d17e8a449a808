//! Status reports: `vtl status`, and a session's statistics.

use std::collections::HashMap;

use vtl_control::{Interface, Negotiation, Packets, SessionStatus, Status};
use vtl_core::session::Phase;
use vtl_proto::{carrier::GRAFT_PORT, intf};

use super::{
    super::{Owner, meter::Mark, now_ns},
    ControlBroker,
};

/// Maximum of sessions in one answer: a row takes up to 700 bytes, and a message holds 128 KiB.
const PAGE: usize = 100;

impl ControlBroker {
    /// Status with at most `PAGE` sessions from index `from` on; without carriers and hooks.
    pub(super) fn status(&mut self, from: u32) -> Status {
        let stats = self.plane.stats();
        let nego = self.responder.counters();
        let stat = |i: u32| stats.get(i as usize).copied().unwrap_or_default();
        let interfaces = self.plane.attached().values().map(|attached| {
            let i = &attached.interface;
            let driver = self.interfaces.driver(i.index);
            Interface {
                name: i.name.clone(),
                mtu: i.mtu,
                driver: driver.map(|(name, _)| name.to_owned()),
                why: driver.map(|(_, why)| why.to_owned()),
            }
        });
        let interfaces = interfaces.collect();
        let names = self.names();
        let more = self.sessions.indexes_from(from).nth(PAGE);
        let sids: Vec<u32> = self.sessions.indexes_from(from).take(PAGE).collect();
        Status {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            kernel: vtl_bpf::kernel_release(),
            uptime_s: (now_ns() - self.started_ns) as f64 / 1e9,
            interfaces,
            sessions: sids
                .into_iter()
                .filter_map(|sid| self.session(sid, &names))
                .collect(),
            more,
            // Except the daemon's own, for flows.
            listeners: self
                .listeners
                .ports()
                .filter(|port| *port != GRAFT_PORT)
                .collect(),
            negotiation: Negotiation {
                accepted: nego.accepted,
                early: nego.early,
                refused: nego.refused,
                cookies: nego.cookies,
                replays: nego.replays,
                repeated: nego.repeated,
                strangers: self.responder.strangers(),
            },
            packets: Packets {
                received: stat(intf::VTL_ST_RX_PACKETS),
                malformed: stat(intf::VTL_ST_RX_MALFORMED),
                no_session: stat(intf::VTL_ST_RX_NO_SESSION),
                no_graft: stat(intf::VTL_ST_RX_NO_GRAFT),
                bad_checksum: stat(intf::VTL_ST_RX_BAD_CSUM),
                duplicate: stat(intf::VTL_ST_RX_DUPLICATE),
                beyond_window: stat(intf::VTL_ST_RX_BEYOND),
                contended: stat(intf::VTL_ST_RX_CONTENDED),
                control: stat(intf::VTL_ST_RX_CONTROL),
                sent: stat(intf::VTL_ST_TX_PACKETS),
                acknowledgements: stat(intf::VTL_ST_TX_ACKS),
                failed: stat(intf::VTL_ST_TX_FAILED),
                others: stat(intf::VTL_ST_RX_OTHERS),
                limited: stat(intf::VTL_ST_RX_LIMITED),
            },
            carriers: Vec::new(),
            hooks: Vec::new(),
            near: Vec::new(),
            gateways: Vec::new(),
        }
    }

    /// State of an aware application's session.
    pub(super) fn statistics(&mut self, owner: Owner) -> Result<SessionStatus, String> {
        // Skip one that it has closed, which may not have ended yet.
        let goes_on = |sid: &u32| {
            let session = self.sessions.get(*sid);
            session.is_some_and(|s| {
                s.aware.granted && !matches!(s.lifecycle.phase(), Phase::Closing(_))
            })
        };
        let owned = self.sessions.of(owner);
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

    fn session(&mut self, sid: u32, names: &HashMap<u16, String>) -> Option<SessionStatus> {
        let session = self.sessions.get_mut(sid)?;
        let entry = self.plane.sessions().get(sid)?;
        let s = entry.snapshot();
        let (tx, rx) = (&s.tx, &s.rx);
        session.meter.note(Mark::new(now_ns(), &entry.meter()));
        let payload = tx.bytes as f64 / tx.sent.max(1) as f64;
        let phase = match session.lifecycle.phase() {
            Phase::Opening(_) => "opening",
            Phase::Open(_) => "open",
            Phase::Closing(_) => "closing",
            Phase::Ended => "ended",
        };
        let (peer, port) = (session.peer, session.port);
        let meter = &session.meter;
        let (rate, loss_pct, lost) = (meter.rate(), meter.loss_pct(), meter.lost());
        Some(SessionStatus {
            sid,
            peer,
            port,
            way: entry.encapsulation().to_string(),
            udp_port: entry.port(),
            cipher: session.agreed().map(|agreed| agreed.keys.suite),
            phase: phase.to_owned(),
            graft: names.get(&s.gid).cloned(),
            rtt_ms: f64::from(tx.srtt_us) / 1e3,
            min_rtt_ms: f64::from(tx.meter.min_rtt_us) / 1e3,
            rate_mbit: rate * payload * 8.0 / 1e6,
            loss_pct,
            mode: mode(tx.mode).map(str::to_owned),
            cwnd: tx.cwnd,
            sent: tx.sent,
            retransmitted: tx.retransmitted,
            delivered: tx.meter.received,
            lost,
            reorder: tx.reorder,
            timeouts: tx.timeouts,
            unacknowledged: tx.next.saturating_sub(tx.una),
            received: rx.received,
            duplicates: rx.dups,
            bad_checksum: rx.bad_csum,
            beyond_window: rx.beyond,
        })
    }
}

/// Name of congestion control's mode (`enum vtl_control_mode`). `None` if the graft has not told it.
fn mode(mode: u32) -> Option<&'static str> {
    match mode {
        intf::VTL_MODE_STARTUP => Some("startup"),
        intf::VTL_MODE_DRAIN => Some("drain"),
        intf::VTL_MODE_PROBE_BW => Some("probe-bw"),
        intf::VTL_MODE_PROBE_RTT => Some("probe-rtt"),
        _ => None,
    }
}
