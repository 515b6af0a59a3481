//! Errors in values, files and addresses, and their exit codes.

use std::fs;
use std::net::TcpListener;

use ssi_hv::exit::ExitCode;

use super::{KERNEL, output, printed_config, refused, text};

#[test]
fn a_run_that_fails_before_it_boots_leaves_a_report_in_place_of_an_older_one() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let path = directory.path().join("report.json");
    let name = path.to_str().expect("UTF-8");
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
    let taken = taken.local_addr().map(|address| address.to_string());
    let taken = taken.expect("an address");
    for (more, code, outcome) in [
        (
            &["--metrics", &taken][..],
            ExitCode::HostError,
            "host-error",
        ),
        (&["--disk", "/no/such"], ExitCode::Usage, "usage"),
        (&["--console", "/no/such/log"], ExitCode::Usage, "usage"),
        (
            &["--disk", "/no/such", "--exec", "x", "--initrd", KERNEL],
            ExitCode::ExecFailed,
            "usage",
        ),
    ] {
        fs::write(&path, "an older one").expect("is written");
        let run = [
            "run", "--kernel", KERNEL, "--memory", "64M", "--report", name,
        ];
        let line = refused(&[&run[..], more].concat(), code);
        let report = fs::read(&path).expect("a report");
        let report: serde_json::Value = serde_json::from_slice(&report).expect("is JSON");
        assert_eq!(report["errors"], serde_json::json!([line]));
        assert_eq!(report["outcome"], outcome);
        assert_eq!(report["exit_code"], code.code());
        assert_eq!(report["guest"]["memory_bytes"], 64 << 20);
    }
}

#[test]
fn a_report_that_cannot_be_written_there_is_a_wrong_value() {
    for command in [
        &["run", "--kernel", KERNEL][..],
        &["node", "--listen", "127.0.0.1:0", "--memory", "1M"],
    ] {
        let report = ["--report", "/no/such/report.json"];
        let line = refused(&[command, &report].concat(), ExitCode::Usage);
        assert!(
            line.contains("cannot write --report /no/such/report.json"),
            "{line}"
        );
    }
}

#[test]
fn kernel_parameters_that_no_kernel_takes_are_refused_before_anything_starts() {
    let long = "a".repeat(2047);
    for (cmdline, more, part) in [
        ("a\tb", &[][..], "--cmdline has the byte 0x09 at position 1"),
        ("\u{e9}", &[], "--cmdline has the byte 0xc3 at position 0"),
        (&long, &[], "--cmdline has 2047 bytes, 2024 is the limit"),
        // The product adds one parameter to these.
        (
            &long[..2024],
            &["--hotplug-memory", "64M"],
            "1989 is the limit",
        ),
        // And what a kernel on several hosts gets, at its longest.
        (
            &long[..1941],
            &["--cpus", "2", "--node", "127.0.0.1:1,cpus=1"],
            "1940 is the limit",
        ),
    ] {
        // No donor listens there, which would be reported first if a connection were attempted.
        let donor = ["--donor", "127.0.0.1:1", "--local-memory", "16M"];
        let first = ["run", "--kernel", KERNEL, "--cmdline", cmdline];
        let line = refused(&[&first[..], &donor, more].concat(), ExitCode::Usage);
        assert!(line.contains(part), "{line}");
    }
}

#[test]
fn a_donor_of_the_bench_that_is_not_there_has_the_code_of_donors() {
    let arguments = ["bench", "transport", "--donor", "127.0.0.1:1"];
    let line = refused(&arguments, ExitCode::DonorUnavailable);
    assert!(line.contains("127.0.0.1:1"), "{line}");
}

/// A wrong file, and whether it uses `--exec`.
const WRONG: [(&str, bool); 3] = [
    ("exec = 'true'\nmemroy = '1G'\n", true),
    ("memroy = '1G'\n", false),
    // A file that is not TOML yields no information.
    ("exec = 'true'\nmemory = \n", false),
];

