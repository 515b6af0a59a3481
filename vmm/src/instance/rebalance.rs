//! Memory that moves to donors with less than their share.

use std::time::Instant;

use crossbeam_channel::bounded;
use memory_fabric::BLOCK_BYTES;
use memory_fabric::fabric::{DonorAddress, RebalanceState, RebalanceSummary};

use super::drains::{VmDrains, connected, newcomers, refusal};
use crate::control_socket::protocol::{RebalanceBody, Refusal, RefusalCode};
use crate::report::{self, RebalanceUsed};

impl VmDrains {
    /// Returns the state of the last rebalancing.
    pub fn rebalance_body(&self) -> RebalanceBody {
        // Read first, so that the count is not newer than the rest.
        let changes = self.changes().count();
        let state = self.lock();
        RebalanceBody {
            preparing: state.is_adding,
            error: state.rebalance_error.clone(),
            rebalance: self.view().rebalance().map(|last| rebalanced(&last)),
            changes,
        }
    }

    /// Has donors join and moves memory until each donor has its share, and waits `until` then for it to
    /// move. Without donors that join, one that is in progress goes on.
    pub fn rebalance(&self, new: Vec<DonorAddress>, until: Instant) -> Result<(), Refusal> {
        let new = in_blocks(new);
        let is_moving = self.view().rebalance().is_some_and(|last| !last.is_over());
        if is_moving && new.is_empty() {
            return Ok(());
        }
        {
            let mut state = self.lock();
            if state.is_adding || state.preparing.is_some() {
                let text = "donors are being asked for memory; wait until that has ended";
                return Err(Refusal::new(RefusalCode::Busy, text));
            }
            state.is_adding = true;
            state.rebalance_error = None;
        }
        self.changes().notify();
        let (result_sender, result) = bounded(1);
        let drains = self.clone();
        let prepare = move || {
            let before = drains.lenders();
            let begun = drains.fabric().rebalance(&new);
            let begun = begun.map_err(|error| refusal(&error));
            let begun = begun.inspect_err(|refusal| {
                tracing::warn!("memory is not rebalanced: {}", refusal.text);
            });
            // Of several donors some may have refused.
            let joined = connected(&new, &drains.lenders());
            {
                let mut state = drains.lock();
                state.is_adding = false;
                match &begun {
                    Ok(_) => state.named.extend(newcomers(joined, &before)),
                    Err(refusal) => state.rebalance_error = Some(refusal.text.clone()),
                }
            }
            drains.changes().notify();
            // The receiver may have timed out.
            let _ = result_sender.try_send(begun.map(drop));
        };
        let thread = std::thread::Builder::new().name("rebalance".into());
        if let Err(error) = thread.spawn(prepare) {
            self.lock().is_adding = false;
            self.changes().notify();
            return Err(Refusal::new(RefusalCode::Failed, error.to_string()));
        }
        // A later result is visible in the body.
        result.recv_deadline(until).unwrap_or(Ok(()))
    }

    /// Ends a rebalancing after the part that is moving.
    pub fn stop_rebalancing(&self) -> Result<(), Refusal> {
        if self.fabric().stop_rebalancing() {
            return Ok(());
        }
        let text = "no memory is being rebalanced";
        Err(Refusal::new(RefusalCode::State, text))
    }
}

/// Returns donors that are asked for whole blocks, which they lend: another boot of the guest asks for
/// what they are named with.
fn in_blocks(mut new: Vec<DonorAddress>) -> Vec<DonorAddress> {
    for bytes in new.iter_mut().filter_map(|donor| donor.bytes.as_mut()) {
        *bytes = (*bytes / BLOCK_BYTES).max(1) * BLOCK_BYTES;
    }
    new
}

/// Returns what is said of the end of a rebalancing: an error if it failed.
pub fn end_of(state: &RebalanceState) -> Result<String, String> {
    match state {
        RebalanceState::Failed(why) => Err(format!("memory is not rebalanced: {why}")),
        RebalanceState::Stopped => Ok("the rebalancing was ended before all had moved".to_owned()),
        RebalanceState::Done | RebalanceState::Moving => {
            Ok("each donor has its share of the memory".to_owned())
        }
    }
}

/// Returns a rebalancing as report and status have it.
pub fn rebalanced(last: &RebalanceSummary) -> RebalanceUsed {
    let (state, error) = match &last.state {
        RebalanceState::Moving => (report::RebalanceState::Moving, None),
        RebalanceState::Done => (report::RebalanceState::Done, None),
        RebalanceState::Stopped => (report::RebalanceState::Stopped, None),
        RebalanceState::Failed(why) => (report::RebalanceState::Failed, Some(why.clone())),
    };
    RebalanceUsed {
        state,
        bytes: last.bytes,
        moved_bytes: last.moved_bytes,
        error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_donor_is_asked_again_for_the_whole_blocks_that_it_lent() {
        const MIB: u64 = 1 << 20;
        let named = |bytes: Option<u64>| DonorAddress {
            address: ([10, 0, 0, 1], 7000).into(),
            name: None,
            fingerprint: None,
            zone: None,
            bytes,
        };
        for (asked, lent) in [(1, 2), (2, 2), (5, 4), (64, 64)] {
            let new = in_blocks(vec![named(Some(asked * MIB)), named(None)]);
            assert_eq!(new, [named(Some(lent * MIB)), named(None)]);
        }
    }
}
