//! The first frames of a connection: who connects to whom, of which VM, and the proof of a secret.

use std::fmt;

use fabric_coherence::Member;
use ring::hmac;

/// "SVPC": a compute node to another one.
pub(super) const MAGIC: [u8; 4] = *b"SVPC";

/// The version of the frames between compute nodes. Others are refused: all compute nodes of a VM
/// run the same program. It is not the version of the frames to donors, which outlive programs.
pub const PEER_VERSION: u16 = 3;

/// Bytes of a prefix, which are the same in all versions.
pub(super) const PREFIX_BYTES: usize = 8;

/// Bytes of a hello after its prefix.
pub(super) const HELLO_BYTES: usize = 92;

/// Bytes of a proof.
pub(super) const PROOF_BYTES: usize = 32;

/// Bytes of a challenge.
pub(super) const NONCE_BYTES: usize = 32;

/// What follows a prefix.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[repr(u16)]
pub(super) enum Step {
    /// A [`Hello`]; that of the accepting node has its proof behind it.
    Hello = 1,
    /// The proof of the connecting node.
    Proof = 2,
    /// Nothing: the connection is accepted.
    Welcome = 3,
    /// A [`Mismatch`].
    Refusal = 4,
    /// A part of setting up rings, or why that failed.
    Rings = 5,
}

/// In what two nodes do not fit together.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[repr(u8)]
pub enum Mismatch {
    /// The versions of the protocol.
    Version = 1,
    /// The VM.
    Vm = 2,
    /// The table of compute nodes.
    Table = 3,
    /// The member that the other one has to be.
    Member = 4,
    /// The epoch.
    Epoch = 5,
    /// The size of the memory.
    Memory = 6,
    /// The VM's secret.
    Secret = 7,
    /// Whether connections are secure.
    Certificates = 8,
    /// Whether RDMA is demanded.
    Rdma = 9,
}

impl Mismatch {
    const ALL: [Self; 9] = [
        Self::Version,
        Self::Vm,
        Self::Table,
        Self::Member,
        Self::Epoch,
        Self::Memory,
        Self::Secret,
        Self::Certificates,
        Self::Rdma,
    ];

    pub(super) fn new(value: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|one| *one as u8 == value)
    }
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Version => "another version of the protocol",
            Self::Vm => "another VM",
            Self::Table => "another table of compute nodes",
            Self::Member => "another member than expected",
            Self::Epoch => "another epoch",
            Self::Memory => "another size of the memory",
            Self::Secret => "a wrong secret",
            Self::Certificates => {
                "another use of certificates; start `ssi-hv run` and `ssi-hv node` on all hosts with \
                 --credentials, or on none"
            }
            Self::Rdma => "another choice of RDMA, which one of the two nodes demands",
        })
    }
}

/// What a node says of RDMA.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[repr(u8)]
pub(super) enum Rdma {
    /// It uses none.
    Absent = 0,
    /// It uses it if both nodes can.
    Offered = 1,
    /// It uses nothing else.
    Demanded = 2,
}

impl Rdma {
    /// Unknown values are none.
    fn new(value: u8) -> Self {
        let all = [Self::Offered, Self::Demanded];
        let mut all = all.into_iter();
        all.find(|one| *one as u8 == value).unwrap_or(Self::Absent)
    }

    /// Whether both nodes want to use it.
    pub(super) fn is_agreed(self, other: Self) -> bool {
        self != Self::Absent && other != Self::Absent
    }

    fn fits(self, other: Self) -> bool {
        self.is_agreed(other) || self != Self::Demanded && other != Self::Demanded
    }
}

/// What both nodes have to agree on, and a challenge.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Hello {
    pub(super) vm: [u8; 16],
    /// A digest of the table of compute nodes.
    pub(super) table: [u8; 32],
    pub(super) from: u8,
    pub(super) to: u8,
    pub(super) rdma: Rdma,
    pub(super) epoch: u32,
    pub(super) pages: u32,
    pub(super) nonce: [u8; NONCE_BYTES],
}

impl Hello {
    pub(super) fn encode(&self) -> [u8; HELLO_BYTES] {
        let mut bytes = [0; HELLO_BYTES];
        bytes[..16].copy_from_slice(&self.vm);
        bytes[16..48].copy_from_slice(&self.table);
        bytes[48] = self.from;
        bytes[49] = self.to;
        bytes[50] = self.rdma as u8;
        bytes[52..56].copy_from_slice(&self.epoch.to_le_bytes());
        bytes[56..60].copy_from_slice(&self.pages.to_le_bytes());
        bytes[60..].copy_from_slice(&self.nonce);
        bytes
    }

    pub(super) fn decode(bytes: &[u8; HELLO_BYTES]) -> Self {
        fn take<const BYTES: usize>(bytes: &[u8], at: usize) -> [u8; BYTES] {
            bytes[at..at + BYTES]
                .try_into()
                .expect("a slice of this length")
        }
        Self {
            vm: take(bytes, 0),
            table: take(bytes, 16),
            from: bytes[48],
            to: bytes[49],
            rdma: Rdma::new(bytes[50]),
            epoch: u32::from_le_bytes(take(bytes, 52)),
            pages: u32::from_le_bytes(take(bytes, 56)),
            nonce: take(bytes, 60),
        }
    }

