//! Memory that is added to a running guest: its device, and the donors that join for it.

mod shared;

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use crossbeam_channel::bounded;
use devices::virtio::{FreeRange, MEM_BLOCK_BYTES, Mem, MemRegion, NotNow, Pluggable};
use memory_fabric::BLOCK_BYTES;
use memory_fabric::fabric::{DonorAddress, Fabric, Hotplug, HotplugError, PlugError};
use memory_fabric::page::PAGE_SHIFT;

use crate::control_socket::changes::Changes;
use crate::control_socket::protocol::{HotplugBody, Refusal, RefusalCode};
use crate::failure::describe;
use crate::machine::MachineHandle;
use crate::report::HotplugUsed;
pub use shared::SharedRegion;

/// The device and the fabric must agree on the size of a block.
const _: () = assert!(MEM_BLOCK_BYTES == BLOCK_BYTES);

/// Where the memory of blocks comes from.
#[derive(Clone, Debug)]
enum Source {
    /// This host, and donors that join: the pager of this host alone has it.
    Paged(Hotplug),
    /// Hosts with vCPUs, which share it.
    Shared(SharedRegion),
}

impl Source {
    /// Returns the first address and the length of the region.
    fn region(&self) -> (u64, u64) {
        match self {
            Self::Paged(hotplug) => {
                let pages = hotplug.pages();
                let start = u64::from(pages.first.number()) << PAGE_SHIFT;
                (start, pages.bytes())
            }
            Self::Shared(region) => (region.start.0, region.bytes),
        }
    }

    fn plugged_bytes(&self) -> u64 {
        match self {
            Self::Paged(hotplug) => u64::from(hotplug.homes().added_blocks()) * BLOCK_BYTES,
            Self::Shared(region) => region.plugged_bytes(),
        }
    }

    /// Returns how much may be plugged by the newest request, where several can be made at a time.
    fn requested_bytes(&self) -> Option<u64> {
        match self {
            Self::Paged(hotplug) => Some(hotplug.requested_bytes()),
            Self::Shared(_) => None,
        }
    }

    /// Returns how much of this host's memory is missing for this much added memory.
    fn missing_bytes(&self, bytes: u64) -> u64 {
        match self {
            Self::Paged(hotplug) => hotplug.missing_bytes(bytes),
            // It is lent since the start.
            Self::Shared(_) => 0,
        }
    }

    /// Allows this much to be plugged, with memory of `donor` if that is named.
    fn request(&self, bytes: u64, donor: Option<DonorAddress>) -> Outcome {
        match (self, donor) {
            (Self::Paged(hotplug), donor) => hotplug.request(bytes, donor),
            (Self::Shared(_), Some(_)) => Err(HotplugError::Needless(bytes)),
            (Self::Shared(_), None) => Ok(()),
        }
    }
}

/// The blocks of a guest's memory device.
#[derive(Debug)]
struct Blocks {
    source: Source,
    changes: Changes,
}

impl Blocks {
    /// Returns the numbers of blocks in the region.
    fn of(&self, range: FreeRange) -> std::ops::Range<u32> {
        let (start, _) = self.source.region();
        // The device only passes blocks of its region.
        let block = |address: u64| u32::try_from((address - start) / BLOCK_BYTES).unwrap_or(0);
        block(range.start.0)..block(range.start.0 + range.bytes)
    }

    /// Notifies of a change that succeeded; one that failed is logged, and the driver retries it.
    fn finish(&self, what: &str, result: Result<(), PlugError>) -> Result<(), NotNow> {
        result.map_err(|error| {
            tracing::debug!("memory is not {what}: {}", describe(&error));
            NotNow
        })?;
        self.changes.notify();
        Ok(())
    }
}

impl Pluggable for Blocks {
    fn plug(&self, blocks: FreeRange) -> Result<(), NotNow> {
        let plugged = match &self.source {
            Source::Paged(hotplug) => hotplug.plug(self.of(blocks)),
            Source::Shared(region) => {
                region.plug(blocks);
                Ok(())
            }
        };
        self.finish("plugged", plugged)
    }

    fn unplug(&self, blocks: FreeRange) -> Result<(), NotNow> {
        let unplugged = match &self.source {
            Source::Paged(hotplug) => hotplug.unplug(self.of(blocks)),
            Source::Shared(region) => {
                region.unplug(blocks);
                Ok(())
            }
        };
        self.finish("unplugged", unplugged)
    }
}

/// The memory device of a boot, with its state.
#[derive(Clone, Debug)]
pub struct HotplugMemory {
    pub device: Arc<Mem>,
    source: Source,
    joining: Arc<Mutex<Joining>>,
    /// Held while the device learns what was requested.
    asking: Arc<Mutex<()>>,
    /// Notified of all visible changes.
    changes: Changes,
}

/// State of donors that were asked to join.
#[derive(Debug, Default)]
struct Joining {
    /// The donor that is joining.
    who: Option<String>,
    /// Why the last one could not join.
    error: Option<String>,
    /// Whether the guest has ended.
    ended: bool,
}

