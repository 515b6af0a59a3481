//! A relay that makes messages old.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::vm::{EPOCH, OLD_EPOCH};

/// Starts a relay to the hostile member. Whatever that sends is of the old epoch from the time on when the
/// relay is told so.
pub(super) fn relay(to: SocketAddr, is_old: &Arc<AtomicBool>) -> SocketAddr {
    let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a port");
    let address = listener.local_addr().expect("bound");
    let is_old = Arc::clone(is_old);
    std::thread::spawn(move || {
        for near in listener.incoming().flatten() {
            let Ok(far) = TcpStream::connect(to) else {
                continue;
            };
            let (Ok(from), Ok(to)) = (near.try_clone(), far.try_clone()) else {
                continue;
            };
            let never = Arc::default();
            let is_old = Arc::clone(&is_old);
            std::thread::spawn(move || pass(from, to, &never));
            std::thread::spawn(move || pass(far, near, &is_old));
        }
    });
    address
}

/// Passes on one direction of a connection.
fn pass(mut from: TcpStream, mut to: TcpStream, is_old: &Arc<AtomicBool>) {
    let _ = to.set_nodelay(true);
    let epoch = EPOCH.to_le_bytes();
    let mut part = [0; 16 << 10];
    while let Ok(count @ 1..) = from.read(&mut part) {
        let part = &mut part[..count];
        if is_old.load(Ordering::Relaxed)
            && let Some(at) = part.windows(4).position(|bytes| bytes == epoch)
        {
            part[at..at + 4].copy_from_slice(&OLD_EPOCH.to_le_bytes());
        }
        if to.write_all(part).is_err() {
            break;
        }
    }
    for end in [&from, &to] {
        let _ = end.shutdown(std::net::Shutdown::Both);
    }
}
