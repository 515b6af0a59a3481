//! Sealed pages: which donors get them, their layer between the pager and its transports, and what
//! follows from a page that does not open.

use super::connections::Transports;
use super::{FabricConfig, FabricError, FabricEvent, FabricObserver};
use crate::homes::{BLOCK_BYTES, HomeTable, NodeId};
use crate::link::LinkEvent;
use crate::nodes::Nodes;
use crate::page::{PAGE_SHIFT, PageIndex};
use crate::transport::vacant::Vacant;
use crate::transport::{IN_FLIGHT_MAX, PageTransport};
use crate::view::VmMemory;
use crate::wire::TrafficClass;
use fabric_host::Seldom;
use fabric_replicas::ReplicaSet;
use fabric_sealing::{Fault, Judge, LinkSeal, SealStats, SealedTransport};
use fabric_sealing::{VERDICTS_MAX, Verdict, VmKey};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

/// Which donors get sealed pages only.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Sealing {
    /// Those on other hosts.
    #[default]
    Auto,
    /// All.
    On,
    /// None.
    Off,
}

impl FabricConfig {
    /// Returns whether a donor gets sealed pages only; the loopback slab has no address. Copies of
    /// a page are equal, so they are sealed if one of the donors of the start wants that.
    #[must_use]
    pub fn seals(&self, donor: Option<SocketAddr>) -> bool {
        match self.seal {
            Sealing::On => true,
            Sealing::Off => false,
            Sealing::Auto if self.redundancy.is_some() => {
                let mut donors = self.donors.iter();
                donors.any(|donor| is_elsewhere(donor.address))
            }
            Sealing::Auto => donor.is_some_and(is_elsewhere),
        }
    }

    /// Returns whether a donor that joins would get pages as they are although it is to get sealed
    /// ones.
    pub(super) fn leaves_unsealed(&self, joins: SocketAddr) -> bool {
        self.seal == Sealing::Auto && is_elsewhere(joins) && !self.seals(Some(joins))
    }
}

fn is_elsewhere(address: SocketAddr) -> bool {
    !address.ip().to_canonical().is_loopback()
}

/// Makes the layer that seals, with one key for the VM.
pub(super) struct Sealer {
    key: Arc<VmKey>,
    stats: Arc<SealStats>,
    homes: Arc<HomeTable>,
    nodes: Arc<Nodes>,
    replicas: Option<Arc<ReplicaSet>>,
    observer: FabricObserver,
}

impl Sealer {
    /// `observer` learns of pages that do not open as it learns of donors that are lost.
    pub fn new(vm: &VmMemory, observer: &FabricObserver) -> Result<Arc<Self>, FabricError> {
        Ok(Arc::new(Self {
            key: Arc::new(VmKey::random()?),
            stats: Arc::clone(&vm.stats.sealing),
            homes: Arc::clone(&vm.plan.homes),
            nodes: Arc::clone(&vm.nodes),
            replicas: vm.replicas.clone(),
            observer: Arc::clone(observer),
        }))
    }

    /// Returns the layer for a link that leads to a loan of so many bytes.
    pub fn layer(&self, link: usize, lease_bytes: u64) -> Result<Layer, FabricError> {
        let judge = Arc::new(LinkJudge {
            link,
            homes: Arc::clone(&self.homes),
            nodes: Arc::clone(&self.nodes),
            replicas: self.replicas.clone(),
            observer: Arc::clone(&self.observer),
            notices: Seldom::notices(),
        });
        let (key, stats) = (Arc::clone(&self.key), Arc::clone(&self.stats));
        let node = u32::try_from(link).expect("a few links");
        let seal = LinkSeal::new(key, node, lease_bytes, stats, judge);
        let seal = seal.map_err(|error| FabricError::System("create the table of seals", error))?;
        // Every read on each donor's connection, and those without room there.
        let lenders = self.replicas.as_ref().map_or(1, |_| self.nodes.links() + 2);
        Ok(Layer {
            seal: Arc::new(seal),
            requests_max: lenders * IN_FLIGHT_MAX,
        })
    }

