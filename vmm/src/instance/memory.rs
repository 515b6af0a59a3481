//! The guest's memory: what is asked of the fabric, the connection to donors, the view of KVM and
//! devices, and the return of leases.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use fabric_identity::{Role, SharedCredentials};
use memory_fabric::NodeIds;
use memory_fabric::fabric::{
    DonorAddress, DonorShares, Fabric, FabricConfig, FabricError, LocalUse, NodeSummary,
    Redundancy, SPIN_DEFAULT, TransportKind,
};
use memory_fabric::guest_memory::GuestMemory;
use memory_fabric::link::rdma::RdmaLinkError;
use memory_fabric::page::{PAGE_SHIFT, PageIndex, PageRange};
use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::{GuestAddress, GuestMemoryMmap, GuestRegionMmap};

use super::run_error::RunError;
use super::supervisor::Supervisor;
use crate::config::name::called;
use crate::config::{Numa, ResolvedDonor, RunConfig};
use crate::credentials;
use crate::exit::ExitCode;
use crate::failure::Failure;
use crate::machine::{all_memory_ranges, guest_memory_ranges, hotplug_start};
use crate::progress::Followed;
use crate::size::ByteSize;

/// What the fabric is asked for; `donors` replaces those of the configuration, if some of these
/// were drained in an earlier boot.
pub fn fabric_config(
    config: &RunConfig,
    donors: Option<Vec<DonorAddress>>,
) -> Result<FabricConfig, Failure> {
    let donors = donors.unwrap_or_else(|| configured_donors(config));
    let pages = |(start, bytes): (GuestAddress, u64)| {
        let first = PageIndex::containing(start.0)?;
        let count = u32::try_from(bytes >> PAGE_SHIFT).ok()?;
        Some(PageRange::new(first, count))
    };
    let memory = config.memory.bytes();
    let added = config.hotplug_memory.map(ByteSize::bytes);
    // With other nodes, what may be added is shared from the start, as all other memory.
    let (ram, hotplug) = match (config.nodes.is_empty(), added) {
        (false, Some(added)) => (all_memory_ranges(memory, added), None),
        (_, added) => (
            guest_memory_ranges(memory),
            added.map(|bytes| (hotplug_start(memory), bytes)),
        ),
    };
    let ram = ram.into_iter().map(pages);
    let lenders = config.transport.lenders(donors.len());
    // Other nodes with vCPUs come before donors.
    let compute = config.nodes.len();
    let mut nodes = NodeIds::in_order(compute + lenders);
    nodes.donors.drain(..compute);
    Ok(FabricConfig {
        vm: called(config.name.as_ref(), std::process::id()),
        nodes,
        ram: ram.collect::<Option<_>>().ok_or(RunError::MemoryTooHigh)?,
        // With other nodes, the memory is shared instead of paged.
        local_bytes: if config.nodes.is_empty() {
            config.local_memory.bytes()
        } else {
            config.shared_memory().bytes()
        },
        local_use: match config.numa {
            Numa::Expose if config.nodes.is_empty() => LocalUse::Home,
            _ => LocalUse::Cache,
        },
        donors,
        redundancy: config.redundancy,
        transport: match (config.redundancy, config.transport) {
            // Adapters read and write whole pages.
            (Redundancy::Stripes(_), TransportKind::Auto) => TransportKind::Tcp,
            (_, transport) => transport,
        },
        rdma: Arc::new(config.rdma.clone()),
        credentials: credentials(config)?,
        checksum: config.checksum,
        seal: config.seal,
        compression: config.compression,
        grace: config.donor_grace,
        on_lost_memory: config.on_lost_memory,
        prefetch: config.prefetch,
        record: config.record_working_set.is_some(),
        replay: Vec::new(),
        spin: SPIN_DEFAULT,
        huge_pages: config.huge_pages,
        hotplug: match hotplug {
            Some(range) => Some(pages(range).ok_or(RunError::MemoryTooHigh)?),
            None => None,
        },
    })
}

fn configured_donors(config: &RunConfig) -> Vec<DonorAddress> {
    config.donors.iter().map(donor_address).collect()
}

/// Returns a donor as the fabric has it.
pub fn donor_address(donor: &ResolvedDonor) -> DonorAddress {
    DonorAddress {
        address: donor.address,
        name: donor.identity.clone(),
        fingerprint: donor.fingerprint,
        zone: donor.zone.as_ref().map(ToString::to_string),
        bytes: donor.memory.map(ByteSize::bytes),
    }
}

/// What donors are shown.
fn credentials(config: &RunConfig) -> Result<Option<Arc<SharedCredentials>>, Failure> {
    let directory = config.credentials.as_deref();
    let loaded = directory.map(|directory| credentials::load(directory, Role::Vm));
    loaded.transpose().map_err(Failure::usage)
}

