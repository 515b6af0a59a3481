//! Boots a stock kernel, or a whole distribution, in a guest that uses two hosts.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use kernel_images::programs;
use ssi_hv_tests::{cleanup, demo, distro};

/// Runs a guest whose memory, or whose CPUs and memory, are on two hosts, and the same guest on one.
#[derive(Debug, Parser)]
#[command(version)]
struct Args {
    /// Boot a whole Debian on emulated hosts, log in, run verified workloads in it, and reboot it.
    #[arg(long)]
    distro: bool,
    /// Boot a guest with one CPU on each of two hosts, and measure and verify from inside what they
    /// share. It takes minutes on emulated hosts. With --distro, a whole Debian works on both CPUs.
    #[arg(long, conflicts_with_all = ["transport", "small"])]
    ssi: bool,
    /// How pages travel: `tcp`, `rdma` or `auto`. The latter two set up software RDMA (SoftRoCE) on
    /// emulated hosts [default: the choice of `ssi-hv run`, without SoftRoCE].
    #[arg(long, conflicts_with = "distro")]
    transport: Option<demo::Transport>,
    /// A guest of 256 MiB with one vCPU, for a slow machine.
    #[arg(long, conflicts_with = "distro")]
    small: bool,
    /// A directory with kernels and programs, such as the `target/share` of an earlier run
    /// [default: `target/share`, created now].
    #[arg(long, conflicts_with = "distro")]
    share: Option<PathBuf>,
}

fn main() -> ExitCode {
    let args = Args::parse();
    let result = cleanup::on_signals().map_err(Into::into).and_then(|()| {
        let workspace = programs::workspace();
        if args.distro && args.ssi {
            distro::demo::run_on_two_hosts(&workspace)
        } else if args.distro {
            distro::demo::run(&workspace)
        } else {
            let size = if args.small {
                demo::Size::Small
            } else {
                demo::Size::Usual
            };
            let config = demo::DemoConfig {
                transport: args.transport,
                size,
                share: args.share,
                ssi: args.ssi,
            };
            demo::run(&workspace, &config)
        }
    });
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("demo: {error:#}");
            ExitCode::FAILURE
        }
    }
}
