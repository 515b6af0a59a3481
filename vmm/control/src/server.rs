//! The server.

use std::future::{Future, poll_fn};
use std::io;
use std::net::{SocketAddr, TcpListener as StdTcpListener};
use std::os::unix::net::UnixListener as StdListener;
use std::path::PathBuf;
use std::pin::pin;
use std::sync::{Arc, OnceLock, mpsc};
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
use hyper::body::{Body, Incoming};
use hyper::header::{ALLOW, CONNECTION, CONTENT_TYPE, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::{Semaphore, oneshot, watch};
use tokio::time::timeout;

use super::accept::Accept;
use super::changes::NextChange;
use super::directory::{Directory, DirectoryError, Kind, VARIABLE};
use super::files;
use super::protocol::{
    BODY_BYTES_MAX, CONNECTION_TIME_MAX, CONNECTIONS_MAX, HEAD_BYTES_MAX, REQUEST_TIME_MAX,
    Refusal, RefusalCode, WAITS_MAX,
};
use super::refusing::{body_of, linger, refusal_bytes, refuse};
use super::route::{Answer, Done, JSON, Route, Service};
use super::workers::Workers;
use ssi_hv_api::name::VmName;

/// Stack size of the HTTP thread.
const STACK_BYTES: usize = 512 << 10;

/// Pause after the kernel refused a connection for lack of descriptors or memory.
const REFUSED_PAUSE: Duration = Duration::from_millis(100);

/// How long a stopping server waits for answers in progress, such as that of the request that stops
/// the process.
const LAST_ANSWERS_TIME_MAX: Duration = Duration::from_millis(250);

/// Why the server cannot start.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// No directory can be used.
    #[error(transparent)]
    Directory(#[from] DirectoryError),
    /// Another VM has the name.
    #[error(
        "--name {name} is taken by the VM of process {pid}; choose another name, or end that VM"
    )]
    NameTaken {
        /// The name.
        name: VmName,
        /// Process id of that VM.
        pid: u32,
    },
    /// The socket cannot be created.
    #[error("cannot listen on {}", path.display())]
    Listen {
        /// The socket.
        path: PathBuf,
        /// The error of the system.
        source: io::Error,
    },
    /// The address cannot be used.
    #[error("cannot listen on {address}")]
    Address {
        /// The address.
        address: SocketAddr,
        /// The error of the system.
        source: io::Error,
    },
    /// A thread or the runtime cannot be created.
    #[error("cannot start a thread")]
    Thread(#[source] io::Error),
}

/// A socket with its server. Dropping it stops the server and removes the socket.
#[derive(Debug)]
pub struct Server {
    /// Path of the socket, if it has one.
    path: Option<PathBuf>,
    /// Dropped to stop the thread.
    stop: Option<oneshot::Sender<()>>,
    /// Disconnected when the thread has stopped.
    ended: mpsc::Receiver<()>,
}

impl Server {
    /// Listens in `directory` under the id of this process, and `name`.
    ///
    /// # Errors
    ///
    /// Fails when another VM has the name, or the socket or a thread cannot be created.
    pub fn start<S: Send + Sync>(
        directory: &Directory,
        kind: Kind,
        name: Option<&VmName>,
        service: Service<S>,
    ) -> Result<Self, ServerError> {
        let _lock = directory.lock()?;
        Self::start_locked(directory, kind, name, service)
    }

    /// Like [`start`](Self::start), for a caller that holds the lock of the directory.
    ///
    /// # Errors
    ///
    /// Fails when another VM has the name, or the socket or a thread cannot be created.
    pub fn start_locked<S: Send + Sync>(
        directory: &Directory,
        kind: Kind,
        name: Option<&VmName>,
        service: Service<S>,
    ) -> Result<Self, ServerError> {
        let (path, listener) = listen(directory, kind, name)?;
        let workers = Workers::start("control", 2, true).map_err(ServerError::Thread)?;
        let from_std = || UnixListener::from_std(listener);
        Self::serve("control", Some(path), from_std, workers, service)
    }

