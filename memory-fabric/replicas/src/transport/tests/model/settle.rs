//! The end of a history: everything is answered, and what donors have is compared.

use super::super::hostile::assert_pieces;
use super::*;

impl World {
    /// Returns whether all copies that are missing find room. A hostile donor goes out at any time.
    fn can_repair(&self) -> bool {
        let copies = self.bed.set.copies();
        let hostile = self.hostile.as_ref().map(|(donor, _)| as_u8(*donor));
        let found = usize::from(hostile.is_some_and(|donor| copies.is_lost(donor)));
        let lost = self.lost[..self.slots.len()].iter();
        let lost = lost.filter(|lost| **lost).count() + found;
        // Of four donors, three have slots enough, but not always on two different ones, and a place
        // to which a copy was moving when a donor went out is not used again.
        match self.layout {
            None => (lost == 0 && self.joined == 0) || (self.slots.len() == 3 && self.leaves == 0),
            Some(layout) => lost + layout.pieces() <= self.slots.len(),
        }
    }

    /// All donors that are not lost return; every request is answered, and both copies of each page
    /// are checked if there is room for two.
    pub(super) fn settle(mut self) -> (u32, u32, u32) {
        for donor in 0..self.down.len() {
            if std::mem::take(&mut self.down[donor]) && !self.lost[donor] {
                self.bed.restore(donor);
                self.bed.set.up(donor);
            }
        }
        let deadline = Instant::now() + Duration::from_secs(30);
        loop {
            self.poll_reader();
            self.poll_evictor();
            self.see_off();
            self.welcome();
            if self.leaving.is_some() || self.rebalancing.is_some() {
                self.use_page();
                self.fetch_run();
            }
            let is_moving = |page: &Page| matches!(page, Page::Writing(..) | Page::Fetching(_));
            let degraded = self.bed.set.copies().degraded();
            let can_repair = self.can_repair();
            let is_settled = self.leaving.is_none()
                && self.rebalancing.is_none()
                && self.joining.is_none()
                && (!can_repair || degraded == 0);
            if is_settled && !self.pages.iter().any(is_moving) {
                break;
            }
            let seed = self.seed;
            assert!(
                Instant::now() < deadline,
                "seed {seed} hangs, {degraded} blocks have one copy, {:?} leaves",
                self.leaving
            );
        }
        for (index, page) in self.pages.iter().enumerate() {
            let Page::Remote(version) = *page else {
                continue;
            };
            let (block, in_block) = split(self.offsets[index]);
            if let Some(layout) = self.layout {
                let what = format!("seed {}", self.seed);
                assert_pieces(&self.bed, layout, self.offsets[index], version, &what);
                continue;
            }
            for place in self.bed.set.copies().readable(block).into_iter().flatten() {
                let donor = self.bed.donors[usize::from(place.donor)].lock();
                let at = offset_at(place, in_block, 1);
                let found = donor.expect("no panic").version_at(at);
                let seed = self.seed;
                assert_eq!(found, version, "seed {seed}: page {index} at {place:?}");
            }
        }
        (self.left, self.joined, self.rebalanced)
    }
}
