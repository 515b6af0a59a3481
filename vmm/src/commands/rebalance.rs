//! `ssi-hv rebalance`.

use std::time::{Duration, Instant};

use anyhow::anyhow;
use ssi_hv::control_socket::client::{ask, call};
use ssi_hv::control_socket::protocol::{RebalanceBody, RebalanceTarget};
use ssi_hv::control_socket::route::Method;
use ssi_hv::exit::ExitCode;
use ssi_hv::progress::Progress;
use ssi_hv::report::{RebalanceState, RebalanceUsed};
use ssi_hv::size::ByteSize;

use super::control::{of_vm, vm_entry};
use super::status::running;
use super::{Failure, print};
use crate::cli::control::RebalanceConfig;

const PATH: &str = "/v1/rebalance";

/// Interval between looks at the progress.
const LOOK_INTERVAL: Duration = Duration::from_millis(500);

/// Unit of the progress bar.
const MIB_SHIFT: u32 = 20;

/// Has donors join, and moves memory until each has its share; or ends that.
pub fn rebalance(config: &RebalanceConfig) -> Result<ExitCode, Failure> {
    let running = running()?;
    let (entry, who) = vm_entry(&running, &config.vm)?;
    let target = RebalanceTarget {
        add: config.add.iter().map(ToString::to_string).collect(),
        stop: config.stop,
    };
    let mut body: RebalanceBody =
        of_vm(&who, call(&entry.path, Method::Post, PATH, Some(&target)))?;
    let wait = Duration::from_secs(config.wait.into());
    let deadline = Instant::now() + wait;
    let mut progress = None;
    while wait > Duration::ZERO && is_under_way(&body) {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            let wait = wait.as_secs();
            return Err(anyhow!("{who}: after {wait} s {}; it continues", said(&body)).into());
        }
        std::thread::sleep(left.min(LOOK_INTERVAL));
        body = of_vm(&who, ask(&entry.path, PATH))?;
        if let (false, Some(last)) = (body.preparing, &body.rebalance) {
            let steps = last.bytes >> MIB_SHIFT;
            let bar = || Progress::begin("rebalancing", steps, "MiB");
            let progress = progress.get_or_insert_with(bar);
            progress.reach(last.moved_bytes >> MIB_SHIFT);
        }
    }
    drop(progress);
    if let (true, Some(error)) = (wait > Duration::ZERO, failure(&body)) {
        return Err(anyhow!("{who}: {error}").into());
    }
    print(&format!("{who}: {}\n", said(&body)))?;
    Ok(ExitCode::Success)
}

fn is_under_way(body: &RebalanceBody) -> bool {
    let state = body.rebalance.as_ref().map(|last| last.state);
    body.preparing || state == Some(RebalanceState::Moving)
}

fn failure(body: &RebalanceBody) -> Option<&str> {
    let last = body.rebalance.as_ref();
    let of_last = last.and_then(|last| last.error.as_deref());
    body.error.as_deref().or(of_last)
}

fn said(body: &RebalanceBody) -> String {
    if body.preparing {
        return "donors are asked for memory".to_owned();
    }
    match (&body.error, &body.rebalance) {
        (Some(error), _) => error.clone(),
        (None, None) => "no memory has been rebalanced".to_owned(),
        (None, Some(last)) => state_of(last),
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
        }
    }

    #[test]
    fn what_is_said_is_the_state_and_a_failure_is_one() {
        let moving = body(RebalanceState::Moving, None);
        assert!(is_under_way(&moving) && failure(&moving).is_none());
        assert_eq!(said(&moving), "16 MiB of 64 MiB have moved");
        let stopped = body(RebalanceState::Stopped, None);
        assert!(!is_under_way(&stopped) && said(&stopped).starts_with("stopped: 16 MiB"));
        let failed = body(RebalanceState::Failed, Some("a donor was lost"));
        assert_eq!(failure(&failed), Some("a donor was lost"));
        let mut done = body(RebalanceState::Done, None);
        assert!(said(&done).contains("its share: 16 MiB"), "{}", said(&done));
        done.rebalance = Some(RebalanceUsed {
            state: RebalanceState::Done,
            ..RebalanceUsed::default()
        });
        assert!(said(&done).contains("already"), "{}", said(&done));
        let preparing = RebalanceBody {
            preparing: true,
            ..stopped
        };
        assert!(is_under_way(&preparing) && said(&preparing).contains("asked"));
    }
}
