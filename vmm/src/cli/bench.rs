//! `ssi-hv bench`: what is measured.

use clap::{Args, Subcommand};

use super::validation::{ValidationError, check_range, check_size};
use crate::config::{GUEST_MEMORY_MAX, LOCAL_MEMORY_MIN, Transport};
use crate::size::ByteSize;

/// The most threads that touch memory: as many as a guest has virtual CPUs.
pub const BENCH_THREADS_MAX: u32 = crate::config::CPUS_MAX;
/// The most donors: they all run on this host.
pub const BENCH_DONORS_MAX: u32 = 8;
/// The longest measurement, in seconds.
pub const BENCH_SECONDS_MAX: u32 = 3600;
/// The least memory: fewer pages than this are resident again before they can be evicted.
pub const BENCH_MEMORY_MIN: ByteSize = ByteSize::from_mib(1);

/// What can be measured.
#[derive(Clone, Debug, PartialEq, Subcommand)]
pub enum BenchCommand {
    /// Latency of a remote fault, beside the floor that no pager can beat
    #[command(
        after_help = "Threads of this process touch memory whose pages are on donors, over loopback; no KVM is needed. The floor, a bare userfaultfd resolution and a bare page exchange over the same transport, is measured in the same rounds of the same run. Ratios are medians over the rounds."
    )]
    Fault(BenchFaultConfig),
}

/// The configuration of `ssi-hv bench fault`.
#[derive(Clone, Debug, PartialEq, Args)]
pub struct BenchFaultConfig {
    /// Memory that is touched
    #[arg(long, value_name = "SIZE", default_value = "256M")]
    pub memory: ByteSize,

    /// What may be resident at once
    #[arg(long, value_name = "SIZE", default_value = "64M")]
    pub local_memory: ByteSize,

    /// Threads that touch it
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub threads: u32,

    /// Donors that lend it, in this process
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub donors: u32,

    /// How pages travel
    #[arg(
        long,
        value_name = "KIND",
        value_enum,
        default_value_t,
        hide_possible_values = true,
        help = "auto, tcp or loopback"
    )]
    pub transport: Transport,

    /// Guard each page on its way with a CRC-32C
    #[arg(long)]
    pub checksum: bool,

    /// How long to measure
    #[arg(long, value_name = "SECONDS", default_value_t = 5)]
    pub seconds: u32,

    /// Stop after this many remote faults instead
    #[arg(long, value_name = "COUNT", conflicts_with = "seconds")]
    pub faults: Option<u64>,

    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

impl BenchFaultConfig {
    /// Checks what the values mean together.
    ///
    /// # Errors
    ///
    /// The first thing that is wrong, with its limit and remedy.
    pub fn validate(&self) -> Result<(), ValidationError> {
        check_size("--memory", self.memory, BENCH_MEMORY_MIN)?;
        check_size("--local-memory", self.local_memory, LOCAL_MEMORY_MIN)?;
        check_range("--threads", self.threads, 1, BENCH_THREADS_MAX)?;
        check_range("--donors", self.donors, 1, BENCH_DONORS_MAX)?;
        check_range("--seconds", self.seconds, 1, BENCH_SECONDS_MAX)?;
        self.transport.require_available()?;
        if self.memory > GUEST_MEMORY_MAX {
            return Err(ValidationError::TooLarge {
                flag: "--memory",
                size: self.memory,
                limit: GUEST_MEMORY_MAX,
            });
        }
        if self.local_memory >= self.memory {
            return Err(ValidationError::NothingRemote {
                local: self.local_memory,
                memory: self.memory,
            });
        }
        if self.faults == Some(0) {
            return Err(ValidationError::OutOfRange {
                flag: "--faults",
                value: 0,
                min: 1,
                max: u64::MAX,
            });
        }
        Ok(())
    }
}
