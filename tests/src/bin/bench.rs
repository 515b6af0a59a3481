//! Measures what remote memory costs, here and beside what else one could take.

use std::process::ExitCode;

use clap::Parser;
use kernel_images::programs;
use ssi_hv_tests::{bench, cleanup};

/// Measures, prints a table, and leaves target/bench/report.json.
#[derive(Debug, Parser)]
#[command(version)]
struct Arguments {
    /// Only what runs on this machine as it is; nothing in the testbed.
    #[arg(long)]
    native: bool,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let result = cleanup::on_signals()
        .map_err(Into::into)
        .and_then(|()| bench::run(&programs::workspace(), arguments.native));
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}
