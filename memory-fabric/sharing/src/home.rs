//! The memory that this node lends as a home for pages.

use fabric_coherence::{Member, Number, Written};
use fabric_pages::page::{PageBytes, PageIndex};
use fabric_peers::{HomeMessage, PeerError, PeerMessage, Peers};

use crate::Failure;
use crate::away::{Away, defect};
use crate::engine::Engine;
use crate::frames::Frames;

/// The page has a place in the depot.
const HAS_PLACE: u8 = 1;
/// The page is in the queue of those that may leave.
const QUEUED: u8 = 1 << 1;

/// Where the bytes of a page are.
#[cfg_attr(test, derive(Clone))]
enum Place {
    Stored(Box<PageBytes>),
    /// In the page's frame: this node has a copy as well, which is as new.
    Frame,
    /// Nowhere: an owner has newer ones.
    Nowhere,
    /// In the depot. A frame of the page is a copy, or newer and written back before it is freed.
    Away,
}

#[cfg_attr(test, derive(Clone))]
struct Kept {
    number: Number,
    place: Place,
    /// The bytes that are stored are those of the write to the depot that is on its way.
    leaves: bool,
}

/// What this node keeps for the compute nodes of the VM. Takes no memory for a page until the page
/// is written back.
#[cfg_attr(test, derive(Clone))]
pub(crate) struct HomeStore {
    pages: Vec<Option<Kept>>,
    /// Pages with bytes of their own here.
    stored: usize,
    /// Flags of each page; empty without a depot.
    flags: Box<[u8]>,
    pub(crate) away: Away,
}

/// Where the bytes of a page are.
#[derive(Debug, Eq, PartialEq)]
pub(crate) enum Found<'a> {
    Here(&'a PageBytes),
    /// In the depot: it has to be [asked](Away::ask) for them.
    Away,
    /// Nobody wrote it back.
    Nowhere,
}

impl HomeStore {
    /// A store without a depot.
    pub(crate) fn new(pages: usize) -> Self {
        let pages = (0..pages).map(|_| None).collect();
        Self {
            pages,
            stored: 0,
            flags: Box::default(),
            away: Away::default(),
        }
    }

    /// The same with a depot, in which some pages have a place.
    pub(crate) fn with_places(mut self, has_place: impl Fn(PageIndex) -> bool) -> Self {
        let numbers = (0..).take(self.pages.len());
        let flag = |number| u8::from(has_place(PageIndex::new(number))) * HAS_PLACE;
        self.flags = numbers.map(flag).collect();
        self
    }

    /// Whether the page has a place in the depot.
    pub(crate) fn has_place(&self, page: PageIndex) -> bool {
        let flags = self.flags.get(page.index());
        flags.is_some_and(|flags| flags & HAS_PLACE != 0)
    }

    /// Pages with bytes here that are in no frame.
    pub(crate) const fn stored(&self) -> usize {
        self.stored
    }

    /// Finds the bytes of the page.
    pub(crate) fn read<'a>(&'a self, page: PageIndex, frames: &'a mut Frames) -> Found<'a> {
        let kept = self.pages.get(page.index()).and_then(Option::as_ref);
        match kept.map(|kept| &kept.place) {
            Some(Place::Stored(bytes)) => Found::Here(bytes),
            Some(Place::Frame) => Found::Here(frames.bytes(page)),
            Some(Place::Away) => Found::Away,
            Some(Place::Nowhere) | None => Found::Nowhere,
        }
    }

    /// Takes the bytes of a page, or notes that they are in its frame, unless there are bytes of a later
    /// grant. Returns whether it did, and a buffer that is free.
    fn write(
        &mut self,
        page: PageIndex,
        number: Number,
        bytes: Option<Box<PageBytes>>,
    ) -> (bool, Option<Box<PageBytes>>) {
        let Some(kept) = self.pages.get_mut(page.index()) else {
            return (false, bytes);
        };
        let later = kept
            .as_ref()
            .filter(|kept| !number.may_replace(kept.number));
        if later.is_some() {
            return (false, bytes);
        }
        let place = bytes.map_or(Place::Frame, Place::Stored);
        let is_stored = matches!(place, Place::Stored(_));
        let is_same = kept.as_ref().is_some_and(|kept| kept.leaves);
        let next = Kept {
            number,
            place,
            leaves: is_same && defect!(self.away, KeepLeaving),
        };
        let old = match kept.replace(next) {
            Some(Kept {
                place: Place::Stored(old),
                ..
            }) => {
                self.stored -= 1;
                Some(old)
            }
            _ => None,
        };
        if is_stored {
            self.now_stored(page);
        }
        (true, old)
    }

    /// The page has bytes of its own here.
    fn now_stored(&mut self, page: PageIndex) {
        self.stored += 1;
        if let Some(flags) = self.flags.get_mut(page.index())
            && *flags & (HAS_PLACE | QUEUED) == HAS_PLACE
        {
            *flags |= QUEUED;
            self.away.enqueue(page);
        }
    }

    fn kept(&mut self, page: PageIndex) -> Option<&mut Kept> {
        self.pages.get_mut(page.index())?.as_mut()
    }

