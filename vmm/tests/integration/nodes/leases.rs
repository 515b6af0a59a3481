//! Processes of a VM that have leases of their own at a donor.

use std::time::{Duration, Instant};

use memory_fabric::NodeId;
use memory_fabric::compute::{ComputeLease, ComputeTable, member};
use memory_fabric::donor::server::{Donor, DonorConfig};
use memory_fabric::link::{Leased, LinkConfig};
use memory_fabric::rdma::DeviceChoice;
use ssi_hv::compute::Connect;
use ssi_hv::machine::MachineError;

use super::{HERE, WORK, request, run_in_two_processes_with, start};
use crate::support::{LIMIT, MEMORY_BYTES, kvm_is_there};

/// What a donor lends the process: a block.
const LENT_BYTES: u64 = MEMORY_BYTES / 2;

fn donor() -> Donor {
    let donor = Donor::start(&DonorConfig {
        credentials: None,
        listen: (HERE, 0).into(),
        memory_bytes: LENT_BYTES,
        lease_duration_max: Duration::from_secs(60),
        spin: Duration::ZERO,
        rdma: DeviceChoice::None,
        allow: None,
    });
    donor.unwrap()
}

/// A lease for the process, and what it is told of it.
fn lease(donor: &Donor) -> (Leased, ComputeLease) {
    let address = donor.address();
    let grace = Duration::from_secs(1);
    let leased = Leased::obtain(LinkConfig {
        local: NodeId(1).into(),
        node: NodeId(2),
        address,
        carrier: Default::default(),
        vm: "test".to_owned(),
        bytes: LENT_BYTES,
        or_less: false,
        grace,
    });
    let leased = leased.unwrap();
    let message = ComputeLease {
        donor: 2,
        address,
        grant: leased.grant().clone(),
        over_udp: false,
        fingerprint: None,
        name: None,
        grace_ms: 1000,
        sealed: true,
        checksum: true,
        compression: None,
    };
    (leased, message)
}

/// The primary has no link to the donor: it learns of the loss from the process alone.
#[test]
fn a_vm_ends_when_the_donor_of_another_node_is_lost() {
    if !kvm_is_there() {
        return;
    }
    let donor = donor();
    let address = donor.address().to_string();
    let (leased, message) = lease(&donor);
    let outcome = run_in_two_processes_with(WORK, vec![message], |_, said| {
        leased.hand_over();
        said.recv_timeout(LIMIT)?;
        assert_eq!(donor.pool().leases(), 1);
        drop(donor);
        Ok(())
    });
    let Err(MachineError::DonorLost { reason }) = outcome else {
        panic!("{outcome:?}");
    };
    assert!(
        reason.starts_with("guest memory on node 2 is lost"),
        "{reason}"
    );
    assert!(reason.contains(&address), "{reason}");
}

#[test]
fn a_process_that_does_not_reach_its_donor_ends_and_names_it() {
    let donor = donor();
    let (leased, message) = lease(&donor);
    let address = donor.address().to_string();
    drop((leased, donor));
    let (_, request) = request();
    let mut process = start(&request, false);
    let here = member(HERE, process.ports(), MEMORY_BYTES / 2);
    let connect = Connect {
        table: ComputeTable(vec![here; 2]),
        leases: vec![message],
        authorities: Vec::new(),
    };
    process.connect(&connect).unwrap();
    let reason = process.end(Instant::now() + LIMIT).reason;
    assert!(
        reason.contains("has to reach the donors of the VM"),
        "{reason}"
    );
    assert!(
        reason.contains(&format!("no memory from donor {address}")),
        "{reason}"
    );
}
