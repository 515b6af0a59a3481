//! The model of a machine's CPUs, the same on each of its nodes.

use std::sync::Arc;

use kvm_bindings::kvm_cpuid_entry2;
use kvm_ioctls::VmFd;
use ssi_hv_nodes::{CpuidEntry, Start};

use super::machine_check::MachineCheck;
use super::packages::Packages;
use super::{Vcpu, cpuid, tsc};
use crate::error::MachineError;
use crate::irqchip::InterruptController;
use crate::nodes::Nodes;

/// The inputs of a CPU model.
#[derive(Clone, Debug)]
pub(crate) struct CpuModel {
    /// CPUID entries that KVM supports: on the primary's host, if there are several nodes.
    pub supported: Vec<kvm_cpuid_entry2>,
    /// Number of vCPUs of the machine, on all nodes.
    pub cpus: u8,
    /// How they are divided among packages.
    pub packages: Packages,
    /// Whether the host's instructions are emulated.
    pub emulated: bool,
    /// The nodes, if there are several.
    pub nodes: Option<Arc<Nodes>>,
    /// A halted vCPU stays in the guest.
    pub halts_in_guest: bool,
    /// The machine checks for memory that is lost, if the machine survives that.
    pub machine_check: Option<MachineCheck>,
}

impl CpuModel {
    /// Creates all vCPUs of a machine without other nodes, each pinned to the CPU at its position in
    /// `pinning`.
    pub fn create_vcpus(
        &self,
        vm: &VmFd,
        interrupts: &InterruptController,
        pinning: &[u32],
    ) -> Result<Vec<Vcpu>, MachineError> {
        (0..self.cpus)
            .map(|id| self.create_vcpu(vm, interrupts, id, pinning))
            .collect()
    }

    /// Creates one vCPU.
    pub fn create_vcpu(
        &self,
        vm: &VmFd,
        interrupts: &InterruptController,
        id: u8,
        pinning: &[u32],
    ) -> Result<Vcpu, MachineError> {
        let tsc_deadline = interrupts.has_tsc_deadline(vm);
        let mut cpuid = cpuid::for_cpu(&self.supported, id, self.packages, tsc_deadline);
        if self.emulated {
            cpuid::hide_xsave(&mut cpuid);
        }
        interrupts.hide_features(&mut cpuid);
        if self.halts_in_guest {
            cpuid::hide_unhalt(&mut cpuid);
        }
        if self.nodes.is_some() {
            cpuid::hide_one_kvm(&mut cpuid);
        }
        if let Some(machine_check) = self.machine_check {
            machine_check.show(&mut cpuid);
        }
        let vcpu = Vcpu::create(vm, interrupts, id, &cpuid)?;
        if let Some(machine_check) = self.machine_check {
            machine_check.set_up(&vcpu.fd)?;
        }
        Ok(Vcpu {
            pinned_to: pinning.get(usize::from(id)).copied(),
            machine_check: self.machine_check,
            ..vcpu
        })
    }

    /// Returns what other nodes need to create their vCPUs, whose time is `clock`.
    pub fn start(&self, clock: tsc::Clock, memory_bytes: u64, hotplug_bytes: u64) -> Start {
        Start {
            owners: self.nodes.as_ref().map_or_else(Vec::new, |n| n.owners()),
            memory_bytes,
            hotplug_bytes,
            tsc_khz: clock.khz,
            tsc_offset: clock.offset,
            emulated: self.emulated,
            package_id_bits: self.packages.id_bits,
            cpuid: self.supported.iter().map(to_entry).collect(),
        }
    }
}

fn to_entry(entry: &kvm_cpuid_entry2) -> CpuidEntry {
    CpuidEntry {
        function: entry.function,
        index: entry.index,
        flags: entry.flags,
        eax: entry.eax,
        ebx: entry.ebx,
        ecx: entry.ecx,
        edx: entry.edx,
    }
}

/// Converts a received entry, the inverse of [`CpuModel::start`].
pub(crate) fn from_entry(entry: &CpuidEntry) -> kvm_cpuid_entry2 {
    kvm_cpuid_entry2 {
        function: entry.function,
        index: entry.index,
        flags: entry.flags,
        eax: entry.eax,
        ebx: entry.ebx,
        ecx: entry.ecx,
        edx: entry.edx,
        ..Default::default()
    }
}

