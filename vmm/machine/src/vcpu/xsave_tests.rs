//! Tests of the state that XSAVE manages, from the host's side of a real KVM: what vCPUs are
//! offered, and that their states are separate.
//!
//! Layout: Intel SDM volume 1, section 13.4, the standard format; the component of AVX has the
//! upper halves of the registers, at 576 on every processor (AMD APM volume 2, section 11.5.7).

use std::fs::OpenOptions;

use kvm_bindings::{KVM_MAX_CPUID_ENTRIES, kvm_cpuid_entry2, kvm_xcrs, kvm_xsave};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use super::packages::Packages;
use super::{Vcpu, cpuid};
use crate::config::Irqchip;
use crate::irqchip::InterruptController;
use crate::kvm::{create_vm, map_memory, open_kvm};
use crate::lifecycle::control::Control;

/// Leaf 1, ECX: XSAVE and AVX.
const ECX_XSAVE: u32 = 1 << 26;
const ECX_AVX: u32 = 1 << 28;
/// XCR0: x87, SSE and AVX.
const X87_SSE_AVX: u64 = 7;
/// The legacy region, the header, and 16 bytes for each of 16 registers.
const X87_SSE_AVX_BYTES: u32 = 512 + 64 + 16 * 16;
/// 32-bit words from the start of the area: register 0 of SSE, the header, register 0 of AVX.
const SSE_WORD: usize = 160 / 4;
const HEADER_WORD: usize = 512 / 4;
const AVX_WORD: usize = 576 / 4;
/// Words of one register, or of its upper half.
const REGISTER_WORDS: usize = 4;

/// Address of the vCPUs' code.
const CODE: GuestAddress = GuestAddress(0x1000);
/// 16-bit code: `2: out 0x80, al; jmp 2b`.
const OUT_FOR_EVER: [u8; 4] = [0xe6, 0x80, 0xeb, 0xfc];

/// A VM with its memory; fields are dropped in order.
struct Host {
    vm: VmFd,
    interrupts: InterruptController,
    supported: Vec<kvm_cpuid_entry2>,
    _memory: GuestMemoryMmap,
    _kvm: Kvm,
}

/// Creates a VM whose vCPUs support AVX. Prints the reason and returns `None` if the host cannot.
fn host() -> Option<Host> {
    if let Err(error) = OpenOptions::new().read(true).write(true).open("/dev/kvm") {
        println!("SKIPPED: /dev/kvm cannot be opened: {error}");
        return None;
    }
    let kvm = open_kvm().unwrap();
    let supported = kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).unwrap();
    let supported = supported.as_slice().to_vec();
    // A software KVM may offer the state of AVX without the instructions.
    if u64::from(leaf(&supported, 0xd).eax) & X87_SSE_AVX != X87_SSE_AVX {
        println!("SKIPPED: KVM offers no state of AVX here");
        return None;
    }
    let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 0x1_0000)]).unwrap();
    memory.write_slice(&OUT_FOR_EVER, CODE).unwrap();
    let vm = create_vm(&kvm).unwrap();
    map_memory(&vm, &memory).unwrap();
    let interrupts = {
        let control = Control::new(0).unwrap();
        InterruptController::new(Irqchip::Kernel, &vm, &control, None).unwrap()
    };
    Some(Host {
        vm,
        interrupts,
        supported,
        _memory: memory,
        _kvm: kvm,
    })
}

impl Host {
    fn cpuid(&self, id: u8) -> Vec<kvm_cpuid_entry2> {
        let tsc_deadline = self.interrupts.has_tsc_deadline(&self.vm);
        cpuid::for_cpu(&self.supported, id, Packages::one(2), tsc_deadline)
    }

    /// Creates a vCPU as the monitor does, with its instruction pointer at the code.
    fn vcpu(&self, id: u8, cpuid: &[kvm_cpuid_entry2]) -> VcpuFd {
        let vcpu = Vcpu::create(&self.vm, &self.interrupts, id, cpuid)
            .unwrap()
            .fd;
        let mut sregs = vcpu.get_sregs().unwrap();
        (sregs.cs.base, sregs.cs.selector) = (0, 0);
        vcpu.set_sregs(&sregs).unwrap();
        let mut regs = vcpu.get_regs().unwrap();
        (regs.rip, regs.rflags) = (CODE.0, 2);
        vcpu.set_regs(&regs).unwrap();
        vcpu.set_mp_state(kvm_bindings::kvm_mp_state {
            mp_state: kvm_bindings::KVM_MP_STATE_RUNNABLE,
        })
        .unwrap();
        vcpu
    }
}

fn leaf(entries: &[kvm_cpuid_entry2], function: u32) -> kvm_cpuid_entry2 {
    let found = |entry: &&kvm_cpuid_entry2| entry.function == function && entry.index == 0;
    entries.iter().find(found).copied().unwrap_or_default()
}

/// Returns whether KVM interprets guests here: the processor has no virtualization extension.
fn kvm_is_software() -> bool {
    let host = std::fs::read_to_string("/proc/cpuinfo").unwrap();
    !host
        .split_whitespace()
        .any(|flag| flag == "svm" || flag == "vmx")
}

