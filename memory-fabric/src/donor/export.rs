//! A lease's memory as adapters see it: registered while there is an RDMA connection, and until
//! the lease ends.

use crate::mapping::Mapping;
use crate::transport::rdma::{
    Access, Device, MemoryRegion, Paging, ProtectionDomain, RdmaError, RemoteMemory,
};
use fabric_host::lock;
use std::sync::{Arc, Mutex};

/// Whether, and how, the memory of a lease is registered.
#[derive(Debug, Default)]
pub(super) struct Export {
    state: Mutex<State>,
    /// Held while memory is being registered, which takes long.
    registering: Mutex<()>,
}

#[derive(Debug, Default)]
struct State {
    region: Option<MemoryRegion>,
    /// Whether pages are pinned, or are being pinned: then they must stay where they are.
    pinned: bool,
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
                    return Ok(Some(describe(region, memory)));
                }
            }
        }
        let registered = ProtectionDomain::new(device).and_then(|domain| {
            // A child that shared the pages would have them copied when they are written.
            memory
                .advise(0, memory.bytes(), libc::MADV_DONTFORK)
                .map_err(|error| RdmaError::System("keep memory from child processes", error))?;
            let register = |paging| {
                lock(&self.state).pinned |= paging == Paging::Pinned;
                let (start, bytes) = (memory.as_ptr(), memory.bytes());
                // SAFETY: the mapping lives for as long as the region, as the caller promises,
                // and its pages stay if they have to, since they count as pinned from before on.
                unsafe {
                    MemoryRegion::register(&domain, start, bytes, Access::RemoteWrite, paging)
                }
            };
            if device.pages_on_demand() {
                match register(Paging::OnDemand) {
                    Ok(region) => return Ok(region),
                    Err(error) => tracing::debug!(%error, "memory is pinned instead"),
                }
            }
            register(Paging::Pinned)
        });
        let mut state = lock(&self.state);
        match registered {
            // The region ends right here.
            Ok(_) if state.ended => Ok(None),
            Ok(region) => {
                let described = describe(&region, memory);
                state.pinned = region.is_pinned();
                state.region = Some(region);
                Ok(Some(described))
            }
            Err(error) => {
                state.pinned = state.region.as_ref().is_some_and(MemoryRegion::is_pinned);
                Err(error)
            }
        }
    }

    /// Ends every access, for good: READs and WRITEs fail from now on.
    pub(super) fn end(&self) {
        let mut state = lock(&self.state);
        state.ended = true;
        state.region = None;
    }

    /// Ends every access if the device is being removed, until it is opened again.
    pub(super) fn release_removed_device(&self) -> bool {
        let mut state = lock(&self.state);
        let gone = |region: &MemoryRegion| region.domain().device().is_gone();
        if !state.region.as_ref().is_some_and(gone) {
            return false;
        }
        state.region = None;
        state.pinned = false;
        true
    }

    /// Does something that may take pages away, unless they are pinned; `None` when they are.
    /// None is being pinned meanwhile.
    pub(super) fn unless_pinned<T>(&self, act: impl FnOnce() -> T) -> Option<T> {
        let state = lock(&self.state);
        (!state.pinned).then(act)
    }
}

fn describe(region: &MemoryRegion, memory: &Mapping) -> (Arc<ProtectionDomain>, RemoteMemory) {
    let remote = RemoteMemory {
        key: region.remote_key(),
        pinned: region.is_pinned(),
        base: memory.as_ptr().addr() as u64,
        bytes: memory.bytes() as u64,
    };
    (Arc::clone(region.domain()), remote)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_go_only_while_none_is_pinned() {
        let export = Export::default();
        assert_eq!(export.unless_pinned(|| 7), Some(7));
        lock(&export.state).pinned = true;
        assert_eq!(export.unless_pinned(|| 7), None);
        assert!(!export.release_removed_device(), "nothing is registered");
        export.end();
        assert_eq!(
            export.unless_pinned(|| 7),
            None,
            "to be unmapped as a whole"
        );
    }
}
