//! Donors whose links differ.

use super::*;
use fabric_transport::PathKind;
use fabric_transport::path::PathStats;
use fabric_transport::select::Selection;

/// Donors with these times to fetch a page, in microseconds, and pages of four blocks with a copy at
/// each.
fn bed(latencies: [u64; 2]) -> Bed {
    let bed = Bed::new(&[4, 4], 4);
    for (donor, latency) in latencies.into_iter().enumerate() {
        let selection = Selection::all(PathKind::Tcp);
        let latency = Duration::from_micros(latency);
        let path = PathStats::new(selection, (PathKind::Tcp, None), None, latency);
        bed.set.set_path(donor, Arc::new(path));
    }
    bed
}

/// How many of the four blocks are read from each donor first.
fn asked(bed: &Bed) -> [usize; 2] {
    let reader = bed.transport(Role::Reader);
    let mut asked = [0; 2];
    for block in 0..4 {
        let [first, other] = reader.sources(block, 0, 1).map(|place| place.expect("two"));
        assert_ne!(first.donor, other.donor);
        asked[usize::from(first.donor)] += 1;
    }
    asked
}

#[test]
fn reads_go_to_the_donor_that_is_much_faster() {
    assert_eq!(asked(&bed([100, 201])), [4, 0]);
    assert_eq!(asked(&bed([201, 100])), [0, 4]);
}

#[test]
fn donors_of_about_the_same_speed_share_the_reads() {
    assert_eq!(asked(&bed([100, 199])), [2, 2]);
    assert_eq!(asked(&bed([199, 100])), [2, 2]);
}

#[test]
fn reads_go_to_the_slower_donor_while_the_faster_one_is_out() {
    let bed = bed([100, 500]);
    bed.cut(0);
    assert_ne!(bed.set.lost(0, "it was killed"), Loss::OfBlocks);
    let mut reader = bed.transport(Role::Reader);
    reader.post_read(Ticket(1), 0).expect("room");
    poll_until(&mut reader, "read", |completed| completed == [(1, 0)]);
}
