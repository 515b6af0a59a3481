//! Runs the thread of a vCPU.

pub(crate) mod affinity;
pub(crate) mod cpuid;
mod first_program;
pub(crate) mod machine_check;
mod memory_error;
pub(crate) mod model;
pub(crate) mod packages;
pub(crate) mod regs;
pub(crate) mod state;
pub(crate) mod state_error;
pub(crate) mod tsc;
#[cfg(test)]
mod xsave_tests;

use std::num::NonZeroU64;
use std::ops::ControlFlow;
use std::sync::{Arc, mpsc};
use std::thread;

use devices::BootTimer;
use fabric_host::{ThreadClass, begin_class};
use kvm_bindings::{CpuId, kvm_cpuid_entry2};
use kvm_ioctls::{VcpuExit, VcpuFd, VmFd};
use ssi_hv_nodes::NodeNumber;

use crate::error::MachineError;
use crate::irqchip::InterruptController;
use crate::irqchip::user::cpu::{Next as ForLocal, UserCpu};
use crate::kvm;
use crate::lifecycle::control::Next;
use crate::lifecycle::kick::{KickRegistration, unblock_kick_signal};
use crate::lifecycle::shared::Shared;
use crate::memory_errors;
use crate::nodes::seat::Seat;
use crate::outcome::Outcome;
use affinity::pin_this_thread;
use machine_check::{MachineCheck, Stopped};
use memory_error::Errors;
use state::VcpuState;

/// A vCPU that is ready to run.
#[derive(Debug)]
pub(crate) struct Vcpu {
    pub index: usize,
    /// The host CPU to which the thread is pinned; `None` without pinning.
    pub pinned_to: Option<u32>,
    pub fd: VcpuFd,
    /// The local APIC, if it is in user space.
    pub local: Option<UserCpu>,
    /// Its place on this node, if there are others.
    pub seat: Option<Arc<Seat>>,
    /// It is on another node, and its thread here waits for it.
    pub is_away: bool,
    /// Whom to tell that the guest runs a program, until then.
    pub first_program: Option<Arc<BootTimer>>,
    /// What this node has added to the offset of its time stamp counter.
    pub added: u64,
    /// The machine checks for memory that is lost, if the machine survives that.
    pub machine_check: Option<MachineCheck>,
    /// Memory errors since the guest last did something else.
    pub errors: Errors,
}

/// The consequence of an exit.
enum Step {
    Continue,
    /// The vCPU was interrupted at an instruction boundary, with its last exit complete.
    Boundary,
    End(Result<Outcome, MachineError>),
}

/// Whether a vCPU changes its node.
enum Moving {
    /// It is here, and stays.
    Stays,
    /// It is on its way, or away.
    Busy,
    /// The run has ended.
    Ends,
}

/// Counts a vCPU thread as ended when dropped, also by a panic.
struct EndGuard<'a> {
    shared: &'a Shared,
    vcpu: usize,
}

impl Drop for EndGuard<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            let vcpu = self.vcpu;
            self.shared
                .control
                .end(Err(MachineError::VcpuPanicked { vcpu }));
        }
        self.shared.control.vcpu_ended();
    }
}

impl Vcpu {
    /// Creates the vCPU with number `id`, in the state in which firmware leaves a CPU.
    pub fn create(
        vm: &VmFd,
        interrupts: &InterruptController,
        id: u8,
        cpuid: &[kvm_cpuid_entry2],
    ) -> Result<Self, MachineError> {
        let fd = vm
            .create_vcpu(u64::from(id))
            .map_err(MachineError::kvm("create a vCPU"))?;
        let cpuid = CpuId::from_entries(cpuid).map_err(|error| MachineError::Kvm {
            action: "take so many CPU features",
            source: std::io::Error::other(format!("{error:?}")),
        })?;
        fd.set_cpuid2(&cpuid)
            .map_err(MachineError::kvm("set the CPU features"))?;
        regs::set_firmware_state(&fd)?;
        let local = interrupts.set_up_cpu(&fd, id, cpuid.as_slice())?;
        Ok(Self {
            index: usize::from(id),
            pinned_to: None,
            fd,
            local,
            seat: None,
            is_away: false,
            first_program: None,
            added: 0,
            machine_check: None,
            errors: Errors::default(),
        })
    }

