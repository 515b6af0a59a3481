//! The commands that control a VM.

use clap::Args;
use ssi_hv::config::address::Donor;
use ssi_hv::size::ByteSize;

/// Limit of `--wait`, in seconds: a day.
const WAIT_SECONDS_MAX: i64 = 86_400;

/// The flags of `ssi-hv pause`, `resume` and `kill`.
#[derive(Clone, Debug, PartialEq, Eq, Args)]
pub struct ControlConfig {
    /// The VM, by its name or process id
    #[arg(value_name = "VM")]
    pub vm: String,
}

/// The flags of `ssi-hv shutdown`.
#[derive(Clone, Debug, PartialEq, Eq, Args)]
pub struct ShutdownConfig {
    /// The VM, by its name or process id
    #[arg(value_name = "VM")]
    pub vm: String,

    /// Wait this long until it has ended
    #[arg(
        long,
        value_name = "SECONDS",
        default_value_t = 0,
        value_parser = clap::value_parser!(u32).range(0..=WAIT_SECONDS_MAX)
    )]
    pub wait: u32,
}

/// The flags of `ssi-hv move`.
#[derive(Clone, Debug, PartialEq, Eq, Args)]
pub struct MoveConfig {
    /// The VM, by its name or process id
    #[arg(value_name = "VM")]
    pub vm: String,

    /// The vCPU, by its number
    #[arg(long, value_name = "N")]
    pub cpu: u32,

    /// The node on which it is to run: primary, or its number or address in the status
    #[arg(long, value_name = "NODE")]
    pub to: String,
}

/// The flags of `ssi-hv hotplug`.
#[derive(Clone, Debug, PartialEq, Eq, Args)]
pub struct HotplugConfig {
    /// The VM, by its name or process id
    #[arg(value_name = "VM")]
    pub vm: String,

    /// How much memory to add in total, 0 for none; without it, show how much there is
    #[arg(long, value_name = "SIZE")]
    pub memory: Option<ByteSize>,

    /// A donor that lends what is missing, HOST:PORT[,name=NAME][,fingerprint=HEX]
    #[arg(long, value_name = "DONOR", requires = "memory")]
    pub donor: Option<Donor>,

    /// Wait this long until the guest has it
    #[arg(
        long,
        value_name = "SECONDS",
        default_value_t = 0,
        value_parser = clap::value_parser!(u32).range(0..=WAIT_SECONDS_MAX)
    )]
    pub wait: u32,
}

/// The flags of `ssi-hv drain`.
#[derive(Clone, Debug, PartialEq, Eq, Args)]
pub struct DrainConfig {
    /// The VM, by its name or process id
    #[arg(value_name = "VM")]
    pub vm: String,

    /// The donor to be drained, by its number or address in the status; without it, show the last
    /// drain
    #[arg(long, value_name = "NODE")]
    pub node: Option<String>,

    /// A donor that gets its memory, HOST:PORT[,name=NAME][,zone=ZONE]...; may be
    /// repeated. Without it, the other donors of the VM get it
    #[arg(long, value_name = "DONOR", requires = "node")]
    pub to: Vec<Donor>,

    /// Wait this long until it has left
    #[arg(
        long,
        value_name = "SECONDS",
        default_value_t = 0,
        value_parser = clap::value_parser!(u32).range(0..=WAIT_SECONDS_MAX)
    )]
    pub wait: u32,
}

/// The flags of `ssi-hv rebalance`.
#[derive(Clone, Debug, PartialEq, Eq, Args)]
pub struct RebalanceConfig {
    /// The VM, by its name or process id
    #[arg(value_name = "VM")]
    pub vm: String,

    /// A donor that joins first, HOST:PORT[,memory=SIZE][,name=NAME]...; may be
    /// repeated. Without memory=, it lends as much as the largest donor, or less
    #[arg(long, value_name = "DONOR", conflicts_with = "stop")]
    pub add: Vec<Donor>,

    /// End it after the part that is moving; the same command without this goes on
    #[arg(long)]
    pub stop: bool,

    /// Wait this long until it has ended
    #[arg(
        long,
        value_name = "SECONDS",
        default_value_t = 0,
        value_parser = clap::value_parser!(u32).range(0..=WAIT_SECONDS_MAX)
    )]
    pub wait: u32,
}

/// A request to a VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ControlCommand {
    /// Pause.
    Pause(ControlConfig),
    /// Resume.
    Resume(ControlConfig),
    /// Shut down.
    Shutdown(ShutdownConfig),
    /// End at once.
    Kill(ControlConfig),
}

impl ControlCommand {
    /// The VM.
    #[must_use]
    pub fn vm(&self) -> &str {
        match self {
            Self::Pause(config) | Self::Resume(config) | Self::Kill(config) => &config.vm,
            Self::Shutdown(config) => &config.vm,
        }
    }

    /// The path of the request.
    #[must_use]
    pub const fn path(&self) -> &'static str {
        match self {
            Self::Pause(_) => "/v1/pause",
            Self::Resume(_) => "/v1/resume",
            Self::Shutdown(_) => "/v1/shutdown",
            Self::Kill(_) => "/v1/kill",
        }
    }
}
