//! `ssi-hv run`.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow};
use memory_fabric::fabric::{
    DonorAddress, Fabric, FabricConfig, FabricError, NodeSummary, SPIN_DEFAULT, Tier, TransportKind,
};
use memory_fabric::guest_memory::GuestMemory;
use memory_fabric::page::{PAGE_SHIFT, PageIndex, PageRange};
use memory_fabric::stats::{PagerStats, Summary};
use ssi_hv::config::{Prefetching, RunConfig, Transport, ValidatedRun};
use ssi_hv::exit::ExitCode;
use ssi_hv::machine::{
    ConsoleConfig, Machine, MachineConfig, MachineHandle, Outcome, command_line,
    guest_memory_ranges,
};
use ssi_hv::report::{
    FaultKind, Faults, Guest, Host, Node, Percentiles, Prefetch, Report, ReportFile, Role, Stages,
    TransportUsed,
};
use ssi_hv::size::ByteSize;
use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::{GuestMemoryMmap, GuestRegionMmap};

use super::Failure;
use super::supervisor::Supervisor;
use super::working_set::WorkingSet;

/// Boots a guest and stays until it ends.
pub fn run(config: &RunConfig) -> Result<ExitCode, Failure> {
    let started = Instant::now();
    let wanted = config.validate()?;
    let report_file = config
        .report
        .as_deref()
        .map(ReportFile::prepare)
        .transpose()?;
    let supervisor = Supervisor::start(report_file.clone()).context("cannot watch for signals")?;

    let mut report = Report::new(Host::detect());
    report.guest = Guest {
        memory_bytes: wanted.memory.bytes(),
        cpus: config.cpus,
        kernel: Some(wanted.kernel.display().to_string()),
    };
    let mut result = boot(config, &wanted, &supervisor, &mut report, started);
    let (end, errors) = supervisor.finish();
    report.errors = errors;
    if let Some(end) = end {
        // Whatever came of it inside, this is why.
        result = match end.error {
            Some(error) => Err(Failure::new(end.code, anyhow!(error))),
            None => Ok(end.code),
        };
    }
    let code = match &result {
        Ok(code) => *code,
        Err(failure) => {
            report.errors.push(failure.one_line());
            failure.code()
        }
    };
    report.outcome = code.name().to_owned();
    report.exit_code = code.code();
    if let Some(file) = report_file {
        let written = file.write(&report);
        // A failure of the run matters more than that of its report.
        if result.is_ok() {
            written?;
        } else if let Err(error) = written {
            tracing::error!("{:#}", anyhow!(error));
        }
    }
    result
}

/// Boots the guest and runs it to its end; fills the report with what was seen.
fn boot(
    config: &RunConfig,
    wanted: &ValidatedRun,
    supervisor: &Arc<Supervisor>,
    report: &mut Report,
    started: Instant,
) -> Result<ExitCode, Failure> {
    let mut fabric_config = fabric_config(config, wanted)?;
    let working_set = WorkingSet::prepare(config, wanted, &mut fabric_config)?;
    let fabric = Fabric::start(&fabric_config, &supervisor.observer()).map_err(donors_failed)?;
    tracing::info!("{}", describe(&fabric, wanted));
    let machine_config = MachineConfig {
        kernel: wanted.kernel.clone(),
        initrd: wanted.initrd.clone(),
        cmdline: command_line(&config.cmdline),
        cpus: u8::try_from(config.cpus).context("--cpus")?,
    };
    let memory = guest_memory(fabric.memory(), wanted.memory)?;
    let machine = Machine::new(&machine_config, memory, ConsoleConfig::stdio())?;
    let handle = machine.handle();
    let prepared = started.elapsed();
    let outcome = if supervisor.attend(handle.clone()) {
        machine.run()
    } else {
        Ok(Outcome::Stopped)
    };
    if let Some(error) = working_set.save(&fabric) {
        // The guest has run all the same.
        supervisor.note(error);
    }
    finish(fabric, &handle, prepared, report);
    Ok(match outcome? {
        Outcome::Shutdown => ExitCode::Success,
        Outcome::Reboot => ExitCode::GuestReboot,
        // The console's escape sequence; why else is for the supervisor to say.
        Outcome::Stopped => ExitCode::Interrupted,
        Outcome::Crash(detail) => {
            return Err(Failure::new(
                ExitCode::GuestCrash,
                anyhow!("the guest crashed: {detail}"),
            ));
        }
    })
}

fn fabric_config(config: &RunConfig, wanted: &ValidatedRun) -> Result<FabricConfig, Failure> {
    let ram = guest_memory_ranges(wanted.memory.bytes())
        .into_iter()
        .map(|(start, bytes)| {
            let first = PageIndex::containing(start.0)?;
            Some(PageRange::new(
                first,
                u32::try_from(bytes >> PAGE_SHIFT).ok()?,
            ))
        });
    Ok(FabricConfig {
        vm: format!("ssi-hv-{}", std::process::id()),
        ram: ram
            .collect::<Option<_>>()
            .context("guest memory is above the limit of 16 TiB")?,
        local_bytes: wanted.local_memory.bytes(),
        donors: wanted
            .donors
            .iter()
            .map(|donor| DonorAddress {
                address: donor.address,
                bytes: donor.memory.map(ByteSize::bytes),
            })
            .collect(),
        transport: match config.transport {
            Transport::Loopback => TransportKind::Loopback,
            _ => TransportKind::Tcp,
        },
        checksum: config.checksum,
        grace: wanted.donor_grace,
        prefetch: config.prefetch == Prefetching::Auto,
        record: config.record_working_set.is_some(),
        replay: Vec::new(),
        spin: SPIN_DEFAULT,
        without_continue_write_protected: false,
    })
}

