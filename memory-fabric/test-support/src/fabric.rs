//! A fabric with a real donor, and threads that access it as vCPUs do.

use fabric_homes::NodeIds;
use fabric_transport::rdma::DeviceChoice;
use memory_fabric::donor::server::{Donor, DonorConfig};
use memory_fabric::fabric::{
    Compression, DonorAddress, Fabric, FabricConfig, FabricError, FabricEvent, FabricObserver,
    LocalUse, OnLostMemory, Redundancy, Sealing, TransportKind,
};
use memory_fabric::page::{PAGE_SIZE, PageIndex, PageRange};
use std::io::{Read as _, Write as _};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Timeout of every wait, far longer than any takes unless it hangs.
pub const PATIENCE: Duration = Duration::from_secs(60);

pub const MIB: u64 = 1 << 20;

/// Default lease duration of donors.
const LEASE: Duration = Duration::from_secs(30);

fn donor_with(listen: SocketAddr, memory_bytes: u64, lease_duration_max: Duration) -> Donor {
    Donor::start(&DonorConfig {
        credentials: None,
        listen,
        memory_bytes,
        lease_duration_max,
        spin: Duration::from_micros(20),
        rdma: DeviceChoice::None,
        allow: None,
    })
    .expect("a donor on loopback")
}

pub fn donor_on(listen: SocketAddr, memory_bytes: u64) -> Donor {
    donor_with(listen, memory_bytes, LEASE)
}

/// Starts a donor with this lease duration.
pub fn donor_for(memory_bytes: u64, lease_duration_max: Duration) -> Donor {
    donor_with(([127, 0, 0, 1], 0).into(), memory_bytes, lease_duration_max)
}

pub fn donor(memory_bytes: u64) -> Donor {
    donor_for(memory_bytes, LEASE)
}

/// Breaks all connections of the donors in turn.
pub struct Breaker<'a> {
    donors: &'a [Donor],
    /// Pages that each donor had transferred when its connections were last broken.
    carried: Vec<AtomicU64>,
    interval: Duration,
    started: Instant,
    due: AtomicU64,
    broken: AtomicU64,
}

/// Interval between two breaks; connecting takes a millisecond.
pub const BREAK_INTERVAL: Duration = Duration::from_millis(50);

/// Minimum of breaks for a meaningful test.
const BREAKS_MIN: u64 = 4;

impl<'a> Breaker<'a> {
    pub fn new(donors: &'a [Donor], interval: Duration) -> Self {
        Self {
            donors,
            carried: donors.iter().map(|_| AtomicU64::new(u64::MAX)).collect(),
            interval,
            started: Instant::now(),
            due: AtomicU64::new(0),
            broken: AtomicU64::new(0),
        }
    }

