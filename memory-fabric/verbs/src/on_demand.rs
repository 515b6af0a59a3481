//! Memory that is registered without being pinned, where the adapter offers it.
//!
//! An adapter with on-demand paging follows the page tables of the process: it takes a page when it
//! first needs it, and lets go of it when the kernel wants that. What it can do is told by a call
//! that libibverbs has as a place in the open device, and not as a function.

use super::abi::{ibv_context, ibv_device_attr_ex, ibv_odp_caps, verbs_context_end};
use std::mem::{offset_of, zeroed};

/// `IBV_ODP_SUPPORT`, `IBV_ODP_SUPPORT_WRITE` and `IBV_ODP_SUPPORT_READ` of `infiniband/verbs.h`.
const SUPPORT: u64 = 1;
const SUPPORT_WRITE: u32 = 1 << 2;
const SUPPORT_READ: u32 = 1 << 3;

/// The same for the test that compares them with the header.
#[cfg(test)]
pub(crate) const CONSTANTS: [(&str, u64); 3] = [
    ("IBV_ODP_SUPPORT", SUPPORT),
    ("IBV_ODP_SUPPORT_WRITE", SUPPORT_WRITE as u64),
    ("IBV_ODP_SUPPORT_READ", SUPPORT_READ as u64),
];

/// Whether a device pages on demand for READs and WRITEs over reliable connections.
///
/// # Safety
///
/// The device must be open.
pub(crate) unsafe fn is_offered(context: *mut ibv_context) -> bool {
    // SAFETY: the device is open. The rest is what `verbs_get_ctx_op` of `infiniband/verbs.h` does:
    // a device that says so in this field is the last part of a larger structure, whose size is in
    // it; older libraries have one without the first fields.
    unsafe {
        if (*context).abi_compat.addr() != usize::MAX {
            return false;
        }
        let before = offset_of!(verbs_context_end, context);
        let extended: *mut verbs_context_end = context.byte_sub(before).cast();
        if (*extended).sz < size_of::<verbs_context_end>() {
            return false;
        }
        let Some(query) = (*extended).query_device_ex else {
            return false;
        };
        // Numbers, for which zero is a value.
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
            // SAFETY: numbers, for which zero is a value.
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
