//! The registration of a lease's memory with adapters: from its first RDMA connection until the
//! lease ends.

use crate::mapping::{Advice, Mapping};
use crate::transport::rdma::{
    Access, Device, MemoryRegion, Paging, ProtectionDomain, RdmaError, RemoteMemory,
};
use fabric_host::lock;
use std::sync::{Arc, Mutex};

/// Memory that is registered with an adapter until this is dropped. The drop may take long or hang
/// (`ibv_dereg_mr`), so no lock may be held during it.
pub(super) trait Registered: std::fmt::Debug + Send + Sync {
    /// Returns the domain through which it is accessible.
    fn domain(&self) -> &Arc<ProtectionDomain>;
    /// Returns whether its pages are pinned.
    fn is_pinned(&self) -> bool;
    /// Returns the key for the peer's requests.
    fn remote_key(&self) -> u32;
    /// Returns the address of its first byte in the peer's requests.
    fn base(&self) -> u64;
    /// Ends it. Returns false if the adapter may still access the memory.
    fn end(self: Box<Self>) -> bool;
    /// Returns whether its device is being removed.
    fn is_of_removed_device(&self) -> bool {
        self.domain().device().is_gone()
    }
}

impl Registered for MemoryRegion {
    fn domain(&self) -> &Arc<ProtectionDomain> {
        self.domain()
    }

    fn is_pinned(&self) -> bool {
        self.is_pinned()
    }

    fn remote_key(&self) -> u32 {
        self.remote_key()
    }

    fn base(&self) -> u64 {
        self.base()
    }

    fn end(self: Box<Self>) -> bool {
        MemoryRegion::end(*self)
    }
}

/// The registration of a lease's memory.
#[derive(Debug, Default)]
pub(super) struct Export {
    state: Mutex<State>,
    /// Held during a registration, which takes long.
    registering: Mutex<()>,
}

#[derive(Debug, Default)]
struct State {
    region: Option<Box<dyn Registered>>,
    /// Number of registrations that pin pages, or may: while it is not zero, pages must not be
    /// released. It includes registrations that are in progress or being ended.
    pins: u32,
    /// Whether a registration could not be ended.
    is_held: bool,
    /// Whether the lease has ended.
    ended: bool,
}

impl Export {
    /// Registers `memory` for READs and WRITEs of its VM, unless it is registered. Returns its
    /// domain, and its location for the peer; `None` if the lease has ended.
    ///
    /// Each lease has a domain of its own, so guessing the key of another lease gives no access.
    ///
    /// `memory` must be the same mapping at each call. None of its pages may be released to the
    /// kernel unless [`Self::unless_pinned`] allows it.
    pub(super) fn open(
        &self,
        memory: &Arc<Mapping>,
        device: &Arc<Device>,
    ) -> Result<Option<(Arc<ProtectionDomain>, RemoteMemory)>, RdmaError> {
        let _one_at_a_time = lock(&self.registering);
        {
            let state = lock(&self.state);
            if state.ended {
                return Ok(None);
            }
            if let Some(region) = &state.region {
                // Compares the device itself: a later device may have the same name.
                if Arc::ptr_eq(region.domain().device(), device) {
                    return Ok(Some(describe(region.as_ref(), memory)));
                }
            }
        }
        let registered = ProtectionDomain::new(device).and_then(|domain| {
            // Otherwise pages shared with a forked child would be copied when they are written.
            memory
                .advise(0, memory.bytes(), Advice::DontFork)
                .map_err(|error| RdmaError::System("keep memory from child processes", error))?;
            let register = |paging| self.register(&domain, memory, paging);
            if device.pages_on_demand() {
                match register(Paging::OnDemand) {
                    Ok(region) => return Ok(region),
                    Err(error) => tracing::debug!(%error, "memory is pinned instead"),
                }
            }
            register(Paging::Pinned)
        });
        let region = registered?;
        let mut state = lock(&self.state);
        let (described, unused) = if state.ended {
            (None, Some(region))
        } else {
            let described = describe(region.as_ref(), memory);
            (Some(described), state.region.replace(region))
        };
        drop(state);
        if let Some(region) = unused {
            // What follows if that fails is done at the end of the lease.
            let _ = self.deregister(region);
        }
        Ok(described)
    }

