//! Why the state of a vCPU is refused.

use ssi_hv_irqchip::InvalidState;
use thiserror::Error;

/// The version of a vCPU's state.
pub(crate) const VERSION: u16 = 1;

/// Why the state of a vCPU that another node has sent cannot be used.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum StateError {
    /// It was saved by another version.
    #[error(
        "it has version {found}, and this program reads {VERSION}: run one version on all nodes"
    )]
    Version {
        /// The version of the state.
        found: u16,
    },
    /// It ends too early.
    #[error("it ends before {part}")]
    Short {
        /// The part that is not there.
        part: &'static str,
    },
    /// There is more.
    #[error("{bytes} bytes follow its end")]
    Long {
        /// How many.
        bytes: usize,
    },
    /// It is of another vCPU.
    #[error("it is that of vCPU {found}")]
    OtherCpu {
        /// That vCPU.
        found: u8,
    },
    /// A value that no vCPU has.
    #[error("{part} is {value:#x}, {limit:#x} is the most")]
    Value {
        /// What it is.
        part: &'static str,
        /// Its value.
        value: u64,
        /// The largest that is valid.
        limit: u64,
    },
    /// A register of the local APIC cannot be so.
    #[error(transparent)]
    LocalApic(#[from] InvalidState),
    /// The local APIC is that of another vCPU.
    #[error("its local APIC has the number {found}")]
    OtherApic {
        /// That number.
        found: u32,
    },
    /// KVM does not take a model-specific register.
    #[error(
        "KVM here does not set the model-specific register {index:#x} to {value:#x}: use hosts with \
         the same processor and kernel"
    )]
    Msr {
        /// The register.
        index: u32,
        /// Its value.
        value: u64,
    },
    /// The time stamp counter has another rate.
    #[error("its time stamp counter has {found} kHz, and that of this node {here} kHz")]
    ClockRate {
        /// The rate in kHz.
        found: u32,
        /// This node's.
        here: u32,
    },
    /// The time stamp counter would go back.
    #[error(
        "the time stamp counter of this node is {ticks} ticks behind: synchronize the clocks of the \
         hosts, or use hosts with invariant counters"
    )]
    ClockBehind {
        /// By how much.
        ticks: u64,
    },
}
