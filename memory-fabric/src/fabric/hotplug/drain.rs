//! A donor of a running VM is drained: the blocks of the guest's initial memory with their home
//! there move to other donors, and its lease ends.
//!
//! Other donors give what their loans have left, or lend more: such a lease has a link of its own,
//! as that of a donor that joins for added memory. All of it is obtained before anything moves.
//! Copies of replicated memory move within the loans that there are, or to donors that join for them
//! (`copies`).

mod blocks;
mod copies;
mod end;
mod heat;
mod placing;
mod rebalance;
mod room;
mod share;
mod spare;
mod spent;

use super::{HotplugError, Inner, State};
use crate::drain::{Drain, DrainState, DrainSummary};
use crate::fabric::{DonorAddress, FabricError, LocalUse, TransportKind};
use crate::homes::{BLOCK_BYTES, JOINERS_MAX, NodeId};
use crate::pager::relocate::{BlockMove, MoveOrder};
use crossbeam_channel::{Receiver, Sender, bounded};
pub(crate) use heat::HOT_FAULTS_MIN;
pub use heat::HeatPolicy;
pub(super) use spent::SpentSlots;
use std::net::SocketAddr;
use std::sync::Arc;

/// Why a donor is not drained.
#[derive(Debug, thiserror::Error)]
pub enum DrainError {
    /// The node does not lend.
    #[error("{0} is no donor of this VM, or has left")]
    NoDonor(NodeId),
    /// It lends for memory that is added, of which nothing has its home there.
    #[error(
        "{0} lends for memory that is added by hot-plug, and nothing of that is there: it leaves when \
         less is requested (`ssi-hv hotplug VM --memory SIZE`)"
    )]
    Empty(NodeId),
    /// Blocks of added memory have their home there.
    #[error(
        "{node} holds {bytes} bytes of memory that was added by hot-plug, which does not move; \
         unplug it first (`ssi-hv hotplug VM --memory SIZE`)"
    )]
    Added {
        /// The node.
        node: NodeId,
        /// Bytes of added memory.
        bytes: u64,
    },
    /// The guest sees the donor.
    #[error("the guest sees each donor as a NUMA node, whose memory cannot move; use --numa flat")]
    Exposed,
    /// Copies move to donors that have less than their share.
    #[error(
        "memory is being rebalanced; wait until that has ended, or stop it (`ssi-hv rebalance VM --stop`)"
    )]
    Rebalancing,
    /// Blocks move to faster donors, or from there.
    #[error(
        "memory is moving to faster donors (--placement heat), and a donor does not answer; retry"
    )]
    Placing,
    /// There are copies on several donors.
    #[error(
        "only memory with one copy moves by its heat; of two copies, the fast one is read first"
    )]
    Copies,
    /// No donor that was named lends anything.
    #[error("no donor has joined ({0})")]
    NothingLent(String),
    /// A donor joins for copies, and there are none.
    #[error("the memory of this VM has one copy of each page, of which none can be made again")]
    OneCopy,
    /// Another drain, or a donor that joins, is in progress.
    #[error("{0} is being drained; wait until it has left")]
    Draining(NodeId),
    /// There is too little room.
    #[error(
        "{needed_mib} MiB have to leave {node}, and other donors have room for {room_mib} MiB \
         ({found}); name a donor with {missing_mib} MiB more by --to"
    )]
    TooLittle {
        /// The donor to be drained.
        node: NodeId,
        /// What it holds, MiB.
        needed_mib: u64,
        /// What others have room for, MiB.
        room_mib: u64,
        /// What each of them offered, or why it did not.
        found: String,
        /// The difference, MiB.
        missing_mib: u64,
    },
    /// The VM's pages are not sealed, and the donor is on another host.
    #[error(
        "{0} is on another host, and the copies are not sealed, since all donors of the start are on \
         this one; start the VM with --seal on, or with --seal off if the network is trusted"
    )]
    NotSealed(SocketAddr),
    /// It is not used at the moment.
    #[error(
        "{0} is not used at the moment, since it was lost or did not answer: there is nothing to \
         drain until it is back; end it, and other donors with room get its copies"
    )]
    Out(NodeId),
    /// There is too little room for copies.
    #[error(
        "{node} holds {needed_mib} MiB of copies, and the other donors have room for {room_mib} MiB \
         of them, where the others of a block are not; name a donor with {needed_mib} MiB by --to"
    )]
    NoRoomForCopies {
        /// The donor to be drained.
        node: NodeId,
        /// What it holds, MiB.
        needed_mib: u64,
        /// What others have room for, MiB.
        room_mib: u64,
    },
    /// It is a donor of the VM.
    #[error("{0} is a donor of this VM already")]
    Member(SocketAddr),
    /// It has room for a small part of the copies that were lost.
    #[error(
        "{address} lends {lent_mib} MiB, and one of the {JOINERS_MAX} donors that can join has to lend \
         {least_mib} MiB for the copies that were lost"
    )]
    TooSmall {
        /// The donor.
        address: SocketAddr,
        /// What it lends, MiB.
        lent_mib: u64,
        /// What is needed of it, MiB.
        least_mib: u64,
    },
    /// Common to all changes of donors.
    #[error(transparent)]
    Change(#[from] HotplugError),
}

/// Drains donors of a running VM. Clones share it; may outlive the fabric.
#[derive(Clone, Debug)]
pub struct Drains(pub(super) Arc<Inner>);

