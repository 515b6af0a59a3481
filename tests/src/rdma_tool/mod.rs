//! Many RDMA connections, and RDMA failures: the program `rdma-faults` on a testbed host. It uses
//! the product's links, lanes and pager without a guest, so that one boot of the testbed covers
//! many cases.

pub mod capture;
pub mod conform;
pub mod many;
mod proxy;
pub mod spoil;
pub mod walk;

use std::io;
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

/// Attempts of a connection whose first packets are lost: one that loses two in a row has timed out.
const CONNECTIONS_MAX: u32 = 5;

/// Obtains a lease of this many pages, over a link that may lose packets.
///
/// # Errors
/// Fails when the donor does not lend.
pub fn lease(donor: SocketAddr, vm: &str, pages: u64) -> Result<Leased, ControlError> {
    despite_loss(|| lease_at_once(donor, vm, pages))
}

/// Repeats a connection that timed out.
fn despite_loss<T>(
    mut connect: impl FnMut() -> Result<T, ControlError>,
) -> Result<T, ControlError> {
    for _ in 1..CONNECTIONS_MAX {
        match connect() {
            Err(ControlError::Connect(_, error)) if error.kind() == io::ErrorKind::TimedOut => (),
            other => return other,
        }
    }
    connect()
}

fn lease_at_once(donor: SocketAddr, vm: &str, pages: u64) -> Result<Leased, ControlError> {
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
    fn a_connection_that_timed_out_is_tried_again_and_one_that_was_refused_is_not() {
        let address = SocketAddr::from(([10, 77, 0, 2], 7700));
        let failing = |kind: io::ErrorKind, times: u32| {
            let mut attempts = 0;
            let connected = despite_loss(|| {
                attempts += 1;
                if attempts <= times {
                    return Err(ControlError::Connect(address, kind.into()));
                }
                Ok(())
            });
            (connected.is_ok(), attempts)
        };
        assert_eq!(failing(io::ErrorKind::TimedOut, 3), (true, 4));
        assert_eq!(
            failing(io::ErrorKind::TimedOut, 9),
            (false, CONNECTIONS_MAX)
        );
        assert_eq!(failing(io::ErrorKind::ConnectionRefused, 1), (false, 1));
    }

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
