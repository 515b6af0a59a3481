//! Refusals as bytes, and the end of connections that are refused.

use std::time::Instant;

use fabric_host::Seldom;
use hyper::StatusCode;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::time::timeout;

use super::protocol::{ErrorBody, REQUEST_TIME_MAX, Refusal};

/// Any local user can connect as often as it likes.
static NOTICES: Seldom = Seldom::notices();

/// Refuses a client, whatever it asks for.
pub(crate) async fn refuse(mut stream: impl AsyncRead + AsyncWrite + Unpin, refusal: &Refusal) {
    if let Some(unreported) = NOTICES.pass(Instant::now()) {
        tracing::warn!(
            reason = refusal.text,
            unreported,
            "a client of the control socket is refused"
        );
    }
    let _ = stream.write_all(&refusal_bytes(refusal)).await;
    let _ = stream.shutdown().await;
    linger(&mut stream).await;
}

/// Reads the rest of a request that was refused before its end. Closing the connection earlier
/// would give the client a broken pipe, which many programs report instead of the refusal.
pub(crate) async fn linger(stream: &mut (impl AsyncRead + Unpin)) {
    let mut nothing = [0; 4096];
    let drain = async { while let Ok(1..) = stream.read(&mut nothing).await {} };
    let _ = timeout(REQUEST_TIME_MAX, drain).await;
}

/// Formats a refusal for a connection without a valid request.
pub(crate) fn refusal_bytes(refusal: &Refusal) -> Vec<u8> {
    let status = StatusCode::from_u16(refusal.code.status());
    let reason = status.ok().and_then(|status| status.canonical_reason());
    let body = body_of(refusal);
    let head = format!(
        "HTTP/1.1 {} {}\r\ncontent-type: application/json\r\nconnection: close\r\n\
         content-length: {}\r\n\r\n",
        refusal.code.status(),
        reason.unwrap_or_default(),
        body.len()
    );
    [head.into_bytes(), body].concat()
}

/// The body of a refusal.
pub(crate) fn body_of(refusal: &Refusal) -> Vec<u8> {
    let body = ErrorBody {
        error: refusal.clone(),
    };
    // A code and a string can always be serialized.
    serde_json::to_vec(&body).unwrap_or_default()
}
