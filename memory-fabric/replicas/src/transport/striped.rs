//! Reads and writes of stripes: which pieces an operation waits for, and where they arrive.

use super::{Operation, ReplicatedTransport, Work, bit, offset_at, page_in, split};
use crate::copies::Has;
use crate::gather::{Gather, Trial};
use crate::member::Purpose;
use crate::placement::Place;
use crate::stripe::{Layout, PIECES_MAX};
use fabric_pages::page::{PAGE_SHIFT, PAGE_SIZE, PageBytes};
use fabric_transport::Full;

/// Reads whose pieces are kept after they are complete: those that are found to be wrong are most
/// likely among the last.
const RECENT_MAX: usize = 16;

/// The pieces of a read that is complete.
#[derive(Clone, Debug, Default)]
pub(super) struct Taken {
    pub gather: Gather,
    pub donors: [u8; PIECES_MAX],
    offset: u64,
    run: Option<u32>,
}

/// A read of a stripe.
#[derive(Clone, Debug, Default)]
pub(super) struct Read {
    pub gather: Gather,
    /// Of a reread, what was read first, if that is still known.
    pub first: Option<Taken>,
    /// Whether it asks for all pieces, to find those that are right.
    pub is_reread: bool,
    /// The pieces with which a reread was tried, a bit each.
    pub tried: u16,
    /// The pieces that are asked for and have not arrived, a bit each.
    asked: u16,
    /// The pieces that were asked for although they may have missed write-backs, a bit each.
    pub unsure: u16,
    /// For each piece that was asked for, the donor.
    pub donors: [u8; PIECES_MAX],
}

/// The stripes of a transport.
#[derive(Debug)]
pub(crate) struct Stripes {
    pub(super) layout: Layout,
    /// By operation. Their buffers are allocated at the first use of a number and kept; the numbers
    /// in use are as few as operations are outstanding.
    pub(super) reads: Vec<Read>,
    /// Number of outstanding rereads.
    pub(super) rereads: usize,
    pub(super) trial: Trial,
    /// The last reads that are complete, where pages are checked.
    recent: [Taken; RECENT_MAX],
    /// Which of them is replaced next.
    oldest: usize,
    /// The parity of the page that is written.
    parity: Box<[u8]>,
}

impl Stripes {
    pub fn new(layout: Layout) -> Self {
        Self {
            layout,
            reads: Vec::new(),
            rereads: 0,
            trial: Trial::new(layout),
            recent: Default::default(),
            oldest: 0,
            parity: vec![0; layout.parity() * layout.unit()].into(),
        }
    }

    /// Returns the number of pieces of data.
    pub fn split(&self) -> usize {
        self.layout.data()
    }

    /// Prepares the pieces of a page that is written.
    pub fn encode(&mut self, page: &PageBytes) {
        self.layout.encode(page, &mut self.parity);
    }

    /// Returns a piece of the page that was encoded last.
    pub fn piece<'a>(&'a self, page: &'a PageBytes, at: usize) -> &'a [u8] {
        let unit = self.layout.unit();
        match at.checked_sub(self.layout.data()) {
            None => &page[at * unit..][..unit],
            Some(row) => &self.parity[row * unit..][..unit],
        }
    }

    /// Begins the read of an operation.
    pub fn begin(&mut self, index: u32, is_reread: bool) {
        let index = index as usize;
        if self.reads.len() <= index {
            self.reads.resize_with(index + 1, Read::default);
        }
        let read = &mut self.reads[index];
        read.gather.clear();
        read.first = None;
        (read.asked, read.tried, read.unsure) = (0, 0, 0);
        read.is_reread = is_reread;
    }

    /// Keeps the pieces of a read that is complete. Buffers are exchanged, not copied.
    pub fn keep(&mut self, index: u32, offset: u64, run: Option<u32>) {
        let Some(read) = self.reads.get_mut(index as usize) else {
            return;
        };
        // What was read of them before may be an older version.
        for kept in &mut self.recent {
            if (kept.offset, kept.run) == (offset, run) {
                kept.gather.clear();
            }
        }
        let kept = &mut self.recent[self.oldest];
        self.oldest = (self.oldest + 1) % RECENT_MAX;
        std::mem::swap(&mut kept.gather, &mut read.gather);
        (kept.donors, kept.offset, kept.run) = (read.donors, offset, run);
    }

    /// Returns the pieces that were read of these pages last, if they are kept.
    pub(super) fn take_recent(&mut self, offset: u64, run: Option<u32>) -> Option<Taken> {
        let is_it = |kept: &&mut Taken| {
            kept.gather.arrived() != 0 && (kept.offset, kept.run) == (offset, run)
        };
        self.recent.iter_mut().find(is_it).map(std::mem::take)
    }

    /// Stops to wait for a donor; true when a read asks for too few pieces then.
    pub fn leave(&mut self, index: u32, donor: u8) -> bool {
        let needed = self.layout.data();
        let Some(read) = self.reads.get_mut(index as usize) else {
            return false;
        };
        let Some(at) = read.asked_of(donor) else {
            return false;
        };
        read.asked &= !(1 << at);
        read.pieces() < needed
    }

