//! Joins standard input and output to a socket, in guests and on hosts of the testbed. What comes on
//! standard input is sent first, to its end; then what the other side sends goes to standard output.
//!
//! Busybox's `nc` ends with its standard input, and knows no vsock(7).

use std::fs::File;
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::ExitCode;

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
/// Any address of ours (VMADDR_CID_ANY).
const ANY: u32 = u32::MAX;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let opened = match arguments[..] {
        ["tcp-connect", address] => TcpStream::connect(address).map(OwnedFd::from),
        ["tcp-listen", address] => TcpListener::bind(address)
            .and_then(|listener| listener.accept())
            .map(|(stream, _)| stream.into()),
        ["unix-connect", path] => UnixStream::connect(path).map(OwnedFd::from),
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

fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(result)
}

fn vsock() -> io::Result<OwnedFd> {
    // SAFETY: socket takes three integers; the descriptor that comes back is new and ours.
    unsafe {
        let fd = check(libc::socket(libc::AF_VSOCK, libc::SOCK_STREAM, 0))?;
        Ok(OwnedFd::from_raw_fd(fd))
    }
}

/// The address of a port, and its size.
fn vsock_address(cid: u32, port: u32) -> (libc::sockaddr_vm, libc::socklen_t) {
    // SAFETY: all fields are integers, of which any value is valid.
    let mut address: libc::sockaddr_vm = unsafe { std::mem::zeroed() };
    address.svm_family = libc::sa_family_t::try_from(libc::AF_VSOCK).unwrap_or(0);
    address.svm_cid = cid;
    address.svm_port = port;
    let size = libc::socklen_t::try_from(size_of_val(&address)).unwrap_or(0);
    (address, size)
}

fn vsock_connect(port: u32) -> io::Result<OwnedFd> {
    let socket = vsock()?;
    let (address, size) = vsock_address(HOST, port);
    // SAFETY: the address lives through the call and has that size.
    check(unsafe { libc::connect(socket.as_raw_fd(), (&raw const address).cast(), size) })?;
    Ok(socket)
}

fn vsock_accept(port: u32) -> io::Result<OwnedFd> {
    let socket = vsock()?;
    let (address, size) = vsock_address(ANY, port);
    // SAFETY: the address lives through the call and has that size.
    check(unsafe { libc::bind(socket.as_raw_fd(), (&raw const address).cast(), size) })?;
    // SAFETY: listen takes two integers.
    check(unsafe { libc::listen(socket.as_raw_fd(), 1) })?;
    eprintln!("socket-pipe: listens on port {port}");
    // SAFETY: no address is asked for; the descriptor that comes back is new and ours.
    unsafe {
        let none = std::ptr::null_mut();
        let fd = libc::accept(socket.as_raw_fd(), none, std::ptr::null_mut());
        Ok(OwnedFd::from_raw_fd(check(fd)?))
    }
}

/// Asks for a port of the guest, and reads the answer and nothing after it.
fn guest_connect(path: &str, port: &str) -> io::Result<OwnedFd> {
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

fn join(socket: OwnedFd) -> io::Result<()> {
    let mut socket = File::from(socket);
    io::copy(&mut io::stdin().lock(), &mut socket)?;
    // SAFETY: shutdown takes two integers.
    check(unsafe { libc::shutdown(socket.as_raw_fd(), libc::SHUT_WR) })?;
    io::copy(&mut socket, &mut io::stdout().lock())?;
    Ok(())
}
