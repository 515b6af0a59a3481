//! The virtual machine.
//!
//! A [`Machine`] is built from a [`MachineConfig`], from guest memory that the caller has
//! mapped as [`guest_memory_ranges`] says, and from a [`ConsoleConfig`]. [`Machine::run`] boots
//! it and gives back how it ended:
//!
//! ```no_run
//! use ssi_hv_machine::{
//!     ConsoleConfig, Machine, MachineConfig, command_line, guest_memory_ranges,
//! };
//! use vm_memory::GuestMemoryMmap;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let ranges: Vec<_> = guest_memory_ranges(1 << 30)
//!     .into_iter()
//!     .map(|(start, bytes)| (start, usize::try_from(bytes).unwrap()))
//!     .collect();
//! let memory = GuestMemoryMmap::from_ranges(&ranges)?;
//! let config = MachineConfig {
//!     kernel: "vmlinuz".into(),
//!     initrd: None,
//!     cmdline: command_line("quiet"),
//!     cpus: 2,
//!     pinning: Vec::new(),
//!     hotplug_bytes: 0,
//!     devices: Vec::new(),
//!     numa: Vec::new(),
//! };
//! let machine = Machine::new(&config, memory, ConsoleConfig::stdio())?;
//! let handle = machine.handle();
//! let outcome = machine.run()?;
//! println!("{outcome:?}, init after {:?}", handle.time_to_init());
//! # Ok(())
//! # }
//! ```
//!
//! # The life of a machine
//!
//! [`Machine::new`] opens KVM, maps the memory, loads kernel and initrd, writes the boot
//! structures and creates the vCPUs. [`Machine::run`] starts a thread for each vCPU and serves
//! the devices on the calling thread until the guest switches itself off or restarts, crashes,
//! or a [`MachineHandle`] stops it.
//!
//! # Memory that is not there yet
//!
//! Any touch of guest memory, by a vCPU or by this module, may wait for a pager: the memory may
//! be backed by userfaultfd. So no lock that a pager could want is held here while guest memory
//! is touched, memory is taken to be zero where nobody wrote, and it is never touched as a
//! whole. A vCPU that waits for a page cannot be made to leave the guest before the page is
//! served. Pausing therefore only asks ([`MachineHandle::pause`]), and ending waits no longer
//! than [`STOP_TIME_MAX`] before it leaves such a thread behind, to die with the process. What a
//! disk has begun ends by itself, so that is waited for up to [`DISK_TIME_MAX`].

mod acpi;
mod boot;
mod console;
mod error;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
mod host_cpu;
mod irqchip;
mod kvm;
mod layout;
mod lifecycle;
mod ports;
mod vcpu;
mod virtio;

use std::fmt;
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use devices::virtio::VirtioDevice;
use devices::{
    BootTimer, Bus, COM1_IRQ, COM2_IRQ, COM2_PORT, ConsoleOutput, MachineEvent, MachineEvents,
    PmRegisters, SERIAL_LEN, SerialPort,
};
use event_manager::{EventManager, EventOps, Events, MutEventSubscriber, SubscriberOps};
use kvm_bindings::KVM_MAX_CPUID_ENTRIES;
use vm_memory::GuestMemoryMmap;
use vmm_sys_util::epoll::EventSet;

pub use acpi::numa::NumaNode;
pub use boot::elf_check::ElfError;
pub use boot::kernel::KernelError;
pub use boot::params::{Initrd, is_of_cmdline};
pub use boot::payload::KERNEL_BYTES_MAX;
pub use console::terminal::{RawTerminal, restore_terminal};
pub use console::{BlockingWriter, ConsoleConfig};
pub use error::MachineError;
pub use host_cpu::is_emulated;
pub use layout::{
    CMDLINE_BYTES_MAX, DEVICE_HOLE_END, DEVICE_HOLE_START, MEMORY_BYTES_MIN, PAGE_BYTES,
    VIRTIO_DEVICES_MAX, guest_memory_ranges, hotplug_start,
};
pub use lifecycle::ending::{DISK_TIME_MAX, STOP_TIME_MAX};
pub use lifecycle::handle::MachineHandle;
pub use vcpu::affinity::allowed_cpus;

use acpi::AcpiTables;
use boot::{kernel, params};
use console::ConsoleInput;
use irqchip::InterruptController;
use lifecycle::control::Control;
use lifecycle::ending;
use ports::{port_bus, serial_port};
use vcpu::{Shared, Vcpu};
use vcpu::{cpuid, regs};
use virtio::VirtioDevices;

