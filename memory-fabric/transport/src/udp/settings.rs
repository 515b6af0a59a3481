//! Configuration of both ends of a connection.

use super::streams::STREAMS;
use crate::UNKNOWN_BYTES_MAX;
use crate::tls::TlsError;
use fabric_identity::{
    CredentialsError, ExpectedNode, Fingerprint, FingerprintVerifier, Identity, SharedCredentials,
    provider,
};
use fabric_wire::TrafficClass;
use quinn_proto::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use quinn_proto::{
    AckFrequencyConfig, ClientConfig, EndpointConfig, MtuDiscoveryConfig, ServerConfig,
    TransportConfig, VarInt,
};
use rustls::version::TLS13;
use std::io;
use std::sync::Arc;
use std::time::Duration;

/// The application protocol (RFC 7301). Its version is in each frame.
const ALPN: &[u8] = b"ssi-hv";

/// Largest payload of a datagram: Ethernet frames of 9000 bytes, without headers of IPv6 and UDP. A
/// page and its headers fit. The path's actual limit is discovered, starting from 1200 bytes.
const DATAGRAM_BYTES_MAX: u16 = 9000 - 40 - 8;

/// Unread bytes that a peer may send on one stream: twice the longest frame.
const STREAM_WINDOW_BYTES: u32 = 1 << 20;

/// Unacknowledged bytes: more than are ever outstanding on a connection.
const SEND_WINDOW_BYTES: usize = 8 << 20;

/// Unread requests of a VM that a donor keeps in the protocol: twice the writes of pages that a VM
/// has outstanding, and nothing longer is sent to a donor.
pub(super) const REQUEST_BYTES_MAX: u32 = 512 << 10;

/// Unacknowledged answers of a donor: more than a VM ever asks for at once, except for prefetching.
pub(super) const fn answer_bytes_max(class: TrafficClass) -> usize {
    match class {
        TrafficClass::Prefetch => SEND_WINDOW_BYTES,
        // Two probes of the longest kind.
        TrafficClass::Probe => 2 << 20,
        TrafficClass::Urgent | TrafficClass::Bulk => 1 << 20,
    }
}

/// Assumed round trip before the first measurement. The default, a third of a second, is for the
/// Internet: a lost handshake packet would cost three times that.
const INITIAL_ROUND_TRIP: Duration = Duration::from_millis(30);

/// Longest delay of an acknowledgement by the peer. It delays the detection of a packet that is
/// lost at the end of an answer.
const ACK_DELAY_MAX: Duration = Duration::from_millis(2);

/// Packets that the peer may leave unacknowledged until then: the next request usually carries the
/// acknowledgement.
const ACK_THRESHOLD: u32 = 8;

/// Returns the limit of unread bytes on all streams of a connection.
pub(super) fn receive_window() -> VarInt {
    let streams = u32::try_from(STREAMS).expect("a small constant");
    VarInt::from_u32(streams * STREAM_WINDOW_BYTES)
}

/// Returns what concerns the transport of a connection whose peer may send so much before it is
/// read.
fn transport(receive_window: VarInt) -> Arc<TransportConfig> {
    let mut discovery = MtuDiscoveryConfig::default();
    discovery.upper_bound(DATAGRAM_BYTES_MAX);
    let mut acks = AckFrequencyConfig::default();
    acks.ack_eliciting_threshold(VarInt::from_u32(ACK_THRESHOLD))
        .max_ack_delay(Some(ACK_DELAY_MAX));
    let streams = u32::try_from(STREAMS).expect("a small constant");
    let mut config = TransportConfig::default();
    config
        .max_concurrent_bidi_streams(VarInt::from_u32(streams))
        .max_concurrent_uni_streams(VarInt::from_u32(0))
        .stream_receive_window(VarInt::from_u32(STREAM_WINDOW_BYTES))
        .receive_window(receive_window)
        .send_window(SEND_WINDOW_BYTES as u64)
        .initial_rtt(INITIAL_ROUND_TRIP)
        .mtu_discovery_config(Some(discovery))
        .ack_frequency_config(Some(acks))
        .datagram_receive_buffer_size(None)
        .allow_spin(false)
        // A connection ends with its lease, or because a request was not answered.
        .max_idle_timeout(None);
    Arc::new(config)
}

