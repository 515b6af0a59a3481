//! The agent of a testbed host: runs operations for its client, and answers heartbeats.

use std::io::{self, BufWriter, Read};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, ExitCode, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

mod check;
mod pending;
mod sys;

use rustix::process::{self, Pid, Signal};
use testbed_agent::{FRAME_BYTES_MAX, Kind, Request};

/// Limit of connections: a test driver needs a handful, so more indicate a defect in it.
const CONNECTIONS_MAX: usize = 64;
/// A client that accepts no bytes for this long is considered dead.
const WRITE_TIMEOUT: Duration = Duration::from_secs(60);
/// Longest pause of a client before its request, and while it sends its file.
const READ_TIMEOUT: Duration = Duration::from_secs(60);
/// The signal that a process cannot handle.
const SIGKILL: i32 = Signal::KILL.as_raw();

fn main() -> ExitCode {
    let Some(address) = std::env::args().nth(1) else {
        eprintln!("usage: testbed-agent ADDRESS:PORT | check | pending high|low");
        return ExitCode::from(2);
    };
    let second = std::env::args().nth(2);
    let result = match address.as_str() {
        "check" => check::run(),
        "pending" => pending::run(second.as_deref()),
        pending::VICTIM => pending::victim(second.as_deref()),
        _ => serve(&address),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("testbed-agent: {address}: {error}");
            ExitCode::FAILURE
        }
    }
}

fn serve(address: &str) -> io::Result<()> {
    let listener = TcpListener::bind(address)?;
    println!("testbed-agent: ready on {address}");
    let open = Arc::new(AtomicUsize::new(0));
    for stream in listener.incoming() {
        let mut stream = stream?;
        if open.fetch_add(1, Ordering::Relaxed) >= CONNECTIONS_MAX {
            open.fetch_sub(1, Ordering::Relaxed);
            let text = format!("too many connections: {CONNECTIONS_MAX} is the limit");
            let _ = send(&mut stream, Kind::Error, text.as_bytes());
            continue;
        }
        let open = Arc::clone(&open);
        std::thread::spawn(move || {
            if let Err(error) = handle(&mut stream) {
                // Best effort: a client that has disconnected receives no error.
                let _ = send(&mut stream, Kind::Error, error.to_string().as_bytes());
            }
            open.fetch_sub(1, Ordering::Relaxed);
        });
    }
    Ok(())
}

fn send(stream: &mut TcpStream, kind: Kind, payload: &[u8]) -> io::Result<()> {
    testbed_agent::write_frame(stream, kind, payload)
}

fn handle(stream: &mut TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    stream.set_write_timeout(Some(WRITE_TIMEOUT))?;
    stream.set_read_timeout(Some(READ_TIMEOUT))?;
    let (kind, payload) = testbed_agent::read_frame(stream)?;
    if kind != Kind::Request {
        return Err(io::Error::other(format!(
            "expected a request, got {kind:?}"
        )));
    }
    match serde_json::from_slice(&payload)? {
        Request::Ping => loop {
            send(stream, Kind::Pong, &[])?;
            let (kind, _) = testbed_agent::read_frame(stream)?;
            if kind != Kind::Ping {
                return Err(io::Error::other(format!("expected a ping, got {kind:?}")));
            }
        },
        Request::Run { argv, env } => run(stream, &argv, env),
        Request::Put { path, mode } => put(stream, &path, mode),
        Request::Get { path } => {
            let mut file = std::fs::File::open(&path).map_err(|e| named(&path, &e))?;
            testbed_agent::send_data(&mut file, stream)
        }
        Request::Signal { pid, signal } => {
            kill(pid, signal)?;
            send(stream, Kind::Done, &[])
        }
    }
}

fn named(path: &str, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{path}: {error}"))
}

fn put(stream: &mut TcpStream, path: &str, mode: u32) -> io::Result<()> {
    let temp = format!("{path}.part");
    let file = std::fs::OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(mode)
        .open(&temp);
    let mut out = BufWriter::new(file.map_err(|e| named(&temp, &e))?);
    testbed_agent::receive_data(stream, &mut out)?;
    drop(out);
    std::fs::rename(&temp, path).map_err(|e| named(path, &e))?;
    send(stream, Kind::Done, &[])
}

fn run(stream: &mut TcpStream, argv: &[String], env: Vec<(String, String)>) -> io::Result<()> {
    let (program, args) = argv
        .split_first()
        .ok_or_else(|| io::Error::other("no command"))?;
    let mut child = Command::new(program)
        .args(args)
        .envs(env)
        .process_group(0)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|e| named(program, &e))?;
    let group = i32::try_from(child.id()).map_err(io::Error::other)?;
    let out = Mutex::new(stream.try_clone()?);
    let emit = |kind: Kind, payload: &[u8]| {
        let mut out = out.lock().unwrap_or_else(PoisonError::into_inner);
        send(&mut out, kind, payload)
    };
    let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
    // The client may be silent for as long as the command runs.
    stream.set_read_timeout(None)?;
    emit(Kind::Started, &group.to_le_bytes())?;
    std::thread::scope(|scope| {
        let pumps = [
            scope.spawn(|| pump(stdout, |bytes| emit(Kind::Stdout, bytes))),
            scope.spawn(|| pump(stderr, |bytes| emit(Kind::Stderr, bytes))),
        ];
        let mut signals = stream.try_clone()?;
        let listener = scope.spawn(move || {
            // Anything else means that the client disconnected, or that the command ended and the
            // stream was shut down.
            while let Ok((Kind::Signal, payload)) = testbed_agent::read_frame(&mut signals) {
                if let Some([signal]) = testbed_agent::integers(&payload) {
                    let _ = kill(group, signal);
                }
            }
            let _ = kill(-group, SIGKILL);
        });
        let status = child.wait()?;
        // Processes that it started in the background are killed too, which closes its pipes.
        let _ = kill(-group, SIGKILL);
        for pump in pumps {
            let _ = pump.join();
        }
        let mut exit = status.code().unwrap_or(-1).to_le_bytes().to_vec();
        exit.extend(status.signal().unwrap_or(-1).to_le_bytes());
        emit(Kind::Exit, &exit)?;
        stream.shutdown(Shutdown::Both)?;
        let _ = listener.join();
        Ok(())
    })
}

/// Sends the output of a pipe; when the client accepts no more, drops the rest.
fn pump(from: Option<impl Read>, emit: impl Fn(&[u8]) -> io::Result<()>) {
    let Some(mut from) = from else { return };
    let mut buffer = vec![0; FRAME_BYTES_MAX.min(64 << 10)];
    let mut client_gone = false;
    while let Ok(n @ 1..) = from.read(&mut buffer) {
        client_gone = client_gone || emit(&buffer[..n]).is_err();
    }
}

fn kill(pid: i32, signal: i32) -> io::Result<()> {
    let unknown = || io::Error::from(io::ErrorKind::InvalidInput);
    // Zero would mean this process's own group.
    let target = Pid::from_raw(pid.saturating_abs()).ok_or_else(unknown)?;
    let is_group = pid < 0;
    if signal == 0 {
        // Signal 0 only checks for existence.
        return Ok(if is_group {
            process::test_kill_process_group(target)
        } else {
            process::test_kill_process(target)
        }?);
    }
    let signal = Signal::from_named_raw(signal).ok_or_else(unknown)?;
    Ok(if is_group {
        process::kill_process_group(target, signal)
    } else {
        process::kill_process(target, signal)
    }?)
}
