//! Whether other threads exist, for which Landlock would restrict nothing.

use std::fs;
use std::io;
use std::time::{Duration, Instant};

use crate::SandboxError;

/// How long threads that have done their work may take to leave the process.
const END_TIME_MAX: Duration = Duration::from_secs(1);

/// Interval of looks: the kernel does not tell when a thread has left.
const LOOK_INTERVAL: Duration = Duration::from_millis(2);

/// Waits a moment until this thread is the only one of the process, as it has to be for
/// [`Sandbox::enter`](crate::Sandbox::enter) to restrict files for the whole process.
///
/// # Errors
///
/// When there are others.
pub fn be_alone() -> Result<(), SandboxError> {
    let until = Instant::now() + END_TIME_MAX;
    loop {
        let others = others().map_err(SandboxError::UnknownThreads)?;
        if others.is_empty() {
            return Ok(());
        }
        if Instant::now() >= until {
            return Err(SandboxError::Threads(others.join(", ")));
        }
        std::thread::sleep(LOOK_INTERVAL);
    }
}

/// Returns the names of the other threads of this process.
fn others() -> io::Result<Vec<String>> {
    let own = rustix::thread::gettid().as_raw_nonzero().to_string();
    let mut names = Vec::new();
    for task in fs::read_dir("/proc/self/task")? {
        let task = task?;
        if task.file_name() == own.as_str() {
            continue;
        }
        match fs::read_to_string(task.path().join("comm")) {
            Ok(name) => names.push(name.trim_end().to_owned()),
            // It has left since.
            Err(error) if has_left(&error) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(names)
}

fn has_left(error: &io::Error) -> bool {
    // Of a file that was opened before, ESRCH.
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(libc::ESRCH)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    #[test]
    fn another_thread_is_named() {
        let (release, wait) = mpsc::channel::<()>();
        let thread = std::thread::Builder::new().name("other".into());
        let thread = thread.spawn(move || wait.recv()).expect("a thread");
        let error = be_alone().expect_err("it exists").to_string();
        assert!(error.contains("other"), "{error}");
        drop(release);
        thread
            .join()
            .expect("it ends")
            .expect_err("it was released");
    }
}
