//! Virtio devices: addresses, interrupts, and the threads that serve them.
//!
//! Only this module assigns addresses and interrupts: each device has a page of registers in the
//! device hole, a separate interrupt, and an entry in the DSDT, in the order in which the machine
//! was given the devices. The guest notifies a queue by a write that KVM converts to an event
//! (ioeventfd) where it can; the write also works as any other register access.
//!
//! Each device has one thread, or several if it supports that. The threads access guest memory, so
//! they may wait for a page as a vCPU does, and they may wait for a slow disk; neither blocks other
//! devices or the console. The end of a run waits for these threads as for vCPUs.

use std::sync::Arc;
use std::thread;

use devices::virtio::{
    CarriesOut, MmioTransport, QUEUE_NOTIFY_OFFSET, QueueServer, VIRTIO_MMIO_LEN, VirtioDevice,
};
use devices::{Bus, EventFdTrigger};
use event_manager::{EventManager, EventOps, Events, MutEventSubscriber, SubscriberOps};
use fabric_host::{ThreadClass, begin_class};
use kvm_ioctls::{Cap, IoEventAddress, VmFd};
use vm_memory::GuestMemoryMmap;
use vmm_sys_util::epoll::EventSet;

use crate::error::MachineError;
use crate::irqchip::InterruptController;
use crate::layout::{VIRTIO_DEVICES_MAX, VIRTIO_INTERRUPT_FIRST, VIRTIO_START};
use crate::lifecycle::shared::Shared;

/// Address and interrupt of a virtio device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Slot {
    /// The device's number, from 0 on.
    pub number: u8,
    /// Address of its registers, [`VIRTIO_MMIO_LEN`] bytes.
    pub start: u64,
    /// Its input of the I/O APIC.
    pub interrupt: u32,
}

impl Slot {
    /// Returns slot `number`, below [`VIRTIO_DEVICES_MAX`].
    pub fn new(number: u8) -> Self {
        Self {
            number,
            start: VIRTIO_START + u64::from(number) * VIRTIO_MMIO_LEN,
            interrupt: VIRTIO_INTERRUPT_FIRST + u32::from(number),
        }
    }
}

/// The virtio devices of a machine, each in its slot.
#[derive(Debug, Default)]
pub(crate) struct VirtioDevices {
    placed: Vec<(Slot, Arc<MmioTransport>, EventFdTrigger)>,
}

impl VirtioDevices {
    /// Assigns slots to devices of a machine with `memory`.
    pub fn new(
        memory: &GuestMemoryMmap,
        devices: &[Arc<dyn VirtioDevice>],
    ) -> Result<Self, MachineError> {
        let limit = usize::from(VIRTIO_DEVICES_MAX);
        if devices.len() > limit {
            return Err(MachineError::TooManyDevices {
                asked: devices.len(),
                limit,
            });
        }
        let slots = (0..VIRTIO_DEVICES_MAX).map(Slot::new);
        let placed = slots.zip(devices).map(|(slot, device)| {
            let interrupt = EventFdTrigger::new()?;
            let transport =
                MmioTransport::new(Arc::clone(device), memory.clone(), interrupt.clone())?;
            Ok((slot, Arc::new(transport), interrupt))
        });
        let placed = placed
            .collect::<std::io::Result<_>>()
            .map_err(MachineError::host("create an event descriptor"))?;
        Ok(Self { placed })
    }

    /// Returns the slots in use.
    pub fn slots(&self) -> Vec<Slot> {
        self.placed.iter().map(|(slot, ..)| *slot).collect()
    }

    /// Returns the registers of each device.
    pub fn transports(&self) -> Vec<Arc<MmioTransport>> {
        let transports = self.placed.iter().map(|(_, transport, _)| transport);
        transports.cloned().collect()
    }

