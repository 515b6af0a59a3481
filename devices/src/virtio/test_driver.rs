//! A guest's driver, for tests: correct, or wrong in every way.

use std::ops::Deref;
use std::sync::{Arc, Mutex};

#[cfg(test)]
use proptest::prelude::*;
use virtio_bindings::virtio_ring::{VRING_DESC_F_NEXT, VRING_DESC_F_WRITE};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use super::{Balloon, FreePages, FreeRange, MmioTransport, VirtioDevice};
use crate::bus::BusDevice;
use crate::trigger::EventFdTrigger;

/// Memory of the guest: 16 MiB, a hole of 16 MiB, and 16 MiB more.
pub(crate) const PART_BYTES: u64 = 16 << 20;
pub(crate) const SECOND_PART: u64 = 2 * PART_BYTES;

pub(crate) const RING_SIZE: u16 = 128;

/// Status bits up to DRIVER_OK.
pub(crate) const STARTED: u32 = 1 | 2 | 8 | 4;

/// VIRTIO_F_VERSION_1, which every driver accepts.
pub(crate) const VERSION_1: u64 = 1 << 32;

/// Where the rings of a queue are: descriptors, available, used.
pub(crate) fn ring(queue: u32) -> [u64; 3] {
    let base = 0x1_0000 + u64::from(queue) * 0x4000;
    [base, base + 0x1000, base + 0x2000]
}

/// An action of a vCPU or of the device's thread.
#[derive(Clone, Debug)]
pub(crate) enum Access {
    Read(u64, usize),
    Write(u64, Vec<u8>),
    Serve(usize),
}

#[cfg(test)]
/// Any access, often a valid one.
pub(crate) fn accesses() -> impl Strategy<Value = Access> {
    let offset = prop_oneof![
        (0_u64..0x40).prop_map(|register| register * 4),
        0_u64..super::VIRTIO_MMIO_LEN - 8,
        any::<u64>(),
    ];
    let value = prop_oneof![
        any::<u32>().prop_map(u32::to_le_bytes),
        (0_u32..16).prop_map(u32::to_le_bytes),
        (0_u32..16).prop_map(|page| (page * 0x1000).to_le_bytes()),
    ];
    prop_oneof![
        (offset.clone(), 0_usize..9).prop_map(|(offset, width)| Access::Read(offset, width)),
        (offset.clone(), value).prop_map(|(offset, value)| Access::Write(offset, value.into())),
        (offset, proptest::collection::vec(any::<u8>(), 0..9))
            .prop_map(|(offset, data)| Access::Write(offset, data)),
        (0_usize..8).prop_map(Access::Serve),
    ]
}

/// A guest with one device.
pub(crate) struct Driver<D> {
    pub memory: GuestMemoryMmap,
    pub interrupt: EventFdTrigger,
    pub device: Arc<D>,
    pub transport: Arc<MmioTransport>,
    available: Mutex<Vec<u16>>,
}

