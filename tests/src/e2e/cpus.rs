//! Scenarios of vCPUs, of their clocks, and of the CPU time of an idle VM.

use std::collections::BTreeMap;

use anyhow::{Context as _, ensure};

use super::donor::Donor;
use super::guest::{Finished, GUEST_DEADLINE, Guest, SHORT, exit};
use super::{Context, Hosts, Result, Scenario, Verdict};
use crate::testbed::Host;

pub(super) const SCENARIOS: &[Scenario] = &[Scenario {
    name: "boot_8cpu",
    about: "eight vCPUs come up, each pinned, with x2APIC, KVM's clock and stolen time; idle they cost next to nothing",
    needs_product: true,
    hosts: Hosts::TWO_6_12,
    run: boot_8cpu,
}];

/// Keeps all vCPUs busy at once, which causes steal time on a host with fewer CPUs; then leaves all
/// idle, which is measured from a second after the work.
const WORK: &str = "for i in 1 2 3 4 5 6 7 8; do (x=0; while [ $x -lt 15000 ]; do x=$((x+1)); done) & done; wait; \
    echo online=$(nproc) x2apic=$(grep -cw x2apic /proc/cpuinfo) \
    stolen=$(head -n 1 /proc/stat | cut -d' ' -f10) \
    clock=$(cat /sys/devices/system/clocksource/clocksource0/current_clocksource); \
    echo idle=$((0+1)); sleep 1; echo idle=$((1+1)); sleep 6; echo idle=$((2+1)); sleep 6";

const CPUS: u32 = 8;
/// Upper bound of host CPU ticks (of 10 ms) that all idle vCPUs together may use in their 6 s.
const IDLE_TICKS_MAX: u64 = 120;
/// Upper bound of ticks for any other thread of the VM in that time: periodic checks run a few
/// times per second.
const OTHER_TICKS_MAX: u64 = 10;

fn boot_8cpu(context: &Context<'_>) -> Result {
    let host = context.testbed.host(1);
    let donor = Donor::start(context)?;
    let mut guest = Guest::remote(CPUS, WORK);
    guest.more.extend(["--cpu-pinning", "0,0,0,0,0,0,0,0"]);
    let process = guest.boot(context)?;
    let ticks = || thread_ticks(host, process.pid());
    process.wait_for_line("idle=1", GUEST_DEADLINE)?;
    process.wait_for_line("idle=2", SHORT)?;
    let before = ticks()?;
    process.wait_for_line("idle=3", SHORT)?;
    let idle = used(&before, &ticks()?);
    let guest = Finished::read(context, process.wait(GUEST_DEADLINE)?)?;
    guest.expect_exit(exit::SHUTDOWN)?;
    donor.stop(context)?;

    let console = &guest.output.stdout;
    for due in ["online=8 x2apic=8 ", " clock=kvm-clock"] {
        ensure!(console.contains(due), "no {due:?}: {console}");
    }
    let stolen = console.rsplit_once(" stolen=").map(|(_, rest)| rest);
    let stolen = stolen.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok());
    let stolen = stolen.context("the guest printed no stolen time")?;
    ensure!(stolen > 0, "nothing stolen from 8 vCPUs on one CPU");
    let idle = judged(&idle)?;
    context.note(format!(
        "{CPUS} idle vCPUs take {:.1} % of a CPU (emulated); {stolen} ticks stolen before",
        f64::from(u32::try_from(idle)?) / 6.0
    ));
    Ok(Verdict::Pass)
}

