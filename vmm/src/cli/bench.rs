//! `ssi-hv bench`: what is measured.

mod clients;
mod fault;

use std::net::SocketAddr;

use clap::{Args, Subcommand, ValueEnum};
use memory_fabric::fabric::TransportKind;
use ssi_hv::config::address::HostPort;
use ssi_hv::config::choice::Choice as _;
use ssi_hv::config::validation::{ValidationError, check_range, check_size, resolve_permitted};
use ssi_hv::config::{GUEST_MEMORY_MAX, LOCAL_MEMORY_MIN};
use ssi_hv::size::ByteSize;

pub use self::clients::BenchClientsConfig;
pub use self::fault::BenchFaultConfig;
use super::words;

/// Longest measurement, in seconds.
pub const BENCH_SECONDS_MAX: u32 = 3600;

/// The benchmarks.
#[derive(Clone, Debug, PartialEq, Subcommand)]
pub enum BenchCommand {
    /// Latency of remote faults, beside the floor that no pager can beat
    #[command(
        after_help = "Threads of this process touch memory whose pages are on donors, over loopback; no KVM is needed. The floor is measured in the same rounds on the same CPUs: the same accesses over a pager that only requests a page from the donor and copies it into place. Ratios are medians over the rounds."
    )]
    Fault(BenchFaultConfig),
    /// Latency, message rate and throughput of each transport, from 64 B to 1 MiB
    #[command(
        after_help = "Without --donor the donor is in this process, over loopback. Each transport that both ends support is measured alone, as at the start of a VM; every byte of the round trips is verified. Comparable with perftest: p50 with the typical latency of ib_read_lat, the stream with ib_read_bw."
    )]
    Transport(BenchTransportConfig),
    /// Scans, several threads and donors, writes, stalls, unchanged pages, and the cost of growth
    #[command(
        after_help = "scan: pages in order and in strides, beside the raw stream of the transport and a floor with what no pager can leave out. threads: faults a second of 1 to 8 threads and 1 to 4 donors, and their processor time. writes: a working set that is written, with decreasing parts of it local. stalls: how long two writers wait for a page while memory is evicted under them. unchanged: writes of the value that a page has already, beside writes of another, and the time of a page's fingerprint. growth: `bench start` from 1 GiB to 4 TiB. Medians over interleaved rounds; every byte is verified."
    )]
    Memory(BenchMemoryConfig),
    /// Set-up, memory and threads of a node for many clients that keep leases
    #[command(
        after_help = "The node is a process of its own, reached over loopback; clients are connections of this process, made and renewed by the code of VMs, on 8 threads. Each leases one page. This process and the node need an open file for each client, and raise the limit as far as it is allowed."
    )]
    Clients(BenchClientsConfig),
    /// Time and memory to set up the memory of a guest
    #[command(
        after_help = "The donor is in this process. Nearly all of the memory is never touched, so it may be far more than the host has."
    )]
    Start(BenchStartConfig),
    /// Memory that several processes share coherently, beside floors of the same run
    #[command(
        after_help = "Each node is a process of this machine with threads that touch their view of one memory; messages and pages travel over TCP loopback, or by RDMA with --transport rdma, and no KVM is needed. A floor is the same system calls on two nodes, by threads that never sleep, and nothing else. Then all nodes work at once; counters are compared with what was added."
    )]
    Coherence(BenchCoherenceConfig),
    /// A node of `bench coherence`, which starts it
    #[command(hide = true)]
    CoherenceNode,
}

/// Limit of nodes of `ssi-hv bench coherence`: as many as share a memory.
pub const BENCH_NODES_MAX: u32 = 16;

/// The configuration of `ssi-hv bench coherence`.
#[derive(Clone, Debug, PartialEq, Args)]
pub struct BenchCoherenceConfig {
    /// Processes that share the memory
    #[arg(long, value_name = "N", default_value_t = 2)]
    pub nodes: u8,

    /// How long the nodes work at once, all kinds of work together
    #[arg(long, value_name = "N", default_value_t = 6)]
    pub seconds: u32,

    /// Measure the same over mutual TLS as well, in turns
    #[arg(long)]
    pub tls: bool,

    /// Measure pages that two nodes keep at a donor as well
    #[arg(long)]
    pub donor: bool,

    /// tcp, or rdma by a device of this host; auto, hybrid, udp and loopback are for donors
    #[arg(
        long,
        value_name = "KIND",
        value_parser = words::<TransportKind>(),
        default_value = "tcp",
        hide_possible_values = true
    )]
    pub transport: TransportKind,

    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

impl BenchCoherenceConfig {
    /// Validates the values.
    ///
    /// # Errors
    ///
    /// Returns what is wrong, with its limit and remedy.
    pub fn validate(&self) -> Result<(), ValidationError> {
        check_range("--nodes", self.nodes.into(), 2, BENCH_NODES_MAX)?;
        match self.transport {
            TransportKind::Tcp => {}
            TransportKind::Rdma if self.tls => return Err(ValidationError::RdmaWithTls),
            TransportKind::Rdma => {}
            other => return Err(ValidationError::NotBetweenNodes(other.word())),
        }
        check_range("--seconds", self.seconds, 1, BENCH_SECONDS_MAX)
    }
}

