//! The process to which the owner of a lease has delegated its use.

use super::Lease;
use crate::transport::rdma::resources::Share;
use fabric_host::lock;
use fabric_identity::{Delegation, Fingerprint};
use fabric_transport::tls::Peer;
use std::sync::Arc;

/// The use of a lease by a process that shows a certificate of its own.
#[derive(Debug)]
pub(in crate::donor) struct Delegated {
    /// The certificate, which is accepted until this is dropped.
    pub(in crate::donor) to: Delegation,
    /// The owner, with the certificate with which it has delegated. What ends the connections of
    /// that one ends those of the process.
    pub(in crate::donor) by: Arc<Peer>,
    /// Of the buffers of connections, for what the owner has shown.
    pub(in crate::donor) _share: Share,
}

impl Lease {
    /// Delegates the lease. Connections of a process that had it before are closed, and those of
    /// the owner, which may make others. Returns false if the lease has ended.
    pub(in crate::donor) fn delegate(&self, next: Delegated) -> bool {
        let mut delegated = lock(&self.delegated);
        // Its end takes what is here, after it was noted.
        if self.has_ended() {
            return false;
        }
        let certificate = next.to.certificate();
        let former = delegated.replace(next);
        drop(delegated);
        if former.is_some_and(|former| former.to.certificate() != certificate) {
            self.controls.close_all();
            self.sessions.shut_down(|_| true);
        }
        true
    }

    /// Returns the owner, if the lease is delegated to the process with this certificate.
    pub(in crate::donor) fn delegated_to(&self, certificate: Fingerprint) -> Option<Arc<Peer>> {
        let delegated = lock(&self.delegated);
        let delegated = delegated.as_ref()?;
        (delegated.to.certificate() == certificate).then(|| Arc::clone(&delegated.by))
    }

    /// Ends the delegation, when the lease has ended.
    pub(super) fn end_delegation(&self) {
        let ended = lock(&self.delegated).take();
        drop(ended);
    }
}
