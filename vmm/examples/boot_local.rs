//! Boots a kernel with plain local memory:
//! `boot_local --kernel K [--initrd I] [--cpus N] [--memory BYTES] [--cmdline S]`.

use std::process::ExitCode;

use ssi_hv::machine::{ConsoleConfig, Machine, MachineConfig, command_line, guest_memory_ranges};
use vm_memory::GuestMemoryMmap;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let mut text = error.to_string();
            let mut source = error.source();
            while let Some(cause) = source {
                text = format!("{text}: {cause}");
                source = cause.source();
            }
            eprintln!("boot_local: {text}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), Box<dyn std::error::Error>> {
    tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::from_default_env())
        .with_writer(std::io::stderr)
        .init();
    let mut config = MachineConfig {
        kernel: "vmlinuz".into(),
        initrd: None,
        cmdline: command_line(""),
        cpus: 1,
    };
    let mut memory_bytes: u64 = 256 << 20;
    let mut pauses: Option<u32> = None;
    let mut arguments = std::env::args().skip(1);
    while let Some(flag) = arguments.next() {
        let value = arguments.next().ok_or("a flag needs a value")?;
        match flag.as_str() {
            "--kernel" => config.kernel = value.into(),
            "--initrd" => config.initrd = Some(value.into()),
            "--cpus" => config.cpus = value.parse()?,
            "--memory" => memory_bytes = value.parse()?,
            "--cmdline" => config.cmdline = command_line(&value),
            "--pauses" => pauses = Some(value.parse()?),
            _ => return Err(format!("unknown flag {flag}").into()),
        }
    }
    let ranges = guest_memory_ranges(memory_bytes)
        .into_iter()
        .map(|(start, bytes)| Ok((start, usize::try_from(bytes)?)))
        .collect::<Result<Vec<_>, std::num::TryFromIntError>>()?;
    let memory = GuestMemoryMmap::from_ranges(&ranges)?;
    let machine = Machine::new(&config, memory, ConsoleConfig::stdio())?;
    let handle = machine.handle();
    if let Some(pauses) = pauses {
        let handle = handle.clone();
        std::thread::spawn(move || {
            let second = std::time::Duration::from_secs(1);
            for _ in 0..pauses {
                std::thread::sleep(second);
                handle.pause();
                let paused = handle.wait_until_paused(second);
                eprintln!("paused: {paused}");
                std::thread::sleep(second);
                handle.resume();
            }
        });
    }
    let outcome = machine.run()?;
    println!(
        "outcome {outcome:?}, init after {:?}",
        handle.time_to_init()
    );
    Ok(())
}
