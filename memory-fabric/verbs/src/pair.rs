//! Queue pairs of reliable connections, and their states.
//!
//! # Retries
//!
//! The adapter repeats a request without an answer after [`TIMEOUT_EXPONENT`](super::settings) (67 ms; the
//! specification allows adapters up to four times as long), at most `RETRIES` times. An outage of
//! 200 ms thus only costs time, and the failure of a peer is detected after half a second on
//! SoftRoCE, and after about two seconds on slower adapters. A shorter timeout would repeat
//! requests to which a busy SoftRoCE peer is only slow to answer. A longer one would increase the
//! cost of packet loss, since the loss of an answer's last packet is detected by the timeout only.
//!
//! READs and WRITEs need no receive requests at the peer, so a peer with pinned memory is never
//! "not ready": `NOT_READY_RETRIES` is for one that nevertheless claims to be, and is finite. A
//! peer with on-demand paging reports it while it allocates a page, which takes as long as its
//! kernel takes: `NOT_READY_RETRIES_PAGING` is unlimited, and the lane's own deadline ends the
//! retries. A WRITE that notifies needs a receive request: its sender counts those that are left.
//!
//! # WRITEs that carry their bytes
//!
//! An adapter reads the bytes of a WRITE from memory after it has taken the request. A few bytes fit
//! into the request itself, which saves that read (`IBV_SEND_INLINE`). How many fit is decided when
//! the queue pair is created: [`Depths::inline_bytes`] are asked for.

use super::abi::{
    ibv_gid, ibv_post_recv, ibv_post_send, ibv_qp, ibv_qp_attr, ibv_qp_attr_mask, ibv_qp_cap,
    ibv_qp_init_attr, ibv_qp_type, ibv_recv_wr, ibv_send_flags, ibv_send_wr, ibv_sge,
    ibv_wr_opcode, rdma_t,
};
use super::batch::{Batch, Request, Verb};
use super::device::{LinkLayer, Mtu, Route};
use super::endpoint::{Endpoint, NUMBER_MAX};
use super::library::verbs;
use super::memory::{Access, ProtectionDomain};
use super::queue::CompletionQueue;
use super::resources::Share;
use super::settings::Retries;
use super::{RdmaError, check, failed};
use std::io;
use std::ptr::{self, NonNull};
use std::sync::Arc;

mod state;

pub use state::PairState;

/// Pause before a retry to a peer that is not ready: code 12 is 0.64 ms.
const NOT_READY_TIMER: u8 = 12;
/// Hop limit of packets.
const HOPS_MAX: u8 = 64;

/// Fewer bytes in a request are not worth another try.
const INLINE_BYTES_LEAST: u32 = 32;

/// How many requests a queue pair takes.
#[derive(Clone, Copy, Debug)]
pub struct Depths {
    /// READs and WRITEs.
    pub requests: usize,
    /// Receive requests, each for one WRITE of the peer that notifies.
    pub receives: usize,
    /// WRITEs of up to so many bytes carry them, or of as many as the adapter takes.
    pub inline_bytes: u16,
}

/// One end of a reliable connection.
#[derive(Debug)]
pub struct QueuePair {
    pair: NonNull<ibv_qp>,
    state: PairState,
    route: Route,
    packet_number: u32,
    reads_answered: u8,
    reads_sent: u8,
    /// The peer and the largest payload of a packet, once connected.
    connected: Option<(Endpoint, Mtu)>,
    chain: Chain,
    /// Description for errors: "queue pair 17 of rxe0 to 10.77.0.2:7700".
    on: String,
    /// Keeps the queue alive for the lifetime of the pair.
    _queue: Arc<CompletionQueue>,
    domain: Arc<ProtectionDomain>,
    _share: Share,
}

// SAFETY: a queue pair is not bound to a thread, and the pointers in its chain, which refer to the
// chain's own boxes, are set before each use.
unsafe impl Send for QueuePair {}

