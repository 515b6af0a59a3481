//! Orders to move a vCPU of a guest on a testbed host.

use std::time::Duration;

use anyhow::ensure;

use crate::testbed::Host;

/// Deadline of an order.
const WITHIN: Duration = Duration::from_secs(60);

/// Whether a CPU that was ordered to move is there. One that waits for a page goes when it has it.
fn has_moved(code: i32, errors: &str) -> anyhow::Result<bool> {
    let is_late = ["has not moved to node", "already: wait until it is there"];
    ensure!(
        code == 0 || is_late.iter().any(|part| errors.contains(part)),
        "`ssi-hv move` ended with {code}: {errors}"
    );
    Ok(code == 0)
}

/// Orders CPU 1 of the guest with this name to move to a node, and returns whether it is there. One
/// that is late goes later.
///
/// # Errors
/// Fails when the order does for another reason.
pub fn order(host: &Host, guest: &str, node: &str) -> anyhow::Result<bool> {
    let order = ["/share/ssi-hv", "move", guest, "--cpu", "1", "--to", node];
    let output = host.run(&order, WITHIN)?;
    has_moved(output.status.code, &output.stderr)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_order_to_move_may_be_late_and_must_not_fail() {
        let late = "vCPU 1 has not moved to node 0 within 8 s: it waits for a page";
        let moves = "vCPU 1 moves to node 0 already: wait until it is there";
        assert!(has_moved(0, "").unwrap());
        assert!(!has_moved(1, late).unwrap());
        assert!(!has_moved(1, moves).unwrap());
        assert!(has_moved(1, "the VM is paused").is_err());
        assert!(has_moved(139, "").is_err());
    }
}
