//! Connections to a lease for measuring: beside those that its pages travel on, and for a while.

use super::rdma::{RdmaLinkConfig, RdmaLinkError, connect};
use super::{LinkPort, LinkRequest};
use crate::control::{ControlError, ControlStream};
use crate::donor::loopback::LoopbackTransport;
use crate::donor::pool::Lease;
use crate::transport::Compression;
use crate::transport::measure::Gauge;
use crate::transport::rdma::probe::ProbeLane;
use crate::transport::tcp::TcpTransport;
use crate::wire::TrafficClass;
use crossbeam_channel::bounded;
use std::sync::Arc;

/// A connection by TCP or UDP.
///
/// # Errors
///
/// When it cannot be made, or the donor refuses it.
pub fn stream(config: &RdmaLinkConfig) -> Result<Gauge, ControlError> {
    let (address, class) = (config.address, TrafficClass::Probe);
    let mut stream = ControlStream::connect_by(address, &config.carrier)?;
    stream.attach(config.token, class, &config.ends)?;
    let (give, connections) = bounded(1);
    let (requests, requested) = bounded(1);
    let _ = give.send(stream.into_stream());
    let ends = config.ends.clone();
    let port = LinkPort::new(class, ends, requests, connections, Arc::default());
    let transport = TcpTransport::new(port, class, false, Compression::Off, Arc::default());
    // A transport asks for another connection when its own is of no more use.
    let failure = move || match requested.try_recv() {
        Ok(LinkRequest::Connection(_, why)) => Some(why.to_string()),
        Ok(LinkRequest::Stop) | Err(_) => None,
    };
    Ok(Gauge::new(
        Box::new(transport),
        config.bytes,
        Box::new(failure),
    ))
}

/// Connects by RDMA. Verbs may hang: call this on a thread that no other thread has to join.
///
/// # Errors
///
/// See [`RdmaLinkError`].
pub fn rdma(config: &RdmaLinkConfig) -> Result<Gauge, RdmaLinkError> {
    let (lane, ..) = connect(config, TrafficClass::Probe, &mut || true)?;
    let (failed, failures) = bounded(1);
    let transport = ProbeLane::new(lane, failed);
    Ok(Gauge::new(
        Box::new(transport),
        config.bytes,
        Box::new(move || failures.try_recv().ok()),
    ))
}

/// Connects by RDMA for pages that are written back, which replaces another such connection of the
/// lease. As for [`rdma`], verbs may hang.
///
/// # Errors
///
/// See [`RdmaLinkError`].
pub fn rdma_writes(config: &RdmaLinkConfig) -> Result<Gauge, RdmaLinkError> {
    let (lane, ..) = connect(config, TrafficClass::Bulk, &mut || true)?;
    let (failed, failures) = bounded(1);
    let transport = ProbeLane::writing(lane, failed);
    Ok(Gauge::new(
        Box::new(transport),
        config.bytes,
        Box::new(move || failures.try_recv().ok()),
    ))
}

/// No connection: a lease in this process.
#[must_use]
pub fn loopback(lease: Arc<Lease>) -> Gauge {
    let bytes = lease.bytes();
    let transport = LoopbackTransport::new(lease);
    Gauge::new(Box::new(transport), bytes, Box::new(|| None))
}

#[cfg(test)]
mod tests;
