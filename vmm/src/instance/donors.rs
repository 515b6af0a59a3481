//! Obtains and returns the memory of a run's donors, each with a progress bar.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::config::RunConfig;
use crate::exit::ExitCode;
use crate::progress::Followed;
use memory_fabric::fabric::{Fabric, FabricConfig, FabricError, NodeSummary};
use memory_fabric::link::rdma::RdmaLinkError;

use super::supervisor::Supervisor;
use crate::failure::Failure;

/// Connects to the donors, which takes long if their memory is registered with adapters.
pub fn connect(
    config: &RunConfig,
    fabric: &FabricConfig,
    supervisor: &Arc<Supervisor>,
) -> Result<Fabric, Failure> {
    let donors = fabric.donors.len() as u64;
    let _progress =
        bars_are_ours(config).then(|| Followed::begin("connecting to donors", donors, "", || 0));
    Fabric::start(fabric, &supervisor.observer()).map_err(donors_failed)
}

/// Returns whether progress bars are allowed before the guest's output starts: `ssi-hv up` has its
/// own.
pub fn bars_are_ours(config: &RunConfig) -> bool {
    config.end_with_fd.is_none()
}

/// Returns whether progress bars are allowed during and after the guest's output, which that of a
/// command excludes.
pub fn has_terminal(config: &RunConfig) -> bool {
    bars_are_ours(config) && config.exec.is_none()
}

/// Stops the fabric: outstanding data is sent to the donors, then each lease is returned.
pub fn give_back(config: &RunConfig, fabric: Fabric) -> Vec<NodeSummary> {
    let donors = fabric.nodes().len().saturating_sub(1) as u64;
    let returned = Arc::new(AtomicU64::new(0));
    let done = Arc::clone(&returned);
    let _progress = has_terminal(config).then(|| {
        let done = move || done.load(Ordering::Relaxed);
        // The guest's last line may be incomplete.
        let end = if config.console.is_none() { "\n" } else { "" };
        Followed::below(end, "giving memory back", donors, "leases", done)
    });
    fabric.shutdown_telling(|| {
        returned.fetch_add(1, Ordering::Relaxed);
    })
}

/// Assigns donors that do not lend enough their own exit code.
fn donors_failed(error: FabricError) -> Failure {
    match &error {
        FabricError::Donor { .. }
        | FabricError::Plan(_)
        | FabricError::Rdma(RdmaLinkError::Donor { .. } | RdmaLinkError::Late { .. }) => {
            Failure::new(ExitCode::DonorUnavailable, error)
        }
        _ => error.into(),
    }
}
