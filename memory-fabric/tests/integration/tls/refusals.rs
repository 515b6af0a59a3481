//! Clients without a valid certificate: each is refused before it has a lease, and the node serves
//! others meanwhile.

use super::cluster::{Cluster, Pair, name, self_signed, uri};
use super::{lease_as, lease_request};
use fabric_identity::{ExpectedNode, FingerprintVerifier, NAME, Role};
use fabric_test_support::*;
use fabric_transport::control::{ControlError, ControlStream};
use fabric_transport::stream::{Carrier, Stream};
use fabric_transport::udp::{Listener, UdpStream};
use fabric_wire::{Frame, FrameKind, encode_message};
use memory_fabric::donor::server::Donor;
use rcgen::ExtendedKeyUsagePurpose;
use rustls::client::{
    ClientSessionStore, Resumption, Tls12ClientSessionValue, Tls13ClientSessionValue,
};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::version::TLS13;
use rustls::{ClientConfig, ClientConnection, NamedGroup, StreamOwned};
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use time::OffsetDateTime;

pub fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

/// A client that accepts every server and shows this certificate, or none.
pub fn config(shown: Option<Pair>) -> ClientConfig {
    config_with(shown, &[])
}

/// The same, which shows others beside its certificate.
pub fn config_with(shown: Option<Pair>, others: &[CertificateDer<'static>]) -> ClientConfig {
    let config = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&TLS13])
        .expect("TLS 1.3")
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(FingerprintVerifier::of_donor(
            None,
            &provider(),
        )));
    match shown {
        None => config.with_no_client_auth(),
        Some(Pair {
            certificate, key, ..
        }) => {
            let key = PrivateKeyDer::Pkcs8(key.serialize_der().into());
            let chain = [&[certificate], others].concat();
            let config = config.with_client_auth_cert(chain, key);
            config.expect("a certificate and its key")
        }
    }
}

/// A client with the certificate of this member.
pub fn config_of(cluster: &Cluster, holder: &str) -> ClientConfig {
    let path = cluster.directory_of(holder);
    let chain = fabric_identity::credentials::certificates(&path.join("cert.pem")).expect("one");
    let key = PrivateKeyDer::from_pem_file(path.join("key.pem")).expect("a key");
    ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&TLS13])
        .expect("TLS 1.3")
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(FingerprintVerifier::of_donor(
            None,
            &provider(),
        )))
        .with_client_auth_cert(chain, key)
        .expect("a certificate and its key")
}

/// By which a client comes.
#[derive(Clone, Copy, Debug)]
pub enum Door {
    Tcp,
    Udp,
}

pub const DOORS: [Door; 2] = [Door::Tcp, Door::Udp];

impl Door {
    /// Asks for a lease as this client, until the first byte of an answer.
    pub fn answer_to(self, donor: &Donor, config: ClientConfig) -> Result<(), String> {
        let answered = match self {
            Self::Tcp => over_tcp(donor, config),
            Self::Udp => over_udp(donor, config),
        };
        answered.map_err(|error| error.to_string())
    }

    /// Returns what a VM uses to connect by this door.
    pub fn carrier(self, node: ExpectedNode) -> Carrier {
        match self {
            Self::Tcp => Carrier::Tls(node),
            Self::Udp => Carrier::Quic(node),
        }
    }
}

pub fn asked() -> Vec<u8> {
    let payload = encode_message(&lease_request(MIB));
    let header = Frame::new(FrameKind::Lease, 0, 0, true).encode(&payload);
    [header.as_slice(), &payload].concat()
}

fn over_tcp(donor: &Donor, config: ClientConfig) -> io::Result<()> {
    answered(donor.address(), config, &asked())
}

/// Sends a frame as this client by TCP, and awaits the first byte of an answer.
pub fn answered(address: SocketAddr, config: ClientConfig, frame: &[u8]) -> io::Result<()> {
    let socket = TcpStream::connect(address)?;
    socket.set_read_timeout(Some(PATIENCE))?;
    let name = ServerName::try_from(NAME).expect("a name");
    let client = ClientConnection::new(Arc::new(config), name).expect("a client");
    let mut stream = StreamOwned::new(client, socket);
    stream.write_all(frame)?;
    match stream.read(&mut [0; 1])? {
        0 => Err(io::ErrorKind::UnexpectedEof.into()),
        _ => Ok(()),
    }
}

