//! The budget of a node for the buffers of its connections.

use super::*;
use fabric_wire::{Refusal, TrafficClass};
use memory_fabric::donor::server::RdmaUse;

/// Limit of the buffers for pages: some connections by TCP, and few by UDP.
const LIMIT: u64 = 10 * MIB;
/// Connections that certainly take more.
const MANY: usize = 32;

/// Opens connections for pages with leases of their own until the node refuses one. Returns them and
/// the refusal.
fn fill_up(
    carrier: &Carrier,
    node: SocketAddr,
    class: TrafficClass,
) -> (Vec<ControlStream>, ControlError) {
    let mut open = Vec::new();
    for _ in 0..MANY {
        let mut control = ControlStream::connect_by(node, carrier).expect("a place");
        let grant = ask(&mut control, MIB).expect("granted");
        open.push(control);
        let mut pages = ControlStream::connect_by(node, carrier).expect("a place");
        match pages.attach(grant.token, class, &ends()) {
            Ok(()) => open.push(pages),
            Err(error) => return (open, error),
        }
    }
    panic!("{MANY} connections are accepted");
}

fn of_buffers(error: &ControlError) -> &str {
    match error {
        ControlError::Refused {
            refusal: Refusal::Busy,
            text,
            ..
        } if text.contains("the buffers of a connection take ")
            && text.contains(&format!(" of {LIMIT} bytes for connections"))
            && text.contains("--allow") =>
        {
            text
        }
        other => panic!("{other}"),
    }
}

#[test]
fn who_uses_up_the_buffers_of_a_node_is_refused_and_its_neighbour_continues() {
    let prod = Cluster::new("prod");
    let config = prod.config(128 * MIB, None);
    let donor = Donor::with_buffers(&config, RdmaUse::default(), None, LIMIT).expect("a donor");
    assert_eq!(donor.buffers().in_use, 0);
    let running = start(&FabricConfig {
        transport: TransportKind::Tcp,
        ..secured(&prod, donor.address())
    });
    let words = Words::of(&running.fabric);
    fill(words, 5);
    let neighbour = donor.buffers().in_use;
    assert!(neighbour > 0, "its buffers are not counted");
    // A part of a handshake takes buffers too.
    let waiting = || donor.waiting_and_established().0;
    let mut half = std::net::TcpStream::connect(donor.address()).expect("a place");
    std::io::Write::write_all(&mut half, &[22, 3, 1, 2, 0, 1]).expect("sent");
    wait_until("a handshake is charged", || {
        donor.buffers().in_use > neighbour && waiting() == 1
    });
    // A connection that can be replaced, with a lease of its own.
    let mut control = control_as(&prod, &donor, "vm/web");
    // Renewed once others have opened all their connections, which takes long on a busy machine.
    let request = LeaseRequest {
        duration_ms: 30_000,
        ..lease_request(MIB)
    };
    let granted = control.call(FrameKind::Lease, &request, FrameKind::Granted);
    let grant: LeaseGrant = granted.expect("granted");
    let reconnect = || {
        let mut pages = control_as(&prod, &donor, "vm/web");
        pages
            .attach(grant.token, TrafficClass::Urgent, &ends())
            .map(|()| pages)
    };
    let mut pages = reconnect().expect("there is room");

    let greedy = ExpectedNode {
        credentials: control_credentials(&prod, "vm/greedy"),
        name: name("alpha"),
    };
    let node = donor.address();
    // By UDP each takes more, so that there is room for some by TCP after that.
    let quic = Carrier::Quic(greedy.clone());
    let (by_udp, refused) = fill_up(&quic, node, TrafficClass::Urgent);
    let text = of_buffers(&refused).to_owned();
    let (by_tcp, refused) = fill_up(&Carrier::Tls(greedy), node, TrafficClass::Bulk);
    println!("{} and {} connections; {text}", by_udp.len(), by_tcp.len());
    assert_ne!(of_buffers(&refused), text, "by TCP one takes less");
    let usage = donor.buffers();
    assert!(usage.in_use <= usage.limit.expect("there is one"));

    // Who has connections uses them, replaces them, and renews its lease.
    verify(words, 5);
    fill(words, 6);
    verify(words, 6);
    for _ in 0..3 {
        pages = reconnect().expect("it takes the place of the one before");
    }
    let renewed: Result<fabric_wire::LeaseStatus, _> =
        control.call(FrameKind::Renew, &grant.token, FrameKind::Status);
    renewed.expect("renewed");

    drop((by_udp, by_tcp));
    let full = usage.in_use;
    wait_until("the buffers are free again", || {
        donor.buffers().in_use < full / 2
    });
    let (_control, other) = lease_as(&prod, &donor, "vm/greedy");
    control_as(&prod, &donor, "vm/greedy")
        .attach(other.token, TrafficClass::Urgent, &ends())
        .expect("there is room again");
    running.fabric.shutdown();
    drop((control, pages, half, _control));
    donor.break_connections();
    wait_until("all have left", || donor.connections() == 0);
    // The thread of a connection frees them when that is counted out.
    wait_until("all buffers are free", || donor.buffers().in_use == 0);
}
