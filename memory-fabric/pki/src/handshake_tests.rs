//! TLS between members with certificates of an authority, and everybody who must be refused.

use std::path::Path;
use std::sync::Arc;

use fabric_identity::credentials;
use fabric_identity::{Credentials, FingerprintVerifier, Identity, NAME, Name};
use rustls::client::WantsClientCert;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{PrivateKeyDer, ServerName};
use rustls::version::TLS13;
use rustls::{ClientConfig, ClientConnection, ServerConfig, ServerConnection};
use tempfile::TempDir;

use crate::authority::{Authority, Validity};

const YEAR: Validity = Validity { days: 365 };

struct Cluster {
    authority: Authority,
    directory: TempDir,
    members: TempDir,
}

impl Cluster {
    fn new(name: &str) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let validity = Validity { days: 3_650 };
        let cluster = name.parse().unwrap();
        Self {
            authority: Authority::create(directory.path(), cluster, validity).unwrap(),
            directory,
            members: tempfile::tempdir().unwrap(),
        }
    }

    /// The credentials of a member, which are made if it has none.
    fn member(&mut self, holder: &str) -> Credentials {
        let path = self.members.path().join(holder);
        if !path.exists() {
            let holder = holder.parse().unwrap();
            self.authority.issue(&holder, YEAR, &path).unwrap();
        }
        Credentials::load(&path).unwrap()
    }
}

fn alpha() -> Name {
    "alpha".parse().unwrap()
}

/// Moves what each end has to say, until both have agreed or one refuses.
fn shake_hands(client: ClientConfig, server: ServerConfig) -> Result<(), rustls::Error> {
    let name = ServerName::try_from(NAME).unwrap();
    let mut client = ClientConnection::new(Arc::new(client), name).unwrap();
    let mut server = ServerConnection::new(Arc::new(server)).unwrap();
    let mut bytes = Vec::new();
    for _ in 0..10 {
        bytes.clear();
        while client.wants_write() {
            client.write_tls(&mut bytes).unwrap();
        }
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            server.read_tls(&mut rest).unwrap();
            server.process_new_packets()?;
        }
        bytes.clear();
        while server.wants_write() {
            server.write_tls(&mut bytes).unwrap();
        }
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            client.read_tls(&mut rest).unwrap();
            client.process_new_packets()?;
        }
        if !client.is_handshaking() && !server.is_handshaking() {
            return Ok(());
        }
    }
    panic!("neither an agreement nor an error");
}

#[track_caller]
fn refused(client: ClientConfig, server: ServerConfig, part: &str) {
    let error = shake_hands(client, server).expect_err(part).to_string();
    assert!(error.contains(part), "{error}, and not {part}");
}

#[test]
fn members_of_a_cluster_connect_to_its_nodes() {
    let mut prod = Cluster::new("prod");
    let node = prod.member("node/alpha");
    for client in ["vm/web", "node/beta", "operator/eve"] {
        let client = prod.member(client).client(&alpha());
        shake_hands(client.unwrap(), node.server().unwrap()).unwrap();
    }
}

#[test]
fn a_node_refuses_who_is_no_member_of_its_cluster() {
    let mut prod = Cluster::new("prod");
    let node = prod.member("node/alpha");
    let server = || node.server().unwrap();

    let nobody = careless().with_no_client_auth();
    refused(nobody, server(), "peer sent no certificates");

    let own = Identity::generate().unwrap();
    let own = careless().with_client_auth_cert(vec![own.certificate], own.key.into());
    refused(own.unwrap(), server(), "UnknownIssuer");

    let mut other = Cluster::new("prod");
    other.member("vm/web");
    let path = other.members.path().join("vm/web");
    let chain = credentials::certificates(&path.join("cert.pem")).unwrap();
    let key = PrivateKeyDer::from_pem_file(path.join("key.pem")).unwrap();
    let stranger = careless().with_client_auth_cert(chain, key).unwrap();
    refused(stranger, server(), "UnknownIssuer");
}

#[test]
fn a_vm_refuses_who_is_no_node_of_its_cluster() {
    let mut prod = Cluster::new("prod");
    let vm = prod.member("vm/web");
    let node = prod.member("node/alpha");

    let mut other = Cluster::new("prod");
    let stranger = other.member("node/alpha").server().unwrap();
    refused(vm.client(&alpha()).unwrap(), stranger, "UnknownIssuer");

    let client = vm.client(&"beta".parse().unwrap()).unwrap();
    refused(client, node.server().unwrap(), "node/beta is needed here");

    // A VM that listens: its certificate is not one for servers.
    let impostor = prod.member("vm/impostor").server().unwrap();
    refused(
        vm.client(&alpha()).unwrap(),
        impostor,
        "server authentication",
    );
}

#[test]
fn a_revoked_member_is_refused_by_who_has_the_new_list() {
    let mut prod = Cluster::new("prod");
    prod.member("node/alpha");
    let vm = prod.member("vm/web");
    let holder = "vm/web".parse().unwrap();
    prod.authority.revoke_holder(&holder).unwrap();
    copy(
        prod.directory.path(),
        &prod.members.path().join("node/alpha"),
        "crl.pem",
    );
    let node = prod.member("node/alpha");
    refused(
        vm.client(&alpha()).unwrap(),
        node.server().unwrap(),
        "Revoked",
    );
}

#[test]
fn tls_before_1_3_is_refused() {
    let mut prod = Cluster::new("prod");
    let node = prod.member("node/alpha");
    // A record of a ClientHello that offers TLS 1.2 alone (RFC 5246, section 7.4.1.2).
    let mut hello = vec![0x03, 0x03];
    hello.extend([7; 32]);
    hello.extend([0, 0, 2, 0xc0, 0x2b, 1, 0, 0, 0]);
    let mut message = vec![1, 0, 0, u8::try_from(hello.len()).unwrap()];
    message.extend(hello);
    let mut record = vec![22, 3, 1, 0, u8::try_from(message.len()).unwrap()];
    record.extend(message);
    let mut server = ServerConnection::new(Arc::new(node.server().unwrap())).unwrap();
    server.read_tls(&mut &record[..]).unwrap();
    let error = server.process_new_packets().unwrap_err();
    assert!(
        matches!(error, rustls::Error::PeerIncompatible(_)),
        "{error:?}"
    );
}

#[test]
fn two_authorities_are_accepted_while_one_replaces_the_other() {
    let mut old = Cluster::new("prod");
    let mut new = Cluster::new("prod");
    old.member("node/alpha");
    new.member("vm/web");
    let (node, vm) = (
        old.members.path().join("node/alpha"),
        new.members.path().join("vm/web"),
    );
    for file in ["ca.pem", "crl.pem"] {
        let bundle: String = [old.directory.path(), new.directory.path()]
            .map(|path| std::fs::read_to_string(path.join(file)).unwrap())
            .concat();
        for member in [&node, &vm] {
            std::fs::write(member.join(file), &bundle).unwrap();
        }
    }
    let client = Credentials::load(&vm).unwrap().client(&alpha()).unwrap();
    let server = Credentials::load(&node).unwrap().server().unwrap();
    shake_hands(client, server).unwrap();
}

fn copy(from: &Path, to: &Path, file: &str) {
    std::fs::copy(from.join(file), to.join(file)).unwrap();
}

fn provider() -> Arc<rustls::crypto::CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

/// What a client without an authority begins with: it accepts every server.
fn careless() -> rustls::ConfigBuilder<ClientConfig, WantsClientCert> {
    ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&TLS13])
        .unwrap()
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(FingerprintVerifier::of_donor(
            None,
            &provider(),
        )))
}
