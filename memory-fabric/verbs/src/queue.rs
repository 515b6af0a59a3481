//! Completion queues, and sleeping until a request completes.

use super::abi::{
    ibv_comp_channel, ibv_cq, ibv_poll_cq, ibv_req_notify_cq, ibv_wc, ibv_wc_opcode, ibv_wc_status,
};
use super::device::Device;
use super::library::verbs;
use super::resources::Share;
use super::{RdmaError, check, failed};
use std::ffi::CStr;
use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd, RawFd};
use std::ptr::{self, NonNull};
use std::sync::Arc;

/// Number of completions polled at once.
const POLL_BATCH: usize = 16;

/// The completion of a request.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Done {
    /// Id of the request.
    pub id: u64,
    /// `IBV_WC_SUCCESS`, or an error code.
    pub status: u32,
    /// Vendor-specific error code.
    pub vendor: u32,
    /// The value of a WRITE of the peer that notified; `None` for a request of this end.
    pub notified: Option<u32>,
}

impl Done {
    /// Returns whether the request succeeded.
    #[must_use]
    pub fn is_success(self) -> bool {
        self.status == ibv_wc_status::IBV_WC_SUCCESS
    }

    /// Returns a description of the status.
    #[must_use]
    pub fn status_text(self) -> String {
        // SAFETY: the function returns a constant text for every number.
        let text = unsafe { (verbs().ibv_wc_status_str)(self.status) };
        if text.is_null() {
            return "unknown".to_owned();
        }
        // SAFETY: as above.
        let text = unsafe { CStr::from_ptr(text) };
        text.to_string_lossy().into_owned()
    }
}

/// A buffer of polled completions.
pub struct Taken {
    completions: Box<[ibv_wc; POLL_BATCH]>,
    filled: std::ops::Range<usize>,
}

impl Taken {
    /// Creates an empty buffer.
    #[must_use]
    pub fn new() -> Self {
        // SAFETY: a structure of numbers, for which zero is a valid value.
        let empty = |_| -> ibv_wc { unsafe { std::mem::zeroed() } };
        Self {
            completions: Box::new(std::array::from_fn(empty)),
            filled: 0..0,
        }
    }

    /// Returns whether all completions were taken from the buffer.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.filled.is_empty()
    }
}

impl Default for Taken {
    fn default() -> Self {
        Self::new()
    }
}

impl Iterator for Taken {
    type Item = Done;

    fn next(&mut self) -> Option<Done> {
        let completion = &self.completions[self.filled.next()?];
        Some(Done {
            id: completion.wr_id,
            status: completion.status,
            vendor: completion.vendor_err,
            notified: notified(completion),
        })
    }
}

/// Returns the value of a successful receive request: the other fields of one that failed are
/// undefined.
fn notified(completion: &ibv_wc) -> Option<u32> {
    let is_receive = completion.status == ibv_wc_status::IBV_WC_SUCCESS
        && completion.opcode == ibv_wc_opcode::IBV_WC_RECV_RDMA_WITH_IMM;
    is_receive.then(|| {
        // SAFETY: any bits are a valid number, and such a completion has one in network byte order.
        u32::from_be(unsafe { completion.imm_data_invalidated_rkey_union.imm_data })
    })
}

impl std::fmt::Debug for Taken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Taken({:?})", self.filled)
    }
}

/// A channel through which an adapter signals completions, with a descriptor.
#[derive(Debug)]
struct Channel {
    channel: NonNull<ibv_comp_channel>,
    device: Arc<Device>,
}

impl Channel {
    fn new(device: &Arc<Device>) -> Result<Self, RdmaError> {
        // SAFETY: the device is open.
        let channel = NonNull::new(unsafe { (verbs().ibv_create_comp_channel)(device.as_ptr()) });
        let channel = channel.ok_or_else(|| {
            failed(
                "ibv_create_comp_channel",
                device.name(),
                io::Error::last_os_error(),
            )
        })?;
        let channel = Self {
            channel,
            device: Arc::clone(device),
        };
        // Non-blocking, so that reading an event without one does not wait.
        rustix::io::ioctl_fionbio(channel.fd(), true).map_err(|error| {
            RdmaError::System("make an event channel non-blocking", error.into())
        })?;
        Ok(channel)
    }

    fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the channel is valid and open while it is borrowed, and its descriptor does not
        // change.
        unsafe { BorrowedFd::borrow_raw(self.channel.as_ref().fd) }
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        // SAFETY: its only queue is destroyed.
        let result = unsafe { (verbs().ibv_destroy_comp_channel)(self.channel.as_ptr()) };
        if let Err(error) = check("ibv_destroy_comp_channel", self.device.name(), result) {
            tracing::warn!("{error}");
        }
    }
}

/// The completion queue of queue pairs.
#[derive(Debug)]
pub struct CompletionQueue {
    queue: NonNull<ibv_cq>,
    /// `None` for a queue without sleepers.
    channel: Option<Channel>,
    device: Arc<Device>,
    _share: Share,
}

