//! The order of random touches.

/// xorshift64* (Vigna, 2016).
pub(super) fn next(state: &mut u64) -> usize {
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    usize::try_from(state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33).unwrap_or(0)
}
