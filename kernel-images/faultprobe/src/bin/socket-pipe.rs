//! Connects standard input and output to a socket, in guests and on hosts of the testbed. Sends
//! standard input to its end first; then copies what the peer sends to standard output.
//!
//! Busybox's `nc` exits with its standard input, and does not support vsock(7).

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::ExitCode;

use socket2::{Domain, SockAddr, Socket, Type};

const USAGE: &str = "socket-pipe: write one of
  socket-pipe tcp-connect ADDRESS:PORT
  socket-pipe tcp-listen ADDRESS:PORT
  socket-pipe unix-connect PATH
  socket-pipe unix-listen PATH
  socket-pipe vsock-connect PORT       from a guest to a port of its host
  socket-pipe vsock-listen PORT        in a guest
  socket-pipe guest-connect PATH PORT  from a host to a port of the guest behind a Unix socket";

/// The address of the host (linux/vm_sockets.h, VMADDR_CID_HOST).
const HOST: u32 = 2;
/// Any local address (VMADDR_CID_ANY).
const ANY: u32 = u32::MAX;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let opened = match arguments[..] {
        ["tcp-connect", address] => TcpStream::connect(address).map(Socket::from),
        ["tcp-listen", address] => TcpListener::bind(address)
            .and_then(|listener| listener.accept())
            .map(|(stream, _)| stream.into()),
        ["unix-connect", path] => UnixStream::connect(path).map(Socket::from),
        ["unix-listen", path] => UnixListener::bind(path)
            .and_then(|listener| listener.accept())
            .map(|(stream, _)| stream.into()),
        ["vsock-connect", port] => number(port).and_then(vsock_connect),
        ["vsock-listen", port] => number(port).and_then(vsock_accept),
        ["guest-connect", path, port] => guest_connect(path, port),
        _ => {
            eprintln!("{USAGE}");
            return ExitCode::from(2);
        }
    };
    match opened.and_then(join) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("socket-pipe: {error}");
            ExitCode::FAILURE
        }
    }
}

fn number(text: &str) -> io::Result<u32> {
    text.parse().map_err(io::Error::other)
}

fn vsock() -> io::Result<Socket> {
    Socket::new(Domain::VSOCK, Type::STREAM, None)
}

fn vsock_connect(port: u32) -> io::Result<Socket> {
    let socket = vsock()?;
    socket.connect(&SockAddr::vsock(HOST, port))?;
    Ok(socket)
}

fn vsock_accept(port: u32) -> io::Result<Socket> {
    let socket = vsock()?;
    socket.bind(&SockAddr::vsock(ANY, port))?;
    socket.listen(1)?;
    eprintln!("socket-pipe: listens on port {port}");
    Ok(socket.accept()?.0)
}

/// Requests a port of the guest, and reads the answer and nothing beyond it.
fn guest_connect(path: &str, port: &str) -> io::Result<Socket> {
    let mut stream = UnixStream::connect(path)?;
    stream.write_all(format!("CONNECT {port}\n").as_bytes())?;
    let mut line = Vec::new();
    while !line.ends_with(b"\n") {
        let mut byte = [0];
        stream.read_exact(&mut byte)?;
        line.extend(byte);
    }
    if !line.starts_with(b"OK ") {
        return Err(io::Error::other("the guest does not listen"));
    }
    Ok(stream.into())
}

fn join(mut socket: Socket) -> io::Result<()> {
    io::copy(&mut io::stdin().lock(), &mut socket)?;
    socket.shutdown(Shutdown::Write)?;
    io::copy(&mut socket, &mut io::stdout().lock())?;
    Ok(())
}
