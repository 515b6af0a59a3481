//! Sizes of structures and places of fields on x86-64, asserted when this is compiled.

use super::*;
use std::mem::offset_of;

/// Asserts sizes (of structures that are declared in whole) and places of fields.
macro_rules! layout {
    ($($type:ident, $size:expr, { $($field:ident $offset:literal;)* })*) => {
        $(const _: () = {
            let size: Option<usize> = $size;
            assert!(size.is_none() || matches!(size, Some(bytes) if bytes == size_of::<$type>()));
            $(assert!(offset_of!($type, $field) == $offset);)*
        };)*

        /// The same for the test that compares it with the header.
        #[cfg(test)]
        const LAYOUT: &[(&str, Option<usize>, &[(&str, usize)])] = &[$((
            stringify!($type),
            $size,
            &[$((stringify!($field), $offset),)*],
        ),)*];
    };
}

layout! {
    ibv_device, None, {
        node_type 16; transport_type 20; name 24; dev_name 88; dev_path 152; ibdev_path 408;
    }
    ibv_context, None, {
        device 0; ops 8; abi_compat 320;
    }
    ibv_context_ops, Some(256), {
        poll_cq 88; req_notify_cq 96; post_send 200;
    }
    ibv_pd, None, {
        context 0;
    }
    ibv_mr, Some(48), {
        context 0; addr 16; length 24; lkey 36; rkey 40;
    }
    ibv_comp_channel, Some(16), {
        context 0; fd 8;
    }
    ibv_cq, None, {
        context 0; channel 8;
    }
    ibv_qp, None, {
        context 0; pd 16; send_cq 24; recv_cq 32; handle 48; qp_num 52;
    }
    ibv_device_attr, Some(232), {
        max_mr_size 80; max_qp 108; max_qp_wr 112; max_cq 128; max_cqe 132; max_mr 136; max_pd 140; max_qp_rd_atom 144; max_qp_init_rd_atom 156; max_pkeys 224; phys_port_cnt 227;
    }
    ibv_odp_caps, Some(24), {
        general_caps 0; per_transport_caps 8;
    }
    ibv_device_attr_ex, Some(400), {
        orig_attr 0; comp_mask 232; odp_caps 240;
    }
    ibv_port_attr, None, {
        state 0; active_mtu 8; lid 34; link_layer 46; flags 47; port_cap_flags2 48;
    }
    ibv_gid, Some(16), {
        raw 0;
    }
    ibv_gid_entry, Some(32), {
        gid 0; gid_index 16; port_num 20; gid_type 24; ndev_ifindex 28;
    }
    ibv_global_route, Some(24), {
        dgid 0; flow_label 16; sgid_index 20; hop_limit 21; traffic_class 22;
    }
    ibv_ah_attr, Some(32), {
        grh 0; dlid 24; is_global 29; port_num 30;
    }
    ibv_qp_cap, Some(20), {
        max_send_wr 0; max_recv_wr 4; max_send_sge 8; max_recv_sge 12; max_inline_data 16;
    }
    ibv_qp_init_attr, Some(64), {
        qp_context 0; send_cq 8; recv_cq 16; srq 24; cap 32; qp_type 52; sq_sig_all 56;
    }
    ibv_qp_attr, Some(144), {
        qp_state 0; path_mtu 8; rq_psn 20; sq_psn 24; dest_qp_num 28; qp_access_flags 32; cap 36; ah_attr 56; alt_ah_attr 88; pkey_index 120; max_rd_atomic 126; max_dest_rd_atomic 127; min_rnr_timer 128; port_num 129; timeout 130; retry_cnt 131; rnr_retry 132; rate_limit 136;
    }
    ibv_sge, Some(16), {
        addr 0; length 8; lkey 12;
    }
    ibv_send_wr, Some(128), {
        wr_id 0; next 8; sg_list 16; num_sge 24; opcode 28; send_flags 32; wr 40;
    }
    ibv_wc, Some(48), {
        wr_id 0; status 8; opcode 12; vendor_err 16; byte_len 20; qp_num 28; src_qp 32; wc_flags 36;
    }
}

// These are counted from the end, so that the test compares them itself.
const _: () = {
    assert!(offset_of!(verbs_context_end, sz) == 96);
    assert!(offset_of!(verbs_context_end, context) == 104);
    assert!(size_of::<verbs_context_end>() == 104 + size_of::<ibv_context>());
    assert!(size_of::<ibv_context>() == 328);
};

#[cfg(test)]
#[path = "layout_tests.rs"]
mod tests;
