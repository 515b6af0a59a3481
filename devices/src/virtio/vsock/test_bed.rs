//! A guest with sockets to its host, for tests.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::io;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::time::Duration;

use vm_memory::{Bytes, GuestAddress};

use super::packet::{HOST_CID, TYPE_STREAM, op};
use super::*;
use crate::virtio::test_driver::{Driver, STARTED, VERSION_1, ring};

pub(super) const CID: u64 = 3;
/// Buffers of the driver for packets: a header and a page.
pub(super) const BUFFERS: u64 = 0x20_0000;
pub(super) const BUFFER_STEP: u64 = 0x2000;
pub(super) const BUFFER_ROOM: u32 = 44 + 4096;
/// Where the driver has what it sends.
pub(super) const SENT: u64 = 0x10_0000;
/// Credit that the guest grants.
pub(super) const GUEST_BUFFER: u32 = 256 << 10;

pub(super) struct Bed {
    pub driver: Driver<Vsock>,
    pub directory: tempfile::TempDir,
    _socket: HostSocket,
    seen: RefCell<u16>,
    packets: RefCell<VecDeque<(Header, Vec<u8>)>>,
}

impl Bed {
    pub fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let socket = HostSocket::listen("vsock", &directory.path().join("v.sock")).unwrap();
        let device = Vsock::new(3, &socket).unwrap();
        let driver = Driver::of(device);
        driver.start(VERSION_1);
        assert_eq!((driver.get(8), driver.get(0x70)), (19, STARTED));
        for chain in 0..32 {
            give_buffer(&driver, chain);
        }
        Self {
            driver,
            directory,
            _socket: socket,
            seen: RefCell::new(0),
            packets: RefCell::default(),
        }
    }

    pub fn path(&self) -> PathBuf {
        self.directory.path().join("v.sock")
    }

    /// A program of the host that listens on a port.
    pub fn listener(&self, port: u32) -> UnixListener {
        UnixListener::bind(self.directory.path().join(format!("v.sock_{port}"))).unwrap()
    }

    /// A client of the host that names a port.
    pub fn client(&self, port: &str) -> UnixStream {
        let mut client = UnixStream::connect(self.path()).unwrap();
        client
            .set_read_timeout(Some(Duration::from_secs(30)))
            .unwrap();
        client
            .write_all(format!("CONNECT {port}\n").as_bytes())
            .unwrap();
        client
    }

    /// The next packet for the guest, if there is one.
    pub fn packet(&self) -> Option<(Header, Vec<u8>)> {
        self.driver.serve(0);
        let mut seen = self.seen.borrow_mut();
        while *seen != self.driver.used(0) {
            let entry = ring(0)[2] + 4 + u64::from(*seen % 128) * 8;
            let memory = &self.driver.memory;
            let head: u32 = memory.read_obj(GuestAddress(entry)).unwrap();
            let written: u32 = memory.read_obj(GuestAddress(entry + 4)).unwrap();
            let head = u16::try_from(head).unwrap();
            let mut bytes = vec![0; usize::try_from(written).unwrap()];
            let place = GuestAddress(BUFFERS + u64::from(head) * BUFFER_STEP);
            memory.read_slice(&mut bytes, place).unwrap();
            let data = bytes.split_off(44);
            let header = Header::from_bytes(&bytes.try_into().unwrap());
            assert_eq!(usize::try_from(header.length).unwrap(), data.len());
            assert_eq!((header.source_cid, header.target_cid), (HOST_CID, CID));
            assert_eq!(header.kind, TYPE_STREAM);
            self.packets.borrow_mut().push_back((header, data));
            give_buffer(&self.driver, head);
            *seen = seen.wrapping_add(1);
        }
        self.packets.borrow_mut().pop_front()
    }

    /// The next packet, which must be of this type.
    pub fn expect(&self, op: u16) -> (Header, Vec<u8>) {
        let (header, data) = self.packet().expect("a packet");
        assert_eq!(header.op, op, "{header:?}");
        (header, data)
    }

    /// Sends a packet as the guest.
    pub fn send(&self, header: Header, data: &[u8]) {
        let header = Header {
            length: u32::try_from(data.len()).unwrap(),
            ..header
        };
        let memory = &self.driver.memory;
        memory
            .write_slice(&header.to_bytes(), GuestAddress(SENT))
            .unwrap();
        memory.write_slice(data, GuestAddress(SENT + 44)).unwrap();
        let bytes = 44 + header.length;
        self.driver
            .offer(1, 0, &[(SENT, 20, false), (SENT + 20, bytes - 20, false)]);
        self.driver.serve(1);
        assert_eq!(self.driver.last_used(1), (0, 0));
    }

    /// A connection requested by the host, seen from the guest's port: both ends.
    pub fn connected(&self, port: u32) -> (UnixStream, Header) {
        let mut client = self.client(&port.to_string());
        let (request, _) = self.expect(op::REQUEST);
        assert_eq!(request.target_port, port);
        let guest = answer(&request);
        self.send(
            Header {
                op: op::RESPONSE,
                ..guest
            },
            &[],
        );
        let ok = format!("OK {}\n", request.source_port);
        let mut line = vec![0; ok.len()];
        client.read_exact(&mut line).unwrap();
        assert_eq!(line, ok.as_bytes());
        (client, guest)
    }
}

pub(super) fn give_buffer(driver: &Driver<Vsock>, chain: u16) {
    let place = BUFFERS + u64::from(chain) * BUFFER_STEP;
    driver.offer(0, chain, &[(place, BUFFER_ROOM, true)]);
}

/// A header of the guest's answer.
pub(super) fn answer(header: &Header) -> Header {
    Header {
        source_cid: CID,
        target_cid: HOST_CID,
        source_port: header.target_port,
        target_port: header.source_port,
        kind: TYPE_STREAM,
        buffer: GUEST_BUFFER,
        ..Header::default()
    }
}

/// A header of the guest's first packet.
pub(super) fn first(guest: u32, host: u32, op: u16) -> Header {
    Header {
        op,
        ..answer(&Header {
            source_port: host,
            target_port: guest,
            ..Header::default()
        })
    }
}

/// Everything that the host reads until the other end closes.
pub(super) fn rest(mut stream: UnixStream) -> Vec<u8> {
    let mut bytes = Vec::new();
    stream.set_nonblocking(false).unwrap();
    stream
        .set_read_timeout(Some(Duration::from_secs(30)))
        .unwrap();
    match stream.read_to_end(&mut bytes) {
        // It was closed before everything sent to it was read.
        Err(error) if error.kind() == io::ErrorKind::ConnectionReset => {}
        result => drop(result.unwrap()),
    }
    bytes
}