/// The device through which KVM is reached.
pub const KVM_PATH: &str = "/dev/kvm";

/// The most vCPUs of a machine. Each has its number as the id of its interrupt controller, and
/// without remapping of interrupts in hardware those of devices reach 8-bit ids alone, of which
/// 255 is for all of them and 254 is not used.
pub const VCPUS_MAX: u8 = 254;

/// How long ending a run waits for a slow console to take the last output.
pub const CONSOLE_DRAIN_TIME_MAX: Duration = Duration::from_secs(2);

/// How long ending a run waits for whoever takes the output of the second serial port: that is
/// data, which a slow reader must not lose.
pub const SECOND_PORT_DRAIN_TIME_MAX: Duration = Duration::from_secs(60);

/// The command line that a stock kernel needs here: its console on the serial port, and an
/// immediate restart after a panic, which ends the run with [`Outcome::Reboot`], unless the kernel has a
/// driver to tell that it panicked. Restarting goes by the ACPI reset register, the kernel's own default.
pub const DEFAULT_CMDLINE: &str = "console=ttyS0 panic=-1";

/// [`DEFAULT_CMDLINE`] with `extra` appended. Of parameters that contradict each other kernels
/// take the last, so `extra` can overrule each default.
pub fn command_line(extra: &str) -> String {
    match extra.trim() {
        "" => DEFAULT_CMDLINE.to_owned(),
        extra => format!("{DEFAULT_CMDLINE} {extra}"),
    }
}

/// What machine to build.
#[derive(Clone, Debug)]
pub struct MachineConfig {
    /// A kernel for x86-64: an ELF file (`vmlinux`) or a bzImage (`vmlinuz`).
    pub kernel: PathBuf,
    /// The archive of the first root file system, if any.
    pub initrd: Option<Initrd>,
    /// The whole command line of the kernel; see [`command_line`].
    pub cmdline: String,
    /// Number of vCPUs, 1 to [`VCPUS_MAX`].
    pub cpus: u8,
    /// CPUs of the host: the thread of each vCPU runs on that in its place. Those without one run
    /// where the host lets them.
    pub pinning: Vec<u32>,
    /// How much memory may be added while it runs: that is the last region of its memory, from
    /// [`hotplug_start`] on, and no part of what the guest is told of at its start.
    pub hotplug_bytes: u64,
    /// Its virtio devices; places and interrupts are given in this order.
    pub devices: Vec<Arc<dyn VirtioDevice>>,
    /// The NUMA nodes that the guest sees, the one with the CPUs first; none for a guest that sees
    /// one kind of memory.
    pub numa: Vec<NumaNode>,
}

/// How a run ended, from the guest's point of view.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The guest has switched itself off.
    Shutdown,
    /// The guest has asked for a restart.
    Reboot,
    /// The guest has run into something from which no CPU goes on: a triple fault, a state
    /// that KVM cannot run, or a panic that its kernel has told of. The text has the reason, and
    /// the vCPU and its instruction pointer where they are known.
    Crash(String),
    /// [`MachineHandle::stop`] was called, or the user typed the escape sequence.
    Stopped,
}

impl From<MachineEvent> for Outcome {
    fn from(event: MachineEvent) -> Self {
        match event {
            MachineEvent::Shutdown => Self::Shutdown,
            MachineEvent::Reboot => Self::Reboot,
            MachineEvent::Panic => Self::Crash("its kernel panicked; the console says why".into()),
        }
    }
}

