//! Simulated donors that lose connections, and a pager that checks every page it reads.

mod fake;
mod hostile;
mod joins;
mod model;
mod paths;
mod striped;

use super::*;
use crate::copies::{Copies, NextMove};
use crate::placement::{Placement, StripePlacement, zones};
use crate::set::{LeaveEvent, Loss, Newcomer, ReplicaEvent};
use crate::stripe::Layout;
use fake::{FakeDonor, FakeTransport, page_with};
use model::World;
use std::sync::Mutex;
use std::thread::JoinHandle;
use striped::write;

/// Ignores counts.
struct Uncounted;

impl Traffic for Uncounted {
    fn wrote(&self, _: usize) {}
    fn fetched(&self, _: usize, _: u32) {}
}

/// A set with the donors behind it, and the events so far.
struct Bed {
    set: Arc<ReplicaSet>,
    donors: Vec<Arc<Mutex<FakeDonor>>>,
    /// Number of donors of the start.
    start: usize,
    events: Arc<Mutex<Vec<ReplicaEvent>>>,
}

impl Bed {
    fn new(slots: &[u32], blocks: u32) -> Self {
        Self::with_joiners(slots, blocks, 0)
    }

    /// The same with places for donors that join.
    fn with_joiners(slots: &[u32], blocks: u32, joiners: usize) -> Self {
        let zones = zones(slots.iter().map(|_| None));
        let placement = Placement::new(slots, &zones, blocks);
        let copies = Copies::new(&placement.blocks, slots, &placement.used, &zones);
        Self::of(copies.with_joiners(joiners), slots.len(), joiners)
    }

    /// Donors of stripes.
    fn striped(slots: &[u32], layout: Layout, blocks: u32) -> Self {
        Self::striped_with_joiners(slots, layout, blocks, 0)
    }

    fn striped_with_joiners(slots: &[u32], layout: Layout, blocks: u32, joiners: usize) -> Self {
        let placement = StripePlacement::new(slots, layout, blocks);
        let copies = Copies::striped(&placement.places, layout, slots, &placement.used);
        assert_eq!(copies.blocks(), blocks, "there is room");
        Self::of(copies.with_joiners(joiners), slots.len(), joiners)
    }

    fn of(copies: Copies, start: usize, joiners: usize) -> Self {
        let donors = start + joiners;
        let events = Arc::<Mutex<Vec<ReplicaEvent>>>::default();
        let sink = Arc::clone(&events);
        let observer = Box::new(move |event| sink.lock().expect("no panic").push(event));
        Self {
            set: Arc::new(ReplicaSet::new(copies, donors, observer)),
            donors: (0..donors).map(|_| Arc::default()).collect(),
            start,
            events,
        }
    }

    fn transport(&self, role: Role) -> ReplicatedTransport {
        let donors = self.donors[..self.start].iter();
        let transports = donors.map(|donor| self.connection(donor));
        let (set, traffic) = (Arc::clone(&self.set), Arc::new(Uncounted));
        let mut made = ReplicatedTransport::new(set, role, transports.collect(), traffic);
        made.repairs.readmission_unit = Duration::ZERO;
        made
    }

    fn connection(&self, donor: &Arc<Mutex<FakeDonor>>) -> Box<dyn PageTransport> {
        Box::new(FakeTransport::new(donor))
    }

    /// A new donor joins, with a connection for each of two transports. The thread ends when it has,
    /// with true, or can not.
    fn join(&mut self, donor: usize, slots: u32) -> JoinHandle<bool> {
        let joins = Arc::<Mutex<FakeDonor>>::default();
        let newcomer = Newcomer {
            slots,
            beside: None,
            transports: (0..2).map(|_| self.connection(&joins)).collect(),
            path: None,
        };
        self.donors[donor] = joins;
        let set = Arc::clone(&self.set);
        let deadline = Instant::now() + Duration::from_secs(20);
        std::thread::spawn(move || {
            set.prepare(donor);
            set.join(donor, newcomer, deadline)
        })
    }

    fn cut(&self, donor: usize) {
        self.donors[donor].lock().expect("no panic").cut = true;
    }

