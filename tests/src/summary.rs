//! The results of all checks: passed, failed and skipped.

use std::time::Duration;

/// Scenarios per run that may pass only when repeated. The emulator hangs occasionally; more of
/// them indicate a fault of the product that repetition hides.
const FLAKY_MAX: usize = 1;
/// Name of the failure for more flaky scenarios than that.
const TOO_FLAKY: &str = "flaky scenarios";

/// Result of one check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The tested property holds.
    Passed,
    /// It does not hold, with the reason.
    Failed(String),
    /// The check could not run, with the reason. Never counted as passed.
    Skipped(String),
}

/// Collects outcomes and prints each as it arrives.
#[derive(Debug, Default)]
pub struct Summary {
    passed: usize,
    failed: Vec<(String, String)>,
    skipped: Vec<(String, String)>,
    restarts: Vec<(String, String)>,
    flaky: Vec<(String, String)>,
    notes: Vec<(String, String)>,
}

impl Summary {
    /// Records the outcome of one check.
    pub fn add(&mut self, name: &str, outcome: Outcome, time: Duration) {
        self.add_with(name, outcome, time, "");
    }

    /// Records the outcome of one check, with more about its time, such as `, 3.1s of CPU`.
    pub fn add_with(&mut self, name: &str, outcome: Outcome, time: Duration, more: &str) {
        let seconds = time.as_secs_f64();
        match outcome {
            Outcome::Passed => {
                println!("{name:<36} ok       {seconds:.1}s{more}");
                self.passed += 1;
            }
            Outcome::Failed(reason) => {
                println!(
                    "{name:<36} FAILED   {seconds:.1}s{more}\n    {}",
                    reason.replace('\n', "\n    ")
                );
                self.failed.push((name.to_owned(), reason));
            }
            Outcome::Skipped(reason) => {
                println!("{name:<36} SKIPPED: {reason}");
                self.skipped.push((name.to_owned(), reason));
            }
        }
    }

    /// Counts checks that another program ran and that passed.
    pub fn add_passed(&mut self, count: usize) {
        self.passed += count;
    }

    /// Counts a check that another program ran, without printing it again.
    pub fn add_silently(&mut self, name: &str, outcome: Outcome) {
        match outcome {
            Outcome::Passed => self.passed += 1,
            Outcome::Failed(reason) => self.failed.push((name.to_owned(), reason)),
            Outcome::Skipped(reason) => self.skipped.push((name.to_owned(), reason)),
        }
    }

    /// Adds the results of another summary without printing them again.
    pub fn merge(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed.extend(other.failed);
        self.skipped.extend(other.skipped);
        self.restarts.extend(other.restarts);
        self.flaky.extend(other.flaky);
        self.notes.extend(other.notes);
    }

    /// Records that the testbed was restarted for a check.
    pub fn restart(&mut self, name: &str, reason: &str) {
        println!("{name:<36} testbed restarted: {reason}");
        self.restarts.push((name.to_owned(), reason.to_owned()));
    }

    /// Records that a check passed only when it was repeated. More than one such check in a run is
    /// a failure itself.
    pub fn flaky(&mut self, name: &str, reason: &str) {
        println!("{name:<36} flaky: {reason}");
        self.flaky.push((name.to_owned(), reason.to_owned()));
    }

    /// Records a number or another fact for the summary.
    pub fn note(&mut self, name: &str, text: &str) {
        self.notes.push((name.to_owned(), text.to_owned()));
    }

    /// Returns whether anything failed.
    #[must_use]
    pub fn has_failures(&self) -> bool {
        !self.failures().is_empty()
    }

    /// Returns what failed, including the flakiness of the whole run.
    fn failures(&self) -> Vec<(String, String)> {
        let mut failures = self.failed.clone();
        if self.flaky.len() > FLAKY_MAX {
            let names: Vec<_> = self.flaky.iter().map(|(name, _)| name.as_str()).collect();
            let reason = format!(
                "{} passed only when repeated, {FLAKY_MAX} is the limit: {}",
                names.len(),
                names.join(", ")
            );
            failures.push((TOO_FLAKY.into(), reason));
        }
        failures
    }

    /// Prints the end of a run; the last line is `N passed, N failed, N skipped`.
    pub fn print(&self) {
        print!("{}", self.closing());
    }

    /// Formats the closing lines of a run.
    fn closing(&self) -> String {
        let mut closing = String::new();
        let mut section = |title: &str, entries: &[(String, String)], short: fn(&str) -> String| {
            if !entries.is_empty() {
                closing += &format!("\n{title}:\n");
                for (name, text) in entries {
                    closing += &format!("  {name}: {}\n", short(text));
                }
            }
        };
        let first_line = |text: &str| text.lines().next().unwrap_or_default().to_owned();
        section("Measured", &self.notes, first_line);
        section("Testbed restarts", &self.restarts, first_line);
        section("flaky", &self.flaky, first_line);
        section("Skipped", &self.skipped, first_line);
        section("Failed", &self.failures(), with_output);
        format!("{closing}\n{}\n", self.last_line())
    }

