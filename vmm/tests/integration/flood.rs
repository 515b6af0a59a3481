//! A node under a flood of connections from clients that show no lease.

use std::fs;
use std::io::{BufRead, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream, UdpSocket};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use fabric_homes::NodeId;
use fabric_identity::{ExpectedNode, Role};
use fabric_test_support::flood::{Handshakes, silent};
use fabric_test_support::proxy::{Mischief, Proxy};
use fabric_test_support::{Words, config, fill, start, verify};
use fabric_transport::control::ControlStream;
use fabric_transport::stream::Carrier;
use fabric_wire::{Ends, FrameKind, LeaseGrant, LeaseRequest, LeaseStatus, TrafficClass};
use memory_fabric::fabric::{FabricConfig, FabricEvent};
use memory_fabric::link::LinkEvent;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use ssi_hv::config::DEFAULT_DONOR_GRACE_SECONDS;
use ssi_hv::credentials;

use crate::running::{LIMIT, Place, Running, node};

/// Connections that are opened and then silent.
const SILENT: usize = 2000;
/// Connections on which a part of a frame, or of a handshake, is sent.
const HALF: usize = 1024;
/// Handshakes of QUIC that are begun.
const HANDSHAKES: usize = 5000;
/// Threads that begin them.
const CLIENTS: usize = 4;
/// Sockets of them that the client keeps at a time.
const KEPT: usize = 1000;
/// How much more than the memory that it lends a node may use.
const ALLOWED_KIB: u64 = 64 << 10;
const LENT_KIB: u64 = 64 << 10;
const GUEST: u64 = 48 << 20;
const LOCAL: u64 = 16 << 20;

/// Another address of this host for each number.
fn address(number: usize) -> Ipv4Addr {
    let number = u32::try_from(number).expect("small");
    Ipv4Addr::from_bits(u32::from_be_bytes([127, 1, 0, 1]) + number)
}

/// What is flooding, and what became of it.
struct Flood {
    node: SocketAddr,
    /// Addresses that it comes from.
    addresses: usize,
    first: &'static [u8],
}

#[derive(Debug, Default)]
struct Flooded {
    silent: Vec<TcpStream>,
    half: Vec<TcpStream>,
    /// The last of the handshakes.
    kept: Vec<UdpSocket>,
    handshakes: usize,
}

/// Ends what repeats, also when the test fails.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl Flood {
    fn from(&self, number: usize) -> Ipv4Addr {
        if self.addresses == 1 {
            return Ipv4Addr::LOCALHOST;
        }
        address(number % self.addresses)
    }

    fn run(&self) -> Flooded {
        thread::scope(|scope| {
            let silent = scope.spawn(|| self.silent(SILENT));
            let half = scope.spawn(|| self.half());
            let begin = |part| scope.spawn(move || self.handshakes(part));
            let handshakes: Vec<_> = (0..CLIENTS).map(begin).collect();
            let mut flooded = Flooded {
                silent: silent.join().expect("it ends"),
                half: half.join().expect("it ends"),
                kept: Vec::new(),
                handshakes: 0,
            };
            for part in handshakes {
                let (kept, answered) = part.join().expect("it ends");
                flooded.kept.extend(kept);
                flooded.handshakes += answered;
            }
            flooded
        })
    }

    fn silent(&self, count: usize) -> Vec<TcpStream> {
        let open = |number| {
            let opened = silent(self.node, self.from(number));
            opened.unwrap_or_else(|error| panic!("connection {number}: {error}"))
        };
        (0..count).map(open).collect()
    }

    fn half(&self) -> Vec<TcpStream> {
        let mut opened = self.silent(HALF);
        for stream in &mut opened {
            // It may have been dropped.
            let _ = stream.write_all(self.first);
        }
        opened
    }

    /// Begins a part of the handshakes. Returns the last sockets, and how many the node answered.
    fn handshakes(&self, part: usize) -> (Vec<UdpSocket>, usize) {
        let client = Handshakes::new();
        let (mut kept, mut answered) = (Vec::new(), 0);
        for number in (part..HANDSHAKES).step_by(CLIENTS) {
            let begun = client.begin(self.node, self.from(number));
            let (socket, retried) = begun.expect("a socket");
            answered += usize::from(retried);
            kept.push(socket);
            if kept.len() > KEPT / CLIENTS {
                kept.remove(0);
            }
        }
        (kept, answered)
    }
}

