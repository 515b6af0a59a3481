//! Parsing the settings of `ssi-hv run`: what the values mean together, and what follows from them.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use devices::virtio::MEM_BLOCK_BYTES;
use fabric_identity::Name;
use memory_fabric::fabric::{
    Compression, Fingerprint, OnLostMemory, Redundancy, Sealing, TransportKind,
};
use memory_fabric::rdma::{DeviceChoice, Settings};
use ssi_hv_sandbox::Privileges;

use super::address::{Donor, HostPort};
use super::choice::{
    Choice as _, HugePages, Numa, OnReboot, Placement, Prefetching, Switch, VcpuPolicy,
};
use super::compute::ComputeNode;
use super::cpu_list::CpuList;
use super::disk::DiskArg;
use super::name::VmName;
use super::net::NetArg;
use super::privileges::{placed, placed_vsock, read_again};
use super::protection::Protection;
use super::settings::RunSettings;
use super::validation::{
    ValidationError, check_cmdline, check_command, check_dedicated, check_file, check_metrics,
    check_named, check_pinning, check_range, check_size, resolve_permitted,
};
use super::vsock::VsockArg;
use super::{
    CPUS_MAX, DONOR_GRACE_SECONDS_MAX, DONORS_MAX, GUEST_MEMORY_MAX, GUEST_MEMORY_MIN,
    PAGE_SIZE_BYTES, TIMEOUT_SECONDS_MAX,
};
use crate::machine::{
    Irqchip, TSC_KHZ_FOR_LPJ_MAX, VIRTIO_DEVICES_MAX, command_line, node_parameters,
};
use crate::size::ByteSize;

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
    /// Whom its certificate has to name.
    pub identity: Option<Name>,
    /// Its failure domain.
    pub zone: Option<Name>,
}

/// A virtual machine whose settings are valid. Starting it may still fail.
#[derive(Clone, Debug, PartialEq)]
pub struct RunConfig {
    /// The name that the user gave it.
    pub name: Option<VmName>,
    /// The kernel; it could be opened.
    pub kernel: PathBuf,
    /// The initial RAM disk; it could be opened.
    pub initrd: Option<PathBuf>,
    /// The command to run in the guest, short enough for the guest's init.
    pub exec: Option<String>,
    /// After this time the guest is stopped.
    pub timeout: Option<Duration>,
    /// The file for the guest's console.
    pub console: Option<PathBuf>,
    /// Kernel parameters beside the default ones, which leave room for them, and for
    /// [`node_parameters`].
    pub kernel_parameters: String,
    /// How many vCPUs there are, from 1.
    pub cpus: u8,
    /// The host's CPU for each vCPU, allowed for this process.
    pub cpu_pinning: Option<CpuList>,
    /// Whether these CPUs run nothing but their vCPUs: no two vCPUs have the same one then.
    pub dedicated_cpus: bool,
    /// Where the guest's interrupt controllers are.
    pub irqchip: Irqchip,
    /// Memory of the guest, a multiple of the page size.
    pub memory: ByteSize,
    /// How much memory may be added while it runs, whole blocks.
    pub hotplug_memory: Option<ByteSize>,
    /// Whether the guest reports free memory.
    pub balloon: bool,
    /// The disks, in the order in which the guest finds them.
    pub disks: Vec<DiskArg>,
    /// The network cards, likewise.
    pub nets: Vec<NetArg>,
    /// Sockets between guest and host.
    pub vsock: Option<VsockArg>,
    /// The socket of the second console.
    pub hvc: Option<PathBuf>,
    /// Whether the guest gets random numbers of the host.
    pub rng: bool,
    /// What a reboot of the guest does.
    pub on_reboot: OnReboot,
    /// How much of all memory is here at once, a multiple of the page size.
    pub local_memory: ByteSize,
    /// The donors, no two with the same address.
    pub donors: Vec<ResolvedDonor>,
    /// What makes up for the loss of a donor.
    pub redundancy: Redundancy,
    /// The nodes that run vCPUs, the last ones of the guest, in their order.
    pub nodes: Vec<ComputeNode>,
    /// How pages travel.
    pub transport: TransportKind,
    /// What is set of RDMA connections.
    pub rdma: Settings,
    /// What the guest sees of where its memory is.
    pub numa: Numa,
    /// Whether memory with its home here may be in huge pages.
    pub huge_pages: bool,
    /// Whether each page in transit has a checksum of ours.
    pub checksum: bool,
    /// Which donors get sealed pages only.
    pub seal: Sealing,
    /// Whether pages are compressed on the network.
    pub compression: Compression,
    /// Whether pages are fetched before they are touched.
    pub prefetch: bool,
    /// The file for the working set of this run.
    pub record_working_set: Option<PathBuf>,
    /// The working set of an earlier run.
    pub replay_working_set: Option<PathBuf>,
    /// How long the guest stays paused for a lost donor.
    pub donor_grace: Duration,
    /// What the loss of memory with a donor does.
    pub on_lost_memory: OnLostMemory,
    /// Whether a donor that fails again and again is drained.
    pub drain_failing: bool,
    /// Whether memory moves by its heat.
    pub placement: Placement,
    /// The directory of its certificate.
    pub credentials: Option<PathBuf>,
    /// Whether donors may be on other hosts.
    pub insecure: bool,
    /// Whether the network to other addresses is one of this host alone.
    pub stays_on_this_host: bool,
    /// The address for Prometheus metrics.
    pub metrics: Option<SocketAddr>,
    /// Whether its process is restricted to what it needs.
    pub sandbox: bool,
    /// The user and the root directory that its process has while the guest runs.
    pub privileges: Option<Privileges>,
    /// Whether nodes merge page tables of the guest's kernel.
    pub merge_tables: bool,
    /// Whether its vCPUs move between nodes without a command.
    pub vcpu_policy: VcpuPolicy,
    /// The file for the report.
    pub report: Option<PathBuf>,
    /// The pipe with whose end the run ends.
    pub end_with_fd: Option<u32>,
}

