//! Connections between members of a cluster, and those who are none.

mod buffers;
mod chains;
pub mod cluster;
mod compute;
mod delegates;
mod peers;
mod policy;
pub mod refusals;
mod tenants;
mod truncation;

use cluster::{Cluster, name};
use fabric_homes::NodeId;
use fabric_identity::{ExpectedNode, Role, SharedCredentials};
use fabric_test_support::udp_proxy::{UdpProxy, Weather};
use fabric_test_support::*;
use fabric_transport::control::{ControlError, ControlStream};
use fabric_transport::stream::Carrier;
use fabric_wire::{Ends, FrameKind, LeaseGrant, LeaseRequest};
use memory_fabric::donor::server::{Donor, Reloaded};
use memory_fabric::fabric::{Compression, FabricConfig, FabricEvent, PathKind, TransportKind};
use memory_fabric::link::LinkEvent;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

const GUEST: u64 = 24 * MIB;
const LOCAL: u64 = 16 * MIB;

fn ends() -> Ends {
    Ends {
        local: NodeId(0).into(),
        donor: NodeId(1),
    }
}

pub fn lease_request(bytes: u64) -> LeaseRequest {
    LeaseRequest {
        vm: "vm".into(),
        bytes,
        or_less: false,
        duration_ms: 5000,
    }
}

pub fn ask(control: &mut ControlStream, bytes: u64) -> Result<LeaseGrant, ControlError> {
    control.call(FrameKind::Lease, &lease_request(bytes), FrameKind::Granted)
}

/// Returns the credentials of a VM or node.
pub fn control_credentials(cluster: &Cluster, holder: &str) -> Arc<SharedCredentials> {
    let role = if holder.starts_with("vm/") {
        Role::Vm
    } else {
        Role::Node
    };
    cluster.member(holder, role)
}

/// Connects to the node `alpha` as a VM or node.
pub fn control_as(cluster: &Cluster, donor: &Donor, holder: &str) -> ControlStream {
    let carrier = Carrier::Tls(ExpectedNode {
        credentials: control_credentials(cluster, holder),
        name: name("alpha"),
    });
    ControlStream::connect_by(donor.address(), &carrier).expect("a donor")
}

pub fn lease_as(cluster: &Cluster, donor: &Donor, holder: &str) -> (ControlStream, LeaseGrant) {
    let mut control = control_as(cluster, donor, holder);
    let grant = ask(&mut control, MIB).expect("granted");
    (control, grant)
}

fn secured(cluster: &Cluster, donor: SocketAddr) -> FabricConfig {
    let mut config = config(GUEST, LOCAL, &[donor]);
    config.credentials = Some(cluster.member("vm/web", Role::Vm));
    config.donors[0].name = Some(name("alpha"));
    config
}

#[test]
fn memory_survives_under_tls_with_connections_that_break() {
    let prod = Cluster::new("prod");
    let donor = prod.donor(GUEST);
    for compression in [Compression::Off, Compression::On] {
        let running = start(&FabricConfig {
            transport: TransportKind::Auto,
            compression,
            ..secured(&prod, donor.address())
        });
        assert_eq!(running.fabric.path(), PathKind::Tcp);
        let words = Words::of(&running.fabric);
        fill(words, 1);
        for _ in 0..3 {
            donor.break_connections();
            verify(words, 1);
        }
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| verify(words, 1));
            }
        });
        running.fabric.shutdown();
        assert_eq!((donor.pool().leases(), donor.pool().lent_bytes()), (0, 0));
    }
}

#[test]
fn memory_survives_over_udp_with_certificates_and_a_bad_network() {
    let prod = Cluster::new("prod");
    let donor = prod.donor(GUEST);
    let proxy = UdpProxy::new(donor.address(), Weather::Loss(3));
    let running = start(&FabricConfig {
        transport: TransportKind::Udp,
        ..secured(&prod, proxy.address)
    });
    assert_eq!(running.fabric.path(), PathKind::Udp);
    let words = Words::of(&running.fabric);
    fill(words, 3);
    for _ in 0..2 {
        donor.break_connections();
        verify(words, 3);
    }
    running.fabric.shutdown();
    assert_eq!((donor.pool().leases(), donor.pool().lent_bytes()), (0, 0));
}

#[test]
fn auto_with_certificates_takes_udp_with_certificates_where_tcp_does_not_pass() {
    let (prod, other) = (Cluster::new("prod"), Cluster::new("prod"));
    // Datagrams pass to it, and its TCP port has no listener.
    let auto = |donor: &Donor| {
        let proxy = UdpProxy::new(donor.address(), Weather::Fair);
        let config = FabricConfig {
            transport: TransportKind::Auto,
            ..secured(&prod, proxy.address)
        };
        (proxy, config)
    };
    let trusted = prod.donor(GUEST);
    let (_proxy, config) = auto(&trusted);
    let running = start(&config);
    assert_eq!(running.fabric.path(), PathKind::Udp);
    running.fabric.shutdown();
    // A node of another authority, and one without certificates.
    for stranger in [other.donor(GUEST), donor(GUEST)] {
        let (_proxy, config) = auto(&stranger);
        let text = refusal(&config);
        assert!(text.contains("certificate is not accepted"), "{text}");
        assert_eq!(stranger.pool().granted.get(), 0);
    }
}

#[test]
fn a_donor_without_a_name_is_refused() {
    let prod = Cluster::new("prod");
    let donor = prod.donor(GUEST);
    let mut config = secured(&prod, donor.address());
    config.donors[0].name = None;
    let text = refusal(&config);
    assert!(text.contains("add name=NAME"), "{text}");
}

