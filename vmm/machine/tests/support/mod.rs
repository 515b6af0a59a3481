//! What the tests of guests of a few instructions share.

use std::io::{self, Write};
use std::path::Path;
use std::sync::mpsc::{Receiver, Sender};
use std::time::Duration;

use ssi_hv_machine::{Irqchip, KVM_PATH, MachineConfig};

/// Sends each byte that a guest writes to its console.
pub struct ConsoleSender(pub Sender<u8>);

impl Write for ConsoleSender {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        for byte in bytes {
            // The test may have ended.
            let _ = self.0.send(*byte);
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Returns whether KVM can be opened. If not, prints `SKIPPED` and the reason.
pub fn kvm_is_there() -> bool {
    let opened = std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open(KVM_PATH);
    if let Err(error) = &opened {
        println!("SKIPPED: {KVM_PATH} cannot be opened: {error}");
    }
    opened.is_ok()
}

/// Waits until a guest has written `byte`, each byte within `limit`. Returns what it wrote instead if
/// it does not.
pub fn wait_for(written: &Receiver<u8>, byte: u8, limit: Duration) -> Result<(), String> {
    let mut so_far = Vec::new();
    while so_far.last() != Some(&byte) {
        match written.recv_timeout(limit) {
            Ok(next) => so_far.push(next),
            Err(_) => return Err(String::from_utf8_lossy(&so_far).into_owned()),
        }
    }
    Ok(())
}

/// Returns the configuration of a machine with this kernel, without devices.
pub fn machine_config(kernel: &Path, cpus: u8, irqchip: Irqchip) -> MachineConfig {
    MachineConfig {
        kernel: kernel.to_owned(),
        initrd: None,
        cmdline: String::new(),
        cpus,
        pinning: Vec::new(),
        dedicated_cpus: false,
        irqchip,
        hotplug_bytes: 0,
        survives_lost_memory: false,
        devices: Vec::new(),
        numa: Vec::new(),
    }
}