fn over_udp(donor: &Donor, config: ClientConfig) -> io::Result<()> {
    let deadline = Instant::now() + PATIENCE;
    let stream = UdpStream::connect_with(donor.address(), config, deadline)?;
    let mut stream = Stream::Udp(stream);
    stream.write_all_by(&asked(), deadline)?;
    match stream.read_by(&mut [0; 1], deadline)? {
        0 => Err(io::ErrorKind::UnexpectedEof.into()),
        _ => Ok(()),
    }
}

#[test]
fn who_has_no_valid_certificate_gets_no_lease() {
    for door in DOORS {
        refuses_all_but_valid_certificates(door);
    }
}

/// Certificates that no node of `prod` accepts; `other` is another authority of a cluster of that
/// name.
pub fn invalid(prod: &Cluster, other: &Cluster) -> Vec<(&'static str, Option<Pair>)> {
    let now = OffsetDateTime::now_utc();
    let day = time::Duration::DAY;
    let named = |uris: &[&str]| {
        let names: Vec<_> = uris.iter().map(|text| uri(text)).collect();
        prod.odd(move |parameters| parameters.subject_alt_names = names)
    };
    vec![
        ("none", None),
        ("one that confirms itself", Some(self_signed())),
        ("one of another authority", Some(other.odd(|_| {}))),
        (
            "an expired one",
            Some(prod.odd(|parameters| {
                parameters.not_before = now - day * 2;
                parameters.not_after = now - day;
            })),
        ),
        (
            "one that is not valid yet",
            Some(prod.odd(|parameters| {
                parameters.not_before = now + day;
                parameters.not_after = now + day * 2;
            })),
        ),
        (
            "one for servers only",
            Some(prod.odd(|parameters| {
                parameters.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
            })),
        ),
        (
            "one of another cluster with the same authority",
            Some(named(&["spiffe://test/ssi-hv/vm/web"])),
        ),
        (
            "one of an unknown role",
            Some(named(&["spiffe://prod/ssi-hv/guest/web"])),
        ),
        ("one without a name", Some(named(&[]))),
        (
            "one with two names",
            Some(named(&[
                "spiffe://prod/ssi-hv/vm/web",
                "spiffe://prod/ssi-hv/vm/db",
            ])),
        ),
    ]
}

fn refuses_all_but_valid_certificates(door: Door) {
    let (prod, other) = (Cluster::new("prod"), Cluster::new("prod"));
    prod.directory_of("node/alpha");
    prod.directory_of("vm/gone");
    prod.revoke("vm/gone", "node/alpha");
    let donor = prod.donor(16 * MIB);
    for (what, shown) in invalid(&prod, &other) {
        let answered = door.answer_to(&donor, config(shown));
        let why = answered.expect_err("the node answers");
        // An alert says so; over TCP a reset may overtake it.
        println!("{door:?}, {what}: {why}");
        if matches!(door, Door::Udp) {
            assert!(why.contains("refuses this end's certificate"), "{why}");
        }
        assert_eq!(donor.pool().granted.get(), 0, "{what} got a lease");
    }
    let revoked = config_of(&prod, "vm/gone");
    let why = door
        .answer_to(&donor, revoked)
        .expect_err("the node answers");
    println!("{door:?}, a revoked one: {why}");
    assert_eq!(donor.pool().granted.get(), 0, "a revoked one got a lease");

    // The same client with a certificate like that of a VM has one.
    let valid = door.answer_to(&donor, config(Some(prod.odd(|_| {}))));
    assert_eq!(valid, Ok(()));
    assert_eq!(donor.pool().granted.get(), 1);
}

#[test]
fn an_operator_uses_no_memory() {
    let prod = Cluster::new("prod");
    let donor = prod.donor(16 * MIB);
    for door in DOORS {
        let carrier = door.carrier(ExpectedNode {
            credentials: prod.member("operator/eve", Role::Operator),
            name: name("alpha"),
        });
        let mut control = ControlStream::connect_by(donor.address(), &carrier).expect("connected");
        let error = super::ask(&mut control, MIB).expect_err("refused");
        assert!(error.to_string().contains("is no VM or node"), "{error}");
        assert_eq!(donor.pool().granted.get(), 0);
    }
}