    fn place(&mut self, page: PageIndex) -> Option<&mut Place> {
        self.kept(page).map(|kept| &mut kept.place)
    }

    /// The next page to write to the depot, with its bytes; the caller calls [`Away::writes_now`].
    pub(crate) fn next_to_leave(&mut self) -> Option<(PageIndex, &PageBytes)> {
        let Self {
            pages, flags, away, ..
        } = self;
        for _ in 0..away.queued() {
            let page = away.dequeue()?;
            let kept = pages.get_mut(page.index())?.as_mut();
            let is_stored = |kept: &&mut Kept| matches!(kept.place, Place::Stored(_));
            let Some(kept) = kept.filter(is_stored) else {
                flags[page.index()] &= !QUEUED;
                continue;
            };
            if away.is_busy(page) {
                if defect!(away, ForgetBusy) {
                    flags[page.index()] &= !QUEUED;
                } else {
                    away.enqueue(page);
                }
                continue;
            }
            kept.leaves = true;
            flags[page.index()] &= !QUEUED;
            // Looked up again: a loop cannot return what it has borrowed conditionally.
            return self.stored_bytes(page).map(|bytes| (page, bytes));
        }
        None
    }

    /// The page, which was [to leave](Self::next_to_leave), stays for now.
    pub(crate) fn stays(&mut self, page: PageIndex) {
        if let Some(kept) = self.kept(page) {
            kept.leaves = false;
        }
        if let Some(flags) = self.flags.get_mut(page.index()) {
            *flags |= QUEUED;
        }
        self.away.enqueue(page);
    }

    fn stored_bytes(&self, page: PageIndex) -> Option<&PageBytes> {
        match &self.pages.get(page.index())?.as_ref()?.place {
            Place::Stored(bytes) => Some(bytes),
            _ => None,
        }
    }

    /// A write to the depot has ended. Returns a buffer that is free, if the page is there now.
    pub(crate) fn left(&mut self, page: PageIndex) -> Option<Box<PageBytes>> {
        if !self.away.wrote(page) {
            return None;
        }
        let any_counts = defect!(self.away, AnyWrite);
        let kept = self.kept(page)?;
        if !std::mem::take(&mut kept.leaves) && !any_counts {
            return None;
        }
        match std::mem::replace(&mut kept.place, Place::Away) {
            Place::Stored(bytes) => {
                self.stored -= 1;
                Some(bytes)
            }
            other => {
                kept.place = other;
                None
            }
        }
    }

    /// The page got a frame, with bytes that are as new as those stored. Returns a buffer that is free.
    pub(crate) fn enters_frame(&mut self, page: PageIndex) -> Option<Box<PageBytes>> {
        let place = self.place(page)?;
        match std::mem::replace(place, Place::Frame) {
            Place::Stored(bytes) => {
                self.stored -= 1;
                Some(bytes)
            }
            Place::Frame => None,
            other @ (Place::Nowhere | Place::Away) => {
                *place = other;
                None
            }
        }
    }

    /// Whether the bytes are those of the page's frame.
    pub(crate) fn is_in_frame(&self, page: PageIndex) -> bool {
        let kept = self.pages.get(page.index()).and_then(Option::as_ref);
        kept.is_some_and(|kept| matches!(kept.place, Place::Frame))
    }

    /// The page's frame is freed: these are its bytes.
    pub(crate) fn leaves_frame(&mut self, page: PageIndex, bytes: Box<PageBytes>) {
        if let Some(kept) = self.kept(page)
            && matches!(kept.place, Place::Frame)
        {
            kept.place = Place::Stored(bytes);
            kept.leaves = false;
            self.now_stored(page);
        }
    }

    /// The page is zero from now on: nobody asks for its bytes, which are freed if they are here.
    pub(crate) fn discard(&mut self, page: PageIndex) {
        let Some(kept) = self.kept(page) else {
            return;
        };
        // A write of them to the depot may be on its way.
        kept.leaves = false;
        if matches!(kept.place, Place::Stored(_) | Place::Frame) {
            let old = std::mem::replace(&mut kept.place, Place::Nowhere);
            self.stored -= usize::from(matches!(old, Place::Stored(_)));
        }
    }

    /// The page's frame is freed, and another node has its only bytes, which are newer than any here.
    pub(crate) fn forget(&mut self, page: PageIndex) {
        if let Some(place @ Place::Frame) = self.place(page) {
            *place = Place::Nowhere;
        }
    }
}

