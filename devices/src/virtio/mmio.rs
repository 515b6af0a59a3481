//! The registers of a virtio device (virtio 1.2, section 4.2: MMIO, version 2), its rings and its
//! interrupt.

use std::io;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use fabric_host::Seldom;
use virtio_bindings::virtio_config::{
    VIRTIO_CONFIG_S_ACKNOWLEDGE, VIRTIO_CONFIG_S_DRIVER, VIRTIO_CONFIG_S_DRIVER_OK,
    VIRTIO_CONFIG_S_FAILED, VIRTIO_CONFIG_S_FEATURES_OK, VIRTIO_CONFIG_S_NEEDS_RESET,
    VIRTIO_F_VERSION_1,
};
use virtio_bindings::virtio_mmio::{
    VIRTIO_MMIO_CONFIG, VIRTIO_MMIO_CONFIG_GENERATION, VIRTIO_MMIO_DEVICE_FEATURES,
    VIRTIO_MMIO_DEVICE_FEATURES_SEL, VIRTIO_MMIO_DEVICE_ID, VIRTIO_MMIO_DRIVER_FEATURES,
    VIRTIO_MMIO_DRIVER_FEATURES_SEL, VIRTIO_MMIO_INT_CONFIG, VIRTIO_MMIO_INT_VRING,
    VIRTIO_MMIO_INTERRUPT_ACK, VIRTIO_MMIO_INTERRUPT_STATUS, VIRTIO_MMIO_MAGIC_VALUE,
    VIRTIO_MMIO_QUEUE_AVAIL_HIGH, VIRTIO_MMIO_QUEUE_AVAIL_LOW, VIRTIO_MMIO_QUEUE_DESC_HIGH,
    VIRTIO_MMIO_QUEUE_DESC_LOW, VIRTIO_MMIO_QUEUE_NOTIFY, VIRTIO_MMIO_QUEUE_NUM,
    VIRTIO_MMIO_QUEUE_NUM_MAX, VIRTIO_MMIO_QUEUE_READY, VIRTIO_MMIO_QUEUE_SEL,
    VIRTIO_MMIO_QUEUE_USED_HIGH, VIRTIO_MMIO_QUEUE_USED_LOW, VIRTIO_MMIO_SHM_BASE_HIGH,
    VIRTIO_MMIO_SHM_LEN_LOW, VIRTIO_MMIO_STATUS, VIRTIO_MMIO_VENDOR_ID, VIRTIO_MMIO_VERSION,
};
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};
use virtio_queue::{Queue, QueueT};
use vm_memory::{GuestAddress, GuestMemoryMmap};
use vm_superio::Trigger;
use vmm_sys_util::eventfd::EventFd;

use super::VirtioDevice;
use super::rings::{Broken, Rings};
use crate::bus::BusDevice;
use crate::lock;
use crate::trigger::EventFdTrigger;

/// Addresses occupied by the registers of a device: one page, mostly configuration space.
pub const VIRTIO_MMIO_LEN: u64 = 0x1000;

/// Where the driver writes a queue's number, 4 bytes, to notify the device.
pub const QUEUE_NOTIFY_OFFSET: u64 = VIRTIO_MMIO_QUEUE_NOTIFY as u64;

/// "virt", little-endian (section 4.2.2).
const MAGIC: u32 = u32::from_le_bytes(*b"virt");
/// The version of the registers that is not "legacy".
const VERSION: u32 = 2;
/// Vendor id: "SSHV", since there is no registry.
const VENDOR: u32 = u32::from_le_bytes(*b"SSHV");

const CONFIG: u64 = VIRTIO_MMIO_CONFIG as u64;

/// Features of transport and rings. Indirect descriptors save ring entries; event indices save
/// notifications and interrupts.
const COMMON_FEATURES: u64 =
    (1 << VIRTIO_F_VERSION_1) | (1 << VIRTIO_RING_F_INDIRECT_DESC) | (1 << VIRTIO_RING_F_EVENT_IDX);

/// How many turns a device serves per notification before its other queues are served.
const TURNS_AT_ONCE: usize = 16;

