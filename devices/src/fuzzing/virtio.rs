//! Virtio devices under a guest that does anything, rings and chains included.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;

use arbitrary::{Arbitrary, Result, Unstructured};
use vm_memory::{Bytes, GuestAddress};

use crate::BusDevice;
use crate::virtio::test_driver::{Driver, PART_BYTES, RING_SIZE, SECOND_PART, STARTED, ring};
use crate::virtio::{
    Balloon, Block, Console, Disk, Entropy, FreePages, FreeRange, HostSocket, Net, VIRTIO_MMIO_LEN,
    VirtioDevice, Vsock,
};

/// Limit of actions per device.
const STEPS_MAX: usize = 100;
/// Where the guest puts the headers of its requests.
const HEADER: u64 = 0x8_0000;
/// Where the guest puts its data.
const DATA: u64 = 0x10_0000;
/// The fuzzed disk's size.
const DISK_BYTES: u64 = 64 << 10;

/// An address, most often one that is in use.
#[derive(Debug, Arbitrary)]
enum Place {
    Data(u16),
    Rings(u16),
    Page(u16),
    /// Near the end of either part of the memory.
    Edge(bool, i8),
    Any(u64),
}

impl Place {
    fn address(&self) -> u64 {
        match self {
            Self::Data(offset) => DATA + u64::from(*offset),
            Self::Rings(offset) => 0x1_0000 + u64::from(*offset),
            Self::Page(page) => u64::from(*page) * 4096,
            Self::Edge(second, offset) => {
                let start = if *second { SECOND_PART } else { 0 };
                (start + PART_BYTES).wrapping_add_signed(i64::from(*offset))
            }
            Self::Any(address) => *address,
        }
    }
}

/// A length in bytes.
#[derive(Debug, Arbitrary)]
enum Length {
    Bytes(u8),
    Sectors(u8),
    Pages(u8),
    Any(u32),
}

impl Length {
    fn bytes(&self) -> u32 {
        match self {
            Self::Bytes(bytes) => u32::from(*bytes),
            Self::Sectors(count) => u32::from(*count) * 512,
            Self::Pages(count) => u32::from(*count) * 4096,
            Self::Any(bytes) => *bytes,
        }
    }
}

/// The next action of the guest, the device's thread or the host.
#[derive(Debug, Arbitrary)]
enum Step {
    /// Restarts the device with its offered features except these.
    Start {
        without: u64,
    },
    Read {
        at: u16,
        width: u8,
    },
    Write {
        at: u16,
        value: [u8; 8],
        width: u8,
    },
    Register {
        number: u8,
        value: u32,
    },
    Descriptor {
        queue: u8,
        at: u8,
        place: Place,
        length: Length,
        flags: u8,
        next: u8,
    },
    Put {
        place: Place,
        bytes: [u8; 16],
    },
    /// A request of a kind that the device knows, split into these pieces.
    Request {
        queue: u8,
        pieces: Vec<(Place, Length, bool)>,
    },
    Available {
        queue: u8,
        head: u16,
    },
    /// Makes this many chains available.
    Index {
        queue: u8,
        index: u16,
    },
    Serve {
        queue: u8,
    },
    Host {
        what: u8,
        value: u32,
    },
}

/// The part that differs between devices in a [`session`].
pub(super) trait Peer<D> {
    /// The first bytes of a request.
    fn header(&mut self, _data: &mut Unstructured<'_>) -> Result<Vec<u8>> {
        Ok(Vec::new())
    }

    /// An action of the host's end.
    fn host(&mut self, _driver: &Driver<D>, _what: u8, _value: u32) {}
}

/// No peer at the host's end, and requests without a header.
struct NoPeer;

impl<D> Peer<D> for NoPeer {}

/// Runs the actions that `data` encodes; afterwards a correct driver must be able to use the
/// device.
pub(super) fn session<D: VirtioDevice + 'static>(
    driver: &Driver<D>,
    data: &mut Unstructured<'_>,
    peer: &mut impl Peer<D>,
) {
    let queues = u8::try_from(driver.device.queue_sizes().len()).expect("few queues");
    driver.start(driver.offered());
    for _ in 0..STEPS_MAX {
        if data.is_empty() || step(driver, queues, data, peer).is_err() {
            break;
        }
    }
    driver.clear_rings();
    driver.start(driver.offered());
    for queue in 0..usize::from(queues) {
        driver.serve(queue);
    }
    assert_eq!(driver.get(0x70), STARTED, "it can be used");
}

