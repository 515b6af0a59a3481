use super::*;

#[test]
fn an_untouched_page_becomes_resident_and_dirty_by_a_first_touch() {
    let entry = PageEntry::new();
    assert!(entry.begin_install(entry.state()));
    entry.mark_dirty();
    assert!(entry.list());
    assert!(!entry.finish_install());
    assert_eq!(entry.state().kind(), Kind::Resident);
    assert!(entry.state().is_dirty());
}

#[test]
fn a_touch_cancels_a_write_back() {
    let entry = resident(true);
    assert!(entry.begin_probation());
    assert!(entry.begin_write_back());
    assert!(entry.begin_install(entry.state()));
    assert!(!entry.finish_install());
    assert!(!entry.begin_drop(Kind::WritingBack));
    assert!(
        entry.state().is_dirty(),
        "a cancelled write-back leaves the page dirty"
    );
}

#[test]
fn a_touch_while_a_page_is_dropped_is_handed_to_the_evictor() {
    let entry = resident(false);
    assert!(entry.begin_probation());
    assert!(entry.begin_drop(Kind::Probation));
    assert!(entry.contend(entry.state()));
    assert!(entry.finish_drop(Kind::Remote).is_contended());
    assert_eq!(entry.state(), State::new(Kind::Remote));
}

#[test]
fn a_second_fault_on_a_fetched_page_is_woken() {
    let entry = PageEntry::new();
    entry.state.store(Kind::Remote as u32, Ordering::Relaxed);
    assert!(entry.begin_fetch(entry.state()));
    assert!(entry.contend(entry.state()));
    assert!(entry.list());
    assert!(entry.finish_install());
    assert!(!entry.state().is_contended() && !entry.state().is_dirty());
}

#[test]
fn a_fault_on_a_page_that_is_given_back_is_told_to_who_held_it() {
    let entry = PageEntry::new();
    entry.state.store(Kind::Remote as u32, Ordering::Relaxed);
    assert!(entry.begin_fetch(entry.state()));
    assert!(!entry.abandon_fetch());
    assert!(entry.begin_fetch(entry.state()));
    assert!(entry.contend(entry.state()));
    assert!(entry.abandon_fetch());
    assert_eq!(entry.state(), State::new(Kind::Remote));
}

#[test]
fn a_discarded_page_stays_listed_until_the_evictor_comes_across_it() {
    let entry = resident(true);
    assert!(entry.begin_discard(entry.state()));
    assert!(!entry.finish_drop(Kind::Untouched).is_contended());
    assert!(entry.state().is_listed() && !entry.state().is_dirty());
    // Touched again before that: it has its place already.
    assert!(entry.begin_install(entry.state()));
    assert!(!entry.unlist(), "it is being filled");
    assert!(!entry.list());
    assert!(!entry.finish_install());
    // Discarded once more, and reached in its queue.
    assert!(entry.begin_discard(entry.state()));
    assert!(!entry.finish_drop(Kind::Untouched).is_contended());
    assert!(entry.unlist() && !entry.unlist());
    assert_eq!(entry.state(), State::new(Kind::Untouched));
}

#[test]
fn an_eviction_takes_a_page_off_the_list_and_a_forgotten_page_is_zero() {
    let entry = resident(false);
    assert!(entry.state().is_listed());
    assert!(entry.begin_probation());
    assert!(entry.begin_drop(Kind::Probation));
    assert!(!entry.finish_drop(Kind::Remote).is_contended());
    assert_eq!(entry.state(), State::new(Kind::Remote));
    assert!(entry.forget(entry.state()));
    assert_eq!(entry.state(), State::new(Kind::Untouched));
}

#[test]
fn a_map_costs_eight_bytes_a_page() {
    assert_eq!(PageMap::BYTES_PER_PAGE, 8);
    let map = PageMap::new(PAGES_MAX).expect("a map of 16 TiB is only address space");
    assert_eq!(
        map.entry(PageIndex::new(u32::MAX - 1)).state(),
        State::new(Kind::Untouched)
    );
}

#[test]
fn a_page_fetched_ahead_is_known_as_such_until_it_is_touched_or_dropped() {
    for (end, left) in [
        (Kind::Resident, State(Kind::Resident as u32 | LISTED)),
        (Kind::Remote, State::new(Kind::Remote)),
        // Discarded: it stays in its queue.
        (Kind::Untouched, State(Kind::Untouched as u32 | LISTED)),
    ] {
        let entry = PageEntry::new();
        entry.state.store(Kind::Remote as u32, Ordering::Relaxed);
        assert!(entry.begin_fetch(entry.state()));
        assert!(entry.list());
        assert!(entry.finish_ahead(true));
        let seen = entry.state();
        assert!(seen.is_ahead() && seen.is_chained() && seen.is_listed());
        assert_eq!(seen.kind(), Kind::Probation);
        match end {
            Kind::Resident => {
                assert!(entry.begin_install(seen));
                assert!(!entry.list());
                assert!(!entry.finish_install());
            }
            Kind::Remote => {
                assert!(entry.begin_drop(Kind::Probation));
                assert!(!entry.finish_drop(Kind::Remote).is_contended());
            }
            _ => {
                assert!(entry.begin_discard(seen));
                assert!(!entry.finish_drop(Kind::Untouched).is_contended());
            }
        }
        assert_eq!(entry.state(), left);
    }
}

#[test]
fn a_page_that_is_wanted_when_it_comes_is_not_set_aside() {
    let entry = PageEntry::new();
    entry.state.store(Kind::Remote as u32, Ordering::Relaxed);
    assert!(entry.begin_fetch(entry.state()));
    assert!(entry.contend(entry.state()));
    assert!(entry.list());
    assert!(!entry.finish_ahead(false));
    assert!(entry.finish_install(), "waiters are woken");
}

fn resident(dirty: bool) -> PageEntry {
    let entry = PageEntry::new();
    assert!(entry.begin_install(entry.state()));
    if dirty {
        entry.mark_dirty();
    }
    assert!(entry.list());
    assert!(!entry.finish_install());
    entry
}
