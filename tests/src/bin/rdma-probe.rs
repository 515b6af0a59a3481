//! Writes and reads a lease by RDMA as the pager does, but without a pager.
//!
//! Pages are written by WRITE in rounds, each with different bytes. All of them are then read over
//! TCP by the donor's CPU, and some by READ, one at a time; each is compared with the last bytes
//! written. Finally the lease ends, and a READ must fail.
//!
//! Prints `WRITING` when writing begins, `FILLED` before the first READ, `READ` after the last one,
//! and one line of JSON at the end.

use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use clap::Parser;
use fabric_transport::tcp::TcpTransport;
use fabric_transport::{Completion, IN_FLIGHT_MAX, PageTransport, Ticket};
use fabric_wire::TrafficClass;
use memory_fabric::fabric::Compression;
use memory_fabric::link::LinkPort;
use memory_fabric::link::rdma::{RdmaLink, RdmaStats, Reader};
use memory_fabric::page::{PAGE_SIZE, PageBytes};
use ssi_hv_tests::rdma_tool::{PATIENCE, lease};
use vmm_sys_util::eventfd::EventFd;

/// Longest total time without RDMA.
const AWAY_MAX: Duration = Duration::from_secs(60);
/// Deadline of one READ: longer than the adapter's retries.
const READ_TIME_MAX: Duration = Duration::from_secs(5);

/// Writes and reads a lease by RDMA.
#[derive(Debug, Parser)]
struct Arguments {
    /// The donor (`ssi-hv node`).
    donor: SocketAddr,
    /// Pages of the lease.
    #[arg(long, default_value_t = 1024)]
    pages: u32,
    /// How often all pages are written.
    #[arg(long, default_value_t = 1)]
    rounds: u32,
    /// Write until RDMA has failed and recovered, and at least this many rounds.
    #[arg(long)]
    until_back: bool,
    /// Number of READs.
    #[arg(long, default_value_t = 2000)]
    reads: u32,
}

