//! A Debian container with systemd on this machine, which shares the machine's network.

use std::io::ErrorKind;
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};

use super::{Output, run_within};
use crate::cleanup::{self, Process, RunDir, Stranger};

/// Deadline for its systemd to finish starting; 2 s on an idle machine.
const BOOT_DEADLINE: Duration = Duration::from_secs(60);
/// Interval of checks for an early exit.
const LOOK: Duration = Duration::from_millis(500);

/// A running container. Dropping it ends all its processes and discards its changes.
#[derive(Debug)]
pub struct Container {
    /// Its process 1, whose end terminates the container; killing only systemd-nspawn leaves it
    /// running.
    _first: Stranger,
    _nspawn: Process,
    /// Process id of process 1 on this machine.
    leader: String,
}

impl Container {
    /// Boots the root file system in `root`, with `dir` as `/package`, and waits until systemd has
    /// started.
    pub fn boot(root: &Path, dir: &Path, log: &Path) -> anyhow::Result<Self> {
        let run_dir = RunDir::new()?;
        let path = run_dir.path().join("notify");
        let socket = UnixDatagram::bind(&path)?;
        socket.set_read_timeout(Some(LOOK))?;
        let output = std::fs::File::create(log)?;
        let mut command = Command::new("systemd-nspawn");
        command
            // This machine may have no running systemd-machined.
            .args(["--quiet", "--register=no", "--keep-unit", "--boot"])
            .args(["--volatile=overlay", "--notify-ready=yes", "--console=pipe"])
            .args(["--machine=ssi-hv-package", "--hostname=package"])
            .arg(format!("--directory={}", root.display()))
            .arg(format!("--bind-ro={}:/package", dir.display()))
            .env("NOTIFY_SOCKET", &path)
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output);
        let nspawn = Process::spawn(&mut command).context("systemd-nspawn")?;
        let (first, leader) = wait_ready(&nspawn, &socket).with_context(|| {
            let said = std::fs::read_to_string(log).unwrap_or_default();
            format!("the container does not start; it said:\n{said}")
        })?;
        Ok(Self {
            _first: first,
            _nspawn: nspawn,
            leader,
        })
    }

    /// Runs a shell script in the container.
    pub fn run(&self, script: &str, within: Duration) -> anyhow::Result<Output> {
        let mut command = Command::new("nsenter");
        command
            .args(["--target", &self.leader, "--all", "--root", "--wd"])
            .args(["--", "/bin/sh", "-c", script])
            .env_clear()
            .envs([
                ("PATH", "/usr/sbin:/usr/bin:/sbin:/bin"),
                ("LC_ALL", "C.UTF-8"),
                ("DEBIAN_FRONTEND", "noninteractive"),
                ("HOME", "/root"),
            ]);
        run_within(&mut command, within)
    }

    /// Runs a script that must succeed, and returns its standard output.
    pub fn check(&self, script: &str, within: Duration) -> anyhow::Result<String> {
        let output = self.run(script, within)?;
        ensure!(
            output.status.success(),
            "in the container `{script}`: {}\n{}{}",
            output.status,
            output.stdout,
            output.stderr
        );
        Ok(output.stdout)
    }
}

/// Waits for the readiness message; an earlier message has the id of process 1 (sd_notify(3)).
fn wait_ready(nspawn: &Process, socket: &UnixDatagram) -> anyhow::Result<(Stranger, String)> {
    let deadline = cleanup::after(BOOT_DEADLINE);
    let mut leader = None;
    let mut message = [0; 4096];
    loop {
        if let Some(status) = nspawn.try_wait()? {
            bail!("systemd-nspawn ended with {status}");
        }
        ensure!(
            Instant::now() < deadline,
            "not within {} s",
            BOOT_DEADLINE.as_secs()
        );
        let length = match socket.recv(&mut message) {
            Ok(length) => length,
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                continue;
            }
            Err(error) => return Err(error.into()),
        };
        let said = String::from_utf8_lossy(&message[..length]);
        for line in said.lines() {
            if let Some(pid) = line.strip_prefix("X_NSPAWN_LEADER_PID=") {
                leader = Some((Stranger::new(pid.parse()?)?, pid.to_owned()));
            } else if line == "READY=1" {
                return leader.context("its process 1 is unknown");
            }
        }
    }
}
