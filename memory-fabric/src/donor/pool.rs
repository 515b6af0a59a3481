//! The memory that a donor lends, and its leases.

mod ending;
mod lease;

pub(super) use lease::Delegated;
pub(crate) use lease::{Control, SessionKind, SessionRefused};
pub use lease::{DropRefused, Lease, OutOfRange};

use super::policy::{Accounts, Charge, Denied, Resource};
use crate::page::PAGE_SIZE;
use crate::stats::Counter;
use crate::wire::{LEASE_DURATION_MS_MIN, LeaseStatus, Token};
use fabric_host::{Seldom, lock};
use fabric_identity::{Fingerprint, Subject};
use fabric_transport::tls::Peer;
use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// How long connections may take to end with their lease. They normally end at once, but a verb may
/// hang, and others must not wait for it.
const CLOSING_TIME_MAX: Duration = Duration::from_secs(10);

/// Limits the log lines about tokens in other hands.
static STOLEN: Seldom = Seldom::notices();

/// Limit of leases: as many as control connections can rest. Each has a mapping of its own, of
/// which Linux allows a process 65,530 (`vm.max_map_count`).
pub const LEASES_MAX: usize = crate::donor::RESTING_MAX;

/// Why no lease is granted.
#[derive(Debug, thiserror::Error)]
pub enum LeaseError {
    /// Not enough memory is free.
    #[error(
        "{asked} bytes asked, {free} of {total} are free; lower --memory of the VM, wait for another VM to end, or raise --memory of the node"
    )]
    NoMemory {
        /// Requested bytes.
        asked: u64,
        /// Bytes free.
        free: u64,
        /// Total bytes.
        total: u64,
    },
    /// The size cannot be lent.
    #[error("{0} bytes asked: not a multiple of the page size 4096, or zero")]
    Size(u64),
    /// There are too many leases.
    #[error(
        "{LEASES_MAX} leases, which is the limit; end VMs that use this node, or use another one"
    )]
    TooMany,
    /// The policy does not allow it.
    #[error(transparent)]
    Denied(#[from] Denied),
    /// A system call failed.
    #[error("cannot map the memory: {0}")]
    System(#[from] io::Error),
}

/// The bytes of a pool that one lease takes. Dropping it returns them, so they count as lent
/// exactly as long as their memory is mapped.
#[derive(Debug)]
struct Taken {
    bytes: u64,
    lent: Arc<Mutex<u64>>,
}

impl Drop for Taken {
    fn drop(&mut self) {
        *lock(&self.lent) -= self.bytes;
    }
}

/// What one lease uses, until it is dropped.
#[derive(Debug)]
struct Share {
    _taken: Taken,
    /// What its owner is charged with, under a policy.
    _charged: Option<[Charge; 2]>,
}

/// Memory of a pool that a process of a VM on this node may use. Dropping it returns the memory.
#[derive(Debug)]
pub struct Reserved {
    _taken: Taken,
}

/// All memory that a donor lends.
#[derive(Debug)]
pub struct Pool {
    bytes: u64,
    duration_max: Duration,
    closing_time_max: Duration,
    /// Held while a lease is made, which may wait for memory of another to be unmapped. The table is
    /// free meanwhile.
    lending: Mutex<()>,
    table: Mutex<Table>,
    lent: Arc<Mutex<u64>>,
    /// `None` without a policy.
    accounts: Option<Arc<Accounts>>,
    /// Leases granted.
    pub granted: Counter,
    /// Leases that were not renewed in time.
    pub expired: Counter,
}

#[derive(Debug, Default)]
struct Table {
    active: HashMap<Token, Arc<Lease>>,
    /// Leases that have ended, but still have users.
    closing: Vec<Closing>,
    /// Sum of the counters of leases that are in neither list.
    past: LeaseStatus,
}

/// A lease that has ended.
#[derive(Debug)]
struct Closing {
    lease: Arc<Lease>,
    /// When to stop watching it.
    until: Instant,
}

impl Pool {
    /// Creates a pool of `bytes`, lent for at most `duration_max` between renewals.
    #[must_use]
    pub fn new(bytes: u64, duration_max: Duration) -> Self {
        Self::under_policy(bytes, duration_max, None)
    }

    /// Creates a pool whose members are charged under a policy, if there is one.
    #[must_use]
    pub fn under_policy(
        bytes: u64,
        duration_max: Duration,
        accounts: Option<Arc<Accounts>>,
    ) -> Self {
        Self {
            accounts,
            bytes,
            duration_max,
            closing_time_max: CLOSING_TIME_MAX,
            lending: Mutex::default(),
            table: Mutex::default(),
            lent: Arc::default(),
            granted: Counter::default(),
            expired: Counter::default(),
        }
    }

    /// Charges a member with a connection. Returns `None` without a policy.
    ///
    /// # Errors
    ///
    /// Fails when the policy does not allow it.
    pub fn admit(&self, member: Option<&Subject>) -> Result<Option<Charge>, Denied> {
        self.charge(member, Resource::Connections, 1)
    }

    /// Charges a member with what it gets beside leases, until the result is dropped; `None`
    /// without a policy.
    ///
    /// # Errors
    ///
    /// Fails when the policy does not allow it.
    pub fn charge(
        &self,
        member: Option<&Subject>,
        resource: Resource,
        amount: u64,
    ) -> Result<Option<Charge>, Denied> {
        let charge = |accounts: &Arc<Accounts>| accounts.charge(member, resource, amount);
        self.accounts.as_ref().map(charge).transpose()
    }

    /// Returns the accounts of its members, under a policy.
    #[must_use]
    pub fn accounts(&self) -> Option<&Arc<Accounts>> {
        self.accounts.as_ref()
    }

    /// Returns the total bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the bytes lent now.
    #[must_use]
    pub fn lent_bytes(&self) -> u64 {
        *lock(&self.lent)
    }

    /// Returns the bytes that a VM could get now: those not lent, and those that others left behind.
    #[must_use]
    pub fn free_bytes(&self) -> u64 {
        let now = Instant::now();
        let table = lock(&self.table);
        let leases = table.active.values();
        let forsaken = leases.filter(|lease| lease.is_forsaken(now));
        let forsaken: u64 = forsaken.map(|lease| lease.bytes()).sum();
        drop(table);
        self.bytes.saturating_sub(self.lent_bytes()) + forsaken
    }

    /// Returns the number of current leases.
    #[must_use]
    pub fn leases(&self) -> usize {
        lock(&self.table).active.len()
    }

    /// Returns the sum of the counters of all leases, including ended ones.
    #[must_use]
    pub fn status(&self) -> LeaseStatus {
        let table = lock(&self.table);
        let closing = table.closing.iter().map(|closing| &closing.lease);
        let leases = table.active.values().chain(closing);
        leases.fold(table.past, |total, lease| sum(total, lease.status()))
    }

    /// Lends `bytes`, or what is free if that is less and `or_less` is set.
    ///
    /// # Errors
    ///
    /// See [`LeaseError`].
    pub fn lend(
        &self,
        vm: String,
        bytes: u64,
        or_less: bool,
        duration: Duration,
    ) -> Result<Arc<Lease>, LeaseError> {
        self.lend_to(None, vm, bytes, or_less, duration)
    }

    /// Like [`lend`](Self::lend), to the member with this certificate. Only that member can use the
    /// lease.
    ///
    /// # Errors
    ///
    /// See [`LeaseError`].
    pub fn lend_to(
        &self,
        owner: Option<Subject>,
        vm: String,
        bytes: u64,
        or_less: bool,
        duration: Duration,
    ) -> Result<Arc<Lease>, LeaseError> {
        if bytes == 0 || !bytes.is_multiple_of(PAGE_SIZE as u64) {
            return Err(LeaseError::Size(bytes));
        }
        let _lending = lock(&self.lending);
        let find = || {
            if self.leases() >= LEASES_MAX {
                return Err(LeaseError::TooMany);
            }
            self.share(owner.as_ref(), bytes, or_less)
        };
        let mut found = find();
        let may_ever_be = or_less || bytes <= self.bytes;
        let is_own = |lease: &Lease| lease.owner == owner;
        // Those of former VMs end one after the other, until there is enough.
        while may_ever_be && !matches!(found, Ok((_, granted)) if granted == bytes) {
            // What a member may not have is made free by no other.
            let own_alone = match found {
                Err(LeaseError::Denied(_)) => true,
                // There is more, but not for this member.
                Ok(_) => self.lent_bytes() < self.bytes,
                Err(_) => false,
            };
            let missing = if or_less { 0 } else { missing(&found) };
            if !self.end_forsaken(missing, |lease| !own_alone || is_own(lease)) {
                break;
            }
            // What was found before is free again first.
            drop(found);
            found = find();
        }
        let (share, granted) = found?;
        let size = usize::try_from(granted).map_err(|_| LeaseError::Size(granted))?;
        let shortest = Duration::from_millis(LEASE_DURATION_MS_MIN.into());
        let duration = duration.clamp(shortest, self.duration_max);
        let lease = Arc::new(Lease::new(
            owner,
            vm,
            random_token()?,
            size,
            duration,
            share,
            self.accounts.clone(),
        )?);
        let mut table = lock(&self.table);
        table.active.insert(lease.token, Arc::clone(&lease));
        drop(table);
        self.granted.increment();
        Ok(lease)
    }

    /// Takes the memory of a lease, and charges its owner. Returns how many bytes it has.
    fn share(
        &self,
        owner: Option<&Subject>,
        bytes: u64,
        or_less: bool,
    ) -> Result<(Share, u64), LeaseError> {
        let Some(accounts) = &self.accounts else {
            let taken = self.take(bytes, or_less)?;
            let granted = taken.bytes;
            let share = Share {
                _taken: taken,
                _charged: None,
            };
            return Ok((share, granted));
        };
        let lease = accounts.charge(owner, Resource::Leases, 1)?;
        let page = PAGE_SIZE as u64;
        let left = accounts.left(owner, Resource::Bytes)?;
        let left = left.map_or(u64::MAX, |left| left / page * page);
        // What is left of the limit, unless that is nothing.
        let within = if or_less && left > 0 {
            bytes.min(left)
        } else {
            bytes
        };
        // Before the memory of the node is looked at: a full node shows no more to those who may not
        // use it.
        if within > left {
            accounts.charge(owner, Resource::Bytes, within)?;
        }
        let taken = self.take(within, or_less)?;
        let granted = taken.bytes;
        let charged = accounts.charge(owner, Resource::Bytes, granted)?;
        let share = Share {
            _taken: taken,
            _charged: Some([lease, charged]),
        };
        Ok((share, granted))
    }

    /// Takes `bytes`, or what is free if that is less and `or_less` is set.
    fn take(&self, bytes: u64, or_less: bool) -> Result<Taken, LeaseError> {
        let mut lent = lock(&self.lent);
        let free = self.bytes.saturating_sub(*lent);
        let granted = if or_less { bytes.min(free) } else { bytes };
        if granted > free || granted == 0 {
            return Err(LeaseError::NoMemory {
                asked: bytes,
                free,
                total: self.bytes,
            });
        }
        *lent += granted;
        drop(lent);
        Ok(Taken {
            bytes: granted,
            lent: Arc::clone(&self.lent),
        })
    }

    /// Reserves `bytes` for a process of a VM on this node.
    ///
    /// # Errors
    ///
    /// See [`LeaseError`].
    pub fn reserve(&self, bytes: u64) -> Result<Reserved, LeaseError> {
        if bytes == 0 || !bytes.is_multiple_of(PAGE_SIZE as u64) {
            return Err(LeaseError::Size(bytes));
        }
        let mut taken = self.take(bytes, false);
        while taken.is_err() && self.end_forsaken(missing(&taken), |_| true) {
            taken = self.take(bytes, false);
        }
        Ok(Reserved { _taken: taken? })
    }

    /// Finds the lease with this token.
    #[must_use]
    pub fn find(&self, token: &Token) -> Option<Arc<Lease>> {
        lock(&self.table).active.get(token).cloned()
    }

    /// Runs `run` with the lease with this token, which does not end meanwhile. So the caller never has
    /// the last reference, as it may with [`find`](Self::find), and unmaps no memory.
    pub(super) fn with<T>(&self, token: &Token, run: impl FnOnce(&Lease) -> T) -> Option<T> {
        let table = lock(&self.table);
        table.active.get(token).map(|lease| run(lease))
    }

    /// Finds the lease with this token for the member with this certificate, or for a peer that has
    /// shown none. A token of another's lease is one that was stolen.
    #[must_use]
    pub fn find_for(&self, token: &Token, user: Option<&Subject>) -> Option<Arc<Lease>> {
        let lease = self.find(token)?;
        if lease.owner.as_ref() == user {
            return Some(lease);
        }
        let user = user.map_or_else(|| "no certificate".to_owned(), ToString::to_string);
        note_stolen(&lease, &user);
        None
    }

    /// Finds the lease with this token, if it is delegated to the process with this certificate,
    /// and its owner.
    pub(super) fn find_delegated(
        &self,
        token: &Token,
        certificate: Fingerprint,
    ) -> Option<(Arc<Lease>, Arc<Peer>)> {
        let lease = self.find(token)?;
        let owner = lease.delegated_to(certificate);
        if owner.is_none() {
            note_stolen(
                &lease,
                &format!("the process with certificate {certificate}"),
            );
        }
        Some((lease, owner?))
    }

    /// Releases RDMA devices that are being removed.
    pub(super) fn release_removed_devices(&self) {
        let leases: Vec<_> = lock(&self.table).active.values().cloned().collect();
        for lease in leases {
            lease.release_removed_device();
        }
    }
}

fn note_stolen(lease: &Lease, user: &str) {
    let vm = &lease.vm;
    if let Some(unreported) = STOLEN.pass(Instant::now()) {
        tracing::warn!(
            user,
            vm,
            unreported,
            "the token of another member's lease was shown; refused"
        );
    }
}

fn sum(one: LeaseStatus, other: LeaseStatus) -> LeaseStatus {
    LeaseStatus {
        pages_read: one.pages_read + other.pages_read,
        pages_written: one.pages_written + other.pages_written,
        pages_dropped: one.pages_dropped + other.pages_dropped,
    }
}

/// Returns how many bytes more would have been enough.
fn missing<T>(found: &Result<T, LeaseError>) -> u64 {
    match found {
        Err(LeaseError::NoMemory { asked, free, .. }) => asked.saturating_sub(*free),
        _ => 0,
    }
}

fn random_token() -> io::Result<Token> {
    let mut token = Token([0; 16]);
    File::open("/dev/urandom")?.read_exact(&mut token.0)?;
    Ok(token)
}

#[cfg(test)]
mod tests;
