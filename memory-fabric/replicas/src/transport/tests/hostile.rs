//! Donors of stripes that send other bytes than they were given: no page is installed with them, the
//! donors are found, and no piece is made of them.

mod copies;
mod holes;
mod lost;

use super::*;
use fabric_pages::page::PAGE_SIZE;
use fake::Forgery;
use std::collections::HashMap;

const TRIES: u64 = 10_000;

pub const FLIPPED_BIT: Forgery = |now, _, _, number| {
    let mut forged = now.to_vec();
    let bit = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20;
    let at = usize::try_from(bit >> 3).expect("44 bits") % forged.len();
    forged[at] ^= 1 << (bit & 7);
    forged
};
const OTHER_PAGE: Forgery = |_, _, other, _| other.to_vec();
const OLD_VERSION: Forgery = |_, before, _, _| before.to_vec();
const ZEROES: Forgery = |now, _, _, _| vec![0; now.len()];
pub const FORGERIES: [Forgery; 4] = [FLIPPED_BIT, OTHER_PAGE, OLD_VERSION, ZEROES];

/// The version of each page that was written back last: what a seal tells of it.
pub type Seals = Arc<Mutex<HashMap<u64, u64>>>;

/// Has pages checked as sealed ones are.
pub fn seal(set: &ReplicaSet) -> Seals {
    let seals = Seals::default();
    let known = Arc::clone(&seals);
    set.set_check(Box::new(move |offset, page| {
        let version = *known.lock().expect("no panic").get(&offset)?;
        let is_genuine = *page == page_with(version);
        // As a key does that does not fit.
        page.fill(0x5a);
        Some(is_genuine)
    }));
    seals
}

/// A VM with a hostile donor.
struct Vm {
    bed: Bed,
    evictor: ReplicatedTransport,
    reader: ReplicatedTransport,
    seals: Seals,
    version: u64,
}

impl Vm {
    fn new(layout: &str, slots: &[u32], blocks: u32) -> Self {
        Self::of(Bed::striped(
            slots,
            layout.parse().expect("possible"),
            blocks,
        ))
    }

    fn of(bed: Bed) -> Self {
        Self {
            evictor: bed.transport(Role::Evictor),
            reader: bed.transport(Role::Reader),
            seals: seal(&bed.set),
            bed,
            version: 0,
        }
    }

    fn write(&mut self, offset: u64) {
        self.version += 1;
        let page = page_with(self.version);
        self.evictor
            .post_write(Ticket(0), offset, &page)
            .expect("room");
        self.seals
            .lock()
            .expect("no panic")
            .insert(offset, self.version);
        poll_until(&mut self.evictor, "written", |completed| {
            !completed.is_empty()
        });
    }

    fn is_genuine(&self, offset: u64, bytes: &[u8]) -> bool {
        let seals = self.seals.lock().expect("no panic");
        (0..).zip(bytes.chunks(PAGE_SIZE)).all(|(number, page)| {
            let at = offset + number * PAGE_SIZE as u64;
            page == page_with(seals[&at])
        })
    }

    /// Polls until a read is complete; returns its bytes.
    fn answer(&mut self) -> Vec<u8> {
        let deadline = Instant::now() + Duration::from_secs(20);
        let mut found = None;
        while found.is_none() {
            assert!(Instant::now() < deadline, "nothing is read");
            self.reader.poll(&mut |completion| {
                let bytes = match completion {
                    Completion::ReadFrom(_, Ticket(7), page) => page.to_vec(),
                    Completion::ReadRunFrom(_, Ticket(7), bytes) => bytes.to_vec(),
                    other => panic!("unexpected {other:?}"),
                };
                assert_eq!(found.replace(bytes), None, "it completes once");
            });
        }
        found.expect("it was read")
    }

    /// Reads pages as a sealed transport does; false when they do not open at all.
    fn read(&mut self, offset: u64, run: Option<u32>) -> bool {
        let posted = match run {
            Some(pages) => self.reader.post_read_run(Ticket(7), offset, pages),
            None => self.reader.post_read(Ticket(7), offset),
        };
        posted.expect("room");
        let bytes = self.answer();
        if self.is_genuine(offset, &bytes) {
            return true;
        }
        self.reader
            .post_reread(Ticket(7), offset, run)
            .expect("room");
        let bytes = self.answer();
        self.is_genuine(offset, &bytes)
    }

