//! The epoch of the home table advances while requests are under way.

use crossbeam_channel::bounded;
use fabric_homes::{BLOCK_PAGES, Home, HomeTable, NodeId};
use fabric_test_support::udp_proxy::{UdpProxy, Weather};
use fabric_test_support::{MIB, PATIENCE, donor};
use fabric_transport::control::ControlStream;
use fabric_transport::port::{LinkPort, LinkRequest};
use fabric_transport::stream::Carrier;
use fabric_transport::tcp::TcpTransport;
use fabric_transport::{Compression, IN_FLIGHT_MAX, PageTransport, Ticket};
use fabric_wire::{Ends, FrameKind, LeaseGrant, LeaseRequest, TrafficClass};
use memory_fabric::page::{PAGE_SIZE, PageIndex, PageRange};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

const REQUESTS: u32 = 4096;
const BLOCK: u32 = 1;

/// Reads pages on one connection, whose first failure fails the test, while a block gains and loses
/// its home.
fn one_connection_serves_all_epochs(donor: SocketAddr, carrier: &Carrier) {
    let added = PageRange::new(PageIndex::new(0), 2 * BLOCK_PAGES);
    let homes = HomeTable::new(NodeId(4), &[], Some(added));
    let ends = Ends {
        local: homes.local_node().clone(),
        donor: NodeId(2),
    };
    let mut control = ControlStream::connect_by(donor, carrier).expect("a donor");
    let request = LeaseRequest {
        vm: "vm".into(),
        bytes: MIB,
        or_less: false,
        duration_ms: 60_000,
    };
    let grant: LeaseGrant = control
        .call(FrameKind::Lease, &request, FrameKind::Granted)
        .expect("granted");
    let class = TrafficClass::Urgent;
    let mut stream = ControlStream::connect_by(donor, carrier).expect("a donor");
    stream.attach(grant.token, class, &ends).expect("attached");
    let (give, connections) = bounded(1);
    give.send(stream.into_stream()).expect("there is room");
    let (requests, failures) = bounded(1);
    let port = LinkPort::new(class, ends, requests, connections, Arc::default());
    let mut transport = TcpTransport::new(port, class, true, Compression::Off, Arc::default());
    let deadline = Instant::now() + PATIENCE;
    let (mut posted, mut answered) = (0, 0);
    while answered < REQUESTS {
        while posted < REQUESTS && transport.in_flight() < IN_FLIGHT_MAX {
            let page = u64::from(posted) % (MIB / PAGE_SIZE as u64);
            let offset = page * PAGE_SIZE as u64;
            transport.post_read(Ticket(posted), offset).expect("room");
            posted += 1;
            // No two requests are of the same epoch.
            let (node, slot) = (NodeId(2), 0);
            homes.assign(BLOCK, Home { node, slot });
            homes.unassign(BLOCK);
        }
        transport.flush();
        transport.poll(&mut |_| answered += 1);
        if let Ok(LinkRequest::Connection(_, why)) = failures.try_recv() {
            panic!("{why} after {answered} answers");
        }
        assert!(Instant::now() < deadline, "{answered} answers");
    }
    let epoch = homes.local_node().epoch();
    assert_eq!(epoch, 1 + 2 * u64::from(REQUESTS));
}

#[test]
fn requests_under_way_stay_valid_over_tcp() {
    let donor = donor(4 * MIB);
    one_connection_serves_all_epochs(donor.address(), &Carrier::Tcp);
}

#[test]
fn requests_that_overtake_each_other_stay_valid_over_udp() {
    let donor = donor(4 * MIB);
    let proxy = UdpProxy::new(donor.address(), Weather::Reordering);
    one_connection_serves_all_epochs(proxy.address, &Carrier::Udp(None));
    assert!(proxy.mischief_done() > 0, "nothing was put to the test");
}
