//! The part of libibverbs' binary interface that is used here: structures and numbers as
//! `infiniband/verbs.h` of rdma-core declares them, under its names.
//!
//! That interface is stable within `libibverbs.so.1`: structures grow at their ends only, and
//! what grows is made by the library. So of those (devices, contexts, queues, pairs) only the
//! beginning is declared, up to the last field that is read; of those that we make, all. Sizes
//! and places are asserted in `layout`, and a test compares them with the header.

#![allow(
    non_camel_case_types,
    dead_code,
    reason = "the names of the header, and its lists as they are"
)]

mod layout;

use libc::{c_char, c_int, c_uint, c_void};
use std::ops::BitOr;

/// Constants of an enumeration of C, in a module of its name.
macro_rules! enumeration {
    ($name:ident: $type:ty { $($constant:ident = $value:expr;)* }) => {
        pub mod $name {
            pub type Type = $type;
            $(pub const $constant: Type = $value;)*
        }
    };
}

/// Flags of C, which can be joined.
macro_rules! flags {
    ($name:ident { $($constant:ident = $bit:expr;)* }) => {
        #[repr(transparent)]
        #[derive(Clone, Copy, Debug, Eq, PartialEq)]
        pub struct $name(pub c_uint);
        impl $name {
            $(pub const $constant: Self = Self(1 << $bit);)*
        }
        impl BitOr for $name {
            type Output = Self;
            fn bitor(self, other: Self) -> Self {
                Self(self.0 | other.0)
            }
        }
    };
}

enumeration!(ibv_transport_type: i32 {
    IBV_TRANSPORT_IB = 0;
});
enumeration!(ibv_port_state: u32 {
    IBV_PORT_ACTIVE = 4;
});
enumeration!(ibv_qp_type: u32 {
    IBV_QPT_RC = 2;
});
enumeration!(ibv_qp_state: u32 {
    IBV_QPS_RESET = 0;
    IBV_QPS_INIT = 1;
    IBV_QPS_RTR = 2;
    IBV_QPS_RTS = 3;
    IBV_QPS_ERR = 6;
});
enumeration!(ibv_wr_opcode: u32 {
    IBV_WR_RDMA_WRITE = 0;
    IBV_WR_RDMA_READ = 4;
});
enumeration!(ibv_wc_status: u32 {
    IBV_WC_SUCCESS = 0;
});

pub const IBV_GID_TYPE_IB: u32 = 0;
pub const IBV_GID_TYPE_ROCE_V1: u32 = 1;
pub const IBV_GID_TYPE_ROCE_V2: u32 = 2;

flags!(ibv_access_flags {
    IBV_ACCESS_LOCAL_WRITE = 0;
    IBV_ACCESS_REMOTE_WRITE = 1;
    IBV_ACCESS_REMOTE_READ = 2;
    IBV_ACCESS_ON_DEMAND = 6;
});
flags!(ibv_send_flags {
    IBV_SEND_FENCE = 0;
    IBV_SEND_SIGNALED = 1;
    IBV_SEND_INLINE = 3;
});
flags!(ibv_qp_attr_mask {
    IBV_QP_STATE = 0;
    IBV_QP_ACCESS_FLAGS = 3;
    IBV_QP_PKEY_INDEX = 4;
    IBV_QP_PORT = 5;
    IBV_QP_AV = 7;
    IBV_QP_PATH_MTU = 8;
    IBV_QP_TIMEOUT = 9;
    IBV_QP_RETRY_CNT = 10;
    IBV_QP_RNR_RETRY = 11;
    IBV_QP_RQ_PSN = 12;
    IBV_QP_MAX_QP_RD_ATOMIC = 13;
    IBV_QP_MIN_RNR_TIMER = 15;
    IBV_QP_SQ_PSN = 16;
    IBV_QP_MAX_DEST_RD_ATOMIC = 17;
    IBV_QP_DEST_QPN = 20;
});

/// A device; its beginning.
#[repr(C)]
pub struct ibv_device {
    _ops: [*mut c_void; 2],
    pub node_type: c_int,
    pub transport_type: ibv_transport_type::Type,
    pub name: [c_char; 64],
    pub dev_name: [c_char; 64],
    pub dev_path: [c_char; 256],
    pub ibdev_path: [c_char; 256],
}

/// An open device; its beginning.
#[repr(C)]
pub struct ibv_context {
    pub device: *mut ibv_device,
    pub ops: ibv_context_ops,
    _descriptors: [c_int; 3],
    _mutex: libc::pthread_mutex_t,
    pub abi_compat: *mut c_void,
}

/// The end of what an open device is a part of, when its `abi_compat` says so: `verbs_context`
/// grows at its front.
#[repr(C)]
pub struct verbs_context_end {
    pub query_device_ex: Option<
        unsafe extern "C" fn(
            *mut ibv_context,
            *const c_void,
            *mut ibv_device_attr_ex,
            usize,
        ) -> c_int,
    >,
    /// From `ibv_destroy_flow` to `_ABI_placeholder3`.
    _unused: [*mut c_void; 11],
    /// Of the whole.
    pub sz: usize,
    pub context: ibv_context,
}

