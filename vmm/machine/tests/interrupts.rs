//! Interrupts of guests of a few instructions, on the real KVM of the host. A test whose host has
//! no KVM says `SKIPPED` and does nothing.

mod support;

use std::io::Write;
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::{Duration, Instant};

use ssi_hv_machine::{
    ConsoleConfig, Irqchip, Machine, MachineConfig, MachineError, MachineHandle, Outcome,
    guest_memory_ranges,
};
use tiny_guests::apic::{
    ACTIVITY, X2APIC_FLAG, lower_cr8, ping_pong, restart_cpu, take_interrupts,
};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use support::{ConsoleSender, kvm_is_there, machine_config, wait_for};

/// No step takes longer on a host that works, however loaded.
const LIMIT: Duration = Duration::from_secs(60);

/// A guest on a thread of its own.
struct Running {
    handle: MachineHandle,
    said: Receiver<u8>,
    end: Receiver<Result<Outcome, MachineError>>,
}

impl Running {
    fn start(guest: Guest, code: &[u8]) -> Self {
        Self::new(guest, code).unwrap()
    }

    fn new(guest: Guest, code: &[u8]) -> Result<Self, MachineError> {
        let ranges: Vec<_> = guest_memory_ranges(4 << 20)
            .into_iter()
            .map(|(start, bytes)| (start, usize::try_from(bytes).unwrap()))
            .collect();
        let memory = GuestMemoryMmap::from_ranges(&ranges).unwrap();
        for (address, byte) in [
            (X2APIC_FLAG, u8::from(guest.x2apic)),
            (ACTIVITY, guest.activity),
        ] {
            memory.write_obj(byte, GuestAddress(address)).unwrap();
        }
        let mut kernel = tempfile::NamedTempFile::new().unwrap();
        kernel.write_all(&tiny_guests::elf(code)).unwrap();
        let config = MachineConfig {
            dedicated_cpus: guest.dedicated_cpus,
            ..machine_config(kernel.path(), guest.cpus, guest.irqchip)
        };
        let (sender, said) = mpsc::channel();
        let console = ConsoleConfig::output_only(Box::new(ConsoleSender(sender)));
        let machine = Machine::new(&config, memory, console)?;
        let handle = machine.handle();
        let (sender, end) = mpsc::channel();
        thread::spawn(move || sender.send(machine.run()));
        Ok(Self { handle, said, end })
    }

    fn wait_for(&self, byte: u8) {
        if let Err(said) = wait_for(&self.said, byte, LIMIT) {
            panic!("it only said {said}");
        }
    }

    /// How it ended, and all that it said since the last wait.
    fn finish(self) -> (Outcome, String) {
        let end = self.end.recv_timeout(LIMIT);
        if end.is_err() {
            self.handle.stop();
        }
        let said: Vec<u8> = self.said.iter().collect();
        let said = String::from_utf8_lossy(&said).into_owned();
        let Ok(end) = end else {
            panic!("it does not end, and has said {said:?}")
        };
        (end.expect("the host can run it"), said)
    }
}

#[derive(Clone, Copy, Debug)]
struct Guest {
    irqchip: Irqchip,
    dedicated_cpus: bool,
    cpus: u8,
    x2apic: bool,
    /// What the second CPU of [`restart_cpu`] does.
    activity: u8,
}

const USER: Guest = Guest {
    irqchip: Irqchip::User,
    dedicated_cpus: false,
    cpus: 1,
    x2apic: false,
    activity: 0,
};

fn takes_interrupts(guest: Guest) {
    if !kvm_is_there() {
        return;
    }
    let running = Running::start(guest, take_interrupts::code());
    running.wait_for(b'b');
    assert!(running.handle.press_power_button());
    running.wait_for(b'B');
    assert!(running.handle.press_power_button());
    let end = running.finish();
    assert_eq!(end, (Outcome::Shutdown, "m".to_owned()));
}

#[test]
fn interrupts_of_each_kind_arrive_by_the_registers_in_memory() {
    takes_interrupts(USER);
}

#[test]
fn interrupts_of_each_kind_arrive_by_model_specific_registers() {
    takes_interrupts(Guest {
        x2apic: true,
        ..USER
    });
}

#[test]
fn an_interrupt_comes_when_cr8_is_lowered_below_it() {
    if !kvm_is_there() {
        return;
    }
    for x2apic in [false, true] {
        let guest = Guest { x2apic, ..USER };
        let (outcome, said) = Running::start(guest, lower_cr8::code()).finish();
        assert_eq!(outcome, Outcome::Shutdown);
        match said.as_str() {
            "c" => {}
            "x" => println!("SKIPPED: this KVM does not exit when CR8 is lowered"),
            other => panic!("{other:?}"),
        }
    }
}

