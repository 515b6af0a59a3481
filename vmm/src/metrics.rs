//! The listener of `--metrics`.

use std::net::SocketAddr;

use anyhow::anyhow;

use crate::control_socket::route::Service;
use crate::control_socket::server::Server;
use crate::failure::Failure;

/// Serves metrics on an address, if there is one. The server stops on drop.
pub fn serve<S: Send + Sync>(
    address: Option<SocketAddr>,
    service: Service<S>,
) -> Result<Option<(Server, SocketAddr)>, Failure> {
    let Some(address) = address else {
        return Ok(None);
    };
    let server = Server::start_on("metrics", address, service);
    server.map(Some).map_err(|error| {
        anyhow!(error)
            .context(format!(
                "cannot listen on --metrics {address}; name another address or port"
            ))
            .into()
    })
}
