//! Reads a lease by RDMA, as the pager does and without one: a page after the other, each
//! compared with what was written. Then it ends the lease, and a READ must fail.
//!
//! Prints `FILLED` when the donor has the pages, and at the end one line of JSON.

use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use clap::Parser;
use memory_fabric::fabric::Compression;
use memory_fabric::layout::NodeId;
use memory_fabric::link::rdma::{RdmaLinkConfig, Reader};
use memory_fabric::link::{Leased, LinkConfig};
use memory_fabric::page::{PAGE_SIZE, PageBytes};
use memory_fabric::stream::Carrier;
use memory_fabric::transport::tcp::TcpTransport;
use memory_fabric::transport::{Completion, IN_FLIGHT_MAX, PageSource, PageTransport as _, Ticket};
use memory_fabric::wire::TrafficClass;
use vmm_sys_util::eventfd::EventFd;

/// How long anything may take that takes milliseconds.
const PATIENCE: Duration = Duration::from_secs(30);
/// How long one READ may take: longer than the adapter needs to give up.
const READ_TIME_MAX: Duration = Duration::from_secs(5);

/// Reads a lease by RDMA.
#[derive(Debug, Parser)]
struct Arguments {
    /// The donor (`ssi-hv node`).
    donor: SocketAddr,
    /// Pages of the lease.
    #[arg(long, default_value_t = 1024)]
    pages: u32,
    /// READs.
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
    let bytes = u64::from(arguments.pages) * PAGE_SIZE as u64;
    let leased = Leased::obtain(LinkConfig {
        node: NodeId(1),
        address: arguments.donor,
        carrier: Carrier::Tcp,
        vm: "rdma-probe".to_owned(),
        bytes,
        or_less: false,
        grace: PATIENCE,
    })?;
    let config = RdmaLinkConfig {
        carrier: Carrier::Tcp,
        node: NodeId(1),
        address: arguments.donor,
        token: leased.grant().token,
        bytes,
    };
    let bell = EventFd::new(0)?;
    let (link, mut ports) = leased.start(vec![(TrafficClass::Bulk, bell)], Arc::new(|_| {}))?;
    let port = ports.pop().context("a port")?;
    fill(
        TcpTransport::new(
            port,
            TrafficClass::Bulk,
            false,
            Compression::Off,
            Arc::default(),
        ),
        arguments.pages,
    )?;
    let mut reader = Reader::connect(&config)?;
    println!("FILLED");
    let mut times = Vec::new();
    let mut corrupt = 0;
    let mut page = [0; PAGE_SIZE];
    for read in 0..arguments.reads {
        let number = scattered(read) % arguments.pages;
        let offset = u64::from(number) * PAGE_SIZE as u64;
        times.push(reader.read(offset, READ_TIME_MAX, &mut page)?);
        corrupt += wrong_bytes(&page, number);
    }
    times.sort_unstable();
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
            "corrupt_bytes": corrupt,
            "p50_us": percentile(50),
            "p99_us": percentile(99),
            "pages_read_by_donor": own.pages_read,
            "after_release": refusal.to_string(),
            "after_release_ms": refused_after.as_millis(),
        })
    );
    ensure!(corrupt == 0, "{corrupt} bytes were wrong");
    Ok(())
}

/// Writes every page over TCP.
fn fill(mut transport: TcpTransport, pages: u32) -> anyhow::Result<()> {
    let deadline = Instant::now() + PATIENCE;
    let (mut next, mut done) = (0, 0);
    while done < pages {
        ensure!(Instant::now() < deadline, "the donor takes no pages");
        while next < pages && transport.in_flight() < IN_FLIGHT_MAX {
            let page = content(next);
            // SAFETY: the page lives until the call returns.
            let source = unsafe { PageSource::new(&raw const page) };
            let offset = u64::from(next) * PAGE_SIZE as u64;
            transport.post_write(Ticket(next), offset, source)?;
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

/// A number that looks random, the same in each run.
fn scattered(number: u32) -> u32 {
    let mixed = (number ^ (number >> 15)).wrapping_mul(0x2c1b_3c6d);
    mixed ^ (mixed >> 13)
}

fn byte(page: u32, place: usize) -> u8 {
    let word = scattered(
        page.wrapping_mul(1024)
            .wrapping_add(u32::try_from(place / 4).unwrap_or(0)),
    );
    word.to_le_bytes()[place % 4]
}

fn content(page: u32) -> PageBytes {
    std::array::from_fn(|place| byte(page, place))
}

fn wrong_bytes(page: &PageBytes, number: u32) -> usize {
    let places = page.iter().enumerate();
    places
        .filter(|(place, found)| **found != byte(number, *place))
        .count()
}
