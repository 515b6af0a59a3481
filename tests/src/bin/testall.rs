//! Runs every check of the project and prints one summary.

use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant, SystemTime};

use anyhow::bail;
use clap::Parser;
use kernel_images::{ImageCache, programs, root};
use ssi_hv_tests::cargo::Step;
use ssi_hv_tests::cleanup;
use ssi_hv_tests::e2e::{Plan, Runner};
use ssi_hv_tests::licences;
use ssi_hv_tests::native;
use ssi_hv_tests::processor::Machine;
use ssi_hv_tests::summary::{Outcome, Summary};
use ssi_hv_tests::test_binaries;
use ssi_hv_tests::testbed::{HostImage, HostKernel};

/// Runs every check: format, lints, licences of dependencies, unit and property tests, loom models,
/// tiny guests under KVM, checks of the release build, and the end-to-end scenarios.
#[derive(Debug, Parser)]
#[command(version)]
struct Args {
    /// Skip the end-to-end scenarios; each counts as skipped.
    #[arg(long)]
    no_e2e: bool,

    /// Start no scenario after this time, in seconds since 1970. An essential one that was not reached
    /// counts as failed, another as skipped; which come first changes from day to day. Use it in
    /// jobs with a time limit, which would otherwise end without results.
    #[arg(long, value_name = "SECONDS")]
    until: Option<u64>,

    /// Also runs what takes minutes: a million simulations of the coherence protocol, and
    /// explorations of larger worlds.
    #[arg(long)]
    long: bool,
}

const SECONDS_PER_DAY: u64 = 24 * 60 * 60;

/// Steps that need no build of the product, in this order. Steps of the same profile cannot run at
/// the same time, because they lock its build directory.
const CHECKS: &[Step<'static>] = &[
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
        // Without RDMA and UDP; also with warnings denied.
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
];

/// Builds the tests and prints the paths of their executables.
const TEST_BUILD: Step<'static> = Step {
    name: "test build",
    args: &["test", "--workspace", "--no-run", "--message-format=json"],
    env: &[],
    runs_tests: false,
};

/// Runs after the test build, which has compiled everything that doc tests link.
const DOC_TESTS: Step<'static> = Step {
    name: "doc tests",
    args: &["test", "--workspace", "--doc"],
    env: &[],
    runs_tests: true,
};

/// Builds what the end-to-end scenarios run.
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

/// Tests all interleavings of the page map's atomics. It has a build directory of its own because
/// its flags differ.
const LOOM: Step<'static> = Step {
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
};

/// What takes too long for every run. In release, because the simulated worlds are many.
const LONG: Step<'static> = Step {
    name: "long simulations",
    args: &[
        "test",
        "--release",
        "-p",
        "fabric-coherence",
        "-p",
        "fabric-peers",
        "-p",
        "fabric-sharing",
        "-p",
        "ssi-hv-machine",
        "-p",
        "ssi-hv",
        "--lib",
        "--test",
        "native",
        "--test",
        "nodes",
        "--test",
        "integration",
        "--target-dir",
        "target/long",
        "--",
        "--ignored",
        "--show-output",
    ],
    env: &[],
    runs_tests: true,
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

/// Prints how busy the machine's CPUs were since the last call: what is idle can run in parallel.
fn print_busy(stage: &str, since: &mut Machine) -> anyhow::Result<()> {
    let now = Machine::now()?;
    let percent = 100.0 * now.busy_since(*since);
    println!("{stage:<36} kept the CPUs {percent:.0}% busy");
    *since = now;
    Ok(())
}

/// Results of the builds.
#[derive(Clone, Copy, Debug, Default)]
struct Built {
    tests: bool,
    product: bool,
}

/// Runs all compilation steps in parallel: the end of a build uses only one CPU, and preparing
/// images mostly waits for I/O. No test that measures time runs meanwhile.
fn build(
    args: &Args,
    workspace: &Path,
    logs: &Path,
    summary: &mut Summary,
) -> anyhow::Result<Built> {
    let mut built = Built::default();
    let mut beside = Summary::default();
    let (checks, product) = std::thread::scope(|scope| {
        scope.spawn(|| prepare_images(args, workspace));
        let product = scope.spawn(|| {
            let product = BUILD.run(workspace, logs, &mut beside)?;
            LOOM.run(workspace, logs, &mut beside)?;
            licences::run(workspace, logs, &mut beside)?;
            anyhow::Ok(product)
        });
        let mut checks = || {
            for step in CHECKS {
                step.run(workspace, logs, summary)?;
            }
            let tests = TEST_BUILD.run(workspace, logs, summary)?;
            DOC_TESTS.run(workspace, logs, summary)?;
            anyhow::Ok(tests)
        };
        (checks(), product.join())
    });
    summary.merge(beside);
    built.tests = checks?;
    built.product = match product {
        Ok(product) => product?,
        Err(_) => bail!("a thread that builds panicked"),
    };
    Ok(built)
}

/// Prepares the images that checks and scenarios boot. Errors are reported by the check that needs
/// the image.
fn prepare_images(args: &Args, workspace: &Path) {
    let begin = Instant::now();
    let kernels = [HostKernel::Linux6_1, HostKernel::Linux6_12];
    let hosts =
        !args.no_e2e && kernels.map(|one| HostImage::prepare(workspace, one).is_ok()) == [true; 2];
    let images = workspace.join("target/images");
    let debian = ImageCache::open(&images).and_then(|cache| root::ensure(&cache));
    let state = |is_there| if is_there { "ready" } else { "not there" };
    println!(
        "{:<36} hosts {}, bare Debian {} in {:.0}s",
        "images",
        state(hosts),
        state(debian.is_ok()),
        begin.elapsed().as_secs_f64()
    );
}

fn run(args: &Args, summary: &mut Summary) -> anyhow::Result<()> {
    cleanup::on_signals()?;
    let workspace = programs::workspace();
    let logs = workspace.join("target/test-logs");
    let mut since = Machine::now()?;
    let built = build(args, &workspace, &logs, summary)?;
    print_busy("builds", &mut since)?;
    if built.tests {
        test_binaries::run(&TEST_BUILD.log(&logs), &logs, summary)?;
        print_busy("tests", &mut since)?;
    }
    if args.long {
        LONG.run(&workspace, &logs, summary)?;
    }
    if built.product {
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
        (!built.product).then_some("ssi-hv was not built")
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
    let mut plan = Plan::all();
    if args.until.is_some() {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?;
        plan = plan.rotated(now.as_secs() / SECONDS_PER_DAY);
    }
    let runner = Runner::prepare(&workspace, None, &plan)?;
    since = Machine::now()?;
    runner.until(args.until).run(&plan, summary);
    print_busy("scenarios", &mut since)
}
