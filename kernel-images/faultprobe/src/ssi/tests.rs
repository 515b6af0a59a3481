use super::broken::{Late, Lossy, Torn};
use super::*;

/// Long enough for two threads to meet.
const TICKS: u64 = 1_500_000_000;
/// A machine that is busy may run them one after the other, and then again.
const ATTEMPTS: usize = 20;

fn team() -> Team {
    let cpus = team::cpus().unwrap();
    assert!(cpus.len() > 1, "this test needs two CPUs");
    Team::on(&cpus[..2]).unwrap()
}

fn count(memory: impl Cells, how: How, patience: u64) -> Count {
    let memory = Arc::new(memory);
    let counters = Arc::new(Counters::new(0, patience));
    let (cells, on) = (memory.clone(), counters.clone());
    let seen = team().run(&[0, 1], move |_| {
        on.run(&*cells, how, &Deadline::after(TICKS / 10))
    });
    Count::of(memory.load(counters.counter()), &seen.unwrap())
}

fn order(memory: impl Cells, litmus: Litmus, at: Variables) -> u64 {
    let run = move |role| litmus.run(&memory, at, role, &Deadline::after(TICKS / 10));
    let histories = team().run(&[0, 1], run).unwrap();
    litmus.violations(&histories)
}

#[test]
fn increments_that_are_not_atomic_are_found() {
    for how in [How::TicketLock, How::Add, How::CompareExchange] {
        let broken = || Torn(Pages::new(Counters::PAGES));
        let is_found = |_| count(broken(), how, TICKS / 10).violations > 0;
        assert!((0..ATTEMPTS).any(is_found), "{how:?}");
        let sound = count(Pages::new(Counters::PAGES), how, u64::MAX);
        assert_eq!(sound.violations, 0, "{how:?}: {sound:?}");
    }
}

#[test]
fn stores_that_overtake_others_are_found() {
    let test = Litmus::MessagePassing;
    for at in [Variables::apart(0), Variables::together(0)] {
        let is_found = |_| order(Late(Pages::new(2)), test, at) > 0;
        assert!((0..ATTEMPTS).any(is_found), "{at:?}");
        assert_eq!(order(Pages::new(2), test, at), 0);
    }
}

#[test]
fn loads_that_overtake_stores_despite_a_fence_are_found() {
    let (test, at) = (Litmus::StoreBuffering, Variables::apart(0));
    let is_found = |_| order(Late(Pages::new(2)), test, at) > 0;
    assert!((0..ATTEMPTS).any(is_found));
    assert_eq!(order(Pages::new(2), test, at), 0);
}

#[test]
fn a_page_with_old_contents_is_found() {
    let memory = Lossy(Pages::new(1));
    let seen = team().run(&[0, 1], move |role| {
        transfer::ping_pong(&memory, 0, role, &Deadline::after(TICKS / 10))
    });
    let corrupt: u64 = seen.unwrap().iter().map(|seen| seen.corrupt).sum();
    assert!(corrupt > 0);
}

#[test]
fn more_threads_than_cpus_run_the_tests_of_three_and_four() {
    let cpus = team::cpus().unwrap();
    for litmus in [Litmus::Causality, Litmus::IndependentReads] {
        let places = cpus.iter().copied().cycle().take(litmus.cpus());
        let team = Team::on(&places.collect::<Vec<_>>()).unwrap();
        let who: Vec<usize> = (0..litmus.cpus()).collect();
        let memory = Pages::new(2);
        let histories = team.run(&who, move |role| {
            let at = Variables::apart(0);
            litmus.run(&memory, at, role, &Deadline::after(TICKS / 5))
        });
        let histories = histories.unwrap();
        assert_eq!(litmus.violations(&histories), 0);
    }
}

#[test]
fn a_cpu_whose_time_is_behind_is_found() {
    let early = |behind: time::Now| {
        let memory = Pages::new(1);
        let begin = Clock::start();
        let seen = team().run(&[0, 1], move |role| {
            let late = if role == 1 { behind } else { [0; 2] };
            let now = || {
                let now = [now_ticks(), begin.elapsed_ns() + TICKS];
                [now[0] - late[0], now[1] - late[1]]
            };
            time::exchange(&memory, 0, role, now, 200, &Deadline::after(u64::MAX))
        });
        let seen = seen.unwrap();
        assert!(seen.iter().all(|one| one.messages == 100), "{seen:?}");
        seen.iter().fold([0, 0], |sum, one| {
            [sum[0] + one.early[0], sum[1] + one.early[1]]
        })
    };
    assert_eq!(early([0, 0]), [0, 0]);
    let [by_counter, by_clock] = [early([TICKS / 10, 0]), early([0, TICKS / 10])];
    assert!(by_counter[0] > 0 && by_counter[1] == 0, "{by_counter:?}");
    assert!(by_clock[0] == 0 && by_clock[1] > 0, "{by_clock:?}");
}
