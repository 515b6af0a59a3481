//! A donor joins for copies, or pieces, that were lost with another one and have found no room.

use super::super::{HotplugError, Inner};
use super::room::Found;
use super::{DrainError, Drains};
use crate::fabric::{DonorAddress, replicas};
use crate::homes::{BLOCK_BYTES, JOINERS_MAX};
use fabric_replicas::ReplicaSet;
use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Arc;

impl Drains {
    /// Lets a donor join that lends as much as the largest of the VM, or less, but not less than
    /// [`Self::spare_bytes_min`]. Copies that have no place are made again there. Returns how much it
    /// lends.
    ///
    /// # Errors
    ///
    /// Fails for memory with one copy, while memory moves, and when the donor does not lend enough or is
    /// one of the VM already. Nothing has changed then.
    pub fn join_for_copies(&self, donor: &DonorAddress) -> Result<u64, DrainError> {
        let set = self.0.replicas.as_ref().ok_or(DrainError::OneCopy)?;
        {
            let mut state = self.0.lock();
            self.0.may_move()?;
            state.may_change()?;
            state.joining = true;
        }
        let joined = self.0.join_spare(set, donor);
        self.0.lock().joining = false;
        joined
    }

    /// Returns what a donor has to lend to join for copies that have no place: with less, all donors
    /// that can join might not suffice.
    #[must_use]
    pub fn spare_bytes_min(&self) -> u64 {
        let set = self.0.replicas.as_ref();
        set.map_or(BLOCK_BYTES, |set| {
            spare_bytes_min(set.copies().displaced(), replicas::copy_bytes(set))
        })
    }

    /// Returns the addresses of the donors that sent too many wrong pieces of pages so far.
    #[must_use]
    pub fn distrusted(&self) -> BTreeSet<SocketAddr> {
        let set = self.0.replicas.as_ref();
        set.map_or_else(BTreeSet::new, |set| self.0.distrusted(set))
    }
}

/// Returns the part of one donor of this many copies: whole blocks, the unit of leases, at least one.
fn spare_bytes_min(copies: u32, copy_bytes: u64) -> u64 {
    let bytes = u64::from(copies) * copy_bytes;
    let blocks = bytes.div_ceil(BLOCK_BYTES * JOINERS_MAX as u64);
    blocks.max(1) * BLOCK_BYTES
}

impl Inner {
    fn join_spare(
        self: &Arc<Self>,
        set: &Arc<ReplicaSet>,
        donor: &DonorAddress,
    ) -> Result<u64, DrainError> {
        let new = self.split_members(set, std::slice::from_ref(donor), |_, _| {})?;
        if new.is_empty() {
            return Err(DrainError::Member(donor.address));
        }
        let most = self.largest_loan().unwrap_or(1);
        let least = spare_bytes_min(set.copies().displaced(), replicas::copy_bytes(set));
        let (mut leases, mut found) = (Vec::new(), Found::default());
        self.lease_more(donor, most, &mut leases, &mut found);
        let Some((_, leased)) = leases.first() else {
            return Err(DrainError::NothingLent(found.texts.join("; ")));
        };
        let bytes = leased.grant().bytes;
        // Also if the largest loan is smaller than the part of one donor.
        if bytes < least.min(u64::from(most) * BLOCK_BYTES) {
            // The lease is released.
            return Err(DrainError::TooSmall {
                address: donor.address,
                lent_mib: bytes >> 20,
                least_mib: least >> 20,
            });
        }
        let joined = self.join_leased(set, &new, leases, &found)?;
        if self.lock().closed {
            self.part_members(set, joined);
            return Err(HotplugError::Ended.into());
        }
        Ok(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_donor_that_joins_lends_an_eighth_of_what_was_lost_and_at_least_a_block() {
        assert_eq!(spare_bytes_min(0, BLOCK_BYTES), BLOCK_BYTES);
        assert_eq!(spare_bytes_min(8, BLOCK_BYTES), BLOCK_BYTES);
        assert_eq!(spare_bytes_min(9, BLOCK_BYTES), 2 * BLOCK_BYTES);
        assert_eq!(spare_bytes_min(24, BLOCK_BYTES), 3 * BLOCK_BYTES);
        // Pieces of stripes of 4+2.
        assert_eq!(spare_bytes_min(64, BLOCK_BYTES / 4), 2 * BLOCK_BYTES);
        assert_eq!(
            spare_bytes_min(u32::MAX, BLOCK_BYTES),
            (1 << 29) * BLOCK_BYTES
        );
    }
}
