//! Hot memory moves to fast donors, and cold memory away from there (`--placement heat`).

use std::io;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError};
use memory_fabric::fabric::{DrainError, HeatPolicy, HotplugError};

use super::drains::VmDrains;
use crate::failure::{Seldom, describe};

/// Time between two looks at the heat: half of the longest time for which faults are counted, so that
/// each is seen in one or two looks.
const LOOK_INTERVAL: Duration = Duration::from_secs(10);

/// Moves memory by its heat in a thread of its own, until the guest ends.
///
/// # Errors
///
/// If the thread cannot be started.
pub fn start(drains: &VmDrains) -> io::Result<()> {
    let (drains, ended) = (drains.clone(), drains.until_end());
    let thread = std::thread::Builder::new().name("placement".into());
    thread.spawn(move || follow(&drains, &ended))?;
    Ok(())
}

/// Looks at the heat until the guest ends, which disconnects `ended`.
fn follow(drains: &VmDrains, ended: &Receiver<()>) {
    let mut policy = HeatPolicy::default();
    let seldom = Seldom::notices();
    while ended.recv_timeout(LOOK_INTERVAL) == Err(RecvTimeoutError::Timeout) {
        match drains.fabric().place_by_heat(&mut policy) {
            Ok(_) => {}
            Err(DrainError::Change(HotplugError::Ended)) => return,
            // Such as a thread that the system does not give now: at the next look.
            Err(DrainError::Change(HotplugError::Donor(error))) => {
                if let Some(unreported) = seldom.pass(Instant::now()) {
                    let why = describe(&error);
                    tracing::warn!(unreported, "memory cannot move by its heat now: {why}");
                }
            }
            Err(error) => {
                let why = describe(&error);
                tracing::warn!(
                    "memory does not move by its heat any more (--placement heat): {why}"
                );
                return;
            }
        }
    }
}
