//! The DSDT: devices, and the sleep state S5 (soft off).

use acpi_tables::aml;
use devices::virtio::VIRTIO_MMIO_LEN;
use devices::{COM1_IRQ, COM1_PORT, PANIC_ACPI_ID, PANIC_PORT, S5_SLEEP_TYPE, SERIAL_LEN};

use super::table::{bytes_of, table};
use crate::virtio::Slot;

/// Builds the DSDT: the serial port, the panic port, virtio devices and S5. CPUs and interrupt
/// controllers are in the MADT.
pub(super) fn dsdt(virtio: &[Slot]) -> Vec<u8> {
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
    // SLP_TYP for PM1a and PM1b; the other two bytes are reserved.
    let s5 = aml::Name::new(
        "_S5_".into(),
        &aml::Package::new(vec![&S5_SLEEP_TYPE, &S5_SLEEP_TYPE, &aml::ZERO, &aml::ZERO]),
    );
    let virtio: Vec<u8> = virtio.iter().flat_map(virtio_device).collect();
    table(*b"DSDT", 2, &[com1, panic, virtio, bytes_of(&s5)].concat())
}

/// Describes a virtio device by the id that Linux's virtio_mmio driver binds to.
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
