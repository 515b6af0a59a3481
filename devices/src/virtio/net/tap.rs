//! A tap device of the host: an interface of its network whose cable is a descriptor.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixDatagram;

use rustix::net::netdevice;
use thiserror::Error;

use crate::sys;

/// Where taps are attached to.
const TUN_PATH: &str = "/dev/net/tun";

/// The longest name of an interface (linux/if.h, IFNAMSIZ less the terminating zero).
pub const TAP_NAME_BYTES_MAX: usize = libc::IFNAMSIZ - 1;

/// Bytes of the header before each packet: that of virtio 1 (section 5.1.6), for Linux
/// `virtio_net_hdr_v1`.
pub(super) const HEADER_BYTES: usize = 12;

/// Why a tap cannot be used.
#[derive(Debug, Error)]
pub enum TapError {
    /// No interface can be called like that.
    #[error(
        "`{name}` is no name of a tap: 1 to {TAP_NAME_BYTES_MAX} letters, digits, `-`, `_` and `.` are; \
         name one that `ip tuntap list` shows"
    )]
    Name {
        /// What was given.
        name: String,
    },
    /// The kernel has no taps.
    #[error("cannot open {TUN_PATH} for the tap {name}; load the module with `modprobe tun`")]
    NoTaps {
        /// The tap that was wanted.
        name: String,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// There is no interface of this name.
    #[error(
        "the tap {name} is not there; make it with `ip tuntap add dev {name} mode tap user $USER` and \
         `ip link set {name} up`, as root"
    )]
    Missing {
        /// Its name.
        name: String,
    },
    /// The user may not use it.
    #[error(
        "the tap {name} is not for this user; make it with `ip tuntap add dev {name} mode tap user $USER` \
         as root, or run as root"
    )]
    NotPermitted {
        /// Its name.
        name: String,
        /// What the kernel says.
        #[source]
        source: io::Error,
    },
    /// Another process has it.
    #[error(
        "the tap {name} is in use by another process, such as another VM; give each VM a tap of its own"
    )]
    InUse {
        /// Its name.
        name: String,
    },
    /// It is another kind of interface.
    #[error(
        "the interface {name} is not a tap with one queue; make one with `ip tuntap add dev NAME mode \
         tap`, and join it to other interfaces by a bridge"
    )]
    NotATap {
        /// Its name.
        name: String,
    },
    /// The kernel refuses something else.
    #[error("the tap {name} cannot be {action}")]
    Refused {
        /// Its name.
        name: String,
        /// What was asked for.
        action: &'static str,
        /// The answer.
        #[source]
        source: io::Error,
    },
}

/// An attached tap. Every packet has a header of [`HEADER_BYTES`] before it, by which checksums
/// and the cutting of large packets are left to the other side.
#[derive(Debug)]
pub struct Tap {
    file: File,
    name: String,
}

impl Tap {
    /// Attaches to the tap `name`, which exists.
    ///
    /// # Errors
    ///
    /// When there is no such tap, or it may not be used, or is in use.
    pub fn open(name: &str) -> Result<Self, TapError> {
        let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        if !(1..=TAP_NAME_BYTES_MAX).contains(&name.len())
            || !name.chars().all(plain)
            || matches!(name, "." | "..")
        {
            return Err(TapError::Name { name: name.into() });
        }
        let name = name.to_owned();
        // Attaching would make one that goes with the process.
        if !exists(&name) {
            return Err(TapError::Missing { name });
        }
        let opened = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(libc::O_NONBLOCK)
            .open(TUN_PATH);
        let file = match opened {
            Ok(file) => file,
            Err(source) => {
                return Err(match source.kind() {
                    io::ErrorKind::PermissionDenied => TapError::NotPermitted { name, source },
                    _ => TapError::NoTaps { name, source },
                });
            }
        };
        let tap = Self { file, name };
        tap.attach()?;
        let header = libc::c_int::try_from(HEADER_BYTES).unwrap_or(0);
        sys::set_tap_header_bytes(&tap.file, header)
            .map_err(|source| tap.refused("given headers of virtio 1", source))?;
        // Who had it before may have left some.
        match tap.set_offloads(0) {
            Ok(()) => Ok(tap),
            Err(source) => Err(tap.refused("told to leave nothing to the guest", source)),
        }
    }