    /// Breaks what is due and has transferred pages since the last break; call it repeatedly.
    /// Without this condition a donor would be lost on a host where connecting takes longer than
    /// the interval.
    pub fn tick(&self) {
        let due = self.started.elapsed().as_millis() / self.interval.as_millis();
        let due = u64::try_from(due).expect("short");
        if self.due.fetch_max(due, Ordering::Relaxed) >= due {
            return;
        }
        let turn = usize::try_from(due).expect("small") % self.donors.len();
        let status = self.donors[turn].pool().status();
        let carried = status.pages_read + status.pages_written;
        if self.carried[turn].swap(carried, Ordering::Relaxed) != carried {
            self.donors[turn].break_connections();
            self.broken.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Checks that connections were broken often enough.
    pub fn assert_broke(&self) {
        let broken = self.broken.load(Ordering::Relaxed);
        assert!(self.is_enough(), "only {broken} were broken");
    }

    /// Returns whether connections were broken often enough.
    pub fn is_enough(&self) -> bool {
        self.broken.load(Ordering::Relaxed) >= BREAKS_MIN
    }
}

pub fn config(guest_bytes: u64, local_bytes: u64, donors: &[SocketAddr]) -> FabricConfig {
    let pages = u32::try_from(guest_bytes / PAGE_SIZE as u64).expect("a small guest");
    FabricConfig {
        vm: "test".into(),
        // One for the loopback slab too, which tests choose later.
        nodes: NodeIds::in_order(donors.len().max(1)),
        ram: vec![PageRange::new(PageIndex::new(0), pages)],
        local_bytes,
        local_use: LocalUse::Cache,
        donors: donors
            .iter()
            .map(|&address| DonorAddress {
                name: None,
                zone: None,
                address,
                fingerprint: None,
                bytes: None,
            })
            .collect(),
        redundancy: Redundancy::None,
        transport: TransportKind::Tcp,
        rdma: Arc::default(),
        credentials: None,
        checksum: false,
        seal: Sealing::Off,
        compression: Compression::Auto,
        grace: Duration::from_secs(10),
        on_lost_memory: OnLostMemory::End,
        prefetch: true,
        record: false,
        replay: Vec::new(),
        spin: Duration::from_micros(20),
        huge_pages: true,
        hotplug: None,
    }
}

/// A running fabric and its events.
pub struct Running {
    pub fabric: Fabric,
    pub events: Receiver<FabricEvent>,
}

pub fn start(config: &FabricConfig) -> Running {
    start_by(Fabric::start, config)
}

/// The same on a host whose kernel lacks CONTINUE with write protection.
pub fn start_as_on_old_kernels(config: &FabricConfig) -> Running {
    start_by(Fabric::start_as_on_old_kernels, config)
}

/// The same on a host whose kernel loses write protection.
pub fn start_without_write_protection(config: &FabricConfig) -> Running {
    start_by(Fabric::start_without_write_protection, config)
}

fn start_by(
    start: fn(&FabricConfig, &FabricObserver) -> Result<Fabric, FabricError>,
    config: &FabricConfig,
) -> Running {
    let (sender, events): (Sender<FabricEvent>, _) = channel();
    let sender = Mutex::new(sender);
    let fabric = start(
        config,
        &(Arc::new(move |event| {
            if let FabricEvent::Failed(why) = &event {
                // Threads that wait for pages would hang, so the test aborts with a message.
                eprintln!("pager failed: {why}");
                std::process::abort();
            }
            let _ = sender.lock().unwrap().send(event);
        }) as Arc<dyn Fn(FabricEvent) + Send + Sync>),
    );
    Running {
        fabric: fabric.expect("the fabric starts"),
        events,
    }
}

/// The guest view as words that threads share.
#[derive(Clone, Copy)]
pub struct Words {
    base: usize,
    count: usize,
}

pub const WORDS_PER_PAGE: usize = PAGE_SIZE / 8;

impl Words {
    /// Returns the words of a fabric, which must outlive them.
    pub fn of(fabric: &Fabric) -> Self {
        let memory = fabric.memory();
        Self {
            base: memory.guest_view().expose_provenance(),
            count: memory.bytes() / 8,
        }
    }

    pub fn at(&self, page: usize, word: usize) -> &AtomicU64 {
        let index = page * WORDS_PER_PAGE + word;
        assert!(index < self.count);
        let words = std::ptr::with_exposed_provenance::<AtomicU64>(self.base);
        // SAFETY: inside the guest view, which is mapped while the fabric lives, is aligned,
        // and is only accessed by atomics.
        unsafe { &*words.add(index) }
    }

    /// Reads a page by a system call; `None` where an access of a thread would raise an error of
    /// the memory.
    pub fn read(&self, page: usize) -> Option<Vec<u64>> {
        let (mut end, mut start) = std::io::pipe().expect("a pipe");
        let words = std::ptr::from_ref(self.at(page, 0));
        // SAFETY: a page of the guest view, as in `at`. The slice is only passed to the kernel.
        let bytes = unsafe { std::slice::from_raw_parts(words.cast::<u8>(), PAGE_SIZE) };
        start.write_all(bytes).ok()?;
        let mut found = [0; PAGE_SIZE];
        end.read_exact(&mut found).expect("what was written");
        let (words, _) = found.as_chunks::<8>();
        Some(words.iter().map(|word| u64::from_le_bytes(*word)).collect())
    }

    /// Writes a page by a system call; false where an access of a thread would raise an error of the
    /// memory. No other thread may access the page meanwhile.
    pub fn write(&self, page: usize, words: &[u64]) -> bool {
        let (mut end, mut start) = std::io::pipe().expect("a pipe");
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        assert_eq!(bytes.len(), PAGE_SIZE);
        start.write_all(&bytes).expect("room for a page");
        let words = self.at(page, 0).as_ptr();
        // SAFETY: a page of the guest view, as in `at`, which the caller has for itself. The slice is
        // only passed to the kernel.
        let bytes = unsafe { std::slice::from_raw_parts_mut(words.cast::<u8>(), PAGE_SIZE) };
        end.read_exact(bytes).is_ok()
    }

    pub fn pages(&self) -> usize {
        self.count / WORDS_PER_PAGE
    }
}

/// Writes a pattern to every page, and then verifies every word of every page.
pub fn fill(words: Words, seed: u64) {
    for page in 0..words.pages() {
        for word in 0..WORDS_PER_PAGE {
            words
                .at(page, word)
                .store(pattern(seed, page, word), Ordering::Relaxed);
        }
    }
}

pub fn verify(words: Words, seed: u64) {
    for page in 0..words.pages() {
        verify_page(words, seed, page);
    }
}

pub fn verify_page(words: Words, seed: u64, page: usize) {
    check_words(words, seed, page, WORDS_PER_PAGE);
}

/// Verifies a page except for its last word.
pub fn check_page(words: Words, seed: u64, page: usize) {
    check_words(words, seed, page, WORDS_PER_PAGE - 1);
}

fn check_words(words: Words, seed: u64, page: usize, count: usize) {
    for word in 0..count {
        let found = words.at(page, word).load(Ordering::Relaxed);
        assert_eq!(found, pattern(seed, page, word), "page {page} word {word}");
    }
}

/// Checks that every word of the pages is `wanted`.
pub fn assert_all(words: Words, pages: std::ops::Range<usize>, wanted: u64) {
    for page in pages {
        for word in 0..WORDS_PER_PAGE {
            let found = words.at(page, word).load(Ordering::Relaxed);
            assert_eq!(found, wanted, "page {page} word {word}");
        }
    }
}

pub fn wait_until(what: &str, condition: impl Fn() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::yield_now();
    }
}

pub fn range(first: usize, count: usize) -> PageRange {
    let number = |n: usize| u32::try_from(n).expect("a small guest");
    PageRange::new(PageIndex::new(number(first)), number(count))
}

/// Returns the pattern of a word in a page. Three of four pages are compressible; all words differ.
pub fn pattern(seed: u64, page: usize, word: usize) -> u64 {
    let mix = |word: u64| {
        let mixed = seed ^ ((page as u64) << 20) ^ word;
        mixed.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(17)
    };
    let word = word as u64;
    if page.is_multiple_of(4) {
        mix(word) | 1
    } else {
        mix(0) & !0xffff | word << 1 | 1
    }
}

/// A small generator: SplitMix64 (Steele, Lea and Flood, 2014).
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    pub fn below(&mut self, limit: usize) -> usize {
        usize::try_from(self.next() % limit as u64).expect("below a usize")
    }
}

/// Starts a fabric that must fail to start, and returns the reason.
pub fn refusal(config: &FabricConfig) -> String {
    let quiet: FabricObserver = Arc::new(|_| {});
    let error = Fabric::start(config, &quiet).expect_err("refused");
    let mut text = error.to_string();
    let mut source = std::error::Error::source(&error);
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}