/// A queue as the driver describes it.
#[derive(Clone, Copy, Debug, Default)]
struct QueueRegisters {
    size: u16,
    descriptors: u64,
    available: u64,
    used: u64,
    ready: bool,
}

#[derive(Debug)]
struct Registers {
    status: u32,
    device_features_select: u32,
    driver_features_select: u32,
    driver_features: u64,
    queue_select: u32,
    queues: Vec<QueueRegisters>,
    /// Incremented by resets.
    session: u64,
}

/// The registers of a [`VirtioDevice`], for the bus of memory-mapped registers.
#[derive(Debug)]
pub struct MmioTransport {
    device: Arc<dyn VirtioDevice>,
    memory: GuestMemoryMmap,
    /// The holder of this lock may wait for the rings. So it is never taken while a ring is served
    /// or a chain is in hand.
    registers: Mutex<Registers>,
    rings: Rings,
    interrupt: EventFdTrigger,
    /// Relaxed would suffice for the guest, which is notified by the interrupt; the interrupt's
    /// descriptor is written after this.
    interrupt_status: AtomicU32,
    config_generation: AtomicU32,
    /// One per queue: notifies the device that the queue has chains.
    notifiers: Vec<EventFd>,
    /// A driver can break its ring and reset the device again and again.
    notices: Seldom,
}

