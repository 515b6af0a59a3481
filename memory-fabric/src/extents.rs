//! Parts of a guest's memory, as reports have them.

use std::ops::Range;

use crate::page::PAGE_SIZE;

/// Most ranges of an [`Extents`]: reports stay short when every second page is lost.
pub const EXTENTS_MAX: usize = 64;

/// Parts of a guest's memory.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Extents {
    /// All of them together, in bytes.
    pub bytes: u64,
    /// The first [`EXTENTS_MAX`], by guest-physical address: starts and lengths.
    pub ranges: Vec<(u64, u64)>,
    /// How many ranges follow these.
    pub omitted: u64,
}

impl Extents {
    /// Pages by their numbers, in order, as far as the guest has memory there.
    pub(crate) fn new(pages: impl Iterator<Item = Range<u32>>, memory: &[Range<u64>]) -> Self {
        let mut all = Self::default();
        // The end of the last range, which may be one that is omitted.
        let mut end = None;
        for pages in pages {
            let address = |page: u32| u64::from(page) * PAGE_SIZE as u64;
            for part in memory {
                let start = address(pages.start).max(part.start);
                let bytes = address(pages.end).min(part.end).saturating_sub(start);
                if bytes == 0 {
                    continue;
                }
                all.bytes += bytes;
                let is_next = end == Some(start);
                end = Some(start + bytes);
                if !is_next && all.ranges.len() < EXTENTS_MAX {
                    all.ranges.push((start, bytes));
                } else if !is_next {
                    all.omitted += 1;
                } else if all.omitted == 0
                    && let Some((_, last)) = all.ranges.last_mut()
                {
                    *last += bytes;
                }
            }
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const P: u64 = PAGE_SIZE as u64;

    #[test]
    fn ranges_are_within_the_guests_memory_and_joined() {
        let memory = [0..10 * P, 20 * P..40 * P];
        let pages = [2..4, 4..6, 8..22, 22..23, 50..60];
        let found = Extents::new(pages.into_iter(), &memory);
        let ranges = [(2 * P, 4 * P), (8 * P, 2 * P), (20 * P, 3 * P)];
        assert_eq!((found.bytes, &found.ranges[..]), (9 * P, &ranges[..]));
        assert_eq!(found.omitted, 0);
        let nothing = Extents::new(std::iter::empty(), &memory);
        assert_eq!(nothing, Extents::default());
    }

    #[test]
    fn ranges_beyond_the_limit_are_counted() {
        let all = std::slice::from_ref(&(0..1 << 40));
        // Of the last ranges, two are one.
        let pages = (0..100).map(|page| 2 * page..2 * page + 1);
        let pages = pages.chain(std::iter::once(199..200));
        let found = Extents::new(pages, all);
        assert_eq!((found.bytes, found.ranges.len()), (101 * P, EXTENTS_MAX));
        assert_eq!(found.ranges[EXTENTS_MAX - 1], (126 * P, P));
        assert_eq!(found.omitted, 36);
    }
}
