//! The compute nodes of a VM, as its primary sees them: its own counters, and the newest report of each
//! other node.

mod sums;

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use crate::compute::{AtDonors, Observed, Watched};
use crate::machine::{MachineHandle, Observer, VcpuThread};
use crate::report::{Coherence, Distribution, Node, NodeLost, NodeState, Peer, PolicyUsed, Role};
use crate::status::{VcpuNow, VcpuState};
use sums::{Hottest, total};

/// A node from which nothing has come for so long is silent. It reports once in a second.
const SILENT_AFTER: Duration = Duration::from_secs(3);

/// The newest report of a node.
#[derive(Clone, Debug)]
struct Seen {
    at: Instant,
    report: Vec<u8>,
}

#[derive(Clone, Debug, Default)]
struct State {
    /// By place; the first is the primary's, and stays empty.
    seen: Vec<Option<Seen>>,
    policy: PolicyUsed,
    has_ended: bool,
    /// What was lost with the lost node.
    losses: Option<NodeLost>,
}

/// The compute nodes of one boot of a guest.
#[derive(Debug)]
pub struct NodesSeen {
    /// The address of each node but the primary.
    addresses: Vec<String>,
    memory_bytes: Vec<u64>,
    owners: Vec<u8>,
    watched: Watched,
    /// The node whose loss ended the VM.
    lost: Arc<OnceLock<u8>>,
    state: Mutex<State>,
}

/// What all nodes have reported.
#[derive(Debug, Default)]
pub struct Reported {
    /// The compute nodes, by place.
    pub nodes: Vec<Node>,
    /// The sums.
    pub coherence: Coherence,
    /// The vCPUs, by number.
    pub vcpus: Vec<VcpuNow>,
    /// How long requests took, by place.
    pub requests: Vec<Distribution>,
    /// How long pages were held, by place.
    pub holds: Vec<Distribution>,
    /// How long RDMA WRITEs to other nodes took, by place.
    pub ring_writes: Vec<Distribution>,
    /// What the nodes keep at donors by themselves, all together.
    pub at_donors: AtDonors,
    /// What moves vCPUs.
    pub policy: PolicyUsed,
}

impl Observer for NodesSeen {
    fn reported(&self, node: u8, report: Vec<u8>) {
        let at = Instant::now();
        if let Some(place) = self.lock().seen.get_mut(usize::from(node)) {
            *place = Some(Seen { at, report });
        }
    }
}

