//! A whole distribution as a guest on host 1 of a testbed, with a disk, a network card, and an SSH
//! server for commands.
//!
//! The host has the other end of the network card, with a DHCP and DNS server. [`work`] has the
//! guest's workloads, and [`comparison`] their times.

pub mod comparison;
pub mod demo;
pub mod ssi;
pub mod work;

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use serde_json::Value;

use crate::published::Published;
use crate::testbed::{Host, Output, RemoteProcess, Tap};

/// The disk of the guest's image on host 1.
pub const DISK: &str = "/dev/vda";
/// Path of the report of `ssi-hv`.
const REPORT: &str = "/tmp/distro.json";
/// Name of the host in the guest's network.
pub const HOST_NAME: &str = "host.ssi.internal";

/// Addresses of the host and of the guest in that network.
const HOST_ADDRESS: &str = "192.168.78.1";
const GUEST_ADDRESS: &str = "192.168.78.2";
const TAP: &str = "debian0";
const KEY: &str = "/tmp/distro-key";
/// The login prompt on the console.
const LOGIN: &str = "debian login:";

/// Deadline from the guest's start to its login prompt. Emulated and alone on its machine it takes
/// about a minute.
pub const LOGIN_DEADLINE: Duration = Duration::from_secs(300);
/// Deadline from the login prompt to the first answer by SSH.
const SSH_DEADLINE: Duration = Duration::from_secs(120);
/// Deadline of the guest's exit.
const END_DEADLINE: Duration = Duration::from_secs(120);
/// Deadline of a small command on the host.
const SHORT: Duration = Duration::from_secs(30);
/// What a script in the guest reads, on the host.
const SCRIPT_INPUT: &str = "/tmp/script-input";

/// Kernel messages that report a problem, in lower case, each preceded by a space.
const COMPLAINTS: &[&str] = &[
    "blocked for more than",
    "soft lockup",
    "detected stalls",
    "rcu_sched self-detected",
    "kernel bug",
    " bug: ",
    " oops: ",
    "call trace",
    "i/o error",
    "ext4-fs error",
    "nobody cared",
    "tx timeout",
    "clocksource: timekeeping watchdog",
    "out of memory",
];

/// The host's end of the guest's network on host 1; dropping it stops its servers.
#[derive(Debug)]
pub struct Network<'a> {
    host: &'a Host,
    /// DHCP and DNS server.
    _names: RemoteProcess,
    /// Server for `iperf3` in the guest.
    _iperf: RemoteProcess,
    /// Public key with which the host logs in to the guest.
    key: String,
}

impl<'a> Network<'a> {
    /// Sets up the network and a key for the guest. Local files go to `dir`.
    ///
    /// # Errors
    /// Fails when the host lacks a tool, or a server does not start.
    pub fn up(host: &'a Host, dir: &Path) -> anyhow::Result<Self> {
        let public = key_of(host, dir)?;
        let tap = format!(
            "ip link del {TAP} 2>/dev/null; rm -f /tmp/leases; ip tuntap add dev {TAP} mode tap && \
             ip addr add {HOST_ADDRESS}/24 dev {TAP} && ip link set {TAP} up"
        );
        host.check(&["sh", "-c", &tap], SHORT)?;
        let names = host.spawn(&[
            "dnsmasq",
            "--keep-in-foreground",
            "--conf-file=/dev/null",
            "--user=root",
            "--pid-file=",
            "--bind-interfaces",
            "--except-interface=lo",
            &format!("--interface={TAP}"),
            &format!("--dhcp-range={GUEST_ADDRESS},{GUEST_ADDRESS},1h"),
            "--dhcp-ignore-clid",
            "--dhcp-leasefile=/tmp/leases",
            "--no-hosts",
            "--no-resolv",
            &format!("--host-record={HOST_NAME},{HOST_ADDRESS}"),
        ])?;
        let iperf = host.spawn(&["iperf3", "--server", "--bind", HOST_ADDRESS])?;
        let listening = "i=0; until ss -Hlnut | grep -q :67 && ss -Hlnt | grep -q :5201; do \
             i=$((i+1)); [ $i -lt 200 ] || exit 1; sleep 0.1; done";
        host.check(&["sh", "-c", listening], SHORT)
            .with_context(|| format!("servers: {}{}", names.stderr(), iperf.stderr()))?;
        Ok(Self {
            host,
            _names: names,
            _iperf: iperf,
            key: public.trim().to_owned(),
        })
    }

