//! The compute nodes of a VM, numbered densely, and sets of them.

use std::fmt;

use fabric_homes::NodeId;
use fabric_homes::node::NODE_IDS;

/// Most compute nodes of a VM: a set of them is one 16-bit word of a directory entry.
pub const MEMBERS_MAX: usize = 16;

/// A compute node's place in the table of [`Members`], below [`MEMBERS_MAX`].
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Member(u8);

impl Member {
    /// The member at a place, or `None` from [`MEMBERS_MAX`] on.
    #[must_use]
    pub const fn at(place: u8) -> Option<Self> {
        if (place as usize) < MEMBERS_MAX {
            Some(Self(place))
        } else {
            None
        }
    }

    /// The place in the table.
    #[must_use]
    pub const fn place(self) -> u8 {
        self.0
    }

    /// The place as an index into an array.
    #[must_use]
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Display for Member {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "member {}", self.0)
    }
}

/// A set of compute nodes.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
pub struct MemberSet(u16);

impl MemberSet {
    /// No member.
    pub const EMPTY: Self = Self(0);

    /// The set of one member.
    #[must_use]
    pub const fn of(member: Member) -> Self {
        Self(1 << member.0)
    }

    /// The set with these bits, bit 0 for the first member.
    #[must_use]
    pub const fn from_bits(bits: u16) -> Self {
        Self(bits)
    }

    /// Bit 0 for the first member.
    #[must_use]
    pub const fn bits(self) -> u16 {
        self.0
    }

    /// Whether `member` is in the set.
    #[must_use]
    pub const fn contains(self, member: Member) -> bool {
        self.0 & 1 << member.0 != 0
    }

    /// The set with `member`.
    #[must_use]
    pub const fn with(self, member: Member) -> Self {
        Self(self.0 | 1 << member.0)
    }

    /// The set without `member`.
    #[must_use]
    pub const fn without(self, member: Member) -> Self {
        Self(self.0 & !(1 << member.0))
    }

    /// Whether all members of this set are in `other`.
    #[must_use]
    pub const fn is_within(self, other: Self) -> bool {
        self.0 & !other.0 == 0
    }

    /// Those of this set that are not in `other`.
    #[must_use]
    pub const fn minus(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// Whether no member is in the set.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// The first member of the set.
    #[must_use]
    pub fn first(self) -> Option<Member> {
        self.iter().next()
    }

    /// The members of the set in order.
    pub fn iter(self) -> impl Iterator<Item = Member> {
        let mut left = self.0;
        std::iter::from_fn(move || {
            let place = u8::try_from(left.trailing_zeros()).ok()?;
            left &= left.wrapping_sub(1);
            Member::at(place)
        })
    }
}

/// Compute nodes that cannot share one memory.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum MembersError {
    /// More compute nodes than a set can hold.
    #[error("too many compute nodes: {0} asked, {MEMBERS_MAX} is the limit")]
    TooMany(usize),
    /// Two compute nodes have the same id.
    #[error("{0} is named twice among the compute nodes")]
    Twice(NodeId),
    /// No compute node at all.
    #[error("no compute node is named")]
    None,
}

/// The table of a VM's compute nodes: the same on each of them.
#[derive(Clone, Debug)]
pub struct Members {
    ids: Vec<NodeId>,
    places: [Option<Member>; NODE_IDS],
}

impl Members {
    /// Numbers the compute nodes in the order in which they are given.
    ///
    /// # Errors
    /// When there are none or more than [`MEMBERS_MAX`], or one is named twice.
    pub fn new(ids: &[NodeId]) -> Result<Self, MembersError> {
        if ids.is_empty() {
            return Err(MembersError::None);
        }
        let mut places = [None; NODE_IDS];
        for (id, place) in ids.iter().zip(0..) {
            let Some(member) = Member::at(place).filter(|_| ids.len() <= MEMBERS_MAX) else {
                return Err(MembersError::TooMany(ids.len()));
            };
            if places[id.index()].replace(member).is_some() {
                return Err(MembersError::Twice(*id));
            }
        }
        let ids = ids.to_vec();
        Ok(Self { ids, places })
    }

    /// All compute nodes as a set.
    #[must_use]
    pub fn all(&self) -> MemberSet {
        let places = (0..).zip(&self.ids);
        let members = places.filter_map(|(place, _)| Member::at(place));
        members.fold(MemberSet::EMPTY, MemberSet::with)
    }

    /// The member with this id, or `None` if it is not a compute node.
    #[must_use]
    pub fn member(&self, id: NodeId) -> Option<Member> {
        self.places[id.index()]
    }

    /// The id of a member, or `None` past the end of the table.
    #[must_use]
    pub fn id(&self, member: Member) -> Option<NodeId> {
        self.ids.get(member.index()).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_has_the_members_that_were_added_in_order() {
        let [a, b] = [3, 15].map(|place| Member::at(place).expect("a place"));
        let set = MemberSet::of(b).with(a);
        assert_eq!(set.iter().collect::<Vec<_>>(), [a, b]);
        assert_eq!(set.without(a), MemberSet::of(b));
        assert!(MemberSet::of(a).is_within(set) && !set.is_within(MemberSet::of(a)));
        assert_eq!(MemberSet::EMPTY.first(), None);
    }

    #[test]
    fn sixteen_compute_nodes_are_the_limit() {
        let ids: Vec<_> = (100..117).map(NodeId).collect();
        let members = Members::new(&ids[..16]).expect("16 nodes");
        assert_eq!(members.all().bits(), u16::MAX);
        let last = members.member(NodeId(115)).expect("a member");
        assert_eq!((last.place(), members.id(last)), (15, Some(NodeId(115))));
        assert_eq!(members.member(NodeId(116)), None);
        assert_eq!(Members::new(&ids).unwrap_err(), MembersError::TooMany(17));
        assert_eq!(Members::new(&[]).unwrap_err(), MembersError::None);
        let twice = Members::new(&[NodeId(7), NodeId(7)]);
        assert_eq!(twice.unwrap_err(), MembersError::Twice(NodeId(7)));
    }
}
