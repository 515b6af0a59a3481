//! A connection ready for READs of one lease.

use super::abi::{ibv_send_flags, ibv_send_wr, ibv_sge, ibv_wc_status, ibv_wr_opcode};
use super::device::{Device, Route};
use super::endpoint::{ConnectAnswer, Endpoint, RemoteMemory};
use super::library::verbs;
use super::memory::{Access, ProtectionDomain};
use super::pair::QueuePair;
use super::queue::{CompletionQueue, Taken};
use super::room::Room;
use super::staging::Staging;
use super::transport::ReadLane;
use super::{LANE_STALL_TIMEOUT, RdmaError};
use crate::page::PAGE_SIZE;
use crate::transport::IN_FLIGHT_MAX;
use std::ffi::CStr;
use std::net::TcpStream;
use std::os::fd::RawFd;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How long a lane that is taken down waits for what is outstanding on it. Nothing depends on
/// it: the end of the queue pair ends it all.
const DRAIN_TIME_MAX: Duration = Duration::from_millis(100);

/// What a lane is to be.
#[derive(Clone, Debug)]
pub(crate) struct LaneConfig {
    /// The device.
    pub device: Arc<Device>,
    /// Port and address.
    pub route: Route,
    /// Pages that may be on their way at once.
    pub pages: usize,
    /// The other end, for errors.
    pub peer: String,
}

/// A lane whose other end is not known yet.
#[derive(Debug)]
pub(crate) struct NewLane {
    pair: QueuePair,
    staging: Staging,
    queue: Arc<CompletionQueue>,
    pages: usize,
}

impl NewLane {
    pub(crate) fn endpoint(&self) -> Endpoint {
        self.pair.endpoint()
    }

    /// Connects it; `session` is the TCP connection over which the other end was made.
    pub(crate) fn connect(
        mut self,
        answer: &ConnectAnswer,
        session: TcpStream,
    ) -> Result<Lane, RdmaError> {
        self.pair.connect(&answer.endpoint)?;
        let requests = (0..IN_FLIGHT_MAX).map(|_| Request {
            page: 0,
            pages: 0,
            posted: false,
        });
        // SAFETY: structures of numbers and pointers, for which zero is a value.
        let (order, part): (ibv_send_wr, ibv_sge) = unsafe { std::mem::zeroed() };
        let mut orders = Vec::with_capacity(IN_FLIGHT_MAX);
        orders.resize_with(IN_FLIGHT_MAX, || ibv_send_wr {
            wr: super::abi::wr_t {
                rdma: super::abi::rdma_t {
                    remote_addr: 0,
                    rkey: answer.memory.key,
                },
            },
            opcode: ibv_wr_opcode::IBV_WR_RDMA_READ,
            send_flags: ibv_send_flags::IBV_SEND_SIGNALED.0,
            ..copy_of(&order)
        });
        Ok(Lane {
            pair: self.pair,
            staging: self.staging,
            queue: self.queue,
            memory: answer.memory,
            room: Room::new(self.pages),
            requests: requests.collect(),
            orders: orders.into_boxed_slice(),
            parts: vec![part; IN_FLIGHT_MAX].into_boxed_slice(),
            batch: 0,
            outstanding: 0,
            taken: Taken::new(),
            progress: Instant::now(),
            revoked: Arc::default(),
            failed: false,
            _session: session,
        })
    }
}

/// A request without what differs between requests.
fn copy_of(order: &ibv_send_wr) -> ibv_send_wr {
    // SAFETY: the structure is plain data; the binding only does not say that it can be copied.
    unsafe { ptr::read(order) }
}

#[derive(Clone, Copy, Debug)]
struct Request {
    /// Where in the staging buffer.
    page: usize,
    pages: usize,
    posted: bool,
}

