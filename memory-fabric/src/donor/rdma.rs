//! RDMA connections of VMs: set up here, and then none of this processor's business.

use super::pool::{Lease, Pool, SessionKind};
use super::server::{TAKE_OVER_TIMEOUT, refuse, refuse_unknown};
use crate::control::{ControlError, ControlStream};
use crate::link::describe;
use crate::transport::rdma::{
    Access, CompletionQueue, ConnectAnswer, ConnectRequest, Device, DeviceChoice, QueuePair,
    RdmaError, pair::NOT_READY_RETRIES,
};
use crate::wire::{FrameKind, Refusal, TrafficClass};
use std::io::Read;
use std::net::TcpStream;

/// Serves a request for an RDMA connection, until that ends.
pub(super) fn serve(
    pool: &Pool,
    choice: &DeviceChoice,
    mut control: ControlStream,
    request: &ConnectRequest,
) -> Result<(), ControlError> {
    let Some(lease) = pool.find(&request.token) else {
        return refuse_unknown(&mut control);
    };
    if *choice == DeviceChoice::None {
        let text = "this node does without RDMA (--rdma-device none)".to_owned();
        return refuse(&mut control, Refusal::NoRdma, text);
    }
    if let Err(error) = request.endpoint.check() {
        return refuse(&mut control, Refusal::Malformed, error.to_string());
    }
    let peer = control.peer();
    let local = control.local()?;
    let broken = |error| ControlError::Stream(peer, error);
    let stream = control.into_stream();
    let kind = SessionKind::Rdma(request.class);
    let registered = stream.try_clone().map_err(broken)?;
    if let Err(error) = lease.begin_session(kind, registered, TAKE_OVER_TIMEOUT) {
        let mut control = ControlStream::accepted(stream, peer);
        let text = format!("the RDMA connection there is does not end: {error}");
        return refuse(&mut control, Refusal::Busy, text);
    }
    let mut control = ControlStream::accepted(stream, peer);
    let connected = connect(&lease, choice, local.ip(), request, &peer.to_string());
    let served = match connected {
        Ok(Some((pair, answer))) => {
            let sent = control.send(FrameKind::Connected, &answer);
            if sent.is_ok() {
                tracing::debug!(%peer, class = ?request.class, "RDMA connection");
                wait_for_end(control.into_stream());
            }
            // Before the session counts as ended.
            drop(pair);
            sent
        }
        Ok(None) => refuse_unknown(&mut control),
        Err(error) => {
            let text = describe(&error);
            refuse(&mut control, Refusal::NoRdma, text)
        }
    };
    lease.end_session(kind);
    served
}

/// Makes this end of a connection. `None` when the lease has ended.
fn connect(
    lease: &Lease,
    choice: &DeviceChoice,
    local: std::net::IpAddr,
    request: &ConnectRequest,
    peer: &str,
) -> Result<Option<(QueuePair, ConnectAnswer)>, RdmaError> {
    let (device, route) = Device::for_peer(choice, local)?;
    let Some((domain, memory)) = lease.export(&device)? else {
        return Ok(None);
    };
    // Of the device that the memory is registered with, which may have been open before.
    let queue = CompletionQueue::silent(domain.device())?;
    // A connection for reading cannot be used for anything else.
    let access = match request.class {
        TrafficClass::Bulk => Access::RemoteWrite,
        TrafficClass::Urgent | TrafficClass::Prefetch => Access::RemoteRead,
    };
    let mut pair = QueuePair::new(&domain, &queue, &route, 1, access, peer)?;
    // This end asks for nothing.
    pair.connect(&request.endpoint, NOT_READY_RETRIES)?;
    let answer = ConnectAnswer {
        endpoint: pair.endpoint(),
        memory,
    };
    Ok(Some((pair, answer)))
}

/// Waits until the VM, or the end of the lease, closes the connection. That has no deadline: the
/// lease has one.
fn wait_for_end(mut stream: TcpStream) {
    if stream.set_read_timeout(None).is_err() {
        return;
    }
    // Nothing is sent on it; whatever comes ends it.
    let mut byte = [0];
    while let Err(error) = stream.read(&mut byte) {
        if error.kind() != std::io::ErrorKind::Interrupted {
            break;
        }
    }
}
