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
use ssi_hv::exit::ExitCode;
use ssi_hv::host;
use ssi_hv::progress::{Progress, Steps};
use ssi_hv_api::bench::{
    RegistrationCost, RegistrationTime, Skipped, StagingTime, Transport, TransportBench,
};

use super::{finish, micros};
use crate::commands::Failure;
use one::{Contents, Limits};

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

/// The results of one transport, and how many bytes were compared.
#[derive(Debug)]
struct Measured {
    transport: Transport,
    verified_bytes: u64,
    corrupt_bytes: u64,
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
    let limits = Limits {
        time: seconds,
        round_trips: config.round_trips.into(),
    };
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
    let (mut verified_bytes, mut corrupt_bytes) = (0, 0);
    let mut take = |kind: &str, result: Result<Measured>| {
        match result {
            Ok(measured) => {
                verified_bytes += measured.verified_bytes;
                corrupt_bytes += measured.corrupt_bytes;
                transports.push(measured.transport);
            }
            Err(error) => skipped.push(Skipped {
                kind: kind.to_owned(),
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
        let written = fill(&lease, &contents, seconds)?;
        if wanted(TransportKind::Tcp) {
            let (lease, contents) = (lease.clone(), Arc::clone(&contents));
            let steps = progress.steps();
            take(
                "tcp",
                in_time(seconds, move || {
                    let connect = || Ok(probe::stream(&lease)?);
                    let mut measured = one::measure("tcp", connect, limits, &contents, &steps)?;
                    measured.transport.write_bytes_per_second = Some(written);
                    let mut gauge = probe::stream(&lease)?;
                    let writes = one::write_one_by_one(&mut gauge, limits, &contents)?;
                    measured.transport.writes = Some(writes);
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
                    let mut measured = one::measure("udp", connect, limits, &contents, &steps)?;
                    measured.transport.write_bytes_per_second = Some(written);
                    let mut gauge = probe::stream(&lease)?;
                    let writes = one::write_one_by_one(&mut gauge, limits, &contents)?;
                    measured.transport.writes = Some(writes);
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
                    // What READs compare was written by WRITEs: TCP leaves other bytes.
                    one::fill(&mut probe::stream(&lease)?, &contents.inverted())?;
                    let mut gauge = probe::rdma_writes(&lease)?;
                    let written = one::fill(&mut gauge, &contents)?;
                    let writes = one::write_one_by_one(&mut gauge, limits, &contents)?;
                    drop(gauge);
                    let connect = || Ok(probe::rdma(&lease)?);
                    let mut measured = one::measure("rdma", connect, limits, &contents, &steps)?;
                    measured.transport.write_bytes_per_second = Some(written);
                    measured.transport.writes = Some(writes);
                    Ok(measured)
                }),
            );
            // The transport's result reports the reason of a failure.
            registration = in_time(seconds, move || registration_cost(local)).ok();
        }
        link.release();
    }
    if loopback_too {
        take("loopback", loopback(limits, &contents, progress.steps()));
    }
    Ok(TransportBench {
        schema: ssi_hv::report::SCHEMA,
        host: host::detect(),
        donor: named.map(|address| address.to_string()),
        lease_bytes: LEASE_BYTES,
        verified_bytes,
        corrupt_bytes,
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

fn loopback(limits: Limits, contents: &Arc<Contents>, steps: Steps) -> Result<Measured> {
    let pool = Pool::new(LEASE_BYTES, Duration::from_secs(3600));
    let lease = pool.lend(
        "bench".to_owned(),
        LEASE_BYTES,
        false,
        Duration::from_secs(3600),
    )?;
    let contents = Arc::clone(contents);
    in_time(limits.time, move || {
        let written = one::fill(&mut probe::loopback(Arc::clone(&lease)), &contents)?;
        let connect = || Ok(probe::loopback(Arc::clone(&lease)));
        let mut measured = one::measure("loopback", connect, limits, &contents, &steps)?;
        measured.transport.connections = None;
        measured.transport.write_bytes_per_second = Some(written);
        let mut gauge = probe::loopback(Arc::clone(&lease));
        let writes = one::write_one_by_one(&mut gauge, limits, &contents)?;
        measured.transport.writes = Some(writes);
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
