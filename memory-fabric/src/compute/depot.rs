//! Pages of a home at donors: the depot of the node that has the leases.

use std::fmt;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::{Arc, PoisonError};
use std::time::Instant;

use fabric_coherence::Member;
use fabric_replicas::ReplicaSet;
use fabric_sharing::{Depot, Homes, Stored};
use fabric_transport::port::STALL_CHECK_INTERVAL;
use vmm_sys_util::eventfd::EventFd;

use crate::homes::{BLOCK_BYTES, BLOCK_PAGES};
use crate::page::{PAGE_SIZE, PageBytes, PageIndex};
use crate::stats::PagerStats;
use crate::transport::{Completion, Interest, PageTransport, Ticket};
use crate::view::{Lenders, VmMemory};

/// Where a block is: the link of its donor, and the block of that lease.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct Slot {
    link: usize,
    block: u32,
}

/// Stores pages at donors, each in a place that is fixed by its block, or in two places: the link to
/// replicated memory is then the only one with room.
pub struct DonorDepot {
    /// For reads, by link.
    urgent: Vec<Box<dyn PageTransport>>,
    /// For writes, by link.
    bulk: Vec<Box<dyn PageTransport>>,
    lent_bytes: Vec<u64>,
    wake: EventFd,
    stats: Arc<PagerStats>,
    lenders: Lenders,
    replicas: Option<Arc<ReplicaSet>>,
    /// By block of the guest.
    slots: Vec<Option<Slot>>,
}

impl fmt::Debug for DonorDepot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DonorDepot")
            .field("lent_bytes", &self.lent_bytes)
            .finish_non_exhaustive()
    }
}

/// Divides the blocks among donors that have room for so many, in turns; the first ones get none if
/// there is not enough room. Returns the slot of each block.
fn divide(blocks: usize, room: &[u64]) -> Vec<Option<Slot>> {
    let all: u64 = room.iter().fold(0, |sum, room| sum.saturating_add(*room));
    let without = blocks.saturating_sub(usize::try_from(all).unwrap_or(usize::MAX));
    let mut slots = vec![None; without];
    let mut used = vec![0_u32; room.len()];
    while slots.len() < blocks {
        for (link, (used, room)) in used.iter_mut().zip(room).enumerate() {
            if slots.len() < blocks && u64::from(*used) < *room {
                slots.push(Some(Slot { link, block: *used }));
                *used += 1;
            }
        }
    }
    slots
}

impl DonorDepot {
    /// Uses one transport for reads and one for writes to each donor, which wake by `wake`.
    pub(crate) fn new(
        urgent: Vec<Box<dyn PageTransport>>,
        bulk: Vec<Box<dyn PageTransport>>,
        lent_bytes: Vec<u64>,
        wake: EventFd,
        vm: &VmMemory,
    ) -> Self {
        Self {
            urgent,
            bulk,
            lent_bytes,
            wake,
            stats: Arc::clone(&vm.stats),
            lenders: Arc::clone(&vm.lent_by),
            replicas: vm.replicas.clone(),
            slots: Vec::new(),
        }
    }

    /// Whole blocks that all donors lend, in bytes; where each has two copies, those that they hold.
    #[must_use]
    pub fn lent_bytes(&self) -> u64 {
        self.room().iter().sum::<u64>() * BLOCK_BYTES
    }

    fn room(&self) -> Vec<u64> {
        let room = self.lent_bytes.iter().map(|bytes| bytes / BLOCK_BYTES);
        room.collect()
    }

    /// Gives the blocks whose home is `me` their places.
    pub(super) fn settle(&mut self, homes: &Homes, me: Member) {
        let blocks: Vec<usize> = homes.blocks_at(me).collect();
        let slots = divide(blocks.len(), &self.room());
        self.slots = vec![None; blocks.last().map_or(0, |last| last + 1)];
        let mut used = vec![0; self.lent_bytes.len()];
        for (block, slot) in blocks.into_iter().zip(slots) {
            self.slots[block] = slot;
            if let Some(slot) = slot {
                used[self.donor(slot)] += BLOCK_BYTES;
            }
        }
        let mut lenders = self.lenders.write().unwrap_or_else(PoisonError::into_inner);
        for (lender, used) in lenders.iter_mut().zip(used) {
            lender.shared_bytes = used;
        }
    }