    /// Starts the thread that runs the vCPU, pinned as configured.
    pub fn spawn(self, shared: Arc<Shared>) -> Result<thread::JoinHandle<()>, MachineError> {
        let (vcpu, pinned_to) = (self.index, self.pinned_to);
        let (report, pinned) = mpsc::sync_channel(1);
        shared.control.vcpu_starts();
        let of_thread = Arc::clone(&shared);
        let thread = thread::Builder::new()
            .name(format!("vcpu{vcpu}"))
            .spawn(move || {
                let result = pinned_to.map_or(Ok(()), pin_this_thread);
                let is_pinned = result.is_ok();
                // The receiver exists: the starting thread waits for this result.
                let _ = report.send(result);
                if is_pinned {
                    self.run(&of_thread);
                } else {
                    of_thread.control.vcpu_ended();
                }
            })
            .inspect_err(|_| shared.control.vcpu_ended())
            .map_err(MachineError::host("start the thread of a vCPU"))?;
        match (pinned.recv(), pinned_to) {
            (Ok(Err(source)), Some(cpu)) => Err(MachineError::Pinning { vcpu, cpu, source }),
            _ => Ok(thread),
        }
    }

    fn run(mut self, shared: &Shared) {
        let _end_guard = EndGuard {
            shared,
            vcpu: self.index,
        };
        begin_class(ThreadClass::Vcpu);
        unblock_kick_signal();
        let kicks = match shared.control.kicks()[self.index].register(&self.fd) {
            Ok(kicks) => kicks,
            Err(error) => {
                let error = MachineError::host("map the state of a vCPU")(error);
                return shared.control.end(Err(error));
            }
        };
        if let Some(local) = &mut self.local {
            sleep_exactly();
            if self.seat.is_some() {
                local.pace_timer();
            }
        }
        if self.machine_check.is_some() {
            memory_errors::unblock();
        }
        while self.step(shared, &kicks).is_continue() {}
    }

    /// Does what is next: waits, sleeps, or enters the guest and handles the exit. Breaks when the run
    /// has ended.
    fn step(&mut self, shared: &Shared, kicks: &KickRegistration<'_>) -> ControlFlow<()> {
        kicks.rearm();
        match shared.control.checkpoint() {
            Next::Run => {}
            Next::Resume => {
                // Reports the pause to the guest, so that its watchdogs do not fire. EINVAL if the
                // guest does not use kvmclock.
                let _ = self.fd.kvmclock_ctrl();
            }
            Next::Exit => return ControlFlow::Break(()),
        }
        match self.change_node(shared, kicks) {
            Ok(Moving::Stays) => {}
            Ok(Moving::Busy) => return ControlFlow::Continue(()),
            Ok(Moving::Ends) => return ControlFlow::Break(()),
            Err(error) => {
                shared.control.end(Err(error));
                return ControlFlow::Break(());
            }
        }
        if let Some(local) = &mut self.local {
            match local.prepare(&mut self.fd, kicks) {
                Ok(ForLocal::Enter) => {}
                Ok(ForLocal::Sleep(limit)) => {
                    if let Some(seat) = &self.seat {
                        seat.nodes().halted();
                    }
                    kicks.sleep(limit);
                    return ControlFlow::Continue(());
                }
                Ok(ForLocal::SleepOffline) => {
                    kicks.sleep_offline();
                    return ControlFlow::Continue(());
                }
                Err(error) => {
                    shared.control.end(Err(error));
                    return ControlFlow::Break(());
                }
            }
        }
        match self.enter(shared) {
            Step::End(end) => {
                shared.control.end(end);
                return ControlFlow::Break(());
            }
            Step::Boundary => self.look_for_program(),
            Step::Continue => {}
        }
        ControlFlow::Continue(())
    }

