//! Checks of the release build that run on this machine and need no emulated hosts.

mod browser;
mod container;
mod package;
mod page;
mod tiny;

use std::fs::File;
use std::io::{Read as _, Seek as _};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};

use crate::cleanup::{self, Process};
use crate::e2e::{Result, Verdict};
use crate::summary::{Outcome, Summary};

/// Environment of a running check.
#[derive(Debug)]
pub struct Context {
    /// Root directory of the workspace.
    pub workspace: PathBuf,
    /// Directory for its files; named after the check.
    pub artifacts: PathBuf,
    notes: std::cell::RefCell<Vec<String>>,
}

impl Context {
    /// Adds a line to the summary, such as a score.
    fn note(&self, text: impl Into<String>) {
        self.notes.borrow_mut().push(text.into());
    }

    /// Returns the path of the product.
    fn product(&self) -> PathBuf {
        self.workspace.join("target/release/ssi-hv")
    }
}

/// One check.
#[derive(Clone, Copy)]
pub struct Check {
    /// Its name, which selects it.
    pub name: &'static str,
    /// The property that it tests.
    pub about: &'static str,
    run: fn(&Context) -> Result,
}

impl std::fmt::Debug for Check {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Check")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

/// All checks, in execution order.
pub const CHECKS: &[Check] = &[
    Check {
        name: "package",
        about: "the package installs into a bare Debian, its service lends memory to a VM, and purging it leaves nothing",
        run: package::check,
    },
    Check {
        name: "report_page",
        about: "the page of a report opens from disk in a browser, at any width, without asking for anything, and prints",
        run: page::check,
    },
];

/// Returns the checks whose names contain one of `parts`; all if there are none.
#[must_use]
pub fn named(parts: &[String]) -> Vec<Check> {
    let is_meant =
        |check: &&Check| parts.is_empty() || parts.iter().any(|part| check.name.contains(part));
    CHECKS.iter().filter(is_meant).copied().collect()
}

/// Runs checks and records their results.
pub fn run(workspace: &Path, checks: &[Check], summary: &mut Summary) {
    for check in checks {
        let begin = Instant::now();
        let context = Context {
            workspace: workspace.to_path_buf(),
            artifacts: workspace.join("target/native").join(check.name),
            notes: std::cell::RefCell::default(),
        };
        let outcome = match attempt(check, &context) {
            Ok(Verdict::Pass) => Outcome::Passed,
            Ok(Verdict::Skip(reason)) => Outcome::Skipped(reason),
            Err(error) => Outcome::Failed(format!("{error:#}")),
        };
        summary.add(check.name, outcome, begin.elapsed());
        for note in context.notes.into_inner() {
            summary.note(check.name, &note);
        }
    }
}

fn attempt(check: &Check, context: &Context) -> Result {
    if !context.product().is_file() {
        let reason = "no ssi-hv in target/release: run cargo build --release -p ssi-hv";
        return Ok(Verdict::Skip(reason.into()));
    }
    let dir = &context.artifacts;
    std::fs::create_dir_all(dir).with_context(|| dir.display().to_string())?;
    (check.run)(context)
}

/// Result of a command.
#[derive(Debug)]
struct Output {
    status: ExitStatus,
    stdout: String,
    stderr: String,
}

/// Runs a command to its end, which must come before the deadline.
fn run_within(command: &mut Command, within: Duration) -> anyhow::Result<Output> {
    let what = format!("{command:?}");
    // Files take any amount of output without a reader.
    let (mut out, mut err) = (tempfile::tempfile()?, tempfile::tempfile()?);
    command.stdin(Stdio::null());
    command.stdout(out.try_clone()?).stderr(err.try_clone()?);
    let process = Process::spawn(command).with_context(|| what.clone())?;
    let status = process.wait_until(cleanup::after(within))?;
    drop(process);
    let (stdout, stderr) = (text(&mut out)?, text(&mut err)?);
    let status = status.with_context(|| {
        format!(
            "{what}: not within {} s\n{stdout}{stderr}",
            within.as_secs()
        )
    })?;
    Ok(Output {
        status,
        stdout,
        stderr,
    })
}

/// Runs a command that must succeed, and returns its standard output.
fn succeed_within(command: &mut Command, within: Duration) -> anyhow::Result<String> {
    let output = run_within(command, within)?;
    ensure!(
        output.status.success(),
        "{command:?}: {}\n{}{}",
        output.status,
        output.stdout,
        output.stderr
    );
    Ok(output.stdout)
}

fn text(file: &mut File) -> std::io::Result<String> {
    let mut bytes = Vec::new();
    file.rewind()?;
    file.read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Returns why a command is not available.
fn missing(command: &str, package: &str) -> Option<String> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let there = std::env::split_paths(&path).any(|dir| dir.join(command).is_file());
    (!there).then(|| format!("no {command}: apt-get install {package}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_that_takes_too_long_is_ended_and_what_it_said_is_kept() {
        // A busy host may start the command only after a second or more.
        let kept = [1, 2, 4, 8, 16, 32].into_iter().any(|seconds| {
            let mut slow = Command::new("sh");
            slow.args(["-c", "echo begun; exec sleep 1000"]);
            let error = run_within(&mut slow, Duration::from_secs(seconds)).unwrap_err();
            let text = format!("{error:#}");
            assert!(text.contains(&format!("not within {seconds} s")), "{text}");
            text.contains("begun")
        });
        assert!(kept, "what it said is lost");
        let mut fails = Command::new("sh");
        fails.args(["-c", "echo why >&2; exit 3"]);
        let error = succeed_within(&mut fails, Duration::from_secs(60)).unwrap_err();
        assert!(error.to_string().contains("why"), "{error}");
    }

    #[test]
    fn a_command_that_is_missing_is_answered_with_its_package() {
        assert_eq!(missing("sh", "dash"), None);
        let reason = missing("no-such-command", "the-package").unwrap();
        assert!(reason.contains("apt-get install the-package"), "{reason}");
    }
}
