//! Virtio devices behind memory-mapped registers (virtio 1.2, OASIS committee specification 01).
//!
//! A device is a [`VirtioDevice`]: its id, its features, its configuration, and what it does
//! with a chain of descriptors. All that devices share is here: [`MmioTransport`] has the
//! registers, the rings and the interrupt, and a [`QueueServer`] carries out, on the thread of
//! an event loop, what the driver has put into the rings.
//!
//! | who | does |
//! |---|---|
//! | a vCPU | reads and writes registers; rings a queue's bell (which KVM may do by itself) |
//! | the thread of an event loop | takes chains from the rings, gives them to the device, interrupts |
//!
//! Devices do not wait for each other: each may have an event loop of its own, and one that
//! [`CarriesOut`] chains on several threads has several. A vCPU waits for those in one case only: when it
//! resets a device or stops a queue it waits for the chains that are being served, since the rings and
//! what their chains point to are its own again afterwards.
//!
//! Everything in registers and rings is the guest's choice. A value that may not be is not
//! taken, and reading it back shows that; a ring that makes no sense stops the device, which
//! says so by DEVICE_NEEDS_RESET. Chains are as long as their ring at the most, or as their table
//! of indirect descriptors, so that loops in them end; devices have limits of their own for what
//! one chain may ask for.

#[cfg(test)]
mod any_device_tests;
mod balloon;
mod block;
mod console;
mod entropy;
mod host_socket;
mod mem;
mod mmio;
mod net;
mod ring;
mod rings;
mod server;
#[cfg(test)]
mod server_threads;
#[cfg(any(test, feature = "fuzzing"))]
#[cfg_attr(not(test), expect(dead_code, reason = "tests use more of it"))]
pub(crate) mod test_driver;
mod vsock;

use std::fmt;
use std::os::fd::BorrowedFd;

use vm_memory::GuestMemoryMmap;

pub use balloon::{
    BALLOON_CHAIN_BYTES_MAX, BALLOON_CHAIN_RANGES_MAX, Balloon, FreePages, FreeRange,
};
pub use block::{Block, Disk, DiskError, SECTOR_BYTES};
pub use console::{CONSOLE_KEPT_BYTES_MAX, Console};
pub use entropy::{ENTROPY_CHAIN_BYTES_MAX, Entropy};
pub use host_socket::{HOST_SOCKET_PATH_BYTES_MAX, HostSocket, HostSocketError};
pub use mem::{MEM_BLOCK_BYTES, Mem, MemRegion, NotNow, Pluggable};
pub use mmio::{MmioTransport, QUEUE_NOTIFY_OFFSET, VIRTIO_MMIO_LEN};
pub use net::{MacAddress, Net, ParseMacError, TAP_NAME_BYTES_MAX, Tap, TapError};
pub use ring::{BrokenRing, Buffers, Chain, Ring};
pub use server::QueueServer;
pub use vsock::{VSOCK_CID_MAX, VSOCK_CID_MIN, Vsock};

/// What is different from device to device.
///
/// Registers are accessed by vCPU threads, rings are served on another: a device locks what
/// it must. Offsets, data and chains are the guest's: all of them are answered or ignored
/// without panic, and what one chain asks for is bounded.
pub trait VirtioDevice: Send + Sync + fmt::Debug {
    /// What people call it, such as `balloon`: for messages, and for the name of its thread, of
    /// which Linux keeps 8 bytes.
    fn name(&self) -> &str;

    /// The kind of device (virtio 1.2, chapter 5).
    fn device_id(&self) -> u32;

    /// The feature bits that it offers, without those of transport and rings.
    fn features(&self) -> u64;

    /// The largest size of each queue: a power of two, or 0 for a queue that is not there.
    fn queue_sizes(&self) -> &[u16];

    /// Reads `data.len()` bytes at `offset` of its configuration; zeroes where there is none.
    fn read_config(&self, offset: u64, data: &mut [u8]);

    /// Writes `data` at `offset` of its configuration, if there is something that drivers write.
    fn write_config(&self, _offset: u64, _data: &[u8]) {}

    /// The driver has accepted these of the features, and begins.
    fn start(&self, _features: u64) {}

    /// The device as one that carries out chains on several threads at once, if it is one. Its
    /// [`serve`](Self::serve) is then not called.
    fn on_threads(&self) -> Option<&dyn CarriesOut> {
        None
    }

    /// Carries out what some chains of queue `queue` ask for. False when there is nothing more
    /// to do until the queue's bell rings, or until [`events`](Self::events) has something. The
    /// driver is told after each call of what was used in it.
    ///
    /// # Errors
    ///
    /// When the ring makes no sense.
    fn serve(&self, _queue: usize, _ring: &mut Ring<'_>) -> Result<bool, BrokenRing> {
        Ok(false)
    }

    /// The driver starts anew.
    fn reset(&self) {}

    /// Whether one of its threads is in a call of the host that touches no guest memory and may take
    /// long, such as one of a disk. Such a call ends by itself, as a wait for a page need not.
    fn waits_for_host(&self) -> bool {
        false
    }

    /// A descriptor of the host from which work comes as well. All queues are served when it
    /// becomes readable or writable, and not again as long as it only stays so.
    fn events(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

/// Carries out chains one by one, several at once: one that has to wait, for a remote page or for the
/// host, does not hold up the others. They are given back to the driver in the order in which they are
/// done.
pub trait CarriesOut: Send + Sync {
    /// How many threads do that, at least 1: each serves the same queues.
    fn threads(&self) -> usize;

    /// Carries out what a chain asks for; gives how many bytes were written to it. Called by several
    /// threads at once. No chain is carried out while the device starts or is reset.
    fn carry_out(&self, chain: &Chain<'_>, memory: &GuestMemoryMmap) -> u32;
}

/// Reads from a configuration that is `config` and zeroes after it.
fn read_bytes_of(config: &[u8], offset: u64, data: &mut [u8]) {
    let start = usize::try_from(offset).unwrap_or(usize::MAX);
    let there = config.get(start..).unwrap_or_default();
    for (byte, value) in data.iter_mut().zip(there) {
        *byte = *value;
    }
}
