//! Tokens in other hands, and streams that end before their request does.

use super::cluster::{Cluster, name};
use super::refusals::{Door, asked, config};
use super::{control_as, control_credentials, lease_as};
use fabric_identity::{ExpectedNode, NAME};
use fabric_test_support::*;
use fabric_transport::control::ControlStream;
use fabric_transport::rdma::{ConnectAnswer, ConnectRequest};
use fabric_wire::FrameKind;
use rustls::pki_types::ServerName;
use rustls::{ClientConnection, StreamOwned};
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::Arc;

#[test]
fn a_stolen_token_opens_nothing() {
    let prod = Cluster::new("prod");
    let donor = prod.donor(16 * MIB);
    let (_control, grant) = lease_as(&prod, &donor, "vm/web");
    for thief in ["vm/thief", "node/beta"] {
        let mut control = control_as(&prod, &donor, thief);
        let resumed: Result<fabric_wire::LeaseStatus, _> =
            control.call(FrameKind::Resume, &grant.token, FrameKind::Status);
        let error = resumed.expect_err(thief).to_string();
        assert!(error.contains("no such lease"), "{error}");
        let node = ExpectedNode {
            credentials: control_credentials(&prod, thief),
            name: name("alpha"),
        };
        let over_udp = Door::Udp.carrier(node);
        let mut pages = ControlStream::connect_by(donor.address(), &over_udp).expect("a donor");
        let class = fabric_wire::TrafficClass::Urgent;
        let attached = pages.attach(grant.token, class, &super::ends());
        let error = attached.expect_err(thief).to_string();
        assert!(error.contains("no such lease"), "{error}");
        // By RDMA: it is refused before a device is needed.
        let request = ConnectRequest {
            attach: super::ends().attach(grant.token, class),
            endpoint: super::policy::endpoint("127.0.0.1"),
        };
        let mut control = control_as(&prod, &donor, thief);
        let connected: Result<ConnectAnswer, _> =
            control.call(FrameKind::Connect, &request, FrameKind::Connected);
        let error = connected.expect_err(thief).to_string();
        assert!(error.contains("no such lease"), "{error}");
    }
    // The owner's next certificate is the owner's.
    let mut pages = control_as(&prod, &donor, "vm/web");
    let class = fabric_wire::TrafficClass::Urgent;
    pages
        .attach(grant.token, class, &super::ends())
        .expect("the owner");
}

/// A client with a valid certificate, which has sent nothing.
fn client(cluster: &Cluster, address: SocketAddr) -> StreamOwned<ClientConnection, TcpStream> {
    let socket = TcpStream::connect(address).expect("a donor");
    socket.set_read_timeout(Some(PATIENCE)).expect("a socket");
    let config = config(Some(cluster.odd(|_| {})));
    let name = ServerName::try_from(NAME).expect("a name");
    let client = ClientConnection::new(Arc::new(config), name).expect("a client");
    StreamOwned::new(client, socket)
}

/// Ends what is sent, and awaits the donor's end of the connection.
fn cut(mut socket: &TcpStream) {
    socket.shutdown(Shutdown::Write).expect("connected");
    // A reset is an end as well.
    let _ = socket.read_to_end(&mut Vec::new());
}

#[test]
fn a_handshake_that_is_cut_obtains_nothing() {
    let prod = Cluster::new("prod");
    let donor = prod.donor(16 * MIB);
    // In the ClientHello.
    let mut hello = Vec::new();
    let mut whole = client(&prod, donor.address());
    whole.conn.write_tls(&mut hello).expect("kept");
    for bytes in [1, 5, hello.len() / 2, hello.len() - 1, hello.len()] {
        let mut socket = TcpStream::connect(donor.address()).expect("a donor");
        socket.set_read_timeout(Some(PATIENCE)).expect("a socket");
        socket.write_all(&hello[..bytes]).expect("sent");
        cut(&socket);
        assert_eq!(donor.pool().granted.get(), 0, "{bytes} bytes of a hello");
    }
    // In the client's certificate and its proof, which come after the donor's.
    for part in [1, 2, 3] {
        let mut client = client(&prod, donor.address());
        client.conn.write_tls(&mut client.sock).expect("sent");
        while client.conn.is_handshaking() {
            client.conn.read_tls(&mut client.sock).expect("an answer");
            client.conn.process_new_packets().expect("a server");
        }
        let mut proof = Vec::new();
        while client.conn.wants_write() {
            client.conn.write_tls(&mut proof).expect("kept");
        }
        let bytes = proof.len() * part / 4;
        client.sock.write_all(&proof[..bytes]).expect("sent");
        cut(&client.sock);
        assert_eq!(donor.pool().granted.get(), 0, "{bytes} bytes of a proof");
    }
    lease_as(&prod, &donor, "vm/web");
    assert_eq!(donor.pool().granted.get(), 1);
}

#[test]
fn a_request_that_is_cut_obtains_nothing() {
    let prod = Cluster::new("prod");
    let (secured, open) = (prod.donor(16 * MIB), donor(16 * MIB));
    let asked = asked();
    for bytes in 1..asked.len() {
        // Without TLS's notice of the end, as from a network that cuts the connection.
        if bytes % 8 == 1 || bytes + 1 == asked.len() {
            let mut client = client(&prod, secured.address());
            client.write_all(&asked[..bytes]).expect("sent");
            client.flush().expect("sent");
            cut(&client.sock);
            assert_eq!(secured.pool().granted.get(), 0, "{bytes} bytes by TLS");
        }
        let mut socket = TcpStream::connect(open.address()).expect("a donor");
        socket.set_read_timeout(Some(PATIENCE)).expect("a socket");
        socket.write_all(&asked[..bytes]).expect("sent");
        cut(&socket);
        assert_eq!(open.pool().granted.get(), 0, "{bytes} bytes");
    }
    // The whole request obtains a lease.
    let mut client = client(&prod, secured.address());
    client.write_all(&asked).expect("sent");
    client.read_exact(&mut [0; 1]).expect("an answer");
    assert_eq!(secured.pool().granted.get(), 1);
}
