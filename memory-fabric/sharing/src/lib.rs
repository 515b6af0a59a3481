//! One guest memory on several compute nodes: runs the protocol of `fabric-coherence` over
//! userfaultfd, the memory of this node, and its peers.
//!
//! One thread does everything: it reads faults, handles messages, unmaps and maps pages, and calls
//! the protocol's pure functions. So a fault is answered with the least number of hand-offs between
//! threads, and no lock is taken. Threads that touch the guest view wait in the kernel; the engine
//! never touches it.

mod ahead;
mod away;
mod carry;
mod depot;
mod discards;
mod engine;
mod evict;
mod faults;
mod fences;
mod frames;
mod give_way;
mod halts;
mod home;
mod homes;
mod hot;
mod losses;
mod merge;
mod owned;
mod requests;
mod sleep;
mod sources;
mod starvation;
mod stats;
mod timers;
mod waits;

use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use fabric_coherence::{Member, MemberSet, Offence};
use fabric_homes::BLOCK_BYTES;
use fabric_pages::guest_memory::GuestMemory;
use fabric_pages::page::{PAGE_SIZE, PageIndex};
use fabric_pages::uffd::UffdError;
use fabric_peers::{PeerError, Peers};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

pub use depot::{Depot, Stored};
pub use discards::{DISCARD_TIME_MAX, DiscardError, Discards};
pub use fences::TableFences;
use frames::Frames;
pub use halts::Halts;
pub use homes::{Homes, Layout, TooLittleLent};
pub use hot::{HotPage, HotPages};
use losses::FenceRequest;
pub use losses::{Losses, PageRanges};
use sleep::Signals;
pub use stats::SharingStats;
pub use waits::Waits;