impl QueuePair {
    /// Creates a queue pair for up to `requests` requests on the port of `route`, ready to be
    /// connected. `access` is the peer's right to memory of the domain.
    pub fn new(
        domain: &Arc<ProtectionDomain>,
        queue: &Arc<CompletionQueue>,
        route: &Route,
        requests: usize,
        access: Access,
        peer: &str,
    ) -> Result<Self, RdmaError> {
        // Nothing is received, but some providers require an entry.
        let depths = Depths {
            requests,
            receives: 1,
            inline_bytes: 0,
        };
        Self::with_depths(domain, queue, route, depths, access, peer)
    }

    /// Like [`new`](Self::new), for a pair that is also notified.
    pub fn with_depths(
        domain: &Arc<ProtectionDomain>,
        queue: &Arc<CompletionQueue>,
        route: &Route,
        depths: Depths,
        access: Access,
        peer: &str,
    ) -> Result<Self, RdmaError> {
        let device = domain.device();
        let share = device.resources().queue_pairs.take()?;
        let packet_number =
            random_packet_number().map_err(|error| RdmaError::System("get random bytes", error))?;
        let attributes = ibv_qp_init_attr {
            qp_context: ptr::null_mut(),
            send_cq: queue.as_ptr(),
            recv_cq: queue.as_ptr(),
            srq: ptr::null_mut(),
            cap: ibv_qp_cap {
                max_send_wr: u32::try_from(depths.requests).expect("a small constant"),
                max_recv_wr: u32::try_from(depths.receives).expect("a small constant"),
                max_send_sge: 1,
                max_recv_sge: 1,
                max_inline_data: 0,
            },
            qp_type: ibv_qp_type::IBV_QPT_RC,
            sq_sig_all: 0,
        };
        let created = with_inline(depths.inline_bytes.into(), |bytes| {
            let mut attributes = attributes;
            attributes.cap.max_inline_data = bytes;
            // SAFETY: domain and queue are valid, and are kept for the lifetime of the pair.
            let pair = unsafe { (verbs().ibv_create_qp)(domain.as_ptr(), &raw mut attributes) };
            let pair = NonNull::new(pair).ok_or_else(io::Error::last_os_error)?;
            // Adapters may give more than they are asked for.
            Ok((pair, attributes.cap.max_inline_data))
        });
        let (pair, inline_bytes) = created.map_err(|error| {
            let on = format!("{} to {peer}", device.name());
            failed("ibv_create_qp", &on, error)
        })?;
        // SAFETY: the pair is valid, and its number does not change.
        let number = unsafe { pair.as_ref().qp_num };
        let mut pair = Self {
            pair,
            state: PairState::Reset,
            route: route.clone(),
            packet_number,
            reads_answered: device.limits().reads_answered,
            reads_sent: device.limits().reads_sent,
            connected: None,
            chain: Chain::new(depths.requests, inline_bytes),
            on: format!("queue pair {number} of {} to {peer}", device.name()),
            _queue: Arc::clone(queue),
            domain: Arc::clone(domain),
            _share: share,
        };
        if depths.inline_bytes > 0 {
            let asked = depths.inline_bytes;
            tracing::debug!(on = pair.on, asked, inline_bytes, "bytes that WRITEs carry");
        }
        let mut attributes = empty();
        attributes.pkey_index = route.partition_index;
        attributes.port_num = route.port;
        attributes.qp_access_flags = access.rights().0;
        let mask = ibv_qp_attr_mask::IBV_QP_PKEY_INDEX
            | ibv_qp_attr_mask::IBV_QP_PORT
            | ibv_qp_attr_mask::IBV_QP_ACCESS_FLAGS;
        pair.become_state(PairState::Init, attributes, mask)?;
        Ok(pair)
    }

