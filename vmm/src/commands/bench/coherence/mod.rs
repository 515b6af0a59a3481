//! `ssi-hv bench coherence`: a memory that several processes of this machine share.

mod cost;
mod donor;
mod floor;
mod node;
mod nodes;
mod protocol;

use std::fmt::Write as _;
use std::net::IpAddr;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use memory_fabric::fabric::TransportKind;
use memory_fabric::page::PAGE_SIZE;
use memory_fabric::rdma;
use memory_fabric::stats::{Histogram, Summary};
use serde::Serialize;
use ssi_hv::exit::ExitCode;
use ssi_hv::host;
use ssi_hv::instance::percentiles;
use ssi_hv::progress::Progress;
use ssi_hv::report::{Host, Percentiles};
use ssi_hv::size::ByteSize;

use super::bed::Bed;
use super::placement;
use super::{ROUNDS, Series, finish, median, micros};
use crate::cli::bench::BenchCoherenceConfig;
use crate::commands::Failure;
use cost::{Cost, Costs};
use donor::AtDonor;
use floor::SAMPLES;
pub use node::serve as node;
use nodes::{Carrier, Nodes, Shared};
use protocol::{Answer, Command, Counters, Exchange, Pages, Work};

/// Pages of a block.
const BLOCK: usize = 512;

/// The results.
#[derive(Debug, Serialize)]
struct CoherenceBench {
    schema: u32,
    host: Host,
    nodes: usize,
    rounds: u32,
    /// What carries messages and pages: `tcp` or `rdma`.
    transport: &'static str,
    transactions: Vec<Transaction>,
    /// The same under TLS, each beside the one without.
    tls: Vec<Transaction>,
    /// Reads of pages that nodes 0 and 1 keep at a donor, each with a lease of its own.
    donor: Vec<Transaction>,
    work: Vec<Worked>,
    /// CPU time of a request with two nodes and with four.
    cost: Vec<Cost>,
    /// Sums of counters that were not what was added.
    wrong_sums: u32,
    /// Of pages at the donor.
    verified_bytes: u64,
    corrupt_bytes: u64,
}

/// One kind of transaction beside its floor: that of first touches is the pager of a VM with one
/// compute node.
#[derive(Debug, Serialize)]
struct Transaction {
    name: &'static str,
    latency_us: Percentiles,
    floor_us: Percentiles,
    /// Medians over the rounds of our percentile divided by that of the floor.
    ratio_p50: f64,
    ratio_p99: f64,
}

/// What all nodes did at once.
#[derive(Debug, Serialize)]
struct Worked {
    name: &'static str,
    /// Accesses of all nodes, and those of one node that worked alone.
    per_second: f64,
    per_second_alone: f64,
    /// Pages that moved or were copied between nodes.
    transfers_per_second: f64,
    invalidations_per_second: f64,
    /// CPU time of all nodes for one of these.
    cpu_us_per_transfer: f64,
    holds: u64,
    lost_early: u64,
    /// The counters of node 0 are the sum of what was added.
    is_exact: bool,
}

/// Measures coherent memory.
pub fn coherence(config: &BenchCoherenceConfig) -> Result<ExitCode, Failure> {
    config.validate()?;
    let result = measure(config)?;
    let wrong = match result.corrupt_bytes {
        0 => (result.wrong_sums.into(), "sums of counters"),
        bytes => (bytes, "bytes"),
    };
    finish(&result, config.json, table, wrong)
}

/// Pages between first touches: as many as one of them fills.
const FILLED: usize = 16;

/// Blocks that the first touches of a round take.
const FIRST_TOUCH_BLOCKS: usize = SAMPLES * FILLED / BLOCK + 1;

/// The kinds of transactions, in the order in which they are measured.
const KINDS: [(&str, Exchange); 4] = [
    ("local grant", Exchange::Local),
    ("write, remote owner (GetM)", Exchange::Write),
    ("read, remote owner (GetS)", Exchange::Read),
    ("upgrade, one sharer", Exchange::Upgrade),
];

/// The address of an RDMA device of this host, by which its processes reach each other.
fn rdma_address() -> Result<IpAddr> {
    let ports = rdma::summaries().context("--transport rdma is not possible")?;
    let ports = ports.iter().filter(|port| port.active && port.usable);
    let addresses = ports
        .flat_map(|port| &port.gids)
        .map(|entry| entry.gid.to_ip());
    // Link-local addresses need a scope.
    let mut addresses = addresses.filter(|address| match address {
        IpAddr::V4(address) => !address.is_unspecified(),
        IpAddr::V6(address) => !address.is_unicast_link_local() && !address.is_unspecified(),
    });
    addresses.next().context(
        "--transport rdma is not possible: no active port of an RDMA device has an IP address; \
         `ssi-hv doctor` shows the ports",
    )
}

