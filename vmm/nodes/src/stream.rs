//! The connections that links run over.

use std::fmt::Debug;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;

/// A connected stream of bytes. After [`prepare`](Self::prepare) no call waits.
pub trait Stream: Debug + Send + Sync {
    /// Makes reads and writes return at once, and sends small writes at once.
    ///
    /// # Errors
    /// When the host refuses it.
    fn prepare(&self) -> io::Result<()>;

    /// Reads what is there.
    ///
    /// # Errors
    /// As [`Read::read`].
    fn read(&self, bytes: &mut [u8]) -> io::Result<usize>;

    /// Writes what fits.
    ///
    /// # Errors
    /// As [`Write::write`].
    fn write(&self, bytes: &[u8]) -> io::Result<usize>;

    /// Sends what writes have taken and the kernel has not. Returns whether some of it is left: it
    /// is sent when this is called again, once the descriptor is writable.
    fn flush(&self) -> bool {
        false
    }

    /// Becomes ready when reads or writes would not wait.
    fn fd(&self) -> BorrowedFd<'_>;

    /// Ends the connection in both directions; the peer reads what was written before.
    fn close(&self);
}

macro_rules! stream {
    ($stream:ty, $prepare:expr) => {
        impl Stream for $stream {
            fn prepare(&self) -> io::Result<()> {
                let prepare: fn(&Self) -> io::Result<()> = $prepare;
                prepare(self)?;
                self.set_nonblocking(true)
            }

            fn read(&self, bytes: &mut [u8]) -> io::Result<usize> {
                let mut this = self;
                Read::read(&mut this, bytes)
            }

            fn write(&self, bytes: &[u8]) -> io::Result<usize> {
                let mut this = self;
                Write::write(&mut this, bytes)
            }

            fn fd(&self) -> BorrowedFd<'_> {
                self.as_fd()
            }

            fn close(&self) {
                // Fails when the peer has ended it before.
                let _ = self.shutdown(Shutdown::Both);
            }
        }
    };
}

stream!(TcpStream, |stream| stream.set_nodelay(true));
stream!(UnixStream, |_| Ok(()));
