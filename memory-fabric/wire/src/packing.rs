//! Compact encoding of pages for the network: zeroes are omitted, other bytes are compressed (LZ4,
//! block format).
//!
//! Packed pages are concatenated. Each is a length, 2 bytes little-endian, and that many bytes:
//!
//! | length | bytes |
//! |---|---|
//! | 0 | none: the page is all zero |
//! | less than a page | an LZ4 block that decompresses to the page |
//! | a page | the page as it is |
//!
//! Packing that does not save an eighth is not worth the time to unpack, so it is not used: neither
//! for a page among others, nor for all of them together.

use fabric_pages::page::{PAGE_SIZE, PageBytes, is_zero};
use lz4_flex::block::{
    CompressTable, compress_into_with_table, decompress_into, get_maximum_output_size,
};
use std::fmt;

/// Bytes of the length field.
pub const LENGTH_BYTES: usize = size_of::<u16>();

/// Size limit of a page's LZ4 block, bytes.
const BLOCK_BYTES_MAX: usize = packed_bytes_max(1) - LENGTH_BYTES;

/// Returns the size limit of this many packed pages: larger ones are sent as they are.
#[must_use]
pub const fn packed_bytes_max(pages: usize) -> usize {
    pages * (PAGE_SIZE / 8 * 7)
}

/// The packing of pages; in a request for pages, the most compact one allowed.
#[derive(Clone, Copy, Debug, Default, Eq, Ord, PartialEq, PartialOrd)]
#[repr(u8)]
pub enum Packing {
    /// No packing.
    #[default]
    Plain = 0,
    /// Pages of zeroes are omitted.
    Zeroes = 1,
    /// In addition, other pages are compressed.
    Lz4 = 2,
}

impl Packing {
    /// Converts a number on the wire.
    #[must_use]
    pub const fn from_number(number: u16) -> Option<Self> {
        match number {
            0 => Some(Self::Plain),
            1 => Some(Self::Zeroes),
            2 => Some(Self::Lz4),
            _ => None,
        }
    }
}

/// Why packed pages are invalid.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum UnpackError {
    /// The bytes end too early.
    #[error("they are cut short in page {page}")]
    Cut {
        /// The page, counted from 0.
        page: usize,
    },
    /// A page has more bytes than a page.
    #[error("page {page} has {bytes} bytes, {PAGE_SIZE} is the limit")]
    TooLong {
        /// The page, counted from 0.
        page: usize,
        /// Its length.
        bytes: usize,
    },
    /// A block is not LZ4, or decompresses to more than a page.
    #[error("page {page} is no LZ4 block of a page: {why}")]
    Block {
        /// The page, counted from 0.
        page: usize,
        /// The decoder's error.
        why: String,
    },
    /// A block decompresses to less than a page.
    #[error("page {page} gives {bytes} bytes, {PAGE_SIZE} are wanted")]
    TooShort {
        /// The page, counted from 0.
        page: usize,
        /// Its decompressed size.
        bytes: usize,
    },
    /// Bytes follow the last page.
    #[error("{bytes} bytes are behind the last page")]
    Behind {
        /// Number of bytes.
        bytes: usize,
    },
}

/// Packs pages. No allocation after its creation.
pub struct Packer {
    table: CompressTable,
    /// Buffer for the largest useful result, and for one page that turns out too long.
    packed: Box<[u8]>,
    pages_max: usize,
}

impl fmt::Debug for Packer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Packer")
            .field("pages_max", &self.pages_max)
            .finish_non_exhaustive()
    }
}

impl Packer {
    /// Creates a packer for up to `pages_max` pages at once.
    #[must_use]
    pub fn new(pages_max: usize) -> Self {
        let room = packed_bytes_max(pages_max) + LENGTH_BYTES + get_maximum_output_size(PAGE_SIZE);
        Self {
            table: CompressTable::default(),
            packed: vec![0; room].into_boxed_slice(),
            pages_max,
        }
    }

    /// Packs whole pages. Returns `None` when that does not save an eighth: they are then to be
    /// sent as they are.
    ///
    /// # Panics
    ///
    /// When there are no pages, parts of pages, or more than `pages_max`.
    pub fn pack(&mut self, pages: &[u8], packing: Packing) -> Option<&[u8]> {
        let (pages, rest) = pages.as_chunks::<PAGE_SIZE>();
        assert!(rest.is_empty() && (1..=self.pages_max).contains(&pages.len()));
        let promising = match packing {
            Packing::Plain => false,
            // The first bytes usually show that a page is not zero.
            Packing::Zeroes => pages.iter().any(is_zero),
            Packing::Lz4 => true,
        };
        if !promising {
            return None;
        }
        let most = packed_bytes_max(pages.len());
        let mut used = 0;
        for page in pages {
            let start = used + LENGTH_BYTES;
            let bytes = self.pack_page(page, packing, start);
            let length = u16::try_from(bytes).expect("at most a page");
            self.packed[used..start].copy_from_slice(&length.to_le_bytes());
            used = start + bytes;
            if used > most {
                return None;
            }
        }
        Some(&self.packed[..used])
    }

