//! A VM's memory without a VM: accesses pages on a donor as a vCPU does, verifies each byte until a
//! signal arrives, and prints the results.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use clap::{Args, ValueEnum};
use fabric_homes::{CACHE_PAGES_MIN, NodeIds};
use memory_fabric::fabric::{
    Compression, DonorAddress, Fabric, FabricConfig, FabricEvent, FabricObserver, LocalUse,
    OnLostMemory, Redundancy, SPIN_DEFAULT, Sealing, TransportKind,
};
use memory_fabric::guest_memory::GuestMemory;
use memory_fabric::link::LinkEvent;
use memory_fabric::page::{PAGE_SHIFT, PAGE_SIZE, PageIndex, PageRange};
use memory_fabric::view::FabricView;
use signal_hook::consts::{SIGTERM, SIGUSR1};
use signal_hook::iterator::Signals;

use super::scattered;

const WORDS: usize = PAGE_SIZE / 8;
/// One of this many accesses writes.
const WRITES_OF: u64 = 4;
/// Exit code when the donor's memory is lost: that of `ssi-hv run`.
const LOST: i32 = 5;

/// How pages travel.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum By {
    /// RDMA where available.
    Auto,
    /// RDMA only.
    Rdma,
}

/// Arguments of the walker.
#[derive(Debug, Args)]
pub struct Arguments {
    /// The donor
    donor: SocketAddr,
    /// Memory in MiB, 16 of which are local
    #[arg(long, default_value_t = 40)]
    mib: u64,
    /// How pages travel
    #[arg(long, default_value = "rdma")]
    transport: By,
}

/// Returns the configuration of a VM with this much memory and the smallest cache.
pub(super) fn config(donor: SocketAddr, bytes: u64, transport: TransportKind) -> FabricConfig {
    let pages = u32::try_from(bytes >> PAGE_SHIFT).unwrap_or(u32::MAX);
    FabricConfig {
        vm: "walk".into(),
        nodes: NodeIds::in_order(1),
        ram: vec![PageRange::new(PageIndex::new(0), pages)],
        local_bytes: CACHE_PAGES_MIN << PAGE_SHIFT,
        local_use: LocalUse::Cache,
        donors: vec![DonorAddress {
            name: None,
            zone: None,
            address: donor,
            bytes: Some(bytes),
            fingerprint: None,
        }],
        redundancy: Redundancy::None,
        transport,
        rdma: Arc::default(),
        credentials: None,
        checksum: false,
        seal: Sealing::Off,
        compression: Compression::Off,
        grace: Duration::from_secs(30),
        on_lost_memory: OnLostMemory::End,
        prefetch: true,
        record: false,
        replay: Vec::new(),
        spin: SPIN_DEFAULT,
        huge_pages: false,
        hotplug: None,
    }
}

/// Returns an observer for a fabric in which no failure is expected.
pub(super) fn deaf() -> FabricObserver {
    Arc::new(|event| {
        if let FabricEvent::Failed(why) = event {
            // A thread that waits for a page would hang.
            eprintln!("rdma-faults: the pager failed: {why}");
            std::process::abort();
        }
    })
}

/// The guest view as words.
#[derive(Clone)]
struct Words {
    memory: Arc<GuestMemory>,
    pages: u64,
}

impl Words {
    fn of(fabric: &Fabric) -> Self {
        let memory = Arc::clone(fabric.memory());
        let pages = (memory.bytes() / PAGE_SIZE) as u64;
        Self { memory, pages }
    }

    fn page(&self, page: u64) -> &[AtomicU64] {
        let page = usize::try_from(page).expect("a small guest");
        &self.memory.guest_words()[page * WORDS..][..WORDS]
    }

    /// Writes the contents of a page for its `age`.
    fn write(&self, page: u64, age: u32) {
        for (number, word) in (0..).zip(self.page(page)) {
            word.store(value(page, age, number), Ordering::Relaxed);
        }
    }

    /// Returns the number of bytes of a page that differ from the expected contents.
    fn wrong_bytes(&self, page: u64, age: u32) -> u64 {
        let words = (0..).zip(self.page(page));
        let wrong = words
            .filter(|&(number, word)| word.load(Ordering::Relaxed) != value(page, age, number));
        8 * wrong.count() as u64
    }
}

fn value(page: u64, age: u32, word: u64) -> u64 {
    scattered(page << 10 | word).wrapping_add(u64::from(age))
}

/// Writes every page and verifies some; returns the number of wrong bytes.
pub(super) fn fill_and_check(fabric: &Fabric, touches: u64) -> u64 {
    let words = Words::of(fabric);
    (0..words.pages).for_each(|page| words.write(page, 1));
    let pages = (0..touches).map(|touch| scattered(touch) % words.pages);
    pages.map(|page| words.wrong_bytes(page, 1)).sum()
}

/// Counters of the walker; relaxed, since they are independent of each other.
#[derive(Debug, Default)]
struct Counts {
    touches: AtomicU64,
    corrupt: AtomicU64,
    longest_ns: AtomicU64,
    stop: AtomicBool,
}

