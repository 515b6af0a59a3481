//! Places for connections: how many a donor keeps, and which of them it drops for another.
//!
//! Until a connection has shown a lease, or got one, nothing is known of its peer but its address.
//! Such connections *wait*. They have few places of their own, so that they keep no holder of a
//! lease out. One that arrives when these are taken replaces another: refusing it would let a client
//! that takes all places first keep all others out.

mod threads;

use super::{CONNECTIONS_MAX, Ending};
use fabric_transport::tls::Peer;
use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;
use std::time::{Duration, Instant};
use threads::{Thread, Threads};

/// Limit of waiting connections, and of threads that serve such: 64 use at most 20 MiB of buffers.
pub const WAITING_MAX: usize = 64;

/// Limit of waiting connections from one address: a VM makes one after the other.
pub const WAITING_OF_ADDRESS_MAX: usize = 16;

/// A connection that has sent something and then nothing of use for so long is idle. Before, it may be
/// in a handshake, which takes some milliseconds, and more on a busy host.
const IDLE_TIME: Duration = Duration::from_secs(1);

/// Limit of control connections that rest: they have no thread of their own. Linux allows a process
/// 20,000 to a million descriptors, as its limit is set.
pub const RESTING_MAX: usize = 32 << 10;

/// Threads beyond [`CONNECTIONS_MAX`] for control connections by TCP: while they are set up, and
/// for their last request. So connections for pages, which take all other places, keep no lease
/// from being resumed or released.
pub const CONTROL_SPARE: usize = 256;

/// Limit of addresses that are remembered beside those that are connected.
const KNOWN_MAX: usize = 2 * CONNECTIONS_MAX;

/// How far a waiting connection is. Those that are least far are dropped first.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(super) enum Stage {
    /// Nothing was received on it. It has no thread.
    Silent,
    /// It has a thread that reads from it.
    Speaking,
    /// Its peer has shown that it is a member of the cluster.
    Member,
}

/// Why a connection is dropped.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Reason {
    /// Too many wait from its address.
    Address,
    /// Too many wait.
    Total,
}

/// What becomes of a new connection.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Admission {
    /// It has this number.
    Admitted(u64),
    /// It has the first number. The connection with the second one is to be closed.
    Instead(u64, u64, Reason),
    /// It is to be closed.
    Refused(Reason),
}

/// All places are taken by connections of leases.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error(
    "{CONNECTIONS_MAX} connections of leases are open, which is the limit; use another node, or end VMs"
)]
pub(super) struct Full;

/// What a connection of a lease is for.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Purpose {
    /// Its lease alone, by TCP: it rests soon, or ends.
    Control,
    /// Anything else.
    Lasting,
}

/// The place of a connection that has a thread.
pub(super) trait Place {
    /// Notes that the connection has shown a lease, or got one, and gives it a place among those of
    /// leases.
    ///
    /// # Errors
    ///
    /// [`Full`].
    fn establish(&self, purpose: Purpose) -> Result<(), Full>;

    /// Notes that the control connection keeps its thread.
    ///
    /// # Errors
    ///
    /// [`Full`], when it has one of those that are for a short time.
    fn stay(&self) -> Result<(), Full>;

    /// From now on, a member that may not use this node any more gets the reason from its vCPUs'
    /// end, instead of a connection that breaks.
    fn ends_with(&self, ending: &Arc<Ending>);

    /// From now on the connection ends with those of a member, on whose behalf its peer uses this
    /// node.
    ///
    /// # Errors
    ///
    /// Fails with the reason when the certificate that the member has shown is not accepted any
    /// more.
    fn belongs_to(&self, member: &Arc<Peer>) -> Result<(), String>;
}

#[derive(Debug)]
struct Waiting {
    from: IpAddr,
    stage: Stage,
    /// When it came to this stage.
    since: Instant,
}

/// A connection of a lease.
#[derive(Debug)]
struct Established {
    from: IpAddr,
    thread: Thread,
    /// Whether it has a place among those that rest, while it is set up.
    promised: bool,
}

/// An address from which leases were used.
#[derive(Debug)]
struct Known {
    /// Open connections of leases from there.
    open: usize,
    /// When the last one ended.
    since: Instant,
}

/// The places of a donor's connections. It knows no sockets: the caller closes what this names.
#[derive(Debug)]
pub(super) struct Places {
    /// By number, so the oldest first.
    waiting: BTreeMap<u64, Waiting>,
    /// Threads that serve waiting connections, and those that were dropped and have not ended.
    threads: usize,
    /// Those of leases.
    established: HashMap<u64, Established>,
    /// How many of these have which thread.
    threads_of: Threads,
    known: HashMap<IpAddr, Known>,
    /// How long an address is remembered: as long as a lease of an absent VM may last.
    memory: Duration,
    next: u64,
}