fn measure(config: &BenchCoherenceConfig) -> Result<CoherenceBench> {
    let count = usize::from(config.nodes);
    let rounds = ROUNDS as usize;
    // One block of each round for local grants, one for transfers; those of the work behind them.
    let work_blocks = Work::ALL.len() * 2;
    let owned = (2 * rounds + work_blocks) * count;
    let blocks = owned + FIRST_TOUCH_BLOCKS * rounds;
    let carrier = match config.transport {
        TransportKind::Rdma => Carrier::Rdma(rdma_address()?),
        _ => Carrier::Tcp,
    };
    let mut nodes = Nodes::start(&Shared::whole(config.nodes, blocks, carrier)?)?;
    let mut secured = match config.tls {
        true => {
            let shared = Shared::whole(config.nodes, 2 * rounds * count, Carrier::Tls)?;
            Some(Nodes::start(&shared)?)
        }
        false => None,
    };
    let mut at_donor = match config.donor {
        true => Some(AtDonor::start(config.nodes, carrier)?),
        false => None,
    };
    let mut costs = Costs::start(carrier)?;
    let mut under_tls: Vec<(Series, Series)> = KINDS.iter().map(|_| Default::default()).collect();
    let Answer::Listening(far) = nodes.ask(1, &Command::FloorServe(None))? else {
        bail!("node 1 serves no floor");
    };
    let mut series: Vec<(Series, Series)> = KINDS.iter().map(|_| Default::default()).collect();
    let mut first = (Series::default(), Series::default());
    // The threads of the pager run where those of node 0 do.
    if let Some(cpus) = placement::of_nodes(count)?.first() {
        placement::use_only(cpus)?;
    }
    let bed_bytes = (rounds * FIRST_TOUCH_BLOCKS * BLOCK * PAGE_SIZE) as u64;
    let bed = ByteSize::from_bytes;
    let bed = Bed::start(bed(2 * bed_bytes), bed(bed_bytes + (64 << 20)), 1, None)?;
    let progress = Progress::rounds(ROUNDS);
    for round in 0..rounds {
        for ((_, what), (_, floor)) in KINDS.iter().zip(&mut series) {
            let what = *what;
            floor.add(&times(nodes.ask(0, &Command::Floor { far, what })?)?);
        }
        let pages = |blocks: usize| Pages {
            first: (blocks + round * FIRST_TOUCH_BLOCKS) * BLOCK,
            step: FILLED,
            count: SAMPLES,
        };
        first.1.add(&times(Answer::Times(node::touch(
            &bed.view,
            pages(0),
            true,
        )?))?);
        let touch = Command::Touch {
            pages: pages(owned),
            write: true,
        };
        first.0.add(&times(nodes.ask(0, &touch)?)?);
        let measured = transactions(&mut nodes, round)?;
        for ((ours, _), times) in series.iter_mut().zip(&measured) {
            ours.add(times);
        }
        if let Some(secured) = &mut secured {
            let under = transactions(secured, round)?;
            for ((series, under), plain) in under_tls.iter_mut().zip(&under).zip(&measured) {
                series.0.add(under);
                series.1.add(plain);
            }
        }
        if let Some(at_donor) = &mut at_donor {
            at_donor.round()?;
        }
        costs.round()?;
        progress.step();
    }
    drop(progress);
    let names = KINDS.iter().map(|(name, _)| *name);
    let names = names.chain(["first touch, block of its own"]);
    let all = series.iter().chain([&first]);
    let transactions = names.zip(all).map(|(name, series)| compared(name, series));
    let transactions = transactions.collect();
    let tls = match secured {
        Some(_) => {
            let all = KINDS.iter().zip(&under_tls);
            all.map(|((name, _), series)| compared(name, series))
                .collect()
        }
        None => Vec::new(),
    };
    let verified_bytes = at_donor
        .as_ref()
        .map_or(0, |measured| measured.verified_bytes);
    let corrupt_bytes = at_donor
        .as_ref()
        .map_or(0, |measured| measured.corrupt_bytes);
    // Its processes end before all others work.
    let donor = at_donor.map_or_else(Vec::new, |measured| measured.transactions());
    let cost = costs.list();
    let milliseconds = u64::from(config.seconds) * 1000 / (2 * Work::ALL.len() as u64);
    let mut work = Vec::new();
    for (place, what) in Work::ALL.into_iter().enumerate() {
        let first = (2 * rounds * count + 2 * place * count) * BLOCK;
        work.push(worked(&mut nodes, what, first, milliseconds)?);
    }
    let wrong_sums = work.iter().filter(|work| !work.is_exact).count();
    Ok(CoherenceBench {
        schema: ssi_hv::report::SCHEMA,
        host: host::detect(),
        nodes: count,
        rounds: ROUNDS,
        transport: match carrier {
            Carrier::Rdma(_) => "rdma",
            Carrier::Tcp | Carrier::Tls => "tcp",
        },
        transactions,
        tls,
        donor,
        work,
        cost,
        wrong_sums: u32::try_from(wrong_sums)?,
        verified_bytes,
        corrupt_bytes,
    })
}

