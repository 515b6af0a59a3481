//! What opens the pages that a donor holds.

use crate::key::Seal;
use fabric_host::Mapping;
use fabric_pages::page::PAGE_SHIFT;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

/// Words of an entry: the number, and the tag in two.
const ENTRY_WORDS: usize = 3;

/// Number and tag of each page of a lease: 24 bytes, which the host backs when they are written.
///
/// The evictor writes the entry of a page when it posts a write-back; the fault thread and the
/// prefetcher read it when they have fetched the page. The page's state keeps them apart, and
/// orders them: a page is fetched only while it is remote, it becomes remote only after its
/// write-back was confirmed, and is written back only when it has arrived. So the words need no
/// order of their own.
#[derive(Debug)]
pub struct SealTable {
    words: Mapping,
}

impl SealTable {
    /// Creates a table for a lease of so many bytes.
    ///
    /// # Errors
    ///
    /// When the host has no address space for it.
    pub fn new(lease_bytes: u64) -> io::Result<Self> {
        let pages = usize::try_from(lease_bytes >> PAGE_SHIFT).expect("64-bit host");
        let bytes = pages.max(1) * ENTRY_WORDS * size_of::<AtomicU64>();
        Ok(Self {
            words: Mapping::anonymous(bytes)?,
        })
    }

    fn entry(&self, offset: u64) -> &[AtomicU64] {
        let page = usize::try_from(offset >> PAGE_SHIFT).expect("64-bit host");
        &self.words.words()[page * ENTRY_WORDS..][..ENTRY_WORDS]
    }

    /// Returns what opens the page at an offset; `None` when none was written there.
    #[must_use]
    pub fn get(&self, offset: u64) -> Option<Seal> {
        let [number, low, high] = self.entry(offset) else {
            unreachable!("an entry has three words");
        };
        // Relaxed: see `SealTable`.
        let number = number.load(Ordering::Relaxed);
        let mut tag = [0; 16];
        tag[..8].copy_from_slice(&low.load(Ordering::Relaxed).to_le_bytes());
        tag[8..].copy_from_slice(&high.load(Ordering::Relaxed).to_le_bytes());
        (number != 0).then_some(Seal { number, tag })
    }

    /// Sets what opens the page at an offset.
    pub fn set(&self, offset: u64, seal: Seal) {
        let [number, low, high] = self.entry(offset) else {
            unreachable!("an entry has three words");
        };
        let (first, second) = seal.tag.split_at(8);
        let word = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().expect("8 bytes"));
        // Relaxed: see `SealTable`.
        number.store(seal.number, Ordering::Relaxed);
        low.store(word(first), Ordering::Relaxed);
        high.store(word(second), Ordering::Relaxed);
    }

    /// Forgets what opens the page at an offset, which is dropped: nothing reads it before it is
    /// written back again.
    pub fn clear(&self, offset: u64) {
        let number = &self.entry(offset)[0];
        // Relaxed: see `SealTable`. What was never set needs no memory of the host.
        if number.load(Ordering::Relaxed) != 0 {
            number.store(0, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_is_what_was_set_last_and_apart_from_its_neighbours() {
        let table = SealTable::new(4 << PAGE_SHIFT).expect("a table");
        let seal = |number: u64| Seal {
            number,
            tag: std::array::from_fn(|byte| number.to_le_bytes()[0] * 16 + byte.to_le_bytes()[0]),
        };
        assert_eq!(table.get(0), None);
        for page in 0..4_u64 {
            table.set(page << PAGE_SHIFT, seal(page + 1));
        }
        table.set(2 << PAGE_SHIFT, seal(9));
        table.clear(1 << PAGE_SHIFT);
        assert_eq!(table.get(1 << PAGE_SHIFT), None);
        table.set(1 << PAGE_SHIFT, seal(2));
        let numbers = [1, 2, 9, 4];
        for (page, number) in numbers.into_iter().enumerate() {
            assert_eq!(table.get((page as u64) << PAGE_SHIFT), Some(seal(number)));
        }
    }

    #[test]
    #[should_panic(expected = "out of range")]
    fn an_offset_beyond_the_lease_is_our_own_error() {
        let table = SealTable::new(4 << PAGE_SHIFT).expect("a table");
        let _ = table.get(4 << PAGE_SHIFT);
    }
}