    /// Compares a hello with this node's own. `from`: who the sender may be.
    pub(super) fn check(
        &self,
        own: &Self,
        from: impl Fn(Member) -> bool,
    ) -> Result<Member, Mismatch> {
        let member = Member::at(self.from).filter(|member| from(*member));
        let checks = [
            (self.vm == own.vm, Mismatch::Vm),
            (self.table == own.table, Mismatch::Table),
            (self.epoch == own.epoch, Mismatch::Epoch),
            (self.pages == own.pages, Mismatch::Memory),
            (self.to == own.from, Mismatch::Member),
            (self.rdma.fits(own.rdma), Mismatch::Rdma),
        ];
        match checks.iter().find(|(fits, _)| !fits) {
            Some((_, mismatch)) => Err(*mismatch),
            None => member.ok_or(Mismatch::Member),
        }
    }
}

pub(super) fn prefix(step: Step) -> [u8; PREFIX_BYTES] {
    let mut bytes = [0; PREFIX_BYTES];
    bytes[..4].copy_from_slice(&MAGIC);
    bytes[4..6].copy_from_slice(&PEER_VERSION.to_le_bytes());
    bytes[6..].copy_from_slice(&(step as u16).to_le_bytes());
    bytes
}

/// The version and the step of a prefix, or `None` if it is none.
pub(super) fn decode_prefix(bytes: [u8; PREFIX_BYTES]) -> Option<(u16, u16)> {
    let [a, b, c, d, version @ .., low, high] = bytes;
    let version = u16::from_le_bytes(version);
    ([a, b, c, d] == MAGIC).then_some((version, u16::from_le_bytes([low, high])))
}

/// Which side of a connection proves that it knows the secret.
#[derive(Clone, Copy, Debug)]
pub(super) enum Side {
    Connecting,
    Accepting,
}

/// What a side signs: its name, and both hellos with their challenges. So a proof serves neither on
/// another connection nor in the other direction.
fn signed(side: Side, connecting: &Hello, accepting: &Hello) -> Vec<u8> {
    let label: &[u8] = match side {
        Side::Connecting => b"ssi-hv peer connects",
        Side::Accepting => b"ssi-hv peer accepts!",
    };
    [label, &connecting.encode(), &accepting.encode()].concat()
}

pub(super) fn prove(
    key: &hmac::Key,
    side: Side,
    connecting: &Hello,
    accepting: &Hello,
) -> [u8; PROOF_BYTES] {
    let tag = hmac::sign(key, &signed(side, connecting, accepting));
    tag.as_ref().try_into().expect("HMAC-SHA-256 has 32 bytes")
}

/// Compares a proof in constant time.
pub(super) fn check_proof(
    key: &hmac::Key,
    side: Side,
    connecting: &Hello,
    accepting: &Hello,
    proof: &[u8; PROOF_BYTES],
) -> Result<(), Mismatch> {
    let signed = signed(side, connecting, accepting);
    hmac::verify(key, &signed, proof).map_err(|_| Mismatch::Secret)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hello(from: u8, to: u8) -> Hello {
        Hello {
            vm: [1; 16],
            table: [2; 32],
            from,
            to,
            rdma: Rdma::Offered,
            epoch: 3,
            pages: 512,
            nonce: [from; 32],
        }
    }

    #[test]
    fn a_hello_survives_its_bytes_and_names_what_does_not_fit() {
        let (there, here) = (hello(0, 2), hello(2, 0));
        assert_eq!(Hello::decode(&there.encode()), there);
        let first = Member::at(0).expect("a place");
        let check = |hello: Hello| hello.check(&here, |member| member == first);
        assert_eq!(check(there), Ok(first));
        assert_eq!(check(hello(1, 2)), Err(Mismatch::Member));
        assert_eq!(check(hello(0, 1)), Err(Mismatch::Member));
        assert_eq!(check(hello(200, 2)), Err(Mismatch::Member));
        let (vm, table) = ([0; 16], [0; 32]);
        assert_eq!(check(Hello { vm, ..there }), Err(Mismatch::Vm));
        assert_eq!(check(Hello { table, ..there }), Err(Mismatch::Table));
        assert_eq!(check(Hello { epoch: 4, ..there }), Err(Mismatch::Epoch));
        assert_eq!(check(Hello { pages: 1, ..there }), Err(Mismatch::Memory));
        for rdma in [Rdma::Absent, Rdma::Offered, Rdma::Demanded] {
            let mut hello = there;
            hello.rdma = rdma;
            assert_eq!(Hello::decode(&hello.encode()), hello);
            assert_eq!(check(hello), Ok(first));
        }
        assert!(!Rdma::Absent.fits(Rdma::Demanded) && !Rdma::Demanded.fits(Rdma::Absent));
        for mismatch in Mismatch::ALL {
            assert_eq!(Mismatch::new(mismatch as u8), Some(mismatch));
        }
    }

    #[test]
    fn a_proof_holds_for_one_connection_one_side_and_one_secret() {
        let key = |secret| hmac::Key::new(hmac::HMAC_SHA256, &[secret; 32]);
        let (there, here) = (hello(0, 2), hello(2, 0));
        let proof = prove(&key(1), Side::Accepting, &there, &here);
        let check =
            |key: &hmac::Key, side, hello: &Hello| check_proof(key, side, hello, &here, &proof);
        assert_eq!(check(&key(1), Side::Accepting, &there), Ok(()));
        let wrong = Err(Mismatch::Secret);
        assert_eq!(check(&key(2), Side::Accepting, &there), wrong);
        assert_eq!(check(&key(1), Side::Connecting, &there), wrong);
        let nonce = [9; 32];
        let later = Hello { nonce, ..there };
        assert_eq!(check(&key(1), Side::Accepting, &later), wrong);
    }
}
