//! Merged tables: page tables of the guest's kernel that several nodes can write at once, because
//! their processors' page walks count as writes (`docs/coherence.md`, "Merged page tables").
//!
//! For the directory a merged page belongs to its home alone, which lends copies to others. Nobody
//! sees stores into a copy until it is compared with its *twin*, the entries as the home has ordered
//! them so far. A node calls [`Merge::fence`] before a message leaves on which others can act, and
//! sends that message when [`Merge::is_settled`].

mod home;
pub mod message;
#[cfg(test)]
mod model;
pub mod tables;

use fabric_pages::page::PageIndex;

use crate::action::Sink;
use crate::members::{Member, MemberSet};
use crate::mutation::{Switch, mutated};
use crate::offence::{Offence, Violation};
use home::Master;
pub use message::{ENTRIES, Entries, MergeMessage};

/// The values of a table's entries.
pub type Values<const W: usize = ENTRIES> = Box<[u64; W]>;

/// The bytes of tables on this node, which its vCPUs may change at any time.
pub trait Memory {
    /// Reads an entry.
    fn load(&self, page: PageIndex, entry: usize) -> u64;

    /// Replaces the value of an entry, unless it is another one than `old`.
    fn replace(&mut self, page: PageIndex, entry: usize, old: u64, new: u64);
}

/// What a node has to do, in this order.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub enum MergeAction<const W: usize = ENTRIES> {
    /// Send a message to another node, with these values beside it.
    Send {
        /// To whom.
        to: Member,
        /// The message.
        message: MergeMessage,
        /// The values.
        values: Option<Values<W>>,
    },
    /// Fill the page with these bytes and map it writable: this answers the request for it.
    Install {
        /// The page.
        page: PageIndex,
        /// The bytes.
        values: Values<W>,
    },
    /// Unmap the page, then call [`Merge::zapped`].
    Zap(PageIndex),
    /// Free the page, which is unmapped.
    Free(PageIndex),
}

/// What becomes of a request for a page of which this node is the home.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Join {
    /// The page is not merged: its directory serves the request.
    Ordinary,
    /// The requester gets a copy.
    Joined,
    /// To be asked again when a message about merged tables has come.
    Later,
}

/// How far a copy has been given up.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
enum Leaving {
    No,
    /// Merged tables that this node is the home of and that are linked in it are given up first.
    Asked,
    /// It is being unmapped.
    Zapping,
    /// The home has been sent the last changes.
    Gone,
}

/// A merged table that this node has.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
struct Copy<const W: usize> {
    page: PageIndex,
    level: u8,
    home: Member,
    /// The entries as the home has ordered them, with those that are on their way to it.
    twin: Values<W>,
    /// Entries on their way to the home.
    flying: Option<Entries>,
    /// To be compared again when these have come back.
    again: bool,
    /// Changes that not all holders have made, as far as this node knows.
    unsettled: u32,
    /// The home waits for [`MergeMessage::Applied`].
    owes: bool,
    leaving: Leaving,
}

impl<const W: usize> Copy<W> {
    fn is_settled(&self) -> bool {
        self.flying.is_none() && !self.again && self.unsettled == 0 && self.leaving == Leaving::No
    }
}

/// The merged tables of a node.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub struct Merge<const W: usize = ENTRIES> {
    me: Member,
    copies: Vec<Copy<W>>,
    masters: Vec<Master<W>>,
    /// Most tables of which this node is the home.
    limit: usize,
    pub(crate) switch: Switch,
}

fn wrong(page: PageIndex, peer: Member) -> Offence {
    Violation::Merged(page).of(peer)
}

impl<const W: usize> Merge<W> {
    /// No merged tables, on node `me`, which may be the home of `limit`.
    #[must_use]
    pub const fn new(me: Member, limit: usize) -> Self {
        Self {
            me,
            copies: Vec::new(),
            masters: Vec::new(),
            limit,
            switch: NO_SWITCH,
        }
    }

