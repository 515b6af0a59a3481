//! Pieces of consecutive pages that arrive, and the pages that they give.

use crate::stripe::{Layout, PARITY_MAX, PIECES_MAX};
use fabric_pages::page::{PAGE_SIZE, PageBytes};
use fabric_wire::RUN_PAGES_MAX;
use std::fmt;

/// Pieces that arrived with other bytes than those of the pages.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Wrong {
    /// Which, a bit each.
    pub pieces: u16,
    /// For each of them, the first page whose piece is wrong.
    pub pages: [usize; PIECES_MAX],
}

impl Wrong {
    fn add(&mut self, at: usize, page: usize) {
        if self.pieces >> at & 1 == 0 {
            self.pieces |= 1 << at;
            self.pages[at] = page;
        }
    }
}

/// Room to try pieces in.
pub(crate) struct Trial {
    page: Box<PageBytes>,
    /// What the check of the page overwrites.
    checked: Box<PageBytes>,
    parity: Box<[u8]>,
}

impl fmt::Debug for Trial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Trial").finish_non_exhaustive()
    }
}

impl Trial {
    pub fn new(layout: Layout) -> Self {
        Self {
            page: Box::new([0; PAGE_SIZE]),
            checked: Box::new([0; PAGE_SIZE]),
            parity: vec![0; layout.parity() * layout.unit()].into(),
        }
    }

    /// Returns a piece of the page.
    fn piece(&self, layout: Layout, at: usize) -> &[u8] {
        let unit = layout.unit();
        match at.checked_sub(layout.data()) {
            None => &self.page[at * unit..][..unit],
            Some(row) => &self.parity[row * unit..][..unit],
        }
    }
}

/// A buffer for the pages, with room for the pieces of parity behind them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Gather {
    bytes: Vec<u8>,
    /// The pieces that have arrived, a bit each.
    arrived: u16,
}

impl Gather {
    /// Forgets what has arrived. The buffer is kept.
    pub fn clear(&mut self) {
        self.arrived = 0;
    }

    /// Returns the pieces that have arrived, a bit each.
    pub fn arrived(&self) -> u16 {
        self.arrived
    }

    /// Takes piece `at` of each page, one after the other. Returns whether there are enough now.
    pub fn take(&mut self, layout: Layout, at: usize, pieces: &[u8]) -> bool {
        let unit = layout.unit();
        let pages = pieces.len() / unit;
        let parity_at = pages * PAGE_SIZE;
        self.bytes
            .resize(parity_at + layout.parity() * pieces.len(), 0);
        match at.checked_sub(layout.data()) {
            None => {
                let targets = self.bytes[..parity_at].chunks_exact_mut(PAGE_SIZE);
                for (page, piece) in targets.zip(pieces.chunks_exact(unit)) {
                    page[at * unit..][..unit].copy_from_slice(piece);
                }
            }
            Some(row) => {
                let start = parity_at + row * pieces.len();
                self.bytes[start..][..pieces.len()].copy_from_slice(pieces);
            }
        }
        self.arrived |= 1 << at;
        self.arrived.count_ones() as usize >= layout.data()
    }

    /// Returns the pages, once there are enough pieces.
    pub fn pages(&mut self, layout: Layout) -> &[u8] {
        let data = (1 << layout.data()) - 1;
        let pages = self.count(layout);
        let (all, parity) = self.bytes.split_at_mut(pages * PAGE_SIZE);
        if self.arrived & data != data {
            let unit = layout.unit();
            for (number, page) in all.chunks_exact_mut(PAGE_SIZE).enumerate() {
                let mut rows: [&[u8]; PARITY_MAX] = [&[]; PARITY_MAX];
                for (row, all) in rows.iter_mut().zip(parity.chunks_exact(pages * unit)) {
                    *row = &all[number * unit..][..unit];
                }
                layout.restore(page, rows, self.arrived);
            }
        }
        all
    }

    fn count(&self, layout: Layout) -> usize {
        self.bytes.len() / (layout.pieces() * layout.unit())
    }

