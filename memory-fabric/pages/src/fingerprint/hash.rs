//! The keyed hash; see the [module](super).

use crate::page::{PAGE_SIZE, PageBytes};
use std::fmt;
use std::io;

/// Words of 64 bits in a page.
const WORDS: usize = PAGE_SIZE / 8;

/// Key words: one for each word of a page, and a pair more for the second sum.
const KEY_WORDS: usize = WORDS + 2;

/// The fingerprint of a page's bytes: 128 bits.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Fingerprint(pub(super) [u64; 2]);

/// The secret key of a VM.
pub struct FingerprintKey {
    words: Box<[u64; KEY_WORDS]>,
    /// For each sum: offset and factors of the reduction.
    reductions: [[u128; 3]; 2],
}

impl FingerprintKey {
    /// Creates a key from the host's random numbers.
    ///
    /// # Errors
    ///
    /// Fails when the host has none.
    pub fn random() -> io::Result<Self> {
        let mut bytes = vec![0_u8; KEY_WORDS * 8 + 6 * 16];
        getrandom::fill(&mut bytes)?;
        let (words, reductions) = bytes.split_at(KEY_WORDS * 8);
        let mut key = Self {
            words: Box::new([0; KEY_WORDS]),
            reductions: [[0; 3]; 2],
        };
        for (word, bytes) in key.words.iter_mut().zip(words.as_chunks().0) {
            *word = u64::from_le_bytes(*bytes);
        }
        let numbers = key.reductions.as_flattened_mut().iter_mut();
        for (number, bytes) in numbers.zip(reductions.as_chunks().0) {
            *number = u128::from_le_bytes(*bytes);
        }
        Ok(key)
    }

    /// Returns the fingerprint of a page.
    #[must_use]
    pub fn of(&self, page: &PageBytes) -> Fingerprint {
        let (mut first, mut second) = (0_u128, 0_u128);
        let (pairs, _) = page.as_chunks::<16>();
        for (pair, key) in pairs.iter().zip(self.words.windows(4).step_by(2)) {
            // Little-endian on every host; a reversed order would hash as well.
            let pair = u128::from_le_bytes(*pair);
            let (low, high) = halves(pair);
            first = first.wrapping_add(product(low, key[0], high, key[1]));
            second = second.wrapping_add(product(low, key[2], high, key[3]));
        }
        Fingerprint([
            reduce(first, &self.reductions[0]),
            reduce(second, &self.reductions[1]),
        ])
    }
}

impl fmt::Debug for FingerprintKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The key is secret.
        f.debug_struct("FingerprintKey").finish_non_exhaustive()
    }
}

#[inline]
fn halves(number: u128) -> (u64, u64) {
    #[allow(clippy::cast_possible_truncation, reason = "the low half is wanted")]
    let low = number as u64;
    let high = u64::try_from(number >> 64).expect("64 bits");
    (low, high)
}

#[inline]
fn product(low: u64, low_key: u64, high: u64, high_key: u64) -> u128 {
    let low = u128::from(low.wrapping_add(low_key));
    low * u128::from(high.wrapping_add(high_key))
}

#[inline]
fn reduce(sum: u128, [offset, low_factor, high_factor]: &[u128; 3]) -> u64 {
    let (low, high) = halves(sum);
    let number = offset
        .wrapping_add(low_factor.wrapping_mul(low.into()))
        .wrapping_add(high_factor.wrapping_mul(high.into()));
    halves(number).1
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(word: impl Fn(usize) -> u64, reductions: [[u128; 3]; 2]) -> FingerprintKey {
        FingerprintKey {
            words: Box::new(std::array::from_fn(word)),
            reductions,
        }
    }

    /// Returns a key whose reductions keep the high halves of the sums.
    fn high_halves(word: impl Fn(usize) -> u64) -> FingerprintKey {
        key(word, [[0, 0, 1 << 64]; 2])
    }

    /// Returns a key whose reductions keep the low halves.
    fn low_halves(word: impl Fn(usize) -> u64) -> FingerprintKey {
        key(word, [[0, 1 << 64, 0]; 2])
    }

    fn page_of(words: impl Fn(usize) -> u64) -> Box<PageBytes> {
        let mut page = Box::new([0; PAGE_SIZE]);
        for (index, bytes) in page.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            *bytes = words(index).to_le_bytes();
        }
        page
    }

    #[test]
    fn the_sums_are_those_of_nh() {
        // (1 + 1)(2 + 1) for the first pair, and 1 * 1 for each of the 255 others.
        let page = page_of(|word| [1, 2].get(word).copied().unwrap_or(0));
        assert_eq!(low_halves(|_| 1).of(&page), Fingerprint([6 + 255; 2]));
        // Carries within a word are dropped, and those of a product are kept.
        let page = page_of(|word| if word < 2 { u64::MAX } else { 0 });
        let only_second = |word| u64::from((2..4).contains(&word)) * 3;
        assert_eq!(low_halves(only_second).of(&page).0, [1 + 9, 4]);
        assert_eq!(high_halves(only_second).of(&page).0, [u64::MAX - 1, 0]);
    }

    #[test]
    fn a_second_key_gives_other_fingerprints_and_the_same_key_the_same() {
        let page = page_of(|word| word as u64);
        let (one, other) = (
            FingerprintKey::random().expect("random numbers"),
            FingerprintKey::random().expect("random numbers"),
        );
        assert_eq!(one.of(&page), one.of(&page));
        assert_ne!(one.of(&page), other.of(&page));
        assert_ne!(one.of(&page).0[0], one.of(&page).0[1]);
    }

    #[test]
    fn every_single_bit_and_every_exchange_of_words_changes_both_halves() {
        let key = FingerprintKey::random().expect("random numbers");
        let mut page = page_of(|word| (word as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let before = key.of(&page);
        let differs = |after: Fingerprint| (0..2).all(|half| before.0[half] != after.0[half]);
        for bit in 0..PAGE_SIZE * 8 {
            page[bit / 8] ^= 1 << (bit % 8);
            assert!(differs(key.of(&page)), "bit {bit}");
            page[bit / 8] ^= 1 << (bit % 8);
        }
        for word in 1..WORDS {
            let (low, high) = page.split_at_mut(word * 8);
            low[..8].swap_with_slice(&mut high[..8]);
            assert!(differs(key.of(&page)), "word {word}");
            let (low, high) = page.split_at_mut(word * 8);
            low[..8].swap_with_slice(&mut high[..8]);
        }
        assert_eq!(key.of(&page), before);
    }
}
