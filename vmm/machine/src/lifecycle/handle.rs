//! Controls a running machine.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use devices::virtio::VirtioDevice;
use devices::{BootEvent, BootTimer, PmRegisters};

use crate::error::MachineError;
use crate::lifecycle::kick::VcpuThread;
use crate::lifecycle::shared::Shared;
use crate::nodes::{MoveError, Mover};
use crate::outcome::Outcome;

/// Controls a machine from any thread, also after its end.
#[derive(Clone, Debug)]
pub struct MachineHandle {
    pub(crate) shared: Arc<Shared>,
    pub(crate) boot_timer: Arc<BootTimer>,
    pub(crate) power: Arc<PmRegisters>,
    /// Moves vCPUs to other nodes, if there are any.
    pub(crate) mover: Option<Arc<Mover>>,
}

impl MachineHandle {
    /// Ends the run with [`Outcome::Stopped`], unless it has ended. Does not wait.
    pub fn stop(&self) {
        self.shared.control.end(Ok(Outcome::Stopped));
    }

    /// Ends the run, unless it has ended, because the pager of the guest's memory has failed. Does
    /// not wait.
    pub fn fail(&self, reason: String) {
        let error = MachineError::SharedMemory { node: None, reason };
        self.shared.control.end(Err(error));
    }

    /// Returns whether the guest has ended the run by itself.
    #[must_use]
    pub fn was_ended_by_guest(&self) -> bool {
        self.shared.control.was_ended_by_guest()
    }

    /// Requests that all vCPUs leave the guest and wait, and that devices are no longer served.
    /// Does not wait: a thread blocked on a page stays blocked until the page is served.
    pub fn pause(&self) {
        self.shared.control.pause();
    }

    /// Waits up to `limit` until a requested pause has reached every vCPU and device. Returns false
    /// if it has not, or if no pause was requested.
    pub fn wait_until_paused(&self, limit: Duration) -> bool {
        self.shared.control.wait_paused(limit)
    }

    /// Lets the vCPUs run again. The guest's kernel is notified of the pause, so that its watchdogs
    /// do not fire.
    pub fn resume(&self) {
        self.shared.control.resume();
    }

    /// Presses the power button. Returns false if the guest has not enabled it, so that pressing
    /// has no effect.
    pub fn press_power_button(&self) -> bool {
        self.power.press_power_button()
    }

    /// Changes this device's configuration and notifies the guest's driver. Without effect when the
    /// machine has no such device.
    pub fn change_config(&self, device: &dyn VirtioDevice, change: impl FnOnce()) {
        let mut transports = self.shared.transports.iter();
        let its = transports.find(|one| one.device().device_id() == device.device_id());
        if let Some(transport) = its {
            transport.change_config(change);
        }
    }

    /// Returns whether no thread of a vCPU or a device accesses the guest's memory any longer.
    /// False after a run whose end left a thread behind that still waits for a page or its disk.
    pub fn all_vcpus_ended(&self) -> bool {
        self.shared.control.wait_all_ended(Duration::ZERO)
    }

    /// Returns the threads of the vCPUs of this node that run.
    pub fn vcpu_threads(&self) -> Vec<VcpuThread> {
        self.shared.vcpu_threads()
    }

    /// Returns the number of machine checks that the guest got for lost memory.
    pub fn machine_checks(&self) -> u64 {
        let errors = self.shared.memory_errors.as_ref();
        // Relaxed: a number for reports.
        errors.map_or(0, |errors| errors.machine_checks.load(Ordering::Relaxed))
    }

    /// Moves a vCPU to the node with this number, and waits until it runs there. Without effect if it
    /// is there already.
    ///
    /// # Errors
    ///
    /// When there is no such vCPU or node, the node lends no further CPU, or the vCPU is not there
    /// within [`MOVE_TIME_MAX`](crate::MOVE_TIME_MAX).
    pub fn move_vcpu(&self, cpu: u32, node: u32) -> Result<(), MoveError> {
        let mover = self.mover.as_ref().ok_or(MoveError::OneNode)?;
        if self.shared.control.is_paused() {
            return Err(MoveError::Paused);
        }
        mover.move_vcpu(cpu, node)
    }

    /// Returns the node that each vCPU is on, or moves to; `None` if there is one node.
    pub fn vcpu_nodes(&self) -> Option<Vec<u8>> {
        self.mover.as_ref().map(|mover| mover.owners())
    }

    /// Returns whether a device is in a system call, for which the end of the run waits.
    pub fn devices_at_work(&self) -> bool {
        self.shared.devices_at_work()
    }

    /// Returns the time from the start of the run to the guest's init, once the guest has reported
    /// it by writing [`devices::BOOT_TIMER_INIT_REACHED`] to port [`devices::BOOT_TIMER_PORT`].
    pub fn time_to_init(&self) -> Option<Duration> {
        self.boot_timer.to_init()
    }

    /// Returns whether this event of the guest's boot has happened.
    pub fn has_happened(&self, event: BootEvent) -> bool {
        self.boot_timer.has_happened(event)
    }
}