impl NodesSeen {
    /// Nothing is known yet but where the nodes and their vCPUs are, and what this node knows. `lost`
    /// is set when the memory of a node is lost.
    pub fn new(
        addresses: Vec<String>,
        memory_bytes: Vec<u64>,
        owners: Vec<u8>,
        watched: Watched,
        lost: Arc<OnceLock<u8>>,
    ) -> Self {
        let state = State {
            seen: vec![None; addresses.len() + 1],
            ..State::default()
        };
        Self {
            addresses,
            memory_bytes,
            owners,
            watched,
            lost,
            state: Mutex::new(state),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Each change is one assignment.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The VM has ended, because that node was lost if there is one.
    pub fn ended(&self, lost: Option<u8>) {
        if let Some(node) = lost {
            // The first loss is the reason.
            let _ = self.lost.set(node);
        }
        self.lock().has_ended = true;
    }

    /// The node whose loss ended the VM.
    pub fn lost(&self) -> Option<u8> {
        self.lost.get().copied()
    }

    /// This was lost with that node; `None` if it is not known.
    pub fn set_losses(&self, losses: Option<NodeLost>) {
        self.lock().losses = losses;
    }

    /// What moves vCPUs has done so much, and why it does no more now.
    pub fn set_policy(&self, policy: PolicyUsed) {
        self.lock().policy = policy;
    }

    /// The number of a node that is named `primary`, or by its number or address.
    pub fn place_of(&self, name: &str) -> Option<u32> {
        if name == "primary" {
            return Some(0);
        }
        let address = (1..).zip(&self.addresses);
        let mut address = address.filter(|(_, address)| *address == name);
        let place = address.next().map(|(place, _)| place);
        place.or_else(|| name.parse().ok())
    }

    /// The names of all nodes, for messages.
    pub fn names(&self) -> Vec<String> {
        let address = (1..).zip(&self.addresses);
        let others = address.map(|(place, address)| format!("{place} ({address})"));
        ["0 (primary)".to_owned()]
            .into_iter()
            .chain(others)
            .collect()
    }

    /// The address of a node; none of the primary.
    pub fn address_of(&self, place: u32) -> Option<String> {
        let index = usize::try_from(place).ok()?.checked_sub(1)?;
        self.addresses.get(index).cloned()
    }

    /// The newest report of each node, by place; that of this node is made of `threads`.
    pub fn observed(&self, threads: &[VcpuThread]) -> Vec<Option<Observed>> {
        let seen = self.lock().seen.clone();
        let all = (0..).zip(seen).map(|(place, seen)| match place {
            0 => Some(Observed::now(&self.watched, threads)),
            _ => seen.and_then(|seen| read(place, &seen.report)),
        });
        all.collect()
    }

    /// What all nodes do; the vCPUs of this node are those of `machine`.
    pub fn now(&self, machine: Option<&MachineHandle>, is_paused: bool) -> Reported {
        let threads = machine.map(MachineHandle::vcpu_threads).unwrap_or_default();
        let here = Observed::now(&self.watched, &threads);
        let lost = self.lost();
        let State {
            seen,
            policy,
            has_ended,
            losses,
        } = self.lock().clone();
        let now = Instant::now();
        let owners = machine
            .and_then(MachineHandle::vcpu_nodes)
            .unwrap_or_else(|| self.owners.clone());
        let mut all = Reported {
            vcpus: vcpus_unknown(&owners),
            policy,
            ..Reported::default()
        };
        let mut hottest = Hottest::default();
        for (place, seen) in (0_u8..).zip(seen) {
            let age = seen
                .as_ref()
                .map(|seen| now.saturating_duration_since(seen.at));
            let observed = match (place, &seen) {
                (0, _) => Some(here.clone()),
                (_, Some(seen)) => read(place, &seen.report),
                (_, None) => None,
            };
            let state = match age {
                _ if lost == Some(place) => NodeState::Lost,
                _ if has_ended => NodeState::Ended,
                _ if place == 0 => NodeState::Up,
                None => NodeState::Starting,
                Some(age) if age > SILENT_AFTER => NodeState::Silent,
                Some(_) if observed.is_none() => NodeState::Silent,
                Some(_) => NodeState::Up,
            };
            let is_up = state == NodeState::Up;
            let observed = observed.unwrap_or_default();
            hottest.add(place, &observed);
            if is_up {
                self.set_vcpus(place, &observed, is_paused, &mut all.vcpus);
            }
            let mut node = self.node(place, &owners, state, age, &observed);
            node.lost = losses.clone().filter(|_| state == NodeState::Lost);
            all.nodes.push(node);
            all.at_donors.add(&observed.at_donors);
            all.requests.push(observed.requests);
            all.holds.push(observed.holds);
            all.ring_writes.push(observed.ring_writes);
        }
        all.coherence = Coherence {
            total: total(&all),
            hottest: hottest.list(),
        };
        all
    }

    /// Enters the vCPUs of a node; what it says of those of others does not count.
    fn set_vcpus(&self, place: u8, observed: &Observed, is_paused: bool, to: &mut [VcpuNow]) {
        for (cpu, state, page) in &observed.vcpus {
            let Some(now) = usize::try_from(*cpu).ok().and_then(|cpu| to.get_mut(cpu)) else {
                continue;
            };
            if now.node == u32::from(place) {
                now.page = *page;
                now.state = match state {
                    VcpuState::Page => VcpuState::Page,
                    _ if is_paused => VcpuState::Paused,
                    state => *state,
                };
            }
        }
    }

    /// How memory travels from a node to each other one, which it can only say once.
    fn peers(&self, place: u8, from: &Observed) -> Vec<Peer> {
        let others = (0..).take(self.addresses.len() + 1);
        let others = others.filter(|other| *other != u32::from(place));
        let said = |other| from.peers.iter().find(|peer| peer.node == other).copied();
        others.filter_map(said).collect()
    }

    fn node(
        &self,
        place: u8,
        owners: &[u8],
        state: NodeState,
        age: Option<Duration>,
        from: &Observed,
    ) -> Node {
        let index = usize::from(place).checked_sub(1);
        let cpus = (0..).zip(owners);
        let cpus = cpus.filter(|(_, owner)| **owner == place);
        Node {
            id: place.into(),
            role: Role::Compute,
            address: index.and_then(|index| self.addresses.get(index).cloned()),
            memory_bytes: self
                .memory_bytes
                .get(usize::from(place))
                .copied()
                .unwrap_or(0),
            cpus: cpus.map(|(cpu, _)| cpu).collect(),
            state: Some(state),
            round_trip_us: from.round_trip_us,
            clock: from.clock,
            peers: self.peers(place, from),
            counted_s_ago: index.and(age).map(|age| age.as_secs_f64()),
            transfers: Some(from.transfers),
            ..Node::default()
        }
    }
}

/// vCPUs of which only the node is known.
fn vcpus_unknown(owners: &[u8]) -> Vec<VcpuNow> {
    let unknown = (0..).zip(owners).map(|(cpu, node)| VcpuNow {
        cpu,
        node: (*node).into(),
        state: VcpuState::Unknown,
        page: None,
    });
    unknown.collect()
}

fn read(node: u8, report: &[u8]) -> Option<Observed> {
    serde_json::from_slice(report)
        .inspect_err(|error| tracing::debug!(node, %error, "a report is malformed"))
        .ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compute::observed::HotPageHere;
    use crate::report::{NodeClock, PeerTransport, PolicyKind, Transfers};

    fn seen() -> NodesSeen {
        let watched = Watched::default();
        let stats = &watched.stats;
        stats.reads.add(3);
        stats.hold.record(Duration::from_micros(10));
        let addresses = vec!["b:7000".to_owned(), "c:7000".to_owned()];
        NodesSeen::new(
            addresses,
            vec![1 << 30; 4],
            vec![0, 1, 1, 2],
            watched,
            Arc::default(),
        )
    }

    fn clock() -> NodeClock {
        NodeClock {
            rate_ppm: Some(-3.5),
            steps: 7,
            ..NodeClock::default()
        }
    }

    fn report(reads: u64) -> Observed {
        let hot = |address, reads| HotPageHere {
            address,
            reads,
            writes: 1,
            earlier_max: 2,
        };
        let peer = |node| Peer {
            node,
            transport: PeerTransport::Rdma,
            connections: 2,
            pages_received: 3,
        };
        Observed {
            transfers: Transfers {
                reads,
                ..Transfers::default()
            },
            holds: vec![(1000.0, 2)],
            hottest: vec![hot(0x5000, 6), hot(0x7000, 1)],
            vcpus: vec![
                (1, VcpuState::Halted, None),
                (2, VcpuState::Page, Some(0x5000)),
                // Not its own.
                (0, VcpuState::Halted, None),
                (99, VcpuState::Halted, None),
            ],
            round_trip_us: Some(51.5),
            clock: Some(clock()),
            // Of itself, twice of another node, and of none.
            peers: [1, 0, 0, 99].map(peer).to_vec(),
            ..Observed::default()
        }
    }

    #[test]
    fn the_reports_of_all_nodes_are_one_picture() {
        let seen = seen();
        let json = |observed: &Observed| serde_json::to_vec(observed).expect("JSON");
        seen.reported(1, json(&report(u64::MAX)));
        seen.reported(
            2,
            json(&Observed {
                hottest: vec![report(0).hottest[1]],
                ..report(4)
            }),
        );
        seen.reported(9, Vec::new());
        let now = seen.now(None, false);
        let states: Vec<_> = now.nodes.iter().map(|node| node.state).collect();
        assert_eq!(states, [Some(NodeState::Up); 3]);
        assert_eq!(now.nodes[1].cpus, [1, 2]);
        assert_eq!(now.nodes[2].address.as_deref(), Some("c:7000"));
        assert_eq!(
            (now.nodes[0].round_trip_us, now.nodes[1].round_trip_us),
            (None, Some(51.5))
        );
        let clocks = now.nodes.iter().map(|node| node.clock);
        let expected = [None, Some(clock()), Some(clock())];
        assert_eq!(clocks.collect::<Vec<_>>(), expected);
        assert_eq!(now.policy, PolicyUsed::default(), "static");
        let peers = now.nodes[1].peers.iter().map(|peer| peer.node);
        assert_eq!(peers.collect::<Vec<_>>(), [0]);
        assert_eq!(now.coherence.total.reads, u64::MAX, "no overflow");
        let total = now.coherence.total;
        assert!((1000.0 - total.hold_us.p50).abs() < 0.1, "{total:?}");
        let hottest = &now.coherence.hottest;
        assert_eq!((hottest[0].address, hottest[0].transfers), (0x5000, 7));
        assert_eq!((hottest[1].nodes.len(), hottest[1].more_max), (2, 4));
        let vcpus: Vec<_> = now
            .vcpus
            .iter()
            .map(|vcpu| (vcpu.state, vcpu.page))
            .collect();
        let unknown = (VcpuState::Unknown, None);
        let page = (VcpuState::Page, Some(0x5000));
        assert_eq!(vcpus, [unknown, (VcpuState::Halted, None), page, unknown]);
        let paused = seen.now(None, true).vcpus;
        assert_eq!(
            (paused[1].state, paused[2].state),
            (VcpuState::Paused, VcpuState::Page)
        );
    }

    #[test]
    fn what_the_policy_did_stays_after_the_end() {
        let seen = seen();
        let policy = PolicyUsed {
            kind: PolicyKind::Follow,
            moves: 3,
            ..PolicyUsed::default()
        };
        seen.set_policy(policy.clone());
        assert_eq!(seen.now(None, false).policy, policy);
        seen.ended(None);
        assert_eq!(seen.now(None, false).policy, policy);
    }

    #[test]
    fn a_node_is_named_by_its_number_or_address() {
        let seen = seen();
        for (name, place) in [
            ("primary", Some(0)),
            ("0", Some(0)),
            ("2", Some(2)),
            ("c:7000", Some(2)),
            ("d:7000", None),
            ("-1", None),
        ] {
            assert_eq!(seen.place_of(name), place, "{name}");
        }
        assert_eq!(seen.names(), ["0 (primary)", "1 (b:7000)", "2 (c:7000)"]);
        assert_eq!(seen.address_of(2).as_deref(), Some("c:7000"));
        assert_eq!((seen.address_of(0), seen.address_of(9)), (None, None));
    }

    #[test]
    fn a_node_that_says_nothing_useful_is_named_by_its_state() {
        let seen = seen();
        seen.reported(1, b"{\"transfers\":[]}".to_vec());
        let states = |seen: &NodesSeen| {
            let nodes = seen.now(None, false).nodes;
            nodes
                .iter()
                .filter_map(|node| node.state)
                .collect::<Vec<_>>()
        };
        use NodeState::{Ended, Lost, Silent, Starting, Up};
        assert_eq!(states(&seen), [Up, Silent, Starting]);
        seen.ended(Some(2));
        assert_eq!(
            (states(&seen), seen.lost()),
            (vec![Ended, Ended, Lost], Some(2))
        );
        let losses = NodeLost {
            blocks: 7,
            ..NodeLost::default()
        };
        seen.set_losses(Some(losses.clone()));
        let lost = seen.now(None, false).nodes.into_iter();
        let lost: Vec<_> = lost.map(|node| node.lost).collect();
        assert_eq!(lost, [None, None, Some(losses)]);
    }
}
