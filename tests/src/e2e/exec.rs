//! One command in a guest, as a CI job runs it (`docs/ci.md`).

use anyhow::{Context as _, ensure};

use super::bed::remove_rxe;
use super::donor::Donor;
use super::guest::{GUEST_DEADLINE, SHORT};
use super::{Context, Hosts, Result, Scenario, Verdict};
use crate::published::Published;

pub(super) const SCENARIOS: &[Scenario] = &[Scenario {
    name: "exec",
    about: "a command in a guest with memory over RDMA gives its output and exit code; a panic gives 125",
    needs_product: true,
    hosts: Hosts::TWO_6_12,
    run: exec,
}];

/// Exit code of every failure that is not the command's own.
const EXEC_FAILED: i32 = 125;

/// The document with the job that users copy.
const DOCUMENT: &str = include_str!("../../../docs/ci.md");

/// The job's command for the donor; the test runs the donor unprivileged.
const NODE: &str = "ssi-hv node --listen 10.77.0.2:7700 --memory 1G --insecure &";

/// Replaces the document's command. It verifies more data than fits the local memory after that
/// data was remote. It then writes bytes that a terminal would change, separate errors, and an exit
/// status.
const COMMAND: &str = r"
head -c 67108864 /dev/urandom >/tmp/data && sha256sum </tmp/data >/tmp/sum || exit 1
sha256sum </tmp/data | cmp - /tmp/sum || exit 1
printf 'a\000b\r\n\033\377'; seq 1 2000
echo no-such-thing >&2
exit 42";

/// Minimum of pages fetched by READ; with fewer, little of the verified data had been remote.
const AWAY_PAGES_MIN: u64 = 2000;

/// What the guest's init sends for `echo begun`: a header of three bytes, and the line.
const BEGUN_FRAME_BYTES: usize = 3 + "begun\n".len();

/// Returns the job's commands in order, each with its host.
fn job() -> anyhow::Result<Vec<(usize, String)>> {
    let text = DOCUMENT.replace("\\\n", " ");
    let lines = text
        .lines()
        .filter_map(|line| line.trim_start().strip_prefix("bed "));
    let commands = lines.map(|line| {
        let (host, command) = line.split_once(" -- ").context("bed HOST -- COMMAND")?;
        Ok((host.parse()?, command.to_owned()))
    });
    commands.collect()
}

/// Runs a script that ends with `--exec` on host 1 with this command; returns exit code, output and
/// errors.
fn run(
    context: &Context<'_>,
    script: &str,
    command: &str,
) -> anyhow::Result<(i32, Vec<u8>, String)> {
    let host = context.testbed.host(1);
    // Through files, since the agent's client treats output as text.
    let script = format!("exec {script} \"$1\" >/tmp/exec.out");
    let output = host.run(&["sh", "-c", &script, "sh", command], GUEST_DEADLINE)?;
    let local = context.artifacts.join("exec.out");
    host.get("/tmp/exec.out", &local)?;
    Ok((output.status.code, std::fs::read(local)?, output.stderr))
}

fn exec(context: &Context<'_>) -> Result {
    let hosts = context.testbed.hosts();
    let (mut donor, mut script) = (None, None);
    for (number, command) in job()? {
        if command == NODE {
            // Pinning the lent memory needs a limit of locked memory and no capability
            // (docs/install.md).
            donor = Some(Donor::without_rights(context)?);
        } else if let Some((run, _)) = command.split_once("--exec ") {
            ensure!(number == 1, "host {number} runs {command}");
            script = Some(format!("{run} --report /tmp/exec.json --exec"));
        } else {
            let host = context.testbed.host(number);
            host.check(&["sh", "-c", &command], SHORT)?;
        }
    }
    let donor = donor.context("docs/ci.md starts another node")?;
    let script = script.context("docs/ci.md runs no command")?;
    let (code, output, errors) = run(context, &script, COMMAND)?;
    ensure!(code == 42, "exit code {code}: {errors}");
    let lines: String = (1..=2000).map(|n| format!("{n}\n")).collect();
    let expected = [&b"a\0b\r\n\x1b\xff"[..], lines.as_bytes()].concat();
    ensure!(
        output == expected,
        "{} bytes of output, {} expected: {:?}",
        output.len(),
        expected.len(),
        String::from_utf8_lossy(&output[..output.len().min(200)])
    );
    ensure!(errors == "no-such-thing\n", "errors: {errors:?}");

    let text = hosts[0].check(&["cat", "/tmp/exec.json"], SHORT)?;
    let report = Published::Report.parse(&text)?;
    // Sequential reads are prefetched: few faults, many pages.
    let faults = report["faults"]["remote"]["count"].as_u64().unwrap_or(0);
    let pages = &report["nodes"][1]["rdma"]["pages_read"];
    let pages = pages.as_u64().unwrap_or(0);
    ensure!(report["exec"]["exit_status"] == 42, "{}", report["exec"]);
    ensure!(
        report["transport"]["kind"] == "rdma",
        "{}",
        report["transport"]
    );
    ensure!(
        faults > 100 && pages > AWAY_PAGES_MIN,
        "{faults} remote faults, {pages} pages by READ"
    );
    context.note(format!(
        "{faults} remote faults, {pages} pages by READ, init after {:.0} ms (emulated)",
        report["boot"]["to_init_ms"].as_f64().unwrap_or(f64::NAN),
    ));
    donor.stop(context)?;
    hosts.iter().try_for_each(remove_rxe)?;

    // Output in transit is lost when a kernel panics, so the command panics after all of it was
    // sent.
    let command = r"tx() { sed -n 's/^1:.* tx:\([0-9]*\).*/\1/p' /proc/tty/driver/serial; }
        before=$(tx); echo begun; until [ $(tx) -ge $((before + FRAME)) ]; do :; done
        echo c >/proc/sysrq-trigger; echo not reached"
        .replace("FRAME", &BEGUN_FRAME_BYTES.to_string());
    let script = "ssi-hv run --kernel /share/cloud-vmlinuz --memory 128M --exec";
    let (code, output, errors) = run(context, script, &command)?;
    ensure!(code == EXEC_FAILED, "exit code {code}: {errors}");
    ensure!(
        output == b"begun\n",
        "{:?}, {errors}",
        String::from_utf8_lossy(&output)
    );
    let reason = "its console says: Kernel panic - not syncing: sysrq triggered crash";
    ensure!(errors.contains(reason), "{errors}");
    Ok(Verdict::Pass)
}
