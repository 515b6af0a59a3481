//! Measures the cost of remote memory, and compares it with the alternatives.

use std::process::ExitCode;

use clap::Parser;
use kernel_images::programs;
use ssi_hv_tests::bench::{self, Parts};
use ssi_hv_tests::cleanup;

/// Measures, prints a table, and writes target/bench/report.json.
#[derive(Debug, Parser)]
#[command(version)]
struct Arguments {
    /// Only the native measurements; nothing in the testbed.
    #[arg(long)]
    native: bool,
    /// Only the comparisons with swap and with post-copy migration, in the testbed.
    #[arg(long, conflicts_with = "native")]
    swap: bool,
    /// How often each side of these comparisons runs.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u8).range(1..=9))]
    rounds: u8,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let parts = match (arguments.native, arguments.swap) {
        (true, _) => Parts::Native,
        (_, true) => Parts::Swap,
        _ => Parts::All,
    };
    let result = cleanup::on_signals()
        .map_err(Into::into)
        .and_then(|()| bench::run(&programs::workspace(), parts, arguments.rounds.into()));
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}
