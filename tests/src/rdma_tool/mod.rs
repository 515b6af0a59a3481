//! Many RDMA connections at once, and RDMA that goes wrong: what the program `rdma-faults` does
//! on a testbed host. It uses the product's links, lanes and pager, and needs no guest, so that
//! much can be tried in one boot of the testbed.

pub mod conform;
pub mod many;
mod proxy;
pub mod spoil;
pub mod walk;

use std::net::SocketAddr;
use std::time::Duration;

use memory_fabric::control::ControlError;
use memory_fabric::homes::NodeId;
use memory_fabric::link::{Leased, LinkConfig};
use memory_fabric::page::{PAGE_SIZE, PageBytes};
use memory_fabric::stream::Carrier;

/// How long anything may take that takes milliseconds.
pub const PATIENCE: Duration = Duration::from_secs(30);
/// How long one READ may take: longer than the adapter needs to give up, and than a silent lane
/// is kept.
const READ_TIME_MAX: Duration = Duration::from_secs(6);

/// A lease of so many pages.
///
/// # Errors
/// When the donor does not lend.
pub fn lease(donor: SocketAddr, vm: &str, pages: u64) -> Result<Leased, ControlError> {
    Leased::obtain(LinkConfig {
        node: NodeId(1),
        address: donor,
        carrier: Carrier::Tcp,
        vm: vm.to_owned(),
        bytes: pages * PAGE_SIZE as u64,
        or_less: false,
        grace: PATIENCE,
    })
}

/// A number that looks random, the same in each run.
fn scattered(number: u64) -> u64 {
    // The last steps of SplitMix64 (Steele, Lea and Flood, 2014).
    let mixed = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

/// The content of a page: no two pages of any two leases have a word in common.
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
