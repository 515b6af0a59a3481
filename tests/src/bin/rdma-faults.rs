//! Tests many simultaneous RDMA connections, and RDMA failures, with the product's fabric and
//! without a guest. See `ssi_hv_tests::rdma_tool`.

use std::process::ExitCode;

use clap::Parser;
use ssi_hv_tests::rdma_tool::{capture, conform, many, spoil, walk};

/// Tests RDMA connections to a donor (`ssi-hv node`).
#[derive(Debug, Parser)]
enum Command {
    /// Captures what passes the network of this host, and counts packets with a text or a token
    Capture(capture::Arguments),
    /// Runs the conformance suite of all transports over RDMA, with a donor in this process
    Conform(conform::Arguments),
    /// Opens many connections at once, reads over each, and requests one beyond the limit
    Many(many::Arguments),
    /// Falsifies the connection parameters that the two ends exchange, and reports the result
    Spoil(spoil::Arguments),
    /// Accesses memory on the donor until a signal stops it
    Walk(walk::Arguments),
}

fn main() -> ExitCode {
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .without_time()
        .init();
    let done = match Command::parse() {
        Command::Capture(arguments) => capture::run(&arguments),
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
