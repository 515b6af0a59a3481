//! The routes of rebalancing: `GET` and `POST /v1/rebalance`.

use std::sync::Arc;

use memory_fabric::fabric::DonorAddress;

use super::drain_routes::{TO_MAX, drains_of};
use super::hotplug_routes::{Limits, joining_donor};
use super::vm::Instance;
use crate::config::address::Donor;
use crate::control_socket::protocol::{RebalanceTarget, Refusal, RefusalCode};
use crate::control_socket::route::{Answer, answer};

/// Returns the last rebalancing.
pub fn look(instance: &Instance) -> Answer {
    let booted = instance.booted()?;
    answer(200, &drains_of(instance, &booted)?.rebalance_body())
}

/// Begins or ends one.
pub fn change(instance: &Arc<Instance>, body: &[u8]) -> Answer {
    let malformed = |text: String| Refusal::new(RefusalCode::Malformed, text);
    let target: RebalanceTarget = serde_json::from_slice(body).map_err(|error| {
        malformed(format!(
            "not {{\"add\": [\"HOST:PORT\"], \"stop\": false}}: {error}"
        ))
    })?;
    let booted = instance.booted()?;
    let drains = drains_of(instance, &booted)?;
    if target.stop {
        if !target.add.is_empty() {
            let text = "`add` has no meaning with `stop`; omit one of them";
            return Err(malformed(text.to_owned()));
        }
        drains.stop_rebalancing()?;
        return answer(202, &drains.rebalance_body());
    }
    if target.add.len() > TO_MAX {
        let count = target.add.len();
        return Err(malformed(format!(
            "{count} donors are named by `add`, and {TO_MAX} is the limit"
        )));
    }
    let limits = Limits::begin();
    let mut new: Vec<DonorAddress> = Vec::new();
    for text in &target.add {
        let donor: Donor = text
            .parse()
            .map_err(|error| malformed(format!("{error}")))?;
        let (address, _) = joining_donor(&instance.config, &donor, limits.names)?;
        if new.iter().any(|other| other.address == address.address) {
            return Err(malformed(format!("{text} is named twice; name it once")));
        }
        new.push(address);
    }
    drains.rebalance(new, limits.answer)?;
    answer(202, &drains.rebalance_body())
}
