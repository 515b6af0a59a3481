//! Contents of pages: every word depends on seed, page, generation and position.

use crate::memory::PAGE_WORDS;

/// An odd number with well-spread bits: 2^64 divided by the golden ratio.
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// Contents of one page in one generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Contents(u64);

impl Contents {
    /// Returns the contents of `page` in `generation` under `seed`.
    pub fn new(seed: u64, page: usize, generation: u32) -> Self {
        Self(mix(mix(seed ^ page as u64) ^ u64::from(generation)))
    }

    /// Returns the word at this index.
    #[inline]
    pub fn word(self, index: usize) -> u64 {
        self.0 ^ (index as u64).wrapping_mul(GOLDEN)
    }

    /// Writes the page.
    pub fn fill(self, words: &mut [u64]) {
        for (index, word) in words.iter_mut().enumerate() {
            *word = self.word(index);
        }
    }

    /// Returns whether the words from `first` to the end of the page are as written.
    pub fn matches(self, words: &[u64], first: usize) -> bool {
        let mut difference = 0;
        for (index, word) in words.iter().enumerate().skip(first) {
            difference |= word ^ self.word(index);
        }
        words.len() == PAGE_WORDS && difference == 0
    }
}

/// A byte that differs from what was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mismatch {
    /// Its offset in the page.
    pub offset: usize,
    /// The byte that was written.
    pub expected: u8,
    /// The byte that was read.
    pub found: u8,
}

/// Returns the bytes in which a pair of words differs, with their offset in the page.
pub fn mismatches(index: usize, expected: u64, found: u64) -> impl Iterator<Item = Mismatch> {
    expected
        .to_le_bytes()
        .into_iter()
        .zip(found.to_le_bytes())
        .enumerate()
        .filter_map(move |(byte, (expected, found))| {
            (expected != found).then_some(Mismatch {
                offset: index * 8 + byte,
                expected,
                found,
            })
        })
}

/// Mixes a value, so that every bit of the result depends on every bit of the input (splitmix64;
/// Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014).
pub fn mix(value: u64) -> u64 {
    let mut z = value.wrapping_add(GOLDEN);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_single_flipped_bit_anywhere_is_noticed() {
        let contents = Contents::new(1, 2, 3);
        let mut words = vec![0; PAGE_WORDS];
        contents.fill(&mut words);
        assert!(contents.matches(&words, 0));
        for bit in (0..PAGE_WORDS * 64).step_by(61) {
            words[bit / 64] ^= 1 << (bit % 64);
            assert!(!contents.matches(&words, 0), "bit {bit}");
            words[bit / 64] ^= 1 << (bit % 64);
        }
    }

    #[test]
    fn another_page_seed_or_generation_never_looks_the_same() {
        let mut words = vec![0; PAGE_WORDS];
        Contents::new(1, 2, 3).fill(&mut words);
        for other in [
            Contents::new(2, 2, 3),
            Contents::new(1, 3, 3),
            Contents::new(1, 2, 4),
        ] {
            assert!(!other.matches(&words, 0));
        }
    }

    #[test]
    fn differing_bytes_are_named_by_offset() {
        let found: Vec<_> = mismatches(2, 0x1100, 0x2200).collect();
        assert_eq!(
            found,
            [Mismatch {
                offset: 17,
                expected: 0x11,
                found: 0x22
            }]
        );
    }
}
