//! The home of merged tables: it orders their changes, and ends the merging of a table.

use std::collections::VecDeque;

use fabric_pages::page::PageIndex;

use super::{Entries, Join, Memory, Merge, MergeAction, MergeMessage, Values, send, tables, wrong};
use crate::action::Sink;
use crate::members::{Member, MemberSet};
use crate::mutation::mutated;
use crate::offence::Offence;

/// A change that waits for its turn.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
struct Change<const W: usize> {
    origin: Member,
    entries: Entries,
    values: Values<W>,
}

/// How far the merging of a table has ended.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
enum Ending {
    No,
    /// Nothing links the table any longer.
    Due,
    /// These have a copy still.
    Recalling(MemberSet),
}

/// A merged table of which this node is the home.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub(super) struct Master<const W: usize> {
    pub(super) page: PageIndex,
    /// The table and its entry that point to this one; a root has none.
    parent: Option<(PageIndex, usize)>,
    /// The other nodes that have a copy.
    pub(super) holders: MemberSet,
    /// Who has not made the change in progress yet.
    turn: Option<MemberSet>,
    /// At most one of each holder.
    queue: VecDeque<Change<W>>,
    ending: Ending,
}

impl<const W: usize> Master<W> {
    pub(super) fn missing(&self, me: Member) -> Option<Member> {
        let recalled = match self.ending {
            Ending::Recalling(left) => left.first(),
            _ => None,
        };
        recalled.or_else(|| self.turn?.without(me).first())
    }
}

impl<const W: usize> Merge<W> {
    /// Merges a page that this node alone has, mapped writable, and of which it is the home. Returns
    /// false if it has as many already as it may have. `parent` is from [`Merge::linked`]; a root
    /// has none.
    pub fn start(
        &mut self,
        page: PageIndex,
        level: u8,
        parent: Option<(PageIndex, usize)>,
        memory: &impl Memory,
    ) -> bool {
        if self.masters.len() >= self.limit || self.find(page).is_some() {
            return false;
        }
        let twin: Vec<u64> = (0..W).map(|entry| memory.load(page, entry)).collect();
        let Ok(twin) = twin.into_boxed_slice().try_into() else {
            return false;
        };
        self.add(page, level, self.me, twin);
        self.masters.push(Master {
            page,
            parent,
            holders: MemberSet::EMPTY,
            turn: None,
            queue: VecDeque::new(),
            ending: Ending::No,
        });
        true
    }

    /// A node asks for a page of which this node is the home.
    ///
    /// # Errors
    /// When it has a copy.
    pub fn join(
        &mut self,
        from: Member,
        page: PageIndex,
        sink: &mut impl Sink<MergeAction<W>>,
    ) -> Result<Join, Offence> {
        let Some(master) = self.masters.iter_mut().find(|master| master.page == page) else {
            return Ok(Join::Ordinary);
        };
        // A copy of a change in progress would be seen by one who does not wait for its end.
        if master.ending != Ending::No || master.turn.is_some() {
            return Ok(Join::Later);
        }
        if master.holders.contains(from) {
            return Err(wrong(page, from));
        }
        master.holders = master.holders.with(from);
        let copy = self.copies.iter().find(|copy| copy.page == page);
        if let Some(copy) = copy {
            let level = copy.level;
            let values = Some(copy.twin.clone());
            send(sink, from, MergeMessage::Copy { page, level }, values);
        }
        Ok(Join::Joined)
    }

    fn master(&mut self, page: PageIndex) -> Option<&mut Master<W>> {
        self.masters.iter_mut().find(|master| master.page == page)
    }

    pub(super) fn queue_change(
        &mut self,
        page: PageIndex,
        origin: Member,
        entries: Entries,
        values: Values<W>,
    ) {
        if let Some(master) = self.master(page) {
            master.queue.push_back(Change {
                origin,
                entries,
                values,
            });
        }
    }

