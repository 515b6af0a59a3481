//! Which node runs a vCPU, and how it moves to another one: a state machine, without threads,
//! connections and time.
//!
//! Each node has a [`Place`] for each vCPU, and posts the events of that vCPU where it says. The
//! owner gives a vCPU away in [`steps`], while the vCPU does not run:
//!
//! 1. It notifies the new owner, which keeps what comes for the vCPU from now on.
//! 2. It notifies all others, which send there from now on.
//! 3. It sends there itself.
//! 4. It sends the state of the vCPU, with all events that it has kept for it.
//!
//! Each notification is answered, and messages between two nodes stay in order. So
//! whatever a node has sent to the old owner has arrived when its answer does, and is part of the
//! state; what it sends to the new owner is newer. No event is lost, comes twice, or overtakes
//! another one of the same sender.
//!
//! A node looks up a place and sends under one lock, which it also holds to change the place.

#[cfg(test)]
mod model;

use crate::message::NodeNumber;

/// Where a vCPU is, as one node knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Place {
    /// On this node.
    Here,
    /// Not here yet. Its events are kept here, and its state will come from that node.
    Coming(NodeNumber),
    /// On that node.
    At(NodeNumber),
}

/// A message of a node about a vCPU that is not there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("node {node} is not the owner of the vCPU, which is {place:?}")]
pub struct NotOwner {
    /// The node.
    pub node: NodeNumber,
    /// Where the vCPU is.
    pub place: Place,
}

impl Place {
    /// The place of a vCPU of `owner`, on node `me`.
    #[must_use]
    pub fn of(owner: NodeNumber, me: NodeNumber) -> Self {
        if owner == me {
            Self::Here
        } else {
            Self::At(owner)
        }
    }

    /// The node that takes the events of the vCPU, where `me` is this node.
    #[must_use]
    pub fn owner(self, me: NodeNumber) -> NodeNumber {
        match self {
            Self::Here | Self::Coming(_) => me,
            Self::At(node) => node,
        }
    }

    /// Node `from` notifies `me` that it gives the vCPU to `to`.
    ///
    /// # Errors
    ///
    /// When the vCPU is not on that node.
    pub fn notified(
        &mut self,
        me: NodeNumber,
        from: NodeNumber,
        to: NodeNumber,
    ) -> Result<(), NotOwner> {
        self.check(from, Self::At(from))?;
        *self = if to == me {
            Self::Coming(from)
        } else {
            Self::At(to)
        };
        Ok(())
    }

    /// The state of the vCPU has come from node `from`.
    ///
    /// # Errors
    ///
    /// When that node has not announced it.
    pub fn came(&mut self, from: NodeNumber) -> Result<(), NotOwner> {
        self.check(from, Self::Coming(from))?;
        *self = Self::Here;
        Ok(())
    }

    fn check(self, node: NodeNumber, due: Self) -> Result<(), NotOwner> {
        if self == due {
            Ok(())
        } else {
            Err(NotOwner { node, place: self })
        }
    }
}

/// A step of the node that gives a vCPU away.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Step {
    /// Notify this node, and wait for its answer.
    Notify(NodeNumber),
    /// Send events to the new owner.
    Switch,
    /// Send the state with all events that were kept.
    Give,
}

/// What the owner of a vCPU does to give it to `to`, in order. `others` are all nodes but the owner.
pub fn steps(to: NodeNumber, others: impl IntoIterator<Item = NodeNumber>) -> Vec<Step> {
    let others = others.into_iter().filter(|node| *node != to);
    let notify = [to].into_iter().chain(others).map(Step::Notify);
    notify.chain([Step::Switch, Step::Give]).collect()
}
