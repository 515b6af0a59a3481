//! The donor's UDP port: every connection on it gets a separate socket and thread.
//!
//! A socket that is connected to the VM is bound to the same address as the listening one
//! (`SO_REUSEPORT`), and the kernel passes it all packets from that VM. Packets from unknown VMs go
//! to the listening socket. A VM must first prove that it receives packets at its address (RFC
//! 9000, section 8.1.2), so spoofed addresses allocate no state here.

use super::connection::{
    DATAGRAM_BUFFER_BYTES, Datagrams, SOCKET_BUFFER_BYTES, UdpCloser, UdpStream,
};
use super::settings;
use crate::UNKNOWN_BYTES_MAX;
use bytes::BytesMut;
use fabric_identity::{Fingerprint, Identity, SharedCredentials};
use quinn_proto::{DatagramEvent, Endpoint, EndpointConfig, ServerConfig};
use quinn_udp::{RecvMeta, Transmit, UdpSockRef, UdpSocketState};
use socket2::{Domain, Protocol, Socket, Type};
use std::collections::{HashSet, VecDeque};
use std::io::{self, IoSliceMut};
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Interval of checks for the donor's end.
const LOOK_INTERVAL: Duration = Duration::from_millis(250);

/// For this long, no connection is started from the address of an earlier one: packets that arrive
/// here were sent before that connection had its socket, and are retransmitted.
const ARRIVAL_TIME: Duration = Duration::from_secs(2);

/// Limit of addresses that are remembered for that. One that is forgotten earlier may cost a connection
/// that its VM does not use.
const ARRIVALS_MAX: usize = 1024;

/// Addresses from which connections were started a short time ago.
#[derive(Debug, Default)]
struct Arrivals {
    /// In the order of time.
    times: VecDeque<(Instant, SocketAddr)>,
    addresses: HashSet<SocketAddr>,
}

impl Arrivals {
    fn forget(&mut self, now: Instant) {
        while let Some((time, address)) = self.times.front()
            && (self.times.len() > ARRIVALS_MAX
                || now.saturating_duration_since(*time) >= ARRIVAL_TIME)
        {
            self.addresses.remove(address);
            self.times.pop_front();
        }
    }

    fn has(&self, address: SocketAddr) -> bool {
        self.addresses.contains(&address)
    }

    fn note(&mut self, address: SocketAddr, now: Instant) {
        if self.addresses.insert(address) {
            self.times.push_back((now, address));
        }
        self.forget(now);
    }
}

/// Set in the first byte of packets that begin a connection (RFC 9000, section 17.2).
const LONG_HEADER: u8 = 0x80;

/// A UDP port for connections of VMs.
#[derive(Debug)]
pub struct Listener {
    socket: UdpSocket,
    address: SocketAddr,
    config: Arc<EndpointConfig>,
    server: Arc<ServerConfig>,
    shown: Shown,
}

/// What a node shows VMs.
#[derive(Debug)]
enum Shown {
    /// A certificate of its own, with this fingerprint.
    Own(Fingerprint),
    /// That of a member of a cluster. VMs have to show theirs.
    Member(Arc<SharedCredentials>),
}

/// A VM that has proved its address and requests a connection.
#[derive(Debug)]
pub struct Arrival {
    /// Address of the VM.
    pub peer: SocketAddr,
    socket: Arc<UdpSocket>,
    ended: Arc<AtomicBool>,
    config: Arc<EndpointConfig>,
    server: Arc<ServerConfig>,
    of_member: bool,
    first: Datagrams,
}

impl Arrival {
    /// Returns a handle that closes the resulting connection.
    pub fn closer(&self) -> UdpCloser {
        UdpCloser::new(&self.socket, &self.ended)
    }

    /// Establishes the connection.
    pub fn accept(self, deadline: Instant) -> io::Result<UdpStream> {
        UdpStream::accept(
            (self.socket, self.ended),
            self.peer,
            &self.config,
            &self.server,
            self.of_member,
            self.first,
            deadline,
        )
    }
}

/// Limit of datagrams that are received before they are processed.
const QUEUE_MAX: usize = 256;

/// Limit of their bytes.
const QUEUE_BYTES_MAX: usize = 1 << 20;

/// Datagrams that are not processed yet. One that comes when there are too many is dropped.
#[derive(Default)]
struct Queue {
    datagrams: VecDeque<Datagram>,
    bytes: usize,
}

impl Queue {
    fn is_full(&self) -> bool {
        self.datagrams.len() >= QUEUE_MAX || self.bytes >= QUEUE_BYTES_MAX
    }

    fn push(&mut self, datagram: Datagram) {
        if !self.is_full() {
            self.bytes += datagram.bytes.len();
            self.datagrams.push_back(datagram);
        }
    }

