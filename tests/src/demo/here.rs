//! The demo on this machine, with donor and guest as two of its processes.

use std::io::Read as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};

use super::{DONOR_DEADLINE, DemoConfig, GUEST_DEADLINE, Outcome, PORT, run_args, show};
use crate::cleanup::{self, Process};
use crate::share::Share;

/// Runs the guest with memory from a donor, and with all memory local.
pub(super) fn run(
    share: &Share,
    dir: &Path,
    config: &DemoConfig,
) -> anyhow::Result<(Outcome, Outcome)> {
    let address = format!("127.0.0.1:{PORT}");
    println!("Lends memory:   ssi-hv node --listen {address} --memory 1G");
    let donor = start_node(share, &address, &["--memory", "1G"])?;
    let args = |donor: Option<&str>| {
        run_args(
            &share.dir.display().to_string(),
            donor,
            config,
            &dir.join("run.json").display().to_string(),
        )
    };
    let arguments = args(Some(&address));
    println!("Runs the guest: ssi-hv {}\n", arguments.join(" "));
    let remote = run_guest(share, dir, &arguments, GUEST_DEADLINE, show)?;
    end_node(&donor)?;
    println!("\nThe same guest with all its memory local, for comparison...");
    let local = run_guest(share, dir, &args(None), GUEST_DEADLINE, |_| {})?;
    Ok((remote, local))
}

/// Starts a node of this machine and waits until it listens.
pub(super) fn start_node(share: &Share, address: &str, more: &[&str]) -> anyhow::Result<Process> {
    let node = Process::spawn(
        Command::new(share.dir.join("ssi-hv"))
            .args(["node", "--listen", address])
            .args(more)
            .stdin(Stdio::null()),
    )
    .context("ssi-hv node")?;
    wait_listening(&node, address)?;
    Ok(node)
}

/// Ends a node and waits for it.
pub(super) fn end_node(node: &Process) -> anyhow::Result<()> {
    node.signal(libc::SIGTERM)?;
    node.wait_until(cleanup::after(DONOR_DEADLINE))?;
    Ok(())
}

/// Runs `ssi-hv` with these arguments, which write the report to `run.json` in `dir`.
pub(super) fn run_guest(
    share: &Share,
    dir: &Path,
    args: &[String],
    deadline: Duration,
    show: fn(&[u8]),
) -> anyhow::Result<Outcome> {
    let report = dir.join("run.json");
    let guest = Process::spawn(
        Command::new(share.dir.join("ssi-hv"))
            .args(args)
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
    let status = guest.wait_until(cleanup::after(deadline))?;
    // Ending the process closes the pipe, which ends the reader.
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
    // Only a refused connection shows that the donor does not listen yet; the pauses are bounded.
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