impl MmioTransport {
    /// Creates the registers of `device`, whose rings are in `memory` and which raises `interrupt`.
    ///
    /// # Errors
    ///
    /// Fails when the process is out of descriptors.
    pub fn new(
        device: Arc<dyn VirtioDevice>,
        memory: GuestMemoryMmap,
        interrupt: EventFdTrigger,
    ) -> io::Result<Self> {
        let queues = device.queue_sizes().len();
        let notifiers = (0..queues)
            .map(|_| EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC))
            .collect::<io::Result<_>>()?;
        Ok(Self {
            device,
            memory,
            registers: Mutex::new(Registers {
                status: 0,
                device_features_select: 0,
                driver_features_select: 0,
                driver_features: 0,
                queue_select: 0,
                queues: vec![QueueRegisters::default(); queues],
                session: 0,
            }),
            rings: Rings::new(queues),
            interrupt,
            interrupt_status: AtomicU32::new(0),
            config_generation: AtomicU32::new(0),
            notifiers,
            notices: Seldom::notices(),
        })
    }

    /// The notification descriptors of the queues, in order. A write to one has the effect of
    /// writing the queue's number to [`QUEUE_NOTIFY_OFFSET`].
    pub fn notifiers(&self) -> &[EventFd] {
        &self.notifiers
    }

    /// Changes the device's configuration and notifies the driver. A driver that reads a field in
    /// parts while it changes sees two generations and reads again.
    pub fn change_config(&self, change: impl FnOnce()) {
        self.config_generation.fetch_add(1, Ordering::AcqRel);
        change();
        self.config_generation.fetch_add(1, Ordering::AcqRel);
        self.raise(VIRTIO_MMIO_INT_CONFIG);
    }

    /// The device.
    pub fn device(&self) -> &Arc<dyn VirtioDevice> {
        &self.device
    }

    /// Serves chains of a queue until there are none. After a bounded number it notifies itself and
    /// returns, so that other queues are served.
    pub fn serve(&self, queue: usize) {
        self.serve_while(queue, &|| true);
    }

    /// As [`serve`](Self::serve), but notifies itself and returns after the first turn for which
    /// `keep_serving` is false: one turn of a disk may take as long as the host's storage does.
    pub fn serve_while(&self, queue: usize, keep_serving: &dyn Fn() -> bool) {
        for _ in 0..TURNS_AT_ONCE {
            match self.serve_once(queue) {
                Ok(true) if keep_serving() => {}
                Ok(true) => break,
                Ok(false) => return,
                Err(Broken(session)) => return self.needs_reset(session),
            }
        }
        self.notify(queue);
    }

    /// Lets the device serve some chains; returns true when there may be more.
    fn serve_once(&self, index: usize) -> Result<bool, Broken> {
        let Some(device) = self.device.on_threads() else {
            let served = self.rings.serve(index, &self.memory, |ring| {
                let more = self.device.serve(index, ring)?;
                if ring.must_notify()? {
                    self.raise(VIRTIO_MMIO_INT_VRING);
                }
                Ok(more)
            });
            return Ok(served?.unwrap_or(false));
        };
        let may_begin = || device.may_begin();
        let taken = self
            .rings
            .take(index, &self.memory, device.threads(), may_begin)?;
        let Some(in_hand) = taken else {
            return Ok(false);
        };
        if in_hand.another_may_begin {
            self.notify(index);
        }
        let written = device.carry_out(&in_hand.chain, &self.memory);
        if in_hand.complete(written)? {
            self.raise(VIRTIO_MMIO_INT_VRING);
        }
        Ok(true)
    }

    /// Stops the device until the driver resets it, unless the driver has already done so.
    fn needs_reset(&self, session: u64) {
        let mut registers = lock(&self.registers);
        if registers.session == session {
            if let Some(unreported) = self.notices.pass(Instant::now()) {
                tracing::warn!(
                    device = self.device.name(),
                    unreported,
                    "the guest's driver made an inconsistent ring; the device stops"
                );
            }
            registers.status |= VIRTIO_CONFIG_S_NEEDS_RESET;
            // The reset waits for chains in hand.
            self.rings.abandon();
            self.raise(VIRTIO_MMIO_INT_CONFIG);
        }
    }

    fn raise(&self, why: u32) {
        self.interrupt_status.fetch_or(why, Ordering::AcqRel);
        if let Err(error) = self.interrupt.trigger() {
            tracing::warn!(%error, "an interrupt of a virtio device is lost");
        }
    }

    fn notify(&self, queue: usize) {
        if let Some(notifier) = self.notifiers.get(queue) {
            // A full counter notifies as well.
            let _ = notifier.write(1);
        }
    }

    fn features(&self) -> u64 {
        self.device.features() | COMMON_FEATURES
    }

    fn read_register(&self, offset: u32) -> u32 {
        let registers = lock(&self.registers);
        let queue = usize::try_from(registers.queue_select).unwrap_or(usize::MAX);
        match offset {
            VIRTIO_MMIO_MAGIC_VALUE => MAGIC,
            VIRTIO_MMIO_VERSION => VERSION,
            VIRTIO_MMIO_DEVICE_ID => self.device.device_id(),
            VIRTIO_MMIO_VENDOR_ID => VENDOR,
            VIRTIO_MMIO_DEVICE_FEATURES => half(self.features(), registers.device_features_select),
            VIRTIO_MMIO_QUEUE_NUM_MAX => {
                let sizes = self.device.queue_sizes();
                sizes.get(queue).map_or(0, |size| u32::from(*size))
            }
            VIRTIO_MMIO_QUEUE_READY => {
                let queue = registers.queues.get(queue);
                queue.map_or(0, |queue| u32::from(queue.ready))
            }
            VIRTIO_MMIO_INTERRUPT_STATUS => self.interrupt_status.load(Ordering::Acquire),
            VIRTIO_MMIO_STATUS => registers.status,
            // Length and base of absent shared memory regions are all ones.
            VIRTIO_MMIO_SHM_LEN_LOW..=VIRTIO_MMIO_SHM_BASE_HIGH => u32::MAX,
            VIRTIO_MMIO_CONFIG_GENERATION => self.config_generation.load(Ordering::Acquire),
            _ => 0,
        }
    }

    fn write_register(&self, offset: u32, value: u32) {
        let mut registers = lock(&self.registers);
        match offset {
            VIRTIO_MMIO_DEVICE_FEATURES_SEL => registers.device_features_select = value,
            VIRTIO_MMIO_DRIVER_FEATURES_SEL => registers.driver_features_select = value,
            VIRTIO_MMIO_DRIVER_FEATURES => registers.write_features(value),
            VIRTIO_MMIO_QUEUE_SEL => registers.queue_select = value,
            VIRTIO_MMIO_QUEUE_NOTIFY => {
                // Outside the lock: the notified thread may need it.
                drop(registers);
                self.notify(usize::try_from(value).unwrap_or(usize::MAX));
            }
            VIRTIO_MMIO_INTERRUPT_ACK => {
                self.interrupt_status.fetch_and(!value, Ordering::AcqRel);
            }
            VIRTIO_MMIO_STATUS => self.write_status(&mut registers, value),
            VIRTIO_MMIO_QUEUE_READY => self.write_ready(&mut registers, value),
            _ => {
                let max = self.device.queue_sizes();
                registers.write_queue(max, offset, value);
            }
        }
    }

    /// The driver sets status bits one after the other (section 3.1.1) and resets by writing zero.
    /// Bits out of order, and attempts to clear bits, are ignored.
    fn write_status(&self, registers: &mut Registers, value: u32) {
        if value == 0 {
            return self.reset(registers);
        }
        let asks = |bit| value & bit != 0;
        registers.status |= value & (VIRTIO_CONFIG_S_ACKNOWLEDGE | VIRTIO_CONFIG_S_FAILED);
        if asks(VIRTIO_CONFIG_S_DRIVER) && registers.has(VIRTIO_CONFIG_S_ACKNOWLEDGE) {
            registers.status |= VIRTIO_CONFIG_S_DRIVER;
        }
        let understood = registers.driver_features & !self.features() == 0
            && registers.driver_features & (1 << VIRTIO_F_VERSION_1) != 0;
        if asks(VIRTIO_CONFIG_S_FEATURES_OK) && registers.has(VIRTIO_CONFIG_S_DRIVER) && understood
        {
            registers.status |= VIRTIO_CONFIG_S_FEATURES_OK;
        }
        if asks(VIRTIO_CONFIG_S_DRIVER_OK)
            && registers.has(VIRTIO_CONFIG_S_FEATURES_OK)
            && !registers.has(VIRTIO_CONFIG_S_DRIVER_OK)
        {
            registers.status |= VIRTIO_CONFIG_S_DRIVER_OK;
            let features = registers.driver_features;
            self.device.start(features);
            let sizes = self.device.queue_sizes().iter();
            let queues = registers.queues.iter().zip(sizes);
            let queues = queues.map(|(queue, max)| {
                let mut queue = self.queue(queue, *max)?;
                queue.set_event_idx(features & (1 << VIRTIO_RING_F_EVENT_IDX) != 0);
                Some(queue)
            });
            self.rings.start(registers.session, queues.collect());
            // Chains that were made available before are served too.
            for queue in 0..self.notifiers.len() {
                self.notify(queue);
            }
        }
    }

    fn reset(&self, registers: &mut Registers) {
        // Waits for chains that are being served.
        self.rings.stop();
        registers.status = 0;
        registers.driver_features = 0;
        registers.queues.fill(QueueRegisters::default());
        registers.session += 1;
        self.interrupt_status.store(0, Ordering::Release);
        self.device.reset();
    }

    /// Starts a queue if its description is valid, or stops it.
    fn write_ready(&self, registers: &mut Registers, value: u32) {
        let index = usize::try_from(registers.queue_select).unwrap_or(usize::MAX);
        let Some(max) = self.device.queue_sizes().get(index) else {
            return;
        };
        let may_start = registers.may_configure();
        let Some(queue) = registers.queues.get_mut(index) else {
            return;
        };
        if value == 0 {
            queue.ready = false;
            self.rings.stop_queue(index);
        } else if value == 1 && may_start {
            queue.ready = true;
            queue.ready = self.queue(queue, *max).is_some();
        }
    }

    /// The queue that these registers describe, if it is ready and valid.
    fn queue(&self, registers: &QueueRegisters, max: u16) -> Option<Queue> {
        let mut queue = Queue::new(max).ok().filter(|_| registers.ready)?;
        queue.try_set_size(registers.size).ok()?;
        let address = GuestAddress;
        queue
            .try_set_desc_table_address(address(registers.descriptors))
            .ok()?;
        queue
            .try_set_avail_ring_address(address(registers.available))
            .ok()?;
        queue
            .try_set_used_ring_address(address(registers.used))
            .ok()?;
        queue.set_ready(true);
        queue.is_valid(&self.memory).then_some(queue)
    }
}

