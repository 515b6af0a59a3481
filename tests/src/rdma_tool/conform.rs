//! The conformance suite of all transports, over RDMA.

use std::net::IpAddr;

use clap::Args;
use fabric_test_support::conformance::remote;

/// Arguments of the suite.
#[derive(Debug, Args)]
pub struct Arguments {
    /// An address of this host that has an RDMA device; donor and VM both run here
    here: IpAddr,
}

/// Runs every case and prints its duration. A failing case panics, which ends the process.
pub fn run(arguments: &Arguments) {
    remote::run_over_rdma(arguments.here, |name, time| println!("{name}: {time:?}"));
    println!("CONFORMS");
}
