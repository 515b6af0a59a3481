//! Donors that are lost while the guest runs, each time, and those that are not used again.

use std::collections::{BTreeSet, HashSet};
use std::net::SocketAddr;

use memory_fabric::NodeId;

/// The donors that were lost at the last look.
#[derive(Debug, Default)]
pub(super) struct Losses {
    seen: HashSet<(NodeId, SocketAddr)>,
    distrusted: BTreeSet<SocketAddr>,
}

impl Losses {
    /// Takes the addresses of donors that sent too many wrong pieces so far. Returns whether there are
    /// others than at the last look: their names are those under which they are listed now.
    pub fn distrust(&mut self, all: BTreeSet<SocketAddr>) -> bool {
        let has_new = !all.is_subset(&self.distrusted);
        self.distrusted = all;
        has_new
    }

    /// Takes those that are lost now. Returns the ones that were not at the last look.
    pub fn look(&mut self, lost: HashSet<(NodeId, SocketAddr)>) -> Vec<SocketAddr> {
        let new = lost.difference(&self.seen).map(|(_, address)| *address);
        let new = new.collect();
        self.seen = lost;
        new
    }

    /// Notes that the donor at an address has joined: lost at the next look, it was lost again. What
    /// is `still` lost has its place no more, such as a donor of the start at the same address.
    pub fn forget(&mut self, address: SocketAddr, still: &HashSet<(NodeId, SocketAddr)>) {
        self.seen
            .retain(|seen| seen.1 != address || still.contains(seen));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_donor_that_sent_wrong_pieces_is_new_once() {
        let address = |last: u8| SocketAddr::from(([10, 0, 0, last], 7000));
        let all = |lasts: &[u8]| lasts.iter().map(|last| address(*last)).collect();
        let mut losses = Losses::default();
        let looks: [(&[u8], bool); 6] = [
            (&[], false),
            (&[1], true),
            (&[1], false),
            (&[1, 2], true),
            (&[2, 1], false),
            (&[3, 1, 2], true),
        ];
        for (lasts, has_new) in looks {
            assert_eq!(losses.distrust(all(lasts)), has_new, "{lasts:?}");
        }
    }

    #[test]
    fn each_loss_of_a_donor_is_seen_once() {
        let address = |last: u8| SocketAddr::from(([10, 0, 0, last], 7000));
        let lost = |all: &[(u8, u8)]| {
            let all = all.iter();
            all.map(|&(node, last)| (NodeId(node), address(last)))
                .collect()
        };
        let mut losses = Losses::default();
        assert_eq!(losses.look(lost(&[])), []);
        assert_eq!(losses.look(lost(&[(1, 1)])), [address(1)]);
        assert_eq!(losses.look(lost(&[(1, 1)])), []);
        assert_eq!(losses.look(lost(&[(1, 1), (3, 2)])), [address(2)]);
        // It is back in its place, and lost again.
        assert_eq!(losses.look(lost(&[(3, 2)])), []);
        assert_eq!(losses.look(lost(&[(1, 1), (3, 2)])), [address(1)]);
        // The same between two looks.
        losses.forget(address(2), &lost(&[(1, 1)]));
        assert_eq!(losses.look(lost(&[(1, 1), (3, 2)])), [address(2)]);
        // One of the start stays lost while the node at its address has joined in another place.
        losses.forget(address(1), &lost(&[(1, 1), (3, 2)]));
        assert_eq!(losses.look(lost(&[(1, 1), (3, 2)])), []);
        assert_eq!(losses.look(lost(&[(1, 1), (4, 1), (3, 2)])), [address(1)]);
        // Another one has taken its place.
        assert_eq!(losses.look(lost(&[(1, 1), (3, 4)])), [address(4)]);
    }
}
