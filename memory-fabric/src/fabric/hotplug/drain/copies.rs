//! A donor of replicated memory is drained: its copies, or pieces of stripes, move to donors that have
//! room, or that join for them, and each block keeps all.

use super::super::members::CONNECT_TIME_MAX;
use super::super::{HotplugError, Inner};
use super::DrainError;
use super::room::Found;
use crate::drain::{Drain, DrainState, DrainSummary};
use crate::fabric::{DonorAddress, FabricError, replicas};
use crate::homes::{BLOCK_BYTES, NodeId};
use crate::link::Leased;
use crate::pager::relocate::MoveProgress;
use crossbeam_channel::{Receiver, bounded};
use fabric_replicas::{LeaveError, LeaveEvent, ReplicaSet};
use std::net::SocketAddr;
use std::sync::{Arc, PoisonError};
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

/// Copies that move, as they are watched.
pub(super) struct Watched {
    pub(super) progress: Arc<MoveProgress>,
    /// Notes the progress.
    pub(super) observer: Box<dyn Fn(LeaveEvent) + Send + Sync>,
    /// Gets the number of those that stayed, at the end.
    pub(super) ended: Receiver<u32>,
}

impl Watched {
    pub(super) fn new() -> Self {
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
        Self {
            progress,
            observer: Box::new(observer),
            ended,
        }
    }
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
        let Watched {
            progress,
            observer,
            ended,
        } = Watched::new();
        let begun = match state.closed {
            true => Err(HotplugError::Ended.into()),
            false => {
                let begun = set.leave(link, &all, observer);
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
            block_bytes: self.copy_bytes(),
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
        tracing::info!(
            "{node} is drained: {blocks} copies of {} KiB move to other donors",
            self.copy_bytes() >> 10
        );
        Ok(drain.summary())
    }

    /// Checks whether the copies of a donor can move, and returns its link. Until they do, no other
    /// drain begins.
    fn begin_copies(&self, set: &ReplicaSet, node: NodeId) -> Result<usize, DrainError> {
        let mut state = self.lock();
        self.may_move()?;
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
        let copy_bytes = replicas::copy_bytes(set);
        // Whole blocks, the unit of leases.
        let in_blocks = |copies: u32| {
            let bytes = u64::from(copies) * copy_bytes;
            u32::try_from(bytes.div_ceil(BLOCK_BYTES)).expect("fewer than copies")
        };
        let held = in_blocks(set.copies().blocks_at(id(link)));
        let mut found = Found::default();
        let new = self.split_members(set, to, |address, member| {
            let room = u64::from(set.copies().room_at(id(member))) * copy_bytes / BLOCK_BYTES;
            found.add(
                &address.to_string(),
                u32::try_from(room).expect("fewer than copies"),
            );
            targets.all.push(member);
        })?;
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
        targets.joined = self.join_leased(set, &new, leases, &found)?;
        targets.all.extend(&targets.joined);
        Ok(targets)
    }

    /// Passes on the donors in `to` that hold copies, or may get them. Returns the others.
    pub(super) fn split_members(
        &self,
        set: &ReplicaSet,
        to: &[DonorAddress],
        mut is_member: impl FnMut(SocketAddr, usize),
    ) -> Result<Vec<DonorAddress>, DrainError> {
        self.part_lost_members(set);
        let mut new = Vec::new();
        for donor in to {
            let address = donor.address;
            if self.config.leaves_unsealed(address) {
                return Err(DrainError::NotSealed(address));
            }
            match self.member_at(set, address) {
                Some(member) => is_member(address, member),
                None => new.push(donor.clone()),
            }
        }
        Ok(new)
    }

    /// Makes donors that have lent members, or none. Returns their links.
    pub(super) fn join_leased(
        &self,
        set: &Arc<ReplicaSet>,
        new: &[DonorAddress],
        leases: Vec<(usize, Leased)>,
        found: &Found,
    ) -> Result<Vec<usize>, DrainError> {
        if leases.len() < new.len() {
            tracing::warn!(
                "not all donors lend that were named: {}",
                found.texts.join("; ")
            );
        }
        let mut joined = Vec::new();
        for (place, leased) in leases {
            let mut named = new.iter();
            let donor = named.find(|donor| donor.address == leased.address());
            let donor = donor.expect("it was asked");
            if let Err(error) = self.join_member(set, place, leased, donor) {
                self.part_members(set, joined);
                return Err(error.into());
            }
            joined.push(place);
        }
        Ok(joined)
    }

    /// Returns an error while memory moves.
    pub(super) fn may_move(&self) -> Result<(), DrainError> {
        if let Some(drain) = self.last_drain().filter(|drain| !drain.is_over()) {
            return Err(DrainError::Draining(drain.node));
        }
        if self.moves.heat.are_moving() {
            return Err(DrainError::Placing);
        }
        let rebalance = self.moves.rebalance.read();
        let rebalance = rebalance.unwrap_or_else(PoisonError::into_inner);
        match rebalance.as_ref().is_some_and(|last| !last.is_over()) {
            true => Err(DrainError::Rebalancing),
            false => Ok(()),
        }
    }

    /// Returns the bytes of a copy, or of a piece.
    fn copy_bytes(&self) -> u64 {
        let set = self.replicas.as_ref();
        set.map_or(BLOCK_BYTES, |set| replicas::copy_bytes(set))
    }

    fn refused(&self, node: NodeId, error: LeaveError) -> DrainError {
        let copy_bytes = self.copy_bytes();
        let mib = |blocks: u32| (u64::from(blocks) * copy_bytes) >> 20;
        match error {
            LeaveError::Out => DrainError::Out(node),
            LeaveError::Rebalancing => DrainError::Rebalancing,
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
            let mib = (u64::from(stayed) * self.copy_bytes()) >> 20;
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
