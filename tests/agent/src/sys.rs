//! Calls of KVM and userfaultfd that have no safe form: linux/kvm.h, linux/userfaultfd.h.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

/// Bytes of a page.
pub const PAGE_SIZE: usize = 4096;

const KVM_GET_API_VERSION: libc::c_ulong = 0xae00;
const KVM_CREATE_VM: libc::c_ulong = 0xae01;
const KVM_GET_VCPU_MMAP_SIZE: libc::c_ulong = 0xae04;
const KVM_CREATE_VCPU: libc::c_ulong = 0xae41;
/// `_IOW(0xae, 0x46, struct kvm_userspace_memory_region)`.
const KVM_SET_USER_MEMORY_REGION: libc::c_ulong = 0x4020_ae46;
const KVM_CREATE_IRQCHIP: libc::c_ulong = 0xae60;
const KVM_RUN: libc::c_ulong = 0xae80;
/// `_IOW(0xae, 0x82, struct kvm_regs)`.
const KVM_SET_REGS: libc::c_ulong = 0x4090_ae82;
/// `_IOR(0xae, 0x83, struct kvm_sregs)` and `_IOW(0xae, 0x84, struct kvm_sregs)`.
const KVM_GET_SREGS: libc::c_ulong = 0x8138_ae83;
const KVM_SET_SREGS: libc::c_ulong = 0x4138_ae84;
/// `_IOWR(0xaa, 0x3f, struct uffdio_api)`.
const UFFDIO_API: libc::c_ulong = 0xc018_aa3f;
/// `_IOWR(0xaa, 0x00, struct uffdio_register)`.
const UFFDIO_REGISTER: libc::c_ulong = 0xc020_aa00;
/// `_IOWR(0xaa, 0x04, struct uffdio_zeropage)`.
const UFFDIO_ZEROPAGE: libc::c_ulong = 0xc020_aa04;
/// `UFFD_API`.
const UFFD_API: u64 = 0xaa;
/// `UFFD_FEATURE_THREAD_ID`: messages name the thread that faults.
pub const UFFD_FEATURE_THREAD_ID: u64 = 1 << 8;
/// `UFFDIO_REGISTER_MODE_MISSING`.
const UFFDIO_REGISTER_MODE_MISSING: u64 = 1;

/// `struct kvm_regs`: 18 registers, of which `rip` and `rflags` are the last.
const REGISTERS: usize = 18;
/// Bytes of `struct kvm_sregs`, which begins with the code segment: a base of 8 bytes, a limit of 4, a
/// selector of 2.
const SREGS_BYTES: usize = 312;

/// Makes an ioctl whose argument is a number or points to `A`.
macro_rules! ioctl {
    ($fd:expr, $request:expr, $argument:expr) => {{
        // SAFETY: the request belongs to this kind of descriptor. Its argument is a number, or points to a
        // structure of the size that the request contains, which outlives the call.
        let result = unsafe { libc::ioctl($fd.as_fd().as_raw_fd(), $request, $argument) };
        if result < 0 {
            Err(io::Error::last_os_error())
        } else {
            Ok(result)
        }
    }};
}

/// Takes the descriptor that a call has returned.
fn descriptor(number: i32) -> OwnedFd {
    // SAFETY: the kernel has just returned it, so that it has no other owner.
    unsafe { OwnedFd::from_raw_fd(number) }
}

/// KVM.
#[derive(Debug)]
pub struct Kvm(File);

impl Kvm {
    pub fn open() -> io::Result<Self> {
        let file = File::options().read(true).write(true).open("/dev/kvm")?;
        Ok(Self(file))
    }

    pub fn api_version(&self) -> io::Result<i32> {
        ioctl!(self.0, KVM_GET_API_VERSION, 0_u64)
    }

    pub fn create_vm(&self) -> io::Result<Vm> {
        ioctl!(self.0, KVM_CREATE_VM, 0_u64).map(|fd| Vm(descriptor(fd)))
    }

    /// Bytes of the page that a vCPU shares with its process.
    pub fn run_bytes(&self) -> io::Result<usize> {
        let bytes = ioctl!(self.0, KVM_GET_VCPU_MMAP_SIZE, 0_u64)?;
        usize::try_from(bytes).map_err(io::Error::other)
    }
}

/// A virtual machine.
#[derive(Debug)]
pub struct Vm(OwnedFd);

impl Vm {
    /// Creates the interrupt controllers of KVM.
    pub fn create_irqchip(&self) -> io::Result<()> {
        ioctl!(self.0, KVM_CREATE_IRQCHIP, 0_u64).map(drop)
    }

    /// Makes `memory` that of the guest, from address 0 on. It must live as long as the process.
    pub fn set_memory(&self, memory: &Mapping) -> io::Result<()> {
        // struct kvm_userspace_memory_region: slot and flags; address; bytes; address here.
        let region = [0, 0, memory.bytes as u64, memory.address as u64];
        ioctl!(self.0, KVM_SET_USER_MEMORY_REGION, &raw const region).map(drop)
    }

