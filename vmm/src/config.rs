//! What `ssi-hv run` is asked to do: one structure for the flags and for `vm.toml`.
//!
//! Reading a flag or a file checks its form ([`crate::size`], [`crate::cli`]);
//! [`RunConfig::validate`] checks what the values mean together. The two give different errors.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use devices::virtio::MEM_BLOCK_BYTES;
use memory_fabric::fabric::Fingerprint;
use serde::{Deserialize, Serialize};

use crate::cli::address::{Donor, HostPort};
pub use crate::cli::choices::{
    Compression, HugePages, Numa, OnReboot, Prefetching, Switch, Transport,
};
use crate::cli::cpu_list::CpuList;
use crate::cli::disk::DiskArg;
use crate::cli::name::VmName;
use crate::cli::net::NetArg;
pub use crate::cli::validation::ValidationError;
use crate::cli::validation::{
    check_command, check_file, check_metrics, check_pinning, check_range, check_size,
    resolve_permitted,
};
use crate::cli::vsock::VsockArg;
use crate::cluster::ClusterFile;
use crate::machine::{VCPUS_MAX, VIRTIO_DEVICES_MAX};
use crate::size::ByteSize;

/// Bytes in a page.
pub const PAGE_SIZE_BYTES: u64 = 4096;
/// The least memory of a guest: a stock kernel with an initramfs does not boot in less.
pub const GUEST_MEMORY_MIN: ByteSize = ByteSize::from_mib(64);
/// The most memory of a guest: the page map links pages by 32-bit numbers, so 16 TiB is out of
/// reach, and half of that leaves room for the hole below 4 GiB and for markers.
pub const GUEST_MEMORY_MAX: ByteSize = ByteSize::from_mib(8 << 20);
/// The least memory of a guest that is here at once: less holds neither the working set of a
/// booting kernel nor the reserve that the evictor keeps free.
pub const LOCAL_MEMORY_MIN: ByteSize = ByteSize::from_mib(16);
/// The most virtual CPUs: what the machine can have.
pub const CPUS_MAX: u32 = VCPUS_MAX as u32;
/// The most donors of one guest: each costs connections and threads at both ends.
pub const DONORS_MAX: usize = 64;
/// The longest time that a guest stays paused for a donor, in seconds: a guest that stood still
/// for longer than an hour is better restarted.
pub const DONOR_GRACE_SECONDS_MAX: u32 = 3600;
/// The longest `--timeout`, in seconds: a week. What runs for longer is no job.
pub const TIMEOUT_SECONDS_MAX: u32 = 7 * 24 * 3600;
/// What `--memory` is when it is not given.
pub const DEFAULT_MEMORY: ByteSize = ByteSize::from_mib(1024);
/// What `--donor-grace` is when it is not given, in seconds.
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

    /// Run this; its output and exit code are ours
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

    /// CPUs of this host, one for each: 2-5 or 0,0,1
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

    /// Room for memory that is added while it runs
    #[arg(long, value_name = "SIZE", help_heading = "Where the memory is")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hotplug_memory: Option<ByteSize>,

    /// Let the guest tell which memory is free
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

    /// Sockets between guest and host
    #[arg(
        long,
        value_name = "VSOCK",
        help_heading = "Guest",
        help = "Sockets to the host, cid=N,path=SOCKET"
    )]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vsock: Option<VsockArg>,

    /// A second console, /dev/hvc0, at a socket
    #[arg(long, value_name = "SOCKET", help_heading = "Guest")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hvc: Option<PathBuf>,

    /// A source of random numbers of the host
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
        help = "When it reboots: exit or restart [default: exit]",
        hide_default_value = true
    )]
    pub on_reboot: OnReboot,

    /// How much is here at once [default: all, or what donors with memory= leave]
    #[arg(
        long,
        value_name = "SIZE",
        help_heading = "Where the memory is",
        help = "How much is here [default: what donors leave]"
    )]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub local_memory: Option<ByteSize>,

    /// A donor, HOST:PORT[,memory=SIZE][,fingerprint=HEX]; repeatable
    #[arg(
        long = "donor",
        value_name = "DONOR",
        help_heading = "Where the memory is",
        help = "HOST:PORT[,memory=SIZE][,fingerprint=HEX]; many"
    )]
    #[serde(rename = "donor", skip_serializing_if = "Vec::is_empty")]
    pub donors: Vec<Donor>,

    /// Nodes that run already, from the file of `ssi-hv up`
    #[arg(
        long,
        value_name = "FILE",
        help_heading = "Where the memory is",
        help = "The nodes of a cluster.toml as donors; they run already"
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

    /// What the guest is told about where its memory is
    #[arg(
        long,
        value_name = "KIND",
        help_heading = "Where the memory is",
        value_enum,
        default_value_t,
        hide_possible_values = true,
        help = "What it sees: flat or expose"
    )]
    pub numa: Numa,

    /// Huge pages for memory at home here: auto or off
    #[arg(
        long,
        value_name = "WHEN",
        help_heading = "Where the memory is",
        value_enum,
        default_value_t,
        hide_possible_values = true,
        help = "Huge pages here: auto or off"
    )]
    pub huge_pages: HugePages,

    /// Guard each page on its way with a CRC-32C
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

    /// Fetch pages before they are asked for
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

    /// Make ready what a recorded run touched first
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

    /// Allow other hosts, unauthenticated, in the clear
    #[arg(long, help_heading = "Where the memory is")]
    pub insecure: bool,

    /// Answer Prometheus on this address, at /metrics; port 0 takes a free one, which -v tells
    #[arg(
        long,
        value_name = "ADDR:PORT",
        help_heading = "Files",
        help = "Answer Prometheus here, at /metrics"
    )]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub metrics: Option<HostPort>,

    /// Write a report in JSON at the end
    #[arg(long, value_name = "FILE", help_heading = "Files")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub report: Option<PathBuf>,

    /// End when the other end of this pipe is closed: `ssi-hv up` starts VMs so
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

