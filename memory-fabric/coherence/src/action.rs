//! What the protocol asks its caller to do.

use fabric_pages::page::PageIndex;

use crate::members::Member;
use crate::message::{BlockIndex, Message, Number};

/// Takes actions in the order in which the caller has to carry them out.
///
/// Each action of one call is complete before the next one begins: an acknowledgement leaves after
/// the unmapping before it has returned.
pub trait Sink<A> {
    /// Takes the next action.
    fn push(&mut self, action: A);
}

impl<A> Sink<A> for Vec<A> {
    fn push(&mut self, action: A) {
        Self::push(self, action);
    }
}

/// What a directory asks for.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub enum DirectoryAction {
    /// Send a message on its lane.
    Send {
        /// To whom; may be this node.
        to: Member,
        /// The message.
        message: Message,
    },
    /// Call [`crate::directory::Directory::page_overdue`] after the deadline of a transaction.
    PageDeadline {
        /// The page.
        page: PageIndex,
        /// The transaction.
        number: Number,
    },
    /// Call [`crate::directory::Directory::block_overdue`] after the deadline of a transaction.
    BlockDeadline {
        /// The block.
        block: BlockIndex,
        /// The transaction.
        number: Number,
    },
}

/// What a node's cache asks for.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub enum CacheAction {
    /// Send a message on its lane.
    Send {
        /// To whom; may be this node.
        to: Member,
        /// The message.
        message: Message,
    },
    /// Send a message on [`crate::message::Lane::Data`] with the page's bytes as they are now.
    SendPage {
        /// To whom; may be this node.
        to: Member,
        /// The message, always [`Message::Data`].
        message: Message,
        /// Free the page's bytes, before anything is done that follows from the message: the page can
        /// come back right after it.
        free: bool,
    },
    /// Unmap the page; its bytes stay.
    Zap(PageIndex),
    /// Map the page read-only if it is mapped.
    WriteProtect(PageIndex),
    /// Map the page, whose bytes are here, and wake its waiters.
    Map {
        /// The page.
        page: PageIndex,
        /// Whether writes are allowed.
        writable: bool,
    },
    /// Put the bytes of a grant into the page, map it, wake its waiters, and call
    /// [`crate::cache::Cache::installed`].
    Install {
        /// The page.
        page: PageIndex,
        /// Whether writes are allowed.
        writable: bool,
        /// Where the bytes are.
        bytes: Bytes,
    },
    /// Wake the waiters of the page, who try again.
    Wake(PageIndex),
    /// Free the page's bytes.
    Free(PageIndex),
    /// Call [`crate::cache::Cache::overdue`] after the deadline for answers of peers, which is half that
    /// of the directory.
    AnswerDeadline {
        /// The page.
        page: PageIndex,
        /// The grant that names these peers.
        number: Number,
    },
    /// Call [`crate::cache::Cache::put_unanswered`] after the deadline for requests.
    PutDeadline {
        /// The page.
        page: PageIndex,
        /// The number with which it was given back.
        number: Number,
    },
    /// Read the page from its home, then call [`crate::cache::Cache::home_read`].
    ReadHome(PageIndex),
    /// Write the page, which is unmapped, to its home, then call [`crate::cache::Cache::written`].
    WriteBack {
        /// The page.
        page: PageIndex,
        /// What the home compares with the number of what it has.
        number: Number,
    },
    /// Call [`crate::cache::Cache::dropped`].
    Dropped(PageIndex),
    /// Call [`crate::cache::Cache::released`] when the vCPU has progressed, as
    /// [`crate::progress::Progress`] finds out.
    Hold {
        /// The page.
        page: PageIndex,
        /// The grant's hold.
        hold: u8,
    },
    /// Stop the owner's protocol in the block, then call [`crate::cache::Cache::split`].
    SplitBlock(BlockIndex),
    /// Start the owner's protocol in the block, then call [`crate::cache::Cache::owned`].
    OwnBlock {
        /// The block.
        block: BlockIndex,
        /// Where the bytes of each page are, empty if all are zero.
        pages: Box<[LocalPage]>,
    },
    /// The access will never be allowed: the VM is stopping.
    Fail(PageIndex),
}

/// Where the bytes of a granted page are.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum Bytes {
    /// It is all zero.
    Zero,
    /// In the buffer of the read from the home.
    Home,
    /// In the buffer of this member's data message.
    Member(Member),
    /// In the page itself.
    Here,
}

/// The state of a page of a block that this node owns, in the owner's protocol.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum LocalPage {
    /// Never written, or all zero; not here.
    Zero,
    /// At its home, not here.
    Home,
    /// Here, equal to what is behind it.
    Clean(crate::message::Behind),
    /// Here, with other bytes than behind it.
    Dirty {
        /// May be mapped writable.
        writable: bool,
    },
}
