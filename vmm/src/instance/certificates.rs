//! The certificates of nodes that run vCPUs, while a VM runs.
//!
//! The connection to such a node lasts as long as the VM, so TLS checks its certificate once. Here it
//! is checked again and again: it expires, or a list of revoked certificates names it. A node that
//! shows another certificate by then, a renewed one, is as good as before.
//!
//! Donors let the processes on nodes use leases for as long as they accept the certificate with
//! which this host has delegated these, so it does that again when it has another one.

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use fabric_identity::presented::Presented;
use fabric_identity::{CertificateDer, SharedCredentials};
use memory_fabric::compute::{Carrier, ControlError, ControlStream, NODE_GRACE};
use memory_fabric::link::{Delegated, Delegation};

use crate::failure::describe;
use crate::intervals::Intervals;

/// Interval of the checks: how long a certificate is used after it is not valid any more, as at a
/// node.
const INTERVAL: Duration = Duration::from_secs(2);

/// A node, and the certificate that it has shown last.
#[derive(Debug)]
pub struct ShownBy {
    /// Its place in the VM.
    pub place: u8,
    /// Where it listens.
    pub address: SocketAddr,
    /// How to connect to it.
    pub carrier: Carrier,
    /// The certificate.
    pub chain: Vec<CertificateDer<'static>>,
    /// Since when it is not valid any more and the node cannot be reached, if that is so.
    pub unreachable_since: Option<Instant>,
}

impl ShownBy {
    /// Checks the certificate, and asks for another if it is not valid any more. Returns why the node
    /// has none. One that cannot be reached when its certificate expires may have another, and has as
    /// long to show it as its memory may be out of reach.
    fn check(&mut self, credentials: &SharedCredentials) -> Result<(), String> {
        let Err(why) = credentials.current().confirm(&self.chain) else {
            return Ok(());
        };
        let why = format!("its certificate is not accepted any more ({why})");
        let connected = match ControlStream::connect_by(self.address, &self.carrier) {
            Ok(connected) => connected,
            Err(ControlError::Connect(..)) if self.has_expired() && self.has_time() => {
                return Ok(());
            }
            Err(error) => return Err(format!("{why}: {}", describe(&error))),
        };
        self.unreachable_since = None;
        let chain = connected.chain().ok_or_else(|| why.clone())?;
        tracing::info!(
            "the node at {} shows another certificate now, which is accepted",
            self.address
        );
        self.chain = chain.to_vec();
        Ok(())
    }

    fn has_expired(&self) -> bool {
        let shown = self.chain.first().and_then(|one| Presented::read(one).ok());
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let now = now.map_or(0, |now| i64::try_from(now.as_secs()).unwrap_or(i64::MAX));
        shown.is_some_and(|shown| shown.not_after < now)
    }

    /// Whether the node may still be out of reach.
    fn has_time(&mut self) -> bool {
        let since = self.unreachable_since.get_or_insert_with(Instant::now);
        since.elapsed() < NODE_GRACE
    }
}

/// Delegates leases again if this host has other certificates. After one that fails, the others wait
/// for the next time, and it comes last: a donor that does not answer delays neither them nor the
/// checks for long. `warned` says whether that was logged.
fn delegate(delegations: &mut VecDeque<Delegation>, warned: &mut bool) {
    for _ in 0..delegations.len() {
        let Some(mut delegation) = delegations.pop_front() else {
            return;
        };
        let node = delegation.node();
        let refreshed = delegation.refresh();
        if !matches!(refreshed, Ok(Delegated::Ended)) {
            delegations.push_back(delegation);
        }
        match refreshed {
            Ok(Delegated::Same | Delegated::Ended) => {}
            Ok(Delegated::Again) => {
                tracing::info!(%node, "a lease was delegated again, with another certificate");
            }
            Err(error) => {
                if !std::mem::replace(warned, true) {
                    let error = describe(&error);
                    tracing::warn!(%node, error, "a lease was not delegated again; it is retried");
                }
                return;
            }
        }
    }
    *warned = false;
}

/// Checks certificates until it is dropped, which waits for a connection that it makes.
#[derive(Debug)]
pub struct NodeCertificates {
    _thread: Intervals,
}

impl NodeCertificates {
    /// Starts to check, and to keep up `delegations`. `lost` is called with the place of the first
    /// node that has no valid certificate any more, and the reason; then the checks end.
    pub fn watch(
        mut nodes: Vec<ShownBy>,
        delegations: impl IntoIterator<Item = Delegation>,
        credentials: Arc<SharedCredentials>,
        lost: impl Fn(u8, &str) + Send + 'static,
    ) -> io::Result<Self> {
        let mut delegations: VecDeque<_> = delegations.into_iter().collect();
        let mut warned = false;
        let check = move || {
            credentials.refresh();
            for node in &mut nodes {
                if let Err(why) = node.check(&credentials) {
                    lost(node.place, &why);
                    return ControlFlow::Break(());
                }
            }
            delegate(&mut delegations, &mut warned);
            ControlFlow::Continue(())
        };
        let _thread = Intervals::start("certificates", INTERVAL, check)?;
        Ok(Self { _thread })
    }
}

#[cfg(test)]
mod tests;