    fn forge(&self, donor: usize, forgery: Forgery) {
        self.bed.donors[donor].lock().expect("no panic").forgery = Some((forgery, 1));
    }

    fn forged(&self, donor: usize) -> u64 {
        self.bed.donors[donor].lock().expect("no panic").forged
    }

    /// Returns the donors that were reported, and those that went out.
    fn events(&self) -> (Vec<usize>, Vec<usize>) {
        let (mut reported, mut out) = (Vec::new(), Vec::new());
        for event in self.bed.events.lock().expect("no panic").iter() {
            match event {
                ReplicaEvent::WrongPieces { donor, .. } => reported.push(*donor),
                ReplicaEvent::Degraded { donor, .. } => out.push(*donor),
                _ => {}
            }
        }
        (reported, out)
    }

    /// Compares what donors have of each page that was written.
    fn assert_pieces(&self) {
        let layout = self.bed.set.copies().layout().expect("striped");
        for (&offset, &version) in self.seals.lock().expect("no panic").iter() {
            assert_pieces(&self.bed, layout, offset, version, "in the end");
        }
    }
}

/// Compares all pieces of a page that may be read.
pub fn assert_pieces(bed: &Bed, layout: Layout, offset: u64, version: u64, what: &str) {
    let (block, in_block) = split(offset);
    let page = page_with(version);
    let mut parity = vec![0; layout.parity() * layout.unit()];
    layout.encode(&page, &mut parity);
    let pieces = page
        .chunks(layout.unit())
        .chain(parity.chunks(layout.unit()));
    for (at, piece) in pieces.enumerate() {
        let Some(place) = bed.set.copies().readable_at(block, at) else {
            continue;
        };
        let donor = bed.donors[usize::from(place.donor)].lock();
        let stored_at = offset_at(place, in_block, layout.data());
        let found = donor.expect("no panic").bytes_at(stored_at, piece.len());
        assert!(
            found == piece,
            "{what}: piece {at} of the page at {offset} at {place:?}"
        );
    }
}

#[test]
fn a_hostile_donor_is_found_and_goes_out_and_no_page_is_wrong() {
    for (number, forgery) in FORGERIES.into_iter().enumerate() {
        let mut tries = 0;
        let mut turn = number;
        while tries < TRIES / 4 {
            let layout = ["4+2", "2+1", "8+2", "2+2"][turn % 4];
            let pieces = layout.parse::<Layout>().expect("possible").pieces();
            let mut vm = Vm::new(layout, &vec![1; pieces], 1);
            for page in (0..8).chain(0..8) {
                vm.write(page * 4096);
            }
            let hostile = turn % pieces;
            vm.forge(hostile, forgery);
            turn += 1;
            let set = Arc::clone(&vm.bed.set);
            let data = set.copies().all(0).take(set.copies().needed());
            let mut data = data.map(|copy| usize::from(copy.place.donor));
            // A donor with parity is not asked.
            let is_asked = data.any(|donor| donor == hostile);
            let mut page = 0;
            while is_asked && !set.copies().is_out(model::as_u8(hostile)) {
                let offset = page % 4 * 4096;
                match page % 3 {
                    // Other pages than the single ones: each wrong piece is of a page of its own.
                    0 => assert!(
                        vm.read(4 * 4096, Some(4)),
                        "kind {number} by {hostile} of {layout}"
                    ),
                    _ => assert!(
                        vm.read(offset, None),
                        "kind {number} by {hostile} of {layout}"
                    ),
                }
                page += 1;
            }
            tries += vm.forged(hostile);
            let (reported, out) = vm.events();
            if page > 0 {
                assert_eq!((reported, out), (vec![hostile], vec![hostile]), "{layout}");
                assert_eq!(vm.bed.set.wrong_pieces.get(), 3);
            }
            assert!((0..8).all(|page| vm.read(page * 4096, None)));
        }
    }
}