/// Connects to the donors, of which `shares` has this host's part, which takes long if their memory is registered with adapters.
pub fn connect(
    config: &RunConfig,
    fabric: &FabricConfig,
    shares: Option<&DonorShares>,
    supervisor: &Arc<Supervisor>,
) -> Result<Fabric, Failure> {
    let donors = fabric.donors.len() as u64;
    let _progress =
        bars_are_ours(config).then(|| Followed::begin("connecting to donors", donors, "", || 0));
    let observer = supervisor.observer();
    let started = match shares {
        None => Fabric::start(fabric, &observer),
        Some(shares) => {
            let (fabric, wanted_bytes) = shares.of(0);
            Fabric::start_shared(&fabric, wanted_bytes, &observer)
        }
    };
    started.map_err(donors_failed)
}

/// Returns how the donors are divided among this host and the nodes that share the guest's memory;
/// `None` where nothing is shared. Nodes use donors by themselves unless that needs what only this
/// host has: the copies of all pages, or its RDMA settings.
pub fn donor_shares(config: &RunConfig, fabric: &FabricConfig) -> Option<DonorShares> {
    if config.nodes.is_empty() || fabric.donors.is_empty() {
        return None;
    }
    let here = config.local_memory.bytes();
    let lent = config.nodes.iter().map(|node| node.memory.bytes());
    let lent = std::iter::once(here).chain(lent).collect();
    let is_divided =
        fabric.redundancy == Redundancy::None && fabric.transport != TransportKind::Rdma;
    Some(DonorShares::new(fabric.clone(), lent, is_divided))
}

/// Returns the guest view for KVM and the device models: of so many bytes, and those that may be added.
pub fn guest_memory(
    memory: &GuestMemory,
    bytes: u64,
    hotplug_bytes: u64,
) -> Result<GuestMemoryMmap, Failure> {
    let mut regions = Vec::new();
    for (start, bytes) in all_memory_ranges(bytes, hotplug_bytes) {
        let offset = usize::try_from(start.0).map_err(RunError::memory)?;
        let bytes = usize::try_from(bytes).map_err(RunError::memory)?;
        if offset
            .checked_add(bytes)
            .is_none_or(|end| end > memory.bytes())
        {
            return Err(RunError::MemoryNotInFabric { address: start.0 }.into());
        }
        // SAFETY: the range is inside the guest view, as checked above. The view is mapped
        // readable and writable for as long as the fabric lives, and that is until the machine
        // has ended, or until the process ends.
        let region = unsafe {
            MmapRegionBuilder::new(bytes)
                .with_raw_mmap_pointer(memory.guest_view().add(offset))
                .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
                .with_mmap_flags(libc::MAP_SHARED | libc::MAP_NORESERVE)
                .build()
        };
        let region = region.map_err(RunError::memory)?;
        let region = GuestRegionMmap::new(region, start);
        regions.push(region.ok_or(RunError::MemoryTooHigh)?);
    }
    Ok(GuestMemoryMmap::from_regions(regions).map_err(RunError::memory)?)
}

/// Returns whether progress bars are allowed before the guest's output starts: `ssi-hv up` has its
/// own.
pub fn bars_are_ours(config: &RunConfig) -> bool {
    config.end_with_fd.is_none()
}

/// Returns whether progress bars are allowed during and after the guest's output, which that of a
/// command excludes.
pub fn has_terminal(config: &RunConfig) -> bool {
    bars_are_ours(config) && config.exec.is_none()
}

/// Stops the fabric: outstanding data is sent to the donors, then each lease is returned.
pub fn return_leases(config: &RunConfig, fabric: Fabric) -> Vec<NodeSummary> {
    let donors = fabric.nodes().len().saturating_sub(1) as u64;
    let returned = Arc::new(AtomicU64::new(0));
    let done = Arc::clone(&returned);
    let _progress = has_terminal(config).then(|| {
        let done = move || done.load(Ordering::Relaxed);
        // The guest's last line may be incomplete.
        let end = if config.console.is_none() { "\n" } else { "" };
        Followed::below(end, "giving memory back", donors, "leases", done)
    });
    fabric.shutdown_with_progress(|| {
        returned.fetch_add(1, Ordering::Relaxed);
    })
}

/// Assigns donors that do not lend enough their own exit code.
pub fn donors_failed(error: FabricError) -> Failure {
    match &error {
        FabricError::Donor { .. }
        | FabricError::Plan(_)
        | FabricError::Rdma(RdmaLinkError::Donor { .. } | RdmaLinkError::Late { .. }) => {
            Failure::new(ExitCode::DonorUnavailable, error)
        }
        FabricError::Authorities(_) => Failure::usage(error),
        _ => error.into(),
    }
}
