//! One VM's part of the memory that a donor lends.

mod controls;
mod delegated;
mod deregistration;
mod for_rdma;
mod sessions;

pub(crate) use controls::Control;
pub(in crate::donor) use delegated::Delegated;
pub(crate) use sessions::{SessionKind, SessionRefused};

use super::Share;
use crate::donor::export::Export;
use crate::donor::policy::Accounts;
use crate::mapping::{Advice, Mapping};
use crate::page::{PAGE_SIZE, PageBytes};
use crate::stats::Counter;
use crate::stream::Closer;
use crate::transport::rdma::{Device, ProtectionDomain, RdmaError, RemoteMemory};
use crate::wire::{DROP_PAGES_MAX, LeaseStatus, ORPHAN_TIME, PIECE_BYTES, Token, orphan_time};
use controls::Controls;
use fabric_host::lock;
use fabric_identity::Subject;
use for_rdma::ForRdma;
use sessions::Sessions;
use std::io;
use std::net::IpAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// An access outside a lease.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[error("page at offset {offset:#x} asked, the lease has {bytes:#x} bytes")]
pub struct OutOfRange {
    /// Requested offset, bytes.
    pub offset: u64,
    /// Size of the lease, bytes.
    pub bytes: u64,
}

/// Pages to drop that are not in the lease, or too many at once.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[error(
    "{pages} pages at offset {offset:#x} to be dropped; 1 to {DROP_PAGES_MAX} whole pages of the lease's {bytes:#x} bytes are allowed"
)]
pub struct DropRefused {
    /// Offset of the first page, bytes.
    pub offset: u64,
    /// Number of pages.
    pub pages: u32,
    /// Size of the lease, bytes.
    pub bytes: u64,
}

/// Memory that is lent to one VM. Each lease has a separate mapping, so that the kernel zeroes its
/// pages before they are reused.
#[derive(Debug)]
pub struct Lease {
    /// Whose it is: no other can use it. `None` where peers have no certificates.
    pub owner: Option<Subject>,
    /// The VM's name.
    pub vm: String,
    /// The secret that authorizes its use.
    pub token: Token,
    /// The lease ends when it was not renewed for this long.
    pub duration: Duration,
    // Dropped before the memory, which it keeps mapped.
    export: Export,
    pub(super) memory: Arc<Mapping>,
    // Dropped after the memory, which is free by then.
    _share: Share,
    accounts: Option<Arc<Accounts>>,
    for_rdma: Mutex<ForRdma>,
    term: Mutex<Term>,
    controls: Arc<Controls>,
    sessions: Arc<Sessions>,
    /// The process that may use it beside its owner.
    delegated: Mutex<Option<Delegated>>,
    /// Pages sent.
    pub pages_read: Counter,
    /// Pages stored.
    pub pages_written: Counter,
    /// Pages dropped at the VM's request.
    pub pages_dropped: Counter,
}

#[derive(Debug)]
struct Term {
    ends_at: Instant,
    /// The control connection that renewed it last, or on which it was granted.
    renewed_by: u64,
    /// Whether its VM is known to have it: it has renewed it.
    is_known: bool,
    /// From when on others who need its memory get it: the peer has closed that connection.
    forsaken_at: Option<Instant>,
}

impl Lease {
    /// Creates a lease with fresh memory.
    pub(super) fn new(
        owner: Option<Subject>,
        vm: String,
        token: Token,
        bytes: usize,
        duration: Duration,
        share: Share,
        accounts: Option<Arc<Accounts>>,
    ) -> io::Result<Self> {
        let memory = Mapping::anonymous(bytes)?;
        // A core dump of a node must not hold the memory of guests.
        memory.advise(0, bytes, Advice::DontDump)?;
        Ok(Self {
            owner,
            vm,
            token,
            duration,
            export: Export::default(),
            memory: Arc::new(memory),
            _share: share,
            accounts,
            for_rdma: Mutex::default(),
            term: Mutex::new(Term {
                ends_at: Instant::now() + duration,
                renewed_by: 0,
                is_known: false,
                forsaken_at: None,
            }),
            controls: Arc::default(),
            sessions: Arc::default(),
            delegated: Mutex::default(),
            pages_read: Counter::default(),
            pages_written: Counter::default(),
            pages_dropped: Counter::default(),
        })
    }

