//! Remote faults, caused by threads that access the guest view as vCPUs do.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::cli::bench::BenchFaultConfig;
use anyhow::{Context as _, Result};
use fabric_transport::stream::Carrier;
use memory_fabric::donor::server::{Donor, DonorConfig};
use memory_fabric::fabric::{
    Compression, DonorAddress, Fabric, FabricConfig, FabricEvent, FabricObserver, LocalUse,
    OnLostMemory, Redundancy, SPIN_DEFAULT, Sealing, TransportKind,
};
use memory_fabric::link::LinkEvent;
use memory_fabric::page::{PAGE_SIZE, PageIndex, PageRange};
use memory_fabric::rdma::DeviceChoice;
use memory_fabric::stats::Histogram;
use memory_fabric::{BLOCK_BYTES, NodeIds};
use ssi_hv::exit::ExitCode;
use ssi_hv::forced_end;
use ssi_hv::host;
use ssi_hv::logging;
use ssi_hv::progress::Progress;
use ssi_hv::report::Stages;

use super::floor::{self, Bare};
use super::members::Members;
use super::placement::Placement;
use super::random::next;
use super::view::View;
use super::write_back::WriteBack;
use super::{FaultBench, Floor, ROUNDS, Series, median, micros, percentiles, usage};

/// Faster accesses did not fault: serving a fault takes longer than this.
pub(super) const FAULT_MIN: Duration = Duration::from_micros(2);

/// One round of touches, and the CPU time that each fault took.
pub(super) struct Round {
    pub(super) times: Histogram,
    pub(super) cpu_us: f64,
}

impl Round {
    pub(super) fn of(
        config: &BenchFaultConfig,
        view: &View,
        round: u32,
        tally: &Tally,
    ) -> Result<Self> {
        let before = usage::processor_time()?;
        let times = touch(config, view, round, tally);
        let took = usage::processor_time()?.saturating_sub(before);
        // Counts of faults stay far below 2^52.
        #[allow(clippy::cast_precision_loss)]
        let count = times.summary().count.max(1) as f64;
        Ok(Self {
            times,
            cpu_us: micros(took) / count,
        })
    }
}

/// What is measured in turns with the rounds.
pub(super) trait Beside {
    /// Measures its part of a round, before or after `plain`, whose result it returns.
    fn round(&mut self, round: u32, plain: &mut dyn FnMut() -> Result<Round>) -> Result<Round>;
}