/// What is called most; the rest of the table is for other uses, or for old libraries.
#[repr(C)]
pub struct ibv_context_ops {
    _unused_1: [*mut c_void; 11],
    pub poll_cq: Option<unsafe extern "C" fn(*mut ibv_cq, c_int, *mut ibv_wc) -> c_int>,
    pub req_notify_cq: Option<unsafe extern "C" fn(*mut ibv_cq, c_int) -> c_int>,
    _unused_2: [*mut c_void; 12],
    pub post_send:
        Option<unsafe extern "C" fn(*mut ibv_qp, *mut ibv_send_wr, *mut *mut ibv_send_wr) -> c_int>,
    _unused_3: [*mut c_void; 6],
}

/// A protection domain; its beginning.
#[repr(C)]
pub struct ibv_pd {
    pub context: *mut ibv_context,
}

/// A memory region.
#[repr(C)]
pub struct ibv_mr {
    pub context: *mut ibv_context,
    pub pd: *mut ibv_pd,
    pub addr: *mut c_void,
    pub length: usize,
    pub handle: u32,
    pub lkey: u32,
    pub rkey: u32,
}

/// A channel for events.
#[repr(C)]
pub struct ibv_comp_channel {
    pub context: *mut ibv_context,
    pub fd: c_int,
    pub refcnt: c_int,
}

/// A completion queue; its beginning.
#[repr(C)]
pub struct ibv_cq {
    pub context: *mut ibv_context,
    pub channel: *mut ibv_comp_channel,
}

/// A queue pair; its beginning.
#[repr(C)]
pub struct ibv_qp {
    pub context: *mut ibv_context,
    pub qp_context: *mut c_void,
    pub pd: *mut ibv_pd,
    pub send_cq: *mut ibv_cq,
    pub recv_cq: *mut ibv_cq,
    _srq: *mut c_void,
    pub handle: u32,
    pub qp_num: u32,
}

/// What a device can do, as `ibv_query_device` fills it.
#[repr(C)]
pub struct ibv_device_attr {
    pub fw_ver: [c_char; 64],
    pub node_guid: u64,
    pub sys_image_guid: u64,
    pub max_mr_size: u64,
    pub page_size_cap: u64,
    pub vendor_id: u32,
    pub vendor_part_id: u32,
    pub hw_ver: u32,
    pub max_qp: c_int,
    pub max_qp_wr: c_int,
    pub device_cap_flags: c_uint,
    pub max_sge: c_int,
    pub max_sge_rd: c_int,
    pub max_cq: c_int,
    pub max_cqe: c_int,
    pub max_mr: c_int,
    pub max_pd: c_int,
    pub max_qp_rd_atom: c_int,
    pub max_ee_rd_atom: c_int,
    pub max_res_rd_atom: c_int,
    pub max_qp_init_rd_atom: c_int,
    /// From `max_ee_init_rd_atom` to `max_srq_sge`.
    _unused: [c_int; 16],
    pub max_pkeys: u16,
    pub local_ca_ack_delay: u8,
    pub phys_port_cnt: u8,
}

/// What a device can do of on-demand paging.
#[repr(C)]
pub struct ibv_odp_caps {
    pub general_caps: u64,
    pub per_transport_caps: per_transport_caps,
}

/// The same for each kind of queue pair.
#[repr(C)]
pub struct per_transport_caps {
    pub rc_odp_caps: u32,
    pub uc_odp_caps: u32,
    pub ud_odp_caps: u32,
}

/// What a device can do, as `query_device_ex` fills it, which is told how long this is.
#[repr(C)]
pub struct ibv_device_attr_ex {
    pub orig_attr: ibv_device_attr,
    pub comp_mask: u32,
    pub odp_caps: ibv_odp_caps,
    /// From `completion_timestamp_mask` to `phys_port_cnt_ex`.
    _unused: [u64; 17],
}

/// A port, as `ibv_query_port` fills it.
#[repr(C)]
pub struct ibv_port_attr {
    pub state: ibv_port_state::Type,
    pub max_mtu: c_uint,
    pub active_mtu: c_uint,
    pub gid_tbl_len: c_int,
    pub port_cap_flags: u32,
    pub max_msg_sz: u32,
    pub bad_pkey_cntr: u32,
    pub qkey_viol_cntr: u32,
    pub pkey_tbl_len: u16,
    pub lid: u16,
    pub sm_lid: u16,
    /// From `lmc` to `phys_state`.
    _unused: [u8; 8],
    pub link_layer: u8,
    pub flags: u8,
    pub port_cap_flags2: u16,
    pub active_speed_ex: u32,
}

/// A global identifier, as a union with its two halves.
#[repr(C)]
#[derive(Clone, Copy)]
pub union ibv_gid {
    pub raw: [u8; 16],
    pub global: ibv_gid_global_t,
}

/// The halves.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_gid_global_t {
    pub subnet_prefix: u64,
    pub interface_id: u64,
}

/// An entry of a port's table.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_gid_entry {
    pub gid: ibv_gid,
    pub gid_index: u32,
    pub port_num: u32,
    pub gid_type: u32,
    pub ndev_ifindex: u32,
}

