//! The certificates of nodes that run vCPUs, while a VM runs.
//!
//! The connection to such a node lasts as long as the VM, so TLS checks its certificate once. Here it
//! is checked again and again: it expires, or a list of revoked certificates names it. A node that
//! shows another certificate by then, a renewed one, is as good as before.

use std::io;
use std::net::SocketAddr;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

use fabric_identity::{CertificateDer, SharedCredentials};
use memory_fabric::compute::{Carrier, ControlStream};

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
}

impl ShownBy {
    /// Checks the certificate, and asks for another if it is not valid any more. Returns why the node
    /// has none.
    fn check(&mut self, credentials: &SharedCredentials) -> Result<(), String> {
        let Err(why) = credentials.current().confirm(&self.chain) else {
            return Ok(());
        };
        let why = format!("its certificate is not accepted any more ({why})");
        let connected = ControlStream::connect_by(self.address, &self.carrier);
        let connected = connected.map_err(|error| format!("{why}: {}", describe(&error)))?;
        let chain = connected.chain().ok_or_else(|| why.clone())?;
        tracing::info!(
            "the node at {} shows another certificate now, which is accepted",
            self.address
        );
        self.chain = chain.to_vec();
        Ok(())
    }
}

/// Checks certificates until it is dropped, which waits for a connection that it makes.
#[derive(Debug)]
pub struct NodeCertificates {
    _thread: Intervals,
}

impl NodeCertificates {
    /// Starts to check. `lost` is called with the place of the first node that has no valid certificate
    /// any more, and the reason; then the checks end.
    pub fn watch(
        mut nodes: Vec<ShownBy>,
        credentials: Arc<SharedCredentials>,
        lost: impl Fn(u8, &str) + Send + 'static,
    ) -> io::Result<Self> {
        let check = move || {
            credentials.refresh();
            for node in &mut nodes {
                if let Err(why) = node.check(&credentials) {
                    lost(node.place, &why);
                    return ControlFlow::Break(());
                }
            }
            ControlFlow::Continue(())
        };
        let _thread = Intervals::start("certificates", INTERVAL, check)?;
        Ok(Self { _thread })
    }
}
