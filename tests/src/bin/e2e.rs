//! Runs the end-to-end scenarios on emulated hosts, and the checks that need none.

use std::process::ExitCode;

use clap::Parser;
use kernel_images::programs;
use ssi_hv_tests::cleanup;
use ssi_hv_tests::e2e::{Plan, Runner};
use ssi_hv_tests::native::{self, Check};
use ssi_hv_tests::summary::Summary;

/// End-to-end tests on emulated hosts, and checks of the release build on this one.
#[derive(Debug, Parser)]
#[command(version)]
struct Args {
    /// Run scenarios whose names contain one of these [default: all except the longest].
    names: Vec<String>,
    /// List the scenarios and run none.
    #[arg(long)]
    list: bool,
    /// How many testbeds run in parallel, 1 to 4 [default: as many as CPUs and memory allow].
    #[arg(long, value_parser = clap::value_parser!(u8).range(1..=4))]
    beds: Option<u8>,
    /// Start no scenario after this time, in seconds since 1970. An essential one that was not reached
    /// counts as failed, another as skipped; which come first changes from day to day.
    #[arg(long, value_name = "SECONDS")]
    until: Option<u64>,
}

fn main() -> ExitCode {
    let args = Args::parse();
    let is_unknown = |name: &&String| {
        let name = std::slice::from_ref(*name);
        Plan::all().named(name).scenarios().next().is_none() && native::named(name).is_empty()
    };
    if let Some(name) = args.names.iter().find(is_unknown) {
        eprintln!("e2e: no scenario is called {name}: see --list");
        return ExitCode::from(2);
    }
    let mut chosen = Plan::all();
    if !args.names.is_empty() {
        chosen = chosen.named(&args.names);
    }
    let native = native::named(&args.names);
    if args.list {
        for check in &native {
            println!("{:<24} {}", check.name, check.about);
        }
        for scenario in chosen.scenarios() {
            println!("{:<24} {}", scenario.name, scenario.about);
        }
        return ExitCode::SUCCESS;
    }
    let needs_beds = chosen.scenarios().next().is_some();
    let mut summary = Summary::default();
    if let Err(error) = run(&chosen, &native, needs_beds, &args, &mut summary) {
        eprintln!("e2e: {error:#}");
        return ExitCode::from(2);
    }
    summary.print();
    if summary.has_failures() {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    }
}

fn run(
    chosen: &Plan,
    native: &[Check],
    needs_beds: bool,
    args: &Args,
    summary: &mut Summary,
) -> anyhow::Result<()> {
    cleanup::on_signals()?;
    let workspace = programs::workspace();
    native::run(&workspace, native, summary);
    if needs_beds {
        let runner = Runner::prepare(&workspace, args.beds.map(usize::from), chosen)?;
        runner.until(args.until).run(chosen, summary);
    }
    Ok(())
}
