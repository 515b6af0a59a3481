//! CPU time and memory of this process, and of others.

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

/// Ticks of /proc in a second: the same on x86-64 and ARM64.
const USER_HZ: u32 = 100;

/// Returns the CPU time of all threads of a process so far.
pub(super) fn processor_time_of(process: &str) -> Result<Duration> {
    let path = format!("/proc/{process}/stat");
    let text = std::fs::read_to_string(&path).with_context(|| path.clone())?;
    let ticks = ticks(&text).with_context(|| format!("no times in {path}"))?;
    Ok(Duration::from_secs(ticks) / USER_HZ)
}

/// Returns the sum of user and system time of a line of `stat` (proc_pid_stat(5)), ticks.
fn ticks(stat: &str) -> Option<u64> {
    // The name before may have spaces and parentheses.
    let (_, fields) = stat.rsplit_once(')')?;
    let mut times = fields.split_whitespace().skip(11);
    let mut next = || times.next()?.parse::<u64>().ok();
    Some(next()? + next()?)
}

/// Returns the number of threads of a process.
pub(super) fn threads_of(process: &str) -> Result<u64> {
    let path = format!("/proc/{process}/status");
    let text = std::fs::read_to_string(&path).with_context(|| path.clone())?;
    let count = text.lines().find_map(|line| line.strip_prefix("Threads:"));
    let count = count.and_then(|count| count.trim().parse().ok());
    count.with_context(|| format!("no threads in {path}"))
}

/// Memory of a process, bytes.
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
        Self::of("self")
    }

    /// The same of the process with this number.
    pub(super) fn of(process: &str) -> Result<Self> {
        let read = |file: &str| {
            let path = format!("/proc/{process}/{file}");
            std::fs::read_to_string(&path).context(path)
        };
        let (rollup, status) = (read("smaps_rollup")?, read("status")?);
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
    Ok(kib.with_context(|| format!("no {name} in /proc"))? << 10)
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

    #[test]
    fn times_and_threads_of_a_process_are_read() {
        let stat = "7 (a ) b) S 1 7 7 0 -1 4194304 1 0 0 0 11 22 3 4 20 0 9 0 5";
        assert_eq!(ticks(stat), Some(33));
        assert_eq!(ticks("7 (a) S 1"), None);
        processor_time_of("self").expect("/proc");
        assert!(threads_of("self").expect("/proc") > 0);
        assert!(threads_of("no process").is_err());
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
