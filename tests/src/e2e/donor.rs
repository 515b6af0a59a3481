//! Donors of scenarios, run through the command line of `ssi-hv`.

use std::time::Duration;

use anyhow::{Context as _, ensure};
use serde_json::Value;

use super::guest::{BOOT_DEADLINE, SHORT, read, tail};
use super::{Context, stall};
use crate::published::Published;
use crate::testbed::RemoteProcess;

/// Address of the first donor.
pub(super) const DONOR: &str = "10.77.0.2:7700";
/// Address of a second donor on the same host.
pub(super) const DONOR_2: &str = "10.77.0.2:7701";
/// Address of a donor on host 3.
pub(super) const DONOR_3: &str = "10.77.0.3:7700";
/// Address of a second donor on host 3.
pub(super) const DONOR_4: &str = "10.77.0.3:7701";
const NODE_REPORT: &str = "/tmp/node.json";
const NODE_2_REPORT: &str = "/tmp/node2.json";

/// A running donor.
#[derive(Debug)]
pub(super) struct Donor {
    host: usize,
    address: String,
    process: RemoteProcess,
    report: String,
}

impl Donor {
    /// Starts a donor on host 2 and waits until it listens.
    pub fn start(context: &Context<'_>) -> anyhow::Result<Self> {
        Self::lending(context, "1G", &[])
    }

    /// Starts a second donor on host 2.
    pub fn second(context: &Context<'_>) -> anyhow::Result<Self> {
        Self::second_lending(context, "1G", &[])
    }

    /// Starts a second donor on host 2 with this memory and further flags.
    pub fn second_lending(
        context: &Context<'_>,
        memory: &str,
        more: &[&str],
    ) -> anyhow::Result<Self> {
        Self::at(context, (2, DONOR_2), &[], NODE_2_REPORT, memory, more)
    }

    /// Starts a donor on host 3.
    pub fn third(context: &Context<'_>) -> anyhow::Result<Self> {
        Self::third_lending(context, "1G", &[])
    }

    /// Starts a donor on host 3 with this memory and further flags.
    pub fn third_lending(
        context: &Context<'_>,
        memory: &str,
        more: &[&str],
    ) -> anyhow::Result<Self> {
        Self::at(context, (3, DONOR_3), &[], NODE_REPORT, memory, more)
    }

    /// Starts a second donor on host 3.
    pub fn fourth(context: &Context<'_>) -> anyhow::Result<Self> {
        Self::at(context, (3, DONOR_4), &[], NODE_2_REPORT, "1G", &[])
    }

    /// Starts a donor as an unprivileged user with the default limit of locked memory, as
    /// `ssi-hv-node.service` of the package runs it.
    pub fn without_rights(context: &Context<'_>) -> anyhow::Result<Self> {
        // The testbed's hosts have only the root user.
        let user = "mkdir -p /etc; grep -qs ^nobody: /etc/passwd || \
            echo nobody:x:65534:65534:::/bin/sh >>/etc/passwd";
        let host = context.testbed.host(2);
        host.check(&["sh", "-c", user], SHORT)?;
        let nobody = [
            "start-stop-daemon",
            "-S",
            "-c",
            "65534:65534",
            "-x",
            "/share/ssi-hv",
            "--",
        ];
        let donor = Self::at(context, (2, DONOR), &nobody, NODE_REPORT, "1G", &[])?;
        let status = format!("/proc/{}/status", donor.pid());
        let status = host.check(&["cat", &status], SHORT)?;
        let none = |name: &str| status.contains(&format!("{name}:\t0000000000000000\n"));
        ensure!(
            status.contains("\nUid:\t65534\t") && none("CapEff") && none("CapPrm"),
            "the donor has rights: {status}"
        );
        Ok(donor)
    }

    /// Starts a donor on host 2 with this memory and further flags.
    pub fn lending(context: &Context<'_>, memory: &str, more: &[&str]) -> anyhow::Result<Self> {
        Self::at(context, (2, DONOR), &[], NODE_REPORT, memory, more)
    }

    /// Starts a donor on this host and port, with this memory and further flags.
    pub fn listening(
        context: &Context<'_>,
        (host, port): (usize, u16),
        memory: &str,
        more: &[&str],
    ) -> anyhow::Result<Self> {
        let address = format!("{}:{port}", context.testbed.host(host).address());
        Self::listening_at(context, (host, &address, port), memory, more)
    }