impl Drains {
    /// Drains a donor: its blocks move to donors with room, or to those in `to`, which may be new
    /// ones. Returns when all room is obtained and the blocks begin to move; that takes as long as
    /// connecting at the start of a VM.
    ///
    /// # Errors
    ///
    /// See [`DrainError`]. Nothing has changed then.
    pub fn drain(&self, node: NodeId, to: &[DonorAddress]) -> Result<DrainSummary, DrainError> {
        let _instead = self.0.end_placing();
        match &self.0.replicas {
            Some(set) => self.0.drain_copies(set, node, to),
            None => self.0.drain(node, to),
        }
    }
}

impl Inner {
    /// Returns an error when blocks of the initial memory cannot move, or not now.
    fn may_move_blocks(&self, state: &State) -> Result<(), DrainError> {
        if self.config.transport == TransportKind::Loopback {
            return Err(HotplugError::Loopback.into());
        }
        if self.config.local_use == LocalUse::Home {
            return Err(DrainError::Exposed);
        }
        self.may_move()?;
        state.may_change()?;
        Ok(())
    }

    /// Checks whether a donor can be drained, and returns its link and number of blocks. Until the
    /// drain ends no other begins, and no donor joins.
    fn begin_drain(&self, node: NodeId) -> Result<(usize, u32), DrainError> {
        let mut state = self.lock();
        self.may_move_blocks(&state)?;
        let homes = &self.shared.homes;
        let link = self.shared.nodes.link_to(node);
        let link = link.filter(|&link| self.is_lender(&state, link));
        let link = link.ok_or(DrainError::NoDonor(node))?;
        let added = homes.added_blocks_at(node);
        if added > 0 {
            let bytes = u64::from(added) * BLOCK_BYTES;
            return Err(DrainError::Added { node, bytes });
        }
        let blocks = homes.ram_blocks_at(node).count();
        // Without blocks it just leaves, unless memory that was asked for is to be there.
        if blocks == 0 && state.pools.used_of(node).is_some() {
            return Err(DrainError::Empty(node));
        }
        state.joining = true;
        state.choosing = true;
        Ok((link, u32::try_from(blocks).expect("23 bits")))
    }

    fn drain(
        self: &Arc<Self>,
        node: NodeId,
        to: &[DonorAddress],
    ) -> Result<DrainSummary, DrainError> {
        let (link, blocks) = self.begin_drain(node)?;
        let begun = self.obtain_room(link, blocks, to);
        let mut state = self.lock();
        (state.joining, state.choosing) = (false, false);
        let begun = begun.and_then(|places| self.checked_room(&state, link, blocks, places));
        let places = match begun {
            Ok(places) => places,
            Err(refused) => {
                drop(state);
                self.leave_lost_targets();
                return Err(refused);
            }
        };
        let homes = &self.shared.homes;
        let moves = homes.ram_blocks_at(node).zip(places);
        let moves = moves.map(|((block, from), to)| BlockMove { block, from, to });
        let moves: Vec<BlockMove> = moves.collect();
        let (order, ended) = self.order(&moves);
        let drain = Drain {
            node,
            blocks,
            block_bytes: BLOCK_BYTES,
            progress: Arc::clone(&order.progress),
            state: DrainState::Moving,
        };
        if state.closed {
            return Err(HotplugError::Ended.into());
        }
        let (news, lost) = bounded(1);
        // Some may have been lost while the room was chosen.
        self.announce_loss(Some(&news));
        let (inner, loan) = (Arc::clone(self), self.loan_of(&state, link));
        let of_order = Arc::clone(&drain.progress);
        // It needs the lock before it does anything for the drain.
        let supervise = move || {
            inner.wait_for_moves(&ended, &lost);
            inner.settle(&moves, &of_order);
            inner.end_drain(link, loan);
        };
        let thread = std::thread::Builder::new().name(format!("drain-{}", node.0));
        let system = |error| HotplugError::Donor(FabricError::System("start a thread", error));
        // First: the end of moves that nobody waits for would not be known.
        state.leaving.push(thread.spawn(supervise).map_err(system)?);
        self.set_drain(drain.clone());
        state.news = Some(news);
        if !self.shared.evictor.move_blocks(order) {
            return Err(HotplugError::Ended.into());
        }
        tracing::info!("{node} is drained: {blocks} blocks of 2 MiB move to other donors");
        Ok(drain.summary())
    }

    /// Makes an order of moves. Returns it with what is disconnected when it has ended; then
    /// [`settle`](Self::settle) has to follow.
    fn order(&self, moves: &[BlockMove]) -> (MoveOrder, Receiver<()>) {
        self.note_leaving(moves);
        let (end, ended) = bounded(1);
        let order = MoveOrder {
            moves: moves.iter().copied().collect(),
            progress: Arc::default(),
            end,
        };
        (order, ended)
    }

    /// Waits until an order of moves has ended; donors that are lost meanwhile before they hold
    /// anything are removed, and with them the moves to them.
    fn wait_for_moves(self: &Arc<Self>, ended: &Receiver<()>, lost: &Receiver<()>) {
        // A disconnected channel is ready as well: the order ends by that, and news by the VM's end.
        loop {
            crossbeam_channel::select! {
                recv(ended) -> _ => break,
                recv(lost) -> news => {
                    self.leave_lost_targets();
                    // The pager has ended before, and may have left the order where it was.
                    if news.is_err() {
                        break;
                    }
                }
            }
        }
    }

    /// Announces that a donor was lost.
    pub(super) fn announce_loss(&self, news: Option<&Sender<()>>) {
        if let Some(news) = news {
            // When one waits already, all are looked at.
            let _ = news.try_send(());
        }
    }
}
