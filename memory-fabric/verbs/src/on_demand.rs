//! Detection of on-demand paging, with which memory is registered without being pinned.
//!
//! An adapter with on-demand paging follows the page tables of the process: it maps a page at the
//! first access, and unmaps it when the kernel requires it.

use super::abi::{ibv_odp_caps, ibv_odp_general_caps, ibv_odp_transport_cap_bits};

const SUPPORT: u64 = ibv_odp_general_caps::IBV_ODP_SUPPORT.0 as u64;
const SUPPORT_WRITE: u32 = ibv_odp_transport_cap_bits::IBV_ODP_SUPPORT_WRITE.0;
const SUPPORT_READ: u32 = ibv_odp_transport_cap_bits::IBV_ODP_SUPPORT_READ.0;

/// Returns whether a device with these capabilities pages on demand for READs and WRITEs over
/// reliable connections.
pub(crate) fn suits(offered: &ibv_odp_caps) -> bool {
    let both = SUPPORT_READ | SUPPORT_WRITE;
    offered.general_caps & SUPPORT != 0 && offered.per_transport_caps.rc_odp_caps & both == both
}

#[cfg(test)]
mod tests {
    use super::*;
    use rdma_sys::ibv_odp_caps__bindgen_ty_1;

    #[test]
    fn reads_and_writes_over_reliable_connections_are_wanted() {
        let offered = |general_caps, rc_odp_caps| {
            suits(&ibv_odp_caps {
                general_caps,
                per_transport_caps: ibv_odp_caps__bindgen_ty_1 {
                    rc_odp_caps,
                    uc_odp_caps: 0,
                    ud_odp_caps: u32::MAX,
                },
            })
        };
        assert!(offered(1, 0b1111) && offered(3, 0b1100));
        assert!(!offered(0, 0b1111), "none at all");
        assert!(!offered(1, 0b1011) && !offered(1, 0b0111), "one of both");
    }
}
