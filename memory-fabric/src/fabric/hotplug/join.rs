//! A donor joins: it gets a place, lends, and its transports go to the pager.

use super::super::adapt::{Change, Followed};
use super::super::connections::Connections;
use super::super::sources::{carrier, obtain};
use super::super::{DonorAddress, FabricError, FabricObserver, TransportKind};
use super::transports::place_of;
use super::{Hotplug, HotplugError, Inner, State};
use crate::homes::BLOCK_BYTES;
use crate::link::rdma::RdmaLink;
use crate::link::{Leased, Link, LinkConfig};
use crate::transport::PageTransport;
use crate::view::LentBy;
use crate::wire::TrafficClass;
use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};

impl Hotplug {
    /// Returns how many bytes of blocks may be plugged, by the newest request.
    #[must_use]
    pub fn requested_bytes(&self) -> u64 {
        let blocks = self.0.requested_blocks.load(Ordering::Acquire);
        u64::from(blocks) * BLOCK_BYTES
    }
}

impl Inner {
    /// A donor joins, for what is missing to `blocks`.
    pub(super) fn join(
        self: &Arc<Self>,
        blocks: u32,
        donor: DonorAddress,
    ) -> Result<(), HotplugError> {
        if self.config.transport == TransportKind::Loopback {
            return Err(HotplugError::Loopback);
        }
        let (place, missing) = {
            let mut state = self.lock();
            state.may_change()?;
            let missing = state.pools.missing(blocks);
            if missing == 0 {
                return Err(HotplugError::Needless(u64::from(blocks) * BLOCK_BYTES));
            }
            let place = self.place_for(&state, donor.address, |_| true);
            let place = place.ok_or_else(|| HotplugError::TooManyDonors(state.joiners.len()))?;
            state.take_place(self.joiner_of(place));
            state.joining = true;
            (place, missing)
        };
        let bytes = u64::from(missing) * BLOCK_BYTES;
        let leased = self.lease(place, &donor, bytes, false);
        let leased = leased.map_err(HotplugError::from);
        let joined = leased.and_then(|leased| self.connect(place, leased));
        let mut state = self.lock();
        state.joining = false;
        let joiner = &mut state.joiners[self.joiner_of(place)];
        let ended = match joined {
            Err(error) => {
                joiner.taken = false;
                return Err(error);
            }
            Ok(links) => {
                joiner.links = Some(links);
                state.closed || state.joiners[self.joiner_of(place)].lost
            }
        };
        let usable = !state.joiners[self.joiner_of(place)].away && !ended;
        state.pools.join(self.node_of(place), missing, usable);
        if ended {
            let why = if state.closed {
                HotplugError::Ended
            } else {
                HotplugError::Donor(FabricError::System(
                    "keep a donor that joined: its memory was lost at once",
                    std::io::ErrorKind::ConnectionAborted.into(),
                ))
            };
            drop(state);
            self.disconnect(place);
            return Err(why);
        }
        self.note_request(&mut state, blocks);
        Ok(())
    }

    /// Sets how many blocks may be plugged.
    pub(super) fn note_request(&self, state: &mut State, blocks: u32) {
        state.pools.request(blocks);
        // With the state's lock, so that both are of the same request.
        self.requested_blocks.store(blocks, Ordering::Release);
    }

    /// The place of a donor: its own one if it was here before, else one that is new, else one
    /// that another has left.
    pub(super) fn place_for(
        &self,
        state: &State,
        address: SocketAddr,
        is_allowed: impl Fn(usize) -> bool,
    ) -> Option<usize> {
        let lenders = self.lenders.read().unwrap_or_else(PoisonError::into_inner);
        let free =
            |place: &usize| !state.joiners[self.joiner_of(*place)].taken && is_allowed(*place);
        let places = self.shared.nodes.joiner_links();
        let known = |place: &usize| lenders.get(*place).and_then(|lent| lent.address);
        let own = |place: &usize| free(place) && known(place) == Some(address);
        places
            .clone()
            .find(own)
            .or_else(|| Some(lenders.len()).filter(|place| places.contains(place) && free(place)))
            .or_else(|| places.clone().find(free))
    }

