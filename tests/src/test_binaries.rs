//! Runs the test binaries that cargo built, several at a time, since many of them mostly wait.
//!
//! A crate's integration tests are one binary. The tests of each of its modules run in a separate
//! process, as those of separate binaries would: some inspect their process, such as its memory,
//! some measure time, and an abort must not affect the others.

use std::collections::{BTreeMap, VecDeque};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use serde_json::Value;

use crate::cargo::{Tests, show_end};
use crate::cleanup::{self, Process};
use crate::summary::{Outcome, Summary};

/// Deadline of one binary.
const DEADLINE: Duration = Duration::from_secs(10 * 60);
/// Binaries and modules whose tests measure time or have short timeouts: they run alone.
const ALONE: &[&str] = &["compression_pays", "bench", "links", "udp", "conformance"];
/// Long ones start first, so that none remains at the end.
const LONG: &[&str] = &[
    "race_ahead",
    "faults",
    "discard",
    "hostile_client",
    "survivors",
];
/// Modules that observe processes for a minute: they run in addition to the others, since they use
/// little CPU time.
const BESIDE: &[&str] = &["prometheus"];
/// How many of the others run in parallel.
const AT_ONCE: usize = 3;

/// Deadline for a binary to list its tests.
const LIST_DEADLINE: Duration = Duration::from_secs(60);

/// A test binary, or one module of it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct TestBinary {
    /// Name of the target, or of the module.
    name: String,
    path: PathBuf,
    /// Directory of its package, in which cargo runs tests too.
    package: PathBuf,
    /// Whether these are integration tests, which run module by module.
    is_integration: bool,
    /// The tests to run; all of the binary if empty.
    only: Vec<String>,
}

impl TestBinary {
    /// Parses the output of `cargo test --no-run --message-format=json`.
    fn listed(text: &str) -> anyhow::Result<Vec<Self>> {
        let mut binaries = Vec::new();
        for line in text.lines().filter(|line| line.starts_with('{')) {
            let message: Value = serde_json::from_str(line).context("cargo's output")?;
            let path = message["executable"].as_str();
            let (true, Some(path)) = (message["profile"]["test"] == true, path) else {
                continue;
            };
            let manifest = message["manifest_path"].as_str().unwrap_or_default();
            let package = Path::new(manifest).parent();
            binaries.push(Self {
                name: message["target"]["name"]
                    .as_str()
                    .context("a target without a name")?
                    .to_owned(),
                path: path.into(),
                package: package.context("a target without a package")?.into(),
                is_integration: message["target"]["kind"][0] == "test",
                only: Vec::new(),
            });
        }
        if binaries.is_empty() {
            bail!("cargo listed no test binary");
        }
        Ok(binaries)
    }

    /// Splits integration tests into their modules; tests outside of modules keep the target's
    /// name.
    fn modules(self, logs: &Path) -> anyhow::Result<Vec<Self>> {
        if !self.is_integration {
            return Ok(vec![self]);
        }
        let mut modules = BTreeMap::<String, Vec<String>>::new();
        for test in self.tests(logs)? {
            let module = test
                .split_once("::")
                .map_or(&*self.name, |(first, _)| first);
            modules.entry(module.to_owned()).or_default().push(test);
        }
        let modules = modules.into_iter().map(|(name, only)| Self {
            name,
            only,
            ..self.clone()
        });
        Ok(modules.collect())
    }

    /// Returns the names of its tests.
    fn tests(&self, logs: &Path) -> anyhow::Result<Vec<String>> {
        let log = logs.join(format!("{}.list", self.file()));
        let output = File::create(&log).with_context(|| log.display().to_string())?;
        let mut command = self.command();
        command.args(["--list", "--format", "terse"]).stdout(output);
        let process = Process::spawn(&mut command).with_context(|| self.name.clone())?;
        let status = process.wait_until(cleanup::after(LIST_DEADLINE))?;
        if !status.is_some_and(|status| status.success()) {
            bail!(
                "{} does not list its tests: {status:?}",
                self.path.display()
            );
        }
        let listed = std::fs::read_to_string(&log)?;
        let names = listed
            .lines()
            .filter_map(|line| line.strip_suffix(": test"));
        Ok(names.map(str::to_owned).collect())
    }

    /// Returns why a process that succeeded has not run all requested tests: the harness ignores
    /// unknown test names.
    fn why_incomplete(&self, printed: &str) -> Option<String> {
        let is_result = |line: &&str| line.starts_with("test ") && line.contains(" ... ");
        let ran = printed.lines().filter(is_result).count();
        let asked = self.only.len();
        (ran < asked).then(|| format!("ran {ran} of {asked} tests"))
    }

    /// Returns its file name, which is unique, unlike the name of the target.
    fn file(&self) -> String {
        let file = self.path.file_name().unwrap_or_default();
        file.to_string_lossy().into_owned()
    }

