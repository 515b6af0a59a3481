//! The other nodes of a VM whose vCPUs are on several hosts.

use std::error::Error as StdError;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use devices::{BOOT_TIMER_PORT, BootEvent};
use fabric_identity::{ExpectedNode, Fingerprint, SharedCredentials};
use memory_fabric::compute::{
    Carrier, ComputeMember, ComputeRequest, ComputeTable, Discards, DonorDepot, Listeners,
    Membership, SharedGuest, SharingError, member,
};
use memory_fabric::fabric::{DonorShares, Fabric, NodeLeases, TransportKind};
use vm_memory::GuestMemoryMmap;

use super::certificates::{NodeCertificates, ShownBy};
use super::lost_node;
use super::memory::donors_failed;
use super::numa::host;
use super::run_error::RunError;
use super::seen::NodesSeen;
use super::supervisor::Supervisor;
use crate::compute::{JoinError, Joined, LentCpus, Shared, byte_ranges, layout, random_vm};
use crate::config::compute::{ComputeNode, with_added};
use crate::config::name::called;
use crate::config::{Numa, RunConfig};
use crate::exit::ExitCode;
use crate::failure::{Failure, describe};
use crate::machine::{
    ConsoleConfig, Machine, MachineConfig, MachineError, NodesConfig, NumaNode, Outcome,
    all_memory_ranges, guest_memory_ranges,
};
use crate::size::ByteSize;

/// The place of this host among the nodes.
const PRIMARY: u8 = 0;

/// The other nodes of one boot of the guest.
#[derive(Debug)]
pub struct OtherNodes {
    nodes: Arc<[ComputeNode]>,
    lent: Vec<LentCpus>,
    shared: SharedGuest,
    seen: Arc<NodesSeen>,
    /// What the nodes keep at donors themselves.
    bytes_at_donors: u64,
    /// `None` without credentials.
    certificates: Option<NodeCertificates>,
}

/// A node as messages name it.
fn named(nodes: &[ComputeNode], place: u8) -> String {
    let node = usize::from(place).checked_sub(1);
    match node.and_then(|node| nodes.get(node)) {
        Some(node) => format!("node {} (number {place})", node.name),
        None => "this host".to_owned(),
    }
}

/// The nodes whose vCPUs begin on this host, and what these wait for.
fn late(nodes: &[ComputeNode]) -> Vec<(u8, BootEvent)> {
    let nodes = (1..).zip(nodes);
    let late = nodes.filter_map(|(place, node)| Some((place, node.from.event()?)));
    late.collect()
}

/// The nodes whose vCPUs wait for an event, as messages name them.
fn named_late(nodes: &[ComputeNode], event: BootEvent) -> Option<String> {
    let late = late(nodes).into_iter();
    let late = late.filter(|(_, awaited)| *awaited == event);
    let names: Vec<_> = late.map(|(place, _)| named(nodes, place)).collect();
    (!names.is_empty()).then(|| names.join(", "))
}

/// What the guest has done when an event happens, and the value of `from=` that waits for it.
const fn awaited(event: BootEvent) -> (&'static str, &'static str) {
    match event {
        BootEvent::Init => ("run a program", "init"),
        BootEvent::Ready => ("reported that it has booted", "ready"),
    }
}

const EVENTS: [BootEvent; 2] = [BootEvent::Init, BootEvent::Ready];

/// The node that has a CPU for each vCPU: those of this host come first.
fn owners(config: &RunConfig) -> Vec<u8> {
    let elsewhere = (1..)
        .zip(&config.nodes)
        .flat_map(|(place, node): (u8, _)| std::iter::repeat_n(place, node.cpus.into()));
    let elsewhere: Vec<u8> = elsewhere.collect();
    let here = usize::from(config.cpus).saturating_sub(elsewhere.len());
    std::iter::repeat_n(0, here).chain(elsewhere).collect()
}

/// What the connection that starts the VM's process on a node is made of. A node's name was checked
/// with the other settings.
fn carrier(node: &ComputeNode, shown: Option<&Arc<SharedCredentials>>) -> Carrier {
    match (shown, &node.identity) {
        (Some(shown), Some(name)) => Carrier::Tls(ExpectedNode {
            credentials: Arc::clone(shown),
            name: name.clone(),
        }),
        _ => Carrier::Tcp,
    }
}

