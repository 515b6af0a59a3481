//! Places that copies have left, and that are used again.
//!
//! A thread may have a request there outstanding: a read that was posted before the copy moved, or
//! a write that comes late. Such a place is kept until each thread has noted, after it was vacated,
//! that all its requests of before are answered.

use super::{Copies, Ledger};
use crate::placement::Place;
use fabric_host::lock;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

/// Places that are not used yet.
#[derive(Debug, Default)]
pub(super) struct Kept {
    places: Vec<Place>,
    /// The epoch that the threads have to note.
    epoch: u32,
}

impl Kept {
    /// Forgets places on a donor.
    pub(super) fn forget(&mut self, donor: u8) {
        self.places.retain(|place| place.donor != donor);
    }
}

/// How far the threads are.
#[derive(Debug, Default)]
pub(super) struct Epochs {
    /// Number of times that places were vacated.
    newest: AtomicU32,
    /// Whether places are kept, so that those who repair look at them without the lock.
    keeps: AtomicBool,
    /// The epoch that each transport has noted.
    noted: Mutex<Vec<Arc<AtomicU32>>>,
}

/// What one transport notes.
#[derive(Debug)]
pub(crate) struct Noted(Arc<AtomicU32>);

impl Noted {
    pub fn epoch(&self) -> u32 {
        self.0.load(Ordering::Relaxed)
    }

    /// Notes that all requests are answered that were posted before this epoch was seen.
    pub fn note(&self, epoch: u32) {
        // Release: pairs with the Acquire of `reclaim`. The answers were taken before.
        self.0.store(epoch, Ordering::Release);
    }
}

impl Drop for Noted {
    fn drop(&mut self) {
        // Its connections are closed.
        self.note(u32::MAX);
    }
}

impl Copies {
    /// Returns what a new transport notes.
    pub(crate) fn register(&self) -> Noted {
        let noted = Arc::new(AtomicU32::new(self.vacated_epoch()));
        lock(&self.epochs.noted).push(Arc::clone(&noted));
        Noted(noted)
    }

    /// Returns the number of times that places were vacated.
    pub(crate) fn vacated_epoch(&self) -> u32 {
        // Acquire: pairs with the Release of `vacate`. Requests that are posted after this go to
        // the new places.
        self.epochs.newest.load(Ordering::Acquire)
    }

    /// Keeps places that no block has any more. Those of a donor that has left are gone, also if
    /// another one joins with its number: no thread has a place there before it is used.
    pub(super) fn vacate(&self, ledger: &mut Ledger, places: impl IntoIterator<Item = Place>) {
        let before = ledger.kept.places.len();
        let Ledger { kept, loans, .. } = ledger;
        let places = places.into_iter();
        let is_kept = |place: &Place| loans[usize::from(place.donor)].standing.has_places();
        kept.places.extend(places.filter(is_kept));
        if ledger.kept.places.len() > before {
            // Relaxed: a hint to look under the lock.
            self.epochs.keeps.store(true, Ordering::Relaxed);
            ledger.kept.epoch = self.epochs.newest.fetch_add(1, Ordering::Release) + 1;
        }
    }

    /// Keeps a place that no block has.
    #[cfg(test)]
    pub(crate) fn vacate_one(&self, place: Place) {
        self.vacate(&mut self.lock(), [place]);
    }

    /// Returns whether there are places that are not used yet.
    pub(crate) fn keeps_places(&self) -> bool {
        self.epochs.keeps.load(Ordering::Relaxed)
    }

    /// Makes kept places usable, if no request to them is outstanding; true when there are none
    /// now.
    pub(crate) fn reclaim_kept(&self) -> bool {
        let mut ledger = self.lock();
        self.reclaim(&mut ledger);
        ledger.kept.places.is_empty()
    }

    /// Makes kept places usable, if no request to them is outstanding.
    pub(super) fn reclaim(&self, ledger: &mut Ledger) {
        if ledger.kept.places.is_empty() {
            // The donors of all of them may have left.
            self.epochs.keeps.store(false, Ordering::Relaxed);
            return;
        }
        let epoch = ledger.kept.epoch;
        let noted = lock(&self.epochs.noted);
        if noted
            .iter()
            .all(|noted| noted.load(Ordering::Acquire) >= epoch)
        {
            for Place { donor, slot } in ledger.kept.places.drain(..) {
                ledger.loans[usize::from(donor)].spare.push(slot);
            }
            self.epochs.keeps.store(false, Ordering::Relaxed);
        }
    }
}