fn step<D: VirtioDevice + 'static>(
    driver: &Driver<D>,
    queues: u8,
    data: &mut Unstructured<'_>,
    peer: &mut impl Peer<D>,
) -> Result<()> {
    let of = |queue: u8| u32::from(queue % queues);
    let put = |address, bytes: &[u8]| {
        // The guest writes nothing outside of its memory.
        let _ = driver.memory.write_slice(bytes, GuestAddress(address));
    };
    match Step::arbitrary(data)? {
        Step::Start { without } => driver.start(driver.offered() & !without),
        Step::Read { at, width } => {
            let mut bytes = [0; 8];
            let at = u64::from(at) % (VIRTIO_MMIO_LEN - 8);
            driver
                .transport
                .read(at, &mut bytes[..usize::from(width % 9)]);
        }
        Step::Write { at, value, width } => {
            let at = u64::from(at) % (VIRTIO_MMIO_LEN - 8);
            driver.transport.write(at, &value[..usize::from(width % 9)]);
        }
        Step::Register { number, value } => driver.set(u64::from(number % 80) * 4, value),
        Step::Descriptor {
            queue,
            at,
            place,
            length,
            flags,
            next,
        } => {
            let at = u16::from(at) % RING_SIZE;
            let (flags, next) = (u32::from(flags), u16::from(next));
            driver.descriptor(of(queue), at, place.address(), length.bytes(), flags, next);
        }
        Step::Put { place, bytes } => put(place.address(), &bytes),
        Step::Request { queue, pieces } => {
            let header = peer.header(data)?;
            put(HEADER, &header);
            let bytes = u32::try_from(header.len()).expect("a short header");
            let mut buffers = vec![(HEADER, bytes, false)];
            buffers.extend(
                pieces
                    .iter()
                    .take(8)
                    .map(|(place, length, writes)| (place.address(), length.bytes(), *writes)),
            );
            let header_is_empty = usize::from(bytes == 0 && buffers.len() > 1);
            driver.offer(of(queue), 0, &buffers[header_is_empty..]);
            driver.serve(usize::from(queue % queues));
        }
        Step::Available { queue, head } => driver.make_available(of(queue), head),
        Step::Index { queue, index } => put(ring(of(queue))[1] + 2, &index.to_le_bytes()),
        Step::Serve { queue } => driver.serve(usize::from(queue % queues)),
        Step::Host { what, value } => peer.host(driver, what, value),
    }
    Ok(())
}

/// A disk in memory of the host.
struct Requests;

impl Peer<Block> for Requests {
    fn header(&mut self, data: &mut Unstructured<'_>) -> Result<Vec<u8>> {
        // All request types are below 16.
        let kind = match u8::arbitrary(data)? {
            kind @ 0..240 => u32::from(kind % 16),
            _ => u32::arbitrary(data)?,
        };
        let sector = match u8::arbitrary(data)? {
            255 => u64::arbitrary(data)?,
            sector => u64::from(sector),
        };
        let mut header = Vec::from(kind.to_le_bytes());
        header.extend([0; 4]);
        header.extend(sector.to_le_bytes());
        Ok(header)
    }
}

pub(super) fn block(input: &[u8]) {
    let mut data = Unstructured::new(input);
    let read_only = bool::arbitrary(&mut data).unwrap_or(false);
    let file = tempfile::tempfile().expect("a file");
    file.set_len(DISK_BYTES).expect("its size");
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let disk = Disk::open(path.as_ref(), read_only).expect("a disk");
    session(&Driver::of(Block::new(0, disk)), &mut data, &mut Requests);
    let length = file.metadata().expect("its size").len();
    assert_eq!(length, DISK_BYTES, "a disk keeps its size");
    if read_only {
        let mut image = vec![1; usize::try_from(DISK_BYTES).expect("a small disk")];
        file.read_exact_at(&mut image, 0).expect("an image");
        assert!(image.iter().all(|byte| *byte == 0), "it is read only");
    }
}

/// The network at the other end of the card.
struct Network(std::os::unix::net::UnixDatagram);

