//! What both ends of a connection are set to.

use super::streams::STREAMS;
use fabric_identity::{DonorVerifier, Fingerprint, Identity};
use quinn_proto::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use quinn_proto::{
    AckFrequencyConfig, ClientConfig, EndpointConfig, MtuDiscoveryConfig, ServerConfig,
    TransportConfig, VarInt,
};
use rustls::crypto::CryptoProvider;
use rustls::version::TLS13;
use std::io;
use std::sync::Arc;
use std::time::Duration;

/// The protocol inside (RFC 7301). Its version is in each frame.
const ALPN: &[u8] = b"ssi-hv";

/// Largest payload of a datagram: Ethernet frames of 9000 bytes, without headers of IPv6 and UDP. A
/// page and its headers fit. What the path takes is found out from 1200 bytes on.
const DATAGRAM_BYTES_MAX: u16 = 9000 - 40 - 8;

/// Bytes that a peer may send on one stream before they were taken: twice the longest frame.
const STREAM_WINDOW_BYTES: u32 = 1 << 20;

/// Bytes sent and not acknowledged: more than is ever outstanding on a connection.
const SEND_WINDOW_BYTES: u64 = 8 << 20;

/// The round trip until one was measured. The default, a third of a second, is for the Internet: a
/// packet of the handshake that is lost would cost three times that.
const INITIAL_ROUND_TRIP: Duration = Duration::from_millis(30);

/// The longest that the other end puts off an acknowledgement. A packet that is lost at the end of an
/// answer is missed by so much later.
const ACK_DELAY_MAX: Duration = Duration::from_millis(2);

/// Packets that the other end may leave unacknowledged meanwhile: the request that follows mostly
/// carries the acknowledgement.
const ACK_THRESHOLD: u32 = 8;

fn transport() -> Arc<TransportConfig> {
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
        .receive_window(VarInt::from_u32(streams * STREAM_WINDOW_BYTES))
        .send_window(SEND_WINDOW_BYTES)
        .initial_rtt(INITIAL_ROUND_TRIP)
        .mtu_discovery_config(Some(discovery))
        .ack_frequency_config(Some(acks))
        .datagram_receive_buffer_size(None)
        .allow_spin(false)
        // A connection ends with its lease, or because somebody asked and was not answered.
        .max_idle_timeout(None);
    Arc::new(config)
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

/// What all endpoints of a process have in common, the secret of its resets among it.
pub(super) fn endpoint() -> Arc<EndpointConfig> {
    let mut config = EndpointConfig::default();
    config
        .max_udp_payload_size(DATAGRAM_BYTES_MAX)
        .expect("within the limits of QUIC");
    Arc::new(config)
}

/// The VM's end, which connects to a donor with this fingerprint, or to any.
pub(super) fn client(fingerprint: Option<Fingerprint>) -> io::Result<ClientConfig> {
    let provider = provider();
    let verifier = Arc::new(DonorVerifier::new(fingerprint, &provider));
    let mut tls = rustls::ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&TLS13])
        .map_err(io::Error::other)?
        .dangerous()
        .with_custom_certificate_verifier(verifier)
        .with_no_client_auth();
    tls.alpn_protocols = vec![ALPN.to_vec()];
    let quic = QuicClientConfig::try_from(tls).map_err(io::Error::other)?;
    let mut config = ClientConfig::new(Arc::new(quic));
    config.transport_config(transport());
    Ok(config)
}

/// The donor's end.
pub(super) fn server(identity: &Identity) -> io::Result<Arc<ServerConfig>> {
    let mut tls = rustls::ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&TLS13])
        .map_err(io::Error::other)?
        .with_no_client_auth()
        .with_single_cert(
            vec![identity.certificate.clone()],
            identity.key.clone_key().into(),
        )
        .map_err(io::Error::other)?;
    tls.alpn_protocols = vec![ALPN.to_vec()];
    let quic = QuicServerConfig::try_from(tls).map_err(io::Error::other)?;
    let mut config = ServerConfig::with_crypto(Arc::new(quic));
    // Sockets are connected to one address of the VM.
    config.transport_config(transport()).migration(false);
    Ok(Arc::new(config))
}
