//! A page as a stripe: its pieces, and pieces of parity from which lost ones are computed.
//!
//! A page is divided into K pieces of data; M pieces of parity are added, so that any K of the K+M
//! pieces give the page. Each piece is at another donor.
//!
//! The code is that of RAID-6: bytes are elements of GF(2^8) modulo x^8 + x^4 + x^3 + x^2 + 1, and
//! parity r is the sum of the pieces of data d, each times g^(r·d) with g = 2. So the first parity
//! is their exclusive or. Each system of equations of lost pieces has a Vandermonde matrix with
//! different g^d, so it can be solved for every choice of at most two lost pieces.
//!
//! There is no table, no allocation and no `unsafe`: sums are evaluated by Horner's rule, which
//! needs only doublings, and the compiler makes vector instructions of them. Products with other
//! constants, eight doublings each, are needed only for what is lost.

use fabric_pages::page::PAGE_SIZE;
use std::fmt;
use std::str::FromStr;

/// Limit of pieces of data.
pub const DATA_MAX: usize = 8;

/// Limit of pieces of parity.
pub const PARITY_MAX: usize = 2;

/// Limit of pieces of a stripe.
pub const PIECES_MAX: usize = DATA_MAX + PARITY_MAX;

/// Limit of bytes of a piece of a stripe.
const UNIT_MAX: usize = PAGE_SIZE / 2;

/// Bytes that are processed together.
const LANE: usize = 64;

/// How many pieces a stripe has.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Layout {
    data: u8,
    parity: u8,
}

/// Why there is no such layout.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[error("K+M is not 2, 4 or 8 pieces of data and 1 or 2 of parity, as in 4+2")]
pub struct LayoutError;

impl Layout {
    /// Divides pages into `data` pieces, and adds `parity` pieces.
    ///
    /// # Errors
    ///
    /// When `data` is not 2, 4 or 8, or `parity` not 1 or 2.
    pub fn new(data: u8, parity: u8) -> Result<Self, LayoutError> {
        let is_possible = matches!(data, 2 | 4 | 8) && matches!(parity, 1 | 2);
        is_possible
            .then_some(Self { data, parity })
            .ok_or(LayoutError)
    }

    /// Returns the number of pieces of data: so many are needed to read a page.
    #[must_use]
    pub const fn data(self) -> usize {
        self.data as usize
    }

    /// Returns the number of pieces of parity: so many may be lost.
    #[must_use]
    pub const fn parity(self) -> usize {
        self.parity as usize
    }

    /// Returns the number of pieces.
    #[must_use]
    pub const fn pieces(self) -> usize {
        self.data() + self.parity()
    }

    /// Returns the bytes of a piece of one page.
    #[must_use]
    pub const fn unit(self) -> usize {
        PAGE_SIZE / self.data()
    }

    /// Computes the pieces of parity of a page, one after the other.
    ///
    /// # Panics
    ///
    /// When that is no page, or not room for them.
    pub fn encode(self, page: &[u8], parity: &mut [u8]) {
        assert_eq!(page.len(), PAGE_SIZE);
        assert_eq!(parity.len(), self.parity() * self.unit());
        for (row, sum) in parity.chunks_exact_mut(self.unit()).enumerate() {
            self.sum(row, page, 0, sum);
        }
    }

    /// Computes the pieces of data that are lost: those without a bit in `present`, which has the
    /// pieces of data in its lowest bits and those of parity behind them. `parity` has the pieces of
    /// parity; those that are lost are ignored.
    ///
    /// # Panics
    ///
    /// With fewer than K pieces.
    pub fn restore(self, page: &mut [u8], parity: [&[u8]; PARITY_MAX], present: u16) {
        let is_there = |at: usize| present >> at & 1 == 1;
        let mut lost = [0; PARITY_MAX];
        let mut count = 0;
        for at in (0..self.data()).filter(|&at| !is_there(at)) {
            assert!(count < self.parity(), "too many pieces are lost");
            lost[count] = at;
            count += 1;
        }
        let (mut rows, mut found) = ([0; PARITY_MAX], 0);
        for row in (0..self.parity()).filter(|row| is_there(self.data() + row)) {
            rows[found] = row;
            found += 1;
        }
        assert!(found >= count, "too many pieces are lost");
        let missing = !present & ((1 << self.data()) - 1);
        let unit = self.unit();
        // What the lost pieces add to each parity.
        let mut sums = [[0; UNIT_MAX]; PARITY_MAX];
        for (&row, sum) in rows[..count].iter().zip(&mut sums) {
            self.sum(row, page, missing, &mut sum[..unit]);
            add(&mut sum[..unit], parity[row]);
        }
        let inverse = inverse(rows, lost, count);
        for (&at, factors) in lost[..count].iter().zip(inverse) {
            let piece = &mut page[at * unit..][..unit];
            piece.fill(0);
            for (factor, sum) in factors.into_iter().zip(&sums).take(count) {
                add_product(piece, &sum[..unit], factor);
            }
        }
    }

