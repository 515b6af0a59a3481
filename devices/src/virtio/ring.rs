//! A queue while a device serves it.

use std::fmt;
use std::sync::atomic::{Ordering, fence};

use thiserror::Error;
use virtio_bindings::virtio_ring::VRING_AVAIL_F_NO_INTERRUPT;
use virtio_queue::{DescriptorChain, Queue, QueueOwnedT, QueueT, Reader, Writer};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use super::lost;

/// A chain of descriptors that the driver has made available.
pub type Chain<'a> = DescriptorChain<&'a GuestMemoryMmap>;

/// A ring is inconsistent: its indices contradict each other, or it names a descriptor that does
/// not exist. The device stops until the driver resets it.
#[derive(Debug, Error)]
#[error("a ring of the guest's driver is inconsistent")]
pub struct BrokenRing(#[source] virtio_queue::Error);

/// The ring of one queue while a device serves it. The device takes chains with
/// [`next_chain`](Self::next_chain) and marks them as [`used`](Self::used) or puts them back.
pub struct Ring<'a> {
    queue: &'a mut Queue,
    memory: &'a GuestMemoryMmap,
    /// The used index for which a notification was last decided.
    notified: u16,
}

impl fmt::Debug for Ring<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ring").finish_non_exhaustive()
    }
}

impl<'a> Ring<'a> {
    pub(super) fn new(queue: &'a mut Queue, memory: &'a GuestMemoryMmap) -> Self {
        Self {
            notified: queue.next_used(),
            queue,
            memory,
        }
    }

    /// The guest's memory.
    pub fn memory(&self) -> &'a GuestMemoryMmap {
        self.memory
    }

    /// Takes the next chain. After `None` the driver notifies the device when it adds one.
    ///
    /// # Errors
    ///
    /// Fails when the ring is inconsistent.
    pub fn next_chain(&mut self) -> Result<Option<Chain<'a>>, BrokenRing> {
        next_chain(self.queue, self.memory)
    }

    /// Puts back the last `count` chains that were taken and not used, so that they are taken
    /// again.
    pub fn put_back(&mut self, count: u16) {
        let next = self.queue.next_avail().wrapping_sub(count);
        self.queue.set_next_avail(next);
    }

    /// Returns a chain to the driver, with the number of bytes written to it.
    ///
    /// # Errors
    ///
    /// Fails when the ring has no chain of this number.
    pub fn used(&mut self, head: u16, written: u32) -> Result<(), BrokenRing> {
        self.queue
            .add_used(self.memory, head, written)
            .map_err(BrokenRing)
    }

    /// Returns several chains at once, each with the number of bytes written to it: the driver sees
    /// all of them or none.
    ///
    /// # Errors
    ///
    /// Fails when the ring has no chain of one of these numbers.
    pub fn used_together(&mut self, chains: &[(u16, u32)]) -> Result<(), BrokenRing> {
        let Some(((last, written), others)) = chains.split_last() else {
            return Ok(());
        };
        for (head, written) in others {
            if *head >= self.queue.size() {
                return Err(BrokenRing(virtio_queue::Error::InvalidDescriptorIndex));
            }
            // Writes the entry as add_used does; the index, which the driver reads, follows with
            // the last entry. The ring was checked to be in memory (virtio 1.2, section 2.7.8).
            let next = self.queue.next_used();
            let place = u64::from(next % self.queue.size()) * 8 + 4;
            let mut entry = [0; 8];
            entry[..4].copy_from_slice(&u32::from(*head).to_le_bytes());
            entry[4..].copy_from_slice(&written.to_le_bytes());
            self.memory
                .write_slice(&entry, GuestAddress(self.queue.used_ring() + place))
                .map_err(out_of_memory)?;
            self.queue.set_next_used(next.wrapping_add(1));
        }
        self.used(*last, *written)
    }

    /// Takes the next chain, serves it, and returns it with the number of bytes written to it.
    /// Returns false when there was none.
    ///
    /// # Errors
    ///
    /// Fails when the ring is inconsistent.
    pub fn serve_next(
        &mut self,
        carry_out: impl FnOnce(Chain<'a>) -> u32,
    ) -> Result<bool, BrokenRing> {
        let Some(chain) = self.next_chain()? else {
            return Ok(false);
        };
        let head = chain.head_index();
        let written = carry_out(chain);
        self.used(head, written)?;
        Ok(true)
    }

    /// Whether the driver must be notified now of used chains: it can suppress that, or ask for it
    /// after a certain chain (virtio 1.2, sections 2.7.7 and 2.7.10).
    pub(super) fn must_notify(&mut self) -> Result<bool, BrokenRing> {
        let before = std::mem::replace(&mut self.notified, self.queue.next_used());
        let count = self.notified.wrapping_sub(before);
        if count == 0 {
            return Ok(false);
        }
        // Pairs with the driver's barrier: a driver that changed its request before this read sees
        // the used chains.
        fence(Ordering::SeqCst);
        let available = self.queue.avail_ring();
        let read = |offset: u64| -> Result<u16, BrokenRing> {
            let place = GuestAddress(available.saturating_add(offset));
            let value = self.memory.load(place, Ordering::Relaxed);
            value.map(u16::from_le).map_err(out_of_memory)
        };
        if self.queue.event_idx_enabled() {
            let after = read(4 + u64::from(self.queue.size()) * 2)?;
            return Ok(self.notified.wrapping_sub(after).wrapping_sub(1) < count);
        }
        Ok(u32::from(read(0)?) & VRING_AVAIL_F_NO_INTERRUPT == 0)
    }
}

