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
//! | the thread of the event loop | takes chains from the rings, gives them to the device, interrupts |
//!
//! A vCPU waits for that thread in one case only: when it resets a device or stops a queue it
//! waits for the chain that is being served, since the rings are its own again afterwards.
//!
//! Everything in registers and rings is the guest's choice. A value that may not be is not
//! taken, and reading it back shows that; a ring that makes no sense stops the device, which
//! says so by DEVICE_NEEDS_RESET. Chains are as long as their ring at the most, so that loops
//! in them end; devices have limits of their own for what one chain may ask for.

mod balloon;
mod mmio;
mod server;
#[cfg(test)]
mod test_driver;

use std::fmt;

use virtio_queue::DescriptorChain;
use vm_memory::GuestMemoryMmap;

pub use balloon::{
    BALLOON_CHAIN_BYTES_MAX, BALLOON_CHAIN_RANGES_MAX, Balloon, FreePages, FreeRange,
};
pub use mmio::{MmioTransport, QUEUE_NOTIFY_OFFSET, VIRTIO_MMIO_LEN};
pub use server::QueueServer;

/// A chain of descriptors that the driver has made available.
pub type Chain<'a> = DescriptorChain<&'a GuestMemoryMmap>;

/// What is different from device to device.
///
/// Registers are accessed by vCPU threads, chains are served on another: a device locks what
/// it must. Offsets, data and chains are the guest's: all of them are answered or ignored
/// without panic, and what one chain asks for is bounded.
pub trait VirtioDevice: Send + Sync + fmt::Debug {
    /// The kind of device (virtio 1.2, chapter 5).
    fn device_id(&self) -> u32;

    /// The feature bits that it offers, without those of the transport.
    fn features(&self) -> u64;

    /// The largest size of each queue: a power of two, or 0 for a queue that is not there.
    fn queue_sizes(&self) -> &[u16];

    /// Reads `data.len()` bytes at `offset` of its configuration; zeroes where there is none.
    fn read_config(&self, offset: u64, data: &mut [u8]);

    /// Writes `data` at `offset` of its configuration.
    fn write_config(&self, offset: u64, data: &[u8]);

    /// Carries out what a chain of queue `queue` asks for, and gives how many bytes it has
    /// written to it.
    fn serve(&self, queue: usize, chain: Chain<'_>) -> u32;

    /// The driver starts anew.
    fn reset(&self);
}