/// Returns what counts as one address: an IPv6 host may use all of its /64 (RFC 4291, section
/// 2.5.1).
fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => {
            let prefix = address.to_bits() & (u128::MAX << 64);
            Ipv6Addr::from_bits(prefix).into()
        }
        address @ IpAddr::V4(_) => address,
    }
}

impl Places {
    /// Creates places; addresses from which leases were used are remembered for `memory`.
    pub(super) fn new(memory: Duration) -> Self {
        Self {
            waiting: BTreeMap::new(),
            threads: 0,
            established: HashMap::new(),
            threads_of: Threads::default(),
            known: HashMap::new(),
            memory,
            next: 0,
        }
    }

    /// Returns the number of waiting connections.
    pub(super) fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Returns the number of connections of leases, with those that rest.
    pub(super) fn established(&self) -> usize {
        self.established.len()
    }

    /// Takes a place for a new connection.
    pub(super) fn admit(&mut self, address: IpAddr, now: Instant) -> Admission {
        let from = network(address);
        let of_address = self.waiting.values().filter(|one| one.from == from);
        let victim = if of_address.count() >= WAITING_OF_ADDRESS_MAX {
            let Some(victim) = self.idle_of(from, now) else {
                return Admission::Refused(Reason::Address);
            };
            Some((victim, Reason::Address))
        } else if self.waiting.len() >= WAITING_MAX {
            let Some(victim) = self.least(from, now) else {
                return Admission::Refused(Reason::Total);
            };
            Some((victim, Reason::Total))
        } else {
            None
        };
        if let Some((victim, _)) = victim {
            self.waiting.remove(&victim);
        }
        let number = self.next;
        self.next += 1;
        let stage = Stage::Silent;
        let since = now;
        self.waiting.insert(number, Waiting { from, stage, since });
        victim.map_or(Admission::Admitted(number), |(victim, reason)| {
            Admission::Instead(number, victim, reason)
        })
    }

    /// Returns the connection to drop for another of the same address: only an idle one. Otherwise
    /// many VMs of one host that connect at once would abort each other's handshakes again and again.
    fn idle_of(&self, from: IpAddr, now: Instant) -> Option<u64> {
        let idle = |one: &Waiting| {
            one.stage == Stage::Silent || now.saturating_duration_since(one.since) >= IDLE_TIME
        };
        let candidates = self.waiting.iter();
        let candidates = candidates.filter(|(_, one)| one.from == from && idle(one));
        candidates
            .min_by_key(|(number, one)| (one.stage, **number))
            .map(|(number, _)| *number)
    }

    /// Returns the connection to drop for another from `from`: one from an address that uses no lease,
    /// not far, from the address with the most, the oldest. A connection from an address that uses a
    /// lease is only dropped for another such.
    fn least(&self, from: IpAddr, now: Instant) -> Option<u64> {
        let mut counts: HashMap<IpAddr, usize> = HashMap::new();
        for one in self.waiting.values() {
            *counts.entry(one.from).or_default() += 1;
        }
        let of_lease = self.is_known(from, now);
        let candidates = self
            .waiting
            .iter()
            .map(|(number, one)| (self.is_known(one.from, now), *number, one))
            .filter(|(known, ..)| of_lease || !known);
        candidates
            .min_by_key(|(known, number, one)| {
                let most_first = WAITING_MAX - counts[&one.from];
                (*known, one.stage, most_first, *number)
            })
            .map(|(_, number, _)| number)
    }

    fn is_known(&self, from: IpAddr, now: Instant) -> bool {
        self.known.get(&from).is_some_and(|known| {
            known.open > 0 || now.saturating_duration_since(known.since) < self.memory
        })
    }

    /// Returns the connections on which nothing was received since `before`, and removes them.
    pub(super) fn drop_silent(&mut self, before: Instant) -> Vec<u64> {
        let silent = |one: &Waiting| one.stage == Stage::Silent && one.since <= before;
        let late: Vec<_> = self
            .waiting
            .iter()
            .filter(|(_, one)| silent(one))
            .map(|(number, _)| *number)
            .collect();
        for number in &late {
            self.waiting.remove(number);
        }
        late
    }

    /// Returns when the oldest silent connection arrived.
    pub(super) fn silent_since(&self) -> Option<Instant> {
        let mut silent = self
            .waiting
            .values()
            .filter(|one| one.stage == Stage::Silent);
        silent.next().map(|one| one.since)
    }

    /// Returns the silent connections, the oldest first.
    pub(super) fn silent(&self) -> impl Iterator<Item = u64> {
        let silent = self
            .waiting
            .iter()
            .filter(|(_, one)| one.stage == Stage::Silent);
        silent.map(|(number, _)| *number)
    }

    /// Returns whether another thread may serve a waiting connection.
    pub(super) fn has_thread(&self) -> bool {
        self.threads < WAITING_MAX
    }

