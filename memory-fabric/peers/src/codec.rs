//! Messages as bytes: numbers are little-endian, tables of pages are packed.
//!
//! A message is its kind, which travels in the header of a frame, and its payload. The bytes of a
//! page are no part of the payload: they travel behind it as they are.

mod error;
mod fields;
mod kind;
mod merge;
#[cfg(test)]
mod tests;

use fabric_coherence::message::{Behind, Grant, PageAt};
use fabric_coherence::{Message, Number};
use fabric_homes::BLOCK_PAGES;
use fabric_pages::page::PageIndex;

use crate::message::{HomeMessage, PeerMessage};
pub use error::DecodeError;
use fields::{Reader, Writer};
pub use kind::Kind;
use merge::{decode_merge, encode_merge};

/// Pages of a block, as the length of a table.
const TABLE: usize = BLOCK_PAGES as usize;

/// Bytes of a block and a number before a table of pages.
const BEFORE_TABLE: usize = 12;

/// The longest payload: the states of all pages of a block, at 2 bits each.
pub const PAYLOAD_BYTES_MAX: usize = BEFORE_TABLE + TABLE / 4;

/// The values that a message may name.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Bounds {
    /// Pages of the guest's memory.
    pub pages: u32,
    /// Compute nodes of the VM.
    pub members: u8,
}

/// A message as bytes.
#[derive(Clone, Debug)]
pub struct Encoded {
    kind: Kind,
    length: usize,
    bytes: [u8; PAYLOAD_BYTES_MAX],
}

impl Encoded {
    /// The message's kind.
    #[must_use]
    pub const fn kind(&self) -> Kind {
        self.kind
    }

    /// The message without its kind.
    #[must_use]
    pub fn payload(&self) -> &[u8] {
        &self.bytes[..self.length]
    }
}

/// Encodes a message, without allocation.
///
/// # Panics
/// When a table of pages has another length than a block.
#[must_use]
pub fn encode(message: &PeerMessage) -> Encoded {
    let mut to = Writer::default();
    match message {
        PeerMessage::Coherence(message) => encode_coherence(message, &mut to),
        PeerMessage::Home(message) => encode_home(message, &mut to),
        PeerMessage::Merge(message) => encode_merge(message, &mut to),
    }
    let (bytes, length) = to.finish();
    Encoded {
        kind: Kind::of(message),
        length,
        bytes,
    }
}

fn encode_coherence(message: &Message, to: &mut Writer) {
    match *message {
        Message::Get { page, want, early } => to.page(page).want(want).flags([early, false]),
        Message::PutShared { page } => to.page(page),
        Message::Put { page, number, left } => to.page(page).number(number).left(left),
        Message::Taken { block, number } | Message::Split { block, number } => {
            to.block(block).number(number)
        }
        Message::Unblock {
            page,
            number,
            written,
        } => to.page(page).number(number).flags([written, false]),
        Message::SplitState {
            block,
            number,
            ref pages,
        } => {
            assert_eq!(pages.len(), TABLE, "page states of {block}");
            to.block(block).number(number).page_states(pages)
        }
        Message::Invalidate {
            page,
            number,
            requester,
        } => to.page(page).number(number).member(requester),
        Message::Fetch {
            page,
            number,
            requester,
            right,
        } => to.page(page).number(number).member(requester).right(right),
        Message::Grant(grant) => to
            .page(grant.page)
            .number(grant.number)
            .right(grant.right)
            .source(grant.source)
            .members(grant.acks)
            .byte(grant.hold),
        Message::PutDone { page, number } | Message::Ack { page, number } => {
            to.page(page).number(number)
        }
        Message::BlockGrant {
            block,
            number,
            ref behind,
        } => {
            assert!(matches!(behind.len(), 0 | TABLE), "pages of {block}");
            to.block(block).number(number).behind(behind)
        }
        Message::Data {
            page,
            number,
            dirty,
            written,
        } => to.page(page).number(number).flags([dirty, written]),
        Message::TokenWant => to,
        Message::TokenBack { number } | Message::TokenGrant { number } => to.number(number),
    };
}

fn encode_home(message: &HomeMessage, to: &mut Writer) {
    match *message {
        HomeMessage::Read { page } | HomeMessage::Bytes { page } => to.page(page),
        HomeMessage::Write { page, number } => to.page(page).number(number),
        HomeMessage::Written {
            page,
            number,
            refused,
        } => to.page(page).number(number).flags([refused, false]),
    };
}

