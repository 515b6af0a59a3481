//! Members of a cluster, and certificates that nobody should accept.

use fabric_identity::credentials::certificates;
use fabric_identity::{ExpectedNode, Name, Role, SharedCredentials};
use fabric_pki::{Authority, Validity};
use fabric_transport::rdma::DeviceChoice;
use memory_fabric::donor::policy::Rule;
use memory_fabric::donor::server::{Donor, DonorConfig};
use rcgen::string::Ia5String;
use rcgen::{
    CertificateParams, ExtendedKeyUsagePurpose, Issuer, KeyPair, KeyUsagePurpose, SanType,
};
use rustls::pki_types::CertificateDer;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tempfile::TempDir;

pub const YEAR: Validity = Validity { days: 365 };

/// A cluster with its authority.
pub struct Cluster {
    directory: TempDir,
}

/// A certificate and its key.
pub struct Pair {
    pub certificate: CertificateDer<'static>,
    pub pem: String,
    pub key: KeyPair,
}

impl Cluster {
    pub fn new(name: &str) -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let cluster = name.parse().expect("a name");
        let validity = Validity { days: 3_650 };
        Authority::create(&directory.path().join("authority"), cluster, validity)
            .expect("an authority");
        Self { directory }
    }

    pub fn authority(&self) -> Authority {
        Authority::open(&self.authority_path()).expect("an authority")
    }

    fn authority_path(&self) -> PathBuf {
        self.directory.path().join("authority")
    }

    /// Returns the directory of a member, which is made if it is not there.
    pub fn directory_of(&self, holder: &str) -> PathBuf {
        let path = self.directory.path().join(holder);
        if !path.exists() {
            let holder = holder.parse().expect("a holder");
            self.authority()
                .issue(&holder, YEAR, &path)
                .expect("a certificate");
        }
        path
    }

    pub fn member(&self, holder: &str, role: Role) -> Arc<SharedCredentials> {
        SharedCredentials::load(&self.directory_of(holder), role).expect("credentials")
    }

    /// Revokes the certificates of a member, and gives it another.
    pub fn renew_revoked(&self, holder: &str) {
        let path = self.directory_of(holder);
        let holder = holder.parse().expect("a holder");
        let mut authority = self.authority();
        authority.revoke_holder(&holder).expect("revoked");
        let new = self.directory.path().join("new");
        authority.issue(&holder, YEAR, &new).expect("a certificate");
        for file in ["key.pem", "cert.pem"] {
            std::fs::copy(new.join(file), path.join(file)).expect("copied");
        }
        std::fs::remove_dir_all(new).expect("removed");
    }

    /// Gives the list of revoked certificates to the directory of a member.
    pub fn inform(&self, holder: &str) {
        let list = self.authority_path().join("crl.pem");
        std::fs::copy(list, self.directory_of(holder).join("crl.pem")).expect("copied");
    }

    /// Revokes a member, and gives the list to the directory of another.
    pub fn revoke(&self, holder: &str, informed: &str) {
        let holder = holder.parse().expect("a holder");
        self.authority().revoke_holder(&holder).expect("revoked");
        let list = self.authority_path().join("crl.pem");
        std::fs::copy(list, self.directory_of(informed).join("crl.pem")).expect("copied");
    }

    /// Has a member accept this authority and another one, while one replaces the other.
    pub fn accept_too(&self, other: &Self, holder: &str) {
        for file in ["ca.pem", "crl.pem"] {
            let both = [self, other].map(|cluster| {
                std::fs::read_to_string(cluster.authority_path().join(file)).expect("a file")
            });
            let path = self.directory_of(holder).join(file);
            std::fs::write(path, both.concat()).expect("written");
        }
    }

    /// Returns what `holder`, a VM, expects at the node with this name.
    pub fn expected(&self, holder: &str, node: &str) -> ExpectedNode {
        ExpectedNode {
            credentials: self.member(holder, Role::Vm),
            name: name(node),
        }
    }

    /// Starts the node `node/alpha`.
    pub fn donor(&self, memory_bytes: u64) -> Donor {
        self.donor_with(memory_bytes, None)
    }

    /// Starts it with a policy.
    pub fn donor_with(&self, memory_bytes: u64, allow: Option<Vec<Rule>>) -> Donor {
        Donor::start(&self.config(memory_bytes, allow)).expect("a donor on loopback")
    }

    pub fn config(&self, memory_bytes: u64, allow: Option<Vec<Rule>>) -> DonorConfig {
        DonorConfig {
            listen: ([127, 0, 0, 1], 0).into(),
            memory_bytes,
            lease_duration_max: Duration::from_secs(30),
            spin: Duration::from_micros(20),
            rdma: DeviceChoice::None,
            credentials: Some(self.member("node/alpha", Role::Node)),
            allow,
        }
    }

    /// Makes a certificate of the authority like that of a VM, but for a change.
    pub fn odd(&self, change: impl FnOnce(&mut CertificateParams)) -> Pair {
        let authority = self.authority_path();
        let key = std::fs::read_to_string(authority.join("ca.key")).expect("a key");
        let key = KeyPair::from_pem(&key).expect("a key");
        let own = certificates(&authority.join("ca.pem")).expect("certificates");
        let issuer = Issuer::from_ca_cert_der(&own[0], key).expect("an authority");
        let key = KeyPair::generate().expect("a key");
        let mut parameters = like_vm();
        change(&mut parameters);
        let certificate = parameters.signed_by(&key, &issuer).expect("a certificate");
        Pair {
            certificate: certificate.der().clone(),
            pem: certificate.pem(),
            key,
        }
    }
}

/// A certificate that confirms itself.
pub fn self_signed() -> Pair {
    let key = KeyPair::generate().expect("a key");
    let certificate = like_vm().self_signed(&key).expect("a certificate");
    Pair {
        certificate: certificate.der().clone(),
        pem: certificate.pem(),
        key,
    }
}

/// What the authority writes into the certificate of `vm/web` of `prod`.
fn like_vm() -> CertificateParams {
    let mut parameters = CertificateParams::default();
    parameters.subject_alt_names = vec![uri("spiffe://prod/ssi-hv/vm/web")];
    parameters.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    parameters.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
    parameters.use_authority_key_identifier_extension = true;
    parameters
}

pub fn uri(text: &str) -> SanType {
    SanType::URI(Ia5String::try_from(text).expect("ASCII"))
}

pub fn name(text: &str) -> Name {
    text.parse().expect("a name")
}