    /// Listens on an address, for tables of read-only requests.
    ///
    /// # Errors
    ///
    /// Fails when the address cannot be used, or a thread cannot be created.
    pub fn start_on<S: Send + Sync>(
        name: &'static str,
        address: SocketAddr,
        service: Service<S>,
    ) -> Result<(Self, SocketAddr), ServerError> {
        let bind = || {
            let listener = StdTcpListener::bind(address)?;
            listener.set_nonblocking(true)?;
            let address = listener.local_addr()?;
            Ok((listener, address))
        };
        let (listener, address) =
            bind().map_err(|source| ServerError::Address { address, source })?;
        let workers = Workers::start(name, 1, false).map_err(ServerError::Thread)?;
        let from_std = || TcpListener::from_std(listener);
        let server = Self::serve(name, None, from_std, workers, service)?;
        Ok((server, address))
    }

    fn serve<S: Send + Sync, L: Accept>(
        name: &'static str,
        path: Option<PathBuf>,
        listener: impl FnOnce() -> io::Result<L>,
        workers: Workers,
        service: Service<S>,
    ) -> Result<Self, ServerError> {
        let (stop, stopped) = oneshot::channel();
        let (alive, ended) = mpsc::channel();
        let server = Self {
            path,
            stop: Some(stop),
            ended,
        };
        let inner = Arc::new(Inner {
            service: Arc::new(service),
            workers,
            answering: watch::Sender::new(0),
            waits: Semaphore::new(WAITS_MAX),
            ending: watch::Sender::new(false),
        });
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .enable_time()
            .build()
            .map_err(ServerError::Thread)?;
        let listener = {
            let _inside = runtime.enter();
            listener().map_err(ServerError::Thread)?
        };
        std::thread::Builder::new()
            .name(name.into())
            .stack_size(STACK_BYTES)
            .spawn(move || {
                let _alive: mpsc::Sender<()> = alive;
                runtime.block_on(serve(listener, stopped, &inner));
                // Connections end with the runtime.
                drop(runtime);
            })
            .map_err(ServerError::Thread)?;
        Ok(server)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(path) = &self.path {
            files::remove(path);
        }
        self.stop = None;
        // Clients have deadlines. Waiting is limited further, since the end of a VM must not depend
        // on clients.
        let _ = self.ended.recv_timeout(LAST_ANSWERS_TIME_MAX * 2);
    }
}

/// Binds the socket unless another VM has the name. The caller holds the lock of the directory.
fn listen(
    directory: &Directory,
    kind: Kind,
    name: Option<&VmName>,
) -> Result<(PathBuf, StdListener), ServerError> {
    // Removes sockets of ended processes, one of which may have had this process's id.
    let sockets = directory.sockets()?;
    let namesake = |name: &VmName| {
        let mut sockets = sockets.iter();
        sockets.find(|entry| entry.has_name(name.as_str()))
    };
    if let Some(name) = name
        && let Some(other) = namesake(name)
    {
        return Err(ServerError::NameTaken {
            name: name.clone(),
            pid: other.pid,
        });
    }
    let path = directory.socket_path(kind, std::process::id(), name);
    if sockets.iter().any(|entry| entry.path == path) {
        // It belongs to a container that shares the directory, where a process has the same id.
        let text = format!("another process listens there; name another directory in {VARIABLE}");
        let source = io::Error::new(io::ErrorKind::AddrInUse, text);
        return Err(ServerError::Listen { path, source });
    }
    match files::bind(&path) {
        Ok(listener) => Ok((path, listener)),
        Err(source) => Err(ServerError::Listen { path, source }),
    }
}

struct Inner<S: 'static> {
    service: Arc<Service<S>>,
    workers: Workers,
    /// Number of connections whose request was read and whose answer is not sent.
    answering: watch::Sender<usize>,
    /// Slots of requests that wait for a change.
    waits: Semaphore,
    /// Whether the server is stopping, which ends all waits.
    ending: watch::Sender<bool>,
}

