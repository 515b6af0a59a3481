//! Frames on several streams of one connection, so that a loss on one does not delay the others.
//!
//! To its users a connection is one sequence of whole frames. In transit each frame is on one
//! stream: those of reads on the one of their request's number, so that an answer arrives on the
//! stream of its request; all others on the first, which preserves their order. Frames are
//! delivered in the order of their completion.

use fabric_wire::{Frame, FrameKind, HEADER_BYTES, PAYLOAD_BYTES_MAX};

/// Streams of a connection.
pub(crate) const STREAMS: usize = 8;

/// Limit of buffered bytes of a stream while a frame can be taken: the longest frame of pages, and
/// a part of the next. Further data stays in the connection, whose window then closes.
const STREAM_BYTES_MAX: usize = 2 * (HEADER_BYTES + PAYLOAD_BYTES_MAX);

/// An empty stream of a limited inbox keeps a buffer of so many times its share of the limit, so that
/// peers that fill one stream after the other occupy no more than [`inbox_bytes_max`].
const KEPT_SHARES: usize = 4;

/// Returns the limit of bytes that an inbox with a limit occupies: what is kept of empty streams, and
/// four times the data of others, since half of a buffer may have been taken, and buffers double.
pub(crate) const fn inbox_bytes_max(bytes_max: usize) -> usize {
    (KEPT_SHARES + 4) * bytes_max
}

/// Returns the stream of a frame to send, and its length with the header.
pub(crate) fn place(header: &[u8; HEADER_BYTES]) -> Option<(usize, usize)> {
    let frame = Frame::decode(header).ok()?;
    let stream = match frame.kind {
        FrameKind::ReadPage | FrameKind::PageData | FrameKind::ReadPages | FrameKind::PagesData => {
            (frame.request & 0xffff) as usize % STREAMS
        }
        _ => 0,
    };
    Some((stream, HEADER_BYTES + frame.length))
}

#[derive(Debug, Default)]
struct Incoming {
    bytes: Vec<u8>,
    /// Number of bytes taken.
    taken: usize,
}

impl Incoming {
    fn waiting(&self) -> &[u8] {
        &self.bytes[self.taken..]
    }
}

/// Data received on the streams and not taken yet.
#[derive(Debug)]
pub(crate) struct Inbox {
    streams: [Incoming; STREAMS],
    /// Limit of buffered bytes of all streams.
    bytes_max: usize,
    /// The frame being taken: its stream, and the remaining bytes.
    current: Option<(usize, usize)>,
    /// The stream at which the search for the next frame starts.
    next: usize,
}

impl Inbox {
    /// Creates an empty one with a limit of the bytes of all streams.
    pub(crate) fn new(bytes_max: usize) -> Self {
        Self {
            streams: Default::default(),
            bytes_max,
            current: None,
            next: 0,
        }
    }

    /// Changes the limit of the bytes of all streams.
    pub(crate) fn set_limit(&mut self, bytes_max: usize) {
        self.bytes_max = bytes_max;
    }

    /// Returns whether a stream accepts more data: also when its only frame is incomplete, since
    /// probe frames exceed the limit of a stream.
    pub(crate) fn has_room(&self, stream: usize) -> bool {
        if self.room() == 0 {
            return false;
        }
        let of_stream = STREAM_BYTES_MAX.min(self.bytes_max / STREAMS);
        self.streams[stream].waiting().len() < of_stream || self.whole(stream).is_none()
    }

    /// Returns how many bytes it accepts from a stream that has room.
    pub(crate) fn room(&self) -> usize {
        if self.bytes_max == usize::MAX {
            return usize::MAX;
        }
        let waiting = self.streams.iter().map(|one| one.waiting().len());
        self.bytes_max.saturating_sub(waiting.sum())
    }

    /// Returns the bytes that its buffers occupy.
    #[cfg(test)]
    fn occupied(&self) -> usize {
        self.streams.iter().map(|one| one.bytes.capacity()).sum()
    }

    /// Appends data of a stream.
    pub(crate) fn push(&mut self, stream: usize, bytes: &[u8]) {
        let stream = &mut self.streams[stream];
        if stream.taken > stream.bytes.len() / 2 {
            stream.bytes.drain(..stream.taken);
            stream.taken = 0;
        }
        stream.bytes.extend_from_slice(bytes);
    }

    /// Returns whether data can be taken.
    pub(crate) fn is_ready(&self) -> bool {
        self.current.is_some() || (0..STREAMS).any(|stream| self.whole(stream).is_some())
    }