    fn pop(&mut self) -> Option<Datagram> {
        let datagram = self.datagrams.pop_front()?;
        self.bytes -= datagram.bytes.len();
        Some(datagram)
    }
}

/// A datagram with its source and destination.
struct Datagram {
    peer: SocketAddr,
    /// This host's address, if the kernel reports it.
    local: Option<IpAddr>,
    bytes: BytesMut,
}

impl Listener {
    /// Listens with these credentials, or else as a new donor with a new fingerprint.
    pub fn bind(
        address: SocketAddr,
        credentials: Option<&Arc<SharedCredentials>>,
    ) -> io::Result<Self> {
        let (tls, shown) = if let Some(credentials) = credentials {
            let shown = Shown::Member(Arc::clone(credentials));
            (settings::member_tls(credentials), shown)
        } else {
            let identity = Identity::generate()?;
            let shown = Shown::Own(identity.fingerprint());
            (settings::open_tls(&identity)?, shown)
        };
        let socket = bound(address)?;
        Ok(Self {
            address: socket.local_addr()?,
            socket,
            config: settings::endpoint(),
            server: Arc::new(settings::server(tls)?),
            shown,
        })
    }

    /// Returns the address on which it listens, with the actual port for port 0.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns the fingerprint of its own certificate; `None` when it shows that of a member.
    #[must_use]
    pub fn fingerprint(&self) -> Option<Fingerprint> {
        match self.shown {
            Shown::Own(fingerprint) => Some(fingerprint),
            Shown::Member(_) => None,
        }
    }

    /// Returns the configuration of a new connection.
    fn server(&self) -> io::Result<Arc<ServerConfig>> {
        match &self.shown {
            Shown::Own(_) => Ok(Arc::clone(&self.server)),
            // They may have been replaced.
            Shown::Member(credentials) => settings::renewed(&self.server, credentials),
        }
    }

    /// Passes new connections to `arrived` until `stopping` is set. It returns whether a connection is
    /// admitted: one that is not may be asked for again at once.
    pub fn run(&self, stopping: &AtomicBool, arrived: &mut dyn FnMut(Arrival) -> bool) {
        let mut endpoint = Endpoint::new(
            Arc::clone(&self.config),
            Some(Arc::clone(&self.server)),
            false,
            None,
        );
        let udp = match UdpSocketState::new(UdpSockRef::from(&self.socket)) {
            Ok(udp) => udp,
            Err(error) => {
                tracing::warn!(%error, "UDP cannot be used");
                return;
            }
        };
        let mut input = vec![0; DATAGRAM_BUFFER_BYTES];
        let mut queue = Queue::default();
        let mut recent = Arrivals::default();
        while !stopping.load(Ordering::SeqCst) {
            let until = Instant::now() + LOOK_INTERVAL;
            if let Err(error) =
                fabric_host::poll::sleep_on(self.socket.as_raw_fd(), libc::POLLIN, Some(until))
            {
                tracing::warn!(%error, "cannot wait for UDP");
                return;
            }
            receive(&udp, &self.socket, &mut input, &mut queue);
            recent.forget(Instant::now());
            while let Some(datagram) = queue.pop() {
                let begins = datagram
                    .bytes
                    .first()
                    .is_some_and(|byte| byte & LONG_HEADER != 0);
                if begins && recent.has(datagram.peer) {
                    continue;
                }
                let arrival = self.handle(&mut endpoint, &udp, datagram, &mut input, &mut queue);
                let peer = arrival.as_ref().map(|arrival| arrival.peer);
                if let Some(peer) = peer.filter(|_| arrival.is_some_and(&mut *arrived)) {
                    recent.note(peer, Instant::now());
                }
            }
        }
    }

    fn handle(
        &self,
        endpoint: &mut Endpoint,
        udp: &UdpSocketState,
        datagram: Datagram,
        input: &mut [u8],
        queue: &mut Queue,
    ) -> Option<Arrival> {
        let Datagram { peer, local, bytes } = datagram;
        let (now, mut response) = (Instant::now(), Vec::new());
        let event = endpoint.handle(now, peer, local, None, bytes.clone(), &mut response)?;
        let transmit = match event {
            DatagramEvent::Response(transmit) => transmit,
            DatagramEvent::NewConnection(incoming) if incoming.remote_address_validated() => {
                // This endpoint keeps no state of it; the connection's own endpoint does.
                endpoint.ignore(incoming);
                let arrival = self.connect(peer, local, bytes, input, queue);
                return arrival
                    .inspect_err(|error| tracing::warn!(%peer, %error, "connection refused"))
                    .ok();
            }
            DatagramEvent::NewConnection(incoming) => {
                endpoint.retry(incoming, &mut response).ok()?
            }
            DatagramEvent::ConnectionEvent(..) => return None,
        };
        let answer = Transmit {
            destination: peer,
            ecn: None,
            contents: &response[..transmit.size],
            segment_size: None,
            // From where the peer expects it, also when this host has several addresses.
            src_ip: local,
        };
        // The peer repeats its request if this response is lost.
        let _ = udp.try_send(UdpSockRef::from(&self.socket), &answer);
        None
    }

