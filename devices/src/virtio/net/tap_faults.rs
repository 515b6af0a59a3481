//! Reports errors of a tap, each kind once.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};

/// The kind of an error of a tap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TapFault {
    /// The interface is down.
    Down,
    /// It was deleted; the descriptor stays open and useless.
    Gone,
    /// It refuses a packet, or another error.
    Other,
}

impl TapFault {
    /// Follows drivers/net/tun.c of Linux.
    fn of(error: &io::Error) -> Self {
        match error.raw_os_error() {
            Some(libc::EIO) => Self::Down,
            Some(libc::EBADFD) => Self::Gone,
            _ => Self::Other,
        }
    }
}

/// Which kinds were reported for a tap. Relaxed: nothing depends on it.
#[derive(Debug, Default)]
pub(super) struct ReportedFaults([AtomicBool; 3]);

impl ReportedFaults {
    /// Whether this kind was reported before.
    #[cfg(test)]
    pub fn has(&self, fault: TapFault) -> bool {
        self.0[fault as usize].load(Ordering::Relaxed)
    }

    /// The message for an error of `tap` at the card `name`, unless its kind was reported before.
    pub fn first(&self, error: &io::Error, name: &str, tap: &str) -> Option<String> {
        let fault = TapFault::of(error);
        if self.0[fault as usize].swap(true, Ordering::Relaxed) {
            return None;
        }
        Some(match fault {
            TapFault::Down => format!(
                "packets of {name} are lost while the tap {tap} is down; `ip link set {tap} up` brings it up"
            ),
            TapFault::Gone => format!(
                "the tap {tap} was deleted, and packets of {name} are lost; create it again with `ip tuntap add \
                 dev {tap} mode tap user $USER` and `ip link set {tap} up`, as root, and restart the VM"
            ),
            TapFault::Other => format!(
                "a packet of {name} is lost, since the tap {tap} reports an error: {error}; further ones are \
                 logged at debug"
            ),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_fault_is_reported_once_with_its_remedy() {
        let reported = ReportedFaults::default();
        for (error, fault, remedy) in [
            (libc::EIO, TapFault::Down, "`ip link set tap0 up`"),
            (libc::EBADFD, TapFault::Gone, "`ip tuntap add dev tap0"),
            (libc::EINVAL, TapFault::Other, "Invalid argument"),
        ] {
            let error = io::Error::from_raw_os_error(error);
            assert!(!reported.has(fault));
            let text = reported.first(&error, "net1", "tap0").unwrap();
            assert!(text.contains(remedy) && text.contains("net1"), "{text}");
            assert!(reported.has(fault));
            assert_eq!(reported.first(&error, "net1", "tap0"), None);
        }
    }
}
