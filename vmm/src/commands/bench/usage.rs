//! CPU time and memory of this process.

use std::time::Duration;

use anyhow::{Context as _, Result};
use rustix::time::{ClockId, clock_gettime};

/// Returns the CPU time of all threads so far, including the kernel's work for them.
pub(super) fn processor_time() -> Result<Duration> {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Ok(Duration::new(
        u64::try_from(time.tv_sec)?,
        u32::try_from(time.tv_nsec)?,
    ))
}

/// Memory of this process, bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Memory {
    /// Resident memory, including guest memory.
    pub(super) resident: u64,
    /// The part of it that is private memory without a file: the heap, the page map, loans of our
    /// donors.
    pub(super) anonymous: u64,
    /// Page tables of all mappings.
    pub(super) page_tables: u64,
}

impl Memory {
    /// Reads the current values from `smaps_rollup`, which counts page by page: the sums in
    /// `status` may be off by some hundred kilobytes.
    pub(super) fn now() -> Result<Self> {
        let read = |path: &str| std::fs::read_to_string(path).with_context(|| path.to_owned());
        let (rollup, status) = (read("/proc/self/smaps_rollup")?, read("/proc/self/status")?);
        Ok(Self {
            resident: field(&rollup, "Rss")?,
            anonymous: field(&rollup, "Anonymous")?,
            page_tables: field(&status, "VmPTE")?,
        })
    }
}

/// Returns the bytes of a line `Name:  123 kB`.
fn field(text: &str, name: &str) -> Result<u64> {
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    let kib = line.and_then(|line| line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
    Ok(kib.with_context(|| format!("no {name} in /proc/self"))? << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_read_by_their_whole_name() {
        let text = "Rss:                5012 kB\nPss_Anon:   7 kB\nAnonymous:  8 kB\n";
        assert_eq!(field(text, "Rss").expect("there"), 5012 << 10);
        assert_eq!(field(text, "Anonymous").expect("there"), 8 << 10);
        assert!(field(text, "Anon").is_err());
    }

    /// In a separate process, since the other tests of this one use memory too.
    #[test]
    fn memory_and_time_grow_with_what_is_used() {
        const ALONE: &str = "SSI_HV_TEST_ALONE";
        if std::env::var_os(ALONE).is_none() {
            let name = "commands::bench::usage::tests::memory_and_time_grow_with_what_is_used";
            let alone = std::process::Command::new(std::env::current_exe().expect("a path"))
                .args(["--exact", name])
                .env(ALONE, "1")
                .output()
                .expect("it starts");
            let said = String::from_utf8_lossy(&alone.stdout);
            assert!(
                alone.status.success() && said.contains("1 passed"),
                "{said}"
            );
            return;
        }
        let (memory, time) = (
            Memory::now().expect("/proc"),
            processor_time().expect("time"),
        );
        let block = vec![1_u8; 64 << 20];
        let more = Memory::now().expect("/proc");
        assert!(more.resident >= memory.resident + (60 << 20));
        assert!(more.anonymous >= memory.anonymous + (60 << 20));
        assert!(std::hint::black_box(block).iter().all(|&byte| byte == 1));
        assert!(processor_time().expect("time") > time);
    }
}
