//! What write-backs send.

use fabric_wire::HEADER_BYTES;
use memory_fabric::fabric::Redundancy;
use memory_fabric::stats::PagerStats;
use serde::Serialize;

/// The write-backs of a memory since its start, most of them from filling it.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct WriteBack {
    /// Pages that were written back; one that all its donors have confirmed counts once.
    pub(super) pages: u64,
    /// Bytes sent for them to all donors, with the headers of their frames.
    pub(super) bytes: u64,
    /// `null` without donors, or without write-backs.
    pub(super) bytes_per_page: f64,
}

impl WriteBack {
    /// Reads the pager's counters.
    pub(super) fn of(stats: &PagerStats, redundancy: Redundancy) -> Self {
        let pages = match redundancy {
            Redundancy::None => {
                let donors = stats.donors.iter();
                donors.map(|donor| donor.pages_written_back.get()).sum()
            }
            // The last link is that to the memory of all donors; the others count copies and pieces.
            Redundancy::Copies | Redundancy::Stripes(_) => {
                let all = stats.donors.last();
                all.map_or(0, |all| all.pages_written_back.get())
            }
        };
        let sent = stats.donors.iter().map(|donor| {
            // Each page or piece has a frame of its own.
            donor.bulk.wire_bytes.get() + donor.bulk.pages.get() * HEADER_BYTES as u64
        });
        let bytes = sent.sum();
        // Counts of bytes stay far below 2^52.
        #[allow(clippy::cast_precision_loss)]
        let bytes_per_page = match (pages, bytes) {
            (0, _) | (_, 0) => f64::NAN,
            _ => bytes as f64 / pages as f64,
        };
        Self {
            pages,
            bytes,
            bytes_per_page,
        }
    }
}

#[cfg(test)]
mod tests {
    use memory_fabric::page::PAGE_SIZE;

    use super::*;

    #[allow(clippy::cast_precision_loss, reason = "a few thousand")]
    const FRAME: f64 = (PAGE_SIZE + HEADER_BYTES) as f64;

    #[test]
    fn pages_count_once_and_bytes_for_each_donor_that_gets_them() {
        let stats = PagerStats::new(2);
        for (donor, pages) in stats.donors.iter().zip([3, 5]) {
            donor.pages_written_back.add(pages);
            let bytes = PAGE_SIZE * usize::try_from(pages).expect("few");
            donor.bulk.record(pages, 0, bytes);
        }
        let one = WriteBack::of(&stats, Redundancy::None);
        assert_eq!((one.pages, one.bytes_per_page), (8, FRAME));

        // Two donors with copies, and the link to both.
        let stats = PagerStats::new(3);
        for donor in &stats.donors {
            donor.pages_written_back.add(7);
        }
        for donor in &stats.donors[..2] {
            donor.bulk.record(7, 0, 7 * PAGE_SIZE);
        }
        let two = WriteBack::of(&stats, Redundancy::Copies);
        assert_eq!((two.pages, two.bytes_per_page), (7, 2.0 * FRAME));
    }

    #[test]
    fn without_write_backs_or_donors_there_is_no_quotient() {
        let stats = PagerStats::new(1);
        assert!(
            WriteBack::of(&stats, Redundancy::None)
                .bytes_per_page
                .is_nan()
        );
        // The loopback slab counts pages and sends nothing.
        stats.donors[0].pages_written_back.increment();
        let none = WriteBack::of(&stats, Redundancy::None);
        assert!(none.pages == 1 && none.bytes_per_page.is_nan(), "{none:?}");
    }
}
