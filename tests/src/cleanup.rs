//! Removes the processes and directories of a run when this process ends.
//!
//! At the end of a run `Drop` removes them. On Ctrl-C and SIGTERM a thread removes everything in a
//! register and then ends the process. If this process is killed, the kernel kills its children
//! (`PR_SET_PDEATHSIG`), and the next run removes the directories.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use crate::sys;

/// Name prefix of run directories in the directory for temporary files; the process id follows.
const PREFIX: &str = "ssi-hv-testbed-";

#[derive(Debug)]
enum Entry {
    Process(Arc<Mutex<Child>>),
    Directory(PathBuf),
    File(PathBuf),
    /// A process that another process started for us.
    Stranger(Arc<OwnedFd>),
}

static REGISTER: Mutex<Vec<(u64, Entry)>> = Mutex::new(Vec::new());

/// Raised before anything is killed because of a signal.
static IS_INTERRUPTED: AtomicBool = AtomicBool::new(false);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic elsewhere must not prevent the clean-up.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn register(entry: Entry) -> u64 {
    let mut register = lock(&REGISTER);
    let id = register.last().map_or(1, |(id, _)| id + 1);
    register.push((id, entry));
    id
}

fn unregister(id: u64) {
    lock(&REGISTER).retain(|(other, _)| *other != id);
}

/// Installs handlers with which SIGINT, SIGTERM and SIGHUP clean up and end this process with 128
/// plus the signal's number.
///
/// # Errors
/// Fails when the handlers cannot be installed.
pub fn on_signals() -> io::Result<()> {
    let mut signals = signal_hook::iterator::Signals::new([SIGINT, SIGTERM, SIGHUP])?;
    std::thread::Builder::new()
        .name("signals".into())
        .spawn(move || {
            if let Some(signal) = signals.forever().next() {
                IS_INTERRUPTED.store(true, Ordering::SeqCst);
                eprintln!("\ninterrupted: stopping what was started");
                // The guard is never released, so no further process can start.
                let mut register = lock(&REGISTER);
                for (_, entry) in register.drain(..).rev() {
                    match entry {
                        Entry::Process(child) => {
                            kill_group(&mut lock(&child));
                        }
                        Entry::Directory(path) => {
                            let _ = std::fs::remove_dir_all(path);
                        }
                        Entry::File(path) => {
                            let _ = std::fs::remove_file(path);
                        }
                        Entry::Stranger(process) => kill_stranger(&process),
                    }
                }
                std::process::exit(128 + signal);
            }
        })?;
    Ok(())
}

/// Never returns once a signal ends this process: what fails then, because it was killed, is no
/// result.
pub fn end_if_interrupted() {
    while IS_INTERRUPTED.load(Ordering::SeqCst) {
        std::thread::park();
    }
}

/// Kills the process group of a child that has not been reaped.
fn kill_group(child: &mut Child) {
    if let Ok(None) = child.try_wait() {
        // The child has not been reaped, so its process group id has not been reused.
        let _ = rustix::process::kill_process_group(Pid::from_child(child), Signal::KILL);
        let _ = child.wait();
    }
}

/// Removes a file when a signal ends this process.
pub fn remove_at_exit(path: &Path) {
    register(Entry::File(path.to_path_buf()));
}

/// A process that another process started for us, such as the first process of a container. It is
/// killed on drop and at exit.
#[derive(Debug)]
pub struct Stranger {
    process: Arc<OwnedFd>,
    id: u64,
}

impl Stranger {
    /// Takes ownership of a process by its id.
    ///
    /// # Errors
    /// Fails when there is no such process.
    pub fn new(pid: i32) -> io::Result<Self> {
        let pid = u32::try_from(pid).ok().and_then(|_| Pid::from_raw(pid));
        let pid = pid.ok_or(Errno::SRCH)?;
        let process = rustix::process::pidfd_open(pid, PidfdFlags::empty())?;
        let process = Arc::new(process);
        let id = register(Entry::Stranger(Arc::clone(&process)));
        Ok(Self { process, id })
    }
}