    /// The index of the donor that has a block, or the copy that is read first.
    fn donor(&self, slot: Slot) -> usize {
        match &self.replicas {
            Some(set) => set.copies().of(slot.block)[0].place.donor.into(),
            None => slot.link,
        }
    }

    /// The link and the offset in its lease.
    fn place(&self, page: PageIndex) -> Option<(usize, u64)> {
        let block = (page.number() / BLOCK_PAGES) as usize;
        let slot = self.slots.get(block).copied().flatten()?;
        let in_block = u64::from(page.number() % BLOCK_PAGES) * PAGE_SIZE as u64;
        Some((slot.link, u64::from(slot.block) * BLOCK_BYTES + in_block))
    }

    fn transports(&mut self) -> impl Iterator<Item = &mut Box<dyn PageTransport>> {
        self.urgent.iter_mut().chain(self.bulk.iter_mut())
    }
}

impl Depot for DonorDepot {
    fn pages(&self) -> usize {
        self.slots.iter().flatten().count() * BLOCK_PAGES as usize
    }

    fn has_place(&self, page: PageIndex) -> bool {
        self.place(page).is_some()
    }

    fn read(&mut self, page: PageIndex) -> bool {
        let place = self.place(page);
        place.is_some_and(|(link, offset)| {
            let ticket = Ticket(page.number());
            self.urgent[link].post_read(ticket, offset).is_ok()
        })
    }

    fn write(&mut self, page: PageIndex, bytes: &PageBytes) -> bool {
        let place = self.place(page);
        place.is_some_and(|(link, offset)| {
            let ticket = Ticket(page.number());
            self.bulk[link].post_write(ticket, offset, bytes).is_ok()
        })
    }

    fn flush(&mut self) {
        self.transports().for_each(|transport| transport.flush());
    }

    fn poll(&mut self, done: &mut dyn FnMut(Stored<'_>)) {
        let Self {
            urgent,
            bulk,
            stats,
            ..
        } = self;
        for (link, transport) in urgent.iter_mut().enumerate() {
            transport.poll(&mut |completion| {
                let (donor, ticket, bytes) = match completion {
                    Completion::Read(ticket, bytes) => (link, ticket, bytes),
                    Completion::ReadFrom(donor, ticket, bytes) => (donor, ticket, bytes),
                    _ => return,
                };
                stats.donors[donor].pages_fetched.increment();
                done(Stored::Read(PageIndex::new(ticket.0), bytes));
            });
        }
        // Replicated memory counts what each donor confirms itself.
        for (transport, donor) in bulk.iter_mut().zip(&stats.donors) {
            transport.poll(&mut |completion| {
                if let Completion::Written(ticket) = completion {
                    donor.pages_written_back.increment();
                    done(Stored::Written(PageIndex::new(ticket.0)));
                }
            });
        }
    }

    fn arm(&mut self) -> bool {
        self.transports()
            .fold(true, |armed, transport| armed & transport.arm())
    }

    fn wake_by(&mut self) -> Option<Instant> {
        let now = Instant::now();
        let wakes = self.transports().flat_map(|transport| {
            let stalls_at = (transport.in_flight() > 0).then(|| now + STALL_CHECK_INTERVAL);
            [transport.wake_by(), stalls_at]
        });
        wakes.flatten().min()
    }

    fn watch(&self, watch: &mut dyn FnMut(RawFd, bool)) {
        watch(self.wake.as_raw_fd(), false);
        for transport in self.urgent.iter().chain(&self.bulk) {
            transport.interests(&mut |Interest { fd, writable }| watch(fd, writable));
        }
    }

    fn slept(&mut self) {
        // Nothing is lost: transports are polled after each sleep.
        let _ = self.wake.read();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_divided_among_donors_with_room() {
        let slots = divide(6, &[1, 3, 9]);
        let found: Vec<_> = slots.iter().flatten().map(|slot| slot.link).collect();
        assert_eq!(found, [0, 1, 2, 1, 2, 1]);
        let of_third: Vec<_> = slots
            .iter()
            .flatten()
            .filter(|slot| slot.link == 2)
            .collect();
        assert_eq!(of_third[1].block, 1);
        let few = divide(5, &[1, 0, 2]);
        assert_eq!(
            few.iter().position(Option::is_some),
            Some(2),
            "the first stay"
        );
        assert_eq!(few.iter().flatten().count(), 3);
        assert_eq!(divide(2, &[]), [None, None]);
    }
}