    /// Returns its size in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.memory.bytes() as u64
    }

    /// Reads the page at `offset`.
    ///
    /// # Errors
    ///
    /// [`OutOfRange`].
    pub fn read(&self, offset: u64, target: &mut PageBytes) -> Result<(), OutOfRange> {
        let start = self.position(offset, 1)?;
        // A write by the VM's other connection may race; the VM, whose memory it is, orders its
        // requests.
        self.memory.read(start, target);
        self.pages_read.increment();
        Ok(())
    }

    /// Appends `count` pages from `offset` on to `target`.
    ///
    /// # Errors
    ///
    /// [`OutOfRange`], when any of them is outside.
    pub fn read_run(
        &self,
        offset: u64,
        count: u32,
        target: &mut Vec<u8>,
    ) -> Result<(), OutOfRange> {
        let start = self.position(offset, count as usize)?;
        let bytes = count as usize * PAGE_SIZE;
        self.memory.append_to(target, start, bytes);
        self.pages_read.add(count.into());
        Ok(())
    }

    /// Appends `bytes` bytes from `offset` on to `target`. They do not count as pages.
    ///
    /// # Errors
    ///
    /// [`OutOfRange`], when any of them is outside, or `offset` is not the start of a page.
    pub fn read_bytes(
        &self,
        offset: u64,
        bytes: u32,
        target: &mut Vec<u8>,
    ) -> Result<(), OutOfRange> {
        let bytes = bytes as usize;
        let start = self.position(offset, bytes.div_ceil(PAGE_SIZE))?;
        self.memory.append_to(target, start, bytes);
        Ok(())
    }

    /// Appends `bytes` bytes from `offset` on to `target`. They count as the pages that they would
    /// fill, rounded up.
    ///
    /// # Errors
    ///
    /// [`OutOfRange`], when any of them is outside, or `offset` is not a multiple of
    /// [`PIECE_BYTES`].
    pub fn read_pieces(
        &self,
        offset: u64,
        bytes: u32,
        target: &mut Vec<u8>,
    ) -> Result<(), OutOfRange> {
        let start = self.part(offset, bytes as usize, PIECE_BYTES)?;
        self.memory.append_to(target, start, bytes as usize);
        self.pages_read
            .add((bytes as usize).div_ceil(PAGE_SIZE) as u64);
        Ok(())
    }

    /// Stores a piece of a page at `offset`. It counts as a page.
    ///
    /// # Errors
    ///
    /// [`OutOfRange`], as for [`read_pieces`](Self::read_pieces).
    pub fn write_piece(&self, offset: u64, piece: &[u8]) -> Result<(), OutOfRange> {
        let start = self.part(offset, piece.len(), PIECE_BYTES)?;
        self.memory.write(start, piece);
        self.pages_written.increment();
        Ok(())
    }

    /// Stores a page at `offset`.
    ///
    /// # Errors
    ///
    /// [`OutOfRange`].
    pub fn write(&self, offset: u64, source: &PageBytes) -> Result<(), OutOfRange> {
        let start = self.position(offset, 1)?;
        self.memory.write(start, source);
        self.pages_written.increment();
        Ok(())
    }

    /// Drops `pages` pages from `offset` on: they read as zero, and use no memory. Pages that the
    /// system cannot release, such as locked ones, are unchanged; and so are all once the lease is
    /// registered for RDMA: the adapter would continue to use the old pages, and the CPU would use
    /// new ones.
    ///
    /// # Errors
    ///
    /// Fails when they are not pages of the lease, or their number is 0 or above
    /// [`DROP_PAGES_MAX`].
    pub fn drop_pages(&self, offset: u64, pages: u32) -> Result<(), DropRefused> {
        let outside = || DropRefused {
            offset,
            pages,
            bytes: self.bytes(),
        };
        if !(1..=DROP_PAGES_MAX).contains(&pages) || !offset.is_multiple_of(PAGE_SIZE as u64) {
            return Err(outside());
        }
        let length = pages as usize * PAGE_SIZE;
        let start = usize::try_from(offset).map_err(|_| outside())?;
        start
            .checked_add(length)
            .filter(|&end| end <= self.memory.bytes())
            .ok_or_else(outside)?;
        // The mapping is private and anonymous, so the next access finds zeroes.
        let drop = || self.memory.advise(start, length, Advice::DontNeed);
        match self.export.unless_pinned(drop) {
            Some(Ok(())) => self.pages_dropped.add(u64::from(pages)),
            Some(Err(error)) => tracing::debug!(%error, pages, "pages are kept"),
            None => {}
        }
        Ok(())
    }

    /// Returns the position of `count` pages at `offset` in the memory.
    fn position(&self, offset: u64, count: usize) -> Result<usize, OutOfRange> {
        self.part(offset, count * PAGE_SIZE, PAGE_SIZE)
    }

    /// Returns the position of bytes at `offset`, a multiple of `unit`, in the memory.
    fn part(&self, offset: u64, bytes: usize, unit: usize) -> Result<usize, OutOfRange> {
        let outside = OutOfRange {
            offset,
            bytes: self.bytes(),
        };
        let start = usize::try_from(offset).map_err(|_| outside)?;
        let inside = start
            .checked_add(bytes)
            .is_some_and(|end| end <= self.memory.bytes());
        if !inside || !start.is_multiple_of(unit) {
            return Err(outside);
        }
        Ok(start)
    }

    /// Returns the counters for the VM.
    #[must_use]
    pub fn status(&self) -> LeaseStatus {
        LeaseStatus {
            pages_read: self.pages_read.get(),
            pages_written: self.pages_written.get(),
            pages_dropped: self.pages_dropped.get(),
        }
    }

    /// Adds a control connection that starts to serve the lease. When it has too many, one that did not
    /// renew it last is closed.
    pub(crate) fn begin_control(&self, closer: Closer) -> Control {
        let in_use = lock(&self.term).renewed_by;
        self.controls.begin(closer, in_use)
    }

    /// Begins the lease on control connection `number`.
    pub fn begin(&self, number: u64) {
        let mut term = lock(&self.term);
        term.ends_at = Instant::now() + self.duration;
        term.renewed_by = number;
    }

    /// Renews the lease on control connection `number`.
    pub fn renew(&self, number: u64) {
        *lock(&self.term) = Term {
            ends_at: Instant::now() + self.duration,
            renewed_by: number,
            is_known: true,
            forsaken_at: None,
        };
    }

    /// Handles a control connection `number` that the peer has closed. If it was the last to renew,
    /// the VM has ended, or reconnects soon; a VM that has never renewed had gone when it was granted
    /// the lease, which ends now. The order in which connections started is no
    /// criterion: after a pause of this host, connections that the VM has abandoned may be served
    /// after the one that it uses.
    pub fn orphan(&self, number: u64) {
        let now = Instant::now();
        let mut term = lock(&self.term);
        if term.renewed_by == number && !term.is_known {
            (term.ends_at, term.forsaken_at) = (now, Some(now));
        } else if term.renewed_by == number {
            term.ends_at = term.ends_at.min(now + orphan_time(self.duration));
            term.forsaken_at = Some(now + ORPHAN_TIME);
        }
    }

    /// Lets the lease last longer, and its memory stay with it.
    pub(super) fn postpone_end(&self, by: Duration) {
        let mut term = lock(&self.term);
        term.ends_at += by;
        term.forsaken_at = term.forsaken_at.map(|at| at + by);
    }

    /// Its VM closed the connection that renewed it last, and that long ago.
    #[cfg(test)]
    pub(super) fn forsake(&self, number: u64) {
        self.orphan(number);
        lock(&self.term).forsaken_at = Some(Instant::now());
    }

    /// Whether its VM seems to have ended, although the lease may continue.
    pub(super) fn is_forsaken(&self, now: Instant) -> bool {
        self.forsaken_since(now).is_some()
    }

    /// Returns since when that is so.
    pub(super) fn forsaken_since(&self, now: Instant) -> Option<Instant> {
        lock(&self.term).forsaken_at.filter(|&at| at <= now)
    }

    pub(in crate::donor) fn ends_at(&self) -> Instant {
        lock(&self.term).ends_at
    }

    /// Returns the addresses of ports that its owner may have for RDMA, under a policy, beside the one
    /// by which it is connected.
    pub(in crate::donor) fn gids(&self) -> Vec<IpAddr> {
        let owner = self.owner.as_ref().map(|owner| &owner.holder);
        let accounts = self.accounts.as_ref();
        accounts
            .zip(owner)
            .map(|(accounts, owner)| accounts.gids(owner))
            .unwrap_or_default()
    }

    /// Registers the lease's memory with `device`; see [`Export::open`].
    pub(in crate::donor) fn export(
        self: &Arc<Self>,
        device: &Arc<Device>,
    ) -> Result<Option<(Arc<ProtectionDomain>, RemoteMemory)>, RdmaError> {
        // Pages are dropped in `drop_pages` only.
        let exported = self.export.open(&self.memory, device)?;
        if exported.is_none() && self.export.is_held() {
            // It ended during a registration that could not be ended after it.
            self.keep_lent();
        }
        Ok(exported)
    }

    /// Ends RDMA connections over a device that is being removed.
    pub(super) fn release_removed_device(self: &Arc<Self>) {
        if let Some(region) = self.export.release_removed_device() {
            self.deregister(region);
            self.sessions
                .shut_down(|kind| matches!(kind, SessionKind::Rdma(_)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Pool;
    use super::*;

    #[test]
    fn a_lease_of_a_vm_that_had_gone_when_it_was_granted_ends_at_once() {
        let duration = Duration::from_secs(60);
        let pool = Pool::new(PAGE_SIZE as u64, duration);
        let lease = pool.lend("a".into(), PAGE_SIZE as u64, false, duration);
        let lease = lease.expect("there is memory");
        lease.begin(7);
        lease.orphan(6);
        assert!(!lease.is_forsaken(Instant::now()), "another connection");
        lease.orphan(7);
        assert!(lease.is_forsaken(Instant::now()));
        assert_eq!(pool.end_expired(Instant::now()), ["a"]);
    }
}