    fn restore(&self, donor: usize) {
        let mut donor = self.donors[donor].lock().expect("no panic");
        donor.cut = false;
        donor.connection += 1;
    }

    fn events(&self) -> usize {
        self.events.lock().expect("no panic").len()
    }
}

/// Polls until a condition holds; returns the tickets of completed writes, and the versions of
/// pages that were read.
fn poll_until(
    transport: &mut ReplicatedTransport,
    what: &str,
    mut is_met: impl FnMut(&[(u32, u64)]) -> bool,
) -> Vec<(u32, u64)> {
    let deadline = Instant::now() + Duration::from_secs(20);
    let mut completed = Vec::new();
    while !is_met(&completed) {
        assert!(Instant::now() < deadline, "{what}");
        transport.poll(&mut |completion| match completion {
            Completion::ReadFrom(_, Ticket(ticket), page) => {
                completed.push((ticket, fake::version_of(page)));
            }
            Completion::Written(Ticket(ticket)) => completed.push((ticket, 0)),
            other => panic!("unexpected {other:?}"),
        });
    }
    completed
}

#[test]
fn a_write_back_is_complete_when_both_donors_have_it() {
    let bed = Bed::new(&[1, 1], 1);
    let mut evictor = bed.transport(Role::Evictor);
    bed.cut(1);
    evictor
        .post_write(Ticket(3), 0, &page_with(7))
        .expect("room");
    for _ in 0..100 {
        evictor.poll(&mut |completion| panic!("{completion:?} with one copy"));
    }
    bed.restore(1);
    let completed = poll_until(&mut evictor, "written", |completed| !completed.is_empty());
    assert_eq!(completed, [(3, 0)]);
    for donor in &bed.donors {
        assert_eq!(donor.lock().expect("no panic").version_at(0), 7);
    }
}

#[test]
fn a_write_back_is_complete_with_one_copy_when_the_other_donor_is_lost() {
    let bed = Bed::new(&[1, 1], 1);
    let mut evictor = bed.transport(Role::Evictor);
    let mut reader = bed.transport(Role::Reader);
    bed.cut(0);
    evictor
        .post_write(Ticket(3), 0, &page_with(7))
        .expect("room");
    assert_eq!(
        bed.set.lost(0, "it was killed"),
        Loss::OfCopies { was_awaited: false }
    );
    poll_until(&mut evictor, "written", |completed| completed == [(3, 0)]);
    reader.post_read(Ticket(4), 0).expect("room");
    poll_until(&mut reader, "read", |completed| completed == [(4, 7)]);
    assert_eq!(bed.set.copies().degraded(), 1);
    assert_eq!(bed.set.lost(1, "it too"), Loss::OfBlocks);
    assert_eq!(bed.events(), 1, "one loss, one event");
}

#[test]
fn a_donor_that_returns_gets_only_what_it_has_missed() {
    let bed = Bed::new(&[1, 1], 1);
    let mut evictor = bed.transport(Role::Evictor);
    (0..100).for_each(|page| write(&mut evictor, page * 4096, 1 + page));
    // Of these one is on its way when the donor goes out, and the others come later.
    bed.cut(1);
    let last = page_with(200);
    evictor
        .post_write(Ticket(2), 20 * 4096, &last)
        .expect("room");
    evictor.poll(&mut |completion| panic!("{completion:?} with one copy"));
    assert!(!bed.set.down(1, "cut"));
    poll_until(&mut evictor, "written", |completed| completed == [(2, 0)]);
    write(&mut evictor, 40 * 4096, 201);
    write(&mut evictor, 99 * 4096, 202);
    let before = bed.donors[1].lock().expect("no panic").writes;
    bed.restore(1);
    bed.set.up(1);
    let set = Arc::clone(&bed.set);
    poll_until(&mut evictor, "filled", |_| set.copies().degraded() == 0);
    let donors = [0, 1].map(|donor| bed.donors[donor].lock().expect("no panic"));
    for page in 0..100 {
        let version = match page {
            20 => 200,
            40 => 201,
            99 => 202,
            other => 1 + other,
        };
        let found = [0, 1].map(|donor: usize| donors[donor].version_at(page * 4096));
        assert_eq!(found, [version; 2], "page {page}");
    }
    // The one on its way arrives late, and is written again.
    assert_eq!(donors[1].writes - before, 4);
    drop(donors);
    assert!(matches!(
        bed.events.lock().expect("no panic")[..],
        [ReplicaEvent::Degraded { .. }, ReplicaEvent::Repaired]
    ));
}

