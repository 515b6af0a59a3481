//! The end of a lease's registration for RDMA, on a separate thread, since `ibv_dereg_mr` may hang.

use super::Lease;
use crate::donor::export::Registered;
use std::sync::Arc;

/// A registration that ends on drop. It keeps the lease's memory mapped until then.
struct Deregistration {
    /// Both `None` after its end.
    lease: Option<Arc<Lease>>,
    region: Option<Box<dyn Registered>>,
}

impl Lease {
    /// Ends a registration of its memory asynchronously. The lease is not closed before that.
    pub(super) fn deregister(self: &Arc<Self>, region: Box<dyn Registered>) {
        self.sessions.begin_deregistration();
        let ends = Deregistration {
            lease: Some(Arc::clone(self)),
            region: Some(region),
        };
        let thread = std::thread::Builder::new().name("donor-dereg".into());
        // Without a thread it is dropped, and thus ended, right here.
        if let Err(error) = thread.spawn(move || drop(ends)) {
            tracing::warn!(vm = self.vm, %error, "memory is deregistered without a thread");
        }
    }

    /// Keeps the memory lent that an adapter may still access.
    pub(super) fn keep_lent(self: &Arc<Self>) {
        tracing::warn!(
            vm = self.vm,
            "an adapter may still access the memory of a lease, which stays lent until this node is \
             started again"
        );
        std::mem::forget(Arc::clone(self));
    }
}

impl Drop for Deregistration {
    fn drop(&mut self) {
        if let (Some(lease), Some(region)) = (self.lease.take(), self.region.take()) {
            if !lease.export.deregister(region) {
                lease.keep_lent();
            }
            let sessions = Arc::clone(&lease.sessions);
            // First, so that the memory is no longer lent when the lease is closed.
            drop(lease);
            sessions.end_deregistration();
        }
    }
}

#[cfg(test)]
impl Lease {
    /// Adds a registration whose `ibv_dereg_mr` hangs until the sender of `returns` is dropped.
    pub(in crate::donor::pool) fn hang_until(&self, returns: crossbeam_channel::Receiver<()>) {
        self.export.hang_until(returns);
    }
}