fn main() -> ExitCode {
    match probe(&Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("rdma-probe: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn probe(arguments: &Arguments) -> anyhow::Result<()> {
    let leased = lease(arguments.donor, "rdma-probe", arguments.pages.into())?;
    let config = leased.rdma_config();
    let classes = [TrafficClass::Bulk, TrafficClass::Urgent];
    let notifiers: std::io::Result<Vec<_>> = classes
        .iter()
        .map(|&class| Ok((class, EventFd::new(0)?)))
        .collect();
    let (link, ports) = leased.start(notifiers?, Arc::new(|_| {}))?;
    let mut ports = ports.into_iter();
    let mut next = |class| tcp(ports.next().expect("one for each class"), class);
    let (bulk, mut urgent) = (next(classes[0]), next(classes[1]));
    let (rdma, mut transport) = RdmaLink::transport(config.clone(), TrafficClass::Bulk, bulk)?;
    // Polling completes the setup of the connection.
    transport.poll(&mut |_| {});
    println!("WRITING");
    let deadline = Instant::now() + AWAY_MAX;
    let mut rounds = 0;
    while rounds < arguments.rounds || arguments.until_back && !is_back(rdma.stats()) {
        ensure!(Instant::now() < deadline, "RDMA does not come back");
        write(&mut *transport, arguments.pages, rounds)?;
        rounds += 1;
    }
    let last = rounds.checked_sub(1).context("nothing was written")?;
    let mut reader = Reader::connect(&config)?;
    let mut corrupt = wrong_over_tcp(&mut urgent, arguments.pages, last)?;
    println!("FILLED");
    let mut times = Vec::new();
    let mut page = [0; PAGE_SIZE];
    for read in 0..arguments.reads {
        let number = scattered(read) % arguments.pages;
        let offset = u64::from(number) * PAGE_SIZE as u64;
        times.push(reader.read(offset, READ_TIME_MAX, &mut page)?);
        corrupt += wrong_bytes(&page, number, last);
    }
    println!("READ");
    times.sort_unstable();
    drop(transport);
    let pages_written = rdma.stats().pages_written.get();
    let failures = rdma.stats().failures.get();
    drop(rdma);
    let own = link.release();
    let started = Instant::now();
    let after = reader.read(0, READ_TIME_MAX, &mut page);
    let refused_after = started.elapsed();
    let Err(refusal) = after else {
        bail!("a READ of a lease that has ended succeeded");
    };
    let percentile = |share: usize| {
        let time = times.get((times.len().saturating_sub(1)) * share / 100);
        time.map_or(0.0, |time| time.as_secs_f64() * 1e6)
    };
    println!(
        "{}",
        serde_json::json!({
            "reads": times.len(),
            "rounds": rounds,
            "pages_written": pages_written,
            "failures": failures,
            "corrupt_bytes": corrupt,
            "p50_us": percentile(50),
            "p99_us": percentile(99),
            "pages_read_by_donor": own.pages_read.saturating_sub(arguments.pages.into()),
            "pages_written_by_donor": own.pages_written,
            "after_release": refusal.to_string(),
            "after_release_ms": refused_after.as_millis(),
        })
    );
    ensure!(corrupt == 0, "{corrupt} bytes were wrong");
    Ok(())
}

fn tcp(port: LinkPort, class: TrafficClass) -> TcpTransport {
    TcpTransport::new(port, class, false, Compression::Off, Arc::default())
}

/// Returns whether RDMA has failed and recovered.
fn is_back(stats: &RdmaStats) -> bool {
    stats.failures.get() > 0 && stats.is_connected()
}

/// Writes the bytes of this round to every page.
fn write(transport: &mut dyn PageTransport, pages: u32, round: u32) -> anyhow::Result<()> {
    let deadline = Instant::now() + PATIENCE;
    let (mut next, mut done) = (0, 0);
    while done < pages {
        ensure!(Instant::now() < deadline, "the donor takes no pages");
        while next < pages && transport.in_flight() < IN_FLIGHT_MAX {
            let page = content(next, round);
            let offset = u64::from(next) * PAGE_SIZE as u64;
            transport.post_write(Ticket(next), offset, &page)?;
            next += 1;
        }
        transport.flush();
        transport.poll(&mut |completion| {
            if matches!(completion, Completion::Written(_)) {
                done += 1;
            }
        });
        std::thread::yield_now();
    }
    Ok(())
}

/// Reads every page over TCP and returns the number of bytes that differ from those of this round.
fn wrong_over_tcp(transport: &mut TcpTransport, pages: u32, round: u32) -> anyhow::Result<usize> {
    let deadline = Instant::now() + PATIENCE;
    let (mut next, mut done, mut wrong) = (0, 0, 0);
    while done < pages {
        ensure!(Instant::now() < deadline, "the donor sends no pages");
        while next < pages && transport.in_flight() < IN_FLIGHT_MAX {
            transport.post_read(Ticket(next), u64::from(next) * PAGE_SIZE as u64)?;
            next += 1;
        }
        transport.flush();
        transport.poll(&mut |completion| {
            if let Completion::Read(Ticket(number), page) = completion {
                done += 1;
                wrong += wrong_bytes(page, number, round);
            }
        });
        std::thread::yield_now();
    }
    Ok(wrong)
}

/// Returns a pseudo-random number that is the same in each run.
fn scattered(number: u32) -> u32 {
    let mixed = (number ^ (number >> 15)).wrapping_mul(0x2c1b_3c6d);
    mixed ^ (mixed >> 13)
}

fn byte(page: u32, round: u32, place: usize) -> u8 {
    let number = page
        .wrapping_mul(1024)
        .wrapping_add(u32::try_from(place / 4).unwrap_or(0));
    let word = scattered(number.wrapping_add(round.wrapping_mul(0x9e37_79b9)));
    word.to_le_bytes()[place % 4]
}

fn content(page: u32, round: u32) -> PageBytes {
    std::array::from_fn(|place| byte(page, round, place))
}

fn wrong_bytes(page: &PageBytes, number: u32, round: u32) -> usize {
    let places = page.iter().enumerate();
    places
        .filter(|(place, found)| **found != byte(number, round, *place))
        .count()
}
