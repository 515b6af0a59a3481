//! TCP connections whose latency matters.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

use rustix::net::sockopt::set_tcp_nodelay;

/// Socket options of Linux 6.15 and later (`include/uapi/linux/tcp.h`).
const TCP_RTO_MIN_US: libc::c_int = 45;
const TCP_DELACK_MAX_US: libc::c_int = 46;

/// How long an acknowledgement waits at most for data to travel with, and a packet without one until
/// it is sent again at least, microseconds; the kernel's own are 200 ms each. The first that the
/// kernel takes: its least are two ticks of its clock, which may tick 100 times a second.
const TIMES_US: [[libc::c_int; 2]; 2] = [[5_000, 10_000], [20_000, 40_000]];

/// Prepares a TCP connection for small messages: each leaves at once, and where one is lost it is sent
/// again after 10 ms, or as long as round trips vary, instead of 200 ms. A kernel before 6.15 keeps its
/// own time, which its administrator can change.
///
/// # Errors
/// Fails when the descriptor is none of TCP.
pub fn prefer_latency(socket: impl AsFd) -> io::Result<()> {
    set_tcp_nodelay(&socket, true)?;
    for [acknowledge, send_again] in TIMES_US {
        // Without early acknowledgements, what is sent again soon was often not lost.
        let set = set(&socket, TCP_DELACK_MAX_US, acknowledge)
            .and_then(|()| set(&socket, TCP_RTO_MIN_US, send_again));
        if set.is_ok() {
            break;
        }
    }
    Ok(())
}

fn set(socket: impl AsFd, option: libc::c_int, value: libc::c_int) -> io::Result<()> {
    let socket = socket.as_fd().as_raw_fd();
    let size = libc::socklen_t::try_from(size_of_val(&value)).map_err(io::Error::other)?;
    // SAFETY: the kernel reads `size` bytes of the value, which outlives the call.
    let result = unsafe {
        libc::setsockopt(
            socket,
            libc::IPPROTO_TCP,
            option,
            (&raw const value).cast(),
            size,
        )
    };
    match result {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::sockopt::tcp_nodelay;
    use rustix::net::{AddressFamily, SocketType, socket};

    fn get(socket: impl AsFd, option: libc::c_int) -> io::Result<libc::c_int> {
        let mut value: libc::c_int = 0;
        let mut size = libc::socklen_t::try_from(size_of_val(&value)).expect("a size");
        // SAFETY: the kernel writes `size` bytes of the value at most, and both outlive the call.
        let result = unsafe {
            libc::getsockopt(
                socket.as_fd().as_raw_fd(),
                libc::IPPROTO_TCP,
                option,
                (&raw mut value).cast(),
                &raw mut size,
            )
        };
        match result {
            0 => Ok(value),
            _ => Err(io::Error::last_os_error()),
        }
    }

    #[test]
    fn a_lost_packet_is_sent_again_soon_and_acknowledged_sooner() {
        let socket = socket(AddressFamily::INET, SocketType::STREAM, None).expect("a socket");
        let before = get(&socket, TCP_RTO_MIN_US);
        prefer_latency(&socket).expect("TCP");
        assert!(tcp_nodelay(&socket).expect("TCP"));
        let Ok(before) = before else {
            println!("SKIPPED: Linux before 6.15 has no such option");
            return;
        };
        let send_again = get(&socket, TCP_RTO_MIN_US).expect("it is there");
        let acknowledge = get(&socket, TCP_DELACK_MAX_US).expect("it is there");
        assert!(
            acknowledge < send_again && send_again < before && send_again <= 48_000,
            "{acknowledge} us, {send_again} us, {before} us before"
        );
    }

    #[test]
    fn what_is_not_tcp_is_refused() {
        let socket = socket(AddressFamily::INET, SocketType::DGRAM, None).expect("a socket");
        assert!(prefer_latency(&socket).is_err());
    }
}
