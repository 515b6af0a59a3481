//! Random numbers that follow from a seed.

/// SplitMix64 (Steele, Lea and Flood, 2014): a sequence that follows from its seed on every
/// machine.
#[derive(Clone, Debug)]
pub(super) struct SplitMix(u64);

impl SplitMix {
    /// Starts the sequence of a seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Returns the next number.
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns a number below a limit, and 0 below 0.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit.max(1)
    }

    /// Takes one of some values.
    pub fn take<T>(&mut self, values: &mut Vec<T>) -> Option<T> {
        let at = usize::try_from(self.below(values.len() as u64)).ok()?;
        (at < values.len()).then(|| values.swap_remove(at))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sequence_is_that_of_the_published_algorithm() {
        let mut random = SplitMix::new(1_234_567);
        assert_eq!(random.next(), 6_457_827_717_110_365_317);
        assert_eq!(random.next(), 3_203_168_211_198_807_973);
        assert_eq!(SplitMix::new(0).next(), 0xe220_a839_7b1d_cdaf);
    }

    #[test]
    fn values_are_taken_once_each_until_none_is_left() {
        let mut random = SplitMix::new(7);
        let mut values = vec![1, 2, 3];
        let taken: Vec<_> = (0..4).map(|_| random.take(&mut values)).collect();
        let mut some: Vec<_> = taken[..3].iter().copied().flatten().collect();
        some.sort_unstable();
        assert_eq!((some, taken[3]), (vec![1, 2, 3], None));
        assert_eq!(random.below(0), 0);
    }
}
