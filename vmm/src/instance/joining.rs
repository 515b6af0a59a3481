//! Nodes of the cluster join a VM with two copies of its pages, or with stripes, when a donor is lost and
//! the others have no room for what it held.
//!
//! Copies on a lost donor have no place if no other one has room. Nodes join for them once copies lack
//! for longer than `--donor-grace`. Copies on a donor that is out of use, and may return, have a place:
//! no node joins for them. A node that was lost may join again, with new memory, after a rest if it was
//! lost again and again, but not one that sent wrong pieces of pages.

mod losses;

use std::collections::{BTreeSet, HashMap, HashSet};
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError};
use memory_fabric::NodeId;
use memory_fabric::fabric::{DonorAddress, DrainError, HotplugError};
use memory_fabric::view::ReplicaSummary;

use super::drains::{VmDrains, connected};
use crate::failure::{Seldom, describe};
use crate::membership::Members;
use losses::Losses;

/// Interval between looks at the counters.
const LOOK_INTERVAL: Duration = Duration::from_millis(500);
/// Time in which copies are looked for beyond the grace of a donor.
const SEARCH_TIME: Duration = Duration::from_secs(1);
/// Interval of warnings that no node joins.
const WARNING_INTERVAL: Duration = Duration::from_secs(60);
/// First and longest pause after an attempt in which no node has joined. Donors are neither drained
/// nor rebalanced while one is asked, which takes seconds if it does not answer.
const PAUSE_MIN: Duration = Duration::from_secs(10);
const PAUSE_MAX: Duration = Duration::from_secs(40);
/// Nodes that are asked in one attempt. The next one begins with others.
const ASKED_MAX: usize = 3;

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
}

/// When a node is to join: copies on lost donors are not made again.
#[derive(Debug, Default)]
struct Need {
    /// Copies that cannot be read.
    degraded: Missing,
    /// Of these, copies on lost donors for which others have no room.
    displaced: Missing,
}

impl Need {
    /// Takes the state of the copies. Returns whether a node is needed, with this grace of donors.
    fn note(&mut self, copies: &ReplicaSummary, grace: Duration, now: Instant) -> bool {
        let repaired = copies.repaired_bytes;
        let degraded = self.degraded.note(copies.degraded_bytes, repaired, now);
        let displaced = self.displaced.note(copies.displaced_bytes, repaired, now);
        degraded >= grace + SEARCH_TIME && displaced >= SEARCH_TIME
    }
}

/// Why no node has joined.
#[derive(Debug, thiserror::Error)]
enum NotJoined {
    /// Donors change at the moment, whichever node is asked.
    #[error("{0}")]
    Busy(String),
    /// This node does not.
    #[error("{0}")]
    Refused(String),
}

impl From<DrainError> for NotJoined {
    fn from(error: DrainError) -> Self {
        let text = describe(&error);
        match error {
            DrainError::Draining(_)
            | DrainError::Rebalancing
            | DrainError::Change(HotplugError::Joining | HotplugError::Ended) => Self::Busy(text),
            _ => Self::Refused(text),
        }
    }
}

/// The nodes that have not joined, and when to ask again.
#[derive(Debug)]
struct Attempts {
    failed: HashMap<SocketAddr, Instant>,
    pause: Duration,
    not_before: Option<Instant>,
}

impl Attempts {
    fn new() -> Self {
        Self {
            failed: HashMap::new(),
            pause: PAUSE_MIN,
            not_before: None,
        }
    }

    fn may_begin(&self, now: Instant) -> bool {
        self.not_before.is_none_or(|at| at <= now)
    }

    /// Returns those of `spares` that are asked now: in their order, but after the others those that
    /// have not joined before.
    fn chosen(&mut self, mut spares: Vec<DonorAddress>) -> Vec<DonorAddress> {
        let is_there = |address| spares.iter().any(|spare| spare.address == address);
        self.failed.retain(|address, _| is_there(*address));
        // Stable, and `None` is first.
        spares.sort_by_key(|spare| self.failed.get(&spare.address).copied());
        spares.truncate(ASKED_MAX);
        spares
    }

