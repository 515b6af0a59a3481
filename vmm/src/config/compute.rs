//! Nodes that run vCPUs of a VM, resolved and checked against the other settings.

use std::net::SocketAddr;

use fabric_identity::Name;
use memory_fabric::fabric::{Compression, TransportKind};

use super::DEFAULT_DONOR_GRACE_SECONDS;
use super::address::HostPort;
use super::choice::{Numa, Switch};
use super::node_arg::{CpusFrom, NODES_MAX};
use super::protection::Protection;
use super::settings::RunSettings;
use super::validation::{ValidationError, check_named, check_range, resolve_permitted};
use crate::machine::Irqchip;
use crate::size::ByteSize;

/// Limit of `--donor-grace` where nodes share memory: a node waits for a page for 20 s, and would name
/// the one that waits for a donor as lost.
pub const SHARED_DONOR_GRACE_SECONDS_MAX: u32 = 10;

/// The unit in which nodes share memory.
const BLOCK_BYTES: u64 = 2 << 20;

/// That a size of memory contains what may be added, if it does, for messages.
pub const fn with_added(hotplug_memory: Option<ByteSize>) -> &'static str {
    match hotplug_memory {
        None => "",
        Some(_) => " with --hotplug-memory",
    }
}

/// A node whose name is resolved and that may be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ComputeNode {
    /// The node as it was named, for messages.
    pub name: HostPort,
    /// Where to connect.
    pub address: SocketAddr,
    /// Its name in its certificate; `None` without credentials.
    pub identity: Option<Name>,
    /// How many vCPUs it runs.
    pub cpus: u8,
    /// How much memory it lends.
    pub memory: ByteSize,
    /// Since when its vCPUs are there.
    pub from: CpusFrom,
}

impl RunSettings {
    /// The memory that hosts with vCPUs share: the guest's, and what may be added to it.
    pub(crate) fn shared_memory(&self) -> ByteSize {
        let added = self.hotplug_memory.unwrap_or(ByteSize::ZERO);
        self.memory.saturating_add(added)
    }