/// Limit of `--round-trips`: enough for the 99.99th percentile.
const ROUND_TRIPS_MAX: u32 = 100_000;

/// The configuration of `ssi-hv bench transport`.
#[derive(Clone, Debug, PartialEq, Args)]
pub struct BenchTransportConfig {
    /// A running node that lends 16 MiB for the benchmark
    #[arg(long, value_name = "HOST:PORT")]
    pub donor: Option<HostPort>,

    /// What to measure
    #[arg(
        long,
        value_name = "KIND",
        value_parser = words::<TransportKind>(),
        default_value = "auto",
        hide_possible_values = true,
        help = "auto (all available), tcp, udp, rdma, hybrid (tcp and rdma) or loopback"
    )]
    pub transport: TransportKind,

    /// Time limit per transport
    #[arg(long, value_name = "N", default_value_t = 5)]
    pub seconds: u32,

    /// Limit of round trips of each size, within the time
    #[arg(long, value_name = "N", default_value_t = 10_000)]
    pub round_trips: u32,

    /// Allow a donor beyond this host
    #[arg(long)]
    pub insecure: bool,

    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

impl BenchTransportConfig {
    /// Validates the values and resolves the donor's name.
    ///
    /// # Errors
    ///
    /// Returns what is wrong, with its limit and remedy.
    pub fn validate(&self) -> Result<Option<SocketAddr>, ValidationError> {
        check_range("--seconds", self.seconds, 1, BENCH_SECONDS_MAX)?;
        check_range("--round-trips", self.round_trips, 1, ROUND_TRIPS_MAX)?;
        if self.transport == TransportKind::Loopback && self.donor.is_some() {
            return Err(ValidationError::LoopbackWithDonor);
        }
        let Some(donor) = &self.donor else {
            return Ok(None);
        };
        if donor.port() == 0 {
            return Err(ValidationError::PortZero {
                address: donor.clone(),
            });
        }
        resolve_permitted("donor", donor, self.insecure).map(Some)
    }
}

/// A part of `ssi-hv bench memory`.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub enum BenchMeasure {
    /// Sequential and strided scans.
    Scan,
    /// Several threads and donors.
    Threads,
    /// A working set that is written.
    Writes,
    /// The longest wait of a single write.
    Stalls,
    /// Writes that change nothing.
    Unchanged,
    /// The cost of growth.
    Growth,
}

/// The configuration of `ssi-hv bench memory`.
#[derive(Clone, Debug, PartialEq, Args)]
pub struct BenchMemoryConfig {
    /// Memory that is touched; a quarter of it is local, except in `writes` and `growth`
    #[arg(long, value_name = "SIZE", default_value = "128M")]
    pub memory: ByteSize,

    /// What to measure
    #[arg(
        long,
        value_name = "WHAT",
        value_enum,
        hide_possible_values = true,
        help = "scan, threads, writes, stalls, unchanged or growth; default: all"
    )]
    pub measure: Vec<BenchMeasure>,

    /// How long `stalls` writes
    #[arg(long, value_name = "N", default_value_t = 60)]
    pub seconds: u32,

    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Minimum memory of `bench memory`: a quarter of it is the smallest local memory.
pub const BENCH_QUARTERED_MEMORY_MIN: ByteSize = ByteSize::from_bytes(LOCAL_MEMORY_MIN.bytes() * 4);
/// Limit of `bench memory`: all of it is touched, several times in parallel.
pub const BENCH_QUARTERED_MEMORY_MAX: ByteSize = ByteSize::from_mib(64 << 10);
/// Minimum memory of `bench start`: more than its local memory.
pub const BENCH_START_MEMORY_MIN: ByteSize = ByteSize::from_mib(512);

impl BenchMemoryConfig {
    /// Validates the combination of values.
    ///
    /// # Errors
    ///
    /// Returns what is wrong, with its limit and remedy.
    pub fn validate(&self) -> Result<(), ValidationError> {
        check_size("--memory", self.memory, BENCH_QUARTERED_MEMORY_MIN)?;
        check_most("--memory", self.memory, BENCH_QUARTERED_MEMORY_MAX)?;
        check_range("--seconds", self.seconds, 1, BENCH_SECONDS_MAX)
    }
}

/// The configuration of `ssi-hv bench start`.
#[derive(Clone, Debug, PartialEq, Args)]
pub struct BenchStartConfig {
    /// Memory of the guest
    #[arg(long, value_name = "SIZE", default_value = "1G")]
    pub memory: ByteSize,

    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

impl BenchStartConfig {
    /// Validates the combination of values.
    ///
    /// # Errors
    ///
    /// Returns what is wrong, with its limit and remedy.
    pub fn validate(&self) -> Result<(), ValidationError> {
        check_size("--memory", self.memory, BENCH_START_MEMORY_MIN)?;
        check_most("--memory", self.memory, GUEST_MEMORY_MAX)
    }
}

fn check_most(flag: &'static str, size: ByteSize, limit: ByteSize) -> Result<(), ValidationError> {
    if size > limit {
        return Err(ValidationError::TooLarge { flag, size, limit });
    }
    Ok(())
}
