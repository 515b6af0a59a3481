//! Nodes that run vCPUs of a VM, resolved and checked against the other settings.

use std::net::SocketAddr;

use memory_fabric::fabric::{Compression, TransportKind};

use super::address::HostPort;
use super::choice::Numa;
use super::node_arg::NODES_MAX;
use super::settings::RunSettings;
use super::validation::{ValidationError, resolve_permitted};
use crate::machine::Irqchip;
use crate::size::ByteSize;

/// The unit in which nodes share memory.
const BLOCK_BYTES: u64 = 2 << 20;

/// A node whose name is resolved and that may be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ComputeNode {
    /// The node as it was named, for messages.
    pub name: HostPort,
    /// Where to connect.
    pub address: SocketAddr,
    /// How many vCPUs it runs.
    pub cpus: u8,
}

impl RunSettings {
    /// The nodes that run vCPUs, of which the first stay on this host.
    pub(super) fn resolved_nodes(&self) -> Result<Vec<ComputeNode>, ValidationError> {
        if self.nodes.is_empty() {
            return Ok(Vec::new());
        }
        let count = self.nodes.len();
        if count > NODES_MAX {
            return Err(ValidationError::TooManyNodes { count });
        }
        let elsewhere: u32 = self.nodes.iter().map(|node| u32::from(node.cpus)).sum();
        let cpus = self.cpus;
        if elsewhere >= cpus {
            return Err(ValidationError::NodesTakeAllCpus { cpus, elsewhere });
        }
        self.check_beside_nodes()?;
        let mut resolved: Vec<ComputeNode> = Vec::with_capacity(count);
        for node in &self.nodes {
            if node.address.port() == 0 {
                let address = node.address.clone();
                return Err(ValidationError::PortZero { address });
            }
            let address = resolve_permitted("node", &node.address, self.insecure)?;
            if let Some(first) = resolved.iter().find(|one| one.address == address) {
                return Err(ValidationError::DuplicateNode {
                    first: first.name.clone(),
                    second: node.address.clone(),
                    address,
                });
            }
            resolved.push(ComputeNode {
                name: node.address.clone(),
                address,
                cpus: node.cpus,
            });
        }
        Ok(resolved)
    }

    /// What a VM on several nodes cannot have.
    fn check_beside_nodes(&self) -> Result<(), ValidationError> {
        let given = [
            (self.irqchip == Some(Irqchip::Kernel), "--irqchip kernel"),
            (!self.donors.is_empty(), "--donor"),
            (self.cluster.is_some(), "--cluster"),
            (self.local_memory.is_some(), "--local-memory"),
            (self.hotplug_memory.is_some(), "--hotplug-memory"),
            (self.numa == Numa::Expose, "--numa expose"),
            (self.cpu_pinning.is_some(), "--cpu-pinning"),
            (self.checksum, "--checksum"),
            (self.compression == Compression::On, "--compression on"),
            (self.record_working_set.is_some(), "--record-working-set"),
            (self.replay_working_set.is_some(), "--replay-working-set"),
            (
                !matches!(self.transport, TransportKind::Auto | TransportKind::Tcp),
                "this --transport",
            ),
        ];
        if let Some((_, flag)) = given.into_iter().find(|(is_given, _)| *is_given) {
            return Err(ValidationError::NotWithNodes { flag });
        }
        let size = self.memory;
        if !size.is_multiple_of(BLOCK_BYTES) || size == ByteSize::ZERO {
            let flag = "--memory";
            return Err(ValidationError::NotWholeBlocks { flag, size });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Switch;
    use crate::config::node_arg::NodeArg;

    fn settings() -> RunSettings {
        RunSettings {
            kernel: Some(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml").into()),
            cpus: 4,
            nodes: vec!["127.0.0.1:7000,cpus=2".parse().expect("a node")],
            ..RunSettings::default()
        }
    }

    fn refused(change: impl FnOnce(&mut RunSettings)) -> String {
        let mut settings = settings();
        change(&mut settings);
        settings.parse().expect_err("to be refused").to_string()
    }

    #[test]
    fn a_vm_on_several_nodes_has_its_interrupt_controllers_in_user_space() {
        let run = settings().parse().expect("is valid");
        assert_eq!((run.nodes.len(), run.irqchip), (1, Irqchip::User));
        // The guest's free pages are not given back, and pages are shared one by one.
        assert!(!run.balloon && !run.huge_pages);
        let mut alone = settings();
        alone.nodes.clear();
        let run = alone.parse().expect("is valid");
        assert_eq!(run.irqchip, Irqchip::Kernel);
        assert!(run.balloon && run.huge_pages && alone.balloon == Switch::On);
        let text = refused(|run| run.irqchip = Some(Irqchip::Kernel));
        assert!(text.contains("--irqchip kernel"), "{text}");
    }

    #[test]
    fn what_several_nodes_cannot_have_is_refused_by_its_flag() {
        let text = refused(|run| run.donors = vec!["127.0.0.1:1".parse().expect("a donor")]);
        assert!(
            text.contains("--donor cannot be used with --node"),
            "{text}"
        );
        let text = refused(|run| run.numa = Numa::Expose);
        assert!(text.contains("--numa expose"), "{text}");
        let text = refused(|run| run.transport = TransportKind::Udp);
        assert!(text.contains("--transport"), "{text}");
        let text = refused(|run| run.memory = ByteSize::from_mib(65));
        assert!(text.contains("65 MiB is not a multiple of 2M"), "{text}");
    }

    #[test]
    fn nodes_are_within_limits_and_named_once() {
        let text = refused(|run| run.cpus = 2);
        assert!(text.contains("all 2 vCPUs"), "{text}");
        let node = |text: &str| text.parse::<NodeArg>().expect("a node");
        let text = refused(|run| run.nodes.push(node("localhost:7000,cpus=1")));
        assert!(text.contains("localhost:7000"), "{text}");
        let text = refused(|run| run.nodes = vec![node("192.0.2.1:7000,cpus=1")]);
        assert!(text.contains("--insecure"), "{text}");
        let text = refused(|run| run.nodes = vec![node("127.0.0.1:0,cpus=1")]);
        assert!(text.contains("port 0"), "{text}");
        let text = refused(|run| {
            run.cpus = 100;
            run.nodes = vec![node("127.0.0.1:1,cpus=1"); 16];
        });
        assert!(text.contains("16 given, 15 is the limit"), "{text}");
    }
}
