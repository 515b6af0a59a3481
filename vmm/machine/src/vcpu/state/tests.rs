//! A vCPU moves between two VMs of the host's KVM, which share a memory, after each exit.

use std::fs::OpenOptions;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use devices::{Bus, BusDevice, MachineEvent, MachineEvents};
use kvm_bindings::KVM_MAX_CPUID_ENTRIES;
use proptest::prelude::*;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use super::*;
use crate::config::Irqchip;
use crate::host_cpu::is_emulated;
use crate::irqchip::InterruptController;
use crate::kvm::{create_vm, map_memory, open_kvm};
use crate::lifecycle::control::Control;
use crate::lifecycle::shared::Shared;
use crate::vcpu::model::CpuModel;
use crate::vcpu::packages::Packages;
use crate::vcpu::tsc::tsc_khz;
use crate::vcpu::{Vcpu, regs};

/// No step takes longer on a host that works, however loaded.
const LIMIT: Duration = Duration::from_secs(120);

/// What a guest has said.
#[derive(Debug, Default)]
struct Console(Mutex<Vec<u8>>);

impl BusDevice for Console {
    fn read(&self, _: u64, data: &mut [u8]) {
        data.fill(0);
    }

    fn write(&self, _: u64, data: &[u8]) {
        self.0.lock().unwrap().extend(data);
    }
}

/// Switches the machine off.
#[derive(Debug)]
struct Power(MachineEvents);

impl BusDevice for Power {
    fn read(&self, _: u64, data: &mut [u8]) {
        data.fill(0);
    }

    fn write(&self, _: u64, _: &[u8]) {
        self.0.signal(MachineEvent::Shutdown);
    }
}

/// A VM with one vCPU.
struct Host {
    shared: Arc<Shared>,
    vcpu: Vcpu,
    facts: HostFacts,
}

impl Host {
    fn new(memory: &GuestMemoryMmap, console: &Arc<Console>) -> Self {
        let kvm = open_kvm().unwrap();
        let supported = kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).unwrap();
        let vm = Arc::new(create_vm(&kvm).unwrap());
        map_memory(&vm, memory).unwrap();
        let control = Control::new(1).unwrap();
        let interrupts = InterruptController::new(Irqchip::User, &vm, &control, None).unwrap();
        let model = CpuModel {
            supported: supported.as_slice().to_vec(),
            cpus: 1,
            packages: Packages::one(1),
            emulated: is_emulated(),
            nodes: None,
            halts_in_guest: false,
            machine_check: None,
        };
        let mut vcpus = model.create_vcpus(&vm, &interrupts, &[]).unwrap();
        let events = MachineEvents::new().unwrap();
        let (mut ports, mut mmio) = (Bus::port_io(), Bus::mmio());
        ports.insert(0x3f8, 1, Arc::clone(console) as _).unwrap();
        let power = Arc::new(Power(events.clone()));
        ports.insert(0x604, 2, power).unwrap();
        interrupts.add_devices(&mut ports, &mut mmio).unwrap();
        Self {
            vcpu: vcpus.remove(0),
            facts: HostFacts {
                msrs: MsrNames::of(&kvm).unwrap(),
                tsc_khz: tsc_khz().unwrap(),
            },
            shared: Arc::new(Shared {
                ports,
                mmio,
                events,
                control,
                transports: Vec::new(),
                _vm: vm,
                memory: memory.clone(),
                memory_errors: None,
            }),
        }
    }

    fn save(&mut self) -> VcpuState {
        let local = self.vcpu.local.as_mut().unwrap();
        VcpuState::save(&self.vcpu.fd, local, &self.facts, 0).unwrap()
    }

    fn install(&mut self, state: &VcpuState) -> Result<(), MachineError> {
        let local = self.vcpu.local.as_mut().unwrap();
        state.install(&mut self.vcpu.fd, local, &self.facts, 0)
    }

    /// Runs the guest until its next exit, and on to an instruction boundary; false at its end.
    fn run_on(&mut self) -> bool {
        let shared = Arc::clone(&self.shared);
        let kicks = shared.control.kicks()[0].register(&self.vcpu.fd).unwrap();
        if self.vcpu.step(&shared, &kicks).is_break() {
            return false;
        }
        loop {
            match self.vcpu.finish_exit(&shared) {
                std::ops::ControlFlow::Continue(true) => return true,
                std::ops::ControlFlow::Continue(false) => {}
                std::ops::ControlFlow::Break(()) => return false,
            }
        }
    }
}

/// Two VMs with a guest in their memory; `None` where there is no KVM.
fn hosts(code: &[u8], x2apic: bool) -> Option<([Host; 2], Arc<Console>)> {
    if let Err(error) = OpenOptions::new().read(true).write(true).open("/dev/kvm") {
        println!("SKIPPED: /dev/kvm cannot be opened: {error}");
        return None;
    }
    let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 4 << 20)]).unwrap();
    regs::write_boot_tables(&memory).unwrap();
    let entry = GuestAddress(tiny_guests::ENTRY);
    memory.write_slice(code, entry).unwrap();
    let flag = GuestAddress(tiny_guests::apic::X2APIC_FLAG);
    memory.write_obj(u8::from(x2apic), flag).unwrap();
    let console = Arc::default();
    let hosts = [(); 2].map(|()| Host::new(&memory, &console));
    regs::set_boot_registers(&hosts[0].vcpu.fd, entry).unwrap();
    Some((hosts, console))
}

