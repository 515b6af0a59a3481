//! Memory as the threads of a benchmark see it, and its contents.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use memory_fabric::fabric::Fabric;
use memory_fabric::guest_memory::GuestMemory;
use memory_fabric::page::{PAGE_SIZE, PageBytes, PageIndex};

/// 64-bit words of a page.
pub(super) const WORDS_PER_PAGE: usize = PAGE_SIZE / size_of::<u64>();

/// The guest view, which threads share.
#[derive(Clone, Debug)]
pub(super) struct View {
    memory: Arc<GuestMemory>,
    pub(super) pages: usize,
}

impl View {
    /// Creates the view of a fabric.
    pub(super) fn of(fabric: &Fabric) -> Self {
        Self::new(fabric.memory())
    }

    /// Creates the view of a memory.
    pub(super) fn new(memory: &Arc<GuestMemory>) -> Self {
        Self {
            memory: Arc::clone(memory),
            pages: memory.bytes() / PAGE_SIZE,
        }
    }

    pub(super) fn word(&self, page: usize, word: usize) -> &AtomicU64 {
        assert!(word < WORDS_PER_PAGE);
        &self.memory.guest_words()[page * WORDS_PER_PAGE + word]
    }

    pub(super) fn fill(&self) {
        (0..self.pages).for_each(|page| self.fill_page(page));
    }

    pub(super) fn fill_page(&self, page: usize) {
        for word in 0..WORDS_PER_PAGE {
            self.word(page, word)
                .store(content(page, word), Ordering::Relaxed);
        }
    }

    /// Returns the number of bytes of a page that differ from what was written.
    pub(super) fn corrupt_bytes(&self, page: usize) -> u64 {
        self.bytes_unlike(page, page)
    }

    /// Returns the number of bytes of a page that differ from the contents of page `other`.
    pub(super) fn bytes_unlike(&self, page: usize, other: usize) -> u64 {
        (0..WORDS_PER_PAGE)
            .map(|word| {
                let found = self.word(page, word).load(Ordering::Relaxed);
                differing_bytes(found, content(other, word))
            })
            .sum()
    }

    /// Returns whether the bytes of a page are in memory, mapped or not.
    pub(super) fn is_here(&self, page: usize) -> io::Result<bool> {
        let index = u32::try_from(page).map_err(io::Error::other)?;
        let mut found = [0];
        self.memory.in_memory(PageIndex::new(index), &mut found)?;
        Ok(found[0] & 1 == 1)
    }
}

/// Returns the number of bytes that differ between two words.
pub(super) fn differing_bytes(found: u64, wanted: u64) -> u64 {
    if found == wanted {
        return 0;
    }
    let differing = (found ^ wanted).to_ne_bytes();
    differing.iter().filter(|&&byte| byte != 0).count() as u64
}

/// Returns the contents of a page.
pub(super) fn page_bytes(page: usize) -> PageBytes {
    let mut bytes = [0; PAGE_SIZE];
    let (words, _) = bytes.as_chunks_mut::<8>();
    for (index, word) in words.iter_mut().enumerate() {
        *word = content(page, index).to_ne_bytes();
    }
    bytes
}

/// Returns the contents of a word in a page.
pub(super) fn content(page: usize, word: usize) -> u64 {
    ((page as u64) << 16 | word as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1
}