/// The output of the 8254's channel 2 rises, with ours and with KVM's.
#[test]
fn a_guest_can_wait_for_the_timer_in_port_0x61() {
    if !kvm_is_there() {
        return;
    }
    for irqchip in [Irqchip::User, Irqchip::Kernel] {
        let guest = Guest { irqchip, ..USER };
        let running = Running::start(guest, tiny_guests::wait_for_timer::code());
        // The output is high, the count was written, mode 0, both bytes of a count are written.
        running.wait_for(0xb0);
        let end = running.finish();
        assert_eq!(end, (Outcome::Shutdown, String::new()), "{irqchip:?}");
    }
}

/// What these guests expect is so with KVM's own controllers too.
#[test]
fn cpus_start_and_wake_each_other_with_the_kernels_controllers() {
    if !kvm_is_there() {
        return;
    }
    let guest = Guest {
        irqchip: Irqchip::Kernel,
        cpus: 2,
        x2apic: true,
        ..USER
    };
    for dedicated_cpus in [false, true] {
        if dedicated_cpus && !halts_stay_in_the_guest() {
            continue;
        }
        for code in [restart_cpu::code(), ping_pong::code()] {
            let guest = Guest {
                dedicated_cpus,
                ..guest
            };
            let end = Running::start(guest, code).finish();
            assert_eq!(end, (Outcome::Shutdown, "k".to_owned()), "{guest:?}");
        }
    }
}

/// Whether KVM can keep a halted vCPU in the guest.
fn halts_stay_in_the_guest() -> bool {
    let offered = kvm_is_there()
        && kvm_ioctls::Kvm::new().is_ok_and(|kvm| ssi_hv_machine::halt_exits_can_be_disabled(&kvm));
    if !offered {
        println!("SKIPPED: this KVM does not let halted vCPUs stay in the guest");
    }
    offered
}

/// What the threads of this process with this name have used of the CPU, in ticks.
fn ticks(name: &str) -> u64 {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let stats =
        tasks.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("stat")).ok());
    let of_task = |stat: String| {
        let (begin, fields) = stat.rsplit_once(')')?;
        let fields: Vec<&str> = fields.split_whitespace().collect();
        let spent = |field: usize| fields.get(field)?.parse::<u64>().ok();
        // Fields 14 and 15 of proc_pid_stat(5), of which the name was the second.
        begin.ends_with(name).then_some(spent(11)? + spent(12)?)
    };
    stats.filter_map(of_task).sum()
}

#[test]
fn a_halted_vcpu_with_a_cpu_of_its_own_keeps_it_and_can_be_stopped() {
    if !halts_stay_in_the_guest() {
        return;
    }
    let guest = Guest {
        irqchip: Irqchip::Kernel,
        dedicated_cpus: true,
        ..USER
    };
    let running = Running::start(guest, tiny_guests::halt_for_ever::code());
    running.wait_for(b'h');
    let (begin, since) = (ticks("vcpu0"), Instant::now());
    // A thread that slept would use nothing.
    while ticks("vcpu0") < begin + 20 {
        assert!(since.elapsed() < LIMIT, "the vCPU left its CPU");
        thread::yield_now();
    }
    running.handle.pause();
    assert!(running.handle.wait_until_paused(LIMIT));
    running.handle.resume();
    running.handle.stop();
    assert_eq!(running.finish().0, Outcome::Stopped);
}

#[test]
fn controllers_in_user_space_do_not_go_with_dedicated_cpus() {
    if !kvm_is_there() {
        return;
    }
    let guest = Guest {
        dedicated_cpus: true,
        ..USER
    };
    let error = Running::new(guest, take_interrupts::code()).err().unwrap();
    let text = error.to_string();
    assert!(text.contains("--dedicated-cpus cannot be used"), "{text}");
}

#[test]
fn a_cpu_is_started_a_hundred_times_whatever_it_does() {
    if !kvm_is_there() {
        return;
    }
    for x2apic in [false, true] {
        for activity in 0..3 {
            let guest = Guest {
                cpus: 2,
                x2apic,
                activity,
                ..USER
            };
            let end = Running::start(guest, restart_cpu::code()).finish();
            assert_eq!(end, (Outcome::Shutdown, "k".to_owned()), "{guest:?}");
        }
    }
}

#[test]
fn halted_cpus_wake_each_other() {
    if !kvm_is_there() {
        return;
    }
    let guest = Guest {
        cpus: 2,
        x2apic: true,
        ..USER
    };
    let end = Running::start(guest, ping_pong::code()).finish();
    assert_eq!(end, (Outcome::Shutdown, "k".to_owned()));
}

#[test]
fn a_halted_machine_is_paused_and_stopped() {
    if !kvm_is_there() {
        return;
    }
    let guest = Guest { cpus: 4, ..USER };
    let running = Running::start(guest, tiny_guests::halt_for_ever::code());
    running.wait_for(b'h');
    for _ in 0..10 {
        running.handle.pause();
        assert!(running.handle.wait_until_paused(LIMIT));
        running.handle.resume();
    }
    running.handle.stop();
    assert_eq!(running.finish().0, Outcome::Stopped);
}
