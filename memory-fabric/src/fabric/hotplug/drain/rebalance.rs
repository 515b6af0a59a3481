//! Memory moves to donors that have less than their share, such as one that has just joined: copies of
//! replicated memory, pieces of stripes, or blocks that have one copy ([`blocks`](super::blocks)).

use super::super::{HotplugError, Inner, State};
use super::copies::Watched;
use super::room::Found;
use super::{DrainError, Drains};
use crate::drain::{Rebalance, RebalanceState, RebalanceSummary, UNREADABLE};
use crate::fabric::{DonorAddress, FabricEvent, replicas};
use crate::homes::BLOCK_BYTES;
use crate::link::Leased;
use crossbeam_channel::{Receiver, bounded};
use fabric_replicas::ReplicaSet;
use std::io;
use std::sync::{Arc, PoisonError};

impl Drains {
    /// Has the donors in `new` join, and moves memory until each donor has its share of it, in
    /// proportion to what it lends. Returns when it begins to move. Donors of `new` that the VM has
    /// already stay as they are.
    ///
    /// # Errors
    ///
    /// See [`DrainError`]. Nothing has changed then.
    pub fn rebalance(&self, new: &[DonorAddress]) -> Result<RebalanceSummary, DrainError> {
        let _instead = self.0.end_placing();
        match &self.0.replicas {
            Some(set) => self.0.rebalance_copies(set, new),
            None => self.0.rebalance_blocks(new),
        }
    }

    /// Ends the rebalancing in progress after the part that is moving. Returns false without one.
    #[must_use]
    pub fn stop_rebalancing(&self) -> bool {
        // One that has begun is recorded while this is locked.
        let _state = self.0.lock();
        let mut is_moving = false;
        // First, so that it is known when the last part has moved.
        self.0.with_rebalance(|last| {
            last.is_stopped = true;
            is_moving = !last.is_over();
            last.progress.stop();
        });
        match &self.0.replicas {
            Some(set) => set.stop_rebalancing(),
            None => is_moving,
        }
    }
}

impl Inner {
    fn rebalance_copies(
        self: &Arc<Self>,
        set: &Arc<ReplicaSet>,
        new: &[DonorAddress],
    ) -> Result<RebalanceSummary, DrainError> {
        {
            let mut state = self.lock();
            self.may_move()?;
            state.may_change()?;
            state.joining = true;
        }
        let joined = self.join_for_share(set, new);
        let mut state = self.lock();
        state.joining = false;
        let joined = joined?;
        let Watched {
            progress,
            observer,
            ended,
        } = Watched::new();
        let begun = match state.closed {
            true => Err(HotplugError::Ended.into()),
            false => {
                let begun = set.rebalance(observer);
                begun.map_err(|_| DrainError::Rebalancing)
            }
        };
        let copies = match begun {
            Ok(copies) => copies,
            Err(refused) => {
                drop(state);
                self.part_members(set, joined);
                return Err(refused);
            }
        };
        let rebalance = Rebalance {
            copies,
            copy_bytes: replicas::copy_bytes(set),
            progress,
            state: RebalanceState::Moving,
            is_stopped: false,
        };
        let supervise = move |inner: &Arc<Self>, closed: &Receiver<()>| {
            inner.supervise_rebalance(&ended, closed);
        };
        let summary = rebalance.summary();
        let watched = self.watch_rebalance(&mut state, rebalance, supervise);
        drop(state);
        // The memory moves as well.
        if let Err(error) = watched {
            self.end_rebalance(RebalanceState::without_thread(&error));
        }
        Ok(summary)
    }

    /// Records a rebalancing that has begun or will begin, and has a thread wait for its end.
    ///
    /// # Errors
    ///
    /// When there is no thread.
    pub(super) fn watch_rebalance(
        self: &Arc<Self>,
        state: &mut State,
        rebalance: Rebalance,
        supervise: impl FnOnce(&Arc<Self>, &Receiver<()>) + Send + 'static,
    ) -> io::Result<()> {
        let mib = rebalance.summary().bytes >> 20;
        let mut last = self
            .moves
            .rebalance
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        *last = Some(rebalance);
        drop(last);
        let (news, closed) = bounded(1);
        state.news = Some(news);
        let inner = Arc::clone(self);
        let supervise = move || supervise(&inner, &closed);
        let thread = std::thread::Builder::new().name("rebalance".into());
        state.leaving.push(thread.spawn(supervise)?);
        tracing::info!("{mib} MiB move to donors that have less than their share");
        Ok(())
    }

