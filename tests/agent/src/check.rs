//! Checks the host's capabilities for a monitor.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// `KVM_GET_API_VERSION` of linux/kvm.h.
const KVM_GET_API_VERSION: libc::c_ulong = 0xae00;
/// `KVM_CREATE_VM` of linux/kvm.h.
const KVM_CREATE_VM: libc::c_ulong = 0xae01;
/// `UFFDIO_API` of linux/userfaultfd.h: `_IOWR(0xaa, 0x3f, struct uffdio_api)`.
const UFFDIO_API: libc::c_ulong = 0xc018_aa3f;
/// `UFFD_API` of linux/userfaultfd.h.
const UFFD_API: u64 = 0xaa;

/// `struct uffdio_api` of linux/userfaultfd.h.
#[repr(C)]
#[derive(Default)]
struct UffdioApi {
    api: u64,
    features: u64,
    ioctls: u64,
}

const _: () = assert!(size_of::<UffdioApi>() == 24);

/// Creates a VM and a userfaultfd that handles kernel faults, and describes each in one line.
pub fn run() -> io::Result<()> {
    let kvm = File::options().read(true).write(true).open("/dev/kvm")?;
    // SAFETY: this ioctl takes no argument and returns a number.
    let version = unsafe { libc::ioctl(kvm.as_raw_fd(), KVM_GET_API_VERSION, 0) };
    // SAFETY: this ioctl takes a number, the machine's type, and returns a descriptor.
    let vm = unsafe { libc::ioctl(kvm.as_raw_fd(), KVM_CREATE_VM, 0) };
    if vm < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor is new and has no other owner.
    drop(unsafe { OwnedFd::from_raw_fd(vm) });
    println!("kvm api={version}");

    // SAFETY: the call takes flags and returns a descriptor.
    let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | libc::O_NONBLOCK) };
    let fd = i32::try_from(fd).map_err(io::Error::other)?;
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor is new and has no other owner.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    let mut api = UffdioApi {
        api: UFFD_API,
        ..UffdioApi::default()
    };
    // SAFETY: the kernel reads and writes one struct uffdio_api, which `api` is.
    if unsafe { libc::ioctl(fd.as_raw_fd(), UFFDIO_API, &raw mut api) } != 0 {
        return Err(io::Error::last_os_error());
    }
    println!("userfaultfd features={:#x}", api.features);
    Ok(())
}
