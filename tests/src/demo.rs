//! The demo: one guest whose memory is on two hosts.

use std::cell::Cell;
use std::fmt::Write as _;
use std::io::{Read as _, Write as _};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use serde_json::{Value, json};

use crate::cleanup::{self, Process};
use crate::e2e::{add_rxe, parse_faultprobe, processor_ticks};
use crate::published::Published;
use crate::share::Share;
use crate::testbed::{Host, HostImage, HostKernel, RemoteProcess, Tap, Testbed, TestbedConfig};

/// What the guest's kernel says first.
const GUEST_BEGINS: &str = "Linux version";
/// How long the guest may take from its start to its end.
const GUEST_DEADLINE: Duration = Duration::from_secs(240);
/// How long a donor may take to listen or to end.
const DONOR_DEADLINE: Duration = Duration::from_secs(30);
/// What the guest runs: with the kernel it needs more than the local memory, so that pages must move.
const CMDLINE: &str = "ssi_exec=\"faultprobe --bytes 256M\"";
const PORT: u16 = 7700;
/// Processor times of processes are told in units of this.
const MS_PER_TICK: u64 = 10;

/// How pages are to travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Transport {
    /// By RDMA where it works, else by TCP.
    Auto,
    /// By RDMA, or not at all.
    Rdma,
    /// By TCP.
    Tcp,
}

impl Transport {
    /// As `ssi-hv run` takes it.
    fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Rdma => "rdma",
            Self::Tcp => "tcp",
        }
    }
}

/// Where the demo runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// Two processes of this machine, linked by its loopback.
    Here,
    /// Two emulated hosts.
    Testbed,
}

/// What came of the guest.
#[derive(Debug)]
struct Outcome {
    exit_code: Option<i32>,
    console: String,
    report: Option<String>,
}

/// Runs the demo and writes `target/demo/report.json`.
///
/// # Errors
/// Fails when the guest does not run to its end, or found a corrupt byte.
pub fn run(workspace: &Path, transport: Option<Transport>) -> anyhow::Result<()> {
    let dir = workspace.join("target/demo");
    std::fs::create_dir_all(&dir).with_context(|| dir.display().to_string())?;
    let file = dir.join("report.json");
    // An older report must not be taken for this run's.
    let _ = std::fs::remove_file(&file);
    let share = Share::prepare(workspace)?;
    ensure!(
        share.has_product(),
        "no ssi-hv in target/release: run scripts/demo"
    );
    let place = choose_place();
    match place {
        Place::Here => println!(
            "This machine has hardware virtualisation: donor and guest run on it, over loopback."
        ),
        Place::Testbed => println!(
            "This machine has no hardware virtualisation for Linux guests: two emulated hosts are used (their times are not representative)."
        ),
    }
    let begin = Instant::now();
    let (outcome, local) = match place {
        Place::Here => run_here(&share, &dir, transport)?,
        Place::Testbed => run_on_testbed(workspace, &share, &dir, transport)?,
    };
    if outcome.exit_code != Some(0) {
        bail!(
            "the guest ended with exit code {:?} instead of 0: see its console above",
            outcome.exit_code
        );
    }
    let probe = parse_faultprobe(&outcome.console)?;
    let parse = |text: Option<String>| -> anyhow::Result<Value> {
        let text = text.context("ssi-hv wrote no report")?;
        Published::Report.parse(&text)
    };
    let mut report = parse(outcome.report)?;
    compare_boots(&mut report, &parse(local.report)?);
    report["faultprobe"] = probe.clone();
    report["demo"] = json!({
        "hosts": if place == Place::Here { "this machine" } else { "testbed" },
        "guest_kernel": share.guest_kernel,
        "seconds": begin.elapsed().as_secs(),
    });
    println!("\n{}", table(&probe, &report));
    std::fs::write(&file, serde_json::to_string_pretty(&report)? + "\n")
        .with_context(|| file.display().to_string())?;
    println!(
        "The whole report: {}",
        file.strip_prefix(workspace).unwrap_or(&file).display()
    );
    ensure!(
        probe["corrupt_bytes"] == 0,
        "{} corrupt bytes",
        probe["corrupt_bytes"]
    );
    Ok(())
}