    /// Notes that a silent connection gets a thread. Returns false if it may not: it was dropped, or
    /// there are too many.
    pub(super) fn begin(&mut self, number: u64, now: Instant) -> bool {
        if !self.has_thread() {
            return false;
        }
        let Some(one) = self.waiting.get_mut(&number) else {
            return false;
        };
        one.stage = Stage::Speaking;
        one.since = now;
        self.threads += 1;
        true
    }

    /// Notes that the peer has shown that it is a member of the cluster.
    pub(super) fn note_member(&mut self, number: u64, now: Instant) {
        if let Some(one) = self.waiting.get_mut(&number) {
            one.stage = Stage::Member;
            one.since = now;
        }
    }

    /// Gives a connection that has a thread a place among those of leases. One that was dropped
    /// meanwhile gets one too, and then ends, since it is closed.
    ///
    /// # Errors
    ///
    /// [`Full`].
    pub(super) fn establish(
        &mut self,
        number: u64,
        address: IpAddr,
        purpose: Purpose,
        now: Instant,
    ) -> Result<(), Full> {
        if self.established.contains_key(&number) {
            return Ok(());
        }
        let (thread, promised) = self.threads_of.take_to_begin(purpose)?;
        let from = network(address);
        self.waiting.remove(&number);
        self.threads -= 1;
        let one = Established {
            from,
            thread,
            promised,
        };
        self.established.insert(number, one);
        let (open, since) = (0, now);
        self.known.entry(from).or_insert(Known { open, since }).open += 1;
        self.forget(now);
        Ok(())
    }

    /// Returns the number of connections that rest.
    pub(super) fn resting(&self) -> usize {
        self.threads_of.resting()
    }

    /// Notes that a control connection keeps its thread.
    ///
    /// # Errors
    ///
    /// [`Full`].
    pub(super) fn stay(&mut self, number: u64) -> Result<(), Full> {
        let Some(one) = self.established.get_mut(&number) else {
            return Ok(());
        };
        self.threads_of.redeem(&mut one.promised);
        match one.thread {
            Thread::Short => self.change(number, Thread::Short, Purpose::Lasting),
            Thread::Lasting | Thread::Shared => Ok(()),
        }
    }

    /// Notes that a connection of a lease has no thread of its own any more.
    ///
    /// # Errors
    ///
    /// [`Full`], when it has to keep its thread.
    pub(super) fn rest(&mut self, number: u64) -> Result<(), Full> {
        let one = self.established.get_mut(&number).ok_or(Full)?;
        self.threads_of.redeem(&mut one.promised);
        let shared = self.threads_of.take(Thread::Shared)?;
        self.threads_of.give_back(one.thread);
        one.thread = shared;
        Ok(())
    }

    /// Notes that a resting connection gets a thread again.
    ///
    /// # Errors
    ///
    /// [`Full`].
    pub(super) fn wake(&mut self, number: u64, purpose: Purpose) -> Result<(), Full> {
        self.change(number, Thread::Shared, purpose)
    }

    fn change(&mut self, number: u64, from: Thread, purpose: Purpose) -> Result<(), Full> {
        let one = self.established.get_mut(&number);
        let one = one.filter(|one| one.thread == from).ok_or(Full)?;
        one.thread = self.threads_of.take_for(purpose)?;
        self.threads_of.give_back(from);
        Ok(())
    }

    /// Removes a connection whose thread has ended, or that rested.
    pub(super) fn end(&mut self, number: u64, now: Instant) {
        if let Some(mut one) = self.established.remove(&number) {
            let from = one.from;
            self.threads_of.redeem(&mut one.promised);
            self.threads_of.give_back(one.thread);
            if let Some(known) = self.known.get_mut(&from) {
                known.open -= 1;
                known.since = now;
            }
            return;
        }
        self.waiting.remove(&number);
        self.threads -= 1;
    }

    /// Removes a silent connection that was closed.
    pub(super) fn remove_silent(&mut self, number: u64) {
        self.waiting.remove(&number);
    }

    /// Forgets addresses that are too many: those without connections, the longest unused first.
    fn forget(&mut self, now: Instant) {
        // As many can be connected.
        let most = KNOWN_MAX + self.established.len();
        if self.known.len() <= most {
            return;
        }
        let memory = self.memory;
        self.known.retain(|_, known| {
            known.open > 0 || now.saturating_duration_since(known.since) < memory
        });
        while self.known.len() > most {
            let unused = self.known.iter().filter(|(_, known)| known.open == 0);
            let oldest = unused.min_by_key(|(_, known)| known.since);
            let Some(oldest) = oldest.map(|(from, _)| *from) else {
                return;
            };
            self.known.remove(&oldest);
        }
    }
}

#[cfg(test)]
mod tests;
