//! What was queued for a peer and is not confirmed by it yet.

use std::collections::VecDeque;

use fabric_pages::page::PageBytes;

use super::frame::{FrameHeader, HEADER_BYTES, RESUME_BYTES, Sequences};
use crate::codec::{Kind, encode};
use crate::message::{PeerLane, PeerMessage};

/// The longest payload that is kept in its queue; only tables of blocks are longer.
const SMALL_BYTES: usize = 32;

/// Bytes of a header with a payload of at most [`SMALL_BYTES`].
pub(super) const HEAD_BYTES: usize = HEADER_BYTES + SMALL_BYTES;

const _: () = assert!(RESUME_BYTES <= SMALL_BYTES);

/// Most messages to a peer that are not confirmed, on the lanes without pages.
///
/// Requests and the answers to them are bounded by [`fabric_coherence::cache::PENDING_MAX`] and
/// [`fabric_coherence::directory::OPEN_MAX`] per node. Dropped shared copies are not answered, so
/// that a node can report one for each page that it has while a peer cannot be reached.
pub const UNCONFIRMED_MAX: usize = 1 << 18;

/// Most pages to a peer that are not confirmed, on the lane of data: 8 times what the peer may have
/// requested, because requests go through a third node, and what arrived is confirmed with a delay.
pub const UNCONFIRMED_PAGES_MAX: usize = 1024;

/// Most messages from and to homes that are not confirmed: requests and answers.
pub const UNCONFIRMED_HOME_MAX: usize = 2048;

/// More is outstanding on a lane than the protocol allows.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[error("{limit} messages of lane {lane:?} wait for its confirmation, which is the limit")]
pub(super) struct Overflow {
    lane: PeerLane,
    limit: usize,
}

/// A message until it is confirmed.
#[derive(Debug)]
struct Queued {
    kind: Kind,
    length: u8,
    small: [u8; SMALL_BYTES],
    /// A payload that is too long for `small`.
    large: Option<Box<[u8]>>,
    page: Option<Box<PageBytes>>,
}

/// The messages of one lane. The first `sent` of them are written to the present connection.
#[derive(Debug, Default)]
struct LaneQueue {
    messages: VecDeque<Queued>,
    /// The sequence number of the first one.
    first: u64,
    sent: usize,
    /// The sequence number after the last one that was written to any connection.
    written: u64,
}

impl LaneQueue {
    fn next(&self) -> u64 {
        self.first + self.sent as u64
    }
}

/// A frame that is being written: its head, and where the rest of it is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Head {
    pub(super) bytes: [u8; HEAD_BYTES],
    pub(super) length: usize,
    /// Its lane and its place there; `None` for frames that are no messages.
    pub(super) place: Option<(usize, u64)>,
}

/// Messages to one peer.
#[derive(Debug)]
pub(super) struct Outbox {
    epoch: u32,
    lanes: [LaneQueue; PeerLane::COUNT],
    /// Pages that are used again.
    spare: Vec<Box<PageBytes>>,
}

fn limit(lane: PeerLane) -> usize {
    match lane {
        PeerLane::Responses | PeerLane::Requests => UNCONFIRMED_MAX,
        PeerLane::Data => UNCONFIRMED_PAGES_MAX,
        PeerLane::Bulk => UNCONFIRMED_HOME_MAX,
    }
}

impl Outbox {
    pub(super) fn new(epoch: u32) -> Self {
        Self {
            epoch,
            lanes: Default::default(),
            spare: Vec::new(),
        }
    }

    /// Appends a message. Allocates only while a queue is longer than it ever was, and for tables of
    /// blocks.
    pub(super) fn push(
        &mut self,
        message: &PeerMessage,
        page: Option<&PageBytes>,
    ) -> Result<(), Overflow> {
        let encoded = encode(message);
        let (kind, payload) = (encoded.kind(), encoded.payload());
        assert_eq!(kind.has_page(), page.is_some(), "the page of a {kind:?}");
        let lane = kind.lane();
        let queue = &mut self.lanes[usize::from(lane)];
        let limit = limit(lane);
        if queue.messages.len() >= limit {
            return Err(Overflow { lane, limit });
        }
        let page = page.map(|bytes| {
            let mut place = self.spare.pop().unwrap_or_else(|| Box::new([0; _]));
            place.copy_from_slice(bytes);
            place
        });
        let mut small = [0; SMALL_BYTES];
        let large = match small.get_mut(..payload.len()) {
            Some(place) => {
                place.copy_from_slice(payload);
                None
            }
            None => Some(payload.into()),
        };
        queue.messages.push_back(Queued {
            kind,
            length: u8::try_from(payload.len()).expect("payloads have at most 140 bytes"),
            small,
            large,
            page,
        });
        Ok(())
    }

