//! Replicated memory: where its copies are, its part of the pager's transports, and what the links
//! of its donors report.

use super::{DonorAddress, FabricConfig, FabricError, FabricEvent, FabricObserver, Redundancy};
use crate::homes::{BLOCK_BYTES, BLOCK_PAGES, Loan, NodeId};
use crate::link::LinkEvent;
use crate::nodes::Nodes;
use crate::page::PAGE_SHIFT;
use crate::stats::PagerStats;
use crate::transport::PageTransport;
use crate::transport::vacant::Vacant;
use crate::view::VmMemory;
use fabric_replicas::{
    Copies, Layout, Loss, Placement, ReplicaEvent, ReplicaSet, ReplicatedTransport, Role,
    SLOTS_MAX, StripePlacement, Traffic,
};
use std::collections::BTreeSet;
use std::io;
use std::sync::Arc;
use vmm_sys_util::eventfd::EventFd;

impl Traffic for PagerStats {
    fn wrote(&self, donor: usize) {
        self.donors[donor].pages_written_back.increment();
    }

    fn fetched(&self, donor: usize, pages: u32) {
        self.donors[donor].pages_fetched.add(pages.into());
    }
}

/// Returns the zone of each donor, as a number.
pub(super) fn zones_of(donors: &[DonorAddress]) -> Vec<u8> {
    fabric_replicas::zones(donors.iter().map(|donor| donor.zone.as_deref()))
}

/// Returns how many bytes to ask a donor for, so that all together have two copies of
/// `remote_bytes`, also when one of them is lost, and in different zones.
pub(super) fn share(remote_bytes: u64, zones: &[u8], donor: usize) -> u64 {
    let blocks = remote_bytes.div_ceil(BLOCK_BYTES).max(1);
    let each = |lenders: usize| {
        let others = (lenders as u64).saturating_sub(1).max(1);
        (2 * blocks).div_ceil(others).min(blocks)
    };
    let named: BTreeSet<u8> = zones.iter().copied().collect();
    let beside = zones.iter().filter(|&&zone| zone == zones[donor]).count() as u64 - 1;
    // What its zone has to hold without one of its donors.
    let of_zone = each(named.len()).div_ceil(beside.max(1));
    each(zones.len()).max(of_zone) * BLOCK_BYTES
}

/// The same for stripes on so many donors.
pub(super) fn striped_share(remote_bytes: u64, layout: Layout, donors: usize) -> u64 {
    let blocks = remote_bytes.div_ceil(BLOCK_BYTES).max(1);
    let pieces = layout.pieces() as u64 * blocks;
    // With more donors than pieces, the others have room for those of a lost one.
    let others = (donors as u64 - 1).max(layout.pieces() as u64);
    let slots = pieces.div_ceil(others).min(blocks);
    (slots * piece_bytes(layout)).next_multiple_of(BLOCK_BYTES)
}

/// Returns the bytes of a piece of a block.
fn piece_bytes(layout: Layout) -> u64 {
    BLOCK_BYTES / layout.data() as u64
}

/// Returns the bytes of a copy of a block, or of a piece of one.
pub(in crate::fabric) fn copy_bytes(set: &ReplicaSet) -> u64 {
    set.copies().layout().map_or(BLOCK_BYTES, piece_bytes)
}

/// Returns how many blocks or pieces so many bytes are, as far as they can be used.
fn blocks_of(bytes: u64, block_bytes: u64) -> u32 {
    u32::try_from(bytes / block_bytes).map_or(SLOTS_MAX, |blocks| blocks.min(SLOTS_MAX))
}

/// Places two copies of so many bytes, or of as many as donors can hold that lend so much each. Returns
/// them, and the number of blocks with their primary copy at each donor.
pub(super) fn place_at_most(
    wanted_bytes: u64,
    zones: &[u8],
    lent_bytes: impl Iterator<Item = u64>,
) -> (Copies, Vec<u32>) {
    let slots = lent_bytes.map(|bytes| blocks_of(bytes, BLOCK_BYTES));
    let slots: Vec<u32> = slots.collect();
    let wanted = blocks_of(wanted_bytes.next_multiple_of(BLOCK_BYTES), BLOCK_BYTES);
    let placement = Placement::new(&slots, zones, wanted);
    let copies = Copies::new(&placement.blocks, &slots, &placement.used, zones);
    (copies, placement.primaries)
}

/// The same for stripes.
fn place_stripes(
    wanted_bytes: u64,
    layout: Layout,
    lent_bytes: impl Iterator<Item = u64>,
) -> (Copies, Vec<u32>) {
    let slots = lent_bytes.map(|bytes| blocks_of(bytes, piece_bytes(layout)));
    let slots: Vec<u32> = slots.collect();
    let wanted = blocks_of(wanted_bytes.next_multiple_of(BLOCK_BYTES), BLOCK_BYTES);
    let placement = StripePlacement::new(&slots, layout, wanted);
    let copies = Copies::striped(&placement.places, layout, &slots, &placement.used);
    (copies, placement.primaries)
}

