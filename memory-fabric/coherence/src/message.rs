//! What compute nodes send each other, and on which lane.

use std::fmt;

use fabric_pages::page::PageIndex;

use crate::members::{Member, MemberSet};

/// The number of a transaction of a page or block: it only grows, within the directory's epoch.
///
/// 48 bits, because that is what a directory entry has room for: 89 years of a grant every 10 us.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Number(u64);

impl Number {
    /// The number before all grants.
    pub const ZERO: Self = Self(0);
    /// The greatest number.
    pub const MAX: Self = Self((1 << 48) - 1);

    /// The number with this value, or `None` past [`Self::MAX`].
    #[must_use]
    pub const fn new(value: u64) -> Option<Self> {
        if value <= Self::MAX.0 {
            Some(Self(value))
        } else {
            None
        }
    }

    /// The number that follows, or `None` after [`Self::MAX`].
    #[must_use]
    pub const fn next(self) -> Option<Self> {
        Self::new(self.0 + 1)
    }

    /// The number's value.
    #[must_use]
    pub const fn value(self) -> u64 {
        self.0
    }

    /// Whether a home that stores bytes of grant `stored` takes those of this grant: refused are
    /// older ones, which a node repeats that lost its connection and meanwhile the page. The bytes of
    /// one grant come in order, because one node writes them.
    #[must_use]
    pub const fn may_replace(self, stored: Self) -> bool {
        self.0 >= stored.0
    }
}

impl fmt::Display for Number {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "number {}", self.0)
    }
}

/// The number of a block of 2 MiB: its first page's number divided by the pages of a block.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct BlockIndex(pub u32);

impl BlockIndex {
    /// The number as an index into an array.
    #[must_use]
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Display for BlockIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "block {:#x}", self.0)
    }
}

/// A lane keeps the order of its messages; nothing orders one lane against another.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub enum Lane {
    /// Starts or continues a transaction; its answer may wait for other transactions.
    Requests,
    /// Ends a wait; handled at once by every receiver.
    Responses,
    /// Pages, from an owner to a requester; handled at once.
    Data,
}

impl Lane {
    /// Every lane.
    pub const ALL: [Self; 3] = [Self::Requests, Self::Responses, Self::Data];
}

impl From<Lane> for usize {
    fn from(lane: Lane) -> Self {
        lane as Self
    }
}

/// What a node asks a directory for.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum Want {
    /// GetS: a copy to read.
    Read,
    /// GetM: the only copy, to write. The node has none.
    Write,
    /// The right to write a shared copy that the node had when it asked.
    Upgrade,
}

/// What is behind the copies of a page, after the last of them was put back.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum Behind {
    /// Zeroes, which travel nowhere. What the home stores has no meaning.
    Zero,
    /// The bytes that the home stores.
    Home,
}

/// What the owner of a page leaves behind when it puts the page back.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum Left {
    /// What was there before: the page was never written.
    Unchanged,
    /// The page is all zero.
    Zero,
    /// The home has acknowledged the bytes.
    Home,
}

/// Where a requester gets a page's bytes from.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum Source {
    /// The page is all zero.
    Zero,
    /// The requester reads them from the page's home.
    Home,
    /// This member sends them.
    Member(Member),
    /// The requester's own shared copy.
    Own,
}

/// A right to use a page.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum Right {
    /// To read, beside other readers.
    Shared,
    /// To read and write, alone.
    Exclusive,
}

