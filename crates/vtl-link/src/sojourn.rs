//! Sojourn times of packets at the bottleneck.

use crate::model::Nanos;

/// Bins per octave: relative precision of 1/16.
const STEPS: u32 = 16;
/// Octaves of a 64-bit number.
const OCTAVES: u32 = 64;

/// A histogram with logarithmic bins.
#[derive(Debug, Clone)]
pub(crate) struct Sojourn {
    bins: Vec<u64>,
    count: u64,
}

impl Default for Sojourn {
    fn default() -> Self {
        Sojourn {
            bins: vec![0; (STEPS * OCTAVES) as usize],
            count: 0,
        }
    }
}

impl Sojourn {
    /// Counts a packet.
    pub(crate) fn record(&mut self, time: Nanos) {
        self.bins[bin(time)] += 1;
        self.count += 1;
    }

    /// Quantile of the times, for a share from 0 to 1, to the precision of a bin; 0 without
    /// packets.
    pub(crate) fn quantile(&self, share: f64) -> Nanos {
        let rank = (self.count as f64 * share).ceil().max(1.0) as u64;
        let mut seen = 0;
        for (index, count) in self.bins.iter().enumerate() {
            seen += count;
            if seen >= rank {
                return lower_bound(index as u32);
            }
        }
        0
    }
}

fn bin(time: Nanos) -> usize {
    if time < Nanos::from(STEPS) {
        return time as usize;
    }
    let octave = time.ilog2();
    let step = (time >> (octave - STEPS.ilog2())) as u32 & (STEPS - 1);
    ((octave - STEPS.ilog2() + 1) * STEPS + step) as usize
}

fn lower_bound(bin: u32) -> Nanos {
    let (octave, step) = (bin / STEPS, Nanos::from(bin % STEPS));
    match octave {
        0 => step,
        _ => (Nanos::from(STEPS) + step) << (octave - 1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantile__within_a_sixteenth() {
        let mut sojourn = Sojourn::default();
        assert_eq!(sojourn.quantile(0.5), 0);
        for time in 1..=1_000_000 {
            sojourn.record(time);
        }
        for share in [0.01, 0.5, 0.95, 1.0] {
            let (is, wanted) = (sojourn.quantile(share) as f64, share * 1e6);
            assert!(
                is <= wanted && is > wanted * 15.0 / 16.0,
                "{is} of {wanted}"
            );
        }
    }

    #[test]
    fn bins__cover_every_time() {
        for time in [0, 1, 15, 16, 17, 1_000, u64::MAX / 2, u64::MAX] {
            let index = bin(time);
            assert!(index < (STEPS * OCTAVES) as usize);
            assert!(lower_bound(index as u32) <= time);
        }
    }
}