    /// Returns the arguments of `ssi-hv` that boot the guest with two vCPUs, 1 GiB of memory and
    /// further parameters of its kernel and flags.
    fn arguments(&self, parameters: &str, more: &[&str]) -> Vec<String> {
        // Debian boots quietly by default as well.
        let cmdline = format!(
            "root={DISK} quiet {parameters} \"systemd.set_credential=ssh.authorized_keys.root:{}\"",
            self.key
        );
        let (disk, net) = (format!("path={DISK}"), format!("tap={TAP}"));
        let mut arguments = vec!["run", "--kernel", "/share/debian-vmlinuz"];
        arguments.extend([
            "--initrd",
            "/share/debian-initrd.img",
            "--cmdline",
            &cmdline,
        ]);
        arguments.extend([
            "--cpus", "2", "--memory", "1G", "--disk", &disk, "--net", &net,
        ]);
        arguments.extend(["--on-reboot", "restart", "--report", REPORT]);
        arguments.extend(more);
        arguments.into_iter().map(str::to_owned).collect()
    }

    /// Boots the guest and waits for its login prompt, so long.
    ///
    /// # Errors
    /// Fails when the prompt does not appear before the deadline.
    pub fn boot(
        &self,
        (parameters, more): (&str, &[&str]),
        console: Tap,
        within: Duration,
    ) -> anyhow::Result<Guest<'a>> {
        self.host.check(&["rm", "-f", REPORT], SHORT)?;
        let mut argv = vec!["/share/ssi-hv".to_owned()];
        argv.extend(self.arguments(parameters, more));
        let argv: Vec<&str> = argv.iter().map(String::as_str).collect();
        let begin = Instant::now();
        let process = self.host.spawn_with(&argv, &[], console)?;
        process.wait_for_text(LOGIN, 1, within)?;
        Ok(Guest {
            host: self.host,
            process,
            to_login: begin.elapsed(),
            logins: 1,
        })
    }
}

impl Drop for Network<'_> {
    fn drop(&mut self) {
        // Best effort: a host that has ended has no tap either.
        let _ = self.host.run(&["ip", "link", "del", TAP], SHORT);
    }
}

/// Creates a key on the host unless it has one, and returns the public half. The disk keeps the
/// first key that it was given for as long as the host runs.
fn key_of(host: &Host, dir: &Path) -> anyhow::Result<String> {
    let public = format!("{KEY}.pub");
    let there = host.run(&["cat", &public], SHORT)?;
    if there.status.code == 0 {
        return Ok(there.stdout);
    }
    let key = dir.join("ssh-key");
    // ssh-keygen asks before overwriting a key.
    let _ = std::fs::remove_file(&key);
    let made = Command::new("ssh-keygen")
        .args(["-q", "-t", "ed25519", "-N", "", "-C", "", "-f"])
        .arg(&key)
        .output()
        .context("ssh-keygen (apt-get install openssh-client)")?;
    ensure!(made.status.success(), "ssh-keygen: {made:?}");
    host.put(&key, KEY, 0o600)?;
    host.put(&key.with_extension("pub"), &public, 0o644)?;
    Ok(std::fs::read_to_string(key.with_extension("pub"))?)
}

/// The arguments by which the host runs a command in the guest.
fn ssh(command: &str) -> Vec<String> {
    let guest = format!("root@{GUEST_ADDRESS}");
    let argv = [
        "ssh",
        "-i",
        KEY,
        "-o",
        "BatchMode=yes",
        "-o",
        "ConnectTimeout=20",
        // A guest that ended is detected within 5 minutes, and a slow one answers within them.
        "-o",
        "ServerAliveInterval=30",
        "-o",
        "ServerAliveCountMax=10",
        // Each start of the testbed has a different guest at this address.
        "-o",
        "StrictHostKeyChecking=no",
        "-o",
        "UserKnownHostsFile=/dev/null",
        "-o",
        "LogLevel=ERROR",
        &guest,
        command,
    ];
    argv.map(str::to_owned).to_vec()
}

