//! What `ssi-hv run` is asked to do: one structure for the flags and for `vm.toml`.
//!
//! Reading a flag or a file checks its form ([`crate::size`], [`crate::cli`]);
//! [`RunConfig::validate`] checks what the values mean together. The two give different errors.

pub mod address;
pub mod choices;
pub mod cpu_list;
pub mod disk;
pub mod file;
mod nearest;
pub mod net;
pub mod planned;
mod run;
pub(crate) mod text;
pub mod validation;
pub mod vsock;

use std::path::PathBuf;

use clap::Args;
use serde::{Deserialize, Serialize};
pub use ssi_hv_api::name;

use self::address::{Donor, HostPort};
pub use self::choices::{Compression, HugePages, Numa, OnReboot, Prefetching, Switch, Transport};
use self::cpu_list::CpuList;
use self::disk::DiskArg;
use self::name::VmName;
use self::net::NetArg;
pub use self::validation::ValidationError;
use self::vsock::VsockArg;
use crate::cluster::ClusterFile;
use crate::machine::VCPUS_MAX;
use crate::size::ByteSize;
pub use run::{ResolvedDonor, ValidatedRun, resolved_donor};

/// Bytes per page.
pub const PAGE_SIZE_BYTES: u64 = 4096;
/// Minimum memory of a guest: a stock kernel with an initramfs does not boot with less.
pub const GUEST_MEMORY_MIN: ByteSize = ByteSize::from_mib(64);
/// Limit of a guest's memory: the page map links pages by 32-bit numbers, so 16 TiB is out of
/// reach, and half of that leaves room for the hole below 4 GiB and for markers.
pub const GUEST_MEMORY_MAX: ByteSize = ByteSize::from_mib(8 << 20);
/// Minimum local memory: less holds neither the working set of a booting kernel nor the evictor's
/// reserve.
pub const LOCAL_MEMORY_MIN: ByteSize = ByteSize::from_mib(16);
/// Limit of vCPUs, from the machine.
pub const CPUS_MAX: u32 = VCPUS_MAX as u32;
/// Limit of donors of one guest: each costs connections and threads at both ends.
pub const DONORS_MAX: usize = 64;
/// Limit of `--donor-grace`, in seconds: after a pause of more than an hour, a restart is better.
pub const DONOR_GRACE_SECONDS_MAX: u32 = 3600;
/// Limit of `--timeout`, in seconds: a week.
pub const TIMEOUT_SECONDS_MAX: u32 = 7 * 24 * 3600;
/// Default of `--memory`.
pub const DEFAULT_MEMORY: ByteSize = ByteSize::from_mib(1024);
/// Default of `--donor-grace`, in seconds.
pub const DEFAULT_DONOR_GRACE_SECONDS: u32 = 30;

