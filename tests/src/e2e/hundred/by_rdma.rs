//! A guest with two copies that it reads by RDMA, from adapters on three hosts.

use anyhow::Context as _;
use serde_json::Value;

use super::{SHORT, Way, guests};
use crate::e2e::{Context, Result};

/// As with TCP, on the same hosts. Host 3 has an address of its own network for that, so that each
/// adapter of host 1 has an address that the other one has not. A guest takes minutes.
pub(super) const BY_RDMA: Way = Way {
    transport: "rdma",
    guests: 1,
    donors: &[
        (2, 7700, "10.77.0.2:7700"),
        (2, 7701, "10.77.0.2:7701"),
        (3, 7700, "10.78.0.3:7700"),
    ],
    ..super::COPIES
};

/// Commands that add adapters and that network, and remove them: the host, and the command.
const ADD_ADAPTERS: [(usize, &str); 3] = [
    (
        1,
        "rdma link add rxe0 type rxe netdev link2 && ip addr add 10.78.0.1/24 dev link3 && \
         rdma link add rxe1 type rxe netdev link3",
    ),
    (2, "rdma link add rxe0 type rxe netdev link1"),
    (
        3,
        "ip addr add 10.78.0.3/24 dev link1 && rdma link add rxe0 type rxe netdev link1",
    ),
];
const REMOVE_ADAPTERS: [(usize, &str); 3] = [
    (
        1,
        "rdma link delete rxe0 && rdma link delete rxe1 && ip addr del 10.78.0.1/24 dev link3",
    ),
    (2, "rdma link delete rxe0"),
    (
        3,
        "rdma link delete rxe0 && ip addr del 10.78.0.3/24 dev link1",
    ),
];

/// Adds the adapters, and runs the guest.
pub(super) fn by_rdma(context: &Context<'_>) -> Result {
    let each = |commands: [(usize, &str); 3]| {
        commands.into_iter().try_for_each(|(host, command)| {
            let host = context.testbed.host(host);
            host.check(&["sh", "-c", command], SHORT).map(drop)
        })
    };
    each(ADD_ADAPTERS)?;
    let verdict = guests(context, &BY_RDMA)?;
    each(REMOVE_ADAPTERS).context("an adapter is still in use")?;
    Ok(verdict)
}

/// Returns how many pages a VM has read by RDMA from each of its donors, by its report: the number of
/// the second one, since of three donors one may be lost before any page was needed from it.
pub(super) fn fetched(report: &Value) -> anyhow::Result<u64> {
    let nodes = report["nodes"].as_array().context("no nodes")?;
    let donors = nodes.iter().skip(1);
    let fetched = donors.map(|node| node["rdma"]["pages_read"].as_u64().unwrap_or(0));
    let mut fetched: Vec<u64> = fetched.collect();
    fetched.sort_unstable();
    fetched
        .into_iter()
        .rev()
        .nth(1)
        .context("fewer than two donors")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn pages_come_by_rdma_only_if_two_donors_sent_some() {
        let of = |pages: &[u64]| {
            let nodes = pages.iter();
            let nodes = nodes.map(|&pages| json!({"rdma": {"pages_read": pages}}));
            let nodes: Vec<Value> = [json!({"id": 0})].into_iter().chain(nodes).collect();
            fetched(&json!({"nodes": nodes}))
        };
        assert_eq!(of(&[0, 900, 0]).unwrap(), 0);
        assert_eq!(of(&[700, 0, 900]).unwrap(), 700);
        assert!(of(&[900]).is_err());
        let by_tcp = json!({"nodes": [{"id": 0}, {"rdma": null}, {"rdma": null}]});
        assert_eq!(fetched(&by_tcp).unwrap(), 0);
    }
}
