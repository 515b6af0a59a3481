//! Requests per second of one disk by the number of threads that serve it, in alternating rounds.
//! The driver keeps 40 requests in flight. The image is created for the benchmark and full of data.

use std::fs::File;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use devices::virtio::{Block, Disk, MmioTransport, QUEUE_NOTIFY_OFFSET, QueueServer};
use devices::{BusDevice as _, EventFdTrigger};
use event_manager::{EventManager, SubscriberOps as _};
use rustix::fs::Advice;
use vm_memory::{Bytes as _, GuestAddress, GuestMemoryMmap};

const ROUNDS: usize = 5;
const THREADS: [usize; 5] = [1, 2, 4, 8, 16];
const IMAGE_BYTES: u64 = 1 << 30;
const BLOCK_BYTES: u32 = 4096;
const BLOCKS: u64 = IMAGE_BYTES / BLOCK_BYTES as u64;
/// Requests in flight. Each has three descriptors, and a page for its data.
const LANES: u16 = 40;
const RING_SIZE: u16 = 128;
/// Exceeds the duration of every request.
const LIMIT: Duration = Duration::from_secs(30);
const MEMORY_BYTES: usize = 16 << 20;

const DESCRIPTORS: u64 = 0x1_0000;
const AVAILABLE: u64 = 0x1_1000;
const USED: u64 = 0x1_2000;
const HEADERS: u64 = 0x2_0000;
const STATUSES: u64 = 0x3_0000;
const DATA: u64 = 0x10_0000;

#[derive(Clone, Copy)]
enum Request {
    Read(u64),
    Write(u64),
    Flush,
}

/// A workload: its name, how many requests, and which.
struct Load {
    name: &'static str,
    count: u32,
    cold: bool,
    request: fn(&mut Random, u32) -> Request,
}

const LOADS: [Load; 3] = [
    Load {
        name: "reads, not in the page cache",
        count: 4000,
        cold: true,
        request: |random, _| Request::Read(random.next() % BLOCKS),
    },
    Load {
        name: "reads, in the page cache",
        count: 100_000,
        cold: false,
        request: |random, _| Request::Read(random.next() % 1024),
    },
    Load {
        name: "writes, each 8th a flush",
        count: 4000,
        cold: false,
        request: |random, number| {
            if number.is_multiple_of(8) {
                Request::Flush
            } else {
                Request::Write(random.next() % BLOCKS)
            }
        },
    },
];

/// Knuth's linear congruential generator, of which the upper half is random enough here.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        let product = self.0.wrapping_mul(6_364_136_223_846_793_005);
        self.0 = product.wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 32
    }
}

fn main() {
    let image = Image::make().expect("room for an image of 1 GiB");
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    for load in &LOADS {
        let mut rates = [const { Vec::new() }; THREADS.len()];
        for _ in 0..ROUNDS {
            for (threads, rates) in THREADS.iter().zip(&mut rates) {
                if load.cold {
                    image.leave_the_page_cache();
                }
                rates.push(rate(&image.0, *threads, load, &mut random));
            }
        }
        let mut one = None;
        for (threads, mut rates) in THREADS.iter().zip(rates) {
            rates.sort_by(f64::total_cmp);
            let median = rates[ROUNDS / 2];
            println!(
                "{}, {threads} threads: {median:.0} a second, {:.2} of one ({:.0} to {:.0})",
                load.name,
                median / *one.get_or_insert(median),
                rates[0],
                rates[ROUNDS - 1]
            );
        }
    }
}

/// A file that is removed on drop.
struct Image(PathBuf);

impl Image {
    fn make() -> io::Result<Self> {
        let image = Self(Path::new(env!("CARGO_TARGET_TMPDIR")).join("disk-bench.img"));
        let mut file = File::create(&image.0)?;
        let mut random = Random(1);
        let mut part = Vec::with_capacity(1 << 20);
        while part.len() < part.capacity() {
            part.extend(random.next().to_le_bytes());
        }
        for _ in 0..IMAGE_BYTES >> 20 {
            file.write_all(&part)?;
        }
        file.sync_all()?;
        Ok(image)
    }

    fn leave_the_page_cache(&self) {
        let file = File::open(&self.0).expect("the image");
        // Only clean pages can be dropped from the page cache.
        file.sync_all().expect("is written");
        rustix::fs::fadvise(&file, 0, None, Advice::DontNeed).expect("takes advice");
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Requests per second of a disk served by this many threads.
fn rate(image: &Path, threads: usize, load: &Load, random: &mut Random) -> f64 {
    let disk = Disk::open(image, false).expect("the image");
    let mut driver = Driver::start(Block::new(0, disk));
    let ended = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..threads {
            let transport = Arc::clone(&driver.transport);
            scope.spawn(|| {
                let mut manager = EventManager::<QueueServer>::new().expect("an event loop");
                manager.add_subscriber(QueueServer::new(transport));
                while !ended.load(Ordering::Relaxed) {
                    manager.run_with_timeout(10).expect("events");
                }
            });
        }
        let begin = Instant::now();
        driver.carry_out(load, random);
        let took = begin.elapsed();
        ended.store(true, Ordering::Relaxed);
        f64::from(load.count) / took.as_secs_f64()
    })
}

