//! The kinds of messages: one byte in the header of a frame.

use fabric_coherence::Message;
use fabric_coherence::merge::MergeMessage;

use super::{BEFORE_TABLE, DecodeError, TABLE};
use crate::message::{HomeMessage, PeerLane, PeerMessage};

macro_rules! kinds {
    ($($name:ident = $value:literal, $bytes:literal;)*) => {
        /// The kind of a message.
        #[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
        #[repr(u8)]
        #[allow(missing_docs, reason = "named like the messages")]
        pub enum Kind {
            $($name = $value,)*
        }

        impl Kind {
            /// Every kind.
            pub const ALL: &[Self] = &[$(Self::$name,)*];

            /// The kind with this value.
            ///
            /// # Errors
            /// When there is none.
            pub const fn new(value: u8) -> Result<Self, DecodeError> {
                match value {
                    $($value => Ok(Self::$name),)*
                    _ => Err(DecodeError::Kind(value)),
                }
            }

            /// Bytes of a payload of this kind, without a table of pages.
            const fn bytes(self) -> usize {
                match self {
                    $(Self::$name => $bytes,)*
                }
            }
        }
    };
}

kinds! {
    Get = 1, 6;
    PutShared = 2, 4;
    Put = 3, 13;
    Taken = 4, 12;
    Unblock = 5, 13;
    SplitState = 6, 12;
    Invalidate = 7, 13;
    Fetch = 8, 14;
    Split = 9, 12;
    Grant = 10, 17;
    PutDone = 11, 12;
    BlockGrant = 12, 12;
    Ack = 13, 12;
    Data = 14, 13;
    TokenWant = 15, 0;
    TokenBack = 16, 8;
    TokenGrant = 17, 8;
    HomeRead = 32, 4;
    HomeBytes = 33, 4;
    HomeWrite = 34, 12;
    HomeWritten = 35, 13;
    MergeCopy = 48, 5;
    MergeChange = 49, 68;
    MergeChanged = 50, 69;
    MergeApplied = 51, 4;
    MergeSettled = 52, 4;
    MergeRecall = 53, 4;
    MergeRecalled = 54, 68;
    MergeDemoted = 55, 4;
}

impl Kind {
    /// The kind of a message.
    #[must_use]
    pub const fn of(message: &PeerMessage) -> Self {
        match message {
            PeerMessage::Coherence(message) => match message {
                Message::Get { .. } => Self::Get,
                Message::PutShared { .. } => Self::PutShared,
                Message::Put { .. } => Self::Put,
                Message::Taken { .. } => Self::Taken,
                Message::Unblock { .. } => Self::Unblock,
                Message::SplitState { .. } => Self::SplitState,
                Message::Invalidate { .. } => Self::Invalidate,
                Message::Fetch { .. } => Self::Fetch,
                Message::Split { .. } => Self::Split,
                Message::Grant(_) => Self::Grant,
                Message::PutDone { .. } => Self::PutDone,
                Message::BlockGrant { .. } => Self::BlockGrant,
                Message::Ack { .. } => Self::Ack,
                Message::Data { .. } => Self::Data,
                Message::TokenWant => Self::TokenWant,
                Message::TokenBack { .. } => Self::TokenBack,
                Message::TokenGrant { .. } => Self::TokenGrant,
            },
            PeerMessage::Home(message) => match message {
                HomeMessage::Read { .. } => Self::HomeRead,
                HomeMessage::Bytes { .. } => Self::HomeBytes,
                HomeMessage::Write { .. } => Self::HomeWrite,
                HomeMessage::Written { .. } => Self::HomeWritten,
            },
            PeerMessage::Merge(message) => match message {
                MergeMessage::Copy { .. } => Self::MergeCopy,
                MergeMessage::Change { .. } => Self::MergeChange,
                MergeMessage::Changed { .. } => Self::MergeChanged,
                MergeMessage::Applied { .. } => Self::MergeApplied,
                MergeMessage::Settled { .. } => Self::MergeSettled,
                MergeMessage::Recall { .. } => Self::MergeRecall,
                MergeMessage::Recalled { .. } => Self::MergeRecalled,
                MergeMessage::Demoted { .. } => Self::MergeDemoted,
            },
        }
    }

    /// The lane of messages of this kind; the same as [`PeerMessage::lane`].
    #[must_use]
    pub const fn lane(self) -> PeerLane {
        match self {
            Self::Unblock
            | Self::SplitState
            | Self::Grant
            | Self::PutDone
            | Self::BlockGrant
            | Self::Ack
            | Self::TokenWant
            | Self::TokenBack
            | Self::TokenGrant => PeerLane::Responses,
            Self::Get
            | Self::PutShared
            | Self::Put
            | Self::Taken
            | Self::Invalidate
            | Self::Fetch
            | Self::Split => PeerLane::Requests,
            Self::Data
            | Self::MergeCopy
            | Self::MergeChange
            | Self::MergeChanged
            | Self::MergeApplied
            | Self::MergeSettled
            | Self::MergeRecall
            | Self::MergeRecalled
            | Self::MergeDemoted => PeerLane::Data,
            Self::HomeRead | Self::HomeBytes | Self::HomeWrite | Self::HomeWritten => {
                PeerLane::Bulk
            }
        }
    }

    /// Whether a page travels beside messages of this kind; the same as [`PeerMessage::has_page`].
    #[must_use]
    pub const fn has_page(self) -> bool {
        matches!(
            self,
            Self::Data
                | Self::HomeBytes
                | Self::HomeWrite
                | Self::MergeCopy
                | Self::MergeChange
                | Self::MergeChanged
                | Self::MergeRecalled
        )
    }

    /// Compares the length of a payload with those that the kind can have.
    ///
    /// # Errors
    /// When it has none of them.
    pub fn check_length(self, found: usize) -> Result<(), DecodeError> {
        let expected = self.bytes();
        let fits = match self {
            Self::SplitState => found == BEFORE_TABLE + TABLE / 4,
            Self::BlockGrant => matches!(found.checked_sub(expected), Some(0 | LONG_BEHIND)),
            _ => found == expected,
        };
        if fits {
            return Ok(());
        }
        Err(DecodeError::Length {
            kind: self,
            found,
            expected,
        })
    }
}

/// Bytes of the table of a block whose pages are not all zero.
const LONG_BEHIND: usize = TABLE / 8;
