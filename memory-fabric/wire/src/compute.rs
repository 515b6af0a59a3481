//! Messages by which a VM gets vCPUs on a node: a process of its own there, which then talks to the
//! other compute nodes of the VM.

use crate::{GrantError, LeaseGrant, LeaseRequest, MEMBER_NAME_BYTES_MAX};
use core::net::SocketAddr;
use fabric_pages::page::{PAGE_SHIFT, PAGES_MAX};
use serde::{Deserialize, Serialize};
use std::fmt;

/// Most compute nodes of a VM.
pub const COMPUTE_NODES_MAX: usize = 16;

/// The secret of a VM, by which its compute nodes know each other.
#[derive(Clone, Copy, Eq, PartialEq, Serialize, Deserialize)]
pub struct VmSecret(pub [u8; 32]);

impl fmt::Debug for VmSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("VmSecret(..)")
    }
}

/// Asks a node to run vCPUs of a VM.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct ComputeRequest {
    /// The VM's name, for the node's log; at most [`VM_NAME_BYTES_MAX`](super::VM_NAME_BYTES_MAX)
    /// bytes.
    pub name: String,
    /// Names the VM among all.
    pub vm: [u8; 16],
    /// What the compute nodes prove to each other that they know.
    pub secret: VmSecret,
    /// The place of the node among the VM's compute nodes. The first is the primary.
    pub me: u8,
    /// How many compute nodes the VM has, at most [`COMPUTE_NODES_MAX`].
    pub nodes: u8,
    /// How many vCPUs the node gets.
    pub cpus: u8,
    /// Bytes of the guest's memory.
    pub memory_bytes: u64,
    /// Bytes of memory that may be added while the guest runs, which the nodes share from the start:
    /// whole blocks of 2 MiB, or 0.
    pub hotplug_bytes: u64,
    /// Bytes of memory that the node lends for both.
    pub lent_bytes: u64,
    /// Whether the nodes merge page tables of the guest's kernel.
    pub merge_tables: bool,
    /// Whether each node is the home of one part of the memory, in their order, instead of blocks
    /// that are mixed.
    pub in_order: bool,
    /// Whether the memory that the nodes share travels by RDMA.
    pub rdma: bool,
}

/// Why a request for vCPUs cannot be right.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum ComputeRequestError {
    /// The name is too long.
    #[error("VM name of {0} bytes, {limit} is the limit", limit = super::VM_NAME_BYTES_MAX)]
    Name(usize),
    /// The place is not that of a node beside the primary.
    #[error("node {me} of {nodes}: 1 to {limit} beside the primary are possible", limit = COMPUTE_NODES_MAX - 1)]
    Place {
        /// The place.
        me: u8,
        /// The number of nodes.
        nodes: u8,
    },
    /// There are no vCPUs to run.
    #[error("0 vCPUs asked, at least 1 is needed")]
    NoCpus,
    /// No guest has such a memory.
    #[error("guest memory of {0} bytes: not a multiple of the page size 4096, or zero")]
    Memory(u64),
    /// No memory is added in such parts.
    #[error("{0} bytes of memory that may be added: not a multiple of 2 MiB")]
    Hotplug(u64),
    /// No guest has so much.
    #[error("guest memory of {0} bytes with what may be added, {GUEST_BYTES_MAX} is the limit")]
    TooLarge(u64),
    /// No node lends such a part of it.
    #[error(
        "{lent} bytes to lend for guest memory of {memory}: not a multiple of the page size 4096, zero, or more"
    )]
    Lent {
        /// What is to be lent.
        lent: u64,
        /// The guest's memory, with what may be added.
        memory: u64,
    },
}

/// Most memory of a guest, with what may be added: what pages have numbers for.
const GUEST_BYTES_MAX: u64 = PAGES_MAX << PAGE_SHIFT;

/// The unit in which memory is added.
const ADDED_BYTES: u64 = 2 << 20;

