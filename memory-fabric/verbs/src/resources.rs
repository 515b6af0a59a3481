//! Usage of limited resources: queue pairs and other objects of a device, connections of a node,
//! memory that may be pinned.
//!
//! A device's limits apply to the whole host, and the counts cover this process only. A verb may
//! therefore fail before the count reaches the limit. When the count does reach it, the error names
//! the resource, the numbers and a remedy, and the verb is not called.

use super::RdmaError;
use serde::Serialize;
use std::fs;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

/// Threshold of a warning, in fifths of the limit: 80 %.
const WARN_FIFTHS: u64 = 4;

/// The value that represents no limit.
const NONE: u64 = u64::MAX;

/// Bit of `CapEff` in `/proc/self/status` that lifts the limit of locked memory (`CAP_IPC_LOCK` of
/// `linux/capability.h`).
const CAP_IPC_LOCK: u32 = 14;

/// Current use and limit of a resource.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Serialize)]
pub struct Usage {
    /// In use by this process.
    pub in_use: u64,
    /// The limit; `None` without one.
    pub limit: Option<u64>,
}

/// This process's usage of a device.
#[derive(Clone, Debug, Eq, PartialEq, Serialize)]
pub struct DeviceUsage {
    /// The device.
    pub device: String,
    /// One for each connection.
    pub queue_pairs: Usage,
    /// Completion queues.
    pub completion_queues: Usage,
    /// Memory regions.
    pub memory_regions: Usage,
    /// Protection domains, which isolate VMs.
    pub protection_domains: Usage,
}

/// A limit and its current use.
#[derive(Debug)]
pub struct Quota {
    /// Name of the resource in the plural: "queue pairs".
    what: &'static str,
    /// Its owner: "rxe0".
    of: String,
    /// Remedy when all are in use.
    remedy: &'static str,
    // Relaxed, both: they order no other memory accesses.
    in_use: AtomicU64,
    limit: u64,
    warned: AtomicBool,
}

/// A part of a quota, returned on drop.
#[derive(Debug)]
pub struct Share {
    quota: Arc<Quota>,
    amount: u64,
}

impl Quota {
    /// Creates a quota of `limit` resources named `what` of owner `of`; the error beyond the limit
    /// contains `remedy`.
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

    /// Takes one unless all are in use.
    ///
    /// # Errors
    ///
    /// [`RdmaError::Exhausted`].
    pub fn take(self: &Arc<Self>) -> Result<Share, RdmaError> {
        self.take_all(1)
    }

    /// Takes `amount` unless less is left.
    ///
    /// # Errors
    ///
    /// [`RdmaError::Exhausted`].
    pub fn take_all(self: &Arc<Self>, amount: u64) -> Result<Share, RdmaError> {
        let limit = self.limit;
        let more = |in_use: u64| in_use.checked_add(amount).filter(|after| *after <= limit);
        // Relaxed: see the field.
        let taken = self
            .in_use
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, more);
        match taken {
            Ok(_) => Ok(self.share(amount)),
            Err(in_use) => Err(RdmaError::Exhausted {
                what: self.what,
                of: self.of.clone(),
                in_use,
                limit,
                remedy: self.remedy,
            }),
        }
    }

    /// Adds `amount` regardless of the limit: for limits that the kernel enforces.
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

    /// Returns whether the threshold of the warning was reached, the first time only.
    fn is_to_be_warned_of(&self) -> bool {
        let Usage { in_use, limit } = self.usage();
        let Some(limit) = limit else {
            return false;
        };
        is_most(in_use, limit) && !self.warned.swap(true, Ordering::Relaxed)
    }

    /// Returns the current use.
    #[must_use]
    pub fn usage(&self) -> Usage {
        Usage {
            in_use: self.in_use.load(Ordering::Relaxed),
            limit: (self.limit != NONE).then_some(self.limit),
        }
    }
}

/// Returns whether `in_use` is 80 % of `limit` or more.
fn is_most(in_use: u64, limit: u64) -> bool {
    u128::from(in_use) * 5 >= u128::from(limit) * u128::from(WARN_FIFTHS)
}

impl Drop for Share {
    fn drop(&mut self) {
        self.quota.in_use.fetch_sub(self.amount, Ordering::Relaxed);
    }
}

/// Limits of a device from `ibv_query_device`.
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

/// Converts a device's limit; zero or a negative number means unknown.
#[cfg(feature = "libibverbs")]
fn limit_of(count: libc::c_int) -> Option<u64> {
    u64::try_from(count).ok().filter(|&count| count > 0)
}

/// Returns the quota of memory that this process has pinned for adapters, in bytes. The kernel
/// enforces its limit.
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

/// Returns the memory that this process has pinned for adapters, and its limit.
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

/// Returns whether a process with this `/proc/PID/status` has a capability.
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
    fn an_amount_is_taken_whole_or_not_at_all() {
        let quota = quota(Some(10));
        let some = quota.take_all(7).expect("there are 10");
        for more in [4, u64::MAX, u64::MAX - 6] {
            assert!(quota.take_all(more).is_err(), "{more}");
            assert_eq!(quota.usage().in_use, 7, "a refusal takes nothing");
        }
        let _rest = quota.take_all(3).expect("the rest");
        drop(some);
        assert_eq!(quota.usage().in_use, 3);
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
        // Not through `take`, which checks for the warning itself.
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
