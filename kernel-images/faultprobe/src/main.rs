//! `faultprobe` on memory of its own: see the library.

use std::process::ExitCode;

use clap::Parser;
use faultprobe::ssi::processes;
use faultprobe::{Args, memory, timer};

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("faultprobe: {error}");
            ExitCode::from(2)
        }
    }
}

/// Returns whether all was right.
fn run(args: &Args) -> Result<bool, String> {
    if let Some(cpu) = args.compute {
        let (input, output) = (std::io::stdin().lock(), std::io::stdout().lock());
        return processes::obey(cpu, input, output).map(|()| true);
    }
    if args.ssi {
        return faultprobe::run_ssi(args);
    }
    if args.timers {
        println!("FAULTPROBE {}", timer::run().to_json());
        return Ok(true);
    }
    let mut memory = memory::Memory::new(args.bytes).map_err(|error| error.to_string())?;
    if let Some(node) = args.node {
        memory.bind(node).map_err(|error| error.to_string())?;
    }
    match args.kinds {
        None => Ok(faultprobe::run_and_print(&mut memory, args)),
        Some(local) => faultprobe::run_kinds(&mut memory, args, local),
    }
}
