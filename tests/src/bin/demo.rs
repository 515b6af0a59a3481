//! Boots a stock kernel, or a whole distribution, in a guest whose memory is on two hosts.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use kernel_images::programs;
use ssi_hv_tests::{cleanup, demo, distro};

/// One guest whose memory is on two hosts, beside the same guest with all of it local.
#[derive(Debug, Parser)]
#[command(version)]
struct Args {
    /// Boot a whole Debian on emulated hosts, log in, let it do verified work, and reboot it.
    #[arg(long)]
    distro: bool,
    /// How pages travel: `tcp`, `rdma` or `auto`. With the latter two, emulated hosts get software
    /// RDMA first (SoftRoCE) [default: what `ssi-hv run` does by itself, without it].
    #[arg(long, conflicts_with = "distro")]
    transport: Option<demo::Transport>,
    /// A guest of 256 MiB with one vCPU, for a slow machine.
    #[arg(long, conflicts_with = "distro")]
    small: bool,
    /// A directory with kernels and programs, as a run of the demo leaves it in `target/share` [default:
    /// that one, made now].
    #[arg(long, conflicts_with = "distro")]
    share: Option<PathBuf>,
}

fn main() -> ExitCode {
    let args = Args::parse();
    let result = cleanup::on_signals().map_err(Into::into).and_then(|()| {
        let workspace = programs::workspace();
        if args.distro {
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
