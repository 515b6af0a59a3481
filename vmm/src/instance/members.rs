//! Connects to donors, and replaces those of an etcd that do not lend.

use std::net::SocketAddr;

use memory_fabric::NodeIds;
use memory_fabric::fabric::{Fabric, FabricConfig, FabricError};

use super::memory::donor_address;
use crate::config::RunConfig;
use crate::failure::Failure;
use crate::membership::Members;

/// Nodes that are asked in place of others: each that is not there takes seconds.
const REPLACED_MAX: usize = 16;

/// Connects to the donors of `fabric`. One that does not lend is left out, and others of the cluster
/// are asked, up to 16 times: an entry may be stale, and another VM may have been faster. The donors
/// of a guest that reboots are those that were left to it; if they are too few, or lend too little,
/// the cluster is asked once for all.
pub fn connected(
    config: &RunConfig,
    members: Option<&Members>,
    mut are_left: bool,
    fabric: &mut FabricConfig,
    connect: impl Fn(&FabricConfig) -> Result<Fabric, Failure>,
) -> Result<Fabric, Failure> {
    let mut replaced = 0;
    if let Some(members) = members {
        members.ask_all_again();
    }
    loop {
        let failure = match connect(fabric) {
            Ok(fabric) => return Ok(fabric),
            Err(failure) => failure,
        };
        let failed = donor_of(&failure);
        let is_replaced = failed.is_some() || are_left && lacks_donors(&failure);
        let Some(members) = members.filter(|_| is_replaced) else {
            return Err(failure);
        };
        are_left = false;
        replaced += 1;
        if replaced > REPLACED_MAX {
            return Err(failure);
        }
        let donors = match members.without(failed, &fabric.donors) {
            Ok(donors) => donors,
            Err(error) => return Err(failure.beside(&error)),
        };
        tracing::warn!("{}; other nodes are asked instead", failure.one_line());
        fabric.nodes = NodeIds::in_order(config.transport.lenders(donors.len()));
        fabric.donors = donors.iter().map(donor_address).collect();
    }
}

/// Returns the donor because of which a start failed.
fn donor_of(failure: &Failure) -> Option<SocketAddr> {
    match failure.cause()? {
        FabricError::Donor { address, .. } => Some(*address),
        _ => None,
    }
}

/// Returns whether a start failed because there are too few donors, or they lend too little.
fn lacks_donors(failure: &Failure) -> bool {
    matches!(
        failure.cause(),
        Some(
            FabricError::TooFewForReplicas(_)
                | FabricError::TooFewForStripes { .. }
                | FabricError::TooLittleForReplicas { .. }
                | FabricError::TooLittleForStripes { .. }
        )
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::instance::memory::donors_failed;

    #[test]
    fn too_few_donors_are_no_failure_of_one() {
        let failure = donors_failed(FabricError::TooFewForReplicas(1));
        assert!(lacks_donors(&failure) && donor_of(&failure).is_none());
        let failure = donors_failed(FabricError::TooManyDonors(65));
        assert!(!lacks_donors(&failure) && donor_of(&failure).is_none());
    }
}
