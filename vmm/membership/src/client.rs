//! Requests to the JSON gateway of an etcd, by HTTP/1.1: one connection that is used again, to the
//! endpoint that answered last.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper::header::{CONTENT_TYPE, HOST};
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use rustls::pki_types::ServerName;
use serde_json::Value;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

use crate::error::{EtcdError, quoted};
use crate::target::{Endpoint, Endpoints, host_port};

/// Deadline of one request to one endpoint, with connecting. An election of etcd takes one to two.
pub(crate) const ATTEMPT_TIME_MAX: Duration = Duration::from_secs(3);
/// Largest answer, and largest line of a stream: a page of a list whose entries are all as large as
/// etcd accepts (1.5 MiB, in base64).
pub(crate) const ANSWER_BYTES_MAX: usize = 40 << 20;

/// Largest other answer.
const SHORT_BYTES_MAX: usize = 64 << 10;
/// The request for a list.
pub(crate) const RANGE: &str = "/v3/kv/range";

/// Asks an etcd. Answers are bounded in time and size.
#[derive(Debug)]
pub(crate) struct Client {
    endpoints: Endpoints,
    /// The endpoint that is asked first.
    current: usize,
    sender: Option<SendRequest<Full<Bytes>>>,
}

/// Lines of a streamed answer.
#[derive(Debug)]
pub(crate) struct Lines {
    endpoint: String,
    body: Incoming,
    buffer: Vec<u8>,
    /// Bytes of `buffer` that have no end of a line.
    searched: usize,
    /// Keeps the connection.
    _sender: SendRequest<Full<Bytes>>,
}

impl Client {
    pub(crate) fn new(endpoints: &Endpoints) -> Self {
        Self {
            endpoints: endpoints.clone(),
            current: 0,
            sender: None,
        }
    }

    pub(crate) const fn endpoints(&self) -> &Endpoints {
        &self.endpoints
    }

    /// Returns the name of the endpoint that is asked.
    pub(crate) fn endpoint(&self) -> &str {
        &self.endpoints.all[self.current].name
    }

    pub(crate) fn malformed(&self, what: &str) -> EtcdError {
        EtcdError::Malformed {
            endpoint: self.endpoint().to_owned(),
            what: quoted(what),
        }
    }

    /// Sends a request, and returns the whole answer. Each endpoint is tried once.
    pub(crate) async fn post(&mut self, path: &str, body: &Value) -> Result<Value, EtcdError> {
        let mut tries = self.endpoints.all.len();
        loop {
            tries -= 1;
            let outcome = match timeout(ATTEMPT_TIME_MAX, self.attempt(path, body)).await {
                Ok(outcome) => outcome,
                Err(_) => Err(self.silent()),
            };
            match outcome {
                Ok((200, answer)) => return Ok(answer),
                // A server without a leader, or that is overloaded; others may do better.
                Ok((500.., _)) | Err(_) if tries > 0 => self.turn_to_next(),
                Ok((status, answer)) => {
                    return Err(EtcdError::Refused {
                        endpoint: self.endpoint().to_owned(),
                        message: refusal_text(status, &answer),
                    });
                }
                Err(error) => {
                    self.turn_to_next();
                    return Err(error);
                }
            }
        }
    }

    /// Sends a request on a connection of its own, whose answer has a line for each event.
    pub(crate) async fn stream(&self, path: &str, body: &Value) -> Result<Lines, EtcdError> {
        let opened = async {
            let endpoint = &self.endpoints.all[self.current];
            let mut sender = self.connected(endpoint).await?;
            let answer = self.send(&mut sender, path, body).await?;
            Ok((sender, answer))
        };
        let opened = timeout(ATTEMPT_TIME_MAX, opened).await;
        let (sender, answer) = opened.map_err(|_| self.silent())??;
        if answer.status() != 200 {
            return Err(EtcdError::Refused {
                endpoint: self.endpoint().to_owned(),
                message: format!("HTTP {}", answer.status().as_u16()),
            });
        }
        Ok(Lines {
            endpoint: self.endpoint().to_owned(),
            body: answer.into_body(),
            buffer: Vec::new(),
            searched: 0,
            _sender: sender,
        })
    }