#[test]
fn a_donor_that_returns_and_has_missed_nothing_is_used_at_once() {
    let bed = Bed::new(&[1, 1], 1);
    let mut evictor = bed.transport(Role::Evictor);
    (0..10).for_each(|page| write(&mut evictor, page * 4096, 1 + page));
    bed.cut(1);
    assert!(!bed.set.down(1, "cut"));
    evictor.poll(&mut |completion| panic!("{completion:?}"));
    let before = bed.donors[1].lock().expect("no panic").writes;
    bed.restore(1);
    bed.set.up(1);
    let set = Arc::clone(&bed.set);
    poll_until(&mut evictor, "used", |_| set.copies().degraded() == 0);
    evictor.poll(&mut |completion| panic!("{completion:?}"));
    assert_eq!(bed.donors[1].lock().expect("no panic").writes, before);
    assert!(matches!(
        bed.events.lock().expect("no panic")[..],
        [ReplicaEvent::Degraded { .. }, ReplicaEvent::Repaired]
    ));
}

#[test]
fn a_read_that_waits_for_a_lost_donor_goes_to_the_other_one() {
    let bed = Bed::new(&[1, 1], 1);
    let mut evictor = bed.transport(Role::Evictor);
    let mut reader = bed.transport(Role::Reader);
    evictor
        .post_write(Ticket(0), 4096, &page_with(9))
        .expect("room");
    poll_until(&mut evictor, "written", |completed| !completed.is_empty());
    let primary = usize::from(bed.set.copies().of(0)[0].place.donor);
    bed.cut(primary);
    reader.post_read(Ticket(1), 4096).expect("room");
    assert!(
        !bed.set.down(primary, "it was killed"),
        "the guest need not wait"
    );
    poll_until(&mut reader, "read", |completed| completed == [(1, 9)]);
}

#[test]
fn a_read_without_an_answer_goes_to_the_other_donor_too_and_completes_once() {
    let bed = Bed::new(&[1, 1], 1);
    let mut evictor = bed.transport(Role::Evictor);
    let mut reader = bed.transport(Role::Reader);
    evictor
        .post_write(Ticket(0), 0, &page_with(9))
        .expect("room");
    poll_until(&mut evictor, "written", |completed| !completed.is_empty());
    let primary = usize::from(bed.set.copies().of(0)[0].place.donor);
    bed.cut(primary);
    reader.post_read(Ticket(1), 0).expect("room");
    poll_until(&mut reader, "read", |completed| completed == [(1, 9)]);
    bed.restore(primary);
    let deadline = Instant::now() + Duration::from_secs(20);
    while reader.members.iter().any(|member| !member.is_idle()) {
        assert!(Instant::now() < deadline, "the late answer");
        reader.poll(&mut |completion| panic!("{completion:?} twice"));
    }
    assert_eq!(reader.in_flight(), 0);
    assert_eq!(bed.events(), 0, "it was only late");
}

#[test]
fn a_donor_that_confirms_nothing_goes_out() {
    let bed = Bed::new(&[1, 1], 1);
    let mut evictor = bed.transport(Role::Evictor);
    bed.cut(1);
    evictor
        .post_write(Ticket(0), 0, &page_with(9))
        .expect("room");
    poll_until(&mut evictor, "written", |completed| !completed.is_empty());
    assert!(bed.set.copies().is_out(1));
    // It answers again: it is used again, and gets what it missed.
    evictor
        .post_write(Ticket(0), 4096, &page_with(10))
        .expect("room");
    poll_until(&mut evictor, "written", |completed| !completed.is_empty());
    bed.restore(1);
    let copies = bed.set.copies();
    poll_until(&mut evictor, "repaired", |_| copies.degraded() == 0);
    let donor = bed.donors[1].lock().expect("no panic");
    assert_eq!((donor.version_at(0), donor.version_at(4096)), (9, 10));
    assert_eq!(bed.events(), 2, "lost, and repaired");
}

