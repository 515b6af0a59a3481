//! Many RDMA connections, and RDMA failures: the program `rdma-faults` on a testbed host. It uses
//! the product's links, lanes and pager without a guest, so that one boot of the testbed covers
//! many cases.

pub mod capture;
pub mod conform;
pub mod many;
mod proxy;
pub mod spoil;
pub mod walk;

use std::net::SocketAddr;
use std::time::Duration;

use fabric_homes::NodeId;
use fabric_transport::control::ControlError;
use fabric_transport::stream::Carrier;
use memory_fabric::link::{Leased, LinkConfig};
use memory_fabric::page::{PAGE_SIZE, PageBytes};

/// Deadline of operations that take milliseconds.
pub const PATIENCE: Duration = Duration::from_secs(30);
/// Deadline of one READ: longer than the adapter's retries and the timeout of a silent lane.
const READ_TIME_MAX: Duration = Duration::from_secs(6);

/// Obtains a lease of this many pages.
///
/// # Errors
/// Fails when the donor does not lend.
pub fn lease(donor: SocketAddr, vm: &str, pages: u64) -> Result<Leased, ControlError> {
    Leased::obtain(LinkConfig {
        local: NodeId(0).into(),
        node: NodeId(1),
        address: donor,
        carrier: Carrier::Tcp,
        vm: vm.to_owned(),
        bytes: pages * PAGE_SIZE as u64,
        or_less: false,
        grace: PATIENCE,
    })
}

/// Returns a pseudo-random number that is the same in each run.
fn scattered(number: u64) -> u64 {
    // The last steps of SplitMix64 (Steele, Lea and Flood, 2014).
    let mixed = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

/// Returns the contents of a page: no two pages of any leases have a word in common.
fn content(lease: u64, page: u64) -> PageBytes {
    let mut bytes = [0; PAGE_SIZE];
    for (number, word) in (0..).zip(bytes.chunks_exact_mut(8)) {
        let value = scattered(lease << 40 | page << 10 | number);
        word.copy_from_slice(&value.to_le_bytes());
    }
    bytes
}

fn wrong_bytes(found: &PageBytes, lease: u64, page: u64) -> usize {
    let wanted = content(lease, page);
    let pairs = found.iter().zip(&wanted);
    pairs.filter(|(found, wanted)| found != wanted).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_of_other_leases_and_other_pages_are_told_apart() {
        let page = content(3, 4);
        assert_eq!(wrong_bytes(&page, 3, 4), 0);
        assert!(wrong_bytes(&page, 4, 3) > 4000);
        assert!(wrong_bytes(&page, 3, 5) > 4000);
        let mut spoiled = page;
        spoiled[17] ^= 1;
        assert_eq!(wrong_bytes(&spoiled, 3, 4), 1);
    }
}
