use super::*;
use crate::mutation::Mutation;

const UNIT: u64 = 100;
const LONGEST: u64 = 8192 * UNIT;

fn unknown(_: u32) -> Option<u64> {
    None
}

fn page(number: u32) -> PageIndex {
    PageIndex::new(number)
}

/// A thread gets pages that the directory says to hold, each after some time, one right after the
/// other. Returns when it got the last one.
fn collect(progress: &mut Progress, id: u32, pages: u32, each: u64, start: u64) -> u64 {
    let mut now = start;
    for number in 0..pages {
        progress.waits(id, page(number), now, unknown);
        now += each;
        progress.woken(page(number), now);
        progress.hold(page(number), 1, now, unknown);
    }
    now
}

fn ended(progress: &mut Progress, now: u64) -> usize {
    std::iter::from_fn(|| progress.over(now, unknown)).count()
}

#[test]
fn a_page_that_was_lost_before_its_access_was_done_was_lost_early() {
    let mut progress = Progress::new(UNIT, LONGEST);
    let [first, second] = [7, 8].map(page);
    assert!(!progress.waits(1, first, 0, unknown).early);
    progress.woken(first, 500);
    // Its instruction needs a second page, for which it waits long.
    assert!(!progress.waits(1, second, 510, unknown).early);
    progress.woken(second, 90_000);
    let seen = progress.waits(1, first, 90_020, unknown);
    assert_eq!((seen.early, seen.lost), (true, 1));
    progress.woken(first, 91_000);
    assert_eq!(progress.waits(1, second, 91_010, unknown).lost, 2);
    progress.woken(second, 92_000);
    let seen = progress.waits(1, first, 92_500, unknown);
    assert_eq!((seen.early, seen.lost), (false, 0), "it ran for long");
}

#[test]
fn pages_lost_between_others_count_as_well() {
    let mut progress = Progress::new(UNIT, LONGEST);
    // Collecting the pages takes longer in all than an access that has its pages.
    let now = collect(&mut progress, 1, 30, 10 * UNIT, 0);
    let mut lost = 0;
    for (number, now) in (0..30).zip(now..) {
        // New pages of the same access in between.
        assert!(!progress.waits(1, page(100 + number), now, unknown).early);
        progress.woken(page(100 + number), now);
        lost = progress.waits(1, page(number), now, unknown).lost;
        progress.woken(page(number), now);
    }
    assert_eq!(lost, 30);
}

/// Pages that a thread loses early on a slow host, of 4 that its access needs again and again: each
/// takes long to come, and the thread runs for many units before it faults on the next one.
fn lost_on_a_slow_host(mutation: Option<Mutation>) -> u32 {
    let mut progress = Progress::new(UNIT, LONGEST);
    progress.switch = mutation;
    let (mut now, mut lost) = (0, 0);
    for number in (0..4).cycle().take(40) {
        lost += u32::from(progress.waits(1, page(number), now, unknown).early);
        now += 200 * UNIT;
        progress.woken(page(number), now);
        now += 20 * UNIT;
    }
    lost
}

#[test]
fn an_access_that_loses_its_pages_on_a_slow_host_is_found() {
    assert_eq!(lost_on_a_slow_host(None), 36);
    // It takes each page for that of another access, and so never holds one.
    assert_eq!(lost_on_a_slow_host(Some(Mutation::StepOfUnit)), 0);
}

#[test]
fn threads_are_told_apart_and_unknown_ones_left_out() {
    let mut progress = Progress::new(UNIT, LONGEST);
    progress.waits(1, page(1), 0, unknown);
    progress.woken(page(1), 0);
    assert!(!progress.waits(2, page(1), 0, unknown).early);
    assert!(progress.waits(1, page(1), 0, unknown).early);
    assert!(!progress.waits(0, page(1), 0, unknown).early);
}

#[test]
fn the_holds_of_a_gang_end_together_and_grow_with_it() {
    for pages in [2, 8, 30] {
        let mut progress = Progress::new(UNIT, LONGEST);
        let now = collect(&mut progress, 1, pages, 3 * UNIT, 0);
        let collected = 3 * UNIT * u64::from(pages - 1);
        let end = now + RUN_FACTOR * collected;
        assert_eq!(progress.next(), Some(end), "{pages} pages");
        assert!(!progress.is_settled(1, end - 1, unknown));
        assert!(progress.is_settled(1, end, unknown));
        assert_eq!(ended(&mut progress, end - 1), 0);
        assert_eq!(ended(&mut progress, end), pages as usize);
    }
}

