//! Guests of a few instructions on the host's KVM.
//!
//! Each guest is assembled, put into an ELF file, and booted like a kernel: in 64-bit mode, with
//! the first 4 GiB identity-mapped and interrupts off. A test on a host without KVM prints
//! `SKIPPED` and returns.

mod balloon;
mod disks;
mod xsave;

use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use ssi_hv::machine::{ConsoleConfig, Outcome, STOP_TIME_MAX};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap};

use crate::running::end;
use crate::support::{COUNTER, LIMIT, kvm_is_there, machine, memory, run, start, start_with};
use crate::terminal::Terminal;
use tiny_guests::{
    count_for_ever, echo_until_q, halt_for_ever, hello, init_reached, is_tsc_invariant,
    keyboard_reset, reset_register, run_where_no_memory_is, second_cpu, talk_for_ever,
    touch_absent_page, triple_fault, unknown_port,
};

#[test]
fn serial_output_is_captured_and_s5_ends_with_shutdown() {
    if !kvm_is_there() {
        return;
    }
    let (outcome, said) = start(hello::code()).finish();
    assert_eq!(outcome, Outcome::Shutdown);
    assert_eq!(said, "hello\n");
}

#[test]
fn reset_register_and_keyboard_controller_end_with_reboot() {
    if !kvm_is_there() {
        return;
    }
    for code in [reset_register::code(), keyboard_reset::code()] {
        assert_eq!(start(code).finish().0, Outcome::Reboot);
    }
}

