//! The demo: one guest whose memory, or whose CPUs and memory, are on two hosts.

mod here;
mod ssi;
mod table;

use std::cell::Cell;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use serde_json::{Value, json};

use crate::e2e::{add_rxe, parse_faultprobe, processor_ticks};
use crate::published::Published;
use crate::share::Share;
use crate::testbed::{Host, HostImage, HostKernel, RemoteProcess, Tap, Testbed, TestbedConfig};

/// First message of the guest's kernel.
const GUEST_BEGINS: &str = "Linux version";
/// Deadline of the guest from start to exit.
const GUEST_DEADLINE: Duration = Duration::from_secs(240);
/// Deadline of a donor's start and exit.
const DONOR_DEADLINE: Duration = Duration::from_secs(30);
const PORT: u16 = 7700;
/// Where a guest's report is written on a testbed host.
const HOST_REPORT: &str = "/tmp/demo.json";
/// Unit of CPU times in /proc.
const MS_PER_TICK: u64 = 10;

/// How pages travel.
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
    /// Returns the value of `ssi-hv run --transport`.
    fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Rdma => "rdma",
            Self::Tcp => "tcp",
        }
    }
}

/// Size of the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Size {
    /// 1 GiB, 256 MiB of them local, and two vCPUs.
    Usual,
    /// 256 MiB, 96 MiB of them local, and one vCPU.
    Small,
}

impl Size {
    /// Returns vCPUs, memory, local memory, and the bytes that the guest writes and verifies. With
    /// its kernel these exceed the local memory, so pages must move.
    fn numbers(self) -> [&'static str; 4] {
        match self {
            Self::Usual => ["2", "1G", "256M", "256M"],
            Self::Small => ["1", "256M", "96M", "64M"],
        }
    }
}

/// Options of the demo.
#[derive(Clone, Debug)]
pub struct DemoConfig {
    /// How pages travel; `None` leaves the choice to `ssi-hv run`.
    pub transport: Option<Transport>,
    /// Size of the guest.
    pub size: Size,
    /// A directory with kernels and programs, as filled by [`Share::prepare`]; `None` prepares one.
    pub share: Option<PathBuf>,
    /// A guest whose CPUs are on two hosts, instead of one with memory of another.
    pub ssi: bool,
}

/// Where the demo runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// Two processes of this machine, connected over its loopback.
    Here,
    /// Two emulated hosts.
    Testbed,
}

/// Result of the guest.
#[derive(Debug)]
struct Outcome {
    exit_code: Option<i32>,
    console: String,
    report: Option<String>,
}

/// Runs the demo and writes `target/demo/report.json`.
///
/// # Errors
/// Fails when the guest does not run to its end, or finds a corrupt byte.
pub fn run(workspace: &Path, config: &DemoConfig) -> anyhow::Result<()> {
    let dir = workspace.join("target/demo");
    std::fs::create_dir_all(&dir).with_context(|| dir.display().to_string())?;
    let file = dir.join("report.json");
    // A report of an earlier run must not be mistaken for this one.
    let _ = std::fs::remove_file(&file);
    let share = match &config.share {
        Some(dir) => Share::open(dir)?,
        None => Share::prepare(workspace)?,
    };
    ensure!(
        share.has_product(),
        "no ssi-hv in target/release: run scripts/demo"
    );
    let place = choose_place();
    match place {
        Place::Here => println!(
            "This machine has hardware virtualisation: node and guest run on it, over loopback."
        ),
        Place::Testbed => println!(
            "This machine has no hardware virtualisation for Linux guests: two emulated hosts are used (their times are not representative)."
        ),
    }
    let begin = Instant::now();
    let (outcome, local) = match (place, config.ssi) {
        (Place::Here, true) => ssi::run_here(&share, &dir)?,
        (Place::Testbed, true) => ssi::run_on_testbed(workspace, &share, &dir)?,
        (Place::Here, false) => here::run(&share, &dir, config)?,
        (Place::Testbed, false) => run_on_testbed(workspace, &share, &dir, config)?,
    };
    let probe = outcome.probe()?;
    let parse = |text: &Option<String>| -> anyhow::Result<Value> {
        let text = text.as_deref().context("ssi-hv wrote no report")?;
        Published::Report.parse(text)
    };
    let mut report = parse(&outcome.report)?;
    let of_local = parse(&local.report)?;
    compare_boots(&mut report, &of_local);
    report["faultprobe"] = probe.clone();
    report["demo"] = json!({
        "hosts": if place == Place::Here { "this machine" } else { "testbed" },
        "guest_kernel": share.guest_kernel,
        "seconds": begin.elapsed().as_secs(),
    });
    if config.ssi {
        let one_host = local.probe().context("the guest on one host")?;
        println!("\n{}", ssi::table(&probe, &one_host, &report));
        report["one_host"] = json!({"faultprobe": one_host, "boot": of_local["boot"]});
    } else {
        println!("\n{}", table::text(&probe, &report));
    }
    std::fs::write(&file, serde_json::to_string_pretty(&report)? + "\n")
        .with_context(|| file.display().to_string())?;
    println!(
        "The whole report: {}",
        file.strip_prefix(workspace).unwrap_or(&file).display()
    );
    for wrong in ["corrupt_bytes", "violations"] {
        // Only the probe of CPUs looks for violations.
        let count = probe[wrong].as_u64().unwrap_or(0);
        ensure!(count == 0, "{wrong}: {count}");
    }
    Ok(())
}

impl Outcome {
    /// Returns what the probe printed in a guest that ran to its end.
    fn probe(&self) -> anyhow::Result<Value> {
        let code = self.exit_code;
        ensure!(
            code == Some(0),
            "the guest ended with exit code {code:?} instead of 0: see its console above"
        );
        parse_faultprobe(&self.console)
    }
}

