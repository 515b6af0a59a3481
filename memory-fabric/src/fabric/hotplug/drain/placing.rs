//! Blocks of memory with one copy move by their heat ([`heat`](super::heat)).

use super::super::{HotplugError, Inner, State};
use super::heat::{Block, Donor, HeatPolicy};
use super::{DrainError, Drains};
use crate::drain::Instead;
use crate::fabric::FabricError;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

/// Deadline for the end of moves by heat when a drain or a rebalancing is to begin: the block that is
/// moving takes much less, unless a donor does not answer.
const END_TIME_MAX: Duration = Duration::from_secs(2);

impl Drains {
    /// Looks at the heat of blocks once, and begins to move hot ones to fast donors and cold ones away
    /// from there. Returns the number of blocks that begin to move: 0 while a donor is out of use, a
    /// drain, a rebalancing or earlier moves are in progress, or a donor joins.
    ///
    /// # Errors
    ///
    /// When blocks cannot move in this VM, or the system gives no thread.
    pub fn place_by_heat(&self, policy: &mut HeatPolicy) -> Result<usize, DrainError> {
        self.0.place_by_heat(policy)
    }
}

impl Inner {
    fn place_by_heat(self: &Arc<Self>, policy: &mut HeatPolicy) -> Result<usize, DrainError> {
        if self.replicas.is_some() {
            return Err(DrainError::Copies);
        }
        self.reclaim_slots();
        let mut state = self.lock();
        match self.may_move_blocks(&state) {
            Ok(()) if self.moves.heat.may_begin() && self.all_are_reachable(&state) => {}
            Err(
                error @ (DrainError::Exposed
                | DrainError::Change(HotplugError::Loopback | HotplugError::Ended)),
            ) => return Err(error),
            // Those of an earlier look.
            Err(DrainError::Placing) => return Ok(0),
            _ => {
                policy.interrupt();
                return Ok(0);
            }
        }
        let donors = self.donors_by_speed(&state);
        let blocks = self.blocks_by_heat(&donors);
        let moves = policy.look(donors, &blocks);
        if moves.is_empty() {
            return Ok(0);
        }
        let count = moves.len();
        let (order, ended) = self.order(&moves);
        let (news, lost) = crossbeam_channel::bounded(1);
        let (inner, progress) = (Arc::clone(self), Arc::clone(&order.progress));
        let supervise = move || {
            inner.wait_for_moves(&ended, &lost);
            inner.settle(&moves, &progress);
            inner.moves.heat.end(progress.moved());
        };
        self.moves.heat.begin(&order.progress);
        let thread = std::thread::Builder::new().name("place-heat".into());
        match thread.spawn(supervise) {
            Ok(thread) => {
                // Those of earlier looks have ended.
                state.leaving.retain(|thread| !thread.is_finished());
                state.leaving.push(thread);
            }
            Err(error) => {
                self.moves.heat.end(0);
                return Err(
                    HotplugError::Donor(FabricError::System("start a thread", error)).into(),
                );
            }
        }
        state.news = Some(news);
        if !self.shared.evictor.move_blocks(order) {
            return Err(HotplugError::Ended.into());
        }
        tracing::debug!("{count} blocks of 2 MiB move because of their heat");
        Ok(count)
    }

    fn all_are_reachable(&self, state: &State) -> bool {
        let mut links = 0..self.shared.nodes.links();
        links.all(|link| !self.is_lender(state, link) || self.is_reachable(link))
    }

    fn donors_by_speed(&self, state: &State) -> Vec<Donor> {
        let lenders = self.lenders.read().unwrap_or_else(PoisonError::into_inner);
        let paths: Vec<_> = lenders.iter().map(|lent| lent.path.clone()).collect();
        drop(lenders);
        let donor = |link: usize| {
            let path = paths.get(link)?.as_ref()?;
            Some(Donor {
                node: self.node_of(link),
                tier: path.tier(),
                page: path.latency_estimate(),
                free: self.free_slots(state, link),
            })
        };
        self.takers(state).filter_map(donor).collect()
    }

    fn blocks_by_heat(&self, donors: &[Donor]) -> Vec<Block> {
        let (homes, touches) = (&self.shared.homes, &self.shared.touches);
        let now = Instant::now();
        let at = donors
            .iter()
            .flat_map(|donor| homes.ram_blocks_at(donor.node));
        let blocks = at.map(|(block, home)| Block {
            block,
            home,
            faults: touches.recent_in(homes.pages_of(block), now),
        });
        blocks.collect()
    }

    /// Ends moves by heat after the block that is moving, so that others can begin, and lets none begin
    /// while the result lives.
    pub(super) fn end_placing(&self) -> Instead<'_> {
        let instead = self.moves.heat.instead();
        // One that may have begun before is known after this.
        drop(self.lock());
        self.moves.heat.stop(END_TIME_MAX);
        instead
    }
}
