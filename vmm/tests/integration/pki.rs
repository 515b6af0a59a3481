//! `ssi-hv pki` through the real binary.

use std::path::Path;
use std::process::Command;

use serde_json::Value;

use crate::running::end;

/// Runs `ssi-hv pki` in a directory, and returns its exit code, standard output and standard error.
fn pki(directory: &Path, arguments: &str) -> (Option<i32>, String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ssi-hv"));
    command
        .arg("pki")
        .args(arguments.split_whitespace())
        .current_dir(directory);
    let output = end::output_of(&mut command);
    let text = |bytes| String::from_utf8(bytes).expect("UTF-8");
    let (stdout, stderr) = (text(output.stdout), text(output.stderr));
    (output.status.code(), stdout, stderr)
}

#[track_caller]
pub fn succeeds(directory: &Path, arguments: &str) -> String {
    let (code, stdout, stderr) = pki(directory, arguments);
    assert_eq!(code, Some(0), "{arguments}: {stderr}");
    stdout
}

#[track_caller]
fn fails(directory: &Path, arguments: &str, expected: i32, part: &str) {
    let (code, stdout, stderr) = pki(directory, arguments);
    assert_eq!(code, Some(expected), "{arguments}: {stdout}{stderr}");
    assert_eq!(stderr.lines().count(), 1, "{stderr}");
    assert!(stderr.contains(part), "{arguments}: {stderr}");
}

#[test]
fn certificates_are_issued_requested_renewed_and_revoked() {
    let directory = tempfile::tempdir().unwrap();
    let at = directory.path();
    succeeds(at, "init ca --cluster prod");
    succeeds(at, "issue ca vm/web -o web");
    let verified = succeeds(at, "verify web");
    assert!(
        verified.starts_with("spiffe://prod/ssi-hv/vm/web\n"),
        "{verified}"
    );

    succeeds(at, "request node/alpha --cluster prod -o alpha");
    fails(at, "verify alpha", 1, "cert.pem");
    succeeds(
        at,
        "sign ca alpha/request.pem node/alpha -o alpha --days 30",
    );
    succeeds(at, "verify alpha");
    succeeds(at, "renew ca alpha/cert.pem -o alpha");

    let said = succeeds(at, "revoke ca node/alpha");
    assert!(said.contains("ssi-hv node reload"), "{said}");
    std::fs::copy(at.join("ca/crl.pem"), at.join("alpha/crl.pem")).unwrap();
    fails(at, "verify alpha", 1, "not confirmed by the authorities");
    let list: Value = serde_json::from_str(&succeeds(at, "list ca --json")).unwrap();
    let certificates = list["certificates"].as_array().unwrap();
    let states: Vec<_> = certificates
        .iter()
        .map(|one| one["state"].as_str())
        .collect();
    assert_eq!(states, [Some("valid"), Some("revoked"), Some("revoked")]);
    assert_eq!(succeeds(at, "list ca").lines().count(), 4);
}

#[test]
fn what_cannot_be_done_is_one_line_with_the_reason() {
    let directory = tempfile::tempdir().unwrap();
    let at = directory.path();
    fails(
        at,
        "list ca",
        1,
        "cannot use the directory ca: No such file or directory (os error 2)\n",
    );
    fails(at, "init ca --cluster Prod", 2, "is not a name");
    fails(at, "init ca --cluster prod --days 0", 2, "--days");
    succeeds(at, "init ca --cluster prod --days 100");
    fails(
        at,
        "init ca --cluster prod",
        1,
        "exists, and is not replaced",
    );
    fails(at, "issue ca donor/a -o a", 2, "is not ROLE/NAME");
    fails(
        at,
        "issue ca node/a -o a",
        1,
        "365 days are more than the authority has left",
    );
    fails(at, "revoke ca 4", 2, "is not a serial number");
    fails(
        at,
        "revoke ca node/a",
        1,
        "has no certificate that is valid",
    );
    fails(at, "sign ca ca/ca.pem node/a -o a", 1, "ca/ca.pem");
    succeeds(at, "issue ca node/a -o a --days 9");
    fails(at, "issue ca node/a -o a --days 9", 1, "a/key.pem exists");
    let key = at.join("a/key.pem");
    let everybody = std::os::unix::fs::PermissionsExt::from_mode(0o644);
    std::fs::set_permissions(key, everybody).unwrap();
    fails(at, "verify a", 1, "chmod 600 a/key.pem");
}