    /// Copies whole frames, one after the other, as far as there is room.
    pub(crate) fn take(&mut self, target: &mut [u8]) -> usize {
        let kept_max = self.bytes_max.saturating_mul(KEPT_SHARES) / STREAMS;
        let mut filled = 0;
        while filled < target.len() {
            let Some((number, left)) = self.current.take().or_else(|| self.choose()) else {
                break;
            };
            let count = left.min(target.len() - filled);
            let stream = &mut self.streams[number];
            target[filled..filled + count].copy_from_slice(&stream.waiting()[..count]);
            filled += count;
            stream.taken += count;
            if stream.taken == stream.bytes.len() {
                stream.bytes.clear();
                stream.taken = 0;
                if stream.bytes.capacity() > kept_max {
                    stream.bytes = Vec::new();
                }
            }
            if left > count {
                self.current = Some((number, left - count));
            }
        }
        filled
    }

    fn choose(&mut self) -> Option<(usize, usize)> {
        let order = (0..STREAMS).map(|step| (self.next + step) % STREAMS);
        let found = order
            .into_iter()
            .find_map(|stream| Some((stream, self.whole(stream)?)))?;
        self.next = (found.0 + 1) % STREAMS;
        Some(found)
    }

    /// Returns the length of a stream's next frame when it is complete. Invalid data is passed on,
    /// so that the user detects it.
    fn whole(&self, stream: usize) -> Option<usize> {
        let waiting = self.streams[stream].waiting();
        let header = waiting.first_chunk::<HEADER_BYTES>()?;
        let bytes = match Frame::decode(header) {
            Ok(frame) => HEADER_BYTES + frame.length,
            Err(_) => waiting.len(),
        };
        (waiting.len() >= bytes).then_some(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fabric_pages::page::PAGE_SIZE;
    use fabric_wire::PROBE_BYTES_MAX;
    use proptest::prelude::*;

    fn frame(kind: FrameKind, request: u64, payload: &[u8]) -> Vec<u8> {
        let header = Frame::new(kind, request, 0, true).encode(payload);
        [&header[..], payload].concat()
    }

    fn place_of(frame: &[u8]) -> usize {
        let place = place(frame.first_chunk().expect("a header")).expect("a frame");
        assert_eq!(place.1, frame.len());
        place.0
    }

    #[test]
    fn an_answer_is_on_the_stream_of_its_request_and_writes_are_all_on_one() {
        for slot in 0..64 {
            let request = (77 << 16) | slot;
            let asked = place_of(&frame(FrameKind::ReadPage, request, &[]));
            let answer = frame(FrameKind::PageData, request, &[1; PAGE_SIZE]);
            assert_eq!(place_of(&answer), asked);
            for kind in [FrameKind::Written, FrameKind::Dropped, FrameKind::Attached] {
                assert_eq!(place_of(&frame(kind, request, &[])), 0);
            }
        }
        let streams = (0..64).map(|slot| place_of(&frame(FrameKind::ReadPage, slot, &[])));
        let streams: std::collections::HashSet<_> = streams.collect();
        assert_eq!(streams.len(), STREAMS);
    }

    #[test]
    fn a_frame_that_is_not_whole_holds_up_no_other_stream() {
        let mut inbox = Inbox::new(usize::MAX);
        let late = frame(FrameKind::PageData, 1, &[1; PAGE_SIZE]);
        let whole = frame(FrameKind::PageData, 2, &[2; PAGE_SIZE]);
        inbox.push(1, &late[..4000]);
        let mut room = [0; 10_000];
        assert_eq!(inbox.take(&mut room), 0);
        inbox.push(2, &whole);
        assert_eq!(inbox.take(&mut room), whole.len());
        assert_eq!(room[..whole.len()], whole);
        assert!(!inbox.is_ready());
        inbox.push(1, &late[4000..]);
        assert_eq!(inbox.take(&mut room), late.len());
        assert_eq!(room[..late.len()], late);
    }

    #[test]
    fn a_frame_longer_than_others_becomes_whole() {
        let long = frame(FrameKind::ProbeData, 1, &vec![3; PROBE_BYTES_MAX as usize]);
        let mut inbox = Inbox::new(usize::MAX);
        let mut came = 0;
        // Continues until there is no room.
        while inbox.has_room(0) && came < 4 * long.len() {
            inbox.push(0, &long[came % long.len()..][..8]);
            came += 8;
        }
        assert!(
            (long.len()..2 * long.len()).contains(&came),
            "{came} bytes are kept"
        );
        let mut taken = vec![0; long.len()];
        assert_eq!(inbox.take(&mut taken), long.len());
        assert_eq!(taken, long);
    }

    #[test]
    fn a_limited_inbox_occupies_little_also_when_stream_after_stream_is_filled() {
        const LIMIT: usize = 256 << 10;
        let mut inbox = Inbox::new(LIMIT);
        let page = frame(FrameKind::WritePage, 1, &[1; PAGE_SIZE]);
        let mut room = vec![0; LIMIT];
        for stream in 0..STREAMS {
            let mut sent = page.iter().cycle();
            let mut pushed = 0;
            while inbox.has_room(stream) {
                let some: Vec<_> = sent.by_ref().take(inbox.room().min(16 << 10)).collect();
                let some: Vec<u8> = some.into_iter().copied().collect();
                inbox.push(stream, &some);
                pushed += some.len();
            }
            assert!(pushed >= LIMIT / STREAMS, "{pushed}");
            assert!(inbox.take(&mut room) > 0);
            // A part of a frame stays, with its buffer.
            assert!(!inbox.is_ready() && !inbox.streams[stream].waiting().is_empty());
            let occupied = inbox.occupied();
            assert!(
                occupied <= inbox_bytes_max(LIMIT),
                "{occupied} are occupied"
            );
        }
        // The rest of each.
        for stream in 0..STREAMS {
            let left = page.len() - inbox.streams[stream].waiting().len();
            inbox.push(stream, &page[page.len() - left..]);
        }
        assert_eq!(inbox.take(&mut room), STREAMS * page.len());
        let occupied = inbox.occupied();
        assert!(occupied <= KEPT_SHARES * LIMIT, "{occupied} are kept");
    }

    #[test]
    fn what_is_no_frame_is_given_to_be_refused() {
        let mut inbox = Inbox::new(usize::MAX);
        inbox.push(3, &[0xa5; 31]);
        assert!(!inbox.is_ready());
        inbox.push(3, &[0xa5; 9]);
        let mut room = [0; 100];
        assert_eq!(inbox.take(&mut room), 40);
        assert_eq!(room[..40], [0xa5; 40]);
    }

    proptest! {
        #[test]
        fn frames_come_out_whole_and_in_the_order_of_their_stream(
            frames in prop::collection::vec((0_usize..STREAMS, 0_usize..3000), 1..40),
            cut in 1_usize..5000,
            room in 1_usize..5000,
        ) {
            let mut inbox = Inbox::new(usize::MAX);
            let mut sent: Vec<Vec<u8>> = vec![Vec::new(); STREAMS];
            for (number, &(stream, bytes)) in frames.iter().enumerate() {
                // The frame's number also identifies its stream.
                let request = (number * STREAMS + stream) as u64;
                let payload = vec![u8::try_from(number).expect("small"); bytes.min(1024)];
                sent[stream].extend(frame(FrameKind::Error, request, &payload));
            }
            let mut came = Vec::new();
            let mut target = vec![0; room];
            let mut offsets = [0; STREAMS];
            while offsets.iter().zip(&sent).any(|(&offset, sent)| offset < sent.len()) {
                for stream in 0..STREAMS {
                    let end = (offsets[stream] + cut).min(sent[stream].len());
                    inbox.push(stream, &sent[stream][offsets[stream]..end]);
                    offsets[stream] = end;
                }
                let count = inbox.take(&mut target);
                came.extend_from_slice(&target[..count]);
            }
            loop {
                let count = inbox.take(&mut target);
                if count == 0 {
                    break;
                }
                came.extend_from_slice(&target[..count]);
            }
            let mut rest = came.as_slice();
            let mut seen: Vec<Vec<u8>> = vec![Vec::new(); STREAMS];
            while let Some(header) = rest.first_chunk::<HEADER_BYTES>() {
                let frame = Frame::decode(header).expect("a whole frame");
                let (one, others) = rest.split_at(HEADER_BYTES + frame.length);
                prop_assert!(frame.verify(header, &one[HEADER_BYTES..]).is_ok());
                seen[usize::try_from(frame.request).expect("small") % STREAMS].extend(one);
                rest = others;
            }
            prop_assert!(rest.is_empty());
            prop_assert_eq!(seen, sent);
        }
    }
}
