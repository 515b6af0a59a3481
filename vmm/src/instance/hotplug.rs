//! Memory that is added to a running guest: between its device, the fabric and who asks for it.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use crate::config::address::Donor;
use crate::config::resolved_donor;
use crate::control_socket::changes::{Changes, NextChange, Seen};
use crate::control_socket::protocol::{HotplugBody, HotplugTarget, Refusal, RefusalCode};
use crate::control_socket::route::{Answer, answer};
use crate::machine::MachineHandle;
use crate::size::ByteSize;
use anyhow::anyhow;
use crossbeam_channel::bounded;
use devices::virtio::{FreeRange, MEM_BLOCK_BYTES, Mem, MemRegion, NotNow, Pluggable};
use memory_fabric::fabric::{DonorAddress, Fabric, Hotplug, HotplugError, PlugError};
use memory_fabric::homes::BLOCK_BYTES;
use memory_fabric::page::PAGE_SHIFT;

use super::observe::Watched;

/// How long a request waits for a donor to join; after that it goes on without being waited for.
const JOIN_TIME_MAX: Duration = Duration::from_secs(8);

/// The device and the fabric have one idea of a block.
const _: () = assert!(MEM_BLOCK_BYTES == BLOCK_BYTES);

/// What a guest's memory device works on.
#[derive(Debug)]
struct Blocks {
    hotplug: Hotplug,
    changes: Changes,
}

impl Blocks {
    fn of(&self, range: FreeRange) -> std::ops::Range<u32> {
        let start = u64::from(self.hotplug.pages().first.number()) << PAGE_SHIFT;
        // The device gives blocks of its region alone.
        let block = |address: u64| u32::try_from((address - start) / BLOCK_BYTES).unwrap_or(0);
        block(range.start.0)..block(range.start.0 + range.bytes)
    }

    fn told(&self, what: &str, result: Result<(), PlugError>) -> Result<(), NotNow> {
        result.map_err(|error| {
            tracing::debug!("memory is not {what}: {:#}", anyhow!(error));
            NotNow
        })?;
        self.changes.notify();
        Ok(())
    }
}

impl Pluggable for Blocks {
    fn plug(&self, blocks: FreeRange) -> Result<(), NotNow> {
        self.told("plugged", self.hotplug.plug(self.of(blocks)))
    }

    fn unplug(&self, blocks: FreeRange) -> Result<(), NotNow> {
        self.told("unplugged", self.hotplug.unplug(self.of(blocks)))
    }
}

/// The memory device of a boot, and what is behind it.
#[derive(Clone, Debug)]
pub struct Plugged {
    pub device: Arc<Mem>,
    hotplug: Hotplug,
    joining: Arc<Mutex<Joining>>,
    /// Told of all that a look shows.
    changes: Changes,
}

/// Of donors that were asked to join.
#[derive(Debug, Default)]
struct Joining {
    /// The one that is about to.
    who: Option<String>,
    /// Why the last one did not.
    error: Option<String>,
    /// Whether the guest has ended.
    ended: bool,
}

impl Plugged {
    /// A device for a guest of this fabric, if it was started for that; `node` is its NUMA node.
    pub fn new(fabric: &Fabric, node: Option<u16>, changes: &Changes) -> Option<Self> {
        let hotplug = fabric.hotplug()?;
        let pages = hotplug.pages();
        let region = MemRegion {
            start: u64::from(pages.first.number()) << PAGE_SHIFT,
            bytes: pages.bytes(),
            node,
        };
        let blocks = Blocks {
            hotplug: hotplug.clone(),
            changes: changes.clone(),
        };
        let device = Arc::new(Mem::new(region, Arc::new(blocks)));
        Some(Self {
            device,
            hotplug,
            joining: Arc::default(),
            changes: changes.clone(),
        })
    }

    /// The guest has ended: nothing of this changes any more, and nobody waits for that.
    pub fn end(&self) {
        self.joining().ended = true;
        self.changes.notify();
    }

    fn joining(&self) -> std::sync::MutexGuard<'_, Joining> {
        self.joining.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn body(&self) -> HotplugBody {
        // First, so that what is told is not older.
        let changes = self.changes.count();
        let joining = self.joining();
        HotplugBody {
            max_bytes: self.device.region().bytes,
            block_bytes: MEM_BLOCK_BYTES,
            requested_bytes: self.device.requested_bytes(),
            plugged_bytes: u64::from(self.hotplug.homes().added_blocks()) * BLOCK_BYTES,
            joining: joining.who.clone(),
            error: joining.error.clone(),
            changes,
        }
    }

    /// Asks the guest for so much, once there is memory for it.
    fn ask(&self, bytes: u64, donor: Option<DonorAddress>, machine: &MachineHandle) -> Outcome {
        self.hotplug.request(bytes, donor)?;
        let change = || self.device.set_requested_bytes(bytes);
        machine.change_config(&*self.device, change);
        self.joining().error = None;
        self.changes.notify();
        Ok(())
    }

