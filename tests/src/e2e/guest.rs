//! Guests of scenarios, run through the command line of `ssi-hv`.

use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use serde_json::Value;

use super::Context;
use super::donor::DONOR;
use super::stall::{self, Received, STILL_MAX};
use crate::published::Published;
use crate::testbed::{Output, RemoteProcess, TestbedError};

/// Deadline of a guest with faultprobe from start to exit.
pub(super) const GUEST_DEADLINE: Duration = Duration::from_secs(600);
/// Deadline of a guest from start to init.
pub(super) const BOOT_DEADLINE: Duration = Duration::from_secs(150);
/// Deadline for a donor to listen, and for anything to end after it was asked to.
pub(super) const SHORT: Duration = Duration::from_secs(60);

/// Message of the guest's init when it runs.
pub(super) const INIT_REACHED: &str = "SSI-HV guest: init reached";

const RUN_REPORT: &str = "/tmp/run.json";

/// Exit codes of `ssi-hv run`; see `docs/exit-codes.md`.
pub(super) mod exit {
    pub const SHUTDOWN: i32 = 0;
    pub const HOST_ERROR: i32 = 1;
    pub const USAGE: i32 = 2;
    pub const REBOOT: i32 = 3;
    pub const CRASH: i32 = 4;
    pub const DONOR_LOST: i32 = 5;
    pub const DONOR_UNAVAILABLE: i32 = 6;
    pub const NODE_LOST: i32 = 7;
    pub const INTERRUPTED: i32 = 130;
    pub const TERMINATED: i32 = 143;
}

/// A guest to start on host 1.
#[derive(Clone, Debug)]
pub(super) struct Guest {
    /// Path relative to `/share`.
    pub kernel: &'static str,
    /// Path relative to `/share`.
    pub initrd: &'static str,
    pub cpus: u32,
    /// Guest memory, as a value of the flag.
    pub memory: &'static str,
    /// Local part of the memory if the rest is on the donor.
    pub local_memory: Option<&'static str>,
    /// Command line of the kernel.
    pub cmdline: String,
    /// Further flags.
    pub more: Vec<&'static str>,
}

/// Parameters that leave out what no command of a scenario needs and a seventh of a guest's boot
/// goes to: the thousands of files of the kernel's tracer, and self-tests of ciphers.
const LEFT_OUT: &str =
    "cryptomgr.notests=1 initcall_blacklist=tracer_init_tracefs,crypto_kdf108_init";

impl Guest {
    /// 512 MiB, a quarter of it local and the rest on the donor, running `exec`.
    pub fn remote(cpus: u32, exec: &str) -> Self {
        Self {
            local_memory: Some("128M"),
            ..Self::local(cpus, exec)
        }
    }

    /// 256 MiB, 96 MiB of them local and the rest on the donor, running `exec`: for tests of
    /// contents, where the amount does not matter. A stock kernel has used 72 MiB when its init
    /// starts.
    pub fn small(cpus: u32, exec: &str) -> Self {
        Self {
            memory: "256M",
            local_memory: Some("96M"),
            ..Self::remote(cpus, exec)
        }
    }

    /// 512 MiB, all local, running `exec`.
    pub fn local(cpus: u32, exec: &str) -> Self {
        Self {
            kernel: "cloud-vmlinuz",
            initrd: "guest.cpio",
            cpus,
            memory: "512M",
            local_memory: None,
            cmdline: if exec.is_empty() {
                String::new()
            } else {
                // Errors and worse only: each character on an emulated console takes a tenth of a
                // millisecond, and a warning about a late timer can interleave with a line of the
                // command.
                format!("loglevel=4 {LEFT_OUT} ssi_exec=\"{exec}\"")
            },
            more: Vec::new(),
        }
    }

    fn argv(&self) -> Vec<String> {
        let mut argv: Vec<String> = [
            "/share/ssi-hv",
            "run",
            "--kernel",
            &format!("/share/{}", self.kernel),
            "--initrd",
            &format!("/share/{}", self.initrd),
            "--memory",
            self.memory,
            "--cpus",
            &self.cpus.to_string(),
            "--cmdline",
            &self.cmdline,
            "--report",
            RUN_REPORT,
        ]
        .map(str::to_owned)
        .into();
        // With certificates nothing has to be accepted without them.
        if !self.more.contains(&"--credentials") {
            argv.push("--insecure".to_owned());
        }
        if let Some(local) = self.local_memory {
            argv.extend(["--local-memory", local, "--donor", DONOR].map(str::to_owned));
        }
        argv.extend(self.more.iter().map(|flag| (*flag).to_owned()));
        argv
    }

