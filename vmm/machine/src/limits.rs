//! Limits of a machine, and of the waits at the end of a run.

use std::time::Duration;

/// The path of the KVM device.
pub const KVM_PATH: &str = "/dev/kvm";

/// Limit of vCPUs. The number of a vCPU is its APIC id, and without interrupt remapping the
/// interrupts of devices only reach 8-bit ids, of which 255 is the broadcast and 254 is not used.
pub const VCPUS_MAX: u8 = 254;

/// How long the end of a run waits for a slow console to take the last output.
pub const CONSOLE_DRAIN_TIME_MAX: Duration = Duration::from_secs(2);

/// How long the end of a run waits for the reader of the second serial port: its output is data,
/// which a slow reader must not lose.
pub const SECOND_PORT_DRAIN_TIME_MAX: Duration = Duration::from_secs(60);
