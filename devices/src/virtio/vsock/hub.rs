//! All connections of a guest, and the host sockets that they lead to.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::io::{self, Read};
use std::mem::MaybeUninit;
use std::ops::Bound;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use fabric_host::root::path_now;
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec, eventfd};
use rustix::io::Errno;
use socket2::{Domain, SockAddr, Socket, Type};

use super::connection::{Connection, Next, Ports};
use super::packet::{HOST_CID, Header, TYPE_STREAM, op};

/// Limit of connections: each has a descriptor and a buffer of 64 KiB.
pub(super) const CONNECTIONS_MAX: usize = 256;
/// Limit of host clients that have connected and not named a port yet. One more closes the oldest.
const CLIENTS_MAX: usize = 32;
/// The longest line in which a client names a port.
const CLIENT_LINE_BYTES_MAX: usize = 32;
/// Limit of refusals that wait for room in the guest. At the limit, no more packets are taken from
/// it.
const REFUSALS_MAX: usize = 128;
/// Events read from the host in one call.
const EVENTS_AT_ONCE: usize = 32;

/// The first port of the host's side of connections that the host requests: above those that
/// programs choose themselves.
const HOST_PORT_FIRST: u32 = 1 << 30;

/// The source of an event.
const WAKE_TOKEN: u64 = 0;
const LISTENER_TOKEN: u64 = 1;
const STREAM_TOKEN_FIRST: u64 = 2;

/// A client of the host that has not named a port yet.
#[derive(Debug)]
struct Client {
    token: u64,
    stream: UnixStream,
    line: Vec<u8>,
}

/// The device's state behind its lock: connections and their sockets.
#[derive(Debug)]
pub(super) struct Hub {
    guest_cid: u64,
    path: PathBuf,
    listener: UnixListener,
    epoll: Arc<OwnedFd>,
    /// Readable when there may be something for the guest although no socket became ready.
    wake: OwnedFd,
    next_token: u64,
    next_port: u32,
    clients: VecDeque<Client>,
    connections: BTreeMap<Ports, Connection>,
    /// Connections by the token of their socket, and the reverse.
    by_token: HashMap<u64, Ports>,
    tokens: HashMap<Ports, u64>,
    /// Connections that the guest has closed, by the token of their socket, while the host has yet to
    /// take what the guest sent before. Their ports are free.
    lingering: BTreeMap<u64, Connection>,
    refusals: VecDeque<Header>,
    /// The connection that was served last.
    last: Option<Ports>,
}