impl<S> Inner<S> {
    /// Waits for a change or for the stop of the server.
    async fn wait_for(&self, change: NextChange) -> Result<(), Refusal> {
        let _place = self.waits.try_acquire().map_err(|_| {
            let text = format!(
                "{WAITS_MAX} requests wait for a change already, the limit; ask without `seen`, or try again"
            );
            Refusal::new(RefusalCode::Busy, text)
        })?;
        let mut ending = self.ending.subscribe();
        let ended = async { drop(ending.wait_for(|ending| *ending).await) };
        first_of(ended, change.come()).await;
        Ok(())
    }
}

/// Completes with the first of two futures and cancels the other.
async fn first_of(one: impl Future<Output = ()>, other: impl Future<Output = ()>) {
    let (mut one, mut other) = (pin!(one), pin!(other));
    poll_fn(|context| match one.as_mut().poll(context) {
        Poll::Ready(()) => Poll::Ready(()),
        Poll::Pending => other.as_mut().poll(context),
    })
    .await;
}

/// Counts a connection as being answered.
struct Answering<S: 'static>(Arc<Inner<S>>);

impl<S> Answering<S> {
    fn begin(inner: &Arc<Inner<S>>) -> Self {
        inner.answering.send_modify(|count| *count += 1);
        Self(Arc::clone(inner))
    }
}

impl<S> Drop for Answering<S> {
    fn drop(&mut self) {
        self.0.answering.send_modify(|count| *count -= 1);
    }
}

/// Accepts connections until the server is stopped.
async fn serve<S: Send + Sync, L: Accept>(
    listener: L,
    stopped: oneshot::Receiver<()>,
    inner: &Arc<Inner<S>>,
) {
    let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let accepting = async {
        loop {
            // The semaphore is never closed.
            let Ok(place) = Arc::clone(&places).acquire_owned().await else {
                return;
            };
            match listener.next().await {
                Ok(stream) => {
                    let inner = Arc::clone(inner);
                    tokio::spawn(async move {
                        let _place = place;
                        let served = async {
                            match L::refused(&stream) {
                                None => attend(stream, inner).await,
                                Some(refusal) => refuse(stream, &refusal).await,
                            }
                        };
                        if timeout(CONNECTION_TIME_MAX, served).await.is_err() {
                            tracing::debug!("a client took too long");
                        }
                    });
                }
                Err(error) => {
                    tracing::debug!(%error, "control socket");
                    tokio::time::sleep(REFUSED_PAUSE).await;
                }
            }
        }
    };
    // Nothing is ever sent: the receiver completes when the sender is dropped.
    let stopped = async { drop(stopped.await) };
    first_of(stopped, accepting).await;
    inner.ending.send_replace(true);
    let mut answering = inner.answering.subscribe();
    let _ = timeout(
        LAST_ANSWERS_TIME_MAX,
        answering.wait_for(|count| *count == 0),
    )
    .await;
}

/// Answers one request and closes the connection. Errors of a client are not reported elsewhere.
async fn attend<S: Send + Sync>(stream: impl AsyncRead + AsyncWrite + Unpin, inner: Arc<Inner<S>>) {
    let answering = OnceLock::new();
    let service = service_fn(|request| {
        let inner = Arc::clone(&inner);
        let _ = answering.set(Answering::begin(&inner));
        Box::pin(async move { Ok::<_, std::convert::Infallible>(respond(&inner, request).await) })
    });
    let mut connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(REQUEST_TIME_MAX)
        .max_buf_size(HEAD_BYTES_MAX)
        .keep_alive(false)
        // A client may shut down its sending half and wait for the answer.
        .half_close(true)
        .serve_connection(TokioIo::new(stream), service);
    let result = poll_fn(|context| connection.poll_without_shutdown(context)).await;
    let mut stream = connection.into_parts().io.into_inner();
    match result {
        Err(error) if error.is_timeout() => {
            // No head arrived in time, for which hyper sends no answer.
            let text = format!("no request within {} s", REQUEST_TIME_MAX.as_secs());
            let refused = refusal_bytes(&Refusal::new(RefusalCode::Slow, text));
            let _ = stream.write_all(&refused).await;
        }
        Err(error) => tracing::debug!(%error, "a client of the control socket"),
        Ok(()) => {}
    }
    let _ = stream.shutdown().await;
    drop(answering);
    linger(&mut stream).await;
}

