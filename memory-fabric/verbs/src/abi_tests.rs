//! Compares declarations that are not generated from the header with it, through a C compiler.

use super::*;
use rdma_sys::{ibv_ah_attr, ibv_global_route};
use std::fmt::Write as _;
use std::mem::offset_of;
use std::process::Command;

/// Returns a C program for a list of conditions: compiling it fails if one does not hold.
fn program(conditions: &[String]) -> String {
    let mut program = "#include <infiniband/verbs.h>\n#include <stddef.h>\n".to_owned();
    for condition in conditions {
        // Writing to a string does not fail.
        let _ = writeln!(program, "_Static_assert({condition}, \"\");");
    }
    program
}

/// Returns the compiler's result; `None` without a compiler or the header.
fn compile(program: &str) -> Option<Result<(), String>> {
    let source = tempfile::Builder::new().suffix(".c").tempfile();
    let source = source.expect("a file");
    std::fs::write(source.path(), program).expect("a file");
    let compiled = Command::new("cc")
        .arg("-fsyntax-only")
        .arg(source.path())
        .output();
    let output = match compiled {
        Err(error) => {
            println!("SKIPPED: no C compiler: {error}");
            return None;
        }
        Ok(output) => output,
    };
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    if text.contains("infiniband/verbs.h: No such file") {
        println!("SKIPPED: no header: install libibverbs-dev");
        return None;
    }
    Some(match output.status.success() {
        true => Ok(()),
        false => Err(text),
    })
}

/// Sizes and offsets of the structures that rdma-sys declares by hand, as conditions in C.
macro_rules! layout {
    ($($kind:ident $type:ident { $($field:ident)* })*) => {{
        let mut conditions = Vec::new();
        $(
            let name = concat!(stringify!($kind), " ", stringify!($type));
            conditions.push(format!("sizeof({name}) == {}", size_of::<$type>()));
            $(conditions.push(format!(
                "offsetof({name}, {}) == {}", stringify!($field), offset_of!($type, $field)
            ));)*
        )*
        conditions
    }};
}

#[test]
fn structures_with_unions_are_those_of_the_header() {
    let mut conditions = layout! {
        union ibv_gid { raw global }
        struct ibv_global_route { dgid flow_label sgid_index hop_limit traffic_class }
        struct ibv_ah_attr { grh dlid sl src_path_bits static_rate is_global port_num }
        struct ibv_qp_attr { qp_state path_mtu rq_psn sq_psn dest_qp_num qp_access_flags ah_attr
            pkey_index max_rd_atomic max_dest_rd_atomic min_rnr_timer port_num timeout retry_cnt
            rnr_retry }
        struct ibv_gid_entry { gid gid_index port_num gid_type }
        struct ibv_wc { wr_id status opcode vendor_err qp_num wc_flags }
        struct ibv_send_wr { wr_id next sg_list num_sge opcode send_flags wr }
    };
    let union = offset_of!(ibv_send_wr, wr);
    for (field, place) in [
        ("remote_addr", offset_of!(rdma_t, remote_addr)),
        ("rkey", offset_of!(rdma_t, rkey)),
    ] {
        let offset = union + place;
        let field = format!("offsetof(struct ibv_send_wr, wr.rdma.{field})");
        conditions.push(format!("{field} == {offset}"));
    }
    for (name, place) in [
        (
            "ibv_wc",
            offset_of!(ibv_wc, imm_data_invalidated_rkey_union),
        ),
        (
            "ibv_send_wr",
            offset_of!(ibv_send_wr, imm_data_invalidated_rkey_union),
        ),
    ] {
        conditions.push(format!("offsetof(struct {name}, imm_data) == {place}"));
    }
    conditions.push(format!("IBV_LINK_LAYER_INFINIBAND == {LINK_INFINIBAND}"));
    conditions.push(format!("IBV_LINK_LAYER_ETHERNET == {LINK_ETHERNET}"));
    if let Some(result) = compile(&program(&conditions)) {
        assert_eq!(result, Ok(()));
    }
}

#[test]
fn the_function_that_bindgen_leaves_out_has_the_type_of_the_header() {
    // As in `library`.
    let declared = |entry_size: &str| {
        format!(
            "__builtin_types_compatible_p(__typeof__(&_ibv_query_gid_table), ssize_t (*)\
             (struct ibv_context *, struct ibv_gid_entry *, size_t, uint32_t, {entry_size}))"
        )
    };
    let Some(right) = compile(&program(&[declared("size_t")])) else {
        return;
    };
    assert_eq!(right, Ok(()));
    let wrong = compile(&program(&[declared("uint32_t")])).expect("it compiled before");
    wrong.expect_err("another type is noticed");
}
