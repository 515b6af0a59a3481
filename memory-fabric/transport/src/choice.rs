//! Decides by trials whether the pages of one connection are compressed.
//!
//! The benefit of compression depends on the link and its other load, on the pages, and on the CPUs
//! of both ends. One number covers all of them: the *time of a page*, from the answer before it to
//! its own, or from its request when nothing was outstanding. With one request at a time that is
//! its latency; with many, it is the time in the slowest part of their path.
//!
//! From time to time there is a trial: short blocks of pages, every second one compressed, in an
//! order that is neutral to gradual changes of speed. A block is better than another when it took a
//! sixteenth less time for its pages. A disturbance may take far longer than all pages of a block,
//! so compression has to win twice:
//!
//! - most pairs of neighbours: a disturbed pair counts no more than any other pair. Turning
//!   compression on requires more wins than keeping it on;
//! - among the least disturbed blocks, which are the fastest quarter of each kind.
//!
//! Between trials the connection rests, for many times the pages of a trial and for some seconds.
//! Where compression does not pay, hardly any page is compressed, and requests only cost a few more
//! comparisons.

use crate::path::PathStats;
use crate::policy::{Policy, Tier};
use fabric_wire::TrafficClass;
use fabric_wire::packing::Packing;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Whether pages are compressed on the network.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Compression {
    /// On each connection for as long as it was measured to pay.
    #[default]
    Auto,
    /// Always.
    On,
    /// Never, and zeroes are sent like any page.
    Off,
}

/// Pairs of blocks in a trial.
const PAIRS: usize = 8;
/// Pages in a trial for each page in a block.
const BLOCKS: u32 = 16;
const _: () = assert!(BLOCKS as usize == 2 * PAIRS);
/// Pairs of 8 to win before compression is turned on: 3 % of trials achieve this by chance.
const WINS_TO_BEGIN: usize = 7;
/// Pairs of 8 to win to keep it on.
const WINS_TO_GO_ON: usize = 4;
/// A block is better than another when it saves this fraction of the time.
const GAIN_PARTS: u64 = 16;
/// Pages between trials for each page in a trial: at most one page in 33 is compressed without
/// benefit.
const REST_FACTOR: u32 = 16;
/// Minimum time between trials. It doubles with each trial that changes nothing, up to the limit of
/// the link's [`Policy`]. So does the number of pages before the first trial, by which time the
/// network has reached its speed.
const REST_MIN: Duration = Duration::from_millis(250);

/// Returns the pages in a block of a trial: more than are outstanding or answered at once, since an
/// answer that arrives together with one of another block cannot be measured.
const fn block_pages(class: TrafficClass) -> u32 {
    match class {
        TrafficClass::Urgent | TrafficClass::Probe => 16,
        TrafficClass::Bulk | TrafficClass::Prefetch => 128,
    }
}

/// The block of a trial to which a request belongs, if any.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(super) struct Part(Option<u8>);

/// The decision for one connection.
#[derive(Debug)]
pub(super) struct Choice {
    setting: Compression,
    /// The last decision.
    compressing: bool,
    block_pages: u32,
    trial: Option<Trial>,
    /// The answers that arrived at once.
    batch: Batch,
    /// Pages answered before the first trial, which is due when the policy says; `None` afterwards.
    before_first: Option<u32>,
    /// Pages to be answered before another trial.
    rest_pages: u32,
    /// Earliest time of the next trial.
    rest_until: Option<Instant>,
    rest: Duration,
    /// The path whose policy applies.
    path: Option<Arc<PathStats>>,
}

#[derive(Debug, Default)]
struct Batch {
    part: Option<Part>,
    mixed: bool,
    pages: u32,
}

#[derive(Debug, Default)]
struct Trial {
    posted: u32,
    answered: u32,
    blocks: [Block; BLOCKS as usize],
}

#[derive(Clone, Copy, Debug, Default)]
struct Block {
    pages: u32,
    time: Duration,
}

/// Returns whether a block of a trial is compressed: no, yes, yes, no, and so on.
const fn is_compressed(block: usize) -> bool {
    matches!(block % 4, 1 | 2)
}

impl Choice {
    pub(super) fn new(setting: Compression, class: TrafficClass) -> Self {
        Self {
            setting,
            compressing: setting == Compression::On,
            block_pages: block_pages(class),
            trial: None,
            batch: Batch::default(),
            before_first: Some(0),
            rest_pages: 0,
            rest_until: None,
            rest: REST_MIN,
            path: None,
        }
    }

    /// Applies the policy of this link from now on.
    pub(super) fn follow(&mut self, path: Arc<PathStats>) {
        self.path = Some(path);
    }

    fn policy(&self) -> Policy {
        let path = self.path.as_ref();
        path.map_or(Policy::of(Tier::FastTcp), |path| path.policy())
    }

    /// Returns whether pages are compressed, except in trials.
    pub(super) fn is_compressing(&self) -> bool {
        self.compressing
    }