/// Checks that this host, the nodes and the donors, which lend so much, have room for the guest.
fn check_lent(config: &RunConfig, by_donors: u64) -> Result<(), Failure> {
    let (memory, local) = (config.shared_memory(), config.local_memory);
    let by_nodes = config.nodes.iter().map(|node| node.memory.bytes()).sum();
    let (by_nodes, by_donors) = (
        ByteSize::from_bytes(by_nodes),
        ByteSize::from_bytes(by_donors),
    );
    let all = local.saturating_add(by_nodes).saturating_add(by_donors);
    if all >= memory {
        return Ok(());
    }
    let missing = memory.saturating_sub(all);
    let error = RunError::DonorsLendTooLittle {
        memory,
        with_added: with_added(config.hotplug_memory),
        local,
        by_nodes,
        by_donors,
        in_copies: match config.redundancy.is_some() {
            true => " in two copies",
            false => "",
        },
        missing,
    };
    Err(Failure::new(ExitCode::DonorUnavailable, error))
}

/// Obtains the leases of each of these nodes, which come behind this host.
fn lease(
    shares: Option<&DonorShares>,
    members: &[ComputeMember],
) -> Result<Vec<NodeLeases>, Failure> {
    let places = (1..).zip(members);
    let leases = places.map(|(place, member)| match shares {
        Some(shares) => shares.lease(place, member.certificate.map(Fingerprint::from)),
        None => Ok(NodeLeases::default()),
    });
    leases.collect::<Result<_, _>>().map_err(donors_failed)
}

/// The certificates that nodes have shown, and the credentials to which they are compared.
fn watched(
    nodes: &[ComputeNode],
    lent: &[LentCpus],
    shown: Option<&Arc<SharedCredentials>>,
) -> Option<(Vec<ShownBy>, Arc<SharedCredentials>)> {
    let credentials = shown?;
    let nodes = (1..).zip(nodes).zip(lent);
    let watched = nodes.filter_map(|((place, node), cpus)| {
        Some(ShownBy {
            place,
            address: node.address,
            carrier: carrier(node, shown),
            chain: cpus.chain()?,
            unreachable_since: None,
        })
    });
    Some((watched.collect(), Arc::clone(credentials)))
}

