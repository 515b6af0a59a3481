//! Boots a stock kernel in a guest whose memory is on two hosts, and measures faults.

use std::process::ExitCode;

use clap::Parser;
use kernel_images::programs;
use ssi_hv_tests::{cleanup, demo};

/// Boots a stock kernel in a guest whose memory is on two hosts, and measures its faults.
#[derive(Debug, Parser)]
struct Arguments {
    /// How pages travel: `tcp`, `rdma` or `auto`. With the latter two, emulated hosts get software
    /// RDMA first (SoftRoCE) [default: what `ssi-hv run` does by itself, without it].
    #[arg(long)]
    transport: Option<demo::Transport>,
}

fn main() -> ExitCode {
    let transport = Arguments::parse().transport;
    let result = cleanup::on_signals()
        .map_err(Into::into)
        .and_then(|()| demo::run(&programs::workspace(), transport));
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("demo: {error:#}");
            ExitCode::FAILURE
        }
    }
}
