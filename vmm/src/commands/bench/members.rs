//! A cluster of one run: certificates of a node and a VM, for measurements under TLS.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context as _, Result};
use fabric_identity::{ExpectedNode, Name, Role, SharedCredentials};
use fabric_pki::{Authority, Validity};
use fabric_transport::stream::Carrier;

/// How long the certificates are valid.
const VALIDITY: Validity = Validity { days: 2 };

/// The credentials of a donor and of a VM that knows it by its name.
#[derive(Clone, Debug)]
pub(super) struct Members {
    pub(super) node: Arc<SharedCredentials>,
    pub(super) vm: Arc<SharedCredentials>,
    pub(super) node_name: Name,
}

impl Members {
    /// The node, and the directory of its certificate.
    pub(super) const NODE: &str = "node/donor";

    /// Makes an authority and certificates in a directory that is removed at once.
    pub(super) fn create() -> Result<Self> {
        let files = tempfile::tempdir().context("cannot create a directory for certificates")?;
        Self::create_at(files.path())
    }

    /// The same in a directory, where that of the node is [`NODE`](Self::NODE).
    pub(super) fn create_at(path: &Path) -> Result<Self> {
        let cluster = "bench".parse()?;
        let mut authority = Authority::create(&path.join("authority"), cluster, VALIDITY)?;
        let mut member = |holder: &str, role| -> Result<_> {
            let directory = path.join(holder);
            authority.issue(&holder.parse()?, Validity { days: 1 }, &directory)?;
            Ok(SharedCredentials::load(&directory, role)?)
        };
        Ok(Self {
            node: member(Self::NODE, Role::Node)?,
            vm: member("vm/bench", Role::Vm)?,
            node_name: "donor".parse()?,
        })
    }

    /// Returns what connections to the donor are made of.
    pub(super) fn carrier(&self) -> Carrier {
        Carrier::Tls(ExpectedNode {
            credentials: Arc::clone(&self.vm),
            name: self.node_name.clone(),
        })
    }
}
