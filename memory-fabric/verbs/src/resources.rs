//! What this process uses of what there is only so much of: queue pairs and the like of a
//! device, connections of a node, memory that may be pinned.
//!
//! A device's limits are those of the whole host, and what is counted is this process's part. So
//! a verb may fail before the count reaches the limit; where the count does reach it, the error
//! says what, how many and what to do, and no verb is tried.

use super::RdmaError;
use serde::Serialize;
use std::fs;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

/// Parts of a limit, of five, from which on its use is warned about: 80 %.
const WARN_FIFTHS: u64 = 4;

/// A limit that stands for none.
const NONE: u64 = u64::MAX;

/// Bit of `CapEff` in `/proc/self/status` with which the limit of locked memory does not count
/// (`CAP_IPC_LOCK` of `linux/capability.h`).
const CAP_IPC_LOCK: u32 = 14;

/// How many of something are in use, and how many there may be.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Serialize)]
pub struct Usage {
    /// In use by this process.
    pub in_use: u64,
    /// How many there may be; `None` where there is no limit.
    pub limit: Option<u64>,
}

/// What this process uses of a device.
#[derive(Clone, Debug, Eq, PartialEq, Serialize)]
pub struct DeviceUsage {
    /// The device.
    pub device: String,
    /// One for each connection.
    pub queue_pairs: Usage,
    /// Where requests complete.
    pub completion_queues: Usage,
    /// Pieces of memory that it may reach.
    pub memory_regions: Usage,
    /// What keeps VMs apart.
    pub protection_domains: Usage,
}

/// A limit, and what is taken of it.
#[derive(Debug)]
pub struct Quota {
    /// In the plural: "queue pairs".
    what: &'static str,
    /// Whose: "rxe0".
    of: String,
    /// What to do when all are taken.
    remedy: &'static str,
    // Relaxed, both: they say nothing about other memory.
    in_use: AtomicU64,
    limit: u64,
    warned: AtomicBool,
}

/// What was taken of a quota; given back when it is dropped.
#[derive(Debug)]
pub struct Share {
    quota: Arc<Quota>,
    amount: u64,
}

impl Quota {
    /// A quota of `limit` things named `what` of owner `of`; the error for one too many says `remedy`.
    pub fn new(
        what: &'static str,
        of: impl Into<String>,
        limit: Option<u64>,
        remedy: &'static str,
    ) -> Arc<Self> {
        Arc::new(Self {
            what,
            of: of.into(),
            remedy,
            in_use: AtomicU64::new(0),
            limit: limit.unwrap_or(NONE),
            warned: AtomicBool::new(false),
        })
    }

    /// Takes one, unless all are in use.
    ///
    /// # Errors
    ///
    /// [`RdmaError::Exhausted`].
    pub fn take(self: &Arc<Self>) -> Result<Share, RdmaError> {
        let limit = self.limit;
        let one_more = |in_use| (in_use < limit).then_some(in_use + 1);
        // Relaxed: see the field.
        let taken = self
            .in_use
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more);
        match taken {
            Ok(_) => Ok(self.share(1)),
            Err(in_use) => Err(RdmaError::Exhausted {
                what: self.what,
                of: self.of.clone(),
                in_use,
                limit,
                remedy: self.remedy,
            }),
        }
    }

    /// Counts so many as taken, whatever the limit is: for one that somebody else enforces.
    pub fn count(self: &Arc<Self>, amount: u64) -> Share {
        // Relaxed: see the field.
        self.in_use.fetch_add(amount, Ordering::Relaxed);
        self.share(amount)
    }

    fn share(self: &Arc<Self>, amount: u64) -> Share {
        if self.is_to_be_warned_of() {
            let (what, of, Usage { in_use, .. }) = (self.what, &self.of, self.usage());
            let (limit, remedy) = (self.limit, self.remedy);
            tracing::warn!("{in_use} of {limit} {what} of {of} are in use; {remedy}");
        }
        Share {
            quota: Arc::clone(self),
            amount,
        }
    }

    /// Whether most of it is taken; true once only.
    fn is_to_be_warned_of(&self) -> bool {
        let Usage { in_use, limit } = self.usage();
        let Some(limit) = limit else {
            return false;
        };
        is_most(in_use, limit) && !self.warned.swap(true, Ordering::Relaxed)
    }

    /// How many are in use now.
    #[must_use]
    pub fn usage(&self) -> Usage {
        Usage {
            in_use: self.in_use.load(Ordering::Relaxed),
            limit: (self.limit != NONE).then_some(self.limit),
        }
    }
}

