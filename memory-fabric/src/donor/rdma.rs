//! RDMA connections of VMs: they are set up here, and then need no CPU of the donor.

use super::TAKE_OVER_TIMEOUT;
use super::places::{Place, Purpose};
use super::pool::{Lease, Pool, SessionKind};
use super::refuse::{refuse, refuse_session, refuse_unknown};
use crate::control::{ControlError, ControlStream};
use crate::link::describe;
use crate::transport::rdma::endpoint::Endpoint;
use crate::transport::rdma::resources::{Quota, Share, Usage};
use crate::transport::rdma::{
    Access, CompletionQueue, ConnectAnswer, ConnectRequest, Device, DeviceChoice, QueuePair,
    RdmaError, Settings,
};
use crate::wire::{AttachRequest, Attached, FrameKind, Refusal, TrafficClass};
use fabric_host::{Seldom, lock};
use std::collections::BTreeMap;
use std::io::Read;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// Limit of RDMA connections of a node; each has a queue pair, and a place among those of leases.
pub const CONNECTIONS_MAX: u32 = 1024;

/// An RDMA connection of a VM. It contains no keys or packet numbers, which would allow others to
/// access the connection.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct RdmaConnection {
    /// The VM's name.
    pub vm: String,
    /// Its traffic class.
    pub class: TrafficClass,
    /// Origin of the VM's control connection.
    pub peer: SocketAddr,
    /// The local device.
    pub device: String,
    /// This end.
    pub here: PairAddress,
    /// The VM's.
    pub there: PairAddress,
}

/// Address of a queue pair.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct PairAddress {
    /// Its number.
    pub queue_pair: u32,
    /// The address of its port; on InfiniBand the global identifier, in the same form.
    pub address: IpAddr,
    /// The local identifier of its port; 0 on Ethernet.
    pub lid: u16,
}

impl From<&Endpoint> for PairAddress {
    fn from(end: &Endpoint) -> Self {
        Self {
            queue_pair: end.queue_pair,
            address: end.gid.to_ip(),
            lid: end.lid,
        }
    }
}

/// The RDMA connections of a donor, and their limit.
#[derive(Debug)]
pub(super) struct Connections {
    quota: Arc<Quota>,
    /// Bytes of leases that are registered, each once.
    memory: Arc<Quota>,
    /// Key: the device, and the number of this end's queue pair.
    active: Mutex<BTreeMap<(String, u32), RdmaConnection>>,
}

impl Connections {
    /// Creates the list with a limit, which is at most [`CONNECTIONS_MAX`], and one of the bytes that
    /// they access, which is otherwise what the node lends.
    pub(super) fn new(most: Option<u32>, bytes_max: Option<u64>) -> Self {
        let most = most.unwrap_or(CONNECTIONS_MAX).into();
        let remedy = "raise --rdma-connections of the node, up to 1024, or end VMs";
        const { assert!(CONNECTIONS_MAX == 1024, "the remedy names it") };
        let more = "raise --rdma-memory of the node, or end VMs";
        Self {
            quota: Quota::new("RDMA connections", "this node", Some(most), remedy),
            memory: Quota::new("bytes for RDMA", "this node", bytes_max, more),
            active: Mutex::default(),
        }
    }

    pub(super) fn usage(&self) -> Usage {
        self.quota.usage()
    }

    pub(super) fn active(&self) -> Vec<RdmaConnection> {
        lock(&self.active).values().cloned().collect()
    }

    fn note(&self, connection: RdmaConnection) -> Noted<'_> {
        let key = (connection.device.clone(), connection.here.queue_pair);
        lock(&self.active).insert(key.clone(), connection);
        Noted {
            connections: self,
            key,
        }
    }
}

/// Lists a connection until it is dropped.
struct Noted<'a> {
    connections: &'a Connections,
    key: (String, u32),
}

impl Drop for Noted<'_> {
    fn drop(&mut self) {
        lock(&self.connections.active).remove(&self.key);
    }
}

