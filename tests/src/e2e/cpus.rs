//! Scenarios of vCPUs, of their clocks, and of what they cost while there is nothing to do.

use anyhow::{Context as _, ensure};

use super::guest::{BOOT_DEADLINE, Donor, Finished, GUEST_DEADLINE, Guest, exit};
use super::rdma::processor_ticks;
use super::{Context, Result, Scenario, Verdict};

pub(super) const SCENARIOS: &[Scenario] = &[Scenario {
    name: "boot_8cpu",
    about: "eight vCPUs come up, each pinned, with x2APIC, KVM's clock and stolen time; idle they cost next to nothing",
    needs_product: true,
    run: boot_8cpu,
}];

/// All vCPUs work at once, which steals time from each on a host with fewer CPUs; then none does
/// anything for a while.
const WORK: &str = "for i in 1 2 3 4 5 6 7 8; do (x=0; while [ $x -lt 15000 ]; do x=$((x+1)); done) & done; wait; \
    echo online=$(nproc) x2apic=$(grep -cw x2apic /proc/cpuinfo) \
    stolen=$(head -n 1 /proc/stat | cut -d' ' -f10) \
    clock=$(cat /sys/devices/system/clocksource/clocksource0/current_clocksource); \
    echo idle=$((0+1)); sleep 6; echo idle=$((1+1)); sleep 3";

/// The most ticks of the host's processor (of 10 ms) that the idle guest may take in its 6 s.
const IDLE_TICKS_MAX: u64 = 120;

fn boot_8cpu(context: &Context<'_>) -> Result {
    let host = context.testbed.host(1);
    let donor = Donor::start(context)?;
    let mut guest = Guest::remote(8, WORK);
    guest.more.extend(["--cpu-pinning", "0,0,0,0,0,0,0,0"]);
    let process = guest.start(context)?;
    let ticks = || processor_ticks(host, process.pid());
    process.wait_for_line("idle=1", BOOT_DEADLINE)?;
    let before = ticks()?;
    process.wait_for_line("idle=2", BOOT_DEADLINE)?;
    let idle = ticks()? - before;
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
    ensure!(
        idle <= IDLE_TICKS_MAX,
        "an idle guest took {idle} ticks of 10 ms in 6 s"
    );
    context.note(format!(
        "8 idle vCPUs take {:.1} % of a CPU (emulated); {stolen} ticks stolen before",
        f64::from(u32::try_from(idle)?) / 6.0
    ));
    Ok(Verdict::Pass)
}
