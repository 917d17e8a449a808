//! Bounds that applications state for their sessions (`max_delay`, `min_throughput`): against what is known of the path when
//! a session is opened, and against what it gets.

use std::{net::IpAddr, time::Duration};

use vtl_control::{BoundEvent, What};
use vtl_core::{
    netmon::{Bound as Limit, Counters, Metrics},
    reconfigure::{BoundWatch, Bounds, Change, Outcome},
    select::Features,
};
use vtl_proto::services::{GraftInfo, Qos};

/// Age of what counts as known of a path.
pub(super) const KNOWN: Duration = Duration::from_secs(300);
/// Interval of rates, ns.
const RATE_NS: u64 = 1_000_000_000;
/// Grafts whose rate a path's losses bound, at most as CUBIC's.
const LOSS_BOUND: [&str; 3] = ["cubic", "dccp-ccid2", "dccp-ccid3"];

/// The bounds among the requirements of a session.
pub(super) fn of(qos: &Qos) -> Bounds {
    let delay = |ms: u32| Duration::from_millis(ms.into());
    // Saturating: what no path has.
    let rate = |mbit: f64| (mbit * 1e6) as u64;
    Bounds {
        max_delay: qos.max_delay_ms.map(delay),
        min_throughput: qos.min_throughput_mbit.map(rate),
    }
}

/// Refuses a session whose bounds the path cannot keep, and puts grafts behind the others that cannot over it.
///
/// # Errors
/// One sentence: half of the path's shortest round trip is longer than the maximum delay.
pub(super) fn choose(
    bounds: &Bounds,
    peer: IpAddr,
    path: &Metrics,
    grafts: &mut [GraftInfo],
) -> Result<(), String> {
    if let (Some(max), Some(rtt)) = (bounds.max_delay, path.min_rtt)
        && rtt / 2 > max
    {
        return Err(format!(
            "the path to {peer} takes {} ms one way, and max_delay is {}: no graft can keep that",
            (rtt / 2).as_millis(),
            max.as_millis(),
        ));
    }
    let features = Features::new(path, None);
    if bounds.broken_by("graft:cubic", &features).is_some() {
        // Stable: the order of preferences stays.
        grafts.sort_by_key(|graft| LOSS_BOUND.contains(&graft.name.as_str()));
    }
    Ok(())
}

/// Watches the bounds of one session.
#[derive(Debug)]
pub(super) struct SessionBounds {
    watch: BoundWatch,
    /// When the last rate was taken, ns, and bytes that had been delivered by then.
    since: Option<(u64, u64)>,
    /// The application had nothing to send since.
    is_idle: bool,
    rate: Option<u64>,
}

impl SessionBounds {
    /// `None`: there are none.
    pub(super) fn new(bounds: Bounds) -> Option<Self> {
        (!bounds.is_none()).then(|| Self {
            watch: BoundWatch::new(bounds),
            since: None,
            is_idle: false,
            rate: None,
        })
    }

    /// Takes a reading, several a second. Returns the events that follow. `graft`: what the session goes by.
    pub(super) fn read(
        &mut self,
        now_ns: u64,
        counters: &Counters,
        (peer, sid): (IpAddr, u32),
        graft: &str,
    ) -> Vec<What> {
        self.note_rate(now_ns, counters);
        // 0 is unknown.
        let known = |rtt: Option<Duration>| rtt.filter(|rtt| !rtt.is_zero());
        let path = Metrics {
            rtt: known(counters.rtt),
            min_rtt: known(counters.min_rtt),
            ..Metrics::default()
        };
        let outcome = Outcome {
            throughput: self.rate,
            ..Outcome::of(&path)
        };
        let changes = self.watch.take(now_ns, &outcome);
        let event = |change: Change| {
            let event = BoundEvent {
                peer,
                association: None,
                sid: Some(sid),
                carrier: format!("graft:{graft}").into(),
                bound: change.bound.name().into(),
                why: self.watch.figures(change.bound, &outcome).into(),
            };
            match change.is_missed {
                true => What::BoundMissed(event),
                false => What::BoundKept(event),
            }
        };
        changes.into_iter().flatten().map(event).collect()
    }

    /// Measures the rate of delivery while the application has more to send.
    fn note_rate(&mut self, now_ns: u64, counters: &Counters) {
        let Some(delivered) = counters.delivered else {
            return;
        };
        self.is_idle |= counters.bound == Limit::Application;
        let (since_ns, before) = *self.since.get_or_insert((now_ns, delivered));
        let took_ns = now_ns.saturating_sub(since_ns);
        if took_ns < RATE_NS {
            return;
        }
        let bits = u128::from(delivered.saturating_sub(before)) * 8 * 1_000_000_000;
        let rate = u64::try_from(bits / u128::from(took_ns)).unwrap_or(u64::MAX);
        self.rate = (!self.is_idle).then_some(rate);
        self.since = Some((now_ns, delivered));
        self.is_idle = false;
    }
}