#[test]
fn a_hostile_donor_that_a_block_needs_is_used_on_and_no_page_is_wrong() {
    // No room for pieces of the donor that is lost; the first one has pieces of both blocks.
    let mut vm = Vm::new("2+1", &[2, 1, 1, 1, 1], 2);
    let donors = |block| {
        let all = vm.bed.set.copies().all(block);
        all.map(|copy| usize::from(copy.place.donor))
            .collect::<Vec<_>>()
    };
    let (first, second) = (donors(0), donors(1));
    assert!(
        first.contains(&0) && second.contains(&0),
        "{first:?}, {second:?}"
    );
    let lost = second.iter().find(|donor| !first.contains(donor)).copied();
    let lost = lost.expect("another donor");
    for page in (0..8).chain(0..8) {
        vm.write(page * 4096);
    }
    vm.bed.cut(lost);
    assert_ne!(vm.bed.set.lost(lost, "it was killed"), Loss::OfBlocks);
    let mut turn = 0;
    while vm.forged(0) < TRIES {
        vm.forge(0, FORGERIES[turn % FORGERIES.len()]);
        let first = turn as u64 % 8;
        let offset = first * 4096;
        match turn % 3 {
            0 => assert!(vm.read(offset, Some(8 - u32::try_from(first).expect("few")))),
            1 => vm.write(offset),
            _ => assert!(vm.read(offset, None)),
        }
        turn += 1;
    }
    assert!(!vm.bed.set.copies().is_out(0), "it is needed");
    let (mut reported, out) = vm.events();
    reported.dedup();
    assert_eq!((reported, out), (vec![0], vec![lost]));
    assert!(vm.bed.set.wrong_pieces.get() > TRIES / 4);
    assert_eq!((vm.reader.outstanding, vm.reader.in_flight()), (0, 0));
}

#[test]
fn one_bad_place_in_a_donors_memory_does_not_put_it_out_of_use() {
    let mut vm = Vm::new("2+1", &[1; 3], 1);
    for page in 0..4 {
        vm.write(page * 4096);
    }
    let set = Arc::clone(&vm.bed.set);
    let first = set.copies().all(0).next().expect("a piece").place.donor;
    vm.forge(first.into(), FLIPPED_BIT);
    assert!((0..10).all(|_| vm.read(0, None)));
    assert!(!set.copies().is_out(first));
    assert_eq!(set.wrong_pieces.get(), 10);
    assert!(vm.read(4096, None) && !set.copies().is_out(first));
    assert!(vm.read(2 * 4096, None) && set.copies().is_out(first));
}

#[test]
fn a_bit_that_flips_on_its_way_suspects_no_donor() {
    let mut vm = Vm::new("4+2", &[1; 6], 1);
    vm.write(0);
    let donors: Vec<_> = vm.bed.set.copies().all(0).collect();
    for copy in donors.iter().take(4).cycle().take(40) {
        let donor = usize::from(copy.place.donor);
        vm.forge(donor, FLIPPED_BIT);
        vm.reader.post_read(Ticket(7), 0).expect("room");
        let bytes = vm.answer();
        assert!(!vm.is_genuine(0, &bytes));
        vm.bed.donors[donor].lock().expect("no panic").forgery = None;
        vm.reader.post_reread(Ticket(7), 0, None).expect("room");
        let bytes = vm.answer();
        assert!(vm.is_genuine(0, &bytes));
    }
    assert_eq!(vm.events(), (vec![], vec![]));
    assert_eq!(vm.bed.set.wrong_pieces.get(), 0);
}

#[test]
fn a_reread_does_not_wait_for_a_silent_donor_and_says_when_too_few_pieces_are_right() {
    let mut vm = Vm::new("4+2", &[1; 6], 1);
    vm.write(0);
    let donors: Vec<_> = vm.bed.set.copies().all(0).collect();
    let donor = |at: usize| usize::from(donors[at].place.donor);
    vm.forge(donor(0), FLIPPED_BIT);
    vm.bed.cut(donor(5));
    assert!(vm.read(0, None), "four of five pieces are right");
    assert_eq!(vm.events().0, [donor(0)]);
    // Too few are right, until the silent one answers.
    vm.forge(donor(1), ZEROES);
    vm.reader.post_reread(Ticket(7), 0, None).expect("room");
    let until = Instant::now() + 4 * reread::REREAD_WAIT;
    while Instant::now() < until {
        vm.reader.poll(&mut |completion| panic!("{completion:?}"));
    }
    assert!(vm.reader.wake_by().is_some(), "it looks again");
    vm.bed.restore(donor(5));
    let bytes = vm.answer();
    assert!(vm.is_genuine(0, &bytes));
    vm.forge(donor(2), OLD_VERSION);
    assert!(!vm.read(0, None), "three of six are wrong");
    assert_eq!((vm.reader.outstanding, vm.reader.in_flight()), (0, 0));
    assert!(
        vm.reader
            .stripes
            .as_ref()
            .is_some_and(|all| all.rereads == 0)
    );
}

