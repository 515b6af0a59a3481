//! The connection of a link of vCPUs under TLS.

use std::io::{self, IoSlice};
use std::net::TcpStream;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use memory_fabric::compute::SecureStream;

use crate::machine::NodeStream;

/// A secure connection that one thread reads and others write. TLS has one state for both
/// directions, so a lock guards it; it is held for one call, and never while a thread waits.
#[derive(Debug)]
pub struct SecureLink {
    socket: TcpStream,
    stream: Mutex<Box<dyn SecureStream>>,
}

impl SecureLink {
    /// Wraps a connection.
    ///
    /// # Errors
    ///
    /// When the process has no descriptor left.
    pub fn new(stream: Box<dyn SecureStream>) -> io::Result<Self> {
        Ok(Self {
            socket: stream.socket().try_clone()?,
            stream: Mutex::new(stream),
        })
    }

    fn lock(&self) -> MutexGuard<'_, Box<dyn SecureStream>> {
        // After a panic the connection fails in its own way.
        self.stream.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl NodeStream for SecureLink {
    fn prepare(&self) -> io::Result<()> {
        // It was prepared before its handshake.
        Ok(())
    }

    fn read(&self, bytes: &mut [u8]) -> io::Result<usize> {
        self.lock().read(bytes).map_err(|error| match error.kind() {
            // The process was killed, or the network cut the connection: no more comes.
            io::ErrorKind::UnexpectedEof => io::ErrorKind::ConnectionReset.into(),
            _ => error,
        })
    }

    fn write(&self, bytes: &[u8]) -> io::Result<usize> {
        self.lock().write_vectored(&[IoSlice::new(bytes)])
    }

    fn flush(&self) -> bool {
        let mut stream = self.lock();
        // The thread that reads finds out that the connection broke.
        stream.flush().is_ok() && stream.is_blocked()
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    fn close(&self) {
        self.lock().close();
    }
}