/// How long a gang of 8 pages runs of which each takes `UNIT`, but one waits for a hold of another
/// node as well, after others of the same kind.
fn run_after_a_hold(hold: u64, mutation: Option<Mutation>) -> u64 {
    let mut progress = Progress::new(UNIT, LONGEST);
    progress.switch = mutation;
    let mut now = 0;
    for _ in 0..20 {
        for number in 0..8 {
            progress.waits(1, page(number), now, unknown);
            now += UNIT + if number == 4 { hold } else { 0 };
            came(&mut progress, number, now);
        }
        let end = progress.next().expect("8 pages are held");
        if progress.over(end, unknown).is_some() {
            ended(&mut progress, end);
        }
        now = end + 2 * UNIT;
    }
    now - 2 * UNIT
}

#[test]
fn how_long_a_gang_runs_has_nothing_of_the_holds_of_other_nodes() {
    // The same gangs, once with and once without another node that holds one of the pages.
    for hold in [40 * UNIT, 400 * UNIT] {
        let runs = |mutation| {
            let held = run_after_a_hold(hold, mutation) - 20 * hold;
            (held, run_after_a_hold(0, mutation))
        };
        let (with, without) = runs(None);
        assert!(with <= without + without / 8, "{with} instead of {without}");
        let (with, without) = runs(Some(Mutation::CountHolds));
        assert!(with > 2 * without, "the mutation is not found");
    }
}

#[test]
fn a_vcpu_that_halts_holds_nothing() {
    let halted = |mutation| {
        let mut progress = Progress::new(UNIT, LONGEST);
        progress.switch = mutation;
        let now = collect(&mut progress, 1, 8, 3 * UNIT, 0);
        // It has hardly run.
        progress.halts(1, now + 1);
        ended(&mut progress, now + 1)
    };
    assert_eq!(halted(None), 8);
    assert_eq!(halted(Some(Mutation::HoldWhileHalted)), 0);
    let ran = |time| move |_| Some(time);
    let mut progress = Progress::new(UNIT, LONGEST);
    progress.waits(1, page(1), 0, ran(5));
    progress.woken(page(1), 10);
    progress.hold(page(1), HOLD_MAX, 10, ran(5));
    progress.halts(2, 11);
    assert_eq!(progress.over(11, ran(5)), None, "another thread");
    progress.halts(1, 11);
    let over = Over {
        page: page(1),
        held: 1,
    };
    assert_eq!(progress.over(11, ran(5)), Some(over));
    // What it faults on next is of another access, and is held again.
    let seen = progress.waits(1, page(1), 12, ran(5));
    assert_eq!((seen.early, seen.lost), (false, 0));
    progress.halts(1, 13);
    assert_eq!(progress.settles_at(1), None, "it had halted before");
    progress.woken(page(1), 20);
    progress.hold(page(1), 1, 20, unknown);
    assert_eq!(progress.next(), Some(20 + UNIT));
}

#[test]
fn what_comes_ahead_for_a_halted_vcpu_is_not_held() {
    let mut progress = Progress::new(UNIT, LONGEST);
    let now = collect(&mut progress, 1, 4, UNIT, 0) + 1000 * UNIT;
    ended(&mut progress, now);
    progress.waits(1, page(0), now, unknown);
    came(&mut progress, 0, now);
    gathered(&mut progress, page(0));
    progress.asked(1, page(1));
    progress.halts(1, now + 1);
    came(&mut progress, 1, now + 2);
    assert_eq!(ended(&mut progress, now + 2), 2);
}

#[test]
fn a_page_is_not_held_by_the_next_gang_of_its_thread() {
    let longest = 20 * UNIT;
    let mut progress = Progress::new(UNIT, longest);
    // Nobody looks at the holds meanwhile.
    let now = collect(&mut progress, 1, 10, 3 * UNIT, 0);
    assert!(now > longest);
    assert_eq!(ended(&mut progress, now), 7, "those of the first gang");
}

#[test]
fn one_page_is_held_for_the_level_of_its_grant() {
    for (level, units) in [(1, 1), (2, 2), (8, 128), (9, 128)] {
        let mut progress = Progress::new(UNIT, LONGEST);
        progress.waits(1, page(1), 0, unknown);
        progress.woken(page(1), 7);
        progress.hold(page(1), level, 7, unknown);
        assert_eq!(progress.next(), Some(7 + units * UNIT));
        // Nobody is known to wait for this one.
        progress.hold(page(2), level, 9, unknown);
        assert_eq!(ended(&mut progress, 9 + units * UNIT), 2);
    }
}