    /// Starts the guest; its console is written to `console.log` of the scenario as it arrives.
    pub fn start(&self, context: &Context<'_>) -> anyhow::Result<RemoteProcess> {
        let host = context.testbed.host(1);
        // A report of an earlier guest must not be mistaken for this one's.
        host.check(&["rm", "-f", RUN_REPORT], SHORT)?;
        let argv = self.argv();
        let argv: Vec<&str> = argv.iter().map(String::as_str).collect();
        let mut log = std::fs::File::create(context.artifacts.join("console.log"))?;
        let tap = move |bytes: &[u8]| {
            // Best effort: the same text is kept in memory and quoted on failure.
            let _ = std::io::Write::write_all(&mut log, bytes);
        };
        Ok(host.spawn_with(&argv, &[], Box::new(tap))?)
    }

    /// Starts the guest and waits until its init runs or it ends.
    pub fn boot(&self, context: &Context<'_>) -> anyhow::Result<RemoteProcess> {
        self.boot_within(context, BOOT_DEADLINE)
    }

    /// Like [`boot`](Self::boot), with another deadline.
    pub fn boot_within(
        &self,
        context: &Context<'_>,
        deadline: Duration,
    ) -> anyhow::Result<RemoteProcess> {
        let process = self.start(context)?;
        reach_init(context, &process, deadline)?;
        Ok(process)
    }

    /// Runs the guest to its end and reads its report.
    pub fn run(&self, context: &Context<'_>) -> anyhow::Result<Finished> {
        let output = self.boot(context)?.wait(GUEST_DEADLINE)?;
        Finished::read(context, output)
    }
}

/// Waits until the guest of this process prints that init runs, or until the process ends.
pub(super) fn reach_init(
    context: &Context<'_>,
    process: &RemoteProcess,
    deadline: Duration,
) -> anyhow::Result<()> {
    match process.wait_for_line(INIT_REACHED, deadline) {
        Err(TestbedError::Deadline { .. }) if process.wait(Duration::ZERO).is_err() => {
            Err(stall::examine(context, process, "init", deadline)?.into())
        }
        // The caller finds out why the guest ended.
        Ok(_) | Err(TestbedError::Deadline { .. }) => Ok(()),
        Err(testbed) => Err(testbed.into()),
    }
}

/// Waits until the guest of this process ends, for as long as pages travel between its nodes. Of one
/// in which nothing moves the error says what its nodes do.
pub(super) fn reach_end(
    context: &Context<'_>,
    process: &RemoteProcess,
    deadline: Duration,
) -> anyhow::Result<Output> {
    let started = Instant::now();
    let mut received = Received::default();
    loop {
        match process.wait(STILL_MAX) {
            Err(TestbedError::Deadline { .. }) => (),
            ended => return Ok(ended?),
        }
        // A VM that does not answer, and has not ended since, stands still, too.
        let still = received.nothing_since(context.testbed.host(1));
        let is_over = still.unwrap_or(true) || started.elapsed() > deadline;
        if is_over && process.wait(Duration::ZERO).is_err() {
            return Err(stall::examine(context, process, "end", started.elapsed())?.into());
        }
    }
}

/// A guest that has ended.
#[derive(Debug)]
pub(super) struct Finished {
    /// Exit status and output of `ssi-hv run`.
    pub output: Output,
    /// Its report.
    pub report: Value,
}

impl Finished {
    /// Fetches the report of a guest that ended with this output.
    pub fn read(context: &Context<'_>, output: Output) -> anyhow::Result<Self> {
        let report = read(context, 1, Published::Report, RUN_REPORT).with_context(|| {
            format!(
                "report of a guest that ended with {}; {}",
                output.status,
                tail(&output)
            )
        })?;
        Ok(Self { output, report })
    }

    /// Fails unless the guest ended with this code.
    pub fn expect_exit(&self, code: i32) -> anyhow::Result<()> {
        let status = self.output.status;
        ensure!(
            status.code == code,
            "exit code {code} expected, got {status}; {}",
            tail(&self.output)
        );
        ensure!(
            self.report["exit_code"].as_i64() == Some(code.into()),
            "report: {}",
            self.report["exit_code"]
        );
        Ok(())
    }

    /// Returns the report's number at a path such as `/faults/remote/count`.
    pub fn number(&self, pointer: &str) -> anyhow::Result<f64> {
        let value = self.report.pointer(pointer).and_then(Value::as_f64);
        value.with_context(|| format!("the report has no number at {pointer}"))
    }

    /// Returns what faultprobe printed, after checking that it verified at least this many bytes
    /// and found none corrupt.
    pub fn faultprobe_over(&self, bytes: u64) -> anyhow::Result<Value> {
        let probe = parse_faultprobe(&self.output.stdout).with_context(|| tail(&self.output))?;
        ensure!(probe["corrupt_bytes"] == 0, "corrupt bytes: {probe}");
        ensure!(
            probe["verified_bytes"].as_u64().is_some_and(|n| n >= bytes),
            "too little verified: {probe}"
        );
        ensure!(
            self.output.stdout.contains("SSI-HV guest: exit status 0"),
            "faultprobe failed: {}",
            tail(&self.output)
        );
        Ok(probe)
    }
}

