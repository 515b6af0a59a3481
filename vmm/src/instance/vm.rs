//! A running VM as its routes and its report see it. Nothing in it leads to guest memory.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use devices::virtio::Balloon;
use memory_fabric::view::FabricView;

use super::hotplug::HotplugMemory;
use super::supervisor::Supervisor;
use crate::config::RunConfig;
use crate::control_socket::changes::Changes;
use crate::control_socket::protocol::{Refusal, RefusalCode};
use crate::machine::MachineHandle;
use crate::report::{Guest, Host, TransportUsed};

/// A VM from the start of its process to the end, over all boots of its guest.
#[derive(Debug)]
pub struct Instance {
    /// Its name at donors and for clients.
    pub name: String,
    /// When its process started.
    pub started: Instant,
    /// The host it runs on.
    pub host: Host,
    /// The guest as it was configured.
    pub guest: Guest,
    /// How it was started.
    pub config: RunConfig,
    /// What pauses, resumes and ends it.
    pub supervisor: Arc<Supervisor>,
    /// How often its added memory has changed, over all boots.
    pub hotplug_changes: Changes,
    restarts: AtomicU64,
    booted: Mutex<Option<Arc<BootedVm>>>,
}

/// One boot of the guest: there from the moment that its memory and devices are.
#[derive(Debug)]
pub struct BootedVm {
    /// The counters and the map of its memory.
    pub view: FabricView,
    /// How its pages travelled at the start.
    pub transport: TransportUsed,
    /// The balloon, unless it is off.
    pub balloon: Option<Arc<Balloon>>,
    /// The memory that can be added, where the VM was started for that.
    pub hotplug: Option<HotplugMemory>,
    /// The machine, once its kernel is loaded, and how long everything until then took.
    machine: OnceLock<(MachineHandle, Duration)>,
}

impl Instance {
    /// A VM whose guest is not booted yet.
    pub fn new(
        name: String,
        started: Instant,
        host: Host,
        guest: Guest,
        config: RunConfig,
        supervisor: Arc<Supervisor>,
    ) -> Self {
        Self {
            name,
            started,
            host,
            guest,
            config,
            supervisor,
            hotplug_changes: Changes::default(),
            restarts: AtomicU64::new(0),
            booted: Mutex::new(None),
        }
    }

    /// This boot; refused as long as there is none.
    pub fn booted(&self) -> Result<Arc<BootedVm>, Refusal> {
        self.slot().clone().ok_or_else(starting)
    }

    /// Shows a boot to clients.
    pub fn set_booted(&self, booted: Arc<BootedVm>) {
        *self.slot() = Some(booted);
    }

    /// Forgets the boot that has ended. Returns how often the guest was restarted.
    pub fn restart(&self) -> u64 {
        *self.slot() = None;
        // Relaxed: a number to look at.
        self.restarts.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// How often the guest was restarted.
    pub fn restarts(&self) -> u64 {
        self.restarts.load(Ordering::Relaxed)
    }

    fn slot(&self) -> MutexGuard<'_, Option<Arc<BootedVm>>> {
        self.booted.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl BootedVm {
    /// A boot whose machine follows.
    pub fn new(
        view: FabricView,
        transport: TransportUsed,
        balloon: Option<Arc<Balloon>>,
        hotplug: Option<HotplugMemory>,
    ) -> Self {
        Self {
            view,
            transport,
            balloon,
            hotplug,
            machine: OnceLock::new(),
        }
    }

    /// Shows the machine, which was ready after this time.
    pub fn set_machine(&self, machine: MachineHandle, prepared: Duration) {
        // A boot has one machine.
        let _ = self.machine.set((machine, prepared));
    }

    /// The machine; refused until its kernel is loaded.
    pub fn machine(&self) -> Result<&MachineHandle, Refusal> {
        let (machine, _) = self.machine.get().ok_or_else(starting)?;
        Ok(machine)
    }

    /// From the start of the boot until the guest's init ran, in milliseconds.
    pub fn time_to_init_ms(&self) -> Option<f64> {
        let (machine, prepared) = self.machine.get()?;
        let time = machine.time_to_init()?;
        Some((*prepared + time).as_secs_f64() * 1e3)
    }
}

/// The refusal of what needs a guest that is there.
pub fn starting() -> Refusal {
    let text = "the VM is starting; try again";
    Refusal::new(RefusalCode::Starting, text)
}