    /// Asks a donor to join, and waits for that for a while.
    fn ask_with(
        &self,
        bytes: u64,
        donor: DonorAddress,
        name: String,
        machine: &MachineHandle,
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
        let (told, outcome) = bounded(1);
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
            // That nobody waits any more is no error.
            let _ = told.try_send(result);
        };
        let thread = std::thread::Builder::new().name("join".into()).spawn(join);
        if let Err(error) = thread {
            self.joining().who = None;
            self.changes.notify();
            return Err(Refusal::new(RefusalCode::Failed, error.to_string()));
        }
        // What comes later is told by who looks.
        outcome.recv_timeout(JOIN_TIME_MAX).unwrap_or(Ok(()))
    }
}

type Outcome = Result<(), HotplugError>;

fn refusal(error: &HotplugError) -> Refusal {
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

/// How much can be added, was asked for, and is there.
pub fn look(watched: &Watched) -> Answer {
    answer(200, &plugged_of(watched)?.body())
}

/// What a look with parameters waits for.
pub fn next_change(watched: &Arc<Watched>, query: &str) -> Result<NextChange, Refusal> {
    let seen = Seen::parse(query)?;
    Ok(plugged_of(watched)?.changes.after(seen))
}

fn plugged_of(watched: &Watched) -> Result<Plugged, Refusal> {
    if watched.paged.get().is_none() {
        return Err(super::vm_routes::starting());
    }
    let text = "the VM was started without --hotplug-memory SIZE, so it has no addresses for more";
    let plugged = watched.plugged.get();
    let plugged = plugged.ok_or_else(|| Refusal::new(RefusalCode::State, text))?;
    if plugged.joining().ended {
        return Err(Refusal::new(RefusalCode::State, "the guest has ended"));
    }
    Ok(plugged)
}

/// Asks the guest to have so much plugged.
pub fn set(watched: &Arc<Watched>, body: &[u8]) -> Answer {
    let malformed = |text: String| Refusal::new(RefusalCode::Malformed, text);
    let target: HotplugTarget = serde_json::from_slice(body).map_err(|error| {
        malformed(format!(
            "not {{\"requested_bytes\": NUMBER, \"donor\": \"HOST:PORT\"}}: {error}"
        ))
    })?;
    let donor: Option<Donor> = match &target.donor {
        Some(text) => Some(
            text.parse()
                .map_err(|error| malformed(format!("{error}")))?,
        ),
        None => None,
    };
    let plugged = plugged_of(watched)?;
    let (machine, _) = watched
        .machine
        .get()
        .ok_or_else(super::vm_routes::starting)?;
    let bytes = target.requested_bytes;
    let limit = plugged.device.region().bytes;
    if !bytes.is_multiple_of(MEM_BLOCK_BYTES) || bytes > limit {
        return Err(malformed(format!(
            "{} is not whole blocks of {} up to {}, which is --hotplug-memory",
            ByteSize::from_bytes(bytes),
            ByteSize::from_bytes(MEM_BLOCK_BYTES),
            ByteSize::from_bytes(limit)
        )));
    }
    match donor {
        None => {
            fits_here(&plugged, bytes)?;
            let asked = plugged.ask(bytes, None, &machine);
            asked.map_err(|error| refusal(&error))?;
        }
        Some(donor) => {
            if donor.memory.is_some() {
                let text = "a donor lends what is missing to requested_bytes; omit memory=";
                return Err(malformed(text.to_owned()));
            }
            let config = &watched.config;
            let resolved = resolved_donor(&donor, config.transport, config.insecure);
            let resolved = resolved.map_err(|error| malformed(one_line(&error)))?;
            let address = DonorAddress {
                address: resolved.address,
                fingerprint: resolved.fingerprint,
                bytes: None,
            };
            plugged.ask_with(bytes, address, donor.address.to_string(), &machine)?;
        }
    }
    answer(202, &plugged.body())
}

fn one_line(error: &dyn std::error::Error) -> String {
    match error.source() {
        Some(cause) => format!("{error}: {cause}"),
        None => error.to_string(),
    }
}

/// Refuses what this host has no memory for just now.
fn fits_here(plugged: &Plugged, bytes: u64) -> Result<(), Refusal> {
    let missing = plugged.hotplug.missing_bytes(bytes);
    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    match crate::doctor::available_bytes(&meminfo) {
        Some(available) if missing > available => Err(Refusal::new(
            RefusalCode::State,
            format!(
                "{} of this host's memory are wanted, and {} are available; name a donor that \
                 lends it, or ask for less",
                ByteSize::from_bytes(missing),
                ByteSize::from_bytes(available)
            ),
        )),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests;
