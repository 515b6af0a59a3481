//! The header of a packet between guest and host (virtio 1.2, section 5.10.6).

/// Bytes of a header.
pub(super) const HEADER_BYTES: usize = 44;
/// The host's address.
pub(super) const HOST_CID: u64 = 2;
/// Type: stream.
pub(super) const TYPE_STREAM: u16 = 1;

/// The operation of a packet.
pub(super) mod op {
    pub const REQUEST: u16 = 1;
    pub const RESPONSE: u16 = 2;
    pub const RESET: u16 = 3;
    pub const SHUTDOWN: u16 = 4;
    pub const DATA: u16 = 5;
    pub const CREDIT_UPDATE: u16 = 6;
    pub const CREDIT_REQUEST: u16 = 7;
}

/// SHUTDOWN flag: the sender receives no more.
pub(super) const SHUTDOWN_RECEIVE: u32 = 1;
/// SHUTDOWN flag: the sender sends no more.
pub(super) const SHUTDOWN_SEND: u32 = 2;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Header {
    pub source_cid: u64,
    pub target_cid: u64,
    pub source_port: u32,
    pub target_port: u32,
    /// Bytes of data after the header.
    pub length: u32,
    pub kind: u16,
    pub op: u16,
    pub flags: u32,
    /// Size of the sender's buffer.
    pub buffer: u32,
    /// Bytes that have left the sender's buffer so far, modulo 2^32.
    pub forwarded: u32,
}

impl Header {
    pub fn from_bytes(bytes: &[u8; HEADER_BYTES]) -> Self {
        let u16_at = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        let u32_at = |at: usize| u32::from(u16_at(at)) | (u32::from(u16_at(at + 2)) << 16);
        let u64_at = |at: usize| u64::from(u32_at(at)) | (u64::from(u32_at(at + 4)) << 32);
        Self {
            source_cid: u64_at(0),
            target_cid: u64_at(8),
            source_port: u32_at(16),
            target_port: u32_at(20),
            length: u32_at(24),
            kind: u16_at(28),
            op: u16_at(30),
            flags: u32_at(32),
            buffer: u32_at(36),
            forwarded: u32_at(40),
        }
    }

    pub fn to_bytes(self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        let mut put = |at: usize, field: &[u8]| bytes[at..at + field.len()].copy_from_slice(field);
        put(0, &self.source_cid.to_le_bytes());
        put(8, &self.target_cid.to_le_bytes());
        put(16, &self.source_port.to_le_bytes());
        put(20, &self.target_port.to_le_bytes());
        put(24, &self.length.to_le_bytes());
        put(28, &self.kind.to_le_bytes());
        put(30, &self.op.to_le_bytes());
        put(32, &self.flags.to_le_bytes());
        put(36, &self.buffer.to_le_bytes());
        put(40, &self.forwarded.to_le_bytes());
        bytes
    }

    /// The reset that refuses this packet.
    pub fn reset(&self) -> Self {
        Self {
            source_cid: HOST_CID,
            target_cid: self.source_cid,
            source_port: self.target_port,
            target_port: self.source_port,
            kind: TYPE_STREAM,
            op: op::RESET,
            ..Self::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn fields_are_where_the_specification_has_them() {
        let bytes: Vec<u8> = (0..44).collect();
        let header = Header::from_bytes(&bytes.try_into().unwrap());
        assert_eq!(header.source_cid, 0x0706_0504_0302_0100);
        assert_eq!(header.target_port, 0x1716_1514);
        assert_eq!((header.kind, header.op), (0x1d1c, 0x1f1e));
        assert_eq!(header.forwarded, 0x2b2a_2928);
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(bytes in proptest::collection::vec(any::<u8>(), 44)) {
            let bytes: [u8; HEADER_BYTES] = bytes.try_into().unwrap();
            prop_assert_eq!(Header::from_bytes(&bytes).to_bytes(), bytes);
        }
    }
}