/// The global part of an address.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_global_route {
    pub dgid: ibv_gid,
    pub flow_label: u32,
    pub sgid_index: u8,
    pub hop_limit: u8,
    pub traffic_class: u8,
}

/// An address.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_ah_attr {
    pub grh: ibv_global_route,
    pub dlid: u16,
    pub sl: u8,
    pub src_path_bits: u8,
    pub static_rate: u8,
    pub is_global: u8,
    pub port_num: u8,
}

/// How much a queue pair is to hold.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_qp_cap {
    pub max_send_wr: u32,
    pub max_recv_wr: u32,
    pub max_send_sge: u32,
    pub max_recv_sge: u32,
    pub max_inline_data: u32,
}

/// What a queue pair is to be.
#[repr(C)]
pub struct ibv_qp_init_attr {
    pub qp_context: *mut c_void,
    pub send_cq: *mut ibv_cq,
    pub recv_cq: *mut ibv_cq,
    pub srq: *mut c_void,
    pub cap: ibv_qp_cap,
    pub qp_type: ibv_qp_type::Type,
    pub sq_sig_all: c_int,
}

/// What of a queue pair is to change.
#[repr(C)]
pub struct ibv_qp_attr {
    pub qp_state: ibv_qp_state::Type,
    pub cur_qp_state: ibv_qp_state::Type,
    pub path_mtu: c_uint,
    pub path_mig_state: c_uint,
    pub qkey: u32,
    pub rq_psn: u32,
    pub sq_psn: u32,
    pub dest_qp_num: u32,
    pub qp_access_flags: c_uint,
    pub cap: ibv_qp_cap,
    pub ah_attr: ibv_ah_attr,
    pub alt_ah_attr: ibv_ah_attr,
    pub pkey_index: u16,
    pub alt_pkey_index: u16,
    pub en_sqd_async_notify: u8,
    pub sq_draining: u8,
    pub max_rd_atomic: u8,
    pub max_dest_rd_atomic: u8,
    pub min_rnr_timer: u8,
    pub port_num: u8,
    pub timeout: u8,
    pub retry_cnt: u8,
    pub rnr_retry: u8,
    pub alt_port_num: u8,
    pub alt_timeout: u8,
    pub rate_limit: u32,
}

/// A piece of memory of a request.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_sge {
    pub addr: u64,
    pub length: u32,
    pub lkey: u32,
}

/// A request.
#[repr(C)]
pub struct ibv_send_wr {
    pub wr_id: u64,
    pub next: *mut Self,
    pub sg_list: *mut ibv_sge,
    pub num_sge: c_int,
    pub opcode: ibv_wr_opcode::Type,
    pub send_flags: c_uint,
    pub _immediate: u32,
    pub wr: wr_t,
    /// Of other kinds of queue pairs, and of requests that are not used.
    pub _unused: [u64; 7],
}

/// What a request is about, by its kind.
#[repr(C)]
pub union wr_t {
    pub rdma: rdma_t,
    /// The longest of the others.
    _atomic: [u64; 4],
}

/// Memory of the other end.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct rdma_t {
    pub remote_addr: u64,
    pub rkey: u32,
}

/// What became of a request.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_wc {
    pub wr_id: u64,
    pub status: ibv_wc_status::Type,
    pub opcode: c_uint,
    pub vendor_err: u32,
    pub byte_len: u32,
    _immediate: u32,
    pub qp_num: u32,
    pub src_qp: u32,
    pub wc_flags: c_uint,
    pub pkey_index: u16,
    pub slid: u16,
    pub sl: u8,
    pub dlid_path_bits: u8,
}

/// Takes completions that are there.
///
/// # Safety
///
/// The queue must be there, and `completions` have room for so many.
pub unsafe fn ibv_poll_cq(queue: *mut ibv_cq, most: c_int, completions: *mut ibv_wc) -> c_int {
    // SAFETY: the queue is there, and its provider has filled the table.
    unsafe {
        let poll = (*(*queue).context).ops.poll_cq;
        poll.map_or(-1, |poll| poll(queue, most, completions))
    }
}

/// Asks for an event at the next completion.
///
/// # Safety
///
/// The queue must be there.
pub unsafe fn ibv_req_notify_cq(queue: *mut ibv_cq, solicited_only: c_int) -> c_int {
    // SAFETY: as above.
    unsafe {
        let notify = (*(*queue).context).ops.req_notify_cq;
        notify.map_or(libc::EOPNOTSUPP, |notify| notify(queue, solicited_only))
    }
}

/// Posts a chain of requests.
///
/// # Safety
///
/// The queue pair must be there, and the chain be as verbs want it.
pub unsafe fn ibv_post_send(
    pair: *mut ibv_qp,
    first: *mut ibv_send_wr,
    bad: *mut *mut ibv_send_wr,
) -> c_int {
    // SAFETY: as above.
    unsafe {
        let post = (*(*pair).context).ops.post_send;
        post.map_or(libc::EOPNOTSUPP, |post| post(pair, first, bad))
    }
}