    pub fn create_vcpu(&self) -> io::Result<Vcpu> {
        ioctl!(self.0, KVM_CREATE_VCPU, 0_u64).map(|fd| Vcpu(descriptor(fd)))
    }
}

/// A vCPU.
#[derive(Debug)]
pub struct Vcpu(OwnedFd);

impl Vcpu {
    /// Makes it begin at address 0 in real mode.
    pub fn start_at_zero(&self) -> io::Result<()> {
        let mut sregs = [0_u64; SREGS_BYTES / 8];
        ioctl!(self.0, KVM_GET_SREGS, &raw mut sregs)?;
        // The base of the code segment; and its selector, above the limit.
        sregs[0] = 0;
        sregs[1] &= !(0xffff << 32);
        ioctl!(self.0, KVM_SET_SREGS, &raw const sregs)?;
        let mut registers = [0_u64; REGISTERS];
        // The bit that is always set.
        registers[REGISTERS - 1] = 2;
        ioctl!(self.0, KVM_SET_REGS, &raw const registers).map(drop)
    }

    /// Enters the guest until it exits.
    pub fn run(&self) -> io::Result<()> {
        ioctl!(self.0, KVM_RUN, 0_u64).map(drop)
    }

    /// Maps what it shares with the process.
    pub fn map_run(&self, bytes: usize) -> io::Result<Mapping> {
        Mapping::new(bytes, libc::MAP_SHARED, self.0.as_raw_fd())
    }
}

/// A mapping that stays until the process ends, unless [`unmap`](Self::unmap) removes it.
#[derive(Debug)]
pub struct Mapping {
    address: usize,
    bytes: usize,
}

impl Mapping {
    fn new(bytes: usize, kind: libc::c_int, fd: libc::c_int) -> io::Result<Self> {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: the kernel chooses the address, so that nothing else is replaced.
        let address = unsafe { libc::mmap(std::ptr::null_mut(), bytes, access, kind, fd, 0) };
        if address == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let address = address.expose_provenance();
        Ok(Self { address, bytes })
    }

    /// Maps private memory.
    pub fn memory(bytes: usize) -> io::Result<Self> {
        Self::new(bytes, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1)
    }

    /// Writes to its beginning.
    pub fn write(&self, bytes: &[u8]) {
        assert!(bytes.len() <= self.bytes);
        let to = std::ptr::with_exposed_provenance_mut(self.address);
        // SAFETY: the mapping is as long, writable, and no reference to it exists.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
    }

    /// Returns the address of its page number `page`.
    pub fn page(&self, page: usize) -> u64 {
        (self.address + page * PAGE_SIZE) as u64
    }

    pub fn unmap(self) -> io::Result<()> {
        let address = std::ptr::with_exposed_provenance_mut(self.address);
        // SAFETY: the mapping belongs to `self`, whose end this is; no reference to it exists.
        let result = unsafe { libc::munmap(address, self.bytes) };
        if result != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }
}

/// A userfaultfd that reports faults of the kernel too.
#[derive(Debug)]
pub struct Uffd(OwnedFd);

impl Uffd {
    /// Creates one with these features, and returns all that the kernel has.
    pub fn create(features: u64) -> io::Result<(Self, u64)> {
        let flags = libc::O_CLOEXEC | libc::O_NONBLOCK;
        // SAFETY: the call takes flags and returns a descriptor.
        let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, flags) };
        let fd = i32::try_from(fd).map_err(io::Error::other)?;
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        let fd = descriptor(fd);
        // struct uffdio_api: version, features, ioctls.
        let mut api = [UFFD_API, features, 0];
        ioctl!(fd, UFFDIO_API, &raw mut api)?;
        Ok((Self(fd), api[1]))
    }

    /// Makes faults on a page that is missing wait.
    pub fn register(&self, page: u64) -> io::Result<()> {
        // struct uffdio_register: a range, modes, ioctls.
        let mut register = [page, PAGE_SIZE as u64, UFFDIO_REGISTER_MODE_MISSING, 0];
        ioctl!(self.0, UFFDIO_REGISTER, &raw mut register).map(drop)
    }
}

impl From<OwnedFd> for Uffd {
    fn from(fd: OwnedFd) -> Self {
        Self(fd)
    }
}

impl From<Uffd> for OwnedFd {
    fn from(uffd: Uffd) -> Self {
        uffd.0
    }
}

/// Resolves a fault by a page of zeroes. `uffd` must be a userfaultfd: on any other file the call fails.
pub fn fill_with_zeroes(uffd: &Uffd, page: u64) -> io::Result<()> {
    // struct uffdio_zeropage: a range, modes, the result.
    let mut zeropage = [page, PAGE_SIZE as u64, 0, 0];
    ioctl!(uffd.0, UFFDIO_ZEROPAGE, &raw mut zeropage).map(drop)
}
