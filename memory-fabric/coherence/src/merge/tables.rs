//! Reading page tables of the guest (Intel SDM volume 3, 4.5; AMD APM volume 2, 5.3). They may
//! contain anything: the work is bounded, and whoever is misled is the guest itself.

use fabric_pages::page::PageIndex;

use super::message::ENTRIES;

/// The level of a root: tables of five levels are not merged.
pub const ROOT: u8 = 4;

/// The first entry of a root's upper half, which belongs to the kernel.
pub const KERNEL_HALF: usize = ENTRIES / 2;

const PRESENT: u64 = 1;
const LARGE: u64 = 1 << 7;
const ADDRESS: u64 = 0x000f_ffff_ffff_f000;
const LARGE_PAGE_BYTES: u64 = 2 << 20;

/// The page that an entry points to, at any level.
fn target(entry: u64) -> Option<PageIndex> {
    PageIndex::containing(entry & ADDRESS).filter(|_| entry & PRESENT != 0)
}

/// The table that an entry of a table of level 2 to 4 points to.
#[must_use]
pub fn table(entry: u64) -> Option<PageIndex> {
    target(entry).filter(|_| entry & LARGE == 0)
}

/// The entries of a table that may point to tables of the kernel.
#[must_use]
pub const fn linking(level: u8) -> std::ops::Range<usize> {
    match level {
        ROOT => KERNEL_HALF..ENTRIES,
        2 | 3 => 0..ENTRIES,
        _ => 0..0,
    }
}

/// Whether a page is a root that is part of what its own upper half maps as the kernel's image: the
/// last 2 GiB of the address space. Linux never frees such a page, and needs it for its own mappings.
/// `load` reads an entry of a page that is here.
pub fn is_kernel_root(page: PageIndex, load: impl Fn(PageIndex, usize) -> Option<u64>) -> bool {
    let below = |of: PageIndex, entry: usize| load(of, entry).and_then(table);
    let Some(third) = below(page, ENTRIES - 1) else {
        return false;
    };
    // The last two entries of level 3 are of 1 GiB each.
    let seconds = [ENTRIES - 2, ENTRIES - 1].map(|entry| below(third, entry));
    seconds.into_iter().flatten().any(|second| {
        (0..ENTRIES).any(|entry| {
            let Some(value) = load(second, entry).filter(|value| value & PRESENT != 0) else {
                return false;
            };
            if value & LARGE != 0 {
                let first = value & ADDRESS & !(LARGE_PAGE_BYTES - 1);
                return page.address().wrapping_sub(first) < LARGE_PAGE_BYTES;
            }
            let maps = |entry| load(table(value)?, entry).and_then(target);
            (0..ENTRIES).any(|entry| maps(entry) == Some(page))
        })
    })
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    type Memory = HashMap<(u32, usize), u64>;

    fn is_root(memory: &Memory, page: u32) -> bool {
        // All pages below 2,048 are here.
        let load = |page: PageIndex, entry| {
            let value = memory.get(&(page.number(), entry)).copied();
            (page.number() < 2048).then(|| value.unwrap_or(0))
        };
        is_kernel_root(PageIndex::new(page), load)
    }

    fn link(page: u64) -> u64 {
        page << 12 | 0x67
    }

    /// Root 520, level 3 at 521, level 2 at 522, as Linux has them in its image.
    fn image(entry: u64) -> Memory {
        HashMap::from([
            ((520, 511), link(521)),
            ((521, 510), link(522)),
            ((522, 9), entry),
        ])
    }

    #[test]
    fn a_root_in_the_image_that_it_maps_is_one() {
        let large = image(512 << 12 | 0xe3);
        assert!(is_root(&large, 520));
        assert!(!is_root(&large, 521), "a table of level 3");
        assert!(!is_root(&image(1024 << 12 | 0xe3), 520), "another image");
        assert!(!is_root(&image(512 << 12 | 0xe2), 520), "not present");
        let mut small = image(link(523));
        assert!(!is_root(&small, 520));
        small.insert((523, 8), link(520));
        assert!(is_root(&small, 520));
    }

    #[test]
    fn a_root_of_a_process_is_none() {
        let mut memory = image(512 << 12 | 0xe3);
        memory.insert((1100, 511), link(521));
        assert!(!is_root(&memory, 1100));
    }

    #[test]
    fn tables_that_point_anywhere_are_none() {
        for entry in [u64::MAX, link(5000), link(520), 0xffff_ffff_f000 | 3] {
            let memory = HashMap::from([((7, 511), entry)]);
            assert!(!is_root(&memory, 7), "{entry:#x}");
        }
        // A root that points to itself at each level.
        let memory = (0..512).map(|entry| ((7, entry), link(7))).collect();
        assert!(
            is_root(&memory, 7),
            "it maps itself, which harms nobody else"
        );
        assert!(is_root(&memory, 7), "and the search ends");
    }

    #[test]
    fn only_the_upper_half_of_a_root_links_tables_of_the_kernel() {
        assert_eq!(linking(4), 256..512);
        assert_eq!(linking(2).len(), 512);
        assert!(linking(1).is_empty());
    }
}
