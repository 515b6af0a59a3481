//! Devices with few registers, and whole buses.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use arbitrary::{Arbitrary, Result, Unstructured};
use vm_memory::{GuestAddress, GuestMemoryMmap};

use crate::virtio::{Entropy, MmioTransport, VIRTIO_MMIO_LEN};
use crate::{
    BOOT_TIMER_PORT, BootTimer, Bus, BusDevice, CMOS_RTC_LEN, CMOS_RTC_PORT, CmosRtc,
    ConsoleOutput, EventFdTrigger, I8042, I8042_COMMAND_PORT, I8042_DATA_PORT, I8254, I8254_LEN,
    I8254_PORT, InterruptLine, MachineEvents, PANIC_PORT, PM_REGISTERS_LEN, PanicPort, PmRegisters,
    ResetRegister, SERIAL_LEN, SPEAKER_PORT, SerialPort,
};

/// Limit of accesses per input.
const ACCESSES_MAX: usize = 300;

/// An interrupt line without a listener.
#[derive(Debug)]
struct NoLine;

impl InterruptLine for NoLine {
    fn set(&self, _raised: bool) {}
}

fn events() -> MachineEvents {
    MachineEvents::new().expect("a descriptor")
}

/// Accesses the `len` registers of a device, within their range, as `data` says; calls `aside` with
/// a byte now and then.
fn registers(device: &dyn BusDevice, len: u64, input: &[u8], mut aside: impl FnMut(u8)) {
    let mut data = Unstructured::new(input);
    let mut access = |data: &mut Unstructured<'_>| -> Result<()> {
        let (what, offset) = <(u8, u8)>::arbitrary(data)?;
        let offset = u64::from(offset) % len;
        let width = usize::from(what >> 2 & 7) + 1;
        let width = width.min(usize::try_from(len - offset).unwrap_or(8));
        let mut bytes = [0xa5; 8];
        match what & 3 {
            0 => device.read(offset, &mut bytes[..width]),
            1 | 2 => {
                data.fill_buffer(&mut bytes[..width])?;
                device.write(offset, &bytes[..width]);
            }
            _ => aside(u8::arbitrary(data)?),
        }
        Ok(())
    };
    for _ in 0..ACCESSES_MAX {
        if data.is_empty() || access(&mut data).is_err() {
            break;
        }
    }
}

pub(super) fn serial(input: &[u8]) {
    let output = ConsoleOutput::spawn(Box::new(io::sink())).expect("a thread");
    let interrupt = EventFdTrigger::new().expect("a descriptor");
    let port = SerialPort::new(interrupt, output.clone()).expect("a descriptor");
    registers(&port, SERIAL_LEN, input, |byte| {
        let typed = [byte; 100];
        let taken = port.receive(&typed[..usize::from(byte % 100)]);
        assert!(taken <= usize::from(byte % 100));
    });
    assert_eq!(output.close(Duration::from_secs(5)), 0, "nothing is lost");
}

pub(super) fn i8042(input: &[u8]) {
    for port in I8042::ports(events()) {
        registers(&port, 1, input, drop);
    }
}

pub(super) fn i8254(input: &[u8]) {
    let timer = Arc::new(I8254::new());
    let speaker = timer.speaker();
    registers(&*timer, I8254_LEN, input, |byte| {
        speaker.write(0, &[byte]);
        speaker.read(0, &mut [byte]);
    });
}

pub(super) fn rtc(input: &[u8]) {
    registers(&CmosRtc::new(), CMOS_RTC_LEN, input, drop);
}

pub(super) fn acpi_pm(input: &[u8]) {
    let power = PmRegisters::new(events(), Arc::new(NoLine));
    registers(&power, PM_REGISTERS_LEN, input, |_| {
        power.press_power_button();
    });
    registers(&ResetRegister::new(events()), 1, input, drop);
}

pub(super) fn panic_port(input: &[u8]) {
    registers(&PanicPort::new(events()), 1, input, drop);
    let timer = BootTimer::new();
    registers(&timer, 1, input, |_| timer.start());
}