impl OtherNodes {
    /// Asks all nodes for their vCPUs and memory, and shares the memory of `fabric`, which nothing
    /// has touched, with them. What donors lend a node by `shares` counts as lent by it. Nodes are
    /// shown the certificate of `shown`. Returns them with what [`machine`](Self::machine) needs, or `None` when
    /// the VM is on this host alone.
    pub fn start(
        config: &RunConfig,
        fabric: &Fabric,
        shares: Option<&DonorShares>,
        supervisor: &Arc<Supervisor>,
        shown: Option<&Arc<SharedCredentials>>,
    ) -> Result<Option<(Self, NodesConfig)>, Failure> {
        if config.nodes.is_empty() {
            return Ok(None);
        }
        let nodes: Arc<[ComputeNode]> = config.nodes.clone().into();
        let (vm, secret) = random_vm().map_err(RunError::host("name the VM"))?;
        // No node connects to the first one.
        let here = IpAddr::V4(Ipv4Addr::LOCALHOST);
        let listeners = match shown {
            Some(_) => Listeners::secured(here, vm, PRIMARY),
            None => Listeners::bind(here),
        };
        let listeners = listeners.map_err(RunError::host("listen"))?;
        let ports = listeners.ports().map_err(RunError::host("listen"))?;
        let merge_tables = config.merge_tables;
        let in_order = config.numa == Numa::Expose;
        let rdma = config.transport == TransportKind::Rdma;
        let depot = fabric.take_depot();
        let by_donors = depot.as_ref().map_or(0, DonorDepot::lent_bytes);
        let lent_here = config.local_memory.bytes().saturating_add(by_donors);
        let hotplug_bytes = config.hotplug_memory.map_or(0, ByteSize::bytes);
        let mut table = vec![member(here, ports, lent_here)];
        let mut lent = Vec::new();
        for (me, node) in (1..).zip(nodes.iter()) {
            let request = ComputeRequest {
                name: called(config.name.as_ref(), std::process::id()),
                vm,
                secret,
                me,
                nodes: u8::try_from(nodes.len() + 1).unwrap_or(u8::MAX),
                cpus: node.cpus,
                memory_bytes: config.memory.bytes(),
                hotplug_bytes,
                lent_bytes: node.memory.bytes(),
                merge_tables,
                in_order,
                rdma,
            };
            let asked = LentCpus::ask(node.address, &carrier(node, shown), &request);
            let (cpus, member) = asked.map_err(|error| unavailable(&nodes, me, error))?;
            lent.push(cpus);
            table.push(member);
        }
        // After the processes have started, so that each takes its leases before they expire.
        let leases = lease(shares, &table[1..])?;
        for (member, leases) in table.iter_mut().skip(1).zip(&leases) {
            member.lent_bytes = member.lent_bytes.saturating_add(leases.lent_bytes());
        }
        let by_nodes: Vec<u64> = leases.iter().map(NodeLeases::lent_bytes).collect();
        check_lent(config, by_donors + by_nodes.iter().sum::<u64>())?;
        let table = ComputeTable(table);
        for ((me, cpus), leases) in (1..).zip(&mut lent).zip(&leases) {
            let connected = cpus.connect(&table, leases);
            connected.map_err(|error| unavailable(&nodes, me, error))?;
        }
        let membership = Membership {
            me: PRIMARY,
            vm,
            secret,
            table,
            ranges: byte_ranges(&all_memory_ranges(config.memory.bytes(), hotplug_bytes)),
            merge_tables,
            layout: layout(in_order),
            rdma: rdma.then(|| config.rdma.clone()),
        };
        let lost = Arc::new(OnceLock::new());
        let failed = {
            let (nodes, supervisor) = (Arc::clone(&nodes), Arc::clone(supervisor));
            let lost = Arc::clone(&lost);
            move |error: SharingError| match error.node {
                Some(node) => {
                    // The memory fails once.
                    let _ = lost.set(node);
                    let name = named(&nodes, node);
                    supervisor.node_lost(format!("{name} is lost: {}", error.reason));
                }
                None => supervisor.memory_failed(&error.reason),
            }
        };
        let certificates = watched(&nodes, &lent, shown).map(|(watched, shown)| {
            let (nodes, supervisor) = (Arc::clone(&nodes), Arc::clone(supervisor));
            let lost = Arc::clone(&lost);
            let delegations = leases.iter().flat_map(NodeLeases::delegations).cloned();
            NodeCertificates::watch(watched, delegations, shown, move |place, why| {
                let _ = lost.set(place);
                supervisor.node_lost(format!("{} is lost: {why}", named(&nodes, place)));
            })
        });
        let certificates = certificates.transpose();
        let certificates = certificates.map_err(RunError::host("start a thread"))?;
        let memory = Arc::clone(fabric.memory());
        let guest = Shared { memory, depot };
        let joined = Joined::connect(membership, listeners, guest, owners(config), failed);
        match joined {
            Ok(joined) => {
                let Joined {
                    shared,
                    nodes: mut links,
                    ..
                } = joined;
                // Every node has connected, which it does when it has its leases.
                leases.into_iter().for_each(NodeLeases::hand_over);
                let places = (1..).zip(&by_nodes);
                let at_donors = places.map(|(place, by_donors)| {
                    let memory = nodes[usize::from(place) - 1].memory.bytes();
                    let home = shared.bytes_at(place);
                    home.saturating_sub(memory).min(*by_donors)
                });
                let bytes_at_donors = at_donors.sum();
                let addresses = nodes.iter().map(|node| node.address.to_string());
                let memory = nodes.iter().map(|node| node.memory);
                let memory = [config.local_memory].into_iter().chain(memory);
                let memory = memory.map(ByteSize::bytes);
                let late = late(&nodes);
                for event in EVENTS {
                    if let Some(names) = named_late(&nodes, event) {
                        let (what, byte) = (awaited(event).0, event.byte());
                        tracing::info!(
                            "the vCPUs of {names} begin on this host, and move when the guest has \
                             {what}, or writes {byte:#x} to port {BOOT_TIMER_PORT:#x}"
                        );
                    }
                }
                let mut owners = owners(config);
                owners.iter_mut().for_each(|owner| {
                    if late.iter().any(|(node, _)| node == owner) {
                        *owner = 0;
                    }
                });
                let seen = Arc::new(NodesSeen::new(
                    addresses.collect(),
                    memory.collect(),
                    owners,
                    (&shared).into(),
                    lost,
                ));
                links.observer = Some(Arc::clone(&seen) as _);
                links.late = late;
                let others = Self {
                    nodes,
                    lent,
                    shared,
                    seen,
                    bytes_at_donors,
                    certificates,
                };
                Ok(Some((others, links)))
            }
            Err(error) => Err(Self::not_joined(&nodes, lent, error)),
        }
    }

    /// The NUMA nodes that the guest sees: one for each host, with its vCPUs and the memory whose home
    /// it is. None if it sees one.
    pub fn numa(&self, config: &RunConfig) -> Vec<NumaNode> {
        if config.numa == Numa::Flat {
            return Vec::new();
        }
        let owners = owners(config);
        let ranges = byte_ranges(&guest_memory_ranges(config.memory.bytes()));
        let hosts = 0..=u8::try_from(self.nodes.len()).unwrap_or(u8::MAX);
        let hosts = hosts.map(|place| {
            let cpus = (0..).zip(&owners);
            let cpus = cpus.filter_map(|(cpu, owner)| (*owner == place).then_some(cpu));
            host(place, cpus.collect(), self.shared.memory_at(place, &ranges))
        });
        hosts.collect()
    }

