//! Builds a machine and runs it to its end.

use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use devices::{
    BootEvent, BootTimer, Bus, COM1_IRQ, COM2_IRQ, COM2_PORT, ConsoleOutput, MachineEvents,
    PmRegisters, SERIAL_LEN, SerialPort,
};
use event_manager::{EventManager, EventOps, Events, MutEventSubscriber, SubscriberOps};
use kvm_bindings::KVM_MAX_CPUID_ENTRIES;
use vm_memory::GuestMemoryMmap;
use vmm_sys_util::epoll::EventSet;

use crate::acpi::AcpiTables;
use crate::boot::{initrd, kernel, params};
use crate::config::MachineConfig;
use crate::console::ConsoleConfig;
use crate::console::input::ConsoleInput;
use crate::console::terminal::RawTerminal;
use crate::error::MachineError;
use crate::host_cpu::is_emulated;
use crate::irqchip::InterruptController;
use crate::lifecycle::control::Control;
use crate::lifecycle::ending;
use crate::lifecycle::handle::MachineHandle;
use crate::lifecycle::shared::Shared;
use crate::limits::{CONSOLE_DRAIN_TIME_MAX, SECOND_PORT_DRAIN_TIME_MAX, VCPUS_MAX};
use crate::memory_errors::MemoryErrors;
use crate::nodes::primary::Primary;
use crate::nodes::seats::{Maker, Seats};
use crate::nodes::time::NodeTime;
use crate::nodes::{Connections, NodesConfig};
use crate::outcome::Outcome;
use crate::ports::{port_bus, serial_port};
use crate::vcpu::machine_check::MachineCheck;
use crate::vcpu::model::CpuModel;
use crate::vcpu::packages::Packages;
use crate::vcpu::state::{HostFacts, MsrNames};
use crate::vcpu::{Vcpu, cpuid, regs, tsc};
use crate::virtio::VirtioDevices;
use crate::{halt_exits, kvm, layout, memory, paging};

/// A machine that is ready to run.
pub struct Machine {
    shared: Arc<Shared>,
    vcpus: Vec<Vcpu>,
    virtio: VirtioDevices,
    serial: Arc<SerialPort>,
    console_input: Option<OwnedFd>,
    console_output: ConsoleOutput,
    on_raw_mode: Option<Box<dyn FnOnce() + Send>>,
    second_output: Option<ConsoleOutput>,
    boot_timer: Arc<BootTimer>,
    power: Arc<PmRegisters>,
    /// Links to the other nodes, until the end.
    nodes: Option<Primary>,
}

impl fmt::Debug for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Machine")
            .field("vcpus", &self.vcpus.len())
            .finish_non_exhaustive()
    }
}

impl Machine {
    /// Builds a machine with `memory`, whose regions are exactly those of
    /// [`guest_memory_ranges`] for its size.
    ///
    /// # Errors
    ///
    /// Every error names the value that is wrong and the remedy.
    pub fn new(
        config: &MachineConfig,
        memory: GuestMemoryMmap,
        console: ConsoleConfig,
    ) -> Result<Self, MachineError> {
        Self::build(config, memory, console, Packages::one(config.cpus), None)
    }

    /// Builds a machine that also has vCPUs on other nodes, which run
    /// [`Secondary`](crate::Secondary), with the same `memory`. This node is the primary.
    ///
    /// # Errors
    ///
    /// As [`Self::new`]; also when a node does not answer, or cannot run its vCPUs.
    pub fn with_nodes(
        config: &MachineConfig,
        memory: GuestMemoryMmap,
        console: ConsoleConfig,
        nodes: NodesConfig,
    ) -> Result<Self, MachineError> {
        let packages = Packages::by_node(&nodes.owners);
        let nodes = Connections::of_primary(nodes, config.cpus)?;
        Self::build(config, memory, console, packages, Some(nodes))
    }

