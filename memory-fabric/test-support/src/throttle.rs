//! A slow network: a proxy that limits the rate of one full-duplex link, which all its connections
//! share.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Bytes forwarded at once: urgent traffic waits at most for this much other traffic.
const CHUNK_BYTES: usize = 2048;

/// One direction of the link, with the time when it becomes free.
#[derive(Debug)]
struct Lane {
    /// The bits of a float, since there is no atomic float.
    bytes_a_second: AtomicU64,
    free_at: Mutex<Instant>,
}

impl Lane {
    fn new(bytes_a_second: f64) -> Self {
        Self {
            bytes_a_second: AtomicU64::new(bytes_a_second.to_bits()),
            free_at: Mutex::new(Instant::now()),
        }
    }

    /// Occupies the link for the duration of this many bytes.
    fn carry(&self, bytes: usize) {
        let rate = f64::from_bits(self.bytes_a_second.load(Ordering::Relaxed));
        let time = Duration::from_secs_f64(bytes as f64 / rate);
        let until = {
            let mut free_at = self.free_at.lock().unwrap();
            *free_at = (*free_at).max(Instant::now()) + time;
            *free_at
        };
        std::thread::sleep(until.saturating_duration_since(Instant::now()));
    }

    fn pass(&self, mut from: &TcpStream, mut to: &TcpStream) {
        let mut bytes = [0; CHUNK_BYTES];
        loop {
            match from.read(&mut bytes) {
                Ok(0) | Err(_) => break,
                Ok(count) => {
                    self.carry(count);
                    if to.write_all(&bytes[..count]).is_err() {
                        break;
                    }
                }
            }
        }
        let _ = from.shutdown(Shutdown::Both);
        let _ = to.shutdown(Shutdown::Both);
    }
}

/// Starts a proxy with a fixed rate and returns its address. It ends with the test's process.
pub fn throttled(donor: SocketAddr, mbit_a_second: f64) -> SocketAddr {
    Throttle::new(donor, mbit_a_second * 1e6 / 8.0).address
}

/// A link whose rate can change during use.
pub struct Throttle {
    pub address: SocketAddr,
    lanes: Arc<[Lane; 2]>,
}

impl Throttle {
    /// Starts a proxy to the donor. It ends with the test's process.
    pub fn new(donor: SocketAddr, bytes_a_second: f64) -> Self {
        let lanes = Arc::new([Lane::new(bytes_a_second), Lane::new(bytes_a_second)]);
        Self {
            address: listen(donor, Arc::clone(&lanes)),
            lanes,
        }
    }

    /// Sets the rate of both directions.
    pub fn set_rate(&self, bytes_a_second: f64) {
        for lane in self.lanes.iter() {
            let bits = bytes_a_second.to_bits();
            lane.bytes_a_second.store(bits, Ordering::Relaxed);
        }
    }
}

fn listen(donor: SocketAddr, lanes: Arc<[Lane; 2]>) -> SocketAddr {
    let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a free port");
    let address = listener.local_addr().expect("bound");
    std::thread::spawn(move || {
        for client in listener.incoming().flatten() {
            let lanes = Arc::clone(&lanes);
            std::thread::spawn(move || {
                let Ok(donor) = TcpStream::connect(donor) else {
                    return;
                };
                for stream in [&client, &donor] {
                    stream.set_nodelay(true).expect("a socket");
                }
                std::thread::scope(|scope| {
                    scope.spawn(|| lanes[0].pass(&client, &donor));
                    lanes[1].pass(&donor, &client);
                });
            });
        }
    });
    address
}
