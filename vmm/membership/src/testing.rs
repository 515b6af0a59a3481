//! A real etcd on a loopback port, for tests.

use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use rcgen::{
    BasicConstraints, CertificateParams, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};
use serde_json::{Value, json};
use socket2::{Domain, Socket, Type};

use crate::client::Client;
use crate::list::runtime;
use crate::target::{Endpoints, Target};

/// Deadline of each wait of a test.
const LIMIT: Duration = Duration::from_secs(60);
/// What etcd logs when it serves.
const READY: &str = "ready to serve client requests";

/// A port of loopback that is kept for one program of a test, also while that program does not run.
///
/// The port is bound and does not listen, so that the kernel gives it to nobody who asks for any port,
/// neither to listen nor to connect from; a program that names it and allows the reuse of addresses,
/// as those in Go do, may listen there.
#[derive(Debug)]
pub struct HeldPort(Socket);

impl HeldPort {
    /// Takes a free port.
    ///
    /// # Panics
    ///
    /// Panics if there is none.
    #[must_use]
    pub fn new() -> Self {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).expect("a socket");
        socket.set_reuse_address(true).expect("an option");
        let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        socket.bind(&any.into()).expect("a port");
        Self(socket)
    }

    /// Returns its address.
    ///
    /// # Panics
    ///
    /// Panics if the socket has no address of IPv4.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        let address = self.0.local_addr().expect("an address");
        address.as_socket().expect("of IPv4")
    }
}

impl Default for HeldPort {
    fn default() -> Self {
        Self::new()
    }
}

/// An etcd that is killed when it is dropped.
#[derive(Debug)]
pub struct Etcd {
    directory: tempfile::TempDir,
    program: PathBuf,
    client: HeldPort,
    peer: HeldPort,
    is_secure: bool,
    child: Child,
}

/// Returns the program, if the host has one; prints a skip otherwise.
fn program() -> Option<PathBuf> {
    let tools = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/tools/etcd");
    let paths = [tools, "/usr/bin/etcd".into(), "/usr/local/bin/etcd".into()];
    let found = paths.into_iter().find(|path| path.is_file());
    if found.is_none() {
        println!("SKIPPED: no etcd: scripts/setup unpacks it");
    }
    found
}

impl Etcd {
    /// Starts one without TLS, if the host has etcd.
    #[must_use]
    pub fn start() -> Option<Self> {
        Self::start_as(false)
    }

    /// Starts one that proves its name, and wants a certificate of its authority.
    #[must_use]
    pub fn with_tls() -> Option<Self> {
        Self::start_as(true)
    }

    fn start_as(is_secure: bool) -> Option<Self> {
        let program = program()?;
        let directory = tempfile::tempdir().expect("a directory");
        if is_secure {
            issue(directory.path());
        }
        let (client, peer) = (HeldPort::new(), HeldPort::new());
        let (child, ready) = spawn(&program, directory.path(), &client, &peer, is_secure);
        let etcd = Self {
            directory,
            program,
            client,
            peer,
            is_secure,
            child,
        };
        assert!(etcd.is_serving(&ready), "{}", log_of(etcd.directory.path()));
        Some(etcd)
    }

    /// Waits until it serves. Returns false if it has ended.
    fn is_serving(&self, ready: &mpsc::Receiver<()>) -> bool {
        match ready.recv_timeout(LIMIT) {
            Ok(()) => true,
            Err(mpsc::RecvTimeoutError::Disconnected) => false,
            Err(mpsc::RecvTimeoutError::Timeout) => panic!("{}", log_of(self.directory.path())),
        }
    }

    /// Returns its address for `--cluster`.
    #[must_use]
    pub fn url(&self) -> String {
        let scheme = if self.is_secure { "etcds" } else { "etcd" };
        format!("{scheme}://{}", self.client.address())
    }