/// Donors that do not lend, or too little, have an exit code of their own.
fn donors_failed(error: FabricError) -> Failure {
    match &error {
        FabricError::Donor { .. } | FabricError::Plan(_) => {
            Failure::new(ExitCode::DonorUnavailable, error)
        }
        _ => error.into(),
    }
}

/// Where the guest's memory is, and how it travels, in a line.
fn describe(fabric: &Fabric, wanted: &ValidatedRun) -> String {
    let plan = fabric.plan();
    let size = |pages: u64| ByteSize::from_bytes(pages << PAGE_SHIFT);
    if plan.cache_pages == 0 {
        return format!("memory {}, all of it local", wanted.memory);
    }
    let transport = transport_used(fabric);
    let round_trip = fabric.round_trip().map_or(String::new(), |time| {
        format!(", round trip {} us", time.as_micros())
    });
    format!(
        "memory {}: {} at home here, {} on {} donor(s) with a cache of {}; transport {}, tier {}{round_trip}",
        wanted.memory,
        size(plan.home_here_pages),
        size(
            plan.layout
                .extents()
                .iter()
                .map(|e| u64::from(e.pages.count))
                .sum::<u64>()
                - plan.home_here_pages
        ),
        fabric.nodes().len() - 1,
        size(plan.cache_pages),
        transport.kind,
        transport.tier,
    )
}

fn transport_used(fabric: &Fabric) -> TransportUsed {
    let (kind, tier) = match (fabric.plan().cache_pages, fabric.transport()) {
        (0, _) => ("none", "none"),
        (_, TransportKind::Loopback) => ("loopback", "none"),
        (_, TransportKind::Tcp) => {
            let tier = Tier::of(fabric.round_trip().unwrap_or(Duration::MAX));
            ("tcp", tier.name())
        }
    };
    TransportUsed {
        kind: kind.to_owned(),
        tier: tier.to_owned(),
    }
}

/// The guest view as KVM and the device models see it.
fn guest_memory(memory: &GuestMemory, size: ByteSize) -> Result<GuestMemoryMmap, Failure> {
    let mut regions = Vec::new();
    for (start, bytes) in guest_memory_ranges(size.bytes()) {
        let offset = usize::try_from(start.0).context("guest address")?;
        let bytes = usize::try_from(bytes).context("guest memory")?;
        if offset
            .checked_add(bytes)
            .is_none_or(|end| end > memory.bytes())
        {
            return Err(anyhow!("guest memory at {:#x} is not in the fabric", start.0).into());
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
        let region = region.context("cannot use guest memory")?;
        regions.push(GuestRegionMmap::new(region, start).context("guest memory overflows")?);
    }
    Ok(GuestMemoryMmap::from_regions(regions).context("guest memory overlaps")?)
}

/// Ends the fabric and reports what it did.
fn finish(fabric: Fabric, machine: &MachineHandle, prepared: Duration, report: &mut Report) {
    report.boot.to_init_ms = machine.time_to_init().map(|time| millis(prepared + time));
    report.transport = transport_used(&fabric);
    let stats = Arc::clone(fabric.stats());
    let nodes = if machine.all_vcpus_ended() {
        fabric.shutdown()
    } else {
        // A vCPU waits for a page. Were its userfaultfd closed it would go on with zeros;
        // so it stays as it is until the process ends, which is now.
        let nodes = fabric.nodes();
        std::mem::forget(fabric);
        nodes
    };
    report.nodes = nodes.iter().map(node).collect();
    report.evictions = stats.evictions.get();
    report.faults = faults(&stats);
    report.prefetch = Prefetch {
        issued: stats.prefetch_issued.get(),
        used: stats.prefetch_used.get(),
        wasted: stats.prefetch_wasted.get(),
        late: stats.prefetch_late.get(),
    };
    tracing::debug!(
        replayed = stats.replayed.get(),
        stalled_for_memory = stats.stalled_for_memory.get(),
        evictions_clean = stats.evictions_clean.get(),
        evictions_zero = stats.evictions_zero.get(),
        evictions_cancelled = stats.evictions_cancelled.get(),
        write_protect = stats.write_protect.summary().count,
        "pager"
    );
}

fn node(summary: &NodeSummary) -> Node {
    Node {
        id: summary.id.0.into(),
        role: if summary.id.0 == 0 {
            Role::Compute
        } else {
            Role::Donor
        },
        address: summary.address.map(|address| address.to_string()),
        memory_bytes: summary.memory_bytes,
        pages_fetched: summary.pages_fetched,
        pages_written_back: summary.pages_written_back,
    }
}

fn faults(stats: &PagerStats) -> Faults {
    let kind = |summary: Summary| FaultKind {
        count: summary.count,
        latency_us: percentiles(&summary),
    };
    Faults {
        remote: kind(stats.remote.summary()),
        zero: kind(stats.zero.summary()),
        minor: kind(stats.minor.summary()),
        stages: Stages {
            queue: percentiles(&stats.queue.summary()),
            fetch: percentiles(&stats.fetch.summary()),
            install: percentiles(&stats.install.summary()),
        },
    }
}

/// Percentiles in microseconds.
pub fn percentiles(summary: &Summary) -> Percentiles {
    let us = |time: Duration| time.as_secs_f64() * 1e6;
    Percentiles {
        p50: us(summary.p50),
        p90: us(summary.p90),
        p99: us(summary.p99),
        p999: us(summary.p999),
        max: us(summary.max),
    }
}

fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}
