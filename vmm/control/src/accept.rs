//! The listeners of a server.

use std::future::Future;
use std::io;

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};

use super::protocol::{Refusal, RefusalCode};

/// A source of connections.
pub(super) trait Accept: Send + 'static {
    /// A connection.
    type Stream: AsyncRead + AsyncWrite + Unpin + Send + 'static;

    /// Returns why the client of a connection is refused, if it is.
    fn refused(_: &Self::Stream) -> Option<Refusal> {
        None
    }

    /// Returns the next connection.
    fn next(&self) -> impl Future<Output = io::Result<Self::Stream>>;
}

impl Accept for UnixListener {
    type Stream = UnixStream;

    fn refused(stream: &UnixStream) -> Option<Refusal> {
        // The permissions of the socket and its directory say the same, unless they were changed.
        let ours = rustix::process::geteuid().as_raw();
        let text = match stream.peer_cred() {
            Ok(peer) if peer.uid() == ours || peer.uid() == 0 => return None,
            Ok(peer) => format!(
                "this socket is for the user {ours} and for root, and the client runs as {}; use sudo",
                peer.uid()
            ),
            Err(error) => format!("the kernel does not say who the client is: {error}"),
        };
        Some(Refusal::new(RefusalCode::Forbidden, text))
    }

    async fn next(&self) -> io::Result<UnixStream> {
        self.accept().await.map(|(stream, _)| stream)
    }
}

impl Accept for TcpListener {
    type Stream = TcpStream;

    async fn next(&self) -> io::Result<TcpStream> {
        self.accept().await.map(|(stream, _)| stream)
    }
}
