//! Emulated hosts.
//!
//! A *testbed host* is a whole machine under QEMU's interpreter (TCG), with nested AMD SVM. It runs
//! a stock kernel with KVM, userfaultfd and software RDMA, independent of this machine's hardware.
//! Hosts have the addresses 10.77.0.1, 10.77.0.2 and so on, with one link for each pair; the link
//! of host 1 to host 2 is the device `link2` there. A second network card of each host connects its
//! agent, which runs commands for the tests and stays reachable when links are cut.
//!
//! Only ratios of times measured here are meaningful.

mod client;
mod error;
mod host;
mod image;
mod process;
mod qemu;

pub use client::Silence;
pub use error::TestbedError;
pub use host::{ExitStatus, Host, Output};
pub use image::{HostImage, HostKernel};
pub(crate) use image::{add_text, add_tools_with_libraries, needed};
pub use process::{RemoteProcess, Tap};

use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::cleanup::{self, RunDir};

/// More hosts than this do not fit a test machine.
pub const HOSTS_MAX: usize = 8;

/// Deadline for hosts to boot. Alone on a machine they need about five seconds.
const BOOT_DEADLINE: Duration = Duration::from_secs(120);
/// Deadline of a small command on a host.
const COMMAND_DEADLINE: Duration = Duration::from_secs(60);

/// Configuration of a testbed.
#[derive(Clone, Debug)]
pub struct TestbedConfig {
    /// Number of hosts.
    pub hosts: usize,
    /// Memory of each host.
    pub memory_mib: u32,
    /// CPUs of each host. With more than one the emulation is not reliable.
    pub cpus: u32,
    /// A directory that hosts see, read-only, as `/share`; it is also in their PATH.
    pub share: PathBuf,
    /// MTU of the links.
    pub mtu: u32,
    /// Directory of `hostN/console.log` and `hostN/qemu.log`.
    pub logs: PathBuf,
    /// A raw image that host 1 has as `/dev/vda`. Writes are discarded with the host.
    pub disk: Option<PathBuf>,
}

impl TestbedConfig {
    /// Two hosts, each with memory for a guest of one GiB, or for lending as much.
    #[must_use]
    pub fn two_hosts(share: &Path, logs: PathBuf) -> Self {
        // The smallest MTU over which an RDMA path carries a page in one packet.
        Self {
            hosts: 2,
            cpus: 1,
            memory_mib: 3000,
            share: share.to_path_buf(),
            mtu: 9000,
            logs,
            disk: None,
        }
    }
}

/// Running hosts, which are stopped on drop.
#[derive(Debug)]
pub struct Testbed {
    hosts: Vec<Host>,
    _run_dir: RunDir,
}

impl Testbed {
    /// Starts hosts and waits until all answer.
    ///
    /// # Errors
    /// Fails when QEMU cannot be started or a host does not answer in time; the end of its
    /// console's log is part of the error.
    pub fn start(config: &TestbedConfig, image: &HostImage) -> Result<Self, TestbedError> {
        if !(1..=HOSTS_MAX).contains(&config.hosts) {
            let text = format!(
                "{} hosts asked, 1 to {HOSTS_MAX} are possible",
                config.hosts
            );
            return Err(TestbedError::Config(text));
        }
        let run_dir = RunDir::new().map_err(|e| TestbedError::io("run directory", e))?;
        // All boot in parallel.
        let mut hosts = Vec::new();
        for number in 1..=config.hosts {
            hosts.push(Host::launch(number, config, image, run_dir.path())?);
        }
        let deadline = cleanup::after(BOOT_DEADLINE);
        for host in &mut hosts {
            host.wait_ready(deadline)?;
        }
        Ok(Self {
            hosts,
            _run_dir: run_dir,
        })
    }

    /// Returns host 1, 2, and so on.
    ///
    /// # Panics
    /// Panics when there is no host of this number, which is a bug of the caller.
    #[must_use]
    pub fn host(&self, number: usize) -> &Host {
        match number
            .checked_sub(1)
            .and_then(|index| self.hosts.get(index))
        {
            Some(host) => host,
            None => panic!("host {number} of {}", self.hosts.len()),
        }
    }