    /// Returns its port.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.client.address().port()
    }

    /// Returns the directory for `--cluster-credentials`.
    #[must_use]
    pub fn credentials(&self) -> PathBuf {
        self.directory.path().join("client")
    }

    /// Returns a directory with the certificate of another authority, and the one of etcd's.
    #[must_use]
    pub fn wrong_credentials(&self) -> PathBuf {
        self.directory.path().join("other")
    }

    /// Returns how it is asked.
    #[must_use]
    pub fn endpoints(&self) -> Endpoints {
        let target: Target = self.url().parse().expect("an address");
        let credentials = self.is_secure.then(|| self.credentials());
        let made = target.endpoints(credentials.as_deref(), false);
        made.expect("it can be asked")
    }

    fn try_ask(&self, path: &str, body: &Value) -> Result<Value, String> {
        let asked = async { Client::new(&self.endpoints()).post(path, body).await };
        let runtime = runtime().expect("a runtime");
        runtime.block_on(asked).map_err(|error| error.to_string())
    }

    /// Sends it a request.
    ///
    /// # Panics
    ///
    /// Panics if it refuses.
    #[must_use]
    pub fn ask(&self, path: &str, body: &Value) -> Value {
        self.try_ask(path, body).expect("an answer")
    }

    /// Writes a key.
    pub fn put(&self, key: &str, value: &[u8]) {
        use base64::Engine as _;
        let base64 = |bytes: &[u8]| base64::engine::general_purpose::STANDARD.encode(bytes);
        let body = json!({ "key": base64(key.as_bytes()), "value": base64(value) });
        let _ = self.ask("/v3/kv/put", &body);
    }

    /// Returns all keys with their values.
    #[must_use]
    pub fn all(&self) -> Vec<(String, Vec<u8>)> {
        use base64::Engine as _;
        let answer = self.ask(
            "/v3/kv/range",
            &json!({ "key": "AA==", "range_end": "AA==" }),
        );
        let bytes = |value: &Value| {
            let text = value.as_str().unwrap_or_default();
            let read = base64::engine::general_purpose::STANDARD.decode(text);
            read.expect("base64")
        };
        let all = answer["kvs"].as_array().cloned().unwrap_or_default();
        let all = all.iter().map(|one| {
            let key = String::from_utf8(bytes(&one["key"])).expect("UTF-8");
            (key, bytes(&one["value"]))
        });
        all.collect()
    }

    /// Ends it without warning.
    pub fn kill(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Starts it again with its data.
    pub fn restart(&mut self) {
        self.kill();
        let directory = self.directory.path();
        let (child, ready) = spawn(
            &self.program,
            directory,
            &self.client,
            &self.peer,
            self.is_secure,
        );
        self.child = child;
        assert!(self.is_serving(&ready), "{}", log_of(self.directory.path()));
    }

    /// Stops it, so that connections stay and nothing is answered, or lets it run on.
    pub fn set_stopped(&self, is_stopped: bool) {
        let signal = if is_stopped { "-STOP" } else { "-CONT" };
        let pid = self.child.id().to_string();
        let sent = Command::new("kill").args([signal, &pid]).status();
        assert!(sent.is_ok_and(|status| status.success()), "no signal");
        if is_stopped {
            wait_until_stopped(self.child.id());
        }
    }
}

/// Waits until no thread of a process runs, after SIGSTOP was sent to it. The signal is sent before
/// that: each thread stops when it next sees it.
///
/// # Panics
///
/// Panics if a thread runs still after a minute.
#[track_caller]
pub fn wait_until_stopped(process: u32) {
    let deadline = Instant::now() + LIMIT;
    while let Some(state) = running_state(process) {
        assert!(
            Instant::now() < deadline,
            "a thread of process {process} is in state {state:?} instead of stopped after {LIMIT:?}"
        );
        thread::yield_now();
    }
}

/// Returns the state of a thread of a process that is neither stopped nor at its end, as proc(5) gives
/// it.
fn running_state(process: u32) -> Option<String> {
    let threads = fs::read_dir(format!("/proc/{process}/task")).ok()?;
    let mut states = threads.filter_map(|thread| {
        let stat = fs::read_to_string(thread.ok()?.path().join("stat")).ok()?;
        let after_name = stat.rsplit(')').next()?;
        after_name.split_whitespace().next().map(str::to_owned)
    });
    states.find(|state| !matches!(state.as_str(), "T" | "t" | "Z" | "X"))
}