/// A node of this program that runs until it is dropped.
struct Node(std::process::Child);

impl Drop for Node {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_guest_uses_memory_of_a_node_with_certificates_alone() {
    if !crate::support::kvm_is_there() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let at = directory.path();
    succeeds(at, "init ca --cluster prod");
    succeeds(at, "issue ca node/alpha -o alpha");
    succeeds(at, "issue ca vm/web -o web");
    std::fs::write(at.join("rules"), "vm/web  # its limits come later\n").unwrap();
    let mut node = Command::new(env!("CARGO_BIN_EXE_ssi-hv"))
        .args(["node", "--listen", "127.0.0.1:0", "--memory", "128M"])
        .args(["--credentials", "alpha", "--allow", "@rules"])
        .env("SSI_HV_RUNTIME_DIR", at.join("node-sockets"))
        .current_dir(at)
        .stdin(std::process::Stdio::null())
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::null())
        .spawn()
        .map(Node)
        .unwrap();
    let stdout = std::io::BufReader::new(node.0.stdout.take().unwrap());
    let mut lines = std::io::BufRead::lines(stdout).map(Result::unwrap);
    let who = lines.next().unwrap();
    assert!(who.ends_with("spiffe://prod/ssi-hv/node/alpha"), "{who}");
    let listening = lines.next().unwrap();
    let address = listening.rsplit(' ').next().unwrap();

