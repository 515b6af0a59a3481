//! Memory that is added to a guest while it runs, and taken from it again.
//!
//! A [`Region`] of pages above the guest's memory is there from the start: it is in the layout and
//! in the page map, known to userfaultfd, and takes no memory. It is divided into blocks of 2 MiB.
//! A block that is plugged has a home: a place in what a donor lends, or this node. [`pools`]
//! decides which, and the fabric's [`Hotplug`](crate::fabric::Hotplug) carries it out.
//!
//! The pager treats all pages of the region alike, whatever becomes of their blocks meanwhile:
//! each is untouched, and filled with zeroes when it is touched. Only when one is to leave this
//! node does the evictor look where its block is at home *now*:
//!
//! | block | the page |
//! |---|---|
//! | at home on a donor | goes there, as any page |
//! | at home here | stays, and the evictor forgets of it; the budget is larger by such blocks |
//! | not plugged, or being unplugged | is dropped, bytes and all |
//!
//! So a guest that touches a block which is not plugged finds zeroes, or what it wrote there
//! itself not long ago, and takes no more memory than the budget has.
//!
//! A block is unplugged in three steps. It is marked as leaving, so that nothing of it goes home any
//! more. The evictor discards its pages, and waits for what was on its way. Then no thread knows of a
//! page of it that is anywhere but nowhere, and its home is taken away.

pub(crate) mod pools;
mod region;

pub(crate) use region::Place;
pub use region::{BLOCK_BYTES, BLOCK_PAGES, Region};

/// Most donors that can have joined at once, and numbers for them.
pub const JOINERS_MAX: usize = 8;
