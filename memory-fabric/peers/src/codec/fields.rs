//! The fields of messages, with every value checked.

use fabric_coherence::merge::{ENTRIES, Entries, tables};
use fabric_coherence::message::{Behind, HOLD_MAX, Left, PageAt, Right, Source, Want};
use fabric_coherence::{BlockIndex, Member, MemberSet, Number};
use fabric_homes::BLOCK_PAGES;
use fabric_pages::page::PageIndex;

use super::{Bounds, DecodeError, PAYLOAD_BYTES_MAX};

/// A source that is a member: the member's place is added.
const SOURCE_MEMBER: u8 = 0x10;

/// Appends fields to a payload.
#[derive(Debug)]
pub(super) struct Writer {
    bytes: [u8; PAYLOAD_BYTES_MAX],
    length: usize,
}

impl Default for Writer {
    fn default() -> Self {
        Self {
            bytes: [0; PAYLOAD_BYTES_MAX],
            length: 0,
        }
    }
}

impl Writer {
    pub(super) fn finish(self) -> ([u8; PAYLOAD_BYTES_MAX], usize) {
        (self.bytes, self.length)
    }

    fn bytes(&mut self, bytes: &[u8]) -> &mut Self {
        self.bytes[self.length..][..bytes.len()].copy_from_slice(bytes);
        self.length += bytes.len();
        self
    }

    pub(super) fn byte(&mut self, byte: u8) -> &mut Self {
        self.bytes(&[byte])
    }

    pub(super) fn page(&mut self, page: PageIndex) -> &mut Self {
        self.bytes(&page.number().to_le_bytes())
    }

    pub(super) fn block(&mut self, block: BlockIndex) -> &mut Self {
        self.bytes(&block.0.to_le_bytes())
    }

    pub(super) fn number(&mut self, number: Number) -> &mut Self {
        self.bytes(&number.value().to_le_bytes())
    }

    pub(super) fn member(&mut self, member: Member) -> &mut Self {
        self.byte(member.place())
    }

    pub(super) fn members(&mut self, members: MemberSet) -> &mut Self {
        self.bytes(&members.bits().to_le_bytes())
    }

    /// A bit for each entry of a table, the first one in the lowest bit.
    pub(super) fn entries(&mut self, entries: Entries) -> &mut Self {
        for word in entries.0 {
            self.bytes(&word.to_le_bytes());
        }
        self
    }

    /// Up to two flags in a byte, the first one in its lowest bit.
    pub(super) fn flags(&mut self, [first, second]: [bool; 2]) -> &mut Self {
        self.byte(u8::from(first) | u8::from(second) << 1)
    }

    pub(super) fn want(&mut self, want: Want) -> &mut Self {
        self.byte(match want {
            Want::Read => 0,
            Want::Write => 1,
            Want::Upgrade => 2,
        })
    }

    pub(super) fn left(&mut self, left: Left) -> &mut Self {
        self.byte(match left {
            Left::Unchanged => 0,
            Left::Zero => 1,
            Left::Home => 2,
        })
    }

    pub(super) fn right(&mut self, right: Right) -> &mut Self {
        self.byte(match right {
            Right::Shared => 0,
            Right::Exclusive => 1,
        })
    }

    pub(super) fn source(&mut self, source: Source) -> &mut Self {
        self.byte(match source {
            Source::Zero => 0,
            Source::Home => 1,
            Source::Own => 2,
            Source::Member(member) => SOURCE_MEMBER + member.place(),
        })
    }

    pub(super) fn page_states(&mut self, pages: &[PageAt]) -> &mut Self {
        for four in pages.chunks(4) {
            let states = four.iter().rev().map(|page| match page {
                PageAt::Zero => 0,
                PageAt::Home => 1,
                PageAt::Owner => 2,
            });
            self.byte(states.fold(0, |byte, state| byte << 2 | state));
        }
        self
    }

    pub(super) fn behind(&mut self, pages: &[Behind]) -> &mut Self {
        for eight in pages.chunks(8) {
            let bits = eight.iter().rev().map(|page| match page {
                Behind::Zero => 0,
                Behind::Home => 1,
            });
            self.byte(bits.fold(0, |byte, bit| byte << 1 | bit));
        }
        self
    }
}

/// Takes fields from a payload whose length fits its kind.
#[derive(Debug)]
pub(super) struct Reader<'a> {
    left: &'a [u8],
    bounds: Bounds,
}

impl<'a> Reader<'a> {
    pub(super) fn new(payload: &'a [u8], bounds: Bounds) -> Self {
        Self {
            left: payload,
            bounds,
        }
    }