impl Peer<Net> for Network {
    fn header(&mut self, data: &mut Unstructured<'_>) -> Result<Vec<u8>> {
        let bytes = usize::from(u8::arbitrary(data)?);
        Ok(vec![u8::arbitrary(data)?; bytes.max(1)])
    }

    fn host(&mut self, _: &Driver<Net>, what: u8, value: u32) {
        let mut packet = [7; 4096];
        let bytes = usize::try_from(value).unwrap_or(0) % packet.len();
        // Packets without room are dropped.
        if what.is_multiple_of(2) {
            let _ = self.0.send(&packet[..bytes]);
        } else {
            let _ = self.0.recv(&mut packet);
        }
    }
}

pub(super) fn net(input: &[u8]) {
    let (card, host) = Net::on_sockets();
    let driver = Driver::of(card);
    session(&driver, &mut Unstructured::new(input), &mut Network(host));
}

pub(super) fn rng(input: &[u8]) {
    let driver = Driver::of(Entropy::new().expect("a source"));
    session(&driver, &mut Unstructured::new(input), &mut NoPeer);
}

/// Programs of the host.
struct Programs {
    directory: tempfile::TempDir,
    streams: Vec<UnixStream>,
    listeners: Vec<UnixListener>,
}

impl Peer<Vsock> for Programs {
    fn header(&mut self, data: &mut Unstructured<'_>) -> Result<Vec<u8>> {
        // The guest's address, the host's, two ports, a length, a type, an operation, flags, and
        // credit; each of them sometimes wrong.
        let wrong = u8::arbitrary(data)?;
        let port =
            |data: &mut Unstructured<'_>| u8::arbitrary(data).map(|port| u32::from(port % 8));
        let mut header = Vec::new();
        header.extend((3 + u64::from(wrong & 1)).to_le_bytes());
        header.extend((2 + u64::from(wrong >> 1 & 1)).to_le_bytes());
        for high in [wrong & 4, wrong & 8] {
            let port = port(data)? + if high == 0 { 0 } else { 1 << 30 };
            header.extend(port.to_le_bytes());
        }
        let length = u8::arbitrary(data)?;
        header.extend(u32::from(length).to_le_bytes());
        header.extend((1 + u16::from(wrong >> 4 & 1)).to_le_bytes());
        header.extend(u16::from(u8::arbitrary(data)? % 9).to_le_bytes());
        header.extend(u32::from(u8::arbitrary(data)? % 4).to_le_bytes());
        header.extend(u32::arbitrary(data)?.to_le_bytes());
        header.extend(u32::arbitrary(data)?.to_le_bytes());
        if wrong & 0x20 == 0 {
            header.extend(vec![wrong; usize::from(length)]);
        }
        Ok(header)
    }

    fn host(&mut self, _: &Driver<Vsock>, what: u8, value: u32) {
        let path = self.directory.path().join("v");
        let count = self.streams.len().max(1);
        let at = usize::try_from(value).unwrap_or(0) % count;
        let mut bytes = [what; 512];
        match (what % 6, self.streams.get_mut(at)) {
            (0, _) if count < 8 => {
                if let Ok(mut stream) = UnixStream::connect(path) {
                    stream.set_nonblocking(true).expect("a socket");
                    let _ = writeln!(stream, "CONNECT {}", value % 8);
                    self.streams.push(stream);
                }
            }
            (1, _) if self.listeners.len() < 4 => {
                let listener = UnixListener::bind(path.with_file_name(format!("v_{}", value % 8)));
                if let Ok(listener) = listener {
                    listener.set_nonblocking(true).expect("a socket");
                    self.listeners.push(listener);
                }
            }
            (2, Some(stream)) => drop(stream.write(&bytes)),
            (3, Some(stream)) => drop(stream.read(&mut bytes)),
            (4, Some(_)) => drop(self.streams.remove(at)),
            _ => {
                let accepted = self
                    .listeners
                    .iter()
                    .filter_map(|listener| listener.accept().ok());
                self.streams.extend(accepted.map(|(stream, _)| stream));
                for stream in &self.streams {
                    stream.set_nonblocking(true).expect("a socket");
                }
            }
        }
    }
}

pub(super) fn vsock(input: &[u8]) {
    let directory = tempfile::tempdir().expect("a directory");
    let socket = HostSocket::listen("vsock", &directory.path().join("v")).expect("a socket");
    let driver = Driver::of(Vsock::new(3, &socket).expect("a device"));
    let mut programs = Programs {
        directory,
        streams: Vec::new(),
        listeners: Vec::new(),
    };
    session(&driver, &mut Unstructured::new(input), &mut programs);
}

