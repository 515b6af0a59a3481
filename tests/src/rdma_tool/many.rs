//! As many RDMA connections as this many VMs have: two for each lease, for faults and for
//! prefetching.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use clap::Args;
use fabric_transport::rdma::resources::pinned_bytes;
use fabric_transport::rdma::{Settings, usage};
use fabric_transport::tcp::TcpTransport;
use fabric_transport::{Completion, PageTransport as _, Ticket};
use fabric_wire::TrafficClass;
use memory_fabric::fabric::Compression;
use memory_fabric::link::rdma::{RdmaLinkConfig, Reader};
use memory_fabric::link::{Link, LinkPort};
use memory_fabric::page::PAGE_SIZE;
use signal_hook::consts::{SIGTERM, SIGUSR1};
use signal_hook::iterator::Signals;
use vmm_sys_util::eventfd::EventFd;

use super::{PATIENCE, READ_TIME_MAX, content, lease, wrong_bytes};

/// Pages of each lease.
const PAGES: u64 = 4;

/// Arguments of the test.
#[derive(Debug, Args)]
pub struct Arguments {
    /// The donor
    donor: SocketAddr,
    /// Number of leases, each with two connections
    #[arg(long, default_value_t = 128)]
    leases: u16,
    /// Initial number of page reads for each connection
    #[arg(long, default_value_t = 4)]
    reads: u16,
    /// Limit of outstanding requests of each connection
    #[arg(long)]
    depth: Option<u16>,
    /// Pages of the buffer of each second connection
    #[arg(long)]
    staging_pages: Option<usize>,
}

/// A lease and its connections.
struct Leaseholder {
    config: RdmaLinkConfig,
    link: Link,
    readers: Vec<Reader>,
}

/// Opens the connections, prints `OPEN ` and JSON, and keeps them until SIGTERM. At each SIGUSR1
/// every connection reads once more, and `AGAIN ` reports the number of READs.
///
/// # Errors
/// Fails when a connection cannot be opened, a byte is wrong, or the donor accepts one beyond the
/// limit.
pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let mut signals = Signals::new([SIGTERM, SIGUSR1])?;
    let mut holders = Vec::new();
    for lease in 0..u64::from(arguments.leases) {
        let held = hold(arguments, lease).with_context(|| format!("lease {lease}"))?;
        holders.push(held);
    }
    println!("LEASED");
    let before = (memory_here()?, available()?);
    let mut times = Vec::new();
    for holder in &mut holders {
        for class in [TrafficClass::Urgent, TrafficClass::Prefetch] {
            let started = Instant::now();
            let reader = Reader::connect_for(&holder.config, class);
            let number = times.len() + 1;
            holder
                .readers
                .push(reader.with_context(|| format!("connection {number}"))?);
            times.push(started.elapsed());
        }
    }
    let after = (memory_here()?, available()?);
    let (reads, corrupt) = read_all(&mut holders, arguments.reads)?;
    // One beyond the donor's limit, on a separate lease.
    let extra = hold(arguments, u64::from(arguments.leases))?;
    let started = Instant::now();
    let refused = Reader::connect(&extra.config).map(drop);
    let refused_after = started.elapsed();
    let refusal = refused
        .err()
        .map(|error| format!("{:#}", anyhow::Error::new(error)));
    times.sort_unstable();
    let count = times.len().max(1);
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    let grown = |after: u64, before: u64| after.saturating_sub(before) / count as u64;
    println!(
        "OPEN {}",
        serde_json::json!({
            "connections": times.len(),
            "setup_ms_p50": times.get(count / 2).copied().map(ms),
            "setup_ms_max": times.last().copied().map(ms),
            "resident_bytes_each": grown(after.0, before.0),
            "host_bytes_each": grown(before.1, after.1),
            "pinned_bytes": pinned_bytes().in_use,
            "resources": usage(),
            "reads": reads,
            "corrupt_bytes": corrupt,
            "refusal": refusal,
            "refused_after_ms": ms(refused_after),
        })
    );
    ensure!(corrupt == 0, "{corrupt} bytes were wrong");
    // The agent kills this process when its client disconnects.
    for signal in signals.forever() {
        if signal == SIGTERM {
            break;
        }
        let (reads, corrupt) = read_all(&mut holders, 1)?;
        ensure!(corrupt == 0, "{corrupt} bytes were wrong");
        println!("AGAIN {reads}");
    }
    let started = Instant::now();
    for holder in holders {
        drop(holder.readers);
        holder.link.release();
    }
    extra.link.release();
    println!("RELEASED {}", ms(started.elapsed()));
    let left = usage()
        .iter()
        .map(|device| device.queue_pairs.in_use)
        .sum::<u64>();
    ensure!(left == 0, "{left} queue pairs are left");
    Ok(())
}

