//! What becomes of a process that is killed while a kernel thread of KVM waits for one of its pages.
//!
//! Such a thread resolves the page faults of a vCPU whose guest has interrupts enabled. The end of the
//! virtual machine waits for it, and the end of userfaultfd lets it continue. The kernel closes the
//! descriptors of a process that ends from the highest number down.

use std::io::{self, BufRead as _, BufReader, Write as _};
use std::os::fd::{AsFd, AsRawFd as _, OwnedFd};
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{fcntl_dupfd_cloexec, read};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

use crate::sys::{Kvm, Mapping, PAGE_SIZE, UFFD_FEATURE_THREAD_ID, Uffd, fill_with_zeroes};

/// The command line of the process that is killed.
pub const VICTIM: &str = "pending-victim";

/// A number above those of all other descriptors of the victim.
const HIGH: i32 = 500;
/// How long the vCPU may take to its fault, and a process that is killed to its end. Emulated hosts are slow.
const FAULT_DEADLINE: Duration = Duration::from_secs(30);
const END_DEADLINE: Duration = Duration::from_secs(5);
/// How long the process may take to its end once nothing waits any more.
const RESCUE_DEADLINE: Duration = Duration::from_secs(30);

/// In real mode: interrupts are enabled, and a byte of page 1 is read.
const GUEST: &[u8] = &[
    0xfb, // sti
    0x90, // nop: an instruction later they are enabled
    0xa0, 0x00, 0x10, // mov al, [0x1000]
    0xf4, // hlt
];
/// Bytes of `struct uffd_msg`, and where in it the page fault's thread is.
const MESSAGE_BYTES: usize = 32;
const MESSAGE_THREAD: std::ops::Range<usize> = 24..28;

/// Where userfaultfd's descriptor is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    /// Above those of KVM: it is closed first.
    High,
    /// Below.
    Low,
}

impl Order {
    fn named(word: Option<&str>) -> io::Result<Self> {
        match word {
            Some("high") => Ok(Self::High),
            Some("low") => Ok(Self::Low),
            _ => Err(io::Error::other("which order? high or low")),
        }
    }
}

/// Kills a process in that state, and prints whether it ends. With the low order this process has the page
/// filled at the end, so that nothing is left behind.
pub fn run(order: Option<&str>) -> io::Result<()> {
    let word = order.unwrap_or_default();
    let order = Order::named(order)?;
    let mut victim = Command::new("/proc/self/exe")
        .args([VICTIM, word])
        .stdout(Stdio::piped())
        .spawn()?;
    let result = kill(&mut victim, order);
    // A victim that does not end must not keep this process.
    if result.is_err() {
        let _ = victim.kill();
    }
    result
}

fn kill(victim: &mut Child, order: Order) -> io::Result<()> {
    let mut line = String::new();
    let said = victim.stdout.take().ok_or(io::ErrorKind::BrokenPipe)?;
    BufReader::new(said).read_line(&mut line)?;
    let words: Vec<&str> = line.split_whitespace().collect();
    let [uffd, page, by] = words[..] else {
        return Err(io::Error::other(format!("the victim said {line:?}")));
    };
    let (uffd, page) = (number(uffd)?, number(page)?);
    let pid = Pid::from_child(victim);
    let pidfd = pidfd_open(pid, PidfdFlags::empty())?;
    // A second owner would keep userfaultfd open, which the high order must do without.
    let rescue = match order {
        Order::High => None,
        Order::Low => {
            let uffd = i32::try_from(uffd).map_err(io::Error::other)?;
            let uffd = pidfd_getfd(&pidfd, uffd, PidfdGetfdFlags::empty())?;
            Some(Uffd::from(uffd))
        }
    };
    println!("pending: the fault of {by} at {page:#x}, userfaultfd is number {uffd}");
    let begin = Instant::now();
    victim.kill()?;
    if is_readable(&pidfd, END_DEADLINE)? {
        let status = victim.wait()?;
        let (signal, time) = (status.signal().unwrap_or(0), begin.elapsed());
        println!("ended by signal {signal} after {} ms", time.as_millis());
        return Ok(());
    }
    let stack = std::fs::read_to_string(format!("/proc/{}/stack", victim.id()));
    let stack = stack.unwrap_or_else(|error| error.to_string());
    println!("does not end within {} s:\n{stack}", END_DEADLINE.as_secs());
    if let Some(uffd) = rescue {
        fill_with_zeroes(&uffd, page)?;
        if is_readable(&pidfd, RESCUE_DEADLINE)? {
            victim.wait()?;
            println!("ended when its page was filled");
        }
    }
    Ok(())
}

fn number(text: &str) -> io::Result<u64> {
    text.parse().map_err(io::Error::other)
}

/// Waits until there is something to read.
fn is_readable(fd: impl AsFd, within: Duration) -> io::Result<bool> {
    let timeout = Timespec::try_from(within).map_err(io::Error::other)?;
    let mut fds = [PollFd::new(&fd, PollFlags::IN)];
    Ok(poll(&mut fds, Some(&timeout))? > 0)
}

/// Lets a vCPU fault on a page that is never filled, prints that, and waits to be killed.
pub fn victim(order: Option<&str>) -> io::Result<()> {
    let order = Order::named(order)?;
    let (uffd, _) = Uffd::create(UFFD_FEATURE_THREAD_ID)?;
    let uffd = match order {
        Order::Low => uffd,
        // The low one is closed.
        Order::High => Uffd::from(fcntl_dupfd_cloexec(OwnedFd::from(uffd), HIGH)?),
    };
    let kvm = Kvm::open()?;
    let vm = kvm.create_vm()?;
    vm.create_irqchip()?;
    let memory = Mapping::memory(2 * PAGE_SIZE)?;
    memory.write(GUEST);
    uffd.register(memory.page(1))?;
    vm.set_memory(&memory)?;
    let vcpu = Arc::new(vm.create_vcpu()?);
    vcpu.start_at_zero()?;
    let run = vcpu.map_run(kvm.run_bytes()?)?;
    let runner = Arc::clone(&vcpu);
    thread::spawn(move || {
        let ended = runner.run();
        // It is killed before.
        eprintln!("the vCPU has returned: {ended:?}");
    });
    let uffd = OwnedFd::from(uffd);
    if !is_readable(&uffd, FAULT_DEADLINE)? {
        return Err(io::Error::other("the vCPU has not faulted"));
    }
    let mut message = [0; MESSAGE_BYTES];
    read(&uffd, &mut message)?;
    let mut thread = [0; 4];
    thread.copy_from_slice(&message[MESSAGE_THREAD]);
    let thread = u32::from_ne_bytes(thread);
    let of_vcpu = Path::new(&format!("/proc/self/task/{thread}")).exists();
    let by = if of_vcpu { "vcpu" } else { "kworker" };
    // The mapping would keep the vCPU, and with it the machine, for as long as the kernel thread has the
    // address space.
    run.unmap()?;
    println!("{} {} {by}", uffd.as_raw_fd(), memory.page(1));
    io::stdout().flush()?;
    loop {
        thread::park();
    }
}