/// Whether `in_use` is 80 % of `limit` or more.
fn is_most(in_use: u64, limit: u64) -> bool {
    u128::from(in_use) * 5 >= u128::from(limit) * u128::from(WARN_FIFTHS)
}

impl Drop for Share {
    fn drop(&mut self) {
        self.quota.in_use.fetch_sub(self.amount, Ordering::Relaxed);
    }
}

/// What a device has, as `ibv_query_device` tells it.
#[cfg(feature = "libibverbs")]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counts {
    pub queue_pairs: libc::c_int,
    pub completion_queues: libc::c_int,
    pub memory_regions: libc::c_int,
    pub protection_domains: libc::c_int,
}

/// The quotas of an open device.
#[cfg(feature = "libibverbs")]
#[derive(Debug)]
pub(crate) struct Resources {
    device: String,
    pub(crate) queue_pairs: Arc<Quota>,
    pub(crate) completion_queues: Arc<Quota>,
    pub(crate) memory_regions: Arc<Quota>,
    pub(crate) protection_domains: Arc<Quota>,
}

#[cfg(feature = "libibverbs")]
impl Resources {
    pub(crate) fn new(device: &str, counts: Counts) -> Self {
        const REMEDY: &str = "end VMs or nodes that use it, or give some of them another device";
        let quota = |what, limit| Quota::new(what, device, limit_of(limit), REMEDY);
        Self {
            device: device.to_owned(),
            queue_pairs: quota("queue pairs", counts.queue_pairs),
            completion_queues: quota("completion queues", counts.completion_queues),
            memory_regions: quota("memory regions", counts.memory_regions),
            protection_domains: quota("protection domains", counts.protection_domains),
        }
    }

    pub(crate) fn usage(&self) -> DeviceUsage {
        DeviceUsage {
            device: self.device.clone(),
            queue_pairs: self.queue_pairs.usage(),
            completion_queues: self.completion_queues.usage(),
            memory_regions: self.memory_regions.usage(),
            protection_domains: self.protection_domains.usage(),
        }
    }
}

/// A limit as a device tells it; one that is zero or negative says nothing.
#[cfg(feature = "libibverbs")]
fn limit_of(count: libc::c_int) -> Option<u64> {
    u64::try_from(count).ok().filter(|&count| count > 0)
}

/// Memory that this process has pinned for adapters, bytes. The kernel enforces the limit.
pub(crate) fn pinned() -> &'static Arc<Quota> {
    static PINNED: OnceLock<Arc<Quota>> = OnceLock::new();
    PINNED.get_or_init(|| {
        let remedy = "raise the limit of locked memory (`ulimit -l unlimited`)";
        Quota::new(
            "bytes of pinned memory",
            "this process",
            pinned_limit(),
            remedy,
        )
    })
}

/// Memory that this process has pinned for adapters, and how much it may.
#[must_use]
pub fn pinned_bytes() -> Usage {
    pinned().usage()
}

fn pinned_limit() -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    if has_capability(&status, CAP_IPC_LOCK) {
        return None;
    }
    rustix::process::getrlimit(rustix::process::Resource::Memlock).current
}