#[test]
fn a_revoked_vm_loses_its_connections_when_the_list_is_read_again() {
    for transport in [TransportKind::Tcp, TransportKind::Udp] {
        loses_its_connections_when_revoked(transport);
    }
}

fn loses_its_connections_when_revoked(transport: TransportKind) {
    let prod = Cluster::new("prod");
    let donor = prod.donor(GUEST);
    let mut config = secured(&prod, donor.address());
    config.transport = transport;
    config.grace = Duration::from_millis(500);
    let running = start(&config);
    let words = Words::of(&running.fabric);
    fill(words, 5);
    // Reading the same files again closes nothing.
    let none = Some(Reloaded::default());
    assert_eq!(donor.reload(None).expect("the same"), none);
    verify(words, 5);
    prod.revoke("vm/web", "node/alpha");
    let reloaded = donor.reload(None).expect("a longer list");
    let closed = reloaded.expect("credentials").connections;
    // Control, faults, write-backs and prefetching.
    assert!(closed >= 4, "{closed}");
    let deadline = Instant::now() + PATIENCE / 2;
    let reason = loop {
        let left = deadline.saturating_duration_since(Instant::now());
        match running.events.recv_timeout(left).expect("an event") {
            FabricEvent::Link(LinkEvent::Lost { reason, .. }) => break reason,
            FabricEvent::Link(_) => {}
            other => panic!("unexpected {other:?}"),
        }
    };
    assert!(
        reason.contains("refuses this end's certificate"),
        "{reason}"
    );
    // Its threads may wait for pages that do not arrive.
    std::mem::forget(running.fabric);
}

#[test]
fn a_donor_that_the_vm_learns_to_be_revoked_is_lost_unless_it_shows_another_certificate() {
    for transport in [TransportKind::Tcp, TransportKind::Udp] {
        is_lost_when_revoked(transport);
    }
}

fn is_lost_when_revoked(transport: TransportKind) {
    let prod = Cluster::new("prod");
    let donor = prod.donor(GUEST);
    let mut config = secured(&prod, donor.address());
    config.transport = transport;
    config.grace = Duration::from_millis(500);
    let shown = Arc::clone(config.credentials.as_ref().expect("given"));
    let running = start(&config);
    let words = Words::of(&running.fabric);
    fill(words, 5);
    // It has another certificate by the time that the VM learns of the end of the first.
    let alpha = prod.directory_of("node/alpha");
    let first = fabric_identity::credentials::certificates(&alpha.join("cert.pem"));
    let first = first.expect("a certificate");
    prod.renew_revoked("node/alpha");
    donor.reload(None).expect("a new certificate");
    let connected = donor.members();
    prod.inform("vm/web");
    wait_until("the VM reads no list", || {
        shown.current().confirm(&first).is_err()
    });
    verify(words, 5);
    // The control connection is made again with the other certificate.
    let until = Instant::now() + Duration::from_secs(5);
    while Instant::now() < until {
        assert!(running.events.try_recv().is_err(), "the donor is not lost");
        verify(words, 5);
    }
    assert_eq!(donor.members(), connected);
    prod.revoke("node/alpha", "vm/web");
    let deadline = Instant::now() + PATIENCE / 2;
    let reason = loop {
        let left = deadline.saturating_duration_since(Instant::now());
        match running.events.recv_timeout(left).expect("an event") {
            FabricEvent::Link(LinkEvent::Lost { reason, .. }) => break reason,
            FabricEvent::Link(_) => {}
            other => panic!("unexpected {other:?}"),
        }
    };
    assert!(reason.contains("evoked"), "{reason}");
    std::mem::forget(running.fabric);
}

#[test]
fn credentials_that_cannot_be_used_do_not_replace_those_in_use() {
    let prod = Cluster::new("prod");
    let donor = prod.donor(GUEST);
    let directory = prod.directory_of("node/alpha");
    let good = std::fs::read(directory.join("cert.pem")).expect("a file");
    let other = prod.directory_of("node/beta");
    std::fs::copy(other.join("cert.pem"), directory.join("cert.pem")).expect("copied");
    assert!(donor.reload(None).is_err(), "another's certificate");
    std::fs::copy(other.join("key.pem"), directory.join("key.pem")).expect("copied");
    let error = donor.reload(None).expect_err("another member").to_string();
    assert!(error.contains("restart it"), "{error}");
    drop(lease_as(&prod, &donor, "vm/web"));
    std::fs::write(directory.join("cert.pem"), good).expect("written");
}

#[test]
fn a_node_that_runs_takes_another_authority_beside_the_first() {
    let (old, new) = (Cluster::new("prod"), Cluster::new("prod"));
    let donor = old.donor(2 * GUEST);
    let running = start(&secured(&old, donor.address()));
    let words = Words::of(&running.fabric);
    fill(words, 7);
    // VMs of the new authority accept the node's certificate, which is of the old one.
    new.accept_too(&old, "vm/web");
    let carrier = Carrier::Tls(new.expected("vm/web", "alpha"));
    let asked = || {
        let mut control = ControlStream::connect_by(donor.address(), &carrier)?;
        ask(&mut control, MIB).map(|_| control)
    };
    assert!(asked().is_err(), "the node knows the old one alone");

    old.accept_too(&new, "node/alpha");
    let reloaded = donor.reload(None).expect("two authorities");
    assert_eq!(reloaded, Some(Reloaded::default()), "nothing is closed");
    drop(asked().expect("a lease"));
    verify(words, 7);
    running.fabric.shutdown();
}
