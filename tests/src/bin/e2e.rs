//! Runs the end-to-end scenarios on testbeds of two hosts.

use std::process::ExitCode;

use clap::Parser;
use kernel_images::programs;
use ssi_hv_tests::cleanup;
use ssi_hv_tests::e2e::{Plan, Runner};
use ssi_hv_tests::summary::Summary;

/// End-to-end tests on emulated hosts.
#[derive(Debug, Parser)]
#[command(version)]
struct Args {
    /// Run scenarios whose names contain one of these; all but the longest, if none is given.
    names: Vec<String>,
    /// List the scenarios and run none.
    #[arg(long)]
    list: bool,
    /// How many testbeds work side by side, 1 to 4 [default: as many as CPUs and memory carry].
    #[arg(long, value_parser = clap::value_parser!(u8).range(1..=4))]
    beds: Option<u8>,
}

fn main() -> ExitCode {
    let args = Args::parse();
    let mut chosen = Plan::all();
    if !args.names.is_empty() {
        chosen = chosen.named(&args.names);
    }
    if args.list {
        for scenario in chosen.scenarios() {
            println!("{:<24} {}", scenario.name, scenario.about);
        }
        return ExitCode::SUCCESS;
    }
    if chosen.scenarios().next().is_none() {
        eprintln!(
            "e2e: no scenario is called {}: see --list",
            args.names.join(" or ")
        );
        return ExitCode::from(2);
    }
    let mut summary = Summary::default();
    match cleanup::on_signals()
        .map_err(Into::into)
        .and_then(|()| Runner::prepare(&programs::workspace(), args.beds.map(usize::from), &chosen))
    {
        Ok(runner) => runner.run(&chosen, &mut summary),
        Err(error) => {
            eprintln!("e2e: {error:#}");
            return ExitCode::from(2);
        }
    }
    summary.print();
    if summary.has_failures() {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    }
}
