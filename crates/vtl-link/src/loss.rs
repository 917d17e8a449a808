//! Loss processes.

use crate::link::LossModel;
use crate::random::Random;

/// A sequence of decisions, one per packet: lost or not.
#[derive(Debug, Clone)]
pub(crate) struct LossProcess {
    model: LossModel,
    /// Mean loss rate, 0 to 1.
    mean: f64,
    in_burst: bool,
    random: Random,
}

impl LossProcess {
    /// A process with the long-term loss rate `mean` (0 to 1).
    pub(crate) fn new(model: LossModel, mean: f64, seed: u64) -> Self {
        LossProcess {
            model,
            mean,
            in_burst: false,
            random: Random::new(seed, 1),
        }
    }

    /// Changes the model, and continues the random sequence.
    pub(crate) fn set(&mut self, model: LossModel, mean: f64) {
        self.model = model;
        self.mean = mean;
    }

    /// Whether the next packet is lost.
    pub(crate) fn lose_next(&mut self) -> bool {
        if self.mean <= 0.0 {
            self.in_burst = false;
            return false;
        }
        match self.model {
            LossModel::Uniform => self.random.chance(self.mean),
            LossModel::GilbertElliott {
                burst_packets,
                bad_loss_pct,
            } => {
                let loss_in_bad = bad_loss_pct / 100.0;
                // The share `bad` of packets in the bad state satisfies bad × loss_in_bad = mean;
                // the mean duration of that state is `burst_packets`.
                let bad = (self.mean / loss_in_bad).min(1.0);
                let leave = 1.0 / burst_packets.max(1.0);
                let enter = if bad < 1.0 {
                    (leave * bad / (1.0 - bad)).min(1.0)
                } else {
                    1.0
                };
                let turn = if self.in_burst { leave } else { enter };
                if self.random.chance(turn) {
                    self.in_burst = bad >= 1.0 || !self.in_burst;
                }
                self.in_burst && self.random.chance(loss_in_bad)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn verdicts(model: LossModel, mean: f64, seed: u64, n: usize) -> Vec<bool> {
        let mut process = LossProcess::new(model, mean, seed);
        (0..n).map(|_| process.lose_next()).collect()
    }

    fn bursts(verdicts: &[bool]) -> Vec<usize> {
        verdicts
            .split(|lost| !lost)
            .map(<[bool]>::len)
            .filter(|&n| n > 0)
            .collect()
    }

    const GE: LossModel = LossModel::GilbertElliott {
        burst_packets: 8.0,
        bad_loss_pct: 100.0,
    };

    #[test]
    fn uniform__mean_within_three_standard_errors() {
        for p in [0.001, 0.01, 0.02, 0.05, 0.5] {
            let n = 200_000;
            let lost = verdicts(LossModel::Uniform, p, 3, n)
                .iter()
                .filter(|&&l| l)
                .count();
            let error = (p * (1.0 - p) / n as f64).sqrt();
            let got = lost as f64 / n as f64;
            assert!((got - p).abs() < 3.0 * error, "{got} for {p}");
        }
    }

    #[test]
    fn gilbert_elliott__same_mean_in_bursts() {
        let n = 2_000_000;
        for p in [0.01, 0.05] {
            let v = verdicts(GE, p, 5, n);
            let got = v.iter().filter(|&&l| l).count() as f64 / n as f64;
            assert!((got / p - 1.0).abs() < 0.05, "{got} for {p}");
            let b = bursts(&v);
            let mean_burst = b.iter().sum::<usize>() as f64 / b.len() as f64;
            assert!((7.5..8.7).contains(&mean_burst), "{mean_burst}");
        }
    }

    #[test]
    fn gilbert_elliott__partial_loss_in_bad_state_keeps_the_mean() {
        let model = LossModel::GilbertElliott {
            burst_packets: 20.0,
            bad_loss_pct: 50.0,
        };
        let n = 2_000_000;
        let got = verdicts(model, 0.02, 5, n).iter().filter(|&&l| l).count() as f64 / n as f64;
        assert!((got / 0.02 - 1.0).abs() < 0.05, "{got}");
    }

    #[test]
    fn extremes__nothing_and_everything() {
        for model in [LossModel::Uniform, GE] {
            assert!(verdicts(model, 0.0, 1, 10_000).iter().all(|l| !l));
            assert!(
                verdicts(model, 1.0, 1, 10_000).iter().all(|l| *l),
                "{model:?}"
            );
        }
    }

    #[test]
    fn seed__repeats_exactly() {
        assert_eq!(verdicts(GE, 0.05, 9, 50_000), verdicts(GE, 0.05, 9, 50_000));
        assert_ne!(
            verdicts(GE, 0.05, 9, 50_000),
            verdicts(GE, 0.05, 10, 50_000)
        );
    }
}