    /// The flags of that memory, for messages.
    fn flags_of_memory(&self) -> &'static str {
        match self.hotplug_memory {
            None => "--memory",
            Some(_) => "--memory with --hotplug-memory,",
        }
    }

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
            check_named("node", &node.address, node.name.as_ref(), self.protection())?;
            let permitted = self.protection() != Protection::None;
            let address = resolve_permitted("node", &node.address, permitted)?;
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
                identity: node.name.clone(),
                cpus: node.cpus,
                memory: node.memory.unwrap_or(self.shared_memory()),
                from: node.from,
            });
        }
        self.check_lent(&resolved)?;
        Ok(resolved)
    }

    /// How long an unreachable donor is waited for, in seconds.
    pub(super) fn donor_grace_seconds(&self) -> u32 {
        if self.nodes.is_empty() || self.donors.is_empty() {
            return self.donor_grace_seconds;
        }
        // Only the default is longer.
        self.donor_grace_seconds.min(SHARED_DONOR_GRACE_SECONDS_MAX)
    }

    /// What this host, the nodes and donors lend for the guest's memory, and for what may be added:
    /// its place is fixed from the start as well.
    fn check_lent(&self, nodes: &[ComputeNode]) -> Result<(), ValidationError> {
        let (memory, flags) = (self.shared_memory(), self.flags_of_memory());
        let local = self.checked_local_memory()?;
        let whole = |flag, size: ByteSize| {
            if size.is_multiple_of(BLOCK_BYTES) && size != ByteSize::ZERO {
                return Ok(());
            }
            Err(ValidationError::NotWholeBlocks { flag, size })
        };
        whole("--local-memory", local)?;
        let mut lent = ByteSize::ZERO;
        for node in nodes {
            whole("memory= of --node", node.memory)?;
            if node.memory > memory {
                let (node, size) = (node.name.clone(), node.memory);
                return Err(ValidationError::NodeAboveMemory {
                    node,
                    size,
                    flags,
                    memory,
                });
            }
            lent = lent.saturating_add(node.memory);
        }
        // Donors that are not asked for so much lend what they have, which they are asked later.
        let by_donors = match self.donors.as_slice() {
            [] => ByteSize::ZERO,
            _ => self.memory_asked_of_donors().unwrap_or(memory),
        };
        lent = lent.saturating_add(by_donors);
        let all = local.saturating_add(lent);
        if all < memory {
            let missing = memory.saturating_sub(all);
            return Err(ValidationError::NodesLendTooLittle {
                memory,
                with_added: with_added(self.hotplug_memory),
                local,
                lent,
                in_copies: self.in_copies(),
                missing,
            });
        }
        Ok(())
    }

    /// How donors lend what they lend, for messages.
    fn in_copies(&self) -> &'static str {
        match self.replicas {
            0 | 1 => "",
            _ => ", donors in two copies",
        }
    }

    /// What a VM on several nodes cannot have.
    fn check_beside_nodes(&self) -> Result<(), ValidationError> {
        let alone = self.donors.is_empty();
        let given = [
            (self.irqchip == Some(Irqchip::Kernel), "--irqchip kernel"),
            (self.cluster.is_some(), "--cluster"),
            // Its parts would be those of the last hosts, and the rest of the memory that of the first.
            (
                self.hotplug_memory.is_some() && self.numa == Numa::Expose,
                "--hotplug-memory with --numa expose",
            ),
            // Memory of donors belongs to no host.
            (
                !alone && self.numa == Numa::Expose,
                "--numa expose beside --donor",
            ),
            (self.cpu_pinning.is_some(), "--cpu-pinning"),
            // These are about the way to donors.
            (alone && self.checksum, "--checksum without --donor"),
            (
                alone && self.compression == Compression::On,
                "--compression on without --donor",
            ),
            (
                alone && self.seal == Some(Switch::On),
                "--seal on without --donor",
            ),
            // Merged tables are not evicted, and a home with donors evicts its own pages.
            (
                !alone && self.merge_tables == Switch::On,
                "--merge-tables on with --donor",
            ),
            (self.record_working_set.is_some(), "--record-working-set"),
            (self.replay_working_set.is_some(), "--replay-working-set"),
            (
                !matches!(
                    self.transport,
                    TransportKind::Auto | TransportKind::Tcp | TransportKind::Rdma
                ),
                "this --transport",
            ),
            (
                self.transport == TransportKind::Rdma && self.credentials.is_some(),
                "--transport rdma with --credentials (RDMA does not encrypt)",
            ),
        ];
        if let Some((_, flag)) = given.into_iter().find(|(is_given, _)| *is_given) {
            return Err(ValidationError::NotWithNodes { flag });
        }
        let grace = self.donor_grace_seconds;
        if !alone && grace != DEFAULT_DONOR_GRACE_SECONDS {
            let max = SHARED_DONOR_GRACE_SECONDS_MAX;
            check_range("--donor-grace with --node", grace, 0, max)?;
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
        // Pages are shared one by one.
        assert!(run.balloon && !run.huge_pages);
        let mut alone = settings();
        alone.nodes.clear();
        let run = alone.parse().expect("is valid");
        assert_eq!(run.irqchip, Irqchip::Kernel);
        assert!(run.balloon && run.huge_pages);
        let text = refused(|run| run.irqchip = Some(Irqchip::Kernel));
        assert!(text.contains("--irqchip kernel"), "{text}");
    }

    #[test]
    fn what_several_nodes_cannot_have_is_refused_by_its_flag() {
        let text = refused(|run| run.checksum = true);
        assert!(text.contains("--checksum without --donor"), "{text}");
        let mut seen = settings();
        seen.numa = Numa::Expose;
        assert_eq!(seen.parse().expect("is valid").numa, Numa::Expose);
        let text = refused(|run| run.transport = TransportKind::Udp);
        assert!(text.contains("--transport"), "{text}");
        let rdma = |credentials: Option<&str>| {
            let mut run = settings();
            run.transport = TransportKind::Rdma;
            run.credentials = credentials.map(Into::into);
            run.parse().map(|run| run.transport)
        };
        assert_eq!(rdma(None).expect("fine"), TransportKind::Rdma);
        let text = rdma(Some("/")).expect_err("not encrypted").to_string();
        assert!(
            text.contains("--transport rdma with --credentials"),
            "{text}"
        );
        let text = refused(|run| run.memory = ByteSize::from_mib(65));
        assert!(text.contains("65 MiB is not a multiple of 2M"), "{text}");
    }

    #[test]
    fn this_host_and_the_nodes_lend_enough_for_the_guest() {
        let node = |text: &str| text.parse::<NodeArg>().expect("a node");
        let lends = |local: Option<u64>, node: NodeArg| {
            let mut settings = settings();
            settings.memory = ByteSize::from_mib(256);
            settings.local_memory = local.map(ByteSize::from_mib);
            settings.nodes = vec![node];
            settings.parse()
        };
        let refused = |local, node| lends(local, node).expect_err("to be refused").to_string();
        let run = lends(None, node("127.0.0.1:7000,cpus=1")).expect("all on each");
        let all = ByteSize::from_mib(256);
        assert_eq!((run.local_memory, run.nodes[0].memory), (all, all));
        let half = || node("127.0.0.1:7000,cpus=1,memory=128M");
        let run = lends(Some(128), half()).expect("half on each");
        let half_size = ByteSize::from_mib(128);
        assert_eq!(
            (run.local_memory, run.nodes[0].memory),
            (half_size, half_size)
        );
        let text = refused(Some(126), half());
        assert!(
            text.contains("126 MiB") && text.contains("128 MiB") && text.contains("by 2 MiB"),
            "{text}"
        );
        let text = refused(Some(129), half());
        assert!(text.contains("--local-memory 129 MiB is not"), "{text}");
        let text = refused(None, node("127.0.0.1:7000,cpus=1,memory=258M"));
        assert!(
            text.contains("lend 258 MiB, more than --memory 256 MiB"),
            "{text}"
        );
        let text = refused(None, node("127.0.0.1:7000,cpus=1,memory=3M"));
        assert!(text.contains("memory= of --node 3 MiB is not"), "{text}");
    }

    #[test]
    fn what_may_be_added_is_lent_from_the_start() {
        let with = |local: Option<u64>, node: &str, change: fn(&mut RunSettings)| {
            let mut settings = settings();
            settings.memory = ByteSize::from_mib(256);
            settings.hotplug_memory = Some(ByteSize::from_mib(64));
            settings.local_memory = local.map(ByteSize::from_mib);
            settings.nodes = vec![node.parse().expect("a node")];
            change(&mut settings);
            settings.parse().map_err(|error| error.to_string())
        };
        let same: fn(&mut RunSettings) = |_| ();
        let run = with(None, "127.0.0.1:7000,cpus=1", same).expect("all on each");
        let all = ByteSize::from_mib(320);
        assert_eq!((run.local_memory, run.nodes[0].memory), (all, all));
        assert_eq!(run.hotplug_memory, Some(ByteSize::from_mib(64)));
        assert_eq!(run.shared_memory(), all);
        with(Some(160), "127.0.0.1:7000,cpus=1,memory=160M", same).expect("half on each");
        let refused = |local, node, change| with(local, node, change).expect_err("refused");
        let text = refused(Some(128), "127.0.0.1:7000,cpus=1,memory=160M", same);
        assert!(
            text.contains("320 MiB with --hotplug-memory is more") && text.contains("by 32 MiB"),
            "{text}"
        );
        let text = refused(None, "127.0.0.1:7000,cpus=1,memory=322M", same);
        assert!(
            text.contains("more than --memory with --hotplug-memory, 320 MiB"),
            "{text}"
        );
        let text = refused(None, "127.0.0.1:7000,cpus=1", |run| {
            run.numa = Numa::Expose;
        });
        assert!(
            text.contains("--hotplug-memory with --numa expose"),
            "{text}"
        );
        let beside = |run: &mut RunSettings| {
            run.donors = vec!["127.0.0.1:1,memory=128M".parse().expect("a donor")];
        };
        let node = "127.0.0.1:7000,cpus=1,memory=64M";
        let run = with(None, node, beside).expect("the rest is here");
        assert_eq!(run.local_memory, ByteSize::from_mib(192));
        let text = refused(Some(64), node, beside);
        assert!(text.contains("by 64 MiB"), "{text}");
    }

    #[test]
    fn donors_lend_beside_nodes_what_these_leave() {
        let with = |local: Option<u64>, donor: &str, change: fn(&mut RunSettings)| {
            let mut settings = settings();
            settings.memory = ByteSize::from_mib(256);
            settings.local_memory = local.map(ByteSize::from_mib);
            let node = "127.0.0.1:7000,cpus=1,memory=64M";
            settings.nodes = vec![node.parse().expect("a node")];
            settings.donors = vec![donor.parse().expect("a donor")];
            change(&mut settings);
            settings.parse().map_err(|error| error.to_string())
        };
        let same: fn(&mut RunSettings) = |_| ();
        let run = with(Some(64), "127.0.0.1:1,memory=128M", same).expect("enough");
        assert_eq!(run.local_memory, ByteSize::from_mib(64));
        assert_eq!((run.nodes.len(), run.donors.len()), (1, 1));
        assert_eq!(run.donor_grace.as_secs(), 10, "not the default of 30");
        with(Some(64), "127.0.0.1:1", same).expect("it is asked later");
        let run = with(None, "127.0.0.1:1,memory=128M", same).expect("the rest is here");
        assert_eq!(run.local_memory, ByteSize::from_mib(128));
        let refused = |local, donor, change| with(local, donor, change).expect_err("refused");
        let text = refused(Some(64), "127.0.0.1:1,memory=126M", same);
        assert!(
            text.contains("the 190 MiB") && text.contains("by 2 MiB"),
            "{text}"
        );
        let text = refused(None, "127.0.0.1:1", same);
        assert!(text.contains("add --local-memory"), "{text}");
        let text = refused(Some(64), "127.0.0.1:1", |run| run.donor_grace_seconds = 11);
        assert!(text.contains("--donor-grace with --node"), "{text}");
        assert!(text.contains("11") && text.contains("10"), "{text}");
        let text = refused(Some(64), "127.0.0.1:1", |run| run.merge_tables = Switch::On);
        assert!(text.contains("--merge-tables on with --donor"), "{text}");
        let text = refused(Some(64), "127.0.0.1:1", |run| run.replicas = 2);
        assert!(text.contains("the number given is 1"), "{text}");
        let twice = |run: &mut RunSettings| {
            run.replicas = 2;
            let other = "127.0.0.1:2,memory=128M";
            run.donors.push(other.parse().expect("a donor"));
        };
        let run = with(Some(64), "127.0.0.1:1,memory=128M", twice).expect("two copies of 128 MiB");
        assert_eq!(run.redundancy, memory_fabric::fabric::Redundancy::Copies);
        let text = refused(Some(64), "127.0.0.1:1,memory=126M", twice);
        assert!(
            text.contains("the 190 MiB") && text.contains("lend, donors in two copies;"),
            "{text}"
        );
        let run = with(Some(64), "127.0.0.1:1", |run| run.seal = Some(Switch::On));
        assert!(run.is_ok(), "donors get sealed pages");
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