    /// Returns this end's parameters for the peer.
    pub fn endpoint(&self) -> Endpoint {
        Endpoint {
            // SAFETY: the pair is valid, and its number does not change.
            queue_pair: unsafe { self.pair.as_ref().qp_num },
            packet_number: self.packet_number,
            link: self.route.link,
            lid: self.route.lid,
            gid: self.route.gid,
            mtu_bytes: self.route.mtu.bytes(),
            reads_answered: self.reads_answered.max(1),
        }
    }

    /// Connects to the peer.
    pub fn connect(&mut self, other: &Endpoint, retries: Retries) -> Result<(), RdmaError> {
        let mtu = other.check()?.min(self.route.mtu);
        if other.link != self.route.link {
            return Err(RdmaError::Mismatch {
                ours: self.route.link,
                theirs: other.link,
            });
        }
        let mut attributes = empty();
        attributes.path_mtu = mtu.to_verbs();
        attributes.dest_qp_num = other.queue_pair;
        attributes.rq_psn = other.packet_number;
        attributes.max_dest_rd_atomic = self.reads_answered;
        attributes.min_rnr_timer = NOT_READY_TIMER;
        attributes.ah_attr.port_num = self.route.port;
        attributes.ah_attr.sl = self.route.service_level;
        match self.route.link {
            LinkLayer::InfiniBand => attributes.ah_attr.dlid = other.lid,
            LinkLayer::Ethernet => {
                attributes.ah_attr.is_global = 1;
                attributes.ah_attr.grh.dgid = ibv_gid { raw: other.gid.0 };
                attributes.ah_attr.grh.sgid_index = self.route.gid_index;
                attributes.ah_attr.grh.hop_limit = HOPS_MAX;
                attributes.ah_attr.grh.traffic_class = self.route.traffic_class;
            }
        }
        let mask = ibv_qp_attr_mask::IBV_QP_AV
            | ibv_qp_attr_mask::IBV_QP_PATH_MTU
            | ibv_qp_attr_mask::IBV_QP_DEST_QPN
            | ibv_qp_attr_mask::IBV_QP_RQ_PSN
            | ibv_qp_attr_mask::IBV_QP_MAX_DEST_RD_ATOMIC
            | ibv_qp_attr_mask::IBV_QP_MIN_RNR_TIMER;
        self.become_state(PairState::ReadyToReceive, attributes, mask)?;

        let mut attributes = empty();
        attributes.timeout = retries.timeout_exponent;
        attributes.retry_cnt = retries.count;
        attributes.rnr_retry = retries.not_ready;
        attributes.sq_psn = self.packet_number;
        attributes.max_rd_atomic = self.reads_sent.min(other.reads_answered);
        let mask = ibv_qp_attr_mask::IBV_QP_TIMEOUT
            | ibv_qp_attr_mask::IBV_QP_RETRY_CNT
            | ibv_qp_attr_mask::IBV_QP_RNR_RETRY
            | ibv_qp_attr_mask::IBV_QP_SQ_PSN
            | ibv_qp_attr_mask::IBV_QP_MAX_QP_RD_ATOMIC;
        self.become_state(PairState::ReadyToSend, attributes, mask)?;
        self.connected = Some((*other, mtu));
        Ok(())
    }

    /// Returns the port and the address of this end.
    pub fn route(&self) -> &Route {
        &self.route
    }

    /// Returns the peer, and the largest payload of a packet to it; `None` before the connection.
    pub fn connected(&self) -> Option<(Endpoint, Mtu)> {
        self.connected
    }

    /// Ends the connection: outstanding requests complete with an error.
    pub fn fail(&mut self) -> Result<(), RdmaError> {
        self.become_state(PairState::Error, empty(), ibv_qp_attr_mask(0))
    }

