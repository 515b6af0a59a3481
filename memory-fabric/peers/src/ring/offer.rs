//! What an end of a connection of adapters has to know of the other, as bytes.

use fabric_verbs::device::{Gid, LinkLayer};
use fabric_verbs::endpoint::Endpoint;

use super::RING_BYTES;

/// Bytes of an offer: an [`Endpoint`], and where the ring is. Numbers are little-endian.
pub const OFFER_BYTES: usize = 42;

/// The value of a kind of network.
const INFINIBAND: u8 = 1;
const ETHERNET: u8 = 2;

/// One end.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Offer {
    pub(super) endpoint: Endpoint,
    /// The key of the ring, and its address; it has [`RING_BYTES`].
    pub(super) key: u32,
    pub(super) address: u64,
}

/// An offer that makes no sense.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub(super) enum OfferError {
    /// The kind of network has no meaning.
    #[error("the other end's kind of network is {0}, and has to be 1 or 2")]
    Link(u8),
    /// The ring ends behind all addresses.
    #[error("the other end's ring of {RING_BYTES} bytes is at {0:#x}")]
    Address(u64),
}

impl Offer {
    pub(super) fn encode(&self) -> [u8; OFFER_BYTES] {
        let Endpoint {
            queue_pair,
            packet_number,
            link,
            lid,
            gid,
            mtu_bytes,
            reads_answered,
        } = self.endpoint;
        let mut bytes = [0; OFFER_BYTES];
        let mut rest = bytes.as_mut_slice();
        let mut put = |part: &[u8]| {
            let (place, behind) = std::mem::take(&mut rest).split_at_mut(part.len());
            place.copy_from_slice(part);
            rest = behind;
        };
        put(&queue_pair.to_le_bytes());
        put(&packet_number.to_le_bytes());
        put(&[match link {
            LinkLayer::InfiniBand => INFINIBAND,
            LinkLayer::Ethernet => ETHERNET,
        }]);
        put(&lid.to_le_bytes());
        put(&gid.0);
        put(&mtu_bytes.to_le_bytes());
        put(&[reads_answered]);
        put(&self.key.to_le_bytes());
        put(&self.address.to_le_bytes());
        bytes
    }

    /// Decodes what can be decoded without the limits of an adapter, which
    /// [`Endpoint::check`] has.
    pub(super) fn decode(bytes: &[u8; OFFER_BYTES]) -> Result<Self, OfferError> {
        fn take<const BYTES: usize>(rest: &mut &[u8]) -> [u8; BYTES] {
            let (part, behind) = rest.split_first_chunk().expect("an offer of this length");
            *rest = behind;
            *part
        }
        let rest = &mut bytes.as_slice();
        let queue_pair = u32::from_le_bytes(take(rest));
        let packet_number = u32::from_le_bytes(take(rest));
        let [link] = take(rest);
        let link = match link {
            INFINIBAND => LinkLayer::InfiniBand,
            ETHERNET => LinkLayer::Ethernet,
            other => return Err(OfferError::Link(other)),
        };
        let lid = u16::from_le_bytes(take(rest));
        let gid = Gid(take(rest));
        let mtu_bytes = u16::from_le_bytes(take(rest));
        let [reads_answered] = take(rest);
        let key = u32::from_le_bytes(take(rest));
        let address = u64::from_le_bytes(take(rest));
        if address.checked_add(RING_BYTES as u64).is_none() {
            return Err(OfferError::Address(address));
        }
        Ok(Self {
            endpoint: Endpoint {
                queue_pair,
                packet_number,
                link,
                lid,
                gid,
                mtu_bytes,
                reads_answered,
            },
            key,
            address,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_offer_survives_its_bytes_and_one_without_sense_is_refused() {
        let offer = Offer {
            endpoint: Endpoint {
                queue_pair: 0x0012_3456,
                packet_number: 0x00ab_cdef,
                link: LinkLayer::Ethernet,
                lid: 0x1234,
                gid: Gid(std::array::from_fn(|place| {
                    u8::try_from(place).expect("small")
                })),
                mtu_bytes: 4096,
                reads_answered: 16,
            },
            key: 0x8765_4321,
            address: 0x7f00_0000_1000,
        };
        let mut bytes = offer.encode();
        assert_eq!(bytes[OFFER_BYTES - 1], 0, "the address is the last field");
        assert_eq!(bytes[OFFER_BYTES - 3], 0x7f);
        assert_eq!(Offer::decode(&bytes), Ok(offer));
        bytes[OFFER_BYTES - 8..].fill(0xff);
        let wraps = Err(OfferError::Address(u64::MAX));
        assert_eq!(Offer::decode(&bytes), wraps);
        bytes[8] = 3;
        assert_eq!(Offer::decode(&bytes), Err(OfferError::Link(3)));
    }
}
