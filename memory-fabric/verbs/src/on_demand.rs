//! Detection of on-demand paging, with which memory is registered without being pinned.
//!
//! An adapter with on-demand paging follows the page tables of the process: it maps a page at the
//! first access, and unmaps it when the kernel requires it. The capability is queried through a
//! function pointer in the open device, since libibverbs exports no function for it.

use super::abi::{
    ibv_context, ibv_device_attr_ex, ibv_odp_caps, ibv_odp_general_caps,
    ibv_odp_transport_cap_bits, verbs_context,
};
use std::mem::{offset_of, zeroed};

const SUPPORT: u64 = ibv_odp_general_caps::IBV_ODP_SUPPORT.0 as u64;
const SUPPORT_WRITE: u32 = ibv_odp_transport_cap_bits::IBV_ODP_SUPPORT_WRITE.0;
const SUPPORT_READ: u32 = ibv_odp_transport_cap_bits::IBV_ODP_SUPPORT_READ.0;

/// Returns whether a device pages on demand for READs and WRITEs over reliable connections.
///
/// # Safety
///
/// The device must be open.
pub(crate) unsafe fn is_offered(context: *mut ibv_context) -> bool {
    // SAFETY: the device is open. The rest follows `verbs_get_ctx_op` of `infiniband/verbs.h`: a
    // device with the marker in this field is the last part of a larger structure, which contains
    // its own size; older libraries have one without the first fields. rdma-sys has this function
    // too, but compares the field with a 32-bit number.
    unsafe {
        if (*context).abi_compat.addr() != usize::MAX {
            return false;
        }
        let before = offset_of!(verbs_context, context);
        let extended: *mut verbs_context = context.byte_sub(before).cast();
        let from_query = size_of::<verbs_context>() - offset_of!(verbs_context, query_device_ex);
        if (*extended).sz < from_query {
            return false;
        }
        let Some(query) = (*extended).query_device_ex else {
            return false;
        };
        // Numbers, for which zero is a valid value.
        let mut attributes: ibv_device_attr_ex = zeroed();
        let bytes = size_of_val(&attributes);
        let result = query(context, std::ptr::null(), &raw mut attributes, bytes);
        result == 0 && suits(&attributes.odp_caps)
    }
}

fn suits(offered: &ibv_odp_caps) -> bool {
    let both = SUPPORT_READ | SUPPORT_WRITE;
    offered.general_caps & SUPPORT != 0 && offered.per_transport_caps.rc_odp_caps & both == both
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_and_writes_over_reliable_connections_are_wanted() {
        let offered = |general_caps, rc_odp_caps| {
            // SAFETY: numbers, for which zero is a valid value.
            let mut offered: ibv_odp_caps = unsafe { zeroed() };
            offered.general_caps = general_caps;
            offered.per_transport_caps.rc_odp_caps = rc_odp_caps;
            offered.per_transport_caps.ud_odp_caps = u32::MAX;
            suits(&offered)
        };
        assert!(offered(1, 0b1111) && offered(3, 0b1100));
        assert!(!offered(0, 0b1111), "none at all");
        assert!(!offered(1, 0b1011) && !offered(1, 0b0111), "one of both");
    }
}
