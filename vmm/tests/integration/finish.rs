//! Pages of reports, man pages, completions, and the format of messages.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use serde_json::Value;
use ssi_hv::host;
use ssi_hv::report::{Host, Report};

use crate::cli::commands;

use crate::running::end;

fn ssi_hv(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ssi-hv"));
    command.args(arguments).stdin(Stdio::null());
    end::output_of(&mut command)
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).expect("UTF-8")
}

fn name(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}

#[test]
fn a_report_becomes_a_page_beside_it_where_it_is_said_or_on_stdout() {
    let directory = tempfile::tempdir().expect("a directory");
    let json = directory.path().join("out.json");
    let mut report = Report::new(host::detect());
    report.outcome = "shutdown".into();
    fs::write(&json, serde_json::to_vec(&report).expect("is JSON")).expect("is written");

    let output = ssi_hv(&["report", name(&json)]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let beside = directory.path().join("out.html");
    assert_eq!(text(&output.stdout).trim(), name(&beside));
    let page = fs::read_to_string(&beside).expect("a page");
    assert!(page.starts_with("<!DOCTYPE html>") && page.ends_with("</html>\n"));

    let named = directory.path().join("other.html");
    assert!(
        ssi_hv(&["report", name(&json), "-o", name(&named)])
            .status
            .success()
    );
    assert_eq!(fs::read_to_string(&named).expect("a page"), page);
    assert_eq!(
        text(&ssi_hv(&["report", name(&json), "-o", "-"]).stdout),
        page
    );
}

#[test]
fn what_is_no_report_is_one_line_that_says_so() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("x.json");
    for (contents, part) in [
        ("", "is not JSON: EOF"),
        ("{", "is not JSON: EOF while parsing an object at line 1"),
        ("[1]", "it has no `schema`"),
        ("{\"schema\": 99}", "has schema 99, this build reads 1"),
        ("{\"schema\": 1, \"vms\": []}", "is no report of a run"),
        (
            "{\"schema\": 1, \"transports\": [7]}",
            "is no comparison; name one that `ssi-hv bench transport --json` printed",
        ),
    ] {
        fs::write(&path, contents).expect("is written");
        let output = ssi_hv(&["report", name(&path)]);
        let errors = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{errors}");
        assert!(errors.contains(part), "{contents}: {errors}");
        assert!(
            errors.contains(name(&path)) && errors.lines().count() == 1,
            "{errors}"
        );
        assert!(!directory.path().join("x.html").exists());
    }
    for (file, part) in [
        ("/no/such.json", "cannot read /no/such.json"),
        ("/", "cannot read /"),
    ] {
        let output = ssi_hv(&["report", file]);
        assert_eq!(output.status.code(), Some(2));
        assert!(text(&output.stderr).contains(part));
    }
    let json = directory.path().join("good.json");
    let report = Report::new(Host::default());
    fs::write(&json, serde_json::to_vec(&report).expect("is JSON")).expect("is written");
    let output = ssi_hv(&["report", name(&json), "-o", "/no/such/page.html"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("cannot write /no/such/page.html; name"));
    let spelled = directory.path().join("./good.json");
    let link = directory.path().join("page.html");
    std::os::unix::fs::symlink(&json, &link).expect("is linked");
    for page in [&json, &spelled, &link] {
        let output = ssi_hv(&["report", name(&json), "-o", name(page)]);
        assert_eq!(output.status.code(), Some(2));
        assert!(text(&output.stderr).contains("would replace the report"));
    }
    let kept = fs::read(&json).expect("is read");
    assert_eq!(kept, serde_json::to_vec(&report).expect("is JSON"));
}

#[test]
fn every_command_has_a_man_page_with_its_flags() {
    let directory = tempfile::tempdir().expect("a directory");
    let pages = directory.path().join("man1");
    let output = ssi_hv(&["man", name(&pages)]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let entries = fs::read_dir(&pages).expect("the directory").flatten();
    let written: BTreeSet<String> = entries
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect();
    for command in commands() {
        let page = [vec!["ssi-hv".to_owned()], command].concat().join("-") + ".1";
        assert!(written.contains(&page), "{page} in {written:?}");
    }
    let run = fs::read_to_string(pages.join("ssi-hv-run.1")).expect("a page");
    for flag in ["exec", "local\\-memory", "donor\\-grace"] {
        assert!(run.contains(flag), "{flag}");
    }
    let output = ssi_hv(&["man", "/proc/no"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("cannot write man pages to /proc/no; name"));
}

#[test]
fn completions_of_bash_are_a_script_that_bash_reads() {
    let directory = tempfile::tempdir().expect("a directory");
    let script = directory.path().join("ssi-hv.bash");
    fs::write(&script, ssi_hv(&["completions", "bash"]).stdout).expect("is written");
    let asked = format!(
        ". {}; COMP_WORDS=(ssi-hv run --local-m); COMP_CWORD=2; _ssi__hv ssi-hv --local-m run; echo ${{COMPREPLY[*]}}",
        script.display()
    );
    let output = Command::new("bash").args(["-c", &asked]).output();
    let output = output.expect("bash starts");
    assert_eq!(text(&output.stdout).trim(), "--local-memory", "{output:?}");
    let output = ssi_hv(&["completions", "bsh"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("a similar value exists: 'bash'"));
}

#[test]
fn messages_are_objects_of_json_when_that_is_asked_for() {
    let kernel = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml");
    let directory = tempfile::tempdir().expect("a directory");
    let run = |more: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ssi-hv"));
        command
            .args(["run", "--kernel", kernel, "--memory", "64M"])
            .args(more)
            .env("SSI_HV_RUNTIME_DIR", directory.path().join("sockets"))
            .stdin(Stdio::null());
        let output = end::output_of(&mut command);
        assert_eq!(output.status.code(), Some(1));
        text(&output.stderr).to_owned()
    };
    let said = run(&["--log-format", "json", "--log-level", "debug"]);
    let objects: Vec<Value> = said
        .lines()
        .map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}")))
        .collect();
    assert!(objects.len() > 1, "{said}");
    let last = objects.last().expect("an error");
    assert_eq!(
        (&last["level"], &last["exit_code"]),
        (&"ERROR".into(), &1.into())
    );
    assert!(
        last["message"]
            .as_str()
            .is_some_and(|text| text.contains(kernel)),
        "{said}"
    );
    // Only the error itself has that level.
    let said = run(&["--log-level", "error"]);
    assert_eq!(said.lines().count(), 1, "{said}");
    assert!(said.starts_with("ssi-hv: error: "), "{said}");
}

#[test]
fn colour_is_for_terminals_and_never_with_no_color() {
    let coloured = |no_color: Option<&str>| {
        // script(1) gives the command a terminal.
        let binary = env!("CARGO_BIN_EXE_ssi-hv");
        let mut command = Command::new("script");
        command
            .args(["-qec", &format!("{binary} doctor"), "/dev/null"])
            .env("TERM", "xterm")
            .env_remove("NO_COLOR")
            .stdin(Stdio::null());
        if let Some(value) = no_color {
            command.env("NO_COLOR", value);
        }
        match command.stdout(Stdio::piped()).spawn() {
            Ok(child) => {
                let output = end::rest_of(child, end::LIMIT);
                Some(output.stdout.contains(&0x1b))
            }
            Err(error) => {
                println!("SKIPPED: script cannot be started: {error}");
                None
            }
        }
    };
    if let Some(shown) = coloured(None) {
        assert!(shown, "a terminal has no colours");
        assert_eq!(coloured(Some("1")), Some(false));
    }
}
