//! The state of a vCPU as bytes: its version, then each part in order, little-endian. The registers
//! have the layout of the kernel's structures, which is part of its interface.

use ssi_hv_irqchip::{InvalidState, LocalApicState, Posted, STATE_VERSION, Vectors};
use zerocopy::{FromBytes, Immutable, IntoBytes};

use super::{Msr, Registers, SavedClock, VcpuState};
use crate::irqchip::user::cpu::{Activity, LocalState};
use crate::kvm::AtExit;
use crate::vcpu::state_error::{StateError, VERSION};

/// Most model-specific registers of a state; KVM lists fewer than 200 for any processor.
const MSRS_MAX: usize = 512;

fn bytes_of<T: IntoBytes + Immutable>(part: &T, to: &mut Vec<u8>) {
    to.extend(part.as_bytes());
}

/// The bytes that are left of a state.
struct Left<'a>(&'a [u8]);

impl Left<'_> {
    fn take<T: FromBytes>(&mut self, part: &'static str) -> Result<T, StateError> {
        let (value, left) = T::read_from_prefix(self.0).map_err(|_| StateError::Short { part })?;
        self.0 = left;
        Ok(value)
    }

    fn at_most(&mut self, part: &'static str, limit: u8) -> Result<u8, StateError> {
        let value: u8 = self.take(part)?;
        if value > limit {
            let (value, limit) = (value.into(), limit.into());
            return Err(StateError::Value { part, value, limit });
        }
        Ok(value)
    }

    fn flag(&mut self, part: &'static str) -> Result<bool, StateError> {
        self.at_most(part, 1).map(|value| value == 1)
    }

    /// A value behind a flag, which is 0 when there is none.
    fn optional<T>(&mut self, part: &'static str) -> Result<Option<T>, StateError>
    where
        T: FromBytes + Copy + Into<u64>,
    {
        let is_there = self.flag(part)?;
        let value: T = self.take(part)?;
        if !is_there && value.into() != 0 {
            let value = value.into();
            let limit = 0;
            return Err(StateError::Value { part, value, limit });
        }
        Ok(is_there.then_some(value))
    }
}

impl VcpuState {
    /// The state as bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut to = Vec::with_capacity(8 << 10);
        to.extend(VERSION.to_le_bytes());
        to.push(self.cpu);
        let Registers {
            general,
            special,
            extended,
            fpu,
            debug,
            events,
            msrs,
        } = &self.registers;
        bytes_of(general, &mut to);
        bytes_of(special, &mut to);
        bytes_of(extended, &mut to);
        to.extend(fpu.region.as_bytes());
        bytes_of(debug, &mut to);
        bytes_of(events, &mut to);
        to.extend(u16::try_from(msrs.len()).unwrap_or(u16::MAX).to_le_bytes());
        for msr in msrs {
            to.extend(msr.index.to_le_bytes());
            to.extend(msr.value.to_le_bytes());
        }
        let SavedClock { khz, offset, ticks } = self.clock;
        to.extend(khz.to_le_bytes());
        to.extend(offset.to_le_bytes());
        to.extend(ticks.to_le_bytes());
        encode_local(&self.local, &mut to);
        to
    }

    /// Reads the state of vCPU `cpu`.
    ///
    /// # Errors
    ///
    /// When it is not one that [`encode`](Self::encode) makes. Values of registers are left to KVM
    /// and to the local APIC, which refuse those that they cannot have.
    pub fn decode(cpu: u8, bytes: &[u8]) -> Result<Self, StateError> {
        let mut left = Left(bytes);
        let found = left.take("the version")?;
        if found != VERSION {
            return Err(StateError::Version { found });
        }
        let found = left.take("the number of the vCPU")?;
        if found != cpu {
            return Err(StateError::OtherCpu { found });
        }
        let mut registers = Registers {
            general: left.take("the registers")?,
            special: left.take("the segment registers")?,
            extended: left.take("the extended control registers")?,
            ..Registers::default()
        };
        let limit = registers.extended.xcrs.len();
        if usize::try_from(registers.extended.nr_xcrs).map_or(true, |found| found > limit) {
            return Err(StateError::Value {
                part: "the number of extended control registers",
                value: registers.extended.nr_xcrs.into(),
                limit: limit as u64,
            });
        }
        registers.fpu.region = left.take("the floating-point state")?;
        registers.debug = left.take("the debug registers")?;
        registers.events = left.take("the events")?;
        let count: u16 = left.take("the number of model-specific registers")?;
        if usize::from(count) > MSRS_MAX {
            return Err(StateError::Value {
                part: "the number of model-specific registers",
                value: count.into(),
                limit: MSRS_MAX as u64,
            });
        }
        for _ in 0..count {
            registers.msrs.push(Msr {
                index: left.take("a model-specific register")?,
                value: left.take("a model-specific register")?,
            });
        }
        let clock = SavedClock {
            khz: left.take("the time stamp counter")?,
            offset: left.take("the time stamp counter")?,
            ticks: left.take("the time stamp counter")?,
        };
        let local = decode_local(&mut left)?;
        if local.apic.id != u32::from(cpu) {
            let found = local.apic.id;
            return Err(StateError::OtherApic { found });
        }
        match left.0.len() {
            0 => Ok(Self {
                cpu,
                registers,
                clock,
                local,
            }),
            bytes => Err(StateError::Long { bytes }),
        }
    }
}