/// Adds to a report how long the same guest took to init with all memory local.
fn compare_boots(report: &mut Value, local: &Value) {
    let time = |report: &Value| report["boot"]["to_init_ms"].as_f64();
    if let (Some(here), Some(local)) = (time(report), time(local)) {
        report["boot"]["local_to_init_ms"] = json!(local);
        report["boot"]["ratio_to_local"] = json!(here / local);
    }
}

/// Linux guests need a CPU with SVM or VMX; a `/dev/kvm` alone may be a software KVM.
fn choose_place() -> Place {
    let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let opens = std::fs::File::options()
        .read(true)
        .write(true)
        .open("/dev/kvm")
        .is_ok();
    if opens && has_virtualization(&cpuinfo) {
        Place::Here
    } else {
        Place::Testbed
    }
}

fn has_virtualization(cpuinfo: &str) -> bool {
    let flags = cpuinfo
        .lines()
        .filter_map(|l| l.strip_prefix("flags")?.split_once(':'));
    flags
        .flat_map(|(_, f)| f.split_whitespace())
        .any(|flag| flag == "svm" || flag == "vmx")
}

/// The arguments of `ssi-hv run`: with most memory on the donor and the probe as its work, or
/// with all memory local and nothing to do, to compare the time to init.
fn run_args(
    dir: &str,
    donor: Option<&str>,
    transport: Option<Transport>,
    report: &str,
) -> Vec<String> {
    let (kernel, initrd) = (format!("{dir}/cloud-vmlinuz"), format!("{dir}/guest.cpio"));
    let mut args = vec![
        "run", "--kernel", &kernel, "--initrd", &initrd, "--cpus", "2", "--memory", "1G",
        "--report", report,
    ];
    if let Some(donor) = donor {
        args.extend([
            "--cmdline",
            CMDLINE,
            "--local-memory",
            "256M",
            "--donor",
            donor,
        ]);
        args.push("--insecure");
        if let Some(transport) = transport {
            args.extend(["--transport", transport.name()]);
        }
    }
    args.into_iter().map(str::to_owned).collect()
}

fn run_on_testbed(
    workspace: &Path,
    share: &Share,
    dir: &Path,
    transport: Option<Transport>,
) -> anyhow::Result<(Outcome, Outcome)> {
    let image = HostImage::prepare(workspace, HostKernel::Linux6_1)?;
    let config = TestbedConfig::two_hosts(&share.dir, workspace.join("target/testbed/demo"));
    let testbed = Testbed::start(&config, &image)?;
    let (compute, lender) = (testbed.host(1), testbed.host(2));
    if matches!(transport, Some(Transport::Rdma | Transport::Auto)) {
        println!("Both hosts get software RDMA: rdma link add rxe0 type rxe netdev ...");
        testbed.hosts().iter().try_for_each(add_rxe)?;
    }
    let address = format!("{}:{PORT}", lender.address());
    println!("Host 2 lends memory: ssi-hv node --listen {address} --memory 1G --insecure");
    let lends = start_donor(lender, &address)?;
    let before = Cell::new(0);
    let remote_report = "/tmp/demo.json";
    let run = |donor: Option<&str>, tap: Tap| -> anyhow::Result<Outcome> {
        let mut argv = vec!["/share/ssi-hv".to_owned()];
        argv.extend(run_args("/share", donor, transport, remote_report));
        if donor.is_some() {
            println!("Host 1 runs the guest:  ssi-hv {}\n", argv[1..].join(" "));
        }
        let argv: Vec<&str> = argv.iter().map(String::as_str).collect();
        let guest = compute.spawn_with(&argv, &[], tap)?;
        if donor.is_some() {
            // By then all connections are made, and memory is registered for RDMA.
            guest.wait_for_line(GUEST_BEGINS, GUEST_DEADLINE)?;
            before.set(processor_ticks(lender, lends.pid())?);
        }
        let output = guest.wait(GUEST_DEADLINE)?;
        let file = dir.join("run.json");
        let report = compute
            .get(remote_report, &file)
            .ok()
            .and_then(|()| std::fs::read_to_string(&file).ok());
        let _ = std::fs::remove_file(file);
        Ok(Outcome {
            exit_code: Some(output.status.code),
            console: output.stdout,
            report,
        })
    };
    let remote = run(Some(&address), Box::new(show))?;
    let used = processor_ticks(lender, lends.pid())?.saturating_sub(before.get());
    println!(
        "\nWhile the guest ran, the donor's process used {} ms of its processor.",
        used * MS_PER_TICK
    );
    println!("\nThe same guest with all its memory local, for comparison...");
    Ok((remote, run(None, Box::new(|_: &[u8]| {}))?))
}

