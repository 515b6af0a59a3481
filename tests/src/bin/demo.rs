//! Boots a stock kernel in a guest whose memory is on two hosts, and measures faults.

use std::process::ExitCode;

use kernel_images::programs;
use ssi_hv_tests::{cleanup, demo};

fn main() -> ExitCode {
    let result = cleanup::on_signals()
        .map_err(Into::into)
        .and_then(|()| demo::run(&programs::workspace()));
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("demo: {error:#}");
            ExitCode::FAILURE
        }
    }
}
