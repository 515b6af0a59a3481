//! Runs the end-to-end scenarios on one testbed of two hosts.

use std::process::ExitCode;

use clap::Parser;
use kernel_images::programs;
use ssi_hv_tests::cleanup;
use ssi_hv_tests::e2e::{self, Runner};
use ssi_hv_tests::summary::Summary;

/// End-to-end tests on emulated hosts.
#[derive(Debug, Parser)]
#[command(version)]
struct Args {
    /// Run scenarios whose names contain one of these; all, if none is given.
    names: Vec<String>,
    /// List the scenarios and run none.
    #[arg(long)]
    list: bool,
}

fn main() -> ExitCode {
    let args = Args::parse();
    let chosen: Vec<_> = e2e::scenarios()
        .into_iter()
        .filter(|s| args.names.is_empty() || args.names.iter().any(|n| s.name.contains(n.as_str())))
        .collect();
    if args.list {
        for scenario in &chosen {
            println!("{:<24} {}", scenario.name, scenario.about);
        }
        return ExitCode::SUCCESS;
    }
    if chosen.is_empty() {
        eprintln!(
            "e2e: no scenario is called {}: see --list",
            args.names.join(" or ")
        );
        return ExitCode::from(2);
    }
    let mut summary = Summary::default();
    match cleanup::on_signals()
        .map_err(Into::into)
        .and_then(|()| Runner::prepare(&programs::workspace()))
    {
        Ok(mut runner) => {
            for scenario in &chosen {
                runner.run(scenario, &mut summary);
            }
        }
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
