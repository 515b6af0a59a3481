//! Processor time of processes and of the whole machine: what a check costs, whatever else uses the
//! machine, and how much of it a stage leaves idle.

use std::io;
use std::time::Duration;

/// Length of a tick in `/proc`, which the kernel's interface fixes at 100 per second.
const TICK: Duration = Duration::from_millis(10);

/// Returns the processor time that a process has used, with its children that were waited for.
///
/// # Errors
/// Fails when the process has ended.
pub fn of_process(pid: u32) -> io::Result<Duration> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    parse_process(&stat).ok_or_else(|| io::Error::other(format!("no times in {stat:?}")))
}

/// Sums utime, stime, cutime and cstime, fields 14 to 17. The second field, the name of the
/// program, may contain spaces and parentheses.
fn parse_process(stat: &str) -> Option<Duration> {
    let (_, fields) = stat.rsplit_once(')')?;
    let times = fields.split_whitespace().skip(11).take(4);
    let ticks = times.map(|field| field.parse::<u32>().ok());
    let ticks: Vec<u32> = ticks.collect::<Option<_>>()?;
    (ticks.len() == 4).then(|| TICK * ticks.iter().sum())
}

/// Ticks of all CPUs since the machine started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Machine {
    idle: u64,
    all: u64,
}

impl Machine {
    /// Reads the ticks until now.
    ///
    /// # Errors
    /// Fails when `/proc/stat` cannot be read.
    pub fn now() -> io::Result<Self> {
        let stat = std::fs::read_to_string("/proc/stat")?;
        Self::parse(&stat).ok_or_else(|| io::Error::other("no line of all CPUs in /proc/stat"))
    }

    /// Guest times are part of user times, so only the first eight fields are added.
    fn parse(stat: &str) -> Option<Self> {
        let fields = stat.lines().next()?.strip_prefix("cpu ")?;
        let ticks = fields.split_whitespace().take(8).map(|f| f.parse().ok());
        let ticks: Vec<u64> = ticks.collect::<Option<_>>()?;
        let [_, _, _, idle, waiting, ..] = ticks[..] else {
            return None;
        };
        Some(Self {
            idle: idle + waiting,
            all: ticks.iter().sum(),
        })
    }

    /// Returns the share of the time since `earlier` in which the CPUs were not idle.
    #[must_use]
    pub fn busy_since(&self, earlier: Self) -> f64 {
        let all = self.all.saturating_sub(earlier.all);
        let idle = self.idle.saturating_sub(earlier.idle);
        // Numbers of ticks are far below the limit of exact floating-point integers.
        #[expect(clippy::cast_precision_loss)]
        let share = 1.0 - idle as f64 / all.max(1) as f64;
        share.clamp(0.0, 1.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_of_a_process_are_read_behind_any_name() {
        let stat = "7 (a) b) S 1 7 7 0 -1 4194560 500 0 0 0 100 20 3 4 20 0 1 0 99 1 1 18";
        assert_eq!(parse_process(stat), Some(Duration::from_millis(1270)));
        assert_eq!(parse_process("7 (a) S 1 7"), None);
        assert!(of_process(std::process::id()).is_ok());
    }

    #[test]
    fn the_share_of_idle_time_includes_waiting_for_disks() {
        let parse = |line: &str| Machine::parse(line).unwrap();
        let earlier = parse("cpu  100 0 50 800 50 0 0 0 0 0\ncpu0 1 2 3\n");
        let later = parse("cpu  150 0 75 860 65 0 0 0 0 0\n");
        assert!((later.busy_since(earlier) - 0.5).abs() < 1e-9);
        assert!(later.busy_since(later).abs() <= 1.0);
        assert_eq!(Machine::parse("cpu  1 2 3"), None);
        assert!(Machine::now().is_ok());
    }
}
