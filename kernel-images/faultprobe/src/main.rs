//! `faultprobe` on memory of its own: see the library.

use std::process::ExitCode;

use clap::Parser;
use faultprobe::{Args, memory};

fn main() -> ExitCode {
    let args = Args::parse();
    let mut memory = match memory::Memory::new(args.bytes) {
        Ok(memory) => memory,
        Err(error) => {
            eprintln!("faultprobe: {error}");
            return ExitCode::from(2);
        }
    };
    if let Some(node) = args.node
        && let Err(error) = memory.bind(node)
    {
        eprintln!("faultprobe: {error}");
        return ExitCode::from(2);
    }
    let sound = match args.kinds {
        None => Ok(faultprobe::run_and_print(&mut memory, &args)),
        Some(local) => faultprobe::run_kinds(&mut memory, &args, local),
    };
    match sound {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("faultprobe: {error}");
            ExitCode::from(2)
        }
    }
}
