//! What a node has to know to connect to the other compute nodes.

use std::fmt;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;

use fabric_coherence::{Member, Members};
use ring::digest;

use super::channel::Security;
use crate::ring::Rings;

/// A connection on which nothing arrives for so long is replaced. Heartbeats come 4 times as often.
pub const STALL_DEFAULT: Duration = Duration::from_secs(4);

/// Time for all compute nodes to start.
pub const START_TIMEOUT_DEFAULT: Duration = Duration::from_secs(30);

/// A member that cannot be reached for so long is lost.
pub const GRACE_DEFAULT: Duration = Duration::from_secs(10);

/// The secret of a VM. It never travels between members: they prove to each other that they know it.
#[derive(Clone)]
pub struct Secret(pub [u8; 32]);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// How a node uses RDMA. Bytes in rings are neither encrypted nor authenticated; what is needed to
/// write into them travels on the connections.
#[derive(Clone, Debug)]
pub struct RdmaPeers {
    /// What makes rings.
    pub rings: Arc<dyn Rings>,
    /// Whether nothing else is used. Otherwise TCP is, where rings cannot be made or break again and
    /// again.
    pub is_demanded: bool,
}

/// A node, and the compute nodes that it connects to.
#[derive(Debug)]
pub struct TcpPeersConfig {
    /// This node.
    pub me: Member,
    /// The VM's compute nodes: the same table on each.
    pub members: Members,
    /// Where each member listens, in the order of the table. This node's own address is not used.
    pub addresses: Vec<SocketAddr>,
    /// Where the members before this one connect to.
    pub listener: TcpListener,
    /// The VM.
    pub vm: [u8; 16],
    /// The VM's secret.
    pub secret: Secret,
    /// What makes the connections secure; `None` leaves them plain.
    pub security: Option<Arc<dyn Security>>,
    /// How RDMA is used; `None` for TCP alone.
    pub rdma: Option<RdmaPeers>,
    /// The epoch of all messages.
    pub epoch: u32,
    /// Pages of the guest's memory.
    pub memory_pages: u32,
    /// How long a member may be out of reach.
    pub grace: Duration,
    /// How long nothing may arrive, or be confirmed, on a connection.
    pub stall: Duration,
    /// How long the first connections may take.
    pub start_timeout: Duration,
}

impl TcpPeersConfig {
    /// A configuration with the default times and epoch 0.
    #[must_use]
    pub fn new(
        me: Member,
        members: Members,
        addresses: Vec<SocketAddr>,
        listener: TcpListener,
        memory_pages: u32,
    ) -> Self {
        Self {
            me,
            members,
            addresses,
            listener,
            vm: [0; 16],
            secret: Secret([0; 32]),
            security: None,
            rdma: None,
            epoch: 0,
            memory_pages,
            grace: GRACE_DEFAULT,
            stall: STALL_DEFAULT,
            start_timeout: START_TIMEOUT_DEFAULT,
        }
    }

    /// Checks what only this program can have wrong.
    ///
    /// # Panics
    /// When there is not one address for each member of the table, or this node is none of them.
    pub(super) fn check(&self) {
        let members = self.members.all();
        let count = members.iter().count();
        assert_eq!(self.addresses.len(), count, "an address for each member");
        assert!(members.contains(self.me), "this node is {}", self.me);
    }

    /// A digest of the table: the ids of all members in their order.
    pub(super) fn table(&self) -> [u8; 32] {
        let ids = self.members.all().iter();
        let ids: Vec<u8> = ids
            .filter_map(|member| self.members.id(member))
            .map(|id| id.0)
            .collect();
        let digest = digest::digest(&digest::SHA256, &ids);
        digest.as_ref().try_into().expect("SHA-256 has 32 bytes")
    }
}