    /// Creates the socket of a connection.
    fn connect(
        &self,
        peer: SocketAddr,
        local: Option<IpAddr>,
        first: BytesMut,
        input: &mut [u8],
        queue: &mut Queue,
    ) -> io::Result<Arrival> {
        let mut address = self.address;
        if let (true, Some(local)) = (address.ip().is_unspecified(), local) {
            // The address that the VM uses, in the family of the socket.
            address.set_ip(match (address.ip(), local) {
                (IpAddr::V6(_), IpAddr::V4(local)) => local.to_ipv6_mapped().into(),
                _ => local,
            });
        }
        let socket = bound(address)?;
        socket.connect(peer)?;
        // Between these two calls it may have received packets of other peers.
        let udp = UdpSocketState::new(UdpSockRef::from(&socket))?;
        let mut between = Queue::default();
        receive(&udp, &socket, input, &mut between);
        let (mut bytes, mut first) = (first.len(), vec![first]);
        while let Some(datagram) = between.pop() {
            if datagram.peer != peer {
                queue.push(datagram);
            } else if bytes + datagram.bytes.len() <= UNKNOWN_BYTES_MAX {
                // More than that is lost, and sent again when it is wanted.
                bytes += datagram.bytes.len();
                first.push(datagram.bytes);
            }
        }
        Ok(Arrival {
            peer,
            socket: Arc::new(socket),
            ended: Arc::default(),
            config: Arc::clone(&self.config),
            server: self.server()?,
            of_member: matches!(self.shown, Shown::Member(_)),
            first,
        })
    }
}

/// Creates a socket on an address that other sockets of this process share.
fn bound(address: SocketAddr) -> io::Result<UdpSocket> {
    let socket = Socket::new(
        Domain::for_address(address),
        Type::DGRAM,
        Some(Protocol::UDP),
    )?;
    socket.set_reuse_port(true)?;
    socket.bind(&address.into())?;
    // A smaller buffer loses packets earlier, which are then retransmitted.
    let _ = socket.set_recv_buffer_size(SOCKET_BUFFER_BYTES);
    Ok(socket.into())
}

/// Appends datagrams from a socket to the queue.
fn receive(udp: &UdpSocketState, socket: &UdpSocket, input: &mut [u8], queue: &mut Queue) {
    let mut metas = [RecvMeta::default()];
    loop {
        let mut buffers = [IoSliceMut::new(input)];
        match udp.recv(UdpSockRef::from(socket), &mut buffers, &mut metas) {
            Ok(_) => {
                let [meta] = metas;
                for bytes in input[..meta.len].chunks(meta.stride.max(1)) {
                    queue.push(Datagram {
                        peer: meta.addr,
                        local: meta.dst_ip,
                        bytes: BytesMut::from(bytes),
                    });
                }
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
            // An earlier datagram could not be delivered.
            Err(_) => {}
        }
        if queue.is_full() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_datagrams_and_few_bytes_wait_to_be_processed() {
        let datagram = |bytes| Datagram {
            peer: SocketAddr::from(([127, 0, 0, 1], 1)),
            local: None,
            bytes: BytesMut::zeroed(bytes),
        };
        for (bytes, fit) in [(60_000, 18), (1200, 256)] {
            let mut queue = Queue::default();
            for _ in 0..300 {
                queue.push(datagram(bytes));
            }
            assert_eq!((queue.datagrams.len(), queue.bytes), (fit, fit * bytes));
            assert!(queue.is_full());
            while queue.pop().is_some() {}
            assert_eq!(queue.bytes, 0);
            queue.push(datagram(bytes));
            assert_eq!(queue.bytes, bytes);
        }
    }

    #[test]
    fn few_arrivals_are_remembered_and_for_a_short_time() {
        let mut recent = Arrivals::default();
        let (peer, now) = (
            |port| SocketAddr::from(([127, 0, 0, 1], port)),
            Instant::now(),
        );
        for port in 1..=2000 {
            recent.note(peer(port), now);
            recent.note(peer(port), now);
        }
        assert_eq!((recent.times.len(), recent.addresses.len()), (1024, 1024));
        assert!(recent.has(peer(2000)) && !recent.has(peer(1)));
        recent.forget(now + ARRIVAL_TIME);
        assert!(recent.times.is_empty() && recent.addresses.is_empty());
    }
}