/// Returns the configuration that all endpoints of a process share, including the secret for
/// stateless resets.
pub(super) fn endpoint() -> Arc<EndpointConfig> {
    let mut config = EndpointConfig::default();
    config
        .max_udp_payload_size(DATAGRAM_BYTES_MAX)
        .expect("within the limits of QUIC");
    Arc::new(config)
}

/// Who has to answer at the other end of a connection.
#[derive(Clone, Debug)]
pub enum Expected {
    /// The donor with this fingerprint, or any. This end shows no certificate.
    Fingerprint(Option<Fingerprint>),
    /// This node of the cluster, and this end shows its own certificate.
    Node(ExpectedNode),
}

/// Returns the TLS configuration of a VM's end.
pub(super) fn client_tls(expected: &Expected) -> io::Result<rustls::ClientConfig> {
    let fingerprint = match expected {
        Expected::Node(node) => return node.client().map_err(unusable),
        Expected::Fingerprint(fingerprint) => *fingerprint,
    };
    let provider = provider();
    let verifier = Arc::new(FingerprintVerifier::of_donor(fingerprint, &provider));
    let tls = rustls::ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&TLS13])
        .map_err(io::Error::other)?
        .dangerous()
        .with_custom_certificate_verifier(verifier)
        .with_no_client_auth();
    Ok(tls)
}

/// Returns the configuration of a VM's end with this one of TLS.
pub(super) fn client(mut tls: rustls::ClientConfig) -> io::Result<ClientConfig> {
    tls.alpn_protocols = vec![ALPN.to_vec()];
    let quic = QuicClientConfig::try_from(tls).map_err(io::Error::other)?;
    let mut config = ClientConfig::new(Arc::new(quic));
    config.transport_config(transport(receive_window()));
    Ok(config)
}

/// Returns the TLS configuration of a donor's end that any VM may use.
pub(super) fn open_tls(identity: &Identity) -> io::Result<rustls::ServerConfig> {
    let mut tls = rustls::ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&TLS13])
        .map_err(io::Error::other)?
        .with_no_client_auth()
        .with_single_cert(
            vec![identity.certificate.clone()],
            identity.key.clone_key().into(),
        )
        .map_err(io::Error::other)?;
    tls.send_tls13_tickets = 0;
    Ok(tls)
}

/// Returns the configuration of a donor's end with this one of TLS.
pub(super) fn server(tls: rustls::ServerConfig) -> io::Result<ServerConfig> {
    let mut config = ServerConfig::with_crypto(crypto(tls)?);
    let little = u32::try_from(UNKNOWN_BYTES_MAX).expect("a small constant");
    // Sockets are connected to one address of the VM, so it cannot migrate.
    config
        .transport_config(transport(VarInt::from_u32(little)))
        .migration(false);
    Ok(config)
}

/// Returns a donor's configuration with other credentials. Its secrets stay those of `config`, so
/// that an address which was confirmed under that one counts.
pub(super) fn renewed(
    config: &ServerConfig,
    credentials: &SharedCredentials,
) -> io::Result<Arc<ServerConfig>> {
    let mut config = config.clone();
    config.crypto = crypto(member_tls(credentials))?;
    Ok(Arc::new(config))
}

/// Returns the TLS configuration of a donor's end for members of its cluster.
pub(super) fn member_tls(credentials: &SharedCredentials) -> rustls::ServerConfig {
    rustls::ServerConfig::clone(&credentials.server())
}

fn crypto(mut tls: rustls::ServerConfig) -> io::Result<Arc<QuicServerConfig>> {
    tls.alpn_protocols = vec![ALPN.to_vec()];
    let quic = QuicServerConfig::try_from(tls).map_err(io::Error::other)?;
    Ok(Arc::new(quic))
}

fn unusable(error: CredentialsError) -> io::Error {
    TlsError::Credentials(error.to_string()).into()
}
