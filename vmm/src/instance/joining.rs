//! Nodes of the cluster join a VM with two copies of its pages, or with stripes, when a donor is lost and
//! the others have no room for what it held.
//!
//! Copies that are not made again for longer than `--donor-grace` have no place: a donor that returns
//! in time fills its own. A node that was lost may join again, with new memory.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError};
use fabric_host::Seldom;
use memory_fabric::fabric::DonorAddress;

use super::drains::{VmDrains, connected};
use crate::failure::describe;
use crate::membership::Members;

/// Interval between looks at the counters.
const LOOK_INTERVAL: Duration = Duration::from_millis(500);
/// Time in which copies are looked for beyond the grace of a donor.
const SEARCH_TIME: Duration = Duration::from_secs(1);
/// Interval of warnings that no node joins.
const WARNING_INTERVAL: Duration = Duration::from_secs(60);

/// Copies that are missing, and since when nothing was repaired.
#[derive(Debug, Default)]
struct Missing {
    seen: Option<(u64, u64, Instant)>,
}

impl Missing {
    /// Takes the bytes with one copy, and those that were restored so far. Returns how long the same
    /// has been missing.
    fn note(&mut self, degraded: u64, repaired: u64, now: Instant) -> Duration {
        if degraded == 0 {
            self.seen = None;
            return Duration::ZERO;
        }
        match self.seen {
            Some((bytes, done, since)) if (bytes, done) == (degraded, repaired) => {
                now.saturating_duration_since(since)
            }
            _ => {
                self.seen = Some((degraded, repaired, now));
                Duration::ZERO
            }
        }
    }

    /// Begins to count again.
    fn restart(&mut self) {
        self.seen = None;
    }
}

impl VmDrains {
    /// Lets a donor join for copies that have no place. Returns how much it lends.
    fn join(&self, donor: DonorAddress) -> Result<u64, String> {
        {
            let state = self.lock();
            if state.preparing.is_some() || state.is_adding {
                return Err("other donors are being asked for memory".to_owned());
            }
        }
        let joined = self.fabric().join_for_copies(&donor);
        let bytes = joined.map_err(|error| describe(&error))?;
        {
            let mut state = self.lock();
            state.named.push(donor);
            state.has_joined = true;
        }
        self.changes().notify();
        Ok(bytes)
    }

    /// Returns the zones of the donors in use.
    fn zones_in_use(&self) -> Vec<String> {
        let in_use = self.in_use();
        let donors = connected(&self.lock().named, &in_use).into_iter();
        donors.filter_map(|donor| donor.zone).collect()
    }
}

/// Lets nodes join where that is needed, in a thread of its own, until the guest ends.
///
/// # Errors
///
/// If the thread cannot be started.
pub fn start(drains: &VmDrains, members: &Arc<Members>, grace: Duration) -> io::Result<()> {
    let (drains, ended) = (drains.clone(), drains.until_end());
    let members = Arc::clone(members);
    let thread = std::thread::Builder::new().name("members".into());
    thread.spawn(move || watch(&drains, &members, grace + SEARCH_TIME, &ended))?;
    Ok(())
}

/// Looks at the copies until the guest ends, which disconnects `ended`.
fn watch(drains: &VmDrains, members: &Members, limit: Duration, ended: &Receiver<()>) {
    let (mut missing, warnings) = (Missing::default(), Seldom::new(WARNING_INTERVAL));
    while ended.recv_timeout(LOOK_INTERVAL) == Err(RecvTimeoutError::Timeout) {
        let Some(copies) = drains.view().replicas() else {
            return;
        };
        let now = Instant::now();
        if missing.note(copies.degraded_bytes, copies.repaired_bytes, now) < limit {
            continue;
        }
        match join_one(drains, members) {
            Ok(()) => missing.restart(),
            Err(reason) => {
                if warnings.pass(now).is_some() {
                    tracing::warn!(
                        "{} MiB on donors are not whole, and no node of the cluster has joined for \
                         the rest: {reason}",
                        copies.degraded_bytes >> 20
                    );
                }
            }
        }
    }
}

/// Lets the first node join that lends.
fn join_one(drains: &VmDrains, members: &Members) -> Result<(), String> {
    let zones = drains.zones_in_use();
    let in_use: Vec<_> = drains.in_use().iter().map(|one| one.address).collect();
    let mut reasons = Vec::new();
    for donor in members.spares(&zones) {
        let address = donor.address;
        if in_use.contains(&Some(address)) {
            continue;
        }
        if drains.has_ended() {
            return Err("the guest has ended".to_owned());
        }
        match drains.join(donor) {
            Ok(bytes) => {
                tracing::warn!(
                    "donor {address} of the cluster joins with {} MiB, since copies that were lost \
                     have no room elsewhere",
                    bytes >> 20
                );
                return Ok(());
            }
            Err(reason) => reasons.push(reason),
        }
    }
    match reasons.pop() {
        Some(last) => Err(last),
        None => Err("no other one has room".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_being_repaired_is_not_missing() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut missing = Missing::default();
        assert_eq!(missing.note(0, 0, at(0)), Duration::ZERO);
        assert_eq!(missing.note(8, 0, at(1)), Duration::ZERO);
        assert_eq!(missing.note(8, 0, at(5)), Duration::from_secs(4));
        assert_eq!(missing.note(6, 2, at(6)), Duration::ZERO, "repaired");
        assert_eq!(missing.note(6, 2, at(9)), Duration::from_secs(3));
        missing.restart();
        assert_eq!(missing.note(6, 2, at(10)), Duration::ZERO, "one joined");
        assert_eq!(missing.note(0, 8, at(11)), Duration::ZERO);
        assert_eq!(missing.note(6, 8, at(20)), Duration::ZERO, "lost again");
    }
}