    /// Returns the command with which cargo would run it.
    fn command(&self) -> Command {
        let mut command = Command::new(&self.path);
        command
            .env("CARGO_MANIFEST_DIR", &self.package)
            .current_dir(&self.package)
            .stdin(Stdio::null());
        command
    }

    /// Runs it to its end.
    fn run(&self, logs: &Path) -> anyhow::Result<Ended> {
        let log = if self.only.is_empty() {
            logs.join(format!("{}.log", self.file()))
        } else {
            logs.join(format!("{}-{}.log", self.file(), self.name))
        };
        let output = File::create(&log).with_context(|| log.display().to_string())?;
        let mut command = self.command();
        command.arg("--show-output");
        if !self.only.is_empty() {
            command.arg("--exact").args(&self.only);
        }
        command.stdout(output.try_clone()?).stderr(output);
        let process = Process::spawn(&mut command).with_context(|| self.name.clone())?;
        let status = process.wait_until(cleanup::after(DEADLINE))?;
        drop(process);
        let text = String::from_utf8_lossy(&std::fs::read(&log)?).into_owned();
        let tests = Tests::parse(&text);
        let wrong = match status {
            Some(status) if status.success() => self.why_incomplete(&text),
            Some(status) => Some(status.to_string()),
            None => Some(format!("not within {} minutes", DEADLINE.as_secs() / 60)),
        };
        let wrong = wrong.map(|wrong| {
            show_end(&text);
            let last = text.lines().rfind(|line| !line.trim().is_empty());
            format!("{wrong}, after `{}`", last.unwrap_or_default())
        });
        Ok(Ended { tests, wrong, log })
    }
}

/// Result of one binary.
#[derive(Debug)]
struct Ended {
    tests: Tests,
    /// Why the process itself failed.
    wrong: Option<String>,
    log: PathBuf,
}

/// Runs all binaries that the build log lists, and counts their tests.
///
/// # Errors
/// Fails when the log cannot be read, or a binary cannot be started.
pub fn run(build_log: &Path, logs: &Path, summary: &mut Summary) -> anyhow::Result<()> {
    let begin = Instant::now();
    let text = std::fs::read(build_log).with_context(|| build_log.display().to_string())?;
    let listed = TestBinary::listed(&String::from_utf8_lossy(&text))?;
    println!("{:<36} running  {} binaries", "tests", listed.len());
    let mut binaries = Vec::new();
    for binary in listed {
        binaries.extend(binary.modules(logs)?);
    }
    let is_in =
        |names: &'static [&str]| move |binary: &TestBinary| names.contains(&binary.name.as_str());
    let (alone, rest): (Vec<_>, Vec<_>) = binaries.into_iter().partition(is_in(ALONE));
    let (beside, mut together): (Vec<_>, Vec<_>) = rest.into_iter().partition(is_in(BESIDE));
    let rank = |binary: &TestBinary| {
        let place = LONG.iter().position(|name| *name == binary.name);
        place.unwrap_or(LONG.len())
    };
    together.sort_by_key(rank);
    let mut ended = run_all(alone, 1, logs)?;
    let (beside, together) = std::thread::scope(|scope| {
        let beside = scope.spawn(|| run_all(beside, 1, logs));
        let together = run_all(together, AT_ONCE, logs);
        (beside.join(), together)
    });
    let Ok(beside) = beside else {
        bail!("a thread that runs tests panicked")
    };
    ended.extend(together?);
    ended.extend(beside?);

    let count = |of: fn(&Tests) -> usize| ended.iter().map(|(_, e)| of(&e.tests)).sum::<usize>();
    println!(
        "{:<36} {} passed, {} failed, {} skipped in {:.0}s",
        "tests",
        count(|tests| tests.passed),
        count(|tests| tests.failed.len()),
        count(|tests| tests.skipped.len()),
        begin.elapsed().as_secs_f64()
    );
    let fuzzed: u64 = ended.iter().map(|(_, ended)| ended.tests.fuzzed).sum();
    if fuzzed > 0 {
        println!("{:<36} {fuzzed} executions of fuzz targets", "tests");
    }
    for (binary, ended) in ended {
        let log = ended.log.display().to_string();
        if let (Some(wrong), true) = (&ended.wrong, ended.tests.failed.is_empty()) {
            // The process failed outside of its tests.
            summary.add_silently(&binary, Outcome::Failed(format!("{wrong}; see {log}")));
        }
        ended.tests.add_to(summary, &log);
    }
    Ok(())
}