    /// Seals the transports of the start, one for each link in order: for each lender, whether it
    /// gets sealed pages only, and the bytes that it lends.
    pub fn seal<'a>(
        &self,
        lenders: impl Iterator<Item = (bool, u64)>,
        transports: impl IntoIterator<Item = (TrafficClass, &'a mut Transports)>,
    ) -> Result<(), FabricError> {
        let mut layers = Vec::new();
        match &self.replicas {
            None => {
                for (link, (is_sealed, bytes)) in lenders.enumerate() {
                    let layer = is_sealed.then(|| self.layer(link, bytes));
                    layers.push(layer.transpose()?);
                }
            }
            // Only the last link is used. The layer is above the copies: they are equal, and what
            // fills one of them needs no key.
            Some(set) => {
                let is_sealed = lenders.map(|(is_sealed, _)| is_sealed);
                let is_sealed: Vec<bool> = is_sealed.collect();
                let link = self.nodes.links() - 1;
                let bytes = u64::from(set.copies().blocks()) * BLOCK_BYTES;
                layers.resize(link, None);
                let layer = is_sealed.contains(&true).then(|| self.layer(link, bytes));
                let layer = layer.transpose()?;
                if let Some(Layer { seal, .. }) = &layer {
                    // The seals know the set as well, and end with the transports.
                    let seal = Arc::downgrade(seal);
                    set.set_check(Box::new(move |offset, page| {
                        seal.upgrade()?.is_genuine(offset, page)
                    }));
                }
                layers.push(layer);
            }
        }
        for (class, transports) in transports {
            for (transport, layer) in transports.iter_mut().zip(&layers) {
                if let Some(layer) = layer {
                    let inner = std::mem::replace(transport, Box::new(Vacant));
                    *transport = layer.over(inner, class);
                }
            }
        }
        Ok(())
    }
}

/// Seals the traffic of one link, on all its transports.
#[derive(Clone, Debug)]
pub(super) struct Layer {
    seal: Arc<LinkSeal>,
    requests_max: usize,
}

impl Layer {
    /// Puts a transport of a class behind the layer.
    pub fn over(
        &self,
        transport: Box<dyn PageTransport>,
        class: TrafficClass,
    ) -> Box<dyn PageTransport> {
        let seal = Arc::clone(&self.seal);
        Box::new(SealedTransport::new(
            transport,
            seal,
            class,
            self.requests_max,
        ))
    }
}

/// Reports the pages of one link that do not open.
struct LinkJudge {
    link: usize,
    homes: Arc<HomeTable>,
    nodes: Arc<Nodes>,
    replicas: Option<Arc<ReplicaSet>>,
    observer: FabricObserver,
    notices: Seldom,
}

impl LinkJudge {
    /// Returns the page that is stored at an offset of the link's loan, and the node it is at.
    fn stored_at(&self, offset: u64) -> Option<(PageIndex, NodeId)> {
        let homes = &self.homes;
        let blocks = u32::try_from(homes.span_pages() / (BLOCK_BYTES >> PAGE_SHIFT)).ok()?;
        (0..=blocks).find_map(|block| {
            let home = homes.home(block)?;
            let is_it = home.node != homes.local()
                && homes.link_to_home(home) == self.link
                && u64::from(home.slot) == offset / BLOCK_BYTES;
            let in_block = u32::try_from((offset % BLOCK_BYTES) >> PAGE_SHIFT).ok()?;
            let first = homes.pages_of(block).first.number();
            is_it.then(|| (PageIndex::new(first + in_block), home.node))
        })
    }
}

/// Names a page that a donor was never given, and no other one has.
fn lost_with_another(page: &str, node: NodeId) -> String {
    format!(
        "{page} is lost: the copy at donor {node} was made without it, since no right one could be read \
         then, and no other donor that is in use has it"
    )
}

/// Names a page that was read as often as any may be.
fn never_right(page: &str, node: NodeId) -> String {
    format!(
        "{page} was read from its donors until {VERDICTS_MAX} attempts, each of two answers, had failed, \
         which is the limit: none sent what was written back last, the last one was donor {node}; check \
         the donors, their memory and the network to them"
    )
}