    /// Whether this node has no merged table.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.copies.is_empty()
    }

    /// Merged tables on this node.
    #[must_use]
    pub fn len(&self) -> usize {
        self.copies.len()
    }

    /// Whether this node has a merged copy of a page, and its vCPUs may write it.
    #[must_use]
    pub fn has(&self, page: PageIndex) -> bool {
        let copy = self.copies.iter().find(|copy| copy.page == page);
        copy.is_some_and(|copy| matches!(copy.leaving, Leaving::No | Leaving::Asked))
    }

    /// The level of the table at `page` and the entry that points to it, if a merged table of the
    /// kernel links it.
    #[must_use]
    pub fn linked(&self, page: PageIndex, memory: &impl Memory) -> Option<(u8, PageIndex, usize)> {
        let copies = self.copies.iter();
        let mut parents =
            copies.filter(|copy| copy.leaving == Leaving::No && !self.is_leaving(copy.page));
        parents.find_map(|copy| {
            let mut entries = tables::linking(copy.level).take_while(|entry| *entry < W);
            let links = |entry: &usize| {
                tables::table(copy.twin[*entry]) == Some(page)
                    && tables::table(memory.load(copy.page, *entry)) == Some(page)
            };
            let entry = entries.find(links)?;
            Some((copy.level - 1, copy.page, entry))
        })
    }

    /// Compares all copies with their twins: what was stored before this call is on its way. The
    /// fence ends when [`Self::is_settled`].
    pub fn fence(&mut self, memory: &impl Memory, sink: &mut impl Sink<MergeAction<W>>) {
        for place in 0..self.copies.len() {
            self.compare(place, memory, sink);
        }
    }

    /// Whether all holders have made all changes that this node has made or seen.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        self.copies.iter().all(Copy::is_settled) || mutated!(self, NoSettling)
    }

    fn compare(
        &mut self,
        place: usize,
        memory: &impl Memory,
        sink: &mut impl Sink<MergeAction<W>>,
    ) {
        let copy = &mut self.copies[place];
        if matches!(copy.leaving, Leaving::Zapping | Leaving::Gone) {
            return;
        }
        if copy.flying.is_some() {
            copy.again = true;
            return;
        }
        copy.again = false;
        let (page, home) = (copy.page, copy.home);
        let Some(entries) = changes(copy, memory) else {
            return;
        };
        copy.flying = Some(entries);
        let values = copy.twin.clone();
        if home == self.me {
            self.queue_change(page, home, entries, values);
            return;
        }
        let message = MergeMessage::Change { page, entries };
        send(sink, home, message, Some(values));
    }

    /// Handles a message. The bytes beside it are `values`.
    ///
    /// # Errors
    /// When the sender broke the protocol.
    pub fn handle(
        &mut self,
        from: Member,
        message: MergeMessage,
        values: Option<Values<W>>,
        memory: &mut impl Memory,
        sink: &mut impl Sink<MergeAction<W>>,
    ) -> Result<(), Offence> {
        let page = message.page();
        let offence = wrong(page, from);
        let values = || values.ok_or(offence);
        match message {
            MergeMessage::Copy { level, .. } => {
                if self.find(page).is_some() || level == 0 || level > tables::ROOT {
                    return Err(offence);
                }
                let values = values()?;
                self.add(page, level, from, values.clone());
                sink.push(MergeAction::Install { page, values });
            }
            MergeMessage::Changed {
                entries, origin, ..
            } => {
                let place = self.copy_of(page, from)?;
                let copy = &self.copies[place];
                let is_back = origin != self.me || copy.flying == Some(entries);
                if copy.owes || !is_back || matches!(copy.leaving, Leaving::Gone) {
                    return Err(offence);
                }
                self.apply(place, origin, entries, &*values()?, memory);
                if origin == self.me && self.copies[place].again {
                    self.compare(place, memory, sink);
                }
            }
            MergeMessage::Settled { .. } => {
                let place = self.copy_of(page, from)?;
                let copy = &mut self.copies[place];
                copy.unsettled = copy.unsettled.checked_sub(1).ok_or(offence)?;
            }
            MergeMessage::Recall { .. } => {
                let place = self.copy_of(page, from)?;
                let copy = &mut self.copies[place];
                if copy.leaving != Leaving::No || copy.owes {
                    return Err(offence);
                }
                copy.leaving = Leaving::Asked;
            }
            MergeMessage::Demoted { .. } => {
                let place = self.copy_of(page, from)?;
                if self.copies[place].leaving != Leaving::Gone {
                    return Err(offence);
                }
                self.copies.swap_remove(place);
            }
            MergeMessage::Change { entries, .. } => {
                self.change(from, page, entries, values()?, memory)?;
            }
            MergeMessage::Applied { .. } => self.applied(from, page, sink)?,
            MergeMessage::Recalled { entries, .. } => {
                self.recalled(from, page, entries, &*values()?, memory)?;
            }
        }
        self.advance(memory, sink);
        Ok(())
    }

    /// [`MergeAction::Zap`] is done: no vCPU can change the copy any longer.
    pub fn zapped(
        &mut self,
        page: PageIndex,
        memory: &impl Memory,
        sink: &mut impl Sink<MergeAction<W>>,
    ) {
        let Some(place) = self.find(page) else {
            return;
        };
        let copy = &mut self.copies[place];
        if copy.leaving != Leaving::Zapping {
            return;
        }
        copy.leaving = Leaving::Gone;
        let home = copy.home;
        let mut entries = changes(copy, memory).unwrap_or_default();
        if mutated!(self, ForgetLastChanges) {
            entries = Entries::default();
        }
        let values = self.copies[place].twin.clone();
        sink.push(MergeAction::Free(page));
        let message = MergeMessage::Recalled { page, entries };
        send(sink, home, message, Some(values));
    }

    /// Makes a change that the home has ordered.
    fn apply(
        &mut self,
        place: usize,
        origin: Member,
        entries: Entries,
        values: &[u64; W],
        memory: &mut impl Memory,
    ) {
        let copy = &mut self.copies[place];
        let page = copy.page;
        let is_mine = origin == self.me;
        for entry in entries.iter().filter(|entry| *entry < W) {
            let new = values[entry];
            let old = std::mem::replace(&mut copy.twin[entry], new);
            let is_flying = copy.flying.is_some_and(|flying| flying.contains(entry));
            // What a vCPU of this node stored is newer, or comes back later in the home's order.
            if !is_mine && !is_flying {
                memory.replace(page, entry, old, new);
            }
        }
        if is_mine {
            copy.flying = None;
        }
        copy.unsettled += 1;
        copy.owes = true;
        for entry in entries.iter().take_while(|entry| *entry < W) {
            self.unlinked(page, entry);
        }
    }

    /// Sends what waited for other tables, and begins what can begin.
    fn advance(&mut self, memory: &mut impl Memory, sink: &mut impl Sink<MergeAction<W>>) {
        while self.advance_copies(sink) || self.advance_masters(memory, sink) {}
    }

    fn advance_copies(&mut self, sink: &mut impl Sink<MergeAction<W>>) -> bool {
        let mut moved = false;
        for place in 0..self.copies.len() {
            let Copy {
                page,
                home,
                owes,
                leaving,
                ..
            } = self.copies[place];
            if owes && !self.is_unlinking(page) {
                self.copies[place].owes = false;
                moved = true;
                if home == self.me {
                    self.applied_here(page, sink);
                } else {
                    send(sink, home, MergeMessage::Applied { page }, None);
                }
            }
            if leaving == Leaving::Asked && !self.gives_up_below(page) {
                self.copies[place].leaving = Leaving::Zapping;
                sink.push(MergeAction::Zap(page));
                moved = true;
            }
        }
        moved
    }

    fn add(&mut self, page: PageIndex, level: u8, home: Member, twin: Values<W>) {
        self.copies.push(Copy {
            page,
            level,
            home,
            twin,
            flying: None,
            again: false,
            unsettled: 0,
            owes: false,
            leaving: Leaving::No,
        });
    }

    fn find(&self, page: PageIndex) -> Option<usize> {
        self.copies.iter().position(|copy| copy.page == page)
    }

    /// The copy that was lent by `home`.
    fn copy_of(&self, page: PageIndex, home: Member) -> Result<usize, Offence> {
        let place = self.find(page);
        let place = place.filter(|place| self.copies[*place].home == home && home != self.me);
        place.ok_or(wrong(page, home))
    }

    /// Who keeps this node waiting, and for which table.
    #[must_use]
    pub fn missing(&self) -> Option<(PageIndex, Member)> {
        let waits = |master: &Master<W>| Some((master.page, master.missing(self.me)?));
        let at_home = self.masters.iter().find_map(waits);
        let mut copies = self.copies.iter();
        let open = copies.find(|copy| !copy.is_settled() && copy.home != self.me);
        at_home.or_else(|| open.map(|copy| (copy.page, copy.home)))
    }

    /// Nodes that have a copy of a table of which this node is the home.
    #[must_use]
    pub fn holders(&self, page: PageIndex) -> MemberSet {
        let master = self.masters.iter().find(|master| master.page == page);
        master.map_or(MemberSet::EMPTY, |master| master.holders)
    }
}

/// The entries that a vCPU changed; the twin takes them.
fn changes<const W: usize>(copy: &mut Copy<W>, memory: &impl Memory) -> Option<Entries> {
    let mut entries = Entries::default();
    for entry in 0..W {
        let value = memory.load(copy.page, entry);
        if value != copy.twin[entry] {
            copy.twin[entry] = value;
            entries.add(entry);
        }
    }
    Some(entries).filter(|entries| !entries.is_empty())
}

fn send<const W: usize>(
    sink: &mut impl Sink<MergeAction<W>>,
    to: Member,
    message: MergeMessage,
    values: Option<Values<W>>,
) {
    sink.push(MergeAction::Send {
        to,
        message,
        values,
    });
}

#[cfg(test)]
const NO_SWITCH: Switch = None;
#[cfg(not(test))]
const NO_SWITCH: Switch = ();
