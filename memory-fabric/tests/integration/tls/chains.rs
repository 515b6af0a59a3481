//! Certificates that a peer shows beside its own: both ends keep them, and so limit them.

use super::cluster::Cluster;
use super::refusals::{DOORS, Door, config_with, describe, provider};
use fabric_identity::{Credentials, Role};
use fabric_test_support::*;
use fabric_transport::control::ControlStream;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::version::TLS13;
use std::sync::Arc;

#[test]
fn certificates_beside_that_of_a_member_have_a_limit() {
    let prod = Cluster::new("prod");
    let donor = prod.donor(16 * MIB);
    let junk = |bytes| CertificateDer::from(vec![0x30; bytes]);
    for door in DOORS {
        let before = donor.pool().granted.get();
        for others in [vec![junk(50); 4], vec![junk(8 << 10)], vec![junk(1000); 60]] {
            let config = config_with(Some(prod.odd(|_| {})), &others);
            let answered = door.answer_to(&donor, config);
            assert!(answered.is_err(), "{door:?}: {} are kept", others.len());
            assert_eq!(donor.pool().granted.get(), before);
        }
        let config = config_with(Some(prod.odd(|_| {})), &vec![junk(50); 3]);
        assert_eq!(door.answer_to(&donor, config), Ok(()));
    }
}

#[test]
fn the_end_that_refuses_a_long_chain_says_its_limit() {
    let prod = Cluster::new("prod");
    let path = prod.directory_of("node/alpha");
    let own = fabric_identity::credentials::certificates(&path.join("cert.pem")).expect("one");
    let chain = own.iter().cycle().take(5).cloned().collect();
    let key = PrivateKeyDer::from_pem_file(path.join("key.pem")).expect("a key");
    let server = rustls::ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&TLS13])
        .expect("TLS 1.3")
        .with_no_client_auth()
        .with_single_cert(chain, key)
        .expect("a certificate and its key");
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("bound");
    let node = std::thread::spawn(move || {
        let (mut socket, _) = listener.accept().expect("a client");
        socket.set_read_timeout(Some(PATIENCE)).expect("a socket");
        let mut server = rustls::ServerConnection::new(Arc::new(server)).expect("a server");
        // The client refuses.
        while server.is_handshaking() && server.complete_io(&mut socket).is_ok() {}
    });
    let carrier = Door::Tcp.carrier(prod.expected("vm/web", "alpha"));
    let error = ControlStream::connect_by(address, &carrier).expect_err("refused");
    let text = describe(&error);
    assert!(
        text.contains("a chain of 5 certificates and") && text.contains("4 of 8192 bytes"),
        "{text}"
    );
    node.join().expect("it does not panic");

    // As a node refuses it, and who would show it.
    let member = prod.member("node/beta", Role::Node);
    let why = member.current().confirm(&vec![own[0].clone(); 5]);
    let why = why.expect_err("5 certificates");
    assert!(why.contains("a chain of 5 certificates and"), "{why}");
    let pem = std::fs::read_to_string(path.join("cert.pem")).expect("one");
    std::fs::write(path.join("cert.pem"), pem.repeat(5)).expect("written");
    let why = Credentials::load(&path).expect_err("5 certificates");
    assert!(
        why.to_string().contains("a chain of 5 certificates and"),
        "{why}"
    );
}