/// A reliable connection for READs from one lease into a staging buffer.
///
/// When something fails the lane is of no more use; its owner hands it to the thread that made
/// it, which takes it down: that may take time, and no page is waited for meanwhile.
pub(crate) struct Lane {
    // In this order: when the pair is gone the adapter touches nothing any more, and the staging
    // buffer may become another's.
    pair: QueuePair,
    staging: Staging,
    queue: Arc<CompletionQueue>,
    memory: RemoteMemory,
    room: Room,
    /// Indexed by the number of a request.
    requests: Box<[Request]>,
    /// The batch that is posted next: `batch` of them, each with its part.
    orders: Box<[ibv_send_wr]>,
    parts: Box<[ibv_sge]>,
    batch: usize,
    outstanding: usize,
    taken: Taken,
    /// When something completed, or was first posted after all had.
    progress: Instant,
    /// Set when the lane has to be let go of.
    revoked: Arc<AtomicBool>,
    failed: bool,
    /// Its end tells the donor that this end is gone.
    _session: TcpStream,
}

// SAFETY: the pointers in requests are to this lane's own boxes, and are set before each use.
unsafe impl Send for Lane {}

impl std::fmt::Debug for Lane {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "Lane({}, {} outstanding)",
            self.pair.on(),
            self.outstanding
        )
    }
}

impl Lane {
    /// Makes this end of a lane.
    pub(crate) fn prepare(config: &LaneConfig) -> Result<NewLane, RdmaError> {
        let domain = ProtectionDomain::own(&config.device)?;
        let queue = CompletionQueue::with_events(&config.device, IN_FLIGHT_MAX)?;
        let pair = QueuePair::new(
            &domain,
            &queue,
            &config.route,
            IN_FLIGHT_MAX,
            Access::Local,
            &config.peer,
        )?;
        Ok(NewLane {
            pair,
            staging: Staging::new(&domain, config.pages)?,
            queue,
            pages: config.pages,
        })
    }

    /// What to set when the lane has to be let go of.
    pub(crate) fn revocation(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.revoked)
    }

    fn take(&mut self, complete: &mut dyn FnMut(u16, &[u8])) -> Result<bool, RdmaError> {
        let mut any = false;
        loop {
            self.queue.poll(&mut self.taken)?;
            let Some(done) = self.taken.next() else {
                if any {
                    self.progress = Instant::now();
                }
                return Ok(any);
            };
            any = true;
            if done.status != ibv_wc_status::IBV_WC_SUCCESS {
                return Err(RdmaError::Completion {
                    on: self.pair.on().to_owned(),
                    status: status_text(done.status),
                    code: done.status,
                    vendor: done.vendor,
                });
            }
            let number = u16::try_from(done.id).unwrap_or(u16::MAX);
            let request = self.requests.get_mut(usize::from(number));
            let Some(request) = request.filter(|request| request.posted) else {
                return Err(RdmaError::Unasked {
                    on: self.pair.on().to_owned(),
                    id: done.id,
                });
            };
            request.posted = false;
            let Request { page, pages, .. } = *request;
            self.outstanding -= 1;
            // SAFETY: the READ that targeted them has completed, and none is made before the
            // room is given back below.
            complete(number, unsafe { self.staging.bytes(page, pages) });
            self.room.give_back(page, pages);
        }
    }

    /// As [`ReadLane::add`], of a number of bytes.
    pub(super) fn add_bytes(&mut self, number: u16, offset: u64, bytes: u32) -> bool {
        let placed = self.add(number, offset, (bytes as usize).div_ceil(PAGE_SIZE));
        if placed {
            self.parts[self.batch - 1].length = bytes;
        }
        placed
    }

    /// Reads one page at `offset` of the lease, with nothing else outstanding; gives the time that
    /// took, and the bytes to `take`.
    pub(crate) fn read_now(
        &mut self,
        offset: u64,
        within: Duration,
        take: &mut dyn FnMut(&[u8]),
    ) -> Result<Duration, RdmaError> {
        if self.failed {
            return Err(RdmaError::CalledBack(self.pair.on().to_owned()));
        }
        let started = Instant::now();
        assert!(self.add(0, offset, 1), "a lane that is idle has room");
        self.post()?;
        while !self.poll(&mut |_, bytes| take(bytes))? {
            let waited = started.elapsed();
            if waited >= within {
                self.failed = true;
                let on = self.pair.on().to_owned();
                return Err(RdmaError::Stalled { on, waited });
            }
            std::thread::yield_now();
        }
        Ok(started.elapsed())
    }

    /// Ends the connection and takes what completes by that, for a while.
    fn drain(&mut self) {
        if let Err(error) = self.pair.fail() {
            tracing::debug!("{error}");
            return;
        }
        let deadline = Instant::now() + DRAIN_TIME_MAX;
        while self.outstanding > 0 && Instant::now() < deadline {
            if self.queue.poll(&mut self.taken).is_err() {
                return;
            }
            if self.taken.next().is_some() {
                self.outstanding -= 1;
            } else {
                std::thread::yield_now();
            }
        }
    }
}