/// Fills the memory, prints `WALKING`, and accesses pages until SIGTERM. Each SIGUSR1 prints `SO
/// FAR ` and JSON, and resets the longest access. When the donor's memory is lost, prints `LOST `
/// and the reason, and exits with code 5.
///
/// # Errors
/// Fails when no memory can be obtained, or a byte was wrong.
pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let mut signals = Signals::new([SIGTERM, SIGUSR1])?;
    let transport = match arguments.transport {
        By::Auto => TransportKind::Auto,
        By::Rdma => TransportKind::Rdma,
    };
    let (observer, events) = observer();
    let fabric = Fabric::start(
        &config(arguments.donor, arguments.mib << 20, transport),
        &observer,
    )?;
    let words = Words::of(&fabric);
    (0..words.pages).for_each(|page| words.write(page, 1));
    let counts = Arc::new(Counts::default());
    let walker = {
        let counts = Arc::clone(&counts);
        let walk = move || walk(words, &counts);
        std::thread::Builder::new()
            .name("walker".into())
            .spawn(walk)?
    };
    println!(
        "WALKING {} ({})",
        fabric.path().name(),
        fabric.rdma_refusals().join("; ")
    );
    for signal in signals.forever() {
        let stop = signal == SIGTERM;
        if stop {
            counts.stop.store(true, Ordering::Relaxed);
            break;
        }
        println!("SO FAR {}", so_far(fabric.view(), &counts, &events));
    }
    walker.join().ok().context("the walker panicked")?;
    println!("DONE {}", so_far(fabric.view(), &counts, &events));
    let corrupt = counts.corrupt.load(Ordering::Relaxed);
    fabric.shutdown();
    anyhow::ensure!(corrupt == 0, "{corrupt} bytes were wrong");
    Ok(())
}

fn walk(words: Words, counts: &Counts) {
    let mut ages = vec![1_u32; usize::try_from(words.pages).expect("a small guest")];
    for turn in 0_u64.. {
        if counts.stop.load(Ordering::Relaxed) {
            return;
        }
        let random = scattered(turn);
        let page = random % words.pages;
        let age = &mut ages[usize::try_from(page).expect("a small guest")];
        let started = Instant::now();
        let wrong = words.wrong_bytes(page, *age);
        if (random >> 32).is_multiple_of(WRITES_OF) {
            *age += 1;
            words.write(page, *age);
        }
        let took = u64::try_from(started.elapsed().as_nanos()).unwrap_or(u64::MAX);
        counts.corrupt.fetch_add(wrong, Ordering::Relaxed);
        counts.longest_ns.fetch_max(took, Ordering::Relaxed);
        counts.touches.fetch_add(1, Ordering::Relaxed);
    }
}

/// Keeps the link's events; the loss of memory ends the process.
fn observer() -> (FabricObserver, Receiver<String>) {
    let (sender, events) = channel();
    let sender = Mutex::new(sender);
    let observer: FabricObserver = Arc::new(move |event| match event {
        FabricEvent::Link(LinkEvent::Lost { reason, .. }) => {
            println!("LOST {reason}");
            std::process::exit(LOST);
        }
        FabricEvent::Link(event) => {
            if let Ok(sender) = sender.lock() {
                // The receiver lives until the end.
                let _ = sender.send(format!("{event:?}"));
            }
        }
        // Its memory has one copy, and ends with it.
        FabricEvent::Poisoned(_)
        | FabricEvent::Degraded { .. }
        | FabricEvent::AwaitedNoMore { .. }
        | FabricEvent::Repaired
        | FabricEvent::Drained(_)
        | FabricEvent::Rebalanced(_) => {}
        FabricEvent::Failed(why) => {
            eprintln!("rdma-faults: the pager failed: {why}");
            std::process::abort();
        }
    });
    (observer, events)
}

fn so_far(view: &FabricView, counts: &Counts, events: &Receiver<String>) -> serde_json::Value {
    let nodes = view.nodes();
    let rdma = nodes.iter().find_map(|node| node.rdma);
    let connected = view
        .rdma()
        .into_iter()
        .flatten()
        .any(|rdma| rdma.is_connected());
    // Less than an hour in nanoseconds is exact.
    #[allow(clippy::cast_precision_loss, reason = "see above")]
    let longest_ms = counts.longest_ns.swap(0, Ordering::Relaxed) as f64 / 1e6;
    serde_json::json!({
        "touches": counts.touches.load(Ordering::Relaxed),
        "corrupt_bytes": counts.corrupt.load(Ordering::Relaxed),
        "longest_ms": longest_ms,
        "pages_read": rdma.map_or(0, |rdma| rdma.pages_read),
        "pages_fetched": nodes.iter().map(|node| node.pages_fetched).sum::<u64>(),
        "connections": rdma.map_or(0, |rdma| rdma.connections),
        "failures": rdma.map_or(0, |rdma| rdma.failures),
        "connected": connected,
        "events": events.try_iter().collect::<Vec<_>>(),
    })
}
