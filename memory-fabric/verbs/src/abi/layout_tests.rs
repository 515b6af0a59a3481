//! The header itself, asked by a C compiler, must agree.

use super::*;
use crate::on_demand;
use std::fmt::Write as _;
use std::process::Command;

/// Numbers that are used, by their names in the header.
fn constants() -> Vec<(&'static str, i64)> {
    macro_rules! of {
        ($($module:ident: $($name:ident)*;)*) => {
            vec![$($((stringify!($name), i64::from($module::$name)),)*)*]
        };
    }
    macro_rules! flags_of {
        ($($type:ident: $($name:ident)*;)*) => {
            vec![$($((stringify!($name), i64::from($type::$name.0)),)*)*]
        };
    }
    let mut all = of! {
        ibv_transport_type: IBV_TRANSPORT_IB;
        ibv_port_state: IBV_PORT_ACTIVE;
        ibv_qp_type: IBV_QPT_RC;
        ibv_qp_state: IBV_QPS_RESET IBV_QPS_INIT IBV_QPS_RTR IBV_QPS_RTS IBV_QPS_ERR;
        ibv_wr_opcode: IBV_WR_RDMA_WRITE IBV_WR_RDMA_READ;
        ibv_wc_status: IBV_WC_SUCCESS;
    };
    all.extend([
        ("IBV_GID_TYPE_IB", i64::from(IBV_GID_TYPE_IB)),
        ("IBV_GID_TYPE_ROCE_V1", i64::from(IBV_GID_TYPE_ROCE_V1)),
        ("IBV_GID_TYPE_ROCE_V2", i64::from(IBV_GID_TYPE_ROCE_V2)),
    ]);
    all.extend(flags_of! {
        ibv_access_flags: IBV_ACCESS_LOCAL_WRITE IBV_ACCESS_REMOTE_WRITE IBV_ACCESS_REMOTE_READ
            IBV_ACCESS_ON_DEMAND;
        ibv_send_flags: IBV_SEND_FENCE IBV_SEND_SIGNALED IBV_SEND_INLINE;
        ibv_qp_attr_mask: IBV_QP_STATE IBV_QP_ACCESS_FLAGS IBV_QP_PKEY_INDEX IBV_QP_PORT IBV_QP_AV
            IBV_QP_PATH_MTU IBV_QP_TIMEOUT IBV_QP_RETRY_CNT IBV_QP_RNR_RETRY IBV_QP_RQ_PSN
            IBV_QP_MAX_QP_RD_ATOMIC IBV_QP_MIN_RNR_TIMER IBV_QP_SQ_PSN IBV_QP_MAX_DEST_RD_ATOMIC
            IBV_QP_DEST_QPN;
    });
    all
}

#[test]
fn layouts_and_numbers_are_those_of_the_header() {
    let mut program = "#include <infiniband/verbs.h>\n#include <stddef.h>\n".to_owned();
    let mut assert = |condition: String| {
        // Writing to a string does not fail.
        let _ = writeln!(program, "_Static_assert({condition}, \"\");");
    };
    for (name, size, fields) in LAYOUT {
        let kind = if *name == "ibv_gid" {
            "union"
        } else {
            "struct"
        };
        if let Some(size) = size {
            assert(format!("sizeof({kind} {name}) == {size}"));
        }
        for (field, offset) in *fields {
            assert(format!("offsetof({kind} {name}, {field}) == {offset}"));
        }
    }
    for (name, value) in constants() {
        assert(format!("{name} == {value}"));
    }
    // What a READ has in the union.
    let union = offset_of!(ibv_send_wr, wr);
    for (field, place) in [
        ("remote_addr", offset_of!(rdma_t, remote_addr)),
        ("rkey", offset_of!(rdma_t, rkey)),
    ] {
        let offset = union + place;
        assert(format!(
            "offsetof(struct ibv_send_wr, wr.rdma.{field}) == {offset}"
        ));
    }

    // What is counted from the end.
    assert(format!(
        "sizeof(struct ibv_context) == {}",
        size_of::<ibv_context>()
    ));
    let (all, first) = ("sizeof(struct verbs_context)", "query_device_ex");
    for (field, place) in [
        (first, 0),
        ("sz", offset_of!(verbs_context_end, sz)),
        ("context", offset_of!(verbs_context_end, context)),
    ] {
        let behind = size_of::<verbs_context_end>() - place;
        assert(format!(
            "{all} - offsetof(struct verbs_context, {field}) == {behind}"
        ));
    }
    for (place, field) in [
        (offset_of!(per_transport_caps, rc_odp_caps), "rc_odp_caps"),
        (offset_of!(per_transport_caps, ud_odp_caps), "ud_odp_caps"),
    ] {
        let place = offset_of!(ibv_odp_caps, per_transport_caps) + place;
        assert(format!(
            "offsetof(struct ibv_odp_caps, per_transport_caps.{field}) == {place}"
        ));
    }
    for (name, value) in on_demand::CONSTANTS {
        assert(format!("{name} == {value}"));
    }

    let source = std::env::temp_dir().join(format!("ssi-hv-abi-{}.c", std::process::id()));
    std::fs::write(&source, &program).expect("a file");
    let compiled = Command::new("cc")
        .arg("-fsyntax-only")
        .arg(&source)
        .output();
    std::fs::remove_file(&source).expect("it is there");
    match compiled {
        Err(error) => println!("SKIPPED: no C compiler: {error}"),
        Ok(output) => {
            let text = String::from_utf8_lossy(&output.stderr);
            if text.contains("infiniband/verbs.h: No such file") {
                println!("SKIPPED: no header: install libibverbs-dev");
            } else {
                assert!(output.status.success(), "{text}");
            }
        }
    }
}
