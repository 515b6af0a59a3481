//! The interrupt side of a vCPU whose local APIC is in user space.
//!
//! Before each entry into the guest [`UserCpu::prepare`] receives posted events, runs the timer,
//! and queues at most one interrupt in KVM, or requests an exit when the guest can take one. After
//! each exit [`UserCpu::left_guest`] records what the guest changed without an exit: CR8 and the
//! mode of the local APIC.

use std::sync::Arc;
use std::time::Duration;

use kvm_bindings::KVM_MSR_EXIT_REASON_INVAL;
use kvm_ioctls::{VcpuExit, VcpuFd};
use rustix::time::{ClockId, clock_gettime};
use ssi_hv_irqchip::{
    Effect, InvalidState, LocalApic, LocalApicState, Mode, PAGE_LEN, Posted, Routing,
};

use super::pace::{Due, Pace};
use super::{UserChip, new_local_apic, registers};
use crate::error::MachineError;
use crate::kvm::{self, AtExit};
use crate::layout::LOCAL_APIC_START;
use crate::lifecycle::kick::KickRegistration;

/// IA32_APIC_BASE: the boot processor flag, and the enable flag.
const BASE_BSP: u64 = 1 << 8;
const BASE_ENABLED: u64 = 1 << 11;

/// Limit of attempts to finish an exit before INIT. An access that crosses pages needs two, and a
/// repeated instruction one for each element until KVM looks for interrupts again, after 1024.
const FINISHES_MAX: u32 = 4096;

/// The activity state of a vCPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Activity {
    #[default]
    Runs,
    /// After HLT, until an interrupt.
    Halted,
    /// After INIT, until a start-up message.
    WaitsForStartup,
}

/// The next action of a vCPU's thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// Enter the guest.
    Enter,
    /// Sleep until a kick, with this limit.
    Sleep(Option<Duration>),
    /// Sleep until a kick, before the start-up message.
    SleepOffline,
}

/// The interrupt side of a vCPU as it moves to another host.
#[derive(Clone, Debug, Default)]
pub(crate) struct LocalState {
    pub activity: Activity,
    pub at_exit: AtExit,
    pub apic: LocalApicState,
    /// Events that were posted and not received.
    pub posted: Posted,
}

/// The local APIC of one vCPU, with the state that connects it to KVM.
#[derive(Debug)]
pub(crate) struct UserCpu {
    index: usize,
    chip: Arc<UserChip>,
    apic: LocalApic,
    published: Routing,
    activity: Activity,
    at_exit: AtExit,
    /// Processor signature: EAX of CPUID leaf 1.
    signature: u32,
    /// The time for which the alarm is set, to avoid setting it again.
    alarm: Option<u64>,
    /// Events that came with the vCPU from another host, which are older than those in its inbox.
    brought: Option<Posted>,
    /// When the timer's interrupt may come, if handlers may wait for the pages of other nodes.
    pace: Option<Pace>,
}

/// Returns nanoseconds of the host's monotonic clock.
fn now() -> u64 {
    let time = clock_gettime(ClockId::Monotonic);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    seconds * 1_000_000_000 + u64::try_from(time.tv_nsec).unwrap_or(0)
}

impl UserCpu {
    /// Creates the local APIC of the new vCPU `index`. All vCPUs except the boot processor wait for
    /// a start-up message.
    pub fn new(
        index: u8,
        chip: Arc<UserChip>,
        vcpu: &VcpuFd,
        signature: u32,
    ) -> Result<Self, MachineError> {
        let is_boot_processor = index == 0;
        let flags = if is_boot_processor { BASE_BSP } else { 0 };
        let apic_base = u64::from(LOCAL_APIC_START) | BASE_ENABLED | flags;
        registers::set_apic_base(vcpu, apic_base)?;
        let apic = new_local_apic(index);
        // As every node has it until a CPU changes it, so that it is not published: a vCPU that comes
        // from another node may have changed it.
        let published = apic.routing();
        Ok(Self {
            index: index.into(),
            chip,
            apic,
            published,
            activity: if is_boot_processor {
                Activity::Runs
            } else {
                Activity::WaitsForStartup
            },
            at_exit: AtExit {
                apic_base,
                ..AtExit::default()
            },
            signature,
            alarm: None,
            brought: None,
            pace: None,
        })
    }

    /// The vCPU shares its memory with those of other nodes: the program that it runs gets time between
    /// two interrupts of its timer.
    pub fn pace_timer(&mut self) {
        self.pace = Some(Pace::default());
    }

    /// Returns the number of the vCPU.
    pub fn number(&self) -> u8 {
        u8::try_from(self.index).unwrap_or(u8::MAX)
    }

