//! `ssi-hv bench transport`: each transport to one donor without other load.

mod one;
mod table;

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::sync::Arc;
use std::sync::mpsc;
use std::time::Duration;

use crate::cli::bench::BenchTransportConfig;
use anyhow::{Context as _, Result, anyhow};
use fabric_host::slices::request_short_slices;
use fabric_transport::rdma::probe::{registrations, staging_time};
use fabric_transport::stream::Carrier;
use memory_fabric::NodeId;
use memory_fabric::donor::pool::Pool;
use memory_fabric::donor::server::{Donor, DonorConfig};
use memory_fabric::fabric::{SPIN_DEFAULT, TransportKind};
use memory_fabric::link::rdma::RdmaLinkConfig;
use memory_fabric::link::{Leased, Link, LinkConfig, probe};
use memory_fabric::rdma::DeviceChoice;
use serde::Serialize;
use ssi_hv::exit::ExitCode;
use ssi_hv::host;
use ssi_hv::progress::{Progress, Steps};
use ssi_hv::report::{Host, Percentiles};

use super::{finish, micros};
use crate::commands::Failure;
use one::Contents;

/// Size of the lease.
const LEASE_BYTES: u64 = 16 << 20;
/// The measured sizes, bytes.
const SIZES: [u32; 8] = [
    64,
    256,
    1 << 10,
    4 << 10,
    16 << 10,
    64 << 10,
    256 << 10,
    1 << 20,
];
/// The registered sizes, bytes.
const REGISTERED: [usize; 4] = [256 << 10, 1 << 20, 16 << 20, 64 << 20];
/// Sizes of staging buffers in pages: for the connection for faults, and for prefetching.
const STAGING_PAGES: [usize; 2] = [64, 512];
/// Additional time of a transport for establishing its connections.
const SETUP_TIME_MAX: Duration = Duration::from_secs(30);

/// The results.
#[derive(Debug, Serialize)]
struct TransportBench {
    schema: u32,
    host: Host,
    /// Address of the donor; `null` when it is in this process.
    donor: Option<String>,
    lease_bytes: u64,
    transports: Vec<Measured>,
    skipped: Vec<Skipped>,
    /// `null` without an RDMA device of this host that reaches the donor.
    registration: Option<RegistrationCost>,
    verified_bytes: u64,
    corrupt_bytes: u64,
}

/// The results of one transport.
#[derive(Debug, Serialize)]
struct Measured {
    kind: &'static str,
    /// `null` without connections.
    connections: Option<Connections>,
    /// Pages written with 64 outstanding; `null` without writes.
    write_bytes_per_second: Option<f64>,
    sizes: Vec<OfSize>,
    /// Histogram of a page's round trips.
    page_histogram: Vec<Bar>,
    #[serde(skip)]
    verified_bytes: u64,
    #[serde(skip)]
    corrupt_bytes: u64,
}

/// Connections that were established one after the other.
#[derive(Debug, Serialize)]
struct Connections {
    count: usize,
    /// The first one: for RDMA it includes the donor's registration of the lease.
    first_ms: f64,
    /// The median of the others.
    others_ms: f64,
}

#[derive(Debug, Serialize)]
struct OfSize {
    bytes: u32,
    round_trips: u64,
    latency_us: Percentiles,
    /// p99 / p50.
    jitter: f64,
    /// Outstanding requests in the stream.
    in_flight: usize,
    messages_per_second: f64,
    stream_bytes_per_second: f64,
}

#[derive(Clone, Copy, Debug, Serialize)]
struct Bar {
    up_to_us: f64,
    count: u64,
}

#[derive(Debug, Serialize)]
struct Skipped {
    kind: &'static str,
    reason: String,
}

#[derive(Debug, Serialize)]
struct RegistrationCost {
    memory: Vec<RegistrationTime>,
    staging: Vec<StagingTime>,
}

#[derive(Debug, Serialize)]
struct RegistrationTime {
    bytes: usize,
    /// Registration of memory that was never accessed.
    first_us: f64,
    /// Registration of the same memory when it is allocated.
    again_us: f64,
    /// Deregistration.
    end_us: f64,
}

#[derive(Debug, Serialize)]
struct StagingTime {
    bytes: usize,
    made_us: f64,
}

