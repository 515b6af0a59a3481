//! What a process can still do in its sandbox. Each case is a process of its own, since there is no way
//! back.

use std::fs;
use std::io::ErrorKind;
use std::os::fd::AsRawFd as _;
use std::os::unix::net::UnixListener;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};

use fabric_host::{ThreadClass, begin_class};
use ssi_hv_sandbox::{Restricted, Sandbox, call_name};

/// Names the case that a process of [`in_its_process`] is.
const CASE: &str = "SSI_HV_SANDBOX_CASE";

/// The directory in which the case has its files.
const PLACE: &str = "SSI_HV_SANDBOX_PLACE";

/// Exit code of the case `files` where files are not restricted; that of a failed test is 101.
const NO_LANDLOCK: i32 = 77;

/// Runs a case in a process of its own.
fn run(case: &str, place: &Path) -> ExitStatus {
    let mut command = Command::new(std::env::current_exe().expect("a path"));
    command.args(["in_its_process", "--exact", "--nocapture"]);
    command.env(CASE, case).env(PLACE, place);
    // As when an error is looked for.
    command.env("RUST_BACKTRACE", "1");
    command.status().expect("it starts")
}

fn place() -> tempfile::TempDir {
    let place = tempfile::tempdir().expect("a directory");
    fs::create_dir(place.path().join("new")).expect("a directory");
    for name in ["read", "write", "secret"] {
        fs::write(place.path().join(name), name).expect("a file");
    }
    place
}

/// Enters the sandbox of all cases: `read` may be read, `write` and `pipe` written, and `new/` has new
/// files.
fn enter(place: &Path, pipe: &Path) -> Restricted {
    let mut sandbox = Sandbox::default();
    sandbox.read(place.join("read"));
    sandbox.read(place.join("absent"));
    sandbox.write(place.join("write"));
    sandbox.create(place.join("new/file"));
    sandbox.create(pipe);
    sandbox.enter().expect("the kernel has seccomp")
}

fn refused<T>(result: std::io::Result<T>) -> bool {
    result.is_err_and(|error| error.kind() == ErrorKind::PermissionDenied)
}

/// Not a test of its own: it does nothing unless [`run`] starts it.
#[test]
fn in_its_process() {
    let (Some(case), Some(place)) = (std::env::var_os(CASE), std::env::var_os(PLACE)) else {
        return;
    };
    let place = PathBuf::from(place);
    // What `/dev/stdout` is in a pipeline.
    let (_reader, writer) = std::io::pipe().expect("a pipe");
    let pipe = PathBuf::from(format!("/proc/self/fd/{}", writer.as_raw_fd()));
    let restricted = enter(&place, &pipe);
    match case.to_str() {
        Some("files") if restricted.files() => {
            files(&place);
            let opened = fs::File::options().write(true).open(pipe);
            opened.expect("a pipe without a name");
        }
        Some("files") => std::process::exit(NO_LANDLOCK),
        Some("work") => work(),
        Some("program") => {
            let error = Command::new("/bin/true").exec();
            unreachable!("a program could have been started: {error}");
        }
        Some("mount") => {
            // SAFETY: no pointer is passed; the call does not return.
            unsafe { libc::syscall(libc::SYS_umount2, 0, 0) };
            unreachable!("mounts were changed");
        }
        Some("vcpu") => ends_in(ThreadClass::Vcpu, socket),
        Some("pager") => ends_in(ThreadClass::Pager, socket),
        Some("started") => ends_in(ThreadClass::Vcpu, || {
            let _ = std::thread::spawn(socket).join();
        }),
        Some("classes") => classes(&place),
        Some("panic") => {
            let thread = in_class(ThreadClass::Vcpu, || panic!("with a backtrace"));
            thread.join().expect_err("it panics");
        }
        other => unreachable!("{other:?}"),
    }
}

/// A call that the process has, and links have.
fn socket() {
    // SAFETY: takes numbers.
    let opened = unsafe { libc::socket(libc::AF_INET, libc::SOCK_STREAM, 0) };
    assert!(opened >= 0, "{}", std::io::Error::last_os_error());
}

/// Starts a thread of that class, which first does what all of them may do.
fn in_class(
    class: ThreadClass,
    then: impl FnOnce() + Send + 'static,
) -> std::thread::JoinHandle<()> {
    let mut null = fs::File::create("/dev/null").expect("allowed");
    let (sender, receiver) = std::sync::mpsc::channel();
    let thread = std::thread::spawn(move || {
        begin_class(class);
        std::io::Write::write_all(&mut null, b"x").expect("allowed");
        sender.send(vec![7_u8; 1 << 20]).expect("a receiver");
        then();
    });
    let sent = receiver.recv().expect("it was not ended");
    assert_eq!(sent.len(), 1 << 20);
    thread
}