/// Places the memory that has its home on donors, which lend so many bytes each, in two copies or in
/// stripes.
pub(super) fn place(
    config: &FabricConfig,
    guest_bytes: u64,
    lent_bytes: impl Iterator<Item = u64>,
) -> Result<(Copies, Vec<u32>), FabricError> {
    let (guest_pages, local_pages) = (guest_bytes >> PAGE_SHIFT, config.local_bytes >> PAGE_SHIFT);
    let home_here = config.local_use.home_here(guest_pages, local_pages);
    let zones = zones_of(&config.donors);
    let wanted_bytes = (guest_pages - home_here) << PAGE_SHIFT;
    let (copies, primaries) = match config.redundancy {
        Redundancy::Stripes(layout) => place_stripes(wanted_bytes, layout, lent_bytes),
        Redundancy::Copies | Redundancy::None => place_at_most(wanted_bytes, &zones, lent_bytes),
    };
    let held_bytes = u64::from(copies.blocks()) * BLOCK_BYTES;
    if config.local_bytes + held_bytes < guest_bytes {
        let missing = guest_bytes - config.local_bytes - held_bytes;
        let (guest_mib, local_mib) = (guest_bytes >> 20, config.local_bytes >> 20);
        let (donors, held_mib) = (primaries.len(), held_bytes >> 20);
        let missing_mib = missing.div_ceil(1 << 20);
        return Err(match config.redundancy {
            Redundancy::Stripes(layout) => FabricError::TooLittleForStripes {
                layout,
                guest_mib,
                local_mib,
                donors,
                held_mib,
                missing_mib,
            },
            Redundancy::Copies | Redundancy::None => FabricError::TooLittleForReplicas {
                guest_mib,
                local_mib,
                donors,
                held_mib,
                missing_mib,
            },
        });
    }
    Ok((copies, primaries))
}

/// Returns the loans for the home table: the blocks with their primary places at each donor.
pub(super) fn loans(primaries: &[u32], nodes: &[NodeId]) -> Vec<Loan> {
    let mut first_slot = 0;
    let loans = nodes.iter().zip(primaries);
    loans
        .map(|(&node, &blocks)| {
            let loan = Loan {
                node,
                pages: u64::from(blocks) * u64::from(BLOCK_PAGES),
                first_slot,
            };
            first_slot += blocks;
            loan
        })
        .collect()
}

/// Creates the set of the donors of a VM.
pub(super) fn set(copies: Copies, nodes: &Nodes, observer: &FabricObserver) -> Arc<ReplicaSet> {
    let copies = copies.with_joiners(nodes.joiners());
    let (all, observer) = (nodes.all().to_vec(), Arc::clone(observer));
    let report = move |event| {
        observer(match event {
            ReplicaEvent::Degraded { donor, reason } => FabricEvent::Degraded {
                node: all[donor],
                reason,
            },
            ReplicaEvent::Awaited { donor, reason } => FabricEvent::Link(LinkEvent::Down {
                node: all[donor],
                reason,
            }),
            ReplicaEvent::Back { donor } => FabricEvent::Link(LinkEvent::Up { node: all[donor] }),
            ReplicaEvent::AwaitedNoMore { donor } => {
                FabricEvent::AwaitedNoMore { node: all[donor] }
            }
            ReplicaEvent::Repaired => FabricEvent::Repaired,
            ReplicaEvent::WrongPieces { donor, pieces } => {
                let donor = all[donor];
                tracing::warn!(
                    pieces,
                    "donor {donor} sent pieces of pages with other bytes than were written back last; \
                     the pages are computed from other pieces, and after 3 such pages the donor is \
                     not used any more, unless too few others have the pieces"
                );
                return;
            }
            ReplicaEvent::PagesLost { pages } => {
                tracing::warn!(
                    pages,
                    "pages are lost: copies were made without them, since none that could be read \
                     then was right, and no donor that is left has them; the VM ends if its guest \
                     reads one before it is written again"
                );
                return;
            }
            ReplicaEvent::InOneZone { blocks } => {
                tracing::warn!(
                    mib = (u64::from(blocks) * BLOCK_BYTES) >> 20,
                    "memory has both copies in one zone, since donors of others have no room: the \
                     loss of that zone loses it; add a donor in another zone, or let those there \
                     lend more"
                );
                return;
            }
        });
    };
    let set = Arc::new(ReplicaSet::new(copies, nodes.all().len(), Box::new(report)));
    set.report_zones();
    set
}

