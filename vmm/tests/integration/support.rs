//! Runs guests for tests.

use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use devices::virtio::VirtioDevice;
use ssi_hv::machine::{
    ConsoleConfig, Irqchip, Machine, MachineConfig, MachineError, MachineHandle, Outcome,
    guest_memory_ranges,
};
use vm_memory::{GuestAddress, GuestMemoryMmap};

pub const MEMORY_BYTES: u64 = 4 << 20;
/// Address of the guests' counter.
pub const COUNTER: GuestAddress = GuestAddress(0x20_0000);
/// Timeout of each step, far longer than on the most loaded host.
pub const LIMIT: Duration = Duration::from_secs(60);

pub fn memory() -> GuestMemoryMmap {
    let ranges: Vec<_> = guest_memory_ranges(MEMORY_BYTES)
        .into_iter()
        .map(|(start, bytes)| (start, usize::try_from(bytes).unwrap()))
        .collect();
    GuestMemoryMmap::from_ranges(&ranges).unwrap()
}

/// A writer that forwards its bytes.
pub struct Sender(mpsc::Sender<u8>);

impl Sender {
    pub fn new(to: mpsc::Sender<u8>) -> Self {
        Self(to)
    }
}

impl Write for Sender {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        for byte in buf {
            // The receiver may have been dropped.
            let _ = self.0.send(*byte);
        }
        Ok(buf.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A guest that runs on a thread of its own.
pub struct Running {
    pub handle: MachineHandle,
    pub output: mpsc::Receiver<u8>,
    end: mpsc::Receiver<Result<Outcome, MachineError>>,
}

impl Running {
    /// Waits until the guest prints `byte`.
    pub fn wait_for(&self, byte: u8) {
        while self
            .output
            .recv_timeout(LIMIT)
            .expect("the guest is silent")
            != byte
        {}
    }

    /// Waits up to `limit` for the end, whose result is discarded; returns false at the timeout.
    pub fn ends_within(&self, limit: Duration) -> bool {
        self.end.recv_timeout(limit).is_ok()
    }

    /// Waits for the end, and returns the guest's output and the result.
    pub fn end(self) -> (Result<Outcome, MachineError>, String) {
        let end = self.end.recv_timeout(LIMIT);
        let said: Vec<u8> = self.output.iter().collect();
        let said = String::from_utf8_lossy(&said).into_owned();
        (end.expect("the machine does not end"), said)
    }

    /// Waits for the end.
    pub fn outcome(&self) -> Outcome {
        self.end
            .recv_timeout(LIMIT)
            .expect("the machine does not end")
            .expect("the host cannot run the machine")
    }

    /// Waits for the end, and returns the guest's output.
    pub fn finish(self) -> (Outcome, String) {
        let outcome = self.outcome();
        let said: Vec<u8> = self.output.iter().collect();
        (outcome, String::from_utf8_lossy(&said).into_owned())
    }
}

/// Returns whether the host has KVM; prints a skip otherwise.
pub fn kvm_is_there() -> bool {
    match std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open("/dev/kvm")
    {
        Ok(_) => true,
        Err(error) => {
            println!("SKIPPED: /dev/kvm cannot be opened: {error}");
            false
        }
    }
}

pub fn machine(code: &[u8], cpus: u8, memory: GuestMemoryMmap, console: ConsoleConfig) -> Machine {
    machine_with(code, cpus, memory, console, Vec::new())
}

/// Like [`machine`], with virtio devices.
pub fn machine_with(
    code: &[u8],
    cpus: u8,
    memory: GuestMemoryMmap,
    console: ConsoleConfig,
    devices: Vec<Arc<dyn VirtioDevice>>,
) -> Machine {
    let mut kernel = tempfile::NamedTempFile::new().unwrap();
    kernel.write_all(&tiny_guests::elf(code)).unwrap();
    let config = MachineConfig {
        hotplug_bytes: 0,
        survives_lost_memory: false,
        kernel: kernel.path().to_owned(),
        initrd: None,
        cmdline: String::new(),
        cpus,
        pinning: Vec::new(),
        dedicated_cpus: false,
        irqchip: Irqchip::Kernel,
        devices,
        numa: Vec::new(),
    };
    Machine::new(&config, memory, console).unwrap()
}

pub fn run(machine: Machine, output: mpsc::Receiver<u8>) -> Running {
    let handle = machine.handle();
    let (sender, end) = mpsc::channel();
    thread::spawn(move || sender.send(machine.run()));
    Running {
        handle,
        output,
        end,
    }
}

pub fn start_with(
    code: &[u8],
    cpus: u8,
    memory: GuestMemoryMmap,
    input: Option<OwnedFd>,
) -> Running {
    let (sender, output) = mpsc::channel();
    let writer = Box::new(Sender(sender));
    let console = match input {
        Some(input) => ConsoleConfig::new(input, writer),
        None => ConsoleConfig::output_only(writer),
    };
    run(machine(code, cpus, memory, console), output)
}

pub fn start(code: &[u8]) -> Running {
    start_with(code, 1, memory(), None)
}