/// A message between compute nodes. Each says which lane it takes ([`Message::lane`]).
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub enum Message {
    /// Node to directory: asks for a page.
    Get {
        /// The page.
        page: PageIndex,
        /// What for.
        want: Want,
        /// The access for which it is lost this page or another one before it progressed: the page is
        /// held, and longer than before.
        early: bool,
    },
    /// Node to directory: the node, which is not the owner, dropped its shared copy. Not answered.
    PutShared {
        /// The page.
        page: PageIndex,
    },
    /// Node to directory: the owner gives the page back and keeps its bytes until [`Message::PutDone`].
    Put {
        /// The page.
        page: PageIndex,
        /// The number of the grant that made the node the owner.
        number: Number,
        /// What it leaves behind.
        left: Left,
    },
    /// Node to directory: the node owns the block; its earlier requests for pages of it are void.
    Taken {
        /// The block.
        block: BlockIndex,
        /// The number of the grant.
        number: Number,
    },
    /// Node to directory: the requester has used the page; the next request may be served.
    Unblock {
        /// The page.
        page: PageIndex,
        /// The number of the grant.
        number: Number,
        /// The previous owner had written it.
        written: bool,
    },
    /// Node to directory: the state of each page of a block that is being split.
    SplitState {
        /// The block.
        block: BlockIndex,
        /// The number of the request to split.
        number: Number,
        /// One for each page.
        pages: Box<[PageAt]>,
    },
    /// Directory to sharer: drop the copy and acknowledge to the requester.
    Invalidate {
        /// The page.
        page: PageIndex,
        /// The number of the transaction.
        number: Number,
        /// The node that needs the acknowledgement.
        requester: Member,
    },
    /// Directory to owner: send the page to the requester.
    Fetch {
        /// The page.
        page: PageIndex,
        /// The number of the transaction.
        number: Number,
        /// The node that needs the page.
        requester: Member,
        /// What the requester will have: after [`Right::Shared`] the owner keeps a read-only copy.
        right: Right,
    },
    /// Directory to owner of a block: other nodes use it; answer with [`Message::SplitState`].
    Split {
        /// The block.
        block: BlockIndex,
        /// The number that its pages have from now on.
        number: Number,
    },
    /// Directory to requester.
    Grant(Grant),
    /// Directory to the node that put a page back: the bytes may be freed.
    PutDone {
        /// The page.
        page: PageIndex,
        /// The number in the put.
        number: Number,
    },
    /// Directory to node: the block is owned by the node, which answers with [`Message::Taken`].
    BlockGrant {
        /// The block.
        block: BlockIndex,
        /// The number of the grant.
        number: Number,
        /// What is behind each page; empty: zeroes behind all.
        behind: Box<[Behind]>,
    },
    /// Sharer to requester: the copy is unmapped and dropped.
    Ack {
        /// The page.
        page: PageIndex,
        /// The number of the transaction.
        number: Number,
    },
    /// Owner to requester: the page, whose bytes travel beside the message.
    Data {
        /// The page.
        page: PageIndex,
        /// The number of the transaction.
        number: Number,
        /// The bytes differ from those behind the copies.
        dirty: bool,
        /// The sender has written them since it got the page.
        written: bool,
    },
    /// Node to the keeper of the starvation token: a vCPU of the node does not progress.
    TokenWant,
    /// Node to keeper: the vCPU progressed, or the time is over.
    TokenBack {
        /// The number of the grant.
        number: Number,
    },
    /// Keeper to node: pages that the node gets stay until it gives the token back.
    TokenGrant {
        /// The number of the grant.
        number: Number,
    },
}

/// Longest minimum hold of one page: 128 units.
pub const HOLD_MAX: u8 = 8;

/// What a directory grants to a requester.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct Grant {
    /// The page.
    pub page: PageIndex,
    /// The number of the transaction: that of acknowledgements, data, unblock and write-backs.
    pub number: Number,
    /// What is granted.
    pub right: Right,
    /// Where the bytes come from.
    pub source: Source,
    /// Who acknowledges to the requester, besides the member that sends the bytes.
    pub acks: MemberSet,
    /// How long to hold the page before the unblock, at least: 0 for not at all, else 2^(hold - 1)
    /// units, up to [`HOLD_MAX`]. [`crate::progress`] has what an access of several pages adds.
    pub hold: u8,
}

/// Where the bytes of a page of an owned block are.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum PageAt {
    /// Nowhere: all zero.
    Zero,
    /// At the page's home.
    Home,
    /// With the block's owner.
    Owner,
}

impl Message {
    /// The lane that the message takes.
    ///
    /// `Taken` is no response although it ends a wait: it has to arrive behind the requests that it
    /// voids. Directories handle it at once, so nothing waits for a request.
    #[must_use]
    pub const fn lane(&self) -> Lane {
        match self {
            Self::Get { .. }
            | Self::PutShared { .. }
            | Self::Put { .. }
            | Self::Taken { .. }
            | Self::Invalidate { .. }
            | Self::Fetch { .. }
            | Self::Split { .. } => Lane::Requests,
            Self::Unblock { .. }
            | Self::SplitState { .. }
            | Self::Grant(_)
            | Self::PutDone { .. }
            | Self::BlockGrant { .. }
            | Self::Ack { .. }
            // One lane: a node that returns the token may ask for it again at once.
            | Self::TokenWant
            | Self::TokenBack { .. }
            | Self::TokenGrant { .. } => Lane::Responses,
            Self::Data { .. } => Lane::Data,
        }
    }

    /// Who handles the message.
    #[must_use]
    pub const fn role(&self) -> Role {
        match self {
            Self::Get { .. }
            | Self::PutShared { .. }
            | Self::Put { .. }
            | Self::Taken { .. }
            | Self::Unblock { .. }
            | Self::SplitState { .. } => Role::Directory,
            Self::Invalidate { .. }
            | Self::Fetch { .. }
            | Self::Split { .. }
            | Self::Grant(_)
            | Self::PutDone { .. }
            | Self::BlockGrant { .. }
            | Self::Ack { .. }
            | Self::Data { .. } => Role::Cache,
            Self::TokenWant | Self::TokenBack { .. } | Self::TokenGrant { .. } => Role::Token,
        }
    }
}

/// A part of a node that handles messages.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum Role {
    /// [`crate::directory::Directory`].
    Directory,
    /// [`crate::cache::Cache`].
    Cache,
    /// [`crate::token`].
    Token,
}
