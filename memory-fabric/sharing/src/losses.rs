//! What is lost with a node: what the directory here and what this node has says of it.

use std::ops::Range;
use std::sync::atomic::{AtomicU8, Ordering};

use fabric_coherence::{BlockIndex, Loss, Member};
use fabric_homes::BLOCK_PAGES;
use fabric_pages::page::PageIndex;
use fabric_peers::{PeerError, Peers};

use crate::Failure;
use crate::engine::Engine;

/// Pages by their numbers, in order, with neighbours joined.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct PageRanges(Vec<Range<u32>>);

impl PageRanges {
    /// Adds pages, of which none is below one that was added before.
    fn add(&mut self, first: u32, count: u32) {
        let end = first.saturating_add(count);
        match self.0.last_mut() {
            Some(last) if last.end == first => last.end = end,
            _ => self.0.push(first..end),
        }
    }

    /// The ranges, in order.
    pub fn iter(&self) -> impl Iterator<Item = Range<u32>> {
        self.0.iter().cloned()
    }
}

/// What is lost with a node, as this one knows it. No page is in two of its lists.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Losses {
    /// The node; `None` where a failure is not that of a node, and nothing is lost with one.
    pub node: Option<Member>,
    /// By the directory of this node: pages whose only up-to-date copy the lost node had, or could
    /// have had.
    pub only_copy: PageRanges,
    /// Of these, the blocks that the lost node owned. It may have used none of their pages.
    pub blocks: u32,
    /// By the directory of this node: pages that were on their way between nodes.
    pub in_transit: PageRanges,
    /// Pages whose home and directory the lost node was, and of which this node has no copy. Others
    /// may have one, and nobody may have used them.
    pub at_home: PageRanges,
}

/// A request of another thread that the engine ends because a node is lost.
#[derive(Debug, Default)]
pub(crate) struct FenceRequest(
    /// One more than the place of the node; 0 without a request. It comes with no other data.
    AtomicU8,
);

impl FenceRequest {
    pub(crate) fn ask(&self, lost: Member) {
        self.0
            .store(lost.place().saturating_add(1), Ordering::Relaxed);
    }

    /// Fails if a node was named.
    pub(crate) fn check(&self) -> Result<(), Failure> {
        let place = self.0.load(Ordering::Relaxed).checked_sub(1);
        place.and_then(Member::at).map_or(Ok(()), |peer| {
            let reason = "it is lost by what other connections to it show".to_owned();
            Err(PeerError::Lost { peer, reason }.into())
        })
    }
}

impl<P: Peers> Engine<P> {
    /// Stops the protocol after a failure. Returns what is lost with the node that failed.
    pub(crate) fn fence(&mut self, failure: &Failure) -> Losses {
        match failure {
            Failure::Offence(offence) => self.losses(offence.peer),
            Failure::Peer(PeerError::Lost { peer, .. } | PeerError::Broken { peer, .. }) => {
                self.losses(*peer)
            }
            _ => Losses::default(),
        }
    }

    fn losses(&mut self, lost: Member) -> Losses {
        let mut losses = Losses {
            node: Some(lost),
            ..Losses::default()
        };
        for loss in self.directory.fence(lost) {
            match loss {
                Loss::Page(page) => losses.only_copy.add(page.number(), 1),
                Loss::InTransit(page) => losses.in_transit.add(page.number(), 1),
                Loss::Block(BlockIndex(block)) => {
                    losses.blocks += 1;
                    let first = block.saturating_mul(BLOCK_PAGES);
                    losses.only_copy.add(first, BLOCK_PAGES);
                }
            }
        }
        for block in 0..self.directory.blocks() {
            let first = block.saturating_mul(BLOCK_PAGES);
            if self.cache.directory_of(PageIndex::new(first)) == lost {
                self.add_home(BlockIndex(block), first, &mut losses.at_home);
            }
        }
        losses
    }

    /// Adds the pages of a block that are not here.
    fn add_home(&self, block: BlockIndex, first: u32, to: &mut PageRanges) {
        let is_owned = self.owned.has(PageIndex::new(first));
        if !is_owned && self.cache.has_nothing_of(block) {
            to.add(first, BLOCK_PAGES);
            return;
        }
        for page in first..first.saturating_add(BLOCK_PAGES) {
            let index = PageIndex::new(page);
            let is_here = match is_owned {
                true => !self.owned.is_at_home(index),
                false => self.cache.has_copy(index),
            };
            if !is_here {
                to.add(page, 1);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbouring_pages_are_one_range() {
        let mut ranges = PageRanges::default();
        for (first, count) in [(3, 1), (4, 1), (6, 1), (512, 512), (1024, 512)] {
            ranges.add(first, count);
        }
        let all: Vec<_> = ranges.iter().collect();
        assert_eq!(all, [3..5, 6..7, 512..1536]);
    }

    #[test]
    fn a_request_names_the_node() {
        let request = FenceRequest::default();
        assert!(request.check().is_ok());
        let lost = Member::at(0).expect("a place");
        request.ask(lost);
        let failure = request.check().expect_err("it is asked for");
        assert!(
            matches!(failure, Failure::Peer(PeerError::Lost { peer, .. }) if peer == lost),
            "{failure}"
        );
    }
}