/// Why the shared memory cannot be served any longer, or not at all.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// No userfaultfd can be used.
    #[error(transparent)]
    Uffd(#[from] UffdError),
    /// The kernel is too old.
    #[error(
        "this kernel cannot map a page write-protected by UFFDIO_CONTINUE: coherent memory needs \
         Linux 6.4 or newer"
    )]
    OldKernel,
    /// The kernel lets shared pages be written unnoticed.
    #[error(
        "this kernel does not keep the write protection of userfaultfd, or that cannot be found out, so \
         writes to pages that nodes share would go unnoticed; `ssi-hv doctor` has the remedy"
    )]
    LostProtection,
    /// A call on guest memory failed.
    #[error("{call} failed on {page}")]
    Userfaultfd {
        /// The call.
        call: &'static str,
        /// The page.
        page: PageIndex,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// Another system call failed.
    #[error("{0} failed")]
    System(&'static str, #[source] io::Error),
    /// A fault outside the guest's memory.
    #[error("fault at host address {0:#x}, which is no guest memory")]
    Stray(usize),
    /// A node broke the protocol, or did not answer in time.
    #[error("{0}; it is fenced, and the VM ends")]
    Offence(Offence),
    /// A peer is lost.
    #[error(transparent)]
    Peer(#[from] PeerError),
    /// The home of a page has no bytes of it.
    #[error("{peer} asked for {page}, which nobody wrote back")]
    NotStored {
        /// Who asked.
        peer: Member,
        /// The page.
        page: PageIndex,
    },
    /// This node did what it must not do.
    #[error("{0} on {1}: a defect of this program")]
    Defect(&'static str, PageIndex),
    /// The engine's thread panicked.
    #[error("the thread that serves shared memory panicked")]
    Panicked,
    /// A value of the configuration.
    #[error("{name} is {value}, {limit}")]
    Invalid {
        /// Its name.
        name: &'static str,
        /// Its value.
        value: u64,
        /// What is allowed.
        limit: &'static str,
    },
}

/// Not a source as well: the text has it already.
impl From<Offence> for Failure {
    fn from(offence: Offence) -> Self {
        Self::Offence(offence)
    }
}

/// Receives the failure of an engine, once, and what is lost with the node that is its cause.
pub type FailureObserver = Box<dyn FnOnce(Failure, Losses) + Send>;

/// How long the engine polls before it sleeps: longer than a transfer takes on a fast link, so that
/// neither end sleeps during one, and as long as KVM polls for a halted vCPU (`halt_poll_ns`).
const SPIN: Duration = Duration::from_micros(200);

/// The time in which a vCPU that got a page surely progressed, and the unit of holds. Larger than
/// a wake-up.
const HOLD_UNIT: Duration = Duration::from_micros(50);

/// Longest time for which an access holds the pages that it collects, in units of holds, and as a part
/// of a transaction's longest time.
const GANG_UNITS_MAX: u32 = 8192;
const GANG_PART: u32 = 8;

/// Longest time that one transaction may take.
const TRANSACTION_TIME_MAX: Duration = Duration::from_secs(20);

/// What an engine is started with. The same on every node, except for `me` and `local_pages`.
#[derive(Clone, Debug)]
pub struct Config {
    /// This node.
    pub me: Member,
    /// All compute nodes.
    pub members: MemberSet,
    /// The homes of all blocks; `None` for one member after the other.
    pub homes: Option<Homes>,
    /// Most pages with bytes on this node, in its guest view or stored as a home. At least those of
    /// which it is the home, without those that have a place in its depot, and [`LOCAL_PAGES_MIN`]
    /// more.
    pub local_pages: usize,
    /// How long the thread polls for work before it sleeps.
    pub spin: Duration,
    /// Unit of the minimum hold of a page.
    pub hold_unit: Duration,
    /// Longest time of one transaction, after which the node that delays it is fenced.
    pub transaction_time_max: Duration,
    /// Merges the kernel's page tables of which this node is the home.
    pub merge_tables: bool,
}

impl Config {
    /// The usual values, with all memory local.
    #[must_use]
    pub const fn new(me: Member, members: MemberSet) -> Self {
        Self {
            me,
            members,
            homes: None,
            local_pages: usize::MAX,
            spin: SPIN,
            hold_unit: HOLD_UNIT,
            transaction_time_max: TRANSACTION_TIME_MAX,
            merge_tables: false,
        }
    }
}

/// Least pages beside those of which a node is the home: what all its vCPUs may wait for and hold,
/// twice.
pub const LOCAL_PAGES_MIN: usize = 2 * fabric_coherence::cache::PENDING_MAX;

/// Most merged tables of all nodes together. They are not evicted, and fit [`LOCAL_PAGES_MIN`] beside
/// what vCPUs wait for.
const TABLES_MAX: usize = LOCAL_PAGES_MIN / 2;

/// A guest memory that this node shares with its peers. Dropping it stops the engine; no thread may
/// touch the guest view then, or wait for a page of it. Where the engine has failed before, system
/// calls that still wait fail with EFAULT, and other accesses raise SIGSEGV.
#[derive(Debug)]
pub struct SharedMemory {
    memory: Arc<GuestMemory>,
    stats: Arc<SharingStats>,
    stop: Arc<EventFd>,
    fence: Arc<FenceRequest>,
    fences: Arc<TableFences>,
    halts: Arc<Halts>,
    discards: Arc<Discards>,
    /// Returns the frames of an engine that has failed.
    thread: Option<JoinHandle<Option<Frames>>>,
}

impl SharedMemory {
    /// Starts the engine.
    ///
    /// # Errors
    /// When a value is out of its range, or the host lacks something.
    pub fn start<P: Peers + Send + 'static>(
        config: Config,
        memory: Arc<GuestMemory>,
        peers: P,
        failed: FailureObserver,
    ) -> Result<Self, Failure> {
        Self::start_with(config, memory, peers, None, failed)
    }

    /// Starts the engine of a node whose home stores in `depot` what it has no room for.
    ///
    /// # Errors
    /// As for [`start`](Self::start).
    pub fn start_with<P: Peers + Send + 'static>(
        config: Config,
        memory: Arc<GuestMemory>,
        peers: P,
        depot: Option<Box<dyn Depot>>,
        failed: FailureObserver,
    ) -> Result<Self, Failure> {
        let blocks = memory.bytes() / PAGE_SIZE / owned::PAGES;
        let homes = config.homes.clone();
        let homes = homes.unwrap_or_else(|| Homes::in_turns(config.members, blocks));
        let elsewhere = depot.as_ref().map_or(0, |depot| depot.pages());
        let kept = homes.pages_at(config.me).saturating_sub(elsewhere);
        if config.local_pages < kept.saturating_add(LOCAL_PAGES_MIN) {
            return Err(Failure::Invalid {
                name: "the number of local pages",
                value: config.local_pages as u64,
                limit: "it has to be 256 more than the pages of which the node is the home and that \
                        have no place in its depot",
            });
        }
        if config.merge_tables && depot.is_some() {
            return Err(Failure::Invalid {
                name: "the number of pages in a depot",
                value: elsewhere as u64,
                limit: "it has to be 0 where page tables are merged, since these are not evicted",
            });
        }
        if homes.len() != blocks {
            return Err(Failure::Invalid {
                name: "the number of blocks that have a home",
                value: homes.len() as u64,
                limit: "it has to be that of the memory",
            });
        }
        if !(memory.bytes() as u64).is_multiple_of(BLOCK_BYTES) {
            return Err(Failure::Invalid {
                name: "the size of shared memory",
                value: memory.bytes() as u64,
                limit: "it has to be whole blocks of 2 MiB",
            });
        }
        if config.hold_unit.is_zero() || config.hold_unit > config.transaction_time_max / 256 {
            return Err(Failure::Invalid {
                name: "the unit of holds in microseconds",
                value: u64::try_from(config.hold_unit.as_micros()).unwrap_or(u64::MAX),
                limit: "it has to be more than 0 and less than 1/256 of a transaction's longest time",
            });
        }
        let stop = EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK);
        let stop = Arc::new(stop.map_err(|error| Failure::System("create an eventfd", error))?);
        let fences = TableFences::new();
        let fences = Arc::new(fences.map_err(|error| Failure::System("create an eventfd", error))?);
        let halts = Halts::new();
        let halts = Arc::new(halts.map_err(|error| Failure::System("create an eventfd", error))?);
        let discards = Discards::new();
        let discards = discards.map_err(|error| Failure::System("create an eventfd", error))?;
        let discards = Arc::new(discards);
        let stats = Arc::new(SharingStats::default());
        let fence = Arc::new(FenceRequest::default());
        let mut engine = engine::Engine::new(
            config,
            &homes,
            Arc::clone(&memory),
            peers,
            Signals {
                stop: Arc::clone(&stop),
                fence: Arc::clone(&fence),
                fences: Arc::clone(&fences),
                halts: Arc::clone(&halts),
                discards: Arc::clone(&discards),
            },
            Arc::clone(&stats),
        )?;
        if let Some(depot) = depot {
            engine.set_depot(depot);
        }
        let thread = std::thread::Builder::new().name("sharing".into());
        let thread = thread.spawn(move || engine::supervise(engine, failed));
        let thread = thread.map_err(|error| Failure::System("start a thread", error))?;
        Ok(Self {
            memory,
            stats,
            stop,
            fence,
            fences,
            halts,
            discards,
            thread: Some(thread),
        })
    }

    /// The memory, whose guest view may be touched by any thread.
    #[must_use]
    pub const fn memory(&self) -> &Arc<GuestMemory> {
        &self.memory
    }

    /// Ends the engine because a node is lost, by what the caller knows of it: the observer of
    /// failures gets what is lost with that node. It is not called again if the engine has failed
    /// before. Threads that wait for a page wait for ever.
    pub fn fence(&self, lost: Member) {
        self.fence.ask(lost);
        // A full counter is readable as well.
        let _ = self.stop.write(1);
    }

    /// What to wait for before acting on other nodes by other means than this memory.
    #[must_use]
    pub const fn fences(&self) -> &Arc<TableFences> {
        &self.fences
    }

    /// What a vCPU's thread lets know that it halts.
    #[must_use]
    pub const fn halts(&self) -> &Arc<Halts> {
        &self.halts
    }

    /// Drops what the guest does not need.
    #[must_use]
    pub const fn discards(&self) -> &Arc<Discards> {
        &self.discards
    }

    /// Counters of the engine.
    #[must_use]
    pub const fn stats(&self) -> &Arc<SharingStats> {
        &self.stats
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // A full counter is readable as well.
        let _ = self.stop.write(1);
        let ended = self.thread.take().map(JoinHandle::join);
        if let Some(Ok(Some(frames))) = ended {
            frames.end();
        }
    }
}
