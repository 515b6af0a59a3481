//! A lease's memory as adapters see it: registered while there is an RDMA connection, and until
//! the lease ends.

use crate::mapping::Mapping;
use crate::transport::rdma::{
    Access, Device, MemoryRegion, Paging, ProtectionDomain, RdmaError, RemoteMemory,
};
use fabric_host::lock;
use std::sync::{Arc, Mutex};

/// Memory that is registered with an adapter until this is dropped. Dropping it may take long or hang
/// (`ibv_dereg_mr`), so no lock may be held then.
pub(super) trait Registered: std::fmt::Debug + Send + Sync {
    /// The domain in which it can be reached.
    fn domain(&self) -> &Arc<ProtectionDomain>;
    /// Whether its pages have to stay where they are.
    fn is_pinned(&self) -> bool;
    /// What names it to the other end.
    fn remote_key(&self) -> u32;
    /// Whether its device is being removed.
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
}

/// Whether, and how, the memory of a lease is registered.
#[derive(Debug, Default)]
pub(super) struct Export {
    state: Mutex<State>,
    /// Held while memory is being registered, which takes long.
    registering: Mutex<()>,
}

#[derive(Debug, Default)]
struct State {
    region: Option<Box<dyn Registered>>,
    /// How many registrations pin pages, or may: with one, pages must stay where they are. One that
    /// is being made or ended counts.
    pins: u32,
    /// Whether the lease has ended.
    ended: bool,
}

impl Export {
    /// Registers `memory` for READs and WRITEs of the VM it is lent to, unless it is. What comes
    /// back is the domain in which it can be reached, and how to name it there. `None` when the lease has
    /// ended.
    ///
    /// The lease's memory has a domain of its own: who guesses the key of another lease can do
    /// nothing with it.
    ///
    /// # Safety
    ///
    /// `memory` must be the same mapping at each call, and stay mapped until [`Self::end`] was
    /// called or this is dropped. None of its pages may be given back to the kernel unless
    /// [`Self::unless_pinned`] allows it.
    pub(super) unsafe fn open(
        &self,
        memory: &Mapping,
        device: &Arc<Device>,
    ) -> Result<Option<(Arc<ProtectionDomain>, RemoteMemory)>, RdmaError> {
        let _one_at_a_time = lock(&self.registering);
        {
            let state = lock(&self.state);
            if state.ended {
                return Ok(None);
            }
            if let Some(region) = &state.region {
                // The very device: one of its name may be another that came after it.
                if Arc::ptr_eq(region.domain().device(), device) {
                    return Ok(Some(describe(region.as_ref(), memory)));
                }
            }
        }
        let registered = ProtectionDomain::new(device).and_then(|domain| {
            // A child that shared the pages would have them copied when they are written.
            memory
                .advise(0, memory.bytes(), libc::MADV_DONTFORK)
                .map_err(|error| RdmaError::System("keep memory from child processes", error))?;
            let register = |paging| {
                // SAFETY: the mapping lives for as long as the region, as the caller promises,
                // and its pages stay if they have to, since they count as pinned from before on.
                unsafe { self.register(&domain, memory, paging) }
            };
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
            self.deregister(region);
        }
        Ok(described)
    }

    /// Registers `memory`, and counts it if that pins it.
    ///
    /// # Safety
    ///
    /// As for [`Self::open`].
    unsafe fn register(
        &self,
        domain: &Arc<ProtectionDomain>,
        memory: &Mapping,
        paging: Paging,
    ) -> Result<Box<dyn Registered>, RdmaError> {
        let pins = u32::from(paging == Paging::Pinned);
        lock(&self.state).pins += pins;
        let (start, bytes) = (memory.as_ptr(), memory.bytes());
        // SAFETY: as the caller promises.
        let region =
            unsafe { MemoryRegion::register(domain, start, bytes, Access::RemoteWrite, paging) };
        match region {
            Ok(region) => Ok(Box::new(region)),
            Err(error) => {
                lock(&self.state).pins -= pins;
                Err(error)
            }
        }
    }

    /// Ends every access, for good, once [`Self::deregister`] has taken what this returns.
    pub(super) fn end(&self) -> Option<Box<dyn Registered>> {
        let mut state = lock(&self.state);
        state.ended = true;
        state.region.take()
    }

    /// Ends every access if the device is being removed, until it is opened again. What comes back
    /// is for [`Self::deregister`].
    pub(super) fn release_removed_device(&self) -> Option<Box<dyn Registered>> {
        let mut state = lock(&self.state);
        state.region.take_if(|region| region.is_of_removed_device())
    }

    /// Ends a registration: READs and WRITEs by its key fail when this returns, which may take long.
    pub(super) fn deregister(&self, region: Box<dyn Registered>) {
        let pins = u32::from(region.is_pinned());
        drop(region);
        lock(&self.state).pins -= pins;
    }

    /// Does something that may take pages away, unless they are pinned; `None` when they are.
    /// None is being pinned meanwhile.
    pub(super) fn unless_pinned<T>(&self, act: impl FnOnce() -> T) -> Option<T> {
        let state = lock(&self.state);
        (state.pins == 0).then(act)
    }
}

fn describe(region: &dyn Registered, memory: &Mapping) -> (Arc<ProtectionDomain>, RemoteMemory) {
    let remote = RemoteMemory {
        key: region.remote_key(),
        pinned: region.is_pinned(),
        base: memory.as_ptr().addr() as u64,
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

    /// Pinned memory, whose `ibv_dereg_mr` returns when the other end of a channel is dropped.
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

        fn is_of_removed_device(&self) -> bool {
            true
        }
    }

    impl Drop for Hanging {
        fn drop(&mut self) {
            let returns = self.0.recv_timeout(PATIENCE);
            assert_eq!(
                returns,
                Err(crossbeam_channel::RecvTimeoutError::Disconnected)
            );
        }
    }

    impl Export {
        /// Has memory registered of which `ibv_dereg_mr` hangs until the sender of `returns` is
        /// dropped.
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
        export.deregister(region);
        assert_eq!(export.unless_pinned(|| 7), Some(7));
    }
}