/// Lets every connection read a page this many times, in turn; returns the number of READs and of
/// wrong bytes. The donor's process takes no part.
fn read_all(holders: &mut [Leaseholder], rounds: u16) -> anyhow::Result<(u64, usize)> {
    let (mut reads, mut corrupt) = (0_u64, 0);
    for round in 0..u64::from(rounds) {
        for (lease, holder) in (0..).zip(holders.iter_mut()) {
            for reader in &mut holder.readers {
                let number = (round + reads) % PAGES;
                let mut page = [0; PAGE_SIZE];
                reader.read(number * PAGE_SIZE as u64, READ_TIME_MAX, &mut page)?;
                corrupt += wrong_bytes(&page, lease, number);
                reads += 1;
            }
        }
    }
    Ok((reads, corrupt))
}

/// Obtains a lease and writes known contents to its pages.
fn hold(arguments: &Arguments, number: u64) -> anyhow::Result<Leaseholder> {
    let leased = lease(arguments.donor, &format!("vm-{number}"), PAGES)?;
    let mut config = leased.rdma_config();
    config.settings = Arc::new(Settings {
        depth: arguments.depth,
        staging_pages: arguments.staging_pages,
        ..Settings::default()
    });
    let notifier = EventFd::new(0)?;
    let (link, mut ports) = leased.start(vec![(TrafficClass::Bulk, notifier)], Arc::new(|_| {}))?;
    fill(ports.pop().context("a port")?, number)?;
    Ok(Leaseholder {
        config,
        link,
        readers: Vec::new(),
    })
}

/// Writes every page over TCP.
fn fill(port: LinkPort, lease: u64) -> anyhow::Result<()> {
    let class = TrafficClass::Bulk;
    let mut tcp = TcpTransport::new(port, class, false, Compression::Off, Arc::default());
    let deadline = Instant::now() + PATIENCE;
    for (ticket, number) in (0..).zip(0..PAGES) {
        let page = content(lease, number);
        tcp.post_write(Ticket(ticket), number * PAGE_SIZE as u64, &page)?;
    }
    tcp.flush();
    let mut written = 0;
    while written < PAGES {
        if Instant::now() >= deadline {
            bail!("the donor takes no pages");
        }
        tcp.poll(&mut |completion| {
            written += u64::from(matches!(completion, Completion::Written(_)));
        });
        std::thread::yield_now();
    }
    Ok(())
}

/// Returns the resident memory of this process in bytes.
fn memory_here() -> anyhow::Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    kib(&status, "VmRSS:").context("no VmRSS")
}

/// Returns the available memory of the host in bytes, from which the kernel's own use for
/// connections is deducted.
fn available() -> anyhow::Result<u64> {
    let meminfo = std::fs::read_to_string("/proc/meminfo")?;
    kib(&meminfo, "MemAvailable:").context("no MemAvailable")
}

/// Returns a line of KiB as bytes.
pub(crate) fn kib(text: &str, name: &str) -> Option<u64> {
    let value = text.lines().find_map(|line| line.strip_prefix(name))?;
    let value: u64 = value.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(value << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_from_what_the_kernel_writes() {
        let text = "Name:\tx\nVmRSS:\t    2048 kB\nMemAvailable:   17 kB\n";
        assert_eq!(kib(text, "VmRSS:"), Some(2 << 20));
        assert_eq!(kib(text, "MemAvailable:"), Some(17 << 10));
        assert_eq!(kib("VmRSS: many\n", "VmRSS:"), None);
    }
}
