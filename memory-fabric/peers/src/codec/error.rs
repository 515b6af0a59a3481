//! Why bytes are no message.

use fabric_coherence::message::HOLD_MAX;
use fabric_coherence::{BlockIndex, Number};
use fabric_pages::page::PageIndex;

use super::Kind;

/// Bytes that no correct peer sends.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum DecodeError {
    /// A kind that does not exist.
    #[error("there is no message of kind {0}")]
    Kind(u8),
    /// A payload of another length than the kind has.
    #[error("{kind:?} with {found} bytes, {expected} are expected")]
    Length {
        /// The message's kind.
        kind: Kind,
        /// Bytes of the payload.
        found: usize,
        /// Bytes that the kind has, without the table that it may have.
        expected: usize,
    },
    /// A page past the end of guest memory.
    #[error("{page} of a memory with {pages} pages")]
    Page {
        /// The page.
        page: PageIndex,
        /// Pages of the memory.
        pages: u32,
    },
    /// A block past the end of guest memory.
    #[error("{block} of a memory with {pages} pages")]
    Block {
        /// The block.
        block: BlockIndex,
        /// Pages of the memory.
        pages: u32,
    },
    /// The number of a transaction that cannot be.
    #[error("number {0}, {limit} is the limit", limit = Number::MAX.value())]
    Number(u64),
    /// A member that does not exist.
    #[error("member {found} of {members} members")]
    Member {
        /// The member's place.
        found: u8,
        /// Members of the VM.
        members: u8,
    },
    /// A set with members that do not exist.
    #[error("the set {found:#x} of {members} members")]
    Members {
        /// The bits of the set.
        found: u16,
        /// Members of the VM.
        members: u8,
    },
    /// A hold that is longer than the longest.
    #[error("hold {0}, {HOLD_MAX} is the limit")]
    Hold(u8),
    /// A field with a value that has no meaning.
    #[error("{field} {found:#x}, {limit:#x} is the greatest")]
    Value {
        /// The field.
        field: &'static str,
        /// Its value.
        found: u8,
        /// The greatest value of the field.
        limit: u8,
    },
}
