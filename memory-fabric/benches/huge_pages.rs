//! Random touches of memory that is all local, through the guest view, in turns without and with
//! huge pages. Says something only where `shmem_enabled` is `advise`, `within_size` or `always`.

use fabric_homes::NodeIds;
use memory_fabric::fabric::{
    Compression, Fabric, FabricConfig, FabricEvent, LocalUse, OnLostMemory, Redundancy,
    SPIN_DEFAULT, Sealing, TransportKind,
};
use memory_fabric::guest_memory::huge_bytes;
use memory_fabric::page::{PAGE_SIZE, PageIndex, PageRange};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

const ROUNDS: u64 = 5;
const BYTES: usize = 1 << 30;
const WORDS: usize = BYTES / 8;
const TOUCHES: u32 = 20_000_000;

fn main() {
    for round in 1..=ROUNDS {
        for huge_pages in [false, true] {
            measure(round, huge_pages);
        }
    }
}

fn measure(round: u64, huge_pages: bool) {
    let config = FabricConfig {
        vm: "bench".into(),
        nodes: NodeIds::in_order(0),
        ram: vec![PageRange::new(PageIndex::new(0), 1 << 18)],
        local_bytes: BYTES as u64,
        local_use: LocalUse::Cache,
        donors: Vec::new(),
        redundancy: Redundancy::None,
        transport: TransportKind::Tcp,
        rdma: Default::default(),
        credentials: None,
        checksum: false,
        seal: Sealing::Off,
        compression: Compression::Auto,
        grace: Duration::from_secs(1),
        on_lost_memory: OnLostMemory::End,
        prefetch: true,
        record: false,
        replay: Vec::new(),
        spin: SPIN_DEFAULT,
        huge_pages,
        hotplug: None,
    };
    let observer = Arc::new(|_: FabricEvent| {});
    let fabric = Fabric::start(&config, &(observer as _)).expect("all of it is local");
    let base = fabric.memory().guest_view().cast::<AtomicU64>();
    // SAFETY: the guest view has so many words, is aligned, is mapped while the fabric lives,
    // and is accessed through these atomics only.
    let words = unsafe { std::slice::from_raw_parts(base, WORDS) };
    let started = Instant::now();
    for page in words.chunks(PAGE_SIZE / 8) {
        page[0].store(1, Ordering::Relaxed);
    }
    let first = started.elapsed();
    let mut random = round;
    let started = Instant::now();
    for _ in 0..TOUCHES {
        // The next place depends on what was read: one touch at a time.
        random = random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        let place = usize::try_from(random >> 37).unwrap_or(0) % WORDS;
        random ^= words[place].load(Ordering::Relaxed);
    }
    let each = started.elapsed().as_secs_f64() * 1e9 / f64::from(TOUCHES);
    println!(
        "round {round} huge pages {huge_pages:5}: {each:6.1} ns a touch, first touch of 1 GiB {:5} ms, {} MiB huge",
        first.as_millis(),
        huge_bytes().unwrap_or(0) >> 20
    );
    fabric.shutdown();
}
