//! Donors that join.

use super::model::as_u8;
use super::*;

const SLOTS: u32 = 4;

/// A set with the transports of two threads.
struct Pager {
    bed: Bed,
    set: Arc<ReplicaSet>,
    reader: ReplicatedTransport,
    evictor: ReplicatedTransport,
    version: u64,
}

impl Pager {
    fn new(slots: &[u32], joiners: usize) -> Self {
        let bed = Bed::with_joiners(slots, 4, joiners);
        let (reader, evictor) = (bed.transport(Role::Reader), bed.transport(Role::Evictor));
        Self {
            set: Arc::clone(&bed.set),
            bed,
            reader,
            evictor,
            version: 0,
        }
    }

    /// Writes a new version of a page of each block.
    fn write(&mut self) {
        self.version += 1;
        for block in 0..4 {
            let page = page_with(self.version);
            let offset = block * BLOCK_BYTES;
            let posted = self.evictor.post_write(Ticket(0), offset, &page);
            posted.expect("room");
            poll_until(&mut self.evictor, "written", |done| !done.is_empty());
        }
    }

    /// Reads these pages, which have to have the last version.
    fn read(&mut self) {
        for block in 0..4 {
            let deadline = Instant::now() + Duration::from_secs(30);
            // Requests wait while the reader notes that donors have changed.
            while self.reader.post_read(Ticket(5), block * BLOCK_BYTES) == Err(Full) {
                assert!(Instant::now() < deadline, "no room for a read");
                self.poll();
            }
            let wanted = [(5, self.version)];
            poll_until(&mut self.reader, "read", |done| done == wanted);
        }
    }

    fn poll(&mut self) {
        for transport in [&mut self.reader, &mut self.evictor] {
            transport.poll(&mut |completion| panic!("unexpected {completion:?}"));
        }
    }

    /// A new donor joins in a place; returns whether it is used then.
    fn join(&mut self, donor: usize) -> bool {
        let thread = self.bed.join(donor, SLOTS);
        let deadline = Instant::now() + Duration::from_secs(30);
        while !thread.is_finished() {
            assert!(Instant::now() < deadline, "{donor} does not join");
            self.poll();
        }
        thread.join().expect("no panic")
    }

    /// Moves all copies of a donor to another one while pages are written, and ends its use.
    fn drain(&mut self, donor: usize, to: usize) {
        let held = self.set.copies().blocks_at(as_u8(donor));
        let ended = Arc::<Mutex<Option<u32>>>::default();
        let sink = Arc::clone(&ended);
        let observer = move |event| {
            if let LeaveEvent::Ended { stayed } = event {
                *sink.lock().expect("no panic") = Some(stayed);
            }
        };
        let begun = self.set.leave(donor, &[to], Box::new(observer));
        assert_eq!(begun, Ok(held));
        let deadline = Instant::now() + Duration::from_secs(30);
        while ended.lock().expect("no panic").is_none() {
            assert!(Instant::now() < deadline, "{donor} does not leave");
            self.write();
            assert_eq!(self.set.copies().degraded(), 0, "two copies all the time");
        }
        assert_eq!(*ended.lock().expect("no panic"), Some(0));
        while !self.set.retire(donor, Instant::now()) {
            assert!(Instant::now() < deadline, "{donor} stays connected");
            self.poll();
        }
        // Its memory belongs to others.
        self.bed.donors[donor].lock().expect("no panic").left = true;
        assert_eq!(self.set.copies().blocks_at(as_u8(to)), held);
        self.read();
    }
}

#[test]
fn both_donors_of_the_start_leave_for_new_ones_and_a_place_is_used_again() {
    let mut pager = Pager::new(&[4, 4], 2);
    pager.write();
    for (joins, leaves) in [(2, 0), (3, 1), (0, 2)] {
        assert!(pager.join(joins));
        assert!(pager.set.copies().is_member(as_u8(joins)));
        pager.drain(leaves, joins);
    }
    assert_eq!(pager.bed.events(), 0, "nothing was lost");
    for donor in [1, 2] {
        assert!(pager.set.copies().has_left(donor) && !pager.set.copies().is_member(donor));
    }
}

#[test]
fn a_donor_that_joins_gets_the_copies_of_one_that_is_lost() {
    let mut pager = Pager::new(&[4, 4], 1);
    pager.write();
    pager.bed.cut(0);
    assert_ne!(pager.set.lost(0, "it was killed"), Loss::OfBlocks);
    pager.poll();
    assert_eq!(pager.set.copies().degraded(), 4, "there is no room");
    assert!(pager.join(2));
    let deadline = Instant::now() + Duration::from_secs(30);
    while pager.set.copies().degraded() > 0 {
        assert!(Instant::now() < deadline, "it is not repaired");
        pager.write();
    }
    // Then the other one of the start is lost as well.
    pager.bed.cut(1);
    assert_ne!(pager.set.lost(1, "it too"), Loss::OfBlocks);
    pager.read();
}

#[test]
fn a_donor_that_is_lost_while_it_joins_is_not_used_and_its_place_is_free() {
    let mut pager = Pager::new(&[4, 4], 1);
    pager.write();
    let thread = pager.bed.join(2, SLOTS);
    let deadline = Instant::now() + Duration::from_secs(30);
    while pager.set.copies().has_left(2) {
        assert!(Instant::now() < deadline, "it does not begin");
        std::thread::yield_now();
    }
    assert_eq!(
        pager.set.lost(2, "it was killed"),
        Loss::OfCopies { was_awaited: false }
    );
    while !thread.is_finished() {
        assert!(Instant::now() < deadline, "it does not end");
        pager.poll();
    }
    assert!(!thread.join().expect("no panic"));
    assert!(pager.set.copies().has_left(2));
    assert_eq!(pager.bed.events(), 0, "nothing depended on it");
    pager.poll();
    assert!(pager.join(2), "another one has its place");
    pager.drain(0, 2);
}

#[test]
fn a_place_with_a_donor_is_not_given_to_another_one() {
    let mut pager = Pager::new(&[4, 4], 1);
    assert!(!pager.join(1));
    assert!(pager.join(2));
    assert!(!pager.join(2));
    assert!(pager.set.copies().is_member(2), "the first one stays");
}