/// Runs the requested measurements.
pub fn transport(config: &BenchTransportConfig) -> std::result::Result<ExitCode, Failure> {
    let donor = config.validate()?;
    let result = measure(config, donor)?;
    let wrong = (result.corrupt_bytes, "bytes");
    finish(&result, config.json, table::of, wrong)?;
    match (result.transports.is_empty(), result.skipped.first()) {
        (true, Some(skipped)) => {
            let error = anyhow!("{}: {}", skipped.kind, skipped.reason);
            Err(Failure::new(ExitCode::HostError, error))
        }
        _ => Ok(ExitCode::Success),
    }
}

fn measure(
    config: &BenchTransportConfig,
    named: Option<SocketAddr>,
) -> std::result::Result<TransportBench, Failure> {
    let seconds = Duration::from_secs(config.seconds.into());
    let wanted = |kind| match config.transport {
        TransportKind::Auto => true,
        TransportKind::Hybrid => matches!(kind, TransportKind::Tcp | TransportKind::Rdma),
        only => only == kind,
    };
    let contents = Arc::new(Contents::new(LEASE_BYTES));
    let mut transports = Vec::new();
    let mut skipped = Vec::new();
    let by_network = [TransportKind::Tcp, TransportKind::Udp, TransportKind::Rdma];
    let loopback_too = wanted(TransportKind::Loopback) && named.is_none();
    let count =
        by_network.into_iter().filter(|&kind| wanted(kind)).count() + usize::from(loopback_too);
    let of_each = SIZES.len() as u64;
    let progress = Progress::still("measuring", count as u64 * of_each, "connects");
    let mut done = 0;
    let mut take = |kind, result: Result<Measured>| {
        match result {
            Ok(measured) => transports.push(measured),
            Err(error) => skipped.push(Skipped {
                kind,
                reason: format!("{error:#}"),
            }),
        }
        // Also for a transport that was skipped, or does not support each size.
        done += of_each;
        progress.reach(done);
    };
    let mut registration = None;
    if by_network.into_iter().any(wanted) {
        // A donor in this process unless one was named.
        let own = named.is_none().then(own_donor).transpose()?;
        let address = named.or(own.as_ref().map(Donor::address));
        let leased = leased(address.context("no donor")?);
        let (link, lease) = leased.map_err(|error| match named {
            Some(_) => Failure::new(ExitCode::DonorUnavailable, error),
            None => error.into(),
        })?;
        // RDMA reads what was written by TCP.
        let written = fill(&lease, &contents, seconds)?;
        if wanted(TransportKind::Tcp) {
            let (lease, contents) = (lease.clone(), Arc::clone(&contents));
            let steps = progress.steps();
            take(
                "tcp",
                in_time(seconds, move || {
                    let connect = || Ok(probe::stream(&lease)?);
                    let mut measured = one::measure("tcp", connect, seconds, &contents, &steps)?;
                    measured.write_bytes_per_second = Some(written);
                    Ok(measured)
                }),
            );
        }
        if wanted(TransportKind::Udp) {
            let lease = RdmaLinkConfig {
                carrier: Carrier::Udp(None),
                ..lease.clone()
            };
            let (contents, steps) = (Arc::clone(&contents), progress.steps());
            take(
                "udp",
                in_time(seconds, move || {
                    let written = one::fill(&mut probe::stream(&lease)?, &contents)?;
                    let connect = || Ok(probe::stream(&lease)?);
                    let mut measured = one::measure("udp", connect, seconds, &contents, &steps)?;
                    measured.write_bytes_per_second = Some(written);
                    Ok(measured)
                }),
            );
        }
        if wanted(TransportKind::Rdma) {
            let local = local_address(lease.address)?;
            let (lease, contents) = (lease.clone(), Arc::clone(&contents));
            let steps = progress.steps();
            take(
                "rdma",
                in_time(seconds, move || {
                    let connect = || Ok(probe::rdma(&lease)?);
                    one::measure("rdma", connect, seconds, &contents, &steps)
                }),
            );
            // The transport's result reports the reason of a failure.
            registration = in_time(seconds, move || registration_cost(local)).ok();
        }
        link.release();
    }
    if loopback_too {
        take("loopback", loopback(seconds, &contents, progress.steps()));
    }
    let sum = |of: fn(&Measured) -> u64| transports.iter().map(of).sum();
    Ok(TransportBench {
        schema: ssi_hv::report::SCHEMA,
        host: host::detect(),
        donor: named.map(|address| address.to_string()),
        lease_bytes: LEASE_BYTES,
        verified_bytes: sum(|measured| measured.verified_bytes),
        corrupt_bytes: sum(|measured| measured.corrupt_bytes),
        transports,
        skipped,
        registration,
    })
}

