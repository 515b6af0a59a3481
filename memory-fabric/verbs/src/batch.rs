//! Batches of requests that are posted with one doorbell.

use super::abi::{ibv_send_flags, ibv_send_wr, ibv_sge, ibv_wr_opcode};
use std::ptr;

/// A range of local memory, registered under `key`.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    /// Address of its first byte.
    pub address: u64,
    /// Its size.
    pub bytes: u32,
    /// The key of its [region](crate::memory::MemoryRegion).
    pub key: u32,
}

/// READs and WRITEs to be posted, each with one range of memory. No allocation after creation.
pub struct Batch {
    /// The first `count` of these are used, each with its element of `parts`.
    orders: Box<[ibv_send_wr]>,
    parts: Box<[ibv_sge]>,
    count: usize,
}

// SAFETY: the pointers in requests refer to this batch's own boxes, and are set before each use.
unsafe impl Send for Batch {}

impl Batch {
    /// Creates a batch for this many requests, which access the peer's memory with `key`.
    #[must_use]
    pub fn new(entries: usize, key: u32) -> Self {
        // SAFETY: structures of numbers and pointers, for which zero is a valid value.
        let (order, part): (ibv_send_wr, ibv_sge) = unsafe { std::mem::zeroed() };
        let mut orders = Vec::with_capacity(entries);
        orders.resize_with(entries, || {
            let rdma = super::abi::rdma_t {
                remote_addr: 0,
                rkey: key,
            };
            ibv_send_wr {
                wr: super::abi::wr_t { rdma },
                ..copy_of(&order)
            }
        });
        Self {
            orders: orders.into_boxed_slice(),
            parts: vec![part; entries].into_boxed_slice(),
            count: 0,
        }
    }

    /// Returns the number of requests.
    #[must_use]
    pub fn len(&self) -> usize {
        self.count
    }

    /// Returns whether it has no request.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Adds a READ from `remote` into `place`, with a completion.
    pub fn read(&mut self, id: u64, remote: u64, place: Place) {
        let signalled = ibv_send_flags::IBV_SEND_SIGNALED.0;
        let read = ibv_wr_opcode::IBV_WR_RDMA_READ;
        self.add((id, read, signalled), remote, place);
    }

    /// Adds a WRITE from `place` to `remote`. It has a completion only if it fails.
    pub fn write(&mut self, id: u64, remote: u64, place: Place) {
        let write = ibv_wr_opcode::IBV_WR_RDMA_WRITE;
        self.add((id, write, 0), remote, place);
    }

    fn add(&mut self, what: (u64, ibv_wr_opcode::Type, u32), remote: u64, place: Place) {
        self.parts[self.count] = ibv_sge {
            addr: place.address,
            length: place.bytes,
            lkey: place.key,
        };
        let order = &mut self.orders[self.count];
        (order.wr_id, order.opcode, order.send_flags) = what;
        order.wr.rdma.remote_addr = remote;
        self.count += 1;
    }

    /// Links all requests into a chain and returns the first, which is valid until a request is
    /// added; the batch is empty afterwards.
    pub(crate) fn take(&mut self) -> *mut ibv_send_wr {
        let parts = self.parts.as_mut_ptr();
        let orders = self.orders.as_mut_ptr();
        for index in 0..self.count {
            let last = index + 1 == self.count;
            // SAFETY: both boxes have an element for each request of a batch.
            unsafe {
                let order = &mut *orders.add(index);
                order.sg_list = parts.add(index);
                order.num_sge = 1;
                order.next = if last {
                    ptr::null_mut()
                } else {
                    orders.add(index + 1)
                };
            }
        }
        self.count = 0;
        orders
    }
}

impl std::fmt::Debug for Batch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Batch({} requests)", self.count)
    }
}

/// Copies the fields that all requests share.
fn copy_of(order: &ibv_send_wr) -> ibv_send_wr {
    // SAFETY: the structure is plain data; only its binding does not implement Copy.
    unsafe { ptr::read(order) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_batch_is_one_chain_and_only_reads_are_signalled() {
        let mut batch = Batch::new(3, 17);
        for _ in 0..2 {
            let place = |address| Place {
                address,
                bytes: 4096,
                key: 5,
            };
            batch.write(1, 0x1000, place(0x10));
            batch.read(2, 0x2000, place(0x20));
            assert_eq!(batch.len(), 2);
            let first = batch.take();
            assert_eq!(batch.len(), 0);
            // SAFETY: the chain is valid until a request is added.
            unsafe {
                let second = (*first).next;
                assert_eq!(((*first).wr_id, (*second).wr_id), (1, 2));
                assert_eq!((*first).send_flags, 0);
                assert_eq!((*second).send_flags, ibv_send_flags::IBV_SEND_SIGNALED.0);
                let remote = (*second).wr.rdma;
                assert_eq!((remote.remote_addr, remote.rkey), (0x2000, 17));
                let part = *(*second).sg_list;
                assert_eq!((part.addr, part.length, part.lkey), (0x20, 4096, 5));
                assert!((*second).next.is_null());
            }
        }
    }
}
