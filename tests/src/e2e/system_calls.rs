//! What the system call filters of `ssi-hv` did on testbed hosts, from their kernels' logs.
//!
//! A call that the class of a thread does not have is logged, or ends the process (seccomp(2)). The
//! kernel writes both to the audit log, which is its own log when no daemon reads it. Hosts have no
//! limit on the rate of messages (`testbed/init`), so none is missing.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::Duration;

use anyhow::bail;
use ssi_hv_sandbox::call_name;

use crate::testbed::{Host, Testbed};

/// Deadline for reading the log of a host.
const LOG_TIME_MAX: Duration = Duration::from_secs(20);
/// The records, without which grep would fail.
const RECORDS: &str = "dmesg | grep -F 'audit: type=1326 ' || true";
/// The signal of a call that ended its process.
const SIGSYS: u32 = 31;

/// A call that a filter did not just let pass.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Call {
    /// The name of the thread. The kernel writes names that are not plain as hexadecimal digits.
    thread: String,
    number: i64,
    killed: bool,
}

impl std::fmt::Display for Call {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match call_name(self.number) {
            Some(name) => write!(f, "{name} by {}", self.thread),
            None => write!(f, "system call {} by {}", self.number, self.thread),
        }
    }
}

/// The records that were seen, by host.
#[derive(Debug, Default)]
pub(super) struct SeenRecords(BTreeMap<usize, u64>);

impl SeenRecords {
    /// Returns a line about the calls since the last time that were only logged, if there are any.
    ///
    /// # Errors
    /// Fails when a call ended a process, or the log of a host cannot be read.
    pub fn check(&mut self, testbed: &Testbed) -> anyhow::Result<Option<String>> {
        let mut calls = BTreeMap::new();
        for host in testbed.hosts() {
            let log = log_of(host)?;
            let last = self.0.entry(host.number()).or_default();
            for (serial, call) in log.lines().filter_map(parse) {
                if serial > *last {
                    *last = serial;
                    *calls.entry(call).or_insert(0_u64) += 1;
                }
            }
        }
        verdict(&calls)
    }
}

fn log_of(host: &Host) -> anyhow::Result<String> {
    Ok(host.check(&["sh", "-c", RECORDS], LOG_TIME_MAX)?)
}

fn verdict(calls: &BTreeMap<Call, u64>) -> anyhow::Result<Option<String>> {
    let mut texts = [String::new(), String::new()];
    for (call, times) in calls {
        let text = &mut texts[usize::from(call.killed)];
        let separator = if text.is_empty() { "" } else { ", " };
        let _ = write!(text, "{separator}{call} ({times})");
    }
    let [logged, killed] = texts;
    if !killed.is_empty() {
        bail!("system calls ended processes: {killed}");
    }
    let line = format!("system calls outside the lists of their threads: {logged}");
    Ok((!logged.is_empty()).then_some(line))
}

/// Reads a record: its number, which grows, and its contents.
fn parse(line: &str) -> Option<(u64, Call)> {
    let (_, record) = line.split_once("audit: type=1326 audit(")?;
    let (stamp, fields) = record.split_once(')')?;
    let serial = stamp.rsplit(':').next()?.parse().ok()?;
    let field = |name: &str| {
        let mut fields = fields.split_whitespace();
        fields.find_map(|field| field.strip_prefix(name)?.strip_prefix('='))
    };
    let call = Call {
        thread: field("comm")?.trim_matches('"').to_owned(),
        number: field("syscall")?.parse().ok()?,
        killed: field("sig")?.parse::<u32>().ok()? == SIGSYS,
    };
    Some((serial, call))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As Linux 6.18 writes them.
    const LOG: &str = r#"[   60.635040] audit: type=1326 audit(1795652280.577:65): auid=4294967295 uid=0 gid=0 ses=4294967295 pid=140 comm="virtio-balloon" exe="/share/ssi-hv" sig=0 arch=c000003e syscall=27 compat=0 ip=0x7f83564d9829 code=0x7ffc0000
[   60.635044] audit: type=1326 audit(1795652280.578:66): auid=4294967295 uid=0 gid=0 ses=4294967295 pid=140 comm="virtio-balloon" exe="/share/ssi-hv" sig=0 arch=c000003e syscall=27 compat=0 ip=0x7f83564d9829 code=0x7ffc0000
[   61.000000] audit: type=1400 audit(1795652280.579:67): something else
[   61.112345] audit: type=1326 audit(1795652281.001:68): auid=4294967295 uid=0 gid=0 ses=4294967295 pid=141 comm="vcpu0" exe="/share/ssi-hv" sig=31 arch=c000003e syscall=59 compat=0 ip=0x7fba6d104829 code=0x80000000
"#;

    fn of(log: &str) -> BTreeMap<Call, u64> {
        let mut calls = BTreeMap::new();
        for (_, call) in log.lines().filter_map(parse) {
            *calls.entry(call).or_default() += 1;
        }
        calls
    }

    #[test]
    fn logged_calls_are_named_and_those_that_killed_are_errors() {
        let serials: Vec<_> = LOG.lines().filter_map(parse).map(|(n, _)| n).collect();
        assert_eq!(serials, [65, 66, 68]);
        let logged: Vec<_> = LOG.lines().take(3).collect();
        let line = verdict(&of(&logged.join("\n"))).expect("none was killed");
        assert!(
            line.expect("two were logged")
                .ends_with("threads: mincore by virtio-balloon (2)")
        );
        let error = verdict(&of(LOG)).expect_err("one was killed").to_string();
        assert_eq!(
            error,
            "system calls ended processes: system call 59 by vcpu0 (1)"
        );
        assert_eq!(verdict(&of("")).expect("nothing happened"), None);
    }
}