    fn build(
        config: &MachineConfig,
        memory: GuestMemoryMmap,
        console: ConsoleConfig,
        packages: Packages,
        connections: Option<Connections>,
    ) -> Result<Self, MachineError> {
        MachineError::check_cpus(u32::from(config.cpus), u32::from(VCPUS_MAX))?;
        let size = memory::check_memory(&memory, config.hotplug_bytes)?;
        if connections.is_some() {
            paging::check()?;
        }
        let kvm = kvm::open_kvm()?;
        let host_limit = u32::try_from(kvm.get_max_vcpus()).unwrap_or(u32::MAX);
        MachineError::check_cpus(u32::from(config.cpus), host_limit)?;
        let supported = kvm
            .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
            .map_err(MachineError::kvm("report its CPU features"))?;
        if let Some(bits) = cpuid::physical_address_bits(supported.as_slice()) {
            memory::check_address_bits(size, bits)?;
            memory::check_hotplug_bits(size, config.hotplug_bytes, bits)?;
        }

        let kernel = kernel::load_kernel(&config.kernel, &memory, size.low_end)?;
        tracing::debug!(format = ?kernel.format, entry = kernel.entry.0, end = kernel.end, "kernel");
        let initrd = match &config.initrd {
            Some(initrd) => {
                let nodes = &config.numa;
                Some(initrd::load_initrd(
                    initrd, &memory, size, kernel.end, nodes,
                )?)
            }
            None => None,
        };
        let virtio = VirtioDevices::new(&memory, &config.devices)?;
        let slots = virtio.slots();
        let tables = AcpiTables::new(config.cpus, &slots, &config.numa, config.irqchip);
        let rsdp = tables.write(&memory)?;
        params::write_boot_params(&memory, size, &kernel, initrd, &config.cmdline, rsdp)?;
        regs::write_boot_tables(&memory)?;

        let vm = Arc::new(kvm::create_vm(&kvm)?);
        kvm::map_memory(&vm, &memory)?;
        if config.dedicated_cpus {
            halt_exits::disable(&vm, config.irqchip)?;
        }
        let nodes = connections.as_ref().map(Connections::nodes);
        let followers = connections.as_ref().map(Connections::followers);
        let control = Control::with_followers(config.cpus.into(), followers.unwrap_or_default())
            .map_err(MachineError::host("prepare for the control of vCPUs"))?;
        let interrupts = InterruptController::new(
            config.irqchip,
            &vm,
            &control,
            nodes.as_ref().map(Arc::clone),
        )?;

        let serial_port = |irq, writer| serial_port(&vm, &interrupts, irq, writer);
        let (serial, console_output) = serial_port(COM1_IRQ, console.output)?;
        let second = console.second.map(|writer| serial_port(COM2_IRQ, writer));
        let (second, second_output) = second.transpose()?.unzip();
        let boot_timer = Arc::new(BootTimer::new());
        let events =
            MachineEvents::new().map_err(MachineError::host("create an event descriptor"))?;
        let sci = interrupts.line(&vm, u32::from(layout::SCI_IRQ));
        let power = Arc::new(PmRegisters::new(events.clone(), sci));
        let mut ports = port_bus(&serial, &boot_timer, &events, &power)?;
        if let Some(second) = second {
            ports.insert(COM2_PORT, SERIAL_LEN, second)?;
        }
        let mut mmio = Bus::mmio();
        virtio.connect(&vm, &interrupts, &mut mmio)?;
        interrupts.add_devices(&mut ports, &mut mmio)?;

        let machine_check = config
            .survives_lost_memory
            .then(|| MachineCheck::of(&kvm, supported.as_slice(), config.cpus));
        let machine_check = machine_check.transpose()?;
        let memory_errors = machine_check.map(|_| MemoryErrors::handle(&memory));
        let memory_errors = memory_errors
            .transpose()
            .map_err(MachineError::host("handle memory errors"))?;
        let model = CpuModel {
            supported: supported.as_slice().to_vec(),
            cpus: config.cpus,
            packages,
            emulated: is_emulated(),
            nodes: nodes.as_ref().map(Arc::clone),
            halts_in_guest: config.dedicated_cpus,
            machine_check,
        };
        let seats = nodes.as_ref().map(|nodes| -> Result<_, MachineError> {
            // KVM gives each vCPU a slightly different offset: all get that of the first one.
            let clock = tsc::Clock::of_new(&kvm)?;
            let maker = Maker {
                clock,
                model: model.clone(),
                vm: Arc::clone(&vm),
                interrupts: interrupts.clone(),
                pinning: config.pinning.clone(),
                host: HostFacts {
                    msrs: MsrNames::of(&kvm)?,
                    tsc_khz: clock.khz,
                },
                time: Arc::new(NodeTime::of_primary()),
            };
            Ok(Arc::new(Seats::new(maker, nodes, control.kicks())))
        });
        let seats = seats.transpose()?;
        let mut vcpus = match &seats {
            Some(seats) => seats.vcpus()?,
            None => model.create_vcpus(&vm, &interrupts, &config.pinning)?,
        };
        if let Some(boot_processor) = vcpus.first() {
            regs::set_boot_registers(&boot_processor.fd, kernel.entry)?;
        }

        let shared = Arc::new(Shared {
            ports,
            mmio,
            events,
            control,
            transports: virtio.transports(),
            _vm: vm,
            memory,
            memory_errors,
        });
        let nodes = connections.zip(seats).map(|(connections, seats)| {
            let start = model.start(seats.clock(), size.total, config.hotplug_bytes);
            Primary::start(connections, &interrupts, &shared, &start, &seats)
        });
        let nodes = nodes.transpose()?;
        if let Some(mover) = nodes.as_ref().map(Primary::mover) {
            if mover.awaits(BootEvent::Init) {
                for vcpu in &mut vcpus {
                    vcpu.first_program = Some(Arc::clone(&boot_timer));
                }
            }
            boot_timer.on_event(move |event| mover.booted(event));
        }
        Ok(Self {
            nodes,
            shared,
            vcpus,
            virtio,
            serial,
            console_input: console.input,
            console_output,
            on_raw_mode: console.on_raw_mode,
            second_output,
            boot_timer,
            power,
        })
    }