impl Registers {
    fn has(&self, bit: u32) -> bool {
        self.status & bit != 0
    }

    /// Queues are described between feature negotiation and the start.
    fn may_configure(&self) -> bool {
        self.has(VIRTIO_CONFIG_S_FEATURES_OK) && !self.has(VIRTIO_CONFIG_S_DRIVER_OK)
    }

    fn write_features(&mut self, value: u32) {
        let may = self.has(VIRTIO_CONFIG_S_DRIVER) && !self.has(VIRTIO_CONFIG_S_FEATURES_OK);
        match self.driver_features_select {
            0 if may => set_low(&mut self.driver_features, value),
            1 if may => set_high(&mut self.driver_features, value),
            _ => {}
        }
    }

    fn write_queue(&mut self, max: &[u16], offset: u32, value: u32) {
        let index = usize::try_from(self.queue_select).unwrap_or(usize::MAX);
        let may = self.may_configure();
        let (Some(queue), Some(&max)) = (self.queues.get_mut(index), max.get(index)) else {
            return;
        };
        if !may || queue.ready {
            return;
        }
        match offset {
            VIRTIO_MMIO_QUEUE_NUM => {
                // An invalid size is not stored: the queue will not become ready.
                let size = u16::try_from(value).unwrap_or(0);
                let fits = size.is_power_of_two() && size <= max;
                queue.size = if fits { size } else { 0 };
            }
            VIRTIO_MMIO_QUEUE_DESC_LOW => set_low(&mut queue.descriptors, value),
            VIRTIO_MMIO_QUEUE_DESC_HIGH => set_high(&mut queue.descriptors, value),
            VIRTIO_MMIO_QUEUE_AVAIL_LOW => set_low(&mut queue.available, value),
            VIRTIO_MMIO_QUEUE_AVAIL_HIGH => set_high(&mut queue.available, value),
            VIRTIO_MMIO_QUEUE_USED_LOW => set_low(&mut queue.used, value),
            VIRTIO_MMIO_QUEUE_USED_HIGH => set_high(&mut queue.used, value),
            _ => {}
        }
    }
}

