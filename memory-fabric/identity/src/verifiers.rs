//! Whether the other end of a TLS connection is a member of the cluster.

use std::sync::Arc;

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{DigitallySignedStruct, DistinguishedName, Error, SignatureScheme};

use crate::NAME;
use crate::certificate::fingerprint_of;
use crate::delegates::Delegates;
use crate::presented::{Presented, check_chain};
use crate::subject::{Name, Role, Subject};

/// Checks that a confirmed certificate names a member of `cluster` with one of `roles`.
fn check(
    certificate: &CertificateDer<'_>,
    cluster: &Name,
    roles: &[Role],
) -> Result<Subject, Error> {
    let general = |text: String| Err(Error::General(text));
    let subject = match Presented::read(certificate) {
        Ok(presented) => presented.subject,
        Err(error) => return general(error.to_string()),
    };
    if subject.cluster != *cluster {
        return general(format!(
            "it is {subject}, of another cluster than {cluster}"
        ));
    }
    if !roles.contains(&subject.holder.role) {
        let roles: Vec<_> = roles.iter().map(|role| role.word()).collect();
        let roles = roles.join(" or ");
        return general(format!("it is {subject}, and a {roles} is needed here"));
    }
    Ok(subject)
}

/// Confirms chains of certificates. `V` is what rustls has for clients, or for servers.
#[derive(Debug)]
pub(crate) struct Confirming<V: ?Sized> {
    /// Looks for the first certificate in the list of its authority, without which it is refused where
    /// there are lists.
    first: Arc<V>,
    /// Looks for all of them in the lists that there are. None where there are none.
    all: Option<Arc<V>>,
}

impl<V: ?Sized> Confirming<V> {
    /// `build` makes what looks for the first certificate alone, or for all.
    pub(crate) fn new<E>(
        has_lists: bool,
        build: impl Fn(Revocation) -> Result<Arc<V>, E>,
    ) -> Result<Self, E> {
        let all = has_lists.then(|| build(Revocation::OfAllKnown));
        Ok(Self {
            first: build(Revocation::OfFirst)?,
            all: all.transpose()?,
        })
    }

    /// Confirms a chain with these certificates after its first. `verify` has one verifier look at it.
    pub(crate) fn confirm<T>(
        &self,
        intermediates: &[CertificateDer<'_>],
        verify: impl Fn(&V) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let confirmed = verify(&self.first)?;
        match &self.all {
            Some(all) if !intermediates.is_empty() => match verify(all) {
                // A list that cannot be used says nothing, such as that of an authority with the same
                // name and another key.
                Ok(_) | Err(Error::InvalidCertRevocationList(_)) => Ok(confirmed),
                // Also where another reason is given: certificates that belong to no chain give one.
                Err(error) => Err(error),
            },
            _ => Ok(confirmed),
        }
    }
}

/// Which certificates of a chain must not be revoked.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Revocation {
    /// The first; that there is no list of its authority counts as revoked where there are lists.
    OfFirst,
    /// All whose authority has a list.
    OfAllKnown,
}

/// Accepts clients that an authority confirms as members of a cluster, and processes to which
/// members have delegated something.
#[derive(Debug)]
pub(crate) struct MemberVerifier {
    confirming: Confirming<dyn ClientCertVerifier>,
    cluster: Name,
    roles: &'static [Role],
    delegates: Arc<Delegates>,
}

impl MemberVerifier {
    pub(crate) fn new(
        confirming: Confirming<dyn ClientCertVerifier>,
        cluster: Name,
        roles: &'static [Role],
        delegates: Arc<Delegates>,
    ) -> Self {
        Self {
            confirming,
            cluster,
            roles,
            delegates,
        }
    }

    /// Returns whether a member has delegated something to the process with this certificate. One
    /// that names a member of the cluster is never such: what it may do is what the authority
    /// confirms.
    fn is_delegate(&self, certificate: &CertificateDer<'_>) -> bool {
        self.delegates.has(fingerprint_of(certificate))
            && Presented::read(certificate).is_ok_and(|one| one.subject.cluster != self.cluster)
    }
}

impl ClientCertVerifier for MemberVerifier {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.confirming.first.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        certificate: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        check_chain(certificate, intermediates).map_err(Error::General)?;
        if self.is_delegate(certificate) {
            return Ok(ClientCertVerified::assertion());
        }
        let confirmed = self.confirming.confirm(intermediates, |confirming| {
            confirming.verify_client_cert(certificate, intermediates, now)
        })?;
        check(certificate, &self.cluster, self.roles)?;
        Ok(confirmed)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let confirming = &self.confirming.first;
        confirming.verify_tls12_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let confirming = &self.confirming.first;
        confirming.verify_tls13_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.confirming.first.supported_verify_schemes()
    }
}

/// Accepts the node of a cluster with one name, if an authority confirms it. The name by which TLS
/// knows a node is the same for all ([`NAME`]); the one in its URI says which node it is.
#[derive(Debug)]
pub(crate) struct NodeVerifier {
    confirming: Confirming<WebPkiServerVerifier>,
    cluster: Name,
    wanted: Name,
}

impl NodeVerifier {
    pub(crate) fn new(
        confirming: Confirming<WebPkiServerVerifier>,
        cluster: Name,
        wanted: Name,
    ) -> Self {
        Self {
            confirming,
            cluster,
            wanted,
        }
    }
}

impl ServerCertVerifier for NodeVerifier {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        check_chain(certificate, intermediates).map_err(Error::General)?;
        let name = ServerName::try_from(NAME).map_err(|error| Error::General(error.to_string()))?;
        let confirmed = self.confirming.confirm(intermediates, |confirming| {
            confirming.verify_server_cert(certificate, intermediates, &name, ocsp, now)
        })?;
        let subject = check(certificate, &self.cluster, &[Role::Node])?;
        if subject.holder.name != self.wanted {
            return Err(Error::General(format!(
                "it is {subject}, and node/{} is needed here; give the address of that node, or the \
                 name of this one",
                self.wanted
            )));
        }
        Ok(confirmed)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let confirming = &self.confirming.first;
        confirming.verify_tls12_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let confirming = &self.confirming.first;
        confirming.verify_tls13_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.confirming.first.supported_verify_schemes()
    }
}