/// Log lines about ports that are not the peer's.
static STRANGERS: Seldom = Seldom::notices();

/// Serves a request for an RDMA connection until that ends.
pub(super) fn serve(
    pool: &Pool,
    settings: &Settings,
    connections: &Connections,
    place: &dyn Place,
    mut control: ControlStream,
    request: &ConnectRequest,
) -> Result<(), ControlError> {
    let AttachRequest {
        token,
        class,
        epoch,
        ..
    } = request.attach;
    let Some(lease) = pool.find_for(&token, control.identity()) else {
        return refuse_unknown(&mut control);
    };
    if let Err(full) = place.establish(Purpose::Lasting) {
        return refuse(&mut control, Refusal::Busy, full.to_string());
    }
    if control.is_udp() {
        let text = "RDMA is set up by TCP".to_owned();
        return refuse(&mut control, Refusal::NoRdma, text);
    }
    if let Err(error) = request.endpoint.check() {
        return refuse(&mut control, Refusal::Malformed, error.to_string());
    }
    let mut allowed = lease.gids();
    allowed.extend(&settings.peers);
    let port = request.endpoint.check_port(control.peer().ip(), &allowed);
    if let Err(error) = port {
        if let Some(unreported) = STRANGERS.pass(Instant::now()) {
            tracing::warn!(peer = %control.peer(), vm = lease.vm, unreported, "RDMA refused: {error}");
        }
        return refuse(&mut control, Refusal::NoRdma, error.to_string());
    }
    if settings.device == DeviceChoice::None {
        let text = "this node does without RDMA (--rdma-device none)".to_owned();
        return refuse(&mut control, Refusal::NoRdma, text);
    }
    let setup = match lease.take_for_rdma(&connections.memory) {
        Ok(setup) => setup,
        Err(why) => return refuse(&mut control, Refusal::NoRdma, why),
    };
    let peer = control.peer();
    let local = control.local()?;
    let stream = control.into_stream();
    let kind = SessionKind::Rdma(class);
    let begun = lease.begin_session(kind, stream.closer(), epoch, TAKE_OVER_TIMEOUT);
    let mut control = ControlStream::accepted(stream, peer);
    if let Err(error) = begun {
        return refuse_session(&mut control, class, &error);
    }
    // A connection that this one replaces has returned its share by now.
    let connected = connections.quota.take().and_then(|share| {
        let ends = connect(&lease, settings, local.ip(), request, &peer.to_string())?;
        Ok(ends.map(|(pair, answer)| (pair, answer, share)))
    });
    drop(setup);
    let served = match connected {
        Ok(Some((pair, answer, share))) => {
            let stamp = Attached::new(&request.attach).accepted();
            let sent = control.send_stamped(FrameKind::Connected, &answer, stamp);
            if sent.is_ok() {
                tracing::debug!(%peer, ?class, "RDMA connection");
                let noted = connections.note(RdmaConnection {
                    vm: lease.vm.clone(),
                    class,
                    peer,
                    device: pair.device().to_owned(),
                    here: (&answer.endpoint).into(),
                    there: (&request.endpoint).into(),
                });
                if let Ok(stream) = control.into_socket() {
                    wait_for_end(stream);
                }
                drop(noted);
            }
            // Before the session counts as ended.
            if let (Some(domain), TrafficClass::Bulk) = (pair.end(), class) {
                lease.expect_late_writes(domain);
            }
            drop::<Share>(share);
            sent
        }
        Ok(None) => refuse_unknown(&mut control),
        Err(error) => {
            let text = describe(&error);
            refuse(&mut control, Refusal::NoRdma, text)
        }
    };
    lease.end_session(kind, epoch);
    served
}

