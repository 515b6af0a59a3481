//! Builds the bus of port devices.

use std::sync::Arc;

use devices::{
    BOOT_TIMER_PORT, BootTimer, Bus, CMOS_RTC_LEN, CMOS_RTC_PORT, COM1_PORT, CmosRtc,
    ConsoleOutput, EventFdTrigger, I8042, I8042_COMMAND_PORT, I8042_DATA_PORT, MachineEvents,
    PANIC_PORT, PM_REGISTERS_LEN, PanicPort, PmRegisters, ResetRegister, SERIAL_LEN, SerialPort,
};

use crate::error::MachineError;
use crate::irqchip::InterruptController;
use crate::layout;

/// Creates a serial port with the buffer of its output, which goes to `writer`.
pub(crate) fn serial_port(
    vm: &kvm_ioctls::VmFd,
    interrupts: &InterruptController,
    irq: u32,
    writer: Box<dyn std::io::Write + Send>,
) -> Result<(Arc<SerialPort>, ConsoleOutput), MachineError> {
    let descriptor = "create an event descriptor";
    let interrupt = EventFdTrigger::new().map_err(MachineError::host(descriptor))?;
    interrupts.connect(vm, &interrupt, irq)?;
    let output =
        ConsoleOutput::spawn(writer).map_err(MachineError::host("start the console thread"))?;
    let port =
        SerialPort::new(interrupt, output.clone()).map_err(MachineError::host(descriptor))?;
    Ok((Arc::new(port), output))
}

/// Builds the bus with each port device at its address.
pub(crate) fn port_bus(
    serial: &Arc<SerialPort>,
    boot_timer: &Arc<BootTimer>,
    events: &MachineEvents,
    power: &Arc<PmRegisters>,
) -> Result<Bus, MachineError> {
    let mut ports = Bus::port_io();
    ports.insert(COM1_PORT, SERIAL_LEN, Arc::clone(serial) as _)?;
    let [keyboard, commands] = I8042::ports(events.clone());
    ports.insert(I8042_DATA_PORT, 1, Arc::new(keyboard))?;
    ports.insert(I8042_COMMAND_PORT, 1, Arc::new(commands))?;
    ports.insert(CMOS_RTC_PORT, CMOS_RTC_LEN, Arc::new(CmosRtc::new()))?;
    ports.insert(PANIC_PORT, 1, Arc::new(PanicPort::new(events.clone())))?;
    ports.insert(BOOT_TIMER_PORT, 1, Arc::clone(boot_timer) as _)?;
    ports.insert(
        u64::from(layout::PM_PORT),
        PM_REGISTERS_LEN,
        Arc::clone(power) as _,
    )?;
    ports.insert(
        u64::from(layout::RESET_PORT),
        1,
        Arc::new(ResetRegister::new(events.clone())),
    )?;
    Ok(ports)
}