#[test]
fn tls_1_2_is_refused() {
    let prod = Cluster::new("prod");
    let donor = prod.donor(16 * MIB);
    // A record with a ClientHello that offers TLS 1.2 alone (RFC 5246, section 7.4.1.2).
    let mut hello = vec![0x03, 0x03];
    hello.extend([7; 32]);
    hello.extend([0, 0, 2, 0xc0, 0x2b, 1, 0, 0, 0]);
    let mut message = vec![1, 0, 0, u8::try_from(hello.len()).expect("short")];
    message.extend(hello);
    let mut record = vec![22, 3, 1, 0, u8::try_from(message.len()).expect("short")];
    record.extend(message);
    let mut socket = TcpStream::connect(donor.address()).expect("a donor");
    socket.set_read_timeout(Some(PATIENCE)).expect("a socket");
    socket.write_all(&record).expect("sent");
    let mut answer = Vec::new();
    socket.read_to_end(&mut answer).expect("the end");
    // A fatal alert (type 21, level 2; RFC 8446, section 6.2), and nothing else.
    assert_eq!(
        (answer[0], answer[5], answer.len()),
        (21, 2, 7),
        "{answer:?}"
    );
    assert_eq!(donor.pool().granted.get(), 0);
}

#[test]
fn who_comes_without_tls_is_told_what_to_do() {
    let prod = Cluster::new("prod");
    let donor = prod.donor(16 * MIB);
    let mut control = ControlStream::connect(donor.address()).expect("connected");
    let error = super::ask(&mut control, MIB).expect_err("refused");
    assert!(error.to_string().contains("--credentials DIR"), "{error}");
    assert_eq!(donor.pool().granted.get(), 0);
}

#[test]
fn a_node_without_tls_is_no_node_of_the_cluster() {
    let prod = Cluster::new("prod");
    let donor = donor(16 * MIB);
    for (door, hint) in [
        (Door::Tcp, "with --credentials"),
        (Door::Udp, "certificate is not accepted"),
    ] {
        let carrier = door.carrier(prod.expected("vm/web", "alpha"));
        let error = ControlStream::connect_by(donor.address(), &carrier).expect_err("refused");
        let text = describe(&error);
        assert!(text.contains(hint), "{text}");
        assert_eq!(donor.pool().granted.get(), 0);
    }
}

#[test]
fn another_node_is_not_the_one_that_was_asked_for() {
    let prod = Cluster::new("prod");
    let donor = prod.donor(16 * MIB);
    for door in DOORS {
        let carrier = door.carrier(prod.expected("vm/web", "beta"));
        let error = ControlStream::connect_by(donor.address(), &carrier).expect_err("refused");
        let text = describe(&error);
        assert!(text.contains("node/beta is needed here"), "{text}");
        assert_eq!(donor.pool().granted.get(), 0);
    }
}

#[test]
fn the_holder_of_a_vms_certificate_is_no_node() {
    let prod = Cluster::new("prod");
    let impostor = prod.member("vm/impostor", Role::Vm);
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("bound");
    let server = std::thread::spawn(move || {
        let (socket, _) = listener.accept().expect("a client");
        fabric_transport::tls::TlsStream::accept(socket, &impostor).map(drop)
    });
    let carrier = Door::Tcp.carrier(prod.expected("vm/web", "impostor"));
    let error = ControlStream::connect_by(address, &carrier).expect_err("refused");
    assert!(matches!(error, ControlError::Identity(..)), "{error:?}");
    let ended = server.join().expect("it does not panic");
    assert!(ended.is_err(), "the impostor has a client");
}

#[test]
fn the_holder_of_a_vms_certificate_is_no_node_over_udp_either() {
    let prod = Cluster::new("prod");
    let impostor = prod.member("vm/impostor", Role::Vm);
    let address = ([127, 0, 0, 1], 0).into();
    let listener = Listener::bind(address, Some(&impostor)).expect("a port");
    let carrier = Door::Udp.carrier(prod.expected("vm/web", "impostor"));
    let stopping = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            listener.run(&stopping, &mut |arrival| {
                let accepted = arrival.accept(Instant::now() + PATIENCE);
                assert!(accepted.is_err(), "the impostor has a client");
                true
            });
        });
        let error = ControlStream::connect_by(listener.address(), &carrier).expect_err("refused");
        stopping.store(true, Ordering::SeqCst);
        assert!(matches!(error, ControlError::Identity(..)), "{error:?}");
    });
}