impl HotplugMemory {
    /// Creates a device for a guest of this fabric, if it is configured, or for a region that other
    /// hosts share; `node` is its NUMA node.
    pub fn new(
        fabric: &Fabric,
        shared: Option<SharedRegion>,
        node: Option<u16>,
        changes: &Changes,
    ) -> Option<Self> {
        let source = match shared {
            Some(region) => Source::Shared(region),
            None => Source::Paged(fabric.hotplug()?),
        };
        let (start, bytes) = source.region();
        let region = MemRegion { start, bytes, node };
        let blocks = Blocks {
            source: source.clone(),
            changes: changes.clone(),
        };
        let device = Arc::new(Mem::new(region, Arc::new(blocks)));
        Some(Self {
            device,
            source,
            joining: Arc::default(),
            asking: Arc::default(),
            changes: changes.clone(),
        })
    }

    /// Records that the guest has ended: nothing changes any more, and all waits end.
    pub fn end(&self) {
        self.joining().ended = true;
        self.changes.notify();
    }

    fn joining(&self) -> std::sync::MutexGuard<'_, Joining> {
        self.joining.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether the guest has ended.
    pub fn has_ended(&self) -> bool {
        self.joining().ended
    }

    /// Returns the counter of visible changes.
    pub fn changes(&self) -> &Changes {
        &self.changes
    }

    /// Returns how much of this host's memory is missing for this much added memory.
    pub fn missing_bytes(&self, bytes: u64) -> u64 {
        self.source.missing_bytes(bytes)
    }

    /// Returns how much can be added, was requested, and is plugged.
    pub fn body(&self) -> HotplugBody {
        // Read first, so that the count is not newer than the rest.
        let changes = self.changes.count();
        let joining = self.joining();
        HotplugBody {
            max_bytes: self.device.region().bytes,
            block_bytes: MEM_BLOCK_BYTES,
            requested_bytes: self.device.requested_bytes(),
            plugged_bytes: self.source.plugged_bytes(),
            joining: joining.who.clone(),
            error: joining.error.clone(),
            changes,
        }
    }

    /// Returns the same for reports.
    pub fn used(&self) -> HotplugUsed {
        HotplugUsed {
            max_bytes: self.device.region().bytes,
            requested_bytes: self.device.requested_bytes(),
            plugged_bytes: self.source.plugged_bytes(),
        }
    }

    /// Requests a size from the guest once there is memory for it.
    pub fn ask(&self, bytes: u64, donor: Option<DonorAddress>, machine: &MachineHandle) -> Outcome {
        self.source.request(bytes, donor)?;
        // Another request may have been accepted since, which the device must not lose.
        let asking = self.asking.lock().unwrap_or_else(PoisonError::into_inner);
        let newest = self.source.requested_bytes().unwrap_or(bytes);
        let change = || self.device.set_requested_bytes(newest);
        machine.change_config(&*self.device, change);
        drop(asking);
        self.joining().error = None;
        self.changes.notify();
        Ok(())
    }

    /// Asks a donor to join, and waits `until` then; joining continues after that.
    pub fn ask_with(
        &self,
        bytes: u64,
        donor: DonorAddress,
        name: String,
        machine: &MachineHandle,
        until: Instant,
    ) -> Result<(), Refusal> {
        {
            let mut joining = self.joining();
            if joining.who.is_some() {
                return Err(refusal(&HotplugError::Joining));
            }
            joining.who = Some(name.clone());
            joining.error = None;
        }
        self.changes.notify();
        let (result_sender, outcome) = bounded(1);
        let (plugged, machine) = (self.clone(), machine.clone());
        let join = move || {
            let result = plugged.ask(bytes, Some(donor), &machine).map_err(|error| {
                let refusal = refusal(&error);
                tracing::warn!("donor {name} does not join: {}", refusal.text);
                refusal
            });
            {
                let mut joining = plugged.joining();
                joining.who = None;
                joining.error = result.as_ref().err().map(|refusal| refusal.text.clone());
            }
            plugged.changes.notify();
            // The receiver may have timed out.
            let _ = result_sender.try_send(result);
        };
        let thread = std::thread::Builder::new().name("join".into()).spawn(join);
        if let Err(error) = thread {
            self.joining().who = None;
            self.changes.notify();
            return Err(Refusal::new(RefusalCode::Failed, error.to_string()));
        }
        // A later result is visible in the status.
        outcome.recv_deadline(until).unwrap_or(Ok(()))
    }
}

type Outcome = Result<(), HotplugError>;

/// Returns the refusal for an error.
pub fn refusal(error: &HotplugError) -> Refusal {
    let code = match error {
        HotplugError::TooMuch { .. } | HotplugError::NotBlocks(_) => RefusalCode::Malformed,
        HotplugError::Joining => RefusalCode::Busy,
        HotplugError::Donor(_) => RefusalCode::Donor,
        _ => RefusalCode::State,
    };
    let causes = std::iter::successors(std::error::Error::source(error), |cause| cause.source());
    let text = causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"));
    Refusal::new(code, text)
}

#[cfg(test)]
mod tests;
