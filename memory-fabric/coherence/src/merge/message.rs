//! What nodes send each other about merged tables.

use fabric_pages::page::PageIndex;

use crate::members::Member;

/// Entries of a table.
pub const ENTRIES: usize = 512;

/// A set of entries of a table.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
pub struct Entries(pub [u64; ENTRIES / 64]);

impl Entries {
    /// Whether an entry is in the set.
    #[must_use]
    pub const fn contains(&self, entry: usize) -> bool {
        self.0[entry / 64] >> (entry % 64) & 1 == 1
    }

    /// Adds an entry.
    pub const fn add(&mut self, entry: usize) {
        self.0[entry / 64] |= 1 << (entry % 64);
    }

    /// Whether no entry is in the set.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0 == [0; ENTRIES / 64]
    }

    /// The entries in order.
    pub fn iter(&self) -> impl Iterator<Item = usize> {
        self.0.into_iter().zip(0..).flat_map(|(word, place)| {
            let mut left = word;
            std::iter::from_fn(move || {
                let bit = usize::try_from(left.trailing_zeros()).ok()?;
                left &= left.checked_sub(1)?;
                Some(place * 64 + bit)
            })
        })
    }
}

/// A message about a merged table. All take one lane, and wait for nothing.
///
/// The values of entries travel beside it, at their places in a page.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum MergeMessage {
    /// Home to a node that asked for the page: a copy of the table, which travels beside it.
    Copy {
        /// The table.
        page: PageIndex,
        /// 1 for a table of pages, 4 for a root.
        level: u8,
    },
    /// Holder to home: what the holder's vCPUs changed.
    Change {
        /// The table.
        page: PageIndex,
        /// The entries.
        entries: Entries,
    },
    /// Home to all holders, also to the one that changed the entries: the next change of the table.
    Changed {
        /// The table.
        page: PageIndex,
        /// The entries.
        entries: Entries,
        /// Who changed them.
        origin: Member,
    },
    /// Holder to home: the change is made, and no table that it unlinks is merged any longer.
    Applied {
        /// The table.
        page: PageIndex,
    },
    /// Home to all holders: all of them have made the change.
    Settled {
        /// The table.
        page: PageIndex,
    },
    /// Home to a holder: give up the copy.
    Recall {
        /// The table.
        page: PageIndex,
    },
    /// Holder to home: the copy is unmapped. The last changes travel beside it.
    Recalled {
        /// The table.
        page: PageIndex,
        /// The entries that changed since the holder's last [`Self::Change`].
        entries: Entries,
    },
    /// Home to all who gave up their copies: the page is ordinary memory.
    Demoted {
        /// The page.
        page: PageIndex,
    },
}

impl MergeMessage {
    /// The table.
    #[must_use]
    pub const fn page(&self) -> PageIndex {
        match *self {
            Self::Copy { page, .. }
            | Self::Change { page, .. }
            | Self::Changed { page, .. }
            | Self::Applied { page }
            | Self::Settled { page }
            | Self::Recall { page }
            | Self::Recalled { page, .. }
            | Self::Demoted { page } => page,
        }
    }

    /// Whether values travel beside the message.
    #[must_use]
    pub const fn has_values(&self) -> bool {
        matches!(
            self,
            Self::Copy { .. } | Self::Change { .. } | Self::Changed { .. } | Self::Recalled { .. }
        )
    }
}