fn resident_kib(node: &Running) -> u64 {
    let status = fs::read_to_string(format!("/proc/{}/status", node.pid())).expect("it runs");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let value = line.and_then(|line| line.trim().strip_suffix("kB"));
    value.expect("a size").trim().parse().expect("a number")
}

/// Makes a page connection of a lease again and again until `stop`. Returns how often, and the longest
/// time that took.
fn reconnect(
    class: TrafficClass,
    node: SocketAddr,
    carrier: &Carrier,
    lease: &Mutex<(ControlStream, LeaseGrant)>,
    stop: &AtomicBool,
) -> (u32, Duration) {
    let token = lease.lock().unwrap().1.token;
    let ends = Ends {
        local: NodeId(0).into(),
        donor: NodeId(1),
    };
    let (mut count, mut longest) = (0, Duration::ZERO);
    while !stop.load(Ordering::Relaxed) {
        let began = Instant::now();
        loop {
            let attached = ControlStream::connect_by(node, carrier)
                .and_then(|mut stream| stream.attach(token, class, &ends));
            match attached {
                Ok(()) => break,
                Err(error) => assert!(began.elapsed() < LIMIT, "no connection: {error:?}"),
            }
        }
        count += 1;
        longest = longest.max(began.elapsed());
        let mut lease = lease.lock().unwrap();
        let renewed: Result<LeaseStatus, _> =
            lease.0.call(FrameKind::Renew, &token, FrameKind::Status);
        renewed.expect("the lease lasts");
    }
    (count, longest)
}

