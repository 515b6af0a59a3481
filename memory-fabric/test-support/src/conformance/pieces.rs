//! Pieces of pages, as stripes have them.

use super::cases::{Bed, Options, PAGES, Request, content};
use fabric_wire::PIECE_BYTES;
use memory_fabric::page::PAGE_SIZE;

/// Pieces replace their part of a page and nothing else; they are read alone, and several of them
/// also across pages.
pub(super) fn pieces(bed: &dyn Bed, options: Options) {
    let mut lines = bed.open(options);
    for (count, version) in [(1, 2), (2, 3), (4, 5)] {
        lines.bulk.write(0..PAGES, 1);
        // Where the piece of a page is.
        let at = |page: u32| page * count % 8;
        let writes = (0..PAGES).map(|page| Request::WritePiece(page, at(page), count, version));
        lines.bulk.carry_out(&writes.collect::<Vec<_>>());
        let wanted: Vec<u8> = (0..PAGES)
            .flat_map(|page| {
                let mut bytes = content(page, 1);
                let start = at(page) as usize * PIECE_BYTES;
                let piece = start..start + count as usize * PIECE_BYTES;
                bytes[piece.clone()].copy_from_slice(&content(page, version)[piece]);
                bytes
            })
            .collect();
        let reads: Vec<_> = (0..PAGES).map(Request::Read).collect();
        let pages = lines.urgent.carry_out(&reads).concat();
        assert!(pages == wanted, "{count} eighths of each page");
        let reads = (0..PAGES).map(|page| Request::ReadPiece(page, at(page), count));
        let found = lines.urgent.carry_out(&reads.collect::<Vec<_>>());
        for (page, piece) in (0..PAGES).zip(found) {
            let start = page as usize * PAGE_SIZE + at(page) as usize * PIECE_BYTES;
            assert!(
                piece == wanted[start..start + piece.len()],
                "piece of page {page}"
            );
            assert_eq!(piece.len(), count as usize * PIECE_BYTES);
        }
        // As those of a run.
        let long = 21 * count;
        let reads = (0..PAGES - 32).map(|page| Request::ReadPiece(page, at(page), long));
        let found = lines.ahead.carry_out(&reads.collect::<Vec<_>>());
        for (page, pieces) in (0..).zip(found) {
            let start = page as usize * PAGE_SIZE + at(page) as usize * PIECE_BYTES;
            assert!(
                pieces == wanted[start..start + pieces.len()],
                "from page {page} on"
            );
            assert_eq!(pieces.len(), long as usize * PIECE_BYTES);
        }
    }
}
