//! Leases from a donor, over connections that links make.

use super::cases::{Bed, CASES, Lines, Options, PAGES, User};
use memory_fabric::donor::server::{Donor, DonorConfig};
use memory_fabric::fabric::{Compression, SPIN_DEFAULT};
use memory_fabric::layout::NodeId;
use memory_fabric::link::rdma::{RdmaLink, RdmaLinkConfig};
use memory_fabric::link::{Leased, LinkConfig, LinkEvent};
use memory_fabric::page::PAGE_SIZE;
use memory_fabric::stream::Carrier;
use memory_fabric::transport::PageTransport;
use memory_fabric::transport::rdma::{DeviceChoice, RdmaTransport};
use memory_fabric::transport::tcp::TcpTransport;
use memory_fabric::wire::TrafficClass;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

/// What a lease has.
pub const BYTES: u64 = PAGES as u64 * PAGE_SIZE as u64;

const CLASSES: [TrafficClass; 3] = [
    TrafficClass::Urgent,
    TrafficClass::Bulk,
    TrafficClass::Prefetch,
];

/// Leases of a donor.
pub struct Remote<'a> {
    donor: &'a Donor,
    /// Where the VM finds it, which may be a network that does something to it.
    address: SocketAddr,
    carrier: Carrier,
    by_rdma: bool,
}

impl<'a> Remote<'a> {
    pub fn new(donor: &'a Donor, address: SocketAddr, carrier: Carrier) -> Self {
        Self {
            donor,
            address,
            carrier,
            by_rdma: false,
        }
    }
}

impl Bed for Remote<'_> {
    fn open(&self, options: Options) -> Lines {
        let leased = Leased::obtain(LinkConfig {
            node: NodeId(1),
            address: self.address,
            carrier: self.carrier,
            vm: "test".into(),
            bytes: BYTES,
            or_less: false,
            grace: Duration::from_secs(30),
        });
        let leased = leased.expect("a lease");
        let rdma = RdmaLinkConfig {
            node: leased.node(),
            address: leased.address(),
            token: leased.grant().token,
            bytes: leased.grant().bytes,
            carrier: leased.carrier(),
        };
        let bell = |class| (class, EventFd::new(EFD_NONBLOCK).expect("an eventfd"));
        let observer = Arc::new(|event: LinkEvent| {
            // Who waits for pages finds out by its own deadline.
            if let LinkEvent::Lost { reason, .. } = event {
                eprintln!("the donor is lost: {reason}");
            }
        });
        let (link, ports) = leased
            .start(CLASSES.map(bell).into(), observer)
            .expect("connections");
        let (rdma, lanes) = self
            .by_rdma
            .then(|| RdmaLink::start(rdma, CLASSES.map(bell).into()).expect("RDMA"))
            .unzip();
        let mut lanes = lanes.into_iter().flatten();
        let mut users = ports.into_iter().zip(CLASSES).map(|(port, class)| {
            let Options {
                compression,
                checksum,
            } = options;
            let tcp = TcpTransport::new(port, class, checksum, compression, Arc::default());
            let transport: Box<dyn PageTransport> = match lanes.next() {
                Some(lane) => Box::new(RdmaTransport::new(lane, tcp)),
                None => Box::new(tcp),
            };
            User::new(transport)
        });
        let mut next = || users.next().expect("a port of each class");
        Lines {
            urgent: next(),
            bulk: next(),
            ahead: next(),
            // In the order in which they have to end.
            _lease: Box::new((rdma, link)),
        }
    }

    fn leases(&self) -> usize {
        self.donor.pool().leases()
    }

    fn forgets_drops(&self) -> bool {
        // What an adapter may reach stays where it is.
        !self.by_rdma
    }
}

/// Runs every case by RDMA, donor and VM at one address of this host, and tells how long each took.
pub fn run_over_rdma(here: IpAddr, mut tell: impl FnMut(&str, Duration)) {
    let donor = Donor::start(&DonorConfig {
        listen: (here, 0).into(),
        memory_bytes: BYTES,
        lease_duration_max: Duration::from_secs(60),
        spin: SPIN_DEFAULT,
        rdma: DeviceChoice::Automatic,
    });
    let donor = donor.expect("a donor");
    let bed = Remote {
        by_rdma: true,
        ..Remote::new(&donor, donor.address(), Carrier::Tcp)
    };
    // A READ or a WRITE has neither a checksum nor compression of ours.
    let options = Options {
        compression: Compression::Off,
        checksum: false,
    };
    for &(name, case) in CASES {
        let started = Instant::now();
        case(&bed, options);
        tell(name, started.elapsed());
    }
}
