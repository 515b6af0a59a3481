//! A network with delayed answers: a proxy that holds back what the donor sends.

use fabric_wire::{AttachRequest, FrameKind, HEADER_BYTES, TrafficClass, decode_message};
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

/// Starts a proxy to `donor` that forwards each piece of its answers after this many microseconds.
/// It ends with the test's process.
pub fn delayed(donor: SocketAddr, delay_us: Arc<AtomicU64>) -> SocketAddr {
    proxy(donor, delay_us, true, Arc::default())
}

/// Holds back what a donor answers on its bulk connections.
#[derive(Default)]
pub struct Snare {
    is_armed: AtomicBool,
    has_sprung: AtomicBool,
}

impl Snare {
    /// Passes no answer from the next page on that is to be written.
    pub fn arm(&self) {
        self.is_armed.store(true, Ordering::SeqCst);
    }

    /// Returns whether a page has come since then, which the donor may have.
    pub fn has_sprung(&self) -> bool {
        self.has_sprung.load(Ordering::SeqCst)
    }

    fn take(&self, bytes: &[u8], requests: &mut Requests) {
        if requests.have_page(bytes) && self.is_armed.load(Ordering::SeqCst) {
            self.has_sprung.store(true, Ordering::SeqCst);
        }
    }
}

/// What comes on a connection after its first frame.
#[derive(Default)]
struct Requests {
    header: Vec<u8>,
    /// Bytes of a payload that have not come yet.
    left: usize,
}

impl Requests {
    /// Takes the bytes that come next. Returns whether a page to be written begins in them.
    fn have_page(&mut self, mut bytes: &[u8]) -> bool {
        let mut have_page = false;
        while !bytes.is_empty() {
            let payload = self.left.min(bytes.len());
            self.left -= payload;
            bytes = &bytes[payload..];
            let header = (HEADER_BYTES - self.header.len()).min(bytes.len());
            self.header.extend(&bytes[..header]);
            bytes = &bytes[header..];
            if self.header.len() == HEADER_BYTES {
                have_page |= self.header[3] == FrameKind::WritePage as u8;
                self.left = payload_of(&self.header);
                self.header.clear();
            }
        }
        have_page
    }
}

fn payload_of(header: &[u8]) -> usize {
    let length = u32::from_le_bytes(header[8..12].try_into().expect("four bytes"));
    length as usize
}

/// Like [`delayed`], with a snare for bulk connections.
pub fn snared(donor: SocketAddr, delay_us: Arc<AtomicU64>, snare: Arc<Snare>) -> SocketAddr {
    proxy(donor, delay_us, true, snare)
}

/// Starts a proxy that closes every measuring connection.
pub fn without_probes(donor: SocketAddr) -> SocketAddr {
    proxy(donor, Arc::default(), false, Arc::default())
}

fn proxy(
    donor: SocketAddr,
    delay_us: Arc<AtomicU64>,
    probes: bool,
    snare: Arc<Snare>,
) -> SocketAddr {
    let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a free port");
    let address = listener.local_addr().expect("bound");
    std::thread::spawn(move || {
        for client in listener.incoming().flatten() {
            let (delay_us, snare) = (Arc::clone(&delay_us), Arc::clone(&snare));
            std::thread::spawn(move || {
                let Ok(donor) = TcpStream::connect(donor) else {
                    return;
                };
                for stream in [&client, &donor] {
                    stream.set_nodelay(true).expect("a socket");
                }
                let Some(first) = first_frame(&client) else {
                    return;
                };
                let class = class_of(&first);
                let is_refused = !probes && class == Some(TrafficClass::Probe);
                if is_refused || (&donor).write_all(&first).is_err() {
                    return;
                }
                let is_bulk = class == Some(TrafficClass::Bulk);
                let mut requests = Requests::default();
                let mut take = |bytes: &[u8]| {
                    if is_bulk {
                        snare.take(bytes, &mut requests);
                    }
                    true
                };
                let is_passed = |_: &[u8]| !is_bulk || !snare.has_sprung();
                std::thread::scope(|scope| {
                    scope.spawn(|| pass(&client, &donor, &AtomicU64::new(0), &mut take));
                    pass(&donor, &client, &delay_us, is_passed);
                });
            });
        }
    });
    address
}

fn first_frame(mut client: &TcpStream) -> Option<Vec<u8>> {
    let mut frame = vec![0; HEADER_BYTES];
    client.read_exact(&mut frame).ok()?;
    frame.resize(HEADER_BYTES + payload_of(&frame), 0);
    client.read_exact(&mut frame[HEADER_BYTES..]).ok()?;
    Some(frame)
}

/// The class of a connection that begins with this frame, if it is one for pages.
fn class_of(frame: &[u8]) -> Option<TrafficClass> {
    let kind = FrameKind::Attach;
    if frame[3] != kind as u8 {
        return None;
    }
    let request = decode_message::<AttachRequest>(kind, &frame[HEADER_BYTES..]);
    request.ok().map(|request| request.class)
}

/// A line of constant delay: pieces do not wait for those before them. Those that are not passed
/// are lost.
fn pass(
    mut from: &TcpStream,
    to: &TcpStream,
    delay_us: &AtomicU64,
    mut is_passed: impl FnMut(&[u8]) -> bool,
) {
    std::thread::scope(|scope| {
        let (give, line) = channel::<(Instant, Vec<u8>)>();
        scope.spawn(move || {
            let mut to = to;
            for (due, bytes) in line {
                let left = due.saturating_duration_since(Instant::now());
                if !left.is_zero() {
                    // This is the simulated delay.
                    std::thread::sleep(left);
                }
                if to.write_all(&bytes).is_err() {
                    break;
                }
            }
            // The reader of `from` ends too.
            let _ = from.shutdown(Shutdown::Both);
            let _ = to.shutdown(Shutdown::Both);
        });
        let mut bytes = vec![0; 256 << 10];
        while let Ok(count @ 1..) = from.read(&mut bytes) {
            if !is_passed(&bytes[..count]) {
                continue;
            }
            let delay = Duration::from_micros(delay_us.load(Ordering::SeqCst));
            let piece = bytes[..count].to_vec();
            if give.send((Instant::now() + delay, piece)).is_err() {
                break;
            }
        }
    });
}