/// Returns the registers of a leaf that are feature masks, which a guest relies on wherever it
/// runs. Bits that only say by what a CPU is not affected are left out.
fn features(entry: &kvm_cpuid_entry2) -> Option<[u32; 4]> {
    const MCDT_NO: u32 = 1 << 5;
    const SSB_NO: u32 = 1 << 26;
    const BTC_NO: u32 = 1 << 29;
    /// Automatic IBRS, PREFETCHI, SBPB, and IBPB with the branch types: what a guest's kernel uses.
    const USED_OF_21: u32 = 1 << 8 | 1 << 20 | 1 << 27 | 1 << 28;
    match (entry.function, entry.index) {
        // EBX and the OSXSAVE bit depend on the CPU that executes CPUID.
        (0x1, _) => Some([0, 0, entry.ecx & !(1 << 27), entry.edx]),
        (0x7, 0) => Some([0, entry.ebx, entry.ecx, entry.edx]),
        (0x7, 1) => Some([entry.eax, 0, 0, entry.edx]),
        (0x7, 2) => Some([0, 0, 0, entry.edx & !MCDT_NO]),
        (0xd, 0) => Some([entry.eax, 0, 0, entry.edx]),
        (0xd, 1) => Some([entry.eax, 0, 0, 0]),
        (0x8000_0001, _) => Some([0, 0, entry.ecx, entry.edx]),
        (0x8000_0008, _) => Some([0, entry.ebx & !(SSB_NO | BTC_NO), 0, 0]),
        (0x8000_0021, _) => Some([entry.eax & USED_OF_21, 0, 0, 0]),
        _ => None,
    }
}

/// Finds a leaf of which this host's CPU lacks features of the primary's that the guest is shown, and
/// returns the missing bits. Where the CPUs are `emulated` it is shown no leaf of XSAVE.
pub(crate) fn lacks(
    here: &[kvm_cpuid_entry2],
    primary: &[kvm_cpuid_entry2],
    emulated: bool,
) -> Option<(u32, [u32; 4])> {
    let shown = |due: &&kvm_cpuid_entry2| !emulated || due.function != 0xd;
    primary.iter().filter(shown).find_map(|due| {
        let mut due = *due;
        cpuid::hide_one_kvm(std::slice::from_mut(&mut due));
        cpuid::hide_from_guests(&mut due);
        let wanted = features(&due)?;
        let same = |one: &&kvm_cpuid_entry2| (one.function, one.index) == (due.function, due.index);
        let there = here
            .iter()
            .find(same)
            .and_then(features)
            .unwrap_or_default();
        let mut missing = wanted;
        for (missing, there) in missing.iter_mut().zip(there) {
            *missing &= !there;
        }
        (missing != [0; 4]).then_some((due.function, missing))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(function: u32, index: u32, [eax, ebx, ecx, edx]: [u32; 4]) -> kvm_cpuid_entry2 {
        kvm_cpuid_entry2 {
            function,
            index,
            eax,
            ebx,
            ecx,
            edx,
            ..Default::default()
        }
    }

    #[test]
    fn a_host_whose_cpu_has_less_is_found() {
        let lacks = |here: &[_], primary: &[_]| lacks(here, primary, false);
        let primary = [
            entry(1, 0, [0, 7 << 24, 0b110, 0]),
            entry(7, 0, [0, 0b101, 0, 0]),
        ];
        assert_eq!(lacks(&primary, &primary), None);
        let more = [
            entry(1, 0, [0, 9 << 24, 0b111, 0]),
            entry(7, 0, [0, 0b1101, 1, 0]),
        ];
        assert_eq!(lacks(&more, &primary), None);
        assert_eq!(lacks(&primary, &more), Some((1, [0, 0, 1, 0])));
        assert_eq!(lacks(&primary[..1], &primary), Some((7, [0, 0b101, 0, 0])));
        // AVX-VNNI, BHI_CTRL, XSAVEC, IBPB, and what is no feature of a CPU or is not shown.
        for (function, index, bits, missing) in [
            (0x7, 1, [1 << 4, 0, 0, 0], true),
            (0x7, 2, [0, 0, 0, 1 << 4], true),
            (0xd, 1, [1 << 1, 0, 0, 0], true),
            (0x8000_0008, 0, [0, 1 << 12, 0, 0], true),
            (0x8000_0008, 0, [0, 1 << 26, 0, 0], false),
            (0x8000_0021, 0, [1 << 2, 0, 0, 0], false),
            (0x7, 0, [0, 1 << 1, 1 << 7, 1 << 20], false),
            (0x2, 0, [1, 1, 1, 1], false),
            // VMX, the deadline of the timer, a hypervisor; SVM, performance counters.
            (0x1, 0, [0, 0, 1 << 5 | 1 << 24 | 1 << 31, 0], false),
            (
                0x8000_0001,
                0,
                [0, 0, 1 << 2 | 1 << 23 | 1 << 24 | 1 << 28, 0],
                false,
            ),
        ] {
            let found = lacks(&[], &[entry(function, index, bits)]);
            let expected = missing.then_some((function, bits));
            assert_eq!(found, expected, "{function:#x}, {index}");
        }
        let xsave = [entry(0xd, 0, [7, 0, 0, 0])];
        assert_eq!(super::lacks(&[], &xsave, true), None);
    }
}
