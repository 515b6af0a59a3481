//! A lane whose requests complete under control of the test.

use crate::page::{PAGE_SIZE, PageBytes};
use crate::transport::rdma::{PageLane, RdmaError};
use std::collections::HashMap;
use std::os::fd::RawFd;
use std::sync::{Arc, Mutex, MutexGuard};

/// Contents that only the lane returns, not the donor.
pub(super) const BY_LANE: u8 = 0xaa;

#[derive(Debug, Default)]
pub(super) struct Hand {
    /// READs that were added, and those that were posted.
    pub(super) added: Vec<(u16, u64, usize)>,
    pub(super) posted: Vec<(u16, u64, usize)>,
    /// How many of those may complete now, from the first on.
    pub(super) complete: usize,
    /// Limit of concurrent READs.
    pub(super) room: usize,
    pub(super) fails: bool,
}

#[derive(Clone, Debug)]
pub(super) struct HeldLane {
    hand: Arc<Mutex<Hand>>,
    /// Pages to be written, by number.
    pages: HashMap<u16, Box<PageBytes>>,
}

impl HeldLane {
    pub(super) fn new(room: usize) -> Self {
        let hand = Hand {
            room,
            ..Hand::default()
        };
        Self {
            hand: Arc::new(Mutex::new(hand)),
            pages: HashMap::new(),
        }
    }

    pub(super) fn hand(&self) -> MutexGuard<'_, Hand> {
        self.hand.lock().expect("no test panics with it")
    }
}

impl PageLane for HeldLane {
    fn add(&mut self, number: u16, offset: u64, pages: usize) -> bool {
        let mut hand = self.hand();
        let fits = hand.added.len() + hand.posted.len() < hand.room;
        if fits {
            hand.added.push((number, offset, pages));
        }
        fits
    }

    fn add_write(&mut self, number: u16, offset: u64, page: &PageBytes) -> bool {
        let fits = self.add(number, offset, 1);
        if fits {
            self.pages.insert(number, Box::new(*page));
        }
        fits
    }

    fn page_of(&self, number: u16) -> &PageBytes {
        &self.pages[&number]
    }

    fn post(&mut self) -> Result<(), RdmaError> {
        let mut hand = self.hand();
        let added = std::mem::take(&mut hand.added);
        hand.posted.extend(added);
        Ok(())
    }

    fn poll(&mut self, complete: &mut dyn FnMut(u16, &[u8])) -> Result<bool, RdmaError> {
        let (done, fails) = {
            let mut hand = self.hand();
            let count = std::mem::take(&mut hand.complete).min(hand.posted.len());
            (hand.posted.drain(..count).collect::<Vec<_>>(), hand.fails)
        };
        for &(number, _, pages) in &done {
            match self.pages.remove(&number) {
                Some(_) => complete(number, &[]),
                None => complete(number, &vec![BY_LANE; pages * PAGE_SIZE]),
            }
        }
        if fails {
            return Err(RdmaError::CalledBack("a test".to_owned()));
        }
        Ok(!done.is_empty())
    }

    fn arm(&mut self) -> bool {
        self.hand().complete == 0
    }

    fn event_fd(&self) -> Option<RawFd> {
        Some(7)
    }
}