/// Whether a process with this `/proc/PID/status` has a capability.
fn has_capability(status: &str, number: u32) -> bool {
    let mask = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .is_some_and(|mask| mask & (1 << number) != 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn quota(limit: Option<u64>) -> Arc<Quota> {
        Quota::new("queue pairs", "rxe0", limit, "use another device")
    }

    #[test]
    fn what_is_taken_counts_until_it_is_dropped_and_the_limit_holds() {
        let quota = quota(Some(2));
        let (first, _second) = (quota.take().expect("one"), quota.take().expect("two"));
        let error = quota.take().expect_err("all are in use").to_string();
        assert_eq!(
            error,
            "2 of 2 queue pairs of rxe0 are in use; use another device"
        );
        assert_eq!(quota.usage().in_use, 2, "a refusal takes nothing");
        drop(first);
        let _again = quota.take().expect("one was given back");
        assert_eq!(
            quota.usage(),
            Usage {
                in_use: 2,
                limit: Some(2)
            }
        );
    }

    #[test]
    fn a_limit_of_nothing_gives_nothing_and_none_gives_all() {
        assert!(quota(Some(0)).take().is_err());
        let unlimited = quota(None);
        let shares: Vec<_> = (0..1000).map(|_| unlimited.take().expect("one")).collect();
        assert_eq!(unlimited.usage().limit, None);
        assert_eq!(unlimited.usage().in_use, 1000);
        drop(shares);
        assert_eq!(unlimited.usage().in_use, 0);
    }

    #[test]
    fn most_of_it_in_use_is_warned_of_once() {
        let quota = quota(Some(10));
        // Without `take`, which asks itself.
        let mut warnings = Vec::new();
        for in_use in [0, 7, 8, 10, 3, 9] {
            quota.in_use.store(in_use, Ordering::Relaxed);
            if quota.is_to_be_warned_of() {
                warnings.push(in_use);
            }
        }
        assert_eq!(warnings, [8]);
        assert!(!Quota::new("", "", None, "").is_to_be_warned_of());
        let taken = Quota::new("queue pairs", "rxe0", Some(5), "");
        let shares: Vec<_> = (0..4).map(|_| taken.take().expect("one")).collect();
        assert_eq!(shares.len(), 4);
        assert!(taken.warned.load(Ordering::Relaxed), "by taking it");
    }

    #[test]
    fn what_the_kernel_enforces_is_counted_beyond_the_limit() {
        let quota = quota(Some(100));
        let share = quota.count(300);
        assert_eq!(quota.usage().in_use, 300);
        drop(share);
        assert_eq!(quota.usage().in_use, 0);
    }

    #[test]
    fn threads_together_take_no_more_than_there_is() {
        let quota = quota(Some(40));
        let taken: u64 = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4)
                .map(|_| scope.spawn(|| (0..20).map_while(|_| quota.take().ok()).collect()))
                .collect();
            let shares = threads.into_iter().map(|thread| {
                let shares: Vec<Share> = thread.join().expect("no panic");
                shares
            });
            let shares: Vec<Share> = shares.flatten().collect();
            shares.len() as u64
        });
        assert_eq!(taken, 40);
        assert_eq!(quota.usage().in_use, 0);
    }

    #[cfg(feature = "libibverbs")]
    #[test]
    fn limits_that_say_nothing_are_none() {
        assert_eq!(limit_of(0).or(limit_of(-1)).or(limit_of(i32::MIN)), None);
        assert_eq!(limit_of(i32::MAX), Some(2_147_483_647));
    }

    #[test]
    fn a_capability_is_read_from_the_mask() {
        assert!(has_capability("Name:\tx\nCapEff:\t0000000000004000\n", 14));
        assert!(!has_capability("CapEff:\t00000000ffffbfff\n", 14));
        assert!(!has_capability("CapEff:\tnonsense\n", 14));
        assert!(!has_capability("", 14));
    }

    proptest! {
        #[test]
        fn most_is_four_fifths_of_any_limit(in_use in any::<u64>(), limit in 1..u64::MAX) {
            let exact = u128::from(in_use) * 100 / u128::from(limit) >= 80;
            prop_assert_eq!(is_most(in_use, limit), exact);
        }
    }
}
