//! Fetches the kernels that SSI-HV boots, and builds the guest's initramfs.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context as _;
use clap::{Parser, Subcommand};
use kernel_images::{ImageCache, Manifest, distro, initramfs, programs};

/// Fetches the kernels that SSI-HV boots, and builds the guest's initramfs.
#[derive(Debug, Parser)]
#[command(version)]
struct Args {
    /// Where kernels are cached [default: target/images of the workspace].
    #[arg(long, global = true)]
    cache: Option<PathBuf>,
    /// The list of kernels [default: the one built in].
    #[arg(long, global = true)]
    manifest: Option<PathBuf>,
    #[command(subcommand)]
    command: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Lists the kernels of the manifest.
    List,
    /// Prepares kernels and prints what they are.
    Fetch {
        /// Names of kernels; all, if none is given.
        names: Vec<String>,
        /// Ask apt for the newest version even if a kernel is cached.
        #[arg(long)]
        refresh: bool,
    },
    /// Prepares the disk of a distribution, and prints the paths of the disk, its kernel and its
    /// initial RAM disk. A guest that writes to the disk needs a copy.
    Distro {
        /// The name of the distribution.
        #[arg(default_value = "debian")]
        name: String,
    },
    /// Builds the guest's initramfs for a kernel.
    Guest {
        /// The kernel whose modules are included.
        #[arg(long, default_value = "cloud")]
        kernel: String,
        /// The directory of the static faultprobe, notify-monitor and socket-pipe [default: built
        /// now].
        #[arg(long)]
        programs: Option<PathBuf>,
        /// The file to write.
        #[arg(short, long)]
        output: PathBuf,
    },
}

fn main() -> ExitCode {
    match run(Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("kernel-images: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: Args) -> anyhow::Result<()> {
    let manifest = match &args.manifest {
        Some(path) => Manifest::load(path)?,
        None => Manifest::built_in()?,
    };
    let root = args
        .cache
        .unwrap_or_else(|| programs::workspace().join("target/images"));
    match args.command {
        Action::List => {
            for kernel in manifest.kernels() {
                println!("{:<8} {:<28} {}", kernel.name, kernel.package, kernel.about);
            }
        }
        Action::Fetch { names, refresh } => {
            let cache = ImageCache::open(&root)?;
            let names = if names.is_empty() {
                manifest.kernels().iter().map(|k| k.name.clone()).collect()
            } else {
                names
            };
            for name in names {
                let spec = manifest.kernel(&name)?;
                let image = if refresh {
                    cache.download(spec)
                } else {
                    cache.ensure(spec)
                }
                .with_context(|| format!("kernel {name}"))?;
                println!(
                    "{name}: {} {} ({:?}), vmlinuz sha256 {}",
                    image.record.package,
                    image.record.version,
                    image.origin,
                    image.record.vmlinuz_sha256
                );
            }
        }
        Action::Distro { name } => {
            let image = distro::ensure(&ImageCache::open(&root)?, manifest.distro(&name)?)?;
            println!("{name}: {} ({:?})", image.record.release, image.origin);
            for path in [image.disk(), image.kernel(), image.initrd()] {
                println!("{}", path.display());
            }
        }
        Action::Guest {
            kernel,
            programs: dir,
            output,
        } => {
            let image = ImageCache::open(&root)?.ensure(manifest.kernel(&kernel)?)?;
            let dir = match dir {
                Some(dir) => dir,
                None => programs::build_static(&programs::workspace(), &["faultprobe"])?,
            };
            initramfs::write_guest(&image, &dir, &output)?;
            println!("{}: for {}", output.display(), image.record.release);
        }
    }
    Ok(())
}
