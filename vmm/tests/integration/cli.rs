//! The command as a user or a script sees it: the real binary, its output and its exit code.

mod devices;
mod wrong;

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use ssi_hv::exit::ExitCode;

use crate::running::end;

fn ssi_hv<I>(arguments: I) -> Command
where
    I: IntoIterator,
    I::Item: AsRef<std::ffi::OsStr>,
{
    let mut command = Command::new(env!("CARGO_BIN_EXE_ssi-hv"));
    command
        .args(arguments)
        .env("COLUMNS", "80")
        .stdin(Stdio::null());
    command
}

fn output(arguments: &[&str]) -> Output {
    end::output_of(&mut ssi_hv(arguments))
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).expect("UTF-8")
}

/// Runs a command that must fail, and returns the single line with the reason.
#[track_caller]
fn refused(arguments: &[&str], code: ExitCode) -> String {
    let output = output(arguments);
    let stderr = text(&output.stderr);
    assert_eq!(output.status.code(), Some(code.code().into()), "{stderr}");
    assert_eq!(text(&output.stdout), "");
    assert_eq!(stderr.lines().count(), 1, "{stderr}");
    stderr
        .trim_end()
        .strip_prefix("ssi-hv: error: ")
        .unwrap_or_else(|| panic!("{stderr}"))
        .to_owned()
}

/// A file that is accepted as a kernel until it is parsed.
const KERNEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml");

#[test]
fn a_memory_that_shall_travel_by_rdma_needs_a_device() {
    if memory_fabric::rdma::summaries().is_ok_and(|ports| !ports.is_empty()) {
        println!("SKIPPED: this host has an RDMA device");
        return;
    }
    let arguments = ["bench", "coherence", "--transport", "rdma"];
    let line = refused(&arguments, ExitCode::HostError);
    let (before, reason) = line.split_once(": ").expect("a reason");
    assert_eq!(before, "--transport rdma is not possible");
    let reasons = ["no RDMA device", "libibverbs", "no RDMA;"];
    assert!(reasons.iter().any(|one| reason.contains(one)), "{line}");
}

#[test]
fn a_wrong_flag_value_or_command_is_one_line_and_exit_code_2() {
    for (arguments, part) in [
        (&["run", "--memry", "1G"][..], "'--memory'"),
        (&["run", "--memory", "1X"], "`1X` is not a size"),
        (&["run", "--cpus", "many"], "not a whole number"),
        (&["run", "--donor", "10.0.0.1"], "no valid port"),
        (
            &["run", "--transport", "rmda"],
            "possible values: auto, tcp, loopback, rdma, hybrid",
        ),
        (&["run", "--numa", "maybe"], "possible values: flat, expose"),
        (&["run", "-q", "-v"], "cannot be used with"),
        (&["run", "surplus"], "'surplus'"),
        (&["node", "--memory", "1G"], "--listen <ADDR:PORT>"),
        (&["bench", "fualt"], "'fault'"),
        (
            &["bench", "fault", "--faults", "1", "--seconds", "1"],
            "cannot be used with",
        ),
        (&["doctr"], "'doctor'"),
    ] {
        let line = refused(arguments, ExitCode::Usage);
        assert!(line.contains(part), "{arguments:?}: {line}");
        assert!(line.contains("--help`"), "{arguments:?}: {line}");
    }
}