/// Creates this end of a connection. Returns `None` when the lease has ended.
fn connect(
    lease: &Arc<Lease>,
    settings: &Settings,
    local: std::net::IpAddr,
    request: &ConnectRequest,
    peer: &str,
) -> Result<Option<(QueuePair, ConnectAnswer)>, RdmaError> {
    let (device, route) = Device::for_peer(settings, local)?;
    let Some((domain, memory)) = lease.export(&device)? else {
        return Ok(None);
    };
    // On the device with which the memory is registered, which may have been open before.
    let queue = CompletionQueue::silent(domain.device())?;
    // A connection for reading has no other rights.
    let access = match request.attach.class {
        TrafficClass::Bulk => Access::RemoteWrite,
        TrafficClass::Urgent | TrafficClass::Prefetch | TrafficClass::Probe => Access::RemoteRead,
    };
    let mut pair = QueuePair::new(&domain, &queue, &route, 1, access, peer)?;
    // This end sends no requests, so that nothing is repeated.
    pair.connect(&request.endpoint, settings.retries)?;
    let answer = ConnectAnswer {
        endpoint: pair.endpoint(),
        memory,
    };
    Ok(Some((pair, answer)))
}

/// Waits until the VM, or the end of the lease, closes the connection. There is no deadline, since
/// the lease has one.
fn wait_for_end(mut stream: TcpStream) {
    if stream.set_read_timeout(None).is_err() {
        return;
    }
    // Nothing is sent on it; any data ends it.
    let mut byte = [0];
    while let Err(error) = stream.read(&mut byte) {
        if error.kind() != std::io::ErrorKind::Interrupted {
            break;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::rdma::RdmaError;

    fn connection(queue_pair: u32) -> RdmaConnection {
        let end = |queue_pair, address: &str| PairAddress {
            queue_pair,
            address: address.parse().expect("an address"),
            lid: 0,
        };
        RdmaConnection {
            vm: "web".to_owned(),
            class: TrafficClass::Urgent,
            peer: ([10, 77, 0, 1], 4000).into(),
            device: "rxe0".to_owned(),
            here: end(queue_pair, "10.77.0.2"),
            there: end(99, "10.77.0.1"),
        }
    }

    #[test]
    fn connections_are_listed_as_long_as_they_last() {
        let connections = Connections::new(None, None);
        assert_eq!(connections.usage().limit, Some(1024));
        let (first, _second) = (
            connections.note(connection(17)),
            connections.note(connection(18)),
        );
        assert_eq!(connections.active(), [connection(17), connection(18)]);
        drop(first);
        assert_eq!(connections.active(), [connection(18)]);
    }

    #[test]
    fn leases_for_rdma_together_have_a_limit_and_each_counts_once() {
        const PAGE: u64 = 4096;
        let connections = Connections::new(None, Some(5 * PAGE));
        let second = std::time::Duration::from_secs(1);
        let pool = Pool::new(8 * PAGE, second);
        let lend = |pages: u64| {
            let lease = pool.lend("web".into(), pages * PAGE, false, second);
            lease.expect("free")
        };
        let (one, other) = (lend(3), lend(3));
        let memory = &connections.memory;
        let first = one.take_for_rdma(memory).expect("within the limit");
        drop(one.take_for_rdma(memory).expect("it is counted already"));
        assert_eq!(
            other.take_for_rdma(memory).expect_err("6 pages"),
            "12288 bytes are asked for, and 12288 of 20480 bytes for RDMA of this node are in use; \
             raise --rdma-memory of the node, or end VMs"
        );
        drop(first);
        drop(other.take_for_rdma(memory).expect("there is room again"));
        assert_eq!(memory.usage().in_use, 0);
    }

    #[test]
    fn one_more_than_the_limit_is_refused_with_the_flag_that_raises_it() {
        let connections = Connections::new(Some(1), None);
        let _one = connections.quota.take().expect("there is one");
        let error = connections.quota.take().map(drop).expect_err("no more");
        assert!(matches!(error, RdmaError::Exhausted { limit: 1, .. }));
        let text = error.to_string();
        assert!(
            text.starts_with("1 of 1 RDMA connections of this node are in use;")
                && text.contains("--rdma-connections"),
            "{text}"
        );
    }
}
