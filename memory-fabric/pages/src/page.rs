//! Guest-physical pages: their size, their numbers, ranges of them.

use std::fmt;

pub use fabric_host::PAGE_SIZE;

/// log2 of [`PAGE_SIZE`].
pub const PAGE_SHIFT: u32 = 12;

/// The bytes of one page.
pub type PageBytes = [u8; PAGE_SIZE];

/// Limit of pages in a guest-physical address space: 2^32 - 1, just under 16 TiB.
///
/// A page number must fit the 32-bit queue link of the page map, whose value 0 means "no page".
pub const PAGES_MAX: u64 = u32::MAX as u64;

/// The number of a guest-physical page: its guest-physical address divided by [`PAGE_SIZE`].
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct PageIndex(u32);

impl PageIndex {
    /// Creates the index of a page with this number.
    #[must_use]
    pub const fn new(number: u32) -> Self {
        Self(number)
    }

    /// Returns the page that contains a guest-physical address (in bytes), or `None` past
    /// [`PAGES_MAX`].
    #[must_use]
    pub fn containing(address: u64) -> Option<Self> {
        u32::try_from(address >> PAGE_SHIFT).ok().map(Self)
    }

    /// Returns the page's number.
    #[must_use]
    pub const fn number(self) -> u32 {
        self.0
    }

    /// Returns the guest-physical address (in bytes) of the page's first byte.
    #[must_use]
    pub const fn address(self) -> u64 {
        (self.0 as u64) << PAGE_SHIFT
    }

    /// Returns the page's number as an index into an array.
    #[must_use]
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Display for PageIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "page {:#x}", self.0)
    }
}

/// A run of consecutive pages.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct PageRange {
    /// The first page.
    pub first: PageIndex,
    /// Number of pages; may be zero.
    pub count: u32,
}

impl PageRange {
    /// Creates the range of `count` pages from `first` on.
    #[must_use]
    pub const fn new(first: PageIndex, count: u32) -> Self {
        Self { first, count }
    }

    /// Returns the number after that of the last page.
    #[must_use]
    pub fn end(self) -> u64 {
        u64::from(self.first.number()) + u64::from(self.count)
    }

    /// Returns the length in bytes.
    #[must_use]
    pub fn bytes(self) -> u64 {
        u64::from(self.count) << PAGE_SHIFT
    }

    /// Returns whether `page` is in the range.
    #[must_use]
    pub fn contains(self, page: PageIndex) -> bool {
        page >= self.first && u64::from(page.number()) < self.end()
    }

    /// Returns the range's first `count` pages and the rest of it.
    #[must_use]
    pub fn split_at(self, count: u32) -> (Self, Self) {
        let count = count.min(self.count);
        let rest = PageIndex::new(self.first.number().saturating_add(count));
        (
            Self::new(self.first, count),
            Self::new(rest, self.count - count),
        )
    }

    /// Iterates over the pages of the range in order.
    pub fn iter(self) -> impl Iterator<Item = PageIndex> {
        let first = self.first.number();
        (0..self.count).map(move |offset| PageIndex::new(first + offset))
    }
}

/// Returns whether every byte of the page is zero.
#[must_use]
pub fn is_zero(page: &PageBytes) -> bool {
    // Wide words, of which the compiler compares many at a time.
    let (words, rest) = page.as_chunks::<16>();
    debug_assert!(rest.is_empty());
    words.iter().all(|&word| u128::from_ne_bytes(word) == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_knows_its_address() {
        let page = PageIndex::containing(0x1_0000_0fff).expect("in range");
        assert_eq!(page.number(), 0x10_0000);
        assert_eq!(page.address(), 0x1_0000_0000);
        assert_eq!(PageIndex::containing(1 << 44), None);
    }

    #[test]
    fn splitting_a_range_keeps_every_page() {
        let range = PageRange::new(PageIndex::new(10), 5);
        let (head, tail) = range.split_at(2);
        let pages: Vec<_> = head.iter().chain(tail.iter()).collect();
        assert_eq!(pages, range.iter().collect::<Vec<_>>());
        assert_eq!(
            range.split_at(9),
            (range, PageRange::new(PageIndex::new(15), 0))
        );
    }

    #[test]
    fn one_set_bit_anywhere_makes_a_page_not_zero() {
        let mut page = [0; PAGE_SIZE];
        assert!(is_zero(&page));
        for at in [0, 1, 15, 16, 2047, 4095] {
            page[at] = 1;
            assert!(!is_zero(&page), "byte {at}");
            page[at] = 0;
        }
    }
}