/// Adds to a report the boot time of the same guest with all memory local.
fn compare_boots(report: &mut Value, local: &Value) {
    let time = |report: &Value| report["boot"]["to_init_ms"].as_f64();
    if let (Some(here), Some(local)) = (time(report), time(local)) {
        report["boot"]["local_to_init_ms"] = json!(local);
        report["boot"]["ratio_to_local"] = json!(here / local);
    }
}

/// Linux guests need a CPU with SVM or VMX; /dev/kvm alone may be a software KVM.
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

/// Returns the arguments of `ssi-hv run`: with most memory on the donor and the probe as workload,
/// or with all memory local and no workload, to compare the boot times.
fn run_args(dir: &str, donor: Option<&str>, config: &DemoConfig, report: &str) -> Vec<String> {
    let [cpus, memory, local, probe] = config.size.numbers();
    let cmdline = format!("ssi_exec=\"faultprobe --bytes {probe}\"");
    let (kernel, initrd) = (format!("{dir}/cloud-vmlinuz"), format!("{dir}/guest.cpio"));
    let mut args = vec![
        "run", "--kernel", &kernel, "--initrd", &initrd, "--cpus", cpus, "--memory", memory,
        "--report", report,
    ];
    if let Some(donor) = donor {
        args.extend([
            "--cmdline",
            &cmdline,
            "--local-memory",
            local,
            "--donor",
            donor,
        ]);
        args.push("--insecure");
        if let Some(transport) = config.transport {
            args.extend(["--transport", transport.name()]);
        }
    }
    args.into_iter().map(str::to_owned).collect()
}

fn run_on_testbed(
    workspace: &Path,
    share: &Share,
    dir: &Path,
    demo: &DemoConfig,
) -> anyhow::Result<(Outcome, Outcome)> {
    let image = HostImage::prepare(workspace, HostKernel::Linux6_1)?;
    let config = TestbedConfig::two_hosts(&share.dir, workspace.join("target/testbed/demo"));
    let testbed = Testbed::start(&config, &image)?;
    let (compute, lender) = (testbed.host(1), testbed.host(2));
    if matches!(demo.transport, Some(Transport::Rdma | Transport::Auto)) {
        println!("Both hosts get software RDMA: rdma link add rxe0 type rxe netdev ...");
        testbed.hosts().iter().try_for_each(add_rxe)?;
    }
    let address = format!("{}:{PORT}", lender.address());
    println!("Host 2 lends memory: ssi-hv node --listen {address} --memory 1G --insecure");
    let lends = start_donor(lender, &address)?;
    let before = Cell::new(0);
    let run = |donor: Option<&str>, tap: Tap| -> anyhow::Result<Outcome> {
        let mut argv = vec!["/share/ssi-hv".to_owned()];
        argv.extend(run_args("/share", donor, demo, HOST_REPORT));
        if donor.is_some() {
            println!("Host 1 runs the guest:  ssi-hv {}\n", argv[1..].join(" "));
        }
        let argv: Vec<&str> = argv.iter().map(String::as_str).collect();
        let guest = compute.spawn_with(&argv, &[], tap)?;
        if donor.is_some() {
            // By then all connections are established, and memory is registered for RDMA.
            guest.wait_for_line(GUEST_BEGINS, GUEST_DEADLINE)?;
            before.set(processor_ticks(lender, lends.pid())?);
        }
        finish(compute, &guest, dir, GUEST_DEADLINE)
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

/// Waits for a guest of a testbed host and fetches its report, which it writes to [`HOST_REPORT`].
fn finish(
    host: &Host,
    guest: &RemoteProcess,
    dir: &Path,
    deadline: Duration,
) -> anyhow::Result<Outcome> {
    let output = guest.wait(deadline)?;
    let file = dir.join("run.json");
    let report = host
        .get(HOST_REPORT, &file)
        .ok()
        .and_then(|()| std::fs::read_to_string(&file).ok());
    let _ = std::fs::remove_file(file);
    Ok(Outcome {
        exit_code: Some(output.status.code),
        console: output.stdout,
        report,
    })
}

/// Starts a donor on a testbed host and waits until it listens.
pub(crate) fn start_donor(lender: &Host, address: &str) -> anyhow::Result<RemoteProcess> {
    start_node(lender, address, &["--memory", "1G"])
}

/// Starts a node that lends this on a testbed host, and waits until it listens.
pub(crate) fn start_node(
    lender: &Host,
    address: &str,
    lends: &[&str],
) -> anyhow::Result<RemoteProcess> {
    let mut argv = vec!["/share/ssi-hv", "node", "--listen", address, "--insecure"];
    argv.extend(lends);
    let donor = lender.spawn(&argv)?;
    let port = address.rsplit(':').next().unwrap_or_default();
    let listening = format!(
        "i=0; until ss -Hltn | grep -q :{port}; do i=$((i+1)); [ $i -lt 200 ] && [ -e /proc/{} ] || exit 1; sleep 0.1; done",
        donor.pid()
    );
    if let Err(error) = lender.check(&["sh", "-c", &listening], DONOR_DEADLINE) {
        bail!(
            "the node does not listen: {error}; it wrote: {}{}",
            donor.stdout(),
            donor.stderr()
        );
    }
    Ok(donor)
}

/// Prints a piece of the guest's console.
pub(crate) fn show(bytes: &[u8]) {
    let mut out = std::io::stdout();
    // Best effort: the reader of our output may have closed it.
    let _ = out.write_all(bytes).and_then(|()| out.flush());
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
}
