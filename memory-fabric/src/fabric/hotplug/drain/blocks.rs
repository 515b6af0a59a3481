//! Blocks of memory with one copy move to donors that have less than their share.

use super::super::{HotplugError, Inner};
use super::DrainError;
use super::share::{self, Lender};
use crate::drain::{Rebalance, RebalanceState, RebalanceSummary};
use crate::fabric::{DonorAddress, FabricError};
use crate::homes::BLOCK_BYTES;
use crossbeam_channel::Receiver;
use std::sync::Arc;

impl Inner {
    pub(super) fn rebalance_blocks(
        self: &Arc<Self>,
        new: &[DonorAddress],
    ) -> Result<RebalanceSummary, DrainError> {
        {
            let mut state = self.lock();
            self.may_move_blocks(&state)?;
            state.joining = true;
        }
        let joined = self.join_with_blocks(new);
        self.reclaim_slots();
        let mut state = self.lock();
        state.joining = false;
        joined?;
        let lenders: Vec<Lender> = self
            .takers(&state)
            .map(|link| Lender {
                node: self.node_of(link),
                lent: self.slots_of(&state, link),
                free: self.free_slots(&state, link),
            })
            .collect();
        let moves = share::plan(&self.shared.homes, lenders);
        let (order, ended) = self.order(&moves);
        if state.closed {
            return Err(HotplugError::Ended.into());
        }
        let rebalance = Rebalance {
            copies: u32::try_from(moves.len()).expect("23 bits"),
            copy_bytes: BLOCK_BYTES,
            progress: Arc::clone(&order.progress),
            state: RebalanceState::Moving,
            is_stopped: false,
        };
        let of_order = Arc::clone(&order.progress);
        let supervise = move |inner: &Arc<Self>, lost: &Receiver<()>| {
            inner.wait_for_moves(&ended, lost);
            let stayed = inner.settle(&moves, &of_order);
            let is_ended = stayed > 0 && inner.shared.lifecycle.is_stopping();
            inner.conclude_rebalance((!is_ended).then_some(stayed));
        };
        // First: the end of moves that nobody waits for would not be known.
        let summary = rebalance.summary();
        if let Err(error) = self.watch_rebalance(&mut state, rebalance, supervise) {
            drop(state);
            self.end_rebalance(RebalanceState::without_thread(&error));
            return Err(HotplugError::Donor(FabricError::System("start a thread", error)).into());
        }
        if !self.shared.evictor.move_blocks(order) {
            return Err(HotplugError::Ended.into());
        }
        Ok(summary)
    }

    /// Has donors join that are not among the VM's.
    fn join_with_blocks(self: &Arc<Self>, new: &[DonorAddress]) -> Result<(), DrainError> {
        let known: Vec<_> = {
            let state = self.lock();
            let links = 0..self.shared.nodes.links();
            let links = links.filter(|&link| self.is_lender(&state, link));
            links.filter_map(|link| self.address_of(link)).collect()
        };
        let new = new.iter().filter(|donor| !known.contains(&donor.address));
        let new: Vec<DonorAddress> = new.cloned().collect();
        let (leases, found) = self.lease_for_share(&new)?;
        if leases.len() < new.len() {
            let texts = found.texts.join("; ");
            tracing::warn!("not all donors lend that were named: {texts}");
        }
        self.connect_all(leases).map(drop)
    }
}
