//! Signals that end what a command runs.

use std::fs;

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

/// Returns those that end a run. SIGHUP is not among them if it was ignored when this process
/// started, as with `nohup`. Call it before a handler is installed.
#[must_use]
pub fn ends() -> Vec<i32> {
    let mut ends = vec![SIGINT, SIGTERM];
    if !is_ignored(SIGHUP) {
        ends.push(SIGHUP);
    }
    ends
}

fn is_ignored(signal: i32) -> bool {
    // Without it, signals are what they are by default.
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    ignored(&status).is_some_and(|mask| mask >> (signal - 1) & 1 == 1)
}

/// Returns the mask of ignored signals by a status as of proc(5).
fn ignored(status: &str) -> Option<u64> {
    let mask = status
        .lines()
        .find_map(|line| line.strip_prefix("SigIgn:"))?;
    u64::from_str_radix(mask.trim(), 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mask_of_a_status_is_found() {
        assert_eq!(
            ignored("SigBlk:\t1\nSigIgn:\t0000000000001001\n"),
            Some(0x1001)
        );
        assert_eq!(ignored("Name:\tssi-hv\n"), None);
        assert!(!is_ignored(SIGTERM));
    }
}