/// Clients of a console.
struct Clients {
    path: std::path::PathBuf,
    streams: Vec<UnixStream>,
}

impl Peer<Console> for Clients {
    fn header(&mut self, data: &mut Unstructured<'_>) -> Result<Vec<u8>> {
        Vec::arbitrary(data)
    }

    fn host(&mut self, _: &Driver<Console>, what: u8, value: u32) {
        let mut bytes = [what; 512];
        let count = self.streams.len();
        match (what % 5, self.streams.first_mut()) {
            (0, _) if count < 4 => {
                let stream = UnixStream::connect(&self.path).expect("a client");
                stream.set_nonblocking(true).expect("a socket");
                self.streams.push(stream);
            }
            (1, Some(stream)) => drop(stream.write(&bytes)),
            (2, Some(stream)) => drop(stream.read(&mut bytes)),
            (3, Some(stream)) if value.is_multiple_of(2) => drop(stream.shutdown(Shutdown::Write)),
            (4, Some(_)) => drop(self.streams.remove(0)),
            _ => {}
        }
    }
}

pub(super) fn console(input: &[u8]) {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("c");
    let socket = HostSocket::listen("console", &path).expect("a socket");
    let driver = Driver::of(Console::new(&socket).expect("a device"));
    let streams = Vec::new();
    let mut clients = Clients { path, streams };
    session(&driver, &mut Unstructured::new(input), &mut clients);
}

/// Accepts free memory, and checks that it is guest memory.
#[derive(Debug)]
struct Checked;

impl FreePages for Checked {
    fn discard(&self, ranges: &[FreeRange]) {
        for range in ranges {
            let (start, end) = (range.start.0, range.start.0 + range.bytes);
            assert!(
                start % 4096 == 0 && range.bytes % 4096 == 0 && end > start,
                "{range:?}"
            );
            let first = end <= PART_BYTES;
            let second = start >= SECOND_PART && end <= SECOND_PART + PART_BYTES;
            assert!(first || second, "{range:?} is not the guest's");
        }
    }
}

/// The user sets the balloon.
struct User;

impl Peer<Balloon> for User {
    fn header(&mut self, data: &mut Unstructured<'_>) -> Result<Vec<u8>> {
        let pages = Vec::<u16>::arbitrary(data)?;
        Ok(pages
            .iter()
            .flat_map(|page| u32::from(*page).to_le_bytes())
            .collect())
    }

    fn host(&mut self, driver: &Driver<Balloon>, _: u8, value: u32) {
        let change = || driver.device.set_target_pages(value);
        driver.transport.change_config(change);
        assert_eq!(driver.get(0x100), value);
    }
}

pub(super) fn balloon(input: &[u8]) {
    let driver = Driver::of(Balloon::new(Arc::new(Checked)));
    session(&driver, &mut Unstructured::new(input), &mut User);
}

/// Registers alone, at any offset and of any width.
pub(super) fn transport(input: &[u8]) {
    let driver = Driver::of(Balloon::new(Arc::new(Checked)));
    let mut data = Unstructured::new(input);
    let any = |data: &mut Unstructured<'_>| -> Result<()> {
        let offset = match u8::arbitrary(data)? {
            register @ 0..0x50 => u64::from(register) * 4,
            0x50..0xf0 => u64::from(u16::arbitrary(data)?),
            _ => u64::arbitrary(data)?,
        };
        let mut bytes = <[u8; 8]>::arbitrary(data)?;
        let width = usize::from(u8::arbitrary(data)? % 9);
        // Most accesses have the width of registers.
        let width = if width > 4 { 4 } else { width };
        if bool::arbitrary(data)? {
            driver.transport.write(offset, &bytes[..width]);
        } else {
            driver.transport.read(offset, &mut bytes[..width]);
        }
        driver.serve(usize::from(bytes[7]));
        Ok(())
    };
    for _ in 0..STEPS_MAX {
        if data.is_empty() || any(&mut data).is_err() {
            break;
        }
    }
    driver.clear_rings();
    driver.start(driver.offered());
    assert_eq!(driver.get(0x70), STARTED, "it can be used");
}