    /// Whether nothing waits for a confirmation.
    pub(super) fn is_empty(&self) -> bool {
        self.lanes.iter().all(|lane| lane.messages.is_empty())
    }

    /// Whether something is not written to the present connection.
    pub(super) fn has_unsent(&self) -> bool {
        let mut lanes = self.lanes.iter();
        lanes.any(|lane| lane.sent < lane.messages.len())
    }

    /// The places of what is to be sent next, in the order of the lanes.
    pub(super) fn unsent(&self) -> impl Iterator<Item = (usize, u64)> + '_ {
        let lanes = self.lanes.iter().enumerate();
        lanes.flat_map(|(lane, queue)| {
            let end = queue.first + queue.messages.len() as u64;
            (queue.next()..end).map(move |sequence| (lane, sequence))
        })
    }

    /// The head of a message that is not confirmed.
    pub(super) fn head(&self, place: (usize, u64), confirmed: [u32; PeerLane::COUNT]) -> Head {
        let (lane, sequence) = place;
        let queued = self.queued(place);
        let header = FrameHeader {
            kind: queued.kind as u8,
            lane: u8::try_from(lane).expect("4 lanes"),
            length: queued.length.into(),
            epoch: self.epoch,
            sequence,
            confirmed,
        };
        let mut bytes = [0; HEAD_BYTES];
        bytes[..HEADER_BYTES].copy_from_slice(&header.encode());
        let inline = match queued.large {
            Some(_) => 0,
            None => usize::from(queued.length),
        };
        bytes[HEADER_BYTES..].copy_from_slice(&queued.small);
        Head {
            bytes,
            length: HEADER_BYTES + inline,
            place: Some(place),
        }
    }

    fn queued(&self, (lane, sequence): (usize, u64)) -> &Queued {
        let queue = &self.lanes[lane];
        let at = usize::try_from(sequence - queue.first).expect("a place in the queue");
        &queue.messages[at]
    }

    /// What follows the head of a message: a long payload, and a page.
    pub(super) fn rest(&self, place: Option<(usize, u64)>) -> [&[u8]; 2] {
        let Some(place) = place else {
            return [&[], &[]];
        };
        let queued = self.queued(place);
        let large = queued.large.as_deref().unwrap_or_default();
        let page = queued.page.as_ref().map(|page| page.as_slice());
        [large, page.unwrap_or_default()]
    }

    /// The next message of the lane is written.
    pub(super) fn wrote(&mut self, lane: usize) {
        let queue = &mut self.lanes[lane];
        queue.sent += 1;
        queue.written = queue.written.max(queue.next());
    }

    /// The peer has everything before these sequence numbers, of which the low halves are known.
    /// Returns whether that is news, or `None` if the peer confirms what was not sent.
    pub(super) fn confirm(&mut self, low: [u32; PeerLane::COUNT]) -> Option<bool> {
        let mut is_news = false;
        for (lane, low) in low.into_iter().enumerate() {
            let queue = &self.lanes[lane];
            let base = u32::try_from(queue.first & u64::from(u32::MAX)).ok()?;
            let count = low.wrapping_sub(base) as usize;
            if count > queue.sent {
                return None;
            }
            is_news |= count > 0;
            self.drop_front(lane, count);
        }
        Some(is_news)
    }

    /// A new connection continues with these sequence numbers. Returns the lane, what the peer
    /// expects and what it may expect, if that is not so.
    pub(super) fn resume(
        &mut self,
        expected: Sequences,
    ) -> Result<bool, (PeerLane, u64, [u64; 2])> {
        let mut is_news = false;
        for (lane, expected) in PeerLane::ALL.into_iter().zip(expected) {
            let queue = &mut self.lanes[usize::from(lane)];
            if !(queue.first..=queue.written).contains(&expected) {
                return Err((lane, expected, [queue.first, queue.written]));
            }
            let count = usize::try_from(expected - queue.first).unwrap_or(usize::MAX);
            is_news |= count > 0;
            self.drop_front(usize::from(lane), count);
            self.lanes[usize::from(lane)].sent = 0;
        }
        Ok(is_news)
    }

    fn drop_front(&mut self, lane: usize, count: usize) {
        let queue = &mut self.lanes[lane];
        for queued in queue.messages.drain(..count) {
            self.spare.extend(queued.page);
        }
        queue.first += count as u64;
        queue.sent = queue.sent.saturating_sub(count);
    }
}