    /// The same at this address.
    pub fn listening_at(
        context: &Context<'_>,
        (host, address, port): (usize, &str, u16),
        memory: &str,
        more: &[&str],
    ) -> anyhow::Result<Self> {
        let report = format!("/tmp/node-{port}.json");
        Self::at(context, (host, address), &[], &report, memory, more)
    }

    fn at(
        context: &Context<'_>,
        (number, address): (usize, &str),
        before: &[&str],
        report: &str,
        memory: &str,
        more: &[&str],
    ) -> anyhow::Result<Self> {
        let host = context.testbed.host(number);
        host.check(&["rm", "-f", report], SHORT)?;
        // A prefix command includes the program's name at its end.
        let program: &[&str] = if before.is_empty() {
            &["/share/ssi-hv"]
        } else {
            before
        };
        let mut argv = program.to_vec();
        argv.extend([
            "node", "--listen", address, "--memory", memory, "--report", report,
        ]);
        // With certificates nothing has to be accepted without them.
        if !more.contains(&"--credentials") {
            argv.push("--insecure");
        }
        argv.extend(more);
        let process = host.spawn(&argv)?;
        let port = address.rsplit(':').next().unwrap_or_default();
        // Checks the socket, so that it does not depend on the donor's messages.
        let script = format!(
            "until ss -Hltn | grep -q :{port}; do [ -e /proc/{} ] || exit 1; sleep 0.2; done",
            process.pid()
        );
        // A host that has to wait for its CPUs reads the program slowly from the share.
        host.check(&["sh", "-c", &script], BOOT_DEADLINE)
            .with_context(|| {
                // Best effort: the error is reported in any case.
                let threads = stall::threads_of(host, process.pid());
                let (output, errors) = (process.stdout(), process.stderr());
                format!(
                    "the donor does not listen; it wrote: {output}{errors}; its threads: {threads}"
                )
            })?;
        Ok(Self {
            host: number,
            address: address.to_owned(),
            process,
            report: report.to_owned(),
        })
    }

    /// Returns its process id on its host.
    pub fn pid(&self) -> i32 {
        self.process.pid()
    }

    /// Returns its address, as a VM names it.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Returns its standard error so far.
    pub fn stderr(&self) -> String {
        self.process.stderr()
    }

    /// Kills the donor, as a crash would.
    pub fn kill(self) -> anyhow::Result<()> {
        Self::kill_all(vec![self])
    }

    /// Kills donors at once, as the loss of a rack would. Some may have ended.
    pub fn kill_all(donors: Vec<Self>) -> anyhow::Result<()> {
        for donor in &donors {
            if donor.process.wait(Duration::ZERO).is_err() {
                donor.process.kill(libc::SIGKILL)?;
            }
        }
        for donor in donors {
            donor.process.wait(SHORT)?;
        }
        Ok(())
    }

    /// Stops the donor and returns its counters: pages read from it, pages written to it.
    pub fn stop(self, context: &Context<'_>) -> anyhow::Result<(u64, u64)> {
        let report = self.end(context)?;
        counters(&report).with_context(|| format!("no counters in the donor's report: {report}"))
    }

    /// Stops the donor and returns its report.
    pub fn end(self, context: &Context<'_>) -> anyhow::Result<Value> {
        self.process.kill(libc::SIGTERM)?;
        let output = self
            .process
            .wait(SHORT)
            .context("the donor does not end on SIGTERM")?;
        read(context, self.host, Published::NodeReport, &self.report)
            .with_context(|| format!("report of the donor; {}", tail(&output)))
    }
}

/// Extracts the counters of pages from a donor's report.
fn counters(report: &Value) -> Option<(u64, u64)> {
    Some((
        find_number(report, "pages_read")?,
        find_number(report, "pages_written")?,
    ))
}

fn find_number(value: &Value, key: &str) -> Option<u64> {
    match value {
        Value::Object(map) => map
            .get(key)
            .and_then(Value::as_u64)
            .or_else(|| map.values().find_map(|inner| find_number(inner, key))),
        Value::Array(items) => items.iter().find_map(|inner| find_number(inner, key)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_found_at_any_depth_and_missed_if_absent() {
        let report = serde_json::json!({"leases": [{"pages_read": 5, "pages_written": 2}]});
        assert_eq!(counters(&report), Some((5, 2)));
        assert_eq!(counters(&serde_json::json!({"pages_read": 5})), None);
    }
}