impl RunConfig {
    /// The memory that hosts with vCPUs share: the guest's, and what may be added to it.
    #[must_use]
    pub fn shared_memory(&self) -> ByteSize {
        let added = self.hotplug_memory.unwrap_or(ByteSize::ZERO);
        self.memory.saturating_add(added)
    }
}

impl RunSettings {
    /// Compares the values with their limits, with each other and with this host: opens files and
    /// resolves the names of donors.
    ///
    /// # Errors
    ///
    /// The first thing that is wrong, with its limit and remedy.
    pub fn parse(&self) -> Result<RunConfig, ValidationError> {
        let kernel = self.kernel.clone().ok_or(ValidationError::KernelNotGiven)?;
        let privileges = self.checked_privileges()?;
        let placed = |flag, path: &Option<PathBuf>| {
            let path = path.as_deref();
            let placed = path.map(|path| placed(privileges.as_ref(), flag, path));
            placed.transpose()
        };
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
        let kernel_parameters = self.kernel_parameters();
        let given = command_line(&kernel_parameters).len() + self.longest_node_parameters();
        check_cmdline(&self.cmdline, given.saturating_sub(self.cmdline.len()))?;
        let cpus = checked_cpus(self.cpus)?;
        if let Some(pinning) = &self.cpu_pinning {
            check_pinning(pinning, self.cpus)?;
        }
        if self.dedicated_cpus {
            let irqchip = self.irqchip.unwrap_or(Irqchip::Kernel);
            check_dedicated(self.cpu_pinning.as_ref(), irqchip, self.cpus)?;
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
        if matches!(self.transport, TransportKind::Rdma | TransportKind::Hybrid) && self.checksum {
            return Err(ValidationError::RdmaWithChecksum);
        }
        let redundancy = self.checked_redundancy()?;
        self.check_on_lost_memory()?;
        self.check_devices()?;
        let nodes = self.resolved_nodes()?;
        let is_alone = nodes.is_empty();
        let donors = self.resolved_donors()?;
        let local_memory = self.checked_local_memory()?;
        let seal = self.checked_seal(&donors)?;
        Ok(RunConfig {
            name: self.name.clone(),
            kernel,
            initrd: self.initrd.clone(),
            exec: self.exec.clone(),
            timeout: self.timeout_seconds.map(seconds),
            console: self.console.clone(),
            kernel_parameters,
            cpus,
            cpu_pinning: self.cpu_pinning.clone(),
            dedicated_cpus: self.dedicated_cpus,
            irqchip: match self.irqchip {
                Some(irqchip) => irqchip,
                None if is_alone => Irqchip::Kernel,
                // The controllers of KVM reach no other host.
                None => Irqchip::User,
            },
            memory: self.memory,
            hotplug_memory: self.hotplug_memory,
            balloon: self.balloon == Switch::On,
            disks: self.disks.clone(),
            nets: self.nets.clone(),
            vsock: placed_vsock(privileges.as_ref(), self.vsock.as_ref())?,
            hvc: placed("--hvc", &self.hvc)?,
            rng: self.rng == Switch::On,
            on_reboot: self.on_reboot,
            local_memory,
            donors,
            redundancy,
            nodes,
            transport: self.transport,
            rdma: self.checked_rdma()?,
            numa: self.numa,
            huge_pages: self.huge_pages == HugePages::Auto && is_alone,
            checksum: self.checksum,
            seal,
            compression: self.compression,
            prefetch: self.prefetch == Prefetching::Auto,
            record_working_set: placed("--record-working-set", &self.record_working_set)?,
            replay_working_set: self.replay_working_set.clone(),
            donor_grace: seconds(self.donor_grace_seconds()),
            on_lost_memory: self.on_lost_memory,
            drain_failing: self.checked_drain_failing()?,
            placement: self.checked_placement()?,
            credentials: self
                .credentials
                .as_deref()
                .map(|path| read_again(privileges.as_ref(), path)),
            insecure: self.insecure,
            stays_on_this_host: self.stays_on_this_host,
            metrics: check_metrics(self.metrics.as_ref(), self.insecure)?,
            sandbox: self.sandbox == Switch::On,
            privileges: privileges.clone(),
            merge_tables: self.merge_tables == Switch::On,
            vcpu_policy: self.vcpu_policy,
            report: placed("--report", &self.report)?,
            end_with_fd: self.end_with_fd,
        })
    }

    /// The kernel parameters beside the default ones. Where memory can be added, a stock kernel takes
    /// what is plugged into use by itself, and so that it can be given back.
    fn kernel_parameters(&self) -> String {
        let of_machine = match self.hotplug_memory {
            Some(_) => "memhp_default_state=online_movable ",
            None => "",
        };
        format!("{of_machine}{}", self.cmdline)
    }

    /// Bytes of the longest parameters that [`node_parameters`] may add.
    fn longest_node_parameters(&self) -> usize {
        // The lists of CPUs are longest with as many on both sides.
        let longest = || {
            let [here, cpus] = [CPUS_MAX / 2, CPUS_MAX].map(u32::from);
            node_parameters(&self.cmdline, Some(TSC_KHZ_FOR_LPJ_MAX), here, cpus).len()
        };
        if self.nodes.is_empty() { 0 } else { longest() }
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

    /// Returns what to do so that memory of donors can move: it does where the guest does not see
    /// them, and this host has all vCPUs.
    fn so_that_memory_moves(&self) -> Option<&'static str> {
        let refusals = [
            (!self.nodes.is_empty(), "remove --node"),
            (self.numa == Numa::Expose, "remove --numa expose"),
            (
                self.transport == TransportKind::Loopback,
                "remove --transport loopback",
            ),
            (self.donors.is_empty(), "add --donor"),
        ];
        let refused = refusals.into_iter().find(|(is_given, _)| *is_given);
        refused.map(|(_, remedy)| remedy)
    }

    fn checked_drain_failing(&self) -> Result<bool, ValidationError> {
        let is_on = self.drain_failing == Switch::On;
        match self.so_that_memory_moves() {
            Some(remedy) if is_on => Err(ValidationError::DrainFailing(remedy)),
            _ => Ok(is_on),
        }
    }

    /// Memory with one copy moves by its heat. Of two copies, that at the faster donor is read.
    fn checked_placement(&self) -> Result<Placement, ValidationError> {
        let copies = self
            .redundancy_flag()
            .map(|_| "remove --replicas 2 and --redundancy");
        match copies.or(self.so_that_memory_moves()) {
            Some(remedy) if self.placement == Placement::Heat => {
                Err(ValidationError::PlacementHeat(remedy))
            }
            _ => Ok(self.placement),
        }
    }

    /// Pages are poisoned where this host has all vCPUs, and donors the only copies.
    fn check_on_lost_memory(&self) -> Result<(), ValidationError> {
        let node = (!self.nodes.is_empty()).then_some("--node");
        match self.redundancy_flag().or(node) {
            Some(flag) if self.on_lost_memory == OnLostMemory::Poison => {
                Err(ValidationError::NotWithPoison(flag))
            }
            _ => Ok(()),
        }
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

    /// Returns the settings of RDMA, if it may be used.
    pub(super) fn checked_rdma(&self) -> Result<Settings, ValidationError> {
        let Some(rdma) = &self.rdma else {
            // See `PrivilegesError::WithRdma`.
            return Ok(match self.user {
                Some(_) => DeviceChoice::None.into(),
                None => Settings::default(),
            });
        };
        match self.transport {
            TransportKind::Auto if self.user.is_some() => {
                Err(ValidationError::RdmaUnused("auto and --user"))
            }
            TransportKind::Auto | TransportKind::Rdma | TransportKind::Hybrid => {
                Ok(rdma.settings().clone())
            }
            TransportKind::Tcp | TransportKind::Udp | TransportKind::Loopback => {
                Err(ValidationError::RdmaUnused(self.transport.word()))
            }
        }
    }

    pub(super) fn protection(&self) -> Protection {
        Protection::of(self.credentials.is_some(), self.insecure)
    }

    fn resolved_donors(&self) -> Result<Vec<ResolvedDonor>, ValidationError> {
        if self.donors.len() > DONORS_MAX {
            return Err(ValidationError::TooManyDonors {
                count: self.donors.len(),
            });
        }
        if self.transport == TransportKind::Loopback && !self.donors.is_empty() {
            return Err(ValidationError::LoopbackWithDonor);
        }
        let mut resolved: Vec<ResolvedDonor> = Vec::with_capacity(self.donors.len());
        for donor in &self.donors {
            let donor = resolved_donor(donor, self.transport, self.protection())?;
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
}

fn seconds(seconds: u32) -> Duration {
    Duration::from_secs(seconds.into())
}

fn checked_cpus(cpus: u32) -> Result<u8, ValidationError> {
    check_range("--cpus", cpus, 1, CPUS_MAX.into())?;
    Ok(u8::try_from(cpus).unwrap_or(CPUS_MAX))
}

/// Checks a donor, and resolves its name.
///
/// # Errors
///
/// If it cannot be used, or not with this transport, or not with this protection.
pub fn resolved_donor(
    donor: &Donor,
    transport: TransportKind,
    protection: Protection,
) -> Result<ResolvedDonor, ValidationError> {
    if donor.address.port() == 0 {
        return Err(ValidationError::PortZero {
            address: donor.address.clone(),
        });
    }
    if donor.fingerprint.is_some() && transport != TransportKind::Udp {
        return Err(ValidationError::FingerprintWithoutUdp {
            address: donor.address.clone(),
        });
    }
    check_named("donor", &donor.address, donor.name.as_ref(), protection)?;
    if protection == Protection::Credentials && donor.fingerprint.is_some() {
        let address = donor.address.clone();
        return Err(ValidationError::FingerprintWithCredentials { address });
    }
    if let Some(memory) = donor.memory {
        let least = ByteSize::from_bytes(PAGE_SIZE_BYTES);
        check_size("--donor memory=", memory, least)?;
    }
    Ok(ResolvedDonor {
        address: resolve_permitted("donor", &donor.address, protection != Protection::None)?,
        name: donor.address.clone(),
        memory: donor.memory,
        fingerprint: donor.fingerprint,
        identity: donor.name.clone(),
        zone: donor.zone.clone(),
    })
}