/// Returns an observer for the links of the donors. The set reports for which donor the guest waits;
/// this passes on that one is lost without which the guest cannot continue.
pub(super) fn link_observer(
    set: &Arc<ReplicaSet>,
    nodes: &Arc<Nodes>,
    observer: &FabricObserver,
) -> FabricObserver {
    let (set, nodes, observer) = (Arc::clone(set), Arc::clone(nodes), Arc::clone(observer));
    Arc::new(move |event| {
        let FabricEvent::Link(link_event) = event else {
            observer(event);
            return;
        };
        let node = link_event.node();
        let Some(donor) = nodes.link_to(node) else {
            return;
        };
        match link_event {
            LinkEvent::Down { reason, .. } => {
                set.down(donor, &reason);
            }
            LinkEvent::Up { .. } => {
                tracing::info!("donor {node} is back");
                set.up(donor);
            }
            LinkEvent::Lost { node, reason } => match set.lost(donor, &reason) {
                Loss::OfBlocks => observer(FabricEvent::Link(LinkEvent::Lost { node, reason })),
                Loss::OfCopies { .. } => tracing::info!("donor {node} does not return: {reason}"),
            },
        }
    })
}

/// Makes the threads with these eventfds look at the set when it changes.
pub(super) fn wake_by<'a>(
    set: &ReplicaSet,
    threads: impl Iterator<Item = &'a EventFd>,
) -> io::Result<()> {
    let threads: Vec<EventFd> = threads.map(EventFd::try_clone).collect::<io::Result<_>>()?;
    set.set_wake(move || {
        for thread in &threads {
            // EAGAIN means that the counter is full, which wakes as well.
            let _ = thread.write(1);
        }
    });
    Ok(())
}

/// Puts the transports to donors behind the link to their replicated memory, the last one.
pub(super) fn join_transports(
    set: &Arc<ReplicaSet>,
    role: Role,
    transports: Vec<Box<dyn PageTransport>>,
    vm: &VmMemory,
) -> Vec<Box<dyn PageTransport>> {
    if transports.is_empty() {
        return transports;
    }
    let vacant = || -> Box<dyn PageTransport> { Box::new(Vacant) };
    let mut joined: Vec<_> = vm.nodes.all().iter().map(|_| vacant()).collect();
    let stats: Arc<dyn Traffic> = Arc::clone(&vm.stats) as _;
    let replicated = ReplicatedTransport::new(Arc::clone(set), role, transports, stats);
    joined.push(Box::new(replicated));
    joined
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_donor_lends_beyond_the_slots_of_a_place_is_not_used() {
        let layout = "8+1".parse().expect("a layout");
        let (copies, primaries) = place_stripes(8 << 20, layout, [4 << 40; 9].into_iter());
        assert_eq!((copies.blocks(), primaries.iter().sum::<u32>()), (4, 4));
        let (copies, _) = place_at_most(8 << 20, &[0, 1], [32 << 40; 2].into_iter());
        assert_eq!(copies.blocks(), 4);
    }

    const MIB: u64 = 1 << 20;

    #[test]
    fn donors_are_asked_for_both_copies_and_for_room_to_lose_one_of_three() {
        let alone = |bytes, donors: u8| share(bytes, &Vec::from_iter(0..donors), 0);
        assert_eq!(alone(100 * MIB, 2), 100 * MIB);
        assert_eq!(alone(100 * MIB, 3), 100 * MIB);
        assert_eq!(alone(120 * MIB, 5), 60 * MIB);
        assert_eq!(alone(0, 2), BLOCK_BYTES);
    }

    #[test]
    fn donors_are_asked_for_their_pieces_and_for_room_to_lose_one_where_there_are_more() {
        let layout = "4+2".parse().expect("possible");
        let share = |bytes, donors| striped_share(bytes, layout, donors);
        assert_eq!(share(96 * MIB, 6), 24 * MIB);
        assert_eq!(share(96 * MIB, 7), 24 * MIB, "six must hold all pieces");
        assert_eq!(share(96 * MIB, 9), 18 * MIB);
        assert_eq!(share(0, 6), BLOCK_BYTES);
    }

    #[test]
    fn a_zone_is_asked_for_a_copy_of_everything_also_without_one_of_its_donors() {
        assert_eq!(share(120 * MIB, &[0, 0, 1, 1], 0), 120 * MIB);
        assert_eq!(
            share(120 * MIB, &[0, 0, 0, 1], 1),
            80 * MIB,
            "as without zones"
        );
        assert_eq!(share(120 * MIB, &[0, 0, 0, 1], 3), 120 * MIB);
        assert_eq!(share(120 * MIB, &[0, 0, 0, 1, 1, 1], 3), 60 * MIB);
    }
}