/// Floods a node from so many addresses while a VM uses its memory, and connects again and again.
fn flooded(addresses: usize, credentials: bool) {
    let place = Place::new();
    let at = place.directory.path();
    let path = |name: &str| at.join(name).to_str().expect("UTF-8").to_owned();
    if credentials {
        place.printed(&["pki", "init", &path("ca"), "--cluster", "prod"]);
        for (holder, name) in [("node/alpha", "alpha"), ("vm/web", "web")] {
            place.printed(&["pki", "issue", &path("ca"), holder, "-o", &path(name)]);
        }
    }
    let alpha = path("alpha");
    let more: &[&str] = if credentials {
        &["--credentials", &alpha]
    } else {
        &[]
    };
    let (mut node, mut address) = node(&place, more);
    if credentials {
        // The first line says who the node is.
        let mut line = String::new();
        node.console.read_line(&mut line).expect("it prints");
        address = line.trim().rsplit(' ').next().expect("one").to_owned();
    }
    let address: SocketAddr = address.parse().expect("an address");
    let vm = credentials.then(|| credentials::load(&at.join("web"), Role::Vm).expect("usable"));
    let proxy = Proxy::new(address, Mischief::None, 0);
    let through = if credentials { address } else { proxy.address };
    let mut config: FabricConfig = config(GUEST, LOCAL, &[through]);
    config.credentials.clone_from(&vm);
    config.donors[0].name = credentials.then(|| "alpha".parse().expect("a name"));
    config.donors[0].bytes = Some(GUEST);
    // As that of `ssi-hv run`.
    config.grace = Duration::from_secs(DEFAULT_DONOR_GRACE_SECONDS.into());
    let fabric_test_support::Running { fabric, events } = start(&config);
    // Threads that wait for a page of a lost donor would wait for ever.
    let pid = Pid::from_raw(node.pid().parse().expect("a process id")).expect("not 0");
    thread::spawn(move || {
        for event in events {
            if let FabricEvent::Link(LinkEvent::Lost { reason, .. }) = event {
                // What `eprintln!` writes is kept for the end of the test, which does not come.
                let text = format!("the VM has lost the node that is flooded: {reason}\n");
                let _ = std::io::stderr().write_all(text.as_bytes());
                // Nothing is dropped.
                let _ = kill_process(pid, Signal::KILL);
                std::process::abort();
            }
        }
    });
    let words = Words::of(&fabric);
    fill(words, 1);

    let tcp = match &vm {
        Some(credentials) => Carrier::Tls(ExpectedNode {
            credentials: credentials.clone(),
            name: "alpha".parse().expect("a name"),
        }),
        None => Carrier::Tcp,
    };
    let udp = match &tcp {
        Carrier::Tls(node) => Carrier::Quic(node.clone()),
        _ => Carrier::Udp(None),
    };
    let mut control = ControlStream::connect_by(address, &tcp).expect("a node");
    let request = LeaseRequest {
        vm: "raw".into(),
        bytes: 1 << 20,
        or_less: false,
        duration_ms: 60_000,
    };
    let grant: LeaseGrant = control
        .call(FrameKind::Lease, &request, FrameKind::Granted)
        .expect("it lends");

    let lease = Mutex::new((control, grant));

    let before = resident_kib(&node);
    let flood = Flood {
        node: address,
        addresses,
        // Of a frame, or of a record of TLS with a ClientHello.
        first: if credentials {
            &[22, 3, 1, 2, 0, 1]
        } else {
            b"SV\x0a\x01\x00"
        },
    };
    let stop = AtomicBool::new(false);
    let (opened, most, by_tcp, by_udp) = thread::scope(|scope| {
        let stopping = Stop(&stop);
        let by_tcp = scope.spawn(|| reconnect(TrafficClass::Urgent, address, &tcp, &lease, &stop));
        let by_udp = scope.spawn(|| reconnect(TrafficClass::Bulk, address, &udp, &lease, &stop));
        let flooding = scope.spawn(|| flood.run());
        let mut most = before;
        while !flooding.is_finished() {
            // The VM's own connections are cut, too.
            proxy.cut(true);
            proxy.cut(false);
            verify(words, 1);
            most = most.max(resident_kib(&node));
        }
        let opened = flooding.join().expect("it ends");
        // Once more with all that is still open.
        proxy.cut(true);
        proxy.cut(false);
        verify(words, 1);
        most = most.max(resident_kib(&node));
        drop(stopping);
        let by_tcp = by_tcp.join().expect("it ends");
        (opened, most, by_tcp, by_udp.join().expect("it ends"))
    });
    let status = place.json(&["status", "--json"]);
    let connections: &Value = &status["nodes"][0]["connections"];
    println!(
        "{} silent, {} half, {} of {HANDSHAKES} handshakes from {addresses} address(es): {before} KiB before, \
         {most} KiB at most; {by_tcp:?} by TCP, {by_udp:?} by UDP; {connections}",
        opened.silent.len(),
        opened.half.len(),
        opened.handshakes,
    );
    assert_eq!(opened.kept.len(), KEPT);
    let count = |pointer: &str| connections.pointer(pointer).and_then(Value::as_u64);
    let dropped = ["address", "total", "silent", "handshake"];
    let dropped = dropped.map(|reason| count(&format!("/dropped/{reason}")).expect("a count"));
    assert!(dropped.iter().sum::<u64>() > 3000, "{connections}");
    assert!(count("/waiting").expect("a count") <= 64, "{connections}");
    assert!(
        most < LENT_KIB + ALLOWED_KIB,
        "the node used {most} KiB, {before} KiB before"
    );
    // By UDP a lost packet alone takes up to 600 ms.
    assert!(by_tcp.0 > 10 && by_udp.0 > 1, "{by_tcp:?} {by_udp:?}");
    drop(opened);
    fabric.shutdown();
    assert_eq!(node.end(libc::SIGTERM), Some(0));
}

#[test]
fn a_vm_reconnects_to_a_node_that_many_addresses_flood() {
    flooded(200, false);
}

#[test]
fn a_vm_reconnects_to_a_node_that_its_own_address_floods() {
    flooded(1, false);
}

#[test]
fn a_vm_with_a_certificate_reconnects_to_a_node_that_its_own_address_floods() {
    flooded(1, true);
}

#[test]
fn a_vm_with_a_certificate_reconnects_to_a_node_that_many_addresses_flood() {
    flooded(200, true);
}