/// Returns the ticks of all vCPUs; fails if they or another thread used too many.
fn judged(idle: &[(String, u64)]) -> anyhow::Result<u64> {
    let is_vcpu = |name: &str| name.starts_with("vcpu");
    let each: Vec<_> = idle
        .iter()
        .filter(|(_, ticks)| *ticks > 0)
        .map(|(name, ticks)| format!("{name} {ticks}"))
        .collect();
    let each = each.join(", ");
    let vcpus = idle.iter().filter(|(name, _)| is_vcpu(name));
    let count = vcpus.clone().count();
    ensure!(
        u32::try_from(count)? == CPUS,
        "{count} threads of vCPUs instead of {CPUS}: {idle:?}"
    );
    let total: u64 = vcpus.map(|(_, ticks)| ticks).sum();
    ensure!(
        total <= IDLE_TICKS_MAX,
        "idle vCPUs took {total} ticks of 10 ms in 6 s, {IDLE_TICKS_MAX} is the limit; each: {each}"
    );
    let busy = idle
        .iter()
        .find(|(name, ticks)| !is_vcpu(name) && *ticks > OTHER_TICKS_MAX);
    if let Some((name, ticks)) = busy {
        anyhow::bail!(
            "the thread {name} took {ticks} ticks of 10 ms in 6 s of an idle guest, {OTHER_TICKS_MAX} is the \
             limit; each: {each}"
        );
    }
    Ok(total)
}

/// Threads of a process by id, each with its name and its CPU time, user and system, in clock
/// ticks.
type Threads = BTreeMap<i32, (String, u64)>;

fn thread_ticks(host: &Host, pid: i32) -> anyhow::Result<Threads> {
    // A thread may end in the meantime.
    let script = format!("cat /proc/{pid}/task/*/stat 2>/dev/null || true");
    let text = host.check(&["sh", "-c", &script], SHORT)?;
    Ok(text.lines().filter_map(thread_of).collect())
}

/// Fields 14 and 15 of a line of `stat`, counted from the end of the name, which may contain
/// anything.
fn thread_of(stat: &str) -> Option<(i32, (String, u64))> {
    let (number, rest) = stat.split_once(" (")?;
    let (name, rest) = rest.rsplit_once(") ")?;
    let mut fields = rest.split_whitespace().skip(11);
    let ticks = fields.next()?.parse::<u64>().ok()? + fields.next()?.parse::<u64>().ok()?;
    Some((number.parse().ok()?, (name.to_owned(), ticks)))
}

/// Returns the ticks that each remaining thread has used since `before`, in descending order.
fn used(before: &Threads, after: &Threads) -> Vec<(String, u64)> {
    let since = |(number, (name, ticks)): (&i32, &(String, u64))| {
        let at_first = before.get(number).map_or(0, |(_, ticks)| *ticks);
        (name.clone(), ticks.saturating_sub(at_first))
    };
    let mut used: Vec<_> = after.iter().map(since).collect();
    used.sort_by_key(|(_, ticks)| std::cmp::Reverse(*ticks));
    used
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a line of `stat` with these times.
    fn stat(number: i32, name: &str, user: u64, system: u64) -> String {
        format!("{number} ({name}) S 1 7 7 0 -1 4194304 90 0 2 0 {user} {system} 0 0 20 0 9 0 5")
    }

    fn threads(lines: &[String]) -> Threads {
        lines.iter().filter_map(|line| thread_of(line)).collect()
    }

    /// An idle VM in which one thread other than its vCPUs used `ticks`.
    fn idle(vcpu_ticks: u64, ticks: u64) -> anyhow::Result<u64> {
        let vcpu = |number: i32, ticks| stat(number, &format!("vcpu{number}"), 100, ticks);
        let vcpus = |ticks| (0..8).map(move |number| vcpu(number, ticks));
        let mut before: Vec<_> = vcpus(1).collect();
        let mut after: Vec<_> = vcpus(1 + vcpu_ticks).collect();
        before.push(stat(20, "a) (b", 5, 5));
        after.push(stat(20, "a) (b", 6, 4 + ticks));
        judged(&used(&threads(&before), &threads(&after)))
    }

    #[test]
    fn a_thread_that_works_while_nothing_is_to_be_done_is_named() {
        assert_eq!(idle(15, 0).unwrap(), 120);
        assert_eq!(idle(1, OTHER_TICKS_MAX).unwrap(), 8);
        let error = idle(2, OTHER_TICKS_MAX + 1).unwrap_err().to_string();
        assert!(error.contains("the thread a) (b took 11 ticks"), "{error}");
        let error = idle(16, 0).unwrap_err().to_string();
        assert!(error.contains("took 128 ticks") && error.contains("vcpu7 16"));
        let error = judged(&[("vcpu0".into(), 0)]).unwrap_err().to_string();
        assert!(error.starts_with("1 threads of vCPUs instead of 8"));
    }
}