/// A donor whose name is resolved and that may be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResolvedDonor {
    /// The donor as it was named, for messages.
    pub name: HostPort,
    /// Where to connect: an IPv4 address when the name has one.
    pub address: SocketAddr,
    /// How much it is asked to lend; `None` for its share of the whole guest, or less if it
    /// has less.
    pub memory: Option<ByteSize>,
    /// What it has to show; `None` when any will do.
    pub fingerprint: Option<Fingerprint>,
}

/// A configuration that was checked, with what follows from it.
#[derive(Clone, Debug, PartialEq)]
pub struct ValidatedRun {
    /// The kernel; it could be opened.
    pub kernel: PathBuf,
    /// The initial RAM disk; it could be opened.
    pub initrd: Option<PathBuf>,
    /// Memory of the guest, a multiple of the page size.
    pub memory: ByteSize,
    /// How much memory may be added while it runs, whole blocks.
    pub hotplug_memory: Option<ByteSize>,
    /// How much of all that is here at once, a multiple of the page size.
    pub local_memory: ByteSize,
    /// The donors, no two with the same address.
    pub donors: Vec<ResolvedDonor>,
    /// How long the guest stays paused for a lost donor.
    pub donor_grace: Duration,
    /// Where Prometheus is answered.
    pub metrics: Option<SocketAddr>,
}

impl RunConfig {
    /// Checks what the values mean together, opens the files and resolves the donors' names.
    ///
    /// # Errors
    ///
    /// The first thing that is wrong, with its limit and remedy.
    pub fn validate(&self) -> Result<ValidatedRun, ValidationError> {
        let kernel = self.kernel.clone().ok_or(ValidationError::KernelNotGiven)?;
        check_file("--kernel", &kernel)?;
        if let Some(initrd) = &self.initrd {
            check_file("--initrd", initrd)?;
        }
        if let Some(command) = &self.exec {
            check_command(command)?;
            if self.on_reboot == OnReboot::Restart {
                return Err(ValidationError::ExecWithRestart);
            }
        }
        if let Some(seconds) = self.timeout_seconds {
            check_range("--timeout", seconds, 1, TIMEOUT_SECONDS_MAX)?;
        }
        check_range("--cpus", self.cpus, 1, CPUS_MAX)?;
        if let Some(pinning) = &self.cpu_pinning {
            check_pinning(pinning, self.cpus)?;
        }
        check_range(
            "--donor-grace",
            self.donor_grace_seconds,
            0,
            DONOR_GRACE_SECONDS_MAX,
        )?;
        check_size("--memory", self.memory, GUEST_MEMORY_MIN)?;
        if self.memory > GUEST_MEMORY_MAX {
            return Err(ValidationError::TooLarge {
                flag: "--memory",
                size: self.memory,
                limit: GUEST_MEMORY_MAX,
            });
        }
        self.check_hotplug_memory()?;
        if matches!(self.transport, Transport::Rdma | Transport::Hybrid) && self.checksum {
            return Err(ValidationError::RdmaWithChecksum);
        }
        self.check_devices()?;
        let donors = self.resolved_donors()?;
        let local_memory = self.checked_local_memory()?;
        Ok(ValidatedRun {
            kernel,
            initrd: self.initrd.clone(),
            memory: self.memory,
            hotplug_memory: self.hotplug_memory,
            local_memory,
            donors,
            donor_grace: Duration::from_secs(self.donor_grace_seconds.into()),
            metrics: check_metrics(self.metrics.as_ref(), self.insecure)?,
        })
    }

    /// Whole blocks, and with the guest's memory no more than a guest can have.
    fn check_hotplug_memory(&self) -> Result<(), ValidationError> {
        let Some(size) = self.hotplug_memory else {
            return Ok(());
        };
        let flag = "--hotplug-memory";
        if size == ByteSize::ZERO || !size.is_multiple_of(MEM_BLOCK_BYTES) {
            return Err(ValidationError::NotWholeBlocks { flag, size });
        }
        let limit = GUEST_MEMORY_MAX.saturating_sub(self.memory);
        if size > limit {
            return Err(ValidationError::TooLarge { flag, size, limit });
        }
        Ok(())
    }

