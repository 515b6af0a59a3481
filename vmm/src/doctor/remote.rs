//! Nodes that are to run vCPUs of VMs of this host: whether they are there, and how their clocks
//! compare with this host's.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use fabric_identity::{ExpectedNode, SharedCredentials};
use memory_fabric::compute::{Carrier, NodeClock};

use super::Finding;
use crate::compute::{NodeSurvey, survey};
use crate::config::Protection;
use crate::config::node_arg::NodeArg;
use crate::config::validation::{ValidationError, check_named, resolve_permitted};
use crate::failure::describe;
use crate::machine::{HostClock, OtherRate, Surveyed};

const CHECK: &str = "node";

/// A node that is to be examined.
#[derive(Debug)]
pub struct ExaminedNode {
    name: String,
    cpus: u8,
    address: SocketAddr,
    carrier: Carrier,
}

impl ExaminedNode {
    /// Resolves the addresses of nodes, to which this host shows a certificate if it has one.
    ///
    /// # Errors
    ///
    /// When an address has no port or cannot be resolved, or a node has no name to be compared with
    /// its certificate.
    pub fn resolve(
        nodes: &[NodeArg],
        shown: Option<&Arc<SharedCredentials>>,
    ) -> Result<Vec<Self>, ValidationError> {
        let protection = match shown {
            Some(_) => Protection::Credentials,
            // A clock is no secret.
            None => Protection::Insecure,
        };
        let resolved = nodes.iter().map(|node| {
            if node.address.port() == 0 {
                let address = node.address.clone();
                return Err(ValidationError::PortZero { address });
            }
            check_named(CHECK, &node.address, node.name.as_ref(), protection)?;
            let address = resolve_permitted(CHECK, &node.address, true)?;
            let carrier = match (shown, &node.name) {
                (Some(shown), Some(name)) => Carrier::Tls(ExpectedNode {
                    credentials: Arc::clone(shown),
                    name: name.clone(),
                }),
                _ => Carrier::Tcp,
            };
            Ok(Self {
                name: node.address.to_string(),
                cpus: node.cpus,
                address,
                carrier,
            })
        });
        resolved.collect()
    }

    /// Asks the node, and compares its clock with this host's.
    #[must_use]
    pub fn examine(&self) -> Finding {
        let here = HostClock::of_this_host().ok();
        let found = survey(self.address, &self.carrier, here);
        let found = found.map_err(|error| describe(&error));
        judge(&self.name, self.cpus, found)
    }
}

fn judge(name: &str, cpus: u8, found: Result<NodeSurvey, String>) -> Finding {
    let NodeSurvey { node, compared } = match found {
        Ok(found) => found,
        Err(reason) => return Finding::missing(CHECK, reason),
    };
    let NodeClock {
        cpus: all, free, ..
    } = node;
    let lent = format!("{name}: {free} of {all} vCPUs are free");
    if free < cpus {
        let detail = format!("{lent}, {cpus} are asked for");
        return Finding::missing(CHECK, detail);
    }
    match (compared, node.rate) {
        (Some(Ok(found)), Some(rate)) => Finding::ok(
            CHECK,
            format!(
                "{lent}; {}; its counter has {} kHz",
                clock(&found),
                rate.khz
            ),
        ),
        (Some(Err(OtherRate { here, of_primary })), _) => Finding::missing(
            CHECK,
            format!(
                "{lent}, but its counter has {here} kHz and this host's {of_primary} kHz, which differ \
                 by more than 250 millionths, and its KVM cannot scale it: a VM of this host cannot \
                 run there"
            ),
        ),
        (_, None) => Finding::missing(
            CHECK,
            format!("{lent}, but its KVM cannot be used, without which no vCPU runs there"),
        ),
        (None, Some(_)) => Finding::warning(
            CHECK,
            format!("{lent}; its clock is not compared: KVM says nothing of the rate of a counter"),
        ),
    }
}

/// How a clock compares with this host's.
fn clock(found: &Surveyed) -> String {
    let ahead = Duration::from_nanos(found.ahead_ns.unsigned_abs());
    let side = match found.ahead_ns < 0 {
        true => "behind",
        false => "ahead of",
    };
    let drift = found.rate_ppm.map_or(String::new(), |(ppm, error)| {
        format!(", drifting by {ppm:.1} millionths, within {error:.1}")
    });
    format!(
        "round trip {}; its clock is {:.6} s {side} this host's, within {}{drift}",
        short(found.round_trip),
        ahead.as_secs_f64(),
        short(found.error_max),
    )
}

fn short(time: Duration) -> String {
    format!("{:.1} us", time.as_secs_f64() * 1e6)
}

#[cfg(test)]
mod tests {
    use memory_fabric::compute::ClockRate;

    use super::super::Status;
    use super::*;

    const NODE: NodeClock = NodeClock {
        ticks: 1,
        rate: Some(ClockRate {
            khz: 2_600_000,
            scales: false,
        }),
        cpus: 4,
        free: 2,
    };

    fn judged(node: NodeClock, compared: Option<Result<Surveyed, OtherRate>>) -> Finding {
        judge("b:7700", 2, Ok(NodeSurvey { node, compared }))
    }

    const FOUND: Surveyed = Surveyed {
        ahead_ns: -1_250_000_000,
        error_max: Duration::from_micros(52),
        rate_ppm: Some((-3.21, 40.4)),
        round_trip: Duration::from_nanos(101_300),
    };

    #[test]
    fn a_node_that_fits_has_its_offset_and_delay() {
        let fine = judged(NODE, Some(Ok(FOUND)));
        assert_eq!(fine.status, Status::Ok);
        let expected = "b:7700: 2 of 4 vCPUs are free; round trip 101.3 us; its clock is 1.250000 s \
                        behind this host's, within 52.0 us, drifting by -3.2 millionths, within 40.4; \
                        its counter has 2600000 kHz";
        assert_eq!(fine.detail, expected);
    }

    #[test]
    fn a_node_that_does_not_fit_says_why() {
        let refused = OtherRate {
            here: 2_600_000,
            of_primary: 3_000_000,
        };
        let taken = NodeClock { free: 1, ..NODE };
        let without = NodeClock { rate: None, ..NODE };
        let absent = judge("b:7700", 2, Err("no answer".to_owned()));
        let cases = [
            (
                judged(NODE, Some(Err(refused))),
                "2600000 kHz and this host's 3000000 kHz",
            ),
            (
                judged(taken, Some(Ok(FOUND))),
                "1 of 4 vCPUs are free, 2 are asked for",
            ),
            (judged(without, None), "its KVM cannot be used"),
            (absent, "no answer"),
        ];
        for (finding, text) in cases {
            assert_eq!(finding.status, Status::Missing, "{finding:?}");
            assert!(finding.detail.contains(text), "{finding:?}");
        }
        let unknown = judged(NODE, None);
        assert_eq!(unknown.status, Status::Warning, "{unknown:?}");
    }
}