/// Executes a request and returns its answer or refusal.
async fn respond<S: Send + Sync>(
    inner: &Inner<S>,
    request: Request<Incoming>,
) -> Response<Full<Bytes>> {
    let path = request.uri().path().to_owned();
    let answer = match answer(inner, request).await {
        Ok(done) => Ok(done),
        Err(refusal) => {
            tracing::debug!(path, ?refusal, "control socket");
            Err(refusal)
        }
    };
    let allow = match &answer {
        Err(refusal) if refusal.code == RefusalCode::UnknownMethod => {
            HeaderValue::from_str(&inner.service.methods_of(&path)).ok()
        }
        _ => None,
    };
    let (status, content_type, body) = match answer {
        Ok(done) => (done.status, done.content_type, done.body),
        Err(refusal) => (refusal.code.status(), JSON, body_of(&refusal)),
    };
    let mut response = Response::new(Full::new(Bytes::from(body)));
    *response.status_mut() =
        StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    headers.insert(CONNECTION, HeaderValue::from_static("close"));
    if let Some(allow) = allow {
        headers.insert(ALLOW, allow);
    }
    response
}

async fn answer<S: Send + Sync>(inner: &Inner<S>, request: Request<Incoming>) -> Answer {
    let uri = request.uri();
    let route = inner.service.find(request.method().as_str(), uri.path())?;
    let change = match (uri.query(), route.until) {
        (None, _) => None,
        (Some(query), Some(until)) => Some(until(&inner.service.subject, query)?),
        (Some(_), None) => return Err(malformed("no parameters belong to this path")),
    };
    let body = body(request.into_body()).await?;
    if !route.takes_body && !body.is_empty() {
        return Err(malformed("no body belongs to this request"));
    }
    if let Some(change) = change {
        inner.wait_for(change).await?;
    }
    let receiver = inner.workers.carry_out(&inner.service, route, body)?;
    let answer = receiver
        .await
        .unwrap_or_else(|_| Err(Refusal::new(RefusalCode::Failed, "answering was given up")));
    check(route, &answer);
    answer
}

/// Checks that a function's answer conforms to its table entry, and thus to the documents.
fn check<S>(route: &Route<S>, answer: &Answer) {
    match answer {
        Ok(Done { status, .. }) => debug_assert_eq!(*status, route.status, "{}", route.path),
        Err(Refusal { code, .. }) => {
            debug_assert!(route.may_refuse(*code), "{}: {code:?}", route.path);
        }
    }
}

fn malformed(text: &str) -> Refusal {
    Refusal::new(RefusalCode::Malformed, text)
}

/// Reads the complete body of a request.
async fn body(body: Incoming) -> Result<Vec<u8>, Refusal> {
    let too_large = || {
        let text = format!("a body of more than {BODY_BYTES_MAX} bytes, the limit");
        Refusal::new(RefusalCode::TooLarge, text)
    };
    let announced = body.size_hint().lower();
    if usize::try_from(announced).map_or(true, |bytes| bytes > BODY_BYTES_MAX) {
        return Err(too_large());
    }
    let limited = Limited::new(body, BODY_BYTES_MAX).collect();
    match timeout(REQUEST_TIME_MAX, limited).await {
        Ok(Ok(collected)) => Ok(collected.to_bytes().to_vec()),
        Ok(Err(error)) if error.is::<LengthLimitError>() => Err(too_large()),
        Ok(Err(error)) => Err(malformed(&format!("the body broke off: {error}"))),
        Err(_) => {
            let text = format!("no whole body within {} s", REQUEST_TIME_MAX.as_secs());
            Err(Refusal::new(RefusalCode::Slow, text))
        }
    }
}