    fn turn_to_next(&mut self) {
        self.sender = None;
        self.current = (self.current + 1) % self.endpoints.all.len();
    }

    fn silent(&self) -> EtcdError {
        self.unreachable(&format!(
            "no answer within {} s",
            ATTEMPT_TIME_MAX.as_secs()
        ))
    }

    fn unreachable(&self, reason: &str) -> EtcdError {
        EtcdError::Unreachable {
            endpoint: self.endpoint().to_owned(),
            reason: quoted(reason),
        }
    }

    /// Returns the status and the answer of the current endpoint.
    async fn attempt(&mut self, path: &str, body: &Value) -> Result<(u16, Value), EtcdError> {
        let mut sender = match self.sender.take() {
            Some(sender) if !sender.is_closed() => sender,
            _ => {
                let endpoint = &self.endpoints.all[self.current];
                self.connected(endpoint).await?
            }
        };
        let answer = self.send(&mut sender, path, body).await?;
        let status = answer.status().as_u16();
        let limit = match path {
            RANGE => ANSWER_BYTES_MAX,
            _ => SHORT_BYTES_MAX,
        };
        let whole = Limited::new(answer.into_body(), limit).collect();
        let whole = whole.await;
        let whole = whole.map_err(|error| self.malformed(&error.to_string()))?;
        self.sender = Some(sender);
        let bytes = whole.to_bytes();
        match serde_json::from_slice(&bytes) {
            Ok(answer) => Ok((status, answer)),
            // What is no etcd.
            Err(_) if status != 200 => Ok((status, Value::Null)),
            Err(error) => Err(self.malformed(&error.to_string())),
        }
    }

    async fn send(
        &self,
        sender: &mut SendRequest<Full<Bytes>>,
        path: &str,
        body: &Value,
    ) -> Result<Response<Incoming>, EtcdError> {
        let request = Request::post(path)
            .header(HOST, self.endpoint())
            .header(CONTENT_TYPE, "application/json")
            .body(Full::new(Bytes::from(body.to_string())));
        let request = request.map_err(|error| self.malformed(&error.to_string()))?;
        let failed = |error: hyper::Error| self.unreachable(&chain(&error));
        sender.ready().await.map_err(failed)?;
        sender.send_request(request).await.map_err(failed)
    }

    async fn connected(&self, endpoint: &Endpoint) -> Result<SendRequest<Full<Bytes>>, EtcdError> {
        let none = std::io::Error::from(std::io::ErrorKind::AddrNotAvailable);
        let mut first = None;
        let count = u32::try_from(endpoint.addresses.len()).unwrap_or(u32::MAX);
        let each = ATTEMPT_TIME_MAX / count.max(1);
        for &address in &endpoint.addresses {
            let reached = timeout(each, self.connected_to(endpoint, address)).await;
            match reached.unwrap_or_else(|_| Err(self.silent())) {
                Ok(sender) => return Ok(sender),
                Err(error) => first = first.or(Some(error)),
            }
        }
        Err(first.unwrap_or_else(|| self.unreachable(&none.to_string())))
    }

    async fn connected_to(
        &self,
        endpoint: &Endpoint,
        address: SocketAddr,
    ) -> Result<SendRequest<Full<Bytes>>, EtcdError> {
        let failed = |error: std::io::Error| self.unreachable(&chain(&error));
        let stream = TcpStream::connect(address).await.map_err(failed)?;
        // Requests are small, and waited for.
        stream.set_nodelay(true).map_err(failed)?;
        let Some(tls) = &self.endpoints.tls else {
            return self.speak(stream).await;
        };
        let host = host_port(&endpoint.name).map(|(host, _)| host.to_owned());
        let name = ServerName::try_from(host.unwrap_or_default());
        let name = name.map_err(|error| self.unreachable(&error.to_string()))?;
        let connector = TlsConnector::from(Arc::clone(&tls.0));
        let stream = connector.connect(name, stream).await.map_err(failed)?;
        self.speak(stream).await
    }

