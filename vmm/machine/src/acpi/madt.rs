//! The MADT: CPUs and interrupt controllers.

use acpi_tables::Aml;
use acpi_tables::madt::{EnabledStatus, IoApic, ProcessorLocalApic};

use super::table::table;
use crate::layout::{IOAPIC_START, LOCAL_APIC_START, SCI_IRQ};

/// MADT flag: the machine also has two 8259s.
const MADT_PCAT_COMPAT: u32 = 1;
/// MADT entry: an ISA interrupt whose polarity or trigger mode differs from the ISA default.
const MADT_INTERRUPT_OVERRIDE: u8 = 2;
/// MADT entry: the local APIC input that is wired to NMI.
const MADT_LOCAL_APIC_NMI: u8 = 4;
/// MADT interrupt flags: active high, level-triggered.
const INTI_HIGH_LEVEL: u16 = 0b1101;
/// MADT interrupt flags: polarity and trigger mode of the bus.
const INTI_CONFORMS: u16 = 0;
/// The id of the I/O APIC; local APICs have 0 to 253.
const IOAPIC_ID: u8 = 0xff;

/// Builds the MADT of a machine with `cpus` CPUs.
pub(super) fn madt(cpus: u8) -> Vec<u8> {
    // The crate's MADT type cannot set the flags.
    let mut body = Vec::new();
    body.extend(LOCAL_APIC_START.to_le_bytes());
    body.extend(MADT_PCAT_COMPAT.to_le_bytes());
    // At most 254 CPUs: ids of local APICs stay below 255, so no x2APIC entries are needed.
    for cpu in 0..cpus {
        ProcessorLocalApic::new(cpu, cpu, EnabledStatus::Enabled).to_aml_bytes(&mut body);
    }
    IoApic::new(IOAPIC_ID, IOAPIC_START, 0).to_aml_bytes(&mut body);
    // KVM wires ISA interrupts, including the timer's, to the pins of the same number, so only the
    // ACPI interrupt differs from the ISA default.
    body.extend([MADT_INTERRUPT_OVERRIDE, 10, 0, SCI_IRQ]);
    body.extend(u32::from(SCI_IRQ).to_le_bytes());
    body.extend(INTI_HIGH_LEVEL.to_le_bytes());
    // LINT1 of every local APIC is the NMI.
    body.extend([MADT_LOCAL_APIC_NMI, 6, 0xff]);
    body.extend(INTI_CONFORMS.to_le_bytes());
    body.push(1);
    table(*b"APIC", 5, &body)
}
