//! A tap device of the host: a network interface whose other end is a descriptor.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixDatagram;

use rustix::net::netdevice;
use thiserror::Error;

use crate::sys;

/// The device through which taps are attached.
const TUN_PATH: &str = "/dev/net/tun";

/// The longest name of an interface (linux/if.h, IFNAMSIZ less the terminating zero).
pub const TAP_NAME_BYTES_MAX: usize = libc::IFNAMSIZ - 1;

/// Bytes of the header before each packet: that of virtio 1 (section 5.1.6), `virtio_net_hdr_v1` in
/// Linux.
pub(super) const HEADER_BYTES: usize = 12;

/// Why a tap cannot be used.
#[derive(Debug, Error)]
pub enum TapError {
    /// The name is not valid for an interface.
    #[error(
        "`{name}` is not a valid tap name: 1 to {TAP_NAME_BYTES_MAX} letters, digits, `-`, `_` and `.` are; \
         name one that `ip tuntap list` shows"
    )]
    Name {
        /// The name.
        name: String,
    },
    /// The kernel has no tap support.
    #[error("cannot open {TUN_PATH} for the tap {name}; load the module with `modprobe tun`")]
    NoTaps {
        /// The requested tap.
        name: String,
        /// The reason.
        #[source]
        source: io::Error,
    },
    /// No interface has this name.
    #[error(
        "the tap {name} is not there; make it with `ip tuntap add dev {name} mode tap user $USER` and \
         `ip link set {name} up`, as root"
    )]
    Missing {
        /// Its name.
        name: String,
    },
    /// The user lacks permission.
    #[error(
        "the tap {name} is not for this user; make it with `ip tuntap add dev {name} mode tap user $USER` \
         as root, or run as root"
    )]
    NotPermitted {
        /// Its name.
        name: String,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// Another process uses it.
    #[error(
        "the tap {name} is in use by another process, such as another VM; give each VM a tap of its own"
    )]
    InUse {
        /// Its name.
        name: String,
    },
    /// The interface is not a tap.
    #[error(
        "the interface {name} is not a tap with one queue; make one with `ip tuntap add dev NAME mode \
         tap`, and join it to other interfaces by a bridge"
    )]
    NotATap {
        /// Its name.
        name: String,
    },
    /// The kernel refuses an operation.
    #[error("the tap {name} cannot be {action}")]
    Refused {
        /// Its name.
        name: String,
        /// The operation.
        action: &'static str,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
}

/// An attached tap. Every packet is preceded by a header of [`HEADER_BYTES`], which carries
/// checksum and segmentation offload.
#[derive(Debug)]
pub struct Tap {
    file: File,
    name: String,
}

impl Tap {
    /// Attaches to the existing tap `name`.
    ///
    /// # Errors
    ///
    /// Fails when there is no such tap, or when it is in use or not permitted.
    pub fn open(name: &str) -> Result<Self, TapError> {
        let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        if !(1..=TAP_NAME_BYTES_MAX).contains(&name.len())
            || !name.chars().all(plain)
            || matches!(name, "." | "..")
        {
            return Err(TapError::Name { name: name.into() });
        }
        let name = name.to_owned();
        // Attaching to a missing name would create a tap that disappears with the process.
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
        // A previous user may have set offloads.
        match tap.set_offloads(0) {
            Ok(()) => Ok(tap),
            Err(source) => Err(tap.refused("set to offload nothing to the guest", source)),
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

    /// Creates a tap from one end of a socket pair, or another file.
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

    /// Sets what the guest completes in packets that it receives, as TUN_F_* bits of
    /// linux/if_tun.h.
    pub(super) fn set_offloads(&self, flags: libc::c_uint) -> io::Result<()> {
        sys::set_tap_offloads(&self.file, flags)
    }

    /// Reads a packet with its header from the host; `WouldBlock` when there is none.
    pub(super) fn receive(&self, packet: &mut [u8]) -> io::Result<usize> {
        retry(|| (&self.file).read(packet))
    }

    /// Writes a packet with its header to the host.
    pub(super) fn send(&self, packet: &[u8]) -> io::Result<()> {
        retry(|| (&self.file).write(packet)).map(drop)
    }
}

impl AsFd for Tap {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// Whether an interface of this name exists.
fn exists(name: &str) -> bool {
    // Any socket queries the network namespace in which it was created.
    UnixDatagram::unbound().is_ok_and(|socket| netdevice::name_to_index(socket, name).is_ok())
}

/// Retries after a signal.
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

    /// A tap that is deleted on drop.
    pub(in super::super) struct Made(pub String);

    impl Made {
        /// Creates a tap; `None`, after printing the reason, where taps cannot be created.
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
            assert!(refused(name).contains("is not a valid tap name"), "{name}");
        }
        let text = refused("no-such-tap0");
        assert!(text.contains("ip tuntap add dev no-such-tap0"), "{text}");
        assert!(!exists("no-such-tap0"), "it was not made either");
    }

    #[test]
    fn what_is_no_tap_is_refused() {
        let text = refused("lo");
        // Without permission to use taps, the kernel may report that first.
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
        // The interface is down.
        let error = tap.send(&[0; 60]).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EIO));
        let nothing = tap.receive(&mut [0; 100]).unwrap_err();
        assert_eq!(nothing.kind(), io::ErrorKind::WouldBlock);
    }
}
