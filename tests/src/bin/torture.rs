//! Injects faults under verifying guests for as long as it is asked to.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use clap::builder::RangedU64ValueParser;
use kernel_images::programs;
use ssi_hv_tests::cleanup;
use ssi_hv_tests::e2e::{PageTransport, Replicas, Torture};
use ssi_hv_tests::testbed::HostKernel;

/// Faults of hosts, links and processes under guests on emulated hosts that verify every byte.
/// Prints a table and ends with one line; exit code 1 if anything went wrong.
#[derive(Debug, Parser)]
#[command(version)]
struct Args {
    /// Minutes after which no round begins; a round with one copy takes about four, one with two
    /// copies longer. At least one round runs.
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u64).range(..=10_080))]
    minutes: u64,
    /// Faults after which no round begins, those of the record included [default: as many as the time
    /// allows].
    #[arg(long, value_parser = RangedU64ValueParser::<usize>::new().range(1..))]
    faults: Option<usize>,
    /// What the order of faults follows from [default: that of the record, or the time].
    #[arg(long)]
    seed: Option<u64>,
    /// A file that gets a line of JSON for each fault. If it has some, the run continues after their last
    /// round, and the table has all.
    #[arg(long, value_name = "FILE")]
    record: Option<PathBuf>,
    /// A transport, to test only that one; may be repeated.
    #[arg(long, value_enum)]
    transport: Vec<PageTransport>,
    /// How many copies of each page donors have, to test only that many; may be repeated.
    #[arg(long, value_enum)]
    replicas: Vec<Replicas>,
    /// The kernel of the hosts.
    #[arg(long, value_enum, default_value = "6.12")]
    kernel: HostKernel,
}

fn main() -> ExitCode {
    let args = Args::parse();
    let torture = Torture {
        time: Duration::from_secs(args.minutes * 60),
        faults: args.faults,
        seed: args.seed,
        record: args.record,
        transports: or_all(args.transport, &PageTransport::ALL),
        replicas: or_all(args.replicas, &Replicas::ALL),
        kernel: args.kernel,
    };
    let ran = cleanup::on_signals()
        .map_err(anyhow::Error::from)
        .and_then(|()| torture.run(&programs::workspace()));
    match ran {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("torture: {error:#}");
            ExitCode::from(2)
        }
    }
}

/// Returns what was chosen, or all where nothing was.
fn or_all<T: Clone>(chosen: Vec<T>, all: &[T]) -> Vec<T> {
    if chosen.is_empty() {
        return all.to_vec();
    }
    chosen
}