/// Measures remote faults, and in each round what is `beside` them, if there is something.
pub(super) fn measure(
    config: &BenchFaultConfig,
    mut beside: Option<&mut dyn Beside>,
) -> Result<FaultBench> {
    let loopback = config.transport == TransportKind::Loopback;
    let placement = Placement::new()?;
    placement.others()?;
    let members = config.tls.then(Members::create).transpose()?;
    let donors = if loopback {
        Vec::new()
    } else {
        start_donors(config, members.as_ref())?
    };
    placement.pager()?;
    let fabric = start_fabric(config, &donors, members.as_ref(), Sealing::Off)?;
    placement.others()?;
    let view = View::of(&fabric);
    view.fill();

    let tally = Tally::default();
    let (mut ours, mut bare) = (Series::default(), Series::default());
    let (mut our_cpu, mut bare_cpu) = (Vec::new(), Vec::new());
    let mut busy = Duration::ZERO;
    let carrier = carrier(config, members.as_ref());
    let of_floor: Vec<_> = donors
        .iter()
        .map(|donor| (donor.address(), &carrier))
        .collect();
    let progress = Progress::rounds(ROUNDS);
    for round in 0..ROUNDS {
        let mut bare_pager = Bare::new(&of_floor, config.checksum, config.memory.bytes())?;
        let floor = bare_pager.touch(config.threads, &placement)?;
        bare_pager.release()?;
        bare.add(&floor.times);
        bare_cpu.push(micros(floor.cpu));
        let mut plain = || {
            let started = Instant::now();
            let measured = Round::of(config, &view, round, &tally);
            busy += started.elapsed();
            measured
        };
        let measured = match &mut beside {
            Some(beside) => beside.round(round, &mut plain)?,
            None => plain()?,
        };
        ours.add(&measured.times);
        our_cpu.push(measured.cpu_us);
        progress.step();
    }
    drop(progress);

    let stats = Arc::clone(fabric.stats());
    fabric.shutdown();
    let all = ours.all.summary();
    let ratio = |of: fn(&memory_fabric::stats::Summary) -> Duration| {
        let rounds = ours.rounds.iter().zip(&bare.rounds);
        median(
            rounds
                .map(|(ours, bare)| micros(of(ours)) / micros(of(bare)))
                .collect(),
        )
    };
    let below = ours.rounds.iter().zip(&bare.rounds);
    let below = below.filter(|(ours, bare)| bare.p50 <= ours.p50).count();
    let cpu_ratios = our_cpu
        .iter()
        .zip(&bare_cpu)
        .map(|(ours, bare)| ours / bare);
    let ratio_cpu = median(cpu_ratios.collect());
    // Counts of faults stay far below 2^52.
    #[allow(clippy::cast_precision_loss)]
    let per_second = all.count as f64 / busy.as_secs_f64();
    Ok(FaultBench {
        schema: ssi_hv::report::SCHEMA,
        host: host::detect(),
        memory_bytes: config.memory.bytes(),
        local_memory_bytes: config.local_memory.bytes(),
        threads: config.threads,
        donors: u32::try_from(donors.len())?,
        transport: match config.transport {
            TransportKind::Loopback => "loopback",
            TransportKind::Udp => "udp",
            TransportKind::Auto
            | TransportKind::Tcp
            | TransportKind::Rdma
            | TransportKind::Hybrid
                if config.tls =>
            {
                "tls"
            }
            TransportKind::Auto
            | TransportKind::Tcp
            | TransportKind::Rdma
            | TransportKind::Hybrid => "tcp",
        },
        rounds: ROUNDS,
        cpus: placement,
        faults: all.count,
        faults_per_second: per_second,
        latency_us: percentiles(&all),
        pager_latency_us: percentiles(&stats.remote.summary()),
        stages: Stages {
            queue: percentiles(&stats.queue.summary()),
            fetch: percentiles(&stats.fetch.summary()),
            install: percentiles(&stats.install.summary()),
        },
        cpu_us: median(our_cpu),
        floor: Floor {
            latency_us: percentiles(&bare.all.summary()),
            cpu_us: median(bare_cpu),
            rounds_below: u32::try_from(below)?,
        },
        ratio_p50: ratio(|summary| summary.p50),
        ratio_p99: ratio(|summary| summary.p99),
        ratio_cpu,
        write_back: WriteBack::of(&stats, Redundancy::None),
        sealed: None,
        tls: None,
        redundant: None,
        verified_bytes: tally.verified.load(Ordering::Relaxed),
        corrupt_bytes: tally.corrupt.load(Ordering::Relaxed),
    })
}

/// Returns the carrier of the floor's connection.
fn carrier(config: &BenchFaultConfig, members: Option<&Members>) -> Carrier {
    if let Some(members) = members {
        return members.carrier();
    }
    match config.transport {
        TransportKind::Udp => Carrier::Udp(None),
        _ => Carrier::Tcp,
    }
}

/// A donor of this process, on loopback over TCP.
pub(super) fn donor(memory_bytes: u64) -> DonorConfig {
    DonorConfig {
        credentials: None,
        listen: ([127, 0, 0, 1], 0).into(),
        memory_bytes,
        lease_duration_max: Duration::from_secs(120),
        spin: SPIN_DEFAULT,
        rdma: DeviceChoice::None,
        allow: None,
    }
}

pub(super) fn start_donors(
    config: &BenchFaultConfig,
    members: Option<&Members>,
) -> Result<Vec<Donor>> {
    let (count, memory) = (config.donor_count(), config.memory.bytes());
    let share = match config.redundancy() {
        Redundancy::None => memory.div_ceil(count.max(1).into()),
        // No donor has more than one copy of a page.
        Redundancy::Copies | Redundancy::Stripes(_) => memory,
    };
    // Whole blocks are lent.
    let memory_bytes = share.next_multiple_of(BLOCK_BYTES) + floor::bytes(memory);
    let donor = DonorConfig {
        credentials: members.map(|members| Arc::clone(&members.node)),
        ..donor(memory_bytes)
    };
    (0..count).map(|_| Ok(Donor::start(&donor)?)).collect()
}