#[test]
fn a_guest_that_moves_after_each_exit_finds_everything_as_it_was() {
    for x2apic in [false, true] {
        let code = tiny_guests::moves::keep_state::code();
        let Some((hosts, console)) = hosts(code, x2apic) else {
            return;
        };
        let [mut here, mut there] = hosts;
        let (begin, mut moves) = (Instant::now(), 0);
        while here.run_on() {
            let state = VcpuState::decode(0, &here.save().encode()).unwrap();
            there.install(&state).unwrap();
            std::mem::swap(&mut here, &mut there);
            moves += 1;
            let said = console.0.lock().unwrap().clone();
            assert!(begin.elapsed() < LIMIT, "{moves} moves, {said:?}");
        }
        let end = here.shared.control.take_end();
        let said = String::from_utf8_lossy(&console.0.lock().unwrap()).into_owned();
        assert_eq!(said, "k", "{end:?}");
        println!("{moves} moves in {:?}", begin.elapsed());
        assert!(moves >= 500, "{moves} moves");
    }
}

#[test]
fn a_state_is_the_same_after_a_move() {
    let Some((hosts, _)) = hosts(tiny_guests::moves::keep_state::code(), false) else {
        return;
    };
    let [mut here, mut there] = hosts;
    for _ in 0..30 {
        assert!(here.run_on());
    }
    let mut state = here.save();
    // Registers that the guest did not use, and what is posted.
    for (word, at) in state.registers.fpu.region[40..104].iter_mut().zip(1..) {
        *word = at * 0x0101_0101;
    }
    // The header: SSE is in use.
    state.registers.fpu.region[128] |= 3;
    state.registers.debug.db = [0x1000, 0x2000, 0x3000, 0x4000];
    state.local.posted.nmi = true;
    state.local.posted.edge.insert(0x77);
    let bytes = state.encode();
    there
        .install(&VcpuState::decode(0, &bytes).unwrap())
        .unwrap();
    let mut again = there.save();
    assert!(again.clock.ticks >= state.clock.ticks, "time went back");
    // What has changed while it moved.
    again.clock.ticks = state.clock.ticks;
    again.local.apic.expires_in_ns = state.local.apic.expires_in_ns;
    assert_eq!(format!("{again:#?}"), format!("{state:#?}"));
    assert_eq!(again.encode(), bytes);
}

#[test]
fn a_state_that_no_vcpu_has_is_refused_by_name() {
    let Some((hosts, _)) = hosts(tiny_guests::moves::keep_state::code(), false) else {
        return;
    };
    let [mut here, mut there] = hosts;
    assert!(here.run_on());
    let bytes = here.save().encode();
    let mut refused = |change: &dyn Fn(&mut VcpuState), text: &str| {
        let mut state = VcpuState::decode(0, &bytes).unwrap();
        change(&mut state);
        let state = VcpuState::decode(0, &state.encode());
        let error = match state {
            Err(error) => error.to_string(),
            Ok(state) => {
                let error = there.install(&state).unwrap_err();
                let cause = std::error::Error::source(&error).map(ToString::to_string);
                format!("{error}: {}", cause.unwrap_or_default())
            }
        };
        assert!(error.contains(text), "{error}");
    };
    refused(&|state| state.clock.khz += 1, "kHz");
    refused(
        &|state| state.clock.ticks += u64::from(state.clock.khz) * 100_000,
        "ticks behind",
    );
    refused(
        &|state| state.local.apic.spurious = 0x8000,
        "spurious vector",
    );
    refused(&|state| state.local.apic.version = 9, "version 9");
    refused(&|state| state.local.apic.id = 4, "the number 4");
    refused(&|state| state.local.at_exit.cr8 = 16, "CR8 is 0x10");
    refused(
        &|state| state.registers.extended.nr_xcrs = 17,
        "control registers is 0x11, 0x10 is the most",
    );
    refused(
        &|state| {
            let (index, value) = (0x1234_5678, 1);
            state.registers.msrs.push(Msr { index, value });
        },
        "register 0x12345678 to 0x1",
    );
    // Long mode without paging tables that have 64-bit entries.
    refused(
        &|state| state.registers.special.cr4 = 0,
        "segment registers",
    );
    assert_eq!(
        VcpuState::decode(1, &bytes).unwrap_err(),
        StateError::OtherCpu { found: 0 }
    );
    let mut longer = bytes.clone();
    longer.push(0);
    let error = VcpuState::decode(0, &longer).unwrap_err();
    assert_eq!(error, StateError::Long { bytes: 1 });
    let older = VcpuState::decode(0, &[&[9, 9], &bytes[2..]].concat());
    assert_eq!(older.unwrap_err(), StateError::Version { found: 0x909 });
    for end in 0..bytes.len() {
        let error = VcpuState::decode(0, &bytes[..end]).unwrap_err();
        assert!(matches!(error, StateError::Short { .. }), "{end}: {error}");
    }
}

proptest! {
    #[test]
    fn what_is_decoded_has_one_encoding(
        changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..8)
    ) {
        let mut state = VcpuState::default();
        state.local.apic.version = ssi_hv_irqchip::STATE_VERSION;
        state.registers.msrs.push(Msr { index: 1, value: 2 });
        let mut bytes = state.encode();
        for (at, value) in changes {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        if let Ok(state) = VcpuState::decode(0, &bytes) {
            prop_assert_eq!(state.encode(), bytes);
        }
    }
}