    fn attach(&self) -> Result<(), TapError> {
        let Err(source) = sys::attach_tap(&self.file, &self.name) else {
            return Ok(());
        };
        let name = self.name.clone();
        Err(match source.raw_os_error() {
            Some(libc::EPERM | libc::EACCES) => TapError::NotPermitted { name, source },
            Some(libc::EBUSY) => TapError::InUse { name },
            Some(libc::EINVAL) => TapError::NotATap { name },
            _ => self.refused("attached to", source),
        })
    }

    fn refused(&self, action: &'static str, source: io::Error) -> TapError {
        TapError::Refused {
            name: self.name.clone(),
            action,
            source,
        }
    }

    /// A tap whose cable is one end of a pair of sockets, or another file.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(super) fn of(file: File) -> Self {
        Self {
            file,
            name: "tap-of-a-test".into(),
        }
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What the guest's side does with packets that come to it, as bits TUN_F_* of
    /// linux/if_tun.h.
    pub(super) fn set_offloads(&self, flags: libc::c_uint) -> io::Result<()> {
        sys::set_tap_offloads(&self.file, flags)
    }

    /// Takes a packet with its header from the host; `WouldBlock` when there is none.
    pub(super) fn receive(&self, packet: &mut [u8]) -> io::Result<usize> {
        retry(|| (&self.file).read(packet))
    }

    /// Gives a packet with its header to the host.
    pub(super) fn send(&self, packet: &[u8]) -> io::Result<()> {
        retry(|| (&self.file).write(packet)).map(drop)
    }
}

impl AsFd for Tap {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// Whether there is an interface of this name.
fn exists(name: &str) -> bool {
    // Any socket asks the network namespace that it was made in.
    UnixDatagram::unbound().is_ok_and(|socket| netdevice::name_to_index(socket, name).is_ok())
}

/// Again after a signal.
fn retry(mut call: impl FnMut() -> io::Result<usize>) -> io::Result<usize> {
    loop {
        match call() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            result => return result,
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::process::Command;

    use super::*;

    /// A tap that goes with the value.
    pub(in super::super) struct Made(pub String);

    impl Made {
        /// `None`, after it has said why, where taps cannot be made.
        pub fn new(suffix: &str) -> Option<Self> {
            let name = format!("sh{}{suffix}", std::process::id());
            match ip(&["tuntap", "add", "dev", &name, "mode", "tap"]) {
                true => Some(Self(name)),
                false => {
                    println!("SKIPPED: no tap can be made: it takes root and `ip`");
                    None
                }
            }
        }
    }

    impl Drop for Made {
        fn drop(&mut self) {
            ip(&["link", "delete", &self.0]);
        }
    }

    fn ip(arguments: &[&str]) -> bool {
        Command::new("ip")
            .args(arguments)
            .output()
            .is_ok_and(|output| output.status.success())
    }

    fn refused(name: &str) -> String {
        let text = Tap::open(name).unwrap_err().to_string();
        assert!(text.contains(name), "{text}");
        assert_eq!(text.lines().count(), 1, "{text}");
        text
    }

    #[test]
    fn a_name_that_no_tap_has_is_refused() {
        for name in [
            "",
            "a/b",
            "tap%d",
            "a b",
            "..",
            "tap-of-16-bytes.",
            "t\u{e4}p",
        ] {
            assert!(refused(name).contains("is no name of a tap"), "{name}");
        }
        let text = refused("no-such-tap0");
        assert!(text.contains("ip tuntap add dev no-such-tap0"), "{text}");
        assert!(!exists("no-such-tap0"), "it was not made either");
    }

    #[test]
    fn what_is_no_tap_is_refused() {
        let text = refused("lo");
        // Without the right to use taps the kernel may say so first.
        assert!(
            text.contains("is not a tap")
                || text.contains("not for this user")
                || text.contains(TUN_PATH),
            "{text}"
        );
    }

    #[test]
    fn a_tap_has_one_user() {
        let Some(made) = Made::new("a") else { return };
        let tap = Tap::open(&made.0).unwrap();
        assert_eq!(tap.name(), made.0);
        assert!(refused(&made.0).contains("in use by another process"));
        drop(tap);
        let tap = Tap::open(&made.0).unwrap();
        tap.set_offloads(libc::TUN_F_CSUM | libc::TUN_F_TSO4 | libc::TUN_F_TSO6)
            .unwrap();
        // Nobody has brought it up.
        let error = tap.send(&[0; 60]).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EIO));
        let nothing = tap.receive(&mut [0; 100]).unwrap_err();
        assert_eq!(nothing.kind(), io::ErrorKind::WouldBlock);
    }
}
