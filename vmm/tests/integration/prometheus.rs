//! A real Prometheus scrapes a VM and a node for a minute, with the example dashboard and rules.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::io::{Read, Write as _};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;
use ssi_hv_membership::testing::HeldPort;

use crate::running::{LIMIT, Place, node, vm_with};
use crate::support;

/// Scrapes of each process: one per second for a minute.
const SCRAPES_MIN: f64 = 60.0;
/// Upper bound of that minute: a stopped node is not scraped.
const MINUTE_MAX: Duration = Duration::from_secs(150);
/// Interval of queries to Prometheus, which sends no notifications.
const PAUSE: Duration = Duration::from_millis(200);

/// Metrics of the documents that need not change here, with the reason. Those of RDMA do not exist
/// here: the scenario `rdma_removed` checks them, with a Prometheus as well.
const STILL: [(&str, &str); 8] = [
    ("ssi_hv_vm_info", "it is what the VM was started with"),
    ("ssi_hv_guest_memory_bytes", "it was configured"),
    ("ssi_hv_home_here_bytes", "it was configured"),
    ("ssi_hv_cache_limit_bytes", "it was configured"),
    ("ssi_hv_node_memory_bytes", "it was configured"),
    ("ssi_hv_donor_memory_bytes", "it was configured"),
    (
        "ssi_hv_donor_tier",
        "a link that stays as fast stays of its class",
    ),
    (
        "ssi_hv_evictions_unchanged_total",
        "the guest changes each page that it writes to",
    ),
];

fn documents(file: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs")).join(file)
}

fn document(file: &str) -> String {
    fs::read_to_string(documents(file)).expect("a document")
}

/// Returns a program that `scripts/setup` unpacked, or that is installed.
fn program(name: &str) -> Command {
    let tools = concat!(env!("CARGO_MANIFEST_DIR"), "/../target/tools");
    let unpacked = PathBuf::from(tools).join(name);
    if unpacked.is_file() {
        Command::new(unpacked)
    } else {
        Command::new(name)
    }
}