/// Starts a donor on a host of the testbed, and waits until it listens.
pub(crate) fn start_donor(lender: &Host, address: &str) -> anyhow::Result<RemoteProcess> {
    let donor = lender.spawn(&[
        "/share/ssi-hv",
        "node",
        "--listen",
        address,
        "--memory",
        "1G",
        "--insecure",
    ])?;
    let port = address.rsplit(':').next().unwrap_or_default();
    let listening = format!(
        "i=0; until ss -Hltn | grep -q :{port}; do i=$((i+1)); [ $i -lt 200 ] && [ -e /proc/{} ] || exit 1; sleep 0.1; done",
        donor.pid()
    );
    if let Err(error) = lender.check(&["sh", "-c", &listening], DONOR_DEADLINE) {
        bail!(
            "the donor does not listen: {error}; it wrote: {}{}",
            donor.stdout(),
            donor.stderr()
        );
    }
    Ok(donor)
}

fn run_here(
    share: &Share,
    dir: &Path,
    transport: Option<Transport>,
) -> anyhow::Result<(Outcome, Outcome)> {
    let program = share.dir.join("ssi-hv");
    let address = format!("127.0.0.1:{PORT}");
    println!("Lends memory:   ssi-hv node --listen {address} --memory 1G");
    let donor = Process::spawn(
        Command::new(&program)
            .args(["node", "--listen", &address, "--memory", "1G"])
            .stdin(Stdio::null()),
    )
    .context("ssi-hv node")?;
    wait_listening(&donor, &address)?;
    let remote = run_guest_here(share, dir, Some(&address), transport, show)?;
    donor.signal(libc::SIGTERM)?;
    donor.wait_until(cleanup::after(DONOR_DEADLINE))?;
    println!("\nThe same guest with all its memory local, for comparison...");
    Ok((remote, run_guest_here(share, dir, None, None, |_| {})?))
}

fn run_guest_here(
    share: &Share,
    dir: &Path,
    donor: Option<&str>,
    transport: Option<Transport>,
    show: fn(&[u8]),
) -> anyhow::Result<Outcome> {
    let report = dir.join("run.json");
    let args = run_args(
        &share.dir.display().to_string(),
        donor,
        transport,
        &report.display().to_string(),
    );
    if donor.is_some() {
        println!("Runs the guest: ssi-hv {}\n", args.join(" "));
    }
    let guest = Process::spawn(
        Command::new(share.dir.join("ssi-hv"))
            .args(&args)
            .stdin(Stdio::null())
            .stdout(Stdio::piped()),
    )
    .context("ssi-hv run")?;
    let mut stdout = guest
        .take_stdout()
        .context("standard output of ssi-hv run")?;
    let reader = std::thread::spawn(move || {
        let mut console = Vec::new();
        let mut piece = [0; 4096];
        while let Ok(count @ 1..) = stdout.read(&mut piece) {
            console.extend_from_slice(&piece[..count]);
            show(&piece[..count]);
        }
        String::from_utf8_lossy(&console).into_owned()
    });
    let status = guest.wait_until(cleanup::after(GUEST_DEADLINE))?;
    // The pipe closes with the process, and with it the reader ends.
    drop(guest);
    let console = reader
        .join()
        .map_err(|_| anyhow::anyhow!("the console's reader panicked"))?;
    let text = std::fs::read_to_string(&report).ok();
    let _ = std::fs::remove_file(report);
    Ok(Outcome {
        exit_code: status.context("the guest took too long")?.code(),
        console,
        report: text,
    })
}

fn wait_listening(donor: &Process, address: &str) -> anyhow::Result<()> {
    let deadline = cleanup::after(DONOR_DEADLINE);
    // A refused connection is the only sign that it does not listen yet; pauses are bounded.
    while std::net::TcpStream::connect(address).is_err() {
        let pause = cleanup::after(Duration::from_millis(50));
        if let Some(status) = donor.wait_until(pause)? {
            bail!("the donor ended with {status}");
        }
        ensure!(
            Instant::now() < deadline,
            "the donor does not listen on {address}"
        );
    }
    Ok(())
}

