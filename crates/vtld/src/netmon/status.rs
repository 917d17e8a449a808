//! The state of paths as commands show it.

use std::{
    net::IpAddr,
    time::{Duration, Instant},
};

use vtl_bpf::netdev;
use vtl_control::{LinkStatus, PathList, PathReport, PathStatus};
use vtl_core::netmon::{Metrics, best};

use super::{Evidence, NetMonitor, Source, exporter::Row, link_layer};
use crate::scope;

/// Maximum number of paths in one message.
const PAGE: usize = 100;

impl NetMonitor {
    /// A page of paths, sorted by address, from one on.
    pub(crate) fn list(&self, from: Option<IpAddr>) -> PathList {
        let mut peers = self.peers();
        peers.retain(|peer| from.is_none_or(|from| *peer >= from));
        let more = peers.get(PAGE).copied();
        peers.truncate(PAGE);
        let path = |peer: IpAddr| Some(self.report(peer).ok()?.path);
        PathList {
            paths: peers.into_iter().filter_map(path).collect(),
            more,
        }
    }

    /// All hosts, sorted. What is told of each is asked for by itself, as readings wait meanwhile.
    fn peers(&self) -> Vec<IpAddr> {
        let mut peers: Vec<IpAddr> = self.hosts().known.keys().copied().collect();
        peers.sort_unstable();
        peers
    }

    /// All that was told, sorted by address.
    pub(super) fn told(&self) -> Vec<Row> {
        let now = Instant::now();
        let mut rows = Vec::new();
        for peer in self.peers() {
            let hosts = self.hosts();
            let told = hosts.known.get(&peer).into_iter().flatten();
            rows.extend(told.filter(|told| told.is_kept(now)).map(|told| {
                let (age, metrics) = told.aged(now);
                (peer, told.evidence, age, metrics)
            }));
        }
        rows
    }

    /// The path to a host.
    ///
    /// # Errors
    /// Nothing is known of it.
    pub(crate) fn report(&self, peer: IpAddr) -> Result<PathReport, String> {
        let peer = peer.to_canonical();
        let hosts = self.hosts();
        let report = hosts
            .known
            .get(&peer)
            .and_then(|told| report(peer, told, Instant::now()));
        report.ok_or_else(|| {
            format!("nothing is known of the path to {peer}: no connection there was carried in the last ten minutes (vtl path list)")
        })
    }

    /// The same, with the link layer of this host's interface. May take as long as somebody changes interfaces.
    ///
    /// # Errors
    /// As [`NetMonitor::report`].
    pub(crate) fn report_with_link(&self, peer: IpAddr) -> Result<PathReport, String> {
        let mut report = self.report(peer)?;
        report.link = scope::exit(peer, None, 0).ok().and_then(link);
        Ok(report)
    }
}

fn report(peer: IpAddr, told: &[Source], now: Instant) -> Option<PathReport> {
    let told: Vec<_> = told.iter().filter(|told| told.is_kept(now)).collect();
    let aged: Vec<_> = told.iter().map(|told| told.aged(now)).collect();
    let (main, metrics) = best(&aged)?;
    let rows = told.iter().zip(&aged);
    Some(PathReport {
        path: row(peer, told[main].evidence, aged[main].0, &metrics),
        told: rows
            .map(|(told, (age, metrics))| row(peer, told.evidence, *age, metrics))
            .collect(),
        link: None,
    })
}

fn link(index: u32) -> Option<LinkStatus> {
    let link = link_layer::read(index);
    Some(LinkStatus {
        interface: netdev::name_of(index)?,
        medium: link.medium.map(|medium| medium.to_string()),
        rate_mbit: link.rate.map(|rate| rate as f64 / 1e6),
        signal_pct: link.signal.map(|signal| rounded(signal * 100.0, 1)),
    })
}

/// Rounds to this number of decimals.
fn rounded(value: f64, decimals: i32) -> f64 {
    let unit = 10_f64.powi(decimals);
    (value * unit).round() / unit
}

fn row(peer: IpAddr, evidence: Evidence, age: Duration, metrics: &Metrics) -> PathStatus {
    let ms = |time: Option<Duration>| Some(rounded(time?.as_secs_f64() * 1e3, 3));
    let percent = |share: Option<f64>| Some(rounded(share? * 100.0, 3));
    let mbit = |rate: u64| rounded(rate as f64 / 1e6, 3);
    let bandwidth = metrics.bandwidth;
    PathStatus {
        peer,
        evidence: evidence.to_string(),
        age_s: rounded(age.as_secs_f64(), 1),
        class: metrics.class().map(|class| class.to_string()),
        looks_wireless: metrics.looks_wireless(),
        min_rtt_ms: ms(metrics.min_rtt),
        rtt_ms: ms(metrics.rtt),
        rtt_variance_ms: ms(metrics.rtt_variance),
        packets: metrics.packets,
        loss_pct: percent(metrics.loss),
        clear_loss_pct: percent(metrics.clear_loss),
        loss_burst: metrics.loss_burst.map(|burst| rounded(burst, 2)),
        reordering_pct: percent(metrics.reordering),
        delivery_mbit: metrics.delivery_rate.map(mbit),
        bandwidth_mbit: bandwidth.map(|bandwidth| mbit(bandwidth.rate)),
        bandwidth_at_least: bandwidth.map(|bandwidth| bandwidth.at_least),
        bandwidth_error_pct: percent(bandwidth.map(|bandwidth| bandwidth.error)),
    }
}
