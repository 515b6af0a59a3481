//! A network that splits, delays and cuts, on the level of bytes.

use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// What the network does with the bytes of a connection.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Faults {
    /// Bytes of both directions after which a connection is cut, on average; 0 for never.
    pub(super) cut_after: u64,
    /// Most bytes that are passed on at once; 0 for all that came.
    pub(super) split: usize,
    /// One in so many reads is delayed by a millisecond; 0 for none.
    pub(super) delayed: u64,
}

#[derive(Debug)]
struct Shared {
    target: SocketAddr,
    faults: Faults,
    random: AtomicU64,
    cuts: AtomicU32,
    /// Bytes are swallowed, and connections stay open.
    is_silent: AtomicBool,
    /// Connections are refused.
    is_closed: AtomicBool,
    streams: Mutex<Vec<TcpStream>>,
}

/// A network in front of one listener.
#[derive(Clone, Debug)]
pub(super) struct Network {
    pub(super) address: SocketAddr,
    shared: Arc<Shared>,
}

impl Network {
    pub(super) fn new(target: SocketAddr, faults: Faults, seed: u64) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a free port");
        let address = listener.local_addr().expect("bound");
        let shared = Arc::new(Shared {
            target,
            faults,
            random: AtomicU64::new(seed | 1),
            cuts: AtomicU32::new(0),
            is_silent: AtomicBool::new(false),
            is_closed: AtomicBool::new(false),
            streams: Mutex::default(),
        });
        let accepting = Arc::clone(&shared);
        // Ends with the test's process.
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let shared = Arc::clone(&accepting);
                if !shared.is_closed.load(Ordering::SeqCst) {
                    std::thread::spawn(move || shared.pass(client));
                }
            }
        });
        Self { address, shared }
    }

    /// Connections that the network cut by itself.
    pub(super) fn cuts(&self) -> u32 {
        self.shared.cuts.load(Ordering::SeqCst)
    }

    /// Swallows all bytes on the connections that there are, and those that are made.
    pub(super) fn silence(&self, is_silent: bool) {
        self.shared.is_silent.store(is_silent, Ordering::SeqCst);
    }

    /// Cuts all connections, and refuses new ones while `is_closed`.
    pub(super) fn close(&self, is_closed: bool) {
        self.shared.is_closed.store(is_closed, Ordering::SeqCst);
        for stream in self.shared.streams.lock().expect("no panic").drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

impl Shared {
    fn random(&self) -> u64 {
        let step = |value: u64| {
            let value = value ^ value << 13;
            let value = value ^ value >> 7;
            Some(value ^ value << 17)
        };
        let drawn = self
            .random
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, step);
        drawn.unwrap_or_else(|value| value)
    }

    fn pass(&self, client: TcpStream) {
        let Ok(server) = TcpStream::connect(self.target) else {
            return;
        };
        for stream in [&client, &server] {
            stream.set_nodelay(true).expect("a socket");
            let clone = stream.try_clone().expect("descriptors");
            self.streams.lock().expect("no panic").push(clone);
        }
        let mean = self.faults.cut_after;
        let left = AtomicU64::new(match mean {
            0 => u64::MAX,
            _ => self.random() % (2 * mean),
        });
        std::thread::scope(|scope| {
            scope.spawn(|| self.copy(&client, &server, &left));
            self.copy(&server, &client, &left);
        });
    }

    fn copy(&self, mut from: &TcpStream, mut to: &TcpStream, left: &AtomicU64) {
        let mut buffer = vec![0; 64 << 10];
        let mut pass = || -> io::Result<()> {
            loop {
                let most = match self.faults.split {
                    0 => buffer.len(),
                    most => 1 + usize::try_from(self.random()).unwrap_or(0) % most,
                };
                let count = from.read(&mut buffer[..most])?;
                if count == 0 {
                    return Ok(());
                }
                if self.is_silent.load(Ordering::SeqCst) {
                    continue;
                }
                if self.faults.delayed > 0 && self.random().is_multiple_of(self.faults.delayed) {
                    // This is the injected delay.
                    std::thread::sleep(Duration::from_millis(1));
                }
                let take = |left: u64| left.checked_sub(count as u64);
                if left
                    .fetch_update(Ordering::SeqCst, Ordering::SeqCst, take)
                    .is_err()
                {
                    // Part of what came is passed on, and the rest lost.
                    let part = usize::try_from(left.swap(0, Ordering::SeqCst)).unwrap_or(0);
                    to.write_all(&buffer[..part.min(count)])?;
                    self.cuts.fetch_add(1, Ordering::SeqCst);
                    return Ok(());
                }
                to.write_all(&buffer[..count])?;
            }
        };
        let _ = pass();
        let _ = from.shutdown(Shutdown::Both);
        let _ = to.shutdown(Shutdown::Both);
    }
}
