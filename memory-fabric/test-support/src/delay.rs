//! A network with delayed answers: a proxy that holds back what the donor sends.

use fabric_wire::{AttachRequest, FrameKind, HEADER_BYTES, TrafficClass, decode_message};
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

/// Starts a proxy to `donor` that forwards each piece of its answers after this many microseconds.
/// It ends with the test's process.
pub fn delayed(donor: SocketAddr, delay_us: Arc<AtomicU64>) -> SocketAddr {
    proxy(donor, delay_us, true)
}

/// Starts a proxy that closes every measuring connection.
pub fn without_probes(donor: SocketAddr) -> SocketAddr {
    proxy(donor, Arc::default(), false)
}

fn proxy(donor: SocketAddr, delay_us: Arc<AtomicU64>, probes: bool) -> SocketAddr {
    let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a free port");
    let address = listener.local_addr().expect("bound");
    std::thread::spawn(move || {
        for client in listener.incoming().flatten() {
            let delay_us = Arc::clone(&delay_us);
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
                if !probes && is_probe(&first) || (&donor).write_all(&first).is_err() {
                    return;
                }
                std::thread::scope(|scope| {
                    scope.spawn(|| pass(&client, &donor, &AtomicU64::new(0)));
                    pass(&donor, &client, &delay_us);
                });
            });
        }
    });
    address
}

fn first_frame(mut client: &TcpStream) -> Option<Vec<u8>> {
    let mut frame = vec![0; HEADER_BYTES];
    client.read_exact(&mut frame).ok()?;
    let length = u32::from_le_bytes(frame[8..12].try_into().expect("four bytes"));
    frame.resize(HEADER_BYTES + length as usize, 0);
    client.read_exact(&mut frame[HEADER_BYTES..]).ok()?;
    Some(frame)
}

fn is_probe(frame: &[u8]) -> bool {
    let kind = FrameKind::Attach;
    let request = decode_message::<AttachRequest>(kind, &frame[HEADER_BYTES..]);
    frame[3] == kind as u8 && request.is_ok_and(|request| request.class == TrafficClass::Probe)
}

/// A line of constant delay: pieces do not wait for those before them.
fn pass(mut from: &TcpStream, to: &TcpStream, delay_us: &AtomicU64) {
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
            let delay = Duration::from_micros(delay_us.load(Ordering::SeqCst));
            let piece = bytes[..count].to_vec();
            if give.send((Instant::now() + delay, piece)).is_err() {
                break;
            }
        }
    });
}
