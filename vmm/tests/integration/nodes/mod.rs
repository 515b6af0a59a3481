//! Guests whose vCPUs are in several processes.

mod clocks;
mod commands;
mod delegated;
mod donors;
mod free_pages;
mod hotplug;
mod leases;
mod lifecycle;
mod litmus;
mod moves;
mod secured;

use std::io::Write;
use std::net::{IpAddr, Ipv4Addr};
use std::path::Path;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use memory_fabric::compute::{
    ComputeLease, ComputeRequest, ComputeTable, Layout, Listeners, Membership, VmSecret, member,
};
use memory_fabric::guest_memory::GuestMemory;
use ssi_hv::compute::{Connect, Joined, RdmaOfNode, VmProcess, byte_ranges, random_vm};
use ssi_hv::machine::{
    ConsoleConfig, Irqchip, Machine, MachineConfig, MachineError, MachineHandle, MoveError,
    Outcome, guest_memory_ranges,
};
use tiny_guests::apic::X2APIC_FLAG;
use tiny_guests::nodes::{ROUNDS, interrupts_between_nodes, work_on_two_nodes};
use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap, GuestRegionMmap};

use crate::support::{LIMIT, MEMORY_BYTES, Sender, kvm_is_there};

const HERE: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

/// The guest view of a memory that outlives what this returns.
fn view(memory: &GuestMemory) -> GuestMemoryMmap {
    // SAFETY: the view is mapped while `memory` lives, which the test drops after the machine.
    let region = unsafe {
        MmapRegionBuilder::new(memory.bytes())
            .with_raw_mmap_pointer(memory.guest_view())
            .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
            .with_mmap_flags(libc::MAP_SHARED | libc::MAP_NORESERVE)
            .build()
    };
    let region = GuestRegionMmap::new(region.unwrap(), GuestAddress(0)).unwrap();
    GuestMemoryMmap::from_regions(vec![region]).unwrap()
}

/// What a new VM asks of its second node.
fn request() -> (VmSecret, ComputeRequest) {
    let (vm, secret) = random_vm().unwrap();
    let request = ComputeRequest {
        name: "test".to_owned(),
        vm,
        secret,
        me: 1,
        nodes: 2,
        cpus: 1,
        memory_bytes: MEMORY_BYTES,
        hotplug_bytes: 0,
        lent_bytes: MEMORY_BYTES / 2,
        merge_tables: false,
        in_order: false,
        rdma: false,
    };
    (secret, request)
}

fn start(request: &ComputeRequest, secured: bool) -> VmProcess {
    let program = Path::new(env!("CARGO_BIN_EXE_ssi-hv"));
    VmProcess::start(program, request, HERE, secured, &RdmaOfNode::Off).unwrap()
}

/// A guest whose second vCPU is in another process.
#[derive(Clone, Copy)]
struct Guest {
    code: fn() -> &'static [u8],
    x2apic: bool,
    /// Whether all connections are under TLS.
    secured: bool,
    /// How often each CPU interrupts the other, where the guest asks.
    rounds: u32,
    /// All that it says after what the test awaits.
    says: &'static str,
    /// Pages that go from the process to the primary, at least.
    pages_min: u64,
    limit: Duration,
}

const WORK: Guest = Guest {
    code: work_on_two_nodes::code,
    x2apic: false,
    secured: false,
    rounds: 0,
    says: "lk",
    pages_min: 100,
    limit: LIMIT,
};

/// Starts a guest, and calls `with` once both vCPUs run, which fails when the guest is silent. The
/// guest has to end by itself.
fn run_in_two_processes(
    guest: Guest,
    with: impl FnOnce(&MachineHandle, &mpsc::Receiver<u8>) -> Result<(), mpsc::RecvTimeoutError>,
) {
    let outcome = run_in_two_processes_with(guest, Vec::new(), with);
    assert_eq!(outcome.unwrap(), Outcome::Shutdown);
}

