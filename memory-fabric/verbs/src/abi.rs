//! The binary interface of libibverbs: structures and constants that rdma-sys generates from the
//! headers of the build machine. Its functions are not linked: [`library`](super::library) loads
//! them. rdma-sys declares structures with unions by hand; a test compares those with the header.

pub(crate) use rdma_sys::{
    _compat_ibv_port_attr, IBV_GID_TYPE_IB, IBV_GID_TYPE_ROCE_V1, IBV_GID_TYPE_ROCE_V2,
    ibv_access_flags, ibv_comp_channel, ibv_context, ibv_cq, ibv_device, ibv_device_attr,
    ibv_device_attr_ex, ibv_gid, ibv_gid_entry, ibv_mr, ibv_odp_caps, ibv_odp_general_caps,
    ibv_odp_transport_cap_bits, ibv_pd, ibv_poll_cq, ibv_port_attr, ibv_port_state, ibv_post_recv,
    ibv_post_send, ibv_qp, ibv_qp_attr, ibv_qp_attr_mask, ibv_qp_cap, ibv_qp_init_attr,
    ibv_qp_state, ibv_qp_type, ibv_recv_wr, ibv_req_notify_cq, ibv_send_flags, ibv_send_wr,
    ibv_sge, ibv_transport_type, ibv_wc, ibv_wc_opcode, ibv_wc_status, ibv_wr_opcode, rdma_t,
    verbs_context,
};

/// `IBV_LINK_LAYER_INFINIBAND` and `IBV_LINK_LAYER_ETHERNET`, which rdma-sys omits.
pub(crate) const LINK_INFINIBAND: u8 = 1;
pub(crate) const LINK_ETHERNET: u8 = 2;

#[cfg(test)]
#[path = "abi_tests.rs"]
mod tests;
