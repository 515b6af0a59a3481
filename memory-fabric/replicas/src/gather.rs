//! Pieces of consecutive pages that arrive, and the pages that they give.

use crate::stripe::{Layout, PARITY_MAX};
use fabric_pages::page::PAGE_SIZE;

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
        let pages = self.bytes.len() / (layout.pieces() * layout.unit());
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