#[test]
fn a_thread_notes_that_a_place_was_left_when_its_requests_of_before_are_answered() {
    let bed = Bed::new(&[2, 2], 1);
    let mut evictor = bed.transport(Role::Evictor);
    let mut reader = bed.transport(Role::Reader);
    bed.cut(0);
    bed.cut(1);
    evictor
        .post_write(Ticket(0), 0, &page_with(9))
        .expect("room");
    reader.post_read(Ticket(1), 4096).expect("room");
    let copies = bed.set.copies();
    copies.vacate_one(Place { donor: 0, slot: 1 });
    let epoch = copies.vacated_epoch();
    for _ in 0..100 {
        for transport in [&mut evictor, &mut reader] {
            transport.poll(&mut |completion| panic!("{completion:?}"));
            assert_ne!(transport.noted.epoch(), epoch);
        }
    }
    bed.restore(0);
    bed.restore(1);
    poll_until(&mut evictor, "written", |completed| !completed.is_empty());
    poll_until(&mut reader, "read", |completed| !completed.is_empty());
    // Requests of after that are for other places, and are not waited for.
    bed.cut(0);
    bed.cut(1);
    reader.post_read(Ticket(2), 0).expect("room");
    for transport in [&mut evictor, &mut reader] {
        transport.poll(&mut |completion| panic!("{completion:?}"));
        assert_eq!(transport.noted.epoch(), epoch);
    }
}

#[test]
fn room_that_a_late_answer_makes_usable_is_used_without_another_change() {
    let bed = Bed::new(&[2, 2, 2], 3);
    let (mut evictor, mut reader) = (bed.transport(Role::Evictor), bed.transport(Role::Reader));
    let copies = bed.set.copies();
    let poll_some = |transport: &mut ReplicatedTransport| {
        for _ in 0..10 {
            transport.poll(&mut |completion| panic!("{completion:?}"));
        }
    };
    bed.cut(0);
    assert_ne!(bed.set.lost(0, "it was killed"), Loss::OfBlocks);
    poll_some(&mut evictor);
    assert_eq!(copies.degraded(), 2, "there is no room");
    bed.cut(1);
    bed.cut(2);
    reader.post_read(Ticket(1), 0).expect("room");
    copies.vacate_one(Place { donor: 1, slot: 2 });
    poll_some(&mut evictor);
    poll_some(&mut reader);
    assert_eq!(copies.degraded(), 2, "the reader has a request outstanding");
    let due = evictor.wake_by().expect("it looks again by itself");
    assert!(due <= Instant::now() + Duration::from_millis(100));
    bed.restore(1);
    bed.restore(2);
    poll_until(&mut reader, "read", |completed| !completed.is_empty());
    poll_until(&mut evictor, "one repaired", |_| copies.degraded() == 1);
}

#[test]
fn a_repair_that_nobody_answers_is_looked_at_again() {
    let bed = Bed::new(&[4, 4, 4], 4);
    let mut evictor = bed.transport(Role::Evictor);
    (0..64).for_each(|page| write(&mut evictor, page * 4096, 1 + page));
    for donor in 0..3 {
        bed.cut(donor);
    }
    assert_ne!(bed.set.lost(0, "it was killed"), Loss::OfBlocks);
    let until = Instant::now() + Duration::from_secs(20);
    // Until the repair has asked for as much as it may.
    while evictor.members[1].is_idle() || evictor.repairs.due().is_some() {
        assert!(Instant::now() < until, "no repair begins");
        evictor.poll(&mut |completion| panic!("{completion:?}"));
    }
    assert_eq!(evictor.in_flight(), 0, "the pager has asked for nothing");
    let due = evictor.wake_by().expect("it looks again by itself");
    assert!(due <= Instant::now() + Duration::from_secs(1));
}