    /// Begins what can begin, after [`Merge::fence`] and [`Merge::zapped`] as well.
    pub fn proceed(&mut self, memory: &mut impl Memory, sink: &mut impl Sink<MergeAction<W>>) {
        self.advance(memory, sink);
    }

    pub(super) fn change(
        &mut self,
        from: Member,
        page: PageIndex,
        entries: Entries,
        values: Values<W>,
        memory: &mut impl Memory,
    ) -> Result<(), Offence> {
        let offence = wrong(page, from);
        let master = self.master(page).ok_or(offence)?;
        let is_holder = match master.ending {
            Ending::Recalling(left) => left.contains(from),
            _ => master.holders.contains(from),
        };
        let has_queued = master.queue.iter().any(|change| change.origin == from);
        if !is_holder || has_queued || entries.is_empty() {
            return Err(offence);
        }
        if matches!(master.ending, Ending::Recalling(_)) {
            self.take(page, from, entries, &values, memory);
        } else {
            self.queue_change(page, from, entries, values);
        }
        Ok(())
    }

    pub(super) fn applied(
        &mut self,
        from: Member,
        page: PageIndex,
        sink: &mut impl Sink<MergeAction<W>>,
    ) -> Result<(), Offence> {
        let offence = wrong(page, from);
        let master = self.master(page).ok_or(offence)?;
        let turn = master.turn.as_mut().filter(|turn| turn.contains(from));
        let turn = turn.ok_or(offence)?;
        *turn = turn.without(from);
        self.end_turn(page, sink);
        Ok(())
    }

    /// This node has made the change in progress itself.
    pub(super) fn applied_here(&mut self, page: PageIndex, sink: &mut impl Sink<MergeAction<W>>) {
        let me = self.me;
        if let Some(turn) = self.master(page).and_then(|master| master.turn.as_mut()) {
            *turn = turn.without(me);
        }
        self.end_turn(page, sink);
    }

    fn end_turn(&mut self, page: PageIndex, sink: &mut impl Sink<MergeAction<W>>) {
        let is_over = |turn: MemberSet| turn.is_empty();
        let Some(master) = self
            .master(page)
            .filter(|one| one.turn.is_some_and(is_over))
        else {
            return;
        };
        master.turn = None;
        for holder in master.holders.iter() {
            send(sink, holder, MergeMessage::Settled { page }, None);
        }
        if let Some(place) = self.find(page) {
            let copy = &mut self.copies[place];
            copy.unsettled = copy.unsettled.saturating_sub(1);
        }
    }

    pub(super) fn recalled(
        &mut self,
        from: Member,
        page: PageIndex,
        entries: Entries,
        values: &[u64; W],
        memory: &mut impl Memory,
    ) -> Result<(), Offence> {
        let offence = wrong(page, from);
        let master = self.master(page).ok_or(offence)?;
        let Ending::Recalling(left) = &mut master.ending else {
            return Err(offence);
        };
        if !left.contains(from) {
            return Err(offence);
        }
        *left = left.without(from);
        self.take(page, from, entries, values, memory);
        Ok(())
    }

    /// Makes a change of a table that all others give up.
    fn take(
        &mut self,
        page: PageIndex,
        origin: Member,
        entries: Entries,
        values: &[u64; W],
        memory: &mut impl Memory,
    ) {
        if let Some(place) = self.find(page) {
            self.apply(place, origin, entries, values, memory);
            let copy = &mut self.copies[place];
            copy.owes = false;
            copy.unsettled = copy.unsettled.saturating_sub(1);
        }
    }

    /// An entry changed: a table that it linked is merged no longer.
    pub(super) fn unlinked(&mut self, page: PageIndex, entry: usize) {
        if mutated!(self, KeepUnlinked) {
            return;
        }
        let Some(place) = self.find(page).filter(|_| entry < W) else {
            return;
        };
        let target = tables::table(self.copies[place].twin[entry]);
        for master in &mut self.masters {
            let was_linked = master.parent == Some((page, entry));
            if was_linked && target != Some(master.page) && master.ending == Ending::No {
                master.ending = Ending::Due;
            }
        }
    }

