//! Leases from a donor, over connections of links.

use super::cases::{Bed, CASES, Lines, Options, PAGES, User};
use super::tenants;
use fabric_homes::NodeId;
use fabric_transport::PathKind;
use fabric_transport::rdma::DeviceChoice;
use fabric_transport::stream::Carrier;
use fabric_transport::tcp::TcpTransport;
use fabric_wire::TrafficClass;
use memory_fabric::donor::server::{Donor, DonorConfig};
use memory_fabric::fabric::{Compression, SPIN_DEFAULT};
use memory_fabric::link::rdma::{RdmaLink, RdmaStats};
use memory_fabric::link::{Leased, LinkConfig, LinkEvent};
use memory_fabric::page::PAGE_SIZE;
use std::cell::RefCell;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

/// Size of a lease.
pub const BYTES: u64 = PAGES as u64 * PAGE_SIZE as u64;

const CLASSES: [TrafficClass; 3] = [
    TrafficClass::Urgent,
    TrafficClass::Bulk,
    TrafficClass::Prefetch,
];

/// Leases from a donor.
pub struct Remote<'a> {
    donor: &'a Donor,
    /// The donor's address for the VM, which may be that of a disturbing proxy.
    address: SocketAddr,
    carrier: Carrier,
    /// Counters of the RDMA connections, if there are any.
    by_rdma: Option<RefCell<Vec<Arc<RdmaStats>>>>,
}

impl<'a> Remote<'a> {
    pub fn new(donor: &'a Donor, address: SocketAddr, carrier: Carrier) -> Self {
        Self {
            donor,
            address,
            carrier,
            by_rdma: None,
        }
    }

    /// The same with pages by RDMA.
    #[must_use]
    pub fn by_rdma(self) -> Self {
        Self {
            by_rdma: Some(RefCell::default()),
            ..self
        }
    }

    /// Returns the pages that were read by RDMA and those that were written, over all connections.
    ///
    /// # Panics
    /// Panics when a connection has failed, or there is no RDMA.
    pub fn by_rdma_without_failure(&self) -> (u64, u64) {
        let stats = self.by_rdma.as_ref().expect("there is RDMA").borrow();
        let count = |of: fn(&RdmaStats) -> u64| stats.iter().map(|stats| of(stats)).sum::<u64>();
        assert_eq!(count(|stats| stats.failures.get()), 0, "RDMA failed");
        (
            count(|stats| stats.pages_read.get()),
            count(|stats| stats.pages_written.get()),
        )
    }
}

impl Bed for Remote<'_> {
    fn open(&self, options: Options) -> Lines {
        let leased = Leased::obtain(LinkConfig {
            local: NodeId(0).into(),
            node: NodeId(1),
            address: self.address,
            carrier: self.carrier.clone(),
            vm: "test".into(),
            bytes: BYTES,
            or_less: false,
            grace: Duration::from_secs(30),
        });
        let leased = leased.expect("a lease");
        let rdma = leased.rdma_config();
        let notifier = |class| (class, EventFd::new(EFD_NONBLOCK).expect("an eventfd"));
        let observer = Arc::new(|event: LinkEvent| {
            // Users that wait for pages fail at their own deadline.
            if let LinkEvent::Lost { reason, .. } = event {
                eprintln!("the donor is lost: {reason}");
            }
        });
        let (link, ports) = leased
            .start(CLASSES.map(notifier).into(), observer)
            .expect("connections");
        let mut rdma_links = Vec::new();
        let mut users = ports.into_iter().zip(CLASSES).map(|(port, class)| {
            let Options {
                compression,
                checksum,
            } = options;
            let tcp = TcpTransport::new(port, class, checksum, compression, Arc::default());
            let Some(stats) = &self.by_rdma else {
                return User::new(Box::new(tcp));
            };
            let over_rdma = RdmaLink::transport(rdma.clone(), class, tcp);
            let (link, mut transport) = over_rdma.expect("RDMA");
            stats.borrow_mut().push(Arc::clone(link.stats()));
            rdma_links.push(link);
            // Polling completes the setup of the connection.
            transport.poll(&mut |_| {});
            User::new(transport)
        });
        let mut next = || users.next().expect("a port of each class");
        Lines {
            urgent: next(),
            bulk: next(),
            ahead: next(),
            // In drop order.
            _lease: Box::new((rdma_links, link)),
        }
    }

    fn leases(&self) -> usize {
        self.donor.pool().leases()
    }

    fn forgets_drops(&self) -> bool {
        // The donor keeps pages that an RDMA adapter can access.
        self.by_rdma.is_none()
    }
}

/// Runs every case over RDMA, with donor and VM at one address of this host; calls `report` with
/// each duration.
pub fn run_over_rdma(here: IpAddr, mut report: impl FnMut(&str, Duration)) {
    let donor = Donor::start(&DonorConfig {
        credentials: None,
        listen: (here, 0).into(),
        memory_bytes: BYTES,
        lease_duration_max: Duration::from_secs(60),
        spin: SPIN_DEFAULT,
        rdma: DeviceChoice::Automatic,
        allow: None,
    });
    let donor = donor.expect("a donor");
    let bed = Remote::new(&donor, donor.address(), Carrier::Tcp).by_rdma();
    // READ and WRITE support neither checksums nor compression.
    let options = Options {
        compression: Compression::Off,
        checksum: false,
    };
    for &(name, case) in CASES {
        let started = Instant::now();
        case(&bed, options);
        report(name, started.elapsed());
    }
    let (read, written) = bed.by_rdma_without_failure();
    assert!(
        read > 10_000 && written > 5_000,
        "{read} pages were read by RDMA, and {written} written"
    );
    let started = Instant::now();
    tenants::in_turn(here, PathKind::Rdma);
    report("tenants", started.elapsed());
}