    /// Waits for the vCPU if it is on another node, gives it the time of this one, and gives it away if
    /// that was ordered.
    fn change_node(
        &mut self,
        shared: &Shared,
        kicks: &KickRegistration<'_>,
    ) -> Result<Moving, MachineError> {
        let Some(seat) = self.seat.clone() else {
            return Ok(Moving::Stays);
        };
        // None while the time of this node changes, which ends with a kick.
        let Some(added) = seat.time().difference() else {
            kicks.sleep(None);
            return Ok(Moving::Busy);
        };
        let behind = added.wrapping_sub(std::mem::replace(&mut self.added, added));
        if self.is_away {
            match seat.arrived() {
                Some(bytes) => self.arrive(&seat, &bytes)?,
                None => kicks.sleep_away(),
            }
            return Ok(Moving::Busy);
        }
        if behind != 0 {
            tsc::add_ticks(&self.fd, behind)?;
        }
        let Some(to) = seat.ordered() else {
            return Ok(Moving::Stays);
        };
        match self.finish_exit(shared) {
            ControlFlow::Continue(true) => self.leave(&seat, to, kicks)?,
            ControlFlow::Continue(false) => {}
            ControlFlow::Break(()) => return Ok(Moving::Ends),
        }
        Ok(Moving::Busy)
    }

    /// Takes the vCPU from another node.
    fn arrive(&mut self, seat: &Seat, bytes: &[u8]) -> Result<(), MachineError> {
        let Some(local) = &mut self.local else {
            return Ok(());
        };
        let cpu = local.number();
        let state = VcpuState::decode(cpu, bytes)
            .map_err(|source| MachineError::VcpuState { cpu, source })?;
        state.install(&mut self.fd, local, seat.host(), self.added)?;
        self.is_away = false;
        seat.nodes().arrived(cpu);
        Ok(())
    }

    /// Gives the vCPU, which is at an instruction boundary, to another node.
    fn leave(
        &mut self,
        seat: &Seat,
        to: NodeNumber,
        kicks: &KickRegistration<'_>,
    ) -> Result<(), MachineError> {
        let Some(local) = &mut self.local else {
            return Ok(());
        };
        let (cpu, fd, added) = (local.number(), &self.fd, self.added);
        // Before the state leaves, so that an order for its way back is not lost.
        let is_away = &mut self.is_away;
        let state = || {
            seat.left();
            *is_away = true;
            VcpuState::save(fd, local, seat.host(), added).map(|state| state.encode())
        };
        // Without an answer of a node the run ends, which the caller notices.
        seat.nodes().give_away(cpu, to, state)?;
        if self.is_away
            && let Some(local) = &mut self.local
        {
            local.stop_alarm(kicks)?;
        }
        Ok(())
    }

    /// Completes the last exit, and handles those that follow from it, without running the guest on.
    /// Returns whether the vCPU is at an instruction boundary, and breaks when the run has ended.
    fn finish_exit(&mut self, shared: &Shared) -> ControlFlow<(), bool> {
        if let Some(local) = &self.local {
            local.write_run_page(&mut self.fd);
        }
        self.fd.set_kvm_immediate_exit(1);
        match self.enter(shared) {
            Step::Boundary => ControlFlow::Continue(true),
            Step::Continue => ControlFlow::Continue(false),
            Step::End(end) => {
                shared.control.end(end);
                ControlFlow::Break(())
            }
        }
    }