    /// Whether the merging of a table that `page` linked is ending.
    pub(super) fn is_unlinking(&self, page: PageIndex) -> bool {
        let mut masters = self.masters.iter();
        masters.any(|one| one.ending != Ending::No && one.is_below(page))
            && !mutated!(self, ConfirmEarly)
    }

    /// Ends the merging of all tables that `page` links. Returns whether some are merged still.
    pub(super) fn gives_up_below(&mut self, page: PageIndex) -> bool {
        let mut has_any = false;
        for master in self.masters.iter_mut().filter(|one| one.is_below(page)) {
            has_any = true;
            if master.ending == Ending::No {
                master.ending = Ending::Due;
            }
        }
        has_any
    }

    /// Whether this node is the home of a table whose merging ends.
    pub(super) fn is_leaving(&self, page: PageIndex) -> bool {
        let mut masters = self.masters.iter();
        masters.any(|master| master.page == page && master.ending != Ending::No)
    }

    pub(super) fn advance_masters(
        &mut self,
        memory: &mut impl Memory,
        sink: &mut impl Sink<MergeAction<W>>,
    ) -> bool {
        for place in 0..self.masters.len() {
            let Master {
                page, turn, ending, ..
            } = self.masters[place];
            if turn.is_some() {
                continue;
            }
            match ending {
                Ending::Recalling(left) if left.is_empty() => self.demote(place, sink),
                Ending::Recalling(_) => continue,
                Ending::Due if self.gives_up_below(page) => continue,
                Ending::Due => self.recall(place, memory, sink),
                Ending::No => {
                    let Some(change) = self.masters[place].queue.pop_front() else {
                        continue;
                    };
                    self.begin_turn(place, &change, memory, sink);
                }
            }
            return true;
        }
        false
    }

    fn begin_turn(
        &mut self,
        place: usize,
        change: &Change<W>,
        memory: &mut impl Memory,
        sink: &mut impl Sink<MergeAction<W>>,
    ) {
        let me = self.me;
        let master = &mut self.masters[place];
        let page = master.page;
        let &Change {
            origin, entries, ..
        } = change;
        master.turn = Some(master.holders.with(me));
        for holder in master.holders.iter() {
            let message = MergeMessage::Changed {
                page,
                entries,
                origin,
            };
            send(sink, holder, message, Some(change.values.clone()));
        }
        if let Some(place) = self.find(page) {
            self.apply(place, origin, entries, &change.values, memory);
            if origin == me && self.copies[place].again {
                self.compare(place, memory, sink);
            }
        }
    }

    fn recall(
        &mut self,
        place: usize,
        memory: &mut impl Memory,
        sink: &mut impl Sink<MergeAction<W>>,
    ) {
        let master = &mut self.masters[place];
        let page = master.page;
        let holders = master.holders;
        master.ending = Ending::Recalling(holders);
        for change in std::mem::take(&mut master.queue) {
            self.take(page, change.origin, change.entries, &change.values, memory);
        }
        for holder in holders.iter() {
            send(sink, holder, MergeMessage::Recall { page }, None);
        }
    }

    fn demote(&mut self, place: usize, sink: &mut impl Sink<MergeAction<W>>) {
        let Master { page, holders, .. } = self.masters.swap_remove(place);
        if let Some(place) = self.find(page) {
            self.copies.swap_remove(place);
        }
        for holder in holders.iter() {
            send(sink, holder, MergeMessage::Demoted { page }, None);
        }
    }
}

impl<const W: usize> Master<W> {
    fn is_below(&self, page: PageIndex) -> bool {
        self.parent.is_some_and(|(parent, _)| parent == page)
    }
}
