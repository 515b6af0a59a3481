//! `ssi-hv rebalance`.

use std::time::Duration;

use ssi_hv::control_socket::client::call;
use ssi_hv::control_socket::protocol::{RebalanceBody, RebalanceTarget};
use ssi_hv::control_socket::route::Method;
use ssi_hv::exit::ExitCode;
use ssi_hv::report::{RebalanceState, RebalanceUsed};
use ssi_hv::size::ByteSize;

use super::Failure;
use super::control::{of_vm, vm_entry};
use super::follow::{Moves, follow};
use super::status::running;
use crate::cli::control::RebalanceConfig;

/// Has donors join, and moves memory until each has its share; or ends that.
pub fn rebalance(config: &RebalanceConfig) -> Result<ExitCode, Failure> {
    let running = running()?;
    let (entry, who) = vm_entry(&running, &config.vm)?;
    let target = RebalanceTarget {
        add: config.add.iter().map(ToString::to_string).collect(),
        stop: config.stop,
    };
    let path = RebalanceBody::PATH;
    let body: RebalanceBody = of_vm(&who, call(&entry.path, Method::Post, path, Some(&target)))?;
    let wait = Duration::from_secs(config.wait.into());
    follow(&who, &entry.path, body, wait)
}

impl Moves for RebalanceBody {
    const PATH: &str = "/v1/rebalance";
    const WHAT: &str = "rebalancing";

    fn changes(&self) -> u64 {
        self.changes
    }

    fn is_under_way(&self) -> bool {
        let state = self.rebalance.as_ref().map(|last| last.state);
        self.preparing || state == Some(RebalanceState::Moving)
    }

    fn moved(&self) -> Option<(u64, u64)> {
        let last = self.rebalance.as_ref().filter(|_| !self.preparing);
        last.map(|last| (last.bytes, last.moved_bytes))
    }

    fn failure(&self) -> Option<&str> {
        let last = self.rebalance.as_ref();
        let of_last = last.and_then(|last| last.error.as_deref());
        self.error.as_deref().or(of_last)
    }

    fn said(&self) -> String {
        if self.preparing {
            return "donors are asked for memory".to_owned();
        }
        match (&self.error, &self.rebalance) {
            (Some(error), _) => error.clone(),
            (None, None) => "no memory has been rebalanced".to_owned(),
            (None, Some(last)) => state_of(last),
        }
    }
}

fn state_of(last: &RebalanceUsed) -> String {
    let size = ByteSize::from_bytes;
    let (all, moved) = (size(last.bytes), size(last.moved_bytes));
    match (last.state, &last.error) {
        (RebalanceState::Done, _) if last.bytes == 0 => {
            "each donor has its share already".to_owned()
        }
        (RebalanceState::Done, _) => format!("each donor has its share: {moved} have moved"),
        (RebalanceState::Stopped, _) => format!("stopped: {moved} of {all} have moved"),
        (RebalanceState::Failed, Some(error)) => format!("{moved} of {all} have moved: {error}"),
        (RebalanceState::Failed | RebalanceState::Moving, _) => {
            format!("{moved} of {all} have moved")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn body(state: RebalanceState, error: Option<&str>) -> RebalanceBody {
        RebalanceBody {
            preparing: false,
            error: None,
            rebalance: Some(RebalanceUsed {
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
        let moving = body(RebalanceState::Moving, None);
        assert!(moving.is_under_way() && moving.failure().is_none());
        assert_eq!(moving.said(), "16 MiB of 64 MiB have moved");
        let stopped = body(RebalanceState::Stopped, None);
        assert!(!stopped.is_under_way() && stopped.said().starts_with("stopped: 16 MiB"));
        let failed = body(RebalanceState::Failed, Some("a donor was lost"));
        assert_eq!(failed.failure(), Some("a donor was lost"));
        let mut done = body(RebalanceState::Done, None);
        assert!(done.said().contains("its share: 16 MiB"), "{}", done.said());
        done.rebalance = Some(RebalanceUsed {
            state: RebalanceState::Done,
            ..RebalanceUsed::default()
        });
        assert!(done.said().contains("already"), "{}", done.said());
        let preparing = RebalanceBody {
            preparing: true,
            ..stopped
        };
        assert!(preparing.is_under_way() && preparing.said().contains("asked"));
    }
}