/// The configuration of one virtual machine, from flags and from `vm.toml`.
///
/// A key of the file has the name of the flag without its dashes: `local-memory = "256M"`.
#[derive(Clone, Debug, PartialEq, Args, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct RunConfig {
    /// Name of the VM [default: ssi-hv-PID]
    #[arg(long, value_name = "NAME", help_heading = "Guest")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<VmName>,

    /// Kernel to boot: an ELF vmlinux or a bzImage
    #[arg(long, value_name = "FILE", help_heading = "Guest")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kernel: Option<PathBuf>,

    /// Initial RAM disk
    #[arg(long, value_name = "FILE", help_heading = "Guest")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub initrd: Option<PathBuf>,

    /// Run this command; return its output and exit code
    #[arg(
        long,
        value_name = "COMMAND",
        help_heading = "Guest",
        allow_hyphen_values = true
    )]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exec: Option<String>,

    /// Stop the guest after this time, with exit code 124
    #[arg(long = "timeout", value_name = "SECONDS", help_heading = "Guest")]
    #[serde(rename = "timeout", skip_serializing_if = "Option::is_none")]
    pub timeout_seconds: Option<u32>,

    /// Write the guest's console to a file
    #[arg(long, value_name = "FILE", help_heading = "Guest")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub console: Option<PathBuf>,

    /// Kernel parameters, appended to the default ones
    #[arg(
        long,
        value_name = "STRING",
        help_heading = "Guest",
        default_value = "",
        hide_default_value = true,
        allow_hyphen_values = true
    )]
    #[serde(skip_serializing_if = "String::is_empty")]
    pub cmdline: String,

    /// Virtual CPUs, 1 to 254
    #[arg(long, value_name = "N", help_heading = "Guest", default_value_t = 1)]
    pub cpus: u32,

    /// Host CPUs to pin to, one for each vCPU: 2-5 or 0,0,1
    #[arg(long, value_name = "CPUS", help_heading = "Guest")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu_pinning: Option<CpuList>,

    /// Memory of the guest
    #[arg(
        long,
        value_name = "SIZE",
        help_heading = "Guest",
        default_value = "1G"
    )]
    pub memory: ByteSize,

    /// Limit of memory that is added at run time
    #[arg(long, value_name = "SIZE", help_heading = "Where the memory is")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hotplug_memory: Option<ByteSize>,

    /// Let the guest report free memory
    #[arg(
        long,
        value_name = "on|off",
        help_heading = "Guest",
        value_enum,
        default_value = "on",
        hide_possible_values = true
    )]
    pub balloon: Switch,

    /// A disk, path=FILE[,readonly]: a raw image or a block device; repeatable
    #[arg(
        long = "disk",
        value_name = "DISK",
        help_heading = "Guest",
        help = "A disk, path=FILE[,readonly]; repeatable"
    )]
    #[serde(rename = "disk", skip_serializing_if = "Vec::is_empty")]
    pub disks: Vec<DiskArg>,

    /// A network card on a tap, tap=NAME[,mac=MAC]; repeatable
    #[arg(
        long = "net",
        value_name = "NET",
        help_heading = "Guest",
        help = "A network card, tap=NAME[,mac=MAC]; repeatable"
    )]
    #[serde(rename = "net", skip_serializing_if = "Vec::is_empty")]
    pub nets: Vec<NetArg>,

    /// Sockets between guest and host, cid=N,path=SOCKET
    #[arg(
        long,
        value_name = "VSOCK",
        help_heading = "Guest",
        help = "Sockets to the host, cid=N,path=SOCKET"
    )]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vsock: Option<VsockArg>,

    /// A second console, /dev/hvc0, on a Unix socket
    #[arg(long, value_name = "SOCKET", help_heading = "Guest")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hvc: Option<PathBuf>,

    /// Provide random numbers of the host
    #[arg(
        long,
        value_name = "on|off",
        help_heading = "Guest",
        value_enum,
        default_value = "on",
        hide_possible_values = true
    )]
    pub rng: Switch,

    /// What to do when the guest reboots
    #[arg(
        long,
        value_name = "WHAT",
        help_heading = "Guest",
        value_enum,
        default_value_t,
        hide_possible_values = true,
        help = "On a reboot: exit or restart [default: exit]",
        hide_default_value = true
    )]
    pub on_reboot: OnReboot,

    /// Local memory [default: all, or what donors with memory= leave]
    #[arg(
        long,
        value_name = "SIZE",
        help_heading = "Where the memory is",
        help = "Local memory [default: what donors leave]"
    )]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub local_memory: Option<ByteSize>,

    /// A donor, HOST:PORT[,memory=SIZE][,fingerprint=HEX]; repeatable
    #[arg(
        long = "donor",
        value_name = "DONOR",
        help_heading = "Where the memory is",
        help = "HOST:PORT[,memory=SIZE][,fingerprint=HEX]; repeatable"
    )]
    #[serde(rename = "donor", skip_serializing_if = "Vec::is_empty")]
    pub donors: Vec<Donor>,

    /// Running nodes as donors, from the file of `ssi-hv up`
    #[arg(
        long,
        value_name = "FILE",
        help_heading = "Where the memory is",
        help = "Running nodes of a cluster.toml as donors"
    )]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cluster: Option<ClusterFile>,

    /// How pages travel
    #[arg(
        long,
        value_name = "KIND",
        help_heading = "Where the memory is",
        value_enum,
        default_value_t,
        hide_possible_values = true,
        hide_default_value = true,
        help = "auto (default), rdma, hybrid, tcp, udp, loopback"
    )]
    pub transport: Transport,

    /// What the guest sees of where its memory is
    #[arg(
        long,
        value_name = "KIND",
        help_heading = "Where the memory is",
        value_enum,
        default_value_t,
        hide_possible_values = true,
        help = "The guest's view: flat or expose"
    )]
    pub numa: Numa,

    /// Huge pages for memory with its home here: auto or off
    #[arg(
        long,
        value_name = "WHEN",
        help_heading = "Where the memory is",
        value_enum,
        default_value_t,
        hide_possible_values = true,
        help = "Local huge pages: auto or off"
    )]
    pub huge_pages: HugePages,

    /// Protect each page in transit with a CRC-32C
    #[arg(long, help_heading = "Where the memory is")]
    pub checksum: bool,

    /// Compress pages on the network
    #[arg(
        long,
        value_name = "WHEN",
        help_heading = "Where the memory is",
        value_enum,
        default_value_t,
        hide_possible_values = true,
        help = "Compress pages: auto, on or off"
    )]
    pub compression: Compression,

    /// Fetch pages before they are touched
    #[arg(
        long,
        value_name = "WHEN",
        help_heading = "Where the memory is",
        value_enum,
        default_value_t,
        hide_possible_values = true,
        help = "Fetch pages ahead: auto or off"
    )]
    pub prefetch: Prefetching,

    /// Write which pages the guest touched first
    #[arg(long, value_name = "FILE", help_heading = "Files")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub record_working_set: Option<PathBuf>,

    /// Prepare what a recorded run touched first
    #[arg(long, value_name = "FILE", help_heading = "Files")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub replay_working_set: Option<PathBuf>,

    /// Pause this long for a lost donor
    #[arg(
        long = "donor-grace",
        value_name = "SECONDS",
        help_heading = "Where the memory is",
        default_value_t = DEFAULT_DONOR_GRACE_SECONDS
    )]
    #[serde(rename = "donor-grace")]
    pub donor_grace_seconds: u32,

    /// Allow other hosts, without encryption
    #[arg(long, help_heading = "Where the memory is")]
    pub insecure: bool,

    /// Serve Prometheus metrics on this address, at /metrics; port 0 selects a free port
    #[arg(
        long,
        value_name = "ADDR:PORT",
        help_heading = "Files",
        help = "Serve Prometheus metrics, at /metrics"
    )]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub metrics: Option<HostPort>,

    /// Write a report in JSON at the end
    #[arg(long, value_name = "FILE", help_heading = "Files")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub report: Option<PathBuf>,

    /// End when the other end of this pipe is closed: `ssi-hv up` starts VMs with it
    #[arg(long, value_name = "FD", hide = true)]
    #[serde(skip)]
    pub end_with_fd: Option<u32>,
}

impl Default for RunConfig {
    fn default() -> Self {
        Self {
            name: None,
            kernel: None,
            initrd: None,
            exec: None,
            timeout_seconds: None,
            console: None,
            cmdline: String::new(),
            cpus: 1,
            cpu_pinning: None,
            memory: DEFAULT_MEMORY,
            hotplug_memory: None,
            balloon: Switch::On,
            disks: Vec::new(),
            nets: Vec::new(),
            vsock: None,
            hvc: None,
            rng: Switch::On,
            on_reboot: OnReboot::Exit,
            local_memory: None,
            donors: Vec::new(),
            cluster: None,
            transport: Transport::Auto,
            numa: Numa::Flat,
            huge_pages: HugePages::Auto,
            checksum: false,
            compression: Compression::Auto,
            prefetch: Prefetching::Auto,
            record_working_set: None,
            replay_working_set: None,
            donor_grace_seconds: DEFAULT_DONOR_GRACE_SECONDS,
            insecure: false,
            metrics: None,
            report: None,
            end_with_fd: None,
        }
    }
}

#[cfg(test)]
mod tests;