    /// Formats the totals.
    #[must_use]
    pub fn last_line(&self) -> String {
        format!(
            "{} passed, {} failed, {} skipped",
            self.passed,
            self.failures().len(),
            self.skipped.len()
        )
    }
}

/// Characters of the start and of the end of a long reason that [`with_output`] keeps.
const KEPT: (usize, usize) = (250, 150);
/// As many lines of output that a reason quotes are repeated at the end.
const QUOTED_LINES: usize = 6;

/// Returns the first line of a text, without its middle where it is long, and the last of the lines
/// that follow: what a process printed before it failed.
fn with_output(text: &str) -> String {
    let mut lines = text.lines();
    let first: Vec<char> = lines.next().unwrap_or_default().chars().collect();
    let mut short: String = if first.len() > KEPT.0 + KEPT.1 {
        let (start, end) = (&first[..KEPT.0], &first[first.len() - KEPT.1..]);
        start
            .iter()
            .chain(&[' ', '.', '.', '.', ' '])
            .chain(end)
            .collect()
    } else {
        first.iter().collect()
    };
    let quoted: Vec<_> = lines.collect();
    for line in quoted
        .iter()
        .skip(quoted.len().saturating_sub(QUOTED_LINES))
    {
        short += &format!("\n    {}", line.trim_start());
    }
    short
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_skip_is_neither_passed_nor_failed() {
        let mut summary = Summary::default();
        summary.add("a", Outcome::Passed, Duration::ZERO);
        summary.add_silently("b", Outcome::Skipped("no kvm".into()));
        assert!(!summary.has_failures());
        summary.add("c", Outcome::Failed("broken".into()), Duration::ZERO);
        summary.restart("c", "hung");
        assert!(summary.has_failures());
        assert_eq!(summary.last_line(), "1 passed, 1 failed, 1 skipped");
        summary.add_passed(2);
        assert_eq!(summary.last_line(), "3 passed, 1 failed, 1 skipped");
    }
    #[test]
    fn what_was_recorded_beside_counts_too() {
        let mut summary = Summary::default();
        summary.add_passed(1);
        let mut beside = Summary::default();
        beside.add_passed(2);
        beside.add_silently("a", Outcome::Failed("broken".into()));
        beside.add_silently("b", Outcome::Skipped("no kvm".into()));
        beside.flaky("c", "passed at attempt 2");
        beside.flaky("d", "passed at attempt 2");
        summary.merge(beside);
        assert_eq!(summary.last_line(), "3 passed, 2 failed, 1 skipped");
    }

    #[test]
    fn the_closing_lines_have_what_a_process_printed_last() {
        let command = "x".repeat(500);
        let quoted = "    | b\n    | c\n    | d\n    | e\n    | f\n    | g";
        let reason = format!("not \"done\" from \"{command}\"\n    | a\n{quoted}");
        let short = with_output(&reason);
        assert!(short.starts_with("not \"done\" from \"xx"), "{short}");
        assert!(short.contains("xx ... xx"), "{short}");
        assert!(short.ends_with(&format!("xx\"\n{quoted}")), "{short}");
        assert_eq!(with_output("see the log"), "see the log");
    }

    #[test]
    fn one_flaky_scenario_is_listed_and_two_fail_the_run() {
        let mut summary = Summary::default();
        summary.add("boot", Outcome::Passed, Duration::ZERO);
        summary.restart("boot", "the emulator hung: host 1");
        summary.flaky("boot", "passed at attempt 2: the emulator hung: host 1");
        assert!(!summary.has_failures());
        let closing = summary.closing();
        let listed = "\nflaky:\n  boot: passed at attempt 2: the emulator hung: host 1\n";
        assert!(closing.contains(listed), "{closing}");
        assert!(
            closing.ends_with("\n1 passed, 0 failed, 0 skipped\n"),
            "{closing}"
        );

        summary.add("exec", Outcome::Passed, Duration::ZERO);
        summary.flaky("exec", "passed at attempt 3: the emulator hung: host 2");
        assert!(summary.has_failures());
        let closing = summary.closing();
        assert!(
            closing.contains("flaky scenarios: 2 passed only when repeated"),
            "{closing}"
        );
        assert!(closing.contains("boot, exec"), "{closing}");
        assert!(
            closing.ends_with("\n2 passed, 1 failed, 0 skipped\n"),
            "{closing}"
        );
    }
}
