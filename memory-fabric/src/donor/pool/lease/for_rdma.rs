//! What a lease takes of the node's memory for RDMA.

use super::Lease;
use crate::donor::policy::{Charge, Resource};
use crate::transport::rdma::resources::{Quota, Share};
use fabric_host::lock;
use std::sync::Arc;

#[derive(Debug, Default)]
pub(super) struct ForRdma {
    /// The share, and what the owner is charged with under a policy. From the first registration until
    /// the lease is gone.
    taken: Option<(Share, Option<Charge>)>,
    /// Connections that are being set up.
    setups: u32,
}

/// A connection that is being set up. What was taken for it is given back if its memory was not
/// registered.
#[derive(Debug)]
#[must_use]
pub(in crate::donor) struct Setup<'a>(&'a Lease);

impl Lease {
    /// Takes its bytes of what the node registers for RDMA, and charges its owner under a policy: both,
    /// or neither with the reason. Once.
    pub(in crate::donor) fn take_for_rdma(&self, quota: &Arc<Quota>) -> Result<Setup<'_>, String> {
        let mut state = lock(&self.for_rdma);
        if state.taken.is_none() {
            let (owner, bytes) = (self.owner.as_ref(), self.bytes());
            let accounts = self.accounts.as_ref();
            let charge = accounts.map(|all| all.charge(owner, Resource::PinnedBytes, bytes));
            let charge = charge.transpose().map_err(|denied| denied.to_string())?;
            let share = quota.take_all(bytes);
            let share = share.map_err(|full| format!("{bytes} bytes are asked for, and {full}"))?;
            state.taken = Some((share, charge));
        }
        state.setups += 1;
        Ok(Setup(self))
    }
}

impl Drop for Setup<'_> {
    fn drop(&mut self) {
        let mut state = lock(&self.0.for_rdma);
        state.setups -= 1;
        if state.setups == 0 && !self.0.export.is_registered() {
            state.taken = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::donor::policy::{Accounts, Amounts, Rule};
    use crate::donor::pool::Pool;
    use crate::page::PAGE_SIZE;
    use fabric_identity::Subject;
    use std::time::{Duration, Instant};

    const SECOND: Duration = Duration::from_secs(1);
    const PAGE: u64 = PAGE_SIZE as u64;

    #[test]
    fn memory_is_charged_once_until_the_setup_has_failed_or_the_lease_is_gone() {
        let limits = Amounts {
            pinned_bytes: Some(3 * PAGE),
            ..Amounts::default()
        };
        let accounts = Accounts::new(vec![Rule {
            members: "vm/web".parse().expect("a pattern"),
            limits,
            gids: Vec::new(),
        }]);
        let pool = Pool::under_policy(8 * PAGE, SECOND * 30, Some(accounts));
        let web: Subject = "spiffe://prod/ssi-hv/vm/web".parse().expect("one");
        let lend = || {
            let lease = pool.lend_to(Some(web.clone()), "web".into(), 2 * PAGE, false, SECOND);
            lease.expect("free")
        };
        let (one, other, third) = (lend(), lend(), lend());
        // What the node refuses is not charged.
        let node = |limit| Quota::new("bytes for RDMA", "this node", limit, "end VMs");
        let error = third.take_for_rdma(&node(Some(PAGE)));
        let error = error.expect_err("more than a page");
        assert!(error.contains("0 of 4096 bytes for RDMA"), "{error}");
        let node = node(None);
        let first = one.take_for_rdma(&node).expect("no limit");
        drop(one.take_for_rdma(&node).expect("it is charged already"));
        let error = other.take_for_rdma(&node).expect_err("more than 3 pages");
        assert!(error.contains("raise pinned="), "{error}");
        drop(first);
        drop(other.take_for_rdma(&node).expect("both setups failed"));
        // This one registers the memory.
        let (end, returns) = crossbeam_channel::bounded(0);
        let setup = one.take_for_rdma(&node).expect("given back");
        one.hang_until(returns);
        drop(setup);
        let refused = |lease: &Lease| lease.take_for_rdma(&node).is_err();
        assert!(refused(&other), "it is registered");
        drop(end);
        for token in [one.token, other.token, third.token] {
            pool.end(&token).expect("it is there");
        }
        drop((one, other, third));
        let deadline = Instant::now() + SECOND * 30;
        while pool.lent_bytes() > 0 {
            assert!(Instant::now() < deadline, "its memory stays lent");
            std::thread::yield_now();
        }
        assert!(pool.accounts().expect("a policy").used().is_empty());
    }
}
