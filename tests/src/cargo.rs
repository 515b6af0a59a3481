//! Runs cargo's checks and parses their test results.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::Context as _;

use crate::cleanup::{self, Process};
use crate::summary::{Outcome, Summary};

/// Deadline of a step. The slowest case is two builds from scratch in parallel on two cores.
const STEP_DEADLINE: Duration = Duration::from_secs(30 * 60);
/// Lines of a failed step's output to print; its log has the whole.
const LINES_SHOWN_MAX: usize = 60;

/// One cargo command with its name and environment.
#[derive(Debug)]
pub struct Step<'a> {
    /// Name of the step and of its log.
    pub name: &'a str,
    /// Arguments of cargo.
    pub args: &'a [&'a str],
    /// Environment variables to set.
    pub env: &'a [(&'a str, &'a str)],
    /// Whether it runs tests, which are then counted individually.
    pub runs_tests: bool,
}

impl Step<'_> {
    /// Returns the path of its log.
    #[must_use]
    pub fn log(&self, logs: &Path) -> PathBuf {
        logs.join(format!("{}.log", self.name))
    }

    /// Runs the step, records its outcome, and returns whether it succeeded.
    ///
    /// # Errors
    /// Fails when the step cannot be started.
    pub fn run(
        &self,
        workspace: &Path,
        logs: &Path,
        summary: &mut Summary,
    ) -> anyhow::Result<bool> {
        let begin = Instant::now();
        println!("{:<36} running  cargo {}", self.name, self.args.join(" "));
        std::fs::create_dir_all(logs)?;
        let path = self.log(logs);
        let log = File::create(&path).with_context(|| path.display().to_string())?;
        let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        command
            .args(self.args)
            .envs(self.env.iter().copied())
            .current_dir(workspace);
        command
            .env("CARGO_TERM_COLOR", "never")
            .stdin(std::process::Stdio::null());
        command.stdout(log.try_clone()?).stderr(log);
        let process = Process::spawn(&mut command).context("cargo")?;
        let status = process.wait_until(cleanup::after(STEP_DEADLINE))?;
        drop(process);

        let succeeded = status.is_some_and(|s| s.success());
        let text = String::from_utf8_lossy(&std::fs::read(&path)?).into_owned();
        let tests = if self.runs_tests {
            Tests::parse(&text)
        } else {
            Tests::default()
        };
        let outcome = match status {
            Some(_) if succeeded => Outcome::Passed,
            None => Outcome::Failed(format!(
                "not within {} minutes",
                STEP_DEADLINE.as_secs() / 60
            )),
            Some(status) => Outcome::Failed(format!("{status}; log in {}", path.display())),
        };
        if !succeeded {
            show_end(&text);
        }
        if tests.passed + tests.failed.len() == 0 || (!succeeded && tests.failed.is_empty()) {
            // The step counts as one check: it has no tests, or it failed outside of its tests.
            summary.add(self.name, outcome, begin.elapsed());
        } else {
            println!(
                "{:<36} {} passed, {} failed, {} skipped in {:.0}s",
                self.name,
                tests.passed,
                tests.failed.len(),
                tests.skipped.len(),
                begin.elapsed().as_secs_f64()
            );
        }
        tests.add_to(summary, &path.display().to_string());
        Ok(succeeded)
    }
}

/// Prints the last lines of a failed step's output.
pub(crate) fn show_end(text: &str) {
    let lines: Vec<&str> = text.lines().collect();
    let from = lines.len().saturating_sub(LINES_SHOWN_MAX);
    println!("{}", lines[from..].join("\n"));
}

/// Results of a `cargo test` run.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Tests {
    pub passed: usize,
    pub failed: Vec<String>,
    /// Names, and how they panicked first.
    pub panics: Vec<(String, String)>,
    /// Names and reasons.
    pub skipped: Vec<(String, String)>,
    /// Executions of fuzz targets.
    pub fuzzed: u64,
}

impl Tests {
    /// Adds the results to the summary; `log` has the complete output.
    pub fn add_to(self, summary: &mut Summary, log: &str) {
        for test in self.failed {
            let mut panics = self.panics.iter();
            let why = panics.find(|(name, _)| *name == test);
            let why = why.map_or_else(String::new, |(_, why)| format!("{why}; "));
            summary.add_silently(&test, Outcome::Failed(format!("{why}see {log}")));
        }
        summary.add_passed(self.passed);
        for (test, reason) in self.skipped {
            summary.add_silently(&test, Outcome::Skipped(reason));
        }
    }

