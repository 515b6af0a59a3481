//! The parameters that the two ends of an RDMA connection exchange.

use super::RdmaError;
use super::device::{Gid, LinkLayer, Mtu};
use serde::{Deserialize, Serialize};
use std::net::IpAddr;

/// Queue-pair numbers and packet numbers have 24 bits (InfiniBand Architecture Specification,
/// volume 1, section 9.2).
pub const NUMBER_MAX: u32 = (1 << 24) - 1;

/// One end of a reliable connection.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct Endpoint {
    /// Number of its queue pair.
    pub queue_pair: u32,
    /// Number of the first packet that it sends, random for each connection, so that packets of an
    /// earlier connection are not accepted in this one.
    pub packet_number: u32,
    /// Its kind of network.
    pub link: LinkLayer,
    /// Its local identifier; 0 on Ethernet.
    pub lid: u16,
    /// Its global identifier.
    pub gid: Gid,
    /// The largest payload of a packet on its port, bytes.
    pub mtu_bytes: u16,
    /// READs of the peer that it answers concurrently.
    pub reads_answered: u8,
}

impl Endpoint {
    /// Validates a peer's parameters and returns its MTU.
    ///
    /// # Errors
    ///
    /// [`RdmaError::Peer`].
    pub fn check(&self) -> Result<Mtu, RdmaError> {
        let number = |what, value: u32| match value {
            0..=NUMBER_MAX => Ok(()),
            _ => Err(RdmaError::Peer {
                what,
                value: value.into(),
                allowed: "24 bits are allowed",
            }),
        };
        number("queue pair", self.queue_pair)?;
        number("packet number", self.packet_number)?;
        if self.reads_answered == 0 {
            return Err(RdmaError::Peer {
                what: "number of READs answered",
                value: 0,
                allowed: "1 at least is needed",
            });
        }
        self.mtu()
    }

    /// Checks that the port is the peer's, which is connected from or at `peer` by TCP: the port has
    /// that address, or one of `allowed`. Otherwise a peer could let this host send to another one,
    /// or take requests of another one. Global identifiers of InfiniBand are no addresses of TCP, so
    /// those have to be in `allowed`, if there are any.
    ///
    /// # Errors
    ///
    /// [`RdmaError::Stranger`].
    pub fn check_port(&self, peer: IpAddr, allowed: &[IpAddr]) -> Result<(), RdmaError> {
        let port = self.gid.to_ip();
        let is_peers = match self.link {
            LinkLayer::Ethernet => port == peer.to_canonical(),
            LinkLayer::InfiniBand => allowed.is_empty(),
        };
        if is_peers || allowed.iter().any(|one| one.to_canonical() == port) {
            return Ok(());
        }
        Err(RdmaError::Stranger { port, peer })
    }

    fn mtu(&self) -> Result<Mtu, RdmaError> {
        Mtu::from_bytes(self.mtu_bytes).ok_or(RdmaError::Peer {
            what: "MTU",
            value: self.mtu_bytes.into(),
            allowed: "256, 512, 1024, 2048 or 4096 are allowed",
        })
    }
}

/// The location of a lease's memory for adapters.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct RemoteMemory {
    /// Its key.
    pub key: u32,
    /// Whether all its pages are pinned. Otherwise a request may have to wait while a page is
    /// allocated.
    pub pinned: bool,
    /// The address of its first byte in requests. It says nothing about the donor's
    /// addresses, except within a huge page, or with paging on demand.
    pub base: u64,
    /// Its size.
    pub bytes: u64,
}

impl RemoteMemory {
    /// Validates a donor's parameters: they must cover a lease of `bytes`.
    ///
    /// # Errors
    ///
    /// [`RdmaError::Peer`].
    pub fn check(&self, bytes: u64) -> Result<(), RdmaError> {
        if self.bytes < bytes || self.base.checked_add(self.bytes).is_none() {
            return Err(RdmaError::Peer {
                what: "registered memory",
                value: self.bytes,
                allowed: "the whole lease is needed",
            });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn endpoint() -> Endpoint {
        Endpoint {
            queue_pair: 17,
            packet_number: 0x00ab_cdef,
            link: LinkLayer::Ethernet,
            lid: 0,
            gid: Gid::from_ip("10.77.0.2".parse().expect("an address")),
            mtu_bytes: 4096,
            reads_answered: 16,
        }
    }

    #[test]
    fn a_peer_that_makes_no_sense_is_refused_by_name_and_value() {
        assert_eq!(endpoint().check().expect("fine").bytes(), 4096);
        type Spoil = fn(&mut Endpoint);
        let spoiled: [(Spoil, &str); 4] = [
            (|end| end.queue_pair = 1 << 24, "queue pair is 16777216"),
            (|end| end.packet_number = u32::MAX, "packet number is"),
            (|end| end.mtu_bytes = 1500, "MTU is 1500"),
            (|end| end.reads_answered = 0, "READs answered is 0"),
        ];
        for (spoil, text) in spoiled {
            let mut end = endpoint();
            spoil(&mut end);
            let error = end.check().expect_err(text).to_string();
            assert!(error.contains(text), "{error}");
        }
    }

    #[test]
    fn a_port_is_that_of_the_peer_or_named() {
        let ip = |text: &str| -> IpAddr { text.parse().expect("an address") };
        let own = endpoint();
        for peer in ["10.77.0.2", "::ffff:10.77.0.2"] {
            own.check_port(ip(peer), &[]).expect("its own");
        }
        let error = own.check_port(ip("10.77.0.3"), &[]).expect_err("another's");
        let text = error.to_string();
        assert!(
            text.contains("10.77.0.2") && text.contains("10.77.0.3") && text.contains("peers="),
            "{text}"
        );
        own.check_port(ip("10.77.0.3"), &[ip("10.9.9.9"), ip("::ffff:10.77.0.2")])
            .expect("named");
        own.check_port(ip("10.77.0.3"), &[ip("10.9.9.9")])
            .expect_err("others are named");
        // Of InfiniBand: any unless some are named.
        let gid = ip("fe80::2:c903:1");
        let far = Endpoint {
            link: LinkLayer::InfiniBand,
            gid: Gid::from_ip(gid),
            ..own
        };
        far.check_port(ip("10.77.0.2"), &[]).expect("any");
        far.check_port(ip("10.77.0.2"), &[gid]).expect("named");
        far.check_port(ip("10.77.0.2"), &[ip("fe80::1")])
            .expect_err("another is named");
    }

    #[test]
    fn memory_must_hold_the_lease_and_not_wrap() {
        let memory = |base, bytes| RemoteMemory {
            key: 1,
            pinned: true,
            base,
            bytes,
        };
        assert!(memory(0x7f00_0000_0000, 8192).check(8192).is_ok());
        assert!(memory(0, 4096).check(8192).is_err());
        assert!(memory(u64::MAX - 4096, 8192).check(8192).is_err());
    }
}
