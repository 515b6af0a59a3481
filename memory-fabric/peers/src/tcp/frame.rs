//! The header before each message on a connection.

use crate::message::PeerLane;

/// Bytes of a header.
pub(super) const HEADER_BYTES: usize = 32;

/// The kind of a frame that only confirms, or is a heartbeat. It has no payload and no place in a lane.
pub(super) const KIND_CONFIRM: u8 = 0xfe;

/// The kind of the first frame in each direction: the sequence number that each lane continues with.
pub(super) const KIND_RESUME: u8 = 0xff;

/// Bytes of the payload of [`KIND_RESUME`].
pub(super) const RESUME_BYTES: usize = PeerLane::COUNT * size_of::<u64>();

/// The sequence numbers of the next messages of all lanes.
pub(super) type Sequences = [u64; PeerLane::COUNT];

/// A header in host byte order.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct FrameHeader {
    /// A message's kind, or one of those above.
    pub(super) kind: u8,
    /// The lane's place, which the kind implies; 0 for other frames.
    pub(super) lane: u8,
    /// Bytes of the payload, without the page behind it.
    pub(super) length: u16,
    pub(super) epoch: u32,
    /// The message's place in its lane; 0 for other frames.
    pub(super) sequence: u64,
    /// The low halves of the sequence numbers that the sender expects next.
    pub(super) confirmed: [u32; PeerLane::COUNT],
}

impl FrameHeader {
    pub(super) fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[0] = self.kind;
        bytes[1] = self.lane;
        bytes[2..4].copy_from_slice(&self.length.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.epoch.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.sequence.to_le_bytes());
        for (place, confirmed) in bytes[16..].chunks_exact_mut(4).zip(self.confirmed) {
            place.copy_from_slice(&confirmed.to_le_bytes());
        }
        bytes
    }

    pub(super) fn decode(bytes: &[u8; HEADER_BYTES]) -> Self {
        let word = |at: usize| {
            let bytes = [bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]];
            u32::from_le_bytes(bytes)
        };
        Self {
            kind: bytes[0],
            lane: bytes[1],
            length: u16::from_le_bytes([bytes[2], bytes[3]]),
            epoch: word(4),
            sequence: u64::from(word(8)) | u64::from(word(12)) << 32,
            confirmed: [word(16), word(20), word(24), word(28)],
        }
    }
}

/// The low halves of sequence numbers.
pub(super) fn low_halves(sequences: Sequences) -> [u32; PeerLane::COUNT] {
    sequences.map(|sequence| u32::try_from(sequence & u64::from(u32::MAX)).expect("32 bits"))
}

pub(super) fn encode_resume(expected: Sequences) -> [u8; RESUME_BYTES] {
    let mut bytes = [0; RESUME_BYTES];
    for (place, sequence) in bytes.chunks_exact_mut(8).zip(expected) {
        place.copy_from_slice(&sequence.to_le_bytes());
    }
    bytes
}

/// The sequence numbers in a payload, or `None` if it has another length.
pub(super) fn decode_resume(payload: &[u8]) -> Option<Sequences> {
    let payload: &[u8; RESUME_BYTES] = payload.try_into().ok()?;
    let mut expected = [0; PeerLane::COUNT];
    for (sequence, place) in expected.iter_mut().zip(payload.chunks_exact(8)) {
        *sequence = u64::from_le_bytes(place.try_into().ok()?);
    }
    Some(expected)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_has_the_bytes_of_this_version() {
        let header = FrameHeader {
            kind: 14,
            lane: 2,
            length: 13,
            epoch: 7,
            sequence: 0x0102_0304_0506_0708,
            confirmed: [1, 2, 3, u32::MAX],
        };
        let bytes = header.encode();
        let expected = [
            14, 2, 13, 0, 7, 0, 0, 0, 8, 7, 6, 5, 4, 3, 2, 1, 1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0,
            255, 255, 255, 255,
        ];
        assert_eq!(bytes, expected);
        assert_eq!(FrameHeader::decode(&bytes), header);
        let expected = [1, 1 << 40, 0, u64::MAX];
        assert_eq!(decode_resume(&encode_resume(expected)), Some(expected));
        assert_eq!(low_halves(expected), [1, 0, 0, u32::MAX]);
        assert_eq!(decode_resume(&[0; 31]), None);
    }
}