impl ComputeRequest {
    /// Checks the values by themselves.
    ///
    /// # Errors
    ///
    /// See [`ComputeRequestError`].
    pub fn check(&self) -> Result<(), ComputeRequestError> {
        let &Self {
            me,
            nodes,
            memory_bytes: memory,
            hotplug_bytes: added,
            lent_bytes: lent,
            ..
        } = self;
        if self.name.len() > super::VM_NAME_BYTES_MAX {
            return Err(ComputeRequestError::Name(self.name.len()));
        }
        if me == 0 || me >= nodes || usize::from(nodes) > COMPUTE_NODES_MAX {
            return Err(ComputeRequestError::Place { me, nodes });
        }
        if self.cpus == 0 {
            return Err(ComputeRequestError::NoCpus);
        }
        if memory == 0 || !memory.is_multiple_of(4096) {
            return Err(ComputeRequestError::Memory(memory));
        }
        if !added.is_multiple_of(ADDED_BYTES) {
            return Err(ComputeRequestError::Hotplug(added));
        }
        let memory = memory.saturating_add(added);
        if memory > GUEST_BYTES_MAX {
            return Err(ComputeRequestError::TooLarge(memory));
        }
        if lent == 0 || lent > memory || !lent.is_multiple_of(4096) {
            return Err(ComputeRequestError::Lent { lent, memory });
        }
        Ok(())
    }
}

/// Where the process of a VM on a node listens, at the address by which the node was reached.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct ComputePorts {
    /// For the memory that the nodes share.
    pub memory: u16,
    /// For what concerns vCPUs.
    pub vcpus: u16,
    /// SHA-256 of the certificate by which the others know the process; `None` without TLS.
    pub certificate: Option<[u8; 32]>,
}

/// Where a compute node listens, and what it lends.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct ComputeMember {
    /// For the memory that the nodes share.
    pub memory: SocketAddr,
    /// For what concerns vCPUs.
    pub vcpus: SocketAddr,
    /// Bytes of memory that it lends.
    pub lent_bytes: u64,
    /// SHA-256 of the certificate by which the others know its process; `None` without TLS.
    pub certificate: Option<[u8; 32]>,
}

/// All compute nodes of a VM, in their order. Nobody connects to the first.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct ComputeTable(pub Vec<ComputeMember>);

/// A lease that the primary obtained for the VM's process on a node, which alone uses and renews it
/// from here on, and how it is to be used.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct ComputeLease {
    /// The number of the donor among the VM's nodes, behind those of compute nodes.
    pub donor: u8,
    /// Where the donor listens.
    pub address: SocketAddr,
    /// What it lends.
    pub grant: LeaseGrant,
    /// Whether it is reached over UDP.
    pub over_udp: bool,
    /// The certificate that it must present over UDP; `None` for any.
    pub fingerprint: Option<[u8; 32]>,
    /// Which node of the cluster has to be there, if the lease was
    /// [delegated](crate::DelegateRequest) to the certificate of the process; at most
    /// [`MEMBER_NAME_BYTES_MAX`] bytes.
    pub name: Option<String>,
    /// How long it may be unreachable before it is lost, in milliseconds.
    pub grace_ms: u32,
    /// Whether it gets sealed pages only.
    pub sealed: bool,
    /// Whether pages carry checksums.
    pub checksum: bool,
    /// Whether pages are compressed; `None` for as long as that was measured to pay.
    pub compression: Option<bool>,
}

/// Why a lease for a process cannot be right.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum ComputeLeaseError {
    /// No donor grants such a lease.
    #[error(transparent)]
    Grant(#[from] GrantError),
    /// The donor's name is too long.
    #[error("name of a node of {0} bytes, {MEMBER_NAME_BYTES_MAX} is the limit")]
    Name(usize),
}

impl ComputeLease {
    /// Checks the values by themselves.
    ///
    /// # Errors
    ///
    /// See [`ComputeLeaseError`].
    pub fn check(&self) -> Result<(), ComputeLeaseError> {
        let name = self.name.as_ref().map_or(0, String::len);
        if name > MEMBER_NAME_BYTES_MAX {
            return Err(ComputeLeaseError::Name(name));
        }
        self.grant.check(&LeaseRequest {
            vm: String::new(),
            bytes: PAGES_MAX << PAGE_SHIFT,
            or_less: true,
            duration_ms: u32::MAX,
        })?;
        Ok(())
    }
}