/// Runs all binaries, this many in parallel.
fn run_all(
    binaries: Vec<TestBinary>,
    at_once: usize,
    logs: &Path,
) -> anyhow::Result<Vec<(String, Ended)>> {
    fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
        mutex.lock().unwrap_or_else(PoisonError::into_inner)
    }
    let queue = Mutex::new(VecDeque::from(binaries));
    let ended = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        let work = || -> anyhow::Result<()> {
            loop {
                let Some(binary) = lock(&queue).pop_front() else {
                    return Ok(());
                };
                let result = binary.run(logs)?;
                lock(&ended).push((binary.name, result));
            }
        };
        let threads: Vec<_> = (0..at_once).map(|_| scope.spawn(work)).collect();
        threads
            .into_iter()
            .try_for_each(|thread| match thread.join() {
                Ok(result) => result,
                Err(_) => bail!("a thread that runs tests panicked"),
            })
    })?;
    Ok(ended.into_inner().unwrap_or_else(PoisonError::into_inner))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn script(dir: &Path, name: &str, text: &str) -> TestBinary {
        use std::os::unix::fs::PermissionsExt as _;
        let path = dir.join(name);
        std::fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        TestBinary {
            name: name.to_owned(),
            path,
            package: dir.to_owned(),
            is_integration: false,
            only: Vec::new(),
        }
    }

    #[test]
    fn executables_with_tests_are_found_in_what_cargo_prints() {
        let text = r#"   Compiling a v0.1.0
{"reason":"compiler-artifact","manifest_path":"/w/a/Cargo.toml","target":{"name":"a","kind":["test"]},"profile":{"test":true},"executable":"/t/a-1"}
{"reason":"compiler-artifact","manifest_path":"/w/a/Cargo.toml","target":{"name":"b"},"profile":{"test":false},"executable":"/t/b"}
{"reason":"compiler-artifact","manifest_path":"/w/a/Cargo.toml","target":{"name":"c"},"profile":{"test":true},"executable":null}
{"reason":"build-finished","success":true}
"#;
        let expected = TestBinary {
            name: "a".into(),
            path: "/t/a-1".into(),
            package: "/w/a".into(),
            is_integration: true,
            only: Vec::new(),
        };
        assert_eq!(TestBinary::listed(text).unwrap(), [expected]);
        assert!(TestBinary::listed("   Finished\n").is_err());
    }

    #[test]
    fn a_binary_that_breaks_between_its_tests_is_a_failure() {
        let dir = tempfile::tempdir().unwrap();
        let binaries = vec![
            script(dir.path(), "good", "echo test a ... ok; pwd"),
            script(dir.path(), "broken", "echo test b ... ok; exit 3"),
        ];
        let mut ended = run_all(binaries, AT_ONCE, dir.path()).unwrap();
        ended.sort_by(|(one, _), (other, _)| one.cmp(other));
        let [(_, broken), (_, good)] = &ended[..] else {
            panic!("{ended:?}")
        };
        assert_eq!((broken.tests.passed, good.tests.passed), (1, 1));
        let why = "exit status: 3, after `test b ... ok`";
        assert_eq!(broken.wrong.as_deref(), Some(why));
        assert_eq!(good.wrong, None);
        let log = std::fs::read_to_string(&good.log).unwrap();
        let here = dir.path().canonicalize().unwrap();
        assert!(log.contains(&here.display().to_string()), "{log}");
    }

    /// Lists three tests in two modules and one outside of them; prints a result for each requested
    /// name.
    const HARNESS: &str = r#"
if [ "$1" = --list ]; then
    printf '%s: test\n' one::a one::deep::b two::c d
    exit 0
fi
shift 2
echo "$$"
for name; do echo "test $name ... ok"; done"#;

    #[test]
    fn integration_tests_run_module_by_module_in_processes_of_their_own() {
        let dir = tempfile::tempdir().unwrap();
        let whole = TestBinary {
            is_integration: true,
            ..script(dir.path(), "integration", HARNESS)
        };
        let modules = whole.modules(dir.path()).unwrap();
        let names: Vec<_> = modules.iter().map(|one| one.name.as_str()).collect();
        assert_eq!(names, ["integration", "one", "two"]);
        assert_eq!(modules[1].only, ["one::a", "one::deep::b"]);
        let ended = run_all(modules, AT_ONCE, dir.path()).unwrap();
        let passed: usize = ended.iter().map(|(_, one)| one.tests.passed).sum();
        assert_eq!(passed, 4);
        let process = |(_, one): &(String, Ended)| {
            let log = std::fs::read_to_string(&one.log).unwrap();
            log.lines().next().unwrap().to_owned()
        };
        let processes: BTreeSet<_> = ended.iter().map(process).collect();
        assert_eq!(processes.len(), 3, "{ended:?}");
        assert!(
            ended.iter().all(|(_, one)| one.wrong.is_none()),
            "{ended:?}"
        );
    }

    #[test]
    fn tests_that_do_not_run_although_they_were_listed_are_a_failure() {
        let dir = tempfile::tempdir().unwrap();
        let text = "if [ \"$1\" = --list ]; then echo 'one::a: test'; fi";
        let binary = TestBinary {
            is_integration: true,
            ..script(dir.path(), "silent", text)
        };
        let ended = run_all(binary.modules(dir.path()).unwrap(), 1, dir.path()).unwrap();
        assert_eq!(
            ended[0].1.wrong.as_deref(),
            Some("ran 0 of 1 tests, after ``")
        );
    }
}