#[test]
fn a_value_beyond_its_limit_is_one_line_and_exit_code_2() {
    let run = |more: &[&'static str]| [&["run", "--kernel", KERNEL], more].concat();
    for (arguments, part) in [
        (vec!["run"], "add --kernel FILE"),
        (
            vec!["run", "--kernel", "/no/such"],
            "cannot open --kernel /no/such",
        ),
        (run(&["--cpus", "255"]), "--cpus 255 is outside 1 to 254"),
        (run(&["--memory", "1M"]), "64 MiB is the least"),
        (
            run(&["--memory", "65M", "--local-memory", "66M"]),
            "is more than --memory",
        ),
        (run(&["--local-memory", "256M"]), "add --donor HOST:PORT"),
        (
            run(&["--transport", "hybrid", "--checksum"]),
            "remove --checksum",
        ),
        (
            vec!["bench", "transport", "--donor", "192.0.2.1:7000"],
            "add --insecure to accept that",
        ),
        (
            vec!["bench", "transport", "--seconds", "0"],
            "--seconds 0 is outside 1 to 3600",
        ),
        (
            vec!["bench", "transport", "--round-trips", "100001"],
            "--round-trips 100001 is outside 1 to 100000",
        ),
        (
            run(&["--local-memory", "16M", "--donor", "192.0.2.1:7000"]),
            "add --insecure to accept that",
        ),
        (
            vec!["node", "--listen", "0.0.0.0:7000", "--memory", "1G"],
            "add --insecure to accept that",
        ),
        (
            run(&["--metrics", "192.0.2.1:9100"]),
            "--metrics 192.0.2.1:9100",
        ),
        (
            vec!["node", "--listen", "127.0.0.1:7000", "--memory", "4095"],
            "1 MiB is the least",
        ),
        (
            vec!["bench", "fault", "--memory", "64M", "--local-memory", "64M"],
            "no page would be remote",
        ),
        (
            vec!["bench", "memory", "--memory", "32M"],
            "64 MiB is the least",
        ),
        (
            vec!["bench", "memory", "--memory", "65G"],
            "64 GiB is the most",
        ),
        (
            vec!["bench", "coherence", "--nodes", "1"],
            "--nodes 1 is outside 2 to 16",
        ),
        (
            vec!["bench", "coherence", "--transport", "udp"],
            "use --transport tcp or rdma",
        ),
        (
            vec!["bench", "coherence", "--transport", "rdma", "--tls"],
            "--tls compares TCP with TLS",
        ),
        (
            vec!["bench", "start", "--memory", "256M"],
            "512 MiB is the least",
        ),
        (
            vec!["bench", "start", "--memory", "9T"],
            "8 TiB is the most",
        ),
    ] {
        let line = refused(&arguments, ExitCode::Usage);
        assert!(line.contains(part), "{arguments:?}: {line}");
    }
}

#[test]
fn the_cause_of_an_error_is_on_the_same_line() {
    let line = refused(&["run", "--kernel", "/no/such"], ExitCode::Usage);
    assert!(
        line.ends_with(": No such file or directory (os error 2)"),
        "{line}"
    );
}

#[test]
fn what_is_planned_says_so() {
    let line = refused(&["run", "--rebalance", "on"], ExitCode::Usage);
    assert!(line.contains("is not there yet in this build; "), "{line}");
}

/// Returns the words of every command that the help lists, beginning with the program itself, which
/// has none.
pub(crate) fn commands() -> Vec<Vec<String>> {
    let mut found = vec![Vec::new()];
    let mut next = 0;
    while let Some(path) = found.get(next).cloned() {
        next += 1;
        let mut arguments: Vec<&str> = path.iter().map(String::as_str).collect();
        arguments.push("--help");
        let output = output(&arguments);
        let lines = text(&output.stdout).lines();
        let listed = lines.skip_while(|line| *line != "Commands:").skip(1);
        let listed = listed.take_while(|line| line.starts_with("  "));
        // The further lines of a description are indented more.
        let names = listed.filter(|line| !line.starts_with("   "));
        let names = names.filter_map(|line| line.split_whitespace().next());
        found.extend(names.map(|name| [path.clone(), vec![name.to_owned()]].concat()));
    }
    found
}

#[test]
fn help_fits_80_columns_and_names_what_is_there() {
    let all = commands();
    assert!(all.len() > 18, "{all:?}");
    for path in all {
        let arguments = [path, vec!["--help".to_owned()]].concat();
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let output = output(&arguments);
        assert!(output.status.success());
        let help = text(&output.stdout);
        assert!(
            help.lines().all(|line| line.chars().count() <= 80),
            "{help}"
        );
        assert!(help.lines().count() <= 49, "{help}");
        assert!(!help.contains("--rebalance"), "{help}");
    }
}

#[test]
fn no_command_shows_the_help_on_stderr_with_exit_code_2() {
    let output = output(&[]);
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("Commands:"));
}

#[test]
fn a_reader_that_goes_away_is_no_error() {
    for arguments in [&["--help"][..], &["doctor"], &["doctor", "--json"]] {
        let mut child = ssi_hv(arguments)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the command starts");
        drop(child.stdout.take());
        let output = end::rest_of(child, end::LIMIT);
        assert_eq!(text(&output.stderr), "");
        assert!(
            output.status.code().is_some_and(|code| code <= 1),
            "{output:?}"
        );
    }
}