#[test]
fn a_reread_survives_the_loss_of_donors_that_it_waits_for() {
    let mut vm = Vm::new("4+2", &[1; 6], 1);
    vm.write(0);
    vm.bed.cut(1);
    vm.bed.cut(4);
    vm.reader.post_reread(Ticket(7), 0, None).expect("room");
    vm.reader.poll(&mut |completion| panic!("{completion:?}"));
    for lost in [1, 4] {
        assert_ne!(vm.bed.set.lost(lost, "it was killed"), Loss::OfBlocks);
    }
    let bytes = vm.answer();
    assert!(vm.is_genuine(0, &bytes));
}

#[test]
fn no_piece_is_made_of_wrong_ones() {
    for (lost, hostile) in [(0, 1), (5, 0), (2, 7), (3, 6)] {
        let mut vm = Vm::new("4+2", &[4; 8], 4);
        for block in 0..4 {
            (0..5).for_each(|page| vm.write(block * BLOCK_BYTES + page * 4096));
        }
        // Nothing is read: only the repair can find it.
        vm.forge(hostile, FLIPPED_BIT);
        vm.bed.cut(lost);
        assert_ne!(vm.bed.set.lost(lost, "it was killed"), Loss::OfBlocks);
        let set = Arc::clone(&vm.bed.set);
        poll_until(&mut vm.evictor, "repaired", |_| {
            set.copies().degraded() == 0
        });
        vm.assert_pieces();
        let (reported, out) = vm.events();
        assert!(
            reported.iter().all(|donor| *donor == hostile),
            "{reported:?}"
        );
        assert!(
            out.iter().all(|donor| [lost, hostile].contains(donor)),
            "{out:?}"
        );
        assert!(
            vm.forged(hostile) == 0 || !reported.is_empty(),
            "it is found"
        );
    }
}

/// As without hostile donors; and a page that does not open is right when it is read again.
#[test]
fn no_wrong_piece_is_used_in_any_of_many_random_histories() {
    let mut found = 0;
    for seed in 0..160 {
        found += World::hostile(seed).run_hostile(2_000);
    }
    assert!(found > 100, "only {found} wrong pieces");
}

#[test]
fn a_wrong_copy_at_a_donor_that_is_needed_is_made_again_from_the_other_one() {
    // No room for the copies of a donor that is lost.
    let bed = Bed::new(&[2, 1, 1], 2);
    let (mut evictor, mut reader) = (bed.transport(Role::Evictor), bed.transport(Role::Reader));
    let copies = bed.set.copies();
    for block in 0..2 {
        let page = page_with(7 + block);
        let posted = evictor.post_write(Ticket(0), block * BLOCK_BYTES, &page);
        posted.expect("room");
        poll_until(&mut evictor, "written", |completed| !completed.is_empty());
    }
    assert_eq!(copies.blocks_at(0), 2, "it has a copy of both");
    assert!(!bed.set.read_elsewhere(0, 0), "it can go out as a whole");
    bed.cut(2);
    assert_ne!(bed.set.lost(2, "it was killed"), Loss::OfBlocks);
    let both = (0..2)
        .partition::<Vec<u32>, _>(|&block| copies.readable(block).iter().all(Option::is_some));
    let both = match both {
        (whole, _) if whole.len() == 1 => u64::from(whole[0]),
        (whole, rest) => panic!("{whole:?}, {rest:?}"),
    };
    assert!(
        !bed.set.read_elsewhere(0, (1 - both) * BLOCK_BYTES),
        "there is no other copy"
    );
    assert_eq!(copies.degraded(), 1);
    assert!(bed.set.read_elsewhere(0, both * BLOCK_BYTES));
    assert!(
        bed.set.read_elsewhere(0, both * BLOCK_BYTES),
        "an answer that was on its way is read elsewhere as well"
    );
    // The lost bytes of the copy come from the other donor, and reads go there.
    bed.cut(0);
    reader
        .post_read(Ticket(5), both * BLOCK_BYTES)
        .expect("room");
    poll_until(&mut reader, "read", |completed| {
        completed == [(5, 7 + both)]
    });
    bed.restore(0);
    assert_eq!(copies.degraded(), 2);
    poll_until(&mut evictor, "filled", |_| copies.degraded() == 1);
    assert_eq!(bed.set.repaired_blocks.get(), 1);
}
