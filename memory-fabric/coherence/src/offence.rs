//! What a peer did that a correct peer never does.

use fabric_pages::page::PageIndex;

use crate::members::Member;
use crate::message::{BlockIndex, Number};

/// A peer broke the protocol. The caller fences the peer; no other state has changed.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[error("{peer} {violation}")]
pub struct Offence {
    /// The peer to fence.
    pub peer: Member,
    /// What it did.
    pub violation: Violation,
}

/// What a correct peer never does.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum Violation {
    /// The sender is not one of the VM's compute nodes.
    #[error("is not a compute node of this VM")]
    NotAMember,
    /// A message names a member that does not exist.
    #[error("names a node that does not exist, for {0}")]
    UnknownMember(PageIndex),
    /// The message was sent to a node that has no such part.
    #[error("sent a message that is not for this part of a node")]
    WrongRole,
    /// A page past the end of guest memory.
    #[error("names {0}, which is past the end of the memory")]
    NoSuchPage(PageIndex),
    /// A block past the end of guest memory.
    #[error("names {0}, which is past the end of the memory")]
    NoSuchBlock(BlockIndex),
    /// A page whose directory is another node.
    #[error("sent a message for {0}, whose directory is elsewhere")]
    ElsewhereDirectory(PageIndex),
    /// More requests than a node may have open.
    #[error("has more than {0} requests open")]
    Flooding(u16),
    /// A request for a right that the node has.
    #[error("asks for {0}, which it has")]
    AlreadyHeld(PageIndex),
    /// The owner of a page dropped it as if it were a mere sharer.
    #[error("dropped {0}, which it owns")]
    DroppedOwned(PageIndex),
    /// A number that was never granted.
    #[error("uses {1} for {0}, which was never granted")]
    NumberNotGranted(PageIndex, Number),
    /// A number of an earlier transaction, from the directory.
    #[error("uses {1} for {0} again")]
    NumberReused(PageIndex, Number),
    /// An unblock without a transaction.
    #[error("unblocks {0}, which does not wait for it")]
    UnblockNotAsked(PageIndex),
    /// An answer for a block without a transaction.
    #[error("answers for {0}, which does not wait for it")]
    BlockNotAsked(BlockIndex),
    /// A table of a block's pages with another length than a block has.
    #[error("sent {1} page states for {0}")]
    BlockLength(BlockIndex, usize),
    /// An acknowledgement without a request for it.
    #[error("acknowledges {0}, which was not asked")]
    AckNotAsked(PageIndex),
    /// A page without a request for it.
    #[error("sent {0}, which was not asked")]
    DataNotAsked(PageIndex),
    /// A grant without a request, or of another kind than the request.
    #[error("grants {0} in a way that was not asked")]
    GrantNotAsked(PageIndex),
    /// A request to give up what the node does not have.
    #[error("asks to give up {0}, which is not held in that way")]
    NotHeld(PageIndex),
    /// A request to split a block, or a grant of one, that does not fit the block's state.
    #[error("asks to split or take {0}, which is not in that state")]
    BlockNotHeld(BlockIndex),
    /// An answer to a put that was not sent.
    #[error("ends a put of {0} that was not sent")]
    PutNotAsked(PageIndex),
    /// The deadline of a transaction is over and the peer did not do its part.
    #[error("did not answer for {0} within the deadline")]
    Silent(PageIndex),
    /// The deadline of a block's transaction is over.
    #[error("did not answer for {0} within the deadline")]
    SilentBlock(BlockIndex),
    /// A lane's messages have a gap.
    #[error("skipped from message {expected} to {found} of a lane")]
    Gap {
        /// The number that should have come.
        expected: u64,
        /// The number that came.
        found: u64,
    },
    /// An epoch before one that the peer has used on the lane.
    #[error("went back to epoch {found} after {seen}")]
    OldEpoch {
        /// The epoch that the peer has used.
        seen: u32,
        /// The epoch of the message.
        found: u32,
    },
    /// An epoch that does not exist yet.
    #[error("uses epoch {found}, and {current} is the latest")]
    FutureEpoch {
        /// This node's epoch.
        current: u32,
        /// The epoch of the message.
        found: u32,
    },
    /// A message about a merged table that does not fit its state.
    #[error("sent a message about {0} that does not fit a merged table")]
    Merged(PageIndex),
    /// A token was returned that the node does not hold, or asked for twice.
    #[error("misuses the starvation token")]
    Token,
    /// All numbers of a page or block are used up.
    #[error("used up the numbers of {0}")]
    NumbersExhausted(PageIndex),
}

impl Violation {
    /// The violation as an offence of a peer.
    #[must_use]
    pub const fn of(self, peer: Member) -> Offence {
        Offence {
            peer,
            violation: self,
        }
    }
}