impl LinkJudge {
    /// Returns whether a page that a donor sent is left until a thread touches it, since no other valid
    /// copy has it, as far as is known: to decide more would end the VM.
    fn is_left(&self, donor: Option<usize>, offset: u64) -> bool {
        let (Some(set), Some(id)) = (&self.replicas, id_of(donor)) else {
            return true;
        };
        set.copies().layout().is_some() || set.lacks(id, offset) || !set.has_other(id, offset)
    }
}

fn id_of(donor: Option<usize>) -> Option<u8> {
    donor.and_then(|donor| u8::try_from(donor).ok())
}

impl Judge for LinkJudge {
    fn judge(&self, fault: Fault) -> Verdict {
        let mut is_last_verdict = false;
        let (donor, offset) = match fault {
            Fault::NotGenuine {
                donor,
                offset,
                is_ahead: true,
            } if self.is_left(donor, offset) => return Verdict::Later,
            Fault::NotGenuine { donor, offset, .. } => (donor, offset),
            Fault::NeverGenuine { donor, offset } => {
                is_last_verdict = true;
                (donor, offset)
            }
            Fault::NotSealed(error) => {
                (self.observer)(FabricEvent::Failed(error.to_string()));
                return Verdict::Lost;
            }
        };
        let stored = self.stored_at(offset);
        let page = stored.map_or_else(|| "a page".into(), |(page, _)| page.to_string());
        let node = match (donor, stored) {
            (Some(donor), _) => self.nodes.node_at(donor),
            (None, Some((_, node))) => node,
            (None, None) => self.nodes.node_at(self.link),
        };
        if is_last_verdict {
            (self.observer)(FabricEvent::Failed(never_right(&page, node)));
            return Verdict::Lost;
        }
        let striped = self.replicas.as_ref();
        let striped = striped.and_then(|set| set.copies().layout());
        if let Some(layout) = striped {
            // All pieces were read, and no choice of them opens.
            let reason = format!(
                "{page} cannot be computed any more: fewer than {} of its pieces that can be read are \
                 those that were written back last; donors, their memory or the network to them \
                 changed the others",
                layout.data()
            );
            (self.observer)(FabricEvent::Failed(reason));
            return Verdict::Lost;
        }
        let id = id_of(donor);
        let is_last = |set: &Arc<ReplicaSet>| id.is_some_and(|id| set.is_last_of(id, offset));
        let is_missing = |set: &Arc<ReplicaSet>| id.is_some_and(|id| set.lacks(id, offset));
        let is_missing = self.replicas.as_ref().is_some_and(is_missing);
        let is_last = self.replicas.as_ref().is_some_and(is_last);
        if is_last {
            let reason = match is_missing {
                true => lost_with_another(&page, node),
                false => format!(
                    "{page} has no right copy any more: donor {node} sent it with other bytes than \
                     were written back last, as it did, or another one, when its second copy was made"
                ),
            };
            (self.observer)(FabricEvent::Failed(reason));
            return Verdict::Lost;
        }
        if is_missing {
            // This copy was never given the page, and another that may have it could not be asked when
            // the read was posted. It is asked now.
            return Verdict::ReadAgain;
        }
        let reason = format!(
            "{page} was received twice with other bytes than were written back last: the donor, its \
             memory or the network to it changed them"
        );
        let (set, copy) = (self.replicas.as_ref(), id);
        if set.is_some_and(|set| copy.is_some_and(|donor| set.read_elsewhere(donor, offset))) {
            // A donor can send as many as it likes.
            if let Some(unreported) = self.notices.pass(Instant::now()) {
                tracing::warn!(
                    unreported,
                    "donor {node} sent a wrong copy: {reason}; the other copy is read, and this one \
                     is made again; the donor stays in use, since it has the only copy of other memory"
                );
            }
            return Verdict::ReadAgain;
        }
        // With another copy the donor goes out of use, as if its memory were gone.
        (self.observer)(FabricEvent::Link(LinkEvent::Lost { node, reason }));
        let is_out = |set: &Arc<ReplicaSet>| id.is_some_and(|id| set.copies().is_out(id));
        if self.replicas.as_ref().is_some_and(is_out) {
            Verdict::ReadAgain
        } else {
            Verdict::Lost
        }
    }
}

#[cfg(test)]
mod tests;