/// Compares a series with its floor.
fn compared(name: &'static str, (ours, floor): &(Series, Series)) -> Transaction {
    let ratio = |of: fn(&Summary) -> Duration| {
        let rounds = ours.rounds.iter().zip(&floor.rounds);
        median(
            rounds
                .map(|(ours, floor)| micros(of(ours)) / micros(of(floor)))
                .collect(),
        )
    };
    Transaction {
        name,
        latency_us: percentiles(&ours.all.summary()),
        floor_us: percentiles(&floor.all.summary()),
        ratio_p50: ratio(|summary| summary.p50),
        ratio_p99: ratio(|summary| summary.p99),
    }
}

fn times(answer: Answer) -> Result<Histogram> {
    let Answer::Times(times) = answer else {
        bail!("a node measured nothing: {answer:?}");
    };
    Ok(histogram(times))
}

fn histogram(nanoseconds: Vec<u64>) -> Histogram {
    let histogram = Histogram::new();
    for time in nanoseconds {
        histogram.record(Duration::from_nanos(time));
    }
    histogram
}

/// Measures one round of the transactions, in the order of [`KINDS`].
fn transactions(nodes: &mut Nodes, round: usize) -> Result<[Histogram; 4]> {
    let pages = |first, count| Pages {
        first,
        step: 1,
        count,
    };
    let touch = |pages, write| Command::Touch { pages, write };
    // Blocks whose directory is node 0, and node 0 or 1 in turns.
    let local = 2 * round * nodes.count() * BLOCK;
    let moving = ((2 * round + 1) * nodes.count() + round % 2) * BLOCK;
    for block in [local, moving] {
        // Two nodes use the block: it is split.
        nodes.ask(0, &touch(pages(block + SAMPLES, 1), true))?;
        nodes.ask(1, &touch(pages(block + SAMPLES + 1, 1), true))?;
    }
    let granted = times(nodes.ask(0, &touch(pages(local, SAMPLES), true))?)?;
    nodes.ask(1, &touch(pages(moving, SAMPLES), true))?;
    let written = times(nodes.ask(0, &touch(pages(moving, SAMPLES), true))?)?;
    let read = times(nodes.ask(1, &touch(pages(moving, SAMPLES), false))?)?;
    let upgraded = times(nodes.ask(0, &touch(pages(moving, SAMPLES), true))?)?;
    Ok([granted, written, read, upgraded])
}

fn counters(nodes: &mut Nodes) -> Result<Counters> {
    let mut sum = Counters::default();
    for answer in nodes.all(&Command::Stats)? {
        let Answer::Stats(one) = answer else {
            bail!("a node has no counters: {answer:?}");
        };
        sum.transfers += one.transfers;
        sum.reads += one.reads;
        sum.writes += one.writes;
        sum.upgrades += one.upgrades;
        sum.invalidated += one.invalidated;
        sum.holds += one.holds;
        sum.early += one.early;
        sum.cpu_us += one.cpu_us;
    }
    Ok(sum)
}