    /// Connects interrupts and notifiers to KVM, and adds the registers to the bus.
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
            for (queue, notifier) in (0_u32..).zip(transport.notifiers()) {
                vm.register_ioevent(notifier, &notify, queue)
                    .map_err(MachineError::kvm("register the notifier of a queue"))?;
            }
        }
        Ok(())
    }

    /// Starts the threads of each device, which serve it until the run ends.
    pub fn spawn(self, shared: &Arc<Shared>) -> Result<(), MachineError> {
        for (_, transport, _) in self.placed {
            let device = transport.device();
            let threads = device.on_threads().map_or(1, CarriesOut::threads);
            for number in 0..threads {
                let name = match threads {
                    1 => format!("virtio-{}", device.name()),
                    _ => format!("virtio-{}-{number}", device.name()),
                };
                spawn_one(name, Arc::clone(&transport), shared)?;
            }
        }
        Ok(())
    }
}

fn spawn_one(
    name: String,
    transport: Arc<MmioTransport>,
    shared: &Arc<Shared>,
) -> Result<(), MachineError> {
    shared.control.device_thread_starts();
    let of_thread = Arc::clone(shared);
    let thread = thread::Builder::new().name(name);
    match thread.spawn(move || run(transport, &of_thread)) {
        Ok(_) => Ok(()),
        Err(error) => {
            shared.control.device_thread_ended();
            let failed = MachineError::host("start the thread of a virtio device");
            Err(failed(error))
        }
    }
}

/// Serves one device; ends the run if that fails.
fn run(transport: Arc<MmioTransport>, shared: &Arc<Shared>) {
    let _end_guard = EndGuard {
        shared,
        device: Arc::clone(transport.device()),
    };
    begin_class(ThreadClass::Device);
    if let Err(error) = serve(transport, shared) {
        shared.control.end(Err(error));
    }
}

fn serve(transport: Arc<MmioTransport>, shared: &Arc<Shared>) -> Result<(), MachineError> {
    let mut manager: EventManager<Box<dyn MutEventSubscriber>> =
        EventManager::new().map_err(MachineError::EventLoop)?;
    manager.add_subscriber(Box::new(End(Arc::clone(shared))));
    manager.add_subscriber(Box::new(Gate {
        server: QueueServer::new(transport),
        shared: Arc::clone(shared),
    }));
    while !shared.control.has_ended() {
        manager.run().map_err(MachineError::EventLoop)?;
    }
    Ok(())
}

/// Blocks the service of a device while the machine is paused.
struct Gate {
    server: QueueServer,
    shared: Arc<Shared>,
}

impl MutEventSubscriber for Gate {
    fn init(&mut self, ops: &mut EventOps) {
        self.server.init(ops);
    }

    fn process(&mut self, events: Events, _ops: &mut EventOps) {
        if let Some(turn) = self.shared.control.device_turn() {
            self.server.process_while(&events, &|| turn.may_continue());
        }
    }
}

/// Wakes the event loop when the run has ended.
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

/// Counts a device thread as ended when dropped, also by a panic.
struct EndGuard<'a> {
    shared: &'a Shared,
    device: Arc<dyn VirtioDevice>,
}

impl Drop for EndGuard<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            let device = self.device.name().to_owned();
            self.shared
                .control
                .end(Err(MachineError::DevicePanicked { device }));
        }
        self.shared.control.device_thread_ended();
    }
}

#[cfg(test)]
mod tests {
    use devices::virtio::{Balloon, FreePages, FreeRange};
    use vm_memory::GuestAddress;

    use super::*;
    use crate::layout::{DEVICE_HOLE_START, IOAPIC_START};

    #[test]
    fn more_devices_than_there_are_places_are_refused() {
        #[derive(Debug)]
        struct NoPages;
        impl FreePages for NoPages {
            fn discard(&self, _: &[FreeRange]) {}
        }
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 4096)]).unwrap();
        let balloon: Arc<dyn VirtioDevice> = Arc::new(Balloon::new(Arc::new(NoPages)));
        let mut devices = vec![balloon; usize::from(VIRTIO_DEVICES_MAX)];
        let placed = VirtioDevices::new(&memory, &devices).unwrap();
        assert_eq!(placed.slots().len(), devices.len());
        devices.extend_from_within(..1);
        let error = VirtioDevices::new(&memory, &devices).unwrap_err();
        assert!(error.to_string().contains("9 asked, 8 is the limit"));
    }

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
        // Above the interrupts of the ISA bus, and below the 24 inputs of the I/O APIC.
        assert!(slots[0].interrupt >= 16 && last.interrupt < 24);
    }
}