/// Longest certificate of a [`ComputeAuthority`], bytes: of some 500 with the keys of `ssi-hv pki`,
/// and some 1,400 with RSA keys of 4,096 bits and few extensions.
pub const AUTHORITY_BYTES_MAX: usize = 1900;

/// Longest certificates of all authorities of a process, bytes: two while one replaces the other.
pub const AUTHORITIES_BYTES_MAX: usize = 4096;

/// Most authorities of a process.
pub const AUTHORITIES_MAX: usize = 4;

/// An authority by which the VM's process on a node knows its donors.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct ComputeAuthority {
    /// The cluster; at most [`MEMBER_NAME_BYTES_MAX`] bytes.
    pub cluster: String,
    /// The certificate of the authority, as DER.
    pub certificate: Vec<u8>,
}

impl ComputeAuthority {
    /// Checks the values by themselves. Returns the length of the certificate.
    ///
    /// # Errors
    ///
    /// Fails with the reason when something is too long, or there is no certificate.
    pub fn check(&self) -> Result<usize, String> {
        let (name, bytes) = (self.cluster.len(), self.certificate.len());
        if name > MEMBER_NAME_BYTES_MAX {
            return Err(format!(
                "name of a cluster of {name} bytes, {MEMBER_NAME_BYTES_MAX} is the limit"
            ));
        }
        if !(1..=AUTHORITY_BYTES_MAX).contains(&bytes) {
            return Err(format!(
                "certificate of an authority of {bytes} bytes, 1 to {AUTHORITY_BYTES_MAX} are \
                 possible"
            ));
        }
        Ok(bytes)
    }
}

/// The end of the process of a VM on a node.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct ComputeEnd {
    /// Why it ended, for people; empty when the VM has ended.
    pub reason: String,
}

/// The time stamp counter of a node's host, for a comparison with another one's.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct NodeClock {
    /// The counter when the node answered.
    pub ticks: u64,
    /// What the node's KVM says of it; `None` where there is none.
    pub rate: Option<ClockRate>,
    /// How many vCPUs the node lends.
    pub cpus: u8,
    /// How many of these nobody has.
    pub free: u8,
}

/// The rate of a host's time stamp counter.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct ClockRate {
    /// In kHz.
    pub khz: u32,
    /// Whether KVM can give a vCPU's counter another rate.
    pub scales: bool,
}

