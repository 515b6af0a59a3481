//! ACPI tables: what the guest cannot find out by asking the CPU.
//!
//! RSDP, XSDT, FADT, FACS, MADT and DSDT (ACPI specification 6.5, chapter 5). The machine is
//! not "hardware-reduced": it has the PM1 registers, so that stock kernels switch off by their
//! usual path. What is near and far is in [`numa`].

pub(crate) mod numa;

use acpi_tables::facs::FACS;
use acpi_tables::fadt::{FADTBuilder, Flags, PmProfile};
use acpi_tables::gas::{AccessSize, AddressSpace, GAS};
use acpi_tables::madt::{EnabledStatus, IoApic, ProcessorLocalApic};
use acpi_tables::rsdp::Rsdp;
use acpi_tables::sdt::Sdt;
use acpi_tables::xsdt::XSDT;
use acpi_tables::{Aml, aml};
use devices::virtio::VIRTIO_MMIO_LEN;
use devices::{
    COM1_IRQ, COM1_PORT, PANIC_ACPI_ID, PANIC_PORT, PM1_CONTROL_OFFSET, PM1_EVENT_OFFSET,
    RESET_VALUE, RTC_CENTURY_REGISTER, S5_SLEEP_TYPE, SERIAL_LEN,
};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use crate::error::MachineError;
use crate::layout::{
    ACPI_END, ACPI_START, IOAPIC_START, LOCAL_APIC_START, PM_PORT, RESET_PORT, SCI_IRQ,
};
use crate::virtio::Slot;
use numa::NumaNode;

pub(crate) const OEM_ID: [u8; 6] = *b"SSIHV ";
pub(crate) const OEM_TABLE_ID: [u8; 8] = *b"SSIHVTBL";
pub(crate) const OEM_REVISION: u32 = 1;

/// Every table starts at a multiple of this: what the FACS needs, the strictest of all.
const TABLE_ALIGNMENT: u64 = 64;
/// Bytes of the header that all tables share.
const HEADER_BYTES: u32 = 36;

/// FADT, IA-PC boot flags: devices of the ISA bus are there, no VGA. The keyboard controller
/// is not announced; it answers the reset command alone.
const BOOT_ARCH_LEGACY_DEVICES: u16 = 1 << 0;
const BOOT_ARCH_NO_VGA: u16 = 1 << 2;

/// MADT: the machine has two 8259s as well.
const MADT_PCAT_COMPAT: u32 = 1;
/// MADT entry: an ISA interrupt with another polarity or trigger than usual.
const MADT_INTERRUPT_OVERRIDE: u8 = 2;
/// MADT entry: the local interrupt that is the non-maskable one.
const MADT_LOCAL_APIC_NMI: u8 = 4;
/// MADT interrupt flags: active high, level-triggered.
const INTI_HIGH_LEVEL: u16 = 0b1101;
/// MADT interrupt flags: as the bus has it.
const INTI_CONFORMS: u16 = 0;
/// The number of the I/O interrupt controller; local controllers have 0 to 253.
const IOAPIC_ID: u8 = 0xff;

/// Tables at their guest-physical addresses.
#[derive(Debug)]
pub(crate) struct AcpiTables {
    /// Pairs of address and bytes, by address, from [`ACPI_START`] on.
    placed: Vec<(u64, Vec<u8>)>,
    next: u64,
}

impl AcpiTables {
    /// The tables of a machine with `cpus` CPUs, virtio devices at `virtio`, and NUMA nodes if
    /// it has any.
    pub fn new(cpus: u8, virtio: &[Slot], nodes: &[NumaNode]) -> Self {
        let mut tables = Self {
            placed: Vec::new(),
            // The RSDP comes first, and is written when the XSDT has its place.
            next: ACPI_START + TABLE_ALIGNMENT,
        };
        let dsdt = tables.add(dsdt(virtio));
        let facs = tables.add(bytes_of(&FACS::new()));
        let mut listed = vec![tables.add(fadt(dsdt, facs)), tables.add(madt(cpus))];
        let numa = numa::tables(cpus, nodes).into_iter();
        listed.extend(numa.map(|table| tables.add(table)));
        let mut xsdt = XSDT::new(OEM_ID, OEM_TABLE_ID, OEM_REVISION);
        for table in listed {
            xsdt.add_entry(table);
        }
        let xsdt = tables.add(bytes_of(&xsdt));
        tables
            .placed
            .insert(0, (ACPI_START, bytes_of(&Rsdp::new(OEM_ID, xsdt))));
        tables
    }

