//! `--metrics` of nodes and VMs, through the real binary.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::process::Stdio;
use std::time::Instant;

use ssi_hv::exit::ExitCode;

use crate::running::{LIMIT, Place, node};
use crate::support;

/// Sends these bytes and returns the complete answer.
fn said_to(address: &str, bytes: &[u8]) -> String {
    let mut stream = TcpStream::connect(address).expect("it listens");
    stream.set_read_timeout(Some(LIMIT)).expect("is set");
    stream.write_all(bytes).expect("is taken");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("UTF-8");
    answer
}

fn request(line: &str) -> Vec<u8> {
    format!("{line} HTTP/1.1\r\nHost: x\r\n\r\n").into_bytes()
}

/// Returns the metrics, requested as Prometheus does.
fn scrape(address: &str) -> String {
    let answer = said_to(address, &request("GET /metrics"));
    let (head, body) = answer.split_once("\r\n\r\n").expect("a head and a body");
    assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
    assert!(
        head.contains("content-type: text/plain; version=0.0.4"),
        "{head}"
    );
    body.to_owned()
}

fn value(text: &str, series: &str) -> f64 {
    let begin = format!("{series} ");
    let line = text.lines().find_map(|line| line.strip_prefix(&begin));
    let value = line.unwrap_or_else(|| panic!("no {series} in {text}"));
    value.parse().expect("a number")
}

/// Returns the address in the line that reports the metrics listener.
fn address_in(lines: impl BufRead) -> String {
    let mut lines = lines.lines().map_while(Result::ok);
    let line = lines.find(|line| line.contains("metrics on http://"));
    let line = line.expect("the address is printed");
    let (_, rest) = line.split_once("http://").expect("an address");
    rest.strip_suffix("/metrics").expect("a path").to_owned()
}

#[test]
fn a_node_answers_who_scrapes_it_and_refuses_the_rest_by_its_code() {
    let place = Place::new();
    let (mut node, _) = node(&place, &["--metrics", "127.0.0.1:0"]);
    let address = address_in(&mut node.console);
    let text = scrape(&address);
    assert!((value(&text, "ssi_hv_node_memory_bytes") - 67_108_864.0).abs() < 0.5);
    assert!(value(&text, "ssi_hv_uptime_seconds") > 0.0);

    let head = said_to(&address, &request("HEAD /metrics"));
    assert!(
        head.starts_with("HTTP/1.1 200 ") && head.ends_with("\r\n\r\n"),
        "{head}"
    );
    let long = format!("GET /{} HTTP/1.1\r\n\r\n", "x".repeat(20_000)).into_bytes();
    let with_body = b"GET /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}".to_vec();
    for (bytes, status) in [
        (request("GET /"), 404),
        (request("GET /v1/status"), 404),
        (request("GET /metrics/"), 404),
        (request("POST /metrics"), 405),
        (request("DELETE /metrics"), 405),
        (request("GET /metrics?x=1"), 400),
        (with_body, 400),
        (b"hello\r\n\r\n".to_vec(), 400),
        (long, 431),
    ] {
        let answer = said_to(&address, &bytes);
        assert!(
            answer.starts_with(&format!("HTTP/1.1 {status} ")),
            "{status}: {answer}"
        );
        assert_eq!(answer.contains("allow: GET"), status == 405, "{answer}");
    }

    // Silent clients beyond the limit of connections: they are disconnected, and the next is
    // answered.
    let silent: Vec<TcpStream> = (0..100)
        .map(|_| TcpStream::connect(&address).expect("the kernel takes it"))
        .collect();
    assert!(scrape(&address).contains("ssi_hv_node_leases 0"));
    drop(silent);
    let mut half = TcpStream::connect(&address).expect("it listens");
    half.write_all(b"GET /met").expect("is taken");
    half.shutdown(Shutdown::Write).expect("the end is sent");
    drop(half);

    // On the control socket, without a metrics port.
    let socket = place.sockets().join(format!("node-{}.sock", node.pid()));
    let mut stream = UnixStream::connect(socket).expect("it listens");
    stream
        .write_all(&request("GET /v1/metrics"))
        .expect("is taken");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("UTF-8");
    let names = |text: &str| -> Vec<String> {
        let types = text.lines().filter(|line| line.starts_with("# TYPE "));
        types.map(str::to_owned).collect()
    };
    assert_eq!(names(&answer), names(&scrape(&address)));

    // A port in use is an error at once.
    let line = place.failed(
        &[
            "node",
            "--listen",
            "127.0.0.1:0",
            "--memory",
            "64M",
            "--metrics",
            &address,
        ],
        ExitCode::HostError,
    );
    for part in [&format!("--metrics {address}"), "name another", "in use"] {
        assert!(line.contains(part), "{part} in {line}");
    }
    assert_eq!(node.end(libc::SIGTERM), Some(0));
    assert!(
        TcpStream::connect(&address).is_err(),
        "nobody listens any more"
    );
}