impl<P: Peers> Engine<P> {
    pub(crate) fn home_message(
        &mut self,
        from: Member,
        message: HomeMessage,
        bytes: Option<Box<PageBytes>>,
    ) -> Result<(), Failure> {
        match (message, bytes) {
            (HomeMessage::Read { page }, _) => {
                let answer = PeerMessage::Home(HomeMessage::Bytes { page });
                let may_leave = self.may_leave(&answer)?;
                let bytes = match self.home.read(page, &mut self.frames) {
                    Found::Here(bytes) => bytes,
                    Found::Away => return self.ask_depot(page, from),
                    Found::Nowhere => return Err(Failure::NotStored { peer: from, page }),
                };
                if may_leave {
                    self.give_way.is_urgent = true;
                    self.peers.send(from, answer, Some(bytes));
                } else {
                    let place = Box::new(*bytes);
                    self.hold_back(from, answer, Some(place));
                }
                Ok(())
            }
            (HomeMessage::Write { page, number }, Some(bytes)) => {
                let refused = if self.directory.stores(from, page, number)? {
                    self.store(page, number, Some(bytes)) == Written::Refused
                } else {
                    self.spare_pages.push(bytes);
                    false
                };
                let answer = HomeMessage::Written {
                    page,
                    number,
                    refused,
                };
                self.answer_write(from, page, answer)?;
                self.one_more()
            }
            (HomeMessage::Bytes { page }, Some(bytes)) => {
                self.answered(from, page, false)?;
                self.home_bytes(page, bytes)
            }
            (HomeMessage::Written { page, refused, .. }, _) => {
                self.answered(from, page, true)?;
                let written = if refused {
                    Written::Refused
                } else {
                    Written::Home
                };
                self.written(page, written)
            }
            (HomeMessage::Write { page, .. } | HomeMessage::Bytes { page }, None) => {
                Err(Failure::Defect("a message came without its page", page))
            }
        }
    }

    /// Keeps bytes that were written back, those in the page's frame if there are none. If this node
    /// has the page, it got it after they were sent, so that the frame has the same or newer ones.
    pub(crate) fn store(
        &mut self,
        page: PageIndex,
        number: Number,
        mut bytes: Option<Box<PageBytes>>,
    ) -> Written {
        if self.frames.is_resident(page) {
            self.spare_pages.extend(bytes.take());
        }
        let (is_kept, free) = self.home.write(page, number, bytes);
        self.spare_pages.extend(free);
        if is_kept {
            Written::Home
        } else {
            Written::Refused
        }
    }

    /// A home answered; it must have been asked.
    fn answered(&mut self, from: Member, page: PageIndex, write: bool) -> Result<(), Failure> {
        if from == self.home_of(page) && self.home_waits.end(page, write) {
            return Ok(());
        }
        let peer = from;
        let reason = format!("it answers as the home of {page}, which was not asked");
        Err(PeerError::Broken { peer, reason }.into())
    }
}

#[cfg(test)]
mod model;

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use fabric_pages::guest_memory::GuestMemory;

    use super::*;

    const PAGE: PageIndex = PageIndex::new(3);

    fn number(value: u64) -> Number {
        Number::new(value).expect("a small number")
    }

    fn bytes(value: u8) -> Option<Box<PageBytes>> {
        Some(Box::new([value; 4096]))
    }

    fn frames() -> Frames {
        let memory = GuestMemory::new(2 << 20).expect("memory");
        Frames::new(Arc::new(memory)).expect("userfaultfd")
    }

    #[test]
    fn bytes_of_an_older_grant_are_refused() {
        let (mut home, mut frames) = (HomeStore::new(4), frames());
        assert_eq!(home.read(PAGE, &mut frames), Found::Nowhere);
        assert!(home.write(PAGE, number(5), bytes(5)).0);
        assert_eq!(home.write(PAGE, number(4), bytes(4)), (false, bytes(4)));
        let again = home.write(PAGE, number(5), bytes(6));
        assert_eq!(again, (true, bytes(5)), "one grant in order");
        assert_eq!(home.read(PAGE, &mut frames), Found::Here(&[6; 4096]));
        assert!(!home.write(PageIndex::new(4), number(9), bytes(0)).0);
        assert_eq!(home.stored(), 1);
    }

    #[test]
    fn a_page_with_a_frame_is_here_once() {
        let (mut home, mut frames) = (HomeStore::new(4), frames());
        assert!(home.write(PAGE, number(5), bytes(5)).0);
        frames.install(PAGE, &[5; 4096], false).expect("installed");
        assert_eq!(home.enters_frame(PAGE), bytes(5));
        assert_eq!((home.stored(), home.is_in_frame(PAGE)), (0, true));
        assert_eq!(home.read(PAGE, &mut frames), Found::Here(&[5; 4096]));
        home.leaves_frame(PAGE, Box::new([5; 4096]));
        frames.free(PAGE);
        assert_eq!(home.read(PAGE, &mut frames), Found::Here(&[5; 4096]));
        assert_eq!(home.stored(), 1);
    }

    #[test]
    fn what_another_node_changed_is_nowhere_until_it_is_written_back() {
        let (mut home, mut frames) = (HomeStore::new(4), frames());
        assert!(home.write(PAGE, number(5), None).0, "in its frame");
        home.forget(PAGE);
        assert_eq!(home.read(PAGE, &mut frames), Found::Nowhere);
        assert_eq!(home.enters_frame(PAGE), None, "newer bytes came");
        assert!(!home.is_in_frame(PAGE));
        assert!(!home.write(PAGE, number(4), bytes(4)).0, "still refused");
        assert!(home.write(PAGE, number(6), bytes(6)).0);
        assert_eq!(home.read(PAGE, &mut frames), Found::Here(&[6; 4096]));
    }
}
