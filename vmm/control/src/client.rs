//! The client.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::Request;
use hyper::client::conn::http1;
use hyper::header::{CONTENT_TYPE, HOST};
use hyper_util::rt::TokioIo;
use serde::Serialize;
use serde::de::DeserializeOwned;
use socket2::{Domain, SockAddr, Socket, Type};

use super::protocol::{ANSWER_BYTES_MAX, ErrorBody, Refusal};
use super::route::Method;

/// Timeout for an answer. It is longer than other clients can delay it.
pub const CLIENT_TIME_MAX: Duration = Duration::from_secs(20);

/// Pause between attempts to connect.
const FULL_PAUSE: Duration = Duration::from_millis(20);

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// Connecting failed.
    #[error("cannot be asked")]
    Stream(#[source] io::Error),
    /// The server closed the connection, or its answer is not HTTP.
    #[error("{}", if .0.is_parse() { "answers something that is not understood" } else { "does not answer" })]
    Http(#[source] hyper::Error),
    /// No answer arrived in time.
    #[error("does not answer within {} s", CLIENT_TIME_MAX.as_secs())]
    Late,
    /// The answer exceeds the limit or is incomplete.
    #[error("gives no whole answer")]
    Body(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The answer has an unexpected format.
    #[error("answers something that is not understood")]
    Malformed(#[source] serde_json::Error),
    /// The server refused the request.
    #[error("refuses: {}", .0.text)]
    Refused(Refusal),
}

/// Requests `path` from the process that listens on `socket`.
///
/// # Errors
///
/// Fails when there is no valid answer in time.
pub fn ask<T: DeserializeOwned>(socket: &Path, path: &str) -> Result<T, ClientError> {
    call(socket, Method::Get, path, None::<&()>)
}

/// Sends a request, optionally with a body.
///
/// # Errors
///
/// Fails when there is no valid answer in time.
pub fn call<T: DeserializeOwned>(
    socket: &Path,
    method: Method,
    path: &str,
    body: Option<&impl Serialize>,
) -> Result<T, ClientError> {
    let deadline = Instant::now() + CLIENT_TIME_MAX;
    let stream = connect(socket, deadline).map_err(ClientError::Stream)?;
    let body = match body {
        Some(body) => serde_json::to_vec(body).map_err(ClientError::Malformed)?,
        None => Vec::new(),
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .enable_time()
        .build()
        .map_err(ClientError::Stream)?;
    let exchange = async {
        let left = deadline.saturating_duration_since(Instant::now());
        tokio::time::timeout(left, exchange(stream, method, path, body)).await
    };
    let (status, answer) = runtime
        .block_on(exchange)
        .unwrap_or(Err(ClientError::Late))?;
    if status.is_success() {
        return serde_json::from_slice(&answer).map_err(ClientError::Malformed);
    }
    let refused: ErrorBody = serde_json::from_slice(&answer).map_err(ClientError::Malformed)?;
    Err(ClientError::Refused(refused.error))
}

async fn exchange(
    stream: UnixStream,
    method: Method,
    path: &str,
    body: Vec<u8>,
) -> Result<(hyper::StatusCode, Bytes), ClientError> {
    let stream = tokio::net::UnixStream::from_std(stream).map_err(ClientError::Stream)?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream))
        .await
        .map_err(ClientError::Http)?;
    // The request sees an error of the connection as well.
    tokio::spawn(connection);
    let mut request = Request::new(Full::new(Bytes::from(body)));
    *request.method_mut() = match method {
        Method::Get => hyper::Method::GET,
        Method::Post => hyper::Method::POST,
        Method::Put => hyper::Method::PUT,
    };
    *request.uri_mut() = path
        .parse()
        .map_err(|error| ClientError::Body(Box::new(error)))?;
    let headers = request.headers_mut();
    headers.insert(HOST, hyper::header::HeaderValue::from_static("ssi-hv"));
    headers.insert(
        CONTENT_TYPE,
        hyper::header::HeaderValue::from_static("application/json"),
    );
    let answer = sender
        .send_request(request)
        .await
        .map_err(ClientError::Http)?;
    let status = answer.status();
    let body = Limited::new(answer.into_body(), ANSWER_BYTES_MAX);
    let body = body.collect().await.map_err(ClientError::Body)?;
    Ok((status, body.to_bytes()))
}

/// Connects before `deadline`: an ordinary connect blocks forever if the socket's queue is full.
/// The stream is non-blocking.
fn connect(path: &Path, deadline: Instant) -> io::Result<UnixStream> {
    loop {
        match try_connect(path) {
            Err(error)
                if error.kind() == io::ErrorKind::WouldBlock && Instant::now() < deadline =>
            {
                std::thread::sleep(FULL_PAUSE);
            }
            result => return result,
        }
    }
}

/// Connects at once, or fails with `WouldBlock` if the queue is full. The stream is non-blocking.
pub(super) fn try_connect(path: &Path) -> io::Result<UnixStream> {
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    socket.set_nonblocking(true)?;
    socket.connect(&SockAddr::unix(path)?)?;
    Ok(OwnedFd::from(socket).into())
}
