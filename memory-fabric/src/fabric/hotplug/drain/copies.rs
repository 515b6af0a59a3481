//! A donor of replicated memory is drained: its copies move to donors of the guest's start that
//! have room, and each block keeps two copies.

use super::super::{HotplugError, Inner};
use super::DrainError;
use crate::drain::{Drain, DrainState, DrainSummary};
use crate::fabric::{DonorAddress, FabricError};
use crate::homes::{BLOCK_BYTES, NodeId};
use crate::pager::relocate::MoveProgress;
use crossbeam_channel::{Receiver, bounded};
use fabric_replicas::{LeaveError, LeaveEvent, ReplicaSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long the pager's threads may take to close their connections to a donor without copies. They
/// are woken for it.
const CLOSE_TIME_MAX: Duration = Duration::from_secs(10);

impl Inner {
    pub(super) fn drain_copies(
        self: &Arc<Self>,
        set: &Arc<ReplicaSet>,
        node: NodeId,
        to: &[DonorAddress],
    ) -> Result<DrainSummary, DrainError> {
        if !to.is_empty() {
            return Err(DrainError::NotToOthers);
        }
        let mut state = self.lock();
        if let Some(drain) = self.last_drain().filter(|drain| !drain.is_over()) {
            return Err(DrainError::Draining(drain.node));
        }
        state.may_change()?;
        let link = self.shared.nodes.link_to(node);
        let link = link.filter(|&link| self.leases.has(link));
        let link = link.ok_or(DrainError::NoDonor(node))?;
        let progress = Arc::<MoveProgress>::default();
        let (end, ended) = bounded(1);
        let moved = Arc::clone(&progress);
        let observer = move |event| match event {
            LeaveEvent::Moved => moved.note_moved(),
            LeaveEvent::Ended { stayed } => {
                // There is room for one, and it ends once.
                let _ = end.try_send(stayed);
            }
        };
        let begun = set.leave(link, Box::new(observer));
        let blocks = begun.map_err(|error| self.refused(node, error))?;
        let drain = Drain {
            node,
            blocks,
            progress,
            state: DrainState::Moving,
        };
        self.set_drain(drain.clone());
        let (news, closed) = bounded(1);
        state.news = Some(news);
        let (inner, set) = (Arc::clone(self), Arc::clone(set));
        let supervise = move || inner.supervise_copies(&set, link, &ended, &closed);
        let thread = std::thread::Builder::new().name(format!("drain-{}", node.0));
        let system = |error| HotplugError::Donor(FabricError::System("start a thread", error));
        // Without the thread the copies move as well, and the donor keeps an unused lease.
        let thread = thread.spawn(supervise).map_err(system).inspect_err(|_| {
            self.set_drain_state(DrainState::Failed("there was no thread for it".into()));
        })?;
        state.leaving.push(thread);
        tracing::info!("{node} is drained: {blocks} copies of 2 MiB move to other donors");
        Ok(drain.summary())
    }

    fn refused(&self, node: NodeId, error: LeaveError) -> DrainError {
        let mib = |blocks: u32| (u64::from(blocks) * BLOCK_BYTES) >> 20;
        match error {
            LeaveError::Out => DrainError::Out(node),
            LeaveError::Leaving(link) => DrainError::Draining(self.node_of(link.into())),
            LeaveError::NoRoom { blocks, room } => DrainError::NoRoomForCopies {
                node,
                needed_mib: mib(blocks),
                room_mib: mib(room),
            },
        }
    }

    fn supervise_copies(
        &self,
        set: &ReplicaSet,
        link: usize,
        ended: &Receiver<u32>,
        closed: &Receiver<()>,
    ) {
        let node = self.node_of(link);
        let stayed = crossbeam_channel::select! {
            recv(ended) -> stayed => stayed.ok(),
            // Disconnected by the VM's end.
            recv(closed) -> _ => None,
        };
        let Some(stayed) = stayed else {
            self.set_drain_state(DrainState::Failed("the VM ended first".to_owned()));
            return;
        };
        let why = if stayed > 0 {
            let mib = (u64::from(stayed) * BLOCK_BYTES) >> 20;
            format!("{node}, or a donor to which copies were to move, was lost; {mib} MiB stay")
        } else {
            self.set_drain_state(DrainState::Leaving);
            if set.retire(link, Instant::now() + CLOSE_TIME_MAX) {
                self.end_lease(link);
                self.set_drain_state(DrainState::Done);
                self.announce_end();
                return;
            }
            let limit = CLOSE_TIME_MAX.as_secs();
            format!("its connections were not closed within {limit} s; it keeps an unused lease")
        };
        self.set_drain_state(DrainState::Failed(why));
        self.announce_end();
    }
}