    let kernel = at.join("hello");
    std::fs::write(&kernel, tiny_guests::elf(tiny_guests::hello::code())).unwrap();
    let run = |donor: &str, credentials: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ssi-hv"));
        command
            .args([
                "run",
                "--kernel",
                "hello",
                "--memory",
                "64M",
                "--local-memory",
                "32M",
            ])
            .args(["--donor", donor])
            .args(credentials)
            .env("SSI_HV_RUNTIME_DIR", at.join("vm-sockets"))
            .current_dir(at)
            .stdin(std::process::Stdio::null());
        let output = end::output_of(&mut command);
        let stderr = String::from_utf8(output.stderr).unwrap();
        (output.status.code(), stderr)
    };
    let (code, stderr) = run(&format!("{address},name=alpha"), &["--credentials", "web"]);
    assert_eq!(code, Some(0), "{stderr}");
    let by_udp = ["--credentials", "web", "--transport", "udp"];
    let (code, stderr) = run(&format!("{address},name=alpha"), &by_udp);
    assert_eq!(code, Some(0), "{stderr}");
    let (code, stderr) = run(&format!("{address},name=beta"), &by_udp);
    assert_eq!(code, Some(6), "{stderr}");
    assert!(stderr.contains("node/beta is needed here"), "{stderr}");
    // Without certificates, with another name, and with the wrong directory.
    let (code, stderr) = run(address, &[]);
    assert_eq!(code, Some(6), "{stderr}");
    assert!(stderr.contains("--credentials DIR"), "{stderr}");
    let (code, stderr) = run(&format!("{address},name=beta"), &["--credentials", "web"]);
    assert_eq!(code, Some(6), "{stderr}");
    assert!(stderr.contains("node/beta is needed here"), "{stderr}");
    let (code, stderr) = run(address, &["--credentials", "web"]);
    assert_eq!(code, Some(2), "{stderr}");
    assert!(stderr.contains("add name=NAME"), "{stderr}");
    let (code, stderr) = run(
        &format!("{address},name=alpha"),
        &["--credentials", "alpha"],
    );
    assert_eq!(code, Some(2), "{stderr}");
    assert!(stderr.contains("and vm/NAME is needed here"), "{stderr}");

    // What an operator asks of the node, by its process id and without.
    let ssi_hv = |words: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ssi-hv"));
        command.args(words).current_dir(at);
        command.env("SSI_HV_RUNTIME_DIR", at.join("node-sockets"));
        let output = end::output_of(&mut command);
        let [stdout, stderr] =
            [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
        (output.status.code(), stdout, stderr)
    };
    let number = node.0.id().to_string();
    for words in [
        &["node", "evict", "vm/web"][..],
        &["node", "evict", "vm/web", "--node", &number],
    ] {
        let (code, stdout, stderr) = ssi_hv(words);
        assert_eq!(code, Some(0), "{stderr}");
        let ended = "vm/web: 0 lease(s) of 0 B ended, 0 connection(s) closed\n";
        assert_eq!(stdout, ended);
    }
    for (words, code, part) in [
        (&["node", "evict", "web"][..], 2, "not ROLE/NAME"),
        (
            &["node", "evict", "vm/web", "--node", "1"],
            1,
            "does not run here",
        ),
        (&["node"], 2, "--listen"),
    ] {
        let (found, _, stderr) = ssi_hv(words);
        assert_eq!(found, Some(code), "{stderr}");
        assert!(stderr.contains(part), "{stderr}");
    }
    let (code, stdout, stderr) = ssi_hv(&["node", "reload"]);
    assert_eq!(code, Some(0), "{stderr}");
    assert_eq!(
        stdout,
        "credentials were read again; 0 connection(s) closed; 1 rule(s) in force, 0 lease(s) of 0 B ended\n"
    );
    let set_rules = |text: &str| {
        std::fs::write(at.join("rules"), text).unwrap();
        ssi_hv(&["node", "reload"])
    };
    let as_web = || run(&format!("{address},name=alpha"), &["--credentials", "web"]);
    // A line that is no rule, after one that would keep the VM out, changes nothing.
    let (code, _, stderr) = set_rules("vm/other\n# here:\nvm/web,size=1G\n");
    assert_eq!(code, Some(1), "{stderr}");
    assert!(
        stderr.contains("rules, line 3: `vm/web,size=1G` is no rule"),
        "{stderr}"
    );
    assert_eq!(as_web().0, Some(0));
    let (code, stdout, stderr) = set_rules("vm/other\nvm/third\n");
    assert_eq!(code, Some(0), "{stderr}");
    assert!(stdout.contains("2 rule(s) in force"), "{stdout}");
    let (code, stderr) = as_web();
    assert_eq!(code, Some(6), "{stderr}");
    assert!(
        stderr.contains("no rule of this node names vm/web"),
        "{stderr}"
    );
    set_rules("vm/web\n");
    assert_eq!(as_web().0, Some(0));
    let good = std::fs::read(at.join("alpha/cert.pem")).unwrap();
    std::fs::write(at.join("alpha/cert.pem"), "none").unwrap();
    let (code, _, stderr) = ssi_hv(&["node", "reload", "--node", &number]);
    assert_eq!(code, Some(1), "{stderr}");
    assert!(stderr.contains("cert.pem has no certificate"), "{stderr}");
    std::fs::write(at.join("alpha/cert.pem"), good).unwrap();

    // A node that has read the list refuses the VM, and is not ended by the signal.
    succeeds(at, "revoke ca vm/web");
    std::fs::copy(at.join("ca/crl.pem"), at.join("alpha/crl.pem")).unwrap();
    let process = rustix::process::Pid::from_child(&node.0);
    rustix::process::kill_process(process, rustix::process::Signal::HUP).unwrap();
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
    let stderr = loop {
        let (code, stderr) = run(&format!("{address},name=alpha"), &["--credentials", "web"]);
        if code == Some(6) {
            break stderr;
        }
        assert!(std::time::Instant::now() < deadline, "{code:?}: {stderr}");
    };
    assert!(
        stderr.contains("refuses this end's certificate"),
        "{stderr}"
    );
    assert!(node.0.try_wait().unwrap().is_none(), "the node has ended");
}