#[test]
fn a_triple_fault_ends_with_a_crash_that_names_it() {
    if !kvm_is_there() {
        return;
    }
    match start(triple_fault::code()).finish().0 {
        Outcome::Crash(text) => {
            assert!(text.contains("triple fault on vCPU 0"), "{text}");
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn running_where_no_memory_is_ends_with_a_crash() {
    if !kvm_is_there() {
        return;
    }
    match start(run_where_no_memory_is::code()).finish().0 {
        // The words depend on how the host's KVM reports the failure.
        Outcome::Crash(text) => {
            println!("{text}");
            assert!(text.contains("on vCPU 0"), "{text}");
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_time_to_init_is_measured() {
    if !kvm_is_there() {
        return;
    }
    let running = start(init_reached::code());
    assert_eq!(running.outcome(), Outcome::Shutdown);
    let to_init = running.handle.time_to_init().unwrap();
    assert!(to_init > Duration::ZERO && to_init < LIMIT);

    let running = start(hello::code());
    assert_eq!(running.outcome(), Outcome::Shutdown);
    assert_eq!(running.handle.time_to_init(), None);
}

#[test]
fn ports_without_a_device_read_as_ones() {
    if !kvm_is_there() {
        return;
    }
    let running = start(unknown_port::code());
    assert_eq!(running.outcome(), Outcome::Shutdown);
    let said: Vec<u8> = running.output.iter().collect();
    // The first byte goes to the transmit register; the others go to the registers after it.
    assert_eq!(said, [0xff]);
}

#[test]
fn a_second_cpu_starts_by_init_and_start_up_interrupts() {
    if !kvm_is_there() {
        return;
    }
    let (outcome, said) = start_with(second_cpu::code(), 2, memory(), None).finish();
    assert_eq!(outcome, Outcome::Shutdown);
    assert_eq!(said, "AB");
}

#[test]
fn the_clock_of_the_guest_is_as_stable_as_the_hosts() {
    if !kvm_is_there() {
        return;
    }
    let host = std::fs::read_to_string("/proc/cpuinfo").unwrap();
    let is_stable = host.split_whitespace().any(|flag| flag == "nonstop_tsc");
    let (outcome, said) = start(is_tsc_invariant::code()).finish();
    assert_eq!(outcome, Outcome::Shutdown);
    assert_eq!(said, if is_stable { "1" } else { "0" });
}

/// Waits until the counter of [`count_for_ever`] changes.
fn wait_for_progress(memory: &GuestMemoryMmap) {
    let deadline = Instant::now() + LIMIT;
    let first: u64 = memory.read_obj(COUNTER).unwrap();
    while memory.read_obj::<u64>(COUNTER).unwrap() == first {
        assert!(Instant::now() < deadline, "the guest makes no progress");
        thread::yield_now();
    }
}

#[test]
fn a_paused_guest_stands_still_and_goes_on_when_resumed() {
    if !kvm_is_there() {
        return;
    }
    let memory = memory();
    let running = start_with(count_for_ever::code(), 2, memory.clone(), None);
    running.wait_for(b'r');
    for _ in 0..10 {
        wait_for_progress(&memory);
        running.handle.pause();
        assert!(running.handle.wait_until_paused(LIMIT));
        let paused: u64 = memory.read_obj(COUNTER).unwrap();
        for _ in 0..10_000 {
            assert_eq!(memory.read_obj::<u64>(COUNTER).unwrap(), paused);
        }
        running.handle.resume();
    }
    wait_for_progress(&memory);
    running.handle.stop();
    assert_eq!(running.outcome(), Outcome::Stopped);
}

#[test]
fn stop_ends_a_guest_that_spins_halts_or_is_paused() {
    if !kvm_is_there() {
        return;
    }
    let running = start(count_for_ever::code());
    running.wait_for(b'r');
    running.handle.stop();
    assert_eq!(running.outcome(), Outcome::Stopped);

    let running = start_with(halt_for_ever::code(), 4, memory(), None);
    running.wait_for(b'h');
    running.handle.stop();
    assert_eq!(running.outcome(), Outcome::Stopped);

    let running = start(count_for_ever::code());
    running.wait_for(b'r');
    running.handle.pause();
    assert!(running.handle.wait_until_paused(LIMIT));
    running.handle.stop();
    assert_eq!(running.outcome(), Outcome::Stopped);
    // A handle outlives its machine.
    running.handle.resume();
    running.handle.stop();
}

#[test]
fn a_machine_stopped_before_it_runs_does_not_run() {
    if !kvm_is_there() {
        return;
    }
    let console = ConsoleConfig::output_only(Box::new(io::sink()));
    let machine = machine(count_for_ever::code(), 1, memory(), console);
    machine.handle().stop();
    assert_eq!(machine.run().unwrap(), Outcome::Stopped);
}

#[test]
fn input_from_pipes_and_files_reaches_the_guest_whole() {
    if !kvm_is_there() {
        return;
    }
    // More than the port's buffer holds.
    let text = "0123456789abcdefghijklmnop".repeat(20) + "q";

    let (reader, mut writer) = io::pipe().unwrap();
    let running = start_with(echo_until_q::code(), 1, memory(), Some(reader.into()));
    running.wait_for(b'>');
    writer.write_all(text.as_bytes()).unwrap();
    drop(writer);
    let (outcome, said) = running.finish();
    assert_eq!((outcome, said), (Outcome::Shutdown, text.clone()));

    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(text.as_bytes()).unwrap();
    let input = file.reopen().unwrap().into();
    let running = start_with(echo_until_q::code(), 1, memory(), Some(input));
    let (outcome, said) = running.finish();
    assert_eq!((outcome, said), (Outcome::Shutdown, format!(">{text}")));
}

#[test]
fn input_that_is_empty_or_closed_does_no_harm() {
    if !kvm_is_there() {
        return;
    }
    let null = std::fs::File::open("/dev/null").unwrap();
    let (closed, writer) = io::pipe().unwrap();
    drop(writer);
    for input in [OwnedFd::from(null), closed.into()] {
        let (outcome, said) = start_with(hello::code(), 1, memory(), Some(input)).finish();
        assert_eq!((outcome, said.as_str()), (Outcome::Shutdown, "hello\n"));
    }
}

/// Set for the process in which [`machine_on_a_terminal`] is active.
const ON_A_TERMINAL: &str = "SSI_HV_TEST_ON_A_TERMINAL";

/// Not a test by itself: runs a machine on the terminal at its standard input, for
/// `a_terminal_is_raw_while_the_machine_runs`.
#[test]
fn machine_on_a_terminal() {
    if std::env::var_os(ON_A_TERMINAL).is_some() {
        // On a raw terminal a line feed still starts a new line.
        let console =
            ConsoleConfig::stdio().on_raw_mode(|| eprintln!("type Ctrl-A x to stop the guest"));
        let machine = machine(halt_for_ever::code(), 1, memory(), console);
        assert_eq!(machine.run().unwrap(), Outcome::Stopped);
    }
}

/// Returns the local modes of a terminal that raw mode switches off.
fn cooked_modes(terminal: &OwnedFd) -> libc::tcflag_t {
    let mut settings = std::mem::MaybeUninit::<libc::termios>::uninit();
    // SAFETY: `settings` has room for what `tcgetattr` writes.
    let result = unsafe { libc::tcgetattr(terminal.as_raw_fd(), settings.as_mut_ptr()) };
    assert_eq!(result, 0);
    // SAFETY: `tcgetattr` has succeeded, so it has filled the struct.
    let settings = unsafe { settings.assume_init() };
    settings.c_lflag & (libc::ICANON | libc::ECHO | libc::ISIG)
}

#[test]
fn a_terminal_is_raw_while_the_machine_runs() {
    if !kvm_is_there() {
        return;
    }
    let (mut user, program) = Terminal::open(24, 80);
    let cooked = cooked_modes(&program);
    assert_ne!(cooked, 0);
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args([
            "--exact",
            "tiny_guest::machine_on_a_terminal",
            "--nocapture",
        ])
        .env(ON_A_TERMINAL, "1")
        .stdin(program.try_clone().unwrap())
        .stdout(program.try_clone().unwrap())
        .stderr(program.try_clone().unwrap());
    // SAFETY: the closure makes only system calls that are safe between fork and exec, and
    // makes standard input the controlling terminal of a new session.
    unsafe {
        command.pre_exec(|| {
            if libc::setsid() < 0 || libc::ioctl(0, libc::TIOCSCTTY, 0) < 0 {
                return Err(io::Error::last_os_error());
            }
            Ok(())
        });
    }
    let mut child = command.spawn().unwrap();
    let mut seen = Vec::new();
    // The hint, printed in raw mode, then the guest's output.
    while !seen.ends_with(b"guest\r\nh") {
        let mut byte = [0];
        let limit = i32::try_from(LIMIT.as_millis()).unwrap();
        let mut poll = libc::pollfd {
            fd: user.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: `poll` is one valid `pollfd`, which lives through the call.
        let ready = unsafe { libc::poll(&raw mut poll, 1, limit) };
        assert_eq!(ready, 1, "{}", String::from_utf8_lossy(&seen));
        user.read_exact(&mut byte).unwrap();
        seen.push(byte[0]);
    }
    assert_eq!(cooked_modes(&program), 0);
    user.write_all(b"\x01x").unwrap();
    let status = end::end_within(&mut child, LIMIT).expect("it ends");
    assert!(status.success(), "{status}");
    assert_eq!(cooked_modes(&program), cooked);
}

/// Returns the CPU time of the calling thread.
fn thread_time() -> Duration {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `time` is a valid `timespec` to write to.
    let result = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    assert_eq!(result, 0);
    Duration::new(
        u64::try_from(time.tv_sec).unwrap(),
        u32::try_from(time.tv_nsec).unwrap(),
    )
}

#[test]
fn input_that_has_ended_costs_no_processor_time() {
    if !kvm_is_there() {
        return;
    }
    // The file stays open elsewhere, as a process's standard input does.
    let (reader, writer) = io::pipe().unwrap();
    let elsewhere = reader.try_clone().unwrap();
    drop(writer);
    let console = ConsoleConfig::new(reader.into(), Box::new(io::sink()));
    let machine = machine(halt_for_ever::code(), 1, memory(), console);
    let handle = machine.handle();
    let stopper = thread::spawn(move || {
        // Not a wait for an event, but the period of the measurement.
        thread::sleep(Duration::from_millis(500));
        handle.stop();
    });
    let before = thread_time();
    assert_eq!(machine.run().unwrap(), Outcome::Stopped);
    let taken = thread_time() - before;
    stopper.join().unwrap();
    drop(elsewhere);
    assert!(taken < Duration::from_millis(100), "{taken:?}");
}

/// Blocks in its first write until the lock is released.
struct Blocked(Arc<Mutex<()>>, mpsc::Sender<()>);

impl Write for Blocked {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        let _ = self.1.send(());
        drop(self.0.lock());
        Ok(buf.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_blocked_console_does_not_keep_the_machine_from_stopping() {
    if !kvm_is_there() {
        return;
    }
    let gate = Arc::new(Mutex::new(()));
    let closed_gate = gate.lock().unwrap();
    let (sender, blocked) = mpsc::channel();
    let console = ConsoleConfig::output_only(Box::new(Blocked(Arc::clone(&gate), sender)));
    let machine = machine(talk_for_ever::code(), 1, memory(), console);
    let running = run(machine, mpsc::channel().1);
    blocked.recv_timeout(LIMIT).unwrap();
    running.handle.stop();
    assert_eq!(running.outcome(), Outcome::Stopped);
    assert!(running.handle.all_vcpus_ended());
    drop(closed_gate);
}

#[test]
fn a_vcpu_that_waits_for_a_page_holds_up_neither_pause_nor_stop() {
    if !kvm_is_there() {
        return;
    }
    let memory = memory();
    let page = memory.get_host_address(GuestAddress(0x30_0000)).unwrap();
    let uffd = match userfaultfd::UffdBuilder::new()
        .close_on_exec(true)
        .user_mode_only(false)
        .create()
    {
        Ok(uffd) => uffd,
        Err(error) => {
            println!("SKIPPED: no userfaultfd for faults of the kernel: {error}");
            return;
        }
    };
    uffd.register(page.cast(), 4096).unwrap();
    let running = start_with(touch_absent_page::code(), 1, memory.clone(), None);
    let event = uffd.read_event().unwrap().unwrap();
    assert!(matches!(event, userfaultfd::Event::Pagefault { .. }));

    running.handle.pause();
    assert!(!running.handle.wait_until_paused(Duration::from_millis(50)));
    let stopped_at = Instant::now();
    running.handle.stop();
    assert_eq!(running.outcome(), Outcome::Stopped);
    assert!(
        stopped_at.elapsed() >= STOP_TIME_MAX,
        "the vCPU left the guest"
    );

    // SAFETY: the page is part of `memory`, which is alive, and registered.
    unsafe { uffd.zeropage(page.cast(), 4096, true) }.unwrap();
}