    fn take<const BYTES: usize>(&mut self) -> [u8; BYTES] {
        let (bytes, left) = self
            .left
            .split_first_chunk()
            .expect("the length was checked");
        self.left = left;
        *bytes
    }

    /// A byte up to a limit.
    fn byte(&mut self, field: &'static str, limit: u8) -> Result<u8, DecodeError> {
        let [found] = self.take();
        if found <= limit {
            return Ok(found);
        }
        Err(DecodeError::Value {
            field,
            found,
            limit,
        })
    }

    /// All that is left.
    pub(super) fn rest(&mut self) -> &'a [u8] {
        std::mem::take(&mut self.left)
    }

    pub(super) fn page(&mut self) -> Result<PageIndex, DecodeError> {
        let page = PageIndex::new(u32::from_le_bytes(self.take()));
        let pages = self.bounds.pages;
        if page.number() < pages {
            return Ok(page);
        }
        Err(DecodeError::Page { page, pages })
    }

    pub(super) fn block(&mut self) -> Result<BlockIndex, DecodeError> {
        let block = BlockIndex(u32::from_le_bytes(self.take()));
        let pages = self.bounds.pages;
        if block.0 < pages.div_ceil(BLOCK_PAGES) {
            return Ok(block);
        }
        Err(DecodeError::Block { block, pages })
    }

    pub(super) fn number(&mut self) -> Result<Number, DecodeError> {
        let value = u64::from_le_bytes(self.take());
        Number::new(value).ok_or(DecodeError::Number(value))
    }

    fn member_at(&self, found: u8) -> Result<Member, DecodeError> {
        let members = self.bounds.members;
        let member = Member::at(found).filter(|_| found < members);
        member.ok_or(DecodeError::Member { found, members })
    }

    pub(super) fn member(&mut self) -> Result<Member, DecodeError> {
        let [found] = self.take();
        self.member_at(found)
    }

    pub(super) fn members(&mut self) -> Result<MemberSet, DecodeError> {
        let found = u16::from_le_bytes(self.take());
        let members = self.bounds.members;
        if u32::from(found) >> members == 0 {
            return Ok(MemberSet::from_bits(found));
        }
        Err(DecodeError::Members { found, members })
    }

    pub(super) fn flag(&mut self) -> Result<bool, DecodeError> {
        Ok(self.byte("flag", 1)? == 1)
    }

    pub(super) fn flags(&mut self) -> Result<[bool; 2], DecodeError> {
        let flags = self.byte("flags", 3)?;
        Ok([flags & 1 != 0, flags & 2 != 0])
    }

    pub(super) fn want(&mut self) -> Result<Want, DecodeError> {
        Ok(match self.byte("want", 2)? {
            0 => Want::Read,
            1 => Want::Write,
            _ => Want::Upgrade,
        })
    }

    pub(super) fn left(&mut self) -> Result<Left, DecodeError> {
        Ok(match self.byte("left", 2)? {
            0 => Left::Unchanged,
            1 => Left::Zero,
            _ => Left::Home,
        })
    }

    pub(super) fn right(&mut self) -> Result<Right, DecodeError> {
        Ok(match self.byte("right", 1)? {
            0 => Right::Shared,
            _ => Right::Exclusive,
        })
    }

    pub(super) fn source(&mut self) -> Result<Source, DecodeError> {
        let [found] = self.take();
        match found {
            0 => Ok(Source::Zero),
            1 => Ok(Source::Home),
            2 => Ok(Source::Own),
            SOURCE_MEMBER.. => self.member_at(found - SOURCE_MEMBER).map(Source::Member),
            _ => Err(DecodeError::Value {
                field: "source",
                found,
                limit: 2,
            }),
        }
    }

    pub(super) fn entries(&mut self) -> Entries {
        let mut words = [0; ENTRIES / 64];
        for word in &mut words {
            *word = u64::from_le_bytes(self.take());
        }
        Entries(words)
    }

    pub(super) fn level(&mut self) -> Result<u8, DecodeError> {
        self.byte("level", tables::ROOT)
    }

    pub(super) fn hold(&mut self) -> Result<u8, DecodeError> {
        let [found] = self.take();
        if found <= HOLD_MAX {
            return Ok(found);
        }
        Err(DecodeError::Hold(found))
    }
}

/// The state of a page of a block, from its two bits.
pub(super) fn page_at(found: u8) -> Result<PageAt, DecodeError> {
    match found {
        0 => Ok(PageAt::Zero),
        1 => Ok(PageAt::Home),
        2 => Ok(PageAt::Owner),
        _ => Err(DecodeError::Value {
            field: "page state",
            found,
            limit: 2,
        }),
    }
}