    fn note_refused(&mut self, address: SocketAddr, now: Instant) {
        self.failed.insert(address, now);
    }

    /// Notes the end of an attempt in which no node has joined.
    fn end(&mut self, reason: &NotJoined, now: Instant) {
        let pause = match reason {
            NotJoined::Busy(_) => PAUSE_MIN,
            NotJoined::Refused(_) => {
                let longer = (self.pause * 2).min(PAUSE_MAX);
                std::mem::replace(&mut self.pause, longer)
            }
        };
        self.not_before = Some(now + pause);
    }

    /// Begins with the first pause again.
    fn restart(&mut self) {
        self.pause = PAUSE_MIN;
        self.not_before = None;
    }
}

impl VmDrains {
    /// Lets a donor join for copies that have no place. Returns how much it lends.
    fn join(&self, donor: DonorAddress) -> Result<u64, NotJoined> {
        {
            let state = self.lock();
            if state.preparing.is_some() || state.is_adding {
                let text = "other donors are being asked for memory";
                return Err(NotJoined::Busy(text.to_owned()));
            }
        }
        let bytes = self.fabric().join_for_copies(&donor)?;
        {
            let mut state = self.lock();
            state.named.push(donor);
            state.has_joined = true;
        }
        self.changes().notify();
        Ok(bytes)
    }

    /// Returns the donors that are lost.
    fn lost(&self, copies: &ReplicaSummary) -> HashSet<(NodeId, SocketAddr)> {
        let lenders = self.lenders().into_iter();
        let lost = lenders.filter(|lender| copies.lost.contains(&lender.node));
        lost.filter_map(|lender| Some((lender.node, lender.address?)))
            .collect()
    }

    /// Excludes those that sent wrong pieces of pages from the nodes that may join.
    fn distrust(&self, members: &Members) -> BTreeSet<SocketAddr> {
        let distrusted = self.fabric().distrusted();
        let named = self.lock().named.clone();
        members.distrust(&distrusted, &named);
        distrusted
    }

    /// Returns the donors that are not lost, as they were named.
    fn used(&self) -> Vec<DonorAddress> {
        let lenders = self.not_lost();
        let mut used = connected(&self.lock().named, &lenders);
        for address in lenders.iter().filter_map(|lender| lender.address) {
            if used.iter().all(|donor| donor.address != address) {
                used.push(DonorAddress {
                    address,
                    name: None,
                    fingerprint: None,
                    zone: None,
                    bytes: None,
                });
            }
        }
        used
    }

