//! TLS between members with certificates of an authority, and everybody who must be refused.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use fabric_identity::credentials;
use fabric_identity::files::{self, Readers};
use fabric_identity::{
    Credentials, CredentialsError, FingerprintVerifier, Identity, NAME, Name, Subject,
};
use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, DistinguishedName,
    DnType, IsCa, Issuer, KeyIdMethod, KeyPair, KeyUsagePurpose, RevokedCertParams, SerialNumber,
};
use rustls::client::WantsClientCert;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::version::TLS13;
use rustls::{ClientConfig, ClientConnection, ServerConfig, ServerConnection};
use tempfile::TempDir;
use time::OffsetDateTime;

use crate::authority::{Authority, Validity};
use crate::member;

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

/// An authority whose certificate the authority `root` has signed, if there is one.
struct Signing {
    parameters: CertificateParams,
    certificate: rcgen::Certificate,
    issuer: Issuer<'static, KeyPair>,
}

impl Signing {
    fn parameters_of(name: &str) -> CertificateParams {
        let serial = u64::try_from(name.len()).unwrap();
        let mut parameters = CertificateParams::default();
        parameters.distinguished_name = DistinguishedName::new();
        parameters.distinguished_name.push(DnType::CommonName, name);
        parameters.serial_number = Some(SerialNumber::from(serial));
        parameters.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        parameters.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        parameters
    }

    fn new(name: &str, root: Option<&Self>) -> Self {
        let parameters = Self::parameters_of(name);
        let key = KeyPair::generate().unwrap();
        let certificate = match root {
            Some(root) => parameters.signed_by(&key, &root.issuer),
            None => parameters.self_signed(&key),
        };
        Self {
            certificate: certificate.unwrap(),
            issuer: Issuer::new(parameters.clone(), key),
            parameters,
        }
    }

    /// Its list of revoked certificates, as PEM.
    fn list(&self, revoked: Option<&Self>) -> String {
        let now = OffsetDateTime::now_utc();
        let revoked = revoked.map(|one| RevokedCertParams {
            serial_number: one.parameters.serial_number.clone().unwrap(),
            revocation_time: now,
            reason_code: None,
            invalidity_date: None,
        });
        let list = CertificateRevocationListParams {
            this_update: now,
            next_update: now + Duration::from_secs(3600),
            crl_number: SerialNumber::from(1_u64),
            issuing_distribution_point: None,
            revoked_certs: revoked.into_iter().collect(),
            key_identifier_method: KeyIdMethod::Sha256,
        };
        list.signed_by(&self.issuer).unwrap().pem().unwrap()
    }

    /// A certificate of a member, and its key.
    fn certify(&self, holder: &str) -> (rcgen::Certificate, KeyPair) {
        let subject = Subject {
            cluster: "prod".parse().unwrap(),
            holder: holder.parse().unwrap(),
        };
        let mut parameters = member::parameters(&subject).unwrap();
        parameters.use_authority_key_identifier_extension = true;
        let key = KeyPair::generate().unwrap();
        (parameters.signed_by(&key, &self.issuer).unwrap(), key)
    }

    /// What a member shows.
    fn chain(&self, holder: &str) -> [CertificateDer<'static>; 2] {
        let (certificate, _) = self.certify(holder);
        [certificate.der(), self.certificate.der()].map(Clone::clone)
    }

    /// The credentials of a member that this authority has signed, with `root` as what it trusts.
    fn member(
        &self,
        holder: &str,
        root: &Self,
        lists: &[String],
    ) -> Result<Credentials, CredentialsError> {
        let (certificate, key) = self.certify(holder);
        let directory = tempfile::tempdir().unwrap();
        let write = |name, text: &str| {
            files::write(
                &directory.path().join(name),
                text.as_bytes(),
                Readers::Owner,
            )
            .unwrap();
        };
        write("cert.pem", &(certificate.pem() + &self.certificate.pem()));
        write("key.pem", &key.serialize_pem());
        write("ca.pem", &root.certificate.pem());
        if !lists.is_empty() {
            write("crl.pem", &lists.concat());
        }
        Credentials::load(directory.path())
    }
}

#[test]
fn a_revoked_authority_between_is_refused_by_who_has_the_list_of_the_root() {
    let root = Signing::new("root", None);
    let between = Signing::new("between", Some(&root));
    let member = |holder: &str, lists: &[String]| between.member(holder, &root, lists);
    let shake = |vm: &Credentials, node: &Credentials| {
        shake_hands(vm.client(&alpha()).unwrap(), node.server().unwrap())
    };
    let (vm, node) = (
        member("vm/web", &[]).unwrap(),
        member("node/alpha", &[]).unwrap(),
    );
    shake(&vm, &node).unwrap();
    // Its own list is needed as soon as there are lists; that of the root is not.
    for lists in [
        vec![between.list(None)],
        vec![between.list(None), root.list(None)],
    ] {
        shake(&member("vm/web", &lists).unwrap(), &node).unwrap();
        shake(&vm, &member("node/alpha", &lists).unwrap()).unwrap();
    }
    let error = member("vm/web", &[root.list(None)]).unwrap_err();
    assert!(error.to_string().contains("Revocation"), "{error}");
    // Who has the new list does not believe in itself any more, so these are of another authority.
    let lists = [between.list(None), root.list(Some(&between))];
    let error = member("vm/web", &lists).unwrap_err();
    assert!(error.to_string().contains("Revoked"), "{error}");
    let other = Signing::new("other", Some(&root));
    let lists = [&lists[..], &[other.list(None)]].concat();
    let with_list = |holder: &str| other.member(holder, &root, &lists).unwrap();
    for result in [
        shake(&with_list("vm/web"), &node),
        shake(&vm, &with_list("node/alpha")),
    ] {
        let error = result.expect_err("revoked").to_string();
        assert!(error.contains("Revoked"), "{error}");
    }
    shake(&with_list("vm/web"), &with_list("node/alpha")).unwrap();
    // As a node, or a VM, looks at an existing connection.
    let confirms = |credentials: &Credentials, signing: &Signing| {
        credentials.confirm(&signing.chain("vm/web"))
    };
    confirms(&node, &between).unwrap();
    let node = with_list("node/alpha");
    let error = confirms(&node, &between).expect_err("revoked");
    assert!(error.contains("Revoked"), "{error}");
    confirms(&node, &other).unwrap();
    // A certificate that belongs to no chain, beside those that do.
    let mut useless = Signing::parameters_of("between");
    useless.not_after = OffsetDateTime::UNIX_EPOCH + Duration::from_secs(1 << 30);
    let key = KeyPair::generate().unwrap();
    let useless = useless.self_signed(&key).unwrap();
    let [first, signer] = between.chain("vm/web");
    let useless = useless.der().clone();
    for chain in [
        [first.clone(), signer.clone(), useless.clone()],
        [first, useless.clone(), signer],
    ] {
        node.confirm(&chain).expect_err("revoked");
    }
    let [first, signer] = other.chain("vm/web");
    node.confirm(&[first, signer, useless]).unwrap();
}
