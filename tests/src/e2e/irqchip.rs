//! Scenarios of guests whose interrupt controllers are in user space.

use anyhow::{Context as _, ensure};

use super::guest::{Finished, Guest, exit};
use super::{Context, Hosts, Result, Scenario, Verdict};

pub(super) const SCENARIOS: &[Scenario] = &[
    Scenario {
        name: "irqchip_user_x2apic",
        about: "a stock kernel with 1, 2 and 8 vCPUs on local APICs in user space, by model-specific registers",
        needs_product: true,
        hosts: Hosts::TWO_6_12,
        run: |context| boots(context, true),
    },
    Scenario {
        name: "irqchip_user_xapic",
        about: "the same by registers in memory",
        needs_product: true,
        hosts: Hosts::TWO_6_1,
        run: |context| boots(context, false),
    },
];

/// Each vCPU but the first goes off and comes back, which takes INIT and start-up messages; sleeps
/// need the timer, and the loops on all vCPUs interrupts between them.
const WORK: &str = "for i in 1 2 3; do for c in /sys/devices/system/cpu/cpu[1-9]*/online; do \
    [ -e $c ] && echo 0 > $c && echo 1 > $c; done; done; \
    for i in $(seq $(nproc)); do (sleep 1; x=0; while [ $x -lt 2000 ]; do x=$((x+1)); done) & done; wait; \
    echo online=$(nproc) x2apic=$(grep -cw x2apic /proc/cpuinfo) \
    deadline=$(grep -cw tsc_deadline_timer /proc/cpuinfo) \
    clock=$(cat /sys/devices/system/clocksource/clocksource0/current_clocksource) \
    timer=$(cat /sys/devices/system/clockevents/clockevent0/current_device) done";

fn boots(context: &Context<'_>, x2apic: bool) -> Result {
    let mut times = Vec::new();
    for cpus in [1, 2, 8] {
        let mut guest = Guest::local(cpus, WORK);
        guest.more.extend(["--irqchip", "user"]);
        if !x2apic {
            guest.cmdline.push_str(" nox2apic");
        }
        let guest = guest.run(context)?;
        check(&guest, cpus, x2apic).with_context(|| format!("{cpus} vCPUs"))?;
        times.push(format!("{:.0}", guest.number("/boot/to_init_ms")?));
    }
    context.note(format!(
        "init after {} ms with 1, 2 and 8 vCPUs (emulated)",
        times.join(", ")
    ));
    Ok(Verdict::Pass)
}

fn check(guest: &Finished, cpus: u32, x2apic: bool) -> anyhow::Result<()> {
    guest.expect_exit(exit::SHUTDOWN)?;
    ensure!(
        guest.report["guest"]["irqchip"] == "user",
        "report: {}",
        guest.report["guest"]
    );
    let with_x2apic = if x2apic { cpus } else { 0 };
    let due =
        format!("online={cpus} x2apic={with_x2apic} deadline=0 clock=kvm-clock timer=lapic done");
    let console = &guest.output.stdout;
    ensure!(console.contains(&due), "no {due:?}: {console}");
    Ok(())
}