    /// Returns a handle to the machine.
    pub fn handle(&self) -> MachineHandle {
        MachineHandle {
            shared: Arc::clone(&self.shared),
            boot_timer: Arc::clone(&self.boot_timer),
            power: Arc::clone(&self.power),
            mover: self.nodes.as_ref().map(Primary::mover),
        }
    }

    /// Runs the machine to its end, on the calling thread and one thread per vCPU. While it runs, a
    /// console on a terminal is in raw mode.
    ///
    /// # Errors
    ///
    /// Fails when the host cannot run the machine; crashes of the guest are outcomes.
    pub fn run(mut self) -> Result<Outcome, MachineError> {
        let raw_terminal = self.enter_raw_mode();
        let served = self.serve();
        if let Err(error) = served {
            self.shared.control.end(Err(error));
        }
        // A vCPU blocked on the reader of the console would be mistaken for one blocked on a page.
        for output in [Some(&self.console_output), self.second_output.as_ref()] {
            output.map(ConsoleOutput::stop_waiting);
        }
        ending::wait_for_threads(&self.shared);
        drop(self.nodes.take());
        let lost_bytes = self.console_output.close(CONSOLE_DRAIN_TIME_MAX);
        if lost_bytes > 0 {
            tracing::warn!(lost_bytes, "the console did not take all output");
        }
        if let Some(second) = &self.second_output {
            let lost_bytes = second.close(SECOND_PORT_DRAIN_TIME_MAX);
            if lost_bytes > 0 {
                tracing::warn!(lost_bytes, "not all output of the second port was taken");
            }
        }
        drop(raw_terminal);
        self.shared
            .control
            .take_end()
            .unwrap_or(Ok(Outcome::Stopped))
    }

    fn enter_raw_mode(&mut self) -> Option<RawTerminal> {
        match RawTerminal::enter(self.console_input.as_ref()?) {
            Ok(Some(raw)) => {
                if let Some(notify) = self.on_raw_mode.take() {
                    notify();
                }
                Some(raw)
            }
            Ok(None) => None,
            Err(error) => {
                tracing::warn!(%error, "cannot put the terminal into raw mode");
                None
            }
        }
    }

    /// Starts the vCPUs, and serves the devices until the run has ended.
    fn serve(&mut self) -> Result<(), MachineError> {
        let mut manager: EventManager<Box<dyn MutEventSubscriber>> =
            EventManager::new().map_err(MachineError::EventLoop)?;
        manager.add_subscriber(Box::new(EndWatcher {
            shared: Arc::clone(&self.shared),
        }));
        if let Some(input) = self.console_input.take() {
            manager.add_subscriber(Box::new(ConsoleInput::new(
                input,
                Arc::clone(&self.serial),
                Arc::clone(&self.shared),
            )));
        }
        if !self.shared.control.has_ended() {
            self.boot_timer.start();
            std::mem::take(&mut self.virtio).spawn(&self.shared)?;
            // The boot processor starts last, so that every vCPU thread exists when the guest
            // begins.
            for vcpu in self.vcpus.drain(..).rev() {
                // Threads are counted, not joined: one may have to be left behind.
                vcpu.spawn(Arc::clone(&self.shared))?;
            }
        }
        while !self.shared.control.has_ended() {
            manager.run().map_err(MachineError::EventLoop)?;
        }
        Ok(())
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        // Ends the console's threads also if the machine was never run.
        for output in [Some(&self.console_output), self.second_output.as_ref()] {
            output.map(|output| output.close(Duration::ZERO));
        }
    }
}

/// Ends the device loop, and ends the run at the request of a device.
struct EndWatcher {
    shared: Arc<Shared>,
}

impl MutEventSubscriber for EndWatcher {
    fn init(&mut self, ops: &mut EventOps) {
        let stuck = self.shared.memory_errors.as_ref().map(MemoryErrors::stuck);
        let watched = [self.shared.events.event_fd(), self.shared.control.wake_fd()];
        for fd in watched.into_iter().chain(stuck) {
            if let Err(error) = ops.add(Events::new(fd, EventSet::IN)) {
                let error = MachineError::EventLoop(error);
                self.shared.control.end(Err(error));
            }
        }
    }

    fn process(&mut self, _events: Events, _ops: &mut EventOps) {
        if let Some(event) = self.shared.events.get() {
            self.shared.control.end(Ok(event.into()));
        }
        let errors = self.shared.memory_errors.as_ref();
        if errors.is_some_and(|errors| errors.stuck().read().is_ok()) {
            self.shared.control.end(Err(MachineError::LostPageUsed));
        }
    }
}
