//! `ssi-hv drain`.

use std::time::Duration;

use ssi_hv::control_socket::client::{ask, call};
use ssi_hv::control_socket::protocol::{DrainBody, DrainTarget};
use ssi_hv::control_socket::route::Method;
use ssi_hv::exit::ExitCode;
use ssi_hv::report::{DrainState, DrainUsed};
use ssi_hv::size::ByteSize;

use super::Failure;
use super::control::{of_vm, vm_entry};
use super::follow::{Moves, follow};
use super::status::running;
use crate::cli::control::DrainConfig;

/// Drains a donor, or shows the last drain.
pub fn drain(config: &DrainConfig) -> Result<ExitCode, Failure> {
    let running = running()?;
    let (entry, who) = vm_entry(&running, &config.vm)?;
    let body: DrainBody = match &config.node {
        Some(node) => {
            let target = DrainTarget {
                node: node.clone(),
                to: config.to.iter().map(ToString::to_string).collect(),
            };
            of_vm(
                &who,
                call(&entry.path, Method::Post, DrainBody::PATH, Some(&target)),
            )?
        }
        None => of_vm(&who, ask(&entry.path, DrainBody::PATH))?,
    };
    let wait = Duration::from_secs(config.wait.into());
    follow(&who, &entry.path, body, wait)
}

impl Moves for DrainBody {
    const PATH: &str = "/v1/drain";
    const WHAT: &str = "draining";

    fn changes(&self) -> u64 {
        self.changes
    }

    fn is_under_way(&self) -> bool {
        let state = self.drain.as_ref().map(|drain| drain.state);
        self.preparing.is_some() || matches!(state, Some(DrainState::Moving | DrainState::Leaving))
    }

    fn moved(&self) -> Option<(u64, u64)> {
        let drain = self.drain.as_ref().filter(|_| self.preparing.is_none());
        drain.map(|drain| (drain.bytes, drain.moved_bytes))
    }

    fn failure(&self) -> Option<&str> {
        let drain = self.drain.as_ref();
        let of_drain = drain.and_then(|drain| drain.error.as_deref());
        self.error.as_deref().or(of_drain)
    }

    fn said(&self) -> String {
        if let Some(node) = self.preparing {
            return format!("other donors are asked for room for the memory of node {node}");
        }
        match (&self.error, &self.drain) {
            (Some(error), _) => error.clone(),
            (None, None) => "no donor has been drained".to_owned(),
            (None, Some(drain)) => state_of(drain),
        }
    }
}

fn state_of(drain: &DrainUsed) -> String {
    let size = ByteSize::from_bytes;
    let (node, all, moved) = (drain.node, size(drain.bytes), size(drain.moved_bytes));
    match (drain.state, &drain.error) {
        (DrainState::Done, _) if drain.bytes == 0 => {
            format!("node {node} has left: it held no memory of this VM")
        }
        (DrainState::Done, _) => {
            format!("node {node} has left: its {all} are on other donors")
        }
        (DrainState::Failed, Some(error)) => format!("node {node} is not drained: {error}"),
        (DrainState::Failed, None) => format!("node {node} is not drained"),
        (DrainState::Leaving, _) => format!("node {node} is leaving: its {all} have moved"),
        (DrainState::Moving, _) => {
            format!("node {node} is drained: {moved} of {all} have moved")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn body(state: DrainState, error: Option<&str>) -> DrainBody {
        DrainBody {
            preparing: None,
            error: None,
            drain: Some(DrainUsed {
                node: 2,
                state,
                bytes: 64 << 20,
                moved_bytes: 16 << 20,
                error: error.map(ToOwned::to_owned),
            }),
            changes: 7,
        }
    }

    #[test]
    fn what_is_said_is_the_state_and_a_failure_is_one() {
        let moving = body(DrainState::Moving, None);
        assert!(moving.is_under_way() && moving.failure().is_none());
        assert!(
            moving.said().contains("16 MiB of 64 MiB"),
            "{}",
            moving.said()
        );
        let done = body(DrainState::Done, None);
        assert!(!done.is_under_way() && done.said().contains("has left: its 64 MiB"));
        let mut empty = done.clone();
        empty.drain.iter_mut().for_each(|drain| drain.bytes = 0);
        assert!(
            empty.said().contains("it held no memory"),
            "{}",
            empty.said()
        );
        let failed = body(DrainState::Failed, Some("a donor was lost"));
        assert!(!failed.is_under_way());
        assert_eq!(failed.failure(), Some("a donor was lost"));
        let refused = DrainBody {
            error: Some("too little".into()),
            ..done
        };
        assert_eq!(refused.said(), "too little");
        let preparing = DrainBody {
            preparing: Some(3),
            ..moving
        };
        assert!(preparing.is_under_way() && preparing.said().contains("node 3"));
    }
}