impl Hub {
    pub fn new(guest_cid: u64, path: &Path, listener: UnixListener) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let wake = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?;
        for (fd, token) in [
            (wake.as_fd(), WAKE_TOKEN),
            (listener.as_fd(), LISTENER_TOKEN),
        ] {
            epoll::add(&epoll, fd, EventData::new_u64(token), EventFlags::IN)?;
        }
        Ok(Self {
            guest_cid,
            path: path.into(),
            listener,
            epoll: Arc::new(epoll),
            wake,
            next_token: STREAM_TOKEN_FIRST,
            next_port: HOST_PORT_FIRST,
            clients: VecDeque::new(),
            connections: BTreeMap::new(),
            by_token: HashMap::new(),
            tokens: HashMap::new(),
            lingering: BTreeMap::new(),
            refusals: VecDeque::new(),
            last: None,
        })
    }

    /// Readable when a socket is ready.
    pub fn epoll(&self) -> Arc<OwnedFd> {
        Arc::clone(&self.epoll)
    }

    /// Closes all connections.
    pub fn clear(&mut self) {
        self.clients.clear();
        self.connections.clear();
        self.by_token.clear();
        self.tokens.clear();
        self.lingering.clear();
        self.refusals.clear();
    }

    /// Ends all connections, and lets the guest know.
    pub fn reset_all(&mut self) {
        self.connections.values_mut().for_each(Connection::reset);
        self.wake();
    }

    /// Wakes the loop to look for packets to the guest.
    fn wake(&self) {
        // A full counter wakes it as well.
        let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
    }

    /// Handles events of the sockets.
    pub fn take_events(&mut self) {
        loop {
            let mut events = [MaybeUninit::uninit(); EVENTS_AT_ONCE];
            let no_wait = Timespec::default();
            let events = match epoll::wait(&self.epoll, &mut events, Some(&no_wait)) {
                Ok((events, _)) => &*events,
                Err(Errno::INTR) => continue,
                Err(_) => &[],
            };
            for event in events {
                match event.data.u64() {
                    WAKE_TOKEN => {
                        // A spurious wakeup is no error.
                        let _ = rustix::io::read(&self.wake, &mut [0; size_of::<u64>()]);
                    }
                    LISTENER_TOKEN => self.accept(),
                    token => self.stream_ready(token, event.flags),
                }
            }
            if events.len() < EVENTS_AT_ONCE {
                return;
            }
        }
    }

    /// Accepts clients until there is none: edge-triggered events do not repeat.
    fn accept(&mut self) {
        for _ in 0..CLIENTS_MAX {
            let Ok((stream, _)) = self.listener.accept() else {
                return;
            };
            let Some(token) = self.watch(&stream) else {
                continue;
            };
            if self.clients.len() == CLIENTS_MAX {
                self.clients.pop_front();
            }
            self.clients.push_back(Client {
                token,
                stream,
                line: Vec::new(),
            });
            self.client_ready(token);
        }
        self.wake();
    }

    /// Registers a socket for edge-triggered events.
    fn watch(&mut self, stream: &UnixStream) -> Option<u64> {
        let token = self.next_token;
        let flags = EventFlags::IN | EventFlags::OUT | EventFlags::RDHUP | EventFlags::ET;
        stream.set_nonblocking(true).ok()?;
        epoll::add(&self.epoll, stream, EventData::new_u64(token), flags).ok()?;
        self.next_token += 1;
        Some(token)
    }

    fn stream_ready(&mut self, token: u64, events: EventFlags) {
        let is_hung_up = events.intersects(EventFlags::HUP | EventFlags::ERR);
        let connection = self
            .by_token
            .get(&token)
            .and_then(|ports| self.connections.get_mut(ports));
        if let Some(connection) = connection {
            connection.ready(is_hung_up);
        } else if let Some(connection) = self.lingering.get_mut(&token) {
            connection.ready(is_hung_up);
            if !connection.lingers() {
                self.lingering.remove(&token);
            }
        } else {
            self.client_ready(token);
        }
    }

    /// Makes room for one more connection: the oldest of those that the guest has closed goes. Returns
    /// whether there is.
    fn make_room(&mut self) -> bool {
        if self.connections.len() + self.lingering.len() >= CONNECTIONS_MAX {
            self.lingering.pop_first();
        }
        self.connections.len() + self.lingering.len() < CONNECTIONS_MAX
    }

    /// Reads the line in which a client names a port, byte by byte, since the bytes after it are
    /// for the guest.
    fn client_ready(&mut self, token: u64) {
        let Some(at) = self.clients.iter().position(|c| c.token == token) else {
            return;
        };
        let client = &mut self.clients[at];
        loop {
            let mut byte = [0];
            match client.stream.read(&mut byte) {
                Ok(1) if byte == *b"\n" => break,
                Ok(1) if client.line.len() < CLIENT_LINE_BYTES_MAX => client.line.extend(byte),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                // It disconnected, or sent something else.
                _ => {
                    self.clients.remove(at);
                    return;
                }
            }
        }
        let Some(client) = self.clients.remove(at) else {
            return;
        };
        let port = std::str::from_utf8(&client.line)
            .ok()
            .and_then(|line| line.strip_prefix("CONNECT "))
            .and_then(|port| port.trim_end_matches('\r').parse().ok());
        match port {
            Some(guest) if self.make_room() => {
                let host = self.free_port(guest);
                let connection = Connection::asked_by_host(client.stream);
                self.insert(Ports { host, guest }, token, connection);
            }
            // Closing is the answer.
            _ => tracing::debug!("a client of the vsock names no port, or there is no room"),
        }
    }

    /// A port of the host that is free for the guest's port.
    fn free_port(&mut self, guest: u32) -> u32 {
        loop {
            let host = self.next_port;
            self.next_port = host.checked_add(1).unwrap_or(HOST_PORT_FIRST);
            if !self.connections.contains_key(&Ports { host, guest }) {
                return host;
            }
        }
    }

    fn insert(&mut self, ports: Ports, token: u64, connection: Connection) {
        self.connections.insert(ports, connection);
        self.by_token.insert(token, ports);
        self.tokens.insert(ports, token);
    }

    /// Removes a connection, and returns it with the token of its socket.
    fn remove(&mut self, ports: Ports) -> Option<(u64, Connection)> {
        let connection = self.connections.remove(&ports)?;
        let token = self.tokens.remove(&ports)?;
        self.by_token.remove(&token);
        Some((token, connection))
    }

    /// The guest has closed a connection.
    fn close(&mut self, ports: Ports) {
        let closed = self.remove(ports);
        self.lingering
            .extend(closed.filter(|(_, connection)| connection.lingers()));
    }

    /// Whether another packet of the guest can be accepted.
    pub fn has_room(&self) -> bool {
        self.refusals.len() < REFUSALS_MAX
    }

    /// Handles a packet of the guest.
    pub fn take_packet(&mut self, header: &Header, data: &[u8]) {
        self.wake();
        let ports = Ports {
            host: header.target_port,
            guest: header.source_port,
        };
        let meant = header.source_cid == self.guest_cid
            && header.target_cid == HOST_CID
            && header.kind == TYPE_STREAM;
        if !meant {
            return self.refuse(header);
        }
        match self.connections.get_mut(&ports) {
            Some(connection) => {
                if connection.take(header, data, ports.host) == Next::Closed {
                    self.close(ports);
                }
            }
            None if header.op == op::REQUEST => self.connect(ports, header),
            None => self.refuse(header),
        }
    }

    fn refuse(&mut self, header: &Header) {
        if header.op != op::RESET && self.has_room() {
            let mut refusal = header.reset();
            refusal.target_cid = self.guest_cid;
            self.refusals.push_back(refusal);
        }
    }

    /// Connects the guest to the socket of the host's port.
    fn connect(&mut self, ports: Ports, request: &Header) {
        let mut path = path_now(&self.path).into_os_string();
        path.push(format!("_{}", ports.host));
        let connected = if self.make_room() {
            connect(Path::new(&path)).ok()
        } else {
            None
        };
        let watched = connected.and_then(|stream| Some((self.watch(&stream)?, stream)));
        match watched {
            Some((token, stream)) => {
                let connection = Connection::asked_by_guest(stream, request);
                self.insert(ports, token, connection);
            }
            None => self.refuse(request),
        }
    }

    /// The next packet for the guest, and how many bytes of `data` it carries. Connections are
    /// served round-robin.
    pub fn next_packet(&mut self, data: &mut [u8]) -> Option<(Header, usize)> {
        if let Some(refusal) = self.refusals.pop_front() {
            if self.refusals.len() + 1 == REFUSALS_MAX {
                // The guest's packets were held back.
                self.wake();
            }
            return Some((refusal, 0));
        }
        let first = self.last.map_or(Bound::Unbounded, Bound::Excluded);
        let after = self.connections.range((first, Bound::Unbounded));
        let mut order: Vec<Ports> = after.map(|(ports, _)| *ports).collect();
        if let Some(last) = self.last {
            order.extend(self.connections.range(..=last).map(|(ports, _)| *ports));
        }
        for ports in order {
            let Some(connection) = self.connections.get_mut(&ports) else {
                continue;
            };
            let Some((mut header, count, next)) = connection.next_packet(data) else {
                continue;
            };
            header.source_cid = HOST_CID;
            header.target_cid = self.guest_cid;
            header.source_port = ports.host;
            header.target_port = ports.guest;
            header.kind = TYPE_STREAM;
            self.last = Some(ports);
            if next == Next::Closed {
                self.remove(ports);
            }
            return Some((header, count));
        }
        None
    }
}

/// Connects without waiting for a listener that is slow to accept.
fn connect(path: &Path) -> io::Result<UnixStream> {
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    socket.set_nonblocking(true)?;
    socket.connect(&SockAddr::unix(path)?)?;
    Ok(std::os::fd::OwnedFd::from(socket).into())
}
