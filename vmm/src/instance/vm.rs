//! A running VM, as its routes and its report see it. It provides no access to guest memory.

use std::io;
use std::mem;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use devices::virtio::{Balloon, RateLimiter};
use fabric_identity::SharedCredentials;
use memory_fabric::view::FabricView;

use super::drains::VmDrains;
use super::hotplug::HotplugMemory;
use super::seen::{NodesSeen, Reported};
use super::supervisor::Supervisor;
use crate::config::RunConfig;
use crate::control_socket::changes::Changes;
use crate::control_socket::protocol::{Refusal, RefusalCode};
use crate::credentials::{self, DailyWarning};
use crate::machine::MachineHandle;
use crate::membership::Members;
use crate::report::{Guest, Host, TransportUsed};
use crate::status::ClusterNow;

/// A VM from the start of its process to the end, over all boots of its guest.
#[derive(Debug)]
pub struct Instance {
    /// Its name for donors and clients.
    pub name: String,
    /// Start time of its process.
    pub started: Instant,
    /// The host it runs on.
    pub host: Host,
    /// The configured guest.
    pub guest: Guest,
    /// Its configuration.
    pub config: RunConfig,
    /// Pauses, resumes and ends it.
    pub supervisor: Arc<Supervisor>,
    /// Counts the changes of its added memory, over all boots.
    pub hotplug_changes: Changes,
    /// What this boot shows to nodes, and what warns before it expires.
    shown: Mutex<Option<(Arc<SharedCredentials>, DailyWarning)>>,
    /// Where its donors come from, if that is an etcd.
    cluster: OnceLock<Arc<Members>>,
    restarts: AtomicU64,
    booted: Mutex<Option<Arc<BootedVm>>>,
}

/// One boot of the guest, from the creation of its memory and devices.
#[derive(Debug)]
pub struct BootedVm {
    /// The counters and the map of its memory.
    pub view: FabricView,
    /// Its transports at the start.
    pub transport: TransportUsed,
    /// The balloon, unless it is off.
    pub balloon: Option<Arc<Balloon>>,
    /// The added memory, if the VM is configured for it.
    pub hotplug: Option<HotplugMemory>,
    /// Drains its donors, if they can be drained.
    pub drains: Option<VmDrains>,
    /// The compute nodes, if vCPUs are on several.
    pub nodes: Option<Arc<NodesSeen>>,
    /// The limiters of devices with limits.
    pub limiters: Vec<Arc<RateLimiter>>,
    /// The machine, once its kernel is loaded, and the time of all preparations.
    machine: OnceLock<(MachineHandle, Duration)>,
}

impl Instance {
    /// Creates a VM whose guest is not booted yet.
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
            shown: Mutex::new(None),
            cluster: OnceLock::new(),
            restarts: AtomicU64::new(0),
            booted: Mutex::new(None),
        }
    }

    /// Returns the current boot, or a refusal if there is none.
    pub fn booted(&self) -> Result<Arc<BootedVm>, Refusal> {
        self.slot().clone().ok_or_else(starting)
    }

    /// Publishes a boot.
    pub fn set_booted(&self, booted: Arc<BootedVm>) {
        *self.slot() = Some(booted);
    }

    /// Notes what the VM shows to nodes in this boot, and warns on each day on which it expires soon.
    ///
    /// # Errors
    ///
    /// Fails when the host has no thread left.
    pub fn note_credentials(&self, shown: &Arc<SharedCredentials>) -> io::Result<()> {
        let warning = DailyWarning::start(Arc::clone(shown))?;
        let now = Some((Arc::clone(shown), warning));
        let before = mem::replace(&mut *self.shown(), now);
        // Its thread ends, with nothing locked.
        drop(before);
        Ok(())
    }

    /// Notes where the VM's donors come from.
    pub fn note_cluster(&self, members: &Arc<Members>) {
        // A VM begins once.
        let _ = self.cluster.set(Arc::clone(members));
    }

    /// Returns what is known of the cluster, if donors come from an etcd.
    pub fn cluster(&self) -> Option<ClusterNow> {
        let watched = self.cluster.get()?.now()?;
        Some(ClusterNow {
            connected: watched.is_connected,
            since_s: watched.since.elapsed().as_secs_f64(),
            nodes: u64::try_from(watched.found.members.len()).unwrap_or(u64::MAX),
            error: watched.error,
        })
    }

    /// Returns when the certificate expires that is in use; `None` without credentials.
    pub fn certificate_not_after(&self) -> Option<i64> {
        let shown = self.shown();
        let (shown, _) = shown.as_ref()?;
        Some(credentials::not_after(shown))
    }

    fn shown(&self) -> MutexGuard<'_, Option<(Arc<SharedCredentials>, DailyWarning)>> {
        self.shown.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Removes the boot that has ended. Returns the number of restarts.
    pub fn restart(&self) -> u64 {
        *self.slot() = None;
        // Relaxed: only for display.
        self.restarts.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Returns the number of restarts of the guest.
    pub fn restarts(&self) -> u64 {
        self.restarts.load(Ordering::Relaxed)
    }

    fn slot(&self) -> MutexGuard<'_, Option<Arc<BootedVm>>> {
        self.booted.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl BootedVm {
    /// Creates a boot whose machine follows.
    pub fn new(
        view: FabricView,
        transport: TransportUsed,
        balloon: Option<Arc<Balloon>>,
        hotplug: Option<HotplugMemory>,
        drains: Option<VmDrains>,
        nodes: Option<Arc<NodesSeen>>,
        limiters: &[Arc<RateLimiter>],
    ) -> Self {
        Self {
            nodes,
            limiters: limiters.to_vec(),
            view,
            transport,
            balloon,
            hotplug,
            drains,
            machine: OnceLock::new(),
        }
    }

    /// Publishes the machine, with the time of its preparation.
    pub fn set_machine(&self, machine: MachineHandle, prepared: Duration) {
        // A boot has one machine.
        let _ = self.machine.set((machine, prepared));
    }

    /// Returns the machine, or a refusal until its kernel is loaded.
    pub fn machine(&self) -> Result<&MachineHandle, Refusal> {
        let (machine, _) = self.machine.get().ok_or_else(starting)?;
        Ok(machine)
    }

    /// Returns what the compute nodes do, if vCPUs are on several.
    pub fn reported(&self, is_paused: bool) -> Option<Reported> {
        let machine = self.machine.get().map(|(machine, _)| machine);
        Some(self.nodes.as_ref()?.now(machine, is_paused))
    }

    /// Returns the number of machine checks that the guest got for lost memory.
    pub fn machine_checks(&self) -> u64 {
        self.machine
            .get()
            .map_or(0, |(machine, _)| machine.machine_checks())
    }

    /// Returns the time from the start of the boot until the guest's init ran, in milliseconds.
    pub fn time_to_init_ms(&self) -> Option<f64> {
        let (machine, prepared) = self.machine.get()?;
        let time = machine.time_to_init()?;
        Some((*prepared + time).as_secs_f64() * 1e3)
    }
}

/// Returns the refusal of requests that need a booted guest.
pub fn starting() -> Refusal {
    let text = "the VM is starting; try again";
    Refusal::new(RefusalCode::Starting, text)
}
