//! A test that inspects the memory of its process, which it does not share.

use fabric_test_support::*;

const GUEST: u64 = 64 * MIB;
const LOCAL: u64 = 16 * MIB;

/// Returns the private resident bytes of this process, which include a donor's slab.
fn anonymous_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("/proc");
    let line = status.lines().find(|line| line.starts_with("RssAnon:"));
    let kib = line.and_then(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok());
    kib.expect("RssAnon") << 10
}

#[test]
fn discarded_pages_are_zero_here_and_gone_at_the_donor() {
    in_own_process(
        "donor_shrinks::discarded_pages_are_zero_here_and_gone_at_the_donor",
        discard_nearly_all,
    );
}

fn discard_nearly_all() {
    let donor = donor(GUEST);
    let running = start(&config(GUEST, LOCAL, &[donor.address()]));
    let words = Words::of(&running.fabric);
    fill(words, 1);
    let pages = words.pages();
    let fetched_before = running.fabric.nodes()[1].pages_fetched;
    let slab_before = anonymous_bytes();
    // All but one page in the middle, which splits the runs.
    let kept = pages / 2 + 3;
    let discarder = running.fabric.discarder();
    discarder
        .discard(&[range(0, kept), range(kept + 1, pages - kept - 1)])
        .expect("discarded");
    let stats = &running.fabric.stats().free_pages;
    assert_eq!(stats.reported.get(), pages as u64 - 1);
    assert!(stats.dropped_here.get() > LOCAL / 4096 / 2);
    assert!(
        running.fabric.cached_pages() <= 1,
        "the budget is free again"
    );
    let resident = running.fabric.memory().resident_bytes().expect("fstat");
    assert!(resident <= 4096, "{resident} bytes are still here");
    wait_until("the donor drops every page", || {
        stats.dropped_at_home.get() >= pages as u64 - 1
    });
    let slab = anonymous_bytes();
    assert!(
        slab + GUEST / 2 < slab_before,
        "the slab shrinks: {slab_before} bytes before, {slab} after"
    );
    // Reads of zero pages cause no traffic; the page in the middle is unchanged.
    assert_all(words, 0..kept, 0);
    assert_all(words, kept + 1..pages, 0);
    verify_page(words, 1, kept);
    let fetched = running.fabric.nodes()[1].pages_fetched - fetched_before;
    assert!(fetched <= 1, "{fetched} pages came from the donor");
    // The memory can be written again.
    fill(words, 2);
    verify(words, 2);
    let nodes = running.fabric.shutdown();
    let count = nodes[1].own_count.expect("the donor reported its counters");
    assert!(count.pages_dropped >= pages as u64 - 1);
}
