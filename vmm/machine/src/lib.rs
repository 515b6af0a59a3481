//! The virtual machine.
//!
//! A [`Machine`] is built from a [`MachineConfig`], from guest memory that the caller has mapped
//! according to [`guest_memory_ranges`], and from a [`ConsoleConfig`]. [`Machine::run`] boots it
//! and returns how the run ended:
//!
//! ```no_run
//! use ssi_hv_machine::{
//!     ConsoleConfig, Irqchip, Machine, MachineConfig, command_line, guest_memory_ranges,
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
//!     dedicated_cpus: false,
//!     irqchip: Irqchip::Kernel,
//!     hotplug_bytes: 0,
//!     survives_lost_memory: false,
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
//! [`Machine::new`] opens KVM, maps the memory, loads kernel and initrd, writes the boot structures
//! and creates the vCPUs. [`Machine::run`] starts a thread for each vCPU and serves the devices on
//! the calling thread until the guest powers off or restarts, crashes, or a [`MachineHandle`] stops
//! it.
//!
//! # Memory that is not there yet
//!
//! Any access to guest memory, by a vCPU or by this crate, may wait for a pager, since the memory
//! may be backed by userfaultfd. Therefore no lock that a pager could need is held here during an
//! access to guest memory, memory that was never written is assumed to be zero, and the memory is
//! never accessed as a whole. A vCPU that waits for a page cannot be made to leave the guest before
//! the page is served. A pause is therefore a request ([`MachineHandle::pause`]), and the end of a
//! run waits up to [`STOP_TIME_MAX`] before it leaves such a thread behind, which ends with the
//! process. Disk requests in progress complete without a pager: the end waits for them for up to
//! [`DISK_TIME_MAX`].

mod acpi;
mod boot;
mod config;
mod console;
mod error;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
mod halt_exits;
mod host_cpu;
mod irqchip;
mod kvm;
mod layout;
mod lifecycle;
mod limits;
mod machine;
mod memory;
mod memory_errors;
mod nodes;
mod outcome;
mod paging;
mod ports;
mod sys;
mod vcpu;
mod virtio;

pub use acpi::numa::NumaNode;
pub use boot::cmdline::{
    DEFAULT_CMDLINE, MOVABLE_NODE, TSC_KHZ_FOR_LPJ_MAX, command_line, is_of_cmdline,
    movable_parameter, node_parameters,
};
pub use boot::elf_check::ElfError;
pub use boot::initrd::Initrd;
pub use boot::kernel_error::KernelError;
pub use boot::payload::KERNEL_BYTES_MAX;
pub use config::{Irqchip, MachineConfig};
pub use console::terminal::{RawTerminal, restore_terminal};
pub use console::{BlockingWriter, ConsoleConfig};
pub use error::MachineError;
pub use halt_exits::can_be_disabled as halt_exits_can_be_disabled;
pub use host_cpu::is_emulated;
pub use layout::{
    CMDLINE_BYTES_MAX, DEVICE_HOLE_END, DEVICE_HOLE_START, MEMORY_BYTES_MIN, PAGE_BYTES,
    VIRTIO_DEVICES_MAX,
};
pub use lifecycle::ending::{DISK_TIME_MAX, STOP_TIME_MAX};
pub use lifecycle::handle::MachineHandle;
pub use lifecycle::kick::{Activity, VcpuThread};
pub use limits::{CONSOLE_DRAIN_TIME_MAX, KVM_PATH, SECOND_PORT_DRAIN_TIME_MAX, VCPUS_MAX};
pub use machine::Machine;
pub use memory::{all_memory_ranges, guest_memory_ranges, hotplug_start};
pub use nodes::{
    Barrier, ClockDifference, ClockSample, ClockSurvey, HaltObserver, HostClock, HostCounter,
    MOVE_TIME_MAX, MoveError, NodeFacts, NodesConfig, Observer, OtherRate, REPORT_BYTES_MAX,
    Reporter, Secondary, SecondaryConfig, SecondaryHandle, Surveyed, TimeFacts, WhileStopped,
    measure_clock, serve_clock,
};
pub use outcome::Outcome;
pub use paging::{KvmParameter, second_level_paging_off};
pub use ssi_hv_nodes::Stream as NodeStream;
pub use sys::time_stamp;
pub use vcpu::affinity::allowed_cpus;
pub use vcpu::state_error::StateError;
pub use vcpu::tsc::tsc_khz;