    /// Each virtio device needs an interrupt of its own.
    fn check_devices(&self) -> Result<(), ValidationError> {
        let (disks, nets) = (self.disks.len(), self.nets.len());
        let switches = [self.balloon, self.rng];
        let on = switches.iter().filter(|there| **there == Switch::On);
        let single = [
            self.vsock.is_some(),
            self.hvc.is_some(),
            self.hotplug_memory.is_some(),
        ];
        let others = on.count() + single.iter().filter(|there| **there).count();
        let limit = usize::from(VIRTIO_DEVICES_MAX);
        if disks + nets + others > limit {
            return Err(ValidationError::TooManyDevices {
                disks,
                nets,
                others,
                limit,
            });
        }
        Ok(())
    }

    fn resolved_donors(&self) -> Result<Vec<ResolvedDonor>, ValidationError> {
        if self.donors.len() > DONORS_MAX {
            return Err(ValidationError::TooManyDonors {
                count: self.donors.len(),
            });
        }
        if self.transport == Transport::Loopback && !self.donors.is_empty() {
            return Err(ValidationError::LoopbackWithDonor);
        }
        let mut resolved: Vec<ResolvedDonor> = Vec::with_capacity(self.donors.len());
        for donor in &self.donors {
            let donor = resolved_donor(donor, self.transport, self.insecure)?;
            if let Some(first) = resolved.iter().find(|d| d.address == donor.address) {
                return Err(ValidationError::DuplicateDonor {
                    first: first.name.clone(),
                    second: donor.name,
                    address: donor.address,
                });
            }
            resolved.push(donor);
        }
        Ok(resolved)
    }

    /// How much is here at once: what was said, or all, or what the donors leave.
    fn checked_local_memory(&self) -> Result<ByteSize, ValidationError> {
        let memory = self.memory;
        let asked = self.memory_asked_of_donors();
        let local = match (self.local_memory, asked) {
            (Some(local), _) => local,
            (None, _) if self.donors.is_empty() => memory,
            (None, Some(lent)) => memory.saturating_sub(lent).max(LOCAL_MEMORY_MIN),
            (None, None) => return Err(ValidationError::LocalMemoryNotGiven { memory }),
        };
        check_size("--local-memory", local, LOCAL_MEMORY_MIN)?;
        // What is beyond the guest's memory is a cache for what donors add.
        let added = self.hotplug_memory.unwrap_or(ByteSize::ZERO);
        let limit = memory.saturating_add(added);
        if local > limit {
            return Err(match self.hotplug_memory {
                None => ValidationError::LocalAboveMemory { local, memory },
                Some(hotplug) => ValidationError::LocalAboveAllMemory {
                    local,
                    memory,
                    hotplug,
                    limit,
                },
            });
        }
        if local < memory && self.donors.is_empty() && self.transport != Transport::Loopback {
            let missing = memory.saturating_sub(local);
            return Err(ValidationError::NoDonor {
                local,
                memory,
                missing,
            });
        }
        match asked {
            Some(lent) if !self.donors.is_empty() && local.saturating_add(lent) < memory => {
                Err(ValidationError::DonorsTooSmall {
                    memory,
                    local,
                    lent,
                })
            }
            _ => Ok(local),
        }
    }

    /// The sum of what the donors are asked for; `None` when one of them leaves it open.
    fn memory_asked_of_donors(&self) -> Option<ByteSize> {
        self.donors.iter().try_fold(ByteSize::ZERO, |sum, donor| {
            Some(sum.saturating_add(donor.memory?))
        })
    }
}

/// Checks a donor, and resolves its name.
///
/// # Errors
///
/// If it cannot be used, or not with this transport, or not without `insecure`.
pub fn resolved_donor(
    donor: &Donor,
    transport: Transport,
    insecure: bool,
) -> Result<ResolvedDonor, ValidationError> {
    if donor.address.port() == 0 {
        return Err(ValidationError::PortZero {
            address: donor.address.clone(),
        });
    }
    if donor.fingerprint.is_some() && transport != Transport::Udp {
        return Err(ValidationError::FingerprintWithoutUdp {
            address: donor.address.clone(),
        });
    }
    if let Some(memory) = donor.memory {
        let least = ByteSize::from_bytes(PAGE_SIZE_BYTES);
        check_size("--donor memory=", memory, least)?;
    }
    Ok(ResolvedDonor {
        address: resolve_permitted("donor", &donor.address, insecure)?,
        name: donor.address.clone(),
        memory: donor.memory,
        fingerprint: donor.fingerprint,
    })
}

#[cfg(test)]
#[path = "cli/config_tests.rs"]
mod tests;
