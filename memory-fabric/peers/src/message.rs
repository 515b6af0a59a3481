//! What compute nodes send each other.

use fabric_coherence::merge::MergeMessage;
use fabric_coherence::{Lane, Message, Number};
use fabric_pages::page::PageIndex;

/// A message between two compute nodes.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum PeerMessage {
    /// Of the directory protocol. A page travels beside [`Message::Data`].
    Coherence(Message),
    /// Between a node and the home of a page.
    Home(HomeMessage),
    /// About tables that several nodes may write. The values of entries travel beside some.
    Merge(MergeMessage),
}

/// A message between a node and a compute node that is the home of pages.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum HomeMessage {
    /// Asks for the bytes that the home stores.
    Read {
        /// The page.
        page: PageIndex,
    },
    /// Answers [`Self::Read`]; the page travels beside it.
    Bytes {
        /// The page.
        page: PageIndex,
    },
    /// Stores the page that travels beside it, unless the home has bytes of a later grant.
    Write {
        /// The page.
        page: PageIndex,
        /// The number of the grant under which the page was written.
        number: Number,
    },
    /// Answers [`Self::Write`].
    Written {
        /// The page.
        page: PageIndex,
        /// The number in the request.
        number: Number,
        /// The home has bytes of a later grant, and did not store these.
        refused: bool,
    },
}

/// A lane keeps the order of its messages; nothing orders one lane against another. Waiting
/// messages are sent in the order of the lanes below.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub enum PeerLane {
    /// [`Lane::Responses`].
    Responses,
    /// [`Lane::Requests`].
    Requests,
    /// [`Lane::Data`].
    Data,
    /// Pages from and to homes.
    Bulk,
}

impl PeerLane {
    /// Number of lanes.
    pub const COUNT: usize = 4;

    /// Every lane, in the order of sending.
    pub const ALL: [Self; Self::COUNT] = [Self::Responses, Self::Requests, Self::Data, Self::Bulk];
}

impl From<PeerLane> for usize {
    fn from(lane: PeerLane) -> Self {
        lane as Self
    }
}

impl PeerMessage {
    /// The lane that the message takes.
    #[must_use]
    pub const fn lane(&self) -> PeerLane {
        match self {
            Self::Coherence(message) => match message.lane() {
                Lane::Responses => PeerLane::Responses,
                Lane::Requests => PeerLane::Requests,
                Lane::Data => PeerLane::Data,
            },
            Self::Home(_) => PeerLane::Bulk,
            Self::Merge(_) => PeerLane::Data,
        }
    }

    /// Whether a page travels beside the message.
    #[must_use]
    pub const fn has_page(&self) -> bool {
        match self {
            Self::Coherence(message) => matches!(message, Message::Data { .. }),
            Self::Home(message) => {
                matches!(
                    message,
                    HomeMessage::Bytes { .. } | HomeMessage::Write { .. }
                )
            }
            Self::Merge(message) => message.has_values(),
        }
    }
}