    /// Leases from a donor that joins, or as much as it has.
    pub(super) fn lease(
        &self,
        place: usize,
        donor: &DonorAddress,
        bytes: u64,
        or_less: bool,
    ) -> Result<Leased, FabricError> {
        let address = donor.address;
        let leased = obtain(
            self.config.transport,
            donor.fingerprint,
            LinkConfig {
                local: self.shared.homes.local_node().clone(),
                node: self.node_of(place),
                address,
                carrier: carrier(&self.config, donor)?,
                vm: self.config.vm.clone(),
                bytes,
                or_less,
                grace: self.config.grace,
            },
        );
        leased.map_err(|source| FabricError::Donor { address, source })
    }

    /// Connects to a donor that has lent, and gives its transports to the pager.
    pub(super) fn connect(
        self: &Arc<Self>,
        place: usize,
        leased: Leased,
    ) -> Result<(Link, Vec<RdmaLink>), HotplugError> {
        let is_sealed = self.config.seals(Some(leased.address()));
        let layer = is_sealed.then(|| self.sealer.layer(place, leased.grant().bytes));
        let layer = layer.transpose()?;
        let mut made = self.make_connections(place, leased, &self.observer_of(place))?;
        for (class, mut transport) in std::mem::take(&mut made.transports) {
            if let Some(layer) = &layer {
                transport = layer.over(transport, class);
            }
            let port = self.shared.port_of(class);
            if port.replace_transport(place, transport).is_none() {
                self.vacate(place);
                return Err(HotplugError::Ended);
            }
        }
        Ok(self.note_connected(place, made))
    }

    /// Connects to a donor that has lent. Its events go to `observer` from then on.
    pub(super) fn make_connections(
        &self,
        place: usize,
        leased: Leased,
        observer: &FabricObserver,
    ) -> Result<Connected, FabricError> {
        let address = leased.address();
        let mut lent_by = self.config.lender(Some(address), leased.grant().bytes);
        let stats = &self.shared.stats.donors[place];
        let traffic = |class| Arc::clone(stats.traffic(class));
        let port = |&class: &TrafficClass| (class, self.shared.port_of(class).event_fd());
        let wakes: Vec<_> = self.classes.iter().map(port).collect();
        let mut made = Connections::default();
        let attached = made.attach(leased, &wakes, observer)?;
        made.add(&self.config, attached, &wakes, &traffic, &mut lent_by)?;
        let Connections {
            urgent,
            bulk,
            ahead,
            rdma_links,
            mut links,
            rdma_refusals,
            followed,
        } = made;
        for refusal in rdma_refusals {
            tracing::info!("donor {address} is not read by RDMA: {refusal}");
        }
        let mut transports = [urgent, bulk, ahead].map(|mut transports| transports.pop());
        let of_class = |&class: &TrafficClass| {
            let transport = transports[place_of(class)].take();
            (class, transport.expect("one for each class"))
        };
        Ok(Connected {
            transports: self.classes.iter().map(of_class).collect(),
            rdma_links: rdma_links.into_iter().flatten().collect(),
            link: links.pop().expect("one was made"),
            followed,
            lent_by,
        })
    }

    /// Records a donor whose transports the pager has.
    pub(super) fn note_connected(
        &self,
        place: usize,
        connected: Connected,
    ) -> (Link, Vec<RdmaLink>) {
        let Connected {
            transports: _,
            rdma_links,
            link,
            followed,
            lent_by,
        } = connected;
        if let Some(path) = lent_by.path.clone() {
            self.shared.policies.join(place, Some(path));
        }
        for followed in followed {
            let _ = self.adapter.try_send(Change::Follow(Box::new(followed)));
        }
        let mut lenders = self.lenders.write().unwrap_or_else(PoisonError::into_inner);
        // Donors may be connected in another order than that of their places.
        while lenders.len() <= place {
            lenders.push(LentBy::default());
        }
        lenders[place] = lent_by;
        (link, rdma_links)
    }
}

/// A donor that has lent, and the connections to it. Drop order: RDMA ends before the lease.
pub(super) struct Connected {
    /// One for each class, in order.
    pub transports: Vec<(TrafficClass, Box<dyn PageTransport>)>,
    pub rdma_links: Vec<RdmaLink>,
    pub link: Link,
    followed: Vec<Followed>,
    pub lent_by: LentBy,
}