    /// Drops what the guest does not need.
    pub const fn discards(&self) -> &Arc<Discards> {
        self.shared.discards()
    }

    /// How much of the guest's memory the nodes keep at donors themselves.
    pub fn bytes_at_donors(&self) -> u64 {
        self.bytes_at_donors
    }

    /// What is known of all nodes, also after the end.
    pub fn seen(&self) -> Arc<NodesSeen> {
        Arc::clone(&self.seen)
    }

    /// Why the nodes are not connected: the reason that a node reports explains most.
    fn not_joined(nodes: &[ComputeNode], lent: Vec<LentCpus>, error: JoinError) -> Failure {
        let Some(place) = error.node() else {
            return error.into();
        };
        let reported = usize::from(place)
            .checked_sub(1)
            .and_then(|node| lent.into_iter().nth(node))
            .and_then(|cpus| cpus.end_within(REASON_TIME_MAX));
        match reported {
            Some(reason) => unavailable(nodes, place, reason),
            None => unavailable(nodes, place, error),
        }
    }

    /// Builds the machine, whose vCPUs elsewhere then wait for its start.
    pub fn machine(
        &self,
        nodes: NodesConfig,
        config: &MachineConfig,
        memory: GuestMemoryMmap,
        console: ConsoleConfig,
    ) -> Result<Machine, Failure> {
        let built = Machine::with_nodes(config, memory, console, nodes);
        built.map_err(|error| match error.node() {
            Some(node) => unavailable(&self.nodes, node, error),
            None => error.into(),
        })
    }

    /// Releases the nodes after the end of the run. `all_ended`: no thread touches the guest's
    /// memory any more. `has_happened`: whether an event of the guest's boot has. Returns the failure
    /// if a node was lost.
    pub fn end(
        self,
        outcome: &Result<Outcome, MachineError>,
        all_ended: bool,
        has_happened: impl Fn(BootEvent) -> bool,
    ) -> Option<Failure> {
        for event in EVENTS {
            if let Some(names) = named_late(&self.nodes, event)
                && !has_happened(event)
            {
                let (what, from) = awaited(event);
                tracing::warn!(
                    "the guest has not {what}: the vCPUs of {names} with from={from} stayed on this \
                     host, unless `ssi-hv move` has moved them; from=start has them there from the start"
                );
            }
        }
        // The end of a node is that of the VM from here on.
        drop(self.certificates);
        let stats = Arc::clone(self.shared.stats());
        tracing::info!(
            faults = stats.faults.get(),
            received = stats.from_member.get(),
            sent = stats.sent.get(),
            "pages shared with other nodes"
        );
        let lost = outcome.as_ref().err().and_then(MachineError::node);
        // A node may report any number.
        let lost = lost.filter(|place| (1..=self.nodes.len()).contains(&usize::from(*place)));
        self.seen.ended(lost);
        if let Some(place) = self.seen.lost() {
            self.seen
                .set_losses(lost_node::lost_with(&self.shared, place));
        }
        if all_ended {
            drop(self.shared);
        } else {
            // A thread waits for a page, and ends with this process.
            std::mem::forget(self.shared);
        }
        let mut failure = None;
        for (place, cpus) in (1..).zip(self.lent) {
            // A node that is lost may never report a reason.
            let reported = match lost == Some(place) {
                true => cpus.end_within(REASON_TIME_MAX),
                false => cpus.end(),
            };
            let name = named(&self.nodes, place);
            if lost == Some(place) {
                let error = outcome
                    .as_ref()
                    .err()
                    .map(|error| describe(error))
                    .unwrap_or_default();
                let reason = reported.filter(|reason| !error.contains(reason.as_str()));
                let reason = reason.map_or(String::new(), |reason| format!("; {reason}"));
                let error = format!("{name} is lost: {error}{reason}");
                failure = Some(Failure::new(ExitCode::NodeLost, RunError::Ended(error)));
            } else if let Some(reason) = reported {
                tracing::debug!("{name}: {reason}");
            }
        }
        failure
    }
}

/// How long to wait for the reason of a node whose failure was noticed here first.
const REASON_TIME_MAX: Duration = Duration::from_secs(2);

fn unavailable(
    nodes: &[ComputeNode],
    place: u8,
    error: impl Into<Box<dyn StdError + Send + Sync>>,
) -> Failure {
    let error = RunError::Node {
        name: named(nodes, place),
        source: error.into(),
    };
    Failure::new(ExitCode::NodeUnavailable, error)
}
