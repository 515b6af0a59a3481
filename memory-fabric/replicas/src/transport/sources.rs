//! Which copies are asked for pages.

use super::{Place, ReplicatedTransport};
use crate::copies::Has;

impl ReplicatedTransport {
    /// Returns the places to read pages of a block from, the better one first.
    ///
    /// A copy that lacks a page is not asked while another has it, however long that takes. A single
    /// page that all valid copies lack is asked of one that is not, whose page its check accepts or not.
    /// A run does not open if all copies lack a page of it: its pages are then read one by one.
    pub(super) fn sources(&self, block: u32, first: u32, pages: u32) -> [Option<Place>; 2] {
        let copies = self.set.copies();
        if copies.has_gap(block, first, pages) {
            let all = [0, 1].map(|at| copies.source_at(block, at, first, pages));
            let wanted = match pages {
                1 => &[Has::All, Has::Perhaps][..],
                _ => &[Has::All],
            };
            for &wanted in wanted {
                let is_usable = |&(place, has): &(Place, Has)| {
                    has == wanted && !self.members[usize::from(place.donor)].out
                };
                let found = all.map(|source| source.filter(is_usable).map(|(place, _)| place));
                if found != [None; 2] {
                    return found;
                }
            }
        }
        let places = copies.readable(block);
        let latency = |place: Option<Place>| {
            let member = self.members.get(usize::from(place?.donor))?;
            member.latency()
        };
        match (latency(places[0]), latency(places[1])) {
            // A margin for noise, so that links of equal speed share the load.
            (Some(primary), Some(other)) if other * 2 < primary => [places[1], places[0]],
            _ => places,
        }
    }
}
