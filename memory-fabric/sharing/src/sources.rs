//! From which nodes the pages came that threads waited for.

use std::sync::atomic::{AtomicU32, Ordering};

use fabric_coherence::members::{MEMBERS_MAX, Member};

/// Threads of which this is counted: as many as are recorded while they wait.
const THREADS_MAX: usize = 64;

/// What one thread waited for.
#[derive(Debug, Default)]
struct Row {
    /// Its id; 0 while the row is free.
    thread: AtomicU32,
    /// Pages, by the node that sent them.
    pages: [AtomicU32; MEMBERS_MAX],
}

/// Counts pages by the thread that waited and by the node that sent them. The engine's thread writes; any
/// thread reads. A thread that has ended keeps its row.
#[derive(Debug)]
pub struct Sources([Row; THREADS_MAX]);

impl Default for Sources {
    fn default() -> Self {
        Self(std::array::from_fn(|_| Row::default()))
    }
}

impl Sources {
    /// A page came from `member` for which the thread waited.
    pub(crate) fn count(&self, thread: u32, member: Member) {
        // Relaxed: each number is complete in itself, and one thread writes.
        for row in &self.0 {
            let of = row.thread.load(Ordering::Relaxed);
            if of == 0 {
                row.thread.store(thread, Ordering::Relaxed);
            }
            if of == 0 || of == thread {
                if let Some(pages) = row.pages.get(member.index()) {
                    pages.fetch_add(1, Ordering::Relaxed);
                }
                return;
            }
        }
    }

    /// The pages that a thread has waited for, by the node that sent them. They wrap around.
    #[must_use]
    pub fn of(&self, thread: u32) -> [u32; MEMBERS_MAX] {
        let is_its = |row: &&Row| row.thread.load(Ordering::Relaxed) == thread;
        let row = self.0.iter().find(is_its).filter(|_| thread != 0);
        std::array::from_fn(|place| row.map_or(0, |row| row.pages[place].load(Ordering::Relaxed)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_counted_by_thread_and_node() {
        let sources = Sources::default();
        let [first, second] = [0, 15].map(|place| Member::at(place).unwrap());
        for (thread, member) in [(7, first), (8, second), (7, second), (7, second)] {
            sources.count(thread, member);
        }
        let of = |thread| {
            let pages = sources.of(thread);
            (pages[0], pages[15], pages.iter().sum::<u32>())
        };
        assert_eq!((of(7), of(8)), ((1, 2, 3), (0, 1, 1)));
        assert_eq!((of(0), of(9)), ((0, 0, 0), (0, 0, 0)));
    }

    #[test]
    fn more_threads_than_rows_are_not_counted() {
        let sources = Sources::default();
        let member = Member::at(1).unwrap();
        for thread in 1..100 {
            sources.count(thread, member);
        }
        assert_eq!((sources.of(64)[1], sources.of(65)[1]), (1, 0));
    }
}