    fn become_state(
        &mut self,
        next: PairState,
        mut attributes: ibv_qp_attr,
        mask: ibv_qp_attr_mask,
    ) -> Result<(), RdmaError> {
        if !self.state.may_become(next) {
            return Err(RdmaError::State {
                on: self.on.clone(),
                from: self.state,
                to: next,
            });
        }
        attributes.qp_state = next.to_verbs();
        let mask = (mask | ibv_qp_attr_mask::IBV_QP_STATE).0;
        let mask = libc::c_int::try_from(mask).expect("small flags");
        // SAFETY: the pair is valid, and the structure has the fields that the mask names.
        let result =
            unsafe { (verbs().ibv_modify_qp)(self.pair.as_ptr(), &raw mut attributes, mask) };
        check("ibv_modify_qp", &self.on, result).inspect_err(|error| {
            tracing::debug!(?next, "{error}");
        })?;
        self.state = next;
        Ok(())
    }

    /// Posts a batch of requests with one doorbell; the batch is empty afterwards.
    ///
    /// # Safety
    ///
    /// The memory to which the requests write must be registered for that, and its contents must
    /// not be relied on until they have completed or the pair is destroyed.
    pub unsafe fn post(&mut self, batch: &mut Batch) -> Result<(), RdmaError> {
        let first = self.chain.build(batch);
        let mut bad = ptr::null_mut();
        // SAFETY: the pair is valid, and the chain was just built from valid requests, which the
        // call copies; the caller guarantees the rest.
        let result = unsafe { ibv_post_send(self.pair.as_ptr(), first, &raw mut bad) };
        check("ibv_post_send", &self.on, result)
    }

    /// Posts a batch of WRITEs with one doorbell; the batch is empty afterwards.
    ///
    /// # Panics
    ///
    /// When the batch has a READ.
    pub fn post_writes(&mut self, batch: &mut Batch) -> Result<(), RdmaError> {
        assert!(batch.only_writes(), "a READ among WRITEs");
        if batch.is_empty() {
            return Ok(());
        }
        // SAFETY: WRITEs change no memory of this process.
        unsafe { self.post(batch) }
    }

    /// Posts receive requests, which take no bytes: each completes with the value of a WRITE of the
    /// peer that notifies.
    pub fn post_receives(&mut self, count: usize) -> Result<(), RdmaError> {
        for _ in 0..count {
            let mut order = ibv_recv_wr {
                wr_id: 0,
                next: ptr::null_mut(),
                sg_list: ptr::null_mut(),
                num_sge: 0,
            };
            let mut bad = ptr::null_mut();
            // SAFETY: the pair is valid, and the request, which the call copies, names no memory.
            let result = unsafe { ibv_post_recv(self.pair.as_ptr(), &raw mut order, &raw mut bad) };
            check("ibv_post_recv", &self.on, result)?;
        }
        Ok(())
    }

    /// Destroys the queue pair. Returns its domain if that failed, now or for another pair of it, and
    /// the adapter [may still access](ProtectionDomain::may_be_accessed) its memory.
    #[must_use]
    pub fn end(self) -> Option<Arc<ProtectionDomain>> {
        let domain = Arc::clone(&self.domain);
        drop(self);
        domain.may_be_accessed().then_some(domain)
    }

    /// Returns the device's name.
    pub fn device(&self) -> &str {
        self.domain.device().name()
    }

    /// Returns device, number and peer.
    #[must_use]
    pub fn on(&self) -> &str {
        &self.on
    }
}

/// The requests of a batch, in the form that the adapter's library reads. No allocation after
/// creation.
struct Chain {
    orders: Box<[ibv_send_wr]>,
    /// The memory of each request.
    parts: Box<[ibv_sge]>,
    /// WRITEs of up to so many bytes carry them.
    inline_bytes: u32,
}

impl Chain {
    fn new(entries: usize, inline_bytes: u32) -> Self {
        // SAFETY: structures of numbers and pointers, for which zero is a valid value.
        let order = || unsafe { std::mem::zeroed() };
        let mut orders = Vec::with_capacity(entries);
        orders.resize_with(entries, order);
        let part = ibv_sge {
            addr: 0,
            length: 0,
            lkey: 0,
        };
        Self {
            orders: orders.into_boxed_slice(),
            parts: vec![part; entries].into_boxed_slice(),
            inline_bytes,
        }
    }

