//! Random numbers: sequences that depend on the seed only, on every platform and in every release.

/// SplitMix64 (Steele, Lea and Flood, 2014) with this state: one 64-bit word, equidistributed,
/// sufficient for choosing lost packets. Committed tables and regression seeds depend on its
/// sequence.
#[derive(Clone, Debug)]
pub struct Random(pub u64);

impl Random {
    /// A generator for one purpose. Purposes have independent sequences under the same seed:
    /// enabling duplication does not change the lost packets.
    pub fn new(seed: u64, purpose: u64) -> Self {
        let mut mixer = Self(seed ^ purpose.wrapping_mul(0xd1b5_4a32_d192_ed03));
        Self(mixer.bits())
    }

    /// The next 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform below `n`, which must not be 0. The bias is below `n` / 2^64.
    pub fn below(&mut self, n: u64) -> u64 {
        self.bits() % n
    }

    /// True with probability 1 / `n`; `n` must not be 0.
    pub fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    /// True with a probability of `p` per cent.
    pub fn percent(&mut self, p: u64) -> bool {
        self.below(100) < p
    }

    /// One of the values; there must be one.
    pub fn pick<T: Copy>(&mut self, values: &[T]) -> T {
        values[self.below(values.len() as u64) as usize]
    }

    /// Uniform in [0, 1).
    pub fn unit(&mut self) -> f64 {
        // 53 bits: every value is exactly representable.
        (self.bits() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// True with probability `p`. Draws nothing when `p` is 0.
    pub fn chance(&mut self, p: f64) -> bool {
        p > 0.0 && self.unit() < p
    }
}

#[cfg(test)]
mod tests {
    use super::Random;

    /// The reference values of the authors' C code (prng.di.unimi.it/splitmix64.c).
    #[test]
    fn bits__are_those_of_split_mix_64() {
        let first = |seed| {
            let mut random = Random(seed);
            [random.bits(), random.bits(), random.bits()]
        };
        assert_eq!(
            first(1_234_567),
            [
                6_457_827_717_110_365_317,
                3_203_168_211_198_807_973,
                9_817_491_932_198_370_423
            ]
        );
        assert_eq!(
            first(0),
            [
                0xe220_a839_7b1d_cdaf,
                0x6e78_9e6a_a1b9_65f4,
                0x06c4_5d18_8009_454f
            ]
        );
    }

    #[test]
    fn purposes__are_unrelated() {
        let mut a = Random::new(7, 1);
        let mut b = Random::new(7, 2);
        assert!((0..100).all(|_| a.bits() != b.bits()));
    }

    #[test]
    fn unit__has_mean_one_half() {
        let mut random = Random::new(1, 0);
        let mean = (0..100_000).map(|_| random.unit()).sum::<f64>() / 100_000.0;
        assert!((mean - 0.5).abs() < 0.005, "{mean}");
    }
}