fn encode_local(local: &LocalState, to: &mut Vec<u8>) {
    let LocalState {
        activity,
        at_exit,
        apic,
        posted,
    } = local;
    to.push(match activity {
        Activity::Runs => 0,
        Activity::Halted => 1,
        Activity::WaitsForStartup => 2,
    });
    to.extend(at_exit.apic_base.to_le_bytes());
    to.extend(at_exit.cr8.to_le_bytes());
    to.push(u8::from(at_exit.interrupts_enabled));
    to.push(u8::from(at_exit.ready_for_interrupt));
    to.extend(apic.version.to_le_bytes());
    to.extend(apic.id.to_le_bytes());
    to.extend([apic.mode, apic.task_priority]);
    for word in [
        apic.logical_destination,
        apic.destination_format,
        apic.spurious,
    ] {
        to.extend(word.to_le_bytes());
    }
    for set in [apic.in_service, apic.trigger_mode, apic.requested] {
        to.extend(set.as_bytes());
    }
    to.extend(apic.errors.to_le_bytes());
    to.extend(apic.error_status.to_le_bytes());
    to.extend(apic.command.to_le_bytes());
    to.extend(apic.vector_table.as_bytes());
    to.extend(apic.initial_count.to_le_bytes());
    to.extend(apic.divide.to_le_bytes());
    to.push(u8::from(apic.expires_in_ns.is_some()));
    to.extend(apic.expires_in_ns.unwrap_or(0).to_le_bytes());
    to.extend(posted.edge.0.as_bytes());
    to.extend(posted.level.0.as_bytes());
    to.push(u8::from(posted.nmi));
    to.push(u8::from(posted.init));
    to.push(u8::from(posted.startup.is_some()));
    to.push(posted.startup.unwrap_or(0));
}

fn decode_local(left: &mut Left<'_>) -> Result<LocalState, StateError> {
    const APIC: &str = "the local APIC";
    const POSTED: &str = "the posted events";
    let activity = match left.at_most("the activity", 2)? {
        0 => Activity::Runs,
        1 => Activity::Halted,
        _ => Activity::WaitsForStartup,
    };
    let at_exit = AtExit {
        apic_base: left.take("the address of the local APIC")?,
        cr8: u64::from_le_bytes(left.take("CR8")?),
        interrupts_enabled: left.flag("the interrupt flag")?,
        ready_for_interrupt: left.flag("the readiness for interrupts")?,
    };
    if at_exit.cr8 > 15 {
        return Err(StateError::Value {
            part: "CR8",
            value: at_exit.cr8,
            limit: 15,
        });
    }
    let version = left.take(APIC)?;
    if version != STATE_VERSION {
        return Err(InvalidState::Version { found: version }.into());
    }
    let apic = LocalApicState {
        version,
        id: left.take(APIC)?,
        mode: left.take(APIC)?,
        task_priority: left.take(APIC)?,
        logical_destination: left.take(APIC)?,
        destination_format: left.take(APIC)?,
        spurious: left.take(APIC)?,
        in_service: left.take(APIC)?,
        trigger_mode: left.take(APIC)?,
        requested: left.take(APIC)?,
        errors: left.take(APIC)?,
        error_status: left.take(APIC)?,
        command: left.take(APIC)?,
        vector_table: left.take(APIC)?,
        initial_count: left.take(APIC)?,
        divide: left.take(APIC)?,
        expires_in_ns: left.optional("the timer of the local APIC")?,
    };
    let posted = Posted {
        edge: Vectors(left.take(POSTED)?),
        level: Vectors(left.take(POSTED)?),
        nmi: left.flag(POSTED)?,
        init: left.flag(POSTED)?,
        startup: left.optional("the page of the start-up message")?,
    };
    Ok(LocalState {
        activity,
        at_exit,
        apic,
        posted,
    })
}
