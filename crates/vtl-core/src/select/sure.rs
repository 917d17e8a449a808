//! Where a graft is surely better than TCP under BBR, whatever is sent: what [`Selector`](super::Selector) says is true of
//! most of the training's cases alike, and so not of each.

use super::{Features, packets};
use crate::profile::Profile;

/// Packets that fit onto the path, from which on a graft has slow start to save. Of the campaign's
/// transfers of 64 KiB to 16 MiB, it took more than 3 % longer than TCP for 1 % where as many fit, and for 43 % where fewer
/// do.
const ENOUGH: f64 = 80.0;
/// The same on a path that loses so many per cent that TCP waits for timeouts.
const ENOUGH_LOSSY: f64 = 40.0;
const LOSSY: f64 = 4.0;
/// Round trip from which on that many fit onto all but slow paths, where nobody knows the rate, ms.
const LONG: f64 = 95.0;

/// Loss from which on a stream goes better by a graft, per cent. Streams do not wait for slow start: of the campaign's links
/// that lose as much, more of them came in time by the graft on 48 % (by more than 3 %), and less on 2 %, be the path long or
/// short; of those that lose less, on 16 % and none.
const STREAM_LOSSY: f64 = 1.0;

/// Whether a graft is surely better. `at_least_mbit`: a lower bound of the rate, where that is unknown, Mbit/s.
pub fn is_sure(features: &Features, at_least_mbit: Option<f64>) -> bool {
    let (Some(rtt_ms), Some(loss)) = (features.rtt_ms, features.loss_percent) else {
        return false;
    };
    if features.profile == Some(Profile::TimeSensitive) && loss >= STREAM_LOSSY {
        return true;
    }
    let enough = if loss >= LOSSY { ENOUGH_LOSSY } else { ENOUGH };
    let is_enough = |mbit: f64| packets(rtt_ms, mbit) >= enough;
    match features.rate_mbit {
        Some(rate) => is_enough(rate),
        None => rtt_ms >= LONG || at_least_mbit.is_some_and(is_enough),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_sure__where_slow_start_takes_long() {
        let sure = |rtt: f64, rate: Option<f64>, loss: f64, at_least: Option<f64>| {
            let features = Features {
                rtt_ms: Some(rtt),
                rate_mbit: rate,
                loss_percent: Some(loss),
                ..Features::default()
            };
            is_sure(&features, at_least)
        };
        // The named profiles.
        assert!(sure(600.0, Some(4.0), 0.0, None));
        assert!(sure(100.0, Some(100.0), 0.0, None));
        assert!(sure(50.0, Some(850.0), 2.0, None));
        assert!(!sure(10.0, Some(16.0), 5.0, None));
        assert!(!sure(40.0, Some(20.0), 2.0, None));
        assert!(sure(40.0, Some(20.0), 5.0, None));
        // Where the rate is unknown.
        assert!(sure(100.0, None, 0.0, None));
        assert!(!sure(50.0, None, 0.0, Some(10.0)));
        assert!(sure(50.0, None, 0.0, Some(30.0)));
        // A rate that is known counts.
        assert!(!sure(100.0, Some(1.0), 0.0, Some(30.0)));
        assert!(!is_sure(&Features::default(), Some(1000.0)));
    }

    #[test]
    fn is_sure__of_streams_where_packets_get_lost() {
        let sure = |profile: Profile, loss: f64| {
            let features = Features {
                rtt_ms: Some(40.0),
                rate_mbit: Some(4.0),
                loss_percent: Some(loss),
                profile: Some(profile),
                ..Features::default()
            };
            is_sure(&features, None)
        };
        assert!(sure(Profile::TimeSensitive, 1.0));
        assert!(!sure(Profile::TimeSensitive, 0.9));
        assert!(!sure(Profile::LossSensitive, 1.0));
    }
}
