//! What is on other nodes, as this node uses it.

use std::sync::Arc;

use devices::BusDevice;
use ssi_hv_nodes::{Access, Link, Message, NodeNumber, Space};

use crate::error::MachineError;
use crate::lifecycle::control::{End, Follower};
use crate::outcome::Outcome;

/// A node that follows the primary.
#[derive(Debug)]
pub(super) struct RemoteNode(pub Arc<Link>);

/// The primary, which learns when the run ends on another node.
#[derive(Debug)]
pub(super) struct ToPrimary(pub Arc<Link>);

/// The end of a run, as nodes send it.
pub(super) fn to_message(end: &End) -> ssi_hv_nodes::End {
    match end {
        Ok(Outcome::Shutdown) => ssi_hv_nodes::End::Shutdown,
        Ok(Outcome::Reboot) => ssi_hv_nodes::End::Reboot,
        Ok(Outcome::Stopped) => ssi_hv_nodes::End::Stopped,
        Ok(Outcome::Crash(reason)) => ssi_hv_nodes::End::Crash(reason.clone()),
        Err(error) => of_error(error),
    }
}

/// The end of a run by an error, as nodes send it.
pub(super) fn of_error(error: &MachineError) -> ssi_hv_nodes::End {
    if let MachineError::DonorLost { reason } = error {
        return ssi_hv_nodes::End::DonorLost(reason.clone());
    }
    let reason = with_causes(error);
    match error.node() {
        Some(node) => ssi_hv_nodes::End::NodeLost { node, reason },
        None => ssi_hv_nodes::End::Failed(reason),
    }
}

/// An error with its causes, in one line.
fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

/// An end that node `node` has sent to node `me`.
pub(super) fn from_message(end: ssi_hv_nodes::End, node: NodeNumber, me: NodeNumber) -> End {
    match end {
        ssi_hv_nodes::End::Shutdown => Ok(Outcome::Shutdown),
        ssi_hv_nodes::End::Reboot => Ok(Outcome::Reboot),
        ssi_hv_nodes::End::Stopped => Ok(Outcome::Stopped),
        ssi_hv_nodes::End::Crash(reason) => Ok(Outcome::Crash(reason)),
        ssi_hv_nodes::End::Failed(reason) => Err(MachineError::NodeFailed { node, reason }),
        ssi_hv_nodes::End::DonorLost(reason) => Err(MachineError::DonorLost { reason }),
        // This node lives: what failed is that node, or the way to it.
        ssi_hv_nodes::End::NodeLost { node: lost, reason } if lost == me => {
            Err(MachineError::NodeFailed { node, reason })
        }
        ssi_hv_nodes::End::NodeLost { node: lost, reason } => Err(MachineError::PeerLost {
            node: lost,
            by: node,
            reason,
        }),
    }
}

impl Follower for RemoteNode {
    fn pause(&self, number: u32) {
        self.0.send(&Message::Pause { number });
    }

    fn resume(&self) {
        self.0.send(&Message::Resume);
    }

    fn end(&self, end: &End) {
        send_end(&self.0, end);
    }
}

impl Follower for ToPrimary {
    // It asked for it.
    fn pause(&self, _number: u32) {}

    fn resume(&self) {}

    fn end(&self, end: &End) {
        send_end(&self.0, end);
    }
}

fn send_end(link: &Link, end: &End) {
    link.send(&Message::End(to_message(end)));
    // A vCPU that waits for an answer of the other node must not keep the run from ending.
    link.end_calls();
}

/// The devices of the primary, at all addresses of a space.
#[derive(Debug)]
pub(super) struct RemoteBus {
    pub link: Arc<Link>,
    pub space: Space,
}

impl RemoteBus {
    /// What the access reads; `None` when there is no answer because the run ends.
    fn access(&self, address: u64, len: usize, write: Option<[u8; 8]>) -> Option<[u8; 8]> {
        let access = Access {
            space: self.space,
            address,
            len: u8::try_from(len).ok().filter(|len| *len <= 8)?,
            write,
        };
        self.link.call(|call| Message::Access { call, access })
    }
}

impl BusDevice for RemoteBus {
    fn read(&self, offset: u64, data: &mut [u8]) {
        match self.access(offset, data.len(), None) {
            Some(answer) => data.copy_from_slice(&answer[..data.len()]),
            // As where no device is.
            None => data.fill(0xff),
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        let mut bytes = [0; 8];
        for (to, from) in bytes.iter_mut().zip(data) {
            *to = *from;
        }
        self.access(offset, data.len(), Some(bytes));
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use ssi_hv_nodes::LinkError;

    use super::*;

    /// What node 0 takes for lost when node 1 ends by this error.
    fn lost_for_primary(error: MachineError) -> (Option<NodeNumber>, String) {
        let error = from_message(to_message(&Err(error)), 1, 0).unwrap_err();
        (error.node(), error.to_string())
    }

    #[test]
    fn a_node_that_another_one_has_lost_is_named() {
        let silent = |peer| LinkError::Silent {
            peer,
            time: Duration::from_secs(12),
        };
        let (node, text) = lost_for_primary(silent(2).into());
        assert_eq!(node, Some(2));
        assert_eq!(text, "node 2 has been silent for 12 s, as node 1 reports");
        let shared = |node| MachineError::SharedMemory {
            node,
            reason: "node 2 broke the protocol".into(),
        };
        assert_eq!(lost_for_primary(shared(Some(2))).0, Some(2));
        // What has no other node as its cause is a failure of the node that reports it.
        assert_eq!(lost_for_primary(shared(None)).0, Some(1));
        let (node, text) = lost_for_primary(silent(0).into());
        assert_eq!(node, Some(1));
        assert_eq!(text, "node 1 cannot go on: node 0 has been silent for 12 s");
    }
}
