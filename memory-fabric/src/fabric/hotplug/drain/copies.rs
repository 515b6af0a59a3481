//! A donor of replicated memory is drained: its copies move to donors that have room, or that join
//! for them, and each block keeps two copies.

use super::super::members::CONNECT_TIME_MAX;
use super::super::{HotplugError, Inner};
use super::DrainError;
use super::room::Found;
use crate::drain::{Drain, DrainState, DrainSummary};
use crate::fabric::{DonorAddress, FabricError};
use crate::homes::{BLOCK_BYTES, NodeId};
use crate::pager::relocate::MoveProgress;
use crossbeam_channel::{Receiver, bounded};
use fabric_replicas::{LeaveError, LeaveEvent, ReplicaSet};
use std::sync::Arc;
use std::time::Instant;

/// Where copies are to move.
#[derive(Debug, Default)]
struct Targets {
    /// The links of the donors, or none for all that have room.
    all: Vec<usize>,
    /// Of these, those that have just joined.
    joined: Vec<usize>,
}

fn id(link: usize) -> u8 {
    u8::try_from(link).expect("at most 64 donors")
}

impl Inner {
    pub(super) fn drain_copies(
        self: &Arc<Self>,
        set: &Arc<ReplicaSet>,
        node: NodeId,
        to: &[DonorAddress],
    ) -> Result<DrainSummary, DrainError> {
        let link = self.begin_copies(set, node)?;
        let room = self.room_for_copies(set, link, to);
        let mut state = self.lock();
        let Targets { all, joined } = room.inspect_err(|_| state.joining = false)?;
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
        let begun = match state.closed {
            true => Err(HotplugError::Ended.into()),
            false => {
                let begun = set.leave(link, &all, Box::new(observer));
                begun.map_err(|error| self.refused(node, error))
            }
        };
        let blocks = match begun {
            Ok(blocks) => blocks,
            Err(refused) => {
                drop(state);
                // Before another drain can move copies to them.
                self.part_members(set, joined);
                self.lock().joining = false;
                return Err(refused);
            }
        };
        state.joining = false;
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

    /// Checks whether the copies of a donor can move, and returns its link. Until they do, no other
    /// drain begins.
    fn begin_copies(&self, set: &ReplicaSet, node: NodeId) -> Result<usize, DrainError> {
        let mut state = self.lock();
        if let Some(drain) = self.last_drain().filter(|drain| !drain.is_over()) {
            return Err(DrainError::Draining(drain.node));
        }
        state.may_change()?;
        let link = self.shared.nodes.link_to(node);
        let link = link.filter(|&link| self.is_lender(&state, link));
        let link = link.ok_or(DrainError::NoDonor(node))?;
        if set.copies().is_out(id(link)) {
            return Err(DrainError::Out(node));
        }
        state.joining = true;
        Ok(link)
    }

    /// Returns the donors in `to`, after those have joined that are new.
    fn room_for_copies(
        self: &Arc<Self>,
        set: &Arc<ReplicaSet>,
        link: usize,
        to: &[DonorAddress],
    ) -> Result<Targets, DrainError> {
        let mut targets = Targets::default();
        if to.is_empty() {
            return Ok(targets);
        }
        self.part_lost_members(set);
        let held = set.copies().blocks_at(id(link));
        let mut found = Found::default();
        let mut new = Vec::new();
        for donor in to {
            let address = donor.address;
            if self.config.leaves_unsealed(address) {
                return Err(DrainError::NotSealed(address));
            }
            match self.member_at(set, address) {
                Some(member) => {
                    found.add(&address.to_string(), set.copies().room_at(id(member)));
                    targets.all.push(member);
                }
                None => new.push(donor.clone()),
            }
        }
        // Each for as much as the donor lends that leaves, or less: so there is room for repairs as
        // before, and a choice of zones.
        let wanted = held.max(self.slots_of(&self.lock(), link));
        let mut leases = Vec::new();
        for donor in &new {
            self.lease_more(donor, wanted, &mut leases, &mut found);
        }
        if found.blocks < held {
            return Err(self.too_little(link, held, found));
        }
        if leases.len() < new.len() {
            tracing::warn!(
                "not all donors lend that were named: {}",
                found.texts.join("; ")
            );
        }
        for (place, leased) in leases {
            let mut named = new.iter();
            let donor = named.find(|donor| donor.address == leased.address());
            let donor = donor.expect("it was asked");
            if let Err(error) = self.join_member(set, place, leased, donor) {
                self.part_members(set, targets.joined);
                return Err(error.into());
            }
            targets.joined.push(place);
            targets.all.push(place);
        }
        Ok(targets)
    }

    fn refused(&self, node: NodeId, error: LeaveError) -> DrainError {
        let mib = |blocks: u32| (u64::from(blocks) * BLOCK_BYTES) >> 20;
        match error {
            LeaveError::Out => DrainError::Out(node),
            LeaveError::Striped => DrainError::Striped(node),
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
            if set.retire(link, Instant::now() + CONNECT_TIME_MAX) {
                self.end_member(link);
                self.set_drain_state(DrainState::Done);
                self.announce_end();
                return;
            }
            let limit = CONNECT_TIME_MAX.as_secs();
            format!("its connections were not closed within {limit} s; it keeps an unused lease")
        };
        self.set_drain_state(DrainState::Failed(why));
        self.announce_end();
    }
}