fn enable(vcpu: &VcpuFd, state: u64) -> Result<(), kvm_ioctls::Error> {
    let mut xcrs = kvm_xcrs {
        nr_xcrs: 1,
        ..Default::default()
    };
    xcrs.xcrs[0].value = state;
    vcpu.set_xcrs(&xcrs)
}

/// Fills every register of SSE and AVX with words that depend on `seed`.
fn fill(vcpu: &VcpuFd, seed: u32) -> kvm_xsave {
    let mut area = vcpu.get_xsave().unwrap();
    for word in 0..16 * REGISTER_WORDS {
        let value = u32::try_from(word).unwrap() + (seed << 16);
        area.region[SSE_WORD + word] = value;
        area.region[AVX_WORD + word] = !value;
    }
    area.region[HEADER_WORD] |= u32::try_from(X87_SSE_AVX).unwrap();
    // SAFETY: no state is enabled by arch_prctl that would make KVM read more than `kvm_xsave` has.
    unsafe { vcpu.set_xsave(&area) }.unwrap();
    area
}

/// Returns the words of the registers of SSE and AVX.
fn registers(area: &kvm_xsave) -> (&[u32], &[u32]) {
    let words = 16 * REGISTER_WORDS;
    (
        &area.region[SSE_WORD..SSE_WORD + words],
        &area.region[AVX_WORD..AVX_WORD + words],
    )
}

#[test]
fn a_vcpu_is_offered_the_state_that_kvm_supports() {
    let Some(host) = host() else { return };
    let cpuid = host.cpuid(0);
    let of_state = |entries: &[kvm_cpuid_entry2]| -> Vec<_> {
        let leaves = entries.iter().filter(|entry| entry.function == 0xd);
        leaves.copied().collect()
    };
    assert_eq!(of_state(&cpuid), of_state(&host.supported));
    let features = |entries| leaf(entries, 1).ecx & (ECX_XSAVE | ECX_AVX);
    assert_eq!(features(&cpuid), features(&host.supported));
    let bytes_max = leaf(&cpuid, 0xd).ecx;
    assert!(bytes_max >= X87_SSE_AVX_BYTES, "{bytes_max} bytes");
}

#[test]
fn a_vcpu_can_enable_the_state_that_it_is_offered() {
    let Some(host) = host() else { return };
    let vcpu = host.vcpu(0, &host.cpuid(0));
    enable(&vcpu, X87_SSE_AVX).unwrap();
    let xcrs = vcpu.get_xcrs().unwrap();
    assert_eq!((xcrs.nr_xcrs, xcrs.xcrs[0].xcr), (1, 0));
    assert_eq!(xcrs.xcrs[0].value, X87_SSE_AVX);
    // A reserved bit, which no processor has.
    assert!(enable(&vcpu, X87_SSE_AVX | 1 << 62).is_err());
    assert_eq!(vcpu.get_xcrs().unwrap().xcrs[0].value, X87_SSE_AVX);
}

#[test]
fn a_vcpu_from_which_xsave_is_hidden_is_offered_nothing_of_it() {
    let Some(host) = host() else { return };
    let mut cpuid = host.cpuid(0);
    cpuid::hide_xsave(&mut cpuid);
    assert!(cpuid.iter().all(|entry| entry.function != 0xd));
    assert_eq!(leaf(&cpuid, 1).ecx & (ECX_XSAVE | ECX_AVX), 0);
    let vcpu = host.vcpu(0, &cpuid);
    enable(&vcpu, 1).unwrap();
}

#[test]
fn a_vcpu_from_which_xsave_is_hidden_cannot_enable_its_state() {
    let Some(host) = host() else { return };
    let mut cpuid = host.cpuid(0);
    cpuid::hide_xsave(&mut cpuid);
    let vcpu = host.vcpu(0, &cpuid);
    let enabled = enable(&vcpu, X87_SSE_AVX);
    if enabled.is_ok() && kvm_is_software() {
        println!("SKIPPED: this software KVM does not compare XCR0 with CPUID");
        return;
    }
    assert!(enabled.is_err());
}

#[test]
fn registers_of_vcpus_survive_each_other_and_their_host() {
    let Some(host) = host() else { return };
    let mut vcpus = [0, 1].map(|id| host.vcpu(id, &host.cpuid(id)));
    let mut expected = Vec::new();
    for (vcpu, seed) in vcpus.iter().zip(1..) {
        enable(vcpu, X87_SSE_AVX).unwrap();
        expected.push(fill(vcpu, seed));
    }
    for _ in 0..100 {
        for vcpu in &mut vcpus {
            let exit = vcpu.run().unwrap();
            assert!(matches!(exit, VcpuExit::IoOut(0x80, _)), "{exit:?}");
        }
        for (vcpu, expected) in vcpus.iter().zip(&expected) {
            let found = vcpu.get_xsave().unwrap();
            assert_eq!(registers(&found), registers(expected));
        }
    }
}
