//! Where virtio devices are, how they are wired, and the thread that serves them.
//!
//! Each has a page of registers in the device hole, an interrupt of its own, and is declared in
//! the DSDT. The guest rings a queue by a write that KVM turns into an event by itself, where it
//! can; the write also works as any other access to a register.
//!
//! The thread touches guest memory, so it may wait for a page as a vCPU does. It is therefore
//! not the one that serves the console, and it is counted like the vCPUs when a run ends.

use std::sync::Arc;
use std::thread;

use devices::virtio::{
    Balloon, FreePages, MmioTransport, QUEUE_NOTIFY_OFFSET, QueueServer, VIRTIO_MMIO_LEN,
    VirtioDevice,
};
use devices::{Bus, EventFdTrigger};
use event_manager::{EventManager, EventOps, Events, MutEventSubscriber, SubscriberOps};
use kvm_ioctls::{Cap, IoEventAddress, VmFd};
use vm_memory::GuestMemoryMmap;
use vmm_sys_util::epoll::EventSet;

use super::error::MachineError;
use super::irqchip::InterruptController;
use super::layout::{VIRTIO_DEVICES_MAX, VIRTIO_INTERRUPT_FIRST, VIRTIO_START};
use super::vcpu::Shared;

/// The place of a virtio device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Slot {
    /// Its number, from 0 on.
    pub number: u8,
    /// Address of its registers, [`VIRTIO_MMIO_LEN`] bytes.
    pub start: u64,
    /// Its input of the I/O interrupt controller.
    pub interrupt: u32,
}

impl Slot {
    /// Place `number`, below [`VIRTIO_DEVICES_MAX`].
    pub fn new(number: u8) -> Self {
        Self {
            number,
            start: VIRTIO_START + u64::from(number) * VIRTIO_MMIO_LEN,
            interrupt: VIRTIO_INTERRUPT_FIRST + u32::from(number),
        }
    }
}

/// The virtio devices of a machine, each at its place.
#[derive(Debug, Default)]
pub(super) struct VirtioDevices {
    placed: Vec<(Slot, Arc<MmioTransport>, EventFdTrigger)>,
}

impl VirtioDevices {
    /// The devices of a machine with `memory`: a balloon, if somebody takes what it frees.
    pub fn new(
        memory: &GuestMemoryMmap,
        free_pages: Option<Arc<dyn FreePages>>,
    ) -> Result<Self, MachineError> {
        let mut devices = Self::default();
        if let Some(free_pages) = free_pages {
            devices.place(memory, Arc::new(Balloon::new(free_pages)))?;
        }
        Ok(devices)
    }

    fn place(
        &mut self,
        memory: &GuestMemoryMmap,
        device: Arc<dyn VirtioDevice>,
    ) -> Result<(), MachineError> {
        let number = u8::try_from(self.placed.len()).unwrap_or(u8::MAX);
        // What devices there are is decided here, not by the user.
        assert!(number < VIRTIO_DEVICES_MAX, "too many virtio devices");
        let system = MachineError::host("create an event descriptor");
        let interrupt = EventFdTrigger::new().map_err(system)?;
        let system = MachineError::host("create an event descriptor");
        let transport =
            MmioTransport::new(device, memory.clone(), interrupt.clone()).map_err(system)?;
        self.placed
            .push((Slot::new(number), Arc::new(transport), interrupt));
        Ok(())
    }

    /// The places that are taken.
    pub fn slots(&self) -> Vec<Slot> {
        self.placed.iter().map(|(slot, ..)| *slot).collect()
    }

    /// Connects interrupts and bells with KVM, and puts the registers on the bus.
    pub fn connect(
        &self,
        vm: &VmFd,
        interrupts: &InterruptController,
        mmio: &mut Bus,
    ) -> Result<(), MachineError> {
        for (slot, transport, interrupt) in &self.placed {
            interrupts.connect(vm, interrupt, slot.interrupt)?;
            mmio.insert(slot.start, VIRTIO_MMIO_LEN, Arc::clone(transport) as _)?;
            if !vm.check_extension(Cap::Ioeventfd) {
                continue;
            }
            let notify = IoEventAddress::Mmio(slot.start + QUEUE_NOTIFY_OFFSET);
            for (queue, bell) in (0_u32..).zip(transport.bells()) {
                vm.register_ioevent(bell, &notify, queue)
                    .map_err(MachineError::kvm("listen to the queues of a device"))?;
            }
        }
        Ok(())
    }

    /// Starts the thread that serves the queues until the run ends. None without devices.
    pub fn spawn(self, shared: &Arc<Shared>) -> Result<(), MachineError> {
        if self.placed.is_empty() {
            return Ok(());
        }
        shared.control.device_thread_starts();
        let of_thread = Arc::clone(shared);
        let spawned = thread::Builder::new()
            .name("virtio".into())
            .spawn(move || self.run(&of_thread));
        if let Err(error) = spawned {
            shared.control.device_thread_ended();
            return Err(MachineError::host("start the thread of virtio devices")(
                error,
            ));
        }
        Ok(())
    }

    fn run(self, shared: &Arc<Shared>) {
        let _departure = Departure(shared);
        if let Err(error) = self.serve(shared) {
            shared.control.end(Err(error));
        }
    }

    fn serve(self, shared: &Arc<Shared>) -> Result<(), MachineError> {
        let mut manager: EventManager<Box<dyn MutEventSubscriber>> =
            EventManager::new().map_err(MachineError::EventLoop)?;
        manager.add_subscriber(Box::new(End(Arc::clone(shared))));
        for (_, transport, _) in self.placed {
            manager.add_subscriber(Box::new(QueueServer::new(transport)));
        }
        while !shared.control.has_ended() {
            manager.run().map_err(MachineError::EventLoop)?;
        }
        Ok(())
    }
}

/// Wakes the loop when the run has ended.
struct End(Arc<Shared>);

impl MutEventSubscriber for End {
    fn init(&mut self, ops: &mut EventOps) {
        let wake = Events::new(self.0.control.wake_fd(), EventSet::IN);
        if let Err(error) = ops.add(wake) {
            let error = MachineError::EventLoop(error);
            self.0.control.end(Err(error));
        }
    }

    fn process(&mut self, _events: Events, _ops: &mut EventOps) {}
}

/// Counts the thread out when it ends, also by a panic.
struct Departure<'a>(&'a Shared);

impl Drop for Departure<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.0.control.end(Err(MachineError::DevicesPanicked));
        }
        self.0.control.device_thread_ended();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::layout::{DEVICE_HOLE_START, IOAPIC_START};

    #[test]
    fn every_place_is_in_the_hole_and_has_an_input_of_its_own() {
        let slots: Vec<_> = (0..VIRTIO_DEVICES_MAX).map(Slot::new).collect();
        for (slot, next) in slots.iter().zip(&slots[1..]) {
            assert!(slot.start + VIRTIO_MMIO_LEN <= next.start);
            assert_ne!(slot.interrupt, next.interrupt);
        }
        let last = slots.last().unwrap();
        assert!(slots[0].start >= DEVICE_HOLE_START);
        assert!(last.start + VIRTIO_MMIO_LEN <= u64::from(IOAPIC_START));
        // Above the interrupts of the ISA bus, below the 24 that there are.
        assert!(slots[0].interrupt >= 16 && last.interrupt < 24);
    }
}
