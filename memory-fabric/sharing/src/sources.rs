//! How long threads waited for the pages of each node.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use fabric_coherence::members::{MEMBERS_MAX, Member};

use crate::waits::THREADS_MAX;

/// What one thread waited for.
#[derive(Debug, Default)]
struct Row {
    /// Its id; 0 while the row is free.
    thread: AtomicU32,
    /// Nanoseconds, by the node that sent the pages.
    waited: [AtomicU64; MEMBERS_MAX],
}

/// Adds up times by the thread that waited and by the node that sent the page. The engine's thread
/// writes; any thread reads. A thread that has ended keeps its row.
#[derive(Debug)]
pub struct Sources([Row; THREADS_MAX]);

impl Default for Sources {
    fn default() -> Self {
        Self(std::array::from_fn(|_| Row::default()))
    }
}

impl Sources {
    /// All rows, from the one on that a thread has unless another one took it before.
    fn rows(&self, thread: u32) -> impl Iterator<Item = &Row> {
        let (before, from) = self.0.split_at(thread as usize % THREADS_MAX);
        from.iter().chain(before)
    }

    /// A page came from `member` for which the thread waited for so many nanoseconds.
    pub(crate) fn count(&self, thread: u32, member: Member, waited: u64) {
        // Relaxed: each number is complete in itself, and one thread writes.
        for row in self.rows(thread) {
            let of = row.thread.load(Ordering::Relaxed);
            if of == 0 {
                row.thread.store(thread, Ordering::Relaxed);
            }
            if of == 0 || of == thread {
                if let Some(sum) = row.waited.get(member.index()) {
                    sum.fetch_add(waited, Ordering::Relaxed);
                }
                return;
            }
        }
    }

    /// How long a thread has waited, by the node that sent the pages, in nanoseconds.
    #[must_use]
    pub fn of(&self, thread: u32) -> [u64; MEMBERS_MAX] {
        let of = |row: &Row| row.thread.load(Ordering::Relaxed);
        let mut rows = self.rows(thread).take_while(|row| of(row) != 0);
        let row = rows.find(|row| of(row) == thread);
        std::array::from_fn(|place| row.map_or(0, |row| row.waited[place].load(Ordering::Relaxed)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_added_up_by_thread_and_node() {
        let sources = Sources::default();
        let [first, second] = [0, 15].map(|place| Member::at(place).unwrap());
        for (thread, member, waited) in [
            (7, first, 100),
            (8, second, 30),
            (7, second, 1),
            (7, second, 2),
        ] {
            sources.count(thread, member, waited);
        }
        let of = |thread| {
            let waited = sources.of(thread);
            (waited[0], waited[15], waited.iter().sum::<u64>())
        };
        assert_eq!((of(7), of(8)), ((100, 3, 103), (0, 30, 30)));
        assert_eq!((of(0), of(9)), ((0, 0, 0), (0, 0, 0)));
    }

    #[test]
    fn more_threads_than_rows_are_not_counted() {
        let sources = Sources::default();
        let member = Member::at(1).unwrap();
        for thread in 1..=600 {
            sources.count(thread, member, 1);
        }
        assert_eq!((sources.of(512)[1], sources.of(513)[1]), (1, 0));
    }
}
