//! Checks dependencies against `deny.toml` with cargo-deny, which is built once into
//! `target/tools`.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;

use crate::cargo::Step;
use crate::summary::{Outcome, Summary};

/// Version of cargo-deny that `deny.toml` is written for.
const VERSION: &str = "0.20.2";
/// Installation directory.
const ROOT: &str = "target/tools/cargo-deny";
/// Build directory; removed afterwards.
const BUILD: &str = "target/tools/cargo-deny-build";
/// The check that needs a database of known vulnerabilities.
const ADVISORIES: &str = "advisories";

/// Checks licences, duplicates and sources of all dependencies. Checks known vulnerabilities only
/// if their database exists on this machine: it is never fetched.
///
/// # Errors
/// Fails when cargo cannot be started.
pub fn run(workspace: &Path, logs: &Path, summary: &mut Summary) -> anyhow::Result<()> {
    if !is_installed(&workspace.join(ROOT)) && !install(workspace, logs, summary)? {
        return Ok(());
    }
    let programs = workspace.join(ROOT).join("bin");
    let path = std::env::var_os("PATH").unwrap_or_default();
    let path = std::env::join_paths(std::iter::once(programs).chain(std::env::split_paths(&path)))?;
    let path = path.to_str().context("PATH is not UTF-8")?;
    let mut check = |name, args| {
        let step = Step {
            name,
            args,
            env: &[("PATH", path)],
            runs_tests: false,
        };
        step.run(workspace, logs, summary)
    };
    check(
        "licences and sources",
        &["deny", "check", "licenses", "bans", "sources"],
    )?;
    match missing_database(cargo_home().as_deref()) {
        None => {
            check(
                ADVISORIES,
                &["deny", "check", "--disable-fetch", "advisories"],
            )?;
        }
        Some(reason) => summary.add(ADVISORIES, Outcome::Skipped(reason), Duration::ZERO),
    }
    Ok(())
}

/// Returns whether the required version is installed in `root`.
fn is_installed(root: &Path) -> bool {
    // `cargo install` writes this record after the program.
    let record = std::fs::read_to_string(root.join(".crates.toml")).unwrap_or_default();
    record.contains(&format!("\"cargo-deny {VERSION} ")) && root.join("bin/cargo-deny").is_file()
}

/// Builds cargo-deny without optimization and debug information, since it runs for seconds and
/// should not take minutes to build. Returns whether that succeeded.
fn install(workspace: &Path, logs: &Path, summary: &mut Summary) -> anyhow::Result<bool> {
    let step = Step {
        name: "cargo-deny build",
        args: &[
            "install",
            "cargo-deny",
            "--version",
            VERSION,
            "--locked",
            "--debug",
            "--root",
            ROOT,
            "--target-dir",
            BUILD,
        ],
        env: &[
            ("CARGO_PROFILE_DEV_OPT_LEVEL", "0"),
            ("CARGO_PROFILE_DEV_DEBUG", "0"),
        ],
        runs_tests: false,
    };
    let installed = step.run(workspace, logs, summary)?;
    // Several hundred megabytes that are not needed again.
    let _ = std::fs::remove_dir_all(workspace.join(BUILD));
    Ok(installed)
}

/// Returns cargo's home directory, which holds its downloads.
fn cargo_home() -> Option<PathBuf> {
    let set = std::env::var_os("CARGO_HOME").map(PathBuf::from);
    set.or_else(|| Some(std::env::home_dir()?.join(".cargo")))
}

/// Returns why vulnerabilities cannot be checked.
fn missing_database(cargo_home: Option<&Path>) -> Option<String> {
    let databases = cargo_home?.join("advisory-dbs");
    let found = std::fs::read_dir(&databases).is_ok_and(|mut entries| entries.next().is_some());
    (!found).then(|| {
        format!(
            "no advisory database in {}: fetch it with `cargo deny fetch` where there is a network",
            databases.display()
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_pinned_version_counts_as_installed() {
        let root = tempfile::tempdir().unwrap();
        let record = |version: &str| {
            let text = format!("[v1]\n\"cargo-deny {version} (registry)\" = [\"cargo-deny\"]\n");
            std::fs::write(root.path().join(".crates.toml"), text).unwrap();
        };
        assert!(!is_installed(root.path()));
        record(VERSION);
        assert!(!is_installed(root.path()), "there is no program");
        std::fs::create_dir(root.path().join("bin")).unwrap();
        std::fs::write(root.path().join("bin/cargo-deny"), "").unwrap();
        assert!(is_installed(root.path()));
        record("0.1.0");
        assert!(!is_installed(root.path()));
    }

    #[test]
    fn without_a_database_the_reason_says_how_to_fetch_it() {
        let home = tempfile::tempdir().unwrap();
        let reason = missing_database(Some(home.path())).unwrap();
        assert!(reason.contains("cargo deny fetch"), "{reason}");
        std::fs::create_dir_all(home.path().join("advisory-dbs/one")).unwrap();
        assert_eq!(missing_database(Some(home.path())), None);
    }
}
