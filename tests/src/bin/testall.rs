//! Runs every check of the project and ends with one summary.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Parser;
use kernel_images::programs;
use ssi_hv_tests::cargo::Step;
use ssi_hv_tests::cleanup;
use ssi_hv_tests::e2e::{Plan, Runner};
use ssi_hv_tests::licences;
use ssi_hv_tests::native;
use ssi_hv_tests::summary::{Outcome, Summary};
use ssi_hv_tests::test_binaries;

/// Runs every check: format, lints, licences of dependencies, unit and property tests, loom models, guests of a few
/// instructions under KVM, what needs the release build, and the end-to-end scenarios.
#[derive(Debug, Parser)]
#[command(version)]
struct Args {
    /// Leave the end-to-end scenarios out; each then counts as skipped.
    #[arg(long)]
    no_e2e: bool,

    /// Leave those scenarios out that have not begun by then, in seconds since 1970; each then counts as failed. For a
    /// job that is ended at its limit and would tell nothing else.
    #[arg(long, value_name = "SECONDS")]
    until: Option<u64>,
}

/// What comes first, in this order.
const STEPS: &[Step<'static>] = &[
    Step {
        name: "format",
        args: &["fmt", "--all", "--", "--check"],
        env: &[],
        runs_tests: false,
    },
    Step {
        name: "lints",
        args: &[
            "clippy",
            "--workspace",
            "--all-targets",
            "--",
            "-D",
            "warnings",
        ],
        env: &[],
        runs_tests: false,
    },
    Step {
        // Without RDMA and UDP; also with every warning denied.
        name: "minimal build",
        args: &[
            "clippy",
            "-p",
            "ssi-hv",
            "--no-default-features",
            "--lib",
            "--bins",
            "--",
            "-D",
            "warnings",
        ],
        env: &[],
        runs_tests: false,
    },
    Step {
        name: "doc tests",
        args: &["test", "--workspace", "--doc"],
        env: &[],
        runs_tests: true,
    },
    Step {
        // All interleavings of the page map's atomics; other flags, so another directory.
        name: "loom",
        args: &[
            "test",
            "--release",
            "-p",
            "fabric-pages",
            "--lib",
            "--target-dir",
            "target/loom",
            "loom",
            "--",
            "--show-output",
        ],
        env: &[("RUSTFLAGS", "--cfg loom")],
        runs_tests: true,
    },
];

/// Builds the tests, and says where they are.
const TEST_BUILD: Step<'static> = Step {
    name: "test build",
    args: &["test", "--workspace", "--no-run", "--message-format=json"],
    env: &[],
    runs_tests: false,
};

/// What the end-to-end scenarios run.
const BUILD: Step<'static> = Step {
    name: "release build",
    args: &[
        "build",
        "--release",
        "-p",
        "ssi-hv",
        "-p",
        "ssi-hv-tests",
        "--bins",
    ],
    env: &[],
    runs_tests: false,
};

fn main() -> ExitCode {
    let mut summary = Summary::default();
    let begin = Instant::now();
    if let Err(error) = run(&Args::parse(), &mut summary) {
        summary.add(
            "test run",
            Outcome::Failed(format!("{error:#}")),
            begin.elapsed(),
        );
    }
    println!("\n{:.0} seconds in all", begin.elapsed().as_secs_f64());
    summary.print();
    if summary.has_failures() {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    }
}

fn run(args: &Args, summary: &mut Summary) -> anyhow::Result<()> {
    cleanup::on_signals()?;
    let workspace = programs::workspace();
    let logs = workspace.join("target/test-logs");
    for step in STEPS {
        step.run(&workspace, &logs, summary)?;
    }
    licences::run(&workspace, &logs, summary)?;
    if TEST_BUILD.run(&workspace, &logs, summary)? {
        test_binaries::run(&TEST_BUILD.log(&logs), &logs, summary)?;
    }
    let built = BUILD.run(&workspace, &logs, summary)?;
    if built {
        native::run(&workspace, native::CHECKS, summary);
    } else {
        for check in native::CHECKS {
            let reason = Outcome::Skipped("ssi-hv was not built".into());
            summary.add(check.name, reason, Duration::ZERO);
        }
    }
    let reason = if args.no_e2e {
        Some("--no-e2e was given")
    } else {
        (!built).then_some("ssi-hv was not built")
    };
    if let Some(reason) = reason {
        for scenario in Plan::all().scenarios() {
            summary.add(
                scenario.name,
                Outcome::Skipped(reason.into()),
                Duration::ZERO,
            );
        }
        return Ok(());
    }
    let plan = Plan::all();
    let runner = Runner::prepare(&workspace, None, &plan)?;
    runner.until(args.until).run(&plan, summary);
    Ok(())
}
