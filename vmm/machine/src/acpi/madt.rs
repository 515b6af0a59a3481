//! The MADT: CPUs and interrupt controllers.

use acpi_tables::Aml;
use acpi_tables::madt::{EnabledStatus, IoApic, ProcessorLocalApic};

use super::table::table;
use crate::layout::{IOAPIC_START, LOCAL_APIC_START, SCI_IRQ};

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

/// The table of a machine with this many CPUs.
pub(super) fn madt(cpus: u8) -> Vec<u8> {
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