    /// Sums up the pieces of a page, each times its factor in this row, without those in `missing`.
    fn sum(self, row: usize, page: &[u8], missing: u16, sum: &mut [u8]) {
        sum.fill(0);
        let pieces = page.chunks_exact(self.unit()).enumerate().rev();
        for (at, piece) in pieces {
            if row > 0 {
                sum.iter_mut().for_each(|byte| *byte = double(*byte));
            }
            if missing >> at & 1 == 0 {
                add(sum, piece);
            }
        }
    }
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}+{}", self.data, self.parity)
    }
}

impl FromStr for Layout {
    type Err = LayoutError;

    fn from_str(text: &str) -> Result<Self, LayoutError> {
        let (data, parity) = text.split_once('+').ok_or(LayoutError)?;
        let number = |text: &str| {
            // A number may begin with a sign as well.
            let is_plain = text.bytes().all(|byte| byte.is_ascii_digit());
            let number = text.parse().ok().filter(|_| is_plain);
            number.ok_or(LayoutError)
        };
        Self::new(number(data)?, number(parity)?)
    }
}

/// Multiplies by g.
#[inline]
fn double(byte: u8) -> u8 {
    // All ones if the product has a bit 8.
    let carry = 0_u8.wrapping_sub(byte >> 7);
    (byte << 1) ^ (0x1d & carry)
}

fn add(sum: &mut [u8], piece: &[u8]) {
    for (byte, &other) in sum.iter_mut().zip(piece) {
        *byte ^= other;
    }
}

/// Adds `factor` times `source`.
fn add_product(sum: &mut [u8], source: &[u8], factor: u8) {
    let (sums, rest) = sum.as_chunks_mut::<LANE>();
    let (sources, behind) = source.as_chunks::<LANE>();
    debug_assert!(rest.is_empty() && behind.is_empty(), "whole lanes");
    for (sum, source) in sums.iter_mut().zip(sources) {
        let mut power = *source;
        let mut bits = factor;
        while bits != 0 {
            if bits & 1 == 1 {
                for (byte, other) in sum.iter_mut().zip(power) {
                    *byte ^= other;
                }
            }
            bits >>= 1;
            power.iter_mut().for_each(|byte| *byte = double(*byte));
        }
    }
}

fn product(one: u8, other: u8) -> u8 {
    let (mut sum, mut power, mut bits) = (0, one, other);
    while bits != 0 {
        if bits & 1 == 1 {
            sum ^= power;
        }
        bits >>= 1;
        power = double(power);
    }
    sum
}

/// Returns g to the power `exponent`.
fn power(exponent: usize) -> u8 {
    (0..exponent).fold(1, |power, _| double(power))
}

/// Returns 1 / `byte`.
fn reciprocal(byte: u8) -> u8 {
    // The group has 255 elements.
    (0..254).fold(1, |power, _| product(power, byte))
}

