//! A donor joins for copies, or pieces, that were lost with another one and have found no room.

use super::super::{HotplugError, Inner};
use super::{DrainError, Drains};
use crate::fabric::DonorAddress;
use crate::homes::BLOCK_BYTES;
use fabric_replicas::ReplicaSet;
use std::sync::Arc;

impl Drains {
    /// Lets a donor join that lends as much as the largest of the VM, or less. Copies that have no
    /// place are made again there. Returns how much it lends.
    ///
    /// # Errors
    ///
    /// Fails for memory with one copy, while memory moves, and when the donor does not lend or is one
    /// of the VM already. Nothing has changed then.
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
}

impl Inner {
    fn join_spare(
        self: &Arc<Self>,
        set: &Arc<ReplicaSet>,
        donor: &DonorAddress,
    ) -> Result<u64, DrainError> {
        let joined = self.join_for_share(set, std::slice::from_ref(donor))?;
        let Some(&place) = joined.first() else {
            return Err(DrainError::Member(donor.address));
        };
        let (is_closed, slots) = {
            let state = self.lock();
            (state.closed, self.slots_of(&state, place))
        };
        if is_closed {
            self.part_members(set, joined);
            return Err(HotplugError::Ended.into());
        }
        Ok(u64::from(slots) * BLOCK_BYTES)
    }
}