    /// Places a table, and gives its address.
    fn add(&mut self, table: Vec<u8>) -> u64 {
        let address = self.next;
        let bytes = u64::try_from(table.len()).unwrap_or(u64::MAX);
        self.next = address
            .saturating_add(bytes)
            .checked_next_multiple_of(TABLE_ALIGNMENT)
            .unwrap_or(u64::MAX);
        self.placed.push((address, table));
        address
    }

    /// Writes the tables into guest memory, and gives the address of the RSDP.
    pub fn write(&self, memory: &GuestMemoryMmap) -> Result<u64, MachineError> {
        if self.next > ACPI_END {
            return Err(MachineError::AcpiTooLarge {
                bytes: self.next - ACPI_START,
                limit: ACPI_END - ACPI_START,
            });
        }
        for (address, table) in &self.placed {
            memory
                .write_slice(table, GuestAddress(*address))
                .map_err(|source| MachineError::WriteMemory {
                    what: "ACPI tables",
                    source,
                })?;
        }
        Ok(ACPI_START)
    }
}

pub(crate) fn bytes_of(table: &dyn Aml) -> Vec<u8> {
    let mut bytes = Vec::new();
    table.to_aml_bytes(&mut bytes);
    bytes
}

/// A table whose body is `body`.
pub(crate) fn table(signature: [u8; 4], revision: u8, body: &[u8]) -> Vec<u8> {
    let mut table = Sdt::new(
        signature,
        HEADER_BYTES,
        revision,
        OEM_ID,
        OEM_TABLE_ID,
        OEM_REVISION,
    );
    table.append_slice(body);
    table.as_slice().to_vec()
}

/// What is there beside CPUs and interrupt controllers: the serial port, the port for panics,
/// virtio devices, and the way to S5.
fn dsdt(virtio: &[Slot]) -> Vec<u8> {
    let com1_port = u16::try_from(COM1_PORT).unwrap_or(0);
    let com1_len = u8::try_from(SERIAL_LEN).unwrap_or(0);
    let com1 = bytes_of(&aml::Device::new(
        "_SB_.COM1".into(),
        vec![
            &aml::Name::new("_HID".into(), &aml::EISAName::new("PNP0501")),
            &aml::Name::new("_UID".into(), &aml::ZERO),
            &aml::Name::new("_DDN".into(), &"COM1"),
            &aml::Name::new(
                "_CRS".into(),
                &aml::ResourceTemplate::new(vec![
                    &aml::Interrupt::new(true, true, false, false, COM1_IRQ),
                    &aml::IO::new(com1_port, com1_port, 0, com1_len),
                ]),
            ),
        ],
    ));
    let panic_port = u16::try_from(PANIC_PORT).unwrap_or(0);
    let panic = bytes_of(&aml::Device::new(
        "_SB_.PEVT".into(),
        vec![
            &aml::Name::new("_HID".into(), &PANIC_ACPI_ID),
            &aml::Name::new(
                "_CRS".into(),
                &aml::ResourceTemplate::new(vec![&aml::IO::new(panic_port, panic_port, 0, 1)]),
            ),
        ],
    ));
    // SLP_TYP for PM1a and PM1b; the other two are reserved.
    let s5 = aml::Name::new(
        "_S5_".into(),
        &aml::Package::new(vec![&S5_SLEEP_TYPE, &S5_SLEEP_TYPE, &aml::ZERO, &aml::ZERO]),
    );
    let virtio: Vec<u8> = virtio.iter().flat_map(virtio_device).collect();
    table(*b"DSDT", 2, &[com1, panic, virtio, bytes_of(&s5)].concat())
}

/// A virtio device, by the id that Linux knows for registers in memory.
fn virtio_device(slot: &Slot) -> Vec<u8> {
    let start = u32::try_from(slot.start).unwrap_or(0);
    let len = u32::try_from(VIRTIO_MMIO_LEN).unwrap_or(0);
    bytes_of(&aml::Device::new(
        format!("_SB_.VIO{:X}", slot.number).as_str().into(),
        vec![
            &aml::Name::new("_HID".into(), &"LNRO0005"),
            &aml::Name::new("_UID".into(), &slot.number),
            &aml::Name::new("_CCA".into(), &aml::ONE),
            &aml::Name::new(
                "_CRS".into(),
                &aml::ResourceTemplate::new(vec![
                    &aml::Memory32Fixed::new(true, start, len),
                    &aml::Interrupt::new(true, true, false, false, slot.interrupt),
                ]),
            ),
        ],
    ))
}

/// A register block of `bytes` in port space, accessed in words.
fn port_block(port: u16, bytes: u8) -> GAS {
    GAS::new(
        AddressSpace::SystemIo,
        bytes * 8,
        0,
        AccessSize::WordAccess,
        u64::from(port),
    )
}

