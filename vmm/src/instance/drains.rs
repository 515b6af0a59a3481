//! Donors that are drained while the guest runs.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use crossbeam_channel::{Receiver, Sender, bounded};
use memory_fabric::NodeId;
use memory_fabric::fabric::{
    DonorAddress, DrainError, DrainState, DrainSummary, Drains, Fabric, HotplugError,
};
use memory_fabric::view::FabricView;

use super::hotplug;
use crate::control_socket::changes::Changes;
use crate::control_socket::protocol::{DrainBody, Refusal, RefusalCode};
use crate::failure::describe;
use crate::report::{self, DrainUsed};

/// Drains the donors of a boot. Clones share it.
#[derive(Clone, Debug)]
pub struct VmDrains {
    drains: Drains,
    view: FabricView,
    state: Arc<Mutex<State>>,
    /// Notified of all visible changes.
    changes: Changes,
}

#[derive(Debug, Default)]
pub(super) struct State {
    /// The donor for whose memory room is being obtained.
    pub preparing: Option<NodeId>,
    /// Why that failed the last time.
    error: Option<String>,
    /// Whether donors are asked for memory before it is rebalanced.
    pub is_adding: bool,
    /// Why that failed the last time.
    pub rebalance_error: Option<String>,
    /// Whether the guest has ended.
    ended: bool,
    /// Disconnected at the end, for the threads that look after donors.
    watches: Vec<Sender<()>>,
    /// The donors of the configuration, and those that were named as targets.
    pub named: Vec<DonorAddress>,
    /// Whether a donor has joined for copies that were lost.
    pub has_joined: bool,
}

/// What came of an attempt to drain a donor that fails.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Attempt {
    /// Its memory moves.
    Begun,
    /// It holds nothing that would move.
    Empty,
    /// Another drain is in progress, a donor joins, or it is out of use at the moment.
    Later,
    /// It cannot be drained.
    Refused(String),
}

/// A donor that lends at the moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lender {
    pub node: NodeId,
    pub address: Option<SocketAddr>,
    /// Memory of the guest with its home there.
    pub bytes: u64,
}

impl Lender {
    /// Returns how messages name it.
    pub fn name(&self) -> String {
        match self.address {
            Some(address) => format!("{} ({address})", self.node.0),
            None => self.node.0.to_string(),
        }
    }
}

