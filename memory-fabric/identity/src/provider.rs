//! The cryptography of all connections.

use std::sync::Arc;

use rustls::crypto::CryptoProvider;
use rustls::crypto::ring::{cipher_suite, default_provider};

/// Returns the cryptography of connections, by ring, for either end. Of the cipher suites AES-128-GCM
/// is preferred: an exchange of a page needs fewer rounds of AES than with 256 bits, and each
/// connection has keys of its own.
#[must_use]
pub fn provider() -> Arc<CryptoProvider> {
    Arc::new(CryptoProvider {
        cipher_suites: vec![
            cipher_suite::TLS13_AES_128_GCM_SHA256,
            cipher_suite::TLS13_AES_256_GCM_SHA384,
            cipher_suite::TLS13_CHACHA20_POLY1305_SHA256,
        ],
        ..default_provider()
    })
}
