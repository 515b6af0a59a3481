//! `faultprobe` measures, inside a guest, what a page fault costs a program, and verifies every
//! byte of the memory that it uses.
//!
//! It fills memory with a pattern that depends on page and generation ([`pattern`]), then visits
//! the pages in random or sequential order. The first access to a page is timed: a read, or for a
//! quarter of the visits a write. Then every byte of the page is compared, and for another quarter
//! of the visits the page is rewritten with the next generation. A last pass compares what was
//! written since it was last compared, so that every byte is compared after its last write.
//!
//! An access counts as a fault if it took longer than a threshold that is derived from the
//! time of accesses to pages touched just before; see [`report::threshold_ns`]. With `--kinds` it
//! measures faults of one kind each instead; see [`kinds`]. With `--ssi` it measures what the CPUs
//! share; see [`ssi`]. With `--timers` it measures how late sleeps end; see [`timer`].

use clap::{Parser, ValueEnum};

pub mod clock;
pub mod cpu;
pub mod kinds;
pub mod memory;
pub mod pattern;
pub mod probe;
pub mod report;
pub mod ssi;
pub mod timer;

/// Limit of memory: page numbers are 32 bits here, with room to spare.
pub const BYTES_MAX: u64 = 1 << 43;

/// Measures page faults from inside a guest and checks every byte.
#[derive(Clone, Debug, Parser)]
#[command(version)]
pub struct Args {
    /// Memory to use, a multiple of 4K (suffixes K, M, G).
    #[arg(long, default_value = "256M", value_parser = parse_bytes)]
    pub bytes: u64,
    /// Order in which pages are visited.
    #[arg(long, value_enum, default_value_t = Order::Random)]
    pub pattern: Order,
    /// Passes over the memory, before the last one that only compares.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=100))]
    pub passes: u8,
    /// Seed of contents and order.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Once the memory is filled, say so and wait for a line of standard input before the visits.
    #[arg(long, conflicts_with_all = ["kinds", "ssi", "timers"])]
    pub pause: bool,
    /// Allocate memory of this NUMA node only.
    #[arg(long, value_name = "NODE", value_parser = clap::value_parser!(u32).range(0..=memory::NODE_MAX))]
    pub node: Option<u32>,
    /// Let the kernel move the memory to other nodes once it is filled.
    #[arg(long, requires = "node")]
    pub unbind: bool,
    /// Measure remote faults and faults on pages fetched ahead, each on its own, in a guest with
    /// this much local memory; wait for a line of standard input before each.
    #[arg(long, value_name = "LOCAL", value_parser = parse_bytes, conflicts_with_all = ["node", "passes", "pattern"])]
    pub kinds: Option<u64>,
    /// Measure and verify what the CPUs share instead: transfers of pages, locks, interrupts, and
    /// the order of accesses.
    #[arg(long, conflicts_with_all = ["node", "passes", "pattern", "kinds", "bytes", "seed"])]
    pub ssi: bool,
    /// About how long that may take.
    #[arg(long, requires = "ssi", default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub seconds: u64,
    /// Compute on this CPU, as a process that `--ssi` starts orders.
    #[arg(long, value_name = "CPU", hide = true)]
    pub compute: Option<usize>,
    /// Measure how late sleeps end instead.
    #[arg(long, conflicts_with_all = ["node", "passes", "pattern", "kinds", "bytes", "seed", "ssi"])]
    pub timers: bool,
}

/// Order in which pages are visited.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Order {
    /// Each page once a pass, shuffled anew for each.
    Random,
    /// By ascending address.
    Sequential,
}

/// Measures faults by kind on `memory`, prints the line of results, and returns whether every byte
/// was right.
///
/// # Errors
/// Fails when the memory is too small.
pub fn run_kinds(memory: &mut memory::Memory, args: &Args, local: u64) -> Result<bool, String> {
    let kinds = kinds::run(memory, args, local, &mut std::io::stdin().lock())?;
    println!("FAULTPROBE {}", kinds.to_json());
    Ok(kinds.is_sound())
}

/// Measures what the CPUs share, prints the line of results, and returns whether all was right.
///
/// # Errors
/// Fails when there is one CPU only, or a thread cannot run.
pub fn run_ssi(args: &Args) -> Result<bool, String> {
    let report = ssi::run(args.seconds)?;
    println!("FAULTPROBE {}", report.to_json());
    Ok(report.is_sound())
}

/// Runs the probe on `memory`, prints its line of results, and returns whether every byte was
/// right.
pub fn run_and_print(memory: &mut memory::Memory, args: &Args) -> bool {
    let mut clock = clock::Clock::start();
    let result = probe::run(memory, args, || {
        if args.pause {
            kinds::wait(&mut std::io::stdin().lock(), "filled");
            // The guest may be on another host now, and it may have waited for long.
            clock = clock::Clock::start();
        }
    });
    let report = report::Report::new(args, &result, &clock);
    println!("FAULTPROBE {}", report.to_json());
    if result.corrupt_bytes > 0 {
        eprintln!("faultprobe: {} corrupt bytes", result.corrupt_bytes);
    }
    result.corrupt_bytes == 0
}

/// Reads a size with an optional suffix K, M or G.
///
/// # Errors
/// Returns what is wrong with the text, with the limit.
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    let (digits, shift) = match text.as_bytes().last() {
        Some(b'K' | b'k') => (&text[..text.len() - 1], 10),
        Some(b'M' | b'm') => (&text[..text.len() - 1], 20),
        Some(b'G' | b'g') => (&text[..text.len() - 1], 30),
        _ => (text, 0),
    };
    let number: u64 = digits
        .parse()
        .map_err(|_| "expected a number with K, M or G".to_owned())?;
    let bytes = number
        .checked_shl(shift)
        .filter(|b| b >> shift == number && *b <= BYTES_MAX);
    let bytes = bytes.ok_or_else(|| format!("{BYTES_MAX} bytes is the limit"))?;
    if bytes == 0 || bytes % memory::PAGE_BYTES_U64 != 0 {
        return Err(format!("{bytes} bytes is not a multiple of 4096 above 0"));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_with_suffixes_are_read() {
        assert_eq!(parse_bytes("4096"), Ok(4096));
        assert_eq!(parse_bytes("8k"), Ok(8192));
        assert_eq!(parse_bytes("512M"), Ok(512 << 20));
        assert_eq!(parse_bytes("1G"), Ok(1 << 30));
    }

    #[test]
    fn impossible_sizes_are_refused_with_the_limit() {
        for text in [
            "",
            "M",
            "-1",
            "1.5G",
            "0",
            "100",
            "99999999999G",
            "18446744073709551615G",
        ] {
            assert!(parse_bytes(text).is_err(), "{text}");
        }
        assert!(
            parse_bytes("99999G")
                .unwrap_err()
                .contains(&BYTES_MAX.to_string())
        );
    }

    #[test]
    fn the_arguments_that_scripts_pass_are_understood() {
        let line = "faultprobe --bytes 512M --pattern sequential --passes 2 --seed 7";
        let args = Args::try_parse_from(line.split(' ')).unwrap();
        assert_eq!((args.bytes, args.passes, args.seed), (512 << 20, 2, 7));
        assert_eq!(args.pattern, Order::Sequential);
        assert!(Args::try_parse_from(["faultprobe", "--passes", "0"]).is_err());
    }
}