/// The last thing that a thread of that class does.
fn ends_in(class: ThreadClass, forbidden: impl FnOnce() + Send + 'static) {
    let _ = in_class(class, forbidden).join();
    unreachable!("a {class:?} thread could do that");
}

fn classes(place: &Path) {
    let read = place.join("read");
    for class in [ThreadClass::Vcpu, ThreadClass::Pager] {
        let read = read.clone();
        // What libraries open does not end the process.
        let thread = in_class(class, move || {
            assert!(refused(fs::read(read)));
            assert!(refused(fs::metadata("/proc/self/status")));
            // A heap that shrinks.
            drop((0..64).map(|_| vec![1_u8; 100_000]).collect::<Vec<_>>());
        });
        thread.join().expect("no panic");
    }
    in_class(ThreadClass::Link, socket)
        .join()
        .expect("no panic");
    for class in [ThreadClass::Link, ThreadClass::Device] {
        // It is not on their lists, which are not enforced.
        let thread = in_class(class, || assert!(std::os::unix::process::parent_id() > 0));
        thread.join().expect("no panic");
    }
    // Other threads have what they had.
    fs::read(read).expect("allowed");
    work();
}

fn files(place: &Path) {
    assert_eq!(fs::read(place.join("read")).expect("allowed"), b"read");
    assert!(refused(fs::write(place.join("read"), "x")));
    fs::write(place.join("write"), "new").expect("allowed");
    assert!(refused(fs::remove_file(place.join("write"))));
    assert!(refused(fs::read(place.join("secret"))));
    assert!(refused(fs::read("/etc/shadow")));
    assert!(refused(fs::write(place.join("another"), "x")));
    let new = place.join("new");
    fs::write(new.join("file.tmp"), "report").expect("allowed");
    fs::rename(new.join("file.tmp"), new.join("file")).expect("allowed");
    drop(UnixListener::bind(new.join("socket")).expect("allowed"));
    fs::remove_file(new.join("socket")).expect("allowed");
    fs::read("/proc/self/status").expect("allowed");
    fs::write("/dev/null", "x").expect("allowed");
    // Threads that start later have the same rights.
    let secret = place.join("secret");
    let there = std::thread::spawn(move || refused(fs::read(secret)));
    assert!(there.join().expect("no panic"));
}

/// What a VM does all the time.
fn work() {
    let numbers = std::thread::spawn(|| (0..1000_u64).sum::<u64>());
    assert_eq!(numbers.join().expect("no panic"), 499_500);
    let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).expect("a port");
    let address = listener.local_addr().expect("bound");
    std::net::TcpStream::connect(address).expect("a listener");
    let (_sender, nothing) = std::sync::mpsc::channel::<()>();
    let waited = nothing.recv_timeout(std::time::Duration::from_millis(1));
    assert_eq!(waited, Err(std::sync::mpsc::RecvTimeoutError::Timeout));
}

#[test]
fn only_named_files_can_be_opened() {
    let ended = run("files", place().path());
    if ended.code() == Some(NO_LANDLOCK) {
        println!("SKIPPED: this kernel has no Landlock, or it is not enabled");
        return;
    }
    assert!(ended.success(), "{ended}");
}

#[test]
fn threads_and_sockets_work() {
    assert!(run("work", place().path()).success());
}

#[test]
fn threads_of_a_class_have_fewer_calls_and_others_keep_theirs() {
    assert!(run("classes", place().path()).success());
}

#[test]
fn a_call_that_its_class_does_not_have_ends_the_process() {
    for case in ["vcpu", "pager", "started"] {
        let status = run(case, place().path());
        assert_eq!(status.signal(), Some(libc::SIGSYS), "{case}: {status}");
    }
}

#[test]
fn a_panic_in_a_class_is_reported_and_ends_its_thread_alone() {
    assert!(run("panic", place().path()).success());
}

#[test]
fn calls_have_the_names_of_the_manual() {
    assert_eq!(call_name(libc::SYS_mincore), Some("mincore"));
    assert_eq!(call_name(libc::SYS_execve), None);
}

#[test]
fn a_forbidden_call_ends_the_process() {
    for case in ["program", "mount"] {
        let status = run(case, place().path());
        assert_eq!(status.signal(), Some(libc::SIGSYS), "{case}: {status}");
    }
}
