//! What the values of a configuration mean together, and what follows from them.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use devices::virtio::MEM_BLOCK_BYTES;
use memory_fabric::fabric::Fingerprint;

use super::{
    CPUS_MAX, DONOR_GRACE_SECONDS_MAX, DONORS_MAX, GUEST_MEMORY_MAX, GUEST_MEMORY_MIN,
    LOCAL_MEMORY_MIN, OnReboot, PAGE_SIZE_BYTES, RunConfig, Switch, TIMEOUT_SECONDS_MAX, Transport,
};
use crate::config::address::{Donor, HostPort};
use crate::config::validation::{
    ValidationError, check_cmdline, check_command, check_file, check_metrics, check_pinning,
    check_range, check_size, resolve_permitted,
};
use crate::machine::{VIRTIO_DEVICES_MAX, command_line};
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
        let given = command_line(&self.kernel_parameters()).len();
        check_cmdline(&self.cmdline, given.saturating_sub(self.cmdline.len()))?;
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

    /// The kernel parameters beside the default ones. Where memory can be added, a stock kernel takes
    /// what is plugged into use by itself, and so that it can be given back.
    #[must_use]
    pub fn kernel_parameters(&self) -> String {
        match self.hotplug_memory {
            Some(_) => format!("memhp_default_state=online_movable {}", self.cmdline),
            None => self.cmdline.clone(),
        }
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
