//! Times of the guest with most of its memory on a donor, compared with all of it local.

use std::fmt::Write as _;
use std::path::Path;
use std::time::Duration;

use anyhow::ensure;
use serde_json::{Value, json};

use super::work::Work;
use super::{LOGIN_DEADLINE, Network};
use crate::testbed::{Host, Tap};

/// Returns the flags for a guest with `local_memory` here and the rest on the donor on host 2.
#[must_use]
pub fn donor_flags(local_memory: &str) -> [&str; 5] {
    [
        "--local-memory",
        local_memory,
        "--donor",
        "10.77.0.2:7700",
        "--insecure",
    ]
}

/// Times of one guest.
#[derive(Clone, Debug)]
pub struct Measured {
    /// From its start to its login prompt.
    pub to_login: Duration,
    /// Each workload.
    pub work: Vec<(&'static str, Duration)>,
    /// From the reboot command to the next login prompt.
    pub reboot: Option<Duration>,
}

/// Boots the guest with these flags, optionally reboots it, runs the workloads, checks its log, and
/// powers it off. Returns the times and the report of `ssi-hv`; local files go to `dir`.
///
/// # Errors
/// Fails when a step fails in the guest, or its kernel logs a problem.
pub fn measure(
    host: &Host,
    dir: &Path,
    flags: &[&str],
    console: Tap,
    pieces: &[Work],
    reboots: bool,
) -> anyhow::Result<(Measured, Value)> {
    let network = Network::up(host, dir)?;
    let mut guest = network.boot(("", flags), console, LOGIN_DEADLINE)?;
    println!("{:<12}{:>10.1} s", "login", guest.to_login.as_secs_f64());
    guest.wait_for_ssh()?;
    // The report covers the last start only, and the workloads belong to it.
    let reboot = if reboots {
        guest.check_log()?;
        Some(guest.reboot()?)
    } else {
        None
    };
    let mut work = Vec::new();
    for piece in pieces {
        let time = piece.run(&guest)?;
        println!("{:<12}{:>10.1} s", piece.name, time.as_secs_f64());
        work.push((piece.name, time));
    }
    guest.check_log()?;
    let measured = Measured {
        to_login: guest.to_login,
        work,
        reboot,
    };
    let report = guest.end(dir)?;
    ensure!(
        report["boot"]["restarts"].as_u64() == Some(reboots.into()),
        "restarts in the report: {}",
        report["boot"]
    );
    Ok((measured, report))
}

/// The same workloads with local and with remote memory.
#[derive(Clone, Debug)]
pub struct Comparison {
    /// With all memory local.
    pub here: Measured,
    /// With most memory on a donor.
    pub there: Measured,
}

impl Comparison {
    /// Returns the steps of both guests with their local and remote seconds.
    #[must_use]
    pub fn rows(&self) -> Vec<(&'static str, f64, f64)> {
        let seconds = |time: &Duration| time.as_secs_f64();
        let login = (
            "login",
            seconds(&self.here.to_login),
            seconds(&self.there.to_login),
        );
        let pairs = self.here.work.iter().zip(&self.there.work);
        let work = pairs.map(|((name, here), (_, there))| (*name, seconds(here), seconds(there)));
        std::iter::once(login).chain(work).collect()
    }

    /// Formats the comparison for the report.
    #[must_use]
    pub fn json(&self) -> Value {
        let rows: Vec<_> = self
            .rows()
            .into_iter()
            .map(|(name, here, there)| {
                json!({ "name": name, "local_s": here, "remote_s": there, "ratio": there / here })
            })
            .collect();
        json!({ "rows": rows, "reboot_s": self.there.reboot.map(|time| time.as_secs_f64()) })
    }

    /// Formats the comparison for the terminal.
    #[must_use]
    pub fn table(&self) -> String {
        let mut text = format!("{:<12}{:>12}{:>12}{:>8}\n", "", "remote", "local", "ratio");
        for (name, here, there) in self.rows() {
            // Writing to a String cannot fail.
            let _ = writeln!(
                text,
                "{name:<12}{there:>10.1} s{here:>10.1} s{:>8.2}",
                there / here
            );
        }
        if let Some(time) = self.there.reboot {
            let _ = writeln!(text, "{:<12}{:>10.1} s", "reboot", time.as_secs_f64());
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_have_the_same_work_of_both_and_the_ratio_is_remote_to_local() {
        let measured = |seconds: u64| Measured {
            to_login: Duration::from_secs(seconds),
            work: vec![("dd", Duration::from_secs(2 * seconds))],
            reboot: None,
        };
        let comparison = Comparison {
            here: measured(10),
            there: measured(15),
        };
        assert_eq!(
            comparison.rows(),
            [("login", 10.0, 15.0), ("dd", 20.0, 30.0)]
        );
        assert_eq!(comparison.json()["rows"][1]["ratio"], 1.5);
        let table = comparison.table();
        let row = table.lines().find(|line| line.starts_with("dd")).unwrap();
        let words: Vec<_> = row.split_whitespace().collect();
        assert_eq!(words, ["dd", "30.0", "s", "20.0", "s", "1.50"]);
    }
}