    /// Returns the donors for another boot of the guest, as [`Self::donors_for_restart`]; of a VM with a
    /// cluster, without those that sent wrong pieces of pages, in place of which there are others.
    pub fn trusted_for_restart(&self, members: Option<&Members>) -> Option<Vec<DonorAddress>> {
        let left = self.donors_for_restart();
        let Some(members) = members else {
            return left;
        };
        if self.distrust(members).is_empty() {
            return left;
        }
        let mut left = left.unwrap_or_else(|| self.lock().named.clone());
        left.retain(|donor| members.trusts(donor));
        Some(left)
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
    thread.spawn(move || watch(&drains, &members, grace, &ended))?;
    Ok(())
}

/// Looks at the copies until the guest ends, which disconnects `ended`.
fn watch(drains: &VmDrains, members: &Members, grace: Duration, ended: &Receiver<()>) {
    let (mut need, mut attempts) = (Need::default(), Attempts::new());
    let mut losses = Losses::default();
    let warnings = Seldom::new(WARNING_INTERVAL);
    while ended.recv_timeout(LOOK_INTERVAL) == Err(RecvTimeoutError::Timeout) {
        let Some(copies) = drains.view().replicas() else {
            return;
        };
        note_donors(drains, members, &mut losses, &copies);
        if copies.displaced_bytes == 0 {
            attempts.restart();
        }
        let now = Instant::now();
        if !need.note(&copies, grace, now) || !attempts.may_begin(now) {
            continue;
        }
        let joined = join_one(drains, members, &mut attempts);
        if drains.has_ended() {
            return;
        }
        match joined {
            Ok(joined) => {
                let copies = drains.view().replicas();
                let still = copies.map(|copies| drains.lost(&copies));
                losses.forget(joined, &still.unwrap_or_default());
                need = Need::default();
                attempts.restart();
            }
            Err(reason) => {
                attempts.end(&reason, Instant::now());
                if warnings.pass(now).is_some() {
                    tracing::warn!(
                        "{} MiB on donors have lost copies, and no node of the cluster has joined \
                         for them: {reason}",
                        copies.displaced_bytes >> 20
                    );
                }
            }
        }
    }
}

/// Notes which donors were lost, or are not used again, at once: their nodes may be listed under other
/// names, and others at their addresses, when one joins in their place.
fn note_donors(drains: &VmDrains, members: &Members, losses: &mut Losses, copies: &ReplicaSummary) {
    if losses.distrust(drains.fabric().distrusted()) {
        drains.distrust(members);
    }
    for lost in losses.look(drains.lost(copies)) {
        members.note_lost(lost);
    }
}

/// Lets the first node join that lends. Returns its address.
fn join_one(
    drains: &VmDrains,
    members: &Members,
    attempts: &mut Attempts,
) -> Result<SocketAddr, NotJoined> {
    let mut last = NotJoined::Refused("no other one that may be asked has room".to_owned());
    let used = drains.used();
    // After that: one that went out in between is in one of both.
    drains.distrust(members);
    let spares = members.spares(&used, drains.fabric().spare_bytes_min());
    for donor in attempts.chosen(spares) {
        if drains.has_ended() {
            break;
        }
        let address = donor.address;
        match drains.join(donor) {
            Ok(bytes) => {
                tracing::warn!(
                    "donor {address} of the cluster joins with {} MiB, since copies that were lost \
                     have no room elsewhere",
                    bytes >> 20
                );
                return Ok(address);
            }
            Err(busy @ NotJoined::Busy(_)) => return Err(busy),
            Err(refused) => {
                attempts.note_refused(address, Instant::now());
                last = refused;
            }
        }
    }
    Err(last)
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
        assert_eq!(missing.note(0, 8, at(11)), Duration::ZERO);
        assert_eq!(missing.note(6, 8, at(20)), Duration::ZERO, "lost again");
    }

    fn copies(degraded: u64, displaced: u64, repaired: u64) -> ReplicaSummary {
        ReplicaSummary {
            layout: None,
            bytes: 64,
            degraded_bytes: degraded,
            displaced_bytes: displaced,
            in_one_zone_bytes: 0,
            repaired_bytes: repaired,
            losses: 1,
            wrong_pieces: 0,
            out: Vec::new(),
            lost: Vec::new(),
        }
    }