/// Longest reason of an end, bytes.
pub const COMPUTE_REASON_BYTES_MAX: usize = 512;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{CONTROL_BYTES_MAX, DelegateRequest, Token, encode_message};

    fn request() -> ComputeRequest {
        ComputeRequest {
            name: "web".to_owned(),
            vm: [1; 16],
            secret: VmSecret([2; 32]),
            me: 1,
            nodes: 2,
            cpus: 1,
            memory_bytes: 64 << 20,
            hotplug_bytes: 0,
            lent_bytes: 32 << 20,
            merge_tables: false,
            in_order: false,
            rdma: false,
        }
    }

    #[test]
    fn a_request_that_cannot_be_right_is_refused_with_its_values() {
        assert_eq!(request().check(), Ok(()));
        for (me, nodes, is_right) in [
            (1, 16, true),
            (15, 16, true),
            (0, 2, false),
            (2, 2, false),
            (1, 17, false),
        ] {
            let asked = ComputeRequest {
                me,
                nodes,
                ..request()
            };
            assert_eq!(asked.check().is_ok(), is_right, "{me} of {nodes}");
        }
        let refused = |asked: ComputeRequest| asked.check().expect_err("refused").to_string();
        let long = ComputeRequest {
            name: "x".repeat(65),
            ..request()
        };
        assert!(refused(long).contains("65 bytes, 64 is the limit"));
        let idle = ComputeRequest {
            cpus: 0,
            ..request()
        };
        assert!(refused(idle).contains("0 vCPUs"));
        for memory_bytes in [0, 4097] {
            let odd = ComputeRequest {
                memory_bytes,
                ..request()
            };
            assert!(refused(odd).contains(&memory_bytes.to_string()));
        }
        for lent_bytes in [0, 4097, (64 << 20) + 4096] {
            let odd = ComputeRequest {
                lent_bytes,
                ..request()
            };
            assert!(refused(odd).contains(&format!("{lent_bytes} bytes to lend")));
        }
        let more = |hotplug_bytes, lent_bytes| ComputeRequest {
            hotplug_bytes,
            lent_bytes,
            ..request()
        };
        assert_eq!(more(2 << 20, 66 << 20).check(), Ok(()));
        assert!(refused(more(2 << 20, 68 << 20)).contains("guest memory of 69206016"));
        assert!(refused(more(4096, 4096)).contains("4096 bytes of memory that may be added"));
        let endless = u64::MAX - u64::MAX % ADDED_BYTES;
        assert!(refused(more(endless, 4096)).contains("is the limit"));
        assert!(!format!("{:?}", request()).contains("[2, 2"));
    }

    #[test]
    fn the_longest_messages_fit_into_a_frame() {
        let address = SocketAddr::from(([0xffff; 8], u16::MAX));
        let table = ComputeTable(vec![
            ComputeMember {
                memory: address,
                vcpus: address,
                lent_bytes: u64::MAX,
                certificate: Some([0xff; 32]),
            };
            COMPUTE_NODES_MAX
        ]);
        assert!(encode_message(&table).len() <= CONTROL_BYTES_MAX);
        let lease = ComputeLease {
            donor: u8::MAX,
            address,
            grant: LeaseGrant {
                token: Token([0xff; 16]),
                bytes: u64::MAX,
                duration_ms: u32::MAX,
            },
            over_udp: true,
            fingerprint: Some([0xff; 32]),
            name: Some("x".repeat(MEMBER_NAME_BYTES_MAX)),
            grace_ms: u32::MAX,
            sealed: true,
            checksum: true,
            compression: Some(true),
        };
        assert!(encode_message(&lease).len() <= CONTROL_BYTES_MAX);
        let named = |bytes: usize| ComputeLease {
            name: Some("x".repeat(bytes)),
            grant: LeaseGrant {
                bytes: 4096,
                ..lease.grant.clone()
            },
            ..lease.clone()
        };
        assert_eq!(named(63).check(), Ok(()));
        assert_eq!(named(64).check(), Err(ComputeLeaseError::Name(64)));
        let authority = |name: usize, bytes: usize| ComputeAuthority {
            cluster: "x".repeat(name),
            certificate: vec![0xff; bytes],
        };
        let longest = authority(MEMBER_NAME_BYTES_MAX, AUTHORITY_BYTES_MAX);
        assert_eq!(longest.check(), Ok(AUTHORITY_BYTES_MAX));
        assert!(encode_message(&longest).len() <= CONTROL_BYTES_MAX);
        for (name, bytes, text) in [
            (64, 1, "64 bytes, 63"),
            (1, 0, "of 0 bytes"),
            (1, 1901, "of 1901 bytes"),
        ] {
            let refused = authority(name, bytes).check().expect_err(text);
            assert!(refused.contains(text), "{refused}");
        }
        let delegated = DelegateRequest {
            token: Token([0xff; 16]),
            certificate: [0xff; 32],
        };
        assert_eq!(encode_message(&delegated).len(), 48);
        assert!(format!("{lease:?}").contains("Token(..)"), "{lease:?}");
        let end = ComputeEnd {
            reason: "x".repeat(COMPUTE_REASON_BYTES_MAX),
        };
        assert!(encode_message(&end).len() <= CONTROL_BYTES_MAX);
        let long = ComputeRequest {
            name: "x".repeat(64),
            memory_bytes: u64::MAX,
            hotplug_bytes: u64::MAX,
            lent_bytes: u64::MAX,
            ..request()
        };
        assert!(encode_message(&long).len() <= CONTROL_BYTES_MAX);
    }
}