/// A running guest.
#[derive(Debug)]
pub struct Guest<'a> {
    host: &'a Host,
    process: RemoteProcess,
    /// From its start to its login prompt.
    pub to_login: Duration,
    /// Number of login prompts so far.
    logins: usize,
}

impl Guest<'_> {
    fn ssh(&self, command: &str, within: Duration) -> anyhow::Result<Output> {
        let argv = ssh(command);
        let argv: Vec<&str> = argv.iter().map(String::as_str).collect();
        Ok(self.host.run(&argv, within)?)
    }

    /// Waits until the guest accepts commands.
    ///
    /// # Errors
    /// Fails when it does not before the deadline.
    pub fn wait_for_ssh(&self) -> anyhow::Result<()> {
        let deadline = Instant::now() + SSH_DEADLINE;
        loop {
            // Each attempt waits for the guest's answer, or for the timeout of ssh.
            let output = self.ssh("true", SSH_DEADLINE)?;
            if output.status.code == 0 {
                return Ok(());
            }
            ensure!(Instant::now() < deadline, "no SSH: {}", output.stderr);
            self.host.check(&["sleep", "0.5"], SHORT)?;
        }
    }

    /// Runs a command in the guest, which must succeed, and returns its output.
    ///
    /// # Errors
    /// Fails when the command fails or exceeds the deadline.
    pub fn run(&self, command: &str, within: Duration) -> anyhow::Result<String> {
        let output = self.ssh(command, within)?;
        if output.status.code == 0 {
            return Ok(output.stdout);
        }
        // If the guest has ended, its VM process has the reason.
        let end = self.process.wait(Duration::ZERO).map_or_else(
            |_| String::new(),
            |end| format!("; its VM has ended with {}: {}", end.status, end.stderr),
        );
        anyhow::bail!(
            "in the guest `{command}` ended with {}{end}; it said: {}{}",
            output.status,
            output.stdout,
            output.stderr
        );
    }

    /// Runs a script in the guest, which prints so many lines with `mark`, each within this time of
    /// the one before, and must succeed. Calls `reached` at each, and returns all that it printed.
    /// The script reads what is written to [`SCRIPT_INPUT`] on the host.
    ///
    /// # Errors
    /// Fails when a line does not come in time, or the script or `reached` fails.
    pub fn follow(
        &self,
        script: &str,
        (mark, lines): (&str, usize),
        within: Duration,
        mut reached: impl FnMut() -> anyhow::Result<()>,
    ) -> anyhow::Result<String> {
        let run =
            format!("rm -f {SCRIPT_INPUT}; mkfifo {SCRIPT_INPUT} && exec \"$@\" <>{SCRIPT_INPUT}");
        let ssh = ssh(script);
        let mut argv = vec!["sh", "-c", &run, "sh"];
        argv.extend(ssh.iter().map(String::as_str));
        let process = self.host.spawn(&argv)?;
        for number in 0..lines {
            process
                .wait_for_nth_line(mark, number, within)
                .with_context(|| format!("line {number} with {mark:?}"))?;
            reached()?;
        }
        let output = process.wait(within)?;
        ensure!(
            output.status.code == 0,
            "in the guest a script ended with {}; it said: {}{}",
            output.status,
            output.stdout,
            output.stderr
        );
        Ok(output.stdout)
    }

    /// Reboots the guest and waits until it runs again. Checks that the contents of its disk are
    /// unchanged and that its boot id is not. Returns the time to the next login prompt.
    ///
    /// # Errors
    /// Fails when the guest does not return, or its disk differs.
    pub fn reboot(&mut self) -> anyhow::Result<Duration> {
        const LOOK: &str =
            "cat /etc/machine-id /etc/ssh/ssh_host_ed25519_key.pub; sha256sum /root/kept";
        const START: &str = "cat /proc/sys/kernel/random/boot_id";
        self.run("head -c 1M /dev/urandom >/root/kept; sync", SHORT)?;
        let (before, start) = (self.run(LOOK, SHORT)?, self.run(START, SHORT)?);
        let begin = Instant::now();
        // The connection may break before the command ends.
        let _ = self.ssh("systemctl reboot", SHORT)?;
        self.logins += 1;
        self.process
            .wait_for_text(LOGIN, self.logins, LOGIN_DEADLINE)
            .context("the guest does not come back after a reboot")?;
        let time = begin.elapsed();
        self.wait_for_ssh()?;
        let (after, new_start) = (self.run(LOOK, SHORT)?, self.run(START, SHORT)?);
        ensure!(
            before == after,
            "before the reboot {before}, after it {after}"
        );
        ensure!(start != new_start, "it was no new start: {start}");
        Ok(time)
    }

    /// Checks the logs of the guest's kernel and services for problems.
    ///
    /// # Errors
    /// Fails with the first problem found.
    pub fn check_log(&self) -> anyhow::Result<()> {
        self.check_log_except(&[])
    }

    /// Like [`check_log`](Self::check_log), apart from these complaints of the kernel.
    ///
    /// # Errors
    /// Fails with the first other problem found.
    pub fn check_log_except(&self, expected: &[&str]) -> anyhow::Result<()> {
        let log = self.run("journalctl --no-pager -q -k -o cat", SHORT)?;
        ensure!(log.contains("Linux version"), "no log: {log}");
        if let Some(line) = complaint(&log, expected) {
            anyhow::bail!("the guest's kernel says: {line}");
        }
        let failed = self.run("systemctl --failed --no-legend --plain", SHORT)?;
        ensure!(failed.trim().is_empty(), "services failed: {failed}");
        Ok(())
    }

    /// Powers the guest off, which must be its end, and returns the report of the run, which is also
    /// left in `dir`.
    ///
    /// # Errors
    /// Fails when the run ends in another way, or there is no report.
    pub fn end(self, dir: &Path) -> anyhow::Result<Value> {
        let _ = self.ssh("systemctl poweroff", SHORT)?;
        let output = self.process.wait(END_DEADLINE)?;
        ensure!(
            output.status.code == 0,
            "the run ended with {} instead of 0: {}",
            output.status,
            output.stderr
        );
        let file = dir.join("distro-run.json");
        self.host.get(REPORT, &file)?;
        Published::Report.parse(&std::fs::read_to_string(&file)?)
    }
}