    /// Returns the packing of the next request, for this many pages.
    pub(super) fn next(&mut self, pages: u32) -> (Packing, Part) {
        if self.setting == Compression::Off {
            return (Packing::Plain, Part::default());
        }
        let mut compress = self.compressing;
        let mut part = Part::default();
        if let Some(trial) = &mut self.trial {
            let block = (trial.posted / self.block_pages) as usize;
            if block < trial.blocks.len() {
                compress = is_compressed(block);
                part = Part(u8::try_from(block).ok());
                trial.posted += pages;
            }
        }
        let packing = if compress {
            Packing::Lz4
        } else {
            Packing::Zeroes
        };
        (packing, part)
    }

    /// Records that a request for this many pages was answered.
    pub(super) fn answered(&mut self, part: Part, pages: u32) {
        let batch = &mut self.batch;
        batch.mixed |= batch.part.is_some_and(|other| other != part);
        batch.part = Some(part);
        batch.pages += pages;
        if let (Some(trial), Part(Some(_))) = (&mut self.trial, part) {
            trial.answered += pages;
        }
    }

    /// Records the end of a batch of answers at `now`, with its duration. Returns true if the
    /// decision changes.
    pub(super) fn measured(&mut self, took: Duration, now: Instant) -> bool {
        let batch = std::mem::take(&mut self.batch);
        if self.setting != Compression::Auto {
            return false;
        }
        let Some(trial) = &mut self.trial else {
            if self.is_due(batch.pages) && self.rest_until.is_none_or(|until| now >= until) {
                self.trial = Some(Trial::default());
                self.before_first = None;
            }
            return false;
        };
        if let (Some(Part(Some(block))), false) = (batch.part, batch.mixed) {
            let block = &mut trial.blocks[usize::from(block)];
            block.pages += batch.pages;
            block.time += took;
        }
        if trial.posted < self.block_pages * BLOCKS || trial.answered < trial.posted {
            return false;
        }
        let wanted = if self.compressing {
            WINS_TO_GO_ON
        } else {
            WINS_TO_BEGIN
        };
        let pays = trial.pays(self.block_pages, wanted);
        self.conclude(pays, now)
    }

    /// Counts answered pages; returns whether enough were for the next trial. The first one follows
    /// the tier of the link, also when that changes meanwhile.
    fn is_due(&mut self, pages: u32) -> bool {
        let first = self.policy().compression_first_pages;
        if let Some(answered) = &mut self.before_first {
            *answered = answered.saturating_add(pages);
            return *answered >= first;
        }
        self.rest_pages = self.rest_pages.saturating_sub(pages);
        self.rest_pages == 0
    }

    /// Records that the connection broke: requests that are repeated on another one are not
    /// measured.
    pub(super) fn interrupted(&mut self) {
        self.trial = None;
        self.batch = Batch::default();
        self.before_first = Some(0);
    }

    fn conclude(&mut self, pays: bool, now: Instant) -> bool {
        let changed = self.compressing != pays;
        self.compressing = pays;
        self.rest = if changed {
            REST_MIN
        } else {
            (self.rest * 2).min(self.policy().compression_rest_max)
        };
        self.trial = None;
        self.rest_until = Some(now + self.rest);
        self.rest_pages = self.block_pages * BLOCKS * REST_FACTOR;
        changed
    }
}

impl Block {
    /// Returns the time of a page in nanoseconds; `None` when too few pages were measured.
    fn page_ns(&self, least_pages: u32) -> Option<u64> {
        let total = u64::try_from(self.time.as_nanos()).ok()?;
        (self.pages >= least_pages).then(|| total / u64::from(self.pages))
    }
}

impl Trial {
    /// Returns whether compression wins enough pairs, and among the least disturbed blocks.
    fn pays(&self, block_pages: u32, wins_wanted: usize) -> bool {
        // A block of which less than half was measured cannot be compared.
        let times = self.blocks.map(|block| block.page_ns(block_pages / 2));
        let pairs: [_; PAIRS] = std::array::from_fn(|pair| {
            let (one, other) = (times[2 * pair], times[2 * pair + 1]);
            if is_compressed(2 * pair) {
                (other, one)
            } else {
                (one, other)
            }
        });
        let wins = pairs
            .iter()
            .filter(|(plain, packed)| is_better(*packed, *plain));
        let undisturbed = |times: [Option<u64>; PAIRS]| {
            let mut times = times.map(|time| time.unwrap_or(u64::MAX));
            times.sort_unstable();
            Some(times[PAIRS / 4 - 1])
        };
        wins.count() >= wins_wanted
            && is_better(
                undisturbed(pairs.map(|(_, packed)| packed)),
                undisturbed(pairs.map(|(plain, _)| plain)),
            )
    }
}

fn is_better(packed_ns: Option<u64>, plain_ns: Option<u64>) -> bool {
    match (packed_ns, plain_ns) {
        (Some(packed), Some(plain)) => packed <= plain / GAIN_PARTS * (GAIN_PARTS - 1),
        _ => false,
    }
}

#[cfg(test)]
#[path = "choice_tests.rs"]
mod tests;