#[test]
fn a_vm_is_scraped_while_it_pages_and_a_taken_port_is_an_error_at_the_start() {
    if !support::kvm_is_there() {
        return;
    }
    let place = Place::new();
    let (donor, donor_address) = node(&place, &[]);
    let kernel = place.directory.path().join("kernel");
    fs::write(
        &kernel,
        tiny_guests::elf(tiny_guests::walk_for_ever::code()),
    )
    .expect("is written");
    let kernel = kernel.to_str().expect("UTF-8");
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let taken = listener.local_addr().expect("an address").to_string();
    let arguments = |metrics| {
        [
            "run",
            "-v",
            "--name",
            "scraped",
            "--kernel",
            kernel,
            "--memory",
            "64M",
            "--local-memory",
            "16M",
            "--donor",
            &donor_address,
            "--metrics",
            metrics,
        ]
    };
    let output = place.output(&arguments(&taken));
    let stderr = String::from_utf8_lossy(&output.stderr);
    let code = ExitCode::HostError.code();
    assert_eq!(output.status.code(), Some(code.into()), "{stderr}");
    assert!(stderr.contains("name another address or port"), "{stderr}");
    drop(listener);
    let mut child = place
        .command(&arguments("127.0.0.1:0"))
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("it starts");
    let stderr = child.stderr.take().expect("a pipe");
    let vm = Ended(child);
    let mut stderr = BufReader::new(stderr);
    let address = address_in(&mut stderr);

    // Scraping works from the very start, and the counts grow.
    let count = "ssi_hv_fault_seconds_count{kind=\"remote\"}";
    let deadline = Instant::now() + LIMIT;
    let first = loop {
        let text = scrape(&address);
        assert!(text.contains("ssi_hv_build_info{version="), "{text}");
        if text.contains(count) && value(&text, count) > 100.0 {
            break text;
        }
        assert!(Instant::now() < deadline, "{text}");
    };
    assert!((value(&first, "ssi_hv_vm_state{state=\"running\"}") - 1.0).abs() < 0.5);
    assert!(
        first.contains("ssi_hv_vm_info{vm=\"scraped\",transport=\"tcp\""),
        "{first}"
    );
    assert!((value(&first, "ssi_hv_donor_reachable{node=\"1\"}") - 1.0).abs() < 0.5);
    for stage in ["queue", "fetch", "install"] {
        let sum = format!("ssi_hv_fault_stage_seconds_sum{{kind=\"remote\",stage=\"{stage}\"}}");
        assert!(value(&first, &sum) > 0.0, "{stage}");
    }
    // The total equals the sum of its stages, within the resolution of the buckets.
    let sum = |text: &str, series: &str| value(text, series);
    let whole = sum(&first, "ssi_hv_fault_seconds_sum{kind=\"remote\"}");
    let stages: f64 = ["queue", "fetch", "install"]
        .iter()
        .map(|stage| {
            let series =
                format!("ssi_hv_fault_stage_seconds_sum{{kind=\"remote\",stage=\"{stage}\"}}");
            sum(&first, &series)
        })
        .sum();
    assert!(
        (whole / stages - 1.0).abs() < 0.1,
        "{whole} s in all, {stages} s in stages"
    );
    loop {
        let now = scrape(&address);
        if value(&now, count) > value(&first, count) {
            break;
        }
        assert!(Instant::now() < deadline, "the counts do not change");
    }
    drop(vm);
    assert_eq!(donor.end(libc::SIGTERM), Some(0));
}

/// A process that is killed on drop.
struct Ended(std::process::Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