#[test]
fn copies_of_a_lost_donor_move_to_a_third_one() {
    let bed = Bed::new(&[4, 4, 4], 4);
    let mut evictor = bed.transport(Role::Evictor);
    for block in 0..4 {
        let offset = block * BLOCK_BYTES;
        evictor
            .post_write(Ticket(0), offset, &page_with(block + 1))
            .expect("room");
        poll_until(&mut evictor, "written", |completed| !completed.is_empty());
    }
    bed.cut(0);
    assert_ne!(bed.set.lost(0, "it was killed"), Loss::OfBlocks);
    assert!(bed.set.copies().degraded() > 0);
    let copies = bed.set.copies();
    poll_until(&mut evictor, "repaired", |_| copies.degraded() == 0);
    assert!(bed.set.repaired_blocks.get() > 0);
    // Then a second donor may be lost.
    bed.cut(1);
    assert_ne!(bed.set.lost(1, "it too"), Loss::OfBlocks);
    let mut reader = bed.transport(Role::Reader);
    for block in 0..4 {
        reader
            .post_read(Ticket(5), block * BLOCK_BYTES)
            .expect("room");
        poll_until(&mut reader, "read", |completed| {
            completed == [(5, block + 1)]
        });
    }
}

#[test]
fn a_donor_leaves_under_write_backs_and_nothing_is_read_from_it_any_more() {
    let bed = Bed::new(&[4, 4, 4], 4);
    let (mut evictor, mut reader) = (bed.transport(Role::Evictor), bed.transport(Role::Reader));
    let write = |evictor: &mut ReplicatedTransport, block: u64, version: u64| {
        let page = page_with(version);
        evictor
            .post_write(Ticket(0), block * BLOCK_BYTES, &page)
            .expect("room");
        poll_until(evictor, "written", |completed| !completed.is_empty());
    };
    (0..4).for_each(|block| write(&mut evictor, block, block + 1));
    let (sender, ended) = std::sync::mpsc::channel();
    let observer = Box::new(move |event| {
        let _ = sender.send(event);
    });
    let held = bed.set.leave(0, &[], observer).expect("there is room");
    let mut version = 10;
    let copies = bed.set.copies();
    while copies.blocks_at(0) > 0 {
        (0..4).for_each(|block| write(&mut evictor, block, version + block));
        version += 10;
        assert_eq!(copies.degraded(), 0, "each block keeps both copies");
    }
    poll_until(&mut evictor, "it ends", |_| {
        bed.set.copies().begin_move() == NextMove::None
    });
    assert!(!bed.set.retire(0, Instant::now()), "it is connected");
    evictor.poll(&mut |completion| panic!("unexpected {completion:?}"));
    assert!(!bed.set.retire(0, Instant::now()), "the reader is");
    reader.poll(&mut |completion| panic!("unexpected {completion:?}"));
    assert!(bed.set.retire(0, Instant::now()));
    bed.donors[0].lock().expect("no panic").left = true;
    let events: Vec<_> = ended.try_iter().collect();
    let moved = events.iter().filter(|event| **event == LeaveEvent::Moved);
    assert_eq!(moved.count(), held as usize);
    assert_eq!(events.last(), Some(&LeaveEvent::Ended { stayed: 0 }));
    for block in 0..4 {
        let wanted = version - 10 + block;
        reader
            .post_read(Ticket(5), block * BLOCK_BYTES)
            .expect("room");
        poll_until(&mut reader, "read", |completed| completed == [(5, wanted)]);
    }
    assert_eq!(bed.events(), 0, "nothing was lost");
}

/// Asserts that donors have left and joined, and copies moved to others.
fn assert_eventful(worlds: impl Iterator<Item = (u32, u32, u32)>) {
    let sum =
        |all: (u32, u32, u32), one: (u32, u32, u32)| (all.0 + one.0, all.1 + one.1, all.2 + one.2);
    let (left, joined, rebalanced) = worlds.fold((0, 0, 0), sum);
    assert!(left > 10, "only {left} donors have left");
    assert!(joined > 10, "only {joined} donors have joined");
    assert!(
        rebalanced > 50,
        "only {rebalanced} copies were to be rebalanced"
    );
}

/// Every page that is read has the version that was written last, whatever happens to donors; in
/// the end both copies have it.
#[test]
fn no_stale_page_is_read_in_any_of_many_random_histories() {
    let worlds = (0..300).map(|seed| World::new(seed).run(3_000));
    assert_eventful(worlds);
}
