//! The complete state of a vCPU, as it moves from one host to another.
//!
//! The vCPU is at an instruction boundary: its last exit is complete. Without local APICs in KVM the
//! kernel knows no other activity than running, so halted and waiting vCPUs are part of the state
//! of their local APIC ([`LocalState`]).
//!
//! Linux, Documentation/virt/kvm/api.rst; the order of installation is that of QEMU
//! (target/i386/kvm/kvm.c, `kvm_arch_put_registers`).

mod codec;
mod msrs;
#[cfg(test)]
mod tests;

use std::time::{Duration, Instant};

use kvm_bindings::{kvm_debugregs, kvm_regs, kvm_sregs, kvm_vcpu_events, kvm_xcrs, kvm_xsave};
use kvm_ioctls::VcpuFd;

use super::state_error::StateError;
use super::tsc::Clock;
use crate::error::MachineError;
use crate::irqchip::user::cpu::{LocalState, UserCpu};
use crate::irqchip::user::registers;
pub(crate) use msrs::{Msr, MsrNames};

/// The guest's time stamp counter on a new host may be behind the one that the vCPU had by the error
/// of the comparison of the two hosts, which is below the time that a message takes. A vCPU whose
/// counter is further behind is not installed.
const TSC_WAIT_MAX: Duration = Duration::from_secs(1);

/// The registers that KVM holds.
#[derive(Debug, Default)]
pub(crate) struct Registers {
    pub general: kvm_regs,
    pub special: kvm_sregs,
    /// XCR0, if the host has XSAVE.
    pub extended: kvm_xcrs,
    /// x87, SSE and what XCR0 enables, in the standard format of XSAVE. No vCPU has more than its
    /// 4096 bytes, for which a process needs a permission that this one does not request.
    pub fpu: kvm_xsave,
    pub debug: kvm_debugregs,
    /// Queued exceptions, interrupts and NMIs.
    pub events: kvm_vcpu_events,
    pub msrs: Vec<Msr>,
}

/// The time stamp counter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SavedClock {
    /// Rate in kHz.
    pub khz: u32,
    /// What is added to the counter of the primary's host.
    pub offset: u64,
    /// The guest's counter when it was saved.
    pub ticks: u64,
}

/// What a host knows of itself, to save and install vCPUs.
#[derive(Clone, Debug, Default)]
pub(crate) struct HostFacts {
    pub msrs: MsrNames,
    /// The rate of the guest's time stamp counters, in kHz.
    pub tsc_khz: u32,
}

/// The state of a vCPU.
#[derive(Debug, Default)]
pub(crate) struct VcpuState {
    pub cpu: u8,
    pub registers: Registers,
    pub clock: SavedClock,
    pub local: LocalState,
}

impl VcpuState {
    /// Reads the state of a vCPU at an instruction boundary, with the events that were posted to it.
    /// `added`: what this node has added to the offset of its counter.
    pub fn save(
        fd: &VcpuFd,
        local: &mut UserCpu,
        host: &HostFacts,
        added: u64,
    ) -> Result<Self, MachineError> {
        let clock = Clock::of(fd)?;
        let registers = Registers {
            general: fd
                .get_regs()
                .map_err(MachineError::kvm("read the registers"))?,
            special: fd
                .get_sregs()
                .map_err(MachineError::kvm("read the segment registers"))?,
            extended: fd
                .get_xcrs()
                .map_err(MachineError::kvm("read the extended control registers"))?,
            fpu: fd
                .get_xsave()
                .map_err(MachineError::kvm("read the floating-point state"))?,
            debug: fd
                .get_debug_regs()
                .map_err(MachineError::kvm("read the debug registers"))?,
            events: fd
                .get_vcpu_events()
                .map_err(MachineError::kvm("read the events of a vCPU"))?,
            msrs: host.msrs.read(fd)?,
        };
        Ok(Self {
            cpu: local.number(),
            registers,
            clock: SavedClock {
                khz: host.tsc_khz,
                offset: clock.offset.wrapping_sub(added),
                ticks: msrs::time_stamp(fd)?,
            },
            local: local.save(),
        })
    }