#[test]
fn a_certificate_that_expires_ends_its_connections() {
    let prod = Cluster::new("prod");
    let donor = prod.donor(16 * MIB);
    let (mut neighbour, of_neighbour) = lease_as(&prod, &donor, "vm/db");
    let until = OffsetDateTime::now_utc() + time::Duration::seconds(10);
    let short = prod.odd(|parameters| parameters.not_after = until);
    let deadline = Instant::now() + PATIENCE;
    let stream = UdpStream::connect_with(donor.address(), config(Some(short)), deadline);
    let stream = Stream::Udp(stream.expect("it is valid"));
    let mut control = ControlStream::accepted(stream, donor.address());
    let grant = super::ask(&mut control, MIB).expect("a lease");
    let renew = |control: &mut ControlStream, token| {
        control.call::<_, fabric_wire::LeaseStatus>(FrameKind::Renew, token, FrameKind::Status)
    };
    while renew(&mut control, &grant.token).is_ok() {
        assert!(Instant::now() < deadline, "it is used after it expired");
        renew(&mut neighbour, &of_neighbour.token).expect("the neighbour's is valid");
    }
    assert!(OffsetDateTime::now_utc() > until, "it was closed too early");
    renew(&mut neighbour, &of_neighbour.token).expect("the neighbour's is valid");
}

/// Counts the tickets with which a server lets a client resume a session.
#[derive(Debug, Default)]
struct Tickets(AtomicUsize);

impl ClientSessionStore for Tickets {
    fn set_kx_hint(&self, _: ServerName<'static>, _: NamedGroup) {}

    fn kx_hint(&self, _: &ServerName<'_>) -> Option<NamedGroup> {
        None
    }

    fn set_tls12_session(&self, _: ServerName<'static>, _: Tls12ClientSessionValue) {}

    fn tls12_session(&self, _: &ServerName<'_>) -> Option<Tls12ClientSessionValue> {
        None
    }

    fn remove_tls12_session(&self, _: &ServerName<'static>) {}

    fn insert_tls13_ticket(&self, _: ServerName<'static>, _: Tls13ClientSessionValue) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }

    fn take_tls13_ticket(&self, _: &ServerName<'static>) -> Option<Tls13ClientSessionValue> {
        None
    }
}

#[test]
fn no_session_is_resumed_and_none_begins_early() {
    let prod = Cluster::new("prod");
    let secured = prod.donor(16 * MIB);
    let open = donor(16 * MIB);
    for (door, donor) in [
        (Door::Tcp, &secured),
        (Door::Udp, &secured),
        (Door::Udp, &open),
    ] {
        let tickets = Arc::new(Tickets::default());
        let mut config = config(Some(prod.odd(|_| {})));
        config.enable_early_data = true;
        config.resumption = Resumption::store(Arc::clone(&tickets) as _);
        assert_eq!(door.answer_to(donor, config), Ok(()));
        // The server would have sent them before the answer.
        assert_eq!(tickets.0.load(Ordering::SeqCst), 0, "{door:?}");
    }
}

#[test]
fn a_silent_client_delays_nobody_and_is_disconnected() {
    let prod = Cluster::new("prod");
    let donor = prod.donor(16 * MIB);
    let started = Instant::now();
    let mut silent: Vec<_> = (0..20)
        .map(|_| TcpStream::connect(donor.address()).expect("connected"))
        .collect();
    // The first bytes of a record that does not come.
    silent[0].write_all(&[22, 3, 1, 2, 0]).expect("sent");
    let (control, _) = lease_as(&prod, &donor, "vm/web");
    assert!(started.elapsed() < Duration::from_secs(4), "it waited");
    for socket in &mut silent {
        socket.set_read_timeout(Some(PATIENCE)).expect("a socket");
        let ended = socket.read_to_end(&mut Vec::new());
        assert!(ended.is_ok(), "{ended:?}");
    }
    assert!(started.elapsed() < Duration::from_secs(20));
    drop(control);
}

pub fn describe(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}