    #[test]
    fn no_node_joins_for_copies_on_a_donor_that_may_return() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let grace = Duration::from_secs(30);
        let mut need = Need::default();
        // It is out for longer than the grace, since it was so often before.
        for seconds in 0..100 {
            assert!(
                !need.note(&copies(8, 0, 0), grace, at(seconds)),
                "{seconds}"
            );
        }
        assert!(
            !need.note(&copies(8, 8, 0), grace, at(100)),
            "lost just now"
        );
        assert!(need.note(&copies(8, 8, 0), grace, at(101)));
        assert!(!need.note(&copies(8, 6, 2), grace, at(102)), "repaired");
        assert!(!need.note(&copies(8, 6, 2), grace, at(132)));
        assert!(need.note(&copies(8, 6, 2), grace, at(133)));
    }

    #[test]
    fn without_grace_no_node_joins_for_copies_that_have_room() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut need = Need::default();
        // A large block takes long, or the rate of repairs is low.
        for seconds in 0..100 {
            let copies = copies(8, 0, 0);
            assert!(
                !need.note(&copies, Duration::ZERO, at(seconds)),
                "{seconds}"
            );
        }
        assert!(!need.note(&copies(4, 4, 4), Duration::ZERO, at(100)));
        assert!(need.note(&copies(4, 4, 4), Duration::ZERO, at(101)));
    }

    fn spare(last: u8) -> DonorAddress {
        DonorAddress {
            address: ([10, 0, 0, last], 7000).into(),
            name: None,
            fingerprint: None,
            zone: None,
            bytes: None,
        }
    }

    #[test]
    fn nodes_that_do_not_lend_are_asked_after_others_and_seldom() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut attempts = Attempts::new();
        let asked = |attempts: &mut Attempts, spares: &[u8]| -> Vec<u8> {
            let spares = spares.iter().map(|&last| spare(last)).collect();
            let chosen = attempts.chosen(spares).into_iter();
            chosen
                .map(|spare| match spare.address.ip() {
                    std::net::IpAddr::V4(ip) => ip.octets()[3],
                    std::net::IpAddr::V6(ip) => panic!("{ip}"),
                })
                .collect()
        };
        assert!(attempts.may_begin(at(0)));
        assert_eq!(asked(&mut attempts, &[1, 2, 3, 4, 5]), [1, 2, 3]);
        for (last, seconds) in [(1, 2), (2, 4), (3, 6)] {
            attempts.note_refused(spare(last).address, at(seconds));
        }
        let refused = NotJoined::Refused(String::new());
        attempts.end(&refused, at(6));
        assert!(!attempts.may_begin(at(15)) && attempts.may_begin(at(16)));
        assert_eq!(asked(&mut attempts, &[1, 2, 3, 4, 5]), [4, 5, 1]);
        attempts.end(&NotJoined::Busy(String::new()), at(20));
        assert!(!attempts.may_begin(at(29)) && attempts.may_begin(at(30)));
        attempts.end(&refused, at(30));
        assert!(!attempts.may_begin(at(49)) && attempts.may_begin(at(50)));
        for _ in 0..9 {
            attempts.end(&refused, at(100));
        }
        assert!(!attempts.may_begin(at(139)) && attempts.may_begin(at(140)));
        // One that was removed and is listed again counts as new.
        assert_eq!(asked(&mut attempts, &[2]), [2]);
        assert_eq!(asked(&mut attempts, &[2, 1]), [1, 2]);
        attempts.restart();
        assert!(attempts.may_begin(at(100)));
        attempts.end(&refused, at(100));
        assert!(attempts.may_begin(at(110)), "the first pause again");
    }

    #[test]
    fn only_what_concerns_one_node_has_the_next_one_asked() {
        use memory_fabric::NodeId;

        for error in [
            DrainError::Draining(NodeId(1)),
            DrainError::Rebalancing,
            HotplugError::Joining.into(),
            HotplugError::Ended.into(),
        ] {
            let not_joined = NotJoined::from(error);
            assert!(matches!(not_joined, NotJoined::Busy(_)), "{not_joined:?}");
        }
        let refused = NotJoined::from(DrainError::NothingLent("10.0.0.1:7: none".into()));
        assert!(matches!(refused, NotJoined::Refused(_)), "{refused:?}");
        let refused = NotJoined::from(DrainError::TooSmall {
            address: ([10, 0, 0, 1], 7).into(),
            lent_mib: 2,
            least_mib: 6,
        });
        assert!(matches!(refused, NotJoined::Refused(_)), "{refused:?}");
        assert!(refused.to_string().contains("one of the 8 donors"));
    }
}