impl Drop for Stranger {
    fn drop(&mut self) {
        kill_stranger(&self.process);
        unregister(self.id);
    }
}

/// Kills the process unless it has exited.
fn kill_stranger(process: &OwnedFd) {
    let _ = rustix::process::pidfd_send_signal(process, Signal::KILL);
}

/// A child process that is killed, with its process group, on drop and at exit.
#[derive(Debug)]
pub struct Process {
    child: Arc<Mutex<Child>>,
    id: u64,
}

impl Process {
    /// Starts a command in a process group of its own, so that Ctrl-C reaches only this process.
    ///
    /// The kernel kills the child when the thread that started it ends, so the calling thread must
    /// live as long as the child is needed.
    ///
    /// # Errors
    /// Fails when the command cannot be started.
    pub fn spawn(command: &mut Command) -> io::Result<Self> {
        command.process_group(0);
        sys::die_with_parent(command);
        // While the register is locked, a signal's clean-up either precedes the start or includes
        // the child.
        let mut register = lock(&REGISTER);
        let child = Arc::new(Mutex::new(command.spawn()?));
        let id = register.last().map_or(1, |(id, _)| id + 1);
        register.push((id, Entry::Process(Arc::clone(&child))));
        Ok(Self { child, id })
    }

    /// Returns the process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        lock(&self.child).id()
    }

    /// Returns the exit status if the process has exited.
    ///
    /// # Errors
    /// Fails when the kernel does not report it.
    pub fn try_wait(&self) -> io::Result<Option<ExitStatus>> {
        lock(&self.child).try_wait()
    }

    /// Takes the process's standard output, once.
    #[must_use]
    pub fn take_stdout(&self) -> Option<std::process::ChildStdout> {
        lock(&self.child).stdout.take()
    }

    /// Sends a signal unless the process has been reaped.
    ///
    /// # Errors
    /// Fails when the process has exited.
    pub fn signal(&self, signal: i32) -> io::Result<()> {
        let mut child = lock(&self.child);
        if child.try_wait()?.is_some() {
            return Err(io::Error::from_raw_os_error(libc::ESRCH));
        }
        let signal = Signal::from_named_raw(signal).ok_or(Errno::INVAL)?;
        // The child has not been reaped, and the lock prevents it, so the id still refers to it.
        Ok(rustix::process::kill_process(
            Pid::from_child(&child),
            signal,
        )?)
    }

    /// Waits for the exit until the deadline; `None` if it passes.
    ///
    /// # Errors
    /// Fails when the kernel does not report the exit.
    pub fn wait_until(&self, deadline: Instant) -> io::Result<Option<ExitStatus>> {
        let process = {
            let mut child = lock(&self.child);
            if let Some(status) = child.try_wait()? {
                return Ok(Some(status));
            }
            // The child has not been reaped, so the id still refers to it.
            rustix::process::pidfd_open(Pid::from_child(&child), PidfdFlags::empty())?
        };
        poll_readable(&process, deadline)?;
        self.try_wait()
    }
}

fn poll_readable(fd: &OwnedFd, deadline: Instant) -> io::Result<()> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let left = Timespec::try_from(left).map_err(io::Error::other)?;
        match rustix::event::poll(&mut [PollFd::new(fd, PollFlags::IN)], Some(&left)) {
            Ok(_) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        kill_group(&mut lock(&self.child));
        unregister(self.id);
    }
}

/// A private directory for sockets, removed on drop.
#[derive(Debug)]
pub struct RunDir {
    path: PathBuf,
    id: u64,
}

impl RunDir {
    /// Creates one, after removing the directories of processes that no longer exist.
    ///
    /// # Errors
    /// Fails when it cannot be created.
    pub fn new() -> io::Result<Self> {
        // Not below target/: the path of a socket is limited to 107 bytes.
        let parent = std::env::temp_dir();
        remove_stale(&parent);
        let prefix = format!("{PREFIX}{}-", std::process::id());
        let path = tempfile::Builder::new()
            .prefix(&prefix)
            .tempdir_in(parent)?
            .keep();
        let id = register(Entry::Directory(path.clone()));
        Ok(Self { path, id })
    }