/// Inverts the matrix whose elements are the factors of the lost pieces in these rows.
fn inverse(
    rows: [usize; PARITY_MAX],
    lost: [usize; PARITY_MAX],
    count: usize,
) -> [[u8; PARITY_MAX]; PARITY_MAX] {
    let factor = |row: usize, at: usize| power(rows[row] * lost[at]);
    match count {
        0 => [[0; 2]; 2],
        1 => [[reciprocal(factor(0, 0)), 0], [0, 0]],
        _ => {
            let [[a, b], [c, d]] = [[factor(0, 0), factor(0, 1)], [factor(1, 0), factor(1, 1)]];
            let scale = reciprocal(product(a, d) ^ product(b, c));
            [[d, b], [c, a]].map(|row| row.map(|element| product(scale, element)))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn all() -> impl Iterator<Item = Layout> {
        let pairs = [2, 4, 8]
            .into_iter()
            .flat_map(|data| [(data, 1), (data, 2)]);
        pairs.map(|(data, parity)| Layout::new(data, parity).expect("possible"))
    }

    fn noise(seed: u64) -> Vec<u8> {
        let mut state = seed | 1;
        let bytes = std::iter::repeat_with(|| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state.to_le_bytes()[3]
        });
        bytes.take(PAGE_SIZE).collect()
    }

    /// Encodes a page, destroys the pieces that are not in `present`, and restores the page.
    fn assert_restored(layout: Layout, page: &[u8], present: u16) {
        let unit = layout.unit();
        let mut parity = vec![0; layout.parity() * unit];
        layout.encode(page, &mut parity);
        let mut damaged = page.to_vec();
        for at in (0..layout.pieces()).filter(|at| present >> at & 1 == 0) {
            match at.checked_sub(layout.data()) {
                None => damaged[at * unit..][..unit].fill(0xa5),
                Some(row) => parity[row * unit..][..unit].fill(0x5a),
            }
        }
        let rows = [0, 1].map(|row| parity.get(row * unit..(row + 1) * unit).unwrap_or(&[]));
        layout.restore(&mut damaged, rows, present);
        assert!(damaged == page, "{layout}: {present:b} are there");
    }

    #[test]
    fn a_page_is_restored_from_every_choice_of_enough_pieces() {
        for layout in all() {
            let page = noise(layout.pieces() as u64);
            let mut choices = 0;
            for present in 0..1_u16 << layout.pieces() {
                if present.count_ones() as usize >= layout.data() {
                    assert_restored(layout, &page, present);
                    choices += 1;
                }
            }
            let (pieces, parity) = (layout.pieces(), layout.parity());
            let pairs = if parity == 2 {
                pieces * (pieces - 1) / 2
            } else {
                0
            };
            assert_eq!(choices, 1 + pieces + pairs, "{layout}");
        }
    }

    proptest! {
        #[test]
        fn whatever_the_page_has_is_restored(seed: u64, choice: u64, data in 1_u32..4) {
            let layout = Layout::new(1 << data, 2).expect("possible");
            let pieces = layout.pieces() as u64;
            let lost = 1 << (choice % pieces) | 1 << (choice / pieces % pieces);
            let all = (1_u16 << layout.pieces()) - 1;
            assert_restored(layout, &noise(seed), all & !lost);
        }
    }

    #[test]
    fn parity_is_the_exclusive_or_and_the_sum_with_powers_of_two() {
        let layout = Layout::new(4, 2).expect("possible");
        let mut page = vec![0; PAGE_SIZE];
        for (at, byte) in [0x01, 0x80, 0x03, 0xff].into_iter().enumerate() {
            page[at * 1024 + 7] = byte;
        }
        let mut parity = vec![1; 2048];
        layout.encode(&page, &mut parity);
        assert_eq!(parity[7], 0x01 ^ 0x80 ^ 0x03 ^ 0xff);
        // 0x80·2 = 0x1d, 3·4 = 0x0c, 0xff·8 = 0xff·2·2·2 = 0xe3·2·2 = 0xdb·2 = 0xab.
        assert_eq!(parity[1024 + 7], 0x01 ^ 0x1d ^ 0x0c ^ 0xab);
        assert_eq!(parity.iter().filter(|byte| **byte != 0).count(), 2);
    }

    #[test]
    fn every_element_but_zero_has_a_reciprocal() {
        for byte in 1..=255 {
            assert_eq!(product(byte, reciprocal(byte)), 1, "{byte}");
        }
    }

    #[test]
    fn layouts_are_read_and_written_as_sums() {
        for layout in all() {
            assert_eq!(layout.to_string().parse(), Ok(layout));
        }
        for text in [
            "", "4", "4+", "+2", "3+1", "4+3", "4+0", "16+2", "1+1", "4+2+1", "4-2", "4++2", "+4+2",
        ] {
            assert_eq!(text.parse::<Layout>(), Err(LayoutError), "{text}");
        }
    }
}
