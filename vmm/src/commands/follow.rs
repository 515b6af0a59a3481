//! Commands that wait until memory has moved between donors.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::anyhow;
use serde::de::DeserializeOwned;
use ssi_hv::control_socket::changes::Seen;
use ssi_hv::control_socket::client::ask;
use ssi_hv::exit::ExitCode;
use ssi_hv::progress::Progress;

use super::control::of_vm;
use super::{Failure, print};

/// Longest wait of a request: the answer arrives at each change of state, and the bar shows what
/// has moved in between.
const BAR_TIME: Duration = Duration::from_millis(500);

/// Unit of the progress bar.
const MIB_SHIFT: u32 = 20;

/// What a VM answers about memory that moves between its donors.
pub trait Moves: DeserializeOwned {
    /// The path of the request.
    const PATH: &str;
    /// What the progress bar says.
    const WHAT: &str;

    /// The number of changes so far.
    fn changes(&self) -> u64;

    /// Whether memory moves, or is about to.
    fn is_under_way(&self) -> bool;

    /// Bytes that move, and those that have moved; `None` before it begins.
    fn moved(&self) -> Option<(u64, u64)>;

    /// Why it failed, if it did.
    fn failure(&self) -> Option<&str>;

    /// The state, for people.
    fn said(&self) -> String;
}

/// Waits for the end, and prints the state. `who` is the VM whose control socket this is.
pub fn follow<B: Moves>(
    who: &str,
    socket: &Path,
    mut body: B,
    wait: Duration,
) -> Result<ExitCode, Failure> {
    let deadline = Instant::now() + wait;
    let mut progress = None;
    while wait > Duration::ZERO && body.is_under_way() {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            let (wait, said) = (wait.as_secs(), body.said());
            return Err(anyhow!("{who}: after {wait} s {said}; it continues").into());
        }
        let seen = Seen {
            changes: body.changes(),
            wait: left.min(BAR_TIME),
        };
        body = of_vm(who, ask(socket, &format!("{}?{seen}", B::PATH)))?;
        if let Some((bytes, moved)) = body.moved() {
            let bar = || Progress::begin(B::WHAT, bytes >> MIB_SHIFT, "MiB");
            let progress = progress.get_or_insert_with(bar);
            progress.reach(moved >> MIB_SHIFT);
        }
    }
    drop(progress);
    if let (true, Some(error)) = (wait > Duration::ZERO, body.failure()) {
        return Err(anyhow!("{who}: {error}").into());
    }
    print(&format!("{who}: {}\n", body.said()))?;
    Ok(ExitCode::Success)
}
