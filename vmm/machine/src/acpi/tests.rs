//! Tests of the tables as a whole.

use super::*;
use crate::VCPUS_MAX;
use crate::config::Irqchip;
use crate::layout::{SCI_IRQ, VIRTIO_DEVICES_MAX};

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
        let tables = AcpiTables::new(cpus, &[], &[], Irqchip::Kernel);
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
    let tables = AcpiTables::new(2, &[], &[], Irqchip::Kernel);
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
    let tables = AcpiTables::new(1, &[], &[], Irqchip::Kernel);
    let fadt = &find(&tables, b"FACP").1;
    // ACPI 6.5, table 5.10: PWR_BUTTON and SLP_BUTTON are set for buttons that are not fixed
    // hardware.
    let flags = u32::from_le_bytes(fadt[112..116].try_into().unwrap());
    assert_eq!(flags & (1 << 4 | 1 << 5), 1 << 5);
    assert_eq!(fadt[46..48], u16::from(SCI_IRQ).to_le_bytes());
}

#[test]
fn virtio_devices_are_declared_with_their_registers_and_interrupt() {
    let tables = AcpiTables::new(1, &[Slot::new(0), Slot::new(3)], &[], Irqchip::Kernel);
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
    let tables = AcpiTables::new(VCPUS_MAX, &[], &[], Irqchip::Kernel);
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
        cpus: Vec::new(),
        memory: vec![(0, 4096); 2],
        hotplug: Some((1 << 32, 4096)),
        is_movable: false,
        latency: std::time::Duration::from_micros(1),
        bandwidth_mb_s: Some(1),
    };
    let mut nodes = vec![node; 65];
    nodes[0].cpus = (0..VCPUS_MAX).collect();
    let tables = AcpiTables::new(VCPUS_MAX, &slots, &nodes, Irqchip::Kernel);
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
    let mut tables = AcpiTables::new(1, &[], &[], Irqchip::Kernel);
    tables.add(vec![0; 0x2_0000]);
    assert!(matches!(
        tables.write(&memory),
        Err(MachineError::AcpiTooLarge { .. })
    ));
}

#[test]
fn only_a_machine_without_the_kernels_timers_has_that_of_acpi() {
    // ACPI 6.5, table 5.9: PM_TMR_BLK at 76, PM_TMR_LEN at 91, TMR_VAL_EXT in the flags.
    let fields = |irqchip| {
        let tables = AcpiTables::new(1, &[], &[], irqchip);
        let fadt = &find(&tables, b"FACP").1;
        let word = |at: usize| u32::from_le_bytes(fadt[at..at + 4].try_into().unwrap());
        (word(76), fadt[91], word(112) & 1 << 8)
    };
    assert_eq!(fields(Irqchip::Kernel), (0, 0, 0));
    assert_eq!(fields(Irqchip::User), (0x608, 4, 1 << 8));
}
