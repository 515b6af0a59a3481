//! The layout of the guest's physical address space.
//!
//! ```text
//! 0x0000_0500  GDT, IDT                       (boot only)
//! 0x0000_7000  boot parameters ("zero page")  (boot only)
//! 0x0000_8000  boot stack, growing down from 0x8ff0
//! 0x0000_9000  page tables                    (boot only)
//! 0x0002_0000  kernel command line            (boot only)
//! 0x0009_fc00  end of low RAM in the memory map
//! 0x000e_0000  ACPI tables, RSDP first        (reserved)
//! 0x0010_0000  RAM: kernel, ... initrd at the end
//! 0xc000_0000  hole of 1 GiB for devices
//! 0xd000_0000    virtio devices, a page of registers each
//! 0xfec0_0000    IOAPIC, local APIC, KVM's own pages
//! 0x1_0000_0000 the rest of RAM
//!               then, from a multiple of 2 GiB on, memory that is added while the guest runs
//! ```

/// Size of a page, the unit of guest memory.
pub const PAGE_BYTES: u64 = 4096;

/// Start of the hole for devices below 4 GiB.
pub const DEVICE_HOLE_START: u64 = 0xc000_0000;
/// End of the hole.
pub const DEVICE_HOLE_END: u64 = 0x1_0000_0000;

/// Minimum of guest memory: the boot structures, the ACPI tables and 1 MiB for a kernel.
pub const MEMORY_BYTES_MIN: u64 = 2 << 20;

/// Global descriptor table for the entry into the kernel.
pub(crate) const GDT_START: u64 = 0x500;
/// Interrupt descriptor table for the entry into the kernel; it is empty.
pub(crate) const IDT_START: u64 = 0x5a0;
/// `struct boot_params` (Linux, Documentation/arch/x86/zero-page.rst).
pub(crate) const ZERO_PAGE_START: u64 = 0x7000;
/// Initial stack pointer of the boot processor.
pub(crate) const BOOT_STACK_POINTER: u64 = 0x8ff0;
/// Page-map level 4 table; the tables below it follow.
pub(crate) const PML4_START: u64 = 0x9000;
pub(crate) const PDPT_START: u64 = 0xa000;
/// Four page directories, one per GiB.
pub(crate) const PAGE_DIRECTORIES_START: u64 = 0xb000;
/// The kernel's command line.
pub(crate) const CMDLINE_START: u64 = 0x2_0000;
/// Limit of the command line with its terminating zero, for kernels that do not state one:
/// COMMAND_LINE_SIZE of Linux on x86 (arch/x86/include/asm/setup.h).
pub const CMDLINE_BYTES_MAX: u64 = 2048;

/// End of usable low RAM; a PC has its extended BIOS data area there.
pub(crate) const LOW_RAM_END: u64 = 0x9_fc00;
/// Start of the ACPI tables, in the range that guests search for the RSDP (ACPI 6.5, 5.2.5.1).
pub(crate) const ACPI_START: u64 = 0xe_0000;
/// End of the area for ACPI tables.
pub(crate) const ACPI_END: u64 = 0x10_0000;
/// Start of RAM above the legacy area.
pub(crate) const HIGH_RAM_START: u64 = 0x10_0000;

/// Registers of the first virtio device; those of the others follow.
pub(crate) const VIRTIO_START: u64 = 0xd000_0000;
/// Interrupt of the first virtio device; those of the others follow. The I/O APIC has 24 inputs, of
/// which the first 16 are those of the ISA bus.
pub(crate) const VIRTIO_INTERRUPT_FIRST: u32 = 16;
/// Limit of virtio devices: each has a separate interrupt.
pub const VIRTIO_DEVICES_MAX: u8 = 8;

/// Registers of the I/O APIC (kvm: IOAPIC_DEFAULT_BASE_ADDRESS).
pub(crate) const IOAPIC_START: u32 = 0xfec0_0000;
/// Registers of the local APICs (kvm: APIC_DEFAULT_PHYS_BASE).
pub(crate) const LOCAL_APIC_START: u32 = 0xfee0_0000;
/// A page for the identity map of KVM on Intel CPUs; outside RAM.
pub(crate) const KVM_IDENTITY_MAP_START: u64 = 0xfffb_c000;
/// Three pages for the task state of KVM on Intel CPUs; outside RAM.
pub(crate) const KVM_TSS_START: usize = 0xfffb_d000;

/// First port of the ACPI PM1 blocks.
pub(crate) const PM_PORT: u16 = 0x600;
/// Port of the ACPI reset register, as in common chipsets.
pub(crate) const RESET_PORT: u16 = 0xcf9;
/// Interrupt of ACPI events.
pub(crate) const SCI_IRQ: u8 = 9;
