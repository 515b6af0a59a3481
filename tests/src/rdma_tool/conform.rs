//! The suite that every transport passes, over RDMA.

use std::net::IpAddr;

use clap::Args;
use fabric_test_support::conformance::remote;

/// Where it runs.
#[derive(Debug, Args)]
pub struct Arguments {
    /// An address of this host that has an RDMA device: donor and VM are both there
    here: IpAddr,
}

/// Runs every case, and prints how long each took. One that fails panics, and so ends the process.
pub fn run(arguments: &Arguments) {
    remote::run_over_rdma(arguments.here, |name, time| println!("{name}: {time:?}"));
    println!("CONFORMS");
}