#[test]
fn who_waits_for_the_next_page_does_not_keep_the_others_for_ever() {
    let mut progress = Progress::new(UNIT, LONGEST);
    let now = collect(&mut progress, 1, 2, UNIT, 0);
    progress.waits(1, page(9), now + 10, unknown);
    let patience = PATIENCE_UNITS * UNIT + RUN_FACTOR * UNIT;
    assert_eq!(progress.settles_at(1), None);
    assert_eq!(ended(&mut progress, now + 9 + patience), 0);
    assert_eq!(ended(&mut progress, now + 10 + patience), 2);
}

#[test]
fn a_gang_ends_after_its_longest_time() {
    let longest = 500 * UNIT;
    let mut progress = Progress::new(UNIT, longest);
    // The next page always comes just in time.
    let mut now = collect(&mut progress, 1, 1, 0, 0);
    for number in 1.. {
        progress.waits(1, page(number), now, unknown);
        now += 15 * UNIT;
        if now >= longest {
            break;
        }
        assert_eq!(ended(&mut progress, now), 0);
        progress.woken(page(number), now);
        progress.hold(page(number), 1, now, unknown);
    }
    assert!(ended(&mut progress, longest) > 30);
    assert_eq!(progress.next(), None);
}

#[test]
fn a_page_for_another_access_does_not_prolong_the_gang() {
    let mut progress = Progress::new(UNIT, LONGEST);
    let now = collect(&mut progress, 1, 8, UNIT, 0);
    let end = now + RUN_FACTOR * 7 * UNIT;
    progress.waits(1, page(50), now + 3 * UNIT, unknown);
    assert_eq!(progress.next(), Some(end), "the time of the gang passes");
    progress.woken(page(50), now + 5 * UNIT);
    progress.hold(page(50), 1, now + 5 * UNIT, unknown);
    assert_eq!(progress.next(), Some(end));
}

#[test]
fn a_thread_that_has_not_run_keeps_its_page_and_has_not_progressed() {
    let mut progress = Progress::new(UNIT, LONGEST);
    let ran = |time| move |_| Some(time);
    progress.waits(1, page(1), 0, ran(500));
    progress.woken(page(1), 10);
    progress.hold(page(1), 1, 10, ran(500));
    assert_eq!(progress.over(10 + UNIT, ran(501)), None);
    assert_eq!(progress.over(10 + 2 * UNIT, ran(501)), None);
    assert!(!progress.is_settled(1, 10 + 3 * UNIT, ran(501)));
    assert!(progress.is_settled(1, 10 + 4 * UNIT, ran(525)));
    let over = Over {
        page: page(1),
        held: 4 * UNIT,
    };
    assert_eq!(progress.over(10 + 4 * UNIT, ran(525)), Some(over));
    let seen = progress.waits(1, page(1), 10 + 5 * UNIT, ran(530));
    assert!(seen.early, "it has run for less than a unit");
    progress.woken(page(1), 1000);
    progress.hold(page(1), 1, 1000, ran(520));
    let late = 1000 + PATIENCE_UNITS * UNIT;
    assert_eq!(progress.over(late - 1, ran(521)), None);
    let over = progress.over(late + UNIT, ran(521));
    assert_eq!(over.map(|over| over.page), Some(page(1)), "in the end");
    let seen = progress.waits(1, page(1), late + 2 * UNIT, ran(520 + UNIT));
    assert!(!seen.early, "it has run for a unit");
}

/// How long a page is held whose thread does not run, after pages were long in coming.
fn held_after_long_waits(mutation: Option<Mutation>) -> (u64, u64) {
    let mut progress = Progress::new(UNIT, LONGEST);
    progress.switch = mutation;
    let mut now = 0;
    for number in 0..200 {
        progress.waits(1, page(number), now, |_| Some(0));
        now += 100 * LONGEST;
        progress.woken(page(number), now);
    }
    progress.hold(page(199), HOLD_MAX, now, |_| Some(0));
    loop {
        now = progress.next().expect("a page is held");
        if let Some(over) = progress.over(now, |_| Some(0)) {
            return (over.held, progress.hold_max());
        }
    }
}

#[test]
fn waits_for_pages_however_long_do_not_prolong_holds_over_their_bound() {
    let (held, most) = held_after_long_waits(None);
    assert!(held <= most, "{held} of {most}");
    let (held, most) = held_after_long_waits(Some(Mutation::UnboundedPatience));
    assert!(held > most, "the mutation is not found: {held} of {most}");
}

