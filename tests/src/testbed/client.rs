//! Client of a host's agent.

use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use testbed_agent::{Kind, Request};

use super::TestbedError;

/// QEMU itself accepts connections to the forwarded port, so connecting succeeds at once or never.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Interval of heartbeat requests.
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(1);
/// Silence after which a host counts as hung. A busy emulated host needs some seconds to schedule
/// its agent.
const HEARTBEAT_SILENCE_MAX: Duration = Duration::from_secs(30);

/// Address of a host's agent, and the time of its last answer.
#[derive(Clone, Debug)]
pub struct Endpoint {
    /// Number of the host.
    pub host: usize,
    /// The port on 127.0.0.1 that leads to the agent.
    pub port: u16,
    /// Path of the host's console log.
    pub log: PathBuf,
    health: Arc<Health>,
}

#[derive(Debug)]
struct Health {
    start: Instant,
    /// Milliseconds from `start` to the last answer.
    last_ms: AtomicU64,
    /// The longest time between two answers, in milliseconds.
    longest_ms: AtomicU64,
}

/// For how long a host's agent has not answered its heartbeat.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Silence {
    /// Time since the last answer.
    pub now: Duration,
    /// The longest time between two answers, or since the last one.
    pub longest: Duration,
}

impl Endpoint {
    /// Creates an endpoint without sending anything.
    pub fn new(host: usize, port: u16, log: PathBuf) -> Self {
        let health = Health {
            start: Instant::now(),
            last_ms: AtomicU64::new(0),
            longest_ms: AtomicU64::new(0),
        };
        Self {
            host,
            port,
            log,
            health: Arc::new(health),
        }
    }

    /// Connects and sends a request.
    pub fn request(&self, request: &Request) -> Result<TcpStream, TestbedError> {
        self.try_request(request).map_err(|e| self.broken(&e))
    }

    fn try_request(&self, request: &Request) -> io::Result<TcpStream> {
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, self.port));
        let mut stream = TcpStream::connect_timeout(&address, CONNECT_TIMEOUT)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(HEARTBEAT_SILENCE_MAX))?;
        stream.set_write_timeout(Some(HEARTBEAT_SILENCE_MAX))?;
        let payload = serde_json::to_vec(request)?;
        testbed_agent::write_frame(&mut stream, Kind::Request, &payload)?;
        Ok(stream)
    }

    /// Sends a request that is answered with one frame.
    pub fn exchange(&self, request: &Request) -> Result<(), TestbedError> {
        let mut stream = self.request(request)?;
        self.expect(&mut stream, Kind::Done)
    }

    /// Reads a frame that must be of this kind.
    pub fn expect(&self, stream: &mut TcpStream, wanted: Kind) -> Result<(), TestbedError> {
        match testbed_agent::read_frame(stream) {
            Ok((kind, _)) if kind == wanted => Ok(()),
            Ok((Kind::Error, text)) => Err(self.refused(&String::from_utf8_lossy(&text))),
            Ok((kind, _)) => Err(self.refused(&format!("unexpected answer {kind:?}"))),
            Err(error) => Err(self.broken(&error)),
        }
    }

    /// Returns an error with the agent's reason.
    pub fn refused(&self, reason: &str) -> TestbedError {
        TestbedError::Agent {
            host: self.host,
            reason: reason.to_owned(),
        }
    }

    /// Returns the error of a broken connection, or of a hung host if the host counts as hung.
    pub fn broken(&self, error: &io::Error) -> TestbedError {
        match self.check() {
            Err(hung) => hung,
            Ok(()) => self.refused(&error.to_string()),
        }
    }

    /// Fails when the host counts as hung.
    pub fn check(&self) -> Result<(), TestbedError> {
        let silent = self.silence().now;
        if silent <= HEARTBEAT_SILENCE_MAX {
            return Ok(());
        }
        let log = self.log.display().to_string();
        Err(TestbedError::HostHung {
            host: self.host,
            silent,
            log,
        })
    }

    /// Returns for how long the agent has not answered.
    pub fn silence(&self) -> Silence {
        let last = Duration::from_millis(self.health.last_ms.load(Ordering::Relaxed));
        let longest = Duration::from_millis(self.health.longest_ms.load(Ordering::Relaxed));
        let now = self.health.start.elapsed().saturating_sub(last);
        Silence {
            now,
            longest: longest.max(now),
        }
    }

    /// Pings the agent once, waiting no longer than `timeout`.
    pub fn ping(&self, timeout: Duration) -> io::Result<TcpStream> {
        let mut stream = self.try_request(&Request::Ping)?;
        stream.set_read_timeout(Some(timeout))?;
        match testbed_agent::read_frame(&mut stream)?.0 {
            Kind::Pong => {
                self.beat();
                Ok(stream)
            }
            other => Err(io::Error::other(format!("unexpected answer {other:?}"))),
        }
    }

    /// Forgets the longest silence so far.
    pub fn forget_silence(&self) {
        // Relaxed: a count that is compared with later ones of the same host.
        self.health.longest_ms.store(0, Ordering::Relaxed);
    }

    fn beat(&self) {
        let ms = u64::try_from(self.health.start.elapsed().as_millis()).unwrap_or(u64::MAX);
        // Relaxed: one thread writes at a time, and readers need no order between the two.
        let last = self.health.last_ms.swap(ms, Ordering::Relaxed);
        // The host boots before its first answer.
        if last > 0 {
            let silent = ms.saturating_sub(last);
            self.health.longest_ms.fetch_max(silent, Ordering::Relaxed);
        }
    }
}

/// A thread that polls a host for signs of life; it stops on drop.
#[derive(Debug)]
pub struct Heartbeat {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Heartbeat {
    /// Starts on a connection that [`Endpoint::ping`] opened.
    pub fn start(endpoint: Endpoint, mut stream: TcpStream) -> io::Result<Self> {
        let (stop, stopped) = mpsc::channel();
        stream.set_read_timeout(Some(HEARTBEAT_INTERVAL))?;
        let thread = std::thread::Builder::new()
            .name(format!("heart{}", endpoint.host))
            .spawn(move || {
                let mut awaiting = false;
                while let Err(RecvTimeoutError::Timeout) = stopped.recv_timeout(HEARTBEAT_INTERVAL)
                {
                    if !awaiting
                        && testbed_agent::write_frame(&mut stream, Kind::Ping, &[]).is_err()
                    {
                        return;
                    }
                    // A late answer is not a lost one, so a timeout continues waiting.
                    match testbed_agent::read_frame(&mut stream) {
                        Ok(_) => {
                            awaiting = false;
                            endpoint.beat();
                        }
                        Err(e)
                            if matches!(
                                e.kind(),
                                io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut
                            ) =>
                        {
                            awaiting = true;
                        }
                        Err(_) => return,
                    }
                }
            })?;
        Ok(Self {
            stop: Some(stop),
            thread: Some(thread),
        })
    }
}

impl Drop for Heartbeat {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
