//! System calls that no crate wraps: the only unsafe code of this crate.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

use vmm_sys_util::ioctl::{ioctl_with_mut_ref, ioctl_with_ref, ioctl_with_val};

/// Locks the whole file for its open file description (fcntl(2), `F_OFD_SETLK`) without waiting:
/// shared with other readers, or exclusive.
///
/// # Errors
///
/// `EAGAIN` or `EACCES` when another description has a conflicting lock; other errors when the file
/// system has no locks.
pub(crate) fn lock_description(file: &File, shared: bool) -> io::Result<()> {
    let kind = if shared { libc::F_RDLCK } else { libc::F_WRLCK };
    let whole = libc::flock64 {
        l_type: libc::c_short::try_from(kind).unwrap_or(0),
        l_whence: libc::c_short::try_from(libc::SEEK_SET).unwrap_or(0),
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    };
    // SAFETY: the descriptor is open, and `whole` outlives the call, which only reads it.
    check(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const whole) })
}

/// `BLKDISCARD` (linux/fs.h): `_IO(0x12, 119)`.
const BLKDISCARD: libc::c_ulong = 0x1277;

/// Discards a range of a block device, in bytes.
///
/// # Errors
///
/// `EOPNOTSUPP` when the device cannot, `EINVAL` when the range is not of its sectors.
pub(crate) fn discard(device: &File, offset: u64, bytes: u64) -> io::Result<()> {
    let range = [offset, bytes];
    // SAFETY: BLKDISCARD reads two numbers of 64 bits, which outlive the call.
    check(unsafe { ioctl_with_ref(device, BLKDISCARD, &range) })
}

/// `struct ifreq` as TUNSETIFF uses it (linux/if.h).
#[repr(C)]
#[derive(Debug, Default)]
struct InterfaceRequest {
    name: [u8; libc::IFNAMSIZ],
    flags: u16,
    rest: [u8; 22],
}

const _: () = assert!(size_of::<InterfaceRequest>() == size_of::<libc::ifreq>());

/// Attaches an open `/dev/net/tun` to the interface `name`: packets with a virtio header and no
/// other metadata.
///
/// # Errors
///
/// Fails when the name is too long, or the kernel refuses.
pub(crate) fn attach_tap(tun: &File, name: &str) -> io::Result<()> {
    let mut request = InterfaceRequest::default();
    // The name is terminated by a zero, so it must be shorter than its field.
    if name.len() >= request.name.len() {
        return Err(io::Error::from(io::ErrorKind::InvalidInput));
    }
    request.name[..name.len()].copy_from_slice(name.as_bytes());
    let flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
    request.flags = u16::try_from(flags).unwrap_or(0);
    // SAFETY: TUNSETIFF reads and writes a `struct ifreq`, whose size is encoded in the request,
    // and which outlives the call.
    check(unsafe { ioctl_with_mut_ref(tun, libc::TUNSETIFF, &mut request) })
}

/// Sets the size of the virtio header before each packet of an attached tap.
///
/// # Errors
///
/// Fails when the kernel refuses.
pub(crate) fn set_tap_header_bytes(tap: &File, bytes: libc::c_int) -> io::Result<()> {
    // SAFETY: TUNSETVNETHDRSZ reads an int, which outlives the call.
    check(unsafe { ioctl_with_ref(tap, libc::TUNSETVNETHDRSZ, &bytes) })
}

/// Sets which checksums and segments the reader of a tap completes, as TUN_F_* bits of
/// linux/if_tun.h.
///
/// # Errors
///
/// Fails when the kernel refuses.
pub(crate) fn set_tap_offloads(tap: &File, flags: libc::c_uint) -> io::Result<()> {
    // SAFETY: TUNSETOFFLOAD takes a number and no pointer.
    check(unsafe { ioctl_with_val(tap, libc::TUNSETOFFLOAD, flags.into()) })
}

/// Returns the error of a call that has just returned `result`.
fn check(result: libc::c_int) -> io::Result<()> {
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_exclusive_lock_excludes_other_descriptions_and_shared_ones_do_not() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let open = || file.reopen().unwrap();
        let (first, second) = (open(), open());
        lock_description(&first, true).unwrap();
        lock_description(&second, true).unwrap();
        let error = lock_description(&second, false).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
        drop(first);
        lock_description(&second, false).unwrap();
    }

    #[test]
    fn a_name_without_room_for_its_end_is_refused_before_the_call() {
        let file = tempfile::tempfile().unwrap();
        let error = attach_tap(&file, "sixteen-bytes-xx").unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
        let error = attach_tap(&file, "fifteen-bytes-x").unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENOTTY));
    }
}