fn fadt(dsdt: u64, facs: u64) -> Vec<u8> {
    const PM1_EVENT_BYTES: u8 = 4;
    const PM1_CONTROL_BYTES: u8 = 2;
    let offset = |offset| PM_PORT + u16::try_from(offset).unwrap_or(0);
    let event = offset(PM1_EVENT_OFFSET);
    let control = offset(PM1_CONTROL_OFFSET);

    let mut fadt = FADTBuilder::new(OEM_ID, OEM_TABLE_ID, OEM_REVISION)
        .preferred_pm_profile(PmProfile::Unspecified)
        .flag(Flags::Wbinvd)
        .flag(Flags::ProcC1)
        // No sleep button. That there is no flag for the power button means that it is fixed
        // hardware: a bit of the PM1 event registers.
        .flag(Flags::SlpButton)
        .flag(Flags::ResetRegSup);
    // Below 4 GiB, so both the old and the new fields can say it.
    fadt.dsdt = u32::try_from(dsdt).unwrap_or(0).into();
    fadt.x_dsdt = dsdt.into();
    fadt.firmware_ctrl = u32::try_from(facs).unwrap_or(0).into();
    fadt.sci_int = u16::from(SCI_IRQ).into();
    // No SMI command port: ACPI mode is always on.
    fadt.smi_cmd = 0.into();
    fadt.pm1a_evt_blk = u32::from(event).into();
    fadt.pm1_evt_len = PM1_EVENT_BYTES;
    fadt.x_pm1a_evt_blk = port_block(event, PM1_EVENT_BYTES);
    fadt.pm1a_cnt_blk = u32::from(control).into();
    fadt.pm1_cnt_len = PM1_CONTROL_BYTES;
    fadt.x_pm1a_cnt_blk = port_block(control, PM1_CONTROL_BYTES);
    fadt.century = RTC_CENTURY_REGISTER;
    fadt.iapc_boot_arch = (BOOT_ARCH_LEGACY_DEVICES | BOOT_ARCH_NO_VGA).into();
    fadt.reset_reg = GAS::new(
        AddressSpace::SystemIo,
        8,
        0,
        AccessSize::ByteAccess,
        u64::from(RESET_PORT),
    );
    fadt.reset_value = RESET_VALUE;
    bytes_of(&fadt.finalize())
}

