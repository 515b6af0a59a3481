//! What the status of a VM says of memory with several copies, or pieces of stripes.

use anyhow::Context as _;
use serde_json::Value;

use super::status::number;

/// The state of the copies at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Copies {
    /// Memory that lacks a copy or a piece.
    pub degraded_bytes: u64,
    /// The addresses of donors that are out of use.
    pub out: Vec<String>,
}

impl Copies {
    /// Reads it from a status with one VM. Memory with one copy lacks none.
    pub fn of(status: &Value) -> anyhow::Result<Self> {
        let vm = &status["vms"][0];
        let replicas = &vm["memory"]["replicas"];
        if replicas.is_null() {
            return Ok(Self::default());
        }
        let nodes = vm["nodes"].as_array().context("no nodes")?;
        let address = |id: &Value| {
            let node = nodes.iter().find(|node| node["id"] == *id);
            let address = node.and_then(|node| node["address"].as_str());
            address.with_context(|| format!("no address of donor {id}: {status}"))
        };
        let out = replicas["out"].as_array().context("no list of donors")?;
        Ok(Self {
            degraded_bytes: number(replicas, "/degraded_bytes")?,
            out: out
                .iter()
                .map(|id| address(id).map(str::to_owned))
                .collect::<anyhow::Result<_>>()?,
        })
    }

    /// Whether the donor is out of use.
    pub fn is_out(&self, donor: &str) -> bool {
        self.out.iter().any(|out| out == donor)
    }

    /// Whether the loss of all these donors has been noticed, and nothing lacks a copy any more.
    pub fn is_whole_without<'a>(&self, lost: impl IntoIterator<Item = &'a str>) -> bool {
        self.degraded_bytes == 0 && lost.into_iter().all(|donor| self.is_out(donor))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn status(replicas: &Value) -> Value {
        let nodes = json!([
            {"id": 0, "address": null},
            {"id": 1, "address": "a:1"},
            {"id": 2, "address": "b:1"},
        ]);
        json!({"vms": [{"nodes": nodes, "memory": {"replicas": replicas}}]})
    }

    #[test]
    fn memory_is_whole_only_after_the_loss_was_noticed_and_repaired() {
        let of = |degraded: u64, out: &[u32]| {
            let replicas = json!({"degraded_bytes": degraded, "out": out});
            Copies::of(&status(&replicas)).unwrap()
        };
        assert!(of(0, &[]).is_whole_without([]));
        assert!(!of(0, &[]).is_whole_without(["b:1"]), "not noticed yet");
        assert!(!of(2 << 20, &[2]).is_whole_without(["b:1"]), "not repaired");
        assert!(!of(0, &[1]).is_whole_without(["b:1"]), "another one");
        assert!(of(0, &[1, 2]).is_whole_without(["b:1"]));
        assert_eq!(of(0, &[2]).out, ["b:1"]);
    }

    #[test]
    fn memory_with_one_copy_is_whole_and_a_status_without_the_donor_is_refused() {
        assert_eq!(
            Copies::of(&status(&Value::Null)).unwrap(),
            Copies::default()
        );
        let unknown = json!({"degraded_bytes": 0, "out": [9]});
        assert!(Copies::of(&status(&unknown)).is_err());
        assert!(Copies::of(&status(&json!({}))).is_err());
    }
}