    /// Returns piece `at` of a page, as it arrived.
    fn arrived_piece(&self, layout: Layout, page: usize, at: usize) -> &[u8] {
        let unit = layout.unit();
        let start = match at.checked_sub(layout.data()) {
            None => page * PAGE_SIZE + at * unit,
            Some(row) => {
                let pages = self.count(layout);
                pages * PAGE_SIZE + (row * pages + page) * unit
            }
        };
        &self.bytes[start..][..unit]
    }

    /// Computes a page from these pieces, which are as many as it has pieces of data.
    fn compute(&self, layout: Layout, number: usize, chosen: u16, page: &mut PageBytes) {
        let start = number * PAGE_SIZE;
        page.copy_from_slice(&self.bytes[start..][..PAGE_SIZE]);
        let mut rows: [&[u8]; PARITY_MAX] = [&[]; PARITY_MAX];
        for (row, piece) in rows.iter_mut().enumerate().take(layout.parity()) {
            *piece = self.arrived_piece(layout, number, layout.data() + row);
        }
        layout.restore(page, rows, chosen);
    }

    /// Looks, for each page, for pieces among those that arrived that give a genuine one, which
    /// `is_genuine` is asked with its number and may overwrite. Keeps these pages, and returns the
    /// wrong pieces; `None`, and nothing has changed, when a page has too few that are right.
    pub fn search(
        &mut self,
        layout: Layout,
        trial: &mut Trial,
        is_genuine: &dyn Fn(usize, &mut PageBytes) -> bool,
    ) -> Option<Wrong> {
        let pages = self.count(layout);
        let is_choice = |chosen: &u16| {
            chosen & !self.arrived == 0 && chosen.count_ones() as usize == layout.data()
        };
        let choices = || (0..1 << layout.pieces()).filter(is_choice);
        let mut found = [0; RUN_PAGES_MAX as usize];
        // What was right for one page is most likely right for the next.
        let mut likely = choices().next()?;
        for (number, found) in found.iter_mut().enumerate().take(pages) {
            let gives = |chosen: &u16| {
                self.compute(layout, number, *chosen, &mut trial.page);
                trial.checked.copy_from_slice(&*trial.page);
                is_genuine(number, &mut trial.checked)
            };
            likely = std::iter::once(likely).chain(choices()).find(gives)?;
            *found = likely;
        }
        let mut wrong = Wrong::default();
        for (number, &chosen) in found.iter().enumerate().take(pages) {
            self.compute(layout, number, chosen, &mut trial.page);
            layout.encode(&*trial.page, &mut trial.parity);
            self.compare(layout, trial, number, &mut wrong);
            self.bytes[number * PAGE_SIZE..][..PAGE_SIZE].copy_from_slice(&*trial.page);
        }
        // All pages are complete.
        self.arrived |= (1 << layout.data()) - 1;
        Some(wrong)
    }

    /// Returns the pieces that arrived here with other bytes than those of the same pages in `right`, of
    /// which all are complete.
    pub fn differing(&self, layout: Layout, trial: &mut Trial, right: &Self) -> Wrong {
        let mut wrong = Wrong::default();
        for number in 0..self.count(layout).min(right.count(layout)) {
            let page = &right.bytes[number * PAGE_SIZE..][..PAGE_SIZE];
            trial.page.copy_from_slice(page);
            layout.encode(&*trial.page, &mut trial.parity);
            self.compare(layout, trial, number, &mut wrong);
        }
        wrong
    }

    /// Compares the pieces of a page that arrived with those of the right page.
    fn compare(&self, layout: Layout, right: &Trial, number: usize, wrong: &mut Wrong) {
        let arrived = (0..layout.pieces()).filter(|at| self.arrived >> at & 1 == 1);
        for at in arrived {
            if self.arrived_piece(layout, number, at) != right.piece(layout, at) {
                wrong.add(at, number);
            }
        }
    }

    /// Returns piece `at` of a single page, once there are enough of it.
    pub fn piece(&mut self, layout: Layout, at: usize) -> Box<[u8]> {
        let unit = layout.unit();
        let page = self.pages(layout);
        match at.checked_sub(layout.data()) {
            None => page[at * unit..][..unit].into(),
            Some(row) => {
                let mut parity = vec![0; layout.parity() * unit];
                layout.encode(page, &mut parity);
                parity[row * unit..][..unit].into()
            }
        }
    }
}