fn madt(cpus: u8) -> Vec<u8> {
    // Not the MADT type of the crate: it cannot set the flags.
    let mut body = Vec::new();
    body.extend(LOCAL_APIC_START.to_le_bytes());
    body.extend(MADT_PCAT_COMPAT.to_le_bytes());
    // At most 254 CPUs: numbers of the local controllers stay below 255, and no x2APIC entries
    // are needed.
    for cpu in 0..cpus {
        ProcessorLocalApic::new(cpu, cpu, EnabledStatus::Enabled).to_aml_bytes(&mut body);
    }
    IoApic::new(IOAPIC_ID, IOAPIC_START, 0).to_aml_bytes(&mut body);
    // KVM wires ISA interrupts to the pins of the same number, the timer included, so only
    // the interrupt of ACPI differs from what the bus has.
    body.extend([MADT_INTERRUPT_OVERRIDE, 10, 0, SCI_IRQ]);
    body.extend(u32::from(SCI_IRQ).to_le_bytes());
    body.extend(INTI_HIGH_LEVEL.to_le_bytes());
    // Input 1 of every local controller is the non-maskable interrupt.
    body.extend([MADT_LOCAL_APIC_NMI, 6, 0xff]);
    body.extend(INTI_CONFORMS.to_le_bytes());
    body.push(1);
    table(*b"APIC", 5, &body)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::VCPUS_MAX;
    use crate::layout::VIRTIO_DEVICES_MAX;

    fn sum(bytes: &[u8]) -> u8 {
        bytes.iter().fold(0, |sum, byte| sum.wrapping_add(*byte))
    }

    fn find<'a>(tables: &'a AcpiTables, signature: &[u8; 4]) -> &'a (u64, Vec<u8>) {
        tables
            .placed
            .iter()
            .find(|(_, table)| table.starts_with(signature))
            .unwrap()
    }

    #[test]
    fn every_table_has_its_length_and_checksum() {
        for cpus in [1, 2, 64, VCPUS_MAX] {
            let tables = AcpiTables::new(cpus, &[], &[]);
            for (address, table) in &tables.placed[1..] {
                assert_eq!(address % TABLE_ALIGNMENT, 0);
                let length = u32::from_le_bytes(table[4..8].try_into().unwrap());
                assert_eq!(usize::try_from(length).unwrap(), table.len());
                if !table.starts_with(b"FACS") {
                    assert_eq!(sum(table), 0);
                }
            }
            let rsdp = &tables.placed[0].1;
            assert!(rsdp.starts_with(b"RSD PTR "));
            assert_eq!(sum(&rsdp[..20]), 0);
            assert_eq!(sum(rsdp), 0);
        }
    }

    #[test]
    fn the_tables_point_to_each_other() {
        let tables = AcpiTables::new(2, &[], &[]);
        let u64_at =
            |table: &[u8], at: usize| u64::from_le_bytes(table[at..at + 8].try_into().unwrap());
        let (xsdt_address, xsdt) = find(&tables, b"XSDT");
        assert_eq!(u64_at(&tables.placed[0].1, 24), *xsdt_address);
        let (fadt_address, fadt) = find(&tables, b"FACP");
        assert_eq!(u64_at(xsdt, 36), *fadt_address);
        assert_eq!(u64_at(xsdt, 44), find(&tables, b"APIC").0);
        assert_eq!(u64_at(fadt, 140), find(&tables, b"DSDT").0);
    }

    #[test]
    fn the_power_button_is_fixed_hardware_and_there_is_no_sleep_button() {
        let tables = AcpiTables::new(1, &[], &[]);
        let fadt = &find(&tables, b"FACP").1;
        // ACPI 6.5, table 5.10: PWR_BUTTON and SLP_BUTTON, set for what is not fixed hardware.
        let flags = u32::from_le_bytes(fadt[112..116].try_into().unwrap());
        assert_eq!(flags & (1 << 4 | 1 << 5), 1 << 5);
        assert_eq!(fadt[46..48], u16::from(SCI_IRQ).to_le_bytes());
    }

    #[test]
    fn virtio_devices_are_declared_with_their_registers_and_interrupt() {
        let tables = AcpiTables::new(1, &[Slot::new(0), Slot::new(3)], &[]);
        let dsdt = &find(&tables, b"DSDT").1;
        let has = |bytes: &[u8]| dsdt.windows(bytes.len()).any(|window| window == bytes);
        assert!(has(b"LNRO0005") && has(b"VIO0") && has(b"VIO3") && !has(b"VIO1"));
        for slot in [Slot::new(0), Slot::new(3)] {
            // Memory32Fixed, writable (ACPI 6.5, 6.4.3.4).
            let mut memory = vec![0x86, 9, 0, 1];
            memory.extend(u32::try_from(slot.start).unwrap().to_le_bytes());
            memory.extend([0, 0x10, 0, 0]);
            assert!(has(&memory));
            // Extended interrupt: consumer, edge, active high, exclusive (6.4.3.6).
            let mut interrupt = vec![0x89, 6, 0, 0b0011, 1];
            interrupt.extend(slot.interrupt.to_le_bytes());
            assert!(has(&interrupt));
        }
    }

    #[test]
    fn the_madt_has_an_entry_for_each_cpu() {
        let tables = AcpiTables::new(VCPUS_MAX, &[], &[]);
        let mut entries = &find(&tables, b"APIC").1[44..];
        let mut cpus = Vec::new();
        while let [kind, len, ..] = entries {
            if *kind == 0 {
                cpus.push(entries[3]);
            }
            entries = &entries[usize::from(*len)..];
        }
        assert_eq!(cpus, (0..VCPUS_MAX).collect::<Vec<u8>>());
    }

    #[test]
    fn the_tables_of_the_largest_machine_fit() {
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 2 << 20)]).unwrap();
        let slots: Vec<_> = (0..VIRTIO_DEVICES_MAX).map(Slot::new).collect();
        let node = NumaNode {
            memory: vec![(0, 4096); 2],
            hotplug: Some((1 << 32, 4096)),
            latency: std::time::Duration::from_micros(1),
            bandwidth_mb_s: Some(1),
        };
        let nodes = vec![node; 65];
        let tables = AcpiTables::new(VCPUS_MAX, &slots, &nodes);
        assert_eq!(tables.write(&memory).unwrap(), ACPI_START);
        for signature in [b"SRAT", b"SLIT", b"HMAT"] {
            let (address, _) = find(&tables, signature);
            let (_, xsdt) = find(&tables, b"XSDT");
            assert!(
                xsdt[36..]
                    .chunks(8)
                    .any(|entry| entry == address.to_le_bytes())
            );
        }
        let rsdp: [u8; 8] = memory.read_obj(GuestAddress(ACPI_START)).unwrap();
        assert_eq!(&rsdp, b"RSD PTR ");
        let mut tables = AcpiTables::new(1, &[], &[]);
        tables.add(vec![0; 0x2_0000]);
        assert!(matches!(
            tables.write(&memory),
            Err(MachineError::AcpiTooLarge { .. })
        ));
    }
}