/// The same with leases of the other process, for any end.
fn run_in_two_processes_with(
    wanted: Guest,
    leases: Vec<ComputeLease>,
    with: impl FnOnce(&MachineHandle, &mpsc::Receiver<u8>) -> Result<(), mpsc::RecvTimeoutError>,
) -> Result<Outcome, MachineError> {
    let (secret, request) = request();
    let vm = request.vm;
    let mut process = start(&request, wanted.secured);
    let listeners = match wanted.secured {
        true => Listeners::secured(HERE, vm, 0),
        false => Listeners::bind(HERE),
    };
    let listeners = listeners.unwrap();
    let table = ComputeTable(vec![
        member(HERE, listeners.ports().unwrap(), MEMORY_BYTES / 2),
        member(HERE, process.ports(), MEMORY_BYTES / 2),
    ]);
    let may_fail = !leases.is_empty();
    let connect = Connect {
        table: table.clone(),
        leases,
        authorities: Vec::new(),
    };
    process.connect(&connect).unwrap();
    let membership = Membership {
        me: 0,
        vm,
        secret,
        table,
        ranges: byte_ranges(&guest_memory_ranges(MEMORY_BYTES)),
        merge_tables: false,
        layout: Layout::Mixed,
        rdma: None,
    };
    let memory = Arc::new(GuestMemory::new(usize::try_from(MEMORY_BYTES).unwrap()).unwrap());
    let failed = move |error| {
        eprintln!("{error}");
        if !may_fail {
            // Threads that wait for a page would wait for ever.
            std::process::abort();
        }
    };
    let of_guest = Arc::clone(&memory);
    let joined = Joined::connect(membership, listeners, of_guest, vec![0, 1], failed).unwrap();
    assert_eq!(joined.clock, None, "the primary's clock is the VM's");

    let guest = view(&memory);
    let flag = GuestAddress(X2APIC_FLAG);
    guest.write_obj(u8::from(wanted.x2apic), flag).unwrap();
    guest
        .write_obj(wanted.rounds, GuestAddress(ROUNDS))
        .unwrap();
    let mut kernel = tempfile::NamedTempFile::new().unwrap();
    let code = tiny_guests::elf((wanted.code)());
    kernel.write_all(&code).unwrap();
    let config = MachineConfig {
        hotplug_bytes: 0,
        survives_lost_memory: false,
        kernel: kernel.path().to_owned(),
        initrd: None,
        cmdline: String::new(),
        cpus: 2,
        pinning: Vec::new(),
        dedicated_cpus: false,
        irqchip: Irqchip::User,
        devices: Vec::new(),
        numa: Vec::new(),
    };
    let (sender, said) = mpsc::channel();
    let console = ConsoleConfig::output_only(Box::new(Sender::new(sender)));
    let machine = Machine::with_nodes(&config, guest, console, joined.nodes).unwrap();
    let handle = machine.handle();
    let (sender, end) = mpsc::channel();
    thread::spawn(move || sender.send(machine.run()));
    let silent = with(&handle, &said).err();
    let outcome = end.recv_timeout(wanted.limit).expect("it does not end");
    assert_eq!(silent, None, "the machine ended with {outcome:?}");
    if outcome.is_err() {
        // A vCPU may wait for a page.
        std::mem::forget(joined.shared);
        return outcome;
    }
    assert_eq!(
        String::from_utf8(said.iter().collect()).unwrap(),
        wanted.says
    );
    let stats = joined.shared.stats();
    let (faults, pages) = (stats.faults.get(), stats.from_member.get());
    println!("{faults} faults here, {pages} pages from the other process");
    assert!(
        pages >= wanted.pages_min,
        "only {pages} pages came from the process"
    );
    drop(joined.shared);
    assert_eq!(process.end(Instant::now() + LIMIT).reason, "");
    outcome
}

fn works(x2apic: bool, secured: bool) {
    if !kvm_is_there() {
        return;
    }
    let guest = Guest {
        x2apic,
        secured,
        ..WORK
    };
    run_in_two_processes(guest, |handle, said| {
        while said.recv_timeout(LIMIT)? != b'b' {}
        assert!(handle.press_power_button());
        Ok(())
    });
}

/// Both CPUs change places with each other for as long as the guest works.
#[test]
fn two_cpus_that_move_between_two_processes_work_together() {
    moves(false);
}

#[test]
fn two_cpus_that_move_between_two_processes_work_together_under_tls() {
    moves(true);
}

fn moves(secured: bool) {
    if !kvm_is_there() {
        return;
    }
    run_in_two_processes(Guest { secured, ..WORK }, |handle, said| {
        let moving = handle.clone();
        let moving = thread::spawn(move || {
            let mut moves = 0;
            for (cpu, node) in [(1, 0), (0, 1), (0, 0), (1, 1)].into_iter().cycle() {
                match moving.move_vcpu(cpu, node) {
                    Ok(()) => moves += 1,
                    Err(MoveError::Ended) => break,
                    // On a busy host; the deadline is that of the guest.
                    Err(MoveError::Late { .. } | MoveError::Moves { .. }) => {}
                    Err(error) => panic!("move {moves}: {error}"),
                }
            }
            moves
        });
        while said.recv_timeout(LIMIT)? != b'b' {}
        assert!(handle.press_power_button());
        let moves = moving.join().expect("it moves");
        println!("{moves} moves");
        assert!(moves > 100, "{moves} moves");
        Ok(())
    });
}

#[test]
fn two_cpus_in_two_processes_work_together() {
    works(false, false);
}

#[test]
fn two_cpus_in_two_processes_work_together_under_tls() {
    works(false, true);
}

#[test]
fn two_cpus_in_two_processes_work_together_in_x2apic_mode() {
    works(true, false);
}

/// Each CPU interrupts the other as often, with a non-maskable interrupt before every eighth.
fn interrupts(x2apic: bool, rounds: u32) {
    if !kvm_is_there() {
        return;
    }
    let guest = Guest {
        code: interrupts_between_nodes::code,
        x2apic,
        rounds,
        says: "k",
        // Interrupts move none; what counts them does.
        pages_min: 1,
        // A round takes a few milliseconds on a machine that is busy.
        limit: LIMIT + Duration::from_millis(10) * rounds,
        ..WORK
    };
    run_in_two_processes(guest, |_, _| Ok(()));
}

#[test]
fn no_interrupt_between_processes_is_lost() {
    interrupts(false, 2000);
}

#[test]
#[ignore = "takes minutes; scripts/test --long runs it"]
fn no_interrupt_of_a_hundred_thousand_between_processes_is_lost() {
    interrupts(true, 100_000);
}