    /// Returns whether a read asks for too few pieces.
    pub fn is_short(&self, index: u32) -> bool {
        let read = self.reads.get(index as usize);
        read.is_some_and(|read| read.pieces() < self.layout.data())
    }

    /// Takes what a donor sent for a read. Returns the pages when there are enough pieces, unless it is
    /// a reread.
    pub fn arrived(&mut self, index: u32, donor: u8, bytes: &[u8]) -> Option<&[u8]> {
        let layout = self.layout;
        let read = self.reads.get_mut(index as usize)?;
        let at = read.asked_of(donor)?;
        read.asked &= !(1 << at);
        let is_enough = read.gather.take(layout, at, bytes);
        (is_enough && !read.is_reread).then(|| read.gather.pages(layout))
    }
}

impl Read {
    /// Returns the piece that a donor is asked for.
    fn asked_of(&self, donor: u8) -> Option<usize> {
        (0..PIECES_MAX).find(|&at| self.asked >> at & 1 == 1 && self.donors[at] == donor)
    }

    /// Returns whether pieces are asked for that may have missed write-backs: those of a single page that
    /// was tried with the others.
    pub fn asks_unsure(&self, run: Option<u32>) -> bool {
        self.is_reread && run.is_none() && self.tried != 0
    }

    /// Returns how many pieces are there or asked for.
    pub fn pieces(&self) -> usize {
        (self.asked | self.gather.arrived()).count_ones() as usize
    }
}

impl ReplicatedTransport {
    /// Asks for as many pieces of a read as it needs; for those that are left when it has asked for so
    /// many already, or is a reread.
    ///
    /// # Errors
    ///
    /// When too few can be asked for now. At the first time nothing was asked for then.
    pub(super) fn post_to_pieces(&mut self, index: u32) -> Result<(), Full> {
        let Operation { offset, work, .. } = *self.operation(index);
        let (Work::Read { run }, Some(stripes)) = (work, &mut self.stripes) else {
            unreachable!("only reads of stripes ask for pieces");
        };
        let layout = stripes.layout;
        let read = &mut stripes.reads[index as usize];
        let (block, in_block) = split(offset);
        let missing = layout.data().saturating_sub(read.pieces());
        let wanted = match missing {
            _ if read.is_reread => layout.pieces(),
            0 => layout.parity(),
            missing => missing,
        };
        let mut found: [Option<(usize, Place, Has)>; PIECES_MAX] = [None; PIECES_MAX];
        let mut count = 0;
        let copies = self.set.copies();
        let (first, pages) = (page_in(in_block), run.unwrap_or(1));
        // Those that lack a page come last. Those that may have missed it are asked only then.
        let passes = match copies.has_gap(block, first, pages) {
            true => &[Has::All, Has::Perhaps, Has::NotAll][..],
            false if read.asks_unsure(run) => &[Has::All, Has::Perhaps],
            false => &[Has::All],
        };
        for (pass, at) in passes
            .iter()
            .flat_map(|pass| (0..layout.pieces()).map(move |at| (*pass, at)))
        {
            if count == wanted || (read.asked | read.gather.arrived()) >> at & 1 == 1 {
                continue;
            }
            let Some((place, has)) = copies.source_at(block, at, first, pages) else {
                continue;
            };
            let member = &self.members[usize::from(place.donor)];
            if has == pass && !member.out && member.has_room() {
                found[count] = Some((at, place, has));
                count += 1;
            }
        }
        let is_first = read.pieces() == 0;
        if count == 0 || (is_first && count < missing) {
            return Err(Full);
        }
        let bytes = run.unwrap_or(1) as usize * layout.unit();
        let mut waits_for = 0;
        for (at, place, has) in found.into_iter().flatten() {
            let member = &mut self.members[usize::from(place.donor)];
            let offset = offset_at(place, in_block, layout.data());
            let posted = member.read_pieces(Purpose::Operation(index), offset, bytes);
            posted.expect("room was seen");
            read.asked |= 1 << at;
            read.donors[at] = place.donor;
            read.unsure |= u16::from(has == Has::Perhaps) << at;
            waits_for |= bit(place.donor);
        }
        let is_short = read.pieces() < layout.data();
        self.operation(index).waits_for |= waits_for;
        if is_short { Err(Full) } else { Ok(()) }
    }
}

/// Returns the offset, in a place, of the pages of a donor that hold nothing but pieces of these pages
/// of a block, and how many they are; `None` without one.
pub(super) fn whole_pages(in_block: u64, pages: u32, split: usize) -> Option<(u64, u32)> {
    let split = split as u64;
    let first = in_block >> PAGE_SHIFT;
    let end = (first + u64::from(pages)) / split;
    let first = first.div_ceil(split);
    let count = u32::try_from(end.checked_sub(first)?).expect("as many as 32 bits");
    (count > 0).then_some((first * PAGE_SIZE as u64, count))
}
