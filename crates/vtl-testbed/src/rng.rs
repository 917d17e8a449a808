//! Random numbers whose sequence depends on the seed alone, on every platform and in every release.

/// SplitMix64 (Steele, Lea and Flood, 2014): one 64-bit word of state, equidistributed, ample for choosing
/// which packets to lose.
#[derive(Debug, Clone)]
pub(crate) struct Rng(u64);

impl Rng {
    /// A generator for one purpose. Two purposes with one seed get unrelated sequences, so that switching
    /// duplication on does not change which packets are lost.
    pub(crate) fn new(seed: u64, purpose: u64) -> Self {
        let mut mixer = Rng(seed ^ purpose.wrapping_mul(0xd1b5_4a32_d192_ed03));
        Rng(mixer.next_u64())
    }

    pub(crate) fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in [0, 1).
    pub(crate) fn unit(&mut self) -> f64 {
        // 53 bits: every value is exactly representable.
        (self.next_u64() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// True with probability `p`. Draws nothing when `p` is 0.
    pub(crate) fn chance(&mut self, p: f64) -> bool {
        p > 0.0 && self.unit() < p
    }
}

#[cfg(test)]
mod tests {
    use super::Rng;

    #[test]
    fn same_seed__same_sequence() {
        let mut a = Rng::new(7, 1);
        let mut b = Rng::new(7, 1);
        assert!((0..100).all(|_| a.next_u64() == b.next_u64()));
    }

    #[test]
    fn purposes__are_unrelated() {
        let mut a = Rng::new(7, 1);
        let mut b = Rng::new(7, 2);
        assert!((0..100).all(|_| a.next_u64() != b.next_u64()));
    }

    #[test]
    fn unit__has_mean_one_half() {
        let mut rng = Rng::new(1, 0);
        let mean = (0..100_000).map(|_| rng.unit()).sum::<f64>() / 100_000.0;
        assert!((mean - 0.5).abs() < 0.005, "{mean}");
    }
}
