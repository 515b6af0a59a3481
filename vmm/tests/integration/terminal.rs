//! A pseudo-terminal for tested programs.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

/// Timeout of each step, far longer than on the most loaded host.
const LIMIT: Duration = Duration::from_secs(60);

/// A marker that no program prints.
const END: &[u8] = b"\x00the end\x00";

/// A pseudo-terminal (pty(7)), and the screen of a program on it.
pub struct Terminal {
    pub keys: File,
    /// The program's end, kept open so that its modes can be inspected afterwards.
    pub program: OwnedFd,
    output: mpsc::Receiver<Vec<u8>>,
    /// All bytes that were written to it.
    pub written: Vec<u8>,
    pub screen: vt100::Parser,
}

impl Terminal {
    /// Opens a pseudo-terminal; returns the end of the user and that of the program.
    pub fn open(rows: u16, columns: u16) -> (File, OwnedFd) {
        let (mut keys, mut program) = (-1, -1);
        let size = libc::winsize {
            ws_row: rows,
            ws_col: columns,
            ws_xpixel: 0,
            ws_ypixel: 0,
        };
        // SAFETY: the first two point to integers that it sets, the last to a size that it reads;
        // null means no name and default modes.
        let result = unsafe {
            libc::openpty(
                &raw mut keys,
                &raw mut program,
                std::ptr::null_mut(),
                std::ptr::null(),
                &raw const size,
            )
        };
        assert_eq!(result, 0, "no pseudo-terminal");
        // No program may hold the other end of its own terminal. SAFETY: fcntl on a descriptor that
        // was just opened.
        let result = unsafe { libc::fcntl(keys, libc::F_SETFD, libc::FD_CLOEXEC) };
        assert_eq!(result, 0, "no flag");
        // SAFETY: both are descriptors that were just opened and have no other owner.
        let (keys, program) =
            unsafe { (OwnedFd::from_raw_fd(keys), OwnedFd::from_raw_fd(program)) };
        (File::from(keys), program)
    }

    pub fn new(rows: u16, columns: u16) -> Self {
        let (keys, program) = Self::open(rows, columns);
        let mut reader = keys.try_clone().expect("a descriptor");
        let (sender, output) = mpsc::channel();
        thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(count @ 1..) = reader.read(&mut bytes) {
                if sender.send(bytes[..count].to_vec()).is_err() {
                    return;
                }
            }
        });
        Self {
            keys,
            program,
            output,
            written: Vec::new(),
            screen: vt100::Parser::new(rows, columns, 0),
        }
    }

    pub fn press(&mut self, keys: &str) {
        self.keys.write_all(keys.as_bytes()).expect("is taken");
    }

    /// Waits until the screen fulfils a condition.
    pub fn wait_for(&mut self, what: &str, is_so: impl Fn(&str) -> bool) -> String {
        let deadline = Instant::now() + LIMIT;
        loop {
            let contents = self.screen.screen().contents();
            if is_so(&contents) {
                return contents;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            match self.output.recv_timeout(left) {
                Ok(bytes) => self.take(&bytes),
                Err(error) => panic!("{what}: {error}, and the screen is\n{contents}"),
            }
        }
    }

    fn take(&mut self, bytes: &[u8]) {
        self.written.extend_from_slice(bytes);
        self.screen.process(bytes);
    }

    /// Reads the remaining output of a program that has ended.
    pub fn finish(&mut self) {
        // A terminal preserves the order.
        let mut program = File::from(self.program.try_clone().expect("a descriptor"));
        program.write_all(END).expect("is taken");
        let deadline = Instant::now() + LIMIT;
        let mut said = Vec::new();
        while !said.ends_with(END) {
            let left = deadline.saturating_duration_since(Instant::now());
            let bytes = self.output.recv_timeout(left);
            said.extend(bytes.expect("the end of what the program has said"));
        }
        self.take(&said[..said.len() - END.len()]);
    }

    /// Returns the terminal's modes (termios(3)).
    pub fn modes(&self) -> [libc::tcflag_t; 4] {
        let mut modes = std::mem::MaybeUninit::<libc::termios>::uninit();
        // SAFETY: the descriptor is open, and the call fills the structure if it succeeds.
        let modes = unsafe {
            assert_eq!(
                libc::tcgetattr(self.program.as_raw_fd(), modes.as_mut_ptr()),
                0
            );
            modes.assume_init()
        };
        [modes.c_iflag, modes.c_oflag, modes.c_cflag, modes.c_lflag]
    }
}
