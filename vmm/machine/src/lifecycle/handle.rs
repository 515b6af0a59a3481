//! Acting on a machine that runs.

use std::sync::Arc;
use std::time::Duration;

use devices::virtio::VirtioDevice;
use devices::{BootTimer, PmRegisters};

use crate::error::MachineError;
use crate::lifecycle::shared::Shared;
use crate::outcome::Outcome;

/// Acts on a machine from any thread, also after its end.
#[derive(Clone, Debug)]
pub struct MachineHandle {
    pub(crate) shared: Arc<Shared>,
    pub(crate) boot_timer: Arc<BootTimer>,
    pub(crate) power: Arc<PmRegisters>,
}

impl MachineHandle {
    /// Ends the run with [`Outcome::Stopped`], unless it has ended. Does not wait.
    pub fn stop(&self) {
        self.shared.control.end(Ok(Outcome::Stopped));
    }

    /// Ends the run, unless it has ended, because what serves the guest's memory has failed. Does not
    /// wait.
    pub fn fail(&self, reason: String) {
        let error = MachineError::SharedMemory { reason };
        self.shared.control.end(Err(error));
    }

    /// Asks all vCPUs to leave the guest and wait, and devices to stop being served. Does not wait for
    /// them: a thread blocked on a page stays blocked until the page is served.
    pub fn pause(&self) {
        self.shared.control.pause();
    }

    /// Waits up to `limit` until a pause that was asked for has reached every vCPU and device;
    /// false when it has not, or when none was asked for.
    pub fn wait_until_paused(&self, limit: Duration) -> bool {
        self.shared.control.wait_paused(limit)
    }

    /// Lets the vCPUs run again. The guest's kernel learns of the pause, so that its watchdogs do not fire.
    pub fn resume(&self) {
        self.shared.control.resume();
    }

    /// Presses the power button. False when the guest has not enabled it, so that pressing
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

    /// Whether no thread, of a vCPU or of devices, touches the guest's memory any more. False
    /// after a run whose end had to leave one behind: that thread still waits for a page, or for its disk.
    pub fn all_vcpus_ended(&self) -> bool {
        self.shared.control.wait_all_ended(Duration::ZERO)
    }

    /// Whether a device is in a call of the host, which the end of the run waits for.
    pub fn devices_at_work(&self) -> bool {
        self.shared.devices_at_work()
    }

    /// The time from the start of the run to the guest's init, once the guest has reported it by
    /// writing [`devices::BOOT_TIMER_INIT_REACHED`] to port [`devices::BOOT_TIMER_PORT`].
    pub fn time_to_init(&self) -> Option<Duration> {
        self.boot_timer.to_init()
    }
}