    /// Registers `memory`. It is counted before if it is pinned, so that no page is released.
    fn register(
        &self,
        domain: &Arc<ProtectionDomain>,
        memory: &Arc<Mapping>,
        paging: Paging,
    ) -> Result<Box<dyn Registered>, RdmaError> {
        let pins = u32::from(paging == Paging::Pinned);
        lock(&self.state).pins += pins;
        let region = match paging {
            Paging::Pinned => {
                MemoryRegion::register_hidden(domain, memory, Access::RemoteWrite, paging)
            }
            // The kernel's SoftRoCE computes the page from the address itself in this case.
            Paging::OnDemand => MemoryRegion::register(domain, memory, Access::RemoteWrite, paging),
        };
        match region {
            Ok(region) => Ok(Box::new(region)),
            Err(error) => {
                lock(&self.state).pins -= pins;
                Err(error)
            }
        }
    }

    /// Ends every access permanently, once [`Self::deregister`] has consumed the result.
    pub(super) fn end(&self) -> Option<Box<dyn Registered>> {
        let mut state = lock(&self.state);
        state.ended = true;
        state.region.take()
    }

    /// Ends every access if the device is being removed, until the next [`Self::open`]. Pass the
    /// result to [`Self::deregister`].
    pub(super) fn release_removed_device(&self) -> Option<Box<dyn Registered>> {
        let mut state = lock(&self.state);
        state.region.take_if(|region| region.is_of_removed_device())
    }

    /// Ends a registration, which may take long: afterwards READs and WRITEs with its key fail. Returns
    /// false if those of this one, or of one before, may not: then no page is released, and the memory
    /// must not count as free.
    pub(super) fn deregister(&self, region: Box<dyn Registered>) -> bool {
        let pins = u32::from(region.is_pinned());
        let has_ended = region.end();
        let mut state = lock(&self.state);
        match has_ended {
            true => state.pins -= pins,
            false => state.is_held = true,
        }
        !state.is_held
    }

    /// Returns whether an adapter may access the memory until the process ends.
    pub(super) fn is_held(&self) -> bool {
        lock(&self.state).is_held
    }

    /// Returns whether memory is registered, or a registration is not known to have ended.
    pub(super) fn is_registered(&self) -> bool {
        let state = lock(&self.state);
        state.region.is_some() || state.pins > 0 || state.is_held
    }

    /// Calls a function that may release pages; returns `None` if pages are pinned. No registration
    /// starts during the call.
    pub(super) fn unless_pinned<T>(&self, act: impl FnOnce() -> T) -> Option<T> {
        let state = lock(&self.state);
        (state.pins == 0).then(act)
    }
}

fn describe(region: &dyn Registered, memory: &Mapping) -> (Arc<ProtectionDomain>, RemoteMemory) {
    let remote = RemoteMemory {
        key: region.remote_key(),
        pinned: region.is_pinned(),
        base: region.base(),
        bytes: memory.bytes() as u64,
    };
    (Arc::clone(region.domain()), remote)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crossbeam_channel::Receiver;
    use std::time::Duration;

    const PATIENCE: Duration = Duration::from_secs(30);

    /// Pinned memory whose `ibv_dereg_mr` returns when the other end of a channel is dropped, and fails
    /// when something comes there.
    #[derive(Debug)]
    struct Hanging(Receiver<()>);

    impl Registered for Hanging {
        fn domain(&self) -> &Arc<ProtectionDomain> {
            unreachable!("it is not reached")
        }

        fn is_pinned(&self) -> bool {
            true
        }

        fn remote_key(&self) -> u32 {
            0
        }

        fn base(&self) -> u64 {
            0
        }

        fn end(self: Box<Self>) -> bool {
            match self.0.recv_timeout(PATIENCE) {
                Ok(()) => false,
                Err(error) => {
                    assert_eq!(error, crossbeam_channel::RecvTimeoutError::Disconnected);
                    true
                }
            }
        }

        fn is_of_removed_device(&self) -> bool {
            true
        }
    }

    impl Export {
        /// Adds a registration whose `ibv_dereg_mr` hangs until the sender of `returns` is dropped.
        pub(in crate::donor) fn hang_until(&self, returns: Receiver<()>) {
            let mut state = lock(&self.state);
            state.pins += 1;
            state.region = Some(Box::new(Hanging(returns)));
        }
    }

    #[test]
    fn pages_go_only_while_none_is_pinned() {
        let export = Export::default();
        assert_eq!(export.unless_pinned(|| 7), Some(7));
        assert!(export.release_removed_device().is_none(), "none is there");
        let (end, returns) = crossbeam_channel::bounded(0);
        export.hang_until(returns);
        assert_eq!(export.unless_pinned(|| 7), None);
        let region = export.release_removed_device().expect("it is there");
        assert_eq!(export.unless_pinned(|| 7), None, "it is still registered");
        drop(end);
        assert!(export.deregister(region));
        assert_eq!(export.unless_pinned(|| 7), Some(7));
    }
}