    /// Packs a page at `start`; returns the number of bytes used.
    fn pack_page(&mut self, page: &PageBytes, packing: Packing, start: usize) -> usize {
        if is_zero(page) {
            return 0;
        }
        if packing == Packing::Lz4 {
            let room = &mut self.packed[start..];
            let packed = compress_into_with_table(page, room, &mut self.table);
            let bytes = packed.expect("there is room for the longest block");
            if bytes <= BLOCK_BYTES_MAX {
                return bytes;
            }
        }
        self.packed[start..start + PAGE_SIZE].copy_from_slice(page);
        PAGE_SIZE
    }
}

/// Unpacks exactly as many pages as fit in `pages`, whose length is whole pages. Returns how many
/// of them took less than a page. After an error the contents of `pages` are undefined.
///
/// # Errors
///
/// Fails when the bytes are not exactly that many packed pages.
pub fn unpack(packed: &[u8], pages: &mut [u8]) -> Result<u64, UnpackError> {
    let mut rest = packed;
    let mut smaller = 0;
    for (number, target) in pages.chunks_exact_mut(PAGE_SIZE).enumerate() {
        let cut = UnpackError::Cut { page: number };
        let (length, behind) = rest.split_first_chunk().ok_or(cut.clone())?;
        let bytes = usize::from(u16::from_le_bytes(*length));
        if bytes > PAGE_SIZE {
            let page = number;
            return Err(UnpackError::TooLong { page, bytes });
        }
        let (source, behind) = behind.split_at_checked(bytes).ok_or(cut)?;
        rest = behind;
        smaller += u64::from(bytes < PAGE_SIZE);
        match bytes {
            0 => target.fill(0),
            PAGE_SIZE => target.copy_from_slice(source),
            _ => unpack_block(source, target, number)?,
        }
    }
    match rest.len() {
        0 => Ok(smaller),
        bytes => Err(UnpackError::Behind { bytes }),
    }
}