/// The part of a guest's driver.
struct Driver {
    memory: GuestMemoryMmap,
    transport: Arc<MmioTransport>,
    available: u16,
    seen: u16,
}

impl Driver {
    fn start(disk: Block) -> Self {
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), MEMORY_BYTES)]);
        let memory = memory.expect("memory");
        let interrupt = EventFdTrigger::new().expect("an event descriptor");
        let transport = MmioTransport::new(Arc::new(disk), memory.clone(), interrupt);
        let driver = Self {
            memory,
            transport: Arc::new(transport.expect("event descriptors")),
            available: 0,
            seen: 0,
        };
        // Accepts every offered feature, then sets up the one queue (virtio 1.2, 3.1.1).
        driver.set(0x70, 1 | 2);
        for half in [1, 0] {
            driver.set(0x14, half);
            let mut offered = [0; 4];
            driver.transport.read(0x10, &mut offered);
            driver.set(0x24, half);
            driver.set(0x20, u32::from_le_bytes(offered));
        }
        driver.set(0x70, 1 | 2 | 8);
        driver.set(0x30, 0);
        driver.set(0x38, u32::from(RING_SIZE));
        for (register, address) in [(0x80, DESCRIPTORS), (0x90, AVAILABLE), (0xa0, USED)] {
            driver.set(register, u32::try_from(address).expect("low memory"));
            driver.set(register + 4, 0);
        }
        driver.set(0x44, 1);
        driver.set(0x70, 1 | 2 | 8 | 4);
        driver
    }

    fn set(&self, register: u64, value: u32) {
        self.transport.write(register, &value.to_le_bytes());
    }

    fn store<T: vm_memory::ByteValued>(&self, value: T, address: u64) {
        let address = GuestAddress(address);
        self.memory.write_obj(value, address).expect("memory");
    }

    fn load<T: vm_memory::ByteValued>(&self, address: u64) -> T {
        self.memory.read_obj(GuestAddress(address)).expect("memory")
    }

    /// Keeps requests in flight until all have completed.
    fn carry_out(&mut self, load: &Load, random: &mut Random) {
        let mut free: Vec<u16> = (0..LANES).collect();
        let (mut offered, mut done) = (0, 0);
        while done < load.count {
            while offered < load.count
                && let Some(lane) = free.pop()
            {
                self.offer(lane, (load.request)(random, offered));
                offered += 1;
            }
            self.set(QUEUE_NOTIFY_OFFSET, 0);
            let deadline = Instant::now() + LIMIT;
            while self.load::<u16>(USED + 2) == self.seen {
                assert!(Instant::now() < deadline, "no request comes back");
                thread::yield_now();
            }
            while self.load::<u16>(USED + 2) != self.seen {
                let place = USED + 4 + u64::from(self.seen % RING_SIZE) * 8;
                let head: u32 = self.load(place);
                let lane = u16::try_from(head / 3).expect("a lane");
                assert_eq!(self.load::<u8>(STATUSES + u64::from(lane)), 0);
                free.push(lane);
                self.seen = self.seen.wrapping_add(1);
                done += 1;
            }
        }
    }

    /// Makes a request available, in the descriptors and the memory of its lane.
    fn offer(&mut self, lane: u16, request: Request) {
        const NEXT: u16 = 1;
        const WRITE: u16 = 2;
        let (kind, block, data) = match request {
            Request::Read(block) => (0_u32, block, Some(WRITE)),
            Request::Write(block) => (1, block, Some(0)),
            Request::Flush => (4, 0, None),
        };
        let header = HEADERS + u64::from(lane) * 16;
        self.store(u64::from(kind), header);
        let sectors = u64::from(BLOCK_BYTES) / devices::virtio::SECTOR_BYTES;
        self.store(block * sectors, header + 8);
        self.store(0xee_u8, STATUSES + u64::from(lane));
        let page = DATA + u64::from(lane) * u64::from(BLOCK_BYTES);
        let data = data.map(|writes| (page, BLOCK_BYTES, writes | NEXT));
        let parts = [
            Some((header, 16, NEXT)),
            data,
            Some((STATUSES + u64::from(lane), 1, WRITE)),
        ];
        for (descriptor, (address, bytes, flags)) in (lane * 3..).zip(parts.into_iter().flatten()) {
            let place = DESCRIPTORS + u64::from(descriptor) * 16;
            self.store(address, place);
            self.store(bytes, place + 8);
            self.store(flags, place + 12);
            self.store(descriptor + 1, place + 14);
        }
        let place = AVAILABLE + 4 + u64::from(self.available % RING_SIZE) * 2;
        self.store(lane * 3, place);
        self.available = self.available.wrapping_add(1);
        self.store(self.available, AVAILABLE + 2);
    }
}