/// A machine that is ready to run.
pub struct Machine {
    shared: Arc<Shared>,
    vcpus: Vec<Vcpu>,
    virtio: VirtioDevices,
    serial: Arc<SerialPort>,
    console_input: Option<std::os::fd::OwnedFd>,
    console_output: ConsoleOutput,
    on_raw_mode: Option<Box<dyn FnOnce() + Send>>,
    second_output: Option<ConsoleOutput>,
    boot_timer: Arc<BootTimer>,
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
    /// Every error says what is wrong with which value, and what mends it.
    pub fn new(
        config: &MachineConfig,
        memory: GuestMemoryMmap,
        console: ConsoleConfig,
    ) -> Result<Self, MachineError> {
        MachineError::check_cpus(u32::from(config.cpus), u32::from(VCPUS_MAX))?;
        let size = layout::check_memory(&memory, config.hotplug_bytes)?;
        let kvm = kvm::open_kvm()?;
        let host_limit = u32::try_from(kvm.get_max_vcpus()).unwrap_or(u32::MAX);
        MachineError::check_cpus(u32::from(config.cpus), host_limit)?;
        let supported = kvm
            .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
            .map_err(MachineError::kvm("tell its CPU features"))?;
        if let Some(bits) = cpuid::physical_address_bits(supported.as_slice()) {
            layout::check_address_bits(size, bits)?;
            layout::check_hotplug_bits(size, config.hotplug_bytes, bits)?;
        }

        let kernel = kernel::load_kernel(&config.kernel, &memory, size.low_end)?;
        tracing::debug!(format = ?kernel.format, entry = kernel.entry.0, end = kernel.end, "kernel");
        let initrd = match &config.initrd {
            Some(initrd) => Some(params::load_initrd(initrd, &memory, size, kernel.end)?),
            None => None,
        };
        let virtio = VirtioDevices::new(&memory, &config.devices)?;
        let rsdp = AcpiTables::new(config.cpus, &virtio.slots(), &config.numa).write(&memory)?;
        params::write_boot_params(&memory, size, &kernel, initrd, &config.cmdline, rsdp)?;
        regs::write_boot_tables(&memory)?;

        let vm = Arc::new(kvm::create_vm(&kvm)?);
        kvm::map_memory(&vm, &memory)?;
        let interrupts = InterruptController::in_kernel(&vm)?;

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

        let tsc_deadline = interrupts.has_tsc_deadline(&vm);
        let emulated = is_emulated();
        let mut pinning = config.pinning.iter();
        let vcpus = (0..config.cpus)
            .map(|id| {
                let mut cpuid = cpuid::for_cpu(supported.as_slice(), id, config.cpus, tsc_deadline);
                if emulated {
                    cpuid::hide_xsave(&mut cpuid);
                }
                let vcpu = kvm::create_vcpu(&vm, &interrupts, id, &cpuid)?;
                Ok(Vcpu {
                    pinned_to: pinning.next().copied(),
                    ..vcpu
                })
            })
            .collect::<Result<Vec<_>, MachineError>>()?;
        if let Some(boot_processor) = vcpus.first() {
            regs::set_boot_registers(&boot_processor.fd, kernel.entry)?;
        }

        let control = Control::new(vcpus.len())
            .map_err(MachineError::host("prepare for the control of vCPUs"))?;
        Ok(Self {
            shared: Arc::new(Shared {
                ports,
                mmio,
                events,
                control,
                power,
                transports: virtio.transports(),
                _vm: vm,
                _memory: memory,
            }),
            vcpus,
            virtio,
            serial,
            console_input: console.input,
            console_output,
            on_raw_mode: console.on_raw_mode,
            second_output,
            boot_timer,
        })
    }

    /// A handle to the machine.
    pub fn handle(&self) -> MachineHandle {
        MachineHandle {
            shared: Arc::clone(&self.shared),
            boot_timer: Arc::clone(&self.boot_timer),
        }
    }

    /// Runs the machine to its end, on the calling thread and one for each vCPU. While it runs
    /// a console on a terminal is in raw mode.
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
        // A vCPU that waits for who reads the console would be taken for one that waits for a page.
        for output in [Some(&self.console_output), self.second_output.as_ref()] {
            output.map(ConsoleOutput::let_go);
        }
        ending::wait_for_threads(&self.shared);
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
        let fd = self.console_input.as_ref()?.as_raw_fd();
        match RawTerminal::enter(fd) {
            Ok(Some(raw)) => {
                if let Some(notify) = self.on_raw_mode.take() {
                    notify();
                }
                Some(raw)
            }
            Ok(None) => None,
            Err(error) => {
                tracing::warn!(%error, "the terminal does not go into raw mode");
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
            // The boot processor comes last: every vCPU is in its place when the guest begins.
            for vcpu in self.vcpus.drain(..).rev() {
                // Ends are counted, not joined: a thread may have to be left behind.
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
        // Lets the console's thread end also when the machine was never run.
        for output in [Some(&self.console_output), self.second_output.as_ref()] {
            output.map(|output| output.close(Duration::ZERO));
        }
    }
}

/// Ends the device loop, and the run when a device asks for that.
struct EndWatcher {
    shared: Arc<Shared>,
}

impl MutEventSubscriber for EndWatcher {
    fn init(&mut self, ops: &mut EventOps) {
        for fd in [self.shared.events.event_fd(), self.shared.control.wake_fd()] {
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
    }
}
