//! Limits of a machine, and of what a run waits for.

use std::time::Duration;

/// The device through which KVM is reached.
pub const KVM_PATH: &str = "/dev/kvm";

/// The most vCPUs of a machine. Each has its number as the id of its interrupt controller, and
/// without remapping of interrupts in hardware those of devices reach 8-bit ids alone, of which
/// 255 is for all of them and 254 is not used.
pub const VCPUS_MAX: u8 = 254;

/// How long ending a run waits for a slow console to take the last output.
pub const CONSOLE_DRAIN_TIME_MAX: Duration = Duration::from_secs(2);

/// How long ending a run waits for the reader of the second serial port: its output is data, which
/// a slow reader must not lose.
pub const SECOND_PORT_DRAIN_TIME_MAX: Duration = Duration::from_secs(60);
