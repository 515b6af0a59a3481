//! The model-specific registers of a vCPU's state: those that KVM says must be saved
//! (KVM_GET_MSR_INDEX_LIST), without those that belong to one host or to its KVM.

use std::sync::Arc;

use kvm_bindings::{Msrs, kvm_msr_entry};
use kvm_ioctls::{Kvm, VcpuFd};

use crate::error::MachineError;

/// The time stamp counter: part of the state by its offset.
const TSC: u32 = 0x10;

/// Registers that do not move: the counter and its adjustment, which have an offset; KVM's clock and
/// what it shares with a guest in memory, which guests on several nodes are not offered; those of
/// Hyper-V; the capabilities of performance counters and of VMX, which no guest is offered, and which
/// are those of the host's CPU all the same; the deadline timer and the registers of local APICs,
/// which are in user space.
const STAY: [std::ops::RangeInclusive<u32>; 8] = [
    TSC..=0x12,
    0x3b..=0x3b,
    0x345..=0x345,
    0x480..=0x491,
    0x6e0..=0x6e0,
    0x800..=0x8ff,
    0x4000_0000..=0x4000_01ff,
    0x4b56_4d00..=0x4b56_4dff,
];

/// Whether a register is part of the state of a vCPU that moves.
fn moves(index: u32) -> bool {
    !STAY.iter().any(|range| range.contains(&index))
}

/// A model-specific register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Msr {
    pub index: u32,
    pub value: u64,
}

impl Msr {
    /// Sets the register of a vCPU. A value of 0 is not missed where there is no such register.
    pub fn set(self, fd: &VcpuFd) -> Result<(), ()> {
        let entries = Msrs::from_entries(&[entry(self.index, self.value)]).map_err(|_| ())?;
        match fd.set_msrs(&entries) {
            Ok(1) => Ok(()),
            _ if self.value == 0 => Ok(()),
            _ => Err(()),
        }
    }
}

/// The registers that this host's KVM has, and that move.
#[derive(Clone, Debug, Default)]
pub(crate) struct MsrNames(Arc<[u32]>);

impl MsrNames {
    pub fn of(kvm: &Kvm) -> Result<Self, MachineError> {
        let list = kvm
            .get_msr_index_list()
            .map_err(MachineError::kvm("list the model-specific registers"))?;
        let all = list.as_slice().iter().copied();
        Ok(Self(all.filter(|index| moves(*index)).collect()))
    }

    /// Reads the registers of a vCPU, without those that it does not have.
    pub fn read(&self, fd: &VcpuFd) -> Result<Vec<Msr>, MachineError> {
        read(fd, &self.0)
    }
}

fn entry(index: u32, data: u64) -> kvm_msr_entry {
    kvm_msr_entry {
        index,
        data,
        ..Default::default()
    }
}

fn read(fd: &VcpuFd, names: &[u32]) -> Result<Vec<Msr>, MachineError> {
    let action = "read the model-specific registers";
    let mut found = Vec::with_capacity(names.len());
    let mut left = names;
    while !left.is_empty() {
        let entries: Vec<_> = left.iter().map(|index| entry(*index, 0)).collect();
        let mut entries = Msrs::from_entries(&entries).map_err(|error| MachineError::Kvm {
            action,
            source: std::io::Error::other(format!("{error:?}")),
        })?;
        let count = fd
            .get_msrs(&mut entries)
            .map_err(MachineError::kvm(action))?;
        let read = entries.as_slice().iter().take(count);
        found.extend(read.map(|entry| Msr {
            index: entry.index,
            value: entry.data,
        }));
        // KVM stops at the first register that it does not have.
        left = left.get(count + 1..).unwrap_or_default();
    }
    Ok(found)
}

/// Those of `wanted` that move and that a vCPU does not have, or with another value.
pub(super) fn differing(fd: &VcpuFd, wanted: &[Msr]) -> Result<Vec<Msr>, MachineError> {
    let names: Vec<u32> = wanted.iter().map(|msr| msr.index).collect();
    let found = read(fd, &names)?;
    let wanted = wanted.iter().copied();
    let differs = |msr: &Msr| moves(msr.index) && !found.contains(msr);
    Ok(wanted.filter(differs).collect())
}

/// Returns the guest's time stamp counter.
pub(super) fn time_stamp(fd: &VcpuFd) -> Result<u64, MachineError> {
    let found = read(fd, &[TSC])?;
    found
        .first()
        .map(|msr| msr.value)
        .ok_or_else(|| MachineError::Kvm {
            action: "read the time stamp counter of a vCPU",
            source: std::io::ErrorKind::Unsupported.into(),
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registers_of_the_host_or_its_kvm_do_not_move() {
        const PERF_CAPABILITIES: u32 = 0x345;
        const EFER: u32 = 0xc000_0080;
        const PAT: u32 = 0x277;
        for stays in [TSC, PERF_CAPABILITIES, 0x486, 0x6e0, 0x802, 0x4000_0000] {
            assert!(!moves(stays), "{stays:#x}");
        }
        assert!([EFER, PAT, 0x48].into_iter().all(moves));
    }
}