    /// Enters the guest and handles the exit.
    fn enter(&mut self, shared: &Shared) -> Step {
        let ((mut exit, fields), error) = memory_errors::while_inside(|| kvm::enter(&mut self.fd));
        if let Some(address) = error {
            // KVM left the guest before the access, which is no exit to be handled.
            if let Some(local) = &mut self.local {
                local.left_guest(fields.at_exit());
            }
            return self.memory_error(shared, address);
        }
        if let Some(local) = &mut self.local {
            local.left_guest(fields.at_exit());
            exit = match exit.map(|exit| local.handle(exit)) {
                Ok(None) => return Step::Continue,
                Ok(Some(exit)) => Ok(exit),
                Err(error) => Err(error),
            };
        }
        match exit {
            Ok(VcpuExit::IoOut(port, data)) => {
                for item in data.chunks(fields.port_item_bytes()) {
                    shared.ports.write(u64::from(port), item);
                }
                // A guest that has powered off must not continue.
                match shared.events.get() {
                    Some(event) => Step::End(Ok(event.into())),
                    None => Step::Continue,
                }
            }
            Ok(VcpuExit::IoIn(port, data)) => {
                for item in data.chunks_mut(fields.port_item_bytes()) {
                    shared.ports.read(u64::from(port), item);
                }
                Step::Continue
            }
            // A KVM without hardware takes poisoned memory for that of a device. It completes the
            // access before it delivers anything.
            Ok(VcpuExit::MmioRead(address, _) | VcpuExit::MmioWrite(address, _))
                if self.machine_check.is_some() && shared.is_memory(address) =>
            {
                self.lost_page(shared, address, Stopped::Inside)
            }
            Ok(VcpuExit::MmioRead(address, data)) => {
                shared.mmio.read(address, data);
                Step::Continue
            }
            Ok(VcpuExit::MmioWrite(address, data)) => {
                shared.mmio.write(address, data);
                Step::Continue
            }
            Ok(VcpuExit::Intr) => Step::Boundary,
            Ok(VcpuExit::IrqWindowOpen) => Step::Continue,
            // On AMD CPUs KVM has already reset the vCPU, and reports the reset vector 0xfff0.
            Ok(VcpuExit::Shutdown) => self.crash("triple fault"),
            Ok(VcpuExit::InternalError) => {
                let what = internal_error(fields.internal_error());
                self.crash(&what)
            }
            Ok(VcpuExit::FailEntry(reason, cpu)) => self.crash(&format!(
                "failed entry with hardware reason {reason:#x} on host CPU {cpu}"
            )),
            Ok(VcpuExit::SystemEvent(kind, _)) => self.crash(&format!("system event {kind}")),
            Ok(exit) => {
                let what = format!("exit that this machine does not handle ({exit:?})");
                self.crash(&what)
            }
            // EAGAIN: a vCPU in KVM that waited for its start-up message has received it.
            Err(error) if error.errno() == libc::EAGAIN => Step::Continue,
            // KVM completes the last exit before it looks for a signal.
            Err(error) if error.errno() == libc::EINTR => Step::Boundary,
            Err(error) => Step::End(Err(MachineError::VcpuRun {
                vcpu: self.index,
                rip: self.rip(),
                source: error.into(),
            })),
        }
    }

    fn crash(&self, what: &str) -> Step {
        Step::End(Ok(Outcome::Crash(format!(
            "{what} on vCPU {} at rip {:#x}",
            self.index,
            self.rip()
        ))))
    }

    /// Returns the instruction pointer, or 0 if KVM does not report it.
    fn rip(&self) -> u64 {
        self.fd.get_regs().map_or(0, |regs| regs.rip)
    }
}

/// Sets the calling thread's timer slack to the minimum: by default the kernel adds up to 50 us to
/// a sleep, to merge wake-ups.
fn sleep_exactly() {
    if let Err(error) = rustix::thread::set_current_timer_slack(NonZeroU64::new(1)) {
        tracing::debug!(%error, "sleeps of a vCPU may take longer");
    }
}

/// Names an internal error of KVM (linux/kvm.h, KVM_INTERNAL_ERROR_*).
fn internal_error(code: Option<u32>) -> String {
    let name = match code {
        Some(1) => "an instruction that it cannot emulate",
        Some(2) => "several exceptions at once",
        Some(3) => "a fault while delivering an event",
        Some(4) => "an exit for a reason unknown to it",
        _ => "unknown reason",
    };
    let code = code.unwrap_or_default();
    format!("internal error of kvm, suberror {code} ({name})")
}