/// Returns the first line in which a kernel reports a problem, and which has none of these texts.
fn complaint<'a>(log: &'a str, expected: &[&str]) -> Option<&'a str> {
    log.lines().find(|line| {
        let line = format!(" {}", line.to_lowercase());
        let has = |texts: &[&str]| texts.iter().any(|text| line.contains(text));
        has(COMPLAINTS) && !has(expected)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hung_task_and_an_error_of_a_disk_are_complaints_and_a_start_is_not() {
        let log = "Linux version 6.1\nDMA: debug\nDEBUG: x\nINFO: task dd:5 blocked for more than 120 seconds.\n";
        assert!(complaint(log, &[]).is_some_and(|line| line.contains("task dd")));
        assert_eq!(complaint(log, &["blocked for more than"]), None);
        let lockup = "watchdog: BUG: soft lockup - CPU#1 stuck for 23s!\n";
        assert_eq!(complaint(lockup, &["soft lockup"]), None);
        assert_eq!(complaint(lockup, &[]), Some(lockup.trim_end()));
        let error = "EXT4-fs error (device vda): ext4_lookup\n";
        assert_eq!(complaint(error, &[]), Some(error.trim_end()));
        assert!(complaint("BUG: unable to handle page fault\n", &[]).is_some());
        assert_eq!(complaint("EXT4-fs (vda): mounted\nDebug: on\n", &[]), None);
    }
}