    /// Takes the state of the vCPU, with all events that were posted to it.
    pub fn save(&mut self) -> LocalState {
        let inbox = &self.chip.inboxes[self.index].inbox;
        let posted = match (self.brought.take(), inbox.take()) {
            (None, None) => Posted::default(),
            (Some(posted), None) | (None, Some(posted)) => posted,
            (Some(older), Some(newer)) => older.then(newer),
        };
        LocalState {
            activity: self.activity,
            at_exit: self.at_exit,
            apic: self.apic.save(now()),
            posted,
        }
    }

    /// Continues from a state that was saved `passed` ago. Other nodes know its routing.
    pub fn restore(&mut self, state: &LocalState, passed: Duration) -> Result<(), InvalidState> {
        let since = now().saturating_sub(u64::try_from(passed.as_nanos()).unwrap_or(u64::MAX));
        self.apic = LocalApic::restore(&state.apic, since)?;
        self.activity = state.activity;
        self.at_exit = state.at_exit;
        self.brought = (state.posted != Posted::default()).then_some(state.posted);
        // What its handler took while it was elsewhere is not known here.
        self.pace = self.pace.take().map(|_| Pace::default());
        self.published = self.apic.routing();
        self.chip.publish(self.index, self.published);
        Ok(())
    }

    /// Stops the timer of a vCPU that has left.
    pub fn stop_alarm(&mut self, kicks: &KickRegistration<'_>) -> Result<(), MachineError> {
        self.alarm = None;
        kicks
            .set_alarm(None)
            .map_err(MachineError::host("set the timer of a vCPU"))
    }

    /// Sets the fields of `kvm_run` that KVM takes at the next entry, whatever the vCPU left there.
    pub fn write_run_page(&self, vcpu: &mut VcpuFd) {
        let run = vcpu.get_kvm_run();
        run.cr8 = u64::from(self.apic.task_priority() >> 4);
        run.request_interrupt_window = 0;
    }

    /// Prepares the next entry into the guest, or returns how long to sleep.
    pub fn prepare(
        &mut self,
        vcpu: &mut VcpuFd,
        kicks: &KickRegistration<'_>,
    ) -> Result<Next, MachineError> {
        if let Some(posted) = self.brought.take() {
            self.receive(&posted, vcpu)?;
        }
        if let Some(posted) = self.chip.inboxes[self.index].inbox.take() {
            self.receive(&posted, vcpu)?;
        }
        if self.activity == Activity::WaitsForStartup {
            return Ok(Next::SleepOffline);
        }
        let (mut left, mut due) = (None, Due::Now);
        if let Some(deadline) = self.apic.deadline() {
            let now = now();
            if deadline <= now {
                due = self.due(now);
                if due == Due::Now {
                    self.apic.run_timer(now);
                }
            }
            left = self.apic.deadline().map(|at| at.saturating_sub(now));
        }
        if self.activity == Activity::Halted {
            if self.apic.pending().is_none() || !self.at_exit.interrupts_enabled {
                return Ok(Next::Sleep(left.map(Duration::from_nanos)));
            }
            self.activity = Activity::Runs;
        }
        if self.at_exit.ready_for_interrupt
            && self.at_exit.interrupts_enabled
            && let Some(vector) = self.apic.acknowledge()
        {
            kvm::interrupt(vcpu, vector)
                .map_err(MachineError::host("queue an interrupt of a vCPU"))?;
            if let Some(pace) = &mut self.pace {
                pace.gives(now);
            }
            // KVM holds one interrupt at a time, and reports at the next exit whether it accepts
            // another.
            self.at_exit.ready_for_interrupt = false;
        }
        let run = vcpu.get_kvm_run();
        let is_awaited = self.apic.pending().is_some() || due == Due::WhenEnabled;
        run.request_interrupt_window = u8::from(is_awaited);
        run.cr8 = u64::from(self.apic.task_priority() >> 4);
        let deadline = match due {
            Due::Now => self.apic.deadline(),
            Due::At(at) => Some(at),
            Due::WhenEnabled => None,
        };
        if self.alarm != deadline {
            kicks
                .set_alarm(deadline)
                .map_err(MachineError::host("set the timer of a vCPU"))?;
            self.alarm = deadline;
        }
        Ok(Next::Enter)
    }

    /// Whether an interrupt of the timer, which is due, is raised.
    fn due(&mut self, now: u64) -> Due {
        let Some(pace) = &mut self.pace else {
            return Due::Now;
        };
        if self.activity == Activity::Halted {
            pace.halts();
        }
        pace.due(now, self.at_exit.interrupts_enabled)
    }

