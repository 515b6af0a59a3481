//! The FADT: addresses of the power-management registers.

use acpi_tables::fadt::{FADTBuilder, Flags, PmProfile};
use acpi_tables::gas::{AccessSize, AddressSpace, GAS};
use devices::{
    PM_TIMER_LEN, PM_TIMER_OFFSET, PM1_CONTROL_OFFSET, PM1_EVENT_OFFSET, RESET_VALUE,
    RTC_CENTURY_REGISTER,
};

use super::table::{OEM_ID, OEM_REVISION, OEM_TABLE_ID, bytes_of};
use crate::config::Irqchip;
use crate::layout::{PM_PORT, RESET_PORT, SCI_IRQ};

/// FADT, IA-PC boot flags: ISA devices are present, VGA is not. The keyboard controller is not
/// announced, since it only answers the reset command.
const BOOT_ARCH_LEGACY_DEVICES: u16 = 1 << 0;
const BOOT_ARCH_NO_VGA: u16 = 1 << 2;

/// Describes a register block of `bytes` in port space, accessed in words.
fn port_block(port: u16, bytes: u8) -> GAS {
    GAS::new(
        AddressSpace::SystemIo,
        bytes * 8,
        0,
        AccessSize::WordAccess,
        u64::from(port),
    )
}

/// Builds the FADT, with the addresses of DSDT and FACS.
pub(super) fn fadt(dsdt: u64, facs: u64, irqchip: Irqchip) -> Vec<u8> {
    const PM1_EVENT_BYTES: u8 = 4;
    const PM1_CONTROL_BYTES: u8 = 2;
    let offset = |offset| PM_PORT + u16::try_from(offset).unwrap_or(0);
    let event = offset(PM1_EVENT_OFFSET);
    let control = offset(PM1_CONTROL_OFFSET);

    let mut fadt = FADTBuilder::new(OEM_ID, OEM_TABLE_ID, OEM_REVISION)
        .preferred_pm_profile(PmProfile::Unspecified)
        .flag(Flags::Wbinvd)
        .flag(Flags::ProcC1)
        // No sleep button. The power button is fixed hardware, a bit of the PM1 event registers,
        // and fixed hardware has no flag here.
        .flag(Flags::SlpButton)
        .flag(Flags::ResetRegSup);
    // Below 4 GiB, so both the 32-bit and the 64-bit fields can hold it.
    fadt.dsdt = u32::try_from(dsdt).unwrap_or(0).into();
    fadt.x_dsdt = dsdt.into();
    fadt.firmware_ctrl = u32::try_from(facs).unwrap_or(0).into();
    fadt.sci_int = u16::from(SCI_IRQ).into();
    // No SMI command port: ACPI mode cannot be switched off.
    fadt.smi_cmd = 0.into();
    fadt.pm1a_evt_blk = u32::from(event).into();
    fadt.pm1_evt_len = PM1_EVENT_BYTES;
    fadt.x_pm1a_evt_blk = port_block(event, PM1_EVENT_BYTES);
    fadt.pm1a_cnt_blk = u32::from(control).into();
    fadt.pm1_cnt_len = PM1_CONTROL_BYTES;
    fadt.x_pm1a_cnt_blk = port_block(control, PM1_CONTROL_BYTES);
    if irqchip == Irqchip::User {
        // Without channel 0 of an 8254 this timer is what a kernel calibrates the timers of the local
        // APICs with.
        let timer = offset(PM_TIMER_OFFSET);
        let bytes = u8::try_from(PM_TIMER_LEN).unwrap_or(0);
        fadt = fadt.flag(Flags::TmrValExt);
        fadt.pm_tmr_blk = u32::from(timer).into();
        fadt.pm_tmr_len = bytes;
        fadt.x_pm_tmr_blk = GAS::new(
            AddressSpace::SystemIo,
            bytes * 8,
            0,
            AccessSize::DwordAccess,
            u64::from(timer),
        );
    }
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
