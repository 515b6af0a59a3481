//! Starts a testbed for interactive use.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use clap::{Args, Parser, Subcommand};
use kernel_images::programs;
use serde::{Deserialize, Serialize};
use ssi_hv_tests::cleanup;
use ssi_hv_tests::share::Share;
use ssi_hv_tests::testbed::{Host, HostImage, HostKernel, Output, Testbed, TestbedConfig};

/// Interval at which `up` checks that its hosts respond.
const HEALTH_INTERVAL: Duration = Duration::from_secs(5);

/// Emulated hosts with KVM, userfaultfd and software RDMA, independent of this machine's hardware.
#[derive(Debug, Parser)]
#[command(version)]
struct Arguments {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Start hosts and keep them until Ctrl-C.
    Up(Bed),
    /// Start hosts, run a command on one, and exit with its exit code.
    Run {
        #[command(flatten)]
        bed: Bed,
        #[command(flatten)]
        what: What,
    },
    /// Run a command on a host of a running `up`.
    Exec(What),
}

#[derive(Clone, Debug, Args)]
struct Bed {
    /// Number of hosts.
    #[arg(long, default_value_t = 2)]
    hosts: usize,
    /// Memory of each host, in MiB.
    #[arg(long, default_value_t = 3000)]
    memory_mib: u32,
    /// CPUs of each host. With more than one, guests crash occasionally because of emulator bugs.
    #[arg(long, default_value_t = 1)]
    cpus: u32,
    /// Their kernel.
    #[arg(long, value_enum, default_value = "6.12")]
    kernel: HostKernel,
    /// MTU of the links.
    #[arg(long, default_value_t = 9000)]
    mtu: u32,
    /// A directory that hosts see as /share [default: target/share, created now].
    #[arg(long)]
    share: Option<PathBuf>,
    /// A raw image that host 1 has as /dev/vda; it is not modified.
    #[arg(long)]
    disk: Option<PathBuf>,
}

#[derive(Clone, Debug, Args)]
struct What {
    /// The host.
    #[arg(long, default_value_t = 1)]
    host: usize,
    /// Seconds after which the command is killed.
    #[arg(long, default_value_t = 600)]
    timeout: u64,
    /// The command and its arguments.
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    command: Vec<String>,
}

/// State that `up` publishes for `exec`.
#[derive(Debug, Deserialize, Serialize)]
struct State {
    pid: u32,
    hosts: Vec<HostState>,
}

#[derive(Debug, Deserialize, Serialize)]
struct HostState {
    number: usize,
    agent_port: u16,
    console_log: PathBuf,
}

fn main() -> ExitCode {
    match run(Arguments::parse().action) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("testbed: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(action: Action) -> anyhow::Result<ExitCode> {
    cleanup::on_signals()?;
    let workspace = programs::workspace();
    let logs = workspace.join("target/testbed");
    let state_file = logs.join("up/state.json");
    match action {
        Action::Up(bed) => {
            let testbed = start(&bed, &workspace, &logs.join("up"))?;
            up(&testbed, &state_file)
        }
        Action::Run { bed, what } => {
            let testbed = start(&bed, &workspace, &logs.join("run"))?;
            if what.host == 0 || what.host > bed.hosts {
                bail!(
                    "there is no host {}: {} hosts were started",
                    what.host,
                    bed.hosts
                );
            }
            execute(testbed.host(what.host), &what)
        }
        Action::Exec(what) => {
            let text = std::fs::read_to_string(&state_file)
                .context("no testbed is running: start one with \"scripts/testbed up\"")?;
            let state: State = serde_json::from_str(&text)?;
            let Some(host) = state.hosts.iter().find(|h| h.number == what.host) else {
                bail!(
                    "there is no host {}: the testbed has {}",
                    what.host,
                    state.hosts.len()
                );
            };
            let attached = Host::attach(host.number, host.agent_port, &host.console_log)
                .context("is \"scripts/testbed up\" still running?")?;
            execute(&attached, &what)
        }
    }
}

fn start(bed: &Bed, workspace: &Path, logs: &Path) -> anyhow::Result<Testbed> {
    let share = match &bed.share {
        Some(dir) => dir
            .canonicalize()
            .with_context(|| dir.display().to_string())?,
        None => Share::prepare(workspace)?.dir,
    };
    let image = HostImage::prepare(workspace, bed.kernel)?;
    let config = TestbedConfig {
        hosts: bed.hosts,
        memory_mib: bed.memory_mib,
        cpus: bed.cpus,
        share,
        mtu: bed.mtu,
        logs: logs.to_path_buf(),
        disk: bed.disk.clone(),
    };
    let begin = Instant::now();
    let testbed = Testbed::start(&config, &image)?;
    eprintln!(
        "testbed: {} hosts are up after {:.1}s",
        bed.hosts,
        begin.elapsed().as_secs_f64()
    );
    Ok(testbed)
}

fn up(testbed: &Testbed, state_file: &Path) -> anyhow::Result<ExitCode> {
    let host = |h: &Host| HostState {
        number: h.number(),
        agent_port: h.agent_port(),
        console_log: h.console_log().to_path_buf(),
    };
    let state = State {
        pid: std::process::id(),
        hosts: testbed.hosts().iter().map(host).collect(),
    };
    std::fs::write(state_file, serde_json::to_string_pretty(&state)?)?;
    cleanup::remove_at_exit(state_file);
    for host in testbed.hosts() {
        println!(
            "host {}: {}, console in {}",
            host.number(),
            host.address(),
            host.console_log().display()
        );
    }
    println!("in another terminal: scripts/testbed exec --host 1 -- COMMAND");
    println!("Ctrl-C ends the hosts");
    loop {
        // On Ctrl-C the signal thread ends the process.
        std::thread::park_timeout(HEALTH_INTERVAL);
        for host in testbed.hosts() {
            host.check_health()?;
        }
    }
}

fn execute(host: &Host, what: &What) -> anyhow::Result<ExitCode> {
    let argv: Vec<&str> = what.command.iter().map(String::as_str).collect();
    let tap = Box::new(|bytes: &[u8]| {
        let mut out = std::io::stdout();
        // Best effort: the reader of our output may have closed it.
        let _ = out.write_all(bytes).and_then(|()| out.flush());
    });
    let process = host.spawn_with(&argv, &[], tap)?;
    let Output { status, .. } = process.wait(Duration::from_secs(what.timeout))?;
    let code = if status.signal >= 0 {
        128 + status.signal
    } else {
        status.code
    };
    Ok(ExitCode::from(u8::try_from(code).unwrap_or(1)))
}