fn is_installed(name: &str) -> bool {
    let mut command = program(name);
    command
        .arg("--version")
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

/// A Prometheus that is killed on drop.
struct Prometheus {
    child: Child,
    port: HeldPort,
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Prometheus {
    fn start(place: &Place, targets: &[&str]) -> Self {
        let directory = place.directory.path();
        let config = directory.join("prometheus.yml");
        let rules = documents("alerts.yml").canonicalize().expect("a path");
        let text = format!(
            "global: {{scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 1s}}\n\
             rule_files: ['{}']\n\
             scrape_configs: [{{job_name: ssi-hv, static_configs: [{{targets: {targets:?}}}]}}]\n",
            rules.display()
        );
        fs::write(&config, text).expect("is written");
        let port = HeldPort::new();
        let log = fs::File::create(directory.join("prometheus.log")).expect("a file");
        let child = program("prometheus")
            .arg(format!("--config.file={}", config.display()))
            .arg(format!(
                "--storage.tsdb.path={}",
                directory.join("data").display()
            ))
            .arg(format!("--web.listen-address={}", port.address()))
            .arg("--log.level=warn")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .expect("it starts");
        Self { child, port }
    }

    /// Returns the JSON at `path`; `None` while it does not answer.
    fn get(&self, path: &str) -> Option<Value> {
        let mut stream = TcpStream::connect(self.port.address()).ok()?;
        stream.set_read_timeout(Some(LIMIT)).ok()?;
        // In this version of HTTP, answers end with the connection.
        write!(
            stream,
            "GET {path} HTTP/1.0\r\nHost: {}\r\n\r\n",
            self.port.address()
        )
        .ok()?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).ok()?;
        let (_, body) = answer.split_once("\r\n\r\n")?;
        serde_json::from_str(body).ok()
    }

    /// Returns the current values of an expression.
    fn query(&self, expression: &str) -> Vec<f64> {
        let encoded = expression.bytes().fold(String::new(), |mut text, byte| {
            // Writing to a string does not fail.
            let _ = write!(text, "%{byte:02x}");
            text
        });
        let Some(answer) = self.get(&format!("/api/v1/query?query={encoded}")) else {
            return Vec::new();
        };
        // During its start it answers with an error.
        let error = answer["error"].as_str().unwrap_or_default();
        assert!(!error.contains("parse error"), "{expression}: {error}");
        let results = answer["data"]["result"]
            .as_array()
            .cloned()
            .unwrap_or_default();
        let values = results.iter().map(|result| {
            let value = result["value"][1].as_str().expect("a value");
            value.parse().expect("a number")
        });
        values.collect()
    }

    /// Waits until an expression has a value.
    fn wait_for(&self, expression: &str) {
        let deadline = Instant::now() + LIMIT;
        while self.query(expression).is_empty() {
            assert!(
                Instant::now() < deadline,
                "no {expression} within {} s",
                LIMIT.as_secs()
            );
            thread::sleep(PAUSE);
        }
    }
}

/// Runs `promtool` on a text, and fails if it reports an error.
fn promtool(arguments: &[&str], input: &str) {
    let mut child = program("promtool")
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("it starts");
    let mut stdin = child.stdin.take().expect("a pipe");
    stdin.write_all(input.as_bytes()).expect("is taken");
    drop(stdin);
    let output = child.wait_with_output().expect("it ends");
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8_lossy(&said);
    assert!(output.status.success(), "{arguments:?}: {said}");
}

/// Returns the metrics at an address in the text format.
fn scrape(address: &str) -> String {
    let mut stream = TcpStream::connect(address).expect("it listens");
    stream.set_read_timeout(Some(LIMIT)).expect("is set");
    stream
        .write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        .expect("is taken");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("UTF-8");
    let (_, body) = answer.split_once("\r\n\r\n").expect("a body");
    body.to_owned()
}

/// Returns the expressions of the dashboard, as Grafana would send them.
fn expressions() -> Vec<String> {
    let dashboard: Value = serde_json::from_str(&document("grafana-dashboard.json")).expect("JSON");
    let panels = dashboard["panels"].as_array().expect("panels");
    let targets = panels.iter().flat_map(|panel| panel["targets"].as_array());
    let expressions = targets.flatten().map(|target| {
        let text = target["expr"].as_str().expect("an expression");
        text.replace("$instance", ".+")
            .replace("$__rate_interval", "30s")
    });
    expressions.collect()
}

/// Returns the expressions that the alerts compare with limits.
fn conditions() -> Vec<String> {
    let alerts = document("alerts.yml");
    let all = alerts
        .lines()
        .filter_map(|line| line.trim().strip_prefix("expr: "));
    let conditions = all.flat_map(|all| all.split(" and ")).map(|condition| {
        let (left, _) = condition
            .rsplit_once(" > ")
            .or_else(|| condition.rsplit_once(" == "))
            .expect("a comparison");
        left.trim_start_matches("on (instance) ").to_owned()
    });
    conditions.collect()
}

/// Returns whether an expression is about what the VM here does not have: RDMA, vCPUs on other
/// nodes, certificates, sealed pages, and copies. Unit tests of the metrics show that their counters are
/// reported.
fn is_elsewhere(expression: &str) -> bool {
    [
        "_rdma_",
        "_compute_",
        "_certificate_",
        "_rejected_",
        "_degraded_",
        "_wrong_",
        "_replicated_",
    ]
    .iter()
    .any(|part| expression.contains(part))
}

/// Returns every metric that a text names.
fn metrics_in(text: &str) -> BTreeSet<String> {
    let words = text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
    let ours = words.filter(|word| word.starts_with("ssi_hv_"));
    ours.map(str::to_owned).collect()
}

#[test]
fn prometheus_scrapes_a_vm_and_a_node_for_a_minute() {
    if !support::kvm_is_there() {
        return;
    }
    for name in ["prometheus", "promtool"] {
        if !is_installed(name) {
            println!("SKIPPED: no {name}: scripts/setup unpacks it");
            return;
        }
    }
    let place = Place::new();
    let ports = [HeldPort::new(), HeldPort::new()];
    let [node_metrics, vm_metrics] = ports.each_ref().map(|port| port.address().to_string());
    let (donor, donor_address) = node(&place, &["--metrics", &node_metrics]);
    let flags = [
        "--name",
        "scraped",
        "--donor",
        &donor_address,
        "--donor-grace",
        "120",
        "--metrics",
        &vm_metrics,
        "--on-reboot",
        "restart",
    ];
    let mut vm = vm_with(&place, tiny_guests::wander::code(), &flags);
    let press_button = || place.printed(&["shutdown", "scraped"]);
    for address in [&node_metrics, &vm_metrics] {
        promtool(&["check", "metrics"], &scrape(address));
    }
    promtool(
        &[
            "check",
            "rules",
            documents("alerts.yml").to_str().expect("UTF-8"),
        ],
        "",
    );

    let prometheus = Prometheus::start(&place, &[&node_metrics, &vm_metrics]);
    prometheus.wait_for("up{job=\"ssi-hv\"} == 1");
    let is_up = |address: &str| format!("up{{instance=\"{address}\"}} == 1");

    // The donor is stopped while the guest begins: local memory runs out, since nothing can be
    // written back.
    prometheus.wait_for("ssi_hv_donor_reachable == 1");
    prometheus.wait_for("ssi_hv_memory_stalls_total == 0");
    donor.signal(libc::SIGSTOP);
    press_button();
    prometheus.wait_for("ssi_hv_memory_stalls_total > 0");
    // The guest is therefore paused, which the alerts report; then the donor continues.
    prometheus.wait_for("ssi_hv_donor_reachable == 0");
    prometheus.wait_for("ssi_hv_vm_state{state=\"paused\"} == 1");
    prometheus.wait_for("ALERTS{alertname=\"SsiHvDonorUnreachable\", alertstate=\"firing\"}");
    donor.signal(libc::SIGCONT);
    prometheus.wait_for("ssi_hv_donor_reachable == 1");
    prometheus.wait_for(&is_up(&node_metrics));
    prometheus.wait_for("ssi_hv_fault_seconds_count{kind=\"remote\"} > 100");
    // The guest reboots and continues.
    press_button();
    let mut said = [0];
    vm.console.read_exact(&mut said).expect("it begins again");
    assert_eq!(&said, b"r");
    press_button();

    // For the rest of the minute it pages occasionally, which leaves CPU time to others.
    let deadline = Instant::now() + MINUTE_MAX;
    let scrapes = |address: &str| {
        let expression = format!("sum_over_time(up{{instance=\"{address}\"}}[10m])");
        prometheus
            .query(&expression)
            .first()
            .copied()
            .unwrap_or(0.0)
    };
    while scrapes(&vm_metrics).min(scrapes(&node_metrics)) < SCRAPES_MIN {
        assert!(
            Instant::now() < deadline,
            "{} scrapes",
            scrapes(&node_metrics)
        );
        place.printed(&["pause", "scraped"]);
        let seen = scrapes(&vm_metrics);
        while scrapes(&vm_metrics) < seen + 3.0 {
            assert!(Instant::now() < deadline, "the VM is not scraped");
            thread::sleep(PAUSE);
        }
        place.printed(&["resume", "scraped"]);
        thread::sleep(PAUSE);
    }

    // Each panel of the dashboard has data, and each alert has input.
    let all = expressions().into_iter().chain(conditions());
    for expression in all.filter(|expression| !is_elsewhere(expression)) {
        // Without events a quantile is NaN.
        let values = prometheus.query(&expression);
        assert!(
            values.iter().any(|value| value.is_finite()),
            "{expression} is {values:?}"
        );
    }
    // Of those who only connect, one address gets 16 places.
    let idle = (0..20).map(|_| TcpStream::connect(&donor_address));
    let idle: Result<Vec<_>, _> = idle.collect();
    prometheus.wait_for("ssi_hv_node_connections_dropped_total{reason=\"address\"} > 3");
    drop(idle.expect("the kernel accepts them"));
    // A killed VM loses its lease.
    assert_eq!(vm.end(libc::SIGKILL), None);
    prometheus.wait_for("ssi_hv_node_leases_expired_total > 0");

    // Every metric has samples and changed.
    let named = metrics_in(&(document("alerts.yml") + &expressions().join("\n")));
    assert!(named.len() > 30, "{named:?}");
    let (mut moved, mut stood) = (0, Vec::new());
    for name in &named {
        if is_elsewhere(name) {
            continue;
        }
        // A histogram is listed without the suffixes of its series.
        let range = format!("{{__name__=~\"{name}(_count)?\"}}[10m]");
        let samples = format!("count_over_time({range})");
        let samples = prometheus.query(&samples);
        assert!(!samples.is_empty(), "no samples of {name}");
        if STILL.iter().any(|(still, _)| still == name) {
            continue;
        }
        let changed = format!("max_over_time({range}) > min_over_time({range})");
        if prometheus.query(&changed).is_empty() {
            stood.push(name);
        }
        moved += 1;
    }
    assert!(stood.is_empty(), "these did not change: {stood:?}");
    println!("{} metrics, {moved} of them moved", named.len());
    assert_eq!(donor.end(libc::SIGTERM), Some(0));
}