/// One of the two 32-bit halves of a value.
fn half(value: u64, select: u32) -> u32 {
    let [a, b, c, d, e, f, g, h] = value.to_le_bytes();
    match select {
        0 => u32::from_le_bytes([a, b, c, d]),
        1 => u32::from_le_bytes([e, f, g, h]),
        _ => 0,
    }
}

fn set_low(value: &mut u64, half: u32) {
    *value = (*value & !0xffff_ffff) | u64::from(half);
}

fn set_high(value: &mut u64, half: u32) {
    *value = (*value & 0xffff_ffff) | (u64::from(half) << 32);
}

/// The register at an offset: registers are 4 bytes wide and accessed as a whole.
fn register_at(offset: u64, width: usize) -> Option<u32> {
    let offset = u32::try_from(offset).ok()?;
    (width == 4 && offset.is_multiple_of(4)).then_some(offset)
}

impl BusDevice for MmioTransport {
    fn read(&self, offset: u64, data: &mut [u8]) {
        if let Some(at) = offset.checked_sub(CONFIG) {
            data.fill(0);
            self.device.read_config(at, data);
        } else if let Some(register) = register_at(offset, data.len()) {
            data.copy_from_slice(&self.read_register(register).to_le_bytes());
        } else {
            data.fill(0xff);
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        if let Some(at) = offset.checked_sub(CONFIG) {
            // The configuration must not be written before features are negotiated (section 3.1.1).
            if lock(&self.registers).has(VIRTIO_CONFIG_S_FEATURES_OK) {
                self.device.write_config(at, data);
            }
        } else if let (Some(register), Ok(value)) =
            (register_at(offset, data.len()), data.try_into())
        {
            self.write_register(register, u32::from_le_bytes(value));
        }
    }
}

#[cfg(test)]
#[path = "mmio_tests.rs"]
mod tests;