impl ReadLane for Lane {
    fn add(&mut self, number: u16, offset: u64, pages: usize) -> bool {
        let bytes = (pages * PAGE_SIZE) as u64;
        assert!(
            offset
                .checked_add(bytes)
                .is_some_and(|end| end <= self.memory.bytes),
            "the layout stays inside the lease"
        );
        let request = &mut self.requests[usize::from(number)];
        assert!(!request.posted, "number {number} is in use");
        let Some(page) = self.room.take(pages) else {
            return false;
        };
        *request = Request {
            page,
            pages,
            posted: true,
        };
        self.parts[self.batch] = ibv_sge {
            addr: self.staging.address(page, pages),
            length: u32::try_from(bytes).expect("a run is short"),
            lkey: self.staging.local_key(),
        };
        let order = &mut self.orders[self.batch];
        order.wr_id = u64::from(number);
        order.wr.rdma.remote_addr = self.memory.base + offset;
        self.batch += 1;
        true
    }

    fn post(&mut self) -> Result<(), RdmaError> {
        if self.batch == 0 {
            return Ok(());
        }
        if self.outstanding == 0 {
            self.progress = Instant::now();
        }
        let parts = self.parts.as_mut_ptr();
        let orders = self.orders.as_mut_ptr();
        for index in 0..self.batch {
            let last = index + 1 == self.batch;
            // SAFETY: both boxes have a place for each request of a batch.
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
        self.outstanding += self.batch;
        self.batch = 0;
        // SAFETY: the chain was just made of valid requests, which the call copies. Their
        // targets are runs of the staging buffer that belong to no other request, and are
        // read only after completion; the buffer outlives the pair.
        let posted = unsafe { self.pair.post(orders) };
        posted.inspect_err(|_| self.failed = true)
    }

    fn poll(&mut self, complete: &mut dyn FnMut(u16, &[u8])) -> Result<bool, RdmaError> {
        // Relaxed: it says nothing about other memory.
        if self.revoked.load(Ordering::Relaxed) {
            self.failed = true;
            return Err(RdmaError::CalledBack(self.pair.on().to_owned()));
        }
        if self.outstanding == 0 {
            return Ok(false);
        }
        let result = self.take(complete);
        self.failed |= result.is_err();
        match result {
            Ok(false) if self.progress.elapsed() >= LANE_STALL_TIMEOUT => {
                self.failed = true;
                Err(RdmaError::Stalled {
                    on: self.pair.on().to_owned(),
                    waited: self.progress.elapsed(),
                })
            }
            result => result,
        }
    }

    fn arm(&mut self) -> bool {
        if self.outstanding == 0 || self.failed {
            return true;
        }
        // An error shows when it is polled next.
        let armed = self
            .queue
            .arm()
            .and_then(|()| self.queue.poll(&mut self.taken));
        armed.is_ok() && self.taken.is_empty()
    }

    fn event_fd(&self) -> Option<RawFd> {
        self.queue.event_fd()
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        self.drain();
    }
}

fn status_text(status: u32) -> String {
    // SAFETY: the function gives a constant text for every number.
    let text = unsafe { (verbs().ibv_wc_status_str)(status) };
    if text.is_null() {
        return "unknown".to_owned();
    }
    // SAFETY: as above.
    unsafe { CStr::from_ptr(text) }
        .to_string_lossy()
        .into_owned()
}
