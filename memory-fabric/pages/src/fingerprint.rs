//! Fingerprints of the bytes that pages have at home, so that a page which counts as dirty and
//! was not changed can be dropped instead of written back.
//!
//! # The hash
//!
//! An equal fingerprint drops bytes of a guest, so two different pages must not have the same
//! one, also when a guest or a donor chooses their content. The hash is a *universal* one with a
//! secret key of its own for each VM: for any two different pages, chosen without knowledge of
//! the key, the probability that their fingerprints are equal is at most 2^-126. That is proven,
//! and not a conjecture about mixing. Fingerprints never leave the process, and whether a page
//! was dropped says no more than "not equal" until the first collision; so after q comparisons
//! the probability of any collision is at most q * 2^-126.
//!
//! 1. NH (Black et al., UMAC, CRYPTO 1999, section 4) with words of 64 bits, as VMAC uses it
//!    (Krovetz and Dai, 2007): the sum modulo 2^128 of (m0 + k0)(m1 + k1) over the pairs of
//!    words. It is done twice, the second time with the key shifted by a pair (the Toeplitz
//!    construction of the same paper, which keeps the two as good as independent): both sums are
//!    equal with a probability of 2^-128 at most.
//! 2. Each sum of 128 bits is reduced to 64 by multiply-shift with a key of its own
//!    (Dietzfelbinger, 1996): (a + b x0 + c x1 mod 2^128) / 2^64 is equal for different sums with
//!    a probability of 2^-64.
//!
//! It needs multiplications of 64 by 64 bits, which every 64-bit processor has, and no data
//! decides how long it takes.

#[cfg(not(loom))]
mod hash;
mod slots;
#[cfg(not(loom))]
mod table;

#[cfg(not(loom))]
pub use hash::{Fingerprint, FingerprintKey};
#[cfg(all(test, loom))]
pub(crate) use slots::FreeSlots;
#[cfg(not(loom))]
pub use table::FingerprintTable;
