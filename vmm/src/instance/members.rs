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
/// are asked, up to 16 times: an entry may be stale, and another VM may have been faster.
pub fn connected(
    config: &RunConfig,
    members: Option<&Members>,
    fabric: &mut FabricConfig,
    connect: impl Fn(&FabricConfig) -> Result<Fabric, Failure>,
) -> Result<Fabric, Failure> {
    let mut replaced = 0;
    loop {
        let failure = match connect(fabric) {
            Ok(fabric) => return Ok(fabric),
            Err(failure) => failure,
        };
        let (Some(members), Some(address)) = (members, donor_of(&failure)) else {
            return Err(failure);
        };
        replaced += 1;
        if replaced > REPLACED_MAX {
            return Err(failure);
        }
        let donors = match members.without(address) {
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