    /// Links the requests of a batch, which is empty afterwards, and returns the first. It is valid
    /// until the next call.
    ///
    /// # Panics
    ///
    /// When there are more than entries.
    fn build(&mut self, batch: &mut Batch) -> *mut ibv_send_wr {
        let (count, rkey) = (batch.len(), batch.key());
        assert!(
            count <= self.orders.len(),
            "more requests than the pair takes"
        );
        let (orders, parts) = (self.orders.as_mut_ptr(), self.parts.as_mut_ptr());
        for (index, request) in batch.take().enumerate() {
            // SAFETY: both boxes have an element for each request.
            let (order, part) = unsafe { (&mut *orders.add(index), parts.add(index)) };
            let place = ibv_sge {
                addr: request.place.address,
                length: request.place.bytes,
                lkey: request.place.key,
            };
            // SAFETY: as above.
            unsafe { part.write(place) };
            order.opcode = match request.verb {
                Verb::Read => ibv_wr_opcode::IBV_WR_RDMA_READ,
                Verb::Write => ibv_wr_opcode::IBV_WR_RDMA_WRITE,
                Verb::Notify(value) => {
                    let immediate = &mut order.imm_data_invalidated_rkey_union;
                    immediate.imm_data = value.to_be();
                    ibv_wr_opcode::IBV_WR_RDMA_WRITE_WITH_IMM
                }
            };
            order.send_flags = self.flags(&request);
            order.wr_id = request.id;
            order.wr.rdma = rdma_t {
                remote_addr: request.remote,
                rkey,
            };
            // Adapters differ in what a part without bytes means.
            (order.sg_list, order.num_sge) = (part, (request.place.bytes > 0).into());
            order.next = if index + 1 == count {
                ptr::null_mut()
            } else {
                orders.wrapping_add(index + 1)
            };
        }
        orders
    }

    fn flags(&self, request: &Request) -> u32 {
        let mut flags = match request.verb {
            Verb::Read | Verb::Notify(_) => ibv_send_flags::IBV_SEND_SIGNALED.0,
            Verb::Write => 0,
        };
        let bytes = request.place.bytes;
        if request.verb != Verb::Read && bytes > 0 && bytes <= self.inline_bytes {
            flags |= ibv_send_flags::IBV_SEND_INLINE.0;
        }
        flags
    }
}

impl std::fmt::Debug for Chain {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Chain({} entries)", self.orders.len())
    }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        // SAFETY: the pair is ours. After the call the adapter no longer accesses memory for it.
        let result = unsafe { (verbs().ibv_destroy_qp)(self.pair.as_ptr()) };
        if let Err(error) = check("ibv_destroy_qp", &self.on, result) {
            self.domain.keep_memory_unused(&error);
            tracing::warn!("{error}");
        }
    }
}

/// Creates a queue pair whose WRITEs carry up to `asked` bytes, or as many as the adapter takes: it
/// refuses more, and says nowhere how many. `create` returns how many the new pair takes.
fn with_inline<T>(
    asked: u32,
    mut create: impl FnMut(u32) -> io::Result<(T, u32)>,
) -> io::Result<(T, u32)> {
    let mut bytes = asked;
    loop {
        match create(bytes) {
            Ok((pair, given)) => return Ok((pair, given.min(asked))),
            Err(error) if bytes == 0 => return Err(error),
            Err(_) if bytes < INLINE_BYTES_LEAST => bytes = 0,
            Err(_) => bytes /= 2,
        }
    }
}

fn empty() -> ibv_qp_attr {
    // SAFETY: a structure of numbers, for which zero is a valid value.
    unsafe { std::mem::zeroed() }
}

fn random_packet_number() -> io::Result<u32> {
    Ok(getrandom::u32()? & NUMBER_MAX)
}

#[cfg(test)]
#[path = "pair_tests.rs"]
mod tests;
