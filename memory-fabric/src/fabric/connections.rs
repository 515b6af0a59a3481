//! Connects to all lenders: the transports, and the measurements of each path.

use super::adapt::Followed;
use super::calibrate::calibrate;
use super::sources::{Sources, connect, notifiers};
use super::{
    Compression, FabricConfig, FabricError, FabricObserver, LOOPBACK_LEASE, TransportKind,
};
use crate::link::path::PathStats;
use crate::link::rdma::{LanePort, RdmaLink, RdmaLinkConfig, RdmaLinkError};
use crate::link::{Leased, Link, LinkPort, LinkStats, describe, while_kept};
use crate::stats::{PagerStats, Traffic};
use crate::transport::loopback::LoopbackTransport;
use crate::transport::rdma::RdmaTransport;
use crate::transport::select::{Reason, Selection};
use crate::transport::tcp::TcpTransport;
use crate::transport::{PageTransport, PathKind};
use crate::view::LentBy;
use crate::wire::TrafficClass;
use std::collections::VecDeque;
use std::sync::Arc;
use vmm_sys_util::eventfd::EventFd;

/// One transport for each lender.
pub(super) type Transports = Vec<Box<dyn PageTransport>>;

/// The transports of all classes.
#[derive(Default)]
pub(super) struct Connections {
    /// For faults.
    pub urgent: Transports,
    /// For write-backs.
    pub bulk: Transports,
    /// For prefetching; empty without it.
    pub ahead: Transports,
    /// Dropped before the links, whose leases they use.
    pub rdma_links: Vec<Option<RdmaLink>>,
    pub links: Vec<Link>,
    /// Why some donors are not used over RDMA although this was tried.
    pub rdma_refusals: Vec<String>,
    /// The links to measure at run time.
    pub followed: Vec<Followed>,
}

/// A donor whose lease is renewed, and which has no page traffic yet.
pub(super) struct Attached {
    rdma_config: RdmaLinkConfig,
    carrier: PathKind,
    stats: Arc<LinkStats>,
    ports: Vec<LinkPort>,
}

impl Connections {
    /// Connects to all lenders. Each class has the eventfd of the thread that uses it. Records in
    /// `lent_by` what is known of each donor.
    pub(super) fn make(
        config: &FabricConfig,
        sources: Sources,
        classes: &[(TrafficClass, &EventFd)],
        stats: &PagerStats,
        lent_by: &mut [LentBy],
        observer: &FabricObserver,
    ) -> Result<Self, FabricError> {
        let mut all = Self::default();
        match sources {
            Sources::None => {}
            Sources::Loopback(pool, bytes) => {
                let lease = pool
                    .lend(config.vm.clone(), bytes, false, LOOPBACK_LEASE)
                    .map_err(FabricError::Loopback)?;
                for transports in [&mut all.urgent, &mut all.bulk, &mut all.ahead] {
                    transports.push(Box::new(LoopbackTransport::new(Arc::clone(&lease))));
                }
            }
            Sources::Donors(leases) => {
                // All links renew their leases before the first path is measured.
                let mut leases = VecDeque::from(leases);
                let mut attached = Vec::with_capacity(leases.len());
                while let Some(leased) = leases.pop_front() {
                    let others = leases.make_contiguous();
                    let made = while_kept(others, || all.attach(leased, classes, observer));
                    attached.push(made?);
                }
                for ((attached, lent_by), stats) in
                    attached.into_iter().zip(lent_by).zip(&stats.donors)
                {
                    let traffic = |class| Arc::clone(stats.traffic(class));
                    all.add(config, attached, classes, &traffic, lent_by)?;
                }
            }
        }
        Ok(all)
    }

    /// Connects to a lender; from then on its lease is renewed.
    pub(super) fn attach(
        &mut self,
        leased: Leased,
        classes: &[(TrafficClass, &EventFd)],
        observer: &FabricObserver,
    ) -> Result<Attached, FabricError> {
        let (rdma_config, carrier) = (leased.rdma_config(), leased.carrier().kind());
        let (link, ports) = connect(leased, classes, Arc::clone(observer))?;
        let stats = Arc::clone(link.stats());
        self.links.push(link);
        Ok(Attached {
            rdma_config,
            carrier,
            stats,
            ports,
        })
    }