/// Decodes a message; allocates only for the pages of a block.
///
/// # Errors
/// When a field is out of bounds, or the length is not that of the kind.
pub fn decode(kind: Kind, payload: &[u8], bounds: Bounds) -> Result<PeerMessage, DecodeError> {
    let mut from = Reader::new(payload, bounds);
    kind.check_length(payload.len())?;
    let from = &mut from;
    let message = match kind {
        Kind::Get => Message::Get {
            page: from.page()?,
            want: from.want()?,
            early: from.flag()?,
        },
        Kind::PutShared => Message::PutShared { page: from.page()? },
        Kind::Put => {
            let (page, number) = page_and_number(from)?;
            let left = from.left()?;
            Message::Put { page, number, left }
        }
        Kind::Taken => Message::Taken {
            block: from.block()?,
            number: from.number()?,
        },
        Kind::Split => Message::Split {
            block: from.block()?,
            number: from.number()?,
        },
        Kind::Unblock => {
            let (page, number) = page_and_number(from)?;
            Message::Unblock {
                page,
                number,
                written: from.flag()?,
            }
        }
        Kind::SplitState => Message::SplitState {
            block: from.block()?,
            number: from.number()?,
            pages: page_states(from)?,
        },
        Kind::Invalidate => {
            let (page, number) = page_and_number(from)?;
            Message::Invalidate {
                page,
                number,
                requester: from.member()?,
            }
        }
        Kind::Fetch => {
            let (page, number) = page_and_number(from)?;
            Message::Fetch {
                page,
                number,
                requester: from.member()?,
                right: from.right()?,
            }
        }
        Kind::Grant => {
            let (page, number) = page_and_number(from)?;
            Message::Grant(Grant {
                page,
                number,
                right: from.right()?,
                source: from.source()?,
                acks: from.members()?,
                hold: from.hold()?,
            })
        }
        Kind::PutDone => {
            let (page, number) = page_and_number(from)?;
            Message::PutDone { page, number }
        }
        Kind::Ack => {
            let (page, number) = page_and_number(from)?;
            Message::Ack { page, number }
        }
        Kind::BlockGrant => Message::BlockGrant {
            block: from.block()?,
            number: from.number()?,
            behind: behind(from),
        },
        Kind::Data => {
            let (page, number) = page_and_number(from)?;
            let [dirty, written] = from.flags()?;
            Message::Data {
                page,
                number,
                dirty,
                written,
            }
        }
        Kind::TokenWant => Message::TokenWant,
        Kind::TokenBack => Message::TokenBack {
            number: from.number()?,
        },
        Kind::TokenGrant => Message::TokenGrant {
            number: from.number()?,
        },
        Kind::HomeRead | Kind::HomeBytes | Kind::HomeWrite | Kind::HomeWritten => {
            return decode_home(kind, from).map(PeerMessage::Home);
        }
        Kind::MergeCopy
        | Kind::MergeChange
        | Kind::MergeChanged
        | Kind::MergeApplied
        | Kind::MergeSettled
        | Kind::MergeRecall
        | Kind::MergeRecalled
        | Kind::MergeDemoted => return decode_merge(kind, from).map(PeerMessage::Merge),
    };
    Ok(PeerMessage::Coherence(message))
}

fn decode_home(kind: Kind, from: &mut Reader<'_>) -> Result<HomeMessage, DecodeError> {
    let page = from.page()?;
    Ok(match kind {
        Kind::HomeRead => HomeMessage::Read { page },
        Kind::HomeBytes => HomeMessage::Bytes { page },
        Kind::HomeWrite => HomeMessage::Write {
            page,
            number: from.number()?,
        },
        _ => HomeMessage::Written {
            page,
            number: from.number()?,
            refused: from.flag()?,
        },
    })
}

fn page_and_number(from: &mut Reader<'_>) -> Result<(PageIndex, Number), DecodeError> {
    Ok((from.page()?, from.number()?))
}

/// The states of a block's pages: 4 in a byte, the first one in its lowest bits.
fn page_states(from: &mut Reader<'_>) -> Result<Box<[PageAt]>, DecodeError> {
    let packed = from.rest();
    let fields = packed
        .iter()
        .flat_map(|byte| (0..4).map(move |place| byte >> (2 * place) & 3));
    fields.map(fields::page_at).collect()
}

/// What is behind a block's pages: 8 in a byte, the first one in its lowest bit.
fn behind(from: &mut Reader<'_>) -> Box<[Behind]> {
    let packed = from.rest();
    let bits = packed
        .iter()
        .flat_map(|byte| (0..8).map(move |place| byte >> place & 1 == 1));
    bits.map(|at_home| match at_home {
        false => Behind::Zero,
        true => Behind::Home,
    })
    .collect()
}