#[test]
fn a_full_disk_behind_stdout_is_an_error() {
    let full = fs::OpenOptions::new()
        .write(true)
        .open("/dev/full")
        .expect("/dev/full");
    let mut command = ssi_hv(["--help"]);
    command.stdout(full).stderr(Stdio::piped());
    let child = command.spawn().expect("it starts");
    let output = end::rest_of(child, end::LIMIT);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("cannot write to stdout: No space left"));
}

fn printed_config(directory: &Path, file: &str, flags: &[&str]) -> String {
    let path = directory.join("vm.toml");
    fs::write(&path, file).expect("the file is written");
    let mut command = ssi_hv(["run", "--print-config", "--config"]);
    let output = end::output_of(command.arg(&path).args(flags));
    assert!(output.status.success(), "{}", text(&output.stderr));
    text(&output.stdout).to_owned()
}

const FILE: &str = r#"
kernel = "vmlinux"
cpus = 2
memory = "2G"
local-memory = 536870912
donor = ["127.0.0.1:7000", "127.0.0.1:7001,memory=1G"]
disk = ["a.img", "path=b.img,readonly"]
net = ["tap=tap0,mac=02:00:00:00:00:0A"]
vsock = "path=vm.sock,cid=3"
checksum = true
"#;

#[test]
fn flags_override_the_file_and_nothing_else() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let flags = ["--cpus", "4", "--donor", "127.0.0.1:7002"];
    assert_eq!(
        printed_config(directory.path(), FILE, &flags),
        r#"kernel = "vmlinux"
cpus = 4
dedicated-cpus = false
memory = "2 GiB"
balloon = "on"
disk = ["path=a.img", "path=b.img,readonly"]
net = ["tap=tap0,mac=02:00:00:00:00:0a"]
vsock = "cid=3,path=vm.sock"
rng = "on"
on-reboot = "exit"
local-memory = "512 MiB"
donor = ["127.0.0.1:7002"]
replicas = 1
transport = "auto"
numa = "flat"
huge-pages = "auto"
checksum = true
compression = "auto"
prefetch = "auto"
donor-grace = 30
on-lost-memory = "end"
drain-failing = "off"
placement = "static"
insecure = false
sandbox = "on"
merge-tables = "off"
vcpu-policy = "static"
"#
    );
}

#[test]
fn the_printed_configuration_is_a_file_that_gives_the_same() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let first = printed_config(directory.path(), FILE, &["--memory", "1.5G"]);
    assert!(first.contains("memory = \"1.5 GiB\""), "{first}");
    let second = printed_config(directory.path(), &first, &[]);
    assert_eq!(first, second);
}

#[test]
fn a_wrong_file_is_one_line_with_the_place_and_a_suggestion() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let path = directory.path().join("vm.toml");
    let name = path.to_str().expect("UTF-8");
    for (contents, part) in [
        (
            "memroy = '1G'",
            "unknown key `memroy`; did you mean `memory`?",
        ),
        ("local_memory = '1G'", "did you mean `local-memory`?"),
        ("zzz = 1", "the keys are the flags"),
        (
            "rebalance = true",
            "unknown key `rebalance`; it is not there yet in this build",
        ),
        ("\n\nmemory = '1X'", "vm.toml:3: `1X` is not a size"),
        ("cpus = 'two'", "vm.toml:1: invalid type"),
        ("cpus = -1", "vm.toml:1: invalid value"),
        ("transport = 'rmda'", "vm.toml:1: unknown variant `rmda`"),
        ("transport = 'rmda'", "did you mean `rdma`?"),
        ("tiemout = 5", "did you mean `timeout`?"),
        (
            "donor = ['nowhere']",
            "vm.toml:1: `nowhere` has no valid port",
        ),
        ("cpus = 1\nmemory = ", "vm.toml:2: "),
        ("cpus = 1\ncpus = 2\n", "vm.toml:2: duplicate key"),
    ] {
        fs::write(&path, contents).expect("the file is written");
        let line = refused(&["run", "--config", name], ExitCode::Usage);
        assert!(line.contains(part), "{contents:?}: {line}");
    }
    fs::write(&path, vec![b'#'; (1 << 20) + 1]).expect("the file is written");
    let line = refused(&["run", "--config", name], ExitCode::Usage);
    assert!(
        line.contains("1048577 bytes, 1048576 is the limit"),
        "{line}"
    );
    let line = refused(&["run", "--config", "/no/such.toml"], ExitCode::Usage);
    assert!(
        line.contains("cannot read --config /no/such.toml: No such file"),
        "{line}"
    );
}

