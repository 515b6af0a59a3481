use super::*;
use crate::donor::server::{Donor, DonorConfig};
use crate::fabric::DonorAddress;
use crate::transport::rdma::DeviceChoice;
use std::net::SocketAddr;

const GUEST: u64 = 64 << 20;

fn node() -> LeasingNode {
    LeasingNode {
        vm: "test".to_owned(),
        place: 1,
        ranges: std::iter::once(0..GUEST).collect(),
        credentials: None,
    }
}

/// Donors that are asked for so much, of a guest with 64 MiB.
fn config(donors: &[(SocketAddr, Option<u64>)]) -> FabricConfig {
    let mut config = node().config(&[]);
    config.nodes = NodeIds::in_order(donors.len() + 1);
    config.nodes.donors.remove(0);
    config.grace = Duration::from_secs(1);
    config.donors = donors
        .iter()
        .map(|(address, bytes)| DonorAddress {
            address: *address,
            name: None,
            fingerprint: None,
            zone: None,
            bytes: *bytes,
        })
        .collect();
    config
}

fn donor(bytes: u64) -> Donor {
    let donor = Donor::start(&DonorConfig {
        credentials: None,
        listen: ([127, 0, 0, 1], 0).into(),
        memory_bytes: bytes,
        lease_duration_max: Duration::from_secs(60),
        spin: Duration::ZERO,
        rdma: DeviceChoice::None,
        allow: None,
    });
    donor.expect("a donor on loopback")
}

fn address(port: u16) -> SocketAddr {
    ([127, 0, 0, 1], port).into()
}

#[test]
fn what_is_asked_of_donors_is_divided_by_what_nodes_lend() {
    let mib = |count: u64| count << 20;
    let all = config(&[(address(1), Some(mib(41))), (address(2), None)]);
    let lent = vec![mib(16), mib(8), mib(1)];
    let shares = DonorShares::new(all.clone(), lent.clone(), true);
    let asked = |place: usize| {
        let (config, wanted) = shares.of(place);
        let donors = config.nodes.donors.iter().zip(&config.donors);
        let donors = donors.map(|(node, donor)| (node.0, donor.address.port(), donor.bytes));
        (donors.collect::<Vec<_>>(), wanted >> 20)
    };
    // 20 blocks and a half of the first donor, and 20 blocks that nobody lends.
    assert_eq!(asked(1), (vec![(2, 1, Some(mib(12))), (3, 2, None)], 12));
    assert_eq!(asked(2), (Vec::new(), 0), "less than a block of each");
    assert_eq!(asked(3), (Vec::new(), 0), "no such node");
    assert_eq!(asked(0), (vec![(2, 1, Some(mib(29))), (3, 2, None)], 28));
    let whole = DonorShares::new(all.clone(), lent, false);
    assert_eq!(whole.of(0).0.donors, all.donors);
    assert_eq!(whole.of(0).1, mib(40));
    assert!(whole.of(1).0.donors.is_empty());
}

#[test]
fn no_part_is_lost_and_the_first_node_has_some_of_each() {
    for lent in [
        vec![1, 1],
        vec![1, 5, 9],
        vec![1 << 40, 3, 3, 3],
        vec![2, u64::MAX],
    ] {
        let shares = DonorShares::new(config(&[]), lent.clone(), true);
        for blocks in 1..50 {
            let parts = (0..lent.len()).map(|place| shares.part(blocks, place));
            assert_eq!(parts.sum::<u64>(), blocks, "{lent:?}");
            assert!(shares.part(blocks, 0) > 0, "{blocks} for {lent:?}");
        }
    }
}

#[test]
fn a_lease_goes_over_to_the_node_that_resumes_it() {
    let donor = donor(GUEST);
    let pool = donor.pool();
    let all = config(&[(donor.address(), Some(40 << 20))]);
    let shares = DonorShares::new(all, vec![8 << 20, 8 << 20], true);
    let given = shares.lease(1, None).expect("a lease");
    assert_eq!(
        (given.lent_bytes(), pool.lent_bytes()),
        (20 << 20, 20 << 20)
    );
    drop(given);
    assert_eq!(pool.leases(), 0, "a start that fails keeps nothing");

    let given = shares.lease(1, None).expect("a lease");
    let messages: Vec<_> = given.messages().cloned().collect();
    let (config, resumed) = node().resume(&messages).expect("it is there");
    assert_eq!(config.nodes.donors, [NodeId(2)]);
    assert_eq!(resumed[0].grant().bytes, 20 << 20);
    given.hand_over();
    assert_eq!(pool.leases(), 1);
    drop(resumed);
    assert_eq!(pool.leases(), 0, "the node ends it");
    let refused = node().resume(&messages).expect_err("it has ended");
    assert!(refused.to_string().contains(&donor.address().to_string()));
}

#[test]
fn donors_without_memory_are_left_out_unless_they_are_asked_for_a_size() {
    let (full, other) = (donor(1 << 20), donor(GUEST));
    let pool = full.pool();
    let _all = pool.lend("other".to_owned(), 1 << 20, false, Duration::from_secs(9));
    let lent = vec![1 << 20, 1 << 20];
    let both = config(&[(full.address(), None), (other.address(), None)]);
    let given = DonorShares::new(both, lent.clone(), true).lease(1, None);
    let given = given.expect("the other one lends");
    let donors = given.messages().map(|lease| lease.donor);
    assert_eq!(donors.collect::<Vec<_>>(), [3]);
    let sized = config(&[(full.address(), Some(8 << 20))]);
    let refused = DonorShares::new(sized, lent, true).lease(1, None);
    assert!(
        matches!(refused, Err(FabricError::Donor { .. })),
        "{refused:?}"
    );
}
