//! ACPI tables: what the guest cannot learn from CPUID.
//!
//! RSDP, XSDT, FADT, FACS, MADT and DSDT (ACPI specification 6.5, chapter 5). The machine is not
//! "hardware-reduced": it has the PM1 registers, so that stock kernels power off by their usual
//! path. NUMA tables are in [`numa`].

mod dsdt;
mod fadt;
mod madt;
pub(crate) mod numa;
mod table;

use acpi_tables::facs::FACS;
use acpi_tables::rsdp::Rsdp;
use acpi_tables::xsdt::XSDT;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use crate::config::Irqchip;
use crate::error::MachineError;
use crate::layout::{ACPI_END, ACPI_START};
use crate::virtio::Slot;
use dsdt::dsdt;
use fadt::fadt;
use madt::madt;
use numa::NumaNode;
use table::{OEM_ID, OEM_REVISION, OEM_TABLE_ID, bytes_of};

/// Alignment of every table: that of the FACS, the strictest.
const TABLE_ALIGNMENT: u64 = 64;
/// The tables and their guest-physical addresses.
#[derive(Debug)]
pub(crate) struct AcpiTables {
    /// Pairs of address and bytes, by ascending address, from [`ACPI_START`] on.
    placed: Vec<(u64, Vec<u8>)>,
    next: u64,
}

impl AcpiTables {
    /// Builds the tables of a machine with `cpus` CPUs, virtio devices at `virtio`, and NUMA nodes
    /// if it has any.
    pub fn new(cpus: u8, virtio: &[Slot], nodes: &[NumaNode], irqchip: Irqchip) -> Self {
        let mut tables = Self {
            placed: Vec::new(),
            // The RSDP comes first; it is written last, since it has the address of the XSDT.
            next: ACPI_START + TABLE_ALIGNMENT,
        };
        let dsdt = tables.add(dsdt(virtio));
        let facs = tables.add(bytes_of(&FACS::new()));
        let mut listed = vec![
            tables.add(fadt(dsdt, facs, irqchip)),
            tables.add(madt(cpus)),
        ];
        let numa = numa::tables(nodes).into_iter();
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

    /// Places a table and returns its address.
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

    /// Writes the tables into guest memory and returns the address of the RSDP.
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

#[cfg(test)]
mod tests;