    /// Has new donors join, each with as much as it is named with, or as the VM's largest lends.
    fn join_for_share(
        self: &Arc<Self>,
        set: &Arc<ReplicaSet>,
        new: &[DonorAddress],
    ) -> Result<Vec<usize>, DrainError> {
        let new = self.split_members(set, new, |_, _| {})?;
        let (leases, found) = self.lease_for_share(&new)?;
        self.join_leased(set, &new, leases, &found)
    }

    /// Leases from new donors, from each as much as it is named with, or as the VM's largest lends, or
    /// less than that.
    pub(super) fn lease_for_share(
        &self,
        new: &[DonorAddress],
    ) -> Result<(Vec<(usize, Leased)>, Found), DrainError> {
        let most = self.largest_loan();
        let (mut leases, mut found) = (Vec::new(), Found::default());
        for donor in new {
            let named = donor.bytes.map(|bytes| bytes / BLOCK_BYTES);
            let named = named.map(|blocks| u32::try_from(blocks).unwrap_or(u32::MAX));
            let wanted = named.or(most).unwrap_or(1).max(1);
            // As at the start: another boot of the guest asks for as much.
            let or_less = named.is_none();
            self.lease_blocks(donor, wanted, or_less, &mut leases, &mut found);
        }
        if leases.is_empty() && !new.is_empty() {
            return Err(DrainError::NothingLent(found.texts.join("; ")));
        }
        Ok((leases, found))
    }

    /// Returns the blocks of the largest loan of the VM.
    pub(super) fn largest_loan(&self) -> Option<u32> {
        let state = self.lock();
        let nodes = &self.shared.nodes;
        // Not the link that stands for all of them.
        let links = (0..nodes.fixed()).chain(nodes.joiner_links());
        let links = links.filter(|&link| self.is_lender(&state, link));
        links.map(|link| self.slots_of(&state, link)).max()
    }

    fn supervise_rebalance(&self, ended: &Receiver<u32>, closed: &Receiver<()>) {
        let stayed = loop {
            crossbeam_channel::select! {
                recv(ended) -> stayed => break stayed.ok(),
                recv(closed) -> news => {
                    // Disconnected by the VM's end; the loss of a donor is none.
                    if news.is_err() {
                        break None;
                    }
                }
            }
        };
        self.conclude_rebalance(stayed);
    }

    /// Ends a rebalancing of which so many parts stayed, or an unknown number when the VM ended.
    pub(super) fn conclude_rebalance(&self, stayed: Option<u32>) {
        let mut is_stopped = false;
        let mut copy_bytes = 0;
        let mut why = "a donor was lost, or out of use";
        self.with_rebalance(|last| {
            (is_stopped, copy_bytes) = (last.is_stopped, last.copy_bytes);
            if last.progress.was_unreadable() {
                why = UNREADABLE;
            }
        });
        let state = match stayed {
            None => RebalanceState::Failed("the VM ended first".to_owned()),
            Some(0) => RebalanceState::Done,
            Some(_) if is_stopped => RebalanceState::Stopped,
            Some(stayed) => {
                let mib = (u64::from(stayed) * copy_bytes) >> 20;
                RebalanceState::Failed(format!("{why}; {mib} MiB stay where they were"))
            }
        };
        self.end_rebalance(state);
    }

    pub(super) fn end_rebalance(&self, state: RebalanceState) {
        self.with_rebalance(|last| last.state = state.clone());
        (self.observer)(FabricEvent::Rebalanced(state));
    }

    /// Changes the last rebalancing.
    fn with_rebalance(&self, change: impl FnOnce(&mut Rebalance)) {
        let mut last = self
            .moves
            .rebalance
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(last) = &mut *last {
            change(last);
        }
    }
}