impl Drop for Etcd {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Starts an etcd. Returns it with what gets a message when it serves, and is disconnected when it has
/// ended.
fn spawn(
    program: &Path,
    directory: &Path,
    client: &HeldPort,
    peer: &HeldPort,
    is_secure: bool,
) -> (Child, mpsc::Receiver<()>) {
    let scheme = if is_secure { "https" } else { "http" };
    let client = format!("{scheme}://{}", client.address());
    let peer = format!("http://{}", peer.address());
    let mut log = fs::OpenOptions::new()
        .create(true)
        .append(true)
        .open(directory.join("log"))
        .expect("a log");
    let mut command = Command::new(program);
    command
        .arg(format!("--data-dir={}", directory.join("data").display()))
        .arg(format!("--listen-client-urls={client}"))
        .arg(format!("--advertise-client-urls={client}"))
        .arg(format!("--listen-peer-urls={peer}"))
        .arg(format!("--initial-advertise-peer-urls={peer}"))
        .arg(format!("--initial-cluster=default={peer}"))
        // A test's disk may be slow.
        .args([
            "--heartbeat-interval=200",
            "--election-timeout=2000",
            "--unsafe-no-fsync",
        ])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    if is_secure {
        let file = |name: &str| directory.join("server").join(name).display().to_string();
        command
            .arg("--client-cert-auth")
            .arg(format!("--trusted-ca-file={}", file("ca.pem")))
            .arg(format!("--cert-file={}", file("cert.pem")))
            .arg(format!("--key-file={}", file("key.pem")));
    }
    let mut child = command.spawn().expect("etcd starts");
    let said = BufReader::new(child.stderr.take().expect("a pipe"));
    let (sender, ready) = mpsc::channel();
    thread::spawn(move || {
        for line in said.lines().map_while(Result::ok) {
            // The directory may be gone, and nobody may wait any more.
            let _ = writeln!(log, "{line}");
            if line.contains(READY) {
                let _ = sender.send(());
            }
        }
    });
    (child, ready)
}

fn log_of(directory: &Path) -> String {
    let log = fs::read_to_string(directory.join("log")).unwrap_or_default();
    let mut last: Vec<_> = log.lines().rev().take(20).collect();
    last.reverse();
    last.join("\n")
}

/// Issues certificates of an authority for etcd and a client, and one of another authority.
fn issue(directory: &Path) {
    let authority = || {
        let mut parameters = CertificateParams::new(Vec::new()).expect("no names");
        parameters.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        parameters.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        let key = KeyPair::generate().expect("a key");
        let pem = parameters.self_signed(&key).expect("is signed").pem();
        (pem, Issuer::new(parameters, key))
    };
    let (pem, issuer) = authority();
    let (_, other) = authority();
    for (name, issuer) in [("server", &issuer), ("client", &issuer), ("other", &other)] {
        let mut parameters = CertificateParams::new(vec!["127.0.0.1".to_owned()]).expect("names");
        // The gateway of etcd is a client of etcd itself, with the certificate of the server.
        parameters.extended_key_usages = vec![
            ExtendedKeyUsagePurpose::ServerAuth,
            ExtendedKeyUsagePurpose::ClientAuth,
        ];
        let key = KeyPair::generate().expect("a key");
        let certificate = parameters.signed_by(&key, issuer).expect("is signed");
        let place = directory.join(name);
        fs::create_dir(&place).expect("a directory");
        let files = [
            ("ca.pem", pem.clone()),
            ("cert.pem", certificate.pem()),
            ("key.pem", key.serialize_pem()),
        ];
        for (file, text) in files {
            let mut options = fs::OpenOptions::new();
            let options = options.create(true).write(true).mode(0o600);
            let opened = options.open(place.join(file));
            std::io::Write::write_all(&mut opened.expect("a file"), text.as_bytes())
                .expect("is written");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::ErrorKind;
    use std::net::{TcpListener, TcpStream};

    use super::*;

    #[test]
    fn a_held_port_can_be_listened_at_and_is_given_to_nobody() {
        let held = HeldPort::new();
        for _ in 0..2 {
            let listener = TcpListener::bind(held.address()).expect("it is free for who names it");
            let connected = TcpStream::connect(held.address()).expect("it listens");
            drop((listener.accept().expect("a connection"), connected));
        }
        // Who asks for any port does not allow its reuse at that moment, as here.
        let other = Socket::new(Domain::IPV4, Type::STREAM, None).expect("a socket");
        let error = other.bind(&held.address().into()).expect_err("it is held");
        assert_eq!(error.kind(), ErrorKind::AddrInUse);
    }

    #[test]
    fn an_etcd_that_is_stopped_does_not_run() {
        let Some(etcd) = Etcd::start() else { return };
        for _ in 0..200 {
            etcd.set_stopped(true);
            assert_eq!(running_state(etcd.child.id()), None);
            etcd.set_stopped(false);
        }
    }
}
