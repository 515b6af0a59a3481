//! Virtio devices behind memory-mapped registers (virtio 1.2, OASIS committee specification 01).
//!
//! A device is a [`VirtioDevice`]: its id, its features, its configuration, and what it does with a
//! chain of descriptors. The common parts are here: [`MmioTransport`] has the registers, the rings
//! and the interrupt, and a [`QueueServer`] serves the rings on the thread of an event loop.
//!
//! | thread | work |
//! |---|---|
//! | a vCPU | reads and writes registers; notifies a queue (which KVM may do itself) |
//! | an event loop's thread | takes chains from the rings, passes them to the device, interrupts |
//!
//! Devices do not wait for each other: each may have an event loop of its own, and one that
//! [`CarriesOut`] chains on several threads has several. A vCPU waits for them in one case only:
//! when it resets a device or stops a queue, until the chains in hand are finished, since the rings
//! and their buffers belong to the guest again afterwards.
//!
//! Everything in registers and rings is the guest's choice. An invalid value is not stored, and
//! reading it back shows that. An inconsistent ring stops the device, which sets
//! DEVICE_NEEDS_RESET. Chains are limited to the size of their ring or of their indirect table, so
//! that loops in them end; devices limit what one chain may request.

#[cfg(test)]
mod any_device_tests;
mod balloon;
mod block;
mod console;
mod entropy;
mod host_socket;
mod lost;
mod mem;
mod mmio;
mod net;
mod rate;
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
pub use lost::{PageCheck, check_pages_by};
pub use mem::{MEM_BLOCK_BYTES, Mem, MemRegion, NotNow, Pluggable};
pub use mmio::{MmioTransport, QUEUE_NOTIFY_OFFSET, VIRTIO_MMIO_LEN};
pub use net::{MacAddress, Net, ParseMacError, TAP_NAME_BYTES_MAX, Tap, TapError};
pub use rate::{Rate, RateLimiter, RateLimits};
pub use ring::{BrokenRing, Buffers, Chain, Ring};
pub use server::QueueServer;
pub use vsock::{VSOCK_CID_MAX, VSOCK_CID_MIN, Vsock};

/// The part that differs between devices.
///
/// Registers are accessed by vCPU threads, rings are served on another thread: a device locks what
/// it must. Offsets, data and chains are the guest's: all of them are handled or ignored without
/// panic, and what one chain may request is bounded.
pub trait VirtioDevice: Send + Sync + fmt::Debug {
    /// A short name such as `balloon`, for messages and for the name of its thread, of which Linux
    /// keeps 8 bytes.
    fn name(&self) -> &str;

    /// The kind of device (virtio 1.2, chapter 5).
    fn device_id(&self) -> u32;

    /// The features that it offers, without those of transport and rings.
    fn features(&self) -> u64;

    /// The largest size of each queue: a power of two, or 0 for an absent queue.
    fn queue_sizes(&self) -> &[u16];

    /// Reads `data.len()` bytes at `offset` of its configuration; zeroes where there is none.
    fn read_config(&self, offset: u64, data: &mut [u8]);

    /// Writes `data` at `offset` of its configuration, if that field is writable for drivers.
    fn write_config(&self, _offset: u64, _data: &[u8]) {}

    /// The driver has accepted these features and starts the device.
    fn start(&self, _features: u64) {}

    /// The device as one that serves chains on several threads, if it is one. Its
    /// [`serve`](Self::serve) is then not called.
    fn on_threads(&self) -> Option<&dyn CarriesOut> {
        None
    }

    /// Serves some chains of queue `queue`. Returns false when there is nothing more to do until
    /// the queue is notified or [`events`](Self::events) is ready. The driver is notified of used
    /// chains after each call.
    ///
    /// # Errors
    ///
    /// Fails when the ring is inconsistent.
    fn serve(&self, _queue: usize, _ring: &mut Ring<'_>) -> Result<bool, BrokenRing> {
        Ok(false)
    }

    /// The driver resets the device.
    fn reset(&self) {}

    /// Whether one of its threads is in a call of the host that touches no guest memory and may
    /// take long, such as a disk's. Unlike a wait for a page, such a call ends by itself.
    fn waits_for_host(&self) -> bool {
        false
    }

    /// A descriptor of the host that is another source of work. All queues are served when it
    /// becomes readable or writable (edge-triggered).
    fn events(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// A timer at which requests that waited for it may go on. All queues are served when it
    /// becomes readable (edge-triggered).
    fn timer(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// The timer has become readable. Called before the queues are served for it.
    fn timer_expired(&self) {}
}

/// Serves several chains at once, so that one that waits for a remote page or for the host does not
/// delay the others. Chains return to the driver in the order in which they finish.
pub trait CarriesOut: Send + Sync {
    /// Number of threads, at least 1; each serves the same queues.
    fn threads(&self) -> usize;

    /// Whether the next chain, which is there, may be taken now. If not, the
    /// [`timer`](VirtioDevice::timer) becomes readable when it may.
    fn may_begin(&self) -> bool {
        true
    }

    /// Serves a chain and returns how many bytes were written to it. Called by several threads at
    /// once, and never while the device starts or is reset.
    fn carry_out(&self, chain: &Chain<'_>, memory: &GuestMemoryMmap) -> u32;
}

/// Reads from a configuration that is `config` followed by zeroes.
fn read_bytes_of(config: &[u8], offset: u64, data: &mut [u8]) {
    let start = usize::try_from(offset).unwrap_or(usize::MAX);
    let there = config.get(start..).unwrap_or_default();
    for (byte, value) in data.iter_mut().zip(there) {
        *byte = *value;
    }
}
