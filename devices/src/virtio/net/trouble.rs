//! What is told of a tap that does not work.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};

/// What is wrong with a tap, by the error that it gives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Trouble {
    /// Nobody has brought it up.
    Down,
    /// It was deleted; the descriptor stays, and is of no use any more.
    Gone,
    /// It does not like a packet, or something else.
    Other,
}

impl Trouble {
    /// As drivers/net/tun.c of Linux answers.
    fn of(error: &io::Error) -> Self {
        match error.raw_os_error() {
            Some(libc::EIO) => Self::Down,
            Some(libc::EBADFD) => Self::Gone,
            _ => Self::Other,
        }
    }
}

/// What was told of a tap: of each trouble the first time. Relaxed: nothing depends on it.
#[derive(Debug, Default)]
pub(super) struct Told([AtomicBool; 3]);

impl Told {
    /// Whether this was told.
    #[cfg(test)]
    pub fn has(&self, trouble: Trouble) -> bool {
        self.0[trouble as usize].load(Ordering::Relaxed)
    }

    /// What is to be told of an error that `tap` gives to the card `name`, if it was not told before.
    pub fn first(&self, error: &io::Error, name: &str, tap: &str) -> Option<String> {
        let trouble = Trouble::of(error);
        if self.0[trouble as usize].swap(true, Ordering::Relaxed) {
            return None;
        }
        Some(match trouble {
            Trouble::Down => format!(
                "packets of {name} are lost while the tap {tap} is down; `ip link set {tap} up` brings it up"
            ),
            Trouble::Gone => format!(
                "the tap {tap} is gone, and with it all packets of {name}; make it again with `ip tuntap add \
                 dev {tap} mode tap user $USER` and `ip link set {tap} up`, as root, and start the VM anew"
            ),
            Trouble::Other => format!(
                "a packet of {name} is lost, for the tap {tap} gives an error: {error}; more of these are told \
                 at level debug"
            ),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_trouble_is_told_once_with_its_remedy() {
        let told = Told::default();
        for (error, trouble, remedy) in [
            (libc::EIO, Trouble::Down, "`ip link set tap0 up`"),
            (libc::EBADFD, Trouble::Gone, "`ip tuntap add dev tap0"),
            (libc::EINVAL, Trouble::Other, "Invalid argument"),
        ] {
            let error = io::Error::from_raw_os_error(error);
            assert!(!told.has(trouble));
            let text = told.first(&error, "net1", "tap0").unwrap();
            assert!(text.contains(remedy) && text.contains("net1"), "{text}");
            assert!(told.has(trouble));
            assert_eq!(told.first(&error, "net1", "tap0"), None);
        }
    }
}