impl<D: VirtioDevice + 'static> Driver<D> {
    /// Creates a device in its initial state.
    pub fn of(device: D) -> Self {
        let part = usize::try_from(PART_BYTES).unwrap();
        let memory = GuestMemoryMmap::from_ranges(&[
            (GuestAddress(0), part),
            (GuestAddress(SECOND_PART), part),
        ])
        .unwrap();
        let interrupt = EventFdTrigger::new().unwrap();
        let device = Arc::new(device);
        let queues = device.queue_sizes().len();
        let transport =
            MmioTransport::new(Arc::clone(&device) as _, memory.clone(), interrupt.clone());
        Self {
            memory,
            interrupt,
            device,
            transport: Arc::new(transport.unwrap()),
            available: Mutex::new(vec![0; queues]),
        }
    }

    /// Starts it with these features.
    pub fn start(&self, features: u64) {
        self.set(0x70, 0);
        self.set(0x70, 1);
        self.set(0x70, 1 | 2);
        self.set(0x24, 1);
        self.set(0x20, u32::try_from(features >> 32).unwrap());
        self.set(0x24, 0);
        self.set(0x20, u32::try_from(features & 0xffff_ffff).unwrap());
        self.set(0x70, 1 | 2 | 8);
        for queue in 0..u32::try_from(self.available.lock().unwrap().len()).unwrap() {
            self.describe(queue, u32::from(RING_SIZE), ring(queue));
        }
        self.set(0x70, STARTED);
    }

    /// All features that the device offers.
    pub fn offered(&self) -> u64 {
        self.set(0x14, 1);
        let high = u64::from(self.get(0x10)) << 32;
        self.set(0x14, 0);
        high | u64::from(self.get(0x10))
    }

    pub fn describe(&self, queue: u32, size: u32, [descriptors, available, used]: [u64; 3]) {
        self.set(0x30, queue);
        self.set(0x38, size);
        for (register, address) in [(0x80, descriptors), (0x90, available), (0xa0, used)] {
            self.set(register, u32::try_from(address & 0xffff_ffff).unwrap());
            self.set(register + 4, u32::try_from(address >> 32).unwrap());
        }
        self.set(0x44, 1);
    }

    pub fn set(&self, register: u64, value: u32) {
        self.transport.write(register, &value.to_le_bytes());
    }

    pub fn get(&self, register: u64) -> u32 {
        let mut data = [0; 4];
        self.transport.read(register, &mut data);
        u32::from_le_bytes(data)
    }

    pub fn notify(&self, queue: u32) {
        self.set(0x50, queue);
    }

    /// Writes one descriptor of a queue.
    pub fn descriptor(&self, queue: u32, at: u16, address: u64, bytes: u32, flags: u32, next: u16) {
        let mut raw = Vec::from(address.to_le_bytes());
        raw.extend(bytes.to_le_bytes());
        raw.extend(u16::try_from(flags).unwrap().to_le_bytes());
        raw.extend(next.to_le_bytes());
        let place = ring(queue)[0] + u64::from(at) * 16;
        self.memory.write_slice(&raw, GuestAddress(place)).unwrap();
    }

    /// Makes the chain that starts with a descriptor available.
    pub fn make_available(&self, queue: u32, head: u16) {
        let index = usize::try_from(queue).unwrap();
        let mut available = self.available.lock().unwrap();
        let ring = ring(queue)[1];
        let place = ring + 4 + u64::from(available[index] % RING_SIZE) * 2;
        self.memory.write_obj(head, GuestAddress(place)).unwrap();
        available[index] = available[index].wrapping_add(1);
        self.memory
            .write_obj(available[index], GuestAddress(ring + 2))
            .unwrap();
    }

    /// Makes buffers available as one chain, from descriptor `first` on: address, length, and
    /// whether the device writes to it.
    pub fn offer(&self, queue: u32, first: u16, buffers: &[(u64, u32, bool)]) {
        let last = first + u16::try_from(buffers.len()).unwrap() - 1;
        for (at, (address, bytes, writes)) in (first..).zip(buffers) {
            let next = if at < last { VRING_DESC_F_NEXT } else { 0 };
            let write = if *writes { VRING_DESC_F_WRITE } else { 0 };
            self.descriptor(queue, at, *address, *bytes, next | write, at + 1);
        }
        self.make_available(queue, first);
    }

    /// How many chains of a queue were returned.
    pub fn used(&self, queue: u32) -> u16 {
        let place = ring(queue)[2] + 2;
        self.memory.read_obj(GuestAddress(place)).unwrap()
    }

    /// The chain that was returned last: its first descriptor, and how much was written to it.
    pub fn last_used(&self, queue: u32) -> (u32, u32) {
        let index = self.used(queue).wrapping_sub(1) % RING_SIZE;
        let place = ring(queue)[2] + 4 + u64::from(index) * 8;
        let read = |place| self.memory.read_obj(GuestAddress(place)).unwrap();
        (read(place), read(place + 4))
    }

    pub fn serve(&self, queue: usize) {
        self.transport.serve(queue);
    }

    pub fn access(&self, access: Access) {
        match access {
            Access::Read(offset, width) => self.transport.read(offset, &mut vec![0; width]),
            Access::Write(offset, data) => self.transport.write(offset, &data),
            Access::Serve(queue) => self.serve(queue),
        }
    }

    /// Clears the rings.
    pub fn clear_rings(&self) {
        self.set(0x70, 0);
        let mut available = self.available.lock().unwrap();
        available.fill(0);
        for queue in 0..u32::try_from(available.len()).unwrap() {
            let [descriptors, ..] = ring(queue);
            let place = GuestAddress(descriptors);
            self.memory.write_slice(&[0; 0x3000], place).unwrap();
        }
    }
}

/// The ranges passed to [`FreePages::discard`].
#[derive(Debug, Default)]
pub(crate) struct Recorder(Mutex<Vec<FreeRange>>);

impl FreePages for Recorder {
    fn discard(&self, ranges: &[FreeRange]) {
        self.0.lock().unwrap().extend(ranges);
    }
}

/// A guest with a balloon.
pub(crate) struct BalloonDriver {
    driver: Driver<Balloon>,
    recorder: Arc<Recorder>,
}

impl Deref for BalloonDriver {
    type Target = Driver<Balloon>;

    fn deref(&self) -> &Driver<Balloon> {
        &self.driver
    }
}

impl BalloonDriver {
    /// A balloon in its initial state.
    pub fn new() -> Self {
        let recorder = Arc::new(Recorder::default());
        Self {
            driver: Driver::of(Balloon::new(Arc::clone(&recorder) as _)),
            recorder,
        }
    }

    /// A balloon that was started as Linux does it, with all queues.
    pub fn started() -> Self {
        let driver = Self::new();
        driver.start(VERSION_1 | (1 << 2) | (1 << 5));
        assert_eq!(driver.get(0x70), STARTED);
        driver
    }

    /// Reports ranges as free, in one chain from descriptor 0 on.
    pub fn report(&self, ranges: &[(u64, u32)]) {
        let buffers: Vec<_> = ranges
            .iter()
            .map(|(at, bytes)| (*at, *bytes, true))
            .collect();
        self.offer(2, 0, &buffers);
    }

    /// The ranges discarded so far.
    pub fn discarded(&self) -> Vec<(u64, u64)> {
        let ranges = self.recorder.0.lock().unwrap();
        ranges.iter().map(|r| (r.start.0, r.bytes)).collect()
    }
}
