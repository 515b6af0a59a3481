//! Leases that other processes of a VM use, each with a certificate of its own.
//!
//! A donor lends to the certificate of the VM, whose key stays on its host. The VM names the
//! certificate of a process to the donor, which lets that process use one lease from then on, for
//! as long as it accepts the certificate with which the VM has done so. So the VM does it again
//! when it has another one.

use super::LinkConfig;
use crate::control::{ControlError, ControlStream};
use crate::homes::NodeId;
use crate::stream::Carrier;
use crate::wire::{DelegateRequest, FrameKind, LeaseStatus, Refusal, Token};
use fabric_identity::{Credentials, Fingerprint};
use std::net::SocketAddr;
use std::sync::Arc;

/// The use of a lease by another process.
#[derive(Clone, Debug)]
pub struct Delegation {
    node: NodeId,
    address: SocketAddr,
    carrier: Carrier,
    request: DelegateRequest,
    /// With what it was done last: the donor keeps all certificates that the VM has shown.
    shown: Option<Arc<Credentials>>,
}

/// What became of a delegation.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Delegated {
    /// It is as before.
    Same,
    /// It was done with other certificates of the VM.
    Again,
    /// The lease has ended.
    Ended,
}

impl Delegation {
    pub(super) fn new(config: &LinkConfig, token: Token, to: Fingerprint) -> Self {
        Self {
            node: config.node,
            address: config.address,
            carrier: config.carrier.clone(),
            request: DelegateRequest {
                token,
                certificate: to.bytes(),
            },
            shown: None,
        }
    }

    /// Returns the donor.
    #[must_use]
    pub const fn node(&self) -> NodeId {
        self.node
    }

    /// Delegates the lease, unless that was done with the certificates that the VM has now.
    ///
    /// # Errors
    ///
    /// When the donor is absent, refuses or breaks the protocol.
    pub fn refresh(&mut self) -> Result<Delegated, ControlError> {
        let shown = match &self.carrier {
            Carrier::Tls(expected) | Carrier::Quic(expected) => {
                Some(expected.credentials.current())
            }
            Carrier::Tcp | Carrier::Udp(_) => None,
        };
        let is_same = |(now, before)| Arc::ptr_eq(now, before);
        if shown.as_ref().zip(self.shown.as_ref()).is_some_and(is_same) {
            return Ok(Delegated::Same);
        }
        let mut control = ControlStream::connect_by(self.address, &self.carrier)?;
        let asked = control.call(FrameKind::Delegate, &self.request, FrameKind::Status);
        match asked {
            Ok(LeaseStatus { .. }) => {
                self.shown = shown;
                Ok(Delegated::Again)
            }
            Err(ControlError::Refused {
                refusal: Refusal::UnknownLease,
                ..
            }) => Ok(Delegated::Ended),
            Err(error) => Err(error),
        }
    }
}
