//! Many RDMA connections at once, and RDMA that goes wrong, tried with the product's fabric and
//! without a guest. See `ssi_hv_tests::rdma_tool`.

use std::process::ExitCode;

use clap::Parser;
use ssi_hv_tests::rdma_tool::{conform, many, spoil, walk};

/// Tries RDMA connections to a donor (`ssi-hv node`).
#[derive(Debug, Parser)]
enum Command {
    /// Runs the suite of all transports over RDMA, to a donor in this process
    Conform(conform::Arguments),
    /// Opens many connections at once, reads by each, and asks for one more
    Many(many::Arguments),
    /// Falsifies what the two ends tell each other, and shows what comes of it
    Spoil(spoil::Arguments),
    /// Touches memory that is on the donor until it is told to stop
    Walk(walk::Arguments),
}

fn main() -> ExitCode {
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .without_time()
        .init();
    let done = match Command::parse() {
        Command::Conform(arguments) => {
            conform::run(&arguments);
            Ok(())
        }
        Command::Many(arguments) => many::run(&arguments),
        Command::Spoil(arguments) => spoil::run(&arguments),
        Command::Walk(arguments) => walk::run(&arguments),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("rdma-faults: {error:#}");
            ExitCode::FAILURE
        }
    }
}
