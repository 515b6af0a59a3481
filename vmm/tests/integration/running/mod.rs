//! Processes of the real binary, and their socket directory.

pub mod end;

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use ssi_hv::exit::ExitCode;
use ssi_hv_membership::testing::wait_until_stopped;

pub use end::LIMIT;

/// A socket directory, and commands that use it.
pub struct Place {
    pub directory: tempfile::TempDir,
}

impl Place {
    pub fn new() -> Self {
        let directory = tempfile::tempdir().expect("a temporary directory");
        Self { directory }
    }

    pub fn sockets(&self) -> PathBuf {
        self.directory.path().join("sockets")
    }

    /// Returns the path of a file or directory below the place's own.
    pub fn path(&self, name: &str) -> String {
        let path = self.directory.path().join(name);
        path.to_str().expect("UTF-8").to_owned()
    }

    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ssi-hv"));
        command
            .args(arguments)
            .env("SSI_HV_RUNTIME_DIR", self.sockets())
            .stdin(Stdio::null());
        command
    }

    #[track_caller]
    pub fn output(&self, arguments: &[&str]) -> Output {
        end::output_of(&mut self.command(arguments))
    }

    /// Returns the output of a command that must succeed.
    #[track_caller]
    pub fn printed(&self, arguments: &[&str]) -> String {
        let output = self.output(arguments);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{arguments:?}: {stderr}");
        String::from_utf8(output.stdout).expect("UTF-8")
    }

    #[track_caller]
    pub fn json(&self, arguments: &[&str]) -> Value {
        serde_json::from_str(&self.printed(arguments)).expect("JSON")
    }

    /// Returns the single error line of a command that must fail with this code.
    #[track_caller]
    pub fn failed(&self, arguments: &[&str], code: ExitCode) -> String {
        let output = self.output(arguments);
        let stderr = String::from_utf8(output.stderr).expect("UTF-8");
        assert_eq!(output.status.code(), Some(code.code().into()), "{stderr}");
        assert_eq!(stderr.lines().count(), 1, "{stderr}");
        stderr
    }

    pub fn files(&self) -> usize {
        fs::read_dir(self.sockets()).map_or(0, Iterator::count)
    }
}

/// A process that is killed on drop.
pub struct Running {
    child: Child,
    pub console: BufReader<std::process::ChildStdout>,
}

/// Sends a signal to a process that the test has started, and that has not been reaped. After SIGSTOP
/// it has stopped.
pub fn signal(process: u32, signal: libc::c_int) {
    let target = libc::pid_t::try_from(process).expect("a process id");
    // SAFETY: sends a signal to a process of this test.
    assert_eq!(unsafe { libc::kill(target, signal) }, 0);
    if signal == libc::SIGSTOP {
        wait_until_stopped(process);
    }
}

impl Running {
    pub fn start(command: &mut Command) -> Self {
        let mut child = command
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("it starts");
        let console = BufReader::new(child.stdout.take().expect("a pipe"));
        Self { child, console }
    }

    pub fn pid(&self) -> String {
        self.child.id().to_string()
    }

    pub fn signal(&self, signal: libc::c_int) {
        self::signal(self.child.id(), signal);
    }

    #[track_caller]
    pub fn end(mut self, signal: libc::c_int) -> Option<i32> {
        self.signal(signal);
        self.code()
    }

    /// Returns its exit code after its end.
    #[track_caller]
    pub fn code(&mut self) -> Option<i32> {
        if let Some(status) = end::end_within(&mut self.child, LIMIT) {
            return status.code();
        }
        let mut said = Vec::new();
        self.console.read_to_end(&mut said).expect("a pipe");
        let said = String::from_utf8_lossy(&said);
        panic!("no end within {LIMIT:?}; its last words: {said:?}");
    }

    /// Waits until it has printed something. Call it when nothing of its output is buffered.
    #[track_caller]
    pub fn speaks(&self) {
        assert!(
            end::is_readable(self.console.get_ref(), LIMIT),
            "nothing is said within {LIMIT:?}"
        );
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Starts a guest that walks through 46 MiB with 16 MiB local, and waits until it runs.
pub fn vm(place: &Place, more: &[&str]) -> Running {
    let flags = [&["--transport", "loopback"], more].concat();
    vm_with(place, tiny_guests::walk_for_ever::code(), &flags)
}

/// Starts a guest of 64 MiB with 16 MiB local, and waits for its first output.
pub fn vm_with(place: &Place, code: &[u8], more: &[&str]) -> Running {
    let kernel = place.directory.path().join("kernel");
    fs::write(&kernel, tiny_guests::elf(code)).expect("is written");
    let kernel = kernel.to_str().expect("UTF-8");
    let mut arguments = vec!["run", "--kernel", kernel, "--memory", "64M"];
    arguments.extend(["--local-memory", "16M"]);
    arguments.extend(more);
    let mut running = Running::start(&mut place.command(&arguments));
    running.speaks();
    let mut said = [0];
    running
        .console
        .read_exact(&mut said)
        .expect("the guest talks");
    assert_eq!(&said, b"r");
    running
}

/// Returns the number at a JSON pointer.
pub fn count(json: &Value, pointer: &str) -> u64 {
    let found = json.pointer(pointer).and_then(Value::as_u64);
    found.unwrap_or_else(|| panic!("no {pointer} in {json}"))
}

/// Time between two questions to a process that announces nothing of what is asked.
const PAUSE: Duration = Duration::from_millis(20);

/// Asks until the answer is what the test waits for, and returns it. An error is any other answer.
#[track_caller]
pub fn until<T>(mut ask: impl FnMut() -> Result<T, String>) -> T {
    let deadline = Instant::now() + LIMIT;
    loop {
        match ask() {
            Ok(answer) => return answer,
            Err(other) => assert!(Instant::now() < deadline, "after {LIMIT:?}: {other}"),
        }
        std::thread::sleep(PAUSE);
    }
}

/// Starts a node and returns its address.
pub fn node(place: &Place, more: &[&str]) -> (Running, String) {
    let arguments = [
        &["node", "--listen", "127.0.0.1:0", "--memory", "64M"],
        more,
    ]
    .concat();
    let mut node = Running::start(&mut place.command(&arguments));
    node.speaks();
    let address = next_address(&mut node);
    (node, address)
}

/// Returns the address at the end of the next line that a node prints.
pub fn next_address(node: &mut Running) -> String {
    let mut line = String::new();
    node.console.read_line(&mut line).expect("it prints");
    let address = line.trim().rsplit(' ').next();
    address.expect("an address").to_owned()
}