/// Finds faultprobe's line on a guest's console.
pub(crate) fn parse_faultprobe(console: &str) -> anyhow::Result<Value> {
    let first = faultprobes(console)?.into_iter().next();
    first.context("faultprobe printed no line")
}

/// Finds the lines of every faultprobe. A message of the kernel may follow on the same line.
pub(super) fn faultprobes(console: &str) -> anyhow::Result<Vec<Value>> {
    let lines = console.lines().filter_map(|l| l.split_once("FAULTPROBE "));
    let parsed = lines.map(|(_, json)| {
        let mut values = serde_json::Deserializer::from_str(json).into_iter();
        values
            .next()
            .transpose()?
            .with_context(|| format!("faultprobe printed {json:?}"))
    });
    parsed.collect()
}

/// Fetches a report from a host and checks it against its schema.
pub(super) fn read(
    context: &Context<'_>,
    host: usize,
    published: Published,
    path: &str,
) -> anyhow::Result<Value> {
    let name = format!("host{host}-{}", path.trim_start_matches("/tmp/"));
    let local = context.artifacts.join(name);
    context.testbed.host(host).get(path, &local)?;
    let text = std::fs::read_to_string(&local)?;
    published
        .parse(&text)
        .with_context(|| local.display().to_string())
}

/// What a run says when a donor cannot be reached.
pub(super) const PAUSED: &str = "the guest is paused";
/// First words of what a kernel says when it fails.
const KERNEL_FAILS: [&str; 5] = [
    "BUG: ",
    "Oops: ",
    "general protection fault",
    "stack guard page was hit",
    "Kernel panic",
];
/// What introduces them in an error, and what is between their lines there.
const KERNEL_INTRO: &str = "kernel: ";
pub(super) const KERNEL_SEPARATOR: &str = " / ";
/// Lines that follow them, with registers and the call trace.
const KERNEL_LINES_MAX: usize = 60;

/// Returns what the kernel of a console said from its first failure on, as one line without times.
fn kernel_failure(console: &str) -> Option<String> {
    let fails = |line: &str| KERNEL_FAILS.iter().any(|words| line.contains(words));
    let lines = console.lines().skip_while(|line| !fails(line));
    let texts = lines.take(KERNEL_LINES_MAX).map(|line| {
        let text = line.split_once("] ").map_or(line, |(_, text)| text);
        text.trim()
    });
    let texts: Vec<&str> = texts.collect();
    (!texts.is_empty()).then(|| texts.join(KERNEL_SEPARATOR))
}

/// Finds what [`tail`] quoted of a kernel in an error.
pub(super) fn kernel_lines(error: &str) -> Option<&str> {
    let (_, quoted) = error.split_once(KERNEL_INTRO)?;
    quoted.lines().next()
}

/// Returns what a guest's kernel said of its failure, if it did, and the last lines of both outputs,
/// for errors.
pub(super) fn tail(output: &Output) -> String {
    let failure = kernel_failure(&output.stdout);
    let failure = failure.map_or_else(String::new, |text| format!("{KERNEL_INTRO}{text}\n  "));
    let last = |text: &str| {
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(15)..].join("\n    | ")
    };
    format!(
        "{failure}console ends\n    | {}\n  errors end\n    | {}",
        last(&output.stdout),
        last(&output.stderr)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failing_kernel_is_quoted_from_its_first_words_on() {
        let console = "[ 1.0] fine\r\n[ 2.0] BUG: unable to x\r\n[ 2.1] RIP: 0010:f+0x0/0x20\r\n\
                       [ 2.2] Kernel panic - not syncing: y\r\n";
        let failure = kernel_failure(console).expect("one");
        assert_eq!(
            failure,
            "BUG: unable to x / RIP: 0010:f+0x0/0x20 / Kernel panic - not syncing: y"
        );
        assert_eq!(kernel_failure("[ 1.0] fine\n"), None);
    }

    #[test]
    fn faultprobe_is_found_between_kernel_messages() {
        let console = "[ 1.0] x\r\n[ 2.0] FAULTPROBE {\"corrupt_bytes\":0}[ 3.0] y\r\nSSI-HV guest: exit status 0\r\n";
        assert_eq!(parse_faultprobe(console).unwrap()["corrupt_bytes"], 0);
        assert!(parse_faultprobe("nothing\n").is_err());
    }

    #[test]
    fn a_guest_with_a_donor_names_its_local_part() {
        let argv = Guest::remote(2, "true").argv().join(" ");
        assert!(
            argv.contains("--local-memory 128M --donor 10.77.0.2:7700"),
            "{argv}"
        );
        assert!(
            argv.contains("--cmdline loglevel=4 ") && argv.contains(" ssi_exec=\"true\""),
            "{argv}"
        );
        assert!(!Guest::local(1, "").argv().join(" ").contains("--donor"));
    }
}
