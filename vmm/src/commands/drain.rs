//! `ssi-hv drain`.

use std::time::{Duration, Instant};

use anyhow::anyhow;
use ssi_hv::control_socket::changes::Seen;
use ssi_hv::control_socket::client::{ask, call};
use ssi_hv::control_socket::protocol::{DrainBody, DrainTarget};
use ssi_hv::control_socket::route::Method;
use ssi_hv::exit::ExitCode;
use ssi_hv::progress::Progress;
use ssi_hv::report::{DrainState, DrainUsed};
use ssi_hv::size::ByteSize;

use super::control::{of_vm, vm_entry};
use super::status::running;
use super::{Failure, print};
use crate::cli::control::DrainConfig;

const PATH: &str = "/v1/drain";

/// Longest wait of a request: the answer arrives at each change of state, and the bar shows what
/// has moved in between.
const BAR_TIME: Duration = Duration::from_millis(500);

/// Unit of the progress bar.
const MIB_SHIFT: u32 = 20;

/// Drains a donor, or shows the last drain.
pub fn drain(config: &DrainConfig) -> Result<ExitCode, Failure> {
    let running = running()?;
    let (entry, who) = vm_entry(&running, &config.vm)?;
    let mut body: DrainBody = match &config.node {
        Some(node) => {
            let target = DrainTarget {
                node: node.clone(),
                to: config.to.iter().map(ToString::to_string).collect(),
            };
            of_vm(&who, call(&entry.path, Method::Post, PATH, Some(&target)))?
        }
        None => of_vm(&who, ask(&entry.path, PATH))?,
    };
    let wait = Duration::from_secs(config.wait.into());
    let deadline = Instant::now() + wait;
    let mut progress = None;
    while wait > Duration::ZERO && is_under_way(&body) {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            let wait = wait.as_secs();
            return Err(anyhow!("{who}: after {wait} s {}; it continues", said(&body)).into());
        }
        let seen = Seen {
            changes: body.changes,
            wait: left.min(BAR_TIME),
        };
        body = of_vm(&who, ask(&entry.path, &format!("{PATH}?{seen}")))?;
        if let (None, Some(drain)) = (body.preparing, &body.drain) {
            let steps = drain.bytes >> MIB_SHIFT;
            let bar = || Progress::begin("draining", steps, "MiB");
            let progress = progress.get_or_insert_with(bar);
            progress.reach(drain.moved_bytes >> MIB_SHIFT);
        }
    }
    drop(progress);
    let waited_for_end = wait > Duration::ZERO;
    if let (true, Some(error)) = (waited_for_end, failure(&body)) {
        return Err(anyhow!("{who}: {error}").into());
    }
    print(&format!("{who}: {}\n", said(&body)))?;
    Ok(ExitCode::Success)
}

fn is_under_way(body: &DrainBody) -> bool {
    let state = body.drain.as_ref().map(|drain| drain.state);
    body.preparing.is_some() || matches!(state, Some(DrainState::Moving | DrainState::Leaving))
}

fn failure(body: &DrainBody) -> Option<&str> {
    let drain = body.drain.as_ref();
    let of_drain = drain.and_then(|drain| drain.error.as_deref());
    body.error.as_deref().or(of_drain)
}

fn said(body: &DrainBody) -> String {
    if let Some(node) = body.preparing {
        return format!("other donors are asked for room for the memory of node {node}");
    }
    match (&body.error, &body.drain) {
        (Some(error), _) => error.clone(),
        (None, None) => "no donor has been drained".to_owned(),
        (None, Some(drain)) => state_of(drain),
    }
}

fn state_of(drain: &DrainUsed) -> String {
    let size = ByteSize::from_bytes;
    let (node, all, moved) = (drain.node, size(drain.bytes), size(drain.moved_bytes));
    match (drain.state, &drain.error) {
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
        assert!(is_under_way(&moving) && failure(&moving).is_none());
        assert!(
            said(&moving).contains("16 MiB of 64 MiB"),
            "{}",
            said(&moving)
        );
        let done = body(DrainState::Done, None);
        assert!(!is_under_way(&done) && said(&done).contains("has left"));
        let failed = body(DrainState::Failed, Some("a donor was lost"));
        assert!(!is_under_way(&failed));
        assert_eq!(failure(&failed), Some("a donor was lost"));
        let refused = DrainBody {
            error: Some("too little".into()),
            ..done
        };
        assert_eq!(said(&refused), "too little");
        let preparing = DrainBody {
            preparing: Some(3),
            ..moving
        };
        assert!(is_under_way(&preparing) && said(&preparing).contains("node 3"));
    }
}
