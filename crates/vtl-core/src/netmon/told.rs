//! What hosts tell each other of a path: the frame FIGURES (PROTOCOL.md, section 7).

use std::time::Duration;

use vtl_proto::frame::Figures;

use super::{Bandwidth, Metrics};

/// Maximum round-trip time that a peer is believed.
const MAX_RTT: Duration = Duration::from_secs(60);
/// Maximum rate, bit/s.
const MAX_RATE: u64 = 10_000_000_000_000;
/// Maximum mean burst, packets.
const MAX_BURST: f64 = 4096.0;

/// What to tell a peer of the direction in which this host sends.
pub fn figures(metrics: &Metrics) -> Figures {
    let micros = |time: Duration| u32::try_from(time.as_micros()).unwrap_or(0);
    // Truncated by `as` at its limits: shares, and bursts of at most a group's packets.
    let scaled = |x: f64, by: f64| (x * by).round() as u32;
    Figures {
        rate: metrics.bandwidth.map_or(0, |bandwidth| bandwidth.rate),
        at_least: metrics.bandwidth.is_some_and(|b| b.at_least),
        min_rtt_us: metrics.min_rtt.map_or(0, micros),
        loss_ppm: (metrics.clear_loss.or(metrics.loss)).map(|loss| scaled(loss, 1e6)),
        burst_milli: metrics.loss_burst.map_or(0, |burst| scaled(burst, 1e3)),
        packets: u32::try_from(metrics.packets).unwrap_or(u32::MAX),
    }
}

/// The state of the path in the direction in which a peer sends, by what it tells. What no path has is unknown.
pub fn told(figures: &Figures) -> Metrics {
    let rtt = Duration::from_micros(figures.min_rtt_us.into());
    let is_rtt = !rtt.is_zero() && rtt <= MAX_RTT;
    let loss = figures.loss_ppm.map(|loss| f64::from(loss) / 1e6);
    let loss = loss.filter(|loss| *loss <= 1.0);
    let burst = f64::from(figures.burst_milli) / 1e3;
    let is_rate = (1..=MAX_RATE).contains(&figures.rate);
    Metrics {
        min_rtt: is_rtt.then_some(rtt),
        loss,
        clear_loss: loss,
        loss_burst: (1.0..=MAX_BURST).contains(&burst).then_some(burst),
        bandwidth: is_rate.then_some(Bandwidth {
            rate: figures.rate,
            at_least: figures.at_least,
            error: 0.0,
        }),
        packets: figures.packets.into(),
        ..Metrics::default()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::select::Features;

    #[test]
    fn told__is_what_was_known() {
        let metrics = Metrics {
            min_rtt: Some(Duration::from_millis(600)),
            rtt: Some(Duration::from_millis(700)),
            loss: Some(0.1),
            clear_loss: Some(0.02),
            loss_burst: Some(1.5),
            bandwidth: Some(Bandwidth {
                rate: 10_000_000,
                at_least: false,
                error: 0.1,
            }),
            packets: 5000,
            ..Metrics::default()
        };
        let features = |metrics: &Metrics| Features::new(metrics, None);
        assert_eq!(features(&told(&figures(&metrics))), features(&metrics));
        assert_eq!(told(&figures(&metrics)).packets, 5000);
        let unknown = Metrics::default();
        assert_eq!(told(&figures(&unknown)), unknown);
    }

    #[test]
    fn told__what_no_path_has_is_unknown() {
        let hostile = Figures {
            rate: u64::MAX,
            at_least: true,
            min_rtt_us: u32::MAX,
            loss_ppm: Some(u32::MAX),
            burst_milli: 999,
            packets: u32::MAX,
        };
        let metrics = Metrics {
            packets: u32::MAX.into(),
            ..Metrics::default()
        };
        assert_eq!(told(&hostile), metrics);
    }

    proptest! {
        #[test]
        fn told__is_always_a_path(
            rate in any::<u64>(), min_rtt_us in any::<u32>(), burst_milli in any::<u32>(),
            loss_ppm in prop::option::of(any::<u32>()), at_least in any::<bool>(), packets in any::<u32>(),
        ) {
            let told = told(&Figures { rate, at_least, min_rtt_us, loss_ppm, burst_milli, packets });
            prop_assert!(told.loss.is_none_or(|loss| (0.0..=1.0).contains(&loss)));
            prop_assert!(told.loss_burst.is_none_or(|burst| (1.0..=MAX_BURST).contains(&burst)));
            prop_assert!(told.min_rtt.is_none_or(|rtt| !rtt.is_zero() && rtt <= MAX_RTT));
            prop_assert!(told.bandwidth.is_none_or(|bandwidth| bandwidth.rate <= MAX_RATE));
        }
    }
}