    /// Measures the paths to a lender, which may take long because of memory registration, and
    /// creates its transports.
    pub(super) fn add(
        &mut self,
        config: &FabricConfig,
        attached: Attached,
        classes: &[(TrafficClass, &EventFd)],
        traffic: &dyn Fn(TrafficClass) -> Arc<Traffic>,
        lent_by: &mut LentBy,
    ) -> Result<(), FabricError> {
        let Attached {
            mut rdma_config,
            carrier,
            stats: link_stats,
            ports,
        } = attached;
        rdma_config.settings = Arc::clone(&config.rdma);
        let found = calibrate(config, &rdma_config)?;
        let mut refusal = found.refusal.as_ref().map(|error| describe(error));
        self.note_refusal(found.refusal);
        let refusals = self.rdma_refusals.len();
        let (rdma, mut lanes) =
            self.connect_rdma(config, rdma_config.clone(), classes, found.selection)?;
        // The substitute for a failed measurement.
        let latency = rdma
            .as_ref()
            .map_or(link_stats.round_trip_min(), RdmaLink::round_trip);
        let selection = rdma
            .as_ref()
            .map_or(Selection::all(carrier), |_| found.selection);
        let mut reason = found.reason;
        if rdma.is_none() && found.selection.faults == PathKind::Rdma {
            // It was measured, and could not be connected afterwards.
            reason = Reason::NoRdma;
            refusal = self.rdma_refusals.get(refusals).cloned();
        }
        let path = PathStats::new(selection, (carrier, found.streams), found.rdma, latency)
            .because(reason, refusal);
        let path = Arc::new(path);
        lent_by.link = Some(Arc::clone(&link_stats));
        lent_by.rdma = rdma.as_ref().map(|link| Arc::clone(link.stats()));
        lent_by.path = Some(Arc::clone(&path));
        let rdma_stats = lent_by.rdma.clone();
        self.followed.push(Followed::new(
            rdma_config,
            link_stats,
            rdma_stats,
            Arc::clone(&path),
        ));
        self.rdma_links.push(rdma);
        let compression = match lent_by.is_sealed {
            true => Compression::Off,
            false => config.compression,
        };
        for (port, &(class, _)) in ports.into_iter().zip(classes) {
            let transports = match class {
                TrafficClass::Urgent => &mut self.urgent,
                TrafficClass::Bulk => &mut self.bulk,
                TrafficClass::Prefetch => &mut self.ahead,
                TrafficClass::Probe => unreachable!("the pager has no such class"),
            };
            let checksum = config.checksum;
            let tcp = TcpTransport::new(port, class, checksum, compression, traffic(class))
                .following(Arc::clone(&path));
            let lane = lanes.iter().position(|lane| lane.class() == class);
            transports.push(match lane {
                Some(lane) => Box::new(RdmaTransport::new(lanes.swap_remove(lane), tcp)),
                None => Box::new(tcp),
            });
        }
        Ok(())
    }

    /// Records why a donor is not used over RDMA.
    fn note_refusal(&mut self, refusal: Option<RdmaLinkError>) {
        match refusal {
            // A host without RDMA is nothing to report.
            Some(error) if error.is_absence() => tracing::debug!("{}", describe(&error)),
            Some(error) => self.rdma_refusals.push(describe(&error)),
            None => {}
        }
    }

    /// Connects to a donor by RDMA, as far as it was selected.
    fn connect_rdma(
        &mut self,
        config: &FabricConfig,
        link_config: RdmaLinkConfig,
        classes: &[(TrafficClass, &EventFd)],
        selection: Selection,
    ) -> Result<(Option<RdmaLink>, Vec<LanePort>), FabricError> {
        if selection.faults != PathKind::Rdma {
            return Ok((None, Vec::new()));
        }
        let classes: Vec<_> = classes
            .iter()
            .copied()
            .filter(|(class, _)| match class {
                TrafficClass::Urgent => true,
                _ => selection.bulk == PathKind::Rdma,
            })
            .collect();
        match RdmaLink::start(link_config, notifiers(&classes)?) {
            Ok((link, lanes)) => Ok((Some(link), lanes)),
            Err(error) if config.transport != TransportKind::Auto => Err(error.into()),
            Err(error) => {
                self.note_refusal(Some(error));
                Ok((None, Vec::new()))
            }
        }
    }
}
