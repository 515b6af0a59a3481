//! Tests of running a command, with processes of this host and a pipe for the serial port.

use std::ffi::CString;
use std::fs::File;
use std::io::{Read, Write as _};
use std::os::fd::{AsRawFd, FromRawFd};
use std::sync::{Mutex, PoisonError};

use super::*;
use crate::exec::channel::{Channel, CommandEnd, Progress};
use crate::exec::frame::HELLO;

/// Held while a process is started: it inherits the pipes of every other test, which have no flag
/// against that.
static STARTING: Mutex<()> = Mutex::new(());

/// Runs a command: returns its output, its errors and its state.
fn run_here(command: &str) -> (Vec<u8>, Vec<u8>, Progress) {
    let _alone = STARTING.lock().unwrap_or_else(PoisonError::into_inner);
    run_alone(command)
}

fn run_alone(command: &str) -> (Vec<u8>, Vec<u8>, Progress) {
    let command = CString::new(command).expect("no zero");
    let (reading, writing) = sys::pipe().expect("a pipe");
    // SAFETY: both are new descriptors without another owner.
    let (mut reading, writing) =
        unsafe { (File::from_raw_fd(reading), File::from_raw_fd(writing)) };
    let runs = std::thread::spawn(move || run(&command, writing.as_raw_fd(), false, || ()));
    let mut bytes = HELLO.to_vec();
    reading.read_to_end(&mut bytes).expect("is read");
    runs.join().expect("ends");
    let (mut out, mut err) = (Vec::new(), Vec::new());
    let channel = Channel::default();
    channel
        .receiver(&mut out, &mut err)
        .write_all(&bytes)
        .expect("never fails");
    (out, err, channel.progress())
}

#[test]
fn output_is_binary_clean_apart_from_errors_and_the_status_is_the_commands() {
    let (out, err, progress) = run_here("printf 'a\\000\\r\\n\\377'; echo oh >&2; exit 42");
    assert_eq!(out, b"a\0\r\n\xff");
    assert_eq!(err, b"oh\n");
    assert_eq!(progress.end, Some(CommandEnd::Status(42)));
}

#[test]
fn much_output_is_whole_and_in_order() {
    let (out, _, progress) = run_here("seq 1 50000");
    let expected: String = (1..=50_000).map(|n| format!("{n}\n")).collect();
    assert!(out == expected.as_bytes(), "{} bytes", out.len());
    assert_eq!(progress.end, Some(CommandEnd::Status(0)));
}

#[test]
fn a_signal_and_a_command_that_is_not_there_end_as_a_shell_says() {
    let (_, _, progress) = run_here("kill -TERM $$");
    assert_eq!(progress.end, Some(CommandEnd::Status(143)));
    let (_, err, progress) = run_here("no-such-command-at-all");
    assert_eq!(progress.end, Some(CommandEnd::Status(127)));
    assert!(String::from_utf8_lossy(&err).contains("not found"));
}

#[test]
fn the_command_has_no_input_and_no_files_of_the_init() {
    let count = "cat; ls /proc/self/fd | wc -l";
    let _alone = STARTING.lock().unwrap_or_else(PoisonError::into_inner);
    let (out, _, _) = run_alone(count);
    // Descriptors that this process inherited are inherited by every child.
    let plain = std::process::Command::new("sh")
        .args(["-c", count])
        .stdin(std::process::Stdio::null())
        .output()
        .expect("sh starts");
    assert_eq!(
        String::from_utf8_lossy(&out),
        String::from_utf8_lossy(&plain.stdout)
    );
}

#[test]
fn a_process_that_is_left_behind_is_not_waited_for() {
    let (out, _, progress) = run_here("sleep 600 & echo $!");
    assert_eq!(progress.end, Some(CommandEnd::Status(0)));
    let pid = String::from_utf8_lossy(&out).trim().to_owned();
    let killed = std::process::Command::new("kill").arg(&pid).status();
    assert!(killed.expect("kill starts").success(), "{pid} had ended");
}

#[test]
fn an_error_of_the_init_has_its_number() {
    let _alone = STARTING.lock().unwrap_or_else(PoisonError::into_inner);
    for (error, expected) in [
        (2, "why: error 2"),
        (40, "why: error 40"),
        (133, "why: error 133"),
    ] {
        let (reading, writing) = sys::pipe().expect("a pipe");
        // SAFETY: a new descriptor without another owner.
        let mut reading = unsafe { File::from_raw_fd(reading) };
        fail_with(writing, b"why", error);
        sys::close(writing);
        let mut frame = Vec::new();
        reading.read_to_end(&mut frame).expect("is read");
        assert_eq!(&frame[HEADER_BYTES..], expected.as_bytes());
    }
}

#[test]
fn the_status_is_sent_last() {
    let _alone = STARTING.lock().unwrap_or_else(PoisonError::into_inner);
    let (reading, writing) = sys::pipe().expect("a pipe");
    // SAFETY: both are new descriptors without another owner.
    let (mut reading, writing) =
        unsafe { (File::from_raw_fd(reading), File::from_raw_fd(writing)) };
    let mut before = 0;
    run(c"echo out; exit 3", writing.as_raw_fd(), false, || {
        before = sys::unread_bytes(reading.as_raw_fd());
    });
    drop(writing);
    let mut bytes = Vec::new();
    reading.read_to_end(&mut bytes).expect("is read");
    assert!(before > 0, "the output came before");
    assert_eq!(bytes.len() - before, HEADER_BYTES + 1);
}

#[test]
fn a_process_that_is_left_behind_and_writes_on_is_not_waited_for() {
    let (out, err, progress) = run_here("yes & echo $! >&2; exit 3");
    let pid = String::from_utf8_lossy(&err).trim().to_owned();
    assert_eq!(progress.end, Some(CommandEnd::Status(3)));
    assert!(out.iter().all(|byte| b"y\n".contains(byte)));
    // It had ended, since nobody reads from it any more, or ends now.
    let _ = std::process::Command::new("kill").arg(&pid).status();
}