fn worked(nodes: &mut Nodes, what: Work, first: usize, milliseconds: u64) -> Result<Worked> {
    let count = |answer: Answer| match answer {
        Answer::Count(count) => Ok(count),
        other => bail!("a node did no work: {other:?}"),
    };
    // The same work on blocks of its own, by one node.
    let alone = Command::Work {
        what,
        first: first + nodes.count() * BLOCK,
        milliseconds,
    };
    let alone = count(nodes.ask(0, &alone)?)?;
    let before = counters(nodes)?;
    let together = Command::Work {
        what,
        first,
        milliseconds,
    };
    let answers = nodes.all(&together)?.into_iter().map(count);
    let done: u64 = answers.sum::<Result<u64>>()?;
    let after = counters(nodes)?;
    let pages = Pages {
        first,
        step: 1,
        count: node::WORK_PAGES * nodes.count().max(1),
    };
    let sum = count(nodes.ask(0, &Command::Sum(pages))?)?;
    let adds = !matches!(what, Work::ReadMostly | Work::ProducerConsumer);
    ensure!(
        milliseconds > 0,
        "--seconds is too small for six kinds of work"
    );
    // Counts stay far below 2^52.
    #[allow(clippy::cast_precision_loss)]
    let per_second = |count: u64| count as f64 * 1e3 / milliseconds as f64;
    let transfers = after.transfers - before.transfers;
    #[allow(clippy::cast_precision_loss)]
    let cpu_us_per_transfer = (after.cpu_us - before.cpu_us) as f64 / transfers.max(1) as f64;
    Ok(Worked {
        name: name(what),
        per_second: per_second(done),
        per_second_alone: per_second(alone),
        transfers_per_second: per_second(transfers),
        invalidations_per_second: per_second(after.invalidated - before.invalidated),
        cpu_us_per_transfer,
        holds: after.holds - before.holds,
        lost_early: after.early - before.early,
        is_exact: !adds || sum == done,
    })
}

const fn name(what: Work) -> &'static str {
    match what {
        Work::PingPong => "one counter, all nodes",
        Work::Migratory => "migratory counters",
        Work::ProducerConsumer => "producer and consumers",
        Work::ReadMostly => "read-mostly",
        Work::FalseSharing => "false sharing",
        Work::Private => "private",
    }
}

/// Writes rows with their floors below a header.
fn rows(text: &mut String, [name, floor]: [&str; 2], rows: &[Transaction]) {
    let [p50, p99] = ["p50", "p99"].map(|part| format!("{floor} {part}"));
    // Writing to a string does not fail.
    let _ = writeln!(
        text,
        "{name:<28}{:>9}{:>9}{p50:>11}{p99:>11}{:>9}{:>9}",
        "p50", "p99", "p50 x", "p99 x"
    );
    for row in rows {
        let _ = writeln!(
            text,
            "{:<28}{:>9.1}{:>9.1}{:>11.1}{:>11.1}{:>9.2}{:>9.2}",
            row.name,
            row.latency_us.p50,
            row.latency_us.p99,
            row.floor_us.p50,
            row.floor_us.p99,
            row.ratio_p50,
            row.ratio_p99
        );
    }
}

fn table(result: &CoherenceBench) -> String {
    let mut text = String::new();
    let host = &result.host;
    // Writing to a string does not fail.
    let _ = writeln!(text, "{}, Linux {}", host.cpu_model, host.kernel);
    let _ = writeln!(
        text,
        "{} nodes, processes of this machine over {}, {} rounds of {SAMPLES}\n",
        result.nodes,
        result.transport.to_uppercase(),
        result.rounds
    );
    rows(&mut text, ["us", "floor"], &result.transactions);
    if !result.tls.is_empty() {
        text.push('\n');
        rows(&mut text, ["us, under TLS", "plain"], &result.tls);
    }
    if !result.donor.is_empty() {
        text.push('\n');
        rows(&mut text, ["us, page at a donor", "floor"], &result.donor);
        let (verified, wrong) = (result.verified_bytes, result.corrupt_bytes);
        let _ = writeln!(text, "{verified} bytes verified, {wrong} wrong");
    }
    let _ = writeln!(
        text,
        "\n{:<28}{:>13}{:>13}{:>12}{:>12}{:>12}{:>8}",
        "a second", "accesses", "one alone", "transfers", "invalidated", "us CPU each", "exact"
    );
    for row in &result.work {
        let _ = writeln!(
            text,
            "{:<28}{:>13.0}{:>13.0}{:>12.0}{:>12.0}{:>12.1}{:>8}",
            row.name,
            row.per_second,
            row.per_second_alone,
            row.transfers_per_second,
            row.invalidations_per_second,
            row.cpu_us_per_transfer,
            if row.is_exact { "yes" } else { "NO" }
        );
    }
    let _ = writeln!(
        text,
        "\n{:<28}{:>9}{:>9}{:>9}",
        "us CPU for a request", "2 nodes", "4 nodes", "x"
    );
    for row in &result.cost {
        let _ = writeln!(
            text,
            "{:<28}{:>9.1}{:>9.1}{:>9.2}",
            row.name, row.two_nodes_cpu_us, row.four_nodes_cpu_us, row.ratio
        );
    }
    text
}
