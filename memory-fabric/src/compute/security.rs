//! Mutual TLS between the processes of a VM on several hosts.

use fabric_coherence::Member;
use fabric_identity::Fingerprint;
use fabric_identity::pinned::{PinnedIdentity, PinnedPeers};
use fabric_peers::{SecureStream, Security};
use fabric_transport::tls::{TlsError, TlsStream};
use std::io::{self, IoSlice};
use std::net::TcpStream;
use std::sync::Arc;

/// TLS 1.3 between the processes of a VM, each of which knows the others by their certificates.
#[derive(Debug)]
pub struct TlsSecurity(PinnedPeers);

impl TlsSecurity {
    /// Secures the connections of the process at the place `me`, which has `identity`, to the
    /// processes with the certificates of `table`.
    ///
    /// # Errors
    ///
    /// Fails when the key cannot be used.
    pub fn shared(
        identity: &PinnedIdentity,
        me: u8,
        table: Vec<Fingerprint>,
    ) -> io::Result<Arc<dyn Security>> {
        let peers = PinnedPeers::new(identity, me.into(), table).map_err(io::Error::other)?;
        Ok(Arc::new(Self(peers)))
    }
}

impl Security for TlsSecurity {
    fn connect(&self, socket: TcpStream, peer: Member) -> io::Result<Box<dyn SecureStream>> {
        let stream = TlsStream::connect_pinned(socket, &self.0, peer.index());
        Ok(Box::new(Secured(stream.map_err(of_process)?)))
    }

    fn accept(&self, socket: TcpStream) -> io::Result<(Box<dyn SecureStream>, Member)> {
        let (stream, place) = TlsStream::accept_pinned(socket, &self.0).map_err(of_process)?;
        let member = u8::try_from(place).ok().and_then(Member::at);
        let member = member.ok_or_else(|| io::Error::other("no such member"))?;
        Ok((Box::new(Secured(stream)), member))
    }
}

/// Names what another process of the VM refuses: it has no certificate of an authority.
fn of_process(error: io::Error) -> io::Error {
    let tls = error.get_ref().and_then(|cause| cause.downcast_ref());
    let Some(TlsError::Refused(alert)) = tls else {
        return error;
    };
    let text = format!(
        "the other node does not accept this process as one of the same boot of the VM (TLS alert \
         {alert:?}); see the log there"
    );
    io::Error::new(error.kind(), text)
}

#[derive(Debug)]
struct Secured(TlsStream);

impl SecureStream for Secured {
    fn socket(&self) -> &TcpStream {
        self.0.socket()
    }

    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.0.read(bytes).map_err(of_process)
    }

    fn write_vectored(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        self.0.write_vectored(parts)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }

    fn is_blocked(&self) -> bool {
        self.0.is_blocked()
    }

    fn is_ready(&self) -> bool {
        self.0.is_ready()
    }

    fn close(&mut self) {
        self.0.close();
    }
}