/// Runs a function on a thread that is abandoned if it hangs, as verbs can.
fn in_time<T: Send + 'static>(
    seconds: Duration,
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    let (give, done) = mpsc::sync_channel(1);
    std::thread::Builder::new()
        .name("bench".to_owned())
        .spawn(move || {
            request_short_slices();
            // The receiver may have given up.
            let _ = give.send(work());
        })
        .context("cannot start a thread")?;
    let limit = seconds * 2 + SETUP_TIME_MAX;
    let late = || anyhow!("not done in {} s: it hangs", limit.as_secs());
    done.recv_timeout(limit).map_err(|_| late())?
}

fn own_donor() -> Result<Donor> {
    Ok(Donor::start(&DonorConfig {
        credentials: None,
        listen: ([127, 0, 0, 1], 0).into(),
        memory_bytes: LEASE_BYTES,
        lease_duration_max: Duration::from_secs(120),
        spin: SPIN_DEFAULT,
        rdma: DeviceChoice::Automatic,
        allow: None,
    })?)
}

/// Obtains a lease that is renewed, and its parameters.
fn leased(address: SocketAddr) -> Result<(Link, RdmaLinkConfig)> {
    let leased = Leased::obtain(LinkConfig {
        local: NodeId(0).into(),
        node: NodeId(1),
        address,
        carrier: Carrier::Tcp,
        vm: "bench".to_owned(),
        bytes: LEASE_BYTES,
        or_less: false,
        grace: Duration::from_secs(5),
    })?;
    let lease = leased.rdma_config();
    let (link, _) = leased.start(Vec::new(), Arc::new(|_| {}))?;
    Ok((link, lease))
}

/// Writes the lease by TCP; returns the rate in bytes per second.
fn fill(lease: &RdmaLinkConfig, contents: &Arc<Contents>, seconds: Duration) -> Result<f64> {
    let (lease, contents) = (lease.clone(), Arc::clone(contents));
    in_time(seconds, move || {
        one::fill(&mut probe::stream(&lease)?, &contents)
    })
}

fn loopback(seconds: Duration, contents: &Arc<Contents>, steps: Steps) -> Result<Measured> {
    let pool = Pool::new(LEASE_BYTES, Duration::from_secs(3600));
    let lease = pool.lend(
        "bench".to_owned(),
        LEASE_BYTES,
        false,
        Duration::from_secs(3600),
    )?;
    let contents = Arc::clone(contents);
    in_time(seconds, move || {
        let written = one::fill(&mut probe::loopback(Arc::clone(&lease)), &contents)?;
        let connect = || Ok(probe::loopback(Arc::clone(&lease)));
        let mut measured = one::measure("loopback", connect, seconds, &contents, &steps)?;
        measured.connections = None;
        measured.write_bytes_per_second = Some(written);
        Ok(measured)
    })
}

/// Returns the address of this host from which a donor is reached. Sends nothing.
fn local_address(donor: SocketAddr) -> Result<IpAddr> {
    let any: IpAddr = if donor.is_ipv4() {
        [0; 4].into()
    } else {
        [0; 16].into()
    };
    let socket = UdpSocket::bind((any, 0)).context("cannot make a socket")?;
    socket
        .connect(donor)
        .context("the donor is not reachable")?;
    Ok(socket.local_addr().context("no local address")?.ip())
}

fn registration_cost(local: IpAddr) -> Result<RegistrationCost> {
    let memory = registrations(local, &REGISTERED)?;
    let staging = STAGING_PAGES.iter().map(|&pages| {
        Ok(StagingTime {
            bytes: pages * memory_fabric::page::PAGE_SIZE,
            made_us: micros(staging_time(local, pages)?),
        })
    });
    Ok(RegistrationCost {
        staging: staging.collect::<Result<_>>()?,
        memory: memory
            .into_iter()
            .map(|cost| RegistrationTime {
                bytes: cost.bytes,
                first_us: micros(cost.first),
                again_us: micros(cost.again),
                end_us: micros(cost.end),
            })
            .collect(),
    })
}