#[cfg(test)]
mod tests {
    use vtl_proto::services::Services;

    use super::*;

    const MS: u64 = 1_000_000;

    fn graft(name: &str) -> GraftInfo {
        GraftInfo {
            name: name.to_owned(),
            gid: 1,
            provides: Services::NONE,
            params: Vec::new(),
        }
    }

    fn peer() -> IpAddr {
        "192.0.2.7".parse().expect("an address")
    }

    fn path(rtt_ms: u64, loss: f64) -> Metrics {
        Metrics {
            min_rtt: Some(Duration::from_millis(rtt_ms)),
            loss: Some(loss),
            ..Metrics::default()
        }
    }

    fn bounds(max_delay_ms: Option<u32>, min_throughput_mbit: Option<f64>) -> Bounds {
        of(&Qos {
            max_delay_ms,
            min_throughput_mbit,
            max_loss_pct: None,
        })
    }

    #[test]
    fn choose__refuses_what_the_path_cannot_keep() {
        let choose = |bounds, path: Metrics| choose(&bounds, peer(), &path, &mut []);
        let error = choose(bounds(Some(100), None), path(600, 0.0)).expect_err("refused");
        let wanted = "the path to 192.0.2.7 takes 300 ms one way, and max_delay is 100: no graft can keep that";
        assert_eq!(error, wanted);
        assert!(choose(bounds(Some(300), None), path(600, 0.0)).is_ok());
        // What is not known refuses nothing.
        assert!(choose(bounds(Some(1), None), Metrics::default()).is_ok());
        assert!(choose(bounds(None, Some(9.0)), path(600, 0.5)).is_ok());
    }

    #[test]
    fn choose__puts_what_losses_bound_behind_the_others() {
        let order = |bounds, path: Metrics| {
            let mut grafts = ["cubic", "stream", "dccp-ccid3", "selective-repeat"].map(graft);
            choose(&bounds, peer(), &path, &mut grafts).expect("no refusal");
            grafts.map(|graft| graft.name)
        };
        let as_it_was = ["cubic", "stream", "dccp-ccid3", "selective-repeat"];
        let behind = ["stream", "selective-repeat", "cubic", "dccp-ccid3"];
        assert_eq!(order(bounds(None, Some(5.0)), path(100, 0.01)), behind);
        assert_eq!(order(bounds(None, Some(0.5)), path(100, 0.01)), as_it_was);
        assert_eq!(order(bounds(Some(999), None), path(100, 0.01)), as_it_was);
        assert_eq!(order(bounds(None, Some(5.0)), path(100, 0.0)), as_it_was);
    }

    /// Readings each 100 ms; the names of the events.
    fn run(watch: &mut SessionBounds, from_ms: u64, readings: &[Counters]) -> Vec<(u64, String)> {
        let mut told = Vec::new();
        for (at, counters) in (from_ms..).step_by(100).zip(readings) {
            for what in watch.read(at * MS, counters, (peer(), 3), "stream") {
                told.push((at, what.name().to_owned()));
            }
        }
        told
    }

    fn counters(rtt_ms: u64, delivered: u64, bound: Limit) -> Counters {
        Counters {
            rtt: Some(Duration::from_millis(rtt_ms)),
            min_rtt: Some(Duration::from_millis(20)),
            rtt_variance: None,
            sent: 0,
            lost: 0,
            delivered: Some(delivered),
            bound,
            reordering: None,
        }
    }

    #[test]
    fn read__tells_a_delay_that_is_missed_and_kept() {
        let mut watch = SessionBounds::new(bounds(Some(100), None)).expect("bounds");
        let slow = vec![counters(400, 0, Limit::Path); 60];
        let told = run(&mut watch, 0, &slow);
        assert_eq!(told, [(3000, "bound_missed".to_owned())]);
        let quick = vec![counters(20, 0, Limit::Path); 60];
        let told = run(&mut watch, 6000, &quick);
        assert_eq!(told, [(9000, "bound_kept".to_owned())]);
        assert!(SessionBounds::new(Bounds::default()).is_none());
    }

    #[test]
    fn read__a_rate_counts_while_the_application_has_more_to_send() {
        // 1 Mbit/s.
        let slow = |bound| -> Vec<_> { (0..80).map(|i| counters(20, i * 12_500, bound)).collect() };
        for (bound, is_told) in [
            (Limit::Path, true),
            (Limit::Window, true),
            (Limit::Application, false),
        ] {
            let mut watch = SessionBounds::new(bounds(None, Some(2.0))).expect("bounds");
            assert_eq!(run(&mut watch, 0, &slow(bound)).is_empty(), !is_told);
        }
        let mut watch = SessionBounds::new(bounds(None, Some(0.8))).expect("bounds");
        assert!(run(&mut watch, 0, &slow(Limit::Path)).is_empty());
    }
}