    /// Receives events posted to this CPU.
    fn receive(&mut self, posted: &Posted, vcpu: &mut VcpuFd) -> Result<(), MachineError> {
        if posted.init {
            self.init(vcpu)?;
        }
        if let Some(page) = posted.startup
            && self.activity == Activity::WaitsForStartup
        {
            registers::start_up(vcpu, page)?;
            self.activity = Activity::Runs;
        }
        // A CPU that waits for a start-up message has no NMI handler yet.
        if posted.nmi && self.activity != Activity::WaitsForStartup {
            vcpu.nmi()
                .map_err(MachineError::kvm("queue an NMI of a vCPU"))?;
            self.activity = Activity::Runs;
        }
        self.apic.accept_posted(posted);
        Ok(())
    }

    fn init(&mut self, vcpu: &mut VcpuFd) -> Result<(), MachineError> {
        // KVM completes the last exit at its next entry. Without this it would complete it after
        // the registers are reset, and skip the first instruction.
        for _ in 0..FINISHES_MAX {
            vcpu.set_kvm_immediate_exit(1);
            match vcpu.run() {
                Err(error) if error.errno() == libc::EINTR => break,
                Ok(_) => {}
                Err(error) => return Err(MachineError::kvm("finish an exit")(error)),
            }
        }
        registers::init(vcpu, self.signature)?;
        self.apic.reset();
        self.update_routing();
        let run = vcpu.get_kvm_run();
        run.cr8 = 0;
        run.request_interrupt_window = 0;
        self.at_exit = AtExit {
            apic_base: self.at_exit.apic_base,
            ..AtExit::default()
        };
        // The boot processor restarts at the reset vector instead.
        if self.at_exit.apic_base & BASE_BSP == 0 {
            self.activity = Activity::WaitsForStartup;
        } else {
            self.activity = Activity::Runs;
        }
        Ok(())
    }

    /// Records what the guest changed while it ran.
    pub fn left_guest(&mut self, at_exit: AtExit) {
        self.apic.set_cr8(at_exit.cr8.to_le_bytes()[0]);
        if at_exit.apic_base != self.at_exit.apic_base {
            self.apic.set_mode(Mode::of_base(at_exit.apic_base));
            self.update_routing();
        }
        self.at_exit = at_exit;
    }

    fn update_routing(&mut self) {
        let routing = self.apic.routing();
        if routing != self.published {
            self.published = routing;
            self.chip.announce(self.index, routing);
        }
    }

    fn follow(&mut self, effect: Effect) {
        match effect {
            Effect::None => self.update_routing(),
            Effect::Send(message) => self.chip.send(&message, Some(self.index)),
            Effect::EndOfInterrupt(vector) => self.chip.end_of_interrupt(vector),
        }
    }

    /// Records that the guest executed HLT.
    fn halt(&mut self) {
        self.activity = Activity::Halted;
    }

    /// Returns the offset of an address in the register page, if it is in that page and the page is
    /// enabled.
    fn page_offset(&self, address: u64) -> Option<u64> {
        let start = self.at_exit.apic_base & !(PAGE_LEN - 1) & 0xf_ffff_ffff_ffff;
        let offset = address.checked_sub(start)?;
        (offset < PAGE_LEN && self.apic.mode() == Mode::XApic).then_some(offset)
    }

    /// Handles an exit of the local APIC; returns any other exit to the caller.
    pub fn handle<'a>(&mut self, exit: VcpuExit<'a>) -> Option<VcpuExit<'a>> {
        let is_invalid =
            |reason: kvm_ioctls::MsrExitReason| reason.bits() & KVM_MSR_EXIT_REASON_INVAL != 0;
        match exit {
            VcpuExit::Hlt => self.halt(),
            // The new value was recorded by `left_guest`.
            VcpuExit::SetTpr => {}
            VcpuExit::MmioRead(address, data) => match self.page_offset(address) {
                Some(offset) => self.apic.read_page(offset, data, now()),
                None => return Some(VcpuExit::MmioRead(address, data)),
            },
            VcpuExit::MmioWrite(address, data) => match self.page_offset(address) {
                Some(offset) => {
                    let effect = self.apic.write_page(offset, data, now());
                    self.follow(effect);
                }
                None => return Some(VcpuExit::MmioWrite(address, data)),
            },
            VcpuExit::X86Rdmsr(access) if is_invalid(access.reason) => {
                match self.apic.read_msr(access.index, now()) {
                    Ok(value) => {
                        *access.data = value;
                        *access.error = 0;
                    }
                    Err(_) => *access.error = 1,
                }
            }
            VcpuExit::X86Wrmsr(access) if is_invalid(access.reason) => {
                match self.apic.write_msr(access.index, access.data, now()) {
                    Ok(effect) => {
                        *access.error = 0;
                        self.follow(effect);
                    }
                    Err(_) => *access.error = 1,
                }
            }
            other => return Some(other),
        }
        None
    }
}