    async fn speak(
        &self,
        stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    ) -> Result<SendRequest<Full<Bytes>>, EtcdError> {
        let made = handshake(TokioIo::new(stream)).await;
        let (sender, connection) = made.map_err(|error| self.unreachable(&chain(&error)))?;
        // It ends with its sender, and its error is that of the request.
        tokio::spawn(connection);
        Ok(sender)
    }
}

impl Lines {
    /// Returns the name of the endpoint that sends them.
    pub(crate) fn endpoint(&self) -> &str {
        &self.endpoint
    }

    /// Returns the next line, however long that takes; dropping the future loses nothing.
    pub(crate) async fn next(&mut self) -> Result<Value, EtcdError> {
        loop {
            let rest = &self.buffer[self.searched..];
            if let Some(at) = rest.iter().position(|&byte| byte == b'\n') {
                let line: Vec<u8> = self.buffer.drain(..=self.searched + at).collect();
                self.searched = 0;
                let read = serde_json::from_slice(&line);
                return read.map_err(|error| self.malformed(&error.to_string()));
            }
            self.searched = self.buffer.len();
            if self.buffer.len() > ANSWER_BYTES_MAX {
                return Err(self.malformed("a line is too long"));
            }
            match self.body.frame().await {
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        self.buffer.extend_from_slice(&data);
                    }
                }
                Some(Err(error)) => return Err(self.ended(&chain(&error))),
                None => return Err(self.ended("it ended the stream of changes")),
            }
        }
    }

    fn ended(&self, reason: &str) -> EtcdError {
        EtcdError::Unreachable {
            endpoint: self.endpoint.clone(),
            reason: quoted(reason),
        }
    }

    pub(crate) fn malformed(&self, what: &str) -> EtcdError {
        EtcdError::Malformed {
            endpoint: self.endpoint.clone(),
            what: quoted(what),
        }
    }
}

/// Returns what etcd says of a refusal.
fn refusal_text(status: u16, answer: &Value) -> String {
    let text = answer["message"].as_str().or(answer["error"].as_str());
    match text {
        Some(text) => quoted(text),
        None => format!("HTTP {status}"),
    }
}

/// Returns an error with its causes.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        source = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::target::Target;
    use serde_json::json;
    use socket2::{Domain, Socket, Type};
    use std::io::{Read as _, Write as _};
    use std::net::{Ipv4Addr, TcpListener};

    /// Answers one request.
    fn answer_one(listener: &TcpListener) {
        let (mut stream, _) = listener.accept().expect("a client");
        let mut seen = Vec::new();
        let mut some = [0; 1024];
        while !seen.ends_with(b"{}") {
            let count = stream.read(&mut some).expect("a request");
            assert_ne!(count, 0, "{}", String::from_utf8_lossy(&seen));
            seen.extend(&some[..count]);
        }
        let answer = b"HTTP/1.1 200 OK\r\ncontent-length: 8\r\n\r\n{\"a\": 1}";
        stream.write_all(answer).expect("a client");
    }

    #[test]
    fn an_address_that_packets_do_not_reach_leaves_time_for_the_next() {
        // It has room for one connection, and the kernel drops packets for others.
        let silent = Socket::new(Domain::IPV4, Type::STREAM, None).expect("a socket");
        let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        silent.bind(&any.into()).expect("a free port");
        silent.listen(0).expect("a port");
        let unreached = silent.local_addr().expect("bound");
        let unreached = unreached.as_socket().expect("of IP");
        let _first = std::net::TcpStream::connect(unreached).expect("there is room");
        let listener = TcpListener::bind(any).expect("a free port");
        let target: Target = "etcd://127.0.0.1:1".parse().expect("an address");
        let endpoints = Endpoints {
            target,
            all: vec![Endpoint {
                name: "etcd:1".to_owned(),
                addresses: vec![unreached, listener.local_addr().expect("bound")],
            }],
            tls: None,
        };
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("a runtime");
        // Left behind if it is not asked.
        let answering = std::thread::spawn(move || answer_one(&listener));
        let mut client = Client::new(&endpoints);
        let answer = runtime.block_on(client.post(RANGE, &json!({})));
        assert_eq!(answer.expect("an answer"), json!({"a": 1}));
        answering.join().expect("it has answered");
    }
}