#[test]
fn a_file_without_an_end_is_refused_and_not_read_into_memory() {
    for arguments in [&["run", "--config", "/dev/zero"][..], &["up", "/dev/zero"]] {
        // Limits the address space, so that a failure does not exhaust the host's memory.
        let mut command = Command::new("prlimit");
        command.args(["--as=1000000000", env!("CARGO_BIN_EXE_ssi-hv")]);
        let output = end::output_of(command.args(arguments));
        let stderr = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{stderr}");
        assert!(
            stderr.contains("/dev/zero gives more than 1048576 bytes, the limit"),
            "{stderr}"
        );
    }
}

#[test]
fn doctor_shows_a_line_for_each_check_and_no_colour_in_a_pipe() {
    let output = output(&["doctor"]);
    let shown = text(&output.stdout);
    assert!(!shown.contains('\x1b'), "{shown}");
    for check in [
        "kernel",
        "kvm",
        "userfaultfd",
        "memory",
        "memfd",
        "rdma",
        "tap",
        "clock",
        "mitigations",
    ] {
        let lines = shown.lines().filter(|line| {
            let mut words = line.split_whitespace();
            let status = words.next().unwrap_or_default();
            ["ok", "warning", "missing"].contains(&status) && words.next() == Some(check)
        });
        assert_eq!(lines.count(), 1, "{check} in {shown}");
    }
}

#[test]
fn doctor_gives_scripts_json_and_an_exit_code_that_agree() {
    let output = output(&["doctor", "--json"]);
    let findings: serde_json::Value = serde_json::from_slice(&output.stdout).expect("is JSON");
    let findings = findings.as_array().expect("an array");
    let missing = findings.iter().any(|f| f["status"] == "missing");
    assert_eq!(output.status.code(), Some(i32::from(missing)));
    for finding in findings {
        assert!(
            finding["check"].is_string() && finding["detail"].is_string(),
            "{finding}"
        );
        assert!(finding.get("remedy").is_some(), "{finding}");
    }
}

/// Returns the flags after `prefix` at the beginning of each line of a text.
fn flags_at_line_starts(text: &str, prefix: &str) -> BTreeSet<String> {
    text.lines()
        .filter_map(|line| {
            let line = line.strip_prefix(prefix)?.trim_start();
            let flag = line.split([' ', '`']).next()?;
            flag.starts_with("--").then(|| flag.to_owned())
        })
        .collect()
}

#[test]
fn the_document_has_the_flags_of_run_and_node_and_no_others() {
    let help = |verb| flags_at_line_starts(text(&output(&[verb, "--help"]).stdout), "  ");
    let mut in_help = help("run");
    in_help.extend(help("node"));
    let document = include_str!("../../../docs/cli.md");
    assert_eq!(flags_at_line_starts(document, "| `"), in_help);
}

#[test]
fn a_working_set_that_cannot_be_written_is_found_before_anything_starts() {
    let line = refused(
        &[
            "run",
            "--kernel",
            KERNEL,
            "--record-working-set",
            "/no/such/set",
        ],
        ExitCode::HostError,
    );
    assert!(line.contains("/no/such/set"), "{line}");
    assert!(line.contains("in a directory that exists"), "{line}");
}

#[test]
fn a_working_set_that_does_not_fit_is_ignored_with_a_warning() {
    // The file is not a kernel either, which ends the run early.
    let output = output(&["run", "--kernel", KERNEL, "--replay-working-set", KERNEL]);
    let stderr = text(&output.stderr);
    assert_eq!(
        output.status.code(),
        Some(ExitCode::HostError.code().into())
    );
    let warnings: Vec<_> = stderr
        .lines()
        .filter(|line| line.contains("--replay-working-set"))
        .collect();
    assert_eq!(warnings.len(), 1, "{stderr}");
    assert!(
        warnings[0].contains("is ignored: not a working set"),
        "{stderr}"
    );
}