impl VmDrains {
    /// Creates it for a fabric that has donors which can be drained. `changes` is notified by the
    /// observer when a drain ends.
    pub fn new(fabric: &Fabric, named: &[DonorAddress], changes: &Changes) -> Option<Self> {
        let state = State {
            named: named.to_vec(),
            ..State::default()
        };
        Some(Self {
            drains: fabric.drains()?,
            view: fabric.view().clone(),
            state: Arc::new(Mutex::new(state)),
            changes: changes.clone(),
        })
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that the guest has ended: nothing changes any more, and all waits end.
    pub fn end(&self) {
        let mut state = self.lock();
        state.ended = true;
        state.watches.clear();
        drop(state);
        self.changes.notify();
    }

    /// Returns whether the guest has ended.
    pub fn has_ended(&self) -> bool {
        self.lock().ended
    }

    /// Returns the counter of visible changes.
    pub fn changes(&self) -> &Changes {
        &self.changes
    }

    /// Returns the donors that lend now.
    pub fn lenders(&self) -> Vec<Lender> {
        lenders(&self.view)
    }

    /// Returns those that hold copies, or may return with them.
    pub(super) fn not_lost(&self) -> Vec<Lender> {
        let copies = self.view.replicas();
        let lost = copies.map(|copies| copies.lost).unwrap_or_default();
        let mut lenders = self.lenders();
        lenders.retain(|lender| !lost.contains(&lender.node));
        lenders
    }

    /// Returns the state of drains.
    pub fn body(&self) -> DrainBody {
        // Read first, so that the count is not newer than the rest.
        let changes = self.changes.count();
        let state = self.lock();
        DrainBody {
            preparing: state.preparing.map(|node| node.0.into()),
            error: state.error.clone(),
            drain: self.view.drain().map(|drain| used(&drain)),
            changes,
        }
    }

    /// Begins to drain a donor, and waits `until` then for its memory to move.
    pub fn begin(
        &self,
        node: NodeId,
        to: Vec<DonorAddress>,
        until: Instant,
    ) -> Result<(), Refusal> {
        {
            let mut state = self.lock();
            // Not an error of the drain that is in progress.
            let moving = self.view.drain().filter(|drain| !drain.is_over());
            if let Some(drain) = moving {
                return Err(refusal(&DrainError::Draining(drain.node)));
            }
            if state.is_adding {
                return Err(refusal(&DrainError::Rebalancing));
            }
            if let Some(other) = state.preparing {
                let text = format!("{other} is about to be drained; wait until it has left");
                return Err(Refusal::new(RefusalCode::Busy, text));
            }
            state.preparing = Some(node);
            state.error = None;
        }
        self.changes.notify();
        let (result_sender, result) = bounded(1);
        let drains = self.clone();
        let prepare = move || {
            let before = drains.lenders();
            let begun = drains.drains.drain(node, &to);
            let begun = begun
                .map_err(|error| refusal(&error))
                .inspect_err(|refusal| {
                    tracing::warn!("{node} is not drained: {}", refusal.text);
                });
            {
                let mut state = drains.lock();
                state.preparing = None;
                match &begun {
                    // One of the VM keeps what it was named with: its zone, and how much it lends.
                    Ok(_) => state.named.extend(newcomers(to, &before)),
                    Err(refusal) => state.error = Some(refusal.text.clone()),
                }
            }
            drains.changes.notify();
            // The receiver may have timed out.
            let _ = result_sender.try_send(begun.map(drop));
        };
        let thread = std::thread::Builder::new().name("drain".into());
        if let Err(error) = thread.spawn(prepare) {
            self.lock().preparing = None;
            self.changes.notify();
            return Err(Refusal::new(RefusalCode::Failed, error.to_string()));
        }
        // A later result is visible in the body.
        result.recv_deadline(until).unwrap_or(Ok(()))
    }

    /// Begins to drain a donor that fails again and again, and waits until its memory moves.
    pub fn attempt(&self, node: NodeId) -> Attempt {
        let mut state = self.lock();
        if state.ended || state.preparing.is_some() {
            return Attempt::Later;
        }
        state.preparing = Some(node);
        drop(state);
        let begun = self.drains.drain(node, &[]);
        let mut state = self.lock();
        state.preparing = None;
        state.error.take_if(|_of_earlier| begun.is_ok());
        drop(state);
        if begun.is_ok() {
            self.changes.notify();
        }
        attempt_of(begun.map(drop))
    }

    /// Returns what is disconnected when the guest ends.
    pub fn until_end(&self) -> Receiver<()> {
        let (watch, ended) = bounded(0);
        self.lock().watches.push(watch);
        ended
    }

    /// Returns what drains the donors.
    pub(super) fn fabric(&self) -> &Drains {
        &self.drains
    }

    /// Returns the memory of the VM.
    pub fn view(&self) -> &FabricView {
        &self.view
    }

    /// Returns the donors for another boot of the guest, if those of its configuration have left, or
    /// others have joined: each that has memory of the guest is asked for at least as much.
    pub fn donors_for_restart(&self) -> Option<Vec<DonorAddress>> {
        let state = self.lock();
        let has_moved = self.view.drain().is_some() || self.view.rebalance().is_some();
        let (named, lenders) = (&state.named, self.lenders());
        let has_left = connected(named, &lenders).len() < named.len();
        if !has_moved && !state.has_joined && !has_left {
            return None;
        }
        Some(match self.view.replicas() {
            // Another one has joined for the copies of those that were lost.
            Some(_) if state.has_joined => connected(named, &self.not_lost()),
            Some(_) => connected(named, &lenders),
            None => still_lending(named, &lenders),
        })
    }
}

/// Returns what came of an attempt, from what beginning it returned.
fn attempt_of(begun: Result<(), DrainError>) -> Attempt {
    match begun {
        Ok(()) => Attempt::Begun,
        Err(
            DrainError::Draining(_)
            | DrainError::Rebalancing
            | DrainError::Placing
            | DrainError::Out(_)
            | DrainError::Change(HotplugError::Joining | HotplugError::Ended),
        ) => Attempt::Later,
        Err(DrainError::Empty(_)) => Attempt::Empty,
        Err(error) => Attempt::Refused(describe(&error)),
    }
}

fn lenders(view: &FabricView) -> Vec<Lender> {
    let links = std::iter::once(None).chain(view.links());
    let donors = view.nodes().into_iter().zip(links);
    donors
        .filter(|(_, link)| link.is_some())
        .map(|(node, _)| Lender {
            node: node.id,
            address: node.address,
            bytes: node.memory_bytes,
        })
        .collect()
}

/// Returns those that did not lend before.
pub(super) fn newcomers(
    to: Vec<DonorAddress>,
    before: &[Lender],
) -> impl Iterator<Item = DonorAddress> {
    to.into_iter().filter(|donor| {
        let mut before = before.iter();
        before.all(|lender| lender.address != Some(donor.address))
    })
}

/// Returns those of `named` that have not left, as they were named last: all hold copies, or have
/// room for them.
pub(super) fn connected(named: &[DonorAddress], lenders: &[Lender]) -> Vec<DonorAddress> {
    let has_left = |donor: &&DonorAddress| {
        let mut lenders = lenders.iter();
        !lenders.any(|lender| lender.address == Some(donor.address))
    };
    let mut left: Vec<DonorAddress> = Vec::new();
    for donor in named.iter().filter(|donor| !has_left(donor)) {
        // One that has left and joined again is one donor, and has one copy of a block.
        match left.iter_mut().find(|one| one.address == donor.address) {
            Some(one) => *one = donor.clone(),
            None => left.push(donor.clone()),
        }
    }
    left
}

/// Returns those of `named` that lend, once each.
fn still_lending(named: &[DonorAddress], lenders: &[Lender]) -> Vec<DonorAddress> {
    let mut lent: HashMap<SocketAddr, u64> = HashMap::new();
    for lender in lenders {
        if let Some(address) = lender.address {
            *lent.entry(address).or_default() += lender.bytes;
        }
    }
    let mut left = Vec::new();
    for donor in named {
        let Some(bytes) = lent.remove(&donor.address).filter(|bytes| *bytes > 0) else {
            continue;
        };
        left.push(DonorAddress {
            bytes: donor.bytes.map(|asked| asked.max(bytes)),
            ..donor.clone()
        });
    }
    left
}

/// Returns what is said of the end of a drain: an error if it failed.
pub fn end_of(drain: &DrainSummary) -> Result<String, String> {
    let node = drain.node;
    match &drain.state {
        DrainState::Failed(why) => Err(format!("donor {node} is not drained: {why}")),
        _ => Ok(format!(
            "donor {node} is drained: it holds no memory of this VM any more"
        )),
    }
}

/// Returns a drain as report and status have it.
pub fn used(drain: &DrainSummary) -> DrainUsed {
    let (state, error) = match &drain.state {
        DrainState::Moving => (report::DrainState::Moving, None),
        DrainState::Leaving => (report::DrainState::Leaving, None),
        DrainState::Done => (report::DrainState::Done, None),
        DrainState::Failed(why) => (report::DrainState::Failed, Some(why.clone())),
    };
    DrainUsed {
        node: drain.node.0.into(),
        state,
        bytes: drain.bytes,
        moved_bytes: drain.moved_bytes,
        error,
    }
}

/// Returns the refusal for an error.
pub(super) fn refusal(error: &DrainError) -> Refusal {
    let code = match error {
        DrainError::NoDonor(_) => RefusalCode::Malformed,
        DrainError::Draining(_) | DrainError::Rebalancing | DrainError::Placing => {
            RefusalCode::Busy
        }
        DrainError::TooLittle { .. }
        | DrainError::NoRoomForCopies { .. }
        | DrainError::TooSmall { .. }
        | DrainError::NothingLent(_) => RefusalCode::Donor,
        DrainError::Change(error) => return hotplug::refusal(error),
        DrainError::Empty(_)
        | DrainError::Added { .. }
        | DrainError::Exposed
        | DrainError::Copies
        | DrainError::OneCopy
        | DrainError::NotSealed(_)
        | DrainError::Member(_)
        | DrainError::Out(_) => RefusalCode::State,
    };
    Refusal::new(code, describe(error))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(address: &str, bytes: Option<u64>) -> DonorAddress {
        DonorAddress {
            name: None,
            zone: None,
            address: address.parse().expect("an address"),
            fingerprint: None,
            bytes,
        }
    }

    fn lends(node: u8, address: &str, bytes: u64) -> Lender {
        Lender {
            node: NodeId(node),
            address: Some(address.parse().expect("an address")),
            bytes,
        }
    }

    #[test]
    fn a_guest_that_is_booted_again_uses_the_donors_that_hold_its_memory() {
        let (a, b, c) = ("10.0.0.1:7", "10.0.0.2:7", "10.0.0.3:7");
        let named = [at(a, Some(24)), at(b, Some(24)), at(c, None), at(b, None)];
        // The first was drained, onto a second lease of the second and onto the third.
        let lenders = [
            lends(1, a, 0),
            lends(2, b, 24),
            lends(3, b, 10),
            lends(4, c, 14),
        ];
        let left = still_lending(&named, &lenders);
        assert_eq!(left, [at(b, Some(34)), at(c, None)]);
        assert_eq!(still_lending(&named, &[]), []);
    }

    #[test]
    fn a_donor_of_the_vm_that_takes_over_keeps_what_it_was_named_with() {
        let [old, new] = ["10.0.0.1:1", "10.0.0.2:1"];
        let to = vec![at(old, None), at(new, None)];
        let found: Vec<DonorAddress> = newcomers(to, &[lends(1, old, 4)]).collect();
        assert_eq!(found, [at(new, None)]);
    }

    #[test]
    fn a_guest_with_replicas_is_booted_again_with_all_donors_that_have_not_left() {
        let (a, b, c) = ("10.0.0.1:7", "10.0.0.2:7", "10.0.0.3:7");
        let named = [at(a, Some(24)), at(b, None), at(c, Some(24))];
        // The third has second copies only.
        let lenders = [lends(2, b, 24), lends(3, c, 0)];
        let left = connected(&named, &lenders);
        assert_eq!(left, [at(b, None), at(c, Some(24))]);
        // The first and the second have left, and the first has joined again.
        let named = [at(a, Some(24)), at(b, None), at(c, None), at(a, None)];
        let lenders = [lends(3, c, 24), lends(4, a, 0)];
        assert_eq!(connected(&named, &lenders), [at(a, None), at(c, None)]);
    }

    #[test]
    fn a_second_drain_may_be_tried_again_and_too_little_room_is_about_donors() {
        let code = |error: DrainError| refusal(&error).code;
        assert_eq!(code(DrainError::Draining(NodeId(1))), RefusalCode::Busy);
        assert_eq!(code(DrainError::NoDonor(NodeId(1))), RefusalCode::Malformed);
        let too_little = DrainError::TooLittle {
            node: NodeId(1),
            needed_mib: 24,
            room_mib: 6,
            found: "10.0.0.1:7: 6 MiB".into(),
            missing_mib: 18,
        };
        assert_eq!(code(too_little), RefusalCode::Donor);
        let no_room = DrainError::NoRoomForCopies {
            node: NodeId(1),
            needed_mib: 24,
            room_mib: 6,
        };
        assert_eq!(code(no_room), RefusalCode::Donor);
        for state in [
            DrainError::Exposed,
            DrainError::NotSealed(([10, 0, 0, 1], 7000).into()),
            DrainError::Out(NodeId(1)),
        ] {
            assert_eq!(code(state), RefusalCode::State);
        }
    }

    #[test]
    fn a_failing_donor_that_cannot_be_drained_at_the_moment_is_tried_again() {
        for error in [
            DrainError::Draining(NodeId(2)),
            DrainError::Out(NodeId(1)),
            DrainError::Change(HotplugError::Joining),
            DrainError::Change(HotplugError::Ended),
        ] {
            assert_eq!(attempt_of(Err(error)), Attempt::Later);
        }
        let refused = attempt_of(Err(DrainError::Change(HotplugError::TooManyDonors(64))));
        assert!(matches!(refused, Attempt::Refused(_)), "{refused:?}");
        assert_eq!(
            attempt_of(Err(DrainError::Empty(NodeId(1)))),
            Attempt::Empty
        );
    }
}