/// What is to be requested when a page has come.
fn gathered(progress: &mut Progress, page: PageIndex) -> Vec<u32> {
    let mut needs = Vec::new();
    progress.gather(page, &mut needs);
    needs.iter().map(|need| need.page.number()).collect()
}

fn came(progress: &mut Progress, number: u32, now: u64) {
    progress.woken(page(number), now);
    progress.hold(page(number), 1, now, unknown);
}

/// A thread gets a gang of 8 pages back, the last one at some time, while it waits for one of them.
/// Returns that time and when each hold ends, or an error if one ended before.
fn regathered(mutation: Option<Mutation>) -> Result<(u64, Vec<u64>), u64> {
    let mut progress = Progress::new(UNIT, LONGEST);
    let now = collect(&mut progress, 1, 8, 3 * UNIT, 0) + 1000 * UNIT;
    assert_eq!(ended(&mut progress, now), 8);
    progress.switch = mutation;
    progress.waits(1, page(0), now, unknown);
    progress.wants(1, true);
    assert!(gathered(&mut progress, page(0)).is_empty(), "not there yet");
    let mut at = now + 500 * UNIT;
    came(&mut progress, 0, at);
    assert_eq!(gathered(&mut progress, page(0)), [1, 2, 3, 4, 5, 6, 7]);
    for number in 1..8 {
        progress.asked(1, page(number));
    }
    // It faults on one of them, which comes third.
    progress.waits(1, page(3), at, unknown);
    for number in [1, 2, 3, 4, 5, 6, 7] {
        at += 3 * UNIT;
        if progress.over(at, unknown).is_some() {
            return Err(at);
        }
        came(&mut progress, number, at);
    }
    let mut ends = Vec::new();
    while let Some(end) = progress.next() {
        ends.extend(progress.over(end, unknown).map(|_| end));
    }
    Ok((at, ends))
}

#[test]
fn a_gang_that_was_lost_is_requested_at_once_and_held_together() {
    let (last, ends) = regathered(None).expect("no hold ends early");
    // The wait for the first is no part of what was collected.
    assert_eq!(ends, vec![last + RUN_FACTOR * 21 * UNIT; 8]);
    let found = regathered(Some(Mutation::ForgetAhead));
    assert!(found.is_err(), "the mutation is not found: {found:?}");
}

#[test]
fn what_came_ahead_is_not_kept_for_ever_for_a_thread_that_waits() {
    let mut progress = Progress::new(UNIT, LONGEST);
    let now = collect(&mut progress, 1, 4, UNIT, 0) + 1000 * UNIT;
    ended(&mut progress, now);
    progress.waits(1, page(0), now, unknown);
    came(&mut progress, 0, now);
    gathered(&mut progress, page(0));
    progress.asked(1, page(1));
    progress.waits(1, page(2), now, unknown);
    let at = now + 10 * UNIT;
    came(&mut progress, 1, at);
    let patience = PATIENCE_UNITS * UNIT + RUN_FACTOR * UNIT;
    assert_eq!(ended(&mut progress, now + patience - 1), 0);
    assert_eq!(ended(&mut progress, now + patience), 2);
}

#[test]
fn a_page_that_came_ahead_and_was_lost_before_the_access_was_done_was_lost_early() {
    let mut progress = Progress::new(UNIT, LONGEST);
    let now = collect(&mut progress, 1, 4, UNIT, 0) + 1000 * UNIT;
    ended(&mut progress, now);
    assert!(!progress.waits(1, page(0), now, unknown).early);
    came(&mut progress, 0, now);
    gathered(&mut progress, page(0));
    progress.asked(1, page(1));
    came(&mut progress, 1, now + 1);
    let seen = progress.waits(1, page(1), now + 2, unknown);
    assert_eq!((seen.early, seen.lost), (true, 1));
}

#[test]
fn a_page_without_contention_or_of_no_known_thread_brings_no_others() {
    let mut progress = Progress::new(UNIT, LONGEST);
    let now = collect(&mut progress, 1, 4, UNIT, 0) + 1000 * UNIT;
    progress.waits(1, page(9), now, unknown);
    progress.woken(page(9), now);
    assert!(gathered(&mut progress, page(9)).is_empty(), "never held");
    assert!(
        gathered(&mut progress, page(0)).is_empty(),
        "it waits for none"
    );
    progress.waits(2, page(0), now, unknown);
    progress.woken(page(0), now);
    assert!(
        gathered(&mut progress, page(0)).is_empty(),
        "needed by another"
    );
}
