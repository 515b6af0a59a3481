//! Pages on their way between the memory of a home and its depot.
//!
//! A state machine without clock and device. Its rules: one write of a page is on its way at a time,
//! none while the page is read, and a page is away only when a write of the bytes that it has now was
//! confirmed. So a depot that completes requests in any order never returns older bytes than those
//! that were stored last.

use std::collections::VecDeque;

use fabric_coherence::Member;
use fabric_pages::page::PageIndex;

/// Most writes on their way to the depot: what one transport takes.
pub(crate) const WRITES_MAX: usize = 64;

/// Most pages that one node reads at once. Each thread that touches its memory waits for one page, and
/// a node requests [`PENDING_MAX`](fabric_coherence::cache::PENDING_MAX) of split blocks at most.
pub(crate) const READS_MAX: usize = 1024;

/// A page that is read from the depot, for the nodes that have asked for it.
#[derive(Clone, Debug)]
struct Reading {
    page: PageIndex,
    nodes: Vec<Member>,
    is_posted: bool,
}

/// What a request for a page that is away leads to.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Asked {
    /// The page comes, and is then for this node as well.
    Comes,
    /// The node waits for this page already, or for [`READS_MAX`] pages.
    TooMuch,
}

/// A rule that is left out, for the test that each is needed.
#[cfg(test)]
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Defect {
    /// A page is written while an older write of it is on its way.
    TwoWrites,
    /// A page is written while it is read.
    WriteWhileRead,
    /// A page is away when any write of it was confirmed.
    AnyWrite,
    /// Bytes that are written back count as those that leave.
    KeepLeaving,
    /// A page that is busy is forgotten instead of tried again.
    ForgetBusy,
}

/// Whether a rule is left out.
macro_rules! defect {
    ($away:expr, $defect:ident) => {{
        #[cfg(test)]
        let is_there = $away.defect == Some($crate::away::Defect::$defect);
        #[cfg(not(test))]
        let is_there = false;
        is_there
    }};
}
pub(crate) use defect;

/// The pages on their way, and those that may leave.
#[derive(Clone, Debug, Default)]
pub(crate) struct Away {
    #[cfg(test)]
    pub(crate) defect: Option<Defect>,
    /// Pages that are stored here and have a place in the depot, in the order in which they came.
    /// Some have left meanwhile in other ways.
    queue: VecDeque<PageIndex>,
    writing: Vec<PageIndex>,
    reading: Vec<Reading>,
}

impl Away {
    /// The page is stored here, and may leave.
    pub(crate) fn enqueue(&mut self, page: PageIndex) {
        self.queue.push_back(page);
    }

    /// The number of pages that may leave.
    pub(crate) fn queued(&self) -> usize {
        self.queue.len()
    }

    /// The next page that may leave; the caller [enqueues](Self::enqueue) one that is
    /// [busy](Self::is_busy) again.
    pub(crate) fn dequeue(&mut self) -> Option<PageIndex> {
        self.queue.pop_front()
    }

    /// Whether the page cannot be written to the depot now.
    pub(crate) fn is_busy(&self, page: PageIndex) -> bool {
        let is_written = self.writing.contains(&page) && !defect!(self, TwoWrites);
        let is_read = self.reading.iter().any(|one| one.page == page);
        is_written || is_read && !defect!(self, WriteWhileRead)
    }

    /// The number of writes on their way.
    pub(crate) fn writes(&self) -> usize {
        self.writing.len()
    }

    /// A write of the page, which is not busy, is on its way.
    pub(crate) fn writes_now(&mut self, page: PageIndex) {
        self.writing.push(page);
    }

    /// A write of the page has ended. Returns whether there was one.
    pub(crate) fn wrote(&mut self, page: PageIndex) -> bool {
        let place = self.writing.iter().position(|one| *one == page);
        place.map(|place| self.writing.swap_remove(place)).is_some()
    }

    /// Pages that are read for a node.
    pub(crate) fn reads_for(&self, node: Member) -> usize {
        let is_for = |one: &&Reading| one.nodes.contains(&node);
        self.reading.iter().filter(is_for).count()
    }

    /// A node asks for a page that is away.
    pub(crate) fn ask(&mut self, page: PageIndex, node: Member) -> Asked {
        if self.reads_for(node) >= READS_MAX {
            return Asked::TooMuch;
        }
        match self.reading.iter_mut().find(|one| one.page == page) {
            Some(reading) if reading.nodes.contains(&node) => return Asked::TooMuch,
            Some(reading) => reading.nodes.push(node),
            None => self.reading.push(Reading {
                page,
                nodes: vec![node],
                is_posted: false,
            }),
        }
        Asked::Comes
    }

    /// A page that is to be read and is not on its way yet.
    pub(crate) fn to_read(&self) -> Option<PageIndex> {
        let waiting = self.reading.iter().find(|one| !one.is_posted);
        waiting.map(|one| one.page)
    }

    /// The page is on its way.
    pub(crate) fn reads_now(&mut self, page: PageIndex) {
        if let Some(reading) = self.reading.iter_mut().find(|one| one.page == page) {
            reading.is_posted = true;
        }
    }

    /// The page came. Returns the nodes that have asked for it; `None` if it was not asked for.
    pub(crate) fn came(&mut self, page: PageIndex) -> Option<Vec<Member>> {
        let is_it = |one: &Reading| one.page == page && one.is_posted;
        let place = self.reading.iter().position(is_it)?;
        Some(self.reading.swap_remove(place).nodes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_has_a_limited_number_of_reads() {
        let (mut away, node) = (Away::default(), Member::at(1).expect("a member"));
        let pages = (0..).map(PageIndex::new);
        let asked: Vec<_> = pages
            .take(READS_MAX + 1)
            .map(|page| away.ask(page, node))
            .collect();
        assert!(
            asked[..READS_MAX]
                .iter()
                .all(|asked| *asked == Asked::Comes)
        );
        assert_eq!(asked[READS_MAX], Asked::TooMuch);
        // The places of others are their own.
        let other = Member::at(2).expect("a member");
        assert_eq!(away.ask(PageIndex::new(0), other), Asked::Comes);
        away.reads_now(PageIndex::new(0));
        assert_eq!(away.came(PageIndex::new(1)), None, "it was not posted");
        assert_eq!(away.came(PageIndex::new(0)), Some(vec![node, other]));
        assert_eq!(away.ask(PageIndex::new(5000), node), Asked::Comes);
    }
}