    /// Parses the output of `cargo test -- --show-output`. A test that could not run prints
    /// `SKIPPED: reason` and returns. The harness counts it as passed, so it is subtracted here. A
    /// test that reports a skip in any other form fails.
    pub fn parse(text: &str) -> Self {
        let mut tests = Self::default();
        let mut printing = "a test";
        let mut panicked_at = None;
        for line in text.lines() {
            // The reason is on the next line.
            if let Some(place) = panicked_at.take() {
                let why = format!("panicked at {place} {line}");
                tests.panics.push((printing.to_owned(), why));
            }
            panicked_at = line.split_once(" panicked at ").map(|(_, place)| place);
            // "---- name stdout ----" precedes the output of a test.
            if let Some(name) = line
                .strip_prefix("---- ")
                .and_then(|l| l.strip_suffix(" stdout ----"))
            {
                printing = name;
            } else if let Some(fuzzed) = line.strip_prefix("FUZZED: ") {
                let count = fuzzed
                    .split(' ')
                    .nth(1)
                    .and_then(|count| count.parse().ok());
                tests.fuzzed += count.unwrap_or(0);
            } else if let Some((_, reason)) = line.split_once("SKIPPED: ") {
                tests.skipped.push((printing.to_owned(), reason.to_owned()));
                tests.passed = tests.passed.saturating_sub(1);
            } else if is_no_proper_skip(line) {
                // It would count as passed.
                let say = format!("{printing} says `{line}`; say `SKIPPED: reason`");
                tests.failed.push(say);
                tests.passed = tests.passed.saturating_sub(1);
            } else if let Some((name, outcome)) = line
                .strip_prefix("test ")
                .and_then(|l| l.rsplit_once(" ... "))
            {
                match outcome.split(',').next().unwrap_or_default() {
                    "ok" => tests.passed += 1,
                    "FAILED" => tests.failed.push(name.to_owned()),
                    "ignored" => tests.skipped.push((name.to_owned(), outcome.to_owned())),
                    _ => {}
                }
            }
        }
        tests
    }
}

/// Returns whether a line reports a skip in a form that is not counted.
fn is_no_proper_skip(line: &str) -> bool {
    let start = line.trim_start().get(.."skipped".len());
    start.is_some_and(|start| start.eq_ignore_ascii_case("skipped"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passed_failed_ignored_and_skipped_tests_are_told_apart() {
        let text = "running 5 tests\ntest a::one ... ok\ntest a::two ... ok\ntest b ... FAILED\n\
                    test c ... ignored, slow\ntest d ... ok\n\nsuccesses:\n\n---- a::two stdout ----\n\
                    SKIPPED: no /dev/kvm\nFUZZED: rtc, 12 executions\nFUZZED: rng, 30 executions\n\nsuccesses:\n    a::one\n\n\
                    failures:\n\n---- b stdout ----\n\nthread 'b' (7) panicked at b.rs:1:2:\nno bytes\n\ntest result: FAILED. 3 passed\n";
        let expected = Tests {
            passed: 2,
            failed: vec!["b".into()],
            panics: vec![("b".into(), "panicked at b.rs:1:2: no bytes".into())],
            skipped: vec![
                ("c".into(), "ignored, slow".into()),
                ("a::two".into(), "no /dev/kvm".into()),
            ],
            fuzzed: 42,
        };
        assert_eq!(Tests::parse(text), expected);
    }

    #[test]
    fn a_skip_that_is_told_in_another_way_fails() {
        for said in [
            "skipped: no compiler",
            "  Skipped no compiler",
            "SKIPPED in part: 1",
        ] {
            let text = format!(
                "test a ... ok\ntest b ... ok\n\nsuccesses:\n\n---- b stdout ----\n{said}\n"
            );
            let tests = Tests::parse(&text);
            assert_eq!((tests.passed, tests.failed.len()), (1, 1), "{said}");
            assert!(tests.failed[0].starts_with("b says `"), "{tests:?}");
            assert_eq!(tests.skipped, []);
        }
        let others = "test skipped_pages_count ... ok\nnothing was skipped\nSKIP\n";
        let tests = Tests::parse(others);
        assert_eq!((tests.passed, tests.failed), (1, vec![]));
    }

    #[test]
    fn a_step_that_fails_without_tests_is_one_failure() {
        let dir = tempfile::tempdir().unwrap();
        let mut summary = Summary::default();
        let step = Step {
            name: "nonsense",
            args: &["no-such-subcommand"],
            env: &[],
            runs_tests: true,
        };
        assert!(!step.run(dir.path(), dir.path(), &mut summary).unwrap());
        assert_eq!(summary.last_line(), "0 passed, 1 failed, 0 skipped");
    }
}
