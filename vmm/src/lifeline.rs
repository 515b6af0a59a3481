//! Ends this process with the one that started it, through a pipe that the other holds open.
//!
//! However it ends, the kernel closes its end of the pipe, which is detected here. On another host
//! sshd does the same when its connection is lost.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileTypeExt;
use std::time::Duration;

use crate::readable::readable_within;

/// Calls `end` when standard input ends, or was silent for `silence_max`: its other end may be on a
/// lost host.
pub fn watch_stdin(silence_max: Duration, end: impl FnOnce() + Send + 'static) -> io::Result<()> {
    std::thread::Builder::new()
        .name("stdin".into())
        .spawn(move || {
            let mut stdin = io::stdin().lock();
            let mut seen = [0; 64];
            let why = loop {
                match readable_within(&stdin, silence_max) {
                    Ok(true) => {}
                    Ok(false) => break "is silent",
                    Err(_) => break "cannot be read",
                }
                match stdin.read(&mut seen) {
                    Ok(0) => break "has ended",
                    Ok(_) => {}
                    Err(error) if is_passing(&error) => {}
                    Err(_) => break "cannot be read",
                }
            };
            tracing::debug!("standard input {why}, and this node with it");
            end();
        })?;
    Ok(())
}

/// Calls `end` when the other end of the pipe `fd` is closed.
pub fn watch_pipe(fd: u32, end: impl FnOnce() + Send + 'static) -> io::Result<()> {
    // Opens a separate descriptor, since the number belongs to the user.
    let mut pipe = File::open(format!("/proc/self/fd/{fd}"))?;
    if !pipe.metadata()?.file_type().is_fifo() {
        return Err(io::Error::other("it is no pipe"));
    }
    std::thread::Builder::new()
        .name("lifeline".into())
        .spawn(move || {
            let mut seen = [0; 64];
            loop {
                match pipe.read(&mut seen) {
                    Ok(read) if read > 0 => {}
                    Err(error) if is_passing(&error) => {}
                    _ => break,
                }
            }
            end();
        })?;
    Ok(())
}

fn is_passing(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock
    )
}