// SAFETY: a queue is not bound to a thread, and libibverbs locks what calls share.
unsafe impl Send for CompletionQueue {}
// SAFETY: as above.
unsafe impl Sync for CompletionQueue {}

impl CompletionQueue {
    /// Creates a queue for `entries` completions, with an event descriptor.
    pub fn with_events(device: &Arc<Device>, entries: usize) -> Result<Arc<Self>, RdmaError> {
        Self::create(device, entries, Some(Channel::new(device)?))
    }

    /// Returns the queue of ends that only answer, which is never polled. Each device has one.
    pub fn silent(device: &Arc<Device>) -> Result<Arc<Self>, RdmaError> {
        device.silent_queue()
    }

    pub(crate) fn for_answers(device: &Arc<Device>) -> Result<Arc<Self>, RdmaError> {
        Self::create(device, 1, None)
    }

    fn create(
        device: &Arc<Device>,
        entries: usize,
        channel: Option<Channel>,
    ) -> Result<Arc<Self>, RdmaError> {
        let share = device.resources().completion_queues.take()?;
        let entries = libc::c_int::try_from(entries).expect("a small constant");
        let events = channel
            .as_ref()
            .map_or(ptr::null_mut(), |channel| channel.channel.as_ptr());
        // SAFETY: the device is open, and the channel, if there is one, outlives the queue.
        let queue = unsafe {
            (verbs().ibv_create_cq)(device.as_ptr(), entries, ptr::null_mut(), events, 0)
        };
        let queue = NonNull::new(queue)
            .ok_or_else(|| failed("ibv_create_cq", device.name(), io::Error::last_os_error()));
        Ok(Arc::new(Self {
            queue: queue?,
            channel,
            device: Arc::clone(device),
            _share: share,
        }))
    }

    pub(crate) fn as_ptr(&self) -> *mut ibv_cq {
        self.queue.as_ptr()
    }

    /// Polls for completions if `taken` has none left; most adapters need no system call for it.
    pub fn poll(&self, taken: &mut Taken) -> Result<(), RdmaError> {
        if !taken.is_empty() {
            return Ok(());
        }
        let most = libc::c_int::try_from(POLL_BATCH).expect("a small constant");
        // SAFETY: the queue is valid, and the buffer has that many entries.
        let count = unsafe { ibv_poll_cq(self.as_ptr(), most, taken.completions.as_mut_ptr()) };
        match usize::try_from(count) {
            Ok(count) => {
                taken.filled = 0..count;
                Ok(())
            }
            Err(_) => Err(failed(
                "ibv_poll_cq",
                self.device.name(),
                io::Error::other("overrun"),
            )),
        }
    }

    /// Returns the descriptor that is readable after a completion since [`Self::arm`].
    pub fn event_fd(&self) -> Option<RawFd> {
        self.channel
            .as_ref()
            .map(|channel| channel.fd().as_raw_fd())
    }

    /// Returns the same descriptor, for as long as the queue is borrowed.
    pub fn events(&self) -> Option<BorrowedFd<'_>> {
        self.channel.as_ref().map(Channel::fd)
    }

    /// Requests an event for the next completion, and consumes earlier events. The caller must poll
    /// once more afterwards for completions from before the call.
    pub fn arm(&self) -> Result<(), RdmaError> {
        if let Some(channel) = &self.channel {
            let (mut queue, mut context) = (ptr::null_mut(), ptr::null_mut());
            // SAFETY: the channel is valid; an event belongs to its only queue, this one, and each
            // is acknowledged once.
            unsafe {
                while (verbs().ibv_get_cq_event)(
                    channel.channel.as_ptr(),
                    &raw mut queue,
                    &raw mut context,
                ) == 0
                {
                    (verbs().ibv_ack_cq_events)(queue, 1);
                }
            }
        }
        // SAFETY: the queue is valid.
        let result = unsafe { ibv_req_notify_cq(self.as_ptr(), 0) };
        check("ibv_req_notify_cq", self.device.name(), result)
    }
}

impl Drop for CompletionQueue {
    fn drop(&mut self) {
        // SAFETY: queue pairs keep the queue alive, so none is left; all events that were read have
        // been acknowledged.
        let result = unsafe { (verbs().ibv_destroy_cq)(self.as_ptr()) };
        if let Err(error) = check("ibv_destroy_cq", self.device.name(), result) {
            tracing::warn!("{error}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_receive_that_succeeded_has_a_value() {
        // SAFETY: a structure of numbers, for which zero is a valid value.
        let mut completion: ibv_wc = unsafe { std::mem::zeroed() };
        completion.imm_data_invalidated_rkey_union.imm_data = 0x0102_0304_u32.to_be();
        assert_eq!(notified(&completion), None, "of a request of this end");
        completion.opcode = ibv_wc_opcode::IBV_WC_RECV_RDMA_WITH_IMM;
        assert_eq!(notified(&completion), Some(0x0102_0304));
        completion.status = ibv_wc_status::IBV_WC_WR_FLUSH_ERR;
        assert_eq!(notified(&completion), None, "of a request that failed");
    }
}
