//! The allocation of pages in a staging buffer.

/// Pages of a buffer, allocated in runs. No heap allocation after creation.
#[derive(Debug)]
pub struct Room {
    /// One bit per page; set when it is in use.
    used: Box<[u64]>,
    pages: usize,
}

impl Room {
    /// Creates a buffer of this many free pages.
    #[must_use]
    pub fn new(pages: usize) -> Self {
        Self {
            used: vec![0; pages.div_ceil(64)].into_boxed_slice(),
            pages,
        }
    }

    /// Allocates the first run of `count` free pages.
    pub fn take(&mut self, count: usize) -> Option<usize> {
        let mut length = 0;
        for page in 0..self.pages {
            if self.is_used(page) {
                length = 0;
                continue;
            }
            length += 1;
            if length == count {
                let first = page + 1 - count;
                self.mark(first, count, true);
                return Some(first);
            }
        }
        None
    }

    /// Frees an allocated run.
    pub fn free(&mut self, first: usize, count: usize) {
        debug_assert!((first..first + count).all(|page| self.is_used(page)));
        self.mark(first, count, false);
    }

    fn is_used(&self, page: usize) -> bool {
        self.used[page / 64] & (1 << (page % 64)) != 0
    }

    fn mark(&mut self, first: usize, count: usize, used: bool) {
        for page in first..first + count {
            let bit = 1 << (page % 64);
            if used {
                self.used[page / 64] |= bit;
            } else {
                self.used[page / 64] &= !bit;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_full_buffer_gives_nothing_and_what_comes_back_is_given_again() {
        let mut room = Room::new(100);
        assert_eq!(room.take(64), Some(0));
        assert_eq!(room.take(36), Some(64));
        assert_eq!(room.take(1), None);
        room.free(10, 5);
        assert_eq!(room.take(6), None);
        assert_eq!(room.take(5), Some(10));
    }

    proptest! {
        #[test]
        fn no_page_is_given_twice(steps in prop::collection::vec((1_usize..9, any::<bool>()), 1..200)) {
            let mut room = Room::new(67);
            let mut given: Vec<(usize, usize)> = Vec::new();
            for (count, take) in steps {
                if take {
                    if let Some(first) = room.take(count) {
                        prop_assert!(first + count <= 67);
                        for &(other, length) in &given {
                            prop_assert!(first + count <= other || other + length <= first);
                        }
                        given.push((first, count));
                    }
                } else if let Some((first, length)) = given.pop() {
                    room.free(first, length);
                }
            }
        }
    }
}