    /// Returns all hosts.
    #[must_use]
    pub fn hosts(&self) -> &[Host] {
        &self.hosts
    }

    /// Returns the processor time of all emulators since they started.
    #[must_use]
    pub fn processor_time(&self) -> Duration {
        self.hosts.iter().map(Host::processor_time).sum()
    }

    /// Cuts the link between two hosts.
    ///
    /// # Errors
    /// Fails when a command on a host fails.
    pub fn cut_link(&self, a: usize, b: usize) -> Result<(), TestbedError> {
        self.host(a).check(
            &["ip", "link", "set", &format!("link{b}"), "down"],
            COMMAND_DEADLINE,
        )?;
        self.host(b).check(
            &["ip", "link", "set", &format!("link{a}"), "down"],
            COMMAND_DEADLINE,
        )?;
        Ok(())
    }

    /// Restores a link that was cut.
    ///
    /// # Errors
    /// Fails when a command on a host fails.
    pub fn restore_link(&self, a: usize, b: usize) -> Result<(), TestbedError> {
        self.host(a)
            .check(&["/etc/link-up", &b.to_string()], COMMAND_DEADLINE)?;
        self.host(b)
            .check(&["/etc/link-up", &a.to_string()], COMMAND_DEADLINE)?;
        Ok(())
    }

    /// Delays packets from one host to another, and drops a share of them.
    ///
    /// # Errors
    /// Fails when a command on the host fails.
    pub fn netem(
        &self,
        from: usize,
        to: usize,
        delay: Duration,
        loss_percent: u8,
    ) -> Result<(), TestbedError> {
        let (link, delay) = (format!("link{to}"), format!("{}us", delay.as_micros()));
        let loss = format!("{loss_percent}%");
        let argv = [
            "tc", "qdisc", "replace", "dev", &link, "root", "netem", "delay", &delay, "loss", &loss,
        ];
        self.host(from).check(&argv, COMMAND_DEADLINE).map(drop)
    }

    /// Limits the rate of a link in both directions.
    ///
    /// # Errors
    /// Fails when a command on a host fails.
    pub fn limit_rate(&self, a: usize, b: usize, mbit_a_second: u32) -> Result<(), TestbedError> {
        let rate = format!("{mbit_a_second}mbit");
        for (from, to) in [(a, b), (b, a)] {
            let link = format!("link{to}");
            let argv = [
                "tc", "qdisc", "replace", "dev", &link, "root", "netem", "rate", &rate,
            ];
            self.host(from).check(&argv, COMMAND_DEADLINE)?;
        }
        Ok(())
    }

    /// Removes what [`netem`](Self::netem) and [`limit_rate`](Self::limit_rate) configured, on all
    /// links.
    ///
    /// # Errors
    /// Fails when a command on a host fails.
    pub fn clear_netem(&self) -> Result<(), TestbedError> {
        for host in &self.hosts {
            // tc fails where there is nothing to delete, which is fine.
            let script =
                "for l in /sys/class/net/link*; do tc qdisc del dev ${l##*/} root; done; true";
            host.run(&["sh", "-c", script], COMMAND_DEADLINE)?;
        }
        Ok(())
    }

    /// Returns two hosts that cannot exchange packets after their links were restored to the
    /// initial state. The emulator is then at fault: occasionally it stops accepting packets from
    /// one end, or delivering them to the other.
    ///
    /// # Errors
    /// Fails when a command on a host fails.
    pub fn stuck_link(&self) -> Result<Option<(usize, usize)>, TestbedError> {
        self.clear_netem()?;
        for a in 1..=self.hosts.len() {
            for b in a + 1..=self.hosts.len() {
                self.restore_link(a, b)?;
                let address = self.host(b).address();
                let ping = ["ping", "-c", "3", "-W", "3", &address];
                let answer = self.host(a).run(&ping, COMMAND_DEADLINE)?;
                // ping succeeds when at least one packet was answered.
                if answer.status.code != 0 {
                    return Ok(Some((a, b)));
                }
            }
        }
        Ok(None)
    }
}