    /// Gives the state to a vCPU of this host that does not run. `added`: what this node adds to the
    /// offset of its counter.
    pub fn install(
        &self,
        fd: &mut VcpuFd,
        local: &mut UserCpu,
        host: &HostFacts,
        added: u64,
    ) -> Result<(), MachineError> {
        let wrong = |source| MachineError::VcpuState {
            cpu: self.cpu,
            source,
        };
        let found = Clock::of(fd)?;
        if host.tsc_khz != self.clock.khz {
            return Err(wrong(StateError::ClockRate {
                found: self.clock.khz,
                here: host.tsc_khz,
            }));
        }
        // The vCPU may have run here before, and the guest may have changed page tables since. KVM
        // drops the translations of a vCPU whose control registers change, so they change to those
        // of a reset first.
        registers::init(fd, 0)?;
        let Registers {
            general,
            special,
            extended,
            fpu,
            debug,
            events,
            msrs,
        } = &self.registers;
        // A queued interrupt is among the events.
        let special = kvm_sregs {
            interrupt_bitmap: [0; 4],
            ..*special
        };
        fd.set_sregs(&special)
            .map_err(MachineError::kvm("set the segment registers"))?;
        fd.set_regs(general)
            .map_err(MachineError::kvm("set the registers"))?;
        if extended.nr_xcrs > 0 {
            fd.set_xcrs(extended)
                .map_err(MachineError::kvm("set the extended control registers"))?;
        }
        // SAFETY: KVM reads the 4096 bytes of a `kvm_xsave`: it reads more only for state that a
        // process has requested by arch_prctl, which this one does not.
        unsafe { fd.set_xsave(fpu) }.map_err(MachineError::kvm("set the floating-point state"))?;
        for msr in msrs::differing(fd, msrs)? {
            msr.set(fd).map_err(|()| {
                wrong(StateError::Msr {
                    index: msr.index,
                    value: msr.value,
                })
            })?;
        }
        fd.set_debug_regs(debug)
            .map_err(MachineError::kvm("set the debug registers"))?;
        fd.set_vcpu_events(events)
            .map_err(MachineError::kvm("set the events of a vCPU"))?;
        let clock = Clock {
            offset: self.clock.offset.wrapping_add(added),
            ..found
        };
        if clock != found {
            clock.set(fd, false)?;
        }
        let ticks = wait_for_time(fd, self.clock.ticks).map_err(|source| match source {
            Late::Behind(by) => wrong(StateError::ClockBehind { ticks: by }),
            Late::Kvm(error) => error,
        })?;
        // The timer of the local APIC has run on meanwhile.
        let passed = u128::from(ticks.wrapping_sub(self.clock.ticks)) * 1_000_000
            / u128::from(self.clock.khz.max(1));
        let passed = Duration::from_nanos(u64::try_from(passed).unwrap_or(u64::MAX));
        local
            .restore(&self.local, passed)
            .map_err(|source| wrong(source.into()))?;
        local.write_run_page(fd);
        Ok(())
    }
}

/// Why a vCPU does not get its time.
enum Late {
    /// Its counter is so many ticks behind.
    Behind(u64),
    Kvm(MachineError),
}

/// Waits until the counter of a vCPU is not behind `ticks`, so that its guest sees no time going
/// back. Returns the counter.
fn wait_for_time(fd: &VcpuFd, ticks: u64) -> Result<u64, Late> {
    let until = Instant::now() + TSC_WAIT_MAX;
    loop {
        let now = msrs::time_stamp(fd).map_err(Late::Kvm)?;
        let behind = ticks.wrapping_sub(now);
        if behind.cast_signed() <= 0 {
            return Ok(now);
        }
        if Instant::now() > until {
            return Err(Late::Behind(behind));
        }
        std::thread::yield_now();
    }
}