#[test]
fn a_wrong_file_that_asks_for_a_command_is_125() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let path = directory.path().join("file.toml");
    let name = path.to_str().expect("UTF-8");
    for (contents, exec) in WRONG {
        let code = if exec {
            ExitCode::ExecFailed
        } else {
            ExitCode::Usage
        };
        fs::write(&path, contents).expect("is written");
        refused(&["run", "--config", name], code);
        let of_cluster =
            format!("[[node]]\nlisten = '127.0.0.1:0'\nmemory = '64M'\n[vm]\n{contents}");
        fs::write(&path, of_cluster).expect("is written");
        refused(&["up", name], code);
        refused(&["up", "--check", name], code);
    }
    // A valid file with a command determines the exit code of other errors too.
    fs::write(&path, "exec = 'true'\n").expect("is written");
    let nodes = ["run", "--config", name, "--cluster", "/no/such"];
    refused(&nodes, ExitCode::ExecFailed);
}

#[test]
fn errors_of_files_are_json_where_that_is_wanted() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let path = directory.path().join("vm.toml");
    let name = path.to_str().expect("UTF-8");
    fs::write(&path, WRONG[0].0).expect("is written");
    for arguments in [
        &["run", "--config", name][..],
        &["run", "--exec", "x", "--cluster", "/no/such"],
    ] {
        let arguments = [arguments, &["--log-format", "json"]].concat();
        let output = output(&arguments);
        let stderr = text(&output.stderr);
        assert_eq!(stderr.lines().count(), 1, "{stderr}");
        let line: serde_json::Value = serde_json::from_str(stderr).expect("is JSON");
        assert_eq!(line["level"], "ERROR");
        assert_eq!(line["exit_code"], ExitCode::ExecFailed.code());
        assert_eq!(
            output.status.code(),
            Some(ExitCode::ExecFailed.code().into())
        );
    }
}

#[test]
fn a_bench_that_needs_a_second_host_says_which_one_has_it() {
    for kind in ["rdma", "hybrid"] {
        let line = refused(&["bench", "fault", "--transport", kind], ExitCode::Usage);
        let said = format!("--transport {kind} needs a second host");
        assert!(line.contains(&said), "{line}");
        assert!(line.contains("bench transport --donor"), "{line}");
    }
}

#[test]
fn an_address_that_cannot_be_listened_on_gets_the_remedy_for_its_cause() {
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
    let taken = taken.local_addr().expect("an address").to_string();
    for (address, part) in [
        (&*taken, "another process has that port"),
        // An address for documentation (RFC 5737), which no host has.
        ("192.0.2.1:7000", "this host has no such address"),
    ] {
        let arguments = ["node", "--listen", address, "--memory", "64M", "--insecure"];
        let line = refused(&arguments, ExitCode::HostError);
        assert!(
            line.contains(&format!("cannot listen on {address}; {part}")),
            "{line}"
        );
    }
}

#[test]
fn donors_that_are_not_asked_for_anything_are_warned_of() {
    // The file is not a kernel, which ends the run early.
    let all = ["--memory", "64M", "--local-memory", "64M"];
    let donor = ["--donor", "127.0.0.1:1"];
    let of = |more: &[&str]| {
        let first = ["-q", "run", "--kernel", KERNEL];
        let output = output(&[&first[..], &all, more].concat());
        text(&output.stderr).to_owned()
    };
    let said = of(&donor);
    assert!(said.contains("none of the 1 donor(s) is used"), "{said}");
    assert!(!of(&[]).contains("donor"));
}

#[test]
fn an_empty_flag_overrides_the_file_as_well() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let file = "kernel = \"vmlinux\"\ncmdline = \"quiet\"\n";
    let has_those_of_the_file = |flags: &[&str]| {
        let printed = printed_config(directory.path(), file, flags);
        printed.contains("cmdline = \"quiet\"")
    };
    assert!(has_those_of_the_file(&[]));
    assert!(!has_those_of_the_file(&["--cmdline", ""]));
}
