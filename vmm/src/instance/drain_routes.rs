//! The routes of drains: `GET` and `POST /v1/drain`.

use std::sync::Arc;

use memory_fabric::fabric::{DonorAddress, TransportKind};

use super::drains::{Lender, VmDrains};
use super::hotplug_routes::{Limits, donor_address};
use super::vm::{BootedVm, Instance};
use crate::config::RunConfig;
use crate::control_socket::changes::{NextChange, Seen};
use crate::control_socket::protocol::{DrainTarget, Refusal, RefusalCode};
use crate::control_socket::route::{Answer, answer};

/// Limit of named donors: as many as can join.
pub const TO_MAX: usize = memory_fabric::JOINERS_MAX;

/// Returns the last drain.
pub fn look(instance: &Instance) -> Answer {
    let booted = instance.booted()?;
    answer(200, &drains_of(instance, &booted)?.body())
}

/// Returns the change of a drain, or a rebalancing, that a request with parameters waits for.
pub fn next_change(instance: &Arc<Instance>, query: &str) -> Result<NextChange, Refusal> {
    let seen = Seen::parse(query)?;
    let booted = instance.booted()?;
    Ok(drains_of(instance, &booted)?.changes().after(seen))
}

pub fn drains_of<'a>(instance: &Instance, booted: &'a BootedVm) -> Result<&'a VmDrains, Refusal> {
    let state = |text| Refusal::new(RefusalCode::State, text);
    // The slab of the loopback transport is not a donor.
    let is_loopback = instance.config.transport == TransportKind::Loopback;
    let drains = booted.drains.as_ref().filter(|_| !is_loopback);
    let drains = drains.ok_or_else(|| state(why_not(&instance.config)))?;
    if drains.has_ended() {
        return Err(state("the guest has ended"));
    }
    Ok(drains)
}

/// Returns why a VM has no donor that can be drained.
fn why_not(config: &RunConfig) -> &'static str {
    if !config.nodes.is_empty() {
        "a page of a VM with --node has a fixed place, also at donors"
    } else if config.transport == TransportKind::Loopback {
        "a VM with --transport loopback has no donors"
    } else {
        "the VM uses no donor: all of its memory is local"
    }
}

/// Begins to drain a donor.
pub fn begin(instance: &Arc<Instance>, body: &[u8]) -> Answer {
    let malformed = |text: String| Refusal::new(RefusalCode::Malformed, text);
    let target: DrainTarget = serde_json::from_slice(body).map_err(|error| {
        malformed(format!(
            "not {{\"node\": \"NODE\", \"to\": [\"HOST:PORT\"]}}: {error}"
        ))
    })?;
    let booted = instance.booted()?;
    let drains = drains_of(instance, &booted)?;
    let lender = find(&drains.lenders(), &target.node).map_err(malformed)?;
    if target.to.len() > TO_MAX {
        let count = target.to.len();
        return Err(malformed(format!(
            "{count} donors are named by `to`, and {TO_MAX} is the limit"
        )));
    }
    let limits = Limits::begin();
    let mut to: Vec<DonorAddress> = Vec::new();
    for text in &target.to {
        let (address, _) = donor_address(&instance.config, text, limits.names)?;
        if Some(address.address) == lender.address {
            return Err(malformed(format!(
                "{text} is {} itself, which is to be drained; name another donor",
                lender.node
            )));
        }
        if to.iter().any(|other| other.address == address.address) {
            return Err(malformed(format!("{text} is named twice; name it once")));
        }
        to.push(address);
    }
    drains.begin(lender.node, to, limits.answer)?;
    answer(202, &drains.body())
}

/// Finds a donor by its number or address.
fn find(lenders: &[Lender], node: &str) -> Result<Lender, String> {
    let is_named = |lender: &&Lender| {
        let address = lender.address.map(|address| address.to_string());
        node == lender.node.0.to_string() || address.as_deref() == Some(node)
    };
    let found = lenders.iter().find(is_named);
    found.copied().ok_or_else(|| {
        let known: Vec<_> = lenders.iter().map(Lender::name).collect();
        match known.as_slice() {
            [] => format!("there is no donor {node:?}: the VM uses none"),
            known => format!(
                "there is no donor {node:?}: the VM has {}",
                known.join(", ")
            ),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use memory_fabric::NodeId;

    fn lender(node: u8, address: &str) -> Lender {
        Lender {
            node: NodeId(node),
            address: address.parse().ok(),
            bytes: 0,
        }
    }

    #[test]
    fn a_donor_is_found_by_number_or_address_and_an_unknown_one_is_answered_with_all() {
        let lenders = [lender(1, "10.0.0.1:7000"), lender(3, "[fd00::3]:7000")];
        assert_eq!(find(&lenders, "3"), Ok(lenders[1]));
        assert_eq!(find(&lenders, "10.0.0.1:7000"), Ok(lenders[0]));
        assert_eq!(find(&lenders, "[fd00::3]:7000"), Ok(lenders[1]));
        for unknown in ["0", "2", "10.0.0.1", "", "01"] {
            let text = find(&lenders, unknown).expect_err(unknown);
            let all = "the VM has 1 (10.0.0.1:7000), 3 ([fd00::3]:7000)";
            assert!(text.contains(all), "{text}");
        }
        let text = find(&[], "1").expect_err("none");
        assert!(text.contains("the VM uses none"), "{text}");
    }
}
