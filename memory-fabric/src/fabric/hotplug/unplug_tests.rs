//! Blocks whose unplugging fails keep their bytes.

use super::*;
use crate::page::PageIndex;
use crate::page_map::Kind;
use crate::pager::mailbox::Arrival;
use crate::support::{
    MIB, WORDS_PER_PAGE, Words, assert_all, config, donor, pattern, start, verify_page,
};
use std::sync::atomic::Ordering;

const GUEST: u64 = 16 * MIB;
const BLOCKS: Range<u32> = 0..40;
const SEED: u64 = 9;

#[test]
fn an_unplug_that_fails_changes_no_byte() {
    let (here, joins) = (donor(GUEST), donor(128 * MIB));
    let config = FabricConfig {
        hotplug: Some(PageRange::new(
            PageIndex::new(64 * BLOCK_PAGES),
            64 * BLOCK_PAGES,
        )),
        prefetch: false,
        ..config(GUEST, GUEST / 2, &[here.address()])
    };
    let running = start(&config);
    let hotplug = running.fabric.hotplug().expect("it was asked for");
    let words = Words::of(&running.fabric);
    let address = DonorAddress {
        name: None,
        zone: None,
        address: joins.address(),
        fingerprint: None,
        bytes: None,
    };
    let bytes = u64::from(BLOCKS.end) * BLOCK_BYTES;
    hotplug.request(bytes, Some(address)).expect("it joins");
    hotplug.plug(BLOCKS).expect("memory");
    let inner = &hotplug.0;
    // Ten times what stays here: pages of every state.
    let pages: Vec<_> = inner.pages_of(&BLOCKS).iter().collect();
    for page in &pages {
        for word in 0..WORDS_PER_PAGE {
            let value = pattern(SEED, page.index(), word);
            words.at(page.index(), word).store(value, Ordering::Relaxed);
        }
    }
    // As the fault thread holds a page of which a donor sends nothing. It is the last, in a piece
    // of its own.
    let held = *pages.last().expect("some");
    let entry = inner.shared.map.entry(held);
    loop {
        let seen = entry.state();
        let here = matches!(seen.kind(), Kind::Resident | Kind::Probation);
        if here && entry.begin_install(seen) {
            break;
        }
        words.at(held.index(), 0).load(Ordering::Relaxed);
    }
    let error = hotplug.unplug(BLOCKS).expect_err("a page is held");
    let late = matches!(error, PlugError::Discard(DiscardError::Late));
    assert!(late, "{error}");
    let released = inner.shared.release(held, Arrival::Touched);
    released.expect("released");
    for page in &pages {
        verify_page(words, SEED, page.index());
    }
    // They are written back as before, and can be unplugged.
    for page in &pages {
        verify_page(words, SEED, page.index());
    }
    hotplug.unplug(BLOCKS).expect("nothing is held");
    assert_eq!(hotplug.homes().added_blocks(), 0);
    hotplug.plug(0..1).expect("memory");
    let first = pages[0].index();
    assert_all(words, first..first + 512, 0);
}