/// Shows a piece of the guest's console.
pub(crate) fn show(bytes: &[u8]) {
    let mut out = std::io::stdout();
    // Whoever closed our output does not want it.
    let _ = out.write_all(bytes).and_then(|()| out.flush());
}

/// The numbers, as the guest saw them and as the pager did.
fn table(probe: &Value, report: &Value) -> String {
    let mut text = format!("{:<16}{:>16}{:>16}\n", "", "in the guest", "in the pager");
    let pager = &report["faults"]["remote"];
    let mut row = |name: &str, guest: &Value, pager: &Value, unit: &str| {
        // Writing to a String cannot fail.
        let _ = writeln!(
            text,
            "{name:<16}{:>16}{:>16}",
            number(guest, unit),
            number(pager, unit)
        );
    };
    row(
        "remote faults",
        &probe["remote_faults"],
        &pager["count"],
        "",
    );
    for key in ["p50", "p90", "p99"] {
        row(
            key,
            &probe["latency_us"][key],
            &pager["latency_us"][key],
            " us",
        );
    }
    for node in report["nodes"].as_array().into_iter().flatten() {
        let mib = node["memory_bytes"].as_u64().unwrap_or(0) >> 20;
        let role = node["role"].as_str().unwrap_or("?");
        let name = format!("node {} {role}", node["id"]);
        let _ = match role {
            "compute" => writeln!(text, "{name:<16}{mib} MiB of local memory"),
            _ => writeln!(
                text,
                "{name:<16}{mib} MiB lent, {} pages fetched, {} written back",
                number(&node["pages_fetched"], ""),
                number(&node["pages_written_back"], ""),
            ),
        };
    }
    let boot = &report["boot"];
    let _ = write!(
        text,
        "time to init    {}",
        number(&boot["to_init_ms"], " ms")
    );
    if let Some(ratio) = boot["ratio_to_local"].as_f64() {
        let local = number(&boot["local_to_init_ms"], " ms");
        let _ = write!(text, ", {ratio:.2} times the {local} with all memory local");
    }
    text.push('\n');
    let verified = probe["verified_bytes"].as_u64().unwrap_or(0) >> 20;
    let _ = writeln!(
        text,
        "verified        {verified} MiB, {} corrupt bytes",
        probe["corrupt_bytes"]
    );
    let kind = report["host"]["virtualization"]
        .as_str()
        .unwrap_or("unknown");
    let _ = write!(
        text,
        "virtualisation  {kind}, transport {}",
        report["transport"]["kind"].as_str().unwrap_or("?")
    );
    text
}

fn number(value: &Value, unit: &str) -> String {
    match value.as_f64() {
        Some(number) => format!("{number:.0}{unit}"),
        None => "-".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn virtualisation_is_a_flag_of_its_own_and_not_part_of_another() {
        assert!(has_virtualization("model : x\nflags\t\t: fpu vmx sse\n"));
        assert!(has_virtualization("flags\t\t: svm\n"));
        assert!(!has_virtualization(
            "flags\t\t: fpu svm_lock\nvmx flags\t: vnmi\n"
        ));
    }

    #[test]
    fn the_table_puts_guest_and_pager_side_by_side() {
        let probe = json!({"remote_faults": 10, "latency_us": {"p50": 1.6}, "verified_bytes": 1 << 30, "corrupt_bytes": 0});
        let report = json!({
            "faults": {"remote": {"count": 12, "latency_us": {"p50": 1.1}}},
            "nodes": [{"id": 1, "role": "donor", "memory_bytes": 2 << 20, "pages_fetched": 5, "pages_written_back": 4}],
            "boot": {"to_init_ms": 1500.2, "local_to_init_ms": 1000.0, "ratio_to_local": 1.5}, "host": {"virtualization": "emulated"}, "transport": {"kind": "tcp"},
        });
        let text = table(&probe, &report);
        assert!(
            text.contains("remote faults                 10              12"),
            "{text}"
        );
        assert!(
            text.contains("p50                         2 us            1 us"),
            "{text}"
        );
        assert!(
            text.contains("p99                            -               -"),
            "{text}"
        );
        assert!(
            text.contains("node 1 donor    2 MiB lent, 5 pages fetched, 4 written back"),
            "{text}"
        );
        assert!(
            text.contains("1500 ms, 1.50 times the 1000 ms")
                && text.contains("1024 MiB, 0 corrupt"),
            "{text}"
        );
    }
}