fn unpack_block(block: &[u8], target: &mut [u8], page: usize) -> Result<(), UnpackError> {
    // Never writes past `target`, whatever the block contains.
    match decompress_into(block, target) {
        Ok(PAGE_SIZE) => Ok(()),
        Ok(bytes) => Err(UnpackError::TooShort { page, bytes }),
        Err(error) => Err(UnpackError::Block {
            page,
            why: error.to_string(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Pages of various kinds: zero, of few values, of text, of noise.
    fn page() -> impl Strategy<Value = Vec<u8>> {
        let noise = prop::collection::vec(any::<u8>(), PAGE_SIZE);
        let part = (0..PAGE_SIZE, prop::collection::vec(any::<u8>(), 1..200));
        prop_oneof![
            Just(vec![0; PAGE_SIZE]),
            any::<u8>().prop_map(|byte| vec![byte; PAGE_SIZE]),
            noise,
            part.prop_map(|(at, bytes)| {
                let mut page = vec![0; PAGE_SIZE];
                for (place, byte) in page[at..].iter_mut().zip(bytes) {
                    *place = byte;
                }
                page
            }),
            prop::collection::vec(any::<u8>(), 1..600).prop_map(|bytes| {
                let repeated = bytes.iter().copied().cycle();
                repeated.take(PAGE_SIZE).collect()
            }),
        ]
    }

    fn text_page() -> Vec<u8> {
        let text = (0..).flat_map(|n: u32| format!("line {n} of a log; ").into_bytes());
        text.take(PAGE_SIZE).collect()
    }

    fn noise_page() -> Vec<u8> {
        let mut state = 1_u64;
        let mut byte = || {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            state.to_le_bytes()[7]
        };
        (0..PAGE_SIZE).map(|_| byte()).collect()
    }

    #[test]
    fn a_page_of_zeroes_is_its_length_and_one_of_noise_is_not_packed() {
        let mut packer = Packer::new(2);
        for packing in [Packing::Zeroes, Packing::Lz4] {
            assert_eq!(packer.pack(&[0; PAGE_SIZE], packing), Some(&[0, 0][..]));
            assert_eq!(packer.pack(&noise_page(), packing), None);
        }
        assert_eq!(packer.pack(&[0; PAGE_SIZE], Packing::Plain), None);
        assert_eq!(packer.pack(&text_page(), Packing::Zeroes), None);
        let packed = packer.pack(&text_page(), Packing::Lz4).expect("smaller");
        assert!(packed.len() < PAGE_SIZE / 2, "{} bytes", packed.len());
    }

    #[test]
    fn pages_that_save_less_than_an_eighth_together_are_not_packed() {
        let mut packer = Packer::new(8);
        let run = |zeroes: usize, noise: usize| {
            let mut pages = vec![0; zeroes * PAGE_SIZE];
            pages.extend(noise_page().repeat(noise));
            pages
        };
        assert!(packer.pack(&run(1, 7), Packing::Zeroes).is_none());
        let packed = packer.pack(&run(2, 6), Packing::Zeroes).expect("smaller");
        assert_eq!(packed.len(), 8 * LENGTH_BYTES + 6 * PAGE_SIZE);
        let mut pages = vec![7; 8 * PAGE_SIZE];
        assert_eq!(unpack(packed, &mut pages), Ok(2));
        assert_eq!(pages, run(2, 6));
    }

    #[test]
    fn every_way_to_be_wrong_has_its_error() {
        let mut packer = Packer::new(1);
        let packed = packer.pack(&text_page(), Packing::Lz4).expect("smaller");
        let packed = packed.to_vec();
        let mut page = [0; PAGE_SIZE];
        assert_eq!(unpack(&packed, &mut page), Ok(1));
        assert_eq!(page[..], text_page());
        let mut fails = |packed: &[u8]| unpack(packed, &mut page).expect_err("wrong");

        assert_eq!(fails(&[]), UnpackError::Cut { page: 0 });
        assert_eq!(fails(&packed[..1]), UnpackError::Cut { page: 0 });
        let cut = &packed[..packed.len() - 1];
        assert_eq!(fails(cut), UnpackError::Cut { page: 0 });
        let longer = [&packed[..], &[0, 0]].concat();
        assert_eq!(fails(&longer), UnpackError::Behind { bytes: 2 });

        let with_length = |bytes: &[u8]| {
            let length = u16::try_from(bytes.len()).expect("short");
            [&length.to_le_bytes(), bytes].concat()
        };
        let bytes = PAGE_SIZE + 1;
        let too_long = with_length(&vec![1; bytes]);
        assert_eq!(fails(&too_long), UnpackError::TooLong { page: 0, bytes });
        // A valid block that ends early: the remainder decompresses to less than a page.
        let literals = with_length(&[0x50, 1, 2, 3, 4, 5]);
        assert_eq!(
            fails(&literals),
            UnpackError::TooShort { page: 0, bytes: 5 }
        );
        // A match before the beginning; one of 65 KB; an empty one.
        for block in [&[0x10, 1, 9, 0][..], &[0x1f, 1, 1, 0, 255, 255], &[0xff]] {
            let mut endless = block.to_vec();
            endless.resize(block.len() + 300, 255);
            let error = fails(&with_length(&endless));
            assert!(
                matches!(error, UnpackError::Block { page: 0, .. }),
                "{error}"
            );
        }
    }

    proptest! {
        #[test]
        fn packed_pages_come_back(
            pages in prop::collection::vec(page(), 1..6),
            packing in prop_oneof![Just(Packing::Zeroes), Just(Packing::Lz4)],
        ) {
            let count = pages.len();
            let pages = pages.concat();
            // The table is reused, as it is for page after page.
            let mut packer = Packer::new(5);
            for _ in 0..2 {
                if let Some(packed) = packer.pack(&pages, packing) {
                    prop_assert!(packed.len() <= packed_bytes_max(count));
                    let mut unpacked = vec![0xa5; pages.len()];
                    prop_assert!(unpack(packed, &mut unpacked).is_ok());
                    prop_assert_eq!(&unpacked, &pages);
                }
            }
        }

        #[test]
        fn no_bytes_make_unpacking_panic(
            bytes in prop::collection::vec(any::<u8>(), 0..6000),
            pages in 1_usize..4,
        ) {
            let mut unpacked = vec![0; pages * PAGE_SIZE];
            let _ = unpack(&bytes, &mut unpacked);
        }

        #[test]
        fn a_damaged_block_stays_inside_its_page(
            page in page(),
            at: prop::sample::Index,
            bit in 0_u8..8,
        ) {
            let mut packer = Packer::new(1);
            let Some(packed) = packer.pack(&page, Packing::Lz4) else {
                return Ok(());
            };
            let mut damaged = packed.to_vec();
            let at = at.index(damaged.len());
            damaged[at] ^= 1 << bit;
            let mut room = vec![0xa5; 3 * PAGE_SIZE];
            let _ = unpack(&damaged, &mut room[PAGE_SIZE..2 * PAGE_SIZE]);
            prop_assert!(room[..PAGE_SIZE].iter().all(|&byte| byte == 0xa5));
            prop_assert!(room[2 * PAGE_SIZE..].iter().all(|&byte| byte == 0xa5));
        }
    }
}