/// Fills both buses with devices and accesses any address with any width. Also fills a bus with
/// ranges chosen by the input.
pub(super) fn bus(input: &[u8]) {
    let mut data = Unstructured::new(input);
    // A run that ends early is valid too.
    let _ = chosen_ranges(&mut data);
    let (ports, mmio) = (whole_port_bus(), whole_mmio_bus());
    let access = |data: &mut Unstructured<'_>| -> Result<()> {
        let (what, near) = <(u8, u8)>::arbitrary(data)?;
        let bases = [
            0x40,
            0x60,
            0x70,
            0x3f8,
            BOOT_TIMER_PORT,
            PANIC_PORT,
            0x600,
            0xcf9,
        ];
        let base = bases[usize::from(near) % bases.len()];
        let (bus, base) = match what & 0x80 {
            0 => (&ports, base),
            _ => (&mmio, 0xd000_0000 + u64::from(near & 1) * VIRTIO_MMIO_LEN),
        };
        let address = match what & 0x60 {
            0x60 => u64::arbitrary(data)?,
            _ => base.wrapping_add_signed(i64::from(i16::arbitrary(data)? >> 4)),
        };
        let width = usize::from(what >> 1 & 0xf);
        let mut bytes = [0; 16];
        if what & 1 == 0 {
            let answered = bus.read(address, &mut bytes[..width]);
            assert!(answered || bytes[..width].iter().all(|byte| *byte == 0xff));
        } else {
            data.fill_buffer(&mut bytes[..width])?;
            bus.write(address, &bytes[..width]);
        }
        Ok(())
    };
    for _ in 0..ACCESSES_MAX {
        if data.is_empty() || access(&mut data).is_err() {
            break;
        }
    }
}

/// Ranges are inserted where they fit, and only addresses inside them are answered.
fn chosen_ranges(data: &mut Unstructured<'_>) -> Result<()> {
    let mut bus = Bus::port_io();
    let mut taken: Vec<(u64, u64)> = Vec::new();
    for _ in 0..u8::arbitrary(data)? % 8 {
        let (base, len) = <(u32, u16)>::arbitrary(data)?;
        let (base, len) = (u64::from(base) % 0x1_0100, u64::from(len) % 0x400);
        let fits = len > 0
            && base + len <= 0x1_0000
            && taken
                .iter()
                .all(|(at, end)| base + len <= *at || base >= *end);
        let inserted = bus.insert(base, len, Arc::new(PanicPort::new(events())));
        assert_eq!(inserted.is_ok(), fits, "{base:#x} {len:#x} {taken:x?}");
        if fits {
            taken.push((base, base + len));
        }
    }
    let address = u64::from(u16::arbitrary(data)?);
    let there = taken.iter().any(|(at, end)| (*at..*end).contains(&address));
    assert_eq!(bus.read(address, &mut [0]), there);
    Ok(())
}

fn whole_port_bus() -> Bus {
    let mut ports = Bus::port_io();
    let end = events();
    let power = PmRegisters::new(end.clone(), Arc::new(NoLine));
    let [keyboard, commands] = I8042::ports(end.clone());
    let timer = Arc::new(I8254::new());
    let speaker = timer.speaker();
    let devices: [(u64, u64, Arc<dyn BusDevice>); 9] = [
        (I8042_DATA_PORT, 1, Arc::new(keyboard)),
        (I8042_COMMAND_PORT, 1, Arc::new(commands)),
        (I8254_PORT, I8254_LEN, timer),
        (SPEAKER_PORT, 1, speaker),
        (CMOS_RTC_PORT, CMOS_RTC_LEN, Arc::new(CmosRtc::new())),
        (PANIC_PORT, 1, Arc::new(PanicPort::new(end.clone()))),
        (BOOT_TIMER_PORT, 1, Arc::new(BootTimer::new())),
        (0x600, PM_REGISTERS_LEN, Arc::new(power)),
        (0xcf9, 1, Arc::new(ResetRegister::new(end))),
    ];
    for (base, len, device) in devices {
        ports.insert(base, len, device).expect("a free place");
    }
    ports
}

fn whole_mmio_bus() -> Bus {
    let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 1 << 20)]).expect("memory");
    let mut mmio = Bus::mmio();
    for number in 0..2 {
        let device = Arc::new(Entropy::new().expect("a source"));
        let interrupt = EventFdTrigger::new().expect("a descriptor");
        let transport = MmioTransport::new(device, memory.clone(), interrupt);
        let start = 0xd000_0000 + number * VIRTIO_MMIO_LEN;
        let transport = Arc::new(transport.expect("a descriptor"));
        mmio.insert(start, VIRTIO_MMIO_LEN, transport)
            .expect("a free place");
    }
    mmio
}