/// Takes the next chain of `queue`. After `None` the driver notifies the device when it adds one.
pub(super) fn next_chain<'m>(
    queue: &mut Queue,
    memory: &'m GuestMemoryMmap,
) -> Result<Option<Chain<'m>>, BrokenRing> {
    let taken = queue.iter(memory).map_err(BrokenRing)?.next();
    if taken.is_some() || !queue.enable_notification(memory).map_err(BrokenRing)? {
        return Ok(taken);
    }
    // One was added between the two reads; that it disappeared violates the specification.
    match queue.iter(memory).map_err(BrokenRing)?.next() {
        Some(chain) => Ok(Some(chain)),
        None => Err(BrokenRing(virtio_queue::Error::InvalidAvailRingIndex)),
    }
}

/// Whether another chain waits. After `false` the driver notifies the device when it adds one.
pub(super) fn has_more(queue: &mut Queue, memory: &GuestMemoryMmap) -> Result<bool, BrokenRing> {
    let available = queue.avail_idx(memory, Ordering::Acquire);
    if available.map_err(BrokenRing)?.0 != queue.next_avail() {
        return Ok(true);
    }
    queue.enable_notification(memory).map_err(BrokenRing)
}

fn out_of_memory(error: vm_memory::GuestMemoryError) -> BrokenRing {
    BrokenRing(virtio_queue::Error::GuestMemory(error))
}

/// The bytes of a chain: those that the device reads, and those that it writes, as two runs,
/// independent of the driver's split into descriptors (virtio 1.2, section 2.7.4).
pub struct Buffers<'a> {
    /// Bytes that the driver wrote for the device.
    pub from_driver: Reader<'a>,
    /// Room for the device's answer.
    pub to_driver: Writer<'a>,
}

impl fmt::Debug for Buffers<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buffers")
            .field("from_driver", &self.from_driver.available_bytes())
            .field("to_driver", &self.to_driver.available_bytes())
            .finish()
    }
}

impl<'a> Buffers<'a> {
    /// Both runs of a chain; `None` when a part is outside the guest's memory, or one that a device
    /// uses is lost. Bounded: a chain has at most the descriptors of its ring or indirect table, 65535,
    /// and less than 4 GiB.
    pub fn of(chain: &Chain<'a>, memory: &'a GuestMemoryMmap) -> Option<Self> {
        if !lost::can_use_all(chain, memory) {
            return None;
        }
        Some(Self {
            from_driver: chain.clone().reader(memory).ok()?,
            to_driver: chain.clone().writer(memory).ok()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use crate::virtio::test_driver::{BalloonDriver, RING_SIZE, ring};
    use vm_memory::{Bytes, GuestAddress};

    /// VIRTIO_F_EVENT_IDX, in addition to a balloon's features.
    const WITH_EVENT_INDEX: u64 = (1 << 32) | (1 << 29) | (1 << 5) | (1 << 2);

    #[test]
    fn a_driver_that_does_not_want_to_be_told_is_not() {
        let driver = BalloonDriver::started();
        let flags = GuestAddress(ring(2)[1]);
        for (flag, wanted) in [(1_u16, 0), (0, 1)] {
            driver.memory.write_obj(flag, flags).unwrap();
            driver.report(&[(0x40_0000, 0x1000)]);
            driver.serve(2);
            assert_eq!(driver.get(0x60), wanted);
        }
    }

    #[test]
    fn a_driver_with_event_indices_is_told_when_it_has_asked_and_asked_back_to_ring() {
        let driver = BalloonDriver::new();
        assert_eq!(driver.offered() & WITH_EVENT_INDEX, WITH_EVENT_INDEX);
        driver.start(WITH_EVENT_INDEX);
        let [_, available, used] = ring(2);
        let used_event = GuestAddress(available + 4 + u64::from(RING_SIZE) * 2);
        let available_event = GuestAddress(used + 4 + u64::from(RING_SIZE) * 8);
        let notified = || {
            let status = driver.get(0x60);
            driver.set(0x64, status);
            status & 1 != 0
        };
        // Request a notification for the second chain.
        driver.memory.write_obj(1_u16, used_event).unwrap();
        for (reports, wanted) in [(1, false), (2, true), (3, false)] {
            driver.report(&[(0x40_0000, 0x1000)]);
            driver.serve(2);
            assert_eq!((driver.used(2), driver.last_used(2)), (reports, (0, 0)));
            assert_eq!(notified(), wanted, "after {reports}");
            let ring_at: u16 = driver.memory.read_obj(available_event).unwrap();
            assert_eq!(ring_at, reports, "a notification is requested for the next");
        }
    }
}