    /// Returns its path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for RunDir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.path);
        unregister(self.id);
    }
}

fn remove_stale(parent: &Path) {
    let Ok(entries) = std::fs::read_dir(parent) else {
        return;
    };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let owner = name
            .to_str()
            .and_then(|n| n.strip_prefix(PREFIX))
            .and_then(|n| n.split('-').next());
        let Some(owner) = owner.filter(|o| o.parse::<u32>().is_ok()) else {
            continue;
        };
        if !Path::new("/proc").join(owner).exists() {
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
}

/// Returns the deadline after this time.
#[must_use]
pub fn after(time: Duration) -> Instant {
    Instant::now() + time
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead as _, BufReader};
    use std::process::Stdio;

    use super::*;

    #[test]
    fn a_process_is_killed_on_drop() {
        let process = Process::spawn(Command::new("sleep").arg("1000")).unwrap();
        let path = format!("/proc/{}", process.pid());
        assert!(Path::new(&path).exists());
        assert_eq!(process.wait_until(Instant::now()).unwrap(), None);
        drop(process);
        assert!(!Path::new(&path).exists());
    }

    #[test]
    fn the_end_of_a_process_is_seen_before_the_deadline() {
        let process = Process::spawn(Command::new("sh").args(["-c", "exit 3"])).unwrap();
        let status = process.wait_until(after(Duration::from_secs(20))).unwrap();
        assert_eq!(status.unwrap().code(), Some(3));
        assert!(process.signal(libc::SIGTERM).is_err());
    }

    #[test]
    fn directories_of_dead_processes_are_removed_and_others_kept() {
        let parent = tempfile::tempdir().unwrap();
        let mut ended = Command::new("true").spawn().unwrap();
        ended.wait().unwrap();
        let stale = parent.path().join(format!("{PREFIX}{}-x", ended.id()));
        let live = parent
            .path()
            .join(format!("{PREFIX}{}-x", std::process::id()));
        for dir in [&stale, &live] {
            std::fs::create_dir(dir).unwrap();
        }
        remove_stale(parent.path());
        assert!(!stale.exists() && live.exists());
    }

    /// The directory of the process that the next test runs.
    const INTERRUPTED: &str = "SSI_HV_TEST_INTERRUPTED";
    const RECORDED: &str = "recorded";
    const STARTED: &str = "started";

    #[test]
    fn what_a_signal_has_killed_is_no_result() {
        if let Some(dir) = std::env::var_os(INTERRUPTED) {
            return record_what_is_killed(Path::new(&dir));
        }
        let dir = tempfile::tempdir().unwrap();
        let test = "cleanup::tests::what_a_signal_has_killed_is_no_result";
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", test, "--nocapture"]);
        command.env(INTERRUPTED, dir.path());
        command.stdout(Stdio::piped()).stderr(Stdio::null());
        let process = Process::spawn(&mut command).unwrap();
        let mut lines = BufReader::new(process.take_stdout().unwrap()).lines();
        assert!(lines.any(|line| line.unwrap().ends_with(STARTED)));
        process.signal(SIGINT).unwrap();
        let status = process.wait_until(after(Duration::from_secs(20))).unwrap();
        assert_eq!(status.and_then(|status| status.code()), Some(128 + SIGINT));
        assert!(!dir.path().join(RECORDED).exists());
    }

    fn record_what_is_killed(dir: &Path) {
        // Removing it after the process was killed takes long enough to record something.
        let full = dir.join("full");
        std::fs::create_dir(&full).unwrap();
        for file in 0..5000 {
            std::fs::write(full.join(file.to_string()), "").unwrap();
        }
        register(Entry::Directory(full));
        on_signals().unwrap();
        let killed = Process::spawn(Command::new("sleep").arg("1000")).unwrap();
        println!("{STARTED}");
        killed.wait_until(after(Duration::from_secs(20))).unwrap();
        end_if_interrupted();
        std::fs::write(dir.join(RECORDED), "").unwrap();
    }
}