/// Ends the process when memory is lost, or a donor that has a part of it.
pub(super) fn observer() -> FabricObserver {
    Arc::new(|event| {
        let reason = match event {
            FabricEvent::Failed(reason) => format!("the pager failed: {reason}"),
            FabricEvent::Link(LinkEvent::Lost { node, reason }) => {
                format!("the donor at {node} is lost: {reason}")
            }
            // What is measured then is memory with fewer copies or pieces.
            FabricEvent::Degraded { node, reason } => {
                format!("the donor at {node} is not used any more: {reason}")
            }
            // No memory here that may be lost.
            FabricEvent::Link(_)
            | FabricEvent::Poisoned(_)
            | FabricEvent::AwaitedNoMore { .. }
            | FabricEvent::Repaired
            | FabricEvent::Drained(_)
            | FabricEvent::Rebalanced(_) => return,
        };
        // Threads wait for pages that will never arrive.
        logging::report_failure(ExitCode::HostError, &reason);
        forced_end::at_once(ExitCode::HostError);
    })
}

/// The memory of a VM of which a part may be local, and the rest is at donors, over TCP.
pub(super) fn plain(
    memory_bytes: u64,
    local_bytes: u64,
    donors: Vec<DonorAddress>,
) -> Result<FabricConfig> {
    let pages = u32::try_from(memory_bytes / PAGE_SIZE as u64).context("--memory")?;
    Ok(FabricConfig {
        vm: "bench".to_owned(),
        // The loopback slab counts as a donor.
        nodes: NodeIds::in_order(donors.len().max(1)),
        ram: vec![PageRange::new(PageIndex::new(0), pages)],
        local_bytes,
        local_use: LocalUse::Cache,
        donors,
        redundancy: Redundancy::None,
        transport: TransportKind::Tcp,
        rdma: Arc::default(),
        credentials: None,
        checksum: false,
        seal: Sealing::Off,
        compression: Compression::Auto,
        grace: Duration::from_secs(5),
        on_lost_memory: OnLostMemory::End,
        prefetch: true,
        record: false,
        replay: Vec::new(),
        spin: SPIN_DEFAULT,
        huge_pages: false,
        hotplug: None,
    })
}

pub(super) fn start_fabric(
    config: &BenchFaultConfig,
    donors: &[Donor],
    members: Option<&Members>,
    seal: Sealing,
) -> Result<Fabric> {
    let donors = donors.iter().map(|donor| DonorAddress {
        name: members.map(|members| members.node_name.clone()),
        address: donor.address(),
        fingerprint: None,
        zone: None,
        bytes: None,
    });
    let (memory, local) = (config.memory.bytes(), config.local_memory.bytes());
    let config = FabricConfig {
        transport: match config.transport {
            TransportKind::Loopback => TransportKind::Loopback,
            TransportKind::Udp => TransportKind::Udp,
            _ => TransportKind::Tcp,
        },
        credentials: members.map(|members| Arc::clone(&members.vm)),
        checksum: config.checksum,
        seal,
        compression: config.compression,
        redundancy: config.redundancy(),
        ..plain(memory, local, donors.collect())?
    };
    Ok(Fabric::start(&config, &observer())?)
}

/// The totals of all threads.
#[derive(Debug, Default)]
pub(super) struct Tally {
    pub(super) faults: AtomicU64,
    pub(super) verified: AtomicU64,
    pub(super) corrupt: AtomicU64,
}

/// Accesses random pages from all threads for one round. Records the accesses that waited for a
/// page from elsewhere.
fn touch(config: &BenchFaultConfig, view: &View, round: u32, tally: &Tally) -> Histogram {
    let times = Histogram::new();
    let started = Instant::now();
    let limit = Duration::from_secs(config.seconds.into()) / ROUNDS;
    let faults_limit = config
        .faults
        .map(|all| all * u64::from(round + 1) / u64::from(ROUNDS));
    std::thread::scope(|scope| {
        for thread in 0..config.threads {
            let times = &times;
            scope.spawn(move || {
                let mut random = u64::from(round * 1000 + thread + 1);
                loop {
                    let enough = match faults_limit {
                        Some(faults) => tally.faults.load(Ordering::Relaxed) >= faults,
                        None => started.elapsed() >= limit,
                    };
                    if enough {
                        break;
                    }
                    let page = next(&mut random) % view.pages;
                    let is_here = view.is_here(page);
                    let before = Instant::now();
                    view.word(page, 0).load(Ordering::Relaxed);
                    let took = before.elapsed();
                    if took >= FAULT_MIN && !is_here.is_ok_and(|is_here| is_here) {
                        times.record(took);
                        tally.faults.fetch_add(1, Ordering::Relaxed);
                        tally
                            .verified
                            .fetch_add(PAGE_SIZE as u64, Ordering::Relaxed);
                        tally
                            .corrupt
                            .fetch_add(view.corrupt_bytes(page), Ordering::Relaxed);
                    }
                }
            });
        }
    });
    times
}
